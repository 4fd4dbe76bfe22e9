"""Files that are complete or absent, and folders made for them."""

from __future__ import annotations

import pytest

from nnlo_common import ConfigurationError
from nnlo_common.base._file_access import of_rank, usable, whole


def test_a_file_is_replaced_only_when_all_is_written(tmp_path):
    path = tmp_path / "result.json"
    path.write_text("old")

    def write_half():
        with whole(path) as fresh:
            fresh.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert [one.read_text() for one in tmp_path.iterdir()] == ["old"]
    with whole(path) as fresh:
        fresh.write_text("new")
    assert [one.read_text() for one in tmp_path.iterdir()] == ["new"]


def test_a_folder_is_made_and_what_cannot_be_written_is_named(tmp_path):
    path = of_rank(tmp_path / "a", "b.json", 3)
    assert usable("Report('a')", path) == path
    assert path.parent.is_dir()
    with pytest.raises(ConfigurationError, match=r"Report\('x'\) cannot write .* \(it is a folder\)"):
        usable("Report('x')", tmp_path)
