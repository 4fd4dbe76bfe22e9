"""Scaling with simulated compute: real messages between many ranks that sleep where they would compute.

A sleep needs no core, so that one small machine runs many more workers than it has cores; all that nnlo does
is real: the messages, the centre's arithmetic, the waits. Weak and strong scaling are two studies:

* weak: each worker has its batch, however many there are, and computes 50 ms on it;
* strong: the workers share one batch, on which a single worker computes 800 ms.

Each layout's figures are appended to a file of results, and what the file has is not measured again: so a
study may be cut into slices of a quiet machine's time.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from html import escape
from math import log2
from pathlib import Path
from typing import Literal

import numpy as np

from nnlo_common.algorithms import EASGD, Algorithm, Downpour
from nnlo_common.algorithms._optimizers import SGD
from nnlo_common.base._errors import NNLOError
from nnlo_common.base._file_access import append_file, read_whole, write_whole
from nnlo_common.base._flat_vector import Vector
from nnlo_common.cluster.transport._mpi4py import World
from nnlo_common.cluster.transport._mpi_world import MPIWorld
from nnlo_common.training._participant import Participant

__all__ = ["PARAMETERS", "ScalingFigures", "ScalingLayout", "drawn", "measured", "run", "tables"]

# -- tables and picture of the scaling studies ---------------------------------------------------------

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


SERVERS = (1, 2, 4)
PARAMETERS, ARRAYS = 1_000_000, 8  # servers cut the centre between arrays
#: How long a worker computes on its batch (weak), and a single one on the common batch (strong).
COMPUTE_S = {"weak": 0.05, "strong": 0.8}
#: Steps before the clock starts, and those that it measures.
_WARM_STEPS = {"weak": 10, "strong": 2}
_STEPS = {"weak": 20, "strong": 10}
_GROUP = 4
_SLEEP_S = 0.02
_LARGEST = 10_000_000  # bytes of a file of results


class _Still:
    """Moves nothing: the step of a worker's optimizer is a part of the simulated compute."""

    learning_rate = 0.0

    def step(self, x: Vector, gradient: Vector) -> None:
        pass

    def state(self) -> dict[str, object]:
        return {}

    def load(self, state: object) -> None:
        pass


@dataclass(frozen=True)
class ScalingLayout:
    """Ranks and their algorithm.

    Attributes:
        study: which scaling.
        algorithm: "EASGD", with an exchange after every tenth step, or "Downpour", with one in each.
        servers: the ranks that hold the centre.
        group: the ranks of each worker.
        computing: the ranks that compute.
    """

    study: Literal["weak", "strong"]
    algorithm: str
    servers: int
    group: int
    computing: int

    @property
    def compute_s(self) -> float:
        """How long each rank computes in a step."""
        return COMPUTE_S[self.study] / (self.computing if self.study == "strong" else 1)

    def rules(self) -> tuple[Algorithm, SGD | _Still]:
        """Return the algorithm and its optimizer."""
        if self.algorithm == "EASGD":
            return EASGD(every=10), _Still()
        return Downpour(), SGD(1e-3)


def layouts(workers: Sequence[int]) -> Iterator[ScalingLayout]:
    """Yield all layouts of both studies."""
    for computing in workers:
        for servers in SERVERS:
            for algorithm in ("EASGD", "Downpour"):
                yield ScalingLayout("weak", algorithm, servers, 1, computing)
        if computing % _GROUP == 0:
            yield ScalingLayout("weak", "EASGD", 1, _GROUP, computing)
    for computing in workers:
        for servers in (SERVERS[0], SERVERS[-1]):
            for algorithm in ("EASGD", "Downpour"):
                yield ScalingLayout("strong", algorithm, servers, 1, computing)


def run(facts: World, results: Path, picture: Path | None, seconds: float, workers: Sequence[int]) -> None:
    """Measure what the file of results lacks, for about `seconds` at most; print tables, draw a picture."""
    world, end_s = MPIWorld(facts), time.monotonic() + seconds
    # Ranks that a layout does not need wait for the next one, and would warn of that as at a start.
    logging.getLogger("nnlo_common.cluster.transport").setLevel(logging.ERROR)
    known = _read(results)
    for layout in layouts(workers):
        told = {"over": time.monotonic() > end_s, "known": any(_same(layout, one) for one in known)}
        told = json.loads(world.gather_text(json.dumps(told))[0])  # rank 0 decides
        if told["over"]:
            break
        if told["known"]:
            continue
        try:
            new = measured(world, layout)
        except NNLOError as error:  # the ranks that this layout does not need would wait
            print(f"error: {layout}: {error}", file=sys.stderr, flush=True)
            world.abort(1)
        if world.rank == 0 and new is not None:
            with append_file(results) as file:
                file.write(f"{json.dumps(asdict(new))}\n".encode())
            share = f"{new.efficiency:.3f}"
            print(f"{layout}: efficiency {share}, load {new.load:.1f}", file=sys.stderr, flush=True)
    if world.rank == 0:
        found = _read(results)
        print(tables(found))
        if picture is not None:
            write_whole(picture, drawn(found))
    world.gather_text("")  # no rank ends the job before rank 0 has printed


def _read(results: Path) -> list[ScalingFigures]:
    if not results.exists():
        return []
    return [ScalingFigures(**json.loads(line)) for line in read_whole(results, _LARGEST).splitlines()]


def _same(layout: ScalingLayout, measured: ScalingFigures) -> bool:
    return all(getattr(measured, name) == value for name, value in asdict(layout).items())


def measured(world: MPIWorld, layout: ScalingLayout) -> ScalingFigures | None:
    """Train in this layout; return its figures on rank 0. The ranks that it does not need sleep."""
    ranks = layout.servers + layout.computing
    efficiency = _trained(world.part(range(ranks)), layout) if world.rank < ranks else 0.0
    all_here = world.facts.comm.Ibarrier()
    while not all_here.Test():
        time.sleep(_SLEEP_S)  # polls of fifty ranks that wait as in a training would take a core
    shares = [float(text) for text in world.gather_text(repr(efficiency))]
    computing = [one for one in shares if one > 0]
    if world.rank != 0:
        return None
    mean = sum(computing) / len(computing)
    shown = {one.name: getattr(layout, one.name) for one in fields(ScalingLayout)}
    return ScalingFigures(**shown, efficiency=mean, least=min(computing), load=os.getloadavg()[0])


def _trained(part: MPIWorld, layout: ScalingLayout) -> float:
    """Return the share of its time that this rank has computed; 0 on a server."""
    algorithm, optimizer = layout.rules()
    warm, steps = _WARM_STEPS[layout.study], _STEPS[layout.study]
    seconds = 0.0
    with Participant(
        algorithm,
        [np.zeros(PARAMETERS // ARRAYS, np.float32) for _ in range(ARRAYS)],
        optimizer=optimizer,
        servers=layout.servers,
        group_size=layout.group,
        world=part,
    ) as me:
        for gradient in me.gradients:
            gradient[:] = 1e-3
        start_s = time.perf_counter()
        for done, _ in enumerate(me.batches(range((warm + steps) * layout.computing)), 1):
            time.sleep(layout.compute_s)
            me.step()
            seconds = time.perf_counter() - start_s
            if done == warm:
                start_s = time.perf_counter()
    part.close()
    return steps * layout.compute_s / seconds if seconds else 0.0
