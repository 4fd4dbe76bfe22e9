"""The end of an elastic search: idle blocks train folds that wait, and join those that have a checkpoint."""

from __future__ import annotations

import json
import threading
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.jobs import mpiexec, running_mpi
from tests.helpers.paths import PROGRAMS
from tests.helpers.threads import DyingMail, ranks

pytest.importorskip("optuna", reason="the environment for MPICH has no Optuna")
import optuna

from nnlo_common import EASGD, SGD, ConfigurationError, Participant, PeerLostError
from nnlo_common.search import optimize
from nnlo_common.search._channels import CoordinatorChannel, Death
from nnlo_common.search._search_messages import Done, End, Halt, Recall, Start, from_text
from nnlo_common.search.coordinator._time_left import TimeLeft
from nnlo_common.search.coordinator._trial_results import ERROR, FAILURE, FOLDS, HELPERS
from nnlo_common.testing import InjectedFault
from tests.helpers.searches import study_coordinator

optuna.logging.set_verbosity(optuna.logging.ERROR)
PROGRAM = PROGRAMS / "tune_elastic.py"


def coordinator(**options):
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    return study, study_coordinator(study, elastic=True, **{"clock": lambda: 0.0} | options)


def told(posts):
    return [(post.team, type(post.message)) for post in posts]


# -- who helps whom ------------------------------------------------------------------------------------


def test_a_fold_that_waits_is_trained_by_an_idle_block():
    study, machine = coordinator(blocks=2, n_trials=1, folds=3)
    first, second = machine.begin()
    assert [(post.team, post.message.fold) for post in (first, second)] == [(0, 0), (1, 1)]
    (third,) = machine.handle(1, Done(second.message.run, "complete", (1.0,)))
    assert (third.team, third.message.fold, third.message.members) == (1, 2, ())
    # The first fold is the last that trains; it has no checkpoint, for all the coordinator knows.
    (recall,) = machine.handle(1, Done(third.message.run, "complete", (3.0,)))
    assert (recall.team, recall.message, recall.leader_only) == (0, Recall(first.message.run), True)
    assert told(machine.handle(0, Done(first.message.run, "complete", (2.0,)))) == [(0, End), (1, End)]
    (trial,) = study.trials
    assert (trial.value, trial.user_attrs[FOLDS]) == (2, [2, 1, 3])
    assert trial.user_attrs[HELPERS] == [[1, 0]]


def test_who_has_left_goes_on_with_those_that_are_idle():
    study, machine = coordinator(blocks=3, n_trials=1)
    start, recall = machine.begin()
    assert told([start, recall]) == [(0, Start), (0, Recall)]
    (again,) = machine.handle(0, Done(start.message.run, "recalled"))
    assert (again.team, again.made_of) == (0, (0, 1, 2))
    first, second = start.message, again.message
    assert (first.trial, first.fold, first.seed) == (second.trial, second.fold, second.seed)
    assert second.run > first.run
    assert told(machine.handle(0, Done(second.run, "complete", (1.0,)))) == [(0, End), (1, End), (2, End)]
    assert study.trials[0].user_attrs[HELPERS] == [[1, 0], [2, 0]]


def test_the_trial_with_the_fewest_ranks_is_helped_then_the_youngest_and_each_gets_its_share():
    now_s = 0.0
    study, machine = coordinator(blocks=5, n_trials=6, clock=lambda: now_s)
    runs = {post.team: post.message.run for post in machine.begin()}
    now_s = 1.0
    (last,) = machine.handle(0, Done(runs[0], "pruned"))
    runs[0] = last.message.run
    recalls = [machine.handle(team, Done(runs[team], "pruned")) for team in (1, 2)]
    assert [told(posts) for posts in recalls] == [[(0, Recall)], [(3, Recall)]]
    for team, helper in ((3, 1), (0, 2)):
        (again,) = machine.handle(team, Done(runs[team], "recalled"))
        assert again.made_of == (team, helper)
        runs[team] = again.message.run
    assert told(machine.handle(0, Done(runs[0], "pruned"))) == [(4, Recall)]
    (again,) = machine.handle(4, Done(runs[4], "recalled"))
    assert again.made_of == (4, 0, 2)
    assert study.trials[4].user_attrs[HELPERS] == [[0, 1.0], [2, 1.0]]
    assert study.trials[5].user_attrs[HELPERS] == [[2, 1.0]]


