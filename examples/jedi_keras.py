"""Train JEDI-net on jets with Keras, on any number of ranks and any back end.

KERAS_BACKEND=torch python examples/jedi_keras.py                         # one process
KERAS_BACKEND=torch mpiexec -n 3 python examples/jedi_keras.py            # 1 server, 2 workers: Downpour
KERAS_BACKEND=jax mpiexec -n 3 python examples/jedi_keras.py --algorithm easgd
KERAS_BACKEND=torch mpiexec -n 3 python examples/jedi_keras.py --data FOLDER --particles 150    # hls4ml files

By default it uses the 30 hardest particles of each jet, 25 times less work than all 150. --algorithm none
trains without a wrapper, for comparison.
"""

from __future__ import annotations

import jets
import keras
import numpy as np
from jet_training import train
from keras import ops
from keras.layers import Dense


def mlp(x, *sizes, last="relu"):
    for size in sizes[:-1]:
        x = Dense(size, activation="relu")(x)
    return Dense(sizes[-1], activation=last)(x)


def jedi_net(particles):
    """Build the network of `jet_networks.JEDINet`: f_R on pairs, f_O on particles, f_C on the whole jet."""
    x = keras.Input((particles, jets.COLUMNS))
    receiver, sender = Dense(32)(x), Dense(32, use_bias=False)(x)
    pairs = mlp(ops.relu(receiver[:, :, None] + sender[:, None]), 16, 8)
    others = (1 - np.eye(particles, dtype="f4"))[:, :, None]  # no pair of a particle with itself
    effects = ops.mean(pairs * others, axis=2)
    found = mlp(ops.concatenate([x, effects], axis=-1), 128, 64, 32)
    return keras.Model(x, mlp(ops.mean(found, axis=1), 160, 80, len(jets.CLASSES), last=None))


if __name__ == "__main__":
    train(__doc__, jedi_net, learning_rate=3e-3, epochs=4)
