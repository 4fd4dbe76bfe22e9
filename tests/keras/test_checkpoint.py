"""Checkpoints of a Keras fit: the same command goes on with the same bits."""

from __future__ import annotations

import json
import os
import shutil
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.jobs import alone, mpiexec
from tests.helpers.threads import writers_left

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras", reason="the environment for MPICH has no frameworks")

import nnlo_keras as nk  # noqa: E402
from nnlo_common import ConfigurationError  # noqa: E402
from nnlo_common.testing import MemoryCluster  # noqa: E402
from nnlo_keras._compat import EMA_SWAPPED  # noqa: E402
from nnlo_keras._snapshot import Decisions  # noqa: E402
from tests.programs import keras_checkpoint  # noqa: E402

PROGRAM = Path(keras_checkpoint.__file__)
ONE_FOLDER = PROGRAM.with_name("keras_one_folder.py")
BATCHES = 30  # of a whole training in one process
TORCH = keras.backend.backend() == "torch"

pytestmark = [
    pytest.mark.framework("keras"),
    # Keras 3.15 itself, with NumPy 2: Variable.__array__ takes no copy argument.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.sampled(2),
]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "samples.h5"
    keras_checkpoint.write(path)
    return path


def same(tmp_path, file, first, **options):
    """Compare a training that was interrupted with one that was not."""
    weights, history, done = keras_checkpoint.train(tmp_path / "run", file, **options)
    want, straight, whole = keras_checkpoint.train(tmp_path / "straight", file, **options)
    assert done.done == whole.done - first
    if TORCH:  # the others trace their first step, which draws
        assert done.drawn == whole.drawn[first:]
    assert history.history == straight.history
    assert history.epoch == [0, 1, 2]
    assert np.array_equal(weights, want)


@pytest.mark.sampled(4)
@pytest.mark.slow
@pytest.mark.parametrize("stop_at", [1, 10, 14, 30])
def test_a_signal_saves_at_the_next_batch_boundary_and_ends_with_its_own_status(
    tmp_path, file, capsys, stop_at
):
    options = {"wrapper": "Downpour"}
    with pytest.raises(SystemExit) as caught:
        keras_checkpoint.train(tmp_path / "run", file, stop_at=stop_at, how="signal", **options)
    assert caught.value.code == 75
    assert "nnlo: a signal ended the training; rerun the same command to res" in capsys.readouterr().out
    same(tmp_path, file, stop_at, **options)
    whole = f"nnlo: {tmp_path}/run has the whole training, so nothing"
    resumes = f"nnlo: resumes from {tmp_path}/run/checkpoint-00000"
    assert (whole if stop_at == 30 else resumes) in capsys.readouterr().out  # all have 30 batches
    keras_checkpoint.train(tmp_path / "run", file, **options)
    assert whole in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    "data",
    [
        "arrays",
        pytest.param(
            "shuffled", marks=pytest.mark.skipif(not TORCH, reason="only torch says where its shuffling is")
        ),
    ],
)
def test_where_the_data_has_no_position_a_signal_saves_at_the_end_of_the_epoch(tmp_path, file, data):
    options = {"wrapper": "EASGD", "data": data}
    with pytest.raises(SystemExit) as caught:
        keras_checkpoint.train(tmp_path / "run", file, stop_at=13, how="signal", **options)
    assert caught.value.code == 75
    same(tmp_path, file, 20, **options)


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["Downpour", "EASGD", "GEM"])
def test_a_killed_training_goes_on_bit_for_bit_within_an_epoch(tmp_path, file, wrapper):
    options = {"wrapper": wrapper, "minutes": 1e-9}  # before each batch
    with pytest.raises(KeyboardInterrupt):
        keras_checkpoint.train(tmp_path / "run", file, stop_at=17, **options)
    same(tmp_path, file, 16, **options)


class Counting(keras.callbacks.Callback):
    """A callback that has seen something."""

    def __init__(self, thing=None):
        super().__init__()
        self.seen, self.thing = [], thing

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append(epoch)

    def state_dict(self):
        return {"seen": self.seen, "sums": np.cumsum(self.seen), "thing": self.thing}

    def load_state_dict(self, state):
        assert state["sums"].tolist() == np.cumsum(state["seen"]).tolist()
        self.seen = state["seen"]


