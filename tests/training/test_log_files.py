"""Log files: one for each rank, with messages and warnings as they come."""

from __future__ import annotations

import logging
import os
import warnings

import pytest

from nnlo_common import ConfigurationError
from nnlo_common.commands.train._job import Job, RankCommand, logged_to


class Command(RankCommand):
    def run(self, flags, unknown):
        raise NotImplementedError

    @property
    def advice(self):
        return ""


def lines(folder):
    (path,) = folder.iterdir()
    return path.name, path.read_text().splitlines()


def test_a_rank_keeps_more_than_it_prints(tmp_path, capsys, monkeypatch):
    shown = []
    monkeypatch.setattr(warnings, "showwarning", lambda *told: shown.append(told))
    command, folder = Command(Job()), tmp_path / "logs"
    logger, other = logging.getLogger("nnlo_torch._train"), logging.getLogger("other")
    before = logging.getLogger("nnlo_torch").level
    command.keep_logs("warning", str(folder))
    logger.debug("silent")
    logger.info("kept")
    logger.error("printed")
    other.error("of somebody else")
    warnings.showwarning("written, too", RuntimeWarning, "file.py", 3)
    command.end_logs()
    logger.error("after the command")
    host = os.uname().nodename
    name, (head, *rest) = lines(folder)
    assert name == f"rank0.{host}.log"
    assert head.startswith(f"# rank 0 of 1 on {host}, process {os.getpid()}, ")
    assert [line[24:] for line in rest] == [
        "INFO    nnlo_torch._train: kept",
        "ERROR   nnlo_torch._train: printed",
        "WARNING warnings: file.py:3: RuntimeWarning: written, too",
    ]
    assert shown == [("written, too", RuntimeWarning, "file.py", 3)]
    printed = capsys.readouterr().err
    assert "kept" not in printed
    assert "ERROR, rank 0: printed" in printed
    assert logging.getLogger("nnlo_torch").level == before


def test_a_resumed_run_adds_to_its_files(tmp_path):
    for _ in range(2):
        with logged_to(tmp_path, 3, 5, "b", asked="--log-dir"):
            logging.getLogger("nnlo_common").warning("once more")
    name, found = lines(tmp_path)
    assert name == "rank3.b.log"
    assert [line.startswith("# rank 3 of 5 on b") for line in found] == [True, False, True, False]


def test_a_folder_that_cannot_be_made_is_refused_by_the_name_of_the_option(tmp_path):
    (tmp_path / "file").write_text("")
    folder = logged_to(tmp_path / "file", 0, 1, "a", asked="--log-dir")
    with pytest.raises(ConfigurationError, match=r"^--log-dir .*file cannot write"), folder:
        pass
