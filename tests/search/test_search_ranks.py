"""Search ranks: parameters are chosen on several ranks at the same time, in copies of the study."""

from __future__ import annotations

import itertools
import random
import threading

import pytest

from tests.helpers.threads import DyingMail, HeldMail, ranks

pytest.importorskip("optuna", reason="the environment for MPICH has no Optuna")
import optuna
from optuna.distributions import FloatDistribution, distribution_to_json
from optuna.trial import TrialState

from nnlo_common import ConfigurationError, NNLOError
from nnlo_common.search import optimize
from nnlo_common.search._channels import Death
from nnlo_common.search._journal import packed
from nnlo_common.search._search_messages import (
    Choose,
    Done,
    End,
    Halt,
    ParameterRequest,
    Start,
    from_text,
    to_text,
)
from nnlo_common.search.samplers._replica import Replica
from nnlo_common.testing import InjectedFault
from tests.helpers.searches import study_coordinator

optuna.logging.set_verbosity(optuna.logging.ERROR)
X = distribution_to_json(FloatDistribution(-1, 1))


class Noting(optuna.samplers.TPESampler):
    """TPE that notes on which thread it chooses what."""

    def __init__(self, notes, **options):
        super().__init__(n_startup_trials=4, **options)
        self.notes = notes

    def sample_relative(self, study, trial, search_space):
        values = super().sample_relative(study, trial, search_space)
        states = [one.state for one in study.get_trials(deepcopy=False)]
        self.notes[trial.number] = threading.get_ident(), values, states
        return values


def objective(trial):
    x = trial.suggest_float("x", -1, 1)
    n = trial.suggest_int("n", 1, 2**40, log=True)
    c = trial.suggest_categorical("c", ["a", None, 3])
    if trial.number % 4 == 0:
        trial.suggest_float("rare", 0, 1)
    return x**2 + (c == "a") + n / 2**40


def searched(size, objective=objective, *, victim=-1, held=None, **options):
    """What search ranks noted, and the studies; rank `held` chooses no second time before one has died."""
    notes, died = {}, threading.Event()

    def program(world):
        study = optuna.create_study()
        study.sampler = options.get("sampler") or Noting(notes, seed=1)
        if world.rank == victim:
            world.mail = lambda: DyingMail(world, "Choose", left=6, died=died)
        elif world.rank == held:
            world.mail = lambda: HeldMail(world, "Choose", died)
        asked = {"sampler": None} | {name: value for name, value in options.items() if name != "sampler"}
        return optimize(study, objective, world=world, **asked)

    with ranks(size) as cluster:
        return notes, cluster.run(program, 180)


def test_what_is_chosen_afar_is_what_is_tried():
    notes, (first, *others) = searched(7, n_trials=24, block_size=2, search_ranks=2)
    assert [trial.state for trial in first.trials] == [TrialState.COMPLETE] * 24
    assert len({thread for thread, *_ in notes.values()}) == 2
    together = [number for number, (_, values, _) in notes.items() if values]
    assert len(together) > 12
    for number in together:
        _, values, _ = notes[number]
        assert values.keys() == {"x", "n", "c"}, "the rare parameter is not of all trials"
        assert values.items() <= first.trials[number].params.items()
    for study in others:
        assert [(one.params, one.values) for one in study.trials] == [
            (one.params, one.values) for one in first.trials
        ]


def test_a_search_rank_knows_of_every_trial_before():
    notes, studies = searched(4, n_trials=20, search_ranks=1)
    assert len(studies[0].trials) == 20
    for number, (_, _, states) in notes.items():
        assert len(states) == number + 1
        assert states.count(TrialState.RUNNING) <= 2 + 4, "two blocks, and what is chosen ahead"


@pytest.mark.parametrize(("search_ranks", "victim", "held"), [(2, 1, 2), (1, 1, None)])
def test_a_dead_search_rank_is_done_without(search_ranks, victim, held, caplog):
    _, studies = searched(3 + search_ranks, victim=victim, held=held, n_trials=20, search_ranks=search_ranks)
    assert isinstance(studies.pop(victim), InjectedFault)
    for study in studies:
        assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 20


