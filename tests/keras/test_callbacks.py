"""Our callbacks in one process, on the back end that KERAS_BACKEND names."""

from __future__ import annotations

import copy
import doctest
import importlib
import json
import os
import pkgutil

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras", reason="the environment for MPICH has no frameworks")

import nnlo_keras as nk  # noqa: E402
from nnlo_common import ConfigurationError  # noqa: E402
from tests.helpers import keras_cases as cases  # noqa: E402
from tests.helpers.keras_cases import equal  # noqa: E402
from tests.helpers.threads import facts_end  # noqa: E402

pytestmark = [
    pytest.mark.framework("keras"),
    # Keras 3.15 itself, with NumPy 2: Variable.__array__ takes no copy argument.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

OURS = [info.name for info in pkgutil.iter_modules(nk._callbacks.__path__, "nnlo_keras._callbacks.")]


@pytest.mark.slow
@pytest.mark.parametrize("name", OURS)
def test_examples_run(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def adam(rate=0.01):
    return nk.Downpour(keras.optimizers.Adam(rate))


def fit(callbacks, *, epochs=3, optimizer=None, model=None, **options):
    """Train on five batches of eight; return the model and its history."""
    model = model or cases.compiled(cases.dense(), optimizer or adam())
    x, y = cases.data()
    options = {"batch_size": 8, "shuffle": False, "verbose": 0} | options
    return model, model.fit(x, y, epochs=epochs, callbacks=callbacks, **options)


def state(model):
    variables = [*model.weights, *model.optimizer.variables]
    return [np.array(keras.ops.convert_to_numpy(one)) for one in variables]


class Interrupt(keras.callbacks.Callback):
    """Fails at the beginning of an epoch, as a time limit would."""

    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            raise TimeoutError


class Rates(keras.callbacks.Callback):
    """Notes the learning rate of each batch."""

    def __init__(self):
        super().__init__()
        self.rates = []

    def on_train_batch_begin(self, batch, logs=None):
        rate = self.model.optimizer.learning_rate
        self.rates.append(float(keras.ops.convert_to_numpy(rate)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("place", ["before", "behind", "without"])
def test_alone_no_callback_of_ours_changes_the_weights(place, tmp_path):
    want, _ = fit([])
    ours = [
        nk.Broadcast(),
        nk.MetricAverage(),
        nk.Report(tmp_path, timeline=True),
    ]
    given = {"before": [*ours, nk.Distribute()], "behind": [nk.Distribute(), *ours], "without": ours}[place]
    got, _ = fit(given)
    assert equal(cases.weights(got), cases.weights(want))


def test_callbacks_can_be_copied():
    for one in (
        nk.Checkpoint("x"),
        nk.WarmUp(),
        nk.Broadcast(),
        nk.MetricAverage(),
        nk.Report("x"),
    ):
        assert type(copy.deepcopy(one)) is type(one)


# Checkpoint


@pytest.mark.sampled(3)
@pytest.mark.parametrize("place", ["before", "behind", "without"])
def test_an_interrupted_training_ends_as_if_it_had_not_been(place, tmp_path):
    want, _ = fit([], epochs=4)

    def callbacks(*others):
        saving = nk.Checkpoint(tmp_path / "run")
        first = {
            "before": [saving, nk.Distribute()],
            "behind": [nk.Distribute(), saving],
            "without": [saving],
        }
        return [*first[place], *others]

    with pytest.raises(TimeoutError):
        fit(callbacks(Interrupt(2)), epochs=4)
    model, history = fit(callbacks(), epochs=4)
    assert history.epoch == [0, 1, 2, 3]
    assert len(history.history["loss"]) == 4
    assert equal(cases.weights(model), cases.weights(want))
    assert int(model.optimizer.iterations) == 20
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    checkpoints = [f"checkpoint-00000{number}" for number in (2, 3, 4)]
    assert names == [*checkpoints, "in-use", "model.keras", "ranks"]

    again, history = fit(callbacks(), epochs=4)
    assert history.epoch == [0, 1, 2, 3]
    assert equal(cases.weights(again), cases.weights(want))
    # The next fit of the same model counts for itself.
    assert fit([], model=again, epochs=1)[1].epoch == [0]


def test_it_saves_what_is_within_a_loss_scale(tmp_path):
    def scaled():
        return keras.optimizers.LossScaleOptimizer(adam())

    want, _ = fit([nk.Distribute()], optimizer=scaled())
    with pytest.raises(TimeoutError):
        fit([nk.Checkpoint(tmp_path), nk.Distribute(), Interrupt(1)], optimizer=scaled())
    got, _ = fit([nk.Checkpoint(tmp_path), nk.Distribute()], optimizer=scaled())
    assert equal(cases.weights(got), cases.weights(want))


def test_what_is_saved_is_a_keras_file(tmp_path):
    model, _ = fit([nk.Checkpoint(tmp_path)], epochs=1)
    again = keras.models.load_model(tmp_path / "model.keras")
    assert equal(state(again), state(model))


def saved(folder):
    manifests = sorted(folder.glob("checkpoint-*/manifest.json"))
    return [json.loads(path.read_text())["facts"]["epoch"] for path in manifests]


def test_it_saves_every_so_often_and_at_the_end(tmp_path):
    fit([nk.Checkpoint(tmp_path, every=2)], epochs=5)
    assert saved(tmp_path) == [2, 4, 5]
    fit([nk.Checkpoint(tmp_path, every=2, keep=1)], epochs=6)
    assert saved(tmp_path) == [6]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": nk.Downpour(keras.optimizers.Adam(), every=2)}, r"every=1, .*lag=0\) there, but"),
        ({"optimizer": nk.EASGD(keras.optimizers.Adam())}, r"Downpour\(.* there, but EASGD"),
        ({"optimizer": nk.Downpour(keras.optimizers.SGD())}, "optimizer is Adam there, but SGD here"),
        ({"layer": 9}, r"number 0' float32\[5, 9\] here and 'number 0' float32\[5, 8\] there"),
    ],
)
def test_another_training_is_refused_and_the_folder_kept(options, words, tmp_path):
    fit([nk.Checkpoint(tmp_path)], epochs=1)
    before = {one: one.read_bytes() for one in tmp_path.rglob("*.*") if one.is_file()}
    layer = keras.layers.Dense(options.get("layer", 8), activation="tanh")
    model = cases.compiled(cases.dense(lambda: layer), options.get("optimizer") or adam())
    with pytest.raises(ConfigurationError, match=words):
        fit([nk.Checkpoint(tmp_path)], model=model)
    assert {one: one.read_bytes() for one in tmp_path.rglob("*.*") if one.is_file()} == before


def test_a_damaged_checkpoint_is_told_of_and_the_one_before_is_used(tmp_path):
    want, _ = fit([nk.Checkpoint(tmp_path)], epochs=3)
    path = tmp_path / "checkpoint-000003" / "rank0.npz"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.warns(RuntimeWarning, match=r"rank0\.npz has 1000 bytes.*from checkpoint-000002 instead"):
        got, _ = fit([nk.Checkpoint(tmp_path)], epochs=3)
    assert equal(state(got), state(want))


# WarmUp


def test_the_rate_rises_to_what_was_compiled():
    rates = Rates()
    fit([rates, nk.WarmUp(1.6, start=0.2), nk.Distribute()], optimizer=adam(0.1), epochs=2)
    # `rates` is called first, and so sees the rate of the batch before.
    want = [0.1, *(0.1 * (0.2 + 0.8 * min(1, i / 8)) for i in range(9))]
    assert rates.rates == pytest.approx(want, rel=1e-6)


def test_it_counts_batches_where_several_are_one_execution():
    together = 1 if keras.backend.backend() == "torch" else 2  # torch has one only
    rates = Rates()
    model = cases.dense()
    model.compile(adam(0.1), "mse", steps_per_execution=together)
    x, _ = cases.data()
    model.fit(
        x, x[:, :3], batch_size=8, epochs=2, verbose=0, callbacks=[nk.WarmUp(steps=5, start=0.0), rates]
    )
    first = [i / 50 for i in range(0, 5, together)]
    assert rates.rates == pytest.approx([*first, *(0.1 for _ in first)], rel=1e-6, abs=1e-9)


def test_another_callback_takes_over_when_it_is_warm():
    rates = Rates()
    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2 if epoch else rate)
    fit([scheduler, nk.WarmUp(start=0.0), rates], optimizer=adam(0.1), epochs=3)
    assert rates.rates == pytest.approx([0.0, 0.02, 0.04, 0.06, 0.08, *5 * [0.05], *5 * [0.025]], rel=1e-6)


