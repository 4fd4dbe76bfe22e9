"""Scaling over 4 to 48 workers as the simulator predicts it, beside what is measured; print a table.

python benchmarks/predicted_scaling.py --assert

It trains as `bench scaling` does: each worker sleeps where a device would compute, all that nnlo does is
real, and all ranks share the cores of this host. The simulator knows what an exchange takes one server and
one worker (`rehearse`), how fast memory is copied and how fast two ranks send to each other. A prediction is
"met" if it is within 15 % of what was measured.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy reads it

import argparse
import logging
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import numpy as np
from accuracy_all import mpiexec
from predictions import MOST, begin_table, end_table

from nnlo_common.base._cores import usable_cores
from nnlo_common.cluster._connecting import connect, guard
from nnlo_common.cluster.transport._mpi_world import MPIWorld
from nnlo_common.commands.bench._scaling import PARAMETERS, ScalingFigures, ScalingLayout, measured
from nnlo_common.simulation import Advice, Ranks, rehearse, simulate
from nnlo_common.simulation._advice import WRAPPED_S, example_facts
from nnlo_common.simulation._probe import ProbeFacts, copy_speed

#: Algorithm, servers, ranks of a worker.
LAYOUTS = (("EASGD", 1, 1), ("EASGD", 4, 1), ("EASGD", 1, 4), ("Downpour", 1, 1), ("Downpour", 4, 1))
_ROUNDS, _TAG = 15, 77


@dataclass(frozen=True)
class Layout(ScalingLayout):
    """A layout whose workers compute for as long as is asked."""

    seconds: float = 0.05

    @property
    def compute_s(self) -> float:
        """How long each rank computes in a step."""
        return self.seconds


def facts() -> ProbeFacts:
    """Return what the simulator knows of this host: a probe, but of no model."""
    rules = [Layout("weak", algorithm, 1, 1, 4).rules() for algorithm in ("EASGD", "Downpour")]
    return replace(
        example_facts(parameters=PARAMETERS),
        one_host=True,
        read_s=(),
        copy_bytes_per_s=copy_speed(PARAMETERS),
        exchanges={rule: rehearse(rule, PARAMETERS, optimizer=optimizer) for rule, optimizer in rules},
    )


def link_speed(world: MPIWorld) -> float:
    """Return the bytes per second of a message as long as the gradient, between the first two ranks."""
    comm, other, times = world.facts.comm, 1 - world.rank, []
    sent, got = np.ones(PARAMETERS, np.float32), np.empty(PARAMETERS, np.float32)
    there, back = partial(comm.Send, sent, other, _TAG), partial(comm.Recv, got, other, _TAG)
    for _ in range(_ROUNDS):
        began_s = time.perf_counter()
        for call in (there, back) if world.rank < other else (back, there):
            call()
        times.append(time.perf_counter() - began_s)
    return 2 * sent.nbytes / float(np.median(times))


def predicted(known: ProbeFacts, layout: Layout) -> float:
    """Return the share of their time that ranks compute, as the simulator sees it."""
    rule, _ = layout.rules()
    costs = Advice(known).costs_of(rule)
    costs = replace(
        costs,
        step=layout.compute_s,
        wrapped_s=0.0,  # there is no framework
        handle=costs.handle.mean - WRAPPED_S,
        cores=usable_cores(),
        apart=True,
    )
    ranks = Ranks.of(rule, layout.computing + layout.servers, servers=layout.servers, group_size=layout.group)
    return simulate(ranks, costs, steps=20).batches_per_s * layout.compute_s / layout.computing


def compare(chosen: argparse.Namespace) -> int:
    """Measure and predict all layouts; return how many predictions are off."""
    own = connect()
    guard(own)
    world = MPIWorld(own)
    # Ranks that a layout does not need would warn of those that are late.
    logging.getLogger("nnlo_common.cluster.transport").setLevel(logging.ERROR)
    speed = link_speed(world) if world.rank < 2 else 0.0
    world.gather_text("")
    known = None if world.rank else replace(facts(), within_bytes_per_s=speed)
    if known is not None:
        begin_table("workers", "compute for", "layout", "predicted", "measured", "off by")
    missed = 0
    for seconds in chosen.seconds:
        for workers in chosen.workers:
            for algorithm, servers, group in LAYOUTS:
                layout = Layout("weak", algorithm, servers, group, workers, seconds)
                runs = [measured(world, layout) for _ in range(chosen.runs)]
                if known is not None:
                    missed += told([one for one in runs if one], predicted(known, layout), seconds)
                world.gather_text("")
    if known is not None:
        end_table(missed, MOST)
    world.gather_text("")  # no rank ends the job before rank 0 has printed
    return missed


def told(runs: list[ScalingFigures], share: float, seconds: float) -> bool:
    """Print a row; return whether the prediction is off."""
    found = [one.efficiency for one in runs]
    off = share / median(found) - 1
    each = ", ".join(f"{one:.2f}" for one in found)
    row = f"| {runs[0].computing} | {1000 * seconds:.0f} ms | {runs[0].label} | {share:.2f}"
    print(f"{row} | {each} | {100 * off:+.0f} % |", flush=True)
    return abs(off) > MOST


def main() -> int:
    """Start the ranks, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("start", "compare"), nargs="?", default="start")
    parser.add_argument("--workers", nargs="+", type=int, default=[4, 16, 48], help="multiples of 4")
    parser.add_argument("--seconds", nargs="+", type=float, default=[0.05, 0.1], help="of each computation")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--assert", dest="insist", action="store_true", help="fail unless all are met")
    chosen = parser.parse_args()
    if chosen.what == "start":
        ranks = max(chosen.workers) + max(servers for _, servers, _ in LAYOUTS)
        command = [mpiexec(), "--oversubscribe", "-n", str(ranks), sys.executable, __file__, "compare"]
        print(f"starting {shlex.join(command)}", file=sys.stderr, flush=True)
        return subprocess.run([*command, *sys.argv[1:]], check=False).returncode
    return 1 if compare(chosen) and chosen.insist else 0


if __name__ == "__main__":
    raise SystemExit(main())