def test_a_sampler_that_fails_on_a_search_rank_ends_the_search():
    class Broken(optuna.samplers.RandomSampler):
        def infer_relative_search_space(self, study, trial):
            raise ValueError("no idea")

    with pytest.raises(NNLOError, match=r"failed on search rank 1 \(host memory\)(.|\n)*no idea"):
        searched(3, n_trials=4, search_ranks=1, sampler=Broken())


@pytest.mark.parametrize(
    ("size", "block_size", "search_ranks", "said"),
    [
        (
            6,
            2,
            2,
            r"= 3 ranks, which .* Start 5 or 7 ranks, or keep 6 with block_size=1 or 3 or search_ranks=1",
        ),
        (2, 1, 3, r"= -2 ranks, fewer than block_size=1. Start 5 ranks, or keep 2 with search_ranks=0"),
    ],
)
def test_what_search_ranks_leave_over_is_refused(size, block_size, search_ranks, said):
    arithmetic = f"{size} - 1 coordinator - {search_ranks} search ranks {said}"
    with pytest.raises(ConfigurationError, match=arithmetic):
        searched(size, n_trials=1, block_size=block_size, search_ranks=search_ranks)


@pytest.mark.filterwarnings("ignore:QMCSampler is experimental")
def test_samplers_that_go_on_from_their_last_choice_are_refused():
    for sampler in ("qmc", "cmaes", optuna.samplers.QMCSampler()):
        with pytest.raises(ConfigurationError, match=r"search_ranks=2 with .*leave search_ranks out"):
            optimize(optuna.create_study(), objective, n_trials=1, search_ranks=2, sampler=sampler)
    study = optimize(optuna.create_study(), objective, n_trials=3, search_ranks=2, sampler="tpe")
    assert len(study.trials) == 3, "one process has no search ranks"


def test_a_search_with_search_ranks_goes_on_from_its_journal(tmp_path):
    path = tmp_path / "search.jsonl"
    searched(4, n_trials=9, search_ranks=1, journal=path)
    notes, studies = searched(5, n_trials=14, search_ranks=2, journal=path)
    assert len(studies[0].trials) == 14
    assert sorted(notes) == list(range(9, 14))
    assert all(states[:9] == [TrialState.COMPLETE] * 9 for _, _, states in notes.values())


class Job:
    """A coordinator whose search ranks choose when chance says so."""

    def __init__(self, seed, blocks, search_ranks, **options):
        self.chance = random.Random(seed)
        self.study = optuna.create_study(sampler=optuna.samplers.TPESampler(n_startup_trials=3))
        self.machine = study_coordinator(self.study, blocks=blocks, search_ranks=search_ranks, **options)
        sampler = optuna.samplers.TPESampler(n_startup_trials=3)
        self.replicas = {
            blocks + index: Replica(optuna.create_study(), sampler, 0) for index in range(search_ranks)
        }
        self.choosing, self.training, self.told, self.halted = {}, {}, set(), set()
        self.most = 0
        self.take(self.machine.begin())

    def take(self, posts):
        for post in posts:
            message = from_text(to_text(post.message))
            assert message == post.message
            if isinstance(message, Choose):
                assert post.team not in self.choosing, "it still chooses"
                self.choosing[post.team] = message
            elif isinstance(message, Start):
                assert post.team not in self.training, "a block got a second trial"
                self.training[post.team] = message.run
            elif isinstance(message, Halt):
                self.halted.add(post.team)
            elif isinstance(message, End):
                self.told.add(post.team)
        self.most = max(self.most, len(self.choosing))

    def step(self):
        team = self.chance.choice([*self.training, *self.choosing])
        if team in self.choosing:
            message, replica = self.choosing.pop(team), self.replicas[team]
            replica.learn(message.news)
            self.take(self.machine.handle(team, replica.choose(message.run)))
            return
        run = self.training.pop(team)
        if team in self.halted:
            self.halted.remove(team)
            self.take(self.machine.handle(team, Done(run, "halted", error="broken off")))
            return
        ((answer),) = self.machine.handle(team, ParameterRequest(run, "x", X))
        x = answer.message.value
        state = "failed" if self.chance.random() < 0.1 else "complete"
        self.take(self.machine.handle(team, Done(run, state, (x**2,) if state == "complete" else (), "why")))


