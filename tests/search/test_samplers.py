"""The samplers of a search, on known functions; Optuna's own suite is in test_tune_suites.py."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from tests.helpers.threads import ranks

pytest.importorskip("optuna", reason="the environment for MPICH has no Optuna")
import optuna
from optuna.samplers import GPSampler, RandomSampler, TPESampler

from nnlo_common import ConfigurationError
from nnlo_common.search import optimize
from nnlo_common.search.coordinator._trial_results import FOLDS, SECONDS
from nnlo_common.search.samplers._bayesian import BayesianSampler, noise_of_means
from nnlo_common.search.samplers._engines import engine
from nnlo_common.search.samplers._evolutionary import EvolutionarySampler
from nnlo_common.search.samplers._names import SAMPLERS

optuna.logging.set_verbosity(optuna.logging.WARNING)


def mixed(trial):
    lr = trial.suggest_float("lr", 1e-5, 1e-1, log=True)
    layers = trial.suggest_int("layers", 1, 8)
    kind = trial.suggest_categorical("kind", ["adam", "sgd", "rms"])
    extra = trial.suggest_float("momentum", 0, 1) if kind == "sgd" else 1.0  # conditional
    return (np.log10(lr) + 2.3) ** 2 + (layers - 7) ** 2 / 4 + (kind != "sgd") + (extra - 0.9) ** 2


def medians(makers, objective, seeds, n_trials):
    found = []
    for make in makers:
        best = []
        for seed in range(seeds):
            study = optuna.create_study(sampler=make(seed=seed))
            study.optimize(objective, n_trials=n_trials)
            best.append(study.best_value)
        found.append(float(np.median(best)))
    return found


def test_evolution_beats_random_search_on_a_conditional_space():
    evolved, random = medians([EvolutionarySampler, RandomSampler], mixed, seeds=5, n_trials=100)
    assert evolved < random / 3


def test_evolution_maximises_too_and_keeps_constraints():
    def objective(trial):
        x = trial.suggest_float("x", 0, 1)
        trial.set_constraint("small", x - 0.6)
        return x

    study = optuna.create_study(direction="maximize", sampler=EvolutionarySampler(seed=1))
    study.optimize(objective, n_trials=80)
    assert 0.55 < study.best_value <= 0.6


def test_evolution_is_for_one_objective_but_its_name_is_for_several():
    study = optuna.create_study(directions=["minimize", "maximize"], sampler=EvolutionarySampler())
    with pytest.raises(ConfigurationError, match="for one objective"):
        study.ask()
    pair = lambda trial: (trial.suggest_float("x", 0, 1), trial.suggest_float("y", 0, 1))  # noqa: E731
    optimize(study, pair, n_trials=5, sampler="evolutionary")
    assert len(study.trials) == 6


@pytest.mark.parametrize(
    ("conditional", "n_trials", "chosen"),
    [(False, 50, GPSampler), (True, 50, TPESampler), (False, 500, TPESampler)],
)
def test_the_rule_of_bayesian(conditional, n_trials, chosen):
    sampler = BayesianSampler(seed=1, n_trials=n_trials)
    study = optuna.create_study()
    for name in ("x", "y" if conditional else "x"):
        study.add_trial(
            optuna.trial.create_trial(
                params={name: 0.5},
                distributions={name: optuna.distributions.FloatDistribution(0, 1)},
                value=1.0,
            )
        )
    assert type(sampler._chooser(study)) is chosen


@pytest.mark.parametrize(("seconds", "chosen"), [(1e-3, TPESampler), (1e3, GPSampler)])
def test_bayesian_keeps_up_with_the_blocks(seconds, chosen):
    study = with_folds(np.random.default_rng(1).normal(size=(12, 3)))
    study.sampler = sampler = BayesianSampler(seed=1)
    study.ask().suggest_float("x", 0, 1)
    for trial in study.get_trials(deepcopy=False):
        trial.user_attrs[SECONDS] = seconds
    assert sampler._chooser(study) is sampler.process, "nobody waits but this one trial"
    study.ask().suggest_float("x", 0, 1)  # in a hurry, if trials are short
    assert type(sampler._chooser(study)) is chosen


@pytest.mark.parametrize(
    ("seconds", "blocks", "chosen", "hurried"),
    [
        (1.0, 4, GPSampler, False),  # 4 blocks with 0.2 s for each choice
        (1.0, None, GPSampler, True),  # 9 trials would ask in the same time
        (0.5, 4, GPSampler, True),
        (0.3, 4, TPESampler, True),
    ],
)
def test_a_process_that_cannot_keep_up_hurries_first(seconds, blocks, chosen, hurried):
    study = with_folds(np.random.default_rng(1).normal(size=(12, 3)))
    study.sampler = sampler = BayesianSampler(seed=1)
    for _ in range(9):  # four train, and others are chosen ahead
        study.ask()
    for trial in study.get_trials(deepcopy=False):
        trial.user_attrs[SECONDS] = seconds
    sampler.blocks, sampler._choosing_s = blocks, [0.2, 0.1]
    assert type(sampler._chooser(study)) is chosen
    assert chosen is TPESampler or sampler._hurried == hurried


def smooth(trial):
    return sum((trial.suggest_float(f"x{index}", -1, 1) - 0.3) ** 2 for index in range(3))


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:Argument ``group``:optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize(
    ("objective", "n_trials", "plain"),
    [
        (smooth, 14, lambda: GPSampler(seed=5)),
        (mixed, 500, lambda: TPESampler(seed=5, multivariate=True, group=True)),
    ],
)
def test_bayesian_chooses_the_very_parameters_of_the_sampler_it_stands_for(objective, n_trials, plain):
    ours, bare = optuna.create_study(), optuna.create_study(sampler=plain())
    ours.sampler = engine("bayesian", 5, n_trials, ours)
    for study in (ours, bare):
        study.optimize(objective, n_trials=min(n_trials, 30))
    assert len({str(trial.params) for trial in ours.trials}) == len(ours.trials)
    assert [trial.params for trial in ours.trials] == [trial.params for trial in bare.trials]


@pytest.mark.parametrize("name", [name for name in SAMPLERS if name != "grid"])
def test_engines_by_name_repeat_with_their_seed(name):
    runs = [optimize(optuna.create_study(), mixed, n_trials=12, sampler=name, seed=5) for _ in range(2)]
    assert [trial.params for trial in runs[0].trials] == [trial.params for trial in runs[1].trials]


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_seed_may_have_more_bits_than_optunas_samplers_take(name):
    """A resumed search adds the trials that it had begun."""

    def found(seed):
        study = optimize(optuna.create_study(), a_number, n_trials=3, sampler=name, seed=seed)
        return [trial.params["x"] for trial in study.trials]

    seeds = [2**32 - 1, *(2**40 + number for number in range(4))]
    results = [found(seed) for seed in seeds]
    assert results == [found(seed) for seed in seeds]
    assert len(set(map(tuple, results))) > 1


def a_number(trial):
    return trial.suggest_int("x", 0, 1000)


def test_unknown_names_are_refused_with_those_there_are():
    with pytest.raises(
        ConfigurationError, match=r"sampler='mesh' is not known: use \"bayesian\", .*\"nsgaii\""
    ):
        engine("mesh", 0, 10, optuna.create_study())


def combination(trial):
    width, kind = trial.suggest_int("width", 8, 16, step=4), trial.suggest_categorical("kind", ["a", "b"])
    depth = trial.suggest_float("depth", 1, 2, step=0.5) if kind == "a" else 0
    trial.set_user_attr("tried", [width, kind, depth])
    return width + depth


@pytest.mark.parametrize("size", [1, 6])
def test_a_grid_tries_each_combination_once_and_ends(size):
    with ranks(size) as cluster:
        studies = cluster.run(
            lambda world: optimize(
                optuna.create_study(), combination, n_trials=50, sampler="grid", world=world
            ),
            timeout_s=30,
        )
    tried = sorted(str(trial.user_attrs["tried"]) for trial in studies[0].trials)
    assert tried == sorted(
        str([width, kind, depth])
        for width in (8, 12, 16)
        for kind, depths in {"a": (1.0, 1.5, 2.0), "b": (0,)}.items()
        for depth in depths
    )


def test_a_grid_without_an_end_is_refused():
    def objective(trial):
        return trial.suggest_float("x", 0, 1)

    with pytest.raises(ConfigurationError, match=r"all values of 'x', a float without a step: give it one"):
        optimize(optuna.create_study(), objective, n_trials=3, sampler="grid")
    with pytest.raises(ConfigurationError, match=r'lockstep=True with sampler="grid"'):
        optimize(optuna.create_study(), objective, n_trials=3, sampler="grid", lockstep=True)
    with pytest.raises(ConfigurationError, match=r"search_ranks=2 with 'grid', which continues from its"):
        optimize(optuna.create_study(), objective, n_trials=3, sampler="grid", search_ranks=2)


def test_cma_es_takes_one_objective():
    with pytest.raises(ConfigurationError, match=r"\"cmaes\" takes one objective, but the study has several"):
        engine("cmaes", 0, 10, optuna.create_study(directions=["minimize", "maximize"]))


def test_a_journal_holds_nothing_that_would_be_unpickled_and_cma_es_learns_from_its_trials(tmp_path):
    journal = tmp_path / "search.jsonl"
    for n_trials in (20, 40):
        study = optuna.create_study()
        optimize(study, smooth, n_trials=n_trials, sampler="cmaes", seed=1, journal=journal)
    text = journal.read_text()
    assert "cma:generation" in text
    assert ":optimizer" not in text
    assert len(study.trials) == 40
    late = [trial.value for trial in study.trials[-10:]]
    assert max(late) < statistics.median(trial.value for trial in study.trials[:10])


def test_a_used_up_grid_ends_the_search():
    sampler = optuna.samplers.GridSampler({"x": [1.0, 2.0, 3.0]})
    study = optimize(
        optuna.create_study(), lambda trial: trial.suggest_float("x", 0, 5), n_trials=10, sampler=sampler
    )
    assert sorted(trial.value for trial in study.trials) == [1, 2, 3]


def with_folds(rows):
    space = {"x": optuna.distributions.FloatDistribution(0, 1)}
    study = optuna.create_study()
    for index, row in enumerate(rows):
        study.add_trial(
            optuna.trial.create_trial(
                params={"x": index / len(rows)},
                distributions=space,
                value=float(np.mean(row)),
                user_attrs={FOLDS: [float(value) for value in row]},
            )
        )
    return study


def test_folds_that_are_harder_for_all_trials_are_no_noise():
    trials = with_folds([[1 + quality, 5 + quality] for quality in range(4)]).trials
    assert noise_of_means(trials) == pytest.approx(0, abs=1e-12)
    assert noise_of_means(trials[:1]) is None
    assert noise_of_means(optuna.create_study().trials) is None


def test_the_noise_of_means_is_what_it_is():
    random = np.random.default_rng(3)
    quality, hardness = random.normal(size=(400, 1)), 10 * random.normal(size=(1, 5))
    rows = quality + hardness + random.normal(size=(400, 5))
    assert noise_of_means(with_folds(rows).trials) == pytest.approx(0.2 / 1.2, rel=0.1)


def test_the_gaussian_process_is_told_how_noisy_means_are(monkeypatch):
    gp = optuna.samplers._gp.sampler.gp
    heard, fit = [], gp.fit_kernel_params

    def spied(*args, **options):
        heard.append(options["minimum_noise"])
        return fit(*args, **options)

    monkeypatch.setattr(gp, "fit_kernel_params", spied)
    rows = np.random.default_rng(1).normal(size=(12, 3))
    study = with_folds(rows)
    study.sampler = BayesianSampler(seed=1)
    study.ask({"x": optuna.distributions.FloatDistribution(0, 1)})
    assert heard == [noise_of_means(study.trials)]
    assert heard[0] > 0.1


def test_a_planted_sampler_is_a_line_and_a_module(tmp_path, monkeypatch):
    (tmp_path / "planted_sampler.py").write_text(
        "from optuna.samplers import RandomSampler\n"
        "def make(wanted):\n"
        "    return RandomSampler(seed=wanted.seed + wanted.n_trials)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(SAMPLERS, "planted", "planted_sampler")
    study = optuna.create_study()
    found = optimize(study, lambda trial: trial.suggest_float("x", 0, 1), n_trials=3, sampler="planted")
    alone = optuna.create_study(sampler=RandomSampler(seed=7))
    assert isinstance(engine("planted", 4, 3, alone), RandomSampler)
    assert len(found.trials) == 3
    with pytest.raises(ConfigurationError, match='or "planted", or any Optuna sampler'):
        engine("plant", 4, 3, alone)
