"""Base classes of all algorithms: a worker's half, a centre's half, and the options that make both.

The halves know only float32 vectors: no MPI, no wall clock, no framework. Every rule works coordinate by
coordinate, so a centre cut over several servers is several independent pairs of halves on slices of the
vector, and the blocks of a long one may be computed by several threads.

All algorithms share one idea: **a commit takes a set of contributions**. Only the number of contributions in
a commit (the quorum) distinguishes an asynchronous rule (one) from a synchronous one (all, or all but some).
"""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, NoReturn, Protocol, Self

import numpy as np
import numpy.typing as npt

from nnlo_common.algorithms._gain import MemberNorms
from nnlo_common.algorithms._noise_scale import NeighbourNoise
from nnlo_common.algorithms._vector_optimizer import Configurable, LeavesMomentum, Optimizer, VectorOptimizer
from nnlo_common.base._block_threads import InOrder, cached_blocks, work_through
from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._flat_vector import PartWork, Vector
from nnlo_common.base._options import FROM_OPTIMIZER, Declared, declared, option
from nnlo_common.base._state_tree import State, Stateful

__all__ = [
    "Algorithm",
    "Ask",
    "CenterRule",
    "Contribution",
    "GainReport",
    "GradientSum",
    "WorkerRule",
    "mean_of",
]


# More workers than anybody has.
_COUNTLESS = 100_000
# A shorter vector travels in float32.
_LEAST_PACKED = 64
# Numbers: a block of two vectors fits a second-level cache.
_BLOCK = 1 << 16


class Ask(enum.IntEnum):
    """A worker's request to the centre at the end of a step."""

    EXCHANGE = enum.auto()
    """Send a contribution and receive the centre's reply: one round trip."""
    PUSH = enum.auto()
    """Send a contribution without a reply."""
    PULL = enum.auto()
    """Receive the centre without a contribution."""
    LOCK = enum.auto()
    """Receive the centre and answer with a commit, before the server handles any other worker."""
    OBSERVE = enum.auto()
    """No request, but the rule must see the gradient of this step."""

    def joined(self, other: Ask | None) -> Ask:
        """Return the request that combines both.

        Example:
            >>> Ask.PUSH.joined(Ask.PULL).name, Ask.PULL.joined(None).name, Ask.OBSERVE.joined(Ask.LOCK).name
            ('EXCHANGE', 'PULL', 'LOCK')
        """
        if {self, other} == {Ask.PUSH, Ask.PULL} or other is Ask.EXCHANGE:
            return Ask.EXCHANGE
        return other if other is not None and self is Ask.OBSERVE else self


@dataclass(slots=True)
class Contribution:
    """One worker's part in a commit.

    Attributes:
        rank: the worker.
        vector: the vector it sent; the commit may overwrite it.
        staleness: commits of the centre since the worker last fetched it.
        weight: its share in a mean, e.g. a number of samples.
        sample: the sampled coordinates of the whole gradient, of which `vector` is a part; None: it is all.
    """

    rank: int
    vector: Vector
    staleness: int = 0
    weight: float = 1.0
    sample: Vector | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GainReport:
    """How much work several workers have done together.

    Attributes:
        workers: their number now.
        batches: the batches that they have contributed.
        progress: the batches of one process that these were worth.
        worth_having: the number of workers at which each would do half of the work that it does alone; None:
            unknown.
        shortened: the share of the last contributions that were shortened.
        retreats: how often the training was lost, and went back.
        held_bytes: what this server holds for that, beyond the centre and the optimizer's state.

    Example:
        >>> GainReport(workers=8, batches=800, progress=510, worth_having=20, shortened=0.02).gain
        5.1
    """

    workers: int
    batches: float
    progress: float
    worth_having: float | None
    shortened: float
    retreats: int = 0
    held_bytes: int = 0

    @property
    def gain(self) -> float:
        """The number of workers whose work they have done."""
        return self.workers * self.progress / self.batches if self.batches else 1.0

    def since(self, before: GainReport | None) -> GainReport:
        """Return the work since an earlier report."""
        if before is None:
            return self
        return replace(self, batches=self.batches - before.batches, progress=self.progress - before.progress)

    def __str__(self) -> str:
        """Say it in a sentence.

        Example:
            >>> print(GainReport(workers=8, batches=800, progress=510, worth_having=20, shortened=0.02))
            8 workers did the work of 5.1; with these settings more than 20 are not worth having
        """
        text = f"{self.workers} workers did the work of {self.gain:.1f}"
        if self.worth_having is None or self.worth_having > _COUNTLESS:
            return text
        return f"{text}; with these settings more than {self.worth_having:.0f} are not worth having"


