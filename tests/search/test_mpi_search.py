"""Searches over blocks of ranks under a real mpiexec: 1 coordinator, 2 blocks of 2."""

from __future__ import annotations

import pytest

from nnlo_common.base._signals import EXIT_CODE
from tests.helpers.jobs import mpiexec
from tests.helpers.pages import code
from tests.helpers.paths import PROGRAMS

pytest.importorskip("optuna", reason="the environment for MPICH has no Optuna")
from tests.chaos.search_strikes import survive

PROGRAM = PROGRAMS / "tune_all.py"
pytestmark = [pytest.mark.slow, pytest.mark.mpi, pytest.mark.framework("torch")]


def lines(*cases, ranks=5):
    done = mpiexec(ranks, PROGRAM, *cases, timeout_s=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.extended  # Keras does so in `make test`
def test_torch_trains_in_blocks_and_one_failed_rank_costs_one_trial_only():
    plain, pruned, *faulty, _ = lines("plain", "pruned", "faults", "lockstep", "searchers")
    assert plain.startswith("plain: ['COMPLETE', 'COMPLETE', 'COMPLETE', 'COMPLETE'")
    assert "PRUNED" in pruned
    assert len(faulty) == 4


@pytest.mark.extended
def test_a_failed_rank_of_a_group_costs_one_trial_only():
    assert len(lines("grouped", ranks=7)) == 5


@pytest.mark.extended
def test_sixty_trials_in_one_process_leave_nothing_behind():
    assert lines("many") == []


def test_two_folds_side_by_side_go_on_after_a_signal(tmp_path):
    program, journal = PROGRAM.with_name("tune_folds.py"), tmp_path / "search.jsonl"
    ended = mpiexec(5, program, "interrupted", journal, timeout_s=60)
    assert ended.returncode == EXIT_CODE, ended.stderr
    assert "Traceback" not in ended.stderr
    again = f"Rerun the same command to resume from the journal {str(journal)!r}."
    assert ended.stderr.count(f"A signal ended the search. {again}") == 1  # of five ranks and two blocks
    begun = journal.read_text()
    assert begun.count('"state": "COMPLETE"') == 2
    done = mpiexec(5, program, "whole", journal, timeout_s=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(["COMPLETE"] * 4)


@pytest.mark.extended
def test_a_search_that_is_killed_three_times_has_each_trial_once(tmp_path):
    survive(0, 3, tmp_path)


def test_the_guide_to_searches_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = code("python", "docs/searches.md", "In a script")
    assert len(blocks) == 4
    exec(compile("\n".join(blocks), "searches.md", "exec"), {})


@pytest.mark.extended
@pytest.mark.framework("torch")
def test_the_trainings_of_the_guide_save_on_several_ranks(tmp_path):
    setup, *_, elastic, _ = code("python", "docs/searches.md", "In a script")
    program = tmp_path / "search.py"
    begin = f"import os\n\nos.chdir({str(tmp_path)!r})\n"
    search = elastic.replace("block_size=3", "block_size=2")  # one block of three ranks
    assert search != elastic
    program.write_text(begin + setup.partition("study =")[0] + search)
    done = mpiexec(3, program)
    assert done.returncode == 0, done.stderr
    assert "RuntimeWarning" not in done.stderr
    for trial in range(4):
        assert [*tmp_path.glob(f"search/{trial:04}/checkpoint-*")], f"trial {trial} has saved nothing"
