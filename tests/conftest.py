"""Fixtures that every test gets: fixed seeds, and frameworks chosen by name."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import random
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from tests.helpers.frameworks import FRAMEWORKS
from tests.helpers.surroundings import undisturbed

CLIENTS = Path(__file__).with_name("clients")

for _name in os.environ.keys() - undisturbed(os.environ).keys():
    del os.environ[_name]

# The same examples in each run, and no limit of time for one: the machine may be busy.
settings.register_profile(
    "anywhere", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("anywhere")


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(1234)
    np.random.seed(1234)  # noqa: NPY002 - user code and frameworks draw from it
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture
def _copies_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers copy as often as they look, and they look between any two messages."""
    monkeypatch.setattr("nnlo_common.training._state_copies._SHORTEST_S", 0.0)
    monkeypatch.setattr("nnlo_common.training._state_copies._SHARE", 1e9)
    monkeypatch.setattr("nnlo_common.training._server_rank.LOOK_FOR_COPIES_S", 0.0)


@pytest.fixture(autouse=True)
def _no_training_left() -> Iterator[None]:
    """A sampler belongs to the wrapper made last; that of a test that has failed must not get another's."""
    yield
    if "nnlo_torch._wrapper" in sys.modules:
        sys.modules["nnlo_torch._wrapper"]._current = None


@pytest.fixture(autouse=True, scope="session")
def _operations_are_made_by_one_thread_at_a_time() -> Iterator[None]:
    """Threads share TensorFlow's definitions of operations, and protobuf may crash if several read one."""
    if "tensorflow" not in sys.modules:
        yield
        return
    from tensorflow.python.framework import op_def_library

    make, turn = op_def_library._apply_op_helper, threading.RLock()

    def make_in_turn(*args: Any, **options: Any) -> Any:
        with turn:
            return make(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op_def_library, "_apply_op_helper", make_in_turn)
        yield


class _Imported:
    """Whoever looks through all objects, to collect what is garbage, say, is spared those of the modules.

    With the frameworks these are a million, which takes a tenth of a second; much of it is imported by
    the first test that has an optimizer, or compiles a model.
    """

    spared = 0

    @classmethod
    def spare(cls) -> None:
        if len(sys.modules) > cls.spared + 50:
            gc.collect()
            gc.freeze()
            cls.spared = len(sys.modules)


class _Compiled:
    """What JAX has compiled takes up to 100 MB a test, which neither it nor the C library gives back."""

    tests = 0

    @classmethod
    def count(cls) -> None:
        cls.tests += 1
        if cls.tests % 10 == 0 and "jax" in sys.modules:
            sys.modules["jax"].clear_caches()
            gc.collect()
            getattr(ctypes.CDLL(None), "malloc_trim", lambda left: None)(0)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as extended what `sampled` leaves to `make test-all`: of each test all but one of so many cases.

    Which one differs from group to group, so that each value of every parameter has its turn.
    """
    seen: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is None or item.get_closest_marker("extended"):
            continue
        (every,) = mark.args
        test = item.nodeid.partition("[")[0]
        group, place = divmod(seen[test], every)
        if place != group % every:
            item.add_marker(pytest.mark.extended)
        seen[test] += 1


def pytest_collection_finish() -> None:
    _Imported.spare()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    _Imported.spare()
    _Compiled.count()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out the tests with other packages' loops, which have an environment of their own."""
    return True if collection_path == CLIENTS and "clients" not in FRAMEWORKS else None


def pytest_report_header() -> str:
    what = "run" if "clients" in FRAMEWORKS else "left out; they run in `make test-clients`"
    return f"tests/clients: {what}"


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("framework"):
        (name,) = mark.args
        if name not in FRAMEWORKS:
            pytest.skip(f"{name} is not in NNLO_TEST_FRAMEWORKS={','.join(sorted(FRAMEWORKS))!r}")
        if importlib.util.find_spec(name) is None:
            pytest.fail(f"NNLO_TEST_FRAMEWORKS asks for {name}, which is not installed")