def fit(folder, epochs, *callbacks, **options):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9, **options), "mse")
    x = np.linspace(-1, 1, 32, dtype="f4").reshape(16, 2)
    given = [nk.Checkpoint(folder), *callbacks]
    model.fit(x, x[:, :1], epochs=epochs, batch_size=4, shuffle=False, verbose=0, callbacks=given)
    return np.concatenate([np.ravel(keras.ops.convert_to_numpy(one)) for one in model.weights])


@pytest.mark.parametrize("error", [MemoryError(), OSError(28, "No space left on device")], ids=repr)
def test_a_model_file_that_cannot_be_written_is_warned_of_and_the_training_goes_on(
    error, tmp_path, monkeypatch
):
    def refuse(*_args, **_options):
        raise error

    monkeypatch.setattr(keras.Model, "save", refuse)
    with pytest.warns(RuntimeWarning, match=r"model\.keras could not be written: .*the training continues"):
        fit(tmp_path, 2)
    assert [path.name for path in sorted(tmp_path.glob("checkpoint-*"))] == [
        "checkpoint-000001",
        "checkpoint-000002",
    ]
    assert not list(tmp_path.glob("model*"))


def test_what_a_callback_of_the_users_own_has_seen_is_kept(tmp_path):
    fit(tmp_path, 2, Counting())
    again = Counting()
    fit(tmp_path, 4, again)
    assert again.seen == [0, 1, 2, 3]
    with pytest.raises(ConfigurationError, match=r"were \['Counting'\] .* but are \[\] now"):
        fit(tmp_path, 5)


def test_a_callback_that_cannot_be_kept_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigurationError, match=r"Counting cannot be saved .*\['thing'\] is a object"):
        fit(tmp_path, 1, Counting(thing=object()))
    half = keras.callbacks.Callback()
    half.state_dict = dict
    with pytest.raises(ConfigurationError, match=r"Callback has only state_dict\(\)"):
        fit(tmp_path, 1, half)
    with pytest.raises(ConfigurationError, match="leave BackupAndRestore out"):
        fit(tmp_path, 1, keras.callbacks.BackupAndRestore(tmp_path / "backup"))


@pytest.mark.parametrize(
    "before", ["", "epoch,loss\n0,1.0\n5,0.5\n"], ids=["new file", "of another training"]
)
def test_a_log_that_is_appended_to_has_each_epoch_once(tmp_path, before):
    path = tmp_path / "log.csv"
    path.write_text(before)
    fit(tmp_path / "run", 3, keras.callbacks.CSVLogger(path, append=True))
    shutil.rmtree(max((tmp_path / "run").glob("checkpoint-*")))  # as if killed between the row and its saving
    fit(tmp_path / "run", 5, keras.callbacks.CSVLogger(path, append=True))
    rows = [line.split(",")[0] for line in path.read_text().splitlines()]
    assert rows == ["epoch", *(["0", "5"] if before else []), "0", "1", "2", "3", "4"]


@pytest.mark.parametrize("options", [{}, {"swap_on_epoch": True}], ids=str)
def test_averaged_weights_are_swapped_as_without_an_interruption(tmp_path, options):
    def swap():
        return keras.callbacks.SwapEMAWeights(**options)

    ema = {"use_ema": True, "ema_momentum": 0.9}
    straight = fit(tmp_path / "straight", 4, swap(), **ema)

    class Stop(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "run", 4, swap(), Stop(), **ema)
    assert np.array_equal(fit(tmp_path / "run", 4, swap(), **ema), straight)


def run(tmp_path, ranks, name, *options, stop_at=0, how="raise", backend=None):
    (tmp_path / name).mkdir(exist_ok=True)
    folders = [str(tmp_path / f"run-{name}"), str(tmp_path / name)]
    env = {"KERAS_BACKEND": backend or keras.backend.backend(), "TF_CPP_MIN_LOG_LEVEL": "3"}
    return mpiexec(ranks, PROGRAM, *folders, str(stop_at), how, *options, timeout_s=110, env=env)


