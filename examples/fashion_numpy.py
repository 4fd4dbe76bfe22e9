"""Train a small network on Fashion-MNIST with numpy alone, on any number of ranks.

python examples/fashion_numpy.py                    # one process
mpiexec -n 3 python examples/fashion_numpy.py       # 1 server, 2 workers: Steady
mpiexec -n 3 python examples/fashion_numpy.py --algorithm easgd
"""

from __future__ import annotations

import argparse
import time
from itertools import pairwise

import fashion_data
import numpy as np

from nnlo_common import (
    AGN,
    EASGD,
    GEM,
    SGD,
    DiLoCo,
    Downpour,
    DynSGD,
    LocalSGD,
    Participant,
    Steady,
    Synchronous,
)

RATE = 0.1
ALGORITHMS = {
    "steady": Steady(),
    "downpour": Downpour(),
    "synchronous": Synchronous(),
    "easgd": EASGD(every=5),
    "gem": GEM(learning_rate=0.02),
    "agn": AGN(every=5, local_learning_rate=RATE),
    "dynsgd": DynSGD(),
    "localsgd": LocalSGD(every=5),
    "diloco": DiLoCo(every=10),
}


def initial(hidden, seed=1):
    draw = np.random.default_rng(seed)
    sizes = [784, hidden, 10]
    weights = [(draw.standard_normal((a, b)) * np.sqrt(2 / a)).astype("f4") for a, b in pairwise(sizes)]
    return [weights[0], np.zeros(hidden, "f4"), weights[1], np.zeros(10, "f4")]


def predict(parameters, x):
    w1, b1, w2, b2 = parameters
    hidden = np.maximum(x @ w1 + b1, 0)
    scores = hidden @ w2 + b2
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    return hidden, scores / scores.sum(axis=1, keepdims=True)


def take_gradient(parameters, gradients, x, y):
    """Back-propagate the mean cross-entropy of a batch into `gradients`."""
    _, _, w2, _ = parameters
    dw1, db1, dw2, db2 = gradients
    hidden, probability = predict(parameters, x)
    probability[np.arange(len(y)), y] -= 1
    probability /= len(y)
    np.matmul(hidden.T, probability, out=dw2)
    np.sum(probability, axis=0, out=db2)
    below = (probability @ w2.T) * (hidden > 0)
    np.matmul(x.T, below, out=dw1)
    np.sum(below, axis=0, out=db1)


def evaluate(parameters, x, y):
    _, probability = predict(parameters, x)
    accuracy = (probability.argmax(axis=1) == y).mean()
    loss = -np.log(probability[np.arange(len(y)), y] + 1e-9).mean()
    return accuracy, loss


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--algorithm", choices=ALGORITHMS, default="steady")
    options.add_argument("--epochs", type=int, default=8)
    options.add_argument("--batch", type=int, default=25)
    options.add_argument("--hidden", type=int, default=64)
    options.add_argument("--data", help="a folder with the full Fashion-MNIST")
    chosen = options.parse_args()
    data = fashion_data.load(chosen.data)

    with Participant(
        ALGORITHMS[chosen.algorithm],
        initial(chosen.hidden),
        optimizer=None if chosen.algorithm == "gem" else SGD(RATE),
        names=["w1", "b1", "w2", "b2"],
    ) as me:
        me.say(f"{type(me.algorithm).__name__} on {me.size} ranks; data: {data.source}")
        if me.table:
            me.say(me.table)
        start = time.perf_counter()
        for epoch in range(chosen.epochs):
            order = np.random.default_rng(epoch).permutation(len(data.x_train))
            batches = [order[i : i + chosen.batch] for i in range(0, len(order), chosen.batch)]
            for batch in me.batches(batches):
                take_gradient(me.point, me.gradients, data.x_train[batch], data.y_train[batch])
                me.step(weight=len(batch))
            accuracy, loss = evaluate(me.parameters, data.x_test, data.y_test)
            me.say(
                f"epoch {epoch + 1}  test accuracy {accuracy:.3f}  test loss {loss:.3f}  "
                f"{time.perf_counter() - start:5.2f} s"
            )
        report = me.report()
        me.say(f"{report.exchanges} exchanges, {report.mean_staleness:.2f} commits stale on average")


if __name__ == "__main__":
    main()
