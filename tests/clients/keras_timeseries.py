"""A forecast of a time series by an LSTM: windows of the past, the mean of what comes next."""

import json
import sys
import tempfile
from pathlib import Path

import keras
import numpy as np

import nnlo_keras as nk

PLAIN = "plain" in sys.argv[1:]
PAST = 24
keras.utils.set_random_seed(19)
times = np.arange(2600)
series = (
    np.sin(times / 7) + 0.5 * np.sin(times / 31) + 0.1 * np.random.default_rng(19).standard_normal(times.size)
)
border = 2000
series = ((series - series[:border].mean()) / series[:border].std()).astype("float32")
windows = np.lib.stride_tricks.sliding_window_view(series, PAST + 1)
past, later = windows[:, :-1, None], windows[:, -1:]
train, test = (past[:border], later[:border]), (past[border:], later[border:])
if not PLAIN:
    train = nk.shard(*train)  # nnlo

model = keras.Sequential([keras.Input((PAST, 1)), keras.layers.LSTM(12), keras.layers.Dense(1)])
optimizer = keras.optimizers.Adam(1e-2, clipnorm=1.0)
with tempfile.TemporaryDirectory() as folder:
    best = Path(folder, "best.weights.h5")
    callbacks = [
        keras.callbacks.ModelCheckpoint(
            best, monitor="val_loss", save_best_only=True, save_weights_only=True
        ),
        keras.callbacks.ReduceLROnPlateau(factor=0.5, patience=1),
    ]
    if not PLAIN:
        optimizer = nk.Downpour(optimizer)  # nnlo
        callbacks.append(distribute := nk.Distribute())  # nnlo
    model.compile(optimizer=optimizer, loss="mse")
    model.fit(*train, batch_size=64, epochs=6, validation_data=test, callbacks=callbacks, verbose=0)
    if best.exists():  # on workers the checkpoint writes nothing
        model.load_weights(best)
loss = model.evaluate(*test, verbose=0)
say = print if PLAIN else distribute.say  # nnlo
say(json.dumps({"mse": round(loss, 4)}))