@pytest.mark.parametrize(("seconds", "helped"), [(7, True), (8, False), (9.5, False), (10.5, True)])
def test_what_is_about_to_end_is_left_alone(seconds, helped):
    now_s = 0.0
    _, machine = coordinator(blocks=2, n_trials=2, clock=lambda: now_s, time_left=TimeLeft(longest_s=10.0))
    first, _ = machine.begin()
    now_s = seconds
    posts = machine.handle(0, Done(first.message.run, "pruned"))
    assert told(posts) == ([(1, Recall)] if helped else [])
    now_s = 10.5  # it takes longer than any before
    assert told(posts + machine.look()) == [(1, Recall)]
    assert machine.look() == []


def test_nobody_joins_as_long_as_there_is_something_to_begin():
    _, machine = coordinator(blocks=2, n_trials=3, teams=2, folds=2)
    starts = machine.begin()
    assert machine.handle(0, Done(starts[0].message.run, "complete", (1.0,))) == []
    for team in (2, 3):
        posts = machine.handle(team, Done(starts[team].message.run, "complete", (1.0,)))
    # The third trial has begun, so that the first team has nothing to wait for but its block.
    assert told(posts) == [(2, Start), (3, Start), (1, Recall)]


def test_a_team_of_several_is_several_again_when_a_rank_has_died():
    study, machine = coordinator(blocks=3, n_trials=1, retries=1)
    start, _ = machine.begin()
    (again,) = machine.handle(0, Done(start.message.run, "recalled"))
    posts = machine.lost(Death(1, 3, "node7"))
    # The trial is tried again, and no one joins any more.
    assert told(posts) == [(0, Start)]
    assert posts[0].made_of == (0,)
    assert machine.handle(0, Done(again.message.run, "failed")) == []  # written before its death was known
    assert len(machine.handle(0, Done(posts[0].message.run, "complete", (1.0,)))) == 3
    assert [trial.state.name for trial in study.trials] == ["FAIL", "COMPLETE"]


@pytest.mark.parametrize("failure", ["error", "diverged", "NaN"])
def test_a_trial_that_fails_in_company_goes_on_without(failure):
    study, machine = coordinator(blocks=3, n_trials=1)
    start, _ = machine.begin()
    (again,) = machine.handle(0, Done(start.message.run, "recalled"))
    posts = machine.handle(0, Done(again.message.run, "failed", error="too many", failure=failure))
    if failure == "NaN":  # what a training has come to that is over
        assert told(posts) == [(0, End), (1, End), (2, End)]
    else:
        assert told(posts) == [(0, Start)]  # and nobody joins it again
        assert posts[0].made_of == (0,)
        assert machine.look() == []
        machine.handle(0, Done(posts[0].message.run, "failed", error="really", failure="error"))
    assert machine.over
    (trial,) = study.trials
    assert trial.user_attrs[ERROR] == ("too many" if failure == "NaN" else "really")


def test_a_halted_trial_that_has_left_is_broken_off():
    study, machine = coordinator(blocks=3, n_trials=2, target=0.5)
    first, second, recall = machine.begin()
    assert told([first, second, recall]) == [(0, Start), (1, Start), (0, Recall)]
    assert told(machine.handle(1, Done(second.message.run, "complete", (0.1,)))) == [(0, Halt)]
    assert told(machine.handle(0, Done(first.message.run, "recalled"))) == [(0, End), (1, End), (2, End)]
    assert [trial.state.name for trial in study.trials] == ["FAIL", "COMPLETE"]


