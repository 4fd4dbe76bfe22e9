"""What Keras' own tests ask of optimizers and callbacks, asked of the wrappers in a world of one.

Alone a wrapper is its optimizer: whatever is done with both leaves the same bits.
"""

from __future__ import annotations

import os
import warnings

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras", reason="the environment for MPICH has no frameworks")

import nnlo_keras as nk  # noqa: E402
from nnlo_common import ConfigurationError  # noqa: E402
from tests.helpers import keras_cases as cases  # noqa: E402
from tests.helpers.frameworks import since  # noqa: E402
from tests.helpers.keras_cases import same, values  # noqa: E402

pytestmark = [
    pytest.mark.framework("keras"),
    # Keras 3.15 itself, with NumPy 2: Variable.__array__ takes no copy argument.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.sampled(2),
]

o = keras.optimizers
k = keras.callbacks
BACKEND = keras.backend.backend()

#: What `Optimizer` itself understands, and so every optimizer.
OPTIONS = [
    {"clipnorm": 0.1},
    {"clipvalue": 0.1},
    {"global_clipnorm": 0.1},
    {"weight_decay": 0.1},
    {"use_ema": True, "ema_momentum": 0.8},
    {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 3},
    {"gradient_accumulation_steps": 3},
    {"gradient_accumulation_steps": 2, "weight_decay": 0.1},
    {"loss_scale_factor": 64.0},
]


def both(make):
    """The optimizer itself, and one like it in a wrapper."""
    return make(), nk.Downpour(make())


def some_variables():
    draw = np.random.default_rng(5)
    shapes = [(4, 3), (3,), (2, 2, 3)]
    return [keras.Variable(draw.standard_normal(shape).astype("f4")) for shape in shapes]


def some_gradients(step):
    draw = np.random.default_rng(step)
    return [
        keras.ops.convert_to_tensor(draw.standard_normal(shape).astype("f4"))
        for shape in [(4, 3), (3,), (2, 2, 3)]
    ]


def stepped(optimizer, steps=5, variables=None):
    """Everything there is after some steps: variables, and the state of the optimizer itself."""
    variables = variables or some_variables()
    for step in range(steps):
        optimizer.apply(some_gradients(step), variables)
    optimizer.finalize_variable_values(variables)
    return values([*variables, *getattr(optimizer, "inner_optimizer", optimizer).variables])


def fitted(optimizer, callbacks=(), epochs=3, model=None, **options):
    """The model after a fit, and the history."""
    model = model or cases.compiled(cases.dense(), optimizer, metrics=["accuracy"])
    x, y = cases.data()
    options = {"batch_size": 8, "shuffle": False, "verbose": 0, "validation_data": (x, y)} | options
    history = model.fit(x, y, epochs=epochs, callbacks=list(callbacks), **options).history
    return model, history


# -- steps --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", cases.OPTIMIZERS.values())
def test_every_optimizer_steps_as_it_does_unwrapped(optimizer):
    plain, wrapped = both(lambda: optimizer(0.05))
    same(stepped(wrapped), stepped(plain))
    assert int(wrapped.iterations) == int(plain.iterations) == 5


@pytest.mark.extended
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("optimizer", cases.OPTIMIZERS.values())
def test_every_optimizer_understands_every_option(optimizer, options):
    plain, wrapped = both(lambda: optimizer(0.05, **options))
    same(stepped(wrapped), stepped(plain))
    assert int(wrapped.iterations) == int(plain.iterations)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_of_the_optimizer_happen_once(options):
    plain, wrapped = both(lambda: o.SGD(0.05, momentum=0.5, **options))
    same(stepped(wrapped), stepped(plain))
    assert float(wrapped.scale_loss(3.0)) == float(plain.scale_loss(3.0))


@pytest.mark.parametrize("schedule", cases.SCHEDULES)
def test_schedules_count_the_optimizers_steps(schedule):
    plain, wrapped = both(lambda: o.SGD(cases.SCHEDULES[schedule]()))
    same(stepped(wrapped, 10), stepped(plain, 10))
    assert float(wrapped.learning_rate) == float(plain.learning_rate)


def test_every_schedule_of_keras_is_among_them():
    schedules = o.schedules
    assert set(cases.SCHEDULES) == {
        name
        for name, schedule in vars(schedules).items()
        if isinstance(schedule, type) and name != "LearningRateSchedule"
    }


def test_gradients_with_their_variables():
    plain, wrapped = both(lambda: o.Adam(0.1))
    one, other = some_variables(), some_variables()
    for step in range(3):
        steps = plain.apply_gradients(list(zip(some_gradients(step), one, strict=True)))
        assert int(wrapped.apply_gradients(list(zip(some_gradients(step), other, strict=True)))) == int(steps)
    same(values(other), values(one))


