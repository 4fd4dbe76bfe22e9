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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from nnlo_common.algorithms import EASGD, Algorithm, Downpour
from nnlo_common.algorithms._optimizers import SGD
from nnlo_common.base._errors import NNLOError
from nnlo_common.base._file_access import append_file, read_whole
from nnlo_common.base._flat_vector import Vector
from nnlo_common.base._whole_files import write_whole
from nnlo_common.cluster.transport._mpi4py import World
from nnlo_common.cluster.transport._mpi_world import MPIWorld
from nnlo_common.commands.bench._scaling_page import ScalingFigures, drawn, tables
from nnlo_common.training._participant import Participant

__all__ = ["run"]

SERVERS = (1, 2, 4)
PARAMETERS, ARRAYS = 1_000_000, 8  # servers cut the centre between arrays
#: How long a worker computes on its batch (weak), and a single one on the common batch (strong).
COMPUTE_S = {"weak": 0.05, "strong": 0.8}
#: Steps before the clock starts, and those that it measures.
_WARM_STEPS = {"weak": 10, "strong": 2}
_STEPS = {"weak": 20, "strong": 10}
_GROUP = 4
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
            measured = _measured(world, layout)
        except NNLOError as error:  # the ranks that this layout does not need would wait
            print(f"error: {layout}: {error}", file=sys.stderr, flush=True)
            world.abort(1)
        if world.rank == 0 and measured is not None:
            with append_file(results) as file:
                file.write(f"{json.dumps(asdict(measured))}\n".encode())
            share = f"{measured.efficiency:.3f}"
            print(f"{layout}: efficiency {share}, load {measured.load:.1f}", file=sys.stderr, flush=True)
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


def _measured(world: MPIWorld, layout: ScalingLayout) -> ScalingFigures | None:
    """Train in this layout; return its figures on rank 0. The ranks that it does not need wait."""
    ranks = layout.servers + layout.computing
    efficiency = _trained(world.part(range(ranks)), layout) if world.rank < ranks else 0.0
    shares = [float(text) for text in world.gather_text(repr(efficiency))]
    computing = [one for one in shares if one > 0]
    if world.rank != 0:
        return None
    mean = sum(computing) / len(computing)
    return ScalingFigures(**asdict(layout), efficiency=mean, least=min(computing), load=os.getloadavg()[0])


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
