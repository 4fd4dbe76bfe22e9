"""Base classes of all algorithms: a worker's half, a centre's half, and the options that make both.

The halves know float32 vectors and nothing else: no MPI, no clock on the wall, no thread, no framework.
Because every rule works coordinate by coordinate, a centre that is cut over several servers is just
several independent pairs of halves on slices of the vector.

One idea carries all algorithms: **a commit takes a set of contributions**. How many make a commit (the
quorum) is all that tells an asynchronous rule (one) from a synchronous one (all, or all but some).
"""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Literal, NoReturn

import numpy as np

from nnlo_common.algorithms._vector_optimizer import Configurable, VectorOptimizer
from nnlo_common.base._arguments import is_number, is_whole
from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._flat_vector import Vector
from nnlo_common.base._state_tree import Stateful

__all__ = ["Algorithm", "Ask", "CenterRule", "Contribution", "GradientSum", "WorkerRule", "mean_of"]


class Ask(enum.IntEnum):
    """What a worker asks of the centre at the end of a step."""

    EXCHANGE = enum.auto()
    """Give a contribution and take the centre's reply: one round trip."""
    PUSH = enum.auto()
    """Give a contribution, take nothing."""
    PULL = enum.auto()
    """Take the centre, give nothing."""
    LOCK = enum.auto()
    """Take the centre and answer with a commit before any other worker is heard."""
    OBSERVE = enum.auto()
    """Nothing; but the rule has to see the gradient of this step."""

    def joined(self, other: Ask | None) -> Ask:
        """Return what asks for both.

        Example:
            >>> Ask.PUSH.joined(Ask.PULL).name, Ask.PULL.joined(None).name, Ask.OBSERVE.joined(Ask.LOCK).name
            ('EXCHANGE', 'PULL', 'LOCK')
        """
        if {self, other} == {Ask.PUSH, Ask.PULL} or other is Ask.EXCHANGE:
            return Ask.EXCHANGE
        return other if other is not None and self is Ask.OBSERVE else self


@dataclass(slots=True)
class Contribution:
    """What one worker brought to a commit.

    Attributes:
        rank: the worker.
        vector: what it sent; the commit may overwrite it.
        staleness: how many commits the centre has seen since the worker last took it.
        weight: its share in a mean, e.g. a number of samples.
    """

    rank: int
    vector: Vector
    staleness: int = 0
    weight: float = 1.0


class WorkerRule(Stateful, ABC):
    """The worker's half of an algorithm, for one piece of the parameter vector.

    A step goes: `count_step`; `observe` the raw gradient; the local optimizer moves the parameters (for some
    rules); if `due`, the `outgoing` vector travels and the reply comes in through `incoming`; `advance`. A
    step that need not be seen may be passed: it is counted only. At an epoch's end `rest` says what is left.

    Attributes:
        clock: steps done.
        gathered: steps since the last contribution, this one included.
        given_sums: gradients come as the sum over all gathered steps; nothing has to be added up here.
        exchange_first: the exchange comes before the local optimizer's step, not after it.
        pipeline: how many replies may still be under way when the next step begins.
        refreshes: every epoch begins at the centre that all have ended the last one with.
    """

    saved: ClassVar[tuple[str, ...]] = ("clock", "gathered")
    given_sums: bool = False
    exchange_first: bool = False
    refreshes: ClassVar[bool] = False
    # Where replies come late: add to them what the worker has moved since, instead of losing it.
    keeps_progress: ClassVar[bool] = False

    def __init__(self, *, pipeline: int = 0) -> None:
        self.clock = self.gathered = 0
        self.pipeline = pipeline

    def begin(self, parameters: Vector, center: Vector) -> None:
        """Start from the centre."""
        np.copyto(parameters, center)

    def count_step(self) -> None:
        """Begin a step."""
        self.gathered += 1

    def observe(self, parameters: Vector, gradient: Vector) -> None:
        """See the raw gradient of this step, before the local optimizer does."""

    @abstractmethod
    def due(self) -> Ask | None:
        """Say what to ask of the centre in this step, if anything."""

    def asked(self, ask: Ask) -> None:
        """Note what is asked for now."""

    @abstractmethod
    def outgoing(self, parameters: Vector, gradient: Vector) -> Vector:
        """Return what travels; it stays as it is until the reply has come."""

    def incoming(self, parameters: Vector, reply: Vector) -> None:
        """Absorb the reply; by default it replaces the parameters.

        Args:
            parameters: changed in place.
            reply: the server's vector. For rules that keep their progress, what the worker has moved by
                itself since the request was sent has been added to it.
        """
        np.copyto(parameters, reply)

    def commit(self, parameters: Vector, center: Vector) -> Vector:
        """Answer a granted lock: move the parameters and return what is added to the centre."""
        raise NotImplementedError(f"{type(self).__name__} never asks for the lock")

    def advance(self) -> None:
        """End a step."""
        self.clock += 1

    def rest(self, gradient: Vector) -> Ask | None:
        """Say what to ask for at the end of an epoch, so that no gradient that was gathered is lost.

        Args:
            gradient: the sum over all gathered steps, where sums are given.
        """
        return None

    def begin_epoch(self) -> None:
        """Begin to count anew what is done every so many steps, if the rule does so in each epoch."""