def test_gradients_that_are_missing():
    for optimizer in both(lambda: o.SGD(1.0)):
        first, second = keras.Variable([3.0, 4.0]), keras.Variable([5.0, 6.0])
        with pytest.raises(ValueError, match="No gradients provided"):
            optimizer.apply([None, None], [first, second])
        with pytest.warns(UserWarning, match="Gradients do not exist"):
            optimizer.apply([None, keras.ops.ones(2)], [first, second])
        same(values([first, second]), [np.array([3.0, 4.0], "f4"), np.array([4.0, 5.0], "f4")])


def test_gradients_without_variables_need_an_optimizer_that_is_built():
    for optimizer in both(lambda: o.SGD(1.0)):
        with pytest.raises(ValueError, match="must already be built"):
            optimizer.apply([keras.ops.ones(2)])
        variable = keras.Variable([3.0, 4.0])
        optimizer.build([variable])
        optimizer.apply([keras.ops.ones(2)])
        same(values([variable]), [np.array([2.0, 3.0], "f4")])


def test_constraints_hold_and_what_is_to_be_overwritten_is():
    for optimizer in both(lambda: o.SGD(0.5)):
        constrained, overwritten = keras.Variable([-1.0, 2.0]), keras.Variable([7.0, 7.0])
        constrained.constraint = keras.constraints.NonNeg()
        overwritten.overwrite_with_gradient = True
        optimizer.apply([keras.ops.ones(2), keras.ops.ones(2)], [constrained, overwritten])
        same(values([constrained, overwritten]), [np.array([0.0, 1.5], "f4"), np.ones(2, "f4")])


def test_weights_of_an_optimizer_can_be_set():
    first, second = nk.Downpour(o.Adam(0.1)), nk.Downpour(o.Adam(0.1))
    stepped(first)
    with pytest.raises(ValueError, match="not yet been built"):
        second.set_weights(first.variables)
    second.build(some_variables())
    second.set_weights(first.variables)
    same(values(second.variables), values(first.variables))


def test_variables_are_excluded_from_weight_decay():
    def make():
        optimizer = o.AdamW(0.1, weight_decay=0.5)
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        return optimizer

    want, _ = fitted(make())
    got, _ = fitted(nk.Downpour(make()))
    same(cases.weights(got), cases.weights(want))


def test_a_rate_that_becomes_a_schedule():
    wrapped = nk.Downpour(o.Adam(0.001))
    count = len(wrapped.variables)
    wrapped.learning_rate = o.schedules.PolynomialDecay(0.001, 4)
    assert len(wrapped.variables) == count - 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        pytest.param(
            lambda: o.MultiOptimizer(o.OptimizerMap(o.SGD())),
            "cannot wrap a MultiOptimizer",
            marks=since("keras", "3.15", "there is a MultiOptimizer"),
        ),
        (lambda: o.LossScaleOptimizer(o.SGD()), "cannot wrap a LossScaleOptimizer"),
    ],
)
def test_optimizers_that_hold_others_are_refused(make, words):
    with pytest.raises(ConfigurationError, match=words):
        nk.EASGD(make())


# -- a loss scale around it ---------------------------------------------------------------------------


def apply_as_fit_does(optimizer, gradients):
    """Step; a LossScaleOptimizer on JAX can do so only with its state outside."""
    if BACKEND != "jax":
        optimizer.apply(gradients, list(optimizer.inner_optimizer._trainable_variables))
        return
    variables, state = list(optimizer._trainable_variables), list(optimizer.variables)
    after = optimizer.stateless_apply([v.value for v in state], gradients, [v.value for v in variables])
    for variable, value in zip([*variables, *state], [*after[0], *after[1]], strict=True):
        variable.assign(value)


@since("keras", "3.9", "a loss scale has the count of the optimizer in it")
@pytest.mark.parametrize("gradient", [[1.0, 6.0], [np.inf, 1.0], [np.nan, 1.0]])
def test_the_loss_scale_leaves_steps_out_that_overflow(gradient):
    def make(inner):
        return o.LossScaleOptimizer(inner, initial_scale=4.0, dynamic_growth_steps=2)

    found = []
    for inner in both(lambda: o.SGD(0.5, momentum=0.9)):
        optimizer, variable = make(inner), keras.Variable([1.0, 2.0])
        optimizer.build([variable])
        for _ in range(3):
            apply_as_fit_does(optimizer, [keras.ops.convert_to_tensor(np.array(gradient, "f4"))])
        found.append([*values([variable, optimizer.dynamic_scale]), int(optimizer.iterations)])
    same(found[1], found[0])
    assert found[0][2] == (3 if np.isfinite(gradient).all() else 0)


