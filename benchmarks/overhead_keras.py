"""Overhead of distributed training for one worker: its samples/s in `fit` beside those of the plain `fit`.

    KERAS_BACKEND=torch mpiexec -n 2 python benchmarks/overhead_keras.py
    KERAS_BACKEND=tensorflow mpiexec -n 2 python benchmarks/overhead_keras.py
    KERAS_BACKEND=jax mpiexec -n 2 python benchmarks/overhead_keras.py

One rank serves the centre, the other trains. Before each epoch of the training the worker fits another model
for a plain epoch, so that drift of the machine cancels in the ratio of the two. Meanwhile the server sleeps
on its wake-up socket. The plain fit has no callbacks and no progress bar. Each rank computes with one thread.

Claims, checked with --assert: with overlap (lag=1) a worker reaches 0.85 of the plain fit where it exchanges
after every batch, and 0.95 where it does after every tenth. On TensorFlow these are 0.75 and 0.90: its
threads also use the second core, which the server needs. On JAX they are 0.40 and 0.65: its plain fit uses
both cores, and makes a step while the next batch is prepared.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before any framework reads it
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")

import argparse
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import keras
import numpy as np
from overhead import BATCH, HEAD, SIZES, Case, cases, options, watched

import nnlo_keras as nk
from nnlo_common.cluster._connecting import connect

TARGETS = {
    "tensorflow": {1: 0.75, 10: 0.90},
    "jax": {1: 0.40, 10: 0.65},
}.get(keras.backend.backend(), {1: 0.85, 10: 0.95})


class Clock(keras.callbacks.Callback):
    """Times epochs from their first batch on, without batch callbacks, which a plain fit does not have.

    The time before the first batch varies from 10 ms to 2 s, so it is left out: Keras makes the iterator, and
    TensorFlow frees the memory of the previous fit.
    """

    def __init__(
        self,
        before: Callable[[int], object] = lambda epoch: None,
        after: Callable[[int], object] = lambda epoch: None,
    ) -> None:
        super().__init__()
        self._before, self._after = before, after
        self.seconds: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Start with the first batch."""
        self._before(epoch)
        model = self.model  # on JAX, reading it writes the variables, which a step must not meet
        step = model.train_function

        def first(*arguments: Any) -> Any:
            model.train_function = step
            self._start_s = time.perf_counter()
            return step(*arguments)

        model.train_function = first

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Stop."""
        self.seconds.append(time.perf_counter() - self._start_s)
        self._after(epoch)


def main() -> int:
    """Measure every case; the worker prints."""
    chosen = options(__doc__)
    world = connect()
    if world is None or world.size != 2:
        raise SystemExit(__doc__)
    _use_one_thread()
    works = world.rank == 1
    if works:
        print(
            f"{world.library}; keras {keras.__version__} on {keras.backend.backend()}; {chosen.optimizer}; "
            f"batches of {BATCH}; {chosen.rounds} rounds of about {chosen.seconds:g} s; load "
            f"{os.getloadavg()[0]:.2f} before\n{HEAD}",
            flush=True,
        )
    missed = sum(_measure(case, chosen, works=works) for case in cases(chosen, TARGETS))
    if works:
        print(f"load {os.getloadavg()[0]:.2f} after", flush=True)
    return 1 if chosen.check and missed else 0


def _use_one_thread() -> None:
    if keras.backend.backend() == "torch":
        import torch

        torch.set_num_threads(1)
    elif keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)


def _model(size: str, optimizer: Any) -> Any:
    keras.utils.set_random_seed(1)
    keras.utils.clear_session()  # resets the numbers in layer names: ranks make different numbers of models
    hidden = [keras.layers.Dense(units, activation="relu") for units in SIZES[size]]
    model = keras.Sequential([keras.Input((784,)), *hidden, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss)
    return model


def _makes(name: str) -> Any:
    return keras.optimizers.Adam(1e-4) if name == "Adam" else keras.optimizers.SGD(1e-3, momentum=0.9)


def _data(steps: int) -> tuple[Any, Any]:
    draw = np.random.default_rng(1)
    # Random data: reading is not measured.
    return draw.standard_normal((steps * BATCH, 784), dtype="f4"), draw.integers(0, 10, steps * BATCH)


def _measure(case: Case, chosen: argparse.Namespace, *, works: bool) -> int:
    """Print the row of one case; return 1 if it misses its claim."""
    inner = _makes(chosen.optimizer)
    trained = _model(case.size, nk.Downpour(inner, every=case.every, lag=case.lag, wire=chosen.wire))
    distribute = nk.Distribute()
    # The first epoch warms up; the last one measures the parts.
    epochs = chosen.rounds + 2
    if not works:
        trained.fit(*_data(1), batch_size=BATCH, epochs=epochs, verbose=0, callbacks=[distribute])
        return 0
    plain = _model(case.size, _makes(chosen.optimizer))
    steps = _steps(plain, case, chosen.seconds)
    data, plain_clock, spent = _data(steps), Clock(), Counter[str]()
    looking = ExitStack()

    def before(epoch: int) -> None:
        plain.fit(*data, batch_size=BATCH, verbose=0, callbacks=[plain_clock])
        if epoch == epochs - 1:
            looking.enter_context(watched(_parts(distribute), spent))

    def after(epoch: int) -> None:
        if epoch == epochs - 1:
            looking.close()  # leaving the server is not part of the epoch

    clock = Clock(before, after)
    trained.fit(*data, batch_size=BATCH, epochs=epochs, verbose=0, callbacks=[distribute, clock])
    plain_s, trained_s = ([s / steps for s in one.seconds] for one in (plain_clock, clock))
    row, missed = case.row(plain_s[1:-1], trained_s[1:-1])
    rest = trained_s[-1] * steps - sum(spent.values())
    parts = [f"{name} {1e6 * seconds / steps:.0f}" for name, seconds in spent.items()]
    print(
        f"{row}\n      plain {1e6 * plain_s[-1]:.0f} us a batch; trained: {', '.join(parts)}, "
        f"fit itself {1e6 * rest / steps:.0f}",
        flush=True,
    )
    return int(missed)


def _steps(model: Any, case: Case, seconds: float) -> int:
    """Return the batches of a plain epoch of so many seconds, in whole cycles of exchanges."""
    clock, data = Clock(), _data(30)
    model.fit(*data, batch_size=BATCH, epochs=3, verbose=0, callbacks=[clock])
    return max(1, round(30 * seconds / min(clock.seconds) / case.every)) * case.every


def _parts(distribute: Any) -> list[tuple[Any, str, str]]:
    """Return the timed parts of an exchange."""
    part, exchanging = distribute._team._part, distribute._exchanges
    weights = exchanging._weights
    endpoint = part._endpoint
    parts = [(weights, "collect", "read sum"), (weights, "clear", "clear sum")]
    parts += [(endpoint, "send", "send"), (endpoint, "receive", "wait"), (endpoint, "flush", "flush")]
    parts += [(one.rule, "incoming", "absorb") for one in part._worker.shard_clients]
    return [*parts, (weights, "publish", "write weights"), (exchanging, "_step", "rest of the exchange")]


if __name__ == "__main__":
    raise SystemExit(main())
