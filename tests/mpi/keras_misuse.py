"""Do one thing wrong in a Keras training; every rank should be told, and soon."""

import sys

import keras
import numpy as np
from keras_cases import compiled, data, dense
from keras_gan import GAN, points

import nnlo_keras as nk
from nnlo_common._startup import connect

case = sys.argv[1]
rank = connect().rank
odd = rank == 1
x, y = data()
optimizer = nk.Downpour(keras.optimizers.SGD(0.1))
callbacks = [nk.Distribute()]
model = dense()


class Fail(keras.callbacks.Callback):
    """Fails in the first epoch of one worker."""

    def on_train_batch_end(self, batch, logs=None):
        if odd and batch == 1:
            raise RuntimeError("a callback of the user's")


if case == "no callback":
    callbacks = []
elif case == "no wrapper":
    optimizer = keras.optimizers.SGD(0.1)
elif case == "other options":
    optimizer = nk.EASGD(keras.optimizers.SGD(0.1), every=3 if odd else 2)
elif case == "other wrapper":
    optimizer = nk.EASGD(keras.optimizers.SGD(0.1)) if odd else optimizer
elif case == "other optimizer" and odd:
    optimizer = nk.Downpour(keras.optimizers.Adam(0.1))
elif case == "other model" and odd:
    model = dense(lambda: keras.layers.Dense(9))
elif case == "failing callback":
    callbacks.append(Fail())
elif case == "nan" and odd:
    x = np.full_like(x, np.nan)
elif case == "other callbacks" and odd:
    callbacks.append(nk.MetricAverage())
elif case == "bare callback":
    callbacks = callbacks[0]
elif case == "no data" and odd:
    x, y = x[:0], y[:0]

if case == "unbuilt optimizers":
    model = GAN()
    model.compile(optimizer, nk.Downpour(keras.optimizers.SGD(0.1)), build=False)
    x, y = points(40), None
else:
    compiled(model, optimizer)
model.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=callbacks)
