"""The options of the algorithms: what they may be, what they make, and how they are told apart."""

from __future__ import annotations

import inspect
import pickle
import re
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, fields, replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nnlo_common
from nnlo_common import (
    AGN,
    EAMSGD,
    EASGD,
    GEM,
    SGD,
    ConfigurationError,
    DiLoCo,
    Downpour,
    DynSGD,
    LocalSGD,
    Steady,
    Synchronous,
)
from nnlo_common.algorithms import Algorithm, Ask, CenterRule, Contribution, WorkerRule
from nnlo_common.algorithms import __all__ as exported
from nnlo_common.algorithms._rule import mean_of

ALGORITHMS: list[Algorithm] = [
    AGN(local_learning_rate=0.1),
    DiLoCo(),
    Downpour(),
    DynSGD(),
    EAMSGD(learning_rate=0.1),
    EASGD(),
    GEM(),
    LocalSGD(),
    Steady(),
    Synchronous(),
]
REQUIRED = {AGN: {"local_learning_rate": 0.1}, EAMSGD: {"learning_rate": 0.1}}
each_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: type(a).__name__)


def make(kind: type[Algorithm], **options: Any) -> Algorithm:
    return kind(**{**REQUIRED.get(kind, {}), **options})


def subclasses(kind: type) -> set[type]:
    return set(kind.__subclasses__()).union(*(subclasses(one) for one in kind.__subclasses__()))


def is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "nnlo_common"


# --- options ---------------------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")
AT_LEAST_1 = ([1, 2, 10**9, np.int64(3)], [0, -1, NAN], "a whole number of at least 1")
AT_LEAST_0 = ([0, 1, 100], [-1, NAN], "a whole number of at least 0")
RATE = ([0.0, 0, 1e-9, 3.5], [-1e-9, NAN, INF], "at least 0, finite")
POSITIVE = ([1e-9, 1, 7.5, np.float32(0.5)], [0, -0.1, NAN, INF], "above 0, finite")
FLAG = ([True, False, np.True_], [0, 1, NAN], "True or False")
MOMENTUM = ([0, 0.0, 0.5, 0.999], [1, 1.0, -0.1, NAN], "at least 0 and below 1")
OPTIONS: dict[type[Algorithm], dict[str, tuple[Sequence[Any], Sequence[Any], str]]] = {
    # The field: what it may be, what it may not be, how that is said.
    Algorithm: {
        "lag": AT_LEAST_0,
        "wire": (
            ["float32"],  # others: tests/protocol
            ["float64", "", 16],
            "'float32' or 'bfloat16' or 'float16' or 'int8' or 'topk'",
        ),
        "topk_momentum": ([0, 0.0], [-0.1, 1, 1.5, "0.9"], "at least 0 and below 1"),  # others need topk
        "topk_nesterov": FLAG,
    },
    Downpour: {
        "n_push": AT_LEAST_1,
        "n_fetch": AT_LEAST_1,
        "schedule": (["dean", "aligned"], ["Dean", ""], "'dean' or 'aligned'"),
        "local_learning_rate": RATE,
        "warm_start": AT_LEAST_0,
    },
    Synchronous: {"backup": AT_LEAST_0},
    EASGD: {
        "every": AT_LEAST_1,
        "alpha": ([1e-9, 0.5, 0.999, None], [0, 1, 1.0, -0.1, NAN], "above 0 and below 1"),
        "beta": POSITIVE,
        "beta_per": (["exchange", "step"], ["steps", ""], "'exchange' or 'step'"),
        "order": (["paper", "step_first"], ["step-first", ""], "'paper' or 'step_first'"),
        "synchronous": FLAG,
        "sub_servers": ([*AT_LEAST_0[0], "host"], *AT_LEAST_0[1:]),
        "sub_every": AT_LEAST_1,
        "sub_alpha": ([1e-9, 0.5, 0.999, None], [0, 1, 1.0, -0.1, NAN], "above 0 and below 1"),
    },
    EAMSGD: {"learning_rate": POSITIVE, "momentum": MOMENTUM},
    GEM: {
        "every": AT_LEAST_1,
        "learning_rate": POSITIVE,
        "momentum": MOMENTUM,
        "kappa": POSITIVE,
        "clip": ([1e-9, 5, 100.0, None], [0, -1, NAN], "above 0, finite"),
        "epsilon": ([1e-30, 1e-16, 1.0], [0, 1e-31, 1e-45, -1.0, NAN], "at least 1e-30, finite"),
        "primed": FLAG,
        "gradient_at": (["update", "center"], ["centre", ""], "'update' or 'center'"),
    },
    AGN: {"every": AT_LEAST_1, "local_learning_rate": RATE},
    DynSGD: {"every": AT_LEAST_1},
    LocalSGD: {"every": AT_LEAST_1, "warmup": AT_LEAST_0},
    Steady: {
        "every": AT_LEAST_1,
        "passes": (["progress", "fixed"], ["fix", ""], "'progress' or 'fixed'"),
        "synchronous": FLAG,
        "memory": ([*RATE[0], None], *RATE[1:]),
        "brake": RATE,
    },
    DiLoCo: {"every": AT_LEAST_1, "outer_learning_rate": POSITIVE, "outer_momentum": MOMENTUM},
}
ROWS = [
    (kind, name, right, wrong, expected)
    for parent, table in OPTIONS.items()
    for kind in ([type(a) for a in ALGORITHMS] if parent is Algorithm else [parent])
    for name, (right, wrong, expected) in table.items()
]