class Ranks:
    """What the ranks of all blocks know, told by real letters."""

    def __init__(self, machine, teams):
        hosts = ["node"] * (1 + sum(map(len, teams)))
        self.machine, self.letters = machine, CoordinatorChannel(self, teams, hosts)
        self.members = {rank: team for team in teams for rank in team}
        self.team = {rank: index for index, team in enumerate(teams) for rank in team}
        self.run, self.flags, self.ended, self.boxes = {}, defaultdict(set), [], defaultdict(list)

    def send(self, peer, text):
        self.boxes[peer].append(from_text(text))

    def receive(self, timeout_s=None):
        return None

    def take(self, posts):
        self.letters.deliver(posts)
        for rank, box in self.boxes.items():
            for message in box:
                self.read(rank, message)
            box.clear()
        for rank, run in self.run.items():
            together = {one for one, other in self.run.items() if other == run}
            assert together == set(self.members[rank]), "ranks do not agree who trains"

    def read(self, rank, message):
        if isinstance(message, End):
            assert rank not in self.run
            self.ended.append(rank)
        elif isinstance(message, Start):
            assert rank not in self.run, "a rank got a second run"
            self.members[rank] = message.members or self.members[rank]
            self.run[rank] = message.run
        elif self.run.get(rank) == message.run:
            self.flags[message.run].add(type(message))

    def runs(self):
        return sorted(set(self.run.values()))

    def leave(self, run):
        members = next(self.members[rank] for rank, other in self.run.items() if other == run)
        self.run = {rank: other for rank, other in self.run.items() if other != run}
        return members

    def end(self, run, message):
        self.take(self.machine.handle(self.team[self.leave(run)[0]], message))

    def die(self, rank):
        del self.members[rank]
        if rank in self.run:
            run = self.run.pop(rank)
            self.run = {one: other for one, other in self.run.items() if other != run}
        self.letters._present.discard(rank)
        self.take(self.machine.lost(Death(self.team[rank], rank, "node")))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_interleaving_ends_with_all_trials_and_each_rank_told_once(data):
    blocks, n_trials = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    folds, deaths = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 2))
    teams = data.draw(st.sampled_from([1, folds]))
    study, machine = coordinator(
        blocks=blocks, n_trials=n_trials, folds=folds, teams=teams, retries=data.draw(st.integers(0, 1))
    )
    cut = [(2 * index + 1, 2 * index + 2) for index in range(blocks * teams)]
    world = Ranks(machine, cut)
    world.take(machine.begin())
    try:
        while runs := world.runs():
            if data.draw(st.booleans()):
                world.take(machine.look())
            if deaths and data.draw(st.integers(0, 9)) == 0:
                deaths -= 1
                world.die(data.draw(st.sampled_from(sorted(world.members))))
                continue
            run = data.draw(st.sampled_from(runs))
            states = ["complete", "complete", "pruned", "failed"]
            if Halt in world.flags[run]:
                states = ["halted"]
            elif Recall in world.flags[run]:
                states = ["complete", "recalled", "recalled"]
            state = data.draw(st.sampled_from(states))
            world.end(run, Done(run, state, (1.0,) if state == "complete" else (), "why"))
    except PeerLostError:
        assert not machine._roster.living
        return
    assert machine.over
    assert sorted(world.ended) == sorted(world.members)
    assert all(trial.state.is_finished() for trial in study.trials)
    repeats = sum("nnlo:tries" in trial.user_attrs for trial in study.trials)
    assert len(study.trials) - repeats == n_trials


# -- over ranks ----------------------------------------------------------------------------------------


