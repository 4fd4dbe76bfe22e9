"""SVG drawings for a page: scales, axes, points, lines and bars."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

__all__ = ["Axes", "AxisScale", "bar", "drawing", "label", "line", "point", "shade"]


_ROOM = 8  # between the outermost values and the axes


@dataclass(frozen=True, slots=True)
class AxisScale:
    """Scale from values to pixels.

    Attributes:
        low: the value at `start`.
        high: the value at `end`.
        start: in pixels.
        end: in pixels.
        log: whether it is logarithmic.
        names: all choices; empty for numbers.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    names: tuple[Any, ...] = ()

    @classmethod
    def of(cls, values: Iterable[Any], start: float, end: float, *, log: bool = False) -> AxisScale:
        """Return a scale for values, numbers or choices.

        Example:
            >>> AxisScale.of([1.0, 3.0], 0, 100).at(2.0), AxisScale.of([1, 100], 0, 100, log=True).at(10)
            (50.0, 50.0)
            >>> AxisScale.of(["a", "b"], 0, 100).at("a")
            25.0
        """
        found = list(values)
        if not all(isinstance(one, int | float) and not isinstance(one, bool) for one in found):
            names = tuple(dict.fromkeys(found))
            return cls(0, len(names) or 1, start, end, names=names)
        low, high = min(found, default=0.0), max(found, default=1.0)
        if low == high:
            low, high = (low / 2, high * 2) if log else (low - 0.5, high + 0.5)
        return cls(low, high, start, end, log and low > 0)

    def at(self, value: Any) -> float:
        """Return the position of a value, in pixels."""
        if self.names:
            share = (self.names.index(value) + 0.5) / len(self.names)
        elif self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 2)

    def ticks(self, count: int = 5) -> list[tuple[float, str]]:
        """Return positions and labels of ticks: round numbers, or the choices."""
        if self.names:
            return [(self.at(name), str(name)) for name in self.names]
        if self.log:
            powers = range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
            if len(powers) >= 3:
                every = math.ceil(len(powers) / count)
                return [(self.at(10.0**power), f"{10.0**power:g}") for power in powers[::every]]
            found = [value for value in _rounds(self.low, self.high) if self.low <= value <= self.high]
            found = found if len(found) >= 2 else [self.low, self.high]
            return [(self.at(value), f"{value:.3g}") for value in found[:: math.ceil(len(found) / count)]]
        step = _round_step((self.high - self.low) / count)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [(self.at(index * step), f"{index * step:.6g}") for index in range(first, last + 1)]


def _rounds(low: float, high: float) -> list[float]:
    """Return round numbers around a range of less than three orders of magnitude."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [factor * 10.0**power for power in powers for factor in (1, 2, 5)]


def _round_step(about: float) -> float:
    power = 10.0 ** math.floor(math.log10(about))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= about * 0.999)


@dataclass(frozen=True, slots=True)
class Axes:
    """A drawing with two axes.

    Attributes:
        x: the scale from left to right.
        y: the scale from bottom to top.
    """

    x: AxisScale
    y: AxisScale

    def axes(self, x_name: str, y_name: str, *, few: bool = False) -> list[str]:
        """Return both axes with ticks and names."""
        left, right = self.x.start - _ROOM, self.x.end + _ROOM
        bottom, top = self.y.start + _ROOM, self.y.end - _ROOM
        x_count, y_count = (3, 4) if few else (6, 5)
        parts = [
            f'<path class="axis" d="M{left} {top}V{bottom}H{right}"/>',
            label((self.x.start + self.x.end) / 2, bottom + 34, x_name, "middle", "name"),
        ]
        for place, text in self.x.ticks(x_count):
            parts += [f'<path class="axis" d="M{place} {bottom}v4"/>', label(place, bottom + 17, text)]
        for place, text in self.y.ticks(y_count):
            parts.append(f'<path class="grid" d="M{left} {place}H{right}"/>')
            parts.append(label(left - 6, place + 4, text, "end"))
        return [*parts, label(left, top - 8, y_name, "start", "name")]


def drawing(width: float, height: float, parts: Iterable[str], title: str) -> str:
    """Return a complete drawing, which a page may scale down."""
    inside = "\n".join(parts)
    # In a narrow window the page scrolls wide drawings, so that letters stay legible.
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" '
        f'style="max-width:{width:g}px;min-width:{0.75 * width:g}px" '
        f'aria-label="{escape(title)}">\n{inside}\n</svg>'
    )


def point(x: float, y: float, told: str, kind: str = "dot", style: str = "", *, radius: float = 4) -> str:
    """Return a point with a tooltip."""
    styled = f' style="{style}"' if style else ""
    where = f'cx="{x:g}" cy="{y:g}" r="{radius:g}"'
    return f'<circle class="{kind}" {where}{styled}><title>{escape(told)}</title></circle>'


def line(points: Sequence[tuple[float, float]], kind: str, told: str = "", style: str = "") -> str:
    """Return a line through points."""
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    title = f"<title>{escape(told)}</title>" if told else ""
    styled = f' style="{style}"' if style else ""
    return f'<polyline class="{kind}" points="{path}"{styled}>{title}</polyline>'


def bar(corner: tuple[float, float], width: float, height: float, kind: str, told: str) -> str:
    """Return a box with a tooltip."""
    x, y = corner
    return (
        f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{max(width, 1):g}" height="{height:g}" rx="2">'
        f"<title>{escape(told)}</title></rect>"
    )


def label(x: float, y: float, text: str, anchor: str = "middle", kind: str = "tick") -> str:
    """Return a text."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'


def shade(share: float) -> str:
    """Return a colour between the worst, 0, and the best, 1, legible on light and dark pages.

    Example:
        >>> shade(0), shade(1)
        ('hsl(215 20% 65%)', 'hsl(15 90% 50%)')
    """
    share = min(max(share, 0.0), 1.0)
    hue = (215 + share * 160) % 360
    return f"hsl({hue:.0f} {20 + 70 * share:.0f}% {65 - 15 * share:.0f}%)"
