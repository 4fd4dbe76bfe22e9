"""A search within a time: what is begun, what is broken off, what the same command goes on with."""

from __future__ import annotations

import datetime
import os
import re
import signal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("optuna", reason="the environment for MPICH has no Optuna")
import optuna
from optuna.trial import TrialState

from nnlo_common import ConfigurationError
from nnlo_common.search import optimize
from nnlo_common.search._journal import Journal
from nnlo_common.search._search_messages import Done, End, Halt, ParameterRequest, Start
from nnlo_common.search._study_search import StudySearch
from nnlo_common.search.coordinator._time_left import TimeLeft, end_of
from nnlo_common.search.coordinator._trial_results import ERROR, SECONDS
from tests.helpers.paths import DOCS
from tests.helpers.searches import study_coordinator

optuna.logging.set_verbosity(optuna.logging.ERROR)


class Clock:
    """A time that passes when it is told to."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(1, 20), min_size=1, max_size=12), st.integers(1, 3), st.floats(5, 60))
@example(durations=[2.5, 2.5], blocks=1, end_s=5.0)  # the last ends when the time is up, to the bit
def test_only_trials_that_may_end_in_time_are_begun(durations, blocks, end_s):
    """Of trials that never take longer than those before none is broken off, and no time is wasted."""
    durations = sorted(durations, reverse=True)
    clock, study = Clock(), optuna.create_study(sampler=optuna.samplers.RandomSampler())
    machine = study_coordinator(
        study, blocks=blocks, n_trials=len(durations), time_left=TimeLeft(end_s), clock=clock
    )
    posts, ends = machine.begin(), {}
    while not machine.over:
        for post in posts:
            if isinstance(post.message, Start):
                ends[post.team] = (clock.now_s + durations[post.message.trial], post.message.run)
            assert not isinstance(post.message, Halt) or ends[post.team][0] >= end_s
        team = min(ends, key=lambda team: ends[team][0])
        clock.now_s, run = ends.pop(team)
        halts = machine.look()
        if halts:  # only what was begun without anything to go by can be too long
            assert run < blocks
        posts = machine.handle(team, Done(run, "halted" if machine.interrupted else "complete", (1.0,)))
    done = [trial for trial in study.trials if trial.state is TrialState.COMPLETE]
    assert len(done) == len(durations) or clock.now_s + durations[0] > end_s


def test_those_before_the_job_was_started_again_count_as_observed(tmp_path):
    path = tmp_path / "search.jsonl"
    clock = Clock()

    def objective(trial):
        clock.now_s += 30.0
        return trial.suggest_float("x", 0, 1)

    def searched(end_s):
        study = optuna.create_study()
        StudySearch(
            study,
            objective,
            n_trials=4,
            folds=1,
            sampler="random",
            seed=0,
            retries=0,
            failures="ignore",
            target=None,
            until=end_s,
            journal=path,
            clock=clock,
        ).alone()
        return study

    assert [trial.user_attrs[SECONDS] for trial in searched(70.0).trials] == [30.0, 30.0]
    assert len(searched(20.0).trials) == 2, "a trial was begun that could not end in time"
    assert len(searched(61.0).trials) == 4


def test_what_runs_when_the_time_is_up_is_trained_again_by_the_same_command(tmp_path):
    path = tmp_path / "search.jsonl"
    clock, study = Clock(), optuna.create_study()
    with_journal = Journal(path, study)
    machine = study_coordinator(
        study, blocks=2, n_trials=5, time_left=TimeLeft(10.0), clock=clock, record=with_journal
    )
    runs = [post.message.run for post in machine.begin()]
    x = optuna.distributions.distribution_to_json(optuna.distributions.FloatDistribution(0, 1))
    chosen = [
        machine.handle(team, ParameterRequest(run, "x", x))[0].message.value for team, run in enumerate(runs)
    ]
    machine.think()
    clock.now_s = 6.0
    machine.handle(0, Done(0, "complete", (1.0,)))
    clock.now_s = 11.0
    assert [type(post.message) for post in machine.look()] == [Halt]
    assert machine.look() == []
    posts = machine.handle(1, Done(1, "halted", error="broken off"))
    assert [type(post.message) for post in posts] == [End, End]
    with_journal.close()
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "FAIL", "FAIL"]
    seen = []
    again = optimize(
        optuna.create_study(),
        lambda trial: seen.append(trial.suggest_float("x", 0, 1)) or 0.0,
        n_trials=5,
        journal=path,
        sampler="random",
    )
    assert seen[0] == chosen[1]
    assert [trial.state for trial in again.trials] == [TrialState.COMPLETE] * 5


def test_a_signal_ends_the_search_with_the_status_for_again(tmp_path):
    path, study = tmp_path / "search.jsonl", optuna.create_study()

    def objective(trial):
        x = trial.suggest_float("x", 0, 1)
        if trial.number == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
            trial.report(0.0, 0)
            raise AssertionError("was not broken off")
        return x

    with pytest.raises(SystemExit, match="75"):
        optimize(study, objective, n_trials=6, journal=path, sampler="random")
    assert "a signal (SIGTERM or SIGUSR1) has come" in study.trials[2].user_attrs[ERROR]
    again = optimize(
        optuna.create_study(), lambda trial: trial.suggest_float("x", 0, 1), n_trials=6, journal=path
    )
    assert len(again.trials) == 6
    assert [trial.params for trial in again.trials[:3]] == [trial.params for trial in study.trials[:3]]


def test_times_are_taken_in_three_ways():
    when = datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC)
    assert end_of(when, 0.0) == when.timestamp()
    assert end_of(60, 5.0) == 65.0
    assert end_of(None, 5.0) is None


@pytest.mark.parametrize("until", ["tomorrow", -3, True, "slurm"])
def test_what_is_no_time_is_refused(until, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    with pytest.raises(ConfigurationError, match=f"until={until!r}"):
        optimize(optuna.create_study(), lambda trial: 0.0, n_trials=1, until=until)


def test_a_job_of_slurm_that_was_not_told_its_end_is_told_how_to_learn_it(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    with pytest.raises(ConfigurationError) as caught:
        end_of("slurm", 0.0)
    (line,) = re.findall(r"`(export .*)` into the job script", str(caught.value))
    assert f"```bash\n{line}\n```" in (DOCS / "clusters.md").read_text()
