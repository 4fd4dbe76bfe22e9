"""The parts of Optuna that are not public are still what `nnlo_common.search._compat` takes them for."""

from __future__ import annotations

import inspect

import pytest

optuna = pytest.importorskip("optuna", reason="the environment for MPICH has no Optuna")
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution  # noqa: E402
from optuna.samplers import BruteForceSampler, CmaEsSampler, GPSampler, RandomSampler  # noqa: E402

from nnlo_common import ConfigurationError  # noqa: E402
from nnlo_common.search import _compat  # noqa: E402

CHANGED = f"Optuna {optuna.__version__} has changed: mend nnlo_common/search/_compat.py"


@pytest.fixture
def study():
    return optuna.create_study(sampler=RandomSampler(seed=1))


def test_a_study_and_a_trial_are_found_in_their_storage(study):
    storage = _compat.storage_of(study)
    assert isinstance(storage, optuna.storages.BaseStorage), f"{CHANGED}: Study._storage is something else"
    number = _compat.study_number(study)
    assert storage.get_study_name_from_id(number) == study.study_name, f"{CHANGED}: Study._study_id is else"
    (frozen,) = storage.get_all_studies()
    assert _compat.study_number(frozen) == number, f"{CHANGED}: FrozenStudy._study_id is something else"
    other = optuna.study.create_study(storage=storage)
    other.ask()
    trial = study.ask()
    there = _compat.number_in(trial)
    assert storage.get_trial_number_from_id(there) == trial.number, f"{CHANGED}: Trial._trial_id is else"
    (frozen,) = study.get_trials()
    assert _compat.number_in(frozen) == there, f"{CHANGED}: FrozenTrial._trial_id is something else"


def test_a_sampler_may_stop_a_search_that_is_led_by_others(study):
    _compat.loop_begins(study)
    assert not _compat.was_stopped(study)
    study.stop()
    assert _compat.was_stopped(study), f"{CHANGED}: Study.stop does not set _stop_flag"
    _compat.loop_begins(study)
    assert not _compat.was_stopped(study)
    _compat.loop_ends(study)
    with pytest.raises(RuntimeError):
        study.stop()


def test_trials_are_read_again(study):
    asked = inspect.getsource(optuna.Study._get_trials)
    assert "self._thread_local.cached_all_trials" in asked, f"{CHANGED}: trials are cached elsewhere"
    study.ask()
    study._get_trials(deepcopy=False, use_cache=True)
    _compat.storage_of(study).create_new_trial(_compat.study_number(study))
    assert len(study._get_trials(deepcopy=False, use_cache=True)) == 1, f"{CHANGED}: nothing is cached"
    _compat.forget_trials(study)
    assert len(study._get_trials(deepcopy=False, use_cache=True)) == 2, f"{CHANGED}: trials are not forgotten"


@pytest.mark.parametrize(
    ("distribution", "suggest"),
    [
        (FloatDistribution(0, 1), lambda trial: trial.suggest_float("x", 0, 1)),
        (FloatDistribution(0.1, 1, log=True), lambda trial: trial.suggest_float("x", 0.1, 1, log=True)),
        (IntDistribution(1, 9, step=2), lambda trial: trial.suggest_int("x", 1, 9, step=2)),
        (CategoricalDistribution(["a", "b"]), lambda trial: trial.suggest_categorical("x", ["a", "b"])),
    ],
)
def test_a_parameter_is_suggested_as_by_the_public_methods(distribution, suggest):
    found = []
    for choose in (suggest, lambda trial: _compat.suggested(trial, "x", distribution)):
        trial = optuna.create_study(sampler=RandomSampler(seed=1)).ask()
        found.append((choose(trial), trial.distributions))
    assert found[0] == found[1], f"{CHANGED}: Trial._suggest is not what suggest_... methods call"


def test_what_was_chosen_elsewhere_is_suggested(study):
    trial, space = study.ask(), {"x": FloatDistribution(0, 1)}
    _compat.chosen_together(trial, space, {"x": 0.25})
    assert trial.suggest_float("x", 0, 1) == 0.25, f"{CHANGED}: Trial._relative_params is not looked at"
    assert trial.relative_params == {"x": 0.25}


def test_a_distribution_knows_what_may_be_had_from_it():
    can = _compat.can_have
    assert can(FloatDistribution(0, 1), 1.0), CHANGED
    assert not can(FloatDistribution(0, 1), 1.5), CHANGED
    assert not can(IntDistribution(1, 9, step=2), 4), f"{CHANGED}: _contains does not see steps"
    assert can(CategoricalDistribution(["a", "b"]), "b"), CHANGED


def test_a_queued_trial_keeps_its_parameters(study):
    study.enqueue_trial({"x": 0.5})
    (waiting,) = study.get_trials()
    assert waiting.system_attrs.get(_compat.FIXED) == {"x": 0.5}, (
        f"{CHANGED}: queued trials are kept otherwise"
    )


