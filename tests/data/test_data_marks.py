"""Marks of data are equal for the same samples, and for no others."""

from __future__ import annotations

import numpy as np
import pytest

from nnlo_common.data._data_marks import all_same, as_values, mark_of

X = np.arange(60, dtype="f4").reshape(20, 3)


class Holder:
    """A data set of one's own."""

    def __init__(self, data):
        self.data, self.itself, self.transform = data, self, str.lower


def attributes(data):
    return [*getattr(data, "__dict__", {}).values()]


def mark(*data):
    return mark_of(*data, parts=attributes)


@pytest.mark.parametrize(
    "wrapped", [lambda x: x, lambda x: [x, x], lambda x: {"x": x}, Holder, lambda x: Holder([Holder(x)])]
)
def test_a_mark_tells_data_apart(wrapped):
    assert mark(wrapped(X)) == mark(wrapped(X.copy())) > 0
    others = [X[::2], X[1::2], X + 1, X.astype("f8"), X.reshape(-1)]
    assert len({mark(wrapped(one)) for one in [X, *others]}) == 1 + len(others)


def test_what_cannot_be_seen_has_no_mark():
    unseen = [None, iter([X]), (x for x in [X]), object(), Holder("a file"), np.array([object()] * 3)]
    assert [mark(one) for one in unseen] == [0] * len(unseen)


def test_rows_elsewhere_are_brought_here():
    class Elsewhere:
        shape = (4,)

        def __getitem__(self, rows):
            return "rows"

    data = Elsewhere()
    assert mark_of(data, parts=attributes, on_host=lambda rows: np.arange(4)) > 0
    assert mark_of(data, parts=attributes, on_host=lambda rows: np.array([None])) == 0


class Scalar:
    """A number in an array without dimensions, whose shape is true, as TensorFlow's are."""

    class Shape(tuple):
        __slots__ = ()

        def __bool__(self):
            return True

    def __init__(self, value):
        self.shape, self.value = self.Shape(), value

    def __getitem__(self, rows):
        raise AssertionError("there are no rows")


def test_numbers_without_dimensions_tell_parts_apart():
    def shard(index):
        on_host = lambda one: one.value if isinstance(one, Scalar) else one  # noqa: E731
        return mark_of([X, Scalar(index)], parts=attributes, on_host=on_host)

    assert shard(0) == shard(0) > 0
    assert shard(0) != shard(1)
    assert mark(np.array(3)) == 0
    assert mark(X, np.array(3)) != mark(X, np.array(4))


def test_means_tell_whether_all_marks_are_equal():
    def means(*marks):
        parts = [as_values(one) for one in marks]
        return {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]}

    largest = 2**22 - 1
    for workers in (2, 3, 7, 1000):
        assert all_same(means(*[largest] * workers))
        assert not all_same(means(*[largest] * (workers - 1), largest - 1))
    assert not all_same(means(0, 0))
