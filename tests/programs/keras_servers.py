"""Two servers with callbacks that decide or write; each rank leaves behind what it has seen."""

import json
import sys
from pathlib import Path

import keras
import numpy as np

import nnlo_keras as nk
from nnlo_common import ConfigurationError
from nnlo_common.cluster._connecting import connect
from tests.helpers.keras_cases import compiled, dense, weights

FOLDER, RANK = Path(sys.argv[1]), connect().rank

draw = np.random.default_rng(2)
X = draw.standard_normal((60, 5)).astype("f4")
Y = draw.integers(0, 3, 60)


class StopOn(keras.callbacks.Callback):
    """Stops the training on one rank, by what only that has seen."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def on_epoch_end(self, epoch, logs=None):
        if (RANK, epoch) == (self.rank, 1):
            self.model.stop_training = True


def train(*callbacks, epochs=6):
    model = compiled(dense(), nk.Downpour(keras.optimizers.SGD(0.05), servers=2))
    try:
        history = model.fit(
            *nk.shard(X, Y, servers=2),
            batch_size=5,
            epochs=epochs,
            verbose=0,
            validation_data=(X, Y),
            callbacks=[*callbacks, nk.Distribute()],
        )
    except ConfigurationError as error:
        return {"refused": str(error)}
    return {"epochs": len(history.epoch), "weights": [one.tolist() for one in weights(model)]}


k = keras.callbacks
found = {f"stopped by server {rank}": train(StopOn(rank)) for rank in (0, 1)}
found["written"] = train(
    k.CSVLogger(str(FOLDER / "log.csv")), k.ModelCheckpoint(str(FOLDER / "{epoch}.weights.h5")), epochs=3
)
found["best again"] = train(k.EarlyStopping(restore_best_weights=True))
found["backup"] = train(k.BackupAndRestore(str(FOLDER / "backup")))
(FOLDER / f"rank{RANK}.json").write_text(json.dumps(found))
