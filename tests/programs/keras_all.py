"""Train with everything that fit can do, on three ranks, and leave behind what each rank has seen."""

import hashlib
import json
import sys
from pathlib import Path

import keras
import numpy as np

import nnlo_keras as nk
from nnlo_common.cluster._connecting import connect
from tests.helpers.keras_cases import compiled, dense, forked, weights

FOLDER = Path(sys.argv[1])
ONLY = sys.argv[2:]
WORLD = connect()
SERVES = WORLD.rank == 0

draw = np.random.default_rng(3)
X = draw.standard_normal((240, 5)).astype("f4")
Y = (X[:, 0] + 2 * X[:, 1] > X[:, 2]).astype("i4") + (X[:, 3] > 1)
VALID_X, VALID_Y = X[200:], Y[200:]
X, Y = X[:200], Y[:200]
WRAPPERS = ["Downpour", "Synchronous", "EASGD", "GEM", "AGN", "DynSGD", "LocalSGD", "DiLoCo"]
found = {}


def wrapped(name="Downpour", rate=0.05, momentum=0.5, inner=None, **options):
    return getattr(nk, name)(inner or keras.optimizers.SGD(rate, momentum=momentum), **options)


def train(
    piece,
    optimizer=None,
    *,
    model=None,
    data=None,
    epochs=4,
    callbacks=(),
    compile_options=None,
    servers=1,
    evaluate=None,
    behind=(),
    **options,
):
    """Train one piece and note the outcome."""
    if model is None:
        model = compiled(dense(), optimizer or wrapped(), metrics=["accuracy"], **(compile_options or {}))
    evaluate = evaluate or (VALID_X, VALID_Y)
    before = model.evaluate(*evaluate, verbose=0, return_dict=True)["loss"]
    distribute = nk.Distribute()
    data = nk.shard(X, Y, servers=servers) if data is None else data
    data = {"x": data[0], "y": data[1], "batch_size": 10} if isinstance(data, tuple) else {"x": data}
    options = {"validation_data": evaluate, "verbose": 0} | options
    history = model.fit(**data, epochs=epochs, callbacks=[*callbacks, distribute, *behind], **options).history
    after = model.evaluate(*evaluate, verbose=0, return_dict=True)["loss"]
    if len(model.inputs) == 1:
        assert model.predict(VALID_X, verbose=0).shape == (40, 3)
    report = distribute.report
    found[piece] = {
        "weights": hashlib.sha256(
            b"".join(np.ascontiguousarray(w).tobytes() for w in weights(model))
        ).hexdigest(),
        "before": before,
        "after": after,
        "history": {name: [float(value) for value in values] for name, values in history.items()},
        "steps": report.steps,
        "exchanges": report.exchanges,
    }
    return model


def share(first, second):
    """Other shares for the two workers than everybody's half."""
    part = [slice(0, 1), first, second][WORLD.rank]
    return X[part], Y[part]


