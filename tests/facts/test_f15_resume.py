"""F15: N + M steps are N steps, a saved state, fresh objects and M steps: bit for bit, for every algorithm.

A pause is a quiescent point: every worker has made N steps and no message is under way. Where the order of
the requests matters, both runs have the same one.
"""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import getitem
from typing import Any

import numpy as np
import pytest

from nnlo_common import (
    AGN,
    EAMSGD,
    EASGD,
    GEM,
    SGD,
    Adagrad,
    Adam,
    ConfigurationError,
    DiLoCo,
    Downpour,
    DynSGD,
    FlatVector,
    LocalSGD,
    RMSprop,
    Synchronous,
    VectorOptimizer,
)
from nnlo_common.algorithms import Algorithm
from nnlo_common.protocol import Server, Shard, Worker
from nnlo_common.testing import Interleaved, RandomOrder, Replay, RoundRobin, VirtualRun, train_virtually

pytestmark = pytest.mark.sampled(3)

WORKERS, BEFORE, AFTER = 3, 7, 8  # no tau below divides 7
SHAPES = ((2, 2), (3,), (2,))
SIZE = sum(int(np.prod(shape)) for shape in SHAPES)
CURVATURE = np.linspace(0.1, 1.5, SIZE, dtype=np.float32)
MINIMA = np.random.default_rng(5).standard_normal((WORKERS, BEFORE + AFTER, SIZE)).astype(np.float32)


@dataclass(frozen=True)
class Case:
    algorithm: Algorithm
    optimizer: Callable[[], VectorOptimizer] | None = None
    local: Callable[[], VectorOptimizer] | None = None


def momentum() -> VectorOptimizer:
    return SGD(0.05, momentum=0.9, nesterov=True)


CASES = {
    "downpour": Case(Downpour(), momentum),
    "downpour, dean": Case(Downpour(n_push=3, n_fetch=2, local_learning_rate=0.02), lambda: Adam(0.05)),
    "downpour, aligned": Case(
        Downpour(n_push=4, n_fetch=4, schedule="aligned", local_learning_rate=0.02), lambda: Adagrad(0.1)
    ),
    "downpour, warm start": Case(Downpour(n_push=2, n_fetch=3, warm_start=3), lambda: RMSprop(0.01)),
    "synchronous": Case(Synchronous(), lambda: Adam(0.05)),
    "synchronous, backup": Case(Synchronous(backup=1), momentum),
    "easgd": Case(EASGD(every=3), local=momentum),
    "easgd, paper": Case(EASGD(every=4, order="paper"), local=lambda: Adam(0.05)),
    "easgd, synchronous": Case(EASGD(every=2, synchronous=True, beta=0.6), local=momentum),
    "eamsgd": Case(EAMSGD(every=3, learning_rate=0.05, momentum=0.9)),
    "gem": Case(GEM(learning_rate=0.05)),
    "gem, at the centre": Case(GEM(learning_rate=0.05, gradient_at="center", kappa=2.0)),
    "agn": Case(AGN(every=4, local_learning_rate=0.05), momentum),
    "dynsgd": Case(DynSGD(every=3), momentum),
    "local sgd": Case(LocalSGD(every=4, warmup=2), local=momentum),
    "diloco": Case(DiLoCo(every=3), local=lambda: Adam(0.05)),
}
each_case = pytest.mark.parametrize("name", CASES)
# After a warm start the first worker is ahead of the others, so a pause changes who comes when.
IN_TURNS = [name for name in CASES if "warm start" not in name]
# With backup workers not every order comes to a point at which all have made the same number of steps:
# the gradient of the last one may wait for others who have paused.
IN_ANY_ORDER = [name for name in CASES if "backup" not in name]


def combined(names: list[str]) -> pytest.MarkDecorator:
    """Every name with every lag and one or two servers, where that is allowed."""
    everything = itertools.product(names, (0, 1, 2), (1, 2))
    allowed = [(name, lag, n) for name, lag, n in everything if n == 1 or "backup" not in name]
    return pytest.mark.parametrize(("name", "lag", "servers"), allowed)


