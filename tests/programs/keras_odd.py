"""Ordinary Keras scripts in which something odd happens, often on one rank only.

Each case says "ready" when what it provokes is about to begin, and "done" if it comes to its end.
"""

import os
import sys
import time

import keras
import numpy as np

import nnlo_keras as nk
from nnlo_common import ConfigurationError, DivergedError
from nnlo_common.cluster._connecting import connect
from tests.helpers.keras_cases import compiled, dense, equal, weights

WORLD = connect()
RANK, SIZE = WORLD.rank, WORLD.size
LONG = 1_000_000  # epochs; nobody waits for the end of such a training

draw = np.random.default_rng(2)
X = draw.standard_normal((60, 5)).astype("f4")
Y = draw.integers(0, 3, 60)


def ready():
    print("ready", flush=True)


def all_ready():
    """Once all have started, which takes its time."""
    WORLD.comm.Barrier()
    ready()


def wrapped(name="Downpour", rate=0.05, **options):
    return getattr(nk, name)(keras.optimizers.SGD(rate), **options)


def train(
    optimizer=None, *callbacks, model=None, data=None, epochs=3, metrics=(), distributed=True, **options
):
    """The training that the cases vary; returns the model."""
    model = compiled(model or dense(), optimizer or wrapped(), metrics=list(metrics))
    data = {"x": X[RANK::SIZE], "y": Y[RANK::SIZE], "batch_size": 5} if data is None else data
    callbacks = [*callbacks, nk.Distribute()] if distributed else [*callbacks]
    model.fit(**data, epochs=epochs, verbose=0, callbacks=callbacks, **options)
    return model


class On(keras.callbacks.Callback):
    """Does something on one rank, when Keras calls the named method for the second time."""

    def __init__(self, rank, method, what):
        super().__init__()
        self.calls = 0
        if rank == RANK:

            def call(*_, **__):
                self.calls += 1
                if self.calls == 2:
                    ready()
                    what()

            setattr(self, method, call)
            # Keras asks the class whether a callback wants to be called.
            self.async_safe = False


def raises(error=ValueError, words="no such sample"):
    raise error(words)


def sleep():
    time.sleep(600)


# -- signals: a case says "ready" and its process ids, and goes on -------------------------------------


def tell():
    print(f"pid {RANK} {os.getpid()}", flush=True)
    WORLD.comm.Barrier()


def during_epoch():
    tell()
    train(None, On(1, "on_train_batch_end", lambda: None), epochs=LONG)


def during_validation():
    tell()
    train(None, On(0, "on_test_begin", sleep), validation_data=(X, Y), epochs=LONG)


# -- exceptions and exits ------------------------------------------------------------------------------


def worker_raises():
    train(None, On(1, "on_train_batch_end", raises))


def server_raises():
    train(None, On(0, "on_epoch_end", raises))


def server_raises_in_validation():
    train(None, On(0, "on_test_batch_end", raises), validation_data=(X, Y))


def split_of_a_share():
    train(data={"x": nk.shard(X), "y": nk.shard(Y), "batch_size": 5}, validation_split=0.2)


class Batches(keras.utils.PyDataset):
    """Batches of five, of which one worker's third is not to be had."""

    def __init__(self, count=4, **options):
        super().__init__(**options)
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if RANK == 1 and index == 2:
            ready()
            raises()
        return X[5 * index : 5 * index + 5], Y[5 * index : 5 * index + 5]


def dataset_raises(workers="1"):
    train(data={"x": Batches(workers=int(workers))})


def metric_raises():
    class Picky(keras.metrics.SparseCategoricalAccuracy):
        resets = 0

        def reset_state(self):
            self.resets += 1
            if RANK == 1 and self.resets == 2:
                ready()
                raises()
            super().reset_state()

    train(metrics=[Picky()])


def interrupted_and_caught():
    """As a notebook or a careful script does it: but the others go on."""
    try:
        train(None, On(1, "on_train_batch_end", lambda: raises(KeyboardInterrupt, "")), epochs=LONG)
    except KeyboardInterrupt:
        print("caught", flush=True)


def interrupted_and_again():
    try:
        train(None, On(1, "on_train_batch_end", lambda: raises(KeyboardInterrupt, "")), epochs=LONG)
    except KeyboardInterrupt:
        train()


def worker_exits():
    train(None, On(1, "on_train_batch_end", lambda: sys.exit(3)), epochs=LONG)


def worker_dies():
    train(None, On(1, "on_train_batch_end", lambda: os._exit(5)), epochs=LONG)


# -- ranks that are not alike --------------------------------------------------------------------------


def named(*names):
    return keras.Sequential([keras.Input((5,)), *(keras.layers.Dense(5, name=name) for name in names)])


def half():
    return keras.Sequential([keras.Input((5,)), keras.layers.Dense(3, dtype="bfloat16")])


def layers(count):
    return dense(*[lambda: keras.layers.Dense(5)] * count)


