"""Trainings that are compared: their options, what simulates them, and how the two are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.equations import simulation
from tests.equations.network import Array, Batch, data_of
from tests.equations.optimizers import SGD, Adam, Optimizer
from tests.equations.replay import OrderError, Replay
from tests.equations.wires import Wire

__all__ = ["RATES", "TOLERANCE", "Case", "Recording", "compare", "tally"]

#: Learning rate and momentum by the name of an optimizer.
RATES = {"sgd": (0.2, 0.0), "momentum": (0.05, 0.8), "nesterov": (0.05, 0.8), "adam": (0.02, 0.0)}

#: The largest difference allowed, in units of the largest weight (at least 1). A float32 number of that size
#: has an error of 6e-8; a gradient here is a sum of some tens of products with such errors, and a training of
#: 60 steps adds them up as a random walk does. A single lost, doubled or delayed gradient moves the weights
#: by 1e-3 and more.
TOLERANCE = 2e-6
#: Adam divides by the root of squared gradients: the error of a small gradient counts as that of a large one.
TOLERANCE_OF_ADAM = 1e-5
#: Without its clip GEM moves by sign(d) however small d is: what one worker rounds moves the others apart.
TOLERANCE_WITHOUT_CLIP = 1e-4
#: A number that float32 has on the other side of a rounding to 8 bits, or to a step, moves by that step.
#: Without the residual the weights are off by 1e-3, with float16 by 1e-4.
TOLERANCES_OF_WIRES = {"bfloat16": 5e-4, "float16": 3e-5, "int8": 5e-4}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training.

    Attributes:
        wrapper: its name.
        options: of the wrapper; local optimizers by their names.
        optimizer: the user's, by its name.
        batches: of each worker in an epoch.
        pattern: whose turn it is to speak, over and over.
        epochs: how many.
        servers: how many.
        together: Keras's steps_per_execution.
        watched: with Keras, whether a callback looks at the weights between batches.
        weights: with PyTorch, what each worker sets as its share in a mean, in place of its samples.
    """

    wrapper: str
    options: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "momentum"
    batches: tuple[int, ...] = (7, 5)
    pattern: tuple[int, ...] = (0, 1)
    epochs: int = 3
    servers: int = 1
    together: int = 1
    watched: bool = True
    weights: tuple[float, ...] = ()

    @property
    def workers(self) -> int:
        """How many workers there are."""
        return len(self.batches)

    @property
    def tolerance(self) -> float:
        """The largest difference allowed."""
        if self.options.get("clip", 0) is None:
            return TOLERANCE_WITHOUT_CLIP
        if "wire" in self.options:
            return TOLERANCES_OF_WIRES[self.options["wire"]]
        adam = "adam" in (self.optimizer, self.options.get("local"))
        return TOLERANCE_OF_ADAM if adam else TOLERANCE

    def data(self, worker: int) -> list[Batch]:
        """The batches of an epoch of a worker."""
        # The gain of Steady is at its bound where workers' gradients have nothing in common.
        return data_of(worker, self.batches[worker], learnable=self.wrapper == "Steady")

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        shape = f"{'+'.join(map(str, self.batches))} batches" + ("" if self.workers == 1 else self._pattern())
        extras = f", {self.servers} servers" * (self.servers > 1) + f", K={self.together}" * (
            self.together > 1
        )
        extras += f", weights {self.weights}" * bool(self.weights) + ", quiet" * (not self.watched)
        return f"{self.wrapper}({self.optimizer}{', ' * bool(options)}{options}), {shape}{extras}"

    def _pattern(self) -> str:
        return " " + "".join("AB"[worker] for worker in self.pattern)


@dataclass(kw_only=True)
class Recording:
    """What a real training has shown.

    Attributes:
        order: worker and kind of each message.
        seen: what each gradient of each worker was taken at.
        after: each worker's weights after each step, if somebody has looked.
        commits: the centre after each commit.
        epochs: what a server's model was after each epoch.
        final: what each worker's model was in the end, where that is the centre.
    """

    order: Sequence[tuple[int, str]]
    seen: Sequence[Sequence[Array]]
    after: Sequence[Sequence[Array]]
    commits: Sequence[Array]
    epochs: Sequence[Array] = ()
    final: Sequence[Array] = ()


