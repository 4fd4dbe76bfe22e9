"""Everything public of a Keras optimizer, on a wrapper: passed on to the optimizer in it, or explained.

Options that Keras gives every optimizer act where the wrapped one steps: alone, on a worker, at the centre.
"""

from __future__ import annotations

import copy
import functools
import os

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras", reason="the environment for MPICH has no frameworks")

import nnlo_keras as nk  # noqa: E402
from nnlo_common import ConfigurationError  # noqa: E402
from nnlo_keras._wrapper import OPTIONS  # noqa: E402
from tests.helpers import keras_cases as cases  # noqa: E402
from tests.helpers.frameworks import since  # noqa: E402
from tests.helpers.keras_cases import same, values  # noqa: E402
from tests.helpers.threads import ranks  # noqa: E402

pytestmark = [
    pytest.mark.framework("keras"),
    # Keras 3.15 itself, with NumPy 2: Variable.__array__ takes no copy argument.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

o = keras.optimizers
BACKEND = keras.backend.backend()
#: EAMSGD and GEM take their options from a momentum SGD once and for all; what they need is in test_keras.py.
WRAPPERS = [nk.Downpour, nk.Synchronous, nk.EASGD, nk.AGN, nk.DynSGD, nk.LocalSGD, nk.DiLoCo]

#: Read from the wrapped optimizer.
READ = {*OPTIONS, "iterations", "learning_rate", "variables"}
#: Set in the wrapped optimizer, too; each with a value that is not the usual one.
SET = {
    "weight_decay": 0.25,
    "clipnorm": 0.5,
    "clipvalue": 0.5,
    "global_clipnorm": 0.5,
    "use_ema": True,
    "ema_momentum": 0.5,
    "ema_overwrite_frequency": 3,
    "loss_scale_factor": 8.0,
    "gradient_accumulation_steps": 2,
    "learning_rate": 0.125,
}
#: Called of the wrapped optimizer, with what.
CALLED = {
    "apply": ([1], [2]),
    "assign": (1, 2),
    "assign_add": (1, 2),
    "assign_sub": (1, 2),
    "build": ([],),
    "exclude_from_weight_decay": (["variable"], ["bias"]),
    "finalize_variable_values": ([],),
    "scale_loss": (1.0,),
    "set_weights": ([],),
    "update_step": (1, 2, 3),
}
EXPLAINED = {
    "add_optimizer_variables": "makes variables of the wrapper, as the sums of gradients are",
    "add_variable": "makes a variable of the wrapper",
    "add_variable_from_reference": "makes a variable of the wrapper",
    "apply_gradients": "calls apply",
    "built": "of each its own: building a wrapper builds the wrapped optimizer, unless it is built",
    "from_config": "makes a wrapper of what get_config has returned",
    "get_config": "has the configuration of the wrapped optimizer inside it",
    "load_own_variables": "does nothing: the wrapped optimizer is loaded as a child",
    "name": "of each its own",
    "save_own_variables": "does nothing: the wrapped optimizer is saved as a child",
    "stateless_apply": "calls apply with `variables` for a state, among which are the wrapped optimizer's",
}


def public(one):
    return {name for name in dir(one) if name[0] != "_" and name != "inner_optimizer"}


# -- the public surface -------------------------------------------------------------------------------


@since("keras", "3.10", "there is Optimizer.add_optimizer_variables")
def test_all_that_is_public_of_an_optimizer_is_passed_on_or_explained():
    assert public(o.Optimizer(0.1)) == READ | set(SET) | set(CALLED) | set(EXPLAINED)
    assert set(SET) | {"iterations", "variables"} == READ


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", SET)
def test_what_is_set_is_set_in_the_wrapped_optimizer(name, wrapper):
    wrapped = wrapper(o.SGD(0.1))
    if (name, wrapper) == ("gradient_accumulation_steps", nk.DynSGD):
        pytest.skip("refused: test_what_an_algorithm_cannot_do_is_refused_by_name")
    setattr(wrapped, name, SET[name])
    for one in (wrapped, wrapped.inner_optimizer):
        assert getattr(one, name) == SET[name]
    assert getattr(copy.deepcopy(wrapped), name) == SET[name]
    assert getattr(wrapper.from_config(wrapped.get_config()), name) == SET[name]


@pytest.mark.parametrize("name", sorted(READ - {"variables"}))
def test_what_is_read_is_read_from_the_wrapped_optimizer(name):
    others = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 3}
    value = others.get(name, SET.get(name))
    options = {} if name == "iterations" else {"use_ema": name in others, name: value}
    wrapped = nk.Downpour(o.SGD(**options))
    want = getattr(wrapped.inner_optimizer, name)
    assert getattr(wrapped, name) is want
    assert value is None or float(want) == value