class WorkerRule(Stateful, ABC):
    """The worker's half of an algorithm, for one piece of the parameter vector.

    A step is: `count_step`; `observe` the raw gradient; the local optimizer moves the parameters (for some
    rules); if `due`, send `outgoing` and pass the reply to `incoming`; `advance`. A step that the rule need
    not see may only be counted. At the end of an epoch `rest` returns the last request.

    Attributes:
        clock: steps done.
        gathered: steps since the last contribution, this one included.
        given_sums: the caller passes sums over all gathered steps, so the rule does not add them up.
        exchange_first: the exchange comes before the local optimizer's step, not after it.
        pipeline: how many replies may be in flight when the next step begins.
        refreshes: every epoch begins at the centre after all workers' last epoch.
        keeps_own: the worker goes on with its own parameters when another rank takes the server's place.
    """

    saved: ClassVar[tuple[str, ...]] = ("clock", "gathered")
    given_sums: bool = False
    exchange_first: bool = False
    refreshes: ClassVar[bool] = False
    # Whether a worker goes on with its own parameters where another rank takes the server's place.
    keeps_own: ClassVar[bool] = False
    # Whether the worker's moves since a request are added to its late reply, so that they are kept.
    keeps_progress: ClassVar[bool] = False
    # Whether `incoming` takes one part of a reply after the other.
    absorbs_parts: ClassVar[bool] = True
    # Whether each step's request sends its gradient as it is, so that parts of it may leave before the step.
    sends_each_gradient: bool = False

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
        """Return the request of this step, if any."""

    def asked(self, ask: Ask) -> None:
        """Note the request being sent."""

    @abstractmethod
    def outgoing(self, parameters: Vector, gradient: Vector) -> Vector:
        """Return the vector to send; it must not change before the reply arrives."""

    def incoming(self, parameters: Vector, reply: Vector) -> None:
        """Absorb the reply; by default it replaces the parameters.

        Args:
            parameters: changed in place.
            reply: the server's vector; with `keeps_progress`, plus the worker's own moves since the request.

        With `absorbs_parts` both may be one part of the whole, each part in turn.
        """
        np.copyto(parameters, reply)

    @property
    def replaces(self) -> bool:
        """Whether a reply replaces the parameters and nothing else, so that they may receive it."""
        return type(self).incoming is WorkerRule.incoming

    def commit(self, parameters: Vector, center: Vector) -> Vector:
        """Answer a granted lock: move the parameters and return the vector to add to the centre."""
        raise NotImplementedError(f"{type(self).__name__} never asks for the lock")

    def advance(self) -> None:
        """End a step."""
        self.clock += 1

    def rest(self, gradient: Vector) -> Ask | None:
        """Return the request at the end of an epoch that uses the gradients gathered so far.

        Args:
            gradient: the sum over all gathered steps, with `given_sums`.
        """
        return None

    def begin_epoch(self) -> None:
        """Restart the count of steps between requests, if the rule counts them per epoch."""

    @property
    def sums(self) -> bool:
        """Whether the rule adds up raw gradients between requests, and nothing else; then see `sum_by`."""
        return False

    def sum_by(self, gradients: GradientSum) -> None:
        """Add up gradients by this sum in place of the rule's own."""
        raise NotImplementedError(f"{type(self).__name__} adds up no gradients")


