"""Readers of files under thousands of hostile contents: each is read, or refused by a named error."""

from __future__ import annotations

import random
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.hostile.readers import READERS, Reader, written

#: Contents for each reader: in the ordinary run, and in the long one.
FEW, MANY = 460, 9_100
_LONGEST_S = 5  # of the processor's time, for one content


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Silence Optuna, which logs each study."""
    optuna = pytest.importorskip("optuna")
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    yield
    optuna.logging.set_verbosity(level)


@contextmanager
def time_limit() -> Iterator[None]:
    """Fail if the body needs the processor for longer; the load of the machine does not count."""

    def fail(*_: object) -> None:
        raise TimeoutError(f"more than {_LONGEST_S} s")

    before = signal.signal(signal.SIGVTALRM, fail)
    signal.setitimer(signal.ITIMER_VIRTUAL, _LONGEST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def read(reader: Reader, data: bytes, folder: Path) -> bool:
    """Return whether a reader accepts a content; fail for any error but its named ones."""
    with time_limit(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning about odd content is no fault
        try:
            reader.read(data, folder)
        except reader.refuses as error:
            if not str(error):
                raise
            return False
    return True


def outside(folder: Path) -> dict[str, bytes | None]:
    """Return all that lies beside a reader's folder."""
    return {
        str(path): path.read_bytes() if path.is_file() else None
        for path in folder.parent.rglob("*")
        if folder not in (path, *path.parents)
    }


def fuzz(name: str, count: int, folder: Path, seed: str) -> int:
    """Give a reader many contents; return how many it has refused."""
    reader, own, refused = READERS[name], folder / "a" / "b" / "own", 0
    own.mkdir(parents=True)
    (folder / "x").write_text("mine")
    (folder / "a" / "x").write_text("mine")
    before = outside(own)
    for number in range(count):
        data = reader.content(random.Random(f"{seed} {name} {number}"))
        try:
            refused += not read(reader, data, own)
        except Exception as error:
            error.add_note(f"{name}, content {number} of seed {seed!r}: {data[:300]!r}")
            raise
    assert outside(own) == before
    return refused


@pytest.mark.parametrize("name", READERS)
def test_valid_contents_are_read(name: str, tmp_path: Path) -> None:
    if name != "folder of a search":  # its second content is not a journal
        assert all(read(READERS[name], data, tmp_path) for data in READERS[name].valid)


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_changed_contents_are_read_or_refused_by_name(name: str, tmp_path: Path) -> None:
    refused = fuzz(name, FEW, tmp_path, "ordinary")
    # The search for an interrupted trial passes over what it cannot read.
    assert refused > FEW // 10 or name == "folder of a search"


@pytest.mark.extended
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", READERS)
def test_very_many_changed_contents_are_read_or_refused_by_name(name: str, tmp_path: Path) -> None:
    fuzz(name, MANY, tmp_path, "extended")


def test_the_contents_are_as_many_as_promised() -> None:
    assert len(READERS) * FEW >= 5_000
    assert len(READERS) * MANY >= 100_000


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
JSON: st.SearchStrategy[Any] = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
@settings(
    max_examples=40,
    suppress_health_check=[*settings().suppress_health_check, HealthCheck.function_scoped_fixture],
)
@given(lines=st.lists(JSON, max_size=3), tail=st.binary(max_size=9))
def test_any_json_and_bytes_are_read_or_refused_by_name(
    name: str, tmp_path: Path, lines: list[Any], tail: bytes
) -> None:
    read(READERS[name], written(lines) + tail, tmp_path)
