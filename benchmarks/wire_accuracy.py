"""Compare the accuracy that packed messages reach with that of float32, at equal samples; print a table.

python benchmarks/wire_accuracy.py --data FOLDER --assert            # Fashion-MNIST, the full set in FOLDER
python benchmarks/wire_accuracy.py jedi --assert                     # JEDI-net on toy jets
python benchmarks/wire_accuracy.py small --data FOLDER --assert      # both, a small network in one process

Each row of the first two is a job of 1 server and 2 workers, `accuracy_torch.py` or `accuracy_jedi.py`, with
the options that docs/accuracy.md has found for float32. A wire is "met" if its mean accuracy over seeds is
at most 0.3 percentage points below that of float32 with the same options, 0.5 with topk.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from functools import cache
from itertools import pairwise, product
from pathlib import Path

import numpy as np
from accuracy_all import mpiexec

import nnlo_common as nc
from nnlo_common import FlatVector
from nnlo_common.testing import RandomOrder, train_virtually

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import fashion_data
import toy_jets

MOST = {"bfloat16": 0.3, "float16": 0.3, "int8": 0.3, "topk": 0.5}
SGD = ["--algorithm", "downpour", "--learning-rate", "0.02", "--momentum", "0.5"]
ADAM = ["--algorithm", "downpour", "--optimizer", "adam", "--momentum", "0.5"]
ROUNDED = ("float32", "bfloat16", "float16", "int8")
#: Script, and rows: options of the job, and wires.
COMPARED = {
    "torch": [
        ([*ADAM, "--batch", "50", "--learning-rate", "0.004"], (*ROUNDED, "topk")),
        ([*SGD, "--batch", "50"], ("float32", "topk")),
        (
            ["--algorithm", "easgd", "--batch", "50", "--learning-rate", "0.1", "--every", "4"],
            ("float32", "int8"),
        ),
    ],
    "jedi": [([*ADAM, "--batch", "20", "--learning-rate", "0.002"], (*ROUNDED, "topk"))],
}
#: Algorithm, workers and learning rate.
SMALL = [(nc.Downpour, 2, 0.05), (nc.Synchronous, 4, 0.1)]
SMALL_WIRES = (*ROUNDED, "topk")
#: Epochs of each data set.
SMALL_DATA = {"fashion": 4, "jets": 6}
BATCH, WIDTH, MOMENTUM = 50, 64, 0.9


def options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=[*COMPARED, "small"], nargs="?", default="torch")
    parser.add_argument("--seeds", nargs="+", default=["1", "2", "3"])
    parser.add_argument("--epochs")
    parser.add_argument("--data", help="a folder with the full Fashion-MNIST, or with jets")
    parser.add_argument("--only", nargs="+", help="these wires, beside float32")
    parser.add_argument("--output", type=Path, help="append the rows to this file, too")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds that one job may take")
    parser.add_argument("--assert", dest="insist", action="store_true", help="fail unless all are met")
    return parser.parse_args()


def run(chosen, settings, wire):
    """Run one job; return the accuracy of each seed in per cent."""
    script = Path(__file__).with_name(f"accuracy_{chosen.what}.py")
    command = [mpiexec(), "--oversubscribe", "-n", "3", sys.executable, script, *settings, "--wire", wire]
    command += ["--seeds", *chosen.seeds]
    for name, value in (("--epochs", chosen.epochs), ("--data", chosen.data)):
        command += [] if value is None else [name, value]
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=chosen.timeout, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("seed=")]
    return [100 * float(dict(word.split("=") for word in line.split())["accuracy"]) for line in lines]


# -- a small network of dense layers, in one process ------------------------------------------------------


@cache
def rows_of(name, folder):
    """Return samples and labels of training and test set; features have mean 0 and width 1."""
    if name == "fashion":
        data = fashion_data.load(folder)
        x, x_test = (
            one.reshape(-1, 14, 2, 14, 2).mean((2, 4)).reshape(len(one), -1)
            for one in (data.x_train[:20000], data.x_test)
        )
        y, y_test = data.y_train[: len(x)], data.y_test
    else:
        made = toy_jets.make_jets(12000, 12000, 10), toy_jets.make_jets(5000, 5000, 10)
        (x, y), (x_test, y_test) = (
            (one.reshape(len(one), -1).astype(np.float32), labels[:, -6:-1].argmax(1)) for one, labels in made
        )
    centre, width = x.mean(0), x.std(0) + 1e-3 * x.std()
    return (x - centre) / width, y, (x_test - centre) / width, y_test


def layers(sizes, draw):
    """Return weights and offsets of each layer."""
    for before, size in pairwise(sizes):
        yield (draw.standard_normal((before, size)) * np.sqrt(2 / before)).astype(np.float32)
        yield np.zeros(size, np.float32)


def scores_of(pieces, x):
    """Return the values of each layer; the last are scores."""
    values = [x]
    for place in range(0, len(pieces), 2):
        made = values[-1] @ pieces[place] + pieces[place + 1]
        values.append(made if place == len(pieces) - 2 else np.maximum(made, 0))
    return values


def gradients(pieces, x, y):
    """Return the gradient of the cross-entropy for each piece."""
    *values, scores = scores_of(pieces, x)
    error = np.exp(scores - scores.max(1, keepdims=True))
    error /= error.sum(1, keepdims=True)
    error[np.arange(len(y)), y] -= 1
    error /= len(y)
    found = []
    for place in range(len(pieces) - 2, -1, -2):
        before = values[place // 2]
        found = [before.T @ error, error.sum(0), *found]
        error = (error @ pieces[place].T) * (before > 0)
    return found


def train_small(kind, name, wire, seed, *, workers, rate, epochs, folder):
    """Train all ranks in this process; return the accuracy of the centre in per cent."""
    x, y, x_test, y_test = rows_of(name, folder)
    draw, count, centers = np.random.default_rng(seed), len(x) // BATCH, []
    start = list(layers([x.shape[1], WIDTH, WIDTH, int(y.max()) + 1], draw))
    batches = np.concatenate([draw.permutation(len(x))[: count * BATCH] for _ in range(epochs)])
    batches = iter(batches.reshape(-1, BATCH))

    class Watched(kind):
        def center(self, *given):
            centers.append(super().center(*given))
            return centers[-1]

    segments = FlatVector.of(start).layout.segments

    def pieces_of(vector):
        return [vector[one.place].reshape(one.shape) for one in segments]

    done = 0

    def gradient(vector, _):
        nonlocal done
        for one in centers:
            one.optimizer.learning_rate = rate * (1 + np.cos(np.pi * done / (epochs * count))) / 2
        done += 1
        batch = next(batches)
        return FlatVector.of(gradients(pieces_of(vector), x[batch], y[batch])).vector

    run = train_virtually(
        Watched(wire=wire),
        gradient,
        start,
        workers=workers,
        steps=epochs * count // workers,
        optimizer=nc.SGD(rate, momentum=MOMENTUM),
        schedule=RandomOrder(seed),
        check=False,
    )
    scores = scores_of(pieces_of(run.center), x_test)[-1]
    return 100 * float((scores.argmax(1) == y_test).mean())


def small(chosen):
    """Yield a name, a wire and the accuracies of each row."""
    for (kind, workers, rate), (name, epochs) in product(SMALL, SMALL_DATA.items()):
        given = {"workers": workers, "rate": rate, "folder": chosen.data}
        given["epochs"] = int(chosen.epochs or epochs)
        for wire in SMALL_WIRES:
            if wire == "float32" or not chosen.only or wire in chosen.only:
                found = [train_small(kind, name, wire, int(seed), **given) for seed in chosen.seeds]
                yield f"{name} {kind.__name__.lower()} workers={workers} rate={rate}", wire, found


def jobs(chosen):
    """Yield the options, the wire and the accuracies of each row of jobs under mpiexec."""
    for settings, wires in COMPARED[chosen.what]:
        for wire in wires:
            if wire == "float32" or not chosen.only or wire in chosen.only:
                yield " ".join(settings), wire, run(chosen, settings, wire)


def main():
    chosen, missed = options(), 0

    def say(text):
        print(text, flush=True)
        if chosen.output is not None:
            with chosen.output.open("a") as file:
                file.write(f"{text}\n")

    say("| options | wire | accuracy of each seed, % | mean, % | to float32, points | |")
    say("|---|---|---|---|---|---|")
    usual = 0.0
    for settings, wire, found in small(chosen) if chosen.what == "small" else jobs(chosen):
        mean = statistics.mean(found)
        usual = mean if wire == "float32" else usual
        off = mean - usual
        met = wire == "float32" or off >= -MOST[wire]
        missed += not met
        verdict = "" if wire == "float32" else "met" if met else "missed"
        seeds = ", ".join(f"{one:.2f}" for one in found)
        say(f"| `{settings}` | {wire} | {seeds} | {mean:.2f} | {off:+.2f} | {verdict} |")
    return int(chosen.insist and missed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
