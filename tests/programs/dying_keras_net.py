"""A model of Keras for `nnlo train`; one rank is killed once the first checkpoint is there."""

import time

import keras

from tests.chaos.dying import die_when_saved


def get_model(dies, folder):
    """The parameters are the rank that dies, and the folder of the run."""
    die_when_saved(dies, folder)
    layers = [keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
    return keras.Sequential([keras.Input((3,)), *layers, keras.layers.Softmax()])


def get_features():
    """A block of samples takes its time, so that training is left to do."""

    def slowly(x):
        time.sleep(0.03)
        return x

    return "features", slowly