class Batches(keras.utils.PyDataset):
    """Batches of ten."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return X[10 * index : 10 * index + 10], Y[10 * index : 10 * index + 10]


def generator():
    while True:
        for index in range(20):
            yield X[10 * index : 10 * index + 10], Y[10 * index : 10 * index + 10]


class Leave(keras.callbacks.Callback):
    """One worker stops in its second epoch."""

    def on_epoch_end(self, epoch, logs=None):
        if WORLD.rank == 2 and epoch == 1:
            self.model.stop_training = True


class Count(keras.callbacks.CSVLogger):
    """Counts what it is asked to write."""

    count = 0

    def on_train_begin(self, logs=None):
        self.count += 1
        super().on_train_begin(logs)


class Rates(keras.callbacks.Callback):
    """Notes the learning rate of each epoch, which no rank begins before all have ended the last one."""

    def on_train_begin(self, logs=None):
        self.seen = []

    def on_epoch_begin(self, epoch, logs=None):
        WORLD.comm.Barrier()

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append(float(self.model.optimizer.learning_rate))


def wrappers():
    slow = {"EASGD": {"every": 2}, "AGN": {"every": 2}, "LocalSGD": {"every": 2}}
    slow["DiLoCo"] = {"every": 3}
    for name in WRAPPERS:
        train(name, wrapped(name, **slow.get(name, {})))


def callbacks():
    logger = Count(str(FOLDER / "log.csv"))
    k = keras.callbacks
    train(
        "callbacks",
        wrapped(rate=0.5, momentum=0.9),
        epochs=40,
        callbacks=[
            logger,
            k.ModelCheckpoint(
                str(FOLDER / "best{epoch}.weights.h5"), save_weights_only=True, save_best_only=True
            ),
            k.EarlyStopping(patience=2, restore_best_weights=True),
        ],
    )
    found["callbacks"]["logged"] = logger.count
    behind = [Count(str(FOLDER / "behind.csv")), k.EarlyStopping(patience=2, restore_best_weights=True)]
    train("callbacks behind", wrapped(rate=0.5, momentum=0.9), epochs=40, behind=behind)
    found["callbacks behind"]["logged"] = behind[0].count
    states = []
    look = k.LambdaCallback(
        on_epoch_end=lambda epoch, logs: states.append(np.concatenate([w.ravel() for w in weights(model)]))
    )
    model = compiled(dense(), wrapped(momentum=0.0), metrics=["accuracy"])
    plateau = k.ReduceLROnPlateau(factor=1e-4, patience=1, min_delta=10.0, min_lr=1e-12)
    train("plateau", model=model, epochs=5, callbacks=[look, plateau])
    found["plateau"]["still"] = bool(np.abs(states[-1] - states[-2]).max() < 1e-4)


def rates():
    k = keras.callbacks
    slow = {"EASGD": {"every": 2}, "AGN": {"every": 2}, "LocalSGD": {"every": 2}, "DiLoCo": {"every": 2}}

    def reduced(piece, name, *others, **options):
        seen, plateau = Rates(), k.ReduceLROnPlateau(factor=0.5, patience=1, min_delta=10.0)
        optimizer = wrapped(name, rate=0.125, **slow.get(name, {}), **options)
        train(piece, optimizer, epochs=5, callbacks=[seen, *others, plateau], servers=optimizer.ranks.servers)
        found[piece]["rates"] = seen.seen

    for name in WRAPPERS:
        reduced(f"{name} reduced", name)
    halved = k.LearningRateScheduler(lambda epoch, rate: rate / 2 if epoch == 3 else rate)
    for name in ("EASGD", "Downpour"):
        reduced(f"{name} reduced and scheduled", name, halved)
    seen = Rates()
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([4, 14], [0.125, 0.0625, 0.03125])
    train("GEM schedule", wrapped("GEM", rate=schedule), epochs=2, callbacks=[seen])
    found["GEM schedule"]["rates"] = seen.seen
    found["GEM schedule"]["iterations"] = int(seen.model.optimizer.iterations)


def restored():
    def backup():
        return keras.callbacks.BackupAndRestore(str(FOLDER / "backup"), delete_checkpoint=False)

    train("two epochs", wrapped(momentum=0.0), epochs=2, behind=[backup()])
    train("two more", wrapped(momentum=0.0), epochs=4, behind=[backup()])


def shares():
    train("uneven shares", data=share(slice(0, 70), slice(70, 90)))


def features():
    if keras.backend.backend() != "torch":
        train("steps per execution", compile_options={"steps_per_execution": 3})
        train("compiled", compile_options={"jit_compile": True})
    train("lag", wrapped(lag=2, momentum=0.0))
    train("averages on workers", wrapped("EASGD", inner=keras.optimizers.SGD(0.1, use_ema=True), every=3))
    train("a worker that leaves early", callbacks=[Leave()])
    train("two servers", wrapped(servers=2), servers=2, epochs=3)
    train("sparse validation", validation_freq=2)
    train("printing", epochs=2, verbose=2)


def half():
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        # A scale that overflows at first, so that steps are left out.
        train("half", epochs=6)
    finally:
        keras.mixed_precision.set_global_policy("float32")


def again():
    model = train("two fits 1", epochs=2)
    train("two fits 2", model=model, epochs=4)
    found["two fits 2"]["before"] = found["two fits 1"]["before"]


def other_models():
    model = forked()
    model.compile(
        wrapped("LocalSGD", every=3),
        loss={"kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "size": "mse"},
    )
    x, size = nk.shard(X, X[:, :1])
    (y,) = (nk.shard(Y),)
    train(
        "normal and forked",
        model=model,
        data=([x, x], {"kind": y, "size": size}),
        evaluate=([VALID_X, VALID_X], {"kind": VALID_Y, "size": VALID_X[:, :1]}),
    )


def sources():
    train("generators", data=nk.shard(Batches()))
    train("steps per epoch", data=generator(), steps_per_epoch=10)


for piece in (wrappers, callbacks, rates, restored, shares, features, half, again, other_models, sources):
    if not ONLY or piece.__name__ in ONLY:
        piece()
        print(WORLD.rank, piece.__name__, file=sys.stderr, flush=True)
(FOLDER / f"rank{WORLD.rank}.json").write_text(json.dumps(found))