def test_a_study_without_a_name_is_known(study):
    assert _compat.has_no_name(study), f"{CHANGED}: it calls a study without a name {study.study_name!r}"
    assert not _compat.has_no_name(optuna.create_study(study_name="mine"))


def test_what_cma_es_pickles_is_known():
    pytest.importorskip("cmaes")
    study = optuna.create_study(sampler=CmaEsSampler(seed=1, n_startup_trials=1))
    study.optimize(lambda t: t.suggest_float("x", 0, 1) + t.suggest_float("y", 0, 1), n_trials=8)
    kept = [key for trial in study.trials for key in trial.system_attrs if _compat.is_pickle(key)]
    assert kept, f"{CHANGED}: CMA-ES keeps itself under another name"


def test_a_gaussian_process_is_told_of_noise():
    pytest.importorskip("torch")
    from optuna._gp import prior

    process = GPSampler(seed=1)
    _compat.tell_noise(process, 0.5)
    assert inspect.getsource(GPSampler).count("minimum_noise=self._minimum_noise") > 0, (
        f"{CHANGED}: GPSampler makes no use of _minimum_noise"
    )
    assert prior.DEFAULT_MINIMUM_NOISE_VAR == _compat.LEAST_NOISE, f"{CHANGED}: its least noise is another"


def test_a_process_looks_at_as_many_places_as_in_optuna_or_at_fewer():
    plain, process = GPSampler(seed=1), GPSampler(seed=1)
    _compat.look_less(process, hurried=True)
    fewer = vars(process).copy()
    _compat.look_less(process, hurried=False)
    for name, (usual, less) in _compat._LOOKS.items():
        assert getattr(plain, name) == getattr(process, name) == usual, f"{CHANGED}: GPSampler.{name}"
        assert fewer[name] == less < usual
        assert f"self.{name}" in inspect.getsource(GPSampler), f"{CHANGED}: GPSampler makes no use of {name}"


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_what_a_brute_force_sampler_has_tried_is_known():
    sampler = BruteForceSampler(seed=1)
    study = optuna.create_study(sampler=sampler)
    assert _compat.Tried.of([], {}).children is None, CHANGED
    study.optimize(lambda trial: trial.suggest_int("x", 1, 3) + trial.suggest_int("y", 1, 2), n_trials=2)
    tried = _compat.Tried.of(study.trials, {})
    assert sorted(tried.children) == [1, 2, 3], f"{CHANGED}: a tree has no branch for each value"
    xs = {trial.params["x"] for trial in study.trials}
    known = sum(2 * (x in xs) or 1 for x in (1, 2, 3))  # below what nobody has tried there is one, unseen
    assert tried.left() == known - 2, f"{CHANGED}: a tree counts otherwise what is left of it"
    assert tried.is_open(), CHANGED
    drawn = _compat.numbers_of(sampler).random_sample()
    assert 0 <= drawn < 1, f"{CHANGED}: BruteForceSampler._rng is something else"


def test_samplers_draw_from_lazy_numbers():
    found = [one for one in vars(RandomSampler(seed=1)).values() if isinstance(one, _compat.LazyRandomState)]
    assert found, f"{CHANGED}: samplers draw from something else than LazyRandomState"
    found[0].rng.seed(1)


class Bare:
    """Has none of the private parts."""

    relative_search_space = None

    def to_internal_repr(self, value):
        return value


@pytest.mark.parametrize(
    ("use", "part"),
    [
        (_compat.storage_of, "_storage"),
        (_compat.study_number, "_study_id"),
        (_compat.number_in, "_trial_id"),
        (_compat.loop_begins, "_thread_local"),
        (_compat.loop_ends, "_thread_local"),
        (_compat.was_stopped, "_stop_flag"),
        (_compat.forget_trials, "_thread_local"),
        (lambda bare: _compat.suggested(bare, "x", None), "_suggest"),
        (lambda bare: _compat.chosen_together(bare, {}, {}), "_relative_params"),
        (lambda bare: _compat.can_have(bare, 1), "_contains"),
        (lambda bare: _compat.tell_noise(bare, 1), "_minimum_noise"),
        (lambda bare: _compat.look_less(bare, hurried=True), "_n_preliminary_samples"),
        (_compat.numbers_of, "_rng"),
        (lambda bare: _compat.Tried(bare).children, "children"),
        (lambda bare: _compat.Tried(bare).left(), "count_unexpanded"),
        (lambda bare: _compat.Tried(bare).is_open(), "is_any_expandable"),
    ],
)
def test_a_part_that_is_gone_is_named(use, part):
    with pytest.raises(
        ConfigurationError, match=f"optuna {optuna.__version__} has changed: Bare has no {part} "
    ):
        use(Bare())


def test_a_tree_that_is_filled_otherwise_is_told_of(monkeypatch):
    monkeypatch.delattr(BruteForceSampler, "_populate_tree")
    with pytest.raises(ConfigurationError, match="BruteForceSampler has no _populate_tree any more"):
        _compat.Tried.of([], {})
