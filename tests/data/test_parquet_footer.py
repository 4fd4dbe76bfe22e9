"""What the end of a Parquet file says is read as pyarrow reads it, and damage is refused in one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nnlo_common import ConfigurationError
from nnlo_common.data.formats._parquet_footer import Footer

pa = pytest.importorskip("pyarrow", reason="the environment for MPICH has no pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

N = np.arange(100)
COLUMNS = {
    "b": N > 40,
    "i1": (N - 50).astype("i1"),
    "i2": (N * -7).astype("i2"),
    "i4": (N * 70_000).astype("i4"),
    "i8": N * -(2**40),
    "u1": (N + 150).astype("u1"),
    "u2": (N + 65_000).astype("u2"),
    "u4": (N + 2**31).astype("u4"),
    "u8": (N - 50).astype("u8") + np.uint64(2**63),
    "f4": (N / 7).astype("f4"),
    "f8": N / -7,
    "nan": np.where(N % 3, N, np.nan),
    "all_nan": np.full(100, np.nan, "f4"),
    "negative_zero": np.where(N % 2, -0.0, 0.0),
}


@pytest.mark.parametrize("version", ["1.0", "2.6"])
@pytest.mark.parametrize("codec", ["none", "snappy", "gzip", "zstd", "brotli", "lz4"])
def test_it_says_what_pyarrow_says(tmp_path, version, codec):
    table = pa.table({**COLUMNS, "text": [*map(str, N)], "when": N.astype("M8[us]"), "some": [None, 3] * 50})
    table = table.append_column("lists", pa.array([[1, 2]] * 100))
    table = table.append_column("inside", pa.array([{"i4": 5}] * 100))
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, compression=codec, version=version, row_group_size=37)
    with path.open("rb") as file:
        footer = Footer(file, "a.parquet", 10**6)
    metadata = pq.ParquetFile(path).metadata
    assert footer.codec == metadata.row_group(0).column(0).compression.lower()
    known = 0
    for group in range(metadata.num_row_groups):
        for index in range(metadata.num_columns):
            column = metadata.row_group(group).column(index)
            name = column.path_in_schema
            if name not in COLUMNS and name != "some":
                continue
            dtype = COLUMNS[name].dtype if name in COLUMNS else np.dtype("i8")
            statistics = column.statistics
            expected = (statistics.min, statistics.max) if statistics.has_min_max else None
            assert footer.bounds(name, group, dtype) == expected, name
            known += expected is not None
    assert known == 3 * len(COLUMNS)  # all but those of which all are NaN
    assert footer.bounds("inside.i4", 0, np.dtype("i4")) is None
    assert footer.bounds("lists", 0, np.dtype("i8")) is None


def test_files_without_statistics_or_row_groups_say_nothing(tmp_path):
    pq.write_table(pa.table({"x": N}), tmp_path / "a.parquet", write_statistics=False)
    pq.ParquetWriter(tmp_path / "b.parquet", pa.schema([("x", pa.int64())])).close()
    for name in ("a.parquet", "b.parquet"):
        with (tmp_path / name).open("rb") as file:
            footer = Footer(file, name, 10**6)
        assert footer.bounds("x", 0, np.dtype("i8")) is None
    assert not footer.codec


@pytest.mark.parametrize("end", [b"", b"PAR1", b"\0" * 4 + b"PAR1", b"\xff" * 4 + b"PAR1", b"\1\0\0\0PARE"])
def test_a_file_that_ends_otherwise_is_damaged(tmp_path, end):
    (tmp_path / "a").write_bytes(b"PAR1" + b"." * 20 + end)
    with (tmp_path / "a").open("rb") as file, pytest.raises(ConfigurationError, match="a is damaged at its"):
        Footer(file, "a", 10**6)


@pytest.mark.parametrize(
    "content",
    [
        b"\x49\x1c" * 40,  # structures inside each other
        b"\x19\xf5" + b"\xff" * 9 + b"\x7f",  # a list that is longer than the file
        b"\x19\xf1\x80\x80\x80\x01" + b"\1" * 2**21,  # a list of too many values
        b"\x15" + b"\xff" * 20,  # a number of too many bits
        b"\x18\x7f...",  # bytes that are cut off
        b"\x1f\0",  # a kind that does not exist
        b"\x49\x15\2",  # row groups that are numbers
        b"\x49\x1c\x19\x15\2",  # columns that are numbers
        b"\x15",
    ],
)
def test_damage_is_refused(tmp_path, content):
    (tmp_path / "a").write_bytes(b"PAR1" + content + len(content).to_bytes(4, "little") + b"PAR1")
    with (tmp_path / "a").open("rb") as file:
        footer = Footer(file, "a", 10**8)
    with pytest.raises(ConfigurationError, match=r"a is damaged at its end \(.+\); make it again"):
        _ = footer.codec
    with pytest.raises(ConfigurationError, match=r"a is damaged at its end \(.+\); make it again"):
        footer.bounds("x", 0, np.dtype("f4"))


_EVERY_BYTE = """
import sys
from contextlib import closing
from nnlo_common import NNLOError
from nnlo_common.data import FileSource

path, value = sys.argv[1], int(sys.argv[2])
content = open(path, "rb").read()
begin = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
read = refused = 0
for at in range(begin, len(content)):
    changed = bytearray(content)
    changed[at] = (changed[at] + value) % 256
    with open(path, "wb") as file:
        file.write(changed)
    try:
        with closing(FileSource(path, features="x", labels="n", select="n > 3")) as source:
            source.take(0, len(source))
        read += 1
    except NNLOError as error:
        assert path in str(error) or "none of 8 samples" in str(error), error
        refused += 1
print(read, refused)
"""


@pytest.mark.parametrize("value", [1, 255])
def test_no_byte_of_it_ends_the_process(tmp_path, value):
    # Statistics of a wrong length, and histograms of a wrong size, did.
    path = tmp_path / "a.parquet"
    table = pa.table({"x": [[1.0, 2.0]] * 8, "n": N[:8]})
    pq.write_table(table.cast(pa.schema([("x", pa.list_(pa.float32(), 2)), ("n", pa.int64())])), path)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _EVERY_BYTE, str(path), str(value)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    read, refused = map(int, done.stdout.split())
    assert read > 10
    assert refused > 100