def test_a_training_that_goes_on_goes_on_warming_up(tmp_path):
    want, got = Rates(), Rates()
    fit([nk.WarmUp(3.5), want], epochs=5)
    with pytest.raises(TimeoutError):
        fit([nk.Checkpoint(tmp_path), nk.WarmUp(3.5), got, Interrupt(2)], epochs=5)
    fit([nk.WarmUp(3.5), nk.Checkpoint(tmp_path), got], epochs=5)
    assert got.rates == want.rates


@pytest.mark.parametrize("again", [True, False], ids=["the same callback", "another one"])
def test_a_second_fit_goes_on_warming_up(again):
    want, got = Rates(), Rates()
    fit([nk.WarmUp(3.5), want], epochs=5)
    warm = nk.WarmUp(3.5)
    model, _ = fit([warm, got], epochs=2)
    fit([warm if again else nk.WarmUp(3.5), got], model=model, epochs=5, initial_epoch=2)
    assert got.rates == want.rates


def test_a_second_fit_warms_up_to_a_rate_that_was_set_between():
    rates = Rates()
    model, _ = fit([nk.WarmUp(3.5)], epochs=2)
    model.optimizer.learning_rate = 0.5
    fit([nk.WarmUp(3.5), rates], model=model, epochs=5, initial_epoch=2)
    assert rates.rates[-1] == 0.5


