"""A model saved after fit on every rank: by `distribute.save`, and by `model.save` to a file of one name."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import keras
import numpy as np

import nnlo_keras as nk
from nnlo_common.training._joining import launched

FOLDER, SERVERS, RANK = Path(sys.argv[1]), int(sys.argv[2]), launched().rank
x = np.random.default_rng(2).standard_normal((60, 5)).astype("f4")
model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
inner = keras.optimizers.SGD(0.01)
model.compile(optimizer=nk.Downpour(inner) if SERVERS else nk.Synchronous(inner, servers=0), loss="mse")
distribute = nk.Distribute()
model.fit(*nk.shard(x, x[:, :1], servers=SERVERS), batch_size=5, epochs=1, callbacks=[distribute], verbose=0)
told = {"speaks": distribute.speaks, "written": False}
before = keras.Model.save


def noted(self, *args, **kwargs):
    """Note that this rank writes."""
    told["written"] = True
    return before(self, *args, **kwargs)


keras.Model.save = noted
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    distribute.save(FOLDER / "once.keras")
    keras.Model.save = before
    if RANK:  # the first rank's file would be the same one
        path = FOLDER / "all" / "m.keras"
        path.parent.mkdir(exist_ok=True)
        if RANK == 1:
            model.save(path)
            model.save(path)
told["warnings"] = [str(one.message) for one in caught if "all other ranks" in str(one.message)]
(FOLDER / f"{RANK}.json").write_text(json.dumps(told))