class CenterRule(Stateful, ABC):
    """The centre's half of an algorithm, for one piece of the parameter vector.

    Attributes:
        center: the parameters that the workers share; changed in place by commits.
        clock: commits done.
        absent: how many workers are not in the next commit because they have ended their epoch before others.
        max_staleness: contributions older than this are dropped; None keeps all.
    """

    saved: ClassVar[tuple[str, ...]] = ("center", "clock")
    max_staleness: int | None = None

    def __init__(self, center: Vector) -> None:
        self.center = center
        self.clock = self.absent = 0

    def quorum(self, awaited: int) -> int:
        """Say how many contributions make a commit while `awaited` workers are still to be heard from."""
        return 1

    def capacity(self) -> int | None:
        """Say how many workers may train now; None: all of them."""
        return None

    @abstractmethod
    def apply(self, contributions: Sequence[Contribution]) -> None:
        """Move the centre by `contributions`, which are sorted by rank."""

    def commit(self, contributions: Sequence[Contribution]) -> None:
        """Apply `contributions` and count the commit."""
        self.apply(contributions)
        self.clock += 1

    def configure(self, options: Vector) -> None:
        """Set the options of the centre's optimizer as a worker has sent them, if it can be told any."""
        optimizer = getattr(self, "optimizer", None)
        if isinstance(optimizer, Configurable):
            optimizer.configure(options)

    def reply(self, vector: Vector) -> None:
        """Turn a contribution's vector, after its commit, into the reply; by default the new centre."""
        np.copyto(vector, self.center)


class GradientSum(Stateful):
    """A running sum of gradients.

    One gradient is passed on as it is, so that a sum of one is that gradient bit for bit.
    """

    saved = ("total", "count")

    def __init__(self, size: int) -> None:
        self.total: Vector = np.zeros(size, np.float32)
        self.count = 0

    def add(self, gradient: Vector) -> None:
        """Add one gradient."""
        if self.count:
            self.total += gradient
        else:
            np.copyto(self.total, gradient)
        self.count += 1

    def take(self) -> Vector:
        """Return the sum, which stays valid until the next `add`, and start again from zero."""
        self.count = 0
        return self.total


def mean_of(contributions: Sequence[Contribution]) -> Vector:
    """Return the weighted mean, computed in the given order within the first contribution's vector.

    The order makes it the same to the bit however the contributions arrived. With equal weights it is
    the plain sum divided by their number.
    """
    mean = contributions[0].vector
    if len(contributions) == 1:
        return mean
    weights = [contribution.weight for contribution in contributions]
    if min(weights) == max(weights):
        weights = [1.0] * len(contributions)
    else:
        # Only their ratios count; a power of two brings them into float32's range without rounding.
        scale = 2.0 ** -math.frexp(max(weights))[1]
        weights = [scale * weight for weight in weights]
        for contribution, weight in zip(contributions, weights, strict=True):
            np.multiply(contribution.vector, np.float32(weight), out=contribution.vector)
    for contribution in contributions[1:]:
        mean += contribution.vector
    np.divide(mean, np.float32(sum(weights)), out=mean)
    return mean


