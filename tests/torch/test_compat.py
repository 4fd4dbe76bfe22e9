"""The parts of PyTorch that are not public are still what `nnlo_torch._compat` takes them for."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")
from torch.utils.data import dataloader  # noqa: E402

from nnlo_torch import _compat  # noqa: E402

pytestmark = pytest.mark.framework("torch")

CHANGED = "PyTorch has changed: mend nnlo_torch/_compat.py, or steps weigh what is drawn ahead of the loop"


def source(*path):
    """The text of a function of a loader's iterator."""
    found = dataloader
    for name in path:
        assert hasattr(found, name), f"{CHANGED}: there is no {'.'.join(path)} in torch.utils.data.dataloader"
        found = getattr(found, name)
    return inspect.getsource(found)


def says(text, part, what):
    assert part in text, f"{CHANGED}: {what}, which {part!r} did"


def test_both_functions_that_samplers_run_below_are_there():
    source("_BaseDataLoaderIter", "_next_index")
    source("_SingleProcessDataLoaderIter", "_next_data")
    assert None not in _compat.DRIVERS, CHANGED
    assert len(_compat.DRIVERS) == 2, CHANGED


@pytest.mark.parametrize("attribute", ["_num_workers", "_index_sampler", "_num_yielded"])
def test_an_iterator_knows_its_loader_and_its_batches(attribute):
    says(
        source("_BaseDataLoaderIter", "__init__"),
        f"self.{attribute} =",
        f"_BaseDataLoaderIter has no {attribute}",
    )


def test_a_batch_counts_once_the_loop_gets_it():
    text = source("_BaseDataLoaderIter", "__next__")
    says(text, "data = self._next_data()\n            self._num_yielded += 1", "__next__ counts otherwise")


def test_a_new_round_has_a_table_of_its_own_before_anything_is_drawn():
    text = source("_MultiProcessingDataLoaderIter", "_reset")
    for part in ("self._send_idx = 0", "self._task_info = {}"):
        says(text, part, "_reset no longer begins anew")
        assert text.index(part) < text.index("self._try_put_index()"), CHANGED


def test_a_batch_is_in_the_table_from_its_drawing_to_the_loop():
    text = source("_MultiProcessingDataLoaderIter", "_try_put_index")
    drawn, noted = text.find("self._next_index()"), text.find("self._task_info[self._send_idx] =")
    counted = text.find("self._send_idx += 1")
    assert 0 < drawn < noted < counted, f"{CHANGED}: _try_put_index draws, notes and counts a batch in turn"
    taken = source("_MultiProcessingDataLoaderIter", "_next_data")
    assert taken.count("self._task_info.pop(") == taken.count("return self._process_data("), CHANGED


def test_the_loader_is_found_from_its_sampler():
    found = []

    class Sampler(torch.utils.data.Sampler):
        def __iter__(self):
            found.append(_compat.driving_loader())
            for number in range(6):
                found.append(found[0] and found[0].drawing)
                yield number

    iterator = iter(torch.utils.data.DataLoader(range(6), 2, sampler=Sampler(), drop_last=True))
    next(iterator)
    batches = found[0]
    assert batches is not None, f"{CHANGED}: no loader was found"
    assert found[1:] == [0, 0], CHANGED
    assert batches.drops_last, CHANGED
    assert not batches.over
    del iterator
    assert batches.over
    assert batches.drawing == -1


def test_a_sampler_without_a_loader_finds_none():
    assert _compat.driving_loader() is None


def test_what_is_missing_is_found_at_once(monkeypatch):
    """Samples count when they are drawn then; nothing fails."""
    found = []

    class Sampler(torch.utils.data.Sampler):
        def __iter__(self):
            found.append(_compat.driving_loader())
            yield 0

    iterator = iter(torch.utils.data.DataLoader(range(6), sampler=Sampler()))
    del iterator._num_yielded
    with pytest.raises(AttributeError, match="_num_yielded"):
        next(iterator)
    assert found == [None]


def test_nothing_else_reaches_into_a_loader():
    parts = ("_num_yielded", "_task_info", "_send_idx", "_index_sampler", "_next_index", "_getframe")
    for path in Path(_compat.__file__).parent.glob("*.py"):
        if path.name != "_compat.py":
            assert not [part for part in parts if part in path.read_text()], path
    assert sys.modules["nnlo_torch._compat"] is _compat