@pytest.mark.extended
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("ranks", "how", "options"),
    [
        (3, "signal", ["wrapper=Synchronous"]),
        (3, "raise", ["wrapper=Synchronous", "data=arrays"]),
        (2, "signal", ["wrapper=Downpour", "every=3"]),
        (2, "signal", ["wrapper=Downpour", "every=3", "wire=int8"]),
        (2, "signal", ["wrapper=Downpour", "assignment=dynamic"]),
        (2, "signal", ["wrapper=EASGD", "every=4"]),
        (2, "raise", ["wrapper=EASGD", "every=4", "data=arrays"]),
        (2, "signal", ["wrapper=Synchronous", "servers=0"]),
        (2, "raise", ["wrapper=Synchronous", "servers=0", "data=arrays"]),
        (3, "signal", ["wrapper=EASGD", "every=4", "group_size=2"]),
        (3, "raise", ["wrapper=Synchronous", "group_size=2", "data=arrays"]),
        (3, "signal", ["wrapper=Downpour", "group_size=2", "assignment=dynamic"]),
    ],
    ids=str,
)
def test_a_training_of_several_ranks_goes_on_bit_for_bit(tmp_path, file, ranks, how, options):
    interrupted_and_resumed(tmp_path, ranks, how, options)


@pytest.mark.extended
@pytest.mark.mpi
@pytest.mark.timeout(300)
def test_a_training_on_tensorflow_goes_on_within_an_epoch(tmp_path, file):
    """There the metrics of a server are built by its first batch, which never comes."""
    interrupted_and_resumed(tmp_path, 2, "signal", ["wrapper=EASGD", "every=4"], backend="tensorflow")


def interrupted_and_resumed(tmp_path, ranks, how, options, backend=None):
    done = run(tmp_path, ranks, "straight", *options, backend=backend)
    assert done.returncode == 0, done.stderr
    stop_at = 7 if ranks == 3 else 13
    if any(
        one.startswith(("servers", "group_size")) for one in options
    ):  # 15 batches in each rank of a group
        stop_at = 7 if how == "signal" else 13
    stopped = run(tmp_path, ranks, "stopped", *options, stop_at=stop_at, how=how, backend=backend)
    assert stopped.returncode == 75 if how == "signal" else stopped.returncode != 0, stopped.stderr
    again = run(tmp_path, ranks, "stopped", *options, backend=backend)
    assert again.returncode == 0, again.stderr
    for rank in range(ranks):
        one, other = (np.load(tmp_path / name / f"rank{rank}.npz") for name in ("straight", "stopped"))
        assert np.array_equal(one["weights"], other["weights"]), rank
        assert np.array_equal(one["loss"], other["loss"]), rank
        # What a server calls a batch is the whole epoch, which it begins once more.
        on_torch = TORCH and backend is None
        assert rank == 0 or not on_torch or np.array_equal(one["drawn"][-4:], other["drawn"][-4:]), rank
        assert other["epochs"].tolist() == [0, 1, 2]
        assert rank == 0 or 0 < other["done"] < one["done"]


@pytest.mark.mpi
@pytest.mark.extended  # the same on torch: tests/torch/test_16_bit_weights.py
def test_checkpoints_within_epochs_do_not_change_the_training(tmp_path, file):
    """On TensorFlow the variables of a server are no views: they show the centre of the last epoch."""
    options = ["wrapper=EASGD", "every=4"]
    for name, minutes in (("straight", "0"), ("saved", "1e-6")):
        done = run(tmp_path, 2, name, *options, f"minutes={minutes}", backend="tensorflow")
        assert done.returncode == 0, done.stderr
    for rank in range(2):
        one, other = (np.load(tmp_path / name / f"rank{rank}.npz") for name in ("straight", "saved"))
        assert np.array_equal(one["weights"], other["weights"]), rank
        assert np.array_equal(one["loss"], other["loss"]), rank


