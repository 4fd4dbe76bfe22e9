"""The study in a file of Optuna's, as it goes, whatever is wrong with the file."""

from __future__ import annotations

import logging
import sqlite3
import threading

import pytest

from tests.helpers.threads import no_new_threads, ranks

pytest.importorskip("optuna", reason="the environment for MPICH has no Optuna")
import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from nnlo_common import ConfigurationError
from nnlo_common.search import optimize

optuna.logging.set_verbosity(optuna.logging.WARNING)


def objective(trial):
    x, kind = trial.suggest_float("x", 1e-3, 1, log=True), trial.suggest_categorical("kind", ["a", None])
    trial.report(x, 0)
    trial.set_user_attr("seen", [x, kind])
    if trial.number == 2:
        raise ValueError("in trial 2")
    return x


def exported(path, **options):
    with no_new_threads():
        return optimize(
            optuna.create_study(study_name="mine"), objective, sampler="random", export=path, **options
        )


def loaded(path, name="mine"):
    """Optuna's own view of a file, closed again."""
    if path.suffix == ".log":
        return optuna.load_study(
            study_name=name, storage=JournalStorage(JournalFileBackend(str(path)))
        ).trials
    storage = optuna.storages.RDBStorage(f"sqlite:///{path}")
    trials = optuna.load_study(study_name=name, storage=storage).trials
    storage.remove_session()
    storage.engine.dispose()
    return trials


def facts(trials):
    return [
        (one.number, one.state, one.values, one.params, one.user_attrs, one.intermediate_values)
        for one in trials
    ]


@pytest.fixture(params=["study.db", "study.log"])
def path(request, tmp_path):
    return tmp_path / request.param


def test_optuna_loads_what_was_exported(path):
    study = exported(path, n_trials=5)
    assert facts(loaded(path)) == facts(study.trials)
    assert len(study.trials) == 5


def test_running_trials_are_there_while_they_run(path):
    seen = []

    def patient(trial):
        x = trial.suggest_float("x", 0, 1)
        for _ in range(200):
            if path.exists() and not seen:
                try:
                    states = [one.state.name for one in loaded(path)]
                except Exception:  # amid its first lines
                    states = []
                if trial.number == 1 and states == ["COMPLETE", "RUNNING"]:
                    seen.append(states)
            if seen or trial.number == 0:
                break
            threading.Event().wait(0.05)
        return x

    optimize(optuna.create_study(study_name="mine"), patient, n_trials=2, sampler="random", export=path)
    assert seen
    assert [one.state.name for one in loaded(path)] == ["COMPLETE", "COMPLETE"]


def test_the_coordinator_of_blocks_exports(path):
    with ranks(3) as cluster:
        study, *_ = cluster.run(
            lambda world: optimize(
                optuna.create_study(study_name="mine"), objective, n_trials=6, export=path, world=world
            )
        )
    assert facts(loaded(path)) == facts(study.trials)


def test_a_search_that_goes_on_takes_its_own_place_and_another_leaves_it(path, tmp_path):
    journal = tmp_path / "search.jsonl"
    exported(path, n_trials=3, journal=journal)
    study = exported(path, n_trials=5, journal=journal)
    assert facts(loaded(path)) == facts(study.trials)
    exported(path, n_trials=1)
    assert len(loaded(path, "mine (2)")) == 1
    other = tmp_path / "other.jsonl"
    exported(path, n_trials=2, journal=other)
    exported(path, n_trials=4, journal=other)
    assert len(loaded(path, "mine (3)")) == 4
    assert facts(loaded(path)) == facts(study.trials)


def test_a_damaged_file_is_set_aside_and_told_of(path, caplog):
    path.write_bytes(b"no study\n" * 100)
    with caplog.at_level(logging.WARNING):
        study = exported(path, n_trials=3)
    assert facts(loaded(path)) == facts(study.trials)
    assert path.with_name(f"{path.name}.damaged").read_bytes().startswith(b"no study")
    assert "moved the file to" in caplog.text
    assert "The search does not depend on it" in caplog.text


def test_a_locked_file_is_told_of_and_the_search_ends(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("nnlo_common.search._export._LOCKED_S", 0.1)
    path = tmp_path / "study.db"
    exported(path, n_trials=1)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("begin exclusive")
    with caplog.at_level(logging.WARNING):
        assert len(exported(path, n_trials=3).trials) == 3
    other.execute("rollback")
    other.close()
    assert "database is locked" in caplog.text
    assert not path.with_name("study.db.damaged").exists()


def test_an_end_that_says_nothing_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"export=.*txt'.*use \.db or \.sqlite3 for SQLite, \.log"):
        exported(tmp_path / "study.txt", n_trials=1)