@pytest.mark.slow
@since("keras", "3.9", "a loss scale has the count of the optimizer in it")
def test_the_case_that_overflows_does_so():
    model = cases.train("float16", nk.Downpour)
    assert isinstance(model.optimizer, o.LossScaleOptimizer)
    assert float(model.optimizer.dynamic_scale) < 2.0**15
    assert 0 < int(model.optimizer.iterations) < 15


# -- fit ----------------------------------------------------------------------------------------------


@pytest.mark.sampled(7)
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *cases.cases(cases.CASES),
        *(pytest.param(name, marks=pytest.mark.extended) for name in cases.cases(cases.MORE)),
    ],
)
def test_alone_the_weights_are_those_of_a_plain_fit(name):
    want = cases.train(name, lambda optimizer: optimizer)
    got = cases.train(name, nk.Downpour, [nk.Distribute()])
    same(cases.weights(got), cases.weights(want))


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
@pytest.mark.skipif(BACKEND != "torch", reason="to try torch.compile, which takes its time")
def test_a_model_that_torch_compiles():
    models = [cases.compiled(cases.dense(), optimizer, jit_compile=True) for optimizer in both(o.SGD)]
    same(*(cases.weights(fitted(None, model=model, epochs=1)[0]) for model in models))


# -- on disk ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", cases.OPTIMIZERS.values())
def test_every_optimizer_comes_back_from_its_configuration(optimizer):
    wrapped = nk.EASGD(optimizer(0.05, clipnorm=0.5, use_ema=True), every=7)
    again = o.deserialize(o.serialize(wrapped))
    assert type(again) is nk.EASGD
    assert type(again.inner_optimizer) is type(wrapped.inner_optimizer)
    assert again.get_config() == wrapped.get_config()


@pytest.mark.parametrize("schedule", cases.SCHEDULES)
def test_every_schedule_comes_back_from_its_configuration(schedule):
    wrapped = nk.Downpour(o.SGD(cases.SCHEDULES[schedule]()))
    again = o.deserialize(o.serialize(wrapped))
    assert again.get_config() == wrapped.get_config()
    same(stepped(again), stepped(wrapped))


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(optimizer, marks=() if name in ("Adam", "Muon") else pytest.mark.extended)
        for name, optimizer in cases.OPTIMIZERS.items()
    ],
)
def test_a_model_that_was_saved_goes_on_as_if_it_had_not_been(optimizer, tmp_path):
    model, _ = fitted(nk.Downpour(optimizer(0.05)))
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    again = keras.models.load_model(tmp_path / "model.keras")
    from_weights = cases.compiled(cases.dense(), nk.Downpour(optimizer(0.05)), metrics=["accuracy"])
    from_weights.optimizer.build(from_weights.trainable_variables)
    from_weights.load_weights(tmp_path / "model.weights.h5")
    want = cases.weights(fitted(None, model=model)[0])
    assert type(again.optimizer) is nk.Downpour
    for one in (again, from_weights):
        assert int(one.optimizer.iterations) == 15
        same(cases.weights(fitted(None, model=one)[0]), want)


@pytest.mark.slow
@pytest.mark.skipif(BACKEND != "tensorflow", reason="about tf.train.Checkpoint")
def test_a_checkpoint_of_tensorflow(tmp_path):
    import tensorflow as tf

    model, _ = fitted(nk.Downpour(o.Adam(0.05)))
    state = [*model.variables, *model.optimizer.variables]
    want = values(state)
    checkpoint = tf.train.Checkpoint(model, optimizer=model.optimizer)
    path = checkpoint.save(str(tmp_path / "checkpoint"))
    fitted(None, model=model)
    assert not np.array_equal(values(state)[0], want[0])
    checkpoint.restore(path)
    same(values(state), want)


# -- callbacks ----------------------------------------------------------------------------------------


class Ramp(k.Callback):
    """Sets the learning rate, batch by batch."""

    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate = 0.01 * (batch + 1)


