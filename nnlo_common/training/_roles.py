"""Roles of a rank in a training: worker, server, or alone; the interface that all three have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from nnlo_common.algorithms._vector_optimizer import VectorOptimizer
from nnlo_common.base._flat_vector import FlatVector, Vector
from nnlo_common.base._state_tree import State
from nnlo_common.protocol import check_weight
from nnlo_common.protocol._query_messages import AnswerT, Query

__all__ = ["Alone", "LocalStep", "RankPart", "TrainingReport", "TeamPart", "say", "speaks"]

#: Moves the parameters of a worker, as a framework's optimizer does.
LocalStep: TypeAlias = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingReport:
    """What a rank has seen of a training.

    Attributes:
        steps: gradients computed here.
        samples: samples taken: by all workers, as the first server knows them, or by this worker.
        exchanges: contributions that this rank's shard of the centre has taken up.
        dropped: contributions that came too late (synchronous training with backup workers).
        mean_staleness: how many commits old a contribution was, on average.
        noise_scale: the gradient noise scale of this rank's shard (synchronous training only), in the unit of
            the workers' weights: samples, unless they were set.
        lost: who has died, as servers know it: rank, host, what it did last, and when; one line for each.
    """

    steps: int = 0
    samples: int = 0
    exchanges: int = 0
    dropped: int = 0
    mean_staleness: float = 0.0
    noise_scale: float | None = None
    lost: tuple[str, ...] = ()


def speaks(role: str) -> bool:
    """Say whether this is the one rank that speaks for all: the one whose parameters are the centre."""
    return role in ("alone", "server 0")


def say(role: str, text: str) -> None:
    """Print `text` if this rank speaks for all."""
    if speaks(role):
        print(text, flush=True)


class RankPart(Protocol):
    """What a rank does at each turn of an ordinary training loop."""

    def start(self) -> None:
        """Take up the part."""

    def step(self, weight: float, local_step: LocalStep | None = None) -> None:
        """Make one step with the gradient that lies ready; `local_step` moves the parameters, if given."""

    def begin_epoch(self) -> bool:
        """Begin an epoch; return whether that has moved the parameters."""

    def end_epoch(self) -> None:
        """Tell, or wait for, the end of an epoch."""

    def point(self) -> Vector:
        """Where the next gradient is to be taken."""

    @property
    def stopped(self) -> bool:
        """Whether training is to end now."""

    def stop(self) -> None:
        """Let training end; only the rank that holds the centre decides that."""

    def report(self) -> TrainingReport:
        """What was seen so far."""

    def finish(self, last: Callable[[], object] = lambda: None) -> None:
        """Leave in good order; `last` is done while the others can still be asked."""


class TeamPart(RankPart, Protocol):
    """What a rank can do besides where it is one of several."""

    def look(self, into: Vector) -> None:
        """Copy the centre as it is now into `into`."""

    def view(self, into: Vector) -> None:
        """Copy the centre into `into` as it is once all have finished the epoch; all ranks get the same."""

    def ask(self, query: Query[AnswerT]) -> AnswerT:
        """Ask the query service."""

    def last_round(self) -> None:
        """Contribute the steps since the last round, where the algorithm trains in rounds."""

    @property
    def told_rate(self) -> float:
        """The learning rate that the first server tells workers; 0: none."""

    def pause(self) -> bool:
        """Wait until all workers are at a batch boundary; False on a worker: it was called off."""

    def state(self) -> State:
        """Return everything that the next step depends on; exact in a pause."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was returned; call it before `start`."""


class Alone:
    """Trains plainly: a world of one."""

    def __init__(self, parameters: FlatVector, gradient: FlatVector, optimizer: VectorOptimizer) -> None:
        self._parameters, self._gradient, self._optimizer = parameters, gradient, optimizer
        self._steps = 0
        self.stopped = False

    def start(self) -> None:
        """Nobody has to be asked."""

    def step(self, weight: float, local_step: LocalStep | None = None) -> None:  # noqa: ARG002
        """Step the optimizer."""
        check_weight(0, weight)
        self._optimizer.step(self._parameters.vector, self._gradient.vector)
        self._steps += 1

    def begin_epoch(self) -> bool:
        """Nobody has to be asked."""
        return False

    def end_epoch(self) -> None:
        """Nobody has to be told."""

    def point(self) -> Vector:
        """Return the parameters, or what lies ahead of them."""
        ahead: Callable[[Vector], Vector] | None = getattr(self._optimizer, "gradient_point", None)
        return self._parameters.vector if ahead is None else ahead(self._parameters.vector)

    def stop(self) -> None:
        """Make no more steps."""
        self.stopped = True

    def report(self) -> TrainingReport:
        """Return the steps made."""
        return TrainingReport(steps=self._steps)

    def finish(self, last: Callable[[], object] = lambda: None) -> None:
        """Nobody has to be told."""
        last()
