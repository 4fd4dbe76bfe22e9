"""Training shared by the jet examples in Keras; each adds its network."""

from __future__ import annotations

import time

import jets
import keras

import nnlo_keras as nk

WRAPPERS = {
    "downpour": nk.Downpour,
    "synchronous": nk.Synchronous,
    "easgd": lambda optimizer: nk.EASGD(optimizer, every=4),
    "localsgd": lambda optimizer: nk.LocalSGD(optimizer, every=4),
    "none": lambda optimizer: optimizer,
}


def train(text, network, learning_rate, epochs):
    """Train the model that `network(particles)` returns; `text` is the docstring of the script."""
    chosen = jets.options(text, WRAPPERS, epochs).parse_args()
    files, held_out = jets.files(chosen)
    reading = jets.reading(files, chosen.particles)
    data = nk.H5Sequence(files, batch_size=50, **reading)
    validation = nk.H5Sequence(held_out, batch_size=500, shuffle=False, shard=False, **reading)

    keras.utils.set_random_seed(1)
    model = network(chosen.particles)
    # Stale gradients need less momentum.
    adam = keras.optimizers.Adam(learning_rate, beta_1=0.5)
    model.compile(
        optimizer=WRAPPERS[chosen.algorithm](adam),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    distribute = nk.Distribute()
    callbacks = [] if chosen.algorithm == "none" else [distribute]
    start = time.perf_counter()
    model.fit(data, epochs=chosen.epochs, validation_data=validation, callbacks=callbacks, verbose=2)
    seconds = time.perf_counter() - start
    scores = model.evaluate(validation, verbose=0, return_dict=True)
    summary = "  ".join(f"{name} {value:.4f}" for name, value in scores.items())
    distribute.say(f"{chosen.algorithm}, {files[0].parent}: {summary}  {seconds:.2f} s")
