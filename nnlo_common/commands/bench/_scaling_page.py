"""Tables and picture of the scaling studies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import log2

__all__ = ["ScalingFigures", "drawn", "tables"]

_TITLES = {
    "weak": "Weak scaling: each worker has its own batch (50 ms)",
    "strong": "Strong scaling: the workers share one batch (800 ms on one worker)",
}
_COLORS = ("#1f5fa8", "#4d96d9", "#9cc6ee", "#b3541e", "#e08a4f", "#f2c09a", "#3b7d3b")
_WIDTH, _HEIGHT, _LEFT, _TOP, _WIDE, _HIGH = 860, 400, 50, 40, 340, 240


@dataclass(frozen=True)
class ScalingFigures:
    """Figures of one layout.

    Attributes:
        study: "weak" or "strong".
        algorithm: its name.
        servers: the ranks that hold the centre.
        group: the ranks of each worker.
        computing: the ranks that compute.
        efficiency: the share of their time that they compute, in the mean.
        least: that of the slowest.
        load: the load of the machine afterwards.
    """

    study: str
    algorithm: str
    servers: int
    group: int
    computing: int
    efficiency: float
    least: float
    load: float

    @property
    def label(self) -> str:
        """The layout in words, without its size."""
        rule = "EASGD, every=10" if self.algorithm == "EASGD" else "Downpour, every step"
        groups = f", groups of {self.group}" if self.group > 1 else ""
        return f"{rule}, servers={self.servers}{groups}"


def tables(found: Sequence[ScalingFigures]) -> str:
    """Return one table in Markdown for each study: a row for each layout, a column for each number of ranks.

    Example:
        >>> print(tables([ScalingFigures("weak", "EASGD", 1, 1, 2, 0.957, 0.95, 0.1)]).splitlines()[-1])
        | EASGD, every=10, servers=1 | 0.96 |
    """
    return "\n\n".join(
        _table(title, [one for one in found if one.study == study])
        for study, title in _TITLES.items()
        if any(one.study == study for one in found)
    )


def _table(title: str, found: Sequence[ScalingFigures]) -> str:
    sizes = sorted({one.computing for one in found})
    lines = [
        title,
        "",
        f"| ranks that compute | {' | '.join(map(str, sizes))} |",
        "|---" * (len(sizes) + 1) + "|",
    ]
    for label, curve in _curves(found):
        cells = [f"{curve[size]:.2f}" if size in curve else "" for size in sizes]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _curves(found: Iterable[ScalingFigures]) -> list[tuple[str, dict[int, float]]]:
    curves: dict[str, dict[int, float]] = {}
    for one in sorted(found, key=lambda one: (one.algorithm != "EASGD", one.group, one.servers)):
        curves.setdefault(one.label, {})[one.computing] = one.efficiency
    return list(curves.items())


def drawn(found: Sequence[ScalingFigures]) -> str:
    """Return a picture of both studies, side by side, as SVG."""
    labels = [label for label, _ in _curves(found)]
    colors = dict(zip(labels, _COLORS, strict=False))
    body = []
    for place, (study, title) in enumerate(_TITLES.items()):
        left = _LEFT + place * (_WIDE + 70)
        curves = _curves(one for one in found if one.study == study)
        body += _axes(left, title.split(":")[0], sorted({size for _, curve in curves for size in curve}))
        body += [_line(left, curve, colors[label]) for label, curve in curves]
    for index, label in enumerate(labels):
        x, y = _LEFT + (index % 2) * (_WIDE + 70), _TOP + _HIGH + 56 + 20 * (index // 2)
        body.append(f'<rect x="{x}" y="{y - 9}" width="18" height="4" fill="{colors[label]}"/>')
        body.append(f'<text x="{x + 26}" y="{y}">{escape(label)}</text>')
    size = f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    style = 'font-family="sans-serif" font-size="12" fill="#222"'
    paper = f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>', paper, *body, "</svg>", ""])


def _axes(left: int, title: str, sizes: Sequence[int]) -> list[str]:
    lines = [
        f'<text x="{left}" y="{_TOP - 16}" font-weight="bold">{title}: share of the time computed</text>'
    ]
    for tenth in range(0, 11, 2):
        y = _y(tenth / 10)
        lines.append(f'<line x1="{left}" y1="{y}" x2="{left + _WIDE}" y2="{y}" stroke="#ddd"/>')
        lines.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{tenth / 10:.1f}</text>')
    for size in sizes:
        x = _x(left, size)
        lines.append(f'<text x="{x}" y="{_TOP + _HIGH + 18}" text-anchor="middle">{size}</text>')
    middle = left + _WIDE / 2
    return [
        *lines,
        f'<text x="{middle}" y="{_TOP + _HIGH + 36}" text-anchor="middle">ranks that compute</text>',
    ]


def _line(left: int, curve: dict[int, float], color: str) -> str:
    points = " ".join(f"{_x(left, size)},{_y(share)}" for size, share in sorted(curve.items()))
    return f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>'


def _x(left: int, size: int) -> float:
    return round(left + _WIDE * log2(size) / log2(64), 1)


def _y(share: float) -> float:
    return round(_TOP + _HIGH * (1 - share), 1)
