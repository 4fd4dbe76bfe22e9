"""Parts of Keras and its back ends that are not public: they are still what `nnlo_keras._compat` says."""

from __future__ import annotations

import inspect
import os
import sys

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras", reason="the environment for MPICH has no frameworks")

from nnlo_common import ConfigurationError  # noqa: E402
from nnlo_keras import _compat  # noqa: E402

pytestmark = [
    pytest.mark.framework("keras"),
    # Keras 3.15 itself, with NumPy 2: Variable.__array__ takes no copy argument.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

BACKEND = keras.backend.backend()
CHANGED = f"Keras {keras.__version__} has changed: mend nnlo_keras/_compat.py"


def model_of_two():
    model = keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    return model


class Look(keras.callbacks.Callback):
    """Does something within `fit`."""

    def __init__(self, **looks):
        super().__init__()
        self.looks, self.seen = looks, {}

    def look(self, hook):
        if hook in self.looks:
            self.seen[hook] = self.looks[hook](self.model)

    def on_train_begin(self, logs=None):
        self.look("train_begin")

    def on_epoch_begin(self, epoch, logs=None):
        self.look("epoch_begin")

    def on_train_batch_end(self, batch, logs=None):
        self.look("batch_end")


def fitted(model=None, x=None, epochs=1, validation_data=None, **looks):
    look, x = Look(**looks), np.ones((8, 2), "f4") if x is None else x
    y = None if isinstance(x, keras.utils.PyDataset) else np.ones((8, 1), "f4")
    history = (model or model_of_two()).fit(
        x, y, batch_size=2, epochs=epochs, verbose=0, callbacks=[look], validation_data=validation_data
    )
    return look.seen, history


def test_what_has_called_is_found():
    seen, _ = fitted(train_begin=lambda model: (_compat.callbacks_of_fit(), _compat.data_of_fit()))
    callbacks, data = seen["train_begin"]
    assert callbacks is not None, f"{CHANGED}: no CallbackList is among what calls a callback"
    assert data is not None, f"{CHANGED}: fit has no local variable epoch_iterator"
    assert getattr(data, "num_batches", 0) == 4, f"{CHANGED}: what fit loops over does not know its length"
    assert hasattr(data, "data_adapter"), f"{CHANGED}: what fit loops over has no data_adapter"
    assert _compat.callbacks_of_fit() is None
    assert _compat.data_of_fit() is None


class Ones(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return np.ones((2, 2), "f4"), np.ones((2, 1), "f4")


def test_the_sequence_behind_the_data_is_found():
    data = Ones()
    seen, _ = fitted(x=data, train_begin=lambda model: _compat.sequence_of(_compat.data_of_fit()))
    assert seen["train_begin"] is data, f"{CHANGED}: the adapter of a PyDataset has no py_dataset"
    assert _compat.sequence_of(object()) is None


def test_an_epoch_has_the_length_that_is_set():
    counted = []

    def shorten(model):
        _compat.set_length(_compat.data_of_fit(), 3)

    fitted(x=Ones(), epoch_begin=shorten, batch_end=lambda model: counted.append(1))
    assert len(counted) == 3, f"{CHANGED}: fit makes no use of _num_batches"


def test_an_epoch_ends_when_it_is_told_to():
    counted = []

    def end(model):
        counted.append(1)
        if len(counted) == 2:
            _compat.end_epoch(_compat.data_of_fit())

    fitted(x=Ones(), batch_end=end)
    assert len(counted) == 2, f"{CHANGED}: fit makes no use of _num_batches and _steps_seen"


def test_an_epoch_goes_on_without_data_when_it_is_told_to():
    """One batch more in this epoch, and one in each later epoch; then `fit` is as before."""
    counted, trained = [], []

    def no_step(*given):  # on JAX it is given the state, too, and returns it
        trained.append(1)
        return ({}, given[0]) if BACKEND == "jax" else {}

    def serve(model):
        counted.append(1)
        if len(counted) == 2:
            model.train_function = no_step
            _compat.without_data(_compat.data_of_fit(), inside=True)

    fitted(x=Ones(), epochs=3, batch_end=serve)
    assert (len(counted), len(trained)) == (5, 3), f"{CHANGED}: fit makes no use of _epoch_iterator"


def test_the_data_of_fit_is_made_again_from_other_samples():
    counted = []

    def halve(model):
        _compat.make_data_again(_compat.data_of_fit(), lambda one: None if one is None else one[:4])

    fitted(epoch_begin=halve, batch_end=lambda model: counted.append(1))
    assert len(counted) == 2, f"{CHANGED}: fit makes its data of something else"


def test_fit_is_validated_as_it_does_by_itself():
    model, held = model_of_two(), (np.ones((5, 2), "f4"), np.zeros((5, 1), "f4"))
    found = []

    class Again(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            found.append(
                (_compat.ending_epoch(), _compat.validated(model, _compat.callbacks_of_fit(), epoch))
            )

        def on_train_batch_end(self, batch, logs=None):
            assert not _compat.ending_epoch()

    x, y = np.ones((8, 2), "f4"), np.ones((8, 1), "f4")
    options = {"validation_data": held, "validation_freq": 2, "epochs": 2, "verbose": 0}
    history = model.fit(x, y, callbacks=[Again()], **options).history
    assert found[0] == (True, {})
    assert found[1] == (True, {"val_loss": history["val_loss"][0], "val_mae": history["val_mae"][0]})
    assert not _compat.ending_epoch()


def test_fit_begins_with_the_epoch_that_is_set():
    model = model_of_two()
    _, history = fitted(model, epochs=3, train_begin=lambda model: _compat.begin_with(model, 2))
    assert history.epoch == [2], f"{CHANGED}: fit makes no use of Model._initial_epoch"
    assert _compat.first_epoch(model) == 2
    _compat.begin_with(model, None)
    assert _compat.first_epoch(model) == 0


def test_validation_rests_and_comes_again():
    undo = []
    model, data = model_of_two(), (np.ones((2, 2), "f4"), np.ones((2, 1), "f4"))
    _, history = fitted(
        model, validation_data=data, train_begin=lambda m: undo.extend(_compat.unvalidated(m))
    )
    assert "val_loss" not in history.history, f"{CHANGED}: fit makes no use of Model._should_eval"
    undo[0]()
    assert "val_loss" in fitted(model, validation_data=data)[1].history


def test_layers_within_others_are_found():
    inner = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    model = keras.Sequential([keras.Input((2,)), inner])
    found = _compat.layers_of(model)
    assert model in found, CHANGED
    assert inner.layers[0] in found, CHANGED
    assert model not in _compat.layers_of(model, itself=False), (
        f"{CHANGED}: include_self means something else"
    )


def test_what_was_made_to_be_trained_is_known_when_it_is_frozen():
    layer = keras.layers.Dense(1)
    layer.build((None, 2))
    layer.trainable = False
    assert [id(one) for one in _compat.made_to_be_trained(layer)] == [id(layer.kernel), id(layer.bias)], (
        f"{CHANGED}: a layer has no list _trainable_variables of what was made to be trained"
    )


def test_the_loss_is_counted_in_samples():
    seen, _ = fitted(batch_end=lambda model: (_compat.synchronise(model), _compat.samples_counted(model))[1])
    assert seen["batch_end"] == 8, f"{CHANGED}: Model._loss_tracker has no count of samples"
    assert _compat.samples_counted(object()) == 0


def test_a_variable_has_a_value_of_its_own_after_its_initializer():
    variable = keras.Variable([1.0, 2.0])
    value = _compat.value_of(variable)
    assert np.asarray(keras.ops.convert_to_numpy(value)).tolist() == [1, 2], (
        f"{CHANGED}: Variable._value is else"
    )
    assert not _compat.away(variable)
    with keras.StatelessScope():
        waiting = keras.Variable(keras.initializers.Zeros(), shape=(2,))
    waits = _compat.value_of(waiting) is None
    assert _compat.has_no_value_yet(waiting) is waits, (
        f"{CHANGED}: Variable._initializer means something else"
    )
    assert not _compat.has_no_value_yet(variable)


def test_layers_draw_from_the_global_seeds():
    keras.utils.set_random_seed(1)
    made = _compat.global_seeds(make=True)
    assert made is _compat.global_seeds(), f"{CHANGED}: the global seed generator has another name"
    before = np.array(keras.ops.convert_to_numpy(made.state))
    keras.random.normal((2,))
    after = np.array(keras.ops.convert_to_numpy(made.state))
    assert not np.array_equal(before, after), f"{CHANGED}: keras.random draws from something else"


def test_an_optimizer_knows_its_variables_and_its_schedule():
    variable, schedule = keras.Variable([1.0]), keras.optimizers.schedules.CosineDecay(0.1, 10)
    optimizer = keras.optimizers.SGD(schedule)
    optimizer.build([variable])
    assert [id(one) for one in _compat.trained_by(optimizer)] == [id(variable)], (
        f"{CHANGED}: an optimizer's _trainable_variables are not those that it was built for"
    )
    assert _compat.schedule_of(optimizer) is schedule, f"{CHANGED}: a schedule is not in _learning_rate"
    assert _compat.schedule_of(keras.optimizers.SGD(0.1)) is None


def test_a_constructor_makes_what_a_wrapper_forgets():
    made = vars(keras.optimizers.SGD(0.1))
    assert not [name for name in _compat.MADE_AT_ONCE if name not in made], CHANGED


def test_what_keras_reads_of_an_optimizer_is_what_is_passed_on():
    plain = keras.optimizers.SGD(0.1, use_ema=True, gradient_accumulation_steps=2)
    plain.build([keras.Variable([1.0])])
    parts = [name for name in vars(_compat.OptimizerInside) if name[0] == "_" and name[1] != "_"]
    assert len(parts) == 5
    lacking = [name for name in parts if not hasattr(plain, name)]
    assert not lacking, f"{CHANGED}: an optimizer has no {', '.join(lacking)}"


def test_swapped_averages_are_noted():
    assert hasattr(keras.callbacks.SwapEMAWeights(), _compat.EMA_SWAPPED), (
        f"{CHANGED}: SwapEMAWeights has no {_compat.EMA_SWAPPED}"
    )


def test_a_module_of_a_back_end_is_known():
    module = keras.optimizers.serialize(keras.optimizers.SGD())["module"]
    assert module == "keras.optimizers" or _compat.module_of_back_end(module), (
        f"{CHANGED}: optimizers are serialized as those of {module}"
    )


#: Private names of Keras that classes of ours define on purpose, by the module of the class.
HIDDEN = {"nnlo_keras._compat": set(vars(_compat.OptimizerInside)), "nnlo_keras._passing": set()}


def test_no_class_of_ours_hides_a_private_name_of_keras_by_chance():
    found = []
    for module in [one for name, one in sys.modules.items() if name.startswith("nnlo_keras.")]:
        for ours in [one for one in vars(module).values() if inspect.isclass(one)]:
            if not ours.__module__.startswith("nnlo_keras") or ".tune." in ours.__module__:
                continue
            theirs = {
                name
                for base in ours.__mro__
                if base.__module__.split(".")[0] in ("keras", "tensorflow", "torch")
                for name in vars(base)
                if name.startswith("_") and not name.startswith("__")
            }
            own = {name for name in vars(ours) if name in theirs and not name.startswith("_abc_")}
            found += [f"{ours.__name__}.{name}" for name in own - HIDDEN.get(ours.__module__, set())]
    assert not sorted(set(found)), f"{CHANGED}, or call ours otherwise: Keras has these names"


class Bare:
    """Has none of the private parts."""

    path = "bare"


@pytest.mark.parametrize(
    ("use", "part"),
    [
        (_compat.spec_of, "_distributed_dataset"),
        (lambda bare: _compat.set_length(bare, 1), "_num_batches"),
        (_compat.end_epoch, "_steps_seen"),
        (lambda bare: _compat.without_data(bare, inside=True), "_enumerate_iterator"),
        (lambda bare: _compat.make_data_again(bare, id), "_interrupted_warning"),
        (_compat.first_epoch, "_initial_epoch"),
        (lambda bare: _compat.begin_with(bare, 1), "_initial_epoch"),
        (_compat.layers_of, "_flatten_layers"),
        (lambda bare: _compat.build_metrics(bare, None), "_symbolic_build"),
        (_compat.unvalidated, "_should_eval"),
        (_compat.taken_state, "_get_jax_state"),
        (_compat.value_of, "_value"),
        (lambda bare: _compat.put_value(bare, 1), "_value"),
        (_compat.away, "_value"),
        (_compat.has_no_value_yet, "_value"),
        pytest.param(
            *(_compat.is_spread, "_layout"),
            marks=pytest.mark.skipif(BACKEND != "jax", reason="only JAX spreads variables over devices"),
        ),
        (_compat.trained_by, "_trainable_variables"),
        (_compat.schedule_of, "_learning_rate"),
    ],
)
def test_a_part_that_is_gone_is_named(use, part):
    with pytest.raises(
        ConfigurationError, match=f"keras {keras.__version__} has changed: .*Bare has no {part} "
    ):
        use(Bare())


def test_a_part_of_a_back_end_that_is_gone_is_named(monkeypatch):
    with pytest.raises(ConfigurationError, match=r"tensorflow .* has changed: Bare has no _numpy any more"):
        _compat.memory_of_tensor(Bare())
    torch = pytest.importorskip("torch")
    for use, part in ((_compat.copy_all, "_foreach_copy_"), (_compat.add_all, "_foreach_add_")):
        monkeypatch.delattr(torch, part)
        with pytest.raises(ConfigurationError, match=f"torch .* has changed: torch has no {part} any more"):
            use([], [])


def test_seeds_that_are_elsewhere_are_told_of(monkeypatch):
    monkeypatch.setitem(sys.modules, "keras.src.backend.common.global_state", None)
    with pytest.raises(ConfigurationError, match="has changed: its global seed generator is gone"):
        _compat.global_seeds()


def test_an_error_of_the_users_own_is_left_alone():
    class Model:
        def _symbolic_build(self, data_batch):
            return data_batch.of_the_user

    with pytest.raises(AttributeError, match="of_the_user"):
        _compat.build_metrics(Model(), object())


@pytest.mark.skipif(BACKEND != "tensorflow", reason="there are data sets of TensorFlow on TensorFlow only")
def test_batches_of_tensorflow_say_what_they_look_like():
    seen, _ = fitted(train_begin=lambda model: _compat.spec_of(_compat.data_of_fit()))
    x, y = seen["train_begin"]
    assert (x.shape[-1], y.shape[-1]) == (2, 1), f"{CHANGED}: element_spec of _distributed_dataset is else"


@pytest.mark.skipif(BACKEND != "tensorflow", reason="there are data sets of TensorFlow on TensorFlow only")
def test_the_steps_of_a_pipeline_are_known_to_its_begin():
    import tensorflow as tf

    first, second = (tf.data.Dataset.range(number) for number in (3, 4))
    middle = first.map(abs)
    made = tf.data.Dataset.zip((middle, second)).batch(2).prefetch(1)
    steps = set(map(id, _compat.steps_of_dataset(made, lambda step: False)))
    assert {id(first), id(second)} < steps, f"TensorFlow {tf.__version__} has changed: _inputs"
    steps = set(map(id, _compat.steps_of_dataset(made, lambda step: step is middle)))
    assert {id(first), id(second), id(middle)} & steps == {id(second), id(middle)}


@pytest.mark.skipif(BACKEND != "tensorflow", reason="tensors of TensorFlow are there on TensorFlow only")
def test_the_memory_of_a_tensor_is_not_a_copy():
    import tensorflow as tf

    tensor = tf.constant([1.0, 2.0])
    first, second = _compat.memory_of_tensor(tensor), _compat.memory_of_tensor(tensor)
    assert np.shares_memory(first, second), f"TensorFlow {tf.__version__} has changed: _numpy copies"


@pytest.mark.skipif(BACKEND != "torch", reason="tensors of torch are there on torch only")
def test_many_tensors_are_copied_and_added_at_once():
    import torch

    places = [torch.zeros(2), torch.zeros(1)]
    _compat.copy_all(places, [torch.ones(2), torch.ones(1)])
    _compat.add_all(places, [torch.ones(2), torch.ones(1)])
    assert [one.tolist() for one in places] == [[2, 2], [2]], f"PyTorch {torch.__version__} has changed"


@pytest.mark.skipif(BACKEND != "jax", reason="fit takes the state out of variables on JAX only")
def test_the_state_that_fit_has_taken_comes_back():
    model, taken = model_of_two(), []

    def look(batch, logs):
        taken.append(_compat.away(model.trainable_variables[0]))
        _compat.synchronise(model)
        taken.append(_compat.away(model.trainable_variables[0]))

    # Not by `Look`: a callback that asks for its model brings the values back.
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=look)
    model.fit(np.ones((8, 2), "f4"), np.ones((8, 1), "f4"), batch_size=2, verbose=0, callbacks=[callback])
    assert taken[0], f"{CHANGED}: on JAX variables have their values within an epoch"
    assert not taken[1], f"{CHANGED}: jax_state_sync does not bring them back"
    lists = ("trainable_variables", "non_trainable_variables", "optimizer.variables", "metrics_variables")
    values = [[one.value for one in _inner(model, name)] for name in lists]
    _compat.give_state(model, values)
    assert [len(one) for one in _compat.taken_state(model)] == [len(one) for one in values], CHANGED
    assert not _compat.is_spread(keras.Variable([1.0]))


@pytest.mark.skipif(BACKEND == "jax", reason="on JAX variables have a layout in each Keras")
def test_variables_without_a_layout_are_not_spread():
    """In Keras 3.7 only those of JAX have one."""
    assert not _compat.is_spread(Bare())


def _inner(model, name):
    for part in name.split("."):
        model = getattr(model, part)
    return model
