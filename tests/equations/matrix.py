"""Which trainings are compared."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from nnlo_common.algorithms._found import ALGORITHMS
from tests.equations.compared import Case

__all__ = ["of_keras", "of_torch"]

ALTERNATE, IRREGULAR, LATE = (0, 1), (0, 0, 1, 0, 1, 1), (1, 0, 0, 0, 1)
#: Batches of two workers in an epoch, which `every` does not divide.
UNEVEN = {1: (7, 5), 3: (7, 5), 10: (12, 9)}
#: Which optimizers the user may have; the first is that of single configurations.
OPTIMIZERS = {
    "Downpour": ("momentum", "sgd", "adam"),
    "Synchronous": ("momentum", "sgd", "adam"),
    "EASGD": ("momentum", "sgd", "adam"),
    "EAMSGD": ("nesterov",),
    "GEM": ("momentum",),
    "AGN": ("momentum", "sgd", "adam"),
    "DynSGD": ("momentum", "sgd", "adam"),
    "LocalSGD": ("momentum", "sgd", "adam"),
    "DiLoCo": ("momentum", "sgd", "adam"),
    "Steady": ("momentum", "sgd", "adam"),
}
#: Further options of each wrapper.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "Downpour": [
        {"n_push": 1, "n_fetch": 2},
        {"n_push": 2, "n_fetch": 1},
        {"n_push": 2, "n_fetch": 3},
        {"n_push": 3, "n_fetch": 1},
        {"n_push": 1, "n_fetch": 10},
        {"n_push": 10, "n_fetch": 3},
        {"n_push": 2, "n_fetch": 4, "local": 0.1},
        {"every": 3, "local": 0.1},
        {"every": 3, "local": "momentum"},
        {"every": 3, "local": "adam"},
    ],
    "Synchronous": [],
    "EASGD": [
        {"every": 1, "alpha": 0.3},
        {"every": 3, "alpha": 0.3, "order": "paper"},
        {"every": 3, "beta": 0.8, "beta_per": "step"},
        {"every": 1, "beta": 0.6, "order": "paper"},
        {"every": 3, "synchronous": True},
        {"every": 3, "synchronous": True, "order": "paper"},
        {"every": 1, "synchronous": True},
    ],
    "EAMSGD": [
        {"every": 1, "alpha": 0.3},
        {"every": 3, "beta": 0.8, "beta_per": "step"},
        {"every": 3, "synchronous": True},
    ],
    "GEM": [
        {"kappa": 2.0},
        {"clip": 1.0},
        {"clip": None},
        {"primed": False},
        {"every": 3, "kappa": 0.5, "clip": 2.0, "primed": False},
    ],
    "AGN": [{"every": 3, "local_learning_rate": 0.3}, {"every": 3, "local_learning_rate": 0.0}],
    "DynSGD": [],
    "LocalSGD": [{"every": 3, "warmup": 4}, {"every": 3, "warmup": 9}],
    "DiLoCo": [
        {"every": 3, "outer_learning_rate": 0.5, "outer_momentum": 0.6},
        {"every": 3, "outer_learning_rate": 1.0, "outer_momentum": 0.0},
    ],
    "Steady": [{"every": 3, "memory": 1.5}, {"brake": 0.0}, {"brake": 0.7, "memory": 0.0}, {"brake": 0.05}],
}


if (
    lacking := {one.__name__ for one in ALGORITHMS.values()} ^ OPTIMIZERS.keys()
    | OPTIMIZERS.keys() ^ OPTIONS.keys()
):
    raise LookupError(f"give tests/equations/matrix.py trainings to compare, of {', '.join(sorted(lacking))}")


def everys(wrapper: str) -> tuple[int | None, ...]:
    """Return the numbers of steps between exchanges that are tried; None: it has no such option."""
    return (1, 3, 10) if "every" in ALGORITHMS[wrapper.lower()].wrapper_options() else (None,)


def of_torch() -> Iterator[Case]:
    """Yield the trainings with nnlo_torch."""
    for wrapper, optimizers in OPTIMIZERS.items():
        for every, lag, optimizer in product(everys(wrapper), (0, 1), optimizers):
            options = {"lag": lag} if every is None else {"every": every, "lag": lag}
            uneven = UNEVEN[every or 1]
            for batches, pattern in ((uneven[:1], (0,)), (uneven, ALTERNATE), (uneven, IRREGULAR)):
                if optimizer == optimizers[0] or pattern != ALTERNATE:
                    yield Case(
                        wrapper=wrapper,
                        options=options,
                        optimizer=optimizer,
                        batches=batches,
                        pattern=pattern,
                    )
        yield from _special(wrapper)


def _special(wrapper: str) -> Iterator[Case]:
    """Yield trainings with options of a wrapper's own, and with several servers."""
    optimizer = OPTIMIZERS[wrapper][0]
    for options, lag in product(OPTIONS[wrapper], (0, 1)):
        for batches, pattern in (((7,), (0,)), ((7, 5), IRREGULAR)):
            yield Case(
                wrapper=wrapper,
                options={**options, "lag": lag},
                optimizer=optimizer,
                batches=batches,
                pattern=pattern,
            )
    for lag in (0, 1, 2):
        options = {"lag": lag} if wrapper == "Synchronous" else {"every": 2, "lag": lag}
        for optimizer, pattern in zip(OPTIMIZERS[wrapper], (LATE, IRREGULAR, ALTERNATE), strict=False):
            yield Case(wrapper=wrapper, options=options, optimizer=optimizer, servers=2, pattern=pattern)
    yield from _wired(wrapper)
    yield from _single(wrapper)


