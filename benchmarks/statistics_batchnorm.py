"""Train a network with BatchNorm on jets; print the accuracy lost to its running statistics, by epoch.

python benchmarks/statistics_batchnorm.py --write alone.json                  # one process
mpiexec -n 3 python benchmarks/statistics_batchnorm.py --beside alone.json    # 1 server, 2 workers

After each epoch the centre is validated twice: with the running statistics, and with those of each batch. The
gap between the two is the loss where running statistics lag behind the weights. `--beside` fails if the mean
gap over the seeds exceeds that in the file by more than `--within` at any epoch.

The gap in percentage points, mean over ten seeds, 60 batches per epoch, and the accuracy at the end. Single
runs differ by several points.

    epoch                                    1     2     3    4    5    6    accuracy
    Keras on TensorFlow, one process         11.6  12.3  9.5  5.5  3.0  1.7  0.516
    1 server, 2 workers, Downpour            12.0  12.3  10.0 5.2  3.1  2.0  0.520
    PyTorch, one process                     17.1  15.2  8.8  6.0  4.6  3.8  0.527
    1 server, 2 workers, Downpour            16.9  15.3  10.4 8.0  4.9  3.2  0.532
    1 server, 2 workers, Synchronous         13.6  11.4  6.5  4.7  2.9  2.3  0.536
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import h5py
import jets

WIDTHS = (64, 64, 32)
VALIDATION_BATCH = 500


def options():
    parser = jets.options(__doc__, ["downpour", "synchronous"], epochs=6)
    parser.add_argument("--framework", choices=["keras", "torch"], default="keras")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--learning-rate", type=float, default=0.01)
    parser.add_argument(
        "--momentum", type=float, help="of the layers, in Keras' convention; default: Keras' own"
    )
    parser.add_argument("--write", type=Path, help="write the accuracies to this file")
    parser.add_argument("--beside", type=Path, help="compare with such a file")
    parser.add_argument("--within", type=float, default=0.01, help="how much larger the mean gap may be")
    parser.set_defaults(particles=20, momentum=0.99)
    return parser.parse_args()


def loaded(paths, reading):
    """Return all features, one row for each jet, and the labels of some files."""
    parts = []
    for path in paths:
        with h5py.File(path) as file:
            x = reading["adapt_features"](file[reading["features"]][:])
            parts.append((x.reshape(len(x), -1), reading["adapt_labels"](file[reading["labels"]][:])))
    x, y = zip(*parts, strict=True)
    return np.concatenate(x).astype("f4"), np.concatenate(y).astype("i8")


def accuracy(scores, y):
    return float((np.asarray(scores).argmax(axis=1) == y).mean())


def pieces(count):
    return [slice(start, start + VALIDATION_BATCH) for start in range(0, count, VALIDATION_BATCH)]


# -- Keras --------------------------------------------------------------------------------------------


def keras_run(chosen, seed, train, validate):
    """Return whether this rank has the centre, and its accuracies after each epoch."""
    import keras

    import nnlo_keras as nk

    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input(train[0].shape[1:])])
    for width in WIDTHS:
        model.add(keras.layers.Dense(width, use_bias=False))
        model.add(keras.layers.BatchNormalization(momentum=chosen.momentum))
        model.add(keras.layers.ReLU())
    model.add(keras.layers.Dense(len(jets.CLASSES)))
    wrapper = {"downpour": nk.Downpour, "synchronous": nk.Synchronous}[chosen.algorithm]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(wrapper(keras.optimizers.SGD(chosen.learning_rate, momentum=0.9)), loss)
    seen, distribute = [], nk.Distribute()

    class Validate(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):  # noqa: ARG002 - Keras' signature
            if distribute.role in ("alone", "server 0"):
                seen.append(keras_accuracies(self.model, *validate))

    x, y = nk.shard(*train)
    model.fit(
        x, y, batch_size=chosen.batch, epochs=chosen.epochs, verbose=0, callbacks=[distribute, Validate()]
    )
    return distribute.role in ("alone", "server 0"), seen


def keras_accuracies(model, x, y):
    """With running statistics, and with those of each batch."""
    import keras

    if keras.backend.backend() == "jax":
        model.jax_state_sync()
    moving = [np.array(one) for one in map(keras.ops.convert_to_numpy, model.non_trainable_variables)]
    scores = [
        np.concatenate(
            [keras.ops.convert_to_numpy(model(x[piece], training=training)) for piece in pieces(len(x))]
        )
        for training in (False, True)
    ]
    for variable, value in zip(model.non_trainable_variables, moving, strict=True):
        variable.assign(value)
    return [accuracy(one, y) for one in scores]


# -- torch --------------------------------------------------------------------------------------------


def torch_run(chosen, seed, train, validate):
    """Return whether this rank has the centre, and its accuracies after each epoch."""
    import torch

    import nnlo_torch as nt

    torch.manual_seed(seed)
    layers, before = [], train[0].shape[1]
    for width in WIDTHS:
        norm = torch.nn.BatchNorm1d(width, momentum=1 - chosen.momentum)
        layers += [torch.nn.Linear(before, width, bias=False), norm, torch.nn.ReLU()]
        before = width
    model = torch.nn.Sequential(*layers, torch.nn.Linear(before, len(jets.CLASSES)))
    wrapper = {"downpour": nt.Downpour, "synchronous": nt.Synchronous}[chosen.algorithm]
    optimizer = wrapper(torch.optim.SGD(model.parameters(), lr=chosen.learning_rate, momentum=0.9))
    data = torch.utils.data.TensorDataset(*map(torch.tensor, train))
    sampler = nt.ShardSampler(data, seed=seed)
    loader = torch.utils.data.DataLoader(data, batch_size=chosen.batch, sampler=sampler)
    x, y, seen = torch.tensor(validate[0]), validate[1], []
    for _ in range(chosen.epochs):
        model.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        with optimizer.evaluation():
            seen.append(torch_accuracies(model, x, y))
    role = optimizer.role
    optimizer.close()
    return role in ("alone", "server 0"), seen


def torch_accuracies(model, x, y):
    """With running statistics, and with those of each batch."""
    import torch

    state = {name: value.clone() for name, value in model.state_dict().items()}
    found = []
    for training in (False, True):
        model.train(training)
        found.append(accuracy(torch.cat([model(x[piece]) for piece in pieces(len(x))]), y))
    model.load_state_dict(state)
    model.eval()
    return found


# -- results -----------------------------------------------------------------------------------------


def table(found, beside):
    """Print the means over the seeds, by epoch; return how much the gaps exceed those of `--beside`."""
    seeds = sorted(found)
    mean = np.mean([found[seed] for seed in seeds], axis=0)
    print("epoch  running  batch    gap" + ("   alone: running  batch    gap    larger by" if beside else ""))
    larger = []
    for epoch, (running, batch) in enumerate(mean):
        line = f"{epoch + 1:5}  {running:.4f}   {batch:.4f} {batch - running:7.4f}"
        if beside:
            other_running, other_batch = np.mean([beside[seed][epoch] for seed in seeds], axis=0)
            larger.append((batch - running) - (other_batch - other_running))
            line += f"          {other_running:.4f}   {other_batch:.4f} {other_batch - other_running:7.4f} "
            line += f"  {larger[-1]:9.4f}"
        print(line, flush=True)
    return larger


def main():
    chosen = options()
    train_files, validation_files = jets.files(chosen)
    reading = jets.reading(train_files, chosen.particles)
    train, validate = loaded(train_files, reading), loaded(validation_files, reading)
    run = {"keras": keras_run, "torch": torch_run}[chosen.framework]
    found, centre = {}, False
    for seed in chosen.seeds:
        centre, found[str(seed)] = run(chosen, seed, train, validate)
        if centre:
            gaps = " ".join(f"{batch - running:.4f}" for running, batch in found[str(seed)])
            print(f"seed {seed}: running {found[str(seed)][-1][0]:.4f} at the end, gaps {gaps}", flush=True)
    if not centre:
        return
    larger = table(found, json.loads(chosen.beside.read_text()) if chosen.beside else None)
    if chosen.write:
        chosen.write.write_text(json.dumps(found))
    if larger and max(larger) > chosen.within:
        raise SystemExit(f"a gap is larger by {max(larger):.4f}, more than {chosen.within}")


if __name__ == "__main__":
    main()