class CenterRule(Stateful, ABC):
    """The centre's half of an algorithm, for one piece of the parameter vector.

    Attributes:
        center: the parameters that the workers share; commits change it in place.
        clock: commits done.
        absent: workers missing from the next commit because they ended their epoch before others.
        max_staleness: staler contributions are dropped; None keeps all.
        progress: the samples of one process that the contributions were worth, if the rule counts them.
        sampled: the number of sampled coordinates that come with a contribution, if the rule needs them.
    """

    saved: ClassVar[tuple[str, ...]] = ("center", "clock")
    max_staleness: int | None = None
    progress: float = 0.0
    sampled: int = 0
    #: Whether contributions are gradients, so that the noise scale is measured on the way.
    takes_gradients: ClassVar[bool] = False

    def __init__(self, center: Vector) -> None:
        self.center = center
        self.clock = self.absent = 0
        self._neighbours = NeighbourNoise(center.size) if self.takes_gradients else None

    @property
    def heavy(self) -> bool:
        """Whether a commit computes much for what it moves, so that threads of waiting workers pay.

        A worker takes in the first parts of a reply while the others are made; where those are made faster
        than sent, it is not idle.
        """
        optimizer = getattr(self, "optimizer", None)
        return isinstance(optimizer, Optimizer) and optimizer.heavy

    def quorum(self, awaited: int) -> int:
        """Return how many contributions make a commit while `awaited` workers can still contribute."""
        return 1

    def capacity(self) -> int | None:
        """Return how many workers may train now; None: all of them."""
        return None

    def share(self, size: int) -> None:
        """Note that the centre is a part of a vector of this size; others serve the rest."""

    def in_groups(self, size: int) -> None:
        """Note that each contribution is the mean of so many ranks' gradients."""

    def attend(self, workers: int) -> None:
        """Note how many workers live; called when one has died."""

    def gain_report(self) -> GainReport | None:
        """Return how much work the workers have done together, if the rule measures it."""
        return None

    @abstractmethod
    def apply(self, contributions: Sequence[Contribution]) -> None:
        """Move the centre by `contributions`, sorted by rank."""

    def commit(self, contributions: Sequence[Contribution]) -> None:
        """Apply `contributions` and count the commit."""
        self._look(contributions)
        self.apply(contributions)
        self.clock += 1

    def apply_by_parts(self, contribution: Contribution) -> PartWork | None:
        """Begin to apply one contribution; return what applies a part, and makes that part of the reply.

        A reply that is the centre it does not make. By default None, and nothing is done: the rule needs the
        whole vector.
        """
        return None

    def commit_by_parts(self, contribution: Contribution, *, replies: bool = True) -> PartWork | None:
        """Count the commit of one contribution, and return what applies its parts; None: use `commit`.

        Args:
            contribution: the contribution.
            replies: each part of the reply is made as well; without it only where that is not the centre.
        """
        move = self.apply_by_parts(contribution)
        if move is None:
            return None
        self._look([contribution])
        self.clock += 1
        return self._replying(move, contribution.vector) if replies and self.replies_center else move

    def _replying(self, move: PartWork, vector: Vector) -> PartWork:
        def move_and_reply(part: slice) -> None:
            move(part)
            self.reply(vector, part)

        return InOrder(move_and_reply) if isinstance(move, InOrder) else move_and_reply

    def noise_in_samples(self) -> float | None:
        """Return the gradient noise scale, if it is measured: in the unit of the contributions' weights."""
        found = self._neighbours
        return found.scale.value if found is not None and found.scale.count else None

    def _look(self, contributions: Sequence[Contribution]) -> None:
        if self._neighbours is not None and len(contributions) == 1:
            (one,) = contributions
            self._neighbours.see(one.rank, one.vector, one.weight)

    def settle(self) -> None:
        """Bring the state of the centre's optimizer up to date, because scripts may look at it now."""

    def configure(self, options: Vector) -> None:
        """Set the options of the centre's optimizer that a worker sent, if it is configurable."""
        optimizer = getattr(self, "optimizer", None)
        if isinstance(optimizer, Configurable):
            optimizer.configure(options)

    @property
    def replies_center(self) -> bool:
        """Whether the reply to a contribution is the new centre, which then need not be copied to be sent."""
        return type(self).reply is CenterRule.reply

    def reply(self, vector: Vector, part: slice = slice(None)) -> None:
        """Overwrite a part of a contribution, after its commit, with the reply; by default the new centre."""
        np.copyto(vector[part], self.center[part])


class GroupRule(Protocol):
    """Steps all ranks of a training without servers alike, in place of the user's optimizer.

    Attributes:
        norms: measures the ranks' gradients while their mean is made.
        progress: the samples of one process that all steps were worth.
    """

    norms: MemberNorms
    progress: float

    def step(self, x: Vector, gradient: Vector, squares: Sequence[float], weight: float) -> None:
        """Make one step with the mean gradient."""

    def gain_report(self) -> GainReport:
        """Return how much work the ranks have done together so far."""

    def state(self) -> State:
        """Return all that the next step depends on."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""


class GradientSum(Stateful):
    """A running sum of gradients.

    A sum of one gradient is that gradient bit for bit.
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
        """Return the sum, valid until the next `add`, and restart from zero."""
        self.count = 0
        return self.total


