"""Topology: the role of each rank as coordinator, server or worker, in blocks, folds and groups.

    13 ranks, Arrangement(blocks=2):
        rank 0       coordinator
        ranks 1-6    block 0: server, workers 0-4
        ranks 7-12   block 1: server, workers 0-4

A *cell* trains one centre: its servers and its workers. Ranks are assigned block by block, fold by fold,
servers first, then groups. Launchers fill one host after the other by default, so the ranks of a group, which
exchange most, share a host.

A plan is a pure function of the number of ranks, the arrangement and, in a tree, the hosts, so all ranks
compute the same one without a message.

A tree has one server, sub-servers, and workers that exchange with a sub-server. The ranks are cut into as
many *branches* as there are sub-servers, host by host, so that a sub-server is on the host of its workers:

    10 ranks on two hosts, Arrangement(sub_servers=2):
        rank 0       server
        ranks 1-4    branch 0: sub-server, workers 0-2
        ranks 5-9    branch 1: sub-server, workers 3-6
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, TypedDict, Unpack

from nnlo_common.base._arguments import whole_number
from nnlo_common.base._errors import ConfigurationError
from nnlo_common.cluster._hosts import Place, text_table

__all__ = ["Arrangement", "Assignment", "Cell", "Role", "Roles", "Topology"]


class Roles(TypedDict, total=False):
    """What a user says of the ranks of a training that decides which of them does what.

    Attributes:
        servers: how many ranks serve the centre.
        group_size: ranks of one worker; None: 1, or all ranks without a server.
        sub_servers: how many serve between the one server and the workers; "host": one on each host, but not
            on that of the server if it is alone there.
        spares: how many wait to serve in the place of a dead server, or to train in a dead worker's: the last
            ranks.
    """

    servers: int
    group_size: int | None
    sub_servers: int | Literal["host"]
    spares: int


# -- arrangement of ranks into servers, workers, groups and blocks: the arithmetic, and its errors -----
#     world = [1 coordinator, with blocks only] + blocks x folds x cell
#     cell  = servers + W groups x group_size ranks + spares,  W = 1, 2, 3, ...
#     tree  = 1 server + sub_servers x (1 sub-server + W workers),  W = 1, 2, 3, ...
#
# Exception: a single rank under the default arrangement has no server and trains alone, so that a script
# runs unchanged without an MPI launcher.


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """How the ranks are divided.

    Attributes:
        servers: servers of one cell; 0 makes every worker also hold a shard of the centre.
        group_size: ranks of one logical worker.
        folds: cells of one block, each for another fold of the data.
        blocks: trials trained in parallel; 0 trains one model and needs no coordinator.
        sub_servers: servers between the one server and the workers; 0: workers exchange with the server.
        spares: ranks that serve in a server's place when it has died.

    Example:
        >>> [size for size in range(1, 14) if Arrangement(blocks=2, group_size=2).fits(size)]
        [7, 11]
    """

    servers: int = 1
    group_size: int = 1
    folds: int = 1
    blocks: int = 0
    sub_servers: int = 0
    spares: int = 0

    def __post_init__(self) -> None:
        least = {"servers": 0, "group_size": 1, "folds": 1, "blocks": 0, "sub_servers": 0, "spares": 0}
        for name, number in least.items():
            whole_number(name, getattr(self, name), number)
        if self.sub_servers:
            self._check_tree()
        if self.spares:
            self._check_spares()

    def _check_spares(self) -> None:
        """Refuse where no spare can take a server's place."""
        others = {"servers": self.servers == 0, "group_size": self.group_size != 1}
        others |= {"sub_servers": self.sub_servers > 0, "blocks": self.blocks > 0, "folds": self.folds > 1}
        for name in [name for name, given in others.items() if given]:
            raise ConfigurationError(
                f"spares={self.spares} with {name}={getattr(self, name)} is not possible: a spare takes the "
                f"place of one of a training's servers. Leave spares or {name} out"
            )

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
        also = [name for name in ("sub_servers", "spares") if getattr(self, name)]
        names = ("blocks", "folds", "servers", "group_size", *also)
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)

    @classmethod
    def of_training(
        cls,
        size: int,
        *,
        servers: int = 1,
        group_size: int | None = None,
        sub_servers: int = 0,
        spares: int = 0,
    ) -> Arrangement:
        """Return the arrangement of one training on ``size`` ranks.

        Args:
            size: how many ranks there are.
            servers: how many of them serve the centre.
            group_size: ranks of one worker; None: 1, or all ranks without a server.
            sub_servers: how many serve between the one server and the workers.
            spares: how many wait to serve in the place of a dead server; a single rank needs none.

        Raises:
            ConfigurationError: there would be several workers without a server.

        Example:
            >>> print(Arrangement.of_training(4, servers=0))
            blocks=0, folds=1, servers=0, group_size=4
        """
        if group_size is None:
            group_size = size if servers == 0 and size > 1 else 1
        spares = spares if size > 1 else 0
        arrangement = cls(servers=servers, group_size=group_size, sub_servers=sub_servers, spares=spares)
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
    if spares := arrangement.spares:
        steps.append(f"{ranks} - {_count(spares, 'spare')} = {_count(ranks - spares, 'worker rank')}")
        ranks -= spares
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
    fixed = bool(arrangement.blocks) + arrangement.cells * arrangement.servers + arrangement.spares
    stride = arrangement.cells * arrangement.group_size
    below = (size - fixed) // stride
    sizes = sorted({fixed + max(groups, 1) * stride for groups in (below, below + 1)})
    changes = []
    for name in ("servers", "group_size", "folds", "blocks"):
        now = getattr(arrangement, name)
        if (name, now) in (("folds", 1), ("blocks", 0)) or arrangement.spares:
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