DIFFER = {
    "shape": lambda odd: {"model": dense(lambda: keras.layers.Dense(8 + odd))},
    "number": lambda odd: {"model": layers(1 + odd)},
    "order": lambda odd: {"model": named("a", "b") if odd else named("b", "a")},
    "dtype": lambda odd: {
        "model": half() if odd else keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
    },
    "statistics": lambda odd: {
        "model": dense(
            lambda: keras.layers.BatchNormalization(center=False, scale=False) if odd else keras.layers.ReLU()
        )
    },
    "wrapper": lambda odd: {"optimizer": wrapped("EASGD" if odd else "Downpour")},
    "options": lambda odd: {"optimizer": wrapped("EASGD", every=2 + odd)},
    "every": lambda odd: {"optimizer": wrapped(every=2 + odd)},
    "servers": lambda odd: {"optimizer": wrapped(servers=1 + odd)},
    "optimizer": lambda odd: {
        "optimizer": nk.Downpour(keras.optimizers.Adam() if odd else keras.optimizers.SGD())
    },
    "epochs": lambda odd: {"epochs": 2 + odd},
}


def differ():
    """All differences in one job: each rank catches the refusal and goes on to the next."""
    for name, make in DIFFER.items():
        for odd in (0, SIZE - 1):
            keras.utils.clear_session()  # the names of layers are counted
            try:
                train(**make(odd == RANK))
            except ConfigurationError as error:
                print(f"{name}, odd rank {odd}, on rank {RANK}: {error}", flush=True)
            else:
                print(f"{name}, odd rank {odd}, on rank {RANK}: not noticed", flush=True)
                os._exit(1)


def one_differs(name):
    all_ready()
    train(**DIFFER[name](RANK == SIZE - 1))


def no_callback(odd):
    all_ready()
    train(distributed=int(odd) != RANK)


def no_wrapper(odd):
    all_ready()
    train(keras.optimizers.SGD() if int(odd) == RANK else None)


def neither(odd):
    """One rank trains by itself, and its script ends while the others wait for it."""
    all_ready()
    plain = int(odd) == RANK
    train(keras.optimizers.SGD() if plain else None, distributed=not plain)


def bare_callback():
    all_ready()
    compiled(dense(), wrapped()).fit(X, Y, batch_size=5, verbose=0, callbacks=nk.Distribute())


class Clipping(keras.Sequential):
    """Clips its weights in the training step, as a Wasserstein GAN does."""

    def train_step(self, *args):
        logs = super().train_step(*args)
        for variable in self.trainable_variables:
            variable.assign(keras.ops.clip(variable, -0.01, 0.01))
        return logs


def clips_weights():
    model = Clipping([keras.Input((5,)), keras.layers.Dense(3)])
    train(wrapped("EASGD", every=2), model=model)
    print("clipped on workers", flush=True)
    all_ready()
    train(wrapped(lag=1), model=model)


def no_data():
    all_ready()
    some = 0 if RANK == 1 else 60
    train(data={"x": X[:some], "y": Y[:some]})


def no_batches():
    all_ready()
    train(data={"x": Batches(0 if RANK == 1 else 2)})


def too_few_samples():
    all_ready()
    x, y = nk.shard(X[:1], Y[:1])
    train(data={"x": x, "y": y})


# -- numbers that are not finite -----------------------------------------------------------------------


def nan(name):
    model = dense()
    x = np.full_like(X, np.nan) if RANK == 1 else X
    all_ready()
    try:
        train(
            wrapped(name, **({"every": 2} if name == "EASGD" else {})),
            model=model,
            data={"x": x, "y": Y},
            epochs=9,
        )
    except DivergedError:
        print(f"the centre is finite: {all(np.isfinite(w).all() for w in weights(model))}", flush=True)
        raise


# -- what simply works ---------------------------------------------------------------------------------


class Begins(keras.callbacks.Callback):
    """Notes with what weights a training begins."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 0:
            self.weights = weights(self.model)


def again():
    """Several trainings of one model and another, with evaluations and predictions between."""
    model, begins, distribute = compiled(dense(), wrapped()), Begins(), nk.Distribute()
    for turn in range(3):
        before = weights(model)
        distribute = distribute if turn < 2 else nk.Distribute()  # both are possible
        model.fit(X[RANK::SIZE], Y[RANK::SIZE], batch_size=5, verbose=0, callbacks=[distribute, begins])
        print(
            f"goes on: {equal(begins.weights, before)}, moved: {not equal(weights(model), before)}",
            flush=True,
        )
        print(f"loss {turn}: {model.evaluate(X, Y, verbose=0)!r}", flush=True)
        assert model.predict(X, verbose=0).shape == (60, 3)
        other = train(wrapped("EASGD", every=2))
        print(f"other {turn}: {other.evaluate(X, Y, verbose=0)!r}", flush=True)
    print("done", flush=True)


def main():
    name, *rest = sys.argv[1:]
    globals()[name](*rest)


if __name__ == "__main__":
    main()
