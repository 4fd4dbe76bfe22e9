"""A small text transformer with a layer of its own: does a sentence have more of one kind of word?"""

import json
import sys

import keras
import numpy as np

import nnlo_keras as nk

PLAIN = "plain" in sys.argv[1:]
WORDS, LENGTH, WIDTH = 200, 20, 16
keras.utils.set_random_seed(17)
draw = np.random.default_rng(17)
texts = draw.integers(1, WORDS, (1800, LENGTH))
labels = ((texts < WORDS // 2).sum(axis=1) > LENGTH // 2).astype("int32")
train, test = (texts[:1400], labels[:1400]), (texts[1400:], labels[1400:])
if not PLAIN:
    train = nk.shard(*train)  # nnlo


class Block(keras.layers.Layer):
    """Attention and a dense network, each with a residual and a normalization."""

    def __init__(self, **options):
        super().__init__(**options)
        layers = keras.layers
        self.attention = layers.MultiHeadAttention(num_heads=2, key_dim=8)
        self.network = keras.Sequential([layers.Dense(32, activation="gelu"), layers.Dense(WIDTH)])
        self.norms = [layers.LayerNormalization(), layers.LayerNormalization()]
        self.dropout = layers.Dropout(0.1)

    def call(self, x, training=None):
        x = self.norms[0](x + self.dropout(self.attention(x, x), training=training))
        return self.norms[1](x + self.dropout(self.network(x), training=training))


class Embedding(keras.layers.Layer):
    """Words and their places."""

    def __init__(self, **options):
        super().__init__(**options)
        self.words = keras.layers.Embedding(WORDS, WIDTH)
        self.places = keras.layers.Embedding(LENGTH, WIDTH)

    def call(self, x):
        return self.words(x) + self.places(keras.ops.arange(LENGTH))


inputs = keras.Input((LENGTH,), dtype="int32")
x = keras.layers.GlobalAveragePooling1D()(Block()(Embedding()(inputs)))
model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(x))
optimizer = keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(5e-3, 400), weight_decay=1e-4)
callbacks = []
if not PLAIN:
    optimizer = nk.EASGD(optimizer, every=2, beta=0.9)  # nnlo
    callbacks = [distribute := nk.Distribute()]  # nnlo
model.compile(optimizer=optimizer, loss="binary_crossentropy", metrics=["accuracy"])
model.fit(*train, batch_size=32, epochs=8, validation_data=test, callbacks=callbacks, verbose=0)
loss, accuracy = model.evaluate(*test, verbose=0)
say = print if PLAIN else distribute.say  # nnlo
say(json.dumps({"accuracy": round(accuracy, 4), "loss": round(loss, 4)}))