def test_a_shorter_warm_up_in_a_second_fit_ends_at_once():
    rates = Rates()
    model, _ = fit([nk.WarmUp(3.5)], epochs=2)
    fit([nk.WarmUp(1), rates], model=model, epochs=3, initial_epoch=2)
    assert rates.rates == pytest.approx(5 * [0.01])


def test_another_callback_has_the_rate_of_a_second_fit_once_it_is_warm():
    rates = Rates()
    halve = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    model, _ = fit([nk.WarmUp(1)], epochs=2)
    fit([halve, nk.WarmUp(1), rates], model=model, epochs=3, initial_epoch=2)
    assert rates.rates == pytest.approx(5 * [0.005])


def test_a_rate_that_was_reduced_after_it_stays_reduced(tmp_path):
    rates = Rates()
    reduce = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.001 if epoch == 2 else rate)
    with pytest.raises(TimeoutError):
        fit([nk.Checkpoint(tmp_path), nk.WarmUp(), reduce, Interrupt(3)], epochs=4)
    fit([nk.Checkpoint(tmp_path), nk.WarmUp(), rates], epochs=4)
    assert rates.rates == pytest.approx(5 * [0.001])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nk.WarmUp(0), "above 0"),
        (lambda: nk.WarmUp(steps=0), "at least 1"),
        (lambda: nk.WarmUp(start=2), "from 0 to 1"),
        (lambda: nk.Checkpoint("x", every=0), "at least 1"),
    ],
)
def test_impossible_options_are_named(make, words):
    with pytest.raises(ConfigurationError, match=words):
        make()


def test_a_schedule_warms_up_by_itself():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.2, 3, 0.5)
    with pytest.raises(ConfigurationError, match=r"schedule ExponentialDecay .* of SGD; a schedule warms up"):
        fit([nk.WarmUp()], optimizer=nk.Downpour(keras.optimizers.SGD(schedule)))


