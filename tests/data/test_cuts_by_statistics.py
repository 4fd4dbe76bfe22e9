"""Cuts use what a Parquet file says of its row groups: where no sample can pass, none is read."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from nnlo_common import ConfigurationError
from nnlo_common.data import FileSource
from nnlo_common.data._selection import Selection

pa = pytest.importorskip("pyarrow", reason="the environment for MPICH has no pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
from nnlo_common.data.formats import _arrow  # noqa: E402 - it needs pyarrow when used only

GROUPS, ROWS = 5, 70_000  # a group is longer than what is looked at together


@pytest.fixture
def path(tmp_path):
    draw = np.random.default_rng(0)
    run = np.repeat(np.arange(GROUPS), ROWS).astype("i4")
    pt = (run * 10 + draw.random(GROUPS * ROWS)).astype("f4")
    pt[::ROWS] = np.nan
    table = pa.table({"pt": pt, "run": run, "x": draw.random(GROUPS * ROWS).astype("f4")})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=ROWS)
    return str(tmp_path / "a.parquet"), pt, run


@pytest.mark.parametrize(
    ("cut", "passes", "groups"),
    [
        ("pt > 30", lambda pt, run: pt > 30, {3, 4}),
        ("20.5 >= pt", lambda pt, run: pt <= 20.5, {0, 1, 2}),
        ("10 < pt < 11 and run == 1", lambda pt, run: (pt > 10) & (pt < 11) & (run == 1), {1}),
        ("run == 2 and pt > -5", lambda pt, run: (run == 2) & (pt > -5), {2}),
        ("pt > 30 or run == 0", lambda pt, run: (pt > 30) | (run == 0), {0, 1, 2, 3, 4}),
        ("not pt > 30", lambda pt, run: ~(pt > 30), {0, 1, 2, 3, 4}),
        ("run != 2", lambda pt, run: run != 2, {0, 1, 2, 3, 4}),
        ("abs(pt) > 30", lambda pt, run: abs(pt) > 30, {0, 1, 2, 3, 4}),
    ],
)
def test_row_groups_that_cannot_pass_are_not_read(path, monkeypatch, cut, passes, groups):
    file, pt, run = path
    decoded = set()
    decode = _arrow._ParquetTable.decode

    def noted(self, name, piece):
        decoded.add(piece)
        return decode(self, name, piece)

    monkeypatch.setattr(_arrow._ParquetTable, "decode", noted)
    source = FileSource(file, features="pt", select=cut, cache="none")
    expected = np.flatnonzero(passes(pt, run))
    assert len(source) == len(expected)
    # A piece that is looked at together may reach into the group before or after.
    assert groups <= decoded <= {one + by for one in groups for by in (-1, 0, 1)}
    np.testing.assert_array_equal(np.asarray(source.take(0, len(source))[0]), pt[expected])
    source.close()


@pytest.mark.parametrize(
    ("cut", "numbers"),
    [
        ("x <= 0.1", np.array([0.1, 0.5, 0.7], "f4")),
        ("x == 0.7", np.array([0.1, 0.5, 0.7], "f4")),
        ("0.7 <= x", np.array([0.1, 0.5, 0.7], "f4")),
        ("x < -0.1", -np.array([0.1, 0.5, 0.7], "f4")),
        ("x == -0.7", -np.array([0.1, 0.5, 0.7], "f4")),
        ("-0.7 >= x", -np.array([0.1, 0.5, 0.7], "f4")),
        ("-0.5 < x <= -0.1", -np.array([0.1, 0.5, 0.7], "f4")),
        ("x < 1e39", np.array([0.1, 0.5, 0.7], "f4")),
        ("x <= 9007199254740992.0", np.array([2**53 + 1, 2**54, 2**55])),
        ("x < 300", np.array([1, 2, 255], "u1")),
        ("x > -1", np.array([1, 2, 3], "u8")),
    ],
)
def test_bounds_are_compared_as_the_numbers_are(tmp_path, cut, numbers):
    x = np.repeat(numbers, ROWS)
    pq.write_table(pa.table({"x": x}), tmp_path / "a.parquet", row_group_size=ROWS)
    np.savez(tmp_path / "a.npz", x=x)
    found = []
    for file in ("a.parquet", "a.npz"):
        with closing(FileSource(str(tmp_path / file), features="x", select=cut, cache="none")) as source:
            found.append(len(source))
    assert found[0] == found[1]


@pytest.mark.parametrize("sign", ["", "-", "+"])
def test_a_number_with_a_sign_is_rounded_like_one_without(sign):
    x = np.array([float(f"{sign}0.1"), 0.5], "f4")
    with closing(FileSource({"x": x}, features="x", select=f"x == {sign}0.1")) as source:
        assert len(source) == 1


def test_a_cut_that_nothing_passes_is_refused_without_reading(path, monkeypatch):
    monkeypatch.setattr(_arrow._ParquetTable, "decode", lambda *_: pytest.fail("it reads"))
    with pytest.raises(ConfigurationError, match=f"none of {GROUPS * ROWS} samples fulfils it"):
        FileSource(path[0], features="pt", select="pt > 1000", cache="none")


def test_formats_without_statistics_are_read(tmp_path):
    np.savez(tmp_path / "a.npz", pt=np.arange(10.0))
    source = FileSource(str(tmp_path / "a.npz"), features="pt", select="pt > 6", cache="none")
    assert len(source) == 3
    source.close()


def test_only_what_each_sample_must_fulfil_counts():
    limits = Selection(
        "a > 1 and (b < 2 or c > 3) and 4 >= d and -5 < e < 6 and not f > 7 and g != 8 and h > i"
    )
    assert [(name, kind.__name__, limit) for name, kind, limit in limits._limits] == [
        ("a", "Gt", 1),
        ("d", "LtE", 4),
        ("e", "Gt", -5),
        ("e", "Lt", 6),
    ]
