"""Downpour SGD: workers push accumulated raw gradients, the centre's optimizer steps with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from nnlo_common.algorithms._optimizers import SGD
from nnlo_common.algorithms._rule import (
    Algorithm,
    Ask,
    CenterRule,
    Contribution,
    GradientSum,
    WorkerRule,
    mean_of,
)
from nnlo_common.algorithms._vector_optimizer import VectorOptimizer, moves
from nnlo_common.base._arguments import whole_number
from nnlo_common.base._flat_vector import PartWork, Vector
from nnlo_common.base._options import Declared, option

__all__ = ["Downpour", "DownpourCenter", "DownpourWorker"]

_OF_EVERY = ("n_push", "n_fetch", "schedule")


class DownpourWorker(WorkerRule):
    """Accumulate raw gradients; push the sum every `n_push` steps, fetch the centre every `n_fetch`."""

    saved = ("clock", "gathered", "began", "behind", "sum")

    def __init__(
        self, size: int, *, n_push: int = 1, n_fetch: int = 1, first_push: int = 0, pipeline: int = 0
    ) -> None:
        super().__init__(pipeline=pipeline)
        self.n_push, self.n_fetch, self.first_push = n_push, n_fetch, first_push
        self.sends_each_gradient = n_push == 1
        self.began = 0  # the schedule counts from this step
        self.behind = 0  # steps since the last request for the centre, this one included
        # A single gradient is sent from the worker's gradient vector, without a sum.
        self.sum = GradientSum(size if n_push > 1 else 0)

    def count_step(self) -> None:
        """Begin a step."""
        super().count_step()
        self.behind += 1

    def asked(self, ask: Ask) -> None:
        """Note a request for the centre."""
        if ask is not Ask.PUSH:
            self.behind = 0

    def observe(self, parameters: Vector, gradient: Vector) -> None:
        """a <- a + g."""
        if self.n_push > 1 and not self.given_sums:
            self.sum.add(gradient)

    def due(self) -> Ask | None:
        """Push after step `first_push` and every `n_push`; fetch before the steps that `n_fetch` divides."""
        step = self.clock - self.began
        push = step % self.n_push == self.first_push
        fetch = (step + 1) % self.n_fetch == 0
        if push:
            return Ask.EXCHANGE if fetch else Ask.PUSH
        return Ask.PULL if fetch else None

    def outgoing(self, parameters: Vector, gradient: Vector) -> Vector:
        """Return a; a <- 0."""
        self.gathered = 0
        return self.sum.take() if self.n_push > 1 and not self.given_sums else gradient

    def rest(self, gradient: Vector) -> Ask | None:
        """Push the rest of a, and fetch."""
        if self.gathered:
            return Ask.EXCHANGE
        return Ask.PULL if self.behind else None

    def begin_epoch(self) -> None:
        """Restart the count of pushes and fetches."""
        self.began = self.clock

    @property
    def sums(self) -> bool:
        """Whether a push holds several gradients."""
        return self.n_push > 1 and not self.given_sums

    def sum_by(self, gradients: GradientSum) -> None:
        """Add up gradients by this sum."""
        self.sum = gradients


class DownpourCenter(CenterRule):
    """c <- Optimizer(c, a), for each a on arrival."""

    takes_gradients: ClassVar[bool] = True
    saved: ClassVar[tuple[str, ...]] = ("center", "clock", "optimizer")

    def __init__(self, center: Vector, optimizer: VectorOptimizer, *, warm_start: int = 0) -> None:
        super().__init__(center)
        self.optimizer, self.warm_start = optimizer, warm_start

    def capacity(self) -> int | None:
        """Let only one worker train for the first `warm_start` commits."""
        return 1 if self.clock < self.warm_start else None

    def apply(self, contributions: Sequence[Contribution]) -> None:
        """Step with the (only) contribution."""
        self.optimizer.step(self.center, mean_of(contributions))

    def apply_by_parts(self, contribution: Contribution) -> PartWork | None:
        """Return what steps a part, if the optimizer can."""
        return moves(self.optimizer, self.center, contribution.vector)


@dataclass(frozen=True, kw_only=True)
class Downpour(Algorithm):
    r"""Downpour SGD (Dean et al., NIPS 2012, section 4.1 and appendix algorithm 1).

    Worker, step t = 0, 1, ...: :math:`x \leftarrow c` if n_fetch divides t; g at x;
    :math:`a \leftarrow a + g`; :math:`x \leftarrow x - \alpha g`; push a and clear it if n_push divides t.
    Centre: :math:`c \leftarrow \mathrm{Optimizer}(c, a)` for each push as it arrives.

    Workers send raw gradients, never differences of weights: with one worker and n_push = n_fetch = 1 the
    centre makes exactly the steps of its optimizer alone, bit for bit.

    Deviations: the push after step t and the fetch before step t+1 share one round trip where both are due;
    every push is acknowledged, so that a slow server slows its workers down instead of queueing pushes. At
    the end of an epoch the worker pushes the rest of a, fetches c, and restarts t.

    Attributes:
        n_push: steps between pushes.
        n_fetch: steps between fetches.
        schedule: "dean" pushes first after step 0, as the paper does (a push then trails its fetch by one
            gradient); "aligned" pushes after step n_push - 1, so that n_push = n_fetch is one round trip.
        local_learning_rate: the paper's alpha for the worker's own steps between fetches.
        warm_start: commits that the first worker makes alone before the others are let in; at the end of its
            first epoch they are let in anyhow, since it may wait for them there.

    Example:
        >>> from nnlo_common import SGD
        >>> from nnlo_common.testing import train_virtually
        >>> run = train_virtually(Downpour(), lambda x, rank: x, [1.0], workers=1, steps=3,
        ...                       optimizer=SGD(0.5))
        >>> run.center
        array([0.125], dtype=float32)
    """

    shorthands: ClassVar[tuple[Declared, ...]] = (
        Declared(name="every", type=int, default=1, help="steps of a worker between exchanges", least=1),
    )

    n_push: int = option(1, "steps between pushes, if not as every says", least=1, unset=True)
    n_fetch: int = option(1, "steps between fetches, if not as every says", least=1, unset=True)
    schedule: Literal["dean", "aligned"] = option(
        "dean", "whether the first push is after the first step", absent="always aligned", fixed="aligned"
    )
    local_learning_rate: float = option(
        0.0,
        "learning rate of a worker's local steps between fetches; without it there are none",
        least=0,
        called="local",
        local="optimizer",
    )
    warm_start: int = option(0, "commits of the first worker before the others join", least=0)

    @classmethod
    def of_options(cls, options: Mapping[str, Any], **taken: Any) -> Self:
        """Return the algorithm; `every` stands for both n_push and n_fetch where they are not given."""
        every = whole_number("every", options.get("every", 1), 1)
        given = {name: value for name, value in options.items() if value is not None}
        return super().of_options({"n_push": every, "n_fetch": every, **given}, **taken)

    @classmethod
    def shortened(cls, options: Mapping[str, str]) -> dict[str, str]:
        """Return what is not at its default, with `every` for what it stands for."""
        every = options.get("n_push")
        aligned = every == "1" or options.get("schedule") == "'aligned'"
        if every is None or every != options.get("n_fetch") or not aligned:
            return super().shortened(options)
        others = {name: value for name, value in options.items() if name not in _OF_EVERY}
        return {**({} if every == "1" else {"every": every}), **super().shortened(others)}

    def commits_alone(self) -> int:
        """Return how many commits the first worker makes before the others train."""
        return self.warm_start

    def worker(self, size: int, workers: int) -> DownpourWorker:
        """Make the worker's half."""
        first_push = 0 if self.schedule == "dean" else self.n_push - 1
        return DownpourWorker(
            size, n_push=self.n_push, n_fetch=self.n_fetch, first_push=first_push, pipeline=self.lag
        )

    def center(self, center: Vector, workers: int, optimizer: VectorOptimizer | None) -> DownpourCenter:
        """Make the centre's half."""
        return DownpourCenter(center, self._needs_optimizer(optimizer), warm_start=self.warm_start)

    def local_optimizer(self) -> VectorOptimizer | None:
        """Return plain SGD with the local learning rate, if that is not 0."""
        return SGD(self.local_learning_rate) if self.local_learning_rate else None
