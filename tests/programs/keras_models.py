"""Train models with optimizers of their own and models of odd shapes; leave behind what each rank has seen.

On two ranks, Downpour is compared with the plain fit.
"""

import hashlib
import json
import sys
from pathlib import Path

import keras
import numpy as np

import nnlo_keras as nk
from nnlo_common.cluster._connecting import connect
from tests.programs.keras_gan import GAN, Averaging, Pair, Subclassed, many, points, weights

FOLDER = Path(sys.argv[1])
ONLY = sys.argv[2:]
WORLD = connect()
TENSORFLOW = keras.backend.backend() == "tensorflow"

X = points()
Y = np.sin(X.sum(axis=1, keepdims=True))
OPTIONS = {name: {"every": 2} for name in ("EASGD", "AGN", "LocalSGD")}
OPTIONS["DiLoCo"] = {"every": 4, "outer_momentum": 0.3}
SLOW = 0.01
found = {}


def wrapped(name="Downpour", rate=0.05, inner=None, **options):
    inner = inner or keras.optimizers.SGD(rate, momentum=0.5)
    return getattr(nk, name)(inner, **OPTIONS.get(name, {}) | options)


def note(piece, model, history=None, **more):
    data = b"".join(np.ascontiguousarray(one).tobytes() for one in weights(model))
    history = history.history if history is not None else {}
    found[piece] = more | {
        "weights": hashlib.sha256(data).hexdigest(),
        "history": {name: [float(value) for value in values] for name, values in history.items()},
    }


def imitate(piece, name="Downpour", *, gan=None, compile_options=None, callbacks=(), **options):
    """Train a GAN."""
    model = gan or GAN()
    pair = wrapped(name, **options), wrapped(name, **options)
    model.compile(*pair, **compile_options or {})
    before = model.miss()
    history = model.fit(
        nk.shard(X, servers=pair[0].ranks.servers),
        batch_size=10,
        epochs=8,
        verbose=0,
        callbacks=[nk.Distribute(), *callbacks],
    )
    note(piece, model, history, before=before, after=model.miss())
    return model


def gans():
    imitate("Downpour", "Downpour")
    imitate("EASGD", "EASGD")
    imitate("GEM", "GEM")
    if not TENSORFLOW:  # where each takes its time to be traced
        for name in ("Synchronous", "AGN", "DynSGD", "LocalSGD", "DiLoCo"):
            imitate(name, name)


class Slow(keras.callbacks.Callback):
    """Slows one of two optimizers down, on the workers."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1 and WORLD.rank:
            self.model.g_optimizer.learning_rate = SLOW


def features():
    imitate("two servers", servers=2)
    imitate("lag", "GEM", lag=1)
    model = imitate("patience", gan=GAN(patience=2))
    found["patience"]["steps"] = [int(one.iterations) for one in (model.d_optimizer, model.g_optimizer)]
    model = imitate("rates", callbacks=[Slow()])
    found["rates"]["rates"] = [float(one.learning_rate) for one in (model.d_optimizer, model.g_optimizer)]
    if TENSORFLOW:
        imitate("compiled", compile_options={"jit_compile": True})
        # Each of its pushes is the sum of three gradients.
        imitate("steps per execution", rate=0.01, compile_options={"steps_per_execution": 3})


def fit(piece, model, x, y, judge, **options):
    """Train any other model; `judge` gives one number, before and after."""
    before = judge(model)
    history = model.fit(x, y, batch_size=10, epochs=4, verbose=0, callbacks=[nk.Distribute()], **options)
    note(piece, model, history, before=before, after=judge(model))


def loss_for(x, y):
    return lambda model: model.evaluate(x, y, verbose=0, return_dict=True)["loss"]


def averages():
    for name in ("Downpour", "EASGD"):
        model = Averaging()
        model.compile(wrapped(name))
        fit(f"average, {name}", model, *nk.shard(X, Y), lambda model: model.miss(model.average, X, Y))


def shapes():
    for name in ("Downpour", "EASGD"):
        model = Subclassed()
        model.compile(wrapped(name, rate=0.02), loss="mse", metrics=["mae"])
        far = Y + 2
        fit(f"subclassed, {name}", model, *nk.shard(X, far), loss_for(X, far), validation_data=(X, far))
        model = many()
        model.compile(wrapped(name, rate=0.02), loss="mse")
        x, y = nk.shard(X, Y)
        everything = [X, X, X], {"sum": Y, "pair": X}
        mine = [x, x, x], {"sum": y, "pair": x}
        fit(f"many, {name}", model, *mine, loss_for(*everything), validation_data=everything)


def distance(one, other):
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


def bits():
    """Downpour is the plain fit, where both optimizers see the weights that the batch began with."""
    o = keras.optimizers
    makers = {
        "momenta": lambda: (o.SGD(0.1, momentum=0.9), o.SGD(0.05, momentum=0.5, nesterov=True)),
        "adam and decay": lambda: (o.Adam(0.01), o.AdamW(0.02, weight_decay=0.1)),
        "clipped": lambda: (o.SGD(0.5, clipnorm=0.1), o.Adam(o.schedules.ExponentialDecay(0.05, 3, 0.5))),
    }
    for name, make in makers.items():
        for kind in ("pair", "gan"):
            results = []
            for wrap, callbacks in ((lambda one: one, []), (nk.Downpour, [nk.Distribute()])):
                model = Pair() if kind == "pair" else GAN(simultaneous=True)
                optimizers = [wrap(one) for one in make()]
                model.compile(optimizers) if kind == "pair" else model.compile(*optimizers)
                start = weights(model)
                keras.utils.set_random_seed(4)
                target = Y if kind == "pair" else None
                model.fit(X, target, batch_size=10, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
                results.append(weights(model))
            plain, ours = results
            found[f"{kind}, {name}"] = {"apart": distance(plain, ours), "moved": distance(start, ours)}


for piece in (bits,) if WORLD.size == 2 else (gans, features, averages, shapes):
    if not ONLY or piece.__name__ in ONLY:
        piece()
        print(WORLD.rank, piece.__name__, file=sys.stderr, flush=True)
(FOLDER / f"rank{WORLD.rank}.json").write_text(json.dumps(found))