@pytest.mark.parametrize("seed", range(8))
def test_any_order_ends_with_all_trials(seed):
    job = Job(seed, blocks=1 + seed % 4, search_ranks=1 + seed % 3, n_trials=20, retries=1)
    for step in itertools.count():
        if job.machine.over:
            break
        if step == 9 and seed % 2:
            dead = max(job.replicas)
            job.choosing.pop(dead, None)
            job.take(job.machine.lost(Death(dead, 1, "node7")))
        job.machine.think()
        job.step()
    assert job.told >= set(range(1 + seed % 4))
    assert all(trial.state.is_finished() for trial in job.study.trials)
    repeats = sum("nnlo:tries" in trial.user_attrs for trial in job.study.trials)
    assert len(job.study.trials) - repeats == 20


def test_all_search_ranks_choose_at_the_same_time():
    job = Job(0, blocks=4, search_ranks=4, n_trials=40)
    while not job.machine.over:
        job.step()
    assert job.most == 4


@pytest.mark.parametrize("reason", ["the target", "the time"])
def test_what_is_being_chosen_when_the_search_ends_is_not_begun(reason):
    job = Job(1, blocks=3, search_ranks=3, n_trials=40, target=-1.0 if reason == "the time" else 2.0)
    for _ in range(10):
        if not job.machine.over:
            job.step()
    if reason == "the time":
        job.take(job.machine.interrupt("the time is up"))
    while not job.machine.over:
        job.step()
    for team, message in job.choosing.items():  # it comes late
        job.replicas[team].learn(message.news)
        assert job.machine.handle(team, job.replicas[team].choose(message.run)) == []
    assert all(trial.state.is_finished() for trial in job.study.trials)


def test_gaussian_processes_beside_each_other_know_of_different_trials():
    class Noting(optuna.samplers.GPSampler):
        def sample_relative(self, study, trial, search_space):
            seen = study.get_trials(deepcopy=False)
            states = [one.state.is_finished() for one in seen]
            known.append((states.count(True), states.count(False), {one.number for one in seen}))
            return {}

    known = []
    made = optuna.create_study()
    made.optimize(lambda trial: 0.0, n_trials=60)
    made.ask()
    made.ask()
    for number in (60, 61):
        replica = Replica(optuna.create_study(), Noting(), 7)
        replica.learn(packed(one) for one in made.get_trials(deepcopy=False))
        replica.choose(number)
        replica.choose(number, beside=True)
    (whole, _, _), (first, running, ones), _, (_, _, others) = known
    assert whole == 60
    assert 35 < first < 55
    assert running == 2
    assert ones != others


@pytest.mark.extended
def test_gaussian_processes_beside_each_other_do_not_choose_the_same():
    pytest.importorskip("torch", reason="Optuna's process computes with it")
    made = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=3))
    made.optimize(lambda trial: trial.suggest_float("x", -1, 1) ** 2, n_trials=15)
    trials = [made.ask() for _ in range(3)]
    chosen = []
    for trial in trials:
        replica = Replica(optuna.create_study(), optuna.samplers.GPSampler(), 7)
        replica.learn(packed(one) for one in made.get_trials(deepcopy=False))
        for beside in (False, True):
            chosen.append(replica.choose(trial.number, beside=beside).params["x"][0])
    assert max(chosen[::2]) - min(chosen[::2]) < 1e-4, "they know the same, so this is no trouble any more"
    assert len({round(value, 4) for value in chosen[1::2]}) == 3


def test_which_rank_chooses_makes_no_difference():
    made = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=3))
    made.optimize(lambda trial: trial.suggest_float("x", -1, 1) ** 2, n_trials=12)
    busy, late = (Replica(optuna.create_study(), optuna.samplers.TPESampler(), 7) for _ in range(2))

    def news(first):
        return [packed(trial) for trial in made.get_trials(deepcopy=False)[first:]]

    trial = made.ask()
    busy.learn(news(0))
    another = busy.choose(12)
    trial.suggest_float("x", -1, 1)
    made.tell(trial, 1.0)
    made.ask()
    busy.learn(news(12))
    late.learn(news(0))
    chosen = late.choose(13)
    assert busy.choose(13) == chosen
    assert chosen.params["x"] != another.params["x"]
