"""Do one thing wrong in a Keras training, before it begins; every rank should be told, and soon."""

import sys

import keras

import nnlo_keras as nk
from nnlo_common.cluster._connecting import connect
from tests.helpers.keras_cases import compiled, data, dense
from tests.programs.keras_gan import GAN, points

case = sys.argv[1]
odd = connect().rank == 1
x, y = data()
optimizer = nk.Downpour(keras.optimizers.SGD(0.1))
callbacks = [nk.Distribute()]
model = dense()

if case == "no wrapper":
    optimizer = keras.optimizers.SGD(0.1)
elif case == "other callbacks" and odd:
    callbacks.append(nk.MetricAverage())
elif case == "bare callback":
    callbacks = callbacks[0]

if case == "unbuilt optimizers":
    model = GAN()
    model.compile(optimizer, nk.Downpour(keras.optimizers.SGD(0.1)), build=False)
    x, y = points(40), None
else:
    compiled(model, optimizer)
model.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=callbacks)