def _wired(wrapper: str) -> Iterator[Case]:
    """Yield trainings whose messages are packed.

    Not by topk: with two classes each gradient of the last layer has another of the same size.
    """
    for number, wire in enumerate(("bfloat16", "float16", "int8")):
        if wire in ALGORITHMS[wrapper.lower()].refused_wires:
            continue
        options: dict[str, Any] = {} if wrapper == "Synchronous" else {"every": 1 + number % 2}
        if number % 2 and wrapper != "LocalSGD":
            options["lag"] = 1
        optimizer = OPTIMIZERS[wrapper][0]
        yield Case(wrapper=wrapper, options={**options, "wire": wire}, optimizer=optimizer, pattern=IRREGULAR)
        if wrapper == "Downpour":
            options = {"n_push": 2, "n_fetch": 3, "lag": number % 2, "wire": wire}
            yield Case(wrapper=wrapper, options=options, pattern=LATE)


def _single(wrapper: str) -> Iterator[Case]:
    """Yield what is about one wrapper only."""
    if wrapper == "Downpour":
        for lag, pattern in product((0, 1), (ALTERNATE, LATE)):
            yield Case(wrapper=wrapper, options={"every": 2, "warm_start": 3, "lag": lag}, pattern=pattern)
        yield Case(wrapper=wrapper, options={"n_push": 2, "n_fetch": 3, "local": 0.1}, servers=2)
    if wrapper == "Synchronous":
        for lag, pattern in product((0, 1), (ALTERNATE, IRREGULAR, LATE)):
            yield Case(wrapper=wrapper, options={"backup": 1, "lag": lag}, pattern=pattern)
    if wrapper == "Steady":
        for optimizer, pattern in product(OPTIMIZERS[wrapper], (ALTERNATE, IRREGULAR)):
            for options in ({"synchronous": True}, {"synchronous": True, "every": 3, "memory": 1.0}):
                yield Case(wrapper=wrapper, options=options, optimizer=optimizer, pattern=pattern)
        yield Case(wrapper=wrapper, options={"synchronous": True}, weights=(1.0, 3.0), batches=(6, 6))
        yield Case(wrapper=wrapper, options={"synchronous": True}, optimizer="adam", servers=2)
        for optimizer in OPTIMIZERS[wrapper]:  # a brake so tight that the training is lost again and again
            yield Case(wrapper=wrapper, options={"brake": 0.05}, optimizer=optimizer, servers=2)
            yield Case(wrapper=wrapper, options={"brake": 0.05, "lag": 1}, optimizer=optimizer)
    if wrapper in ("Synchronous", "LocalSGD", "DiLoCo"):
        options = {} if wrapper == "Synchronous" else {"every": 3}
        yield Case(wrapper=wrapper, options=options, batches=(6, 6))
        yield Case(wrapper=wrapper, options=options, weights=(1.0, 3.0))
    if wrapper in ("LocalSGD", "DiLoCo"):
        yield Case(wrapper=wrapper, options={"every": 2}, batches=(7, 6))  # one has nothing left in the end


def of_keras(backend: str) -> Iterator[tuple[Case, bool]]:
    """Yield the trainings with nnlo_keras, each with whether it belongs to the long ones."""
    for wrapper, optimizers in OPTIMIZERS.items():
        for number, (every, lag) in enumerate(product(everys(wrapper), (0, 1))):
            options = {"lag": lag} if every is None else {"every": every, "lag": lag}
            uneven = UNEVEN[every or 1]
            shapes = ((uneven[:1], (0,)), (uneven, ALTERNATE), (uneven, IRREGULAR))
            for turn, ((batches, pattern), watched) in enumerate(product(shapes, (False, True))):
                optimizer = optimizers[(number + turn) % len(optimizers)]
                short = every in (None, 3) and batches == uneven and watched == (pattern == ALTERNATE)
                case = Case(
                    wrapper=wrapper,
                    options=options,
                    optimizer=optimizer,
                    batches=batches,
                    pattern=pattern,
                    watched=watched,
                )
                yield case, not short
        yield from _more_of_keras(wrapper, backend)


def _more_of_keras(wrapper: str, backend: str) -> Iterator[tuple[Case, bool]]:
    """Yield further options of a wrapper, several servers, and several steps in an execution."""
    for number, case in enumerate(_special(wrapper)):
        if not case.weights:
            quiet = Case(**{**vars(case), "watched": bool(number % 2)})
            yield quiet, bool(number % 3 if case.servers == 1 else number % 5)
    if backend == "torch" or wrapper == "EAMSGD":  # neither can have several steps in an execution
        return
    several = [(1, 2), (3, 2), (3, 4), (10, 4), (3, 16), (2, 16)]
    for number, ((every, together), lag) in enumerate(product(several, (0, 1))):
        if wrapper == "Synchronous" and every != 3:
            continue
        options = {"lag": lag} if wrapper == "Synchronous" else {"every": every, "lag": lag}
        extras: list[dict[str, Any]] = [{}]
        if wrapper == "EASGD":
            extras.append({"order": "paper"})
        if wrapper == "Downpour":
            extras.append({"local": 0.1})
        for extra in extras:
            case = Case(
                wrapper=wrapper,
                options={**options, **extra},
                optimizer=OPTIMIZERS[wrapper][0],
                batches=UNEVEN[every if every == 10 else 3],
                pattern=IRREGULAR,
                together=together,
                watched=bool(number % 2),
            )
            yield case, (every, together, lag) not in ((3, 2, 0), (3, 4, 1))