def searched(size, objective, *, victim=-1, kind="Start", left=3, **options):
    options = {"block_size": 2, "sampler": "random", "elastic": True} | options

    def program(world):
        if world.rank == victim:
            world.mail = lambda: DyingMail(world, kind, left)
        return optimize(optuna.create_study(), objective, world=world, **options)

    with ranks(size) as cluster:
        return cluster.run(program, 180)


def without_checkpoint(trial):
    start = [np.ones(2, "f4")]
    with Participant(EASGD(), start, optimizer=SGD(trial.suggest_float("lr", 0.01, 0.5))) as me:
        for _ in me.batches(range(4)):
            me.gradients[0][:] = me.point[0]
            me.step()
    return float(me.parameters[0][0])


@pytest.mark.parametrize("options", [{}, {"folds": 3}, {"folds": 2}])
def test_trainings_without_a_checkpoint_stay_with_their_block(options):
    studies = searched(7, without_checkpoint, n_trials=4, **options)
    plain = searched(7, without_checkpoint, n_trials=4, **options | {"elastic": False})
    for study, other in zip(studies, plain, strict=True):
        assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 4
        assert len(study.trials) == len(other.trials)


def test_idle_teams_train_the_folds_that_wait():
    helped = threading.Event()

    def objective(trial):
        if trial.number == 3:  # the last: the other teams become idle while its first fold trains
            if trial.fold:
                helped.set()
            else:
                assert helped.wait(30)
        return without_checkpoint(trial)

    study, *_ = searched(7, objective, n_trials=4, folds=3)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 4
    assert any(HELPERS in trial.user_attrs for trial in study.trials)


def test_it_does_not_go_with_lockstep():
    with pytest.raises(ConfigurationError, match=r"lockstep=True with elastic=True: .*leave one of them out"):
        searched(5, without_checkpoint, n_trials=2, lockstep=True)


def with_checkpoint(folder, make, epochs=6):
    """An objective that keeps which epochs it has trained, with how many ranks."""
    torch, nt = pytest.importorskip("torch"), pytest.importorskip("nnlo_torch")
    from nnlo_common.training._joining import launched

    data = torch.ones(16, 1)

    def objective(trial):
        model = torch.nn.Linear(1, 1)
        trial.suggest_float("x", 0, 1)
        optimizer = make(nt, torch.optim.SGD(model.parameters(), lr=0.01))
        sampler = nt.ShardSampler(data, optimizer=optimizer)
        loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler)
        # Without facts: a rank that dies here is a thread, and would leave theirs.
        checkpoint = nt.Checkpoint(folder / f"{trial.number}-{trial.fold}", optimizer, report=False)
        for epoch in checkpoint.epochs(epochs):
            for x in checkpoint.batches(loader):
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
            key = f"fold {trial.fold}"
            trial.set_user_attr(key, [*trial.user_attrs.get(key, []), [epoch, launched().size]])
        return 1.0

    return objective


def easgd(nt, optimizer):
    return nt.EASGD(optimizer, every=2)


@pytest.mark.framework("torch")
@pytest.mark.parametrize("options", [{}, {"folds": 2, "block_size": 4}])
def test_idle_blocks_join_a_training_and_each_epoch_is_trained_once(options, tmp_path):
    studies = searched(9, with_checkpoint(tmp_path, easgd), n_trials=1, **options)
    for study in studies:
        (trial,) = study.trials
        for fold in range(options.get("folds", 1)):
            seen = trial.user_attrs[f"fold {fold}"]
            assert [epoch for epoch, _ in seen] == [*range(6)]
            sizes = [size for _, size in seen]
            assert (sizes[0], sizes) == (2, sorted(sizes))
        assert sizes[-1] > 2
    assert studies[0].trials[0].value == 1


