"""A convnet for small pictures of digits, with noise: a digit is a pattern of strokes on 12 by 12 pixels."""

import json
import sys

import keras
import numpy as np

import nnlo_keras as nk

PLAIN = "plain" in sys.argv[1:]
keras.utils.set_random_seed(3)
draw = np.random.default_rng(3)
strokes = draw.random((10, 12, 12, 1)) > 0.7
labels = draw.integers(0, 10, 1600)
pictures = (strokes[labels] + 0.7 * draw.standard_normal((1600, 12, 12, 1))).astype("float32")
train, test = (pictures[:1200], labels[:1200]), (pictures[1200:], labels[1200:])
if not PLAIN:
    train = nk.shard(*train)  # nnlo

layers = keras.layers
model = keras.Sequential(
    [
        keras.Input((12, 12, 1)),
        layers.Conv2D(8, 3, activation="relu"),
        layers.MaxPooling2D(2),
        layers.Flatten(),
        layers.Dropout(0.2),
        layers.Dense(10, activation="softmax"),
    ]
)
optimizer = keras.optimizers.Adam(3e-3)
callbacks = [keras.callbacks.EarlyStopping("val_accuracy", patience=4, restore_best_weights=True)]
if not PLAIN:
    optimizer = nk.Downpour(optimizer)  # nnlo
    callbacks.append(distribute := nk.Distribute())  # nnlo
model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(*train, batch_size=32, epochs=6, validation_data=test, callbacks=callbacks, verbose=0)
loss, accuracy = model.evaluate(*test, verbose=0)
say = print if PLAIN else distribute.say  # nnlo
say(json.dumps({"accuracy": round(accuracy, 4), "loss": round(loss, 4)}))
