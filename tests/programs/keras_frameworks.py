"""A training and a search in Keras that tell what has loaded TensorFlow, where another is the back end."""

from __future__ import annotations

import json
import sys
import tempfile
import traceback


class Watch:
    """Notes who imports TensorFlow, and leaves the import to others."""

    def __init__(self):
        self.importers = []

    def find_spec(self, name, path=None, target=None):
        places = [f"{one.filename}:{one.lineno}" for one in traceback.extract_stack()[:-1]]
        asked = any("importlib.util" in place for place in places)  # whether it is installed
        if name == "tensorflow" and not asked:
            self.importers += [place for place in places if "<frozen" not in place]


sys.meta_path.insert(0, watch := Watch())

import keras  # noqa: E402
import numpy as np  # noqa: E402

import nnlo_keras as nk  # noqa: E402
from nnlo_common.training._joining import launched  # noqa: E402

x = np.random.default_rng(0).standard_normal((96, 3)).astype("f4")
y = x.sum(1, keepdims=True)


def build(hp=None):
    rate = 0.1 if hp is None else hp.Float("rate", 1e-3, 1e-1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.1), keras.layers.Dense(1)])
    model.compile(optimizer=nk.Downpour(keras.optimizers.SGD(rate)), loss="mse", metrics=["mae"])
    return model


model = build()
stopping = keras.callbacks.EarlyStopping(patience=3)
callbacks = [stopping, nk.Distribute()]
model.fit(*nk.shard(x, y), batch_size=8, epochs=2, validation_data=(x, y), callbacks=callbacks, verbose=0)
model.evaluate(x, y, verbose=0)
model.predict(x, verbose=0)

own = tempfile.mkdtemp()
folder = launched().gather_text(own)[0]
tuner = nk.MPITuner(
    build, "random", objective="val_loss", max_trials=2, seed=1, block_size=2, directory=folder
)
tuner.search(x, y, batch_size=8, epochs=2, validation_data=(x, y), verbose=0)
tuner.get_best_models()

print(json.dumps(watch.importers or ["nobody"]), flush=True)