def in_one_folder(tmp_path, ranks, epochs, wrapper, **options):
    """Train in one process or on ranks, in the same folder; return weights, epochs and what was printed."""
    arguments = [str(tmp_path / "run"), str(epochs), wrapper, json.dumps(options), str(tmp_path / "rank")]
    done = started_in_one_folder(ranks, arguments)
    assert done.returncode == 0, done.stderr
    found = [np.load(tmp_path / f"rank-{rank}.npz") for rank in range(ranks)]
    return [one["weights"] for one in found], found[0]["begun"].tolist(), done.stdout


def started_in_one_folder(ranks, arguments):
    env = {"KERAS_BACKEND": keras.backend.backend(), "TF_CPP_MIN_LOG_LEVEL": "3"}
    if ranks == 1:
        return alone(ONE_FOLDER, *arguments, timeout_s=110, env=env)
    return mpiexec(ranks, ONE_FOLDER, *arguments, timeout_s=110, env=env)


@pytest.mark.mpi
@pytest.mark.extended  # threads as ranks of PyTorch do so in `make test`
@pytest.mark.timeout(400)
def test_another_data_set_is_refused_with_another_number_of_workers(tmp_path):
    in_one_folder(tmp_path, 3, 1, "Downpour")
    options, rank = json.dumps({"samples": 24}), str(tmp_path / "rank")
    for ranks in (2, 1):
        done = started_in_one_folder(ranks, [str(tmp_path / "run"), "2", "Downpour", options, rank])
        assert done.returncode != 0
        assert "another training: its data set has 20 samples, but this one has 24; choose" in done.stderr
    _, begun, told = in_one_folder(tmp_path, 2, 2, "Downpour")
    assert begun == [0, 1]
    assert "was saved with 2 workers, but this run has 1" in told


def of_data(folder, epochs, x, *targets, **options):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(nk.Downpour(keras.optimizers.SGD(0.01)), "mse")
    return model.fit(
        x, *targets, epochs=epochs, verbose=0, callbacks=[nk.Distribute(), nk.Checkpoint(folder)], **options
    )


@pytest.mark.parametrize("kind", ["arrays", "structure", "Batches"])
def test_another_data_set_than_of_shard_or_of_files_is_refused(tmp_path, kind):
    def data(samples):
        x = np.ones((samples, 1), "f4")
        if kind == "Batches":
            return [nk.Batches({"x": x, "y": x}, features="x", labels="y", batch_size=4)]
        given = nk.shard(x, x) if kind == "arrays" else [nk.shard({"x": x, "y": x})]
        return given if kind == "arrays" else [given[0]["x"], given[0]["y"]]

    of_data(tmp_path, 1, *data(8))
    assert json.loads(next(tmp_path.glob("checkpoint-*/manifest.json")).read_text())["facts"]["data"] == {
        "samples": 8,
        **({"columns": ["x float32[1]", "y float32[1]"]} if kind == "Batches" else {}),
    }
    with pytest.raises(ConfigurationError, match="its data set has 8 samples, but this one has 12; choose"):
        of_data(tmp_path, 2, *data(12))
    assert of_data(tmp_path, 2, *data(8)).epoch == [0, 1]


def test_of_data_that_shard_has_not_seen_nothing_is_compared(tmp_path):
    for epochs, samples in ((1, 8), (2, 12)):
        x = np.ones((samples, 1), "f4")
        assert len(of_data(tmp_path, epochs, x, x).epoch) == epochs


@pytest.mark.extended  # threads as ranks of PyTorch do so in `make test`
@pytest.mark.mpi
@pytest.mark.timeout(400)
@pytest.mark.parametrize("wrapper", ["Downpour", "LocalSGD"])
def test_from_one_process_to_a_server_and_back_the_bits_are_those_of_one_process(tmp_path, wrapper):
    """With one worker, so that the plain fit is the independent computation; Adam has a state to lose."""
    options = {"every": 1} if wrapper == "LocalSGD" else {}
    (tmp_path / "straight").mkdir()
    (straight,), _, _ = in_one_folder(tmp_path / "straight", 1, 4, wrapper, **options)
    for ranks, epochs in ((1, 1), (2, 2), (1, 3), (2, 4)):
        weights, begun, told = in_one_folder(tmp_path, ranks, epochs, wrapper, **options)
        assert begun == list(range(epochs))
        expected = "by one process, but" if ranks == 2 else "but this run is one process"
        assert told.count(expected) == (epochs > 1)
    for rank in range(2):
        assert np.array_equal(weights[rank], straight), rank


