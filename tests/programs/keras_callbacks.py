"""Train with each of our callbacks on three ranks, and leave behind what each rank has seen."""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import keras
import numpy as np

import nnlo_keras as nk
from nnlo_common.cluster._connecting import connect
from tests.helpers.keras_cases import compiled, dense, weights

FOLDER = Path(sys.argv[1])
DIES_IN = int(sys.argv[2]) if len(sys.argv) > 2 else None  # which epoch
WORLD = connect()
draw = np.random.default_rng(3)
X = draw.standard_normal((130, 5)).astype("f4")
Y = (X[:, 0] + 2 * X[:, 1] > X[:, 2]).astype("i4") + (X[:, 3] > 1)
VALID = X[100:], Y[100:]
X, Y = X[:100], Y[:100]
found = {}


def normal():
    return keras.layers.BatchNormalization()


def numbers(values):
    return {name: float(value) for name, value in values.items() if np.ndim(value) == 0}


def digest(arrays):
    return hashlib.sha256(b"".join(np.ascontiguousarray(one).tobytes() for one in arrays)).hexdigest()


def of_optimizer(model):
    """What of the wrapped optimizer is to be equal: floats and the number of steps."""
    inner = model.optimizer.inner_optimizer
    floats = [keras.ops.convert_to_numpy(one) for one in inner.variables if "float" in one.dtype]
    return [*floats, np.array(int(keras.ops.convert_to_numpy(inner.iterations)))]


def frozen(model):
    """What of a model no optimizer trains."""
    return [keras.ops.convert_to_numpy(one) for one in model.non_trainable_weights if "float" in one.dtype]


class See(keras.callbacks.Callback):
    """Notes what callbacks are given."""

    def __init__(self):
        super().__init__()
        self.logs, self.epochs, self.rates = [], [], []

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs.append(epoch)
        if not self.rates:
            self.start = digest([*weights(self.model), *of_optimizer(self.model)])

    def on_train_batch_begin(self, batch, logs=None):
        self.rates.append(self.rate())

    def on_epoch_end(self, epoch, logs=None):
        self.logs.append(numbers(logs))

    def rate(self):
        return float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))


def train(
    piece,
    optimizer,
    callbacks,
    *,
    model=None,
    epochs=3,
    data=None,
    behind=(),
    compile_options=None,
    **options,
):
    """Train one piece, with `Distribute` between `callbacks` and those `behind` it."""
    model = model or compiled(dense(normal), optimizer, metrics=["accuracy"], **(compile_options or {}))
    see, distribute = See(), nk.Distribute()
    x, y = data or nk.shard(X, Y)
    history = model.fit(
        x,
        y,
        batch_size=10,
        epochs=epochs,
        validation_data=VALID,
        verbose=0,
        shuffle=False,
        callbacks=[*callbacks, distribute, *behind, see],
        **options,
    ).history
    found[piece] = {
        "role": distribute.role,
        "weights": digest(weights(model)),
        "history": {name: [float(value) for value in values] for name, values in history.items()},
        "seen": see.logs,
        "epochs": see.epochs,
        "rates": see.rates,
        "start": getattr(see, "start", None),
        "rate": see.rate(),
    }
    return model


def share(first, second):
    """Shares of other sizes for the two workers."""
    part = [slice(0, 1), first, second][WORLD.rank]
    return X[part], Y[part]


class Own(keras.callbacks.Callback):
    """Notes this rank's own metrics, in front of the average."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append(numbers(logs))


class Stop(keras.callbacks.Callback):
    """One rank stops in its second epoch."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def on_epoch_end(self, epoch, logs=None):
        if WORLD.rank == self.rank and epoch == 1:
            self.model.stop_training = True


class Die(keras.callbacks.Callback):
    """A worker is killed amid an epoch, when the checkpoints of those before are on the disk."""

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if WORLD.rank == 1 and self.epoch == DIES_IN:
            time.sleep(1)  # they are written by threads, and confirmed between batches
            if len(list(FOLDER.glob("here/checkpoint-*/manifest.json"))) == DIES_IN:
                os.kill(os.getpid(), signal.SIGKILL)


def sgd(rate=0.05):
    return keras.optimizers.SGD(rate, momentum=0.5)


def means():
    uneven = share(slice(0, 64), slice(64, 100))
    own = []
    train("means", nk.Downpour(sgd()), [Own(own), nk.MetricAverage()], data=uneven)
    found["means"]["own"] = own
    train("means behind", nk.EASGD(sgd(), every=3), [], behind=[nk.MetricAverage()], data=uneven)
    train("means, a worker stops", nk.Downpour(sgd()), [nk.MetricAverage(), Stop(2)], data=uneven)
    train("means, the server stops", nk.Downpour(sgd()), [Stop(0), nk.MetricAverage()], data=uneven)


def broadcast():
    for piece, wrap in {"broadcast": nk.Downpour, "broadcast to workers": nk.EASGD}.items():
        model = compiled(dense(normal), wrap(keras.optimizers.Adam(0.01)), metrics=["accuracy"])
        model.layers[-1].trainable = False
        compiled(model, wrap(keras.optimizers.Adam(0.01)), metrics=["accuracy"])
        model.optimizer.build(model.trainable_variables)
        if WORLD.rank == 0:  # as if it had been loaded there
            some = np.random.default_rng(5)
            for one in [*model.weights, *model.optimizer.inner_optimizer.variables]:
                if "float" in one.dtype:
                    one.assign(np.abs(some.standard_normal(one.shape)).astype("f4") / 100)
            model.optimizer.iterations.assign(17)
        train(piece, None, [nk.Broadcast()], model=model, epochs=1)
        found[piece]["frozen"] = digest(frozen(model)[-1:])


def warm_up():
    for piece, wrap in {"warm-up": nk.Synchronous, "warm-up on workers": nk.EASGD}.items():
        train(piece, wrap(sgd(0.1)), [nk.WarmUp(1.5, start=0.2)])
    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2 if epoch else rate)
    train("warm-up, scheduler", nk.Downpour(sgd(0.1)), [nk.WarmUp(1.0)], behind=[scheduler])
    plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.1, patience=1, min_delta=9.0)
    train("warm-up, plateau", nk.Downpour(sgd(0.1)), [plateau, nk.WarmUp(0.5)], epochs=4)


def written():
    train(
        "written",
        nk.Downpour(sgd()),
        [nk.Report(FOLDER / "facts", timeline=True)],
        data=share(slice(0, 64), slice(64, 100)),
    )
    train("written behind", nk.EASGD(sgd(), every=2), [], behind=[nk.Report(FOLDER / "behind")])


def checkpoint():
    """Ends for good in the middle, when it is to; is started again by the same command."""
    saving = [nk.Checkpoint(FOLDER / "here"), nk.WarmUp(2.5), Die()]
    for piece, callbacks in {"checkpoint": saving, "uninterrupted": saving[1:2]}.items():
        model = train(piece, nk.Synchronous(keras.optimizers.Adam(0.01)), callbacks, epochs=4)
        found[piece]["optimizer"] = digest(of_optimizer(model))
    train("checkpoint, complete", nk.Synchronous(keras.optimizers.Adam(0.01)), saving, epochs=4)
    train(
        "checkpoint on workers",
        nk.EASGD(sgd(), every=2),
        [],
        behind=[nk.Checkpoint(FOLDER / "workers", every=2), nk.Broadcast()],
    )


for piece in (checkpoint, means, broadcast, warm_up, written):
    piece()
    print(WORLD.rank, piece.__name__, file=sys.stderr, flush=True)
(FOLDER / f"rank{WORLD.rank}.json").write_text(json.dumps(found))