@pytest.mark.parametrize("name", CALLED)
def test_what_is_called_is_called_of_the_wrapped_optimizer(name, monkeypatch):
    wrapped, calls = nk.EASGD(o.SGD(0.1)), []
    wrapped.built = name == "apply" or name == "set_weights"

    def note(*args, **options):
        calls.append((*args, *options.values()))
        return "answer"

    monkeypatch.setattr(wrapped.inner_optimizer, name, note)
    answer = getattr(wrapped, name)(*CALLED[name])
    assert calls == [CALLED[name]]
    assert answer == (None if getattr(o.SGD, name).__name__ in NOTHING else "answer")


#: What returns nothing in Keras either.
NOTHING = {name for name in CALLED if name not in ("apply", "scale_loss", "update_step")}


def test_an_option_that_only_some_optimizers_have_is_passed_on_too():
    wrapped = nk.Downpour(o.SGD(0.1, momentum=0.5, nesterov=True))
    assert (wrapped.momentum, wrapped.nesterov) == (0.5, True)
    wrapped.momentum = 0.75
    assert wrapped.inner_optimizer.momentum == 0.75
    with pytest.raises(AttributeError, match="beta_1"):
        wrapped.beta_1  # noqa: B018
    wrapped.note = "of the wrapper's own"
    assert not hasattr(wrapped.inner_optimizer, "note")


def test_a_wrapper_alone_has_no_variables_of_its_own():
    for optimizer in (o.Adam(0.1), o.SGD(0.1, use_ema=True, gradient_accumulation_steps=2)):
        wrapped = fitted(nk.Downpour(optimizer), callbacks=[nk.Distribute()]).optimizer
        assert [id(one) for one in wrapped.variables] == [id(one) for one in optimizer.variables]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nk.GEM(o.SGD(0.1, loss_scale_factor=8.0)), "it got SGD with loss_scale_factor"),
        (
            lambda: nk.DynSGD(o.SGD(0.1, gradient_accumulation_steps=4)),
            "DynSGD cannot wrap .* gradient_accumulation_steps=4.*; use every=4",
        ),
        (lambda: nk.GEM(o.SGD(0.1, gradient_accumulation_steps=4)), "SGD with gradient_accumulation_steps"),
        (
            lambda: nk.Downpour(o.SGD(0.1, global_clipnorm=1.0), servers=2),
            "servers=2 cannot wrap .* global_clipnorm=1.0.*; use servers=1 or clipnorm",
        ),
    ],
)
def test_what_an_algorithm_cannot_do_is_refused_by_name(make, words):
    with pytest.raises(ConfigurationError, match=words):
        make()


@pytest.mark.parametrize(
    ("wrapped", "name", "value"),
    [
        (lambda: nk.GEM(o.SGD(0.1, momentum=0.9)), "momentum", 0.5),
        (lambda: nk.GEM(o.SGD(0.1, momentum=0.9)), "weight_decay", 0.1),
        (lambda: nk.EAMSGD(o.SGD(0.1, momentum=0.9, nesterov=True)), "nesterov", False),
        (lambda: nk.DynSGD(o.SGD(0.1)), "gradient_accumulation_steps", 4),
        (lambda: nk.Synchronous(o.SGD(0.1), servers=2), "global_clipnorm", 1.0),
    ],
)
def test_what_is_refused_is_refused_later_too_and_not_set(wrapped, name, value):
    optimizer = wrapped()
    before = getattr(optimizer, name)
    with pytest.raises(ConfigurationError):
        setattr(optimizer, name, value)
    assert getattr(optimizer.inner_optimizer, name) == before


