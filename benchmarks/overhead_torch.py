"""What distributed training costs one worker: its samples/s beside those of the plain torch loop.

    mpiexec -n 2 python benchmarks/overhead_torch.py

One rank serves the centre, the other works. The worker times a plain loop and a training in turn, a few
hundred milliseconds of each, so that drift of the machine cancels; the ratio is taken within each round.
While the plain loop runs the server sleeps on its doorbell. Each rank computes with one thread.

Claims, checked with --assert: with overlap (lag=1) a worker reaches 0.90 of the plain loop where it
exchanges at every step, and 0.97 where it does at every tenth.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch and numpy read it

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch

import nnlo_torch as nt
from nnlo_common._startup import connect

# Hidden layers between 784 inputs and 10 classes; about as many parameters as the name says.
SIZES = {"90k": (100, 100), "1.8M": (1000, 1000), "11M": (2900, 2900)}
BATCH = 100
TARGETS = {1: 0.90, 10: 0.97}
# For the server to come to rest, and its last reply with it.
REST_S = 0.03


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    size: str
    every: int
    lag: int

    @property
    def target(self) -> float | None:
        """What is claimed for it, if anything."""
        return TARGETS.get(self.every) if self.lag else None


class Loop:
    """A training loop as anybody writes it, over batches that lie ready."""

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
        """Do the same and add up how long its parts take."""
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
    options = _options()
    world = connect()
    if world is None or world.size != 2:
        raise SystemExit(__doc__)
    torch.set_num_threads(1)
    cases = [
        Case(size, every, lag) for size in options.sizes for every in options.every for lag in options.lags
    ]
    if world.rank == 1:
        print(
            f"{world.library}; torch {torch.__version__}; {options.optimizer}; batches of {BATCH}; "
            f"{options.rounds} rounds of {options.seconds:g} s; load {os.getloadavg()[0]:.2f} before\n"
            f"{'size':>5} {'every':>5} {'lag':>3} {'plain':>9} {'trained':>9} {'ratio [min, max]':>22} claim",
            flush=True,
        )
    missed = 0
    for case in cases:
        loop = Loop(case.size, _makes(options.optimizer))
        loop.optimizer = nt.Downpour(loop.optimizer, every=case.every, lag=case.lag)
        torch.set_num_threads(1)  # wrapping gives each rank its share of the cores
        loop.optimizer.begin_epoch()
        if not loop.optimizer.serves:
            missed += _measure(case, loop, Loop(case.size, _makes(options.optimizer)), options)
        loop.optimizer.close()
    if world.rank == 1:
        print(f"threads per rank: {torch.get_num_threads()}; load {os.getloadavg()[0]:.2f} after", flush=True)
    return 1 if options.check and missed else 0


def _options() -> argparse.Namespace:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    options.add_argument("--every", nargs="+", type=int, default=[1, 10])
    options.add_argument("--lags", nargs="+", type=int, default=[0, 1])
    options.add_argument("--optimizer", choices=["SGD", "Adam"], default="SGD", help="SGD: with momentum")
    options.add_argument("--rounds", type=int, default=11)
    options.add_argument("--seconds", type=float, default=0.5, help="how long each side runs in a round")
    options.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    options.add_argument("--assert", dest="check", action="store_true", help="fail if a claim is missed")
    chosen = options.parse_args()
    if chosen.quick:
        chosen.rounds, chosen.seconds = 5, 0.2
    return chosen


def _makes(name: str) -> Callable[[Any], torch.optim.Optimizer]:
    if name == "Adam":
        return lambda parameters: torch.optim.Adam(parameters, lr=1e-4)
    return lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def _measure(case: Case, trained: Loop, plain: Loop, options: argparse.Namespace) -> int:
    """Print the row of one case; return 1 if it misses its claim."""
    plain.run(3)
    trained.run(3 * case.every)
    steps = _rounded(options.seconds / (plain.run(5) / 5), case.every)
    plain_s, trained_s = [], []
    for _ in range(options.rounds):
        time.sleep(REST_S)
        plain.run(1)
        plain_s.append(plain.run(steps) / steps)
        # As many exchanges are under way when the clock starts as when it stops.
        trained.run(case.every * (case.lag + 1))
        trained_s.append(trained.run(steps) / steps)
    ratios = [one / other for one, other in zip(plain_s, trained_s, strict=True)]
    missed = case.target is not None and median(ratios) < case.target
    verdict = "" if case.target is None else f"{case.target:.2f} {'missed' if missed else 'met'}"
    print(
        f"{case.size:>5} {case.every:5} {case.lag:3} {BATCH / median(plain_s):7.0f}/s "
        f"{BATCH / median(trained_s):7.0f}/s {median(ratios):8.3f} [{min(ratios):.3f}, {max(ratios):.3f}]  "
        f"{verdict}\n{_breakdown(plain, trained, steps)}",
        flush=True,
    )
    return int(missed)


def _rounded(steps: float, every: int) -> int:
    """Whole cycles of exchanges, at least one."""
    return max(1, round(steps / every)) * every


def _breakdown(plain: Loop, trained: Loop, steps: int) -> str:
    """Where the time of a step goes; measured apart, since looking takes time too."""
    spent: dict[str, Counter[str]] = {"plain": Counter(), "trained": Counter()}
    time.sleep(REST_S)
    plain.run_in_parts(steps, spent["plain"])
    with _watched(trained.optimizer, spent["trained"]):
        trained.run_in_parts(steps, spent["trained"])
    lines = []
    for name, parts in spent.items():
        inside = sum(seconds for part, seconds in parts.items() if part not in ("compute", "step", "zero"))
        if inside:
            parts["other"] = parts.pop("step") - inside
        times = ", ".join(f"{part} {1e6 * seconds / steps:.0f}" for part, seconds in parts.items())
        lines.append(f"      {name:>7}, us per step: {times}")
    return "\n".join(lines)


@contextmanager
def _watched(optimizer: nt.Downpour, spent: Counter[str]) -> Iterator[None]:
    """Let the parts of an exchange say how long they take; methods are shadowed for that long."""
    part, bridge = optimizer._team._part, optimizer._bridge
    rules = [conversation.rule for conversation in part._worker.conversations]
    shadowed = [(bridge, "collect", "collect"), (part._endpoint, "send", "send")]
    shadowed += [(part._endpoint, "receive", "wait"), (part._endpoint, "flush", "flush")]
    shadowed += [(rule, "observe", "sum") for rule in rules]
    shadowed += [(rule, "incoming", "absorb") for rule in rules]
    for owner, method, name in shadowed:
        setattr(owner, method, _timed(getattr(owner, method), name, spent))
    try:
        yield
    finally:
        for owner, method, _ in shadowed:
            delattr(owner, method)


def _timed(method: Callable[..., Any], name: str, spent: Counter[str]) -> Callable[..., Any]:
    def timed(*args: Any) -> Any:
        start_s = time.perf_counter()
        result = method(*args)
        spent[name] += time.perf_counter() - start_s
        return result

    return timed


if __name__ == "__main__":
    raise SystemExit(main())