def optimizer_of(name: str, *, hat: bool) -> Callable[[], Optimizer]:
    """Return what makes the user's optimizer; `hat`: Keras's Adam."""
    rate, momentum = RATES[name]
    if name == "adam":
        return lambda: Adam(rate, epsilon=1e-7 if hat else 1e-8, hat=hat)
    return lambda: SGD(rate, momentum, nesterov=name == "nesterov")


def simulated(case: Case, *, keras: bool) -> Replay:
    """Return the simulation of a case, which has not begun."""
    options = dict(case.options)
    if isinstance(local := options.get("local"), str):
        options["local"] = optimizer_of(local, hat=keras)
    elif local is not None:
        options["local"] = lambda: SGD(local)
    wire = options.pop("wire", None)
    algorithm = getattr(simulation, case.wrapper)(
        optimizer_of(case.optimizer, hat=keras), case.workers, **options
    )
    if wire is not None:
        algorithm.wire = Wire(wire, case.wrapper)
    data = [case.data(worker) for worker in range(case.workers)]
    return Replay(algorithm, data, epochs=case.epochs, together=case.together, weights=case.weights)


#: By wrapper: how many trainings were compared, and the largest difference.
tally: dict[str, tuple[int, float]] = {}


def compare(case: Case, run: Recording, *, keras: bool = False) -> None:
    """Compare a training with its simulation.

    Raises:
        AssertionError: they differ; it names the first differences of each kind.
    """
    replay, problems = simulated(case, keras=keras), []
    try:
        replay.run(run.order)
    except OrderError as error:
        problems.append(str(error))
    if keras and replay.centre.epochs:  # with Keras the last epoch has what follows it
        replay.centre.epochs[-1] = replay.centre.c
    if not problems:
        problems += _missing(case, replay, run)
    worst = 0.0
    for what, real, expected in _series(replay, run):
        for place, (one, other) in enumerate(zip(real, expected, strict=False)):
            scale = max(1.0, float(np.abs(other).max()))
            off = float(np.abs(one - other).max()) / scale
            worst = max(worst, off)
            if not off <= case.tolerance:
                at = int(np.abs(one - other).argmax())
                problems.append(
                    f"{what} {place + 1}: off by {off:.3g}; parameter {at} is {one[at]:.8f}, "
                    f"{other[at]:.8f} was expected"
                )
                break
    count, before = tally.get(case.wrapper, (0, 0.0))
    tally[case.wrapper] = count + 1, max(before, worst)
    if problems:
        raise AssertionError("\n  ".join([str(case), *problems]))


def _series(replay: Replay, run: Recording) -> list[tuple[str, Sequence[Array], Sequence[Array]]]:
    """What is compared, one after another: its name, what was seen, what was expected."""
    series: list[tuple[str, Sequence[Array], Sequence[Array]]] = []
    for w in replay.workers:
        series.append((f"worker {w.number}, gradient taken at step", run.seen[w.number], w.seen))
        if run.after:
            series.append((f"worker {w.number}, weights after execution", run.after[w.number], w.after))
    series.append(("centre after commit", run.commits, replay.centre.commits))
    series.append(("model of the server after epoch", run.epochs, replay.centre.epochs))
    last = [replay.centre.c] * len(run.final)
    return [*series, ("final weights of rank", run.final, last)]


def _missing(case: Case, replay: Replay, run: Recording) -> list[str]:
    """What has not as many entries as it has to have."""
    lengths = {"commits": (len(run.commits), len(replay.centre.commits))}
    for w in replay.workers:
        lengths[f"gradients of worker {w.number}"] = len(run.seen[w.number]), len(w.seen)
        if run.after:
            lengths[f"executions of worker {w.number}"] = len(run.after[w.number]), len(w.after)
    if run.epochs:
        lengths["epochs"] = len(run.epochs), case.epochs
    return [f"{real} {what}, {want} were expected" for what, (real, want) in lengths.items() if real != want]
