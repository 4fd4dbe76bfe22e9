"""Elastic averaging SGD and its momentum form: an elastic force pulls worker and centre together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import numpy as np

from nnlo_common.algorithms._optimizers import LookaheadMomentum
from nnlo_common.algorithms._rule import Algorithm, Ask, CenterRule, Contribution, WorkerRule
from nnlo_common.algorithms._vector_optimizer import VectorOptimizer
from nnlo_common.base._block_threads import cached_blocks, work_through
from nnlo_common.base._errors import plural
from nnlo_common.base._flat_vector import PartWork, Vector
from nnlo_common.base._options import FROM_OPTIMIZER, option

__all__ = ["EAMSGD", "EASGD", "ElasticCenter", "ElasticWorker"]

_BLOCK = 65536  # numbers: a block of the centre and one of a contribution fit a second-level cache


_SUB_EVERY = 10
#: Why only elastic averaging has sub-servers, and what else to do.
_ONLY_ELASTIC = (
    "is for EASGD and EAMSGD only: in a tree of servers any other algorithm would move the centre late, by "
    "sums whose staleness adds up from level to level, and gain nothing; use servers=M or a larger every"
)
_TIED = "a sub-server's centre belongs to its own workers; continue with as many ranks"


class ElasticWorker(WorkerRule):
    """Send x; receive the elastic difference E = alpha (x - c); x <- x - E."""

    keeps_own = True

    def __init__(self, *, every: int, exchange_first: bool, pipeline: int = 0) -> None:
        super().__init__(pipeline=pipeline)
        self.every, self.exchange_first = every, exchange_first

    def due(self) -> Ask | None:
        """Exchange before steps 0, tau, 2 tau, ... (paper), or after steps tau - 1, 2 tau - 1, ..."""
        steps = self.clock if self.exchange_first else self.clock + 1
        return Ask.EXCHANGE if steps % self.every == 0 else None

    def outgoing(self, parameters: Vector, gradient: Vector) -> Vector:
        """Return x."""
        self.gathered = 0
        return parameters

    def incoming(self, parameters: Vector, reply: Vector) -> None:
        """x <- x - E."""
        parameters -= reply


class ElasticCenter(CenterRule):
    """c <- c + sum of E_i, with E_i = alpha (x_i - c) all taken at the old centre."""

    def __init__(self, center: Vector, alpha: float, *, synchronous: bool) -> None:
        super().__init__(center)
        self.alpha, self.synchronous = np.float32(alpha), synchronous

    def quorum(self, awaited: int) -> int:
        """Commit each contribution on arrival, or all at once."""
        return awaited if self.synchronous else 1

    def apply(self, contributions: Sequence[Contribution]) -> None:
        """Replace each x by its E, so that both sides move by the same float32 numbers."""
        move = partial(self._move, [contribution.vector for contribution in contributions])
        work_through(move, self.center.size)

    def apply_by_parts(self, contribution: Contribution) -> PartWork:
        """Return what does so for a part."""
        return partial(self._move, [contribution.vector])

    def _move(self, vectors: list[Vector], part: slice) -> None:
        for block in cached_blocks(part, _BLOCK):
            center, differences = self.center[block], [vector[block] for vector in vectors]
            for one in differences:
                np.subtract(one, center, out=one)
                np.multiply(one, self.alpha, out=one)
            for one in differences:
                np.add(center, one, out=center)

    def reply(self, vector: Vector, part: slice = slice(None)) -> None:
        """Do nothing: `apply` has left the reply E in the vector."""


@dataclass(frozen=True, kw_only=True)
class EASGD(Algorithm):
    r"""Elastic averaging SGD (Zhang, Choromanska, LeCun, NIPS 2015, arXiv:1412.6651).

    Asynchronous (algorithm 1), every tau steps of a worker, with :math:`E = \alpha (x - c)`:
    :math:`x \leftarrow x - E,\ c \leftarrow c + E`. Synchronous (equations 3 and 4): the same for all
    workers at once with the old centre. In between each worker steps on its own.

    The order of exchange and step decides stability. With f = h x^2 / 2, e = eta h and one worker:

    * order="paper": the gradient is taken at x before the exchange and applied after it.
      Stable iff 0 <= e <= 2 and 0 <= alpha <= (4 - 2e)/(4 - e). The default beta=0.9 with ONE worker
      therefore diverges for e > 4/11; use more workers or a smaller beta there.
    * order="step_first": the local step, then the exchange. Stable iff alpha is below
      (4 - 2e)/(4 - 3e) for e < 4/3 and below e/(2(e - 1)) for e > 1; for e > 2 it must also be above
      (4 - 2e)/(4 - 3e).

    A training resumed with another number of workers keeps beta, not alpha, and all workers start at c.

    With `sub_servers` the centre is the top of an elastic tree (Zhang, PhD thesis, 2016, arXiv:1605.02216,
    chapter 6): workers exchange with their sub-server, and a sub-server exchanges, with its own centre for x,
    with the top after `sub_every` exchanges of its workers. At each exchange both sides of the edge move, and
    the sub-server's centre moves by nothing else meanwhile. Stable in any order and depth if e <= 2 and every
    alpha is below 1, which is checked. By default alpha = beta / (d + 1) for d children, as in the thesis,
    where only the receiver moves (deviation). Use it only if the link between hosts stays full; `servers=M`
    and a larger `every` come first.

    Deviations: the worker sends x and the server replies E (the paper sends c down and E up), so that both
    sides move by the same float32 numbers in one round trip without a lock. "step_first" is the default
    because, asynchronously, it is stable wherever "paper" is, and because it is right for optimizers that
    read x (weight decay).

    Attributes:
        every: tau, steps between exchanges.
        alpha: the moving rate. None: from beta.
        beta: p alpha for p workers.
        beta_per: whether beta is for an exchange or a step: "exchange": alpha = beta / p; "step":
            alpha = beta / (p tau), the paper's footnote on effective elasticity.
        order: whether the exchange or the step comes first; see above.
        synchronous: wait for all workers at each exchange.
        sub_servers: servers between the top server and the workers; "host": one on each host; 0: none.
        sub_every: exchanges of its workers that a sub-server makes between two of its own with the top.
        sub_alpha: the moving rate between sub-servers and the top. None: beta / (sub-servers + 1).

    Example:
        >>> from nnlo_common.testing import train_virtually
        >>> still = lambda x, rank: 0 * x
        >>> run = train_virtually(EASGD(every=1, alpha=0.25), still, [0.0], workers=1, steps=1,
        ...                       begin=[[1.0]])
        >>> run.center, run.parameters[0]
        (array([0.25], dtype=float32), array([0.75], dtype=float32))
    """

    optimizer_runs: ClassVar[Literal["center", "worker", "nowhere"]] = "worker"
    sends: ClassVar[Literal["steps", "weights", "replaced"]] = "weights"
    replies: ClassVar[Literal["center", "steps"]] = "steps"
    refused_wires: ClassVar[Mapping[str, str]] = {
        "topk": "the centre would pull at weights of long ago, which does not converge; use int8"
    }

    every: int = option(10, "steps of a worker between exchanges", least=1)
    alpha: float | None = option(
        None, "the moving rate, in place of beta", below=1, replaces=("beta", "alpha = beta / workers")
    )
    beta: float = option(0.9, "the common pull of all workers: p alpha for p of them")
    beta_per: Literal["exchange", "step"] = option("exchange", "whether beta is for an exchange or a step")
    order: Literal["paper", "step_first"] = option(
        "step_first", "whether the exchange or the step comes first"
    )
    synchronous: bool = option(False, "wait for all workers at each exchange")
    sub_servers: int | Literal["host"] = option(
        0,
        "servers between the top server and the workers; host: one on each host",
        least=0,
        elsewhere=_ONLY_ELASTIC,
    )
    sub_every: int = option(
        _SUB_EVERY,
        "exchanges of a sub-server's workers between two of its own",
        least=1,
        elsewhere=_ONLY_ELASTIC,
    )
    sub_alpha: float | None = option(
        None,
        "the moving rate of sub-servers, with the top server; else from beta",
        below=1,
        elsewhere=_ONLY_ELASTIC,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sub_servers:
            object.__setattr__(self, "tied_to_workers", _TIED)
        if not self.sub_servers and (self.sub_every != _SUB_EVERY or self.sub_alpha is not None):
            self._refuse("sub_every and sub_alpha are for sub-servers; say how many with sub_servers, too")
        if self.sub_servers and self.synchronous:
            self._refuse(
                "synchronous=True with sub_servers is not possible: all workers would wait for each other, "
                "whatever server they exchange with; leave one of them out"
            )
        if self.sub_servers and self.lag:
            self._refuse(
                f"lag={self.lag} with sub_servers is not possible: a sub-server is on the host of its "
                "workers, so there is no round trip to hide; leave one of them out"
            )

    def moving_rate(self, workers: int) -> float:
        """Return alpha for `workers` workers of one server."""
        if self.alpha is not None:
            return self.alpha
        steps = self.every if self.beta_per == "step" else 1
        neighbours = workers + 1 if self.sub_servers else workers  # the top server counts
        alpha = self.beta / (neighbours * steps)
        if alpha >= 1:
            self._refuse(
                f"beta={self.beta:g} with {plural(workers, 'worker')} makes alpha={alpha:.3g}, but alpha "
                "must be below 1; use a smaller beta or more workers"
            )
        return alpha

    def check(self, workers: int, servers: int) -> None:
        """Refuse too few workers for beta: alpha must stay below 1."""
        self.moving_rate(workers)

    def sub_moving_rate(self, sub_servers: int) -> float:
        """Return alpha between the top server and `sub_servers` sub-servers.

        Example:
            >>> EASGD(sub_servers=2, beta=0.75).sub_moving_rate(2)
            0.25
        """
        if self.sub_alpha is not None:
            return self.sub_alpha
        steps = self.sub_every if self.beta_per == "step" else 1
        alpha = self.beta / ((sub_servers + 1) * steps)
        if alpha >= 1:
            self._refuse(
                f"beta={self.beta:g} with {sub_servers} sub-servers makes sub_alpha={alpha:.3g}, but it must "
                "be below 1; use a smaller beta, or give sub_alpha"
            )
        return alpha

    def tree(self) -> int | Literal["host"]:
        """Return the number of sub-servers."""
        return self.sub_servers

    def check_tree(self, sub_servers: int) -> None:
        """Refuse too few sub-servers for beta: alpha must stay below 1 there, too."""
        self.sub_moving_rate(sub_servers)

    def top_center(self, center: Vector, sub_servers: int) -> ElasticCenter:
        """Make the top server's half of an elastic tree."""
        return ElasticCenter(center, self.sub_moving_rate(sub_servers), synchronous=False)

    def sub_worker(self) -> ElasticWorker:
        """Make a sub-server's half of its edge to the top server; its steps are its workers' exchanges."""
        return ElasticWorker(every=self.sub_every, exchange_first=False)

    def exchanges_until_top(self) -> int:
        """Return how many exchanges of its workers a sub-server waits for."""
        return self.sub_every

    def exchanges_first(self) -> bool:
        """Whether the exchange comes before the step."""
        return self.order == "paper"

    def steps_until_move(self) -> int:
        """Return tau, and one more in the paper's order, whose first exchange moves nothing."""
        return self.every + self.exchanges_first()

    def worker(self, size: int, workers: int) -> ElasticWorker:
        """Make the worker's half."""
        return ElasticWorker(every=self.every, exchange_first=self.exchanges_first(), pipeline=self.lag)

    def center(self, center: Vector, workers: int, optimizer: VectorOptimizer | None) -> ElasticCenter:
        """Make the centre's half."""
        return ElasticCenter(center, self.moving_rate(workers), synchronous=self.synchronous)


