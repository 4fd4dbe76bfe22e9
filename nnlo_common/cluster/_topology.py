"""Topology: the role of each rank as coordinator, server or worker, in blocks, folds and groups.

    13 ranks, Arrangement(blocks=2):
        rank 0       coordinator
        ranks 1-6    block 0: server, workers 0-4
        ranks 7-12   block 1: server, workers 0-4

A *cell* is what trains one centre: its servers and its workers. Ranks are handed out block by block, fold by
fold, servers first, then groups. Launchers fill one host after the other unless told otherwise, so the ranks
of a group, which talk most, lie side by side.

Nothing here knows MPI: a plan is a pure function of the number of ranks and the arrangement, and therefore
equal on all ranks without a message.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.cluster._arrangement import Arrangement
from nnlo_common.cluster._hosts import Place, text_table

__all__ = ["Arrangement", "Assignment", "Cell", "Role", "Topology"]


class Role(enum.Enum):
    """What a rank does.

    Example:
        >>> [assignment.role.value for assignment in Topology.plan(4, Arrangement(blocks=1)).assignments]
        ['coordinator', 'server', 'worker', 'worker']
    """

    COORDINATOR = "coordinator"  # hands out the trials of a search; only with blocks
    SERVER = "server"  # holds a shard of its cell's centre
    WORKER = "worker"  # trains and speaks with the servers, for its whole group where that has several ranks
    MEMBER = "member"  # trains inside a group and speaks with the ranks of that group only


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What one rank is.

    Attributes:
        rank: its number among all ranks.
        role: what it does.
        block: index of its block; None without blocks and on the coordinator.
        fold: index of its fold, 0 where there is one only; None on the coordinator.
        shard: index of the shard of the centre that it holds; None where it holds none. Without servers the
            workers hold the shards, so the worker of a world of one holds shard 0, the whole.
        worker: index, within its cell, of the logical worker it belongs to; None if it does not train.
        member: index within that logical worker; None if it does not train.

    Example:
        >>> Topology.plan(3).assignment(2)
        Assignment(rank=2, role=<Role.WORKER: 'worker'>, block=None, fold=0, shard=None, worker=1, member=0)
    """

    rank: int
    role: Role
    block: int | None = None
    fold: int | None = None
    shard: int | None = None
    worker: int | None = None
    member: int | None = None

    @property
    def title(self) -> str:
        """What reports and files call this rank in a training: "server 0", "worker 1", ..."""
        return f"worker {self.worker}" if self.shard is None else f"server {self.shard}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The ranks that train one centre.

    Attributes:
        index: ``block x folds + fold``.
        block: index of its block; None without blocks.
        fold: index of its fold.
        servers: the server ranks, by shard; empty where the workers hold the shards themselves.
        groups: the ranks of every logical worker, its leading rank first.

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

    @property
    def workers(self) -> tuple[int, ...]:
        """The leading rank of every group."""
        return tuple(group[0] for group in self.groups)

    @property
    def holders(self) -> tuple[int, ...]:
        """The ranks that hold the shards of the centre, by shard: the servers, or else the workers."""
        return self.servers or self.workers

    @property
    def ranks(self) -> tuple[int, ...]:
        """All its ranks, in order."""
        return self.servers + tuple(rank for group in self.groups for rank in group)

    @property
    def alone(self) -> bool:
        """Whether it is one rank only, which trains plainly and exchanges nothing."""
        return len(self.ranks) == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The role of every rank.

    Attributes:
        arrangement: how the ranks are divided.
        coordinator: the rank that hands out trials; None without blocks.
        cells: one for every centre, block by block and fold by fold.
        assignments: what each rank is, by rank.

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
    def plan(cls, size: int, arrangement: Arrangement | None = None) -> Topology:
        """Give each of ``size`` ranks its role.

        Args:
            size: how many ranks there are.
            arrangement: how they are divided; by default one server, and the rest are workers.

        Raises:
            ConfigurationError: ranks would be left over or missing; see `Arrangement.check`.
        """
        arrangement = arrangement or Arrangement()
        arrangement.check(size)
        coordinator = 0 if arrangement.blocks else None
        cells = tuple(_cells(size, arrangement))
        assignments = tuple(_assignments(coordinator, cells))
        return cls(arrangement=arrangement, coordinator=coordinator, cells=cells, assignments=assignments)

    def assignment(self, rank: int) -> Assignment:
        """Return what a rank is."""
        if not 0 <= rank < len(self.assignments):
            raise ConfigurationError(f"rank={rank!r}: must be from 0 to {len(self.assignments) - 1}")
        return self.assignments[rank]

    def cell_of(self, rank: int) -> Cell:
        """Return the cell of a rank; the coordinator has none and is refused."""
        assignment = self.assignment(rank)
        if assignment.fold is None:
            raise ConfigurationError(
                f"rank={rank!r}: is the coordinator, which is in no cell; look at its role first"
            )
        return self.cells[(assignment.block or 0) * self.arrangement.folds + assignment.fold]

    def gpus(self, places: Sequence[Place]) -> tuple[int | None, ...]:
        """Choose the GPU of every rank: ``turn % visible GPUs``, turns being taken host by host.

        On each host the training ranks come first, in rank order, and the servers after them. A server steps
        and validates the model and so wants a GPU too, but it gets an idle one if there is one and never
        moves workers together. The coordinator holds no model and gets None.
        """
        found, size = [place.rank for place in places], len(self.assignments)
        if found != list(range(size)):
            raise ConfigurationError(
                f"places of ranks {found}: must be those of ranks 0 to {size - 1}, in order"
            )
        residents: dict[str, list[int]] = defaultdict(list)
        for assignment in sorted(self.assignments, key=lambda each: each.role is Role.SERVER):
            if assignment.role is not Role.COORDINATOR:
                residents[places[assignment.rank].host].append(assignment.rank)
        devices: list[int | None] = [None] * size
        for ranks in residents.values():
            for turn, rank in enumerate(ranks):
                visible = places[rank].gpus
                devices[rank] = turn % visible if visible else None
        return tuple(devices)

    def table(self, places: Sequence[Place] | None = None) -> str:
        """Print the role of every rank; with ``places`` also its host, local rank and GPU."""
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
        """Return the role of a rank as the table names it."""
        if assignment.role is Role.COORDINATOR:
            return "coordinator"
        cell = self.cell_of(assignment.rank)
        if assignment.role is Role.SERVER:
            return f"server {assignment.shard} of {len(cell.servers)}"
        title = f"worker {assignment.worker}"
        if assignment.role is Role.MEMBER:
            return f"{title}, member {assignment.member} of {self.arrangement.group_size}"
        if cell.alone:
            return f"{title}, alone"
        return title if cell.servers else f"{title}, shard {assignment.shard} of {len(cell.workers)}"

    def validate(self) -> None:
        """Check what every plan promises; for tests and for topologies built by hand.

        Raises:
            ConfigurationError: a rank has no role or several, a cell or a group has another size than
                the arrangement says, or the assignments do not say what the cells say.
        """
        broken = "; ".join(_broken_promises(self))
        if broken:
            raise ConfigurationError(
                f"this topology of {len(self.assignments)} ranks as {self.arrangement} breaks what every "
                f"plan keeps: {broken}. Build it with Topology.plan"
            )


