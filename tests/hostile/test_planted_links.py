"""Links that somebody has planted where nnlo writes: their targets keep their content."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("optuna", reason="the environment for MPICH has no Optuna")
import optuna

from nnlo_common import ConfigurationError
from nnlo_common.base._file_access import (
    append_file,
    hold,
    hold_lock,
    new_file,
    read_whole,
    release_lock,
    remove_tree,
    whole,
    whole_file,
    write_whole,
)
from nnlo_common.commands.train._run_folder import write_json
from nnlo_common.commands.tune._search_folder import drop_models, inspect_folder
from nnlo_common.search._export import Export
from nnlo_common.search._journal import Journal
from nnlo_common.training._participant import Recording
from nnlo_common.training.report._facts_writer import FactsFile
from nnlo_common.training.report._trace_file import Trace

MINE = "nobody may change this\n" * 20


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """Return a file that must keep its content."""
    path = tmp_path / "mine.txt"
    path.write_text(MINE)
    return path


class OneShard:
    shard, handled = 0, ((1, "push"),)


def by_name(path: Path) -> None:
    with whole(path) as fresh:
        fresh.write_text("new")


def by_stream(path: Path) -> None:
    with whole_file(path) as file:
        file.write(b"new")


def record(path: Path) -> None:
    Recording(path, OneShard()).write()  # type: ignore[arg-type]


def save_by_torch(path: Path) -> None:
    import torch

    import nnlo_torch

    model = torch.nn.Linear(1, 1)
    nnlo_torch.Downpour(torch.optim.SGD(model.parameters(), lr=0.1)).save({"a": 1}, path)


WRITERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "whole": (by_name, "a.part.json"),
    "whole_file": (by_stream, "a.part.json"),
    "write_whole": (lambda path: write_whole(path, "new"), "a.part.json"),
    "write_json": (lambda path: write_json(path, {"a": 1}), "a.part.json"),
    "log_order": (record, "a.json.part"),
    "optimizer.save": (save_by_torch, "a.part.json"),
}


@pytest.mark.parametrize(
    ("write", "part"),
    [
        pytest.param(
            *one, marks=[pytest.mark.framework("torch")] if name == "optimizer.save" else [], id=name
        )
        for name, one in WRITERS.items()
    ],
)
def test_a_whole_file_takes_the_place_of_links(
    tmp_path: Path, mine: Path, write: Callable[[Path], object], part: str
) -> None:
    path = tmp_path / "out" / "a.json"
    path.parent.mkdir()
    path.symlink_to(mine)
    path.with_name(part).symlink_to(mine)
    write(path)
    assert mine.read_text() == MINE
    assert [one.name for one in path.parent.iterdir()] == ["a.json"]
    assert not path.is_symlink()


def test_a_link_that_takes_the_place_of_the_new_file_is_not_kept(tmp_path: Path, mine: Path) -> None:
    def exchange() -> None:
        with whole(tmp_path / "a.json") as fresh:
            fresh.unlink()
            fresh.symlink_to(mine)

    with pytest.raises(OSError, match="symbolic link"):
        exchange()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["mine.txt"]


def test_the_lock_of_a_folder_is_no_link(tmp_path: Path, mine: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "in-use").symlink_to(mine)
    with pytest.raises(
        ConfigurationError, match=r"in-use cannot be opened \(it is a symbolic link.*remove it"
    ):
        hold(run)
    assert mine.read_text() == MINE
    (run / "in-use").unlink()
    os.mkfifo(run / "in-use")
    with pytest.raises(ConfigurationError, match="it is a pipe, not a regular file"):
        hold(run)


def test_the_owner_of_a_lock_is_not_written_into_a_file_with_another_name(tmp_path: Path, mine: Path) -> None:
    lock = tmp_path / "in-use"
    lock.hardlink_to(mine)
    hold_lock(lock, "training", "folder")
    release_lock(lock)
    assert mine.read_text() == MINE


def journal(path: Path) -> None:
    study = optuna.create_study(study_name="a")
    Journal(path, study).close()


def test_the_lock_of_a_journal_is_no_link(tmp_path: Path, mine: Path) -> None:
    (tmp_path / ".a.jsonl.in-use").symlink_to(mine)
    with pytest.raises(ConfigurationError, match="symbolic link"):
        journal(tmp_path / "a.jsonl")
    assert mine.read_text() == MINE


def trace(path: Path) -> None:
    Trace(path, 0, "worker 0")


def log(path: Path) -> None:
    FactsFile(path.parent, 0).add("end")


def export(path: Path) -> None:
    Export(path.with_suffix(".log"), optuna.create_study(study_name="a")).close()


NAMED: dict[str, tuple[Callable[[Path], object], str]] = {
    "timeline": (trace, "a.json"),
    "facts": (log, "ranks/facts.rank0.jsonl"),
    "journal": (journal, "a.json"),
    "export": (export, "a.log"),
}


@pytest.mark.parametrize(("write", "name"), NAMED.values(), ids=NAMED)
def test_outputs_that_grow_are_refused_behind_a_link(
    tmp_path: Path, mine: Path, write: Callable[[Path], object], name: str
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).symlink_to(mine)
    with pytest.raises(ConfigurationError, match=r"\(it is a symbolic link, which is not followed\)"):
        write(tmp_path / "a.json")
    assert mine.read_text() == MINE


def test_a_folder_of_ranks_that_is_a_link_is_refused(tmp_path: Path, mine: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/ranks").symlink_to(mine.parent)
    with pytest.raises(ConfigurationError, match=r"ranks is a symbolic link, which is not followed\)"):
        FactsFile(tmp_path / "run", 0)
    assert [one.name for one in mine.parent.iterdir() if "rank" in one.name] == []


def test_a_timeline_never_follows_a_link_that_comes_later(
    tmp_path: Path, mine: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.json"
    one = Trace(path, 0, "worker 0")
    path.unlink()
    one.count("queue", 1.0)
    path.symlink_to(mine)
    one.flush()
    assert "symbolic link" in caplog.text
    assert mine.read_text() == MINE


def test_facts_never_follow_a_link_that_comes_later(
    tmp_path: Path, mine: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = FactsFile(tmp_path, 0)
    (tmp_path / "ranks/facts.rank0.jsonl").symlink_to(mine)
    one.add("end")
    assert "symbolic link" in caplog.text
    assert mine.read_text() == MINE


# --- searches ----------------------------------------------------------------------------------------------


def search(folder: Path) -> Path:
    trials = folder / "run" / "trials"
    trials.mkdir(parents=True)
    return trials


def test_an_interrupted_trial_that_is_a_link_is_refused_and_its_target_kept(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    (theirs / "fold1").mkdir(parents=True)
    (theirs / "fold1" / "history.json").write_text("{}")
    trials = search(tmp_path)
    (trials / "0001").symlink_to(theirs)
    (trials / "0001.json").write_text(json.dumps({"parameters": {}, "seed": 1}))
    with pytest.raises(ConfigurationError, match=r"has a symbolic link in it, .*0001, in place of a folder"):
        inspect_folder(trials.parent, goes_on=True)
    assert (theirs / "fold1" / "history.json").exists()


def test_only_trials_are_removed_from_a_search(tmp_path: Path) -> None:
    trials = search(tmp_path)
    (trials / "0001").mkdir()
    (trials / "0002").mkdir()
    (trials / "0002.json").write_text("[]")
    (trials / ".json").write_text("null")  # the name of this trial would be empty: the folder of all
    (trials / "notes.txt").write_text("mine")
    journal_line = {"trial": 0, "state": "COMPLETE", "user": {"nnlo:folder": "0001"}}
    (trials.parent / "journal.jsonl").write_text(json.dumps(journal_line) + "\n")
    found = inspect_folder(trials.parent, goes_on=False)
    assert found.taken == ("0001",)
    assert sorted(one.name for one in trials.iterdir()) == [".json", "0001", "notes.txt"]


@pytest.mark.parametrize("name", ["../../theirs", "/theirs", "..", "", "0001/../../../theirs"])
def test_models_are_removed_only_from_trials(tmp_path: Path, name: str) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "weights.pt").write_text("theirs")
    trials = search(tmp_path)
    (trials.parent / "weights.pt").write_text("mine")
    (trials / "0001").mkdir()
    drop_models(trials.parent, name.replace("/theirs", str(theirs)) if name == "/theirs" else name)
    (trials / "0002").symlink_to(theirs)
    drop_models(trials.parent, "0002")
    (trials / "0001" / "fold1").symlink_to(theirs)
    drop_models(trials.parent, "0001")
    assert (theirs / "weights.pt").exists()
    assert (trials.parent / "weights.pt").exists()


# --- the functions themselves ----------------------------------------------------------------------------


def test_a_new_file_replaces_a_link_and_refuses_a_folder(tmp_path: Path, mine: Path) -> None:
    (tmp_path / "a").symlink_to(mine)
    with new_file(tmp_path / "a") as file:
        file.write(b"new")
    assert (tmp_path / "a").read_bytes() == b"new"
    assert mine.read_text() == MINE
    (tmp_path / "b").mkdir()
    with pytest.raises(IsADirectoryError):
        new_file(tmp_path / "b")


def test_nothing_is_appended_to_links_pipes_and_devices(tmp_path: Path, mine: Path) -> None:
    (tmp_path / "link").symlink_to(mine)
    os.mkfifo(tmp_path / "pipe")
    for path, told in (
        (tmp_path / "link", "link"),
        (tmp_path / "pipe", "pipe"),
        (Path("/dev/null"), "device"),
    ):
        with pytest.raises(OSError, match=told):
            append_file(path)


def test_a_link_is_removed_without_its_target(tmp_path: Path, mine: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for target in (mine, theirs, tmp_path / "nothing"):
        (tmp_path / "link").symlink_to(target)
        remove_tree(tmp_path / "link")
        assert not (tmp_path / "link").is_symlink()
    assert mine.exists()
    assert theirs.exists()


def test_a_file_that_grows_is_read_up_to_the_limit_only(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 11)
    assert read_whole(tmp_path / "a", 11) == b"x" * 11
    with pytest.raises(OSError, match="it has more than 10 bytes"):
        read_whole(tmp_path / "a", 10)
    assert b"python" in read_whole("/proc/self/cmdline", 100_000)  # its size is 0 in the file system
    with pytest.raises(OSError, match="more than 3 bytes"):
        read_whole("/proc/self/cmdline", 3)