each_option = pytest.mark.parametrize(
    ("kind", "name", "right", "wrong", "expected"), ROWS, ids=[f"{row[0].__name__}-{row[1]}" for row in ROWS]
)


def options_with(name: str, value: Any) -> dict[str, Any]:
    """The options to set one: two are refused without sub-servers."""
    return {"sub_servers": 2, name: value} if name in ("sub_every", "sub_alpha") else {name: value}


def refusal(kind: type[Algorithm], name: str, value: Any) -> str:
    with pytest.raises(ConfigurationError) as refused:
        make(kind, **options_with(name, value))
    return str(refused.value)


@each_option
def test_an_option_may_be_this_and_not_that(
    kind: type[Algorithm], name: str, right: Sequence[Any], wrong: Sequence[Any], expected: str
) -> None:
    for value in right:
        assert getattr(make(kind, **options_with(name, value)), name) == value
    for value in wrong:
        text = f"{kind.__name__}: {name}={value!r} is not possible: it must be {expected}"
        assert refusal(kind, name, value) == text


@each_option
def test_an_option_of_another_type_is_refused_in_the_same_words(
    kind: type[Algorithm], name: str, right: Sequence[Any], wrong: Sequence[Any], expected: str
) -> None:
    """Options come from files and command lines too; and of half a step nothing is ever due."""
    for value in ([1], "3", None, True, *([1.5] if "whole" in expected else [])):
        if value not in right:
            text = f"{kind.__name__}: {name}={value!r} is not possible: it must be {expected}"
            assert refusal(kind, name, value) == text