@since("keras", "3.10", "a loss scale takes the place of one in the optimizer")
def test_a_loss_scale_around_a_wrapper_takes_the_place_of_that_in_it():
    found = []
    for inner in (o.SGD(0.5, loss_scale_factor=100.0), nk.Downpour(o.SGD(0.5, loss_scale_factor=100.0))):
        optimizer, variable = o.LossScaleOptimizer(inner, initial_scale=4.0), keras.Variable([1.0, 2.0])
        optimizer.build([variable])
        assert inner.loss_scale_factor is None
        state = [one.value for one in optimizer.variables]
        gradient = keras.ops.convert_to_tensor(np.array([4.0, 8.0], "f4"))
        if BACKEND == "jax":
            (after,), _ = optimizer.stateless_apply(state, [gradient], [variable.value])
            variable.assign(after)
        else:
            optimizer.apply([gradient], [variable])
        found.append(values([variable]))
    same(*found)
    same(found[0], [np.array([0.5, 1.0], "f4")])


# -- weight decay, and what is excluded from it -------------------------------------------------------


def fitted(optimizer, exclude=None, model=None, callbacks=(), x=None, **options):
    """A model after a fit; `exclude` is called once there is a model, and before anything is built."""
    model = model or cases.dense()
    if exclude is not None:
        exclude(optimizer, model)
    cases.compiled(model, optimizer)
    options = {"batch_size": 8, "epochs": 3, "shuffle": False, "verbose": 0} | options
    data_x, y = cases.data()
    model.fit(data_x if x is None else x, y, callbacks=list(callbacks), **options)
    return model


EXCLUDED = {
    "names": lambda optimizer, model: optimizer.exclude_from_weight_decay(var_names=["bias"]),
    "variables": lambda optimizer, model: optimizer.exclude_from_weight_decay(
        [model.trainable_variables[0], model.trainable_variables[3]]
    ),
    "both": lambda optimizer, model: optimizer.exclude_from_weight_decay(
        model.trainable_variables[:1], ["bias"]
    ),
}


@pytest.mark.slow
@functools.cache  # one compilation for all wrappers
def plainly_decayed(excluded=None):
    optimizer = o.AdamW(0.05, weight_decay=0.5)
    return cases.weights(fitted(optimizer, EXCLUDED[excluded]) if excluded else fitted(optimizer))


@pytest.mark.sampled(9)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("excluded", EXCLUDED)
def test_what_is_excluded_from_weight_decay_on_a_wrapper_is_so_in_the_wrapped_optimizer(excluded, wrapper):
    decays, want = plainly_decayed(), plainly_decayed(excluded)
    got = cases.weights(fitted(wrapper(o.AdamW(0.05, weight_decay=0.5)), EXCLUDED[excluded]))
    same(got, want)
    assert not np.array_equal(want[0], decays[0])


@pytest.mark.slow
def test_a_model_that_is_loaded_has_forgotten_what_was_excluded_as_with_keras_itself(tmp_path):
    found = []
    for wrap in (lambda optimizer: optimizer, nk.Downpour):
        model = fitted(wrap(o.AdamW(0.05, weight_decay=0.5)), EXCLUDED["names"])
        model.save(tmp_path / "model.keras")
        again = keras.models.load_model(tmp_path / "model.keras")
        optimizers = (again.optimizer, type(again.optimizer).from_config(model.optimizer.get_config()))
        excluded = [
            [one._use_weight_decay(variable) for variable in model.trainable_variables]
            for one in (getattr(optimizer, "inner_optimizer", optimizer) for optimizer in optimizers)
        ]
        again.fit(*cases.data(), batch_size=8, shuffle=False, verbose=0)
        found.append((cases.weights(again), excluded))
    same(found[1][0], found[0][0])
    assert found[0][1] == found[1][1] == [[True] * 4] * 2


# -- one server and one worker are the plain optimizer ------------------------------------------------


@pytest.fixture
def _launched(monkeypatch):
    """Let optimizers that `fit` builds early know that there are several ranks, as under a launcher."""
    monkeypatch.setattr("nnlo_keras._wrapper.launched", lambda: "several ranks")


def on_ranks(size, wrap, make, exclude=None, options=lambda rank: {}):
    """The weights, and the optimizer's variables, of each rank after a fit."""
    start = cases.dense().get_weights()

    def program(world):
        model = cases.dense()
        model.set_weights(start)
        distribute = nk.Distribute(world=world)
        model = fitted(wrap(make()), exclude, model, [distribute], **options(world.rank))
        return cases.weights(model), values(model.optimizer.inner_optimizer.variables)

    with ranks(size) as cluster:
        return cluster.run(program, timeout_s=60)


