"""The coordinator as a state machine: whatever the order in which blocks speak, the books are right."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("optuna", reason="the environment for MPICH has no Optuna")
import optuna
from optuna.distributions import FloatDistribution, distribution_to_json

from nnlo_common import ProtocolError
from nnlo_common.tune._coordinator import Coordinator
from nnlo_common.tune._endings import ERROR
from nnlo_common.tune._messages import Answer, Done, End, Halt, Start, Suggest

optuna.logging.set_verbosity(optuna.logging.ERROR)
X = distribution_to_json(FloatDistribution(0, 1))


def coordinator(**options):
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    return study, Coordinator(study, **options)


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
            elif isinstance(post.message, Answer):
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
            posts = machine.handle(block, Suggest(busy[block], "x", X))
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
    with pytest.raises(ProtocolError, match="team 1 speaks of run 0, which it does not train"):
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
    assert not machine.think(), "more is chosen ahead than two blocks may need"
    assert chosen == [2]
