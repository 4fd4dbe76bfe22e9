"""Arrangement of ranks into servers, workers, groups and blocks: the arithmetic, and errors that explain it.

    world = [1 coordinator, with blocks only] + blocks x folds x cell
    cell  = servers + W groups x group_size ranks,  W = 1, 2, 3, ...
    tree  = 1 server + sub_servers x (1 sub-server + W workers),  W = 1, 2, 3, ...

Exception: a single rank under the default arrangement has no server and trains alone, so that a script runs
unchanged without an MPI launcher.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nnlo_common.base._arguments import whole_number
from nnlo_common.base._errors import ConfigurationError

__all__ = ["Arrangement"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """How the ranks are divided.

    Attributes:
        servers: servers of one cell; 0 makes every worker also hold a shard of the centre.
        group_size: ranks of one logical worker.
        folds: cells of one block, each for another fold of the data.
        blocks: trials trained in parallel; 0 trains one model and needs no coordinator.
        sub_servers: servers between the one server and the workers; 0: workers exchange with the server.

    Example:
        >>> [size for size in range(1, 14) if Arrangement(blocks=2, group_size=2).fits(size)]
        [7, 11]
    """

    servers: int = 1
    group_size: int = 1
    folds: int = 1
    blocks: int = 0
    sub_servers: int = 0

    def __post_init__(self) -> None:
        least = {"servers": 0, "group_size": 1, "folds": 1, "blocks": 0, "sub_servers": 0}
        for name, number in least.items():
            whole_number(name, getattr(self, name), number)
        if self.sub_servers:
            self._check_tree()

    def _check_tree(self) -> None:
        """Refuse what a tree of servers cannot have."""
        if self.servers != 1:
            raise ConfigurationError(
                f"sub_servers={self.sub_servers} with servers={self.servers} is not possible: a tree has one "
                "server at its top; use servers=1, or several servers without sub_servers"
            )
        if self.group_size != 1:
            raise ConfigurationError(
                f"sub_servers={self.sub_servers} with group_size={self.group_size} is not possible: use "
                "groups of ranks, which exchange less often, or sub-servers"
            )
        if self.blocks or self.folds > 1:
            raise ConfigurationError(
                f"sub_servers={self.sub_servers} in a search is not possible; leave it out"
            )

    def __str__(self) -> str:
        names = ("blocks", "folds", "servers", "group_size", *(("sub_servers",) if self.sub_servers else ()))
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)

    @classmethod
    def of_training(
        cls, size: int, *, servers: int = 1, group_size: int | None = None, sub_servers: int = 0
    ) -> Arrangement:
        """Return the arrangement of one training on ``size`` ranks.

        Args:
            size: how many ranks there are.
            servers: how many of them serve the centre.
            group_size: ranks of one worker; None: 1, or all ranks without a server.
            sub_servers: how many serve between the one server and the workers.

        Raises:
            ConfigurationError: there would be several workers without a server.

        Example:
            >>> print(Arrangement.of_training(4, servers=0))
            blocks=0, folds=1, servers=0, group_size=4
        """
        if group_size is None:
            group_size = size if servers == 0 and size > 1 else 1
        arrangement = cls(servers=servers, group_size=group_size, sub_servers=sub_servers)
        if servers == 0 and group_size != size:
            arrangement.check(size)
            raise ConfigurationError(
                f"servers=0 with group_size={group_size} on {size} ranks makes {size // group_size} workers "
                "without a server, which is not possible yet; leave group_size out, so that all ranks are "
                "one group, or use servers=1"
            )
        return arrangement

    @property
    def cells(self) -> int:
        """``max(blocks, 1) x folds``: how many centres are trained in parallel."""
        return max(self.blocks, 1) * self.folds

    def fits(self, size: int) -> bool:
        """Whether the arrangement divides ``size`` ranks with none left over."""
        return not _obstacle(size, self)

    def check(self, size: int) -> None:
        """Refuse a number of ranks that the arrangement does not divide.

        Raises:
            ConfigurationError: ranks would be left over or missing. The message shows the arithmetic, the
                nearest possible numbers of ranks, and other values of one field that fit this number.

        Example:
            >>> Arrangement(group_size=2).check(4)  # doctest: +ELLIPSIS, +NORMALIZE_WHITESPACE
            Traceback (most recent call last):
            nnlo_common.ConfigurationError: 4 ranks cannot be laid out as ...: 4 - 1 server = 3 worker
            ranks, which is not a multiple of group_size=2. Start 3 or 5 ranks, or keep 4 ranks with ...
        """
        whole_number("size", size, 1)
        if obstacle := _obstacle(size, self):
            raise ConfigurationError(
                f"{_count(size, 'rank')} cannot be laid out as {self}: {obstacle}. {_ways_out(size, self)}"
            )


def _obstacle(size: int, arrangement: Arrangement) -> str:
    """Return the arithmetic that does not come out; empty where the arrangement fits."""
    if size == 1 and arrangement == Arrangement():
        return ""
    if subs := arrangement.sub_servers:
        short = size < 1 + 2 * subs
        return (
            f"1 server, {_count(subs, 'sub-server')} and a worker for each need {1 + 2 * subs} ranks" * short
        )
    cells, servers, group_size = arrangement.cells, arrangement.servers, arrangement.group_size
    steps, ranks = [_count(size, "rank")], size
    if arrangement.blocks:
        ranks = size - 1
        steps.append(f"{size} - 1 coordinator = {_count(ranks, 'rank')}")
    if cells > 1:
        quotient, left_over = divmod(ranks, cells)
        if left_over:
            return f"{_chain(steps)}, which is not a multiple of {_divisor(arrangement)}"
        steps.append(f"{ranks} / {_divisor(arrangement)} = {_count(quotient, 'rank')} a cell")
        ranks = quotient
    if servers:
        steps.append(f"{ranks} - {_count(servers, 'server')} = {_count(ranks - servers, 'worker rank')}")
        ranks -= servers
    if ranks < group_size:
        return f"{_chain(steps)}, fewer than group_size={group_size}"
    if ranks % group_size:
        return f"{_chain(steps)}, which is not a multiple of group_size={group_size}"
    return ""


def _chain(steps: list[str]) -> str:
    """Join the steps; the first one, the bare number of ranks, appears only if it is the only one."""
    return "; ".join(steps[1:]) or steps[0]


def _divisor(arrangement: Arrangement) -> str:
    """Return ``2 blocks``, ``3 folds`` or ``(2 blocks x 3 folds)``."""
    parts = [(arrangement.blocks, "block"), (arrangement.folds, "fold")]
    factors = [_count(number, noun) for number, noun in parts if number > 1]
    return factors[0] if len(factors) == 1 else f"({' x '.join(factors)})"


def _ways_out(size: int, arrangement: Arrangement) -> str:
    """Return the nearest possible numbers of ranks, and values of one field that fit this number."""
    if arrangement.sub_servers:
        fewer = f", or ask for at most {(size - 1) // 2}" if size > 2 else ""
        return f"Start at least {1 + 2 * arrangement.sub_servers} ranks{fewer}."
    fixed = bool(arrangement.blocks) + arrangement.cells * arrangement.servers
    stride = arrangement.cells * arrangement.group_size
    below = (size - fixed) // stride
    sizes = sorted({fixed + max(groups, 1) * stride for groups in (below, below + 1)})
    changes = []
    for name in ("servers", "group_size", "folds", "blocks"):
        now = getattr(arrangement, name)
        if (name, now) in (("folds", 1), ("blocks", 0)):
            continue  # do not suggest a search to a user who trains one model
        distances = [
            (abs(value - now), value)
            for value in range(1, size + 1)
            if replace(arrangement, **{name: value}).fits(size)
        ]
        if distances:
            changes.append(f"{name}={min(distances)[1]}")
    keep = f", or keep {_count(size, 'rank')} with {' or '.join(changes)}" if changes else ""
    return f"Start {' or '.join(map(str, sizes))} ranks{keep}."


def _count(number: int, noun: str) -> str:
    """Return ``1 rank``, ``2 ranks``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