#: Everything at once. On jax norms are added up otherwise at the centre: `ROUNDED` in test_keras_mpi.py.
ALL_OPTIONS = {
    "weight_decay": 0.1,
    "clipvalue" if BACKEND == "jax" else "clipnorm": 0.05,
    "use_ema": True,
    "ema_momentum": 0.8,
    "ema_overwrite_frequency": 4,
}


@pytest.mark.sampled(9)
@pytest.mark.slow
@pytest.mark.parametrize("excluded", ["names", "variables"])
@pytest.mark.parametrize("name", cases.OPTIMIZERS)
@pytest.mark.usefixtures("_launched")
def test_one_worker_has_the_bits_of_the_plain_fit_with_all_options_together(name, excluded):
    def make():
        return cases.OPTIMIZERS[name](0.05, **ALL_OPTIONS)

    def exclude_and_build(optimizer, model):
        EXCLUDED[excluded](optimizer, model)
        if name == "ScheduleFreeAdamW":  # why: `keras_cases.py`
            optimizer.build(model.trainable_variables)

    plain = make()
    want = cases.weights(fitted(plain, exclude_and_build))
    (center, state), (own, _) = on_ranks(2, nk.Downpour, make, EXCLUDED[excluded])
    same(center, want)
    same(own, want)
    same(state, values(plain.variables))


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    "wrap", [nk.Downpour, nk.Synchronous, nk.EASGD, nk.LocalSGD], ids=lambda w: w.__name__
)
@pytest.mark.usefixtures("_launched")
def test_one_worker_accumulates_as_the_plain_fit_does(wrap):
    def make():
        return o.Adam(0.05, gradient_accumulation_steps=3, weight_decay=0.1)

    options = {"every": 5} if wrap is nk.LocalSGD else {"every": 1000} if wrap is nk.EASGD else {}
    plain = make()
    want = cases.weights(fitted(plain))
    found = on_ranks(2, lambda optimizer: wrap(optimizer, **options), make)
    local = wrap in (nk.EASGD, nk.LocalSGD)
    if wrap is not nk.EASGD:
        same(found[0][0], want)
        same(found[1][0], want)
    same(found[int(local)][1], values(plain.variables))


@pytest.mark.slow
@pytest.mark.usefixtures("_launched")
def test_at_the_centre_what_is_accumulated_are_the_rounds_of_all_workers():
    def make():
        return o.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2)

    x, y = cases.data()
    want = cases.weights(fitted(make(), epochs=2))
    halves = [
        np.concatenate([part[at : at + 4] for at in range(rank, 40, 8)]) for rank in (0, 4) for part in [x]
    ]
    labels = [np.concatenate([y[at : at + 4] for at in range(rank, 40, 8)]) for rank in (0, 4)]
    start = cases.dense().get_weights()

    def program(world):
        model = cases.dense()
        model.set_weights(start)
        cases.compiled(model, nk.Synchronous(make()))
        mine = max(world.rank - 1, 0)
        options = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
        model.fit(halves[mine], labels[mine], callbacks=[nk.Distribute(world=world)], **options)
        return cases.weights(model)

    with ranks(3) as cluster:
        for found in cluster.run(program, timeout_s=60):
            for got, expected in zip(found, want, strict=True):
                np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


class _Sum:
    """Stands for the sum of gradients of a worker."""

    def add(self, gradients):
        pass


@pytest.mark.parametrize("local", [0.5, "another"])
def test_local_steps_go_by_gradients_that_are_not_scaled(local):
    found = []
    for scale in (None, 8.0):
        inner = o.SGD(0.1, loss_scale_factor=scale)
        wrapped = nk.Downpour(inner, local=o.SGD(0.25) if local == "another" else local)
        variable = keras.Variable([1.0, 2.0])
        wrapped.build([variable])
        wrapped.sum, wrapped.mode, wrapped.attached = _Sum(), nk._wrapper.StepMode.ACCUMULATE, True
        wrapped.apply([keras.ops.ones(2) * (scale or 1.0)], [variable])
        found.append(values([variable]))
    same(*found)