def _broken_promises(topology: Topology) -> Iterator[str]:
    """Name what a topology does not keep."""
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
        return  # what follows reads the groups
    if len({len(cell.groups) for cell in cells}) != 1:
        yield "all cells have equally many groups"
    shards = [[each.shard for each in topology.assignments if each.rank in cell.holders] for cell in cells]
    if any(numbers != list(range(len(cell.holders))) for numbers, cell in zip(shards, cells, strict=True)):
        yield "the shards of a cell are numbered from 0"
    if topology.assignments != tuple(_assignments(topology.coordinator, cells)):
        yield "the assignments say what the cells say"


def _cells(size: int, arrangement: Arrangement) -> Iterator[Cell]:
    """Cut the ranks into cells; the arrangement fits."""
    first = 1 if arrangement.blocks else 0
    length = (size - first) // arrangement.cells
    servers = min(arrangement.servers, length - 1)  # fewer than asked for in a world of one only
    for index in range(arrangement.cells):
        start = first + index * length
        leaders = range(start + servers, start + length, arrangement.group_size)
        yield Cell(
            index=index,
            block=index // arrangement.folds if arrangement.blocks else None,
            fold=index % arrangement.folds,
            servers=tuple(range(start, start + servers)),
            groups=tuple(tuple(range(rank, rank + arrangement.group_size)) for rank in leaders),
        )


def _assignments(coordinator: int | None, cells: Sequence[Cell]) -> Iterator[Assignment]:
    """Say of every rank what the cells say, in the order of the cells."""
    if coordinator is not None:
        yield Assignment(rank=coordinator, role=Role.COORDINATOR)
    for cell in cells:
        common = Assignment(rank=-1, role=Role.SERVER, block=cell.block, fold=cell.fold)
        for shard, rank in enumerate(cell.servers):
            yield replace(common, rank=rank, shard=shard)
        for worker, group in enumerate(cell.groups):
            for member, rank in enumerate(group):
                leads = member == 0
                role = Role.WORKER if leads else Role.MEMBER
                held = worker if leads and not cell.servers else None
                yield replace(common, rank=rank, role=role, shard=held, worker=worker, member=member)
