"""Overhead of distributed training for one worker: its samples/s beside those of the plain torch loop.

    mpiexec -n 2 python benchmarks/overhead_torch.py

One rank serves the centre, the other trains. The worker times a plain loop and a training in turn, a few
hundred milliseconds of each, so that drift of the machine cancels in the ratio of each round. During the
plain loop the server sleeps on its wake-up socket. Each rank computes with one thread.

Claims, checked with --assert: with overlap (lag=1) a worker reaches 0.90 of the plain loop where it
exchanges at every step, and 0.97 where it does at every tenth.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch and numpy read it

import argparse
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from overhead import BATCH, HEAD, SIZES, Case, cases, options, watched

import nnlo_torch as nt
from nnlo_common.cluster._connecting import connect

TARGETS = {1: 0.90, 10: 0.97}
# Time for the server to finish its last reply and go to sleep.
REST_S = 0.03


class Loop:
    """A common training loop, over batches made beforehand."""

    def __init__(self, size: str, optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        torch.manual_seed(1)
        widths = (784, *SIZES[size], 10)
        layers: list[torch.nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
        self.model = torch.nn.Sequential(*layers[:-1])
        self.optimizer = optimizer(self.model.parameters())
        self.batches = [(torch.randn(BATCH, 784), torch.randint(10, (BATCH,))) for _ in range(8)]
        self.lose = torch.nn.CrossEntropyLoss()

    def run(self, steps: int) -> float:
        """Make some steps and return the seconds they took."""
        model, optimizer, lose, batches = self.model, self.optimizer, self.lose, self.batches
        start_s = time.perf_counter()
        for step in range(steps):
            x, y = batches[step % len(batches)]
            lose(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return time.perf_counter() - start_s

    def run_in_parts(self, steps: int, spent: Counter[str]) -> None:
        """Do the same and add up the times of its parts."""
        clock = time.perf_counter
        for step in range(steps):
            x, y = self.batches[step % len(self.batches)]
            start_s = clock()
            self.lose(self.model(x), y).backward()
            computed_s = clock()
            self.optimizer.step()
            stepped_s = clock()
            self.optimizer.zero_grad()
            spent["compute"] += computed_s - start_s
            spent["step"] += stepped_s - computed_s
            spent["zero"] += clock() - stepped_s


def main() -> int:
    """Measure every case; the worker prints."""
    chosen = options(__doc__)
    world = connect()
    if world is None or world.size != 2:
        raise SystemExit(__doc__)
    torch.set_num_threads(1)
    if world.rank == 1:
        print(
            f"{world.library}; torch {torch.__version__}; {chosen.optimizer}; batches of {BATCH}; "
            f"{chosen.rounds} rounds of {chosen.seconds:g} s; load {os.getloadavg()[0]:.2f} before\n"
            f"{HEAD}",
            flush=True,
        )
    missed = 0
    for case in cases(chosen, TARGETS):
        loop = Loop(case.size, _makes(chosen.optimizer))
        way = {"overlap": True} if chosen.wire == "overlap" else {"wire": chosen.wire}
        loop.optimizer = nt.Downpour(loop.optimizer, every=case.every, lag=case.lag, **way)
        torch.set_num_threads(1)  # wrapping gives each rank its share of the cores
        loop.optimizer.begin_epoch()
        if not loop.optimizer.serves:
            missed += _measure(case, loop, Loop(case.size, _makes(chosen.optimizer)), chosen)
        loop.optimizer.close()
    if world.rank == 1:
        print(f"threads per rank: {torch.get_num_threads()}; load {os.getloadavg()[0]:.2f} after", flush=True)
    return 1 if chosen.check and missed else 0


def _makes(name: str) -> Callable[[Any], torch.optim.Optimizer]:
    if name == "Adam":
        return lambda parameters: torch.optim.Adam(parameters, lr=1e-4)
    return lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def _measure(case: Case, trained: Loop, plain: Loop, chosen: argparse.Namespace) -> int:
    """Print the row of one case; return 1 if it misses its claim."""
    plain.run(3)
    trained.run(3 * case.every)
    steps = _rounded(chosen.seconds / (plain.run(5) / 5), case.every)
    plain_s, trained_s = [], []
    for _ in range(chosen.rounds):
        time.sleep(REST_S)
        plain.run(1)
        plain_s.append(plain.run(steps) / steps)
        # As many exchanges are under way when the clock starts as when it stops.
        trained.run(case.every * (case.lag + 1))
        trained_s.append(trained.run(steps) / steps)
    row, missed = case.row(plain_s, trained_s)
    print(f"{row}\n{_breakdown(plain, trained, steps)}", flush=True)
    return int(missed)


def _rounded(steps: float, every: int) -> int:
    """Round to whole cycles of exchanges, at least one."""
    return max(1, round(steps / every)) * every


def _breakdown(plain: Loop, trained: Loop, steps: int) -> str:
    """Return the times of the parts of a step, measured separately because timing costs time."""
    spent: dict[str, Counter[str]] = {"plain": Counter(), "trained": Counter()}
    time.sleep(REST_S)
    plain.run_in_parts(steps, spent["plain"])
    with watched(_parts(trained.optimizer), spent["trained"]):
        trained.run_in_parts(steps, spent["trained"])
    lines = []
    for name, parts in spent.items():
        inside = sum(seconds for part, seconds in parts.items() if part not in ("compute", "step", "zero"))
        if inside:
            parts["other"] = parts.pop("step") - inside
        times = ", ".join(f"{part} {1e6 * seconds / steps:.0f}" for part, seconds in parts.items())
        lines.append(f"      {name:>7}, us per step: {times}")
    return "\n".join(lines)


def _parts(optimizer: nt.Downpour) -> list[tuple[Any, str, str]]:
    """Return the timed parts of an exchange."""
    part, flat_model = optimizer._team._part, optimizer._flat_model
    endpoint = part._endpoint
    rules = [shard_client.rule for shard_client in part._worker.shard_clients]
    parts = [(flat_model, "collect", "collect"), (endpoint, "send", "send")]
    parts += [(endpoint, "receive", "wait"), (endpoint, "flush", "flush")]
    parts += [(rule, "observe", "sum") for rule in rules]
    return [*parts, *((rule, "incoming", "absorb") for rule in rules)]


if __name__ == "__main__":
    raise SystemExit(main())