def mean_of(contributions: Sequence[Contribution]) -> Vector:
    """Return the weighted mean, computed in the given order in the first contribution's vector.

    The order makes the result bit-identical for any order of arrival. With equal weights it is the plain sum
    divided by the number of contributions.
    """
    mean = contributions[0].vector
    if len(contributions) == 1:
        return mean
    weights = [contribution.weight for contribution in contributions]
    if min(weights) == max(weights):
        weights = [1.0] * len(contributions)
    else:
        # Only ratios matter; a power of two scales them into float32's range without rounding.
        scale = 2.0 ** -math.frexp(max(weights))[1]
        weights = [scale * weight for weight in weights]

    def gather(part: slice) -> None:
        for block in cached_blocks(part, _BLOCK):
            vectors = [contribution.vector[block] for contribution in contributions]
            for vector, weight in zip(vectors, weights, strict=True):
                if weight != 1.0:
                    np.multiply(vector, np.float32(weight), out=vector)
            for vector in vectors[1:]:
                np.add(mean[block], vector, out=mean[block])
            np.divide(mean[block], np.float32(sum(weights)), out=mean[block])

    work_through(gather, mean.size)
    return mean


@dataclass(frozen=True, kw_only=True)
class Algorithm(ABC):
    """The options of an algorithm; makes the worker's and the centre's half.

    A subclass is the only place that knows its name: each field declares an option by `option`, and each fact
    that others need is a class attribute or a method here. A subclass in a module of this folder is found:
    both frameworks have a wrapper for it, and `nnlo train` a mode.

    Attributes:
        lag: how many exchanges may be under way while the worker goes on (gradient lag, pipelined SGD:
            Kurth et al. 2018, arXiv:1810.01993). With lag L a step absorbs the reply to the exchange L
            before its own, so that L=1 hides one round trip behind one step; the first L exchanges
            change nothing.
        wire: how numbers travel between workers and servers: unchanged, or smaller for slow links; what is
            lost is sent later. See docs/wire.md.
        topk_momentum: with wire="topk", the momentum of the SGD that steps the centre, which workers add up
            in its place; see `with_momentum_of`.
        topk_nesterov: whether it is Nesterov's.
    """

    #: Where the user's optimizer steps: at the centre, on each worker, or nowhere.
    optimizer_runs: ClassVar[Literal["center", "worker", "nowhere"]] = "center"

    #: The SGD that wrappers need, to take its learning rate and momentum; empty: any optimizer.
    made_of: ClassVar[Literal["", "momentum", "nesterov"]] = ""

    #: Whether the centre steps with an optimizer besides the workers', which `train_virtually` may be given.
    outer_optimizer: ClassVar[bool] = False

    #: Whether the rule makes the steps of SGD, Adam and AdamW itself, from the options of the user's.
    steps_in_place: ClassVar[bool] = False

    #: Whether a step of the centre has the gradients of all workers, as one large batch would.
    steps_together: ClassVar[bool] = False

    #: Whether contributions are averaged, weighted by their numbers of samples.
    weighs: ClassVar[bool] = False

    #: Whether the centre divides a gradient by its staleness, so that others must not add them up first.
    scales_by_staleness: ClassVar[bool] = False

    #: Whether the centre gets the workers' steps in rounds only, so that the last round must be closed.
    trains_in_rounds: ClassVar[bool] = False

    #: Why optimizers that take turns cannot share a training; empty where they can.
    one_optimizer: ClassVar[str] = ""

    #: Why a training cannot resume with another number of workers; empty where it can, from the centre.
    tied_to_workers: ClassVar[str] = ""

    #: What a worker sends: "steps", which are added up; "weights", which a reply moves; or weights that the
    #: reply "replaced". A compressed wire sends differences of weights, see `protocol/_wire.py`.
    sends: ClassVar[Literal["steps", "weights", "replaced"]] = "steps"

    #: What a server replies to it: the "center", or "steps" that move the worker.
    replies: ClassVar[Literal["center", "steps"]] = "center"

    #: Why a wire cannot carry its contributions, by wire.
    refused_wires: ClassVar[Mapping[str, str]] = {}

    #: Options of the wrappers and of `nnlo train` that are no fields; `of_options` makes fields of them.
    shorthands: ClassVar[tuple[Declared, ...]] = ()

    lag: int = option(0, "exchanges that may be under way while the worker trains on", least=0)
    wire: Literal["float32", "bfloat16", "float16", "int8", "topk"] = option(
        "float32", "how numbers travel between workers and servers", quiet=True
    )
    topk_momentum: float = option(
        0.0, "the momentum that workers add up", least=0, below=1, absent=FROM_OPTIMIZER, quiet=True
    )
    topk_nesterov: bool = option(False, "whether it is Nesterov's", absent=FROM_OPTIMIZER, quiet=True)

    def __post_init__(self) -> None:
        for name, one in declared(type(self)).items():
            value = getattr(self, name)
            if not one.holds(value):
                self._refuse(f"{name}={value!r} is not possible: it must be {one.expected}")
            object.__setattr__(self, name, one.exact(value))
        if self.wire in self.refused_wires:
            self._refuse(f"wire={self.wire!r} is not possible: {self.refused_wires[self.wire]}")
        if self.wire == "topk" and self.sends != "steps":
            self._refuse(
                "wire='topk' is not possible: it sends weights, of which all numbers matter; use int8"
            )
        if self.topk_momentum and self.wire != "topk":
            self._refuse(
                f"topk_momentum={self.topk_momentum!r} with wire={self.wire!r} is not possible: with this "
                "wire the optimizer of the centre has the momentum; leave it out"
            )

    # -- a rule in two halves -------------------------------------------------------------------------

    @abstractmethod
    def worker(self, size: int, workers: int) -> WorkerRule:
        """Make the worker's half for `size` coordinates, as one of `workers`."""

    @abstractmethod
    def center(self, center: Vector, workers: int, optimizer: VectorOptimizer | None) -> CenterRule:
        """Make the centre's half around the vector `center`, which it changes in place."""

    def counts_progress(self, ranks: int) -> bool:
        """Whether an epoch ends when the progress of an epoch is made, not after a pass over the samples.

        Args:
            ranks: the number of ranks that train.
        """
        return False

    def group(self, size: int, optimizer: VectorOptimizer | None) -> GroupRule | None:
        """Make what steps all ranks of a training without servers; None: the user's optimizer by itself."""
        return None

    def sampled(self, size: int, ranks: int) -> npt.NDArray[np.int64] | None:
        """Return the coordinates of a whole gradient that every server needs; None: those of its part.

        Args:
            size: the number of coordinates.
            ranks: the number of ranks that train.
        """
        return None

    #: Whether `group` makes the steps of a training without servers, in place of the user's optimizer.
    steps_groups: ClassVar[bool] = False

    def optimizer_runs_at(self, servers: int) -> Literal["center", "worker", "nowhere"]:
        """Return where the user's optimizer steps, with so many servers."""
        if servers:
            return self.optimizer_runs
        return "nowhere" if self.steps_groups else "worker"

    def check(self, workers: int, servers: int) -> None:  # noqa: B027 - a hook
        """Refuse numbers of workers or servers that the options do not allow."""

    def local_optimizer(self) -> VectorOptimizer | None:
        """Return the algorithm's own optimizer for a worker's parameters, if it has one."""
        return None

    def with_momentum_of(self, optimizer: object) -> Self:
        """Return the algorithm with the momentum of this optimizer on the workers, where topk has it.

        A gradient of which topk sends a number each hundredth time would act like a large step under the
        momentum of the centre (Lin et al. 2018, arXiv:1712.01887, section 3). So workers add up velocities in
        place of gradients, and the centre's SGD steps without momentum. Other optimizers stay as they are.

        Args:
            optimizer: the one that steps the centre; None: there is none.

        Example:
            >>> from nnlo_common import SGD, Downpour
            >>> Downpour(wire="topk").with_momentum_of(SGD(0.1, momentum=0.9)).topk_momentum
            0.9
        """
        if self.wire != "topk" or not isinstance(optimizer, LeavesMomentum):
            return self
        momentum, nesterov = optimizer.own_momentum()
        if not momentum:
            return self
        return replace(self, topk_momentum=momentum, topk_nesterov=nesterov)

    def packs(self, size: int) -> bool:
        """Whether a vector of this size travels in another form; a short one would gain nothing."""
        return self.wire != "float32" and size >= _LEAST_PACKED

    def at_center(self, optimizer: VectorOptimizer | None, size: int) -> VectorOptimizer | None:
        """Return the optimizer that steps a centre of this size, without the momentum that workers have."""
        if not (self.wire == "topk" and self.packs(size) and isinstance(optimizer, LeavesMomentum)):
            return optimizer
        momentum, nesterov = optimizer.own_momentum()
        if momentum and (momentum, nesterov) != (self.topk_momentum, self.topk_nesterov):
            self._refuse(
                f"the optimizer has momentum={momentum!r}, nesterov={nesterov!r}, but workers add up "
                f"topk_momentum={self.topk_momentum!r}, topk_nesterov={self.topk_nesterov!r}; take the "
                "algorithm's `with_momentum_of(optimizer)`"
            )
        if momentum:
            optimizer.leave_momentum()
        return optimizer

    def alone(self, optimizer: VectorOptimizer | None) -> VectorOptimizer:
        """Return the optimizer of a rank that trains alone: the user's, or the algorithm's own."""
        return optimizer or self.local_optimizer() or self._needs_optimizer(None)

    def commits_alone(self) -> int:
        """Return how many commits the first worker makes before the others train."""
        return 0

    def exchanges_first(self) -> bool:
        """Whether an exchange comes before the step of a worker, not after it."""
        return False

    def steps_until_move(self) -> int:
        """Return how many steps of a worker move the centre; 0: it gets what is left of an epoch, too."""
        return 0

    # -- a tree of servers ----------------------------------------------------------------------------

    def tree(self) -> int | Literal["host"]:
        """Return the number of sub-servers that it asks for; "host": one on each host; 0: no tree."""
        return 0

    def check_tree(self, sub_servers: int) -> None:
        """Refuse a number of sub-servers that the options do not allow."""
        raise NotImplementedError(f"{type(self).__name__} has no tree")

    def top_center(self, center: Vector, sub_servers: int) -> CenterRule:
        """Make the top server's half."""
        raise NotImplementedError(f"{type(self).__name__} has no tree")

    def sub_worker(self) -> WorkerRule:
        """Make a sub-server's half of its edge to the top server; its steps are its workers' exchanges."""
        raise NotImplementedError(f"{type(self).__name__} has no tree")

    def exchanges_until_top(self) -> int:
        """Return how many exchanges of a sub-server's workers move the top server's centre."""
        raise NotImplementedError(f"{type(self).__name__} has no tree")

    # -- options --------------------------------------------------------------------------------------

    @classmethod
    def wrapper_options(cls) -> dict[str, Declared]:
        """Return the options that wrappers and `nnlo train` take, by their names there.

        Example:
            >>> from nnlo_common import Downpour
            >>> list(Downpour.wrapper_options())
            ['every', 'n_push', 'n_fetch', 'local', 'warm_start', 'lag', 'wire']
        """
        every = (*cls.shorthands, *declared(cls).values())
        return {one.name: one for one in every if not one.absent}

    @classmethod
    def local_option(cls) -> Declared | None:
        """Return the option that moves a worker's weights between exchanges, if there is one."""
        return next((one for one in cls.wrapper_options().values() if one.local), None)

    @classmethod
    def of_options(cls, options: Mapping[str, Any], **taken: Any) -> Self:
        """Return the algorithm with options as wrappers and `nnlo train` take them; it refuses invalid ones.

        Args:
            options: by the wrappers' names; at most those of `wrapper_options`.
            taken: fields from the user's optimizer.
        """
        found = {one.field: one.fixed for one in declared(cls).values() if one.fixed is not None}
        for name, one in cls.wrapper_options().items():
            value = options.get(name, one.wrapper_default)
            if value is None and (one.unset or one.local):  # it is not given
                value = 0.0 if one.local else one.default
            if one.field:
                found[one.field] = value
        return cls(**found, **taken)

    def with_local_rate(self, rate: float) -> Self:
        """Return the algorithm with this learning rate of local steps, if it has such an option."""
        one = self.local_option()
        changed: dict[str, Any] = {} if one is None else {one.field: rate}
        return replace(self, **changed)

    @classmethod
    def shortened(cls, options: Mapping[str, str]) -> dict[str, str]:
        """Return the options of a description, as text, that are not at their defaults."""
        defaults = {name: repr(one.default) for name, one in declared(cls).items()}
        return {name: value for name, value in options.items() if defaults.get(name) != value}

    def describe(self) -> str:
        """Return one line, equal for equal options; ranks compare it before they start.

        Without a tree it is as if no algorithm had one. A quiet option at its default is left out.
        """
        known, tree = declared(type(self)), self.tree()
        shown = [
            one.name
            for one in fields(self)
            if (tree or not known[one.name].elsewhere)
            and not (known[one.name].quiet and getattr(self, one.name) == one.default)
        ]
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def _refuse(self, problem: str) -> NoReturn:
        raise ConfigurationError(f"{type(self).__name__}: {problem}")

    def _needs_optimizer(self, optimizer: VectorOptimizer | None) -> VectorOptimizer:
        if optimizer is None:
            self._refuse("it needs an optimizer; pass one, e.g. SGD(0.1)")
        return optimizer