@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # as Keras finds out how much there is
def test_epochs_of_unknown_length_are_named():
    x, y = cases.data()

    def batches():
        for start in range(0, 40, 8):
            yield x[start : start + 8], y[start : start + 8]

    model = cases.compiled(cases.dense(), adam())
    with pytest.raises(ConfigurationError, match=r"WarmUp\(epochs=1.0\) does not know how many batches"):
        model.fit(batches(), shuffle=False, verbose=0, callbacks=[nk.WarmUp()])
    rates = Rates()
    model.fit(batches(), shuffle=False, verbose=0, callbacks=[nk.WarmUp(steps=2, start=0.5), rates])
    # On TensorFlow a batch begins that is not there.
    assert rates.rates[:5] == pytest.approx([0.005, 0.0075, 0.01, 0.01, 0.01], rel=1e-6)


# Report


def epochs_in(folder):
    lines = map(json.loads, (folder / "ranks/facts.rank0.jsonl").read_text().splitlines())
    return [line for line in lines if line["what"] == "epoch"]


def test_the_report_has_a_line_for_each_epoch(tmp_path):
    for _ in range(2):  # the second training goes on in the same file
        fit([nk.Report(tmp_path / "new"), nk.Distribute()], validation_split=0.2)
    lines = epochs_in(tmp_path / "new")
    assert [line["epoch"] for line in lines] == [0, 1, 2, 0, 1, 2]
    for line in lines:
        assert (line["batches"], line["samples"]) == (4, 32)
        assert line["batches_per_second"] == pytest.approx(4 / line["seconds"], rel=0.01)
        assert line["memory_mb"] > 10
        assert line["cpu_s"] > 0
        assert line["learning_rate"] == pytest.approx(0.01)
        assert set(line["metrics"]) == {"loss", "val_loss"}
        assert min(line["spent"]["compute"], line["spent"]["validate"]) > 0
        assert sum(line["spent"].values()) == pytest.approx(line["seconds"], abs=1e-4)


def test_what_is_saved_has_facts_unless_there_is_a_report(tmp_path):
    for epochs in (2, 3):
        fit([nk.Checkpoint(tmp_path / "saved"), nk.Distribute()], epochs=epochs)
    assert [line["epoch"] for line in epochs_in(tmp_path / "saved")] == [0, 1, 2]
    assert all({"loss"} == set(line["metrics"]) for line in epochs_in(tmp_path / "saved"))
    fit([nk.Checkpoint(tmp_path / "with"), nk.Report(tmp_path / "own")])
    fit([nk.Checkpoint(tmp_path / "without", report=False)])
    assert [path.parents[1].name for path in tmp_path.glob("*/ranks/facts*")] in (
        ["own", "saved"],
        ["saved", "own"],
    )


@pytest.mark.extended
def test_the_profiler_of_the_back_end_writes_into_the_folder(tmp_path):
    fit([nk.Report(tmp_path, profile="2-3"), nk.Distribute()], epochs=1)
    (folder,) = tmp_path.glob("ranks/profile*")
    assert folder.name == "profile.rank0"
    assert list(
        folder.glob("trace.json" if keras.backend.backend() == "torch" else "plugins/profile/*/*.xplane.pb")
    )


def test_the_report_is_json_whatever_the_loss_is(tmp_path):
    x, y = cases.data()
    model = cases.compiled(cases.dense(), adam())
    model.fit(np.full_like(x, np.nan), y, verbose=0, callbacks=[nk.Report(tmp_path)])
    assert [line["metrics"] for line in epochs_in(tmp_path)] == [{"loss": None}]


@pytest.mark.parametrize("callback", [nk.Report, nk.Checkpoint])
def test_a_place_that_cannot_be_written_to_is_named_before_the_training(callback, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=f"{callback.__name__}.* cannot write .*name a"):
        fit([callback(tmp_path / "file" / "here"), Interrupt(0)])


def test_an_interrupted_timeline_is_valid(tmp_path):
    with pytest.raises(TimeoutError):
        fit([nk.Report(tmp_path, timeline=True), Interrupt(1)], validation_split=0.2)
    facts_end()  # nothing closes a report whose fit has failed
    events = json.loads((tmp_path / "ranks/timeline.rank0.json").read_text())
    assert events[0]["args"]["name"].startswith("alone on ")
    assert [event["name"] for event in events[2:] if event["name"] in ("validate", "epoch 0")] == [
        "validate",
        "epoch 0",
    ]
