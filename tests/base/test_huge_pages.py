"""Memory in large pages: zeroed, not shared, freed after use, and not wasted."""

from __future__ import annotations

import gc
import mmap
import threading
from itertools import pairwise
from pathlib import Path
from typing import Self

import numpy as np
import pytest

from nnlo_common import Frame
from nnlo_common.base import _flat_vector as _pages
from nnlo_common.base._flat_vector import PAGE, zeroed

pytestmark = pytest.mark.skipif(
    not hasattr(mmap, "MADV_HUGEPAGE"), reason="only Linux gives large pages to who asks"
)


def place(array: np.ndarray) -> tuple[int, int]:
    start = array.__array_interface__["data"][0]
    return start, start + array.nbytes


def disjoint(pieces: list[np.ndarray]) -> bool:
    places = sorted(map(place, pieces))
    return all(end <= start for (_, end), (start, _) in pairwise(places))


@pytest.mark.parametrize("count", [1, 100, 32768, 100_001, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE + 7])
def test_a_piece_is_zeroed_and_as_long_as_asked(count: int) -> None:
    piece = zeroed(count)
    assert (piece.dtype, piece.shape) == (np.uint8, (count,))
    assert piece.flags.c_contiguous
    assert piece.flags.writeable
    assert not piece.any()


def test_pieces_of_a_page_are_not_each_others() -> None:
    pieces = [zeroed(50_000 + 1000 * number) for number in range(100)]
    assert disjoint(pieces)
    for number, piece in enumerate(pieces):
        piece[:] = number
    assert all((piece == number).all() for number, piece in enumerate(pieces))


def test_what_was_given_back_and_asked_for_again_is_zeroed() -> None:
    for _ in range(50):
        piece = zeroed(700_000)
        assert not piece.any()
        piece[:] = 255


def test_a_large_piece_begins_where_a_large_page_does() -> None:
    assert place(zeroed(3 * PAGE))[0] % PAGE == 0


def test_threads_get_pieces_of_their_own() -> None:
    pieces: list[np.ndarray] = []

    def take() -> None:
        pieces.extend(zeroed(40_000) for _ in range(200))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(pieces) == 1600
    assert disjoint(pieces)


def test_small_models_share_pages() -> None:
    """64 workers with two messages of 90 000 numbers each need little more memory than the messages."""
    frames = [Frame(90_000) for _ in range(128)]
    pages = {address // PAGE for frame in frames for address in place(frame.bytes)}
    assert len(pages) * PAGE < 1.25 * sum(frame.bytes.nbytes for frame in frames)


def test_memory_is_given_back() -> None:
    def mapped() -> int:
        """Return the address space in bytes."""
        return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE

    gc.collect()
    before = mapped()
    for _ in range(20):
        kept = [Frame(10_000_000) for _ in range(5)]
        del kept
    gc.collect()
    assert mapped() - before < 20_000_000


@pytest.mark.parametrize("refusing", ["mmap", "madvise"])
def test_a_system_that_refuses_gives_ordinary_memory(refusing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(mmap.mmap):
        def __new__(cls, *args: object, **kwargs: object) -> Self:
            if refusing == "mmap":
                raise OSError(12, "Cannot allocate memory")
            return super().__new__(cls, *args, **kwargs)

        def madvise(self, *args: object) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(_pages.mmap, "mmap", Refusing)
    piece = zeroed(3 * PAGE)
    assert piece.size == 3 * PAGE
    assert not piece.any()
    piece[:] = 1