@dataclass(frozen=True, kw_only=True)
class Algorithm(ABC):
    """The options of an algorithm; makes the worker's and the centre's half.

    Attributes:
        lag: how many exchanges may be under way while the worker goes on (gradient lag, pipelined SGD:
            Kurth et al. 2018, arXiv:1810.01993). With lag L a step absorbs the reply to the exchange L
            before its own, so that L=1 hides one round trip behind one step; the first L exchanges
            change nothing.
    """

    #: Whose step the user's optimizer makes: the centre's, each worker's, or nobody's.
    optimizer_runs: ClassVar[Literal["center", "worker", "nowhere"]] = "center"

    #: Whether contributions are averaged, so that it matters how many samples each is of.
    weighs: ClassVar[bool] = False

    #: Whether what workers do between exchanges reaches the centre in rounds only: the last is to be closed.
    trains_in_rounds: ClassVar[bool] = False

    #: Why a training cannot go on with another number of workers; empty where it can, from the centre.
    tied_to_workers: ClassVar[str] = ""

    lag: int = 0

    def __post_init__(self) -> None:
        self._whole("lag", least=0)

    @abstractmethod
    def worker(self, size: int, workers: int) -> WorkerRule:
        """Make the worker's half for `size` coordinates, as one of `workers`."""

    @abstractmethod
    def center(self, center: Vector, workers: int, optimizer: VectorOptimizer | None) -> CenterRule:
        """Make the centre's half around the vector `center`, which it changes in place."""

    def check(self, workers: int, servers: int) -> None:  # noqa: B027 - a hook
        """Refuse a number of workers or servers that the options do not allow."""

    def local_optimizer(self) -> VectorOptimizer | None:
        """Return the optimizer that moves a worker's parameters, where the algorithm brings its own."""
        return None

    def alone(self, optimizer: VectorOptimizer | None) -> VectorOptimizer:
        """Return what trains plainly in a world of one: the user's optimizer, or the algorithm's own."""
        return optimizer or self.local_optimizer() or self._needs_optimizer(None)

    def _whole(self, name: str, *, least: int) -> None:
        """Refuse the option `name` unless it is a whole number of at least `least`."""
        value = getattr(self, name)
        if not is_whole(value, least):
            self._refuse_option(name, f"a whole number of at least {least}")
        object.__setattr__(self, name, int(value))  # so that equal options are described alike

    def _real(
        self, name: str, *, least: float | None = None, above: float = 0, below: float = math.inf
    ) -> None:
        """Refuse the option `name` unless it is a number in the given range."""
        value = getattr(self, name)
        low = f"above {above}" if least is None else f"at least {least}"
        if (
            not is_number(value)
            or not (value > above if least is None else value >= least)
            or not value < below
        ):
            self._refuse_option(name, low + (", finite" if below == math.inf else f" and below {below}"))
        object.__setattr__(self, name, float(value))

    def _one_of(self, name: str, *choices: str) -> None:
        """Refuse the option `name` unless it is one of `choices`."""
        if getattr(self, name) not in choices:
            self._refuse_option(name, " or ".join(map(repr, choices)))

    def _refuse_option(self, name: str, expected: str) -> NoReturn:
        self._refuse(f"{name}={getattr(self, name)!r} is not possible: it must be {expected}")

    def _refuse(self, problem: str) -> NoReturn:
        raise ConfigurationError(f"{type(self).__name__}: {problem}")

    def _needs_optimizer(self, optimizer: VectorOptimizer | None) -> VectorOptimizer:
        if optimizer is None:
            self._refuse("it needs an optimizer; pass one, e.g. SGD(0.1)")
        return optimizer

    def describe(self) -> str:
        """Return one line that is equal for equal options; ranks compare it before they start."""
        options = ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in fields(self))
        return f"{type(self).__name__}({options})"
