"""A layer of Keras that counts with which samples it was trained."""

import keras

__all__ = ["Count"]


class Count(keras.layers.Layer):
    """Counts how often it was trained with each sample, whose number is the last feature; drops that feature.

    Args:
        samples: the number of samples.
    """

    def __init__(self, samples, **options):
        super().__init__(**options)
        self._samples = samples

    def get_config(self):
        return {**super().get_config(), "samples": self._samples}

    def build(self, shape):
        self.times = self.add_weight(
            shape=(self._samples,), dtype="int32", initializer="zeros", trainable=False
        )

    def call(self, inputs, training=False):
        if training:
            numbers = keras.ops.cast(inputs[:, -1], "int32")
            once = keras.ops.bincount(numbers, minlength=self._samples)
            self.times.assign_add(keras.ops.cast(once, "int32"))
        return inputs[:, :-1]