class Minibatches:
    """Quadratics whose minimum is another one for each worker and step; `done` of them are used up."""

    def __init__(self, servers: int, done: int = 0) -> None:
        self.left = [itertools.islice(MINIMA[i], done, None) for i in range(WORKERS)]
        self.first = servers

    def __call__(self, x: np.ndarray, rank: int) -> np.ndarray:
        return CURVATURE * (x - next(self.left[rank - self.first]))


def train(
    case: Case, *, lag: int = 0, servers: int = 1, steps: int = BEFORE, done: int = 0, **options: Any
) -> VirtualRun:
    initial = [np.linspace(-1, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape) for shape in SHAPES]
    return train_virtually(
        replace(case.algorithm, lag=lag),
        Minibatches(servers, done),
        initial,
        **{
            "workers": WORKERS,
            "steps": steps,
            "servers": servers,
            "optimizer": case.optimizer and case.optimizer(),
            "local": case.local,
            "leave": False,
            **options,
        },
    )


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every number, text and array of a state, with the way to it."""
    if isinstance(tree, dict | list | tuple):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in items:
            yield from leaves(value, (*path, key))
    else:
        yield path, tree


def plain(state: Any) -> list[Any]:
    """A state as a list that is equal for states that are equal to the bit."""
    return [
        (path, (str(leaf.dtype), leaf.shape, leaf.tobytes()) if isinstance(leaf, np.ndarray) else leaf)
        for path, leaf in leaves(state)
    ]


# --- exact -----------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@combined(IN_TURNS)
def test_resuming_in_turns_is_exact(name: str, lag: int, servers: int) -> None:
    case, turns = CASES[name], RoundRobin()
    paused = train(case, lag=lag, servers=servers, schedule=turns)
    resumed = train(
        case, lag=lag, servers=servers, steps=AFTER, done=BEFORE, resume=paused.state(), schedule=turns
    )
    straight = train(case, lag=lag, servers=servers, steps=BEFORE + AFTER, schedule=RoundRobin())
    assert plain(resumed.state()) == plain(straight.state())
    assert np.array_equal(resumed.center, straight.center)
    assert np.array_equal(resumed.parameters, straight.parameters)
    assert not np.array_equal(resumed.center, paused.center)


@pytest.mark.sampled(4)
@combined(IN_ANY_ORDER)
def test_resuming_is_exact_in_any_order(name: str, lag: int, servers: int) -> None:
    """Two runs in orders of their own, one after the other, are one run in those two orders."""
    case = CASES[name]
    for seed, schedule in itertools.product(range(3), (Interleaved, RandomOrder)):
        paused = train(case, lag=lag, servers=servers, schedule=schedule(seed))
        resumed = train(
            case,
            lag=lag,
            servers=servers,
            steps=AFTER,
            done=BEFORE,
            resume=pickle.loads(pickle.dumps(paused.state())),
            schedule=schedule(seed + 1),
        )
        order = {
            shard: [*paused.trace[shard], *without_joins(resumed.trace[shard])] for shard in paused.trace
        }
        straight = train(case, lag=lag, servers=servers, steps=BEFORE + AFTER, schedule=Replay(order))
        assert straight.trace == order
        assert plain(resumed.state()) == plain(straight.state())


def without_joins(trace: list[int]) -> list[int]:
    """The first request of a worker is its joining; a worker that goes on has joined before."""
    rest = list(trace)
    for rank in set(trace):
        rest.remove(rank)
    return rest


@pytest.mark.sampled(2)
@combined(IN_TURNS)
def test_many_pauses_are_exact_too(name: str, lag: int, servers: int) -> None:
    case, turns, state = CASES[name], RoundRobin(), None
    for start, end in itertools.pairwise([0, 4, 5, 5, 11, BEFORE + AFTER]):
        run = train(
            case, lag=lag, servers=servers, steps=end - start, done=start, resume=state, schedule=turns
        )
        state = run.state()
    straight = train(case, lag=lag, servers=servers, steps=BEFORE + AFTER)
    assert plain(state) == plain(straight.state())


@pytest.mark.parametrize("name", IN_TURNS)
def test_a_resumed_run_can_end_in_good_order(name: str) -> None:
    case = CASES[name]
    state = train(case, lag=1).state()
    resumed = train(case, lag=1, steps=AFTER, done=BEFORE, resume=state, leave=True)
    straight = train(case, lag=1, steps=BEFORE + AFTER, leave=True)
    assert resumed.servers[0].finished
    assert np.array_equal(resumed.center, straight.center)
    assert np.array_equal(resumed.parameters, straight.parameters)


# --- a copy ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", IN_ANY_ORDER)
def test_a_state_is_a_copy_and_a_plain_tree(name: str) -> None:
    case = CASES[name]
    run = train(case, lag=2, servers=2)
    state = run.state()
    kept = plain(state)
    assert {type(leaf) for _, leaf in leaves(state)} <= {int, float, str, type(None), np.ndarray}
    train(case, lag=2, servers=2, steps=AFTER, done=BEFORE, resume=state)
    assert plain(state) == kept  # going on from it does not change it
    for _, leaf in leaves(state):
        if isinstance(leaf, np.ndarray):
            leaf[...] = 77
    assert plain(run.state()) == kept  # nor does it share memory with what it was taken from


# --- what does not fit is refused ------------------------------------------------------------------------

# With one and the same optimizer and tau, so that not even the shapes of their states need to differ.
OTHERS = {
    type(algorithm).__name__: Case(
        algorithm, (lambda: SGD(0.1)) if algorithm.optimizer_runs == "center" else None, lambda: SGD(0.1)
    )
    for algorithm in (
        AGN(every=3, local_learning_rate=0.1),
        DiLoCo(every=3),
        Downpour(n_push=3, n_fetch=3),
        DynSGD(every=3),
        EAMSGD(every=3, learning_rate=0.1),
        EASGD(every=3),
        GEM(learning_rate=0.1),
        LocalSGD(every=3),
        Synchronous(),
    )
}


@pytest.mark.parametrize(("saved", "asked"), list(itertools.permutations(OTHERS, 2)))
def test_a_state_of_another_algorithm_is_refused(saved: str, asked: str) -> None:
    state = train(OTHERS[saved]).state()
    train(OTHERS[asked])  # so the state is what is refused
    with pytest.raises(ConfigurationError):
        train(OTHERS[asked], resume=state)


@pytest.mark.parametrize(
    "changed",
    [
        {"servers": 2},
        {"lag": 0},
        {"lag": 1},
        {"workers": 2},
        {"workers": 4},
        {"optimizer": RMSprop(0.1)},
        {"local": momentum},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_state_of_a_run_of_another_make_is_refused(changed: dict[str, Any]) -> None:
    state = train(CASES["synchronous"], lag=2).state()
    with pytest.raises(ConfigurationError):
        train(CASES["synchronous"], resume=state, **{"lag": 2, **changed})


@dataclass(frozen=True)
class Fresh:
    """A server and a worker of a case as they are before they join, with other sizes if asked for."""

    case: Case
    lag: int = 1
    places: list[slice] = field(default_factory=lambda: [slice(0, 4), slice(4, SIZE)])
    local: Callable[[], VectorOptimizer] | None = None

    def algorithm(self) -> Algorithm:
        return replace(self.case.algorithm, lag=self.lag)

    def server(self) -> Server:
        optimizer = self.case.optimizer and self.case.optimizer()
        place = self.places[0]
        center = np.zeros(place.stop - place.start, np.float32)
        return Server(self.algorithm().center(center, WORKERS, optimizer), range(2, 2 + WORKERS))

    def worker(self) -> Worker:
        local = self.local or self.case.local
        x, gradient = (FlatVector.of([np.zeros(self.places[-1].stop, np.float32)]) for _ in range(2))
        return Worker(
            2,
            self.algorithm(),
            x,
            gradient,
            [Shard(index, index, place) for index, place in enumerate(self.places)],
            workers=WORKERS,
            local=local and local(),
        )


DAMAGES: dict[str, Callable[[np.ndarray], np.ndarray] | None] = {
    "missing": None,
    "of length n + 1": lambda array: np.ones(array.size + 1, array.dtype),
    "of length 1": lambda array: np.ones(1, array.dtype),
    "float64": lambda array: array.astype(np.float64),
}


def damaged(state: Any) -> Iterator[tuple[str, Any]]:
    """Copies of a state, each with one thing missing, of another size or of another dtype."""
    paths = [path[:n] for path, _ in leaves(state) for n in range(1, len(path) + 1)]
    for path, (what, change) in itertools.product(dict.fromkeys(paths), DAMAGES.items()):
        if "staleness" in path[:-1]:
            continue  # one count fewer is as good a state
        if "length" in what and ("optimizer" in path or "local" in path):
            continue  # an optimizer learns its size in its first step, and refuses then
        result = thawed(state)
        parent = reduce(getitem, path[:-1], result)
        if change is None and isinstance(path[-1], str):
            del parent[path[-1]]
        elif change is not None and isinstance(parent[path[-1]], np.ndarray):
            parent[path[-1]] = change(parent[path[-1]])
        else:
            continue
        yield f"{'/'.join(map(str, path))} {what}", result


def thawed(tree: Any) -> Any:
    """A deep copy with lists for tuples, so that any part of it can be replaced."""
    if isinstance(tree, dict):
        return {key: thawed(value) for key, value in tree.items()}
    return [thawed(value) for value in tree] if isinstance(tree, list | tuple) else copy.copy(tree)


def wrongly_taken(make: Callable[[], Any], states: Iterator[tuple[str, Any]]) -> list[str]:
    """What a load did not refuse with a ConfigurationError, or not before it had changed something."""
    problems = []
    for what, state in states:
        target = make()
        before = plain(target.state())
        try:
            target.load(state)
        except ConfigurationError:
            if plain(target.state()) != before:
                problems.append(f"{what}: refused half-way")
        except Exception as error:
            problems.append(f"{what}: {type(error).__name__}: {error}")
        else:
            problems.append(f"{what}: taken")
    return problems


@pytest.mark.parametrize("half", ["server", "worker"])
@pytest.mark.parametrize("name", IN_ANY_ORDER)
def test_a_damaged_state_is_refused_and_changes_nothing(name: str, half: str) -> None:
    fresh = Fresh(CASES[name])
    state = train(CASES[name], lag=1, servers=2).state()[f"{half}s"][0]
    make = getattr(fresh, half)
    make().load(state)  # the whole one is fine
    assert wrongly_taken(make, damaged(state)) == []


@pytest.mark.parametrize("half", ["server", "worker"])
@pytest.mark.parametrize("name", IN_ANY_ORDER)
def test_a_state_of_another_model_is_refused_and_changes_nothing(name: str, half: str) -> None:
    state = train(CASES[name], lag=1, servers=2).state()[f"{half}s"][0]
    for places in ([slice(0, 5), slice(5, SIZE + 1)], [slice(0, 3), slice(3, SIZE)]):
        assert wrongly_taken(getattr(Fresh(CASES[name], places=places), half), iter([("", state)])) == []


@pytest.mark.parametrize(
    ("saved", "asked"),
    [("easgd", Fresh(CASES["easgd"], local=lambda: Adam(0.1))), ("gem", Fresh(CASES["gem"], local=momentum))],
)
def test_a_state_with_another_local_optimizer_is_refused_and_changes_nothing(
    saved: str, asked: Fresh
) -> None:
    state = train(CASES[saved], lag=1, servers=2).state()["workers"][0]
    assert wrongly_taken(asked.worker, iter([("", state)])) == []
    without = Fresh(Case(asked.case.algorithm))
    state = train(CASES[saved], lag=1, servers=2, local=momentum).state()["workers"][0]
    assert wrongly_taken(without.worker, iter([("", state)])) == []
