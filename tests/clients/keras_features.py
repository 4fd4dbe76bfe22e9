"""Structured data by a `FeatureSpace` in a tf.data pipeline: numbers, texts and a cross of two columns."""

import json
import sys

import keras
import numpy as np
import tensorflow as tf

import nnlo_keras as nk

PLAIN = "plain" in sys.argv[1:]
keras.utils.set_random_seed(29)
draw = np.random.default_rng(29)
count, border = 2000, 1600
rows = {
    "age": draw.uniform(20, 80, count).astype("float32"),
    "pressure": draw.normal(120, 15, count).astype("float32"),
    "vessels": draw.integers(0, 4, count),
    "pain": draw.choice(["none", "some", "much"], count),
}
score = (rows["age"] - 50) / 15 + (rows["pressure"] - 120) / 30 + 1.5 * (rows["pain"] == "much")
score += np.where(rows["pain"] == "none", 1, -1) * (rows["vessels"] - 1.5)
labels = (score + 0.3 * draw.standard_normal(count) > 0.5).astype("int32")
patients = tf.data.Dataset.from_tensor_slices((rows, labels))
train, test = patients.take(border), patients.skip(border)

space = keras.utils.FeatureSpace(
    features={
        "age": keras.utils.FeatureSpace.float_discretized(num_bins=8),
        "pressure": "float_normalized",
        "vessels": keras.utils.FeatureSpace.integer_categorical(num_oov_indices=0),
        "pain": "string_categorical",
    },
    crosses=[keras.utils.FeatureSpace.cross(("pain", "vessels"), crossing_dim=32)],
    output_mode="concat",
)
space.adapt(train.batch(100).map(lambda row, label: row))  # to all samples, the same on each rank
if not PLAIN:
    train = nk.shard(train)  # nnlo


def batches(patients):
    return patients.batch(32).map(lambda row, label: (space(row), label)).prefetch(2)


encoded = space.get_encoded_features()
x = keras.layers.Dropout(0.1)(keras.layers.Dense(16, activation="relu")(encoded))
model = keras.Model(encoded, keras.layers.Dense(1, activation="sigmoid")(x))
optimizer = keras.optimizers.Adam(5e-3)
callbacks = []
if not PLAIN:
    optimizer = nk.Downpour(optimizer)  # nnlo
    callbacks = [distribute := nk.Distribute()]  # nnlo
model.compile(optimizer=optimizer, loss="binary_crossentropy", metrics=["accuracy"])
test = batches(test)
model.fit(
    batches(train.shuffle(border, seed=1)), epochs=8, validation_data=test, callbacks=callbacks, verbose=0
)
loss, accuracy = model.evaluate(test, verbose=0)
say = print if PLAIN else distribute.say  # nnlo
say(json.dumps({"accuracy": round(accuracy, 4), "loss": round(loss, 4)}))
