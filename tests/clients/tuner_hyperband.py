"""A search by Hyperband for a network and its batches: a `HyperModel` with its own `build` and `fit`."""

from __future__ import annotations

import keras
import keras_tuner

from tests.clients.common import WRAPPED, blobs, finish, first

if WRAPPED:
    import nnlo_keras as nk


class Classifier(keras_tuner.HyperModel):
    def build(self, hp):
        model = keras.Sequential([keras.Input((8,))])
        if hp.Boolean("scale"):
            model.add(keras.layers.BatchNormalization())
        for number in range(hp.Int("layers", 1, 2)):
            width = hp.Int(f"width {number}", 8, 32, step=8)
            model.add(keras.layers.Dense(width, activation=hp.Choice("activation", ["relu", "tanh"])))
        if hp.Boolean("dropout"):
            with hp.conditional_scope("dropout", [True]):
                model.add(keras.layers.Dropout(hp.Float("share", 0.05, 0.25)))
        model.add(keras.layers.Dense(4, activation="softmax"))
        rate = hp.Float("rate", 1e-3, 1e-1, sampling="log")
        model.compile(keras.optimizers.Adam(rate), "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    def fit(self, hp, model, *args, **options):
        return model.fit(*args, batch_size=hp.Choice("batch", [16, 32]), shuffle=True, **options)


def main() -> None:
    (x, y), held_out = ([part.numpy() for part in blobs(seed=seed)] for seed in (0, 1))
    limits = {"max_epochs": 6, "factor": 3, "seed": 3}
    folder = {"directory": "search", "project_name": "hyperband", "overwrite": True}
    if WRAPPED:
        oracle = keras_tuner.oracles.HyperbandOracle("val_accuracy", **limits)
        tuner = nk.MPITuner(Classifier(), oracle, block_size=2, distribute="downpour", **folder)
    else:
        tuner = keras_tuner.Hyperband(Classifier(), objective="val_accuracy", **limits, **folder)
    stopping = keras.callbacks.EarlyStopping("val_loss", patience=3)
    tuner.search(x, y, validation_data=held_out, callbacks=[stopping], verbose=0)

    (best,) = tuner.get_best_models()
    _, accuracy = best.evaluate(*held_out, verbose=0)
    model = tuner.hypermodel.build(tuner.get_best_hyperparameters()[0])
    finish(first(), accuracy=accuracy, trials=len(tuner.oracle.trials), parameters=model.count_params())


if __name__ == "__main__":
    main()
