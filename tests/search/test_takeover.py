"""A coordinator that dies at drawn points; a spare takes over, and no trial is lost or trained twice."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter

import pytest

from nnlo_common import ConfigurationError, PeerLostError
from tests.helpers.threads import MortalMail, ranks

pytest.importorskip("optuna", reason="the environment for MPICH has no Optuna")
import optuna

from nnlo_common.search import optimize
from nnlo_common.search._channels import CoordinatorChannel
from nnlo_common.search._search_messages import End, Left, from_text, to_text
from nnlo_common.search.coordinator._trial_results import COORDINATOR, ERROR, FAILURE, FOLDS
from nnlo_common.testing import InjectedFault

pytestmark = pytest.mark.sampled(3)

optuna.logging.set_verbosity(optuna.logging.ERROR)


class Search:
    """A search of which ranks die: `deaths` has the number of the letter, and whether it is sent, by rank."""

    def __init__(self, size, deaths, **options):
        self.begun, self.lock, self.deaths, self.size = Counter(), threading.Lock(), deaths, size
        self.options = {"n_trials": 8, "block_size": 1, "sampler": "random", "spares": 1} | options
        self.pruner = optuna.pruners.ThresholdPruner(upper=2.4)
        self.fails = False

    def objective(self, trial):
        with self.lock:
            self.begun[trial.number, trial.fold] += 1
        x, kind = trial.suggest_float("x", 0, 1), trial.suggest_categorical("kind", "ab")
        trial.set_user_attr("seen", x)
        if self.fails and "nnlo:retry of" not in trial.user_attrs and trial.number % 3 == 1:
            raise ValueError("odd")
        for step in range(3):
            trial.report(x + step, step)
            if trial.should_prune():
                raise optuna.TrialPruned
        return x + (kind == "a")

    def program(self, world):
        if world.rank in self.deaths:
            left, after = self.deaths[world.rank]
            world.mail = lambda: MortalMail(world, left, after=after)
        return optimize(optuna.create_study(pruner=self.pruner), self.objective, world=world, **self.options)

    def run(self):
        with ranks(self.size) as cluster:
            return cluster.run(self.program, 60)

    def check(self, studies):
        """Each living rank has the same trials, each trained once, with what it has told."""
        trials, folds = self.options["n_trials"], self.options.get("folds", 1)
        assert all(isinstance(studies.pop(rank), InjectedFault) for rank in sorted(self.deaths, reverse=True))
        told = [[(trial.params, trial.values, trial.state) for trial in study.trials] for study in studies]
        assert told == told[:1] * len(told)
        for number, trial in enumerate(studies[-1].trials):
            x, kind = trial.params["x"], trial.params["kind"]
            assert trial.number == number
            assert trial.state.name == ("PRUNED" if x > 0.4 else "COMPLETE"), trial
            assert trial.user_attrs["seen"] == x
            assert trial.intermediate_values == {0: x, 1: x + 1, 2: x + 2}
            if trial.value is not None and trial.state.name == "COMPLETE":
                assert trial.value == x + (kind == "a")
        assert len(studies[-1].trials) == trials
        pruned = {trial.number for trial in studies[-1].trials if trial.state.name == "PRUNED"}
        each = self.options["block_size"] // (folds if self.options["block_size"] % folds == 0 else 1)
        assert set(self.begun.values()) == {each}, "a trial was begun twice, or not on all ranks of its block"
        if folds == 1 or not pruned:
            assert len(self.begun) == trials * folds


def drawn(seed, *victims, most=130):
    """The letters with which these ranks die."""
    draw = random.Random(f"takeover {seed}")
    return {rank: (draw.randint(1, most), draw.random() < 0.5) for rank in victims}


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("left", range(1, 130, 4))
def test_a_spare_takes_over_at_any_letter(left, after):
    search = Search(5, {0: (left, after)})
    search.check(search.run())


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    ("size", "options"),
    [
        (6, {"block_size": 2}),
        (6, {"block_size": 2, "folds": 2}),
        (4, {"folds": 2}),
        (6, {"search_ranks": 2, "sampler": "tpe"}),
        (4, {"sampler": "evolutionary", "failures": "worst"}),
    ],
    ids=["ranks", "side by side", "in turn", "search ranks", "evolutionary"],
)
def test_every_kind_of_search_goes_on(size, options, seed):
    search = Search(size, drawn(seed, 0, most=100), **options)
    search.check(search.run())


@pytest.mark.parametrize("seed", range(12))
def test_of_two_spares_the_second_takes_over_from_the_first(seed):
    search = Search(6, drawn(seed, 0, 4, most=60), spares=2)
    search.check(search.run())


@pytest.mark.parametrize("seed", range(12))
def test_a_retry_is_neither_lost_nor_made_twice(seed):
    search = Search(5, drawn(seed, 0, most=100), retries=1)
    search.fails = True
    studies = search.run()
    assert isinstance(studies.pop(0), InjectedFault)
    for study in studies:
        failed = [trial for trial in study.trials if trial.state.name == "FAIL"]
        again = [trial for trial in study.trials if "nnlo:retry of" in trial.user_attrs]
        assert len(study.trials) == 8 + len(failed)
        assert {trial.number for trial in failed} == {trial.user_attrs["nnlo:retry of"] for trial in again}
        assert len(failed) == len(again) > 0
    assert set(search.begun.values()) == {1}


@pytest.mark.parametrize("seed", range(12))
def test_a_block_may_die_too(seed):
    search = Search(5, drawn(seed, 0, most=60) | drawn(f"{seed} block", 2, most=30), retries=1)
    studies = search.run()
    assert isinstance(studies.pop(2), InjectedFault)
    assert isinstance(studies.pop(0), InjectedFault)
    for study in studies:
        failed = [trial for trial in study.trials if trial.state.name == "FAIL"]
        assert [trial.user_attrs[FAILURE] for trial in failed] in ([], ["died"])
        assert len(study.trials) == 8 + len(failed)
    assert sum(search.begun.values()) <= 9


@pytest.mark.parametrize("seed", range(20))
def test_whoever_dies_besides_all_trials_end(seed):
    draw = random.Random(f"several {seed}")
    size, searchers, spares = draw.choice([1, 2]), draw.choice([0, 2]), draw.choice([1, 2])
    ranks_of_all = 1 + searchers + 3 * size + spares
    victims = {0, draw.randrange(1, ranks_of_all - spares)} | ({ranks_of_all - 2} if spares == 2 else set())
    options = {"search_ranks": searchers, "spares": spares, "block_size": size, "retries": 1}
    search = Search(ranks_of_all, drawn(seed, *victims, most=60), **options)
    studies = [study for study in search.run() if not isinstance(study, InjectedFault)]
    assert len(studies) >= ranks_of_all - len(victims)
    for study in studies:
        ended = [trial for trial in study.trials if trial.state.name in ("COMPLETE", "PRUNED")]
        assert len(ended) == 8
        failed = [trial for trial in study.trials if trial not in ended]
        assert [trial.user_attrs[FAILURE] for trial in failed] in ([], ["died"])
    assert max(search.begun.values()) == size


@pytest.mark.parametrize("seed", range(6))
def test_the_journal_goes_on_where_the_spare_is(seed, tmp_path):
    journal, called = tmp_path / "search.jsonl", []
    options = {
        "journal": journal,
        "export": tmp_path / "search.log",
        "callbacks": [lambda study, trial: called.append(trial.number)],
    }
    search = Search(4, drawn(seed, 0, most=90), **options)
    studies = search.run()
    spare = studies[3]
    search.check(studies)
    assert spare.user_attrs[COORDINATOR] == 3
    ended = [line["trial"] for line in map(json.loads, journal.read_text().splitlines()) if "state" in line]
    assert sorted(ended) == list(range(8))
    assert sorted(set(called)) == list(range(8))
    storage = optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend(str(tmp_path / "search.log"))
    )
    (name,) = optuna.get_all_study_names(storage)
    assert len(optuna.load_study(study_name=name, storage=storage).trials) == 8
    more = Search(4, {}, n_trials=10, journal=journal)  # the same command resumes
    assert len(more.run()[0].trials) == 10
    assert sum(more.begun.values()) == 2


@pytest.mark.parametrize("seed", range(6))
def test_a_search_that_a_result_ends_stops_its_trials(seed):
    search = Search(5, drawn(seed, 0, most=50), n_trials=500, target_objective=0.3)
    studies = search.run()
    assert isinstance(studies.pop(0), InjectedFault)
    for study in studies:
        best = min(trial.value for trial in study.trials if trial.state.name == "COMPLETE")
        assert best <= 0.3
        assert len(study.trials) < 500
        for trial in study.trials:
            assert trial.state.is_finished()
            assert trial.state.name != "FAIL" or "has reached" in trial.user_attrs[ERROR]


def test_folds_side_by_side_have_all_their_values():
    search = Search(6, {0: (40, False)}, block_size=2, folds=2)
    search.pruner = optuna.pruners.NopPruner()
    studies = search.run()[1:]
    for trial in studies[-1].trials:
        first, second = trial.user_attrs[FOLDS]
        assert first == second == trial.value
    assert len(search.begun) == 16


class Scripted:
    """The mail of a rank that is sent these texts in turn."""

    def __init__(self, *texts):
        self.texts, self.sent = [*texts], []

    def receive(self, timeout_s=None):
        return self.texts.pop(0)

    def send(self, peer, text):
        self.sent.append((peer, from_text(text)))


def test_a_spare_that_hears_of_the_end_last_tells_those_that_have_left_before():
    """They wait until it has left, too."""
    left, end = to_text(Left(-1)), to_text(End(-1, ()))
    mail = Scripted((1, left), (2, left), (4, left), (0, end))
    channel = CoordinatorChannel(mail, [(1,), (2,)], ["node1"] * 6, rank=5, spares=[4, 5])
    assert isinstance(channel.stand_by(), End)
    assert sorted(peer for peer, message in mail.sent if isinstance(message, Left)) == [0, 4]


def test_a_dead_spare_is_missed_by_nobody():
    studies = Search(5, {4: (9, False)}).run()
    assert isinstance(studies.pop(4), InjectedFault)
    assert [len(study.trials) for study in studies] == [8] * 4


def test_with_its_spares_dead_the_job_ends_and_says_what_would_have_helped():
    with pytest.raises(PeerLostError, match=r"it coordinated the search.*with spares=2 another rank would"):
        Search(5, {0: (30, False), 4: (9, False)}).run()
    with pytest.raises(PeerLostError, match=r"it coordinated the search.*with spares=1 another rank would"):
        Search(5, {0: (30, False)}, spares=0).run()


@pytest.mark.parametrize("name", ["lockstep", "elastic"])
def test_what_a_spare_cannot_go_on_with_is_refused(name):
    with pytest.raises(ConfigurationError, match=f"{name}=True with spares=1 is not possible"):
        Search(4, {}, **{name: True}).run()


def test_ranks_that_do_not_fit_are_told_of_the_spares():
    with pytest.raises(
        ConfigurationError, match=r"5 - 1 coordinator - 1 spare = 3 ranks, .*Start 4 or 6 ranks"
    ):
        Search(5, {}, block_size=2).run()
