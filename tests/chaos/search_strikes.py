"""Kills all of a search at random moments, and judges what the same command makes of it.

python -m tests.chaos.search_strikes SEED COUNT
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import optuna
import psutil

from tests.helpers.jobs import launcher, starting

__all__ = ["survive"]

RANKS = 5
_END_S, _LATEST_S = 90.0, 3.0
# So that the search has not ended before the last strike: in three seconds about as many are finished.
_TRIALS_PER_STRIKE = 80


def survive(seed: int, count: int, folder: Path) -> list[int]:
    """Strike so often, then let the search end; return how many trials had finished at each strike.

    Raises:
        AssertionError: a trial is missing, was counted twice, or was trained again although it had finished.
    """
    draw, seen, trials = random.Random(seed), [], count * _TRIALS_PER_STRIKE
    for _ in range(count):
        finished, begun = _finished(folder), _begun(folder)
        _job(folder, trials, after_s=draw.uniform(0.0, _LATEST_S))
        assert not finished & set(_begun(folder)[len(begun) :]), "what had finished was trained again"
        assert finished <= _finished(folder), "a finished trial was lost"
        seen.append(len(_finished(folder)))
    _job(folder, trials, after_s=None)
    lines = _lines(folder)
    states = [line["state"] for line in lines if "state" in line]
    assert states == ["COMPLETE"] * trials, states
    assert len(_finished(folder)) == trials, "a trial was counted twice"
    _check_export(folder, trials)
    return seen


def _job(folder: Path, trials: int, after_s: float | None) -> None:
    """Run the search to its end, or kill all of its processes after that time."""
    program = Path(__file__).with_name("search_job.py")
    command = [launcher(), "-n", str(RANKS), sys.executable, program, folder, str(trials)]
    before = _inode(folder)
    with (folder / "text").open("w+") as text, starting(command, text) as process:
        if after_s is not None:
            _await_start(folder, process, before)
        try:
            status = process.wait(_END_S if after_s is None else after_s)
        except subprocess.TimeoutExpired:
            assert after_s is not None, (folder / "text").read_text()
            for one in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
                one.kill()
            return
        assert status == 0, (folder / "text").read_text()


def _await_start(folder: Path, process: subprocess.Popen[str], before: int) -> None:
    """Wait until the coordinator has written its journal anew, or is about to."""
    limit_s = time.monotonic() + _END_S
    while _inode(folder) == before and process.poll() is None:
        assert time.monotonic() < limit_s, (folder / "text").read_text()
        time.sleep(5e-3)


def _inode(folder: Path) -> int:
    path = folder / "search.jsonl"
    return path.stat().st_ino if path.exists() else 0


def _lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "search.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _finished(folder: Path) -> set[str]:
    """The rates of the trials that are in the journal."""
    return {repr(line["params"]["rate"][0]) for line in _lines(folder) if "state" in line}


def _begun(folder: Path) -> list[str]:
    """The rates of the trials that were begun, one after another."""
    path = folder / "begun"
    return path.read_text().split() if path.exists() else []


def _check_export(folder: Path, trials: int) -> None:
    backend = optuna.storages.journal.JournalFileBackend(str(folder / "search.log"))
    storage = optuna.storages.JournalStorage(backend)
    (name,) = optuna.get_all_study_names(storage)
    found = optuna.load_study(study_name=name, storage=storage).trials
    assert [trial.state.name for trial in found] == ["COMPLETE"] * trials, (folder / "text").read_text()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        print(survive(int(sys.argv[1]), int(sys.argv[2]), Path(made)))