@dataclass(frozen=True, kw_only=True)
class EAMSGD(EASGD):
    r"""EASGD with Nesterov momentum on the workers (the same paper, algorithm 2).

    :math:`v \leftarrow \delta v - \eta g(x + \delta v),\ x \leftarrow x + v`; the exchange is EASGD's in
    the paper's order and leaves v alone. With momentum=0 it is EASGD with plain SGD.

    Take the gradient at the look-ahead point :math:`x + \delta v`, not to x.

    Attributes:
        learning_rate: eta.
        momentum: delta.

    Example:
        >>> EAMSGD(learning_rate=0.1).local_optimizer()
        LookaheadMomentum(learning_rate=0.1, momentum=0.99)
    """

    optimizer_runs: ClassVar[Literal["center", "worker", "nowhere"]] = "nowhere"

    made_of: ClassVar[Literal["", "momentum", "nesterov"]] = "nesterov"
    one_optimizer: ClassVar[str] = "its momentum moves all parameters in each step"

    order: Literal["paper", "step_first"] = option(
        "paper", "whether the exchange or the step comes first", absent="always the paper's"
    )
    # Wrappers put the learning rate into the gradient.
    learning_rate: float = option(help="eta, the learning rate", absent=FROM_OPTIMIZER, fixed=1.0)
    momentum: float = option(0.99, "delta, the momentum", least=0, below=1, absent=FROM_OPTIMIZER)

    def local_optimizer(self) -> VectorOptimizer:
        """Return the look-ahead momentum optimizer of algorithm 2."""
        return LookaheadMomentum(self.learning_rate, momentum=self.momentum)