_LEAST_BRANCH = 2  # a sub-server and a worker


class Role(enum.Enum):
    """The role of a rank.

    Example:
        >>> [assignment.role.value for assignment in Topology.plan(4, Arrangement(blocks=1)).assignments]
        ['coordinator', 'server', 'worker', 'worker']
    """

    COORDINATOR = "coordinator"  # assigns the trials of a search; only with blocks
    SERVER = "server"  # holds a shard of its cell's centre
    SUB_SERVER = "sub-server"  # serves the workers of its branch, and exchanges with the server
    SPARE = "spare"  # holds a copy of the server's state, and serves when it has died
    WORKER = "worker"  # trains, and exchanges with the servers for its group
    MEMBER = "member"  # trains, and exchanges within its group only

    @property
    def serves(self) -> bool:
        """Whether it holds a centre for others, and does not train."""
        return self in (Role.SERVER, Role.SUB_SERVER, Role.SPARE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The role of one rank and its position in the topology.

    Attributes:
        rank: the number among all ranks.
        role: the role.
        block: index of its block; None without blocks and on the coordinator.
        fold: index of its fold; None on the coordinator.
        shard: index of its shard of the centre; None if it holds none. Without servers the workers hold the
            shards; a rank that trains alone holds shard 0, the whole centre.
        worker: index of its logical worker within the cell; None if it does not train.
        member: index within that logical worker; None if it does not train.
        branch: index of its sub-server's branch in a tree; None outside of one.
        spare: index among the spares; None if it is none.

    Example:
        >>> assignment = Topology.plan(3).assignment(2)
        >>> assignment.role, assignment.worker, assignment.title
        (<Role.WORKER: 'worker'>, 1, 'worker 1')
    """

    rank: int
    role: Role
    block: int | None = None
    fold: int | None = None
    shard: int | None = None
    worker: int | None = None
    member: int | None = None
    branch: int | None = None
    spare: int | None = None

    @property
    def title(self) -> str:
        """The name of this rank in reports and files.

        "server 0", "worker 1", "worker 1, member 2", or "lead" for the first rank of a group without servers.
        """
        if self.role is Role.MEMBER:
            return f"worker {self.worker}, member {self.member}"
        if self.role is Role.SUB_SERVER:
            return f"sub-server {self.branch}"
        if self.role is Role.SPARE:
            return f"spare {self.spare}"
        if self.shard is None:
            return f"worker {self.worker}"
        return f"server {self.shard}" if self.role is Role.SERVER else "lead"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The ranks that train one centre.

    Attributes:
        index: ``block x folds + fold``.
        block: index of its block; None without blocks.
        fold: index of its fold.
        servers: the server ranks, by shard; empty where the workers hold the shards themselves.
        groups: the ranks of every logical worker, leading rank first.
        branches: in a tree, the ranks of every branch, its sub-server first; else empty.
        spares: the ranks that serve in the place of a dead server, in this order.

    Example:
        >>> cell = Topology.plan(6, Arrangement(servers=2, group_size=2)).cells[0]
        >>> cell.servers, cell.groups, cell.workers
        ((0, 1), ((2, 3), (4, 5)), (2, 4))
    """

    index: int
    block: int | None
    fold: int
    servers: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    branches: tuple[tuple[int, ...], ...] = ()
    spares: tuple[int, ...] = ()

    @property
    def sub_servers(self) -> tuple[int, ...]:
        """The first rank of every branch."""
        return tuple(branch[0] for branch in self.branches)

    def branch_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of the branch of a sub-server or worker, the sub-server first."""
        return next(branch for branch in self.branches if rank in branch)

    @property
    def workers(self) -> tuple[int, ...]:
        """The leading rank of every group."""
        return tuple(group[0] for group in self.groups)

    @property
    def holders(self) -> tuple[int, ...]:
        """The ranks that hold the shards of the centre, by shard: the servers, or else the workers."""
        return self.servers or self.workers

    @property
    def spares_may_train(self) -> bool:
        """Whether there are more spares than the one that stays for each server."""
        return len(self.spares) > len(self.servers)

    def spares_of(self, shard: int) -> tuple[int, ...]:
        """Return the ranks that serve a shard when its server has died, in this order.

        It is fixed, so that all ranks agree. With fewer spares than servers a spare has several shards, and
        takes the place of the first of their servers that dies.

        Example:
            >>> cell = Topology.plan(8, Arrangement(servers=2, spares=3)).cells[0]
            >>> cell.spares, cell.spares_of(0), cell.spares_of(1)
            ((5, 6, 7), (5, 7), (6,))
        """
        own = self.spares[shard :: len(self.servers)]
        return own or self.spares[shard % max(1, len(self.spares)) :][:1]

    @property
    def ranks(self) -> tuple[int, ...]:
        """All its ranks, in order."""
        trains = (rank for group in self.groups for rank in group)
        ranks = (*self.servers, *self.sub_servers, *trains, *self.spares)
        return tuple(sorted(ranks)) if self.branches else ranks

    @property
    def alone(self) -> bool:
        """Whether the cell is one rank, which trains without exchanges."""
        return len(self.ranks) == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The role of every rank.

    Attributes:
        arrangement: how the ranks are divided.
        coordinator: the rank that assigns trials; None without blocks.
        cells: one for every centre, block by block and fold by fold.
        assignments: the assignment of each rank, by rank.

    Example:
        >>> print(Topology.plan(5, Arrangement(servers=1, group_size=2)).table())
        rank  role
           0  server 0 of 1
           1  worker 0
           2  worker 0, member 1 of 2
           3  worker 1
           4  worker 1, member 1 of 2
    """

    arrangement: Arrangement
    coordinator: int | None
    cells: tuple[Cell, ...]
    assignments: tuple[Assignment, ...]

    @classmethod
    def plan(
        cls, size: int, arrangement: Arrangement | None = None, hosts: Sequence[str] | None = None
    ) -> Topology:
        """Give each of ``size`` ranks its role.

        Args:
            size: how many ranks there are.
            arrangement: how they are divided; by default one server and workers.
            hosts: the host of each rank, which a tree follows; None: the launcher fills host after host.

        Raises:
            ConfigurationError: ranks would be left over or missing; see `Arrangement.check`.
        """
        arrangement = arrangement or Arrangement()
        arrangement.check(size)
        coordinator = 0 if arrangement.blocks else None
        subs = arrangement.sub_servers
        cells = (_tree(hosts or [""] * size, subs),) if subs else tuple(_cells(size, arrangement))
        assignments = tuple(_assignments(coordinator, cells))
        return cls(arrangement=arrangement, coordinator=coordinator, cells=cells, assignments=assignments)

    @classmethod
    def of_training(cls, hosts: Sequence[str], **roles: Unpack[Roles]) -> Topology:
        """Give each rank its role in one training.

        Args:
            hosts: the host of each rank.
            roles: what the user says of the ranks.

        Example:
            >>> tree = Topology.of_training(["a", "a", "a", "b", "b"], sub_servers="host")
            >>> [assignment.title for assignment in tree.assignments]
            ['server 0', 'sub-server 0', 'worker 0', 'sub-server 1', 'worker 1']
        """
        given: dict[str, Any] = {**roles}
        if given.get("sub_servers") == "host":
            given["sub_servers"] = len(_hosts_of_branches(hosts))
        return cls.plan(len(hosts), Arrangement.of_training(len(hosts), **given), hosts)

    def assignment(self, rank: int) -> Assignment:
        """Return the assignment of a rank."""
        if not 0 <= rank < len(self.assignments):
            raise ConfigurationError(f"rank={rank!r}: must be from 0 to {len(self.assignments) - 1}")
        return self.assignments[rank]

    def cell_of(self, rank: int) -> Cell:
        """Return the cell of a rank; refuse the coordinator, which has none."""
        assignment = self.assignment(rank)
        if assignment.fold is None:
            raise ConfigurationError(
                f"rank={rank!r}: is the coordinator, which is in no cell; check its role first"
            )
        return self.cells[(assignment.block or 0) * self.arrangement.folds + assignment.fold]

    def gpus(self, places: Sequence[Place]) -> tuple[int | None, ...]:
        """Choose the GPU of every rank: ``turn % visible GPUs``, with turns counted per host.

        On each host the training ranks take the first turns, in rank order, then the servers. A server also
        steps and validates the model, so it gets an idle GPU if there is one, but never at the cost of a
        worker. The coordinator holds no model and gets None.
        """
        found, size = [place.rank for place in places], len(self.assignments)
        if found != list(range(size)):
            raise ConfigurationError(
                f"places of ranks {found}: pass those of ranks 0 to {size - 1}, in order"
            )
        residents: dict[str, list[int]] = defaultdict(list)
        for assignment in sorted(self.assignments, key=lambda each: each.role.serves):
            if assignment.role is not Role.COORDINATOR:
                residents[places[assignment.rank].host].append(assignment.rank)
        devices: list[int | None] = [None] * size
        for ranks in residents.values():
            for turn, rank in enumerate(ranks):
                visible = places[rank].gpus
                devices[rank] = turn % visible if visible else None
        return tuple(devices)

    def table(self, places: Sequence[Place] | None = None) -> str:
        """Return a table of the roles; with ``places`` also of host, local rank and GPU."""
        columns: dict[str, Sequence[int | str | None]] = {"rank": range(len(self.assignments))}
        if places is not None:
            devices = self.gpus(places)
            columns |= {"host": [place.host for place in places]}
            columns |= {"local rank": [place.local_rank for place in places], "GPU": devices}
        if self.arrangement.blocks:
            columns["block"] = [assignment.block for assignment in self.assignments]
        if self.arrangement.folds > 1:
            columns["fold"] = [assignment.fold for assignment in self.assignments]
        columns["role"] = [self._title(assignment) for assignment in self.assignments]
        return text_table(list(columns), list(zip(*columns.values(), strict=True)))

    def _title(self, assignment: Assignment) -> str:
        """Return the role of a rank as shown in the table."""
        if assignment.role is Role.COORDINATOR:
            return "coordinator"
        cell = self.cell_of(assignment.rank)
        if assignment.role.serves:
            of_role = {Role.SERVER: cell.servers, Role.SUB_SERVER: cell.branches, Role.SPARE: cell.spares}
            number = len(of_role[assignment.role])
            return f"{assignment.title} of {number}"
        title = f"worker {assignment.worker}"
        if cell.branches:
            title = f"{title} of sub-server {assignment.branch}"
        elif assignment.role is Role.MEMBER:
            return f"{title}, member {assignment.member} of {self.arrangement.group_size}"
        if cell.alone:
            return f"{title}, alone"
        if not cell.servers and len(cell.groups) == 1:
            return f"{title}, lead, without a server"
        return title if cell.servers else f"{title}, shard {assignment.shard} of {len(cell.workers)}"

    def validate(self) -> None:
        """Check the invariants of every plan; for tests and for topologies built by hand.

        Raises:
            ConfigurationError: a rank has no role or several, a cell or a group has a size other than the
                arrangement's, or assignments and cells disagree.
        """
        broken = "; ".join(_violations(self))
        if broken:
            raise ConfigurationError(
                f"this topology of {len(self.assignments)} ranks as {self.arrangement} violates: {broken}. "
                "Build it with Topology.plan"
            )


def _violations(topology: Topology) -> Iterator[str]:
    """Yield the violated invariants."""
    cells, wanted = topology.cells, topology.arrangement
    lone = len(topology.assignments) == 1 and wanted == Arrangement()
    ranks = [] if topology.coordinator is None else [topology.coordinator]
    ranks += [rank for cell in cells for rank in cell.ranks]
    if ranks != list(range(len(topology.assignments))):
        yield "every rank is in exactly one place, in order"
    if (topology.coordinator is None) != (wanted.blocks == 0):
        yield "there is a coordinator exactly with blocks"
    places = [(cell.index, (cell.block or 0) * wanted.folds + cell.fold) for cell in cells]
    if places != [(index, index) for index in range(wanted.cells)]:
        yield "there is one cell for every block and fold, in order"
    if {len(cell.servers) for cell in cells} != {0 if lone else wanted.servers}:
        yield "every cell has the servers asked for"
    if {len(group) for cell in cells for group in cell.groups} != {wanted.group_size}:
        yield "every group has the size asked for"
        return  # the other checks need the groups
    if len({len(cell.groups) for cell in cells}) != 1:
        yield "all cells have equally many groups"
    shards = [[each.shard for each in topology.assignments if each.rank in cell.holders] for cell in cells]
    if any(numbers != list(range(len(cell.holders))) for numbers, cell in zip(shards, cells, strict=True)):
        yield "the shards of a cell are numbered from 0"
    if any(len(cell.branches) != wanted.sub_servers for cell in cells):
        yield "every cell has the sub-servers asked for"
    if any(len(cell.spares) != wanted.spares for cell in cells):
        yield "every cell has the spares asked for"
    if topology.assignments != tuple(_assignments(topology.coordinator, cells)):
        yield "the assignments say what the cells say"


def _cells(size: int, arrangement: Arrangement) -> Iterator[Cell]:
    """Cut the ranks into cells; the arrangement fits."""
    first = 1 if arrangement.blocks else 0
    length = (size - first) // arrangement.cells
    servers = min(arrangement.servers, length - 1)  # fewer than requested only for a single rank
    for index in range(arrangement.cells):
        start = first + index * length
        end = start + length - arrangement.spares
        leaders = range(start + servers, end, arrangement.group_size)
        yield Cell(
            index=index,
            block=index // arrangement.folds if arrangement.blocks else None,
            fold=index % arrangement.folds,
            servers=tuple(range(start, start + servers)),
            groups=tuple(tuple(range(rank, rank + arrangement.group_size)) for rank in leaders),
            spares=tuple(range(end, start + length)),
        )


def _hosts_of_branches(hosts: Sequence[str]) -> dict[str, list[int]]:
    """Return the ranks of each host, without that of a server which has it to itself."""
    of_host: dict[str, list[int]] = defaultdict(list)
    for rank, host in enumerate(hosts):
        of_host[host].append(rank)
    return {host: ranks for host, ranks in of_host.items() if ranks != [0]}


def _tree(hosts: Sequence[str], sub_servers: int) -> Cell:
    """Cut the ranks of these hosts into a server and branches."""
    pieces = list(_hosts_of_branches(hosts).values())
    if sub_servers % len(pieces):  # branches cannot end with the hosts
        pieces = [[rank for ranks in pieces for rank in ranks]]
    each = sub_servers // len(pieces)
    cuts = [list(_cut(ranks, each)) for ranks in pieces]
    branches = [tuple(rank for rank in part if rank) for parts in cuts for part in parts]
    for index, branch in enumerate(branches):
        if len(branch) < _LEAST_BRANCH:
            where = f" on host {hosts[branch[0]]}" if branch and hosts[branch[0]] else ""
            raise ConfigurationError(
                f"sub-server {index} of {sub_servers}{where} would have no worker; start more ranks there "
                f"(each needs one for itself and one for a worker, rank 0 is the server), or ask for fewer"
            )
    workers = sorted(rank for _, *workers in branches for rank in workers)
    groups = tuple((rank,) for rank in workers)
    return Cell(index=0, block=None, fold=0, servers=(0,), groups=groups, branches=tuple(branches))


def _cut(ranks: Sequence[int], pieces: int) -> Iterator[Sequence[int]]:
    """Cut the ranks into pieces whose sizes differ by at most one; rank 0 makes its piece a larger one."""
    ends = [-(-index * len(ranks) // pieces) for index in range(pieces + 1)]
    for start, end in pairwise(ends):
        yield ranks[start:end]


def _assignments(coordinator: int | None, cells: Sequence[Cell]) -> Iterator[Assignment]:
    """Yield the assignment of every rank, cell by cell."""
    if coordinator is not None:
        yield Assignment(rank=coordinator, role=Role.COORDINATOR)
    for cell in cells:
        common = Assignment(rank=-1, role=Role.SERVER, block=cell.block, fold=cell.fold)
        for shard, rank in enumerate(cell.servers):
            yield replace(common, rank=rank, shard=shard)
        if cell.branches:
            yield from _of_tree(cell, common)
            continue
        for worker, group in enumerate(cell.groups):
            for member, rank in enumerate(group):
                leads = member == 0
                role = Role.WORKER if leads else Role.MEMBER
                held = worker if leads and not cell.servers else None
                yield replace(common, rank=rank, role=role, shard=held, worker=worker, member=member)
        for spare, rank in enumerate(cell.spares):
            yield replace(common, rank=rank, role=Role.SPARE, spare=spare)


def _of_tree(cell: Cell, common: Assignment) -> Iterator[Assignment]:
    """Yield the assignments of a tree's sub-servers and workers, by rank."""
    for rank in cell.ranks[1:]:
        branch = next(index for index, ranks in enumerate(cell.branches) if rank in ranks)
        if rank in cell.sub_servers:
            yield replace(common, rank=rank, role=Role.SUB_SERVER, branch=branch)
        else:
            worker = cell.workers.index(rank)
            yield replace(common, rank=rank, role=Role.WORKER, worker=worker, member=0, branch=branch)
