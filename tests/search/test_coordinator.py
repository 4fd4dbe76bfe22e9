"""The coordinator as a state machine: whatever the order in which blocks speak, the records are right."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("optuna", reason="the environment for MPICH has no Optuna")
import optuna
from optuna.distributions import FloatDistribution, distribution_to_json

from nnlo_common import PeerLostError, ProtocolError
from nnlo_common.search._channels import Death
from nnlo_common.search._search_messages import (
    Done,
    End,
    Halt,
    ParameterRequest,
    RequestAnswer,
    Start,
)
from nnlo_common.search.coordinator._trial_results import ERROR, FAILURE
from tests.helpers.searches import study_coordinator

optuna.logging.set_verbosity(optuna.logging.ERROR)
X = distribution_to_json(FloatDistribution(0, 1))


def coordinator(**options):
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    return study, study_coordinator(study, **options)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_interleaving_ends_with_all_trials_and_each_block_told_once(data):
    blocks, n_trials = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 8))
    retries, target = data.draw(st.integers(0, 2)), data.draw(st.sampled_from([None, 0.1]))
    study, machine = coordinator(blocks=blocks, n_trials=n_trials, retries=retries, target=target)
    busy, asked, ended, halted = {}, set(), [], set()
    posts = machine.begin()
    while True:
        for post in posts:
            if isinstance(post.message, Start):
                assert post.team not in busy, "a block got a second trial"
                busy[post.team] = post.message.run
            elif isinstance(post.message, RequestAnswer):
                assert 0 <= post.message.value <= 1
                asked.add(post.team)
            elif isinstance(post.message, Halt):
                assert busy[post.team] == post.message.run
                halted.add(post.team)
            elif isinstance(post.message, End):
                ended.append(post.team)
        if not busy:
            break
        if data.draw(st.booleans()):
            machine.think()
        block = data.draw(st.sampled_from(sorted(busy)))
        if block not in asked and block not in halted:
            posts = machine.handle(block, ParameterRequest(busy[block], "x", X))
            continue
        trial = busy.pop(block)
        asked.discard(block)
        states = ["halted"] if block in halted else ["complete", "pruned", "failed"]
        halted.discard(block)
        state = data.draw(st.sampled_from(states))
        value = data.draw(st.sampled_from([0.05, 0.5])) if state == "complete" else None
        posts = machine.handle(block, Done(trial, state, () if value is None else (value,), "why"))
    assert sorted(ended) == list(range(blocks))
    assert machine.over
    assert all(trial.state.is_finished() for trial in study.trials), "a trial is left running"
    reached = target is not None and any(trial.value == 0.05 for trial in study.trials if trial.value)
    repeats = sum("nnlo:tries" in trial.user_attrs for trial in study.trials)
    if not reached:
        assert len(study.trials) - repeats == n_trials


def test_a_message_about_another_trial_is_refused():
    _, machine = coordinator(blocks=2, n_trials=2)
    machine.begin()
    with pytest.raises(ProtocolError, match="team 1 sent a message about run 0, not its own"):
        machine.handle(1, Done(0, "complete", (1.0,)))


def test_the_reason_stays_with_a_trial_that_was_broken_off():
    study, machine = coordinator(blocks=2, n_trials=5, target=0.0)
    machine.begin()
    (halt,) = machine.handle(0, Done(0, "complete", (-1.0,)))
    assert halt.team == 1
    machine.handle(1, Done(1, "halted", error="broken off: " + halt.message.reason))
    assert study.trials[1].user_attrs[ERROR] == "broken off: trial 0 has reached -1.0"


def test_what_is_asked_ahead_is_chosen_ahead():
    study, machine = coordinator(blocks=2, n_trials=20)
    chosen = []

    class Noting(optuna.samplers.TPESampler):
        def sample_relative(self, study, trial, search_space):
            chosen.append(trial.number)
            return super().sample_relative(study, trial, search_space)

    study.sampler = Noting(seed=1)
    machine.begin()
    assert machine.think()
    assert not machine.think(), "more is chosen ahead than one of two blocks needs at first"
    assert chosen == [2]


def test_as_many_are_chosen_ahead_as_blocks_end_at_once_and_no_more():
    study, machine = coordinator(blocks=16, n_trials=1000)
    train = {post.team: post.message.run for post in machine.begin()}

    def end(blocks):
        for block in blocks:
            (post,) = machine.handle(block, Done(train[block], "complete", (1.0,)))
            train[post.team] = post.message.run

    def chosen():
        before = len(study.get_trials(deepcopy=False))
        while machine.think():
            pass
        return len(study.get_trials(deepcopy=False)) - before

    assert chosen() == 3, "few at first: each is chosen with fewer results"
    end(range(16))  # all at once: 13 have to wait
    assert chosen() == 16
    end(range(16))
    assert chosen() == 16, "nobody has waited, and none was left"
    for block in [*range(16), *range(16)]:  # one by one: 15 have not been needed
        end([block])
        chosen()
    running = study.get_trials(deepcopy=False, states=[optuna.trial.TrialState.RUNNING])
    assert len(running) - 16 == 3


class Job:
    """A coordinator with its teams, of which ranks may die; each rank is a team of its own."""

    def __init__(self, blocks, teams, **options):
        self.study, self.machine = coordinator(blocks=blocks, teams=teams, folds=teams, **options)
        self.teams, self.dead, self.ended = teams, set(), set()
        self.busy, self.halted = {}, set()
        self.take(self.machine.begin())

    def take(self, posts):
        for post in posts:
            if isinstance(post.message, Start):
                short = {team // self.teams for team in self.dead}
                assert post.team // self.teams not in short, "a block that lacks a rank got a trial"
                self.busy[post.team] = post.message.run
            elif isinstance(post.message, Halt):
                self.halted.add(post.team)
            elif isinstance(post.message, End):
                self.ended.add(post.team)

    def die(self, team):
        self.dead.add(team)
        self.busy.pop(team, None)
        self.take(self.machine.lost(Death(team, team + 1, "node7")))

    def finish(self, team, state):
        state = "halted" if team in self.halted else state
        self.halted.discard(team)
        run = self.busy.pop(team)
        self.take(self.machine.handle(team, Done(run, state, (1.0,) if state == "complete" else (), "why")))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_whoever_dies_and_when_all_trials_end_or_the_job_does(data):
    blocks, teams = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    n_trials, retries = data.draw(st.integers(1, 8)), data.draw(st.integers(0, 2))
    job = Job(blocks, teams, n_trials=n_trials, retries=retries)
    try:
        while job.busy:
            if data.draw(st.booleans()):
                job.machine.think()
            living = sorted(set(range(blocks * teams)) - job.dead)
            if data.draw(st.integers(0, 5)) == 0:
                job.die(data.draw(st.sampled_from(living)))
            elif job.busy:
                team = data.draw(st.sampled_from(sorted(job.busy)))
                job.finish(team, data.draw(st.sampled_from(["complete", "pruned", "failed"])))
    except PeerLostError:
        assert {team // teams for team in job.dead} == set(range(blocks)), "a block could have gone on"
        return
    assert job.machine.over
    assert job.ended == set(range(blocks * teams))
    assert all(trial.state.is_finished() for trial in job.study.trials), "a trial is left running"
    repeats = sum("nnlo:tries" in trial.user_attrs for trial in job.study.trials)
    assert len(job.study.trials) - repeats == n_trials


def test_the_trial_of_a_dead_block_is_tried_again_by_another():
    job = Job(2, 1, n_trials=2, retries=1)
    job.machine.handle(0, ParameterRequest(0, "x", X))
    job.die(0)
    assert job.study.trials[0].user_attrs[FAILURE] == "died"
    assert "rank 1 on node7, which trained it, has died" in job.study.trials[0].user_attrs[ERROR]
    assert job.machine.handle(0, ParameterRequest(0, "y", X)) == [], (
        "it was written before the death was known"
    )
    job.finish(1, "complete")
    job.finish(1, "complete")
    assert job.machine.over
    first, _, again = job.study.trials
    assert again.params == {} or again.params == first.params
    assert again.user_attrs["nnlo:retry of"] == 0


def test_folds_beside_the_dead_are_broken_off():
    job = Job(2, 2, n_trials=3)
    job.die(1)
    assert job.halted == {0}
    job.finish(0, "halted")
    assert job.study.trials[0].user_attrs[FAILURE] == "died"
    assert sorted(job.busy) == [2, 3]


def test_the_last_block_takes_the_search_with_it():
    job = Job(1, 1, n_trials=5)
    with pytest.raises(PeerLostError, match="rank 1: has died, and with it the last block; trials left: 4"):
        job.die(0)


def test_what_a_signal_has_broken_off_has_not_failed_because_its_block_died_then():
    job = Job(2, 1, n_trials=2)
    job.take(job.machine.interrupt("the time is up"))
    job.die(0)
    assert FAILURE not in job.study.trials[0].user_attrs
