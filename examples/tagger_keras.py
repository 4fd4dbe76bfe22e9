"""Train a recurrent jet tagger with Keras: a GRU that reads the particles of a jet, the softest first.

KERAS_BACKEND=torch python examples/tagger_keras.py                       # one process
KERAS_BACKEND=torch mpiexec -n 3 python examples/tagger_keras.py          # 1 server, 2 workers: Downpour
KERAS_BACKEND=tensorflow mpiexec -n 3 python examples/tagger_keras.py --algorithm easgd

The files and options are those of `jedi_keras.py`. --algorithm none trains without a wrapper.
"""

from __future__ import annotations

import jets
import keras
from jet_training import train
from keras.layers import GRU, Dense


def tagger(particles):
    """Build the network; it reads the hardest particle last, so that it remembers it best."""
    return keras.Sequential(
        [
            keras.Input((particles, jets.COLUMNS)),
            GRU(48, go_backwards=True),
            Dense(32, activation="relu"),
            Dense(len(jets.CLASSES)),
        ]
    )


if __name__ == "__main__":
    train(__doc__, tagger, learning_rate=3e-3, epochs=6)
