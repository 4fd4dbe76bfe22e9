"""Flat vectors: exact copies in and out, alignment, cuts at parameter boundaries, errors by name."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnlo_common import ConfigurationError, FlatVector, Frame, Layout, Segment
from nnlo_common.plugin import laid_out

F4 = np.float32


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def numbers(shape: tuple[int, ...], dtype: Any = F4, start: float = 1.0) -> np.ndarray:
    return np.arange(start, start + np.prod(shape, dtype=int)).reshape(shape).astype(dtype)


def strided() -> Iterator[tuple[str, np.ndarray]]:
    """Return arrays of every memory order."""
    base = numbers((4, 6))
    yield "contiguous", base
    yield "every second", numbers((9,))[::2]
    yield "transposed", base.T
    yield "fortran", np.asfortranarray(base)
    yield "backwards", base[::-1, ::-1]
    yield "inner block", base[1:3, 2:5]
    yield "three axes", numbers((2, 3, 4)).transpose(2, 0, 1)[::-1, :, ::2]
    yield "scalar", np.array(2.5, F4)
    yield "scalar of an array", base[2:3, 1:2].reshape(())
    yield "empty", np.zeros((0, 3), F4)
    yield "one", np.ones((1, 1, 1), F4)


# --- the frame -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 1000])
def test_a_frame_is_one_piece_whose_header_and_vector_are_aligned(size: int) -> None:
    frames = [Frame(size) for _ in range(20)]  # wherever the allocator puts them
    for frame in frames:
        assert address(frame.bytes) % 64 == 0
        assert address(frame.vector) % 64 == 0
        assert (frame.bytes.nbytes, len(frame.header), frame.vector.size) == (64 + 4 * size, 64, size)
        assert frame.bytes.flags.c_contiguous
        assert frame.vector.dtype == F4
        assert not frame.bytes.any()
        frame.header[0] = 7
        frame.vector[:] = 1
        assert frame.bytes[0] == 7
        assert frame.bytes[64:].tobytes() == np.ones(size, F4).tobytes()
    assert not any(np.shares_memory(*pair) for pair in itertools.pairwise([f.bytes for f in frames]))


def test_a_frame_may_lie_in_other_memory() -> None:
    flat = FlatVector.of([np.zeros(3, F4)])
    own, other = flat.frame.bytes, np.zeros(64 + 4 * 3, np.uint8)
    flat.lie_in(other)
    flat.vector[:] = 2
    flat.frame.header[0] = 7
    assert flat.vector is flat.frame.vector
    assert (other[0], other[64:].view(F4).tolist()) == (7, [2, 2, 2])
    flat.lie_in(own)
    assert flat.vector.tolist() == [0, 0, 0]


# --- round trips -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "array"), strided_cases := list(strided()), ids=[k for k, _ in strided_cases]
)
def test_arrays_of_any_memory_order_go_in_and_out(kind: str, array: np.ndarray) -> None:
    others = [numbers((3,), start=50), numbers((2, 2), start=90)]
    arrays = [others[0], array, others[1]]
    originals = [one.copy() for one in arrays]
    flat = FlatVector.of(arrays)
    assert flat.vector.tolist() == [*originals[0].ravel(), *originals[1].ravel(), *originals[2].ravel()]
    for one in arrays:
        one[...] = -1
    flat.vector += 0
    flat.write_to(arrays)
    assert all(np.array_equal(one, original) for one, original in zip(arrays, originals, strict=True))


def test_16_bits_widen_exactly_and_round_on_the_way_back() -> None:
    every_half = np.arange(2**16, dtype=np.uint16).view(np.float16)
    finite = every_half[np.isfinite(every_half)].copy()
    flat = FlatVector.of([finite])
    assert np.array_equal(flat.vector, finite.astype(np.float64))
    back = np.zeros_like(finite)
    flat.write_to([back])
    assert np.array_equal(back.view(np.uint16), finite.view(np.uint16))
    flat.vector[:3] = [1 + 2**-11, 1 + 3 * 2**-11, 1e-9]  # half a unit: to even, to even, to zero
    flat.write_to([back])
    assert back[:3].tolist() == [1.0, 1 + 2**-9, 0.0]


@pytest.mark.framework("keras")
def test_bfloat16_goes_in_and_out() -> None:
    import ml_dtypes

    every = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    finite = every[np.isfinite(every.astype(F4))].reshape(-1, 2)
    flat = FlatVector.of([finite, np.array(1.5, ml_dtypes.bfloat16)], ["w", "s"])
    assert [segment.dtype for segment in flat.layout.segments] == ["bfloat16", "bfloat16"]
    assert np.array_equal(flat.vector[:-1], finite.astype(F4).ravel())
    back = [np.zeros_like(finite), np.zeros((), ml_dtypes.bfloat16)]
    flat.write_to(back)
    assert np.array_equal(back[0].view(np.uint16), finite.view(np.uint16))
    assert float(back[1]) == 1.5


def test_views_are_the_vector_and_nothing_is_copied() -> None:
    big = np.ones((500, 1000), F4)
    flat = FlatVector.of([big, np.ones(3, F4), np.array(4.0, F4)])
    assert np.shares_memory(flat.vector, flat.frame.bytes)
    for view, segment in zip(flat.views(), flat.layout.segments, strict=True):
        assert address(view) == address(flat.vector[segment.place])
        assert view.shape == segment.shape
    flat.views()[2][...] = 9
    assert flat.vector[-1] == 9
    tracemalloc.start()
    flat.read_from([big, np.ones(3, F4), np.array(4.0, F4)])
    flat.write_to([big, np.ones(3, F4), np.array(4.0, F4)])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < big.nbytes / 20


@st.composite
def models(draw: st.DrawFn) -> list[np.ndarray]:
    """Arrays of any shape, dtype and stride, filled with small whole numbers."""
    arrays = []
    for _ in range(draw(st.integers(0, 5))):
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        dtype = draw(st.sampled_from([np.float32, np.float16]))
        steps = [draw(st.sampled_from([1, 2, -1, -3])) for _ in shape]
        base = np.zeros([max(1, n * abs(step)) for n, step in zip(shape, steps, strict=True)], dtype)
        cut = base[(*(slice(None, None, step) for step in steps), ...)][(*(slice(n) for n in shape), ...)]
        cut = cut.transpose(draw(st.permutations(range(len(shape)))))
        cut[...] = draw(st.integers(-500, 500)) + np.arange(cut.size).reshape(cut.shape)
        arrays.append(cut)
    return arrays


@settings(max_examples=100)
@given(models())
def test_any_model_goes_in_and_out(arrays: list[np.ndarray]) -> None:
    flat = FlatVector.of(arrays)
    assert flat.layout.size == sum(array.size for array in arrays)
    assert np.array_equal(flat.vector, np.concatenate([[], *(array.ravel() for array in arrays)]))
    assert [view.tolist() for view in flat.views()] == [array.tolist() for array in arrays]
    back = [np.full_like(array, 77) for array in arrays]
    flat.write_to(back)
    assert all(np.array_equal(one, array) for one, array in zip(back, arrays, strict=True))
    flat.vector[:] = 0
    flat.read_from(arrays)
    assert [view.tolist() for view in flat.views()] == [array.tolist() for array in arrays]
    again = Layout.from_json(flat.layout.to_json())
    assert again == flat.layout == Layout.of(back)
    assert again.fingerprint() == flat.layout.fingerprint()


# --- tied and overlapping --------------------------------------------------------------------------------


def test_tied_arrays_get_one_place_and_are_written_together() -> None:
    matrix = numbers((2, 3))
    arrays = [numbers((2,), start=50), matrix, matrix.T, matrix, matrix.T, matrix[:]]
    with pytest.raises(ConfigurationError, match="array 1 and array 2 share part"):
        FlatVector.of(arrays)  # the transposed one is another order of the same numbers
    arrays = [arrays[0], matrix, matrix, matrix[:]]
    flat = FlatVector.of(arrays, ["b", "encoder", "decoder", "third"])
    assert flat.layout.size == 8
    assert [segment.tied_to for segment in flat.layout.segments] == [None, None, "encoder", "encoder"]
    first, second, third = flat.views()[1:]
    assert address(first) == address(second) == address(third)
    second[0, 0] = 100
    assert first[0, 0] == 100
    flat.write_to(arrays)
    assert matrix[0, 0] == 100
    assert flat.layout.cut(2) == (slice(0, 2), slice(2, 8))


def test_every_array_of_a_tied_layout_is_written_also_where_it_is_a_copy() -> None:
    """Frameworks return copies: arrays tied in the model need not be tied in the target of write_to."""
    matrix = numbers((2, 3))
    flat = FlatVector.of([matrix, matrix])
    copies = [np.zeros_like(matrix), np.zeros_like(matrix)]
    flat.write_to(copies)
    assert np.array_equal(copies[0], matrix)
    assert np.array_equal(copies[1], matrix)


def overlapping() -> dict[str, list[np.ndarray]]:
    base = numbers((24,))
    grid = base.reshape(4, 6)
    return {
        "shifted": [base[:10], base[5:15]],
        "inside": [base, base[3:5]],
        "other shape": [base, grid],
        "other order": [grid[:2], grid[:2].T],
        "crossing": [grid[:, ::2], grid[1, :]],
        "reversed": [base, base[::-1]],
        "other dtype": [base, base.view(np.float16)],
    }


@pytest.mark.parametrize("name", overlapping())
def test_partly_overlapping_arrays_are_refused_by_name(name: str) -> None:
    arrays = overlapping()[name]
    for pair in (arrays, arrays[::-1]):
        model = [np.ones(2, F4), pair[0], np.ones(3, F4), pair[1]]
        with pytest.raises(ConfigurationError, match="left and right share part of their memory; pass"):
            Layout.of(model, ["a", "left", "b", "right"])


def test_an_overlap_is_found_behind_arrays_that_lie_in_between() -> None:
    base = numbers((24,))
    with pytest.raises(ConfigurationError, match="even and late share"):
        Layout.of([base[::2], base[1:4:2], base[5:6], base[7:9]], ["even", "odd", "one", "late"])


@pytest.mark.parametrize(
    "arrays",
    [
        [(base := numbers((24,)))[::2], base[1::2]],
        [base.reshape(4, 6)[:, :2], base.reshape(4, 6)[:, 2:]],
        [base.reshape(4, 6)[:2], base.reshape(4, 6)[2:]],
        [
            base.reshape(2, 3, 4)[:, ::2, 1:],
            base.reshape(2, 3, 4)[:, 1::2, :2],
            base.reshape(2, 3, 4)[:, ::2, 0],
        ],
        [base[:0], base, base[5:5]],
    ],
    ids=["interleaved", "columns", "halves", "three", "empty"],
)
def test_arrays_that_share_a_buffer_but_no_number_are_accepted(arrays: list[np.ndarray]) -> None:
    flat = FlatVector.of(arrays)
    assert flat.layout.size == sum(array.size for array in arrays)
    assert all(segment.tied_to is None for segment in flat.layout.segments)
    originals = [array.copy() for array in arrays]
    flat.write_to(arrays)
    assert all(np.array_equal(one, other) for one, other in zip(arrays, originals, strict=True))


# --- what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("array", "found", "advice"),
    [
        (
            np.zeros((2, 3)),
            "float64[2, 3]",
            "float32 would round it: convert it yourself, or pass allow_narrowing",
        ),
        (np.zeros(2, np.int32), "int32[2]", "leave it out or convert it yourself"),
        (np.zeros(2, np.int8), "int8[2]", "leave it out or convert it yourself"),
        (np.zeros(2, np.uint8), "uint8[2]", "leave it out or convert it yourself"),
        (np.zeros(4, bool), "bool[4]", "leave it out or convert it yourself"),
        (np.zeros(2, np.complex64), "complex64[2]", "leave it out or convert it yourself"),
        (np.zeros(2, object), "object[2]", "leave it out or convert it yourself"),
        (np.array(["a"]), "str", "leave it out or convert it yourself"),
        (np.zeros(2, [("a", "f4")]), "void", "leave it out or convert it yourself"),
        (np.zeros(2, "M8[s]"), "datetime64[s][2]", "leave it out or convert it yourself"),
        (np.zeros(2, ">f4"), "byte order", "use .astype"),
        (np.zeros(2, ">f2"), "byte order", "use .astype"),
        ([1.0, 2.0], "a list, not a numpy array", "use numpy.asarray"),
        (1.0, "a float, not a numpy array", "use numpy.asarray"),
        (np.float32(1.0), "a float32, not a numpy array", "use numpy.asarray"),
        (None, "a NoneType, not a numpy array", "use numpy.asarray"),
    ],
    ids=repr,
)
def test_what_float32_cannot_hold_is_refused_by_name(array: Any, found: str, advice: str) -> None:
    fine = np.zeros(3, F4)
    with pytest.raises(ConfigurationError) as refusal:
        Layout.of([fine, array], ["layer.bias", "layer.kernel"])
    text = str(refusal.value)
    assert text.startswith("layer.kernel is ")
    assert found in text
    assert advice in text
    with pytest.raises(ConfigurationError, match=r"^array 1 is "):
        FlatVector.of([fine, array])


def test_float64_is_narrowed_only_where_that_is_asked_for() -> None:
    wide = np.array([1 / 3, 1e-50, 1e10])
    flat = FlatVector.of([wide], allow_narrowing=True)
    assert flat.vector.tolist() == wide.astype(F4).tolist()
    back = np.zeros(3)
    flat.write_to([back])
    assert np.array_equal(back, wide.astype(F4))
    for other in (np.zeros(2, np.int64), np.zeros(2, np.complex128), np.zeros(2, ">f8"), np.zeros(2, object)):
        with pytest.raises(ConfigurationError, match="array 0 is "):
            Layout.of([other], allow_narrowing=True)


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["a"], "2 arrays were given with 1 names; give one each"),
        (["a", "b", "c"], "2 arrays were given with 3 names; give one each"),
        ([], "2 arrays were given with 0 names; give one each"),
        (["a", "a"], "the name 'a' was given to two arrays; names must differ"),
    ],
)
def test_names_must_fit(names: list[str], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        Layout.of([np.zeros(1, F4), np.zeros(1, F4)], names)


@pytest.mark.parametrize("method", ["read_from", "write_to"])
@pytest.mark.parametrize(
    ("arrays", "problem"),
    [
        ([np.zeros((2, 3), F4)], "1 arrays were given for a layout of 2; give one"),
        (
            [np.zeros((2, 3), F4), np.zeros(3, F4), np.zeros(1, F4)],
            "3 arrays were given for a layout of 2; give one",
        ),
        (
            [np.zeros((3, 2), F4), np.zeros(3, F4)],
            r"w was laid out as float32\[2, 3\] but is now float32\[3, 2\]; make",
        ),
        ([np.zeros((2, 3), F4), np.zeros(4, F4)], r"b was laid out as float32\[3\] but is now float32\[4\]"),
        ([np.zeros((2, 3), F4), np.zeros(1, F4)], r"b was laid out as float32\[3\] but is now float32\[1\]"),
        (
            [np.zeros((2, 3), F4), np.zeros(3, np.float16)],
            r"b was laid out as float32\[3\] but is now float16",
        ),
        ([np.zeros((2, 3), F4), np.zeros(3)], r"b was laid out as float32\[3\] but is now float64"),
        ([np.zeros((2, 3), F4), [0.0, 0.0, 0.0]], r"b was laid out as float32\[3\] but is now a list"),
    ],
)
def test_arrays_that_have_changed_are_refused_and_nothing_is_touched(
    method: str, arrays: list[Any], problem: str
) -> None:
    flat = FlatVector.of([numbers((2, 3)), numbers((3,))], ["w", "b"])
    with pytest.raises(ConfigurationError, match=problem):
        getattr(flat, method)(arrays)
    assert flat.vector.tolist() == [1, 2, 3, 4, 5, 6, 1, 2, 3]
    assert not any(np.any(array) for array in arrays)


def test_a_read_only_array_is_read_but_not_written() -> None:
    frozen = numbers((3,))
    frozen.flags.writeable = False
    flat = FlatVector.of([frozen], ["w"])
    flat.vector += 1
    with pytest.raises(ConfigurationError, match=r"w is read-only.*pass a writable array"):
        flat.write_to([frozen])
    assert frozen.tolist() == [1, 2, 3]


# --- the layout ------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=8), st.data())
def test_cutting_is_as_even_as_parameter_boundaries_allow(sizes: list[int], data: st.DataObject) -> None:
    layout = Layout.of([np.zeros(n, F4) for n in sizes])
    filled = [n for n in sizes if n]
    parts = data.draw(st.integers(1, max(1, len(filled))))
    cuts = layout.cut(parts)
    edges = [0, *np.cumsum(sizes).tolist()]
    assert [cut.start for cut in cuts] == [0, *(cut.stop for cut in cuts[:-1])]
    assert cuts[-1].stop == layout.size
    assert all(cut.stop in edges for cut in cuts)
    assert all(cut.stop > cut.start for cut in cuts) or not filled
    borders = itertools.combinations(range(1, len(filled)), parts - 1)
    even = (
        min(
            max(sum(filled[a:b]) for a, b in itertools.pairwise([0, *inner, len(filled)]))
            for inner in borders
        )
        if filled
        else 0
    )
    assert max(cut.stop - cut.start for cut in cuts) == even


@pytest.mark.parametrize(
    ("sizes", "parts", "most"),
    [([3, 4], 3, 2), ([3, 4], 0, 2), ([3, 4], -1, 2), ([0, 0], 2, 1), ([], 2, 1), ([5, 0, 5], 3, 2)],
)
def test_more_parts_than_parameters_are_refused(sizes: list[int], parts: int, most: int) -> None:
    layout = Layout.of([np.zeros(n, F4) for n in sizes])
    filled = sum(n > 0 for n in sizes)
    with pytest.raises(
        ConfigurationError,
        match=f"into {parts} parts.*the model has {filled} non-empty.*at most {most} servers?",
    ):
        layout.cut(parts)
    assert len(layout.cut(most)) == most


def test_a_tied_array_is_no_parameter_of_its_own_to_cut_at() -> None:
    matrix = np.zeros(6, F4)
    layout = Layout.of([matrix, matrix, np.zeros(2, F4)])
    assert layout.cut(2) == (slice(0, 6), slice(6, 8))
    with pytest.raises(ConfigurationError, match="2 non-empty parameters"):
        layout.cut(3)


def test_a_layout_travels_as_one_line_of_json() -> None:
    matrix = np.zeros((2, 3), np.float16)
    layout = Layout.of([matrix, np.zeros((), F4), matrix, np.zeros((0,), F4)], ["w", "β", "tied", "none"])
    text = layout.to_json()
    assert "\n" not in text
    assert len(json.loads(text)["segments"]) == 4
    assert Layout.from_json(text) == layout
    assert Layout.from_json(text).segments[0] == Segment("w", (2, 3), "float16", 0, 6)
    assert Layout.from_json(Layout.of([]).to_json()) == Layout.of([])
    with pytest.raises(FrozenInstanceError):
        layout.size = 3  # type: ignore[misc]


def two(name: str = "w", shape: tuple[int, ...] = (2, 3), dtype: Any = F4, *, more: int = 0) -> Layout:
    arrays = [np.zeros(2, F4), np.zeros(shape, dtype), *(np.zeros(1, F4) for _ in range(more))]
    return Layout.of(arrays, ["b", name, *(f"more {i}" for i in range(more))])


TIED = Layout.of([m := np.zeros((2, 3), F4), np.zeros(2, F4), m], ["w", "b", "t"])


@pytest.mark.parametrize(
    ("one", "other", "difference"),
    [
        (two(), two(), None),
        (two(), two("v"), "parameter 1 is 'w' float32[2, 3] here and 'v' float32[2, 3] there"),
        (two(), two(shape=(3, 2)), "parameter 1 is 'w' float32[2, 3] here and 'w' float32[3, 2] there"),
        (two(), two(dtype=np.float16), "parameter 1 is 'w' float32[2, 3] here and 'w' float16[2, 3] there"),
        (two(), two(more=2), "2 parameters here and 4 there"),
        (two(more=1), two(), "3 parameters here and 2 there"),
        (Layout.of([]), two(), "0 parameters here and 2 there"),
        (
            TIED,
            Layout.of([np.zeros((2, 3), F4), np.zeros(2, F4), np.zeros((2, 3), F4)], ["w", "b", "t"]),
            "parameter 2 is 't' float32[2, 3] tied to 'w' here and 't' float32[2, 3] there",
        ),
    ],
)
def test_the_first_difference_is_told_and_fingerprints_tell_them_apart(
    one: Layout, other: Layout, difference: str | None
) -> None:
    assert one.difference(other) == difference
    assert (one.fingerprint() == other.fingerprint()) == (difference is None) == (one == other)
    assert len(one.fingerprint()) == 16
    int(one.fingerprint(), 16)


def test_fingerprints_do_not_depend_on_the_values_or_the_process() -> None:
    layout = Layout.of([np.zeros((2, 3), F4)], ["w"])
    assert layout.fingerprint() == Layout.of([np.ones((2, 3), F4)], ["w"]).fingerprint() == "3b4f326772acb4f5"
    moved = replace(layout, segments=(replace(layout.segments[0], offset=1),))
    assert moved.fingerprint() != layout.fingerprint()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=8))
def test_padded_pieces_begin_on_cache_lines_with_room_for_a_mark_before_the_next(
    shapes: list[tuple[int, int]],
) -> None:
    layout = laid_out(
        ((str(index), shape, "float32", index) for index, shape in enumerate(shapes)), padded=True
    )
    assert [segment.shape for segment in layout.segments] == shapes
    assert all(segment.offset % 16 == 0 and segment.tied_to is None for segment in layout.segments)
    marks = layout.marks().tolist() if shapes else []
    ends = [*(segment.offset for segment in layout.segments[1:]), layout.size]
    for segment, mark, end in zip(layout.segments, marks, ends, strict=False):
        assert segment.place.stop <= mark < end


def test_pieces_of_one_memory_share_the_first_one_s_place() -> None:
    layout = laid_out([("a", (2,), "float32", "x"), ("b", (3,), "float16", "y"), ("c", (2,), "float32", "x")])
    assert layout == Layout(
        (
            Segment("a", (2,), "float32", 0, 2),
            Segment("b", (3,), "float16", 2, 3),
            Segment("c", (2,), "float32", 0, 2, tied_to="a"),
        ),
        5,
    )