@pytest.mark.framework("torch")
def test_a_training_that_is_not_fit_for_more_ranks_goes_on_without_them(tmp_path):
    def make(nt, inner):
        from nnlo_common.training._joining import launched

        if launched().size > 2:
            raise ConfigurationError("too many")
        return easgd(nt, inner)

    study, *_ = searched(5, with_checkpoint(tmp_path, make), n_trials=1)
    (trial,) = study.trials
    assert trial.state.name == "COMPLETE"
    assert trial.user_attrs["fold 0"] == [[epoch, 2] for epoch in range(6)]


@pytest.mark.framework("torch")
def test_an_algorithm_that_is_tied_to_its_workers_stays_with_them(tmp_path):
    study, *_ = searched(5, with_checkpoint(tmp_path, lambda nt, inner: nt.Synchronous(inner)), n_trials=1)
    assert study.trials[0].user_attrs["fold 0"] == [[epoch, 2] for epoch in range(6)]


@pytest.mark.sampled(4)
@pytest.mark.framework("torch")
@pytest.mark.parametrize("victim", [1, 2, 3, 4])
@pytest.mark.parametrize(("kind", "left"), [("Start", 2), ("RunOutcome", 3), ("Text", 9)])
def test_a_death_costs_the_block_only_though_it_has_joined_another(victim, kind, left, tmp_path):
    studies = searched(
        5,
        with_checkpoint(tmp_path, easgd),
        n_trials=1,
        retries=2,
        victim=victim,
        kind=kind,
        left=left,
    )
    if not isinstance(studies[victim], InjectedFault):  # nobody has written to it so often
        assert [trial.state.name for trial in studies[0].trials] == ["COMPLETE"]
        return
    del studies[victim]
    for study in studies:
        states = [trial.state.name for trial in study.trials]
        assert states.count("COMPLETE") == 1
        failed = [trial for trial in study.trials if trial.state.name == "FAIL"]
        assert [trial.user_attrs[FAILURE] for trial in failed] in (["died"], [])


def run(folder, size, *words, **options):
    done = mpiexec(size, PROGRAM, folder, *map(str, words), timeout_s=100, **options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.framework("torch")
def test_blocks_of_processes_become_one(tmp_path):
    found, said = run(tmp_path, 5, 1, 2, 1)
    ((epochs, sizes),) = [zip(*seen["fold 0"], strict=True) for seen in found["seen"]]
    assert epochs == tuple(range(8))
    assert (sizes[0], sizes[-1]) == (2, 4)
    assert "was saved with 1 worker, but this run has 3" in said


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.framework("torch")
@pytest.mark.parametrize(
    "words", [(5, 3, 2, 1), (7, 4, 3, 1), (9, 3, 2, 1), (9, 3, 4, 2), (5, 2, 2, 3)], ids=str
)
def test_every_epoch_is_trained_once_whoever_joins(words, tmp_path):
    size, trials, block, folds = words
    found, _ = run(tmp_path, size, trials, block, folds)
    assert found["states"] == ["COMPLETE"] * trials
    for number, seen in enumerate(found["seen"]):
        for fold in range(folds):
            epochs = [epoch for epoch, _ in seen[f"fold {fold}"]]
            assert epochs == [*range(3 + 5 * (number == trials - 1) + fold)]
    sizes = [size for seen in found["seen"] for fold in seen.values() for _, size in fold]
    assert max(sizes) > min(sizes)


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.framework("torch")
@pytest.mark.parametrize("victim", [1, 2, 3, 4])
def test_a_process_that_is_killed_after_its_block_has_joined_costs_its_block_only(victim, tmp_path):
    if running_mpi() == "MPICH":
        pytest.skip("MPICH's mpiexec ends the job when a rank dies")
    found, said = run(tmp_path, 5, 3, 2, 1, victim, options=["--with-ft", "ulfm"])
    if f"rank {victim} on" in said:
        assert found["states"] == ["COMPLETE", "COMPLETE", "FAIL", "COMPLETE"]
        assert found["seen"][2]["nnlo:failure"] == "died"
    else:  # a server, which has no batches
        assert found["states"] == ["COMPLETE"] * 3