@each_algorithm
def test_options_are_known_keyword_only_and_frozen(algorithm: Algorithm) -> None:
    kind = type(algorithm)
    with pytest.raises(TypeError, match="unexpected keyword argument 'evry'"):
        kind(evry=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        kind(1)  # type: ignore[call-arg]
    for field in fields(algorithm):
        assert field.kw_only
        with pytest.raises(FrozenInstanceError):
            setattr(algorithm, field.name, 1)
    assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert pickle.loads(pickle.dumps(algorithm)) == algorithm
    assert hash(algorithm) == hash(replace(algorithm))


def test_every_algorithm_is_here_exported_and_checked() -> None:
    ours = {kind for kind in subclasses(Algorithm) if is_ours(kind)}
    assert {type(algorithm) for algorithm in ALGORITHMS} == ours
    assert set(OPTIONS) == ours | {Algorithm}
    for kind in ours:
        names = {name for parent in kind.__mro__ for name in OPTIONS.get(parent, {})}
        assert {field.name for field in fields(kind)} == names
    for kind in ours:
        assert getattr(nnlo_common, kind.__name__) is kind
        assert kind.__name__ in exported
        assert kind.__name__ in nnlo_common.__all__


# --- the moving rate of EASGD ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [EASGD, EAMSGD])
@pytest.mark.parametrize(
    ("options", "workers", "alpha"),
    [
        ({}, 1, 0.9),
        ({}, 4, 0.9 / 4),
        ({"beta": 0.5}, 8, 0.5 / 8),
        ({"beta": 1.5}, 2, 0.75),
        ({"beta_per": "step", "every": 10}, 4, 0.9 / 40),
        ({"beta_per": "step", "every": 1}, 4, 0.9 / 4),
        ({"beta_per": "step", "every": 10, "beta": 3.0}, 1, 0.3),
        ({"beta_per": "exchange", "every": 10}, 4, 0.9 / 4),
        ({"alpha": 0.3}, 1, 0.3),
        ({"alpha": 0.3}, 50, 0.3),
        ({"alpha": 0.3, "beta": 7.0, "beta_per": "step"}, 2, 0.3),  # alpha goes before beta
    ],
)
def test_the_moving_rate(kind: type[EASGD], options: dict[str, Any], workers: int, alpha: float) -> None:
    algorithm = make(kind, **options)
    assert algorithm.moving_rate(workers) == pytest.approx(alpha, rel=1e-12)
    center = algorithm.center(np.zeros(1, np.float32), workers, None)
    asked = [Contribution(1, np.ones(1, np.float32))]
    center.commit(asked)
    assert center.center == np.float32(alpha)  # and it is what the centre moves by


@pytest.mark.parametrize(
    ("options", "workers"),
    [
        ({"beta": 1.0}, 1),
        ({"beta": 2.5}, 2),
        ({"beta": 4}, 4),
        ({"beta": 10.0, "beta_per": "step", "every": 5}, 2),
    ],
)
def test_a_beta_that_makes_alpha_1_or_more_is_refused(options: dict[str, Any], workers: int) -> None:
    algorithm = EASGD(**options)  # how many workers there are is not known yet
    for ask in (algorithm.moving_rate, lambda p: algorithm.check(p, 1)):
        with pytest.raises(
            ConfigurationError,
            match=f"EASGD: beta={options['beta']:g} with {workers} workers? makes alpha=.*use a smaller beta",
        ):
            ask(workers)
    assert algorithm.moving_rate(workers + 4) < 1


# --- what cannot be made ---------------------------------------------------------------------------------


@each_algorithm
def test_who_needs_an_optimizer_says_so(algorithm: Algorithm) -> None:
    center = np.zeros(2, np.float32)
    if algorithm.optimizer_runs == "center":
        with pytest.raises(
            ConfigurationError, match=rf"{type(algorithm).__name__}: .* optimizer; pass one, e.g. SGD"
        ):
            algorithm.center(center, 2, None)
    else:
        algorithm.center(center, 2, None)
    assert algorithm.center(center, 2, SGD(0.1)).center is center  # changed in place, not copied


@pytest.mark.parametrize(("backup", "workers"), [(1, 1), (2, 2), (5, 3)])
def test_backup_must_leave_somebody_to_wait_for(backup: int, workers: int) -> None:
    with pytest.raises(
        ConfigurationError,
        match=f"backup={backup} of {workers} workers?.*backup <= {workers - 1} or start more",
    ):
        Synchronous(backup=backup).check(workers, 1)
    Synchronous(backup=backup).check(backup + 1, 1)


def test_backup_is_refused_where_servers_could_choose_differently() -> None:
    with pytest.raises(ConfigurationError, match="backup=1 works with one server, not with 2; use servers=1"):
        Synchronous(backup=1).check(4, 2)
    Synchronous().check(4, 2)


# --- describe --------------------------------------------------------------------------------------------

VALUES = st.sampled_from([1, 1.0, 2, np.int64(2), 0.5, np.float64(0.5), np.float32(0.5), 0.25])


@settings(max_examples=200)
@given(VALUES, VALUES, st.integers(1, 2), st.integers(1, 2), st.sampled_from([EASGD, EAMSGD]))
def test_descriptions_are_equal_exactly_where_the_options_are(
    one: float, other: float, every: int, others: int, kind: type[EASGD]
) -> None:
    a, b = EASGD(every=every, beta=one), make(kind, every=others, beta=other, order="step_first")
    assert (a.describe() == b.describe()) == (a == b)


@pytest.mark.parametrize("index", range(len(ALGORITHMS)))
def test_a_description_is_one_line_that_names_every_option(index: int) -> None:
    algorithm = ALGORITHMS[index]
    text = algorithm.describe()
    assert "\n" not in text
    assert text.startswith(f"{type(algorithm).__name__}(")
    # Without sub-servers their options are left out, and the usual wire with what is for another one.
    unsaid = ("sub_", "wire", "topk_")
    named = [one.name for one in fields(algorithm) if not one.name.startswith(unsaid)]
    assert all(f"{name}=" in text for name in named)
    assert replace(algorithm).describe() == text
    assert replace(algorithm, lag=algorithm.lag + 1).describe() != text
    assert [other.describe() for other in ALGORITHMS].count(text) == 1


# --- both halves -----------------------------------------------------------------------------------------


@each_algorithm
def test_both_halves_are_documented_and_of_our_kind(algorithm: Algorithm) -> None:
    worker = algorithm.worker(3, 2)
    center = algorithm.center(np.zeros(3, np.float32), 2, SGD(0.1))
    assert isinstance(worker, WorkerRule)
    assert isinstance(center, CenterRule)
    for kind in (type(worker), type(center), type(algorithm)):
        assert kind.__doc__ is not None
        assert "__doc__" in vars(kind)
        for name, member in vars(kind).items():
            assert name.startswith("_") or not inspect.isfunction(member) or member.__doc__, f"{kind}.{name}"
    for field in fields(algorithm):
        documents = [inspect.cleandoc(base.__doc__ or "") for base in type(algorithm).__mro__]
        assert any(f"{field.name}:" in text or f"{field.name}, " in text for text in documents), field.name
    assert re.search(
        r"arXiv:\d{4}\.\d{4,5}|NIPS 2012|SIGMOD 2017|the same paper", type(algorithm).__doc__ or ""
    )
    assert algorithm.optimizer_runs in ("center", "worker", "nowhere")


@pytest.mark.parametrize(
    "rule", sorted(filter(is_ours, subclasses(WorkerRule) | subclasses(CenterRule)), key=repr)
)
def test_what_a_rule_saves_is_what_its_steps_depend_on(rule: type) -> None:
    """A state names each attribute once, and the clock is always among them."""
    assert len(set(rule.saved)) == len(rule.saved)
    assert "clock" in rule.saved
    assert ("center" in rule.saved) == issubclass(rule, CenterRule)


@pytest.mark.parametrize(
    ("algorithm", "asks"),
    [
        # E: exchange, P: push, F: fetch (pull), L: lock, ".": nothing. One letter for each step.
        (Downpour(), "EEEE"),
        (Downpour(n_push=3, n_fetch=3), "P.FP.FP.F"),
        (Downpour(n_push=3, n_fetch=3, schedule="aligned"), "..E..E..E"),
        (Downpour(n_push=2, n_fetch=3), "P.E.PF"),
        (Downpour(n_push=2, n_fetch=1), "EFEFEF"),
        (Downpour(n_push=1, n_fetch=3), "PPEPPE"),
        (DynSGD(every=2), ".E.E"),
        (AGN(every=3, local_learning_rate=0.1), "..E..E"),
        (Synchronous(backup=1), "EEE"),
        (EASGD(every=3), "..E..E"),
        (EASGD(every=3, order="paper"), "E..E..E"),
        (EAMSGD(every=2, learning_rate=0.1), "E.E.E"),
        (GEM(), "LLL"),
        (GEM(lag=2), "..LLL"),
        (LocalSGD(every=3), "..E..E"),
        (LocalSGD(every=3, warmup=2), "EE..E..E"),
        (DiLoCo(every=2), ".E.E"),
    ],
    ids=lambda value: value.describe() if isinstance(value, Algorithm) else value,
)
def test_what_is_asked_in_which_step(algorithm: Algorithm, asks: str) -> None:
    letters = {None: ".", Ask.EXCHANGE: "E", Ask.PUSH: "P", Ask.PULL: "F", Ask.LOCK: "L"}
    rule, seen = algorithm.worker(1, 2), ""
    for _ in asks:
        rule.observe(np.zeros(1, np.float32), np.zeros(1, np.float32))
        seen += letters[rule.due()]
        rule.advance()
    assert seen == asks


# --- the mean --------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(-100, 100), st.sampled_from([1.0, 2.0, 0.5, 7.0])), min_size=1, max_size=6)
)
def test_the_mean_is_weighted(rows: list[tuple[int, float]]) -> None:
    """Checked with fractions; whole numbers and few bits, so that only the division rounds."""
    contributions = [
        Contribution(rank, np.float32([value, -value]), weight=weight)
        for rank, (value, weight) in enumerate(rows)
    ]
    exact = sum(Fraction(v) * Fraction(w) for v, w in rows) / sum(Fraction(w) for _, w in rows)
    mean = mean_of(contributions)
    assert mean is contributions[0].vector
    assert mean.tolist() == [float(np.float32(float(exact))), float(np.float32(float(-exact)))]


def test_a_mean_of_one_is_itself_to_the_bit_whatever_its_weight() -> None:
    vector = np.float32([0.1, -0.0, 1e-40, 3e38])
    kept = vector.tobytes()
    assert mean_of([Contribution(1, vector, weight=0.3)]).tobytes() == kept