CALLBACKS = {
    "LearningRateScheduler": lambda folder: [k.LearningRateScheduler(lambda epoch, rate: rate * 0.5)],
    "ReduceLROnPlateau": lambda folder: [k.ReduceLROnPlateau(factor=0.1, patience=1, min_delta=10)],
    "EarlyStopping": lambda folder: [k.EarlyStopping(patience=1, min_delta=10, restore_best_weights=True)],
    "ModelCheckpoint": lambda folder: [k.ModelCheckpoint(str(folder / "{epoch}.keras"))],
    "SwapEMAWeights": lambda folder: [
        k.SwapEMAWeights(swap_on_epoch=True),
        k.ModelCheckpoint(str(folder / "{epoch}.weights.h5"), save_weights_only=True),
    ],
    "CSVLogger": lambda folder: [k.CSVLogger(str(folder / "log.csv"))],
    "TerminateOnNaN": lambda folder: [k.TerminateOnNaN()],
    "own": lambda folder: [Ramp()],
}


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks_see_and_do_what_they_always_do(name, tmp_path):
    found = []
    for optimizer, distribute in zip(
        both(lambda: o.SGD(0.1, momentum=0.9, use_ema=name == "SwapEMAWeights")), (0, 1), strict=True
    ):
        folder = tmp_path / str(distribute)
        folder.mkdir()
        extra = [nk.Distribute()] if distribute else []
        model, history = fitted(optimizer, [*CALLBACKS[name](folder), *extra], epochs=4)
        files = sorted(path.name for path in folder.iterdir())
        found.append((model, history, files, folder))
    (plain, want, files, theirs), (wrapped, got, written, ours) = found
    same(cases.weights(wrapped), cases.weights(plain))
    assert got == want
    assert written == files
    for file in files:
        if file.endswith(".csv"):
            assert (ours / file).read_text() == (theirs / file).read_text()
        if file.endswith(".keras"):
            same(*(cases.weights(keras.models.load_model(folder / file)) for folder in (ours, theirs)))
        if file.endswith(".weights.h5"):
            wrapped.load_weights(ours / file)
            plain.load_weights(theirs / file)
            same(cases.weights(wrapped), cases.weights(plain))
            same(values(wrapped.optimizer.inner_optimizer.variables), values(plain.optimizer.variables))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_averages_are_validated_under_a_loss_scale_too(policy):
    found = []
    for optimizer in both(lambda: o.SGD(0.1, use_ema=True, ema_momentum=0.5)):
        keras.config.set_dtype_policy(policy)
        try:
            model, history = fitted(optimizer, [k.SwapEMAWeights()])
        finally:
            keras.config.set_dtype_policy("float32")
        found.append((cases.weights(model), history))
    same(found[1][0], found[0][0])
    assert found[1][1] == found[0][1]
    assert found[0][1]["val_loss"][0] != found[0][1]["loss"][0]


@pytest.mark.slow
def test_a_training_that_was_interrupted_goes_on_from_its_backup(tmp_path):
    class Interrupt(k.Callback):
        """Comes after the second epoch's backup."""

        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    want, history = fitted(nk.Downpour(o.Adam(0.05)), epochs=4)
    backup = k.BackupAndRestore(str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        fitted(nk.Downpour(o.Adam(0.05)), [backup, nk.Distribute(), Interrupt()], epochs=4)
    got, rest = fitted(nk.Downpour(o.Adam(0.05)), [backup, nk.Distribute()], epochs=4)
    same(cases.weights(got), cases.weights(want))
    assert rest["loss"] == history["loss"][2:]


@pytest.mark.slow
def test_a_loss_that_is_none_ends_the_training():
    x, y = cases.data()
    model = cases.compiled(cases.dense(), nk.Downpour(o.SGD(0.1)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy's, about what is not finite
        history = model.fit(
            np.full_like(x, np.nan), y, epochs=5, verbose=0, callbacks=[k.TerminateOnNaN(), nk.Distribute()]
        )
    assert len(history.history["loss"]) == 1


@pytest.mark.slow
def test_hooks_are_called_as_often_as_ever():
    names = [name for name in dir(k.LambdaCallback) if name.startswith("on_")]

    def calls_with(optimizer):
        calls = []

        def hook(name):
            return lambda *args, **options: calls.append((name, args))

        fitted(optimizer, [k.LambdaCallback(**{name: hook(name) for name in names})], epochs=2)
        return [(name, args[0] if args and isinstance(args[0], int) else None) for name, args in calls]

    plain, wrapped = (calls_with(optimizer) for optimizer in both(lambda: o.SGD(0.1)))
    assert wrapped == plain
    assert ("on_epoch_end", 1) in plain


@pytest.mark.parametrize(("given", "expected"), [(None, [0.05, 0.02]), (0.5, [0.5, 0.5])])
def test_the_local_steps_of_agn_follow_the_optimizer_unless_they_have_a_rate_of_their_own(given, expected):
    wrapper = nk.AGN(keras.optimizers.SGD(0.05), local_learning_rate=given)
    again = nk.AGN.from_config(wrapper.get_config())
    assert again.algorithm == wrapper.algorithm
    variable = keras.Variable(np.zeros(2, "f4"))
    moved = []
    for rate in (0.05, 0.02):
        again.learning_rate = rate  # as a callback sets it
        before = np.array(keras.ops.convert_to_numpy(variable))
        again._step_locally([keras.ops.ones(2)], [variable])
        moved.append(float((before - keras.ops.convert_to_numpy(variable))[0]))
    assert moved == pytest.approx(expected)
