"""Structured data: numbers and texts, whose statistics and vocabularies are adapted before the training."""

import json
import sys

import keras
import numpy as np

import nnlo_keras as nk

PLAIN = "plain" in sys.argv[1:]
keras.utils.set_random_seed(23)
draw = np.random.default_rng(23)
count, border = 2000, 1600
rows = {
    "age": draw.uniform(20, 80, count).astype("float32"),
    "pressure": draw.normal(120, 15, count).astype("float32"),
    "pain": draw.choice(["none", "some", "much"], count),
}
score = (rows["age"] - 50) / 15 + (rows["pressure"] - 120) / 15 + 1.5 * (rows["pain"] == "much")
labels = (score + 0.3 * draw.standard_normal(count) > 0.5).astype("int32")

lookup = keras.layers.StringLookup(output_mode="one_hot")
lookup.adapt(rows["pain"][:border])  # of all samples, the same on each rank
numbers = np.stack([rows["age"], rows["pressure"]], axis=1)
kinds = np.asarray(lookup(rows["pain"].tolist()), dtype="float32")
scale = keras.layers.Normalization()
scale.adapt(numbers[:border])

features = {"numbers": numbers, "kinds": kinds}
train = {name: value[:border] for name, value in features.items()}, labels[:border]
test = {name: value[border:] for name, value in features.items()}, labels[border:]
if not PLAIN:
    train = nk.shard(*train)  # nnlo

inputs = {name: keras.Input(value.shape[1:], name=name) for name, value in features.items()}
x = keras.layers.concatenate([scale(inputs["numbers"]), inputs["kinds"]])
x = keras.layers.Dropout(0.1)(keras.layers.Dense(16, activation="relu")(x))
model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(x))
optimizer = keras.optimizers.RMSprop(3e-3)
callbacks = []
if not PLAIN:
    optimizer = nk.LocalSGD(optimizer, every=4)  # nnlo
    callbacks = [distribute := nk.Distribute()]  # nnlo
model.compile(optimizer=optimizer, loss="binary_crossentropy", metrics=["accuracy"])
model.fit(*train, batch_size=32, epochs=8, validation_data=test, callbacks=callbacks, verbose=0)
loss, accuracy = model.evaluate(*test, verbose=0)
say = print if PLAIN else distribute.say  # nnlo
say(json.dumps({"accuracy": round(accuracy, 4), "loss": round(loss, 4)}))