@pytest.mark.mpi
@pytest.mark.extended
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("ranks", "wrapper", "options"),
    [
        (3, "EASGD", {"every": 1}),
        (3, "Synchronous", {"servers": 0}),
        (3, "Downpour", {"group_size": 2}),
        (3, "GEM", {}),
        (3, "GEM", {"group_size": 2}),
        (3, "DiLoCo", {"every": 1}),
    ],
)
def test_ranks_take_over_the_weights_of_one_process_and_it_takes_over_the_centre(
    tmp_path, ranks, wrapper, options
):
    (weights,), _, _ = in_one_folder(tmp_path, 1, 2, wrapper, **options)
    there, _, _ = in_one_folder(tmp_path, ranks, 2, wrapper, **options)
    assert all(np.array_equal(one, weights) for one in there)
    (center, *_), _, _ = in_one_folder(tmp_path, ranks, 3, wrapper, **options)
    assert not np.array_equal(center, weights)
    (back,), _, _ = in_one_folder(tmp_path, 1, 3, wrapper, **options)
    assert np.array_equal(back, center)


def test_of_a_fit_that_has_failed_on_several_ranks_nothing_stays(tmp_path, monkeypatch):
    """No thread goes on writing facts or live files, and no model is kept in memory."""
    monkeypatch.setattr("nnlo_keras._wrapper.launched", lambda: "several ranks")
    before, models, made = writers_left(), [], threading.Barrier(3)

    class Fail(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise OSError("of the user's")

    def program(world):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(nk.Downpour(keras.optimizers.SGD(0.1)), "mse", jit_compile=False)
        models.append(weakref.ref(model))
        made.wait()
        progress = nk.Progress(run=tmp_path, live=False)
        callbacks = [nk.Distribute(world=world), nk.Checkpoint(tmp_path), progress, Fail()]
        x = np.full((8, 2), world.rank, "f4")
        model.fit(x, x[:, 0], batch_size=2, verbose=0, callbacks=callbacks)

    def run():
        with MemoryCluster(3) as cluster:
            cluster.run(program, 60)

    def lives():
        return [thread for thread in threading.enumerate() if thread.name == "nnlo live file"]

    with pytest.raises(OSError, match="of the user's"):
        run()
    assert writers_left() == before
    assert [one() for one in models] == [None] * 3
    for thread in lives():
        thread.join(30)
    assert lives() == []
    assert "ended" in (tmp_path / "ranks/live.rank1.json").read_text()


@pytest.mark.slow
def test_facts_of_an_epoch_that_was_begun_before_count_the_rest_of_it(tmp_path, file):
    with pytest.raises(SystemExit):
        keras_checkpoint.train(tmp_path, file, stop_at=14, how="signal", wrapper="Downpour")
    keras_checkpoint.train(tmp_path, file, wrapper="Downpour")
    lines = map(json.loads, (tmp_path / "ranks" / "facts.rank0.jsonl").read_text().splitlines())
    found = [(one["epoch"], one["batches"], one["samples"]) for one in lines if one["what"] == "epoch"]
    assert found == [(0, 10, 40), (1, 6, 24), (2, 10, 40)]


def test_another_rank_is_not_told_that_averages_are_in_the_model():
    """What goes on in the place of a dead server is the centre as it was before they were swapped."""
    swap, stopping = keras.callbacks.SwapEMAWeights(swap_on_epoch=True), keras.callbacks.EarlyStopping()
    vars(swap)[EMA_SWAPPED], stopping.wait = True, 1
    decisions = Decisions(keras.callbacks.CallbackList([swap, stopping], add_history=False))
    assert decisions.state()["seen"][0] == {EMA_SWAPPED: True}
    (_, of_swap), (_, of_stopping) = decisions.told()["seen"]
    assert (of_swap, of_stopping["wait"]) == ({}, 1)
