"""Ledger of leases on a server: gives each worker parts of an epoch in proportion to its speed."""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, Final, TypeAlias

from nnlo_common.base._arguments import whole_number
from nnlo_common.base._errors import ConfigurationError, ProtocolError
from nnlo_common.base._state_tree import State, require

__all__ = ["EpochRecord", "Holder", "Lease", "Leases", "Range", "Ranges", "Unanswered", "WAIT"]

# -- lease: the answer to a worker that asks for positions of an epoch ---------------------------------


@dataclass(frozen=True, slots=True)
class Lease:
    """The positions [start, stop) of an epoch, for one worker alone.

    Attributes:
        epoch: the epoch of the positions. It may be earlier than the one the worker asked about: then
            another worker died with them.
        start: the first position.
        stop: the one after the last.

    Example:
        >>> lease = Lease(epoch=0, start=6, stop=9)
        >>> lease.size, "abcdefghij"[lease.start : lease.stop]
        (3, 'ghi')
    """

    epoch: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of positions."""
        return self.stop - self.start


class Unanswered(enum.Enum):
    """An answer that comes later, see `Leases.answers`."""

    WAIT = "nothing is free, but another worker holds positions that come back if it dies"


WAIT: Final = Unanswered.WAIT


# -- record of one worker in the ledger of leases ------------------------------------------------------


@dataclass(slots=True)
class Holder:
    """The ledger's record of a living worker.

    Attributes:
        epoch: the epoch it asked about last.
        leases: its leases, in the order of use.
        used: positions it has used in this epoch. The last lease counts in full, the one before by half, and
            so on, so that a worker that becomes slow soon shows.
        seen: positions that all workers together used during its leases, weighted alike. `used / seen` is its
            share of the work, measured without a clock.

    Example:
        >>> worker = Holder(epoch=1, used=30, seen=90)
        >>> worker.most(120, unit=4), worker.most(600, unit=4)  # half of its third; 3/2 of what it used
        (20, 44)
        >>> worker.take(Lease(1, 0, 20))
        >>> worker.state()
        {'epoch': 1, 'leases': [[1, 0, 20]], 'used': 15, 'seen': 45}
    """

    epoch: int = 0
    leases: list[Lease] = field(default_factory=list)
    used: int = 0
    seen: int = 0

    @property
    def size(self) -> int:
        """The number of positions in its leases."""
        return sum(lease.size for lease in self.leases)

    def turn_to(self, epoch: int) -> None:
        """Record the epoch that it asks about; a new epoch resets its counts."""
        # Old counts mislead: while a worker uses the last leases of an epoch, the others are idle.
        if epoch != self.epoch:
            self.epoch, self.used, self.seen = epoch, 0, 0

    def most(self, left: int, unit: int) -> int:
        """Return the size of its next lease, in whole units: one unit, before it has used any."""
        # Guided self-scheduling (Polychronopoulos and Kuck, 1987), with the measured share for 1/p. The share
        # is halved because others' leases count only when they end: even if it is twice the true share, no
        # worker is late. Small leases measure it badly, so a lease may only about double the last one; then
        # none takes much longer than all before it, however slow the worker is.
        half = min(left * self.used // max(self.seen, 1), 3 * self.used) // 2
        return max(half // unit, 1) * unit

    def take(self, lease: Lease) -> None:
        """Add a lease, and halve the counts; rounded up, so that small counts do not vanish."""
        self.leases.append(lease)
        self.used, self.seen = (self.used + 1) // 2, (self.seen + 1) // 2

    def holds_of(self, epoch: int) -> bool:
        """Return whether any of its leases is of this epoch or an earlier one."""
        return any(lease.epoch <= epoch for lease in self.leases)

    def state(self) -> State:
        """Return the record, for a checkpoint."""
        leases = [list(astuple(lease)) for lease in self.leases]
        return {"epoch": self.epoch, "leases": leases, "used": self.used, "seen": self.seen}

    @classmethod
    def of(cls, owner: str, state: Mapping[str, Any]) -> Holder:
        """Return the holder that returned `state`."""
        require(owner, state, epoch=int, leases=[[int]], used=int, seen=int)
        leases = [Lease(*lease) for lease in state["leases"]]
        return cls(state["epoch"], leases, state["used"], state["seen"])


# -- sets of whole numbers as ranges: the free, used or owed positions of an epoch ---------------------

Range: TypeAlias = tuple[int, int]


class Ranges:
    """A set of whole numbers, held as sorted ranges [start, stop) that neither touch nor overlap.

    Attributes:
        total: the number of elements.

    Example:
        >>> ranges = Ranges([(0, 3), (5, 9)])
        >>> ranges.add(3, 5)
        >>> list(ranges), ranges.take(4), list(ranges)
        ([(0, 9)], (0, 4), [(4, 9)])
    """

    __slots__ = ("_ranges", "total")

    def __init__(self, ranges: Iterable[Sequence[int]] = ()) -> None:
        self._ranges: list[Range] = []
        self.total = 0
        for start, stop in ranges:
            self.add(start, stop)

    def __iter__(self) -> Iterator[Range]:
        return iter(self._ranges)

    def __contains__(self, number: int) -> bool:
        return any(start <= number < stop for start, stop in self._ranges)

    def add(self, start: int, stop: int) -> None:
        """Add the numbers from `start` up to `stop`; an empty range changes nothing.

        Raises:
            ValueError: the range runs backwards, or a number is in already.
        """
        if start == stop:
            return
        at = bisect_left(self._ranges, (start, stop))
        before, after = self._ranges[max(at - 1, 0) : at], self._ranges[at : at + 1]
        if start > stop or (before and before[0][1] > start) or (after and after[0][0] < stop):
            raise ValueError(
                f"[{start}, {stop}) runs backwards or is in already, at least partly: {self._ranges}"
            )
        self.total += stop - start
        first, last = at, at
        if before and before[0][1] == start:
            first, start = at - 1, before[0][0]
        if after and after[0][0] == stop:
            last, stop = at + 1, after[0][1]
        self._ranges[first:last] = [(start, stop)]

    def put(self, start: int, stop: int) -> None:
        """Add the numbers from `start` up to `stop`, of which some may be in already."""
        self.remove(start, stop)
        self.add(start, stop)

    def remove(self, start: int, stop: int) -> None:
        """Remove the numbers from `start` up to `stop`, as far as they are in."""
        cut: list[Range] = []
        for first, end in self._ranges:
            pieces = (first, min(end, start)), (max(first, stop), end)
            cut += [one for one in pieces if one[0] < one[1]]
        self._ranges, self.total = cut, sum(end - first for first, end in cut)

    def take(self, most: int) -> Range | None:
        """Remove up to `most` numbers from the first range, and return them as a range."""
        if not self._ranges:
            return None
        start, end = self._ranges[0]
        stop = min(start + most, end)
        self._ranges[:1] = [(stop, end)] if stop < end else []
        self.total -= stop - start
        return start, stop


# -- record of one epoch in the ledger of leases: the status of each position --------------------------


class EpochRecord:
    """The positions of one epoch that no worker holds.

    Attributes:
        free: available to workers that ask about this epoch.
        owed: lost with a dead worker; available to workers that ask about this epoch or a later one.
        used: reported as used.

    Example:
        >>> record = EpochRecord(10)
        >>> record.take(4, late=False), record.take(4, late=True), list(record.free)
        ((0, 4), None, [(4, 10)])
    """

    __slots__ = ("free", "owed", "size", "used")

    def __init__(self, size: int) -> None:
        self.size = size
        self.free, self.owed, self.used = Ranges([(0, size)]), Ranges(), Ranges()

    @property
    def complete(self) -> bool:
        """Whether every position was used."""
        return self.used.total == self.size

    def left(self, *, late: bool) -> int:
        """Return the number of positions available to a worker in this epoch, or in a later one (`late`)."""
        return self.owed.total + (0 if late else self.free.total)

    def take(self, most: int, *, late: bool) -> Range | None:
        """Remove and return up to `most` positions in a row; owed ones first, as they have waited longest."""
        part = self.owed.take(most)
        return self.free.take(most) if part is None and not late else part

    def remove(self, start: int, stop: int) -> None:
        """Remove these positions, whatever their status."""
        for ranges in (self.free, self.owed, self.used):
            ranges.remove(start, stop)

    def unused(self, held: Iterable[Range] = ()) -> list[Range]:
        """Return all unused positions, including those that workers hold (`held`)."""
        return list(Ranges(sorted([*self.free, *self.owed, *held])))

    def validate(self, held: Iterable[Range]) -> None:
        """Check that each position is exactly one of free, owed, used or held."""
        parts = sorted([*self.free, *self.owed, *self.used, *held])
        stops = [0, *(stop for _, stop in parts)]
        if [start for start, _ in parts] + [self.size] != stops:
            raise AssertionError(f"broken invariant: {parts} have each of {self.size} positions once")

    def state(self) -> State:
        """Return the status of each position."""
        return {name: [list(part) for part in getattr(self, name)] for name in ("free", "owed", "used")}

    @classmethod
    def of(cls, size: int, owner: str, state: Mapping[str, Any]) -> EpochRecord:
        """Return the object that returned `state`."""
        require(owner, state, free=[[int]], owed=[[int]], used=[[int]])
        record = cls(size)
        record.free, record.owed, record.used = (Ranges(state[name]) for name in ("free", "owed", "used"))
        return record


_REMEMBERED = 8  # epochs kept that every worker abandoned unfinished
OWNER = "the leases"  # in errors about saved states


class Leases:
    """Leases ranges of positions of each epoch to workers on request; a slow worker gets fewer.

    A pure state machine: the same calls give the same answers. A worker asks for a lease, uses it up, asks
    for the next one (a little earlier, if it reads ahead), and so on until the answer is None; it may then
    ask about a later epoch while others are still in this one. A lease is about half of what its worker
    would use of the remaining positions at its present share of the work; the share is measured again in each
    epoch, from a first lease of one unit. So leases grow, then shrink, and all workers end at about the same
    time, however slow some are; only a worker that becomes slow during a large lease ends late.

    Each position of an epoch is leased once, with two exceptions:

    * A worker died (`lost`). Its whole lease is owed: leased again in that epoch or, if no worker asks about
      that epoch any more, at the end of a later one, the oldest first; such a lease has the earlier epoch's
      number. Positions that the dead worker had already used are then used twice.
    * A worker left its loop early (`give_back`, `leave`, or it asks about a later epoch at once). The
      positions it has not used are free again for workers that still ask about that epoch, and for no others:
      an epoch that all workers left early is not completed later. (Owed positions become owed again.)

    `unfinished` returns the unused positions of an epoch; of epochs that all workers left early, for the last
    few only (the others count as not begun, so that the ledger stays small). While any worker holds positions
    of this epoch or an earlier one, a patient ledger makes the others wait instead of ending their epoch, so
    that nothing is left over while a worker lives and asks. Call `answers` after each other call: it may
    have answers for waiting workers.

    Args:
        size: the number of positions in each epoch.
        workers: the ranks that may ask.
        unit: leases are multiples of it: the batch size, so that no worker has a smaller batch in
            mid-epoch. Smaller leases come at the end of the epoch and after a return in mid-unit.
        patient: make workers wait for positions that others may return, instead of ending their epoch.
        order: determines the samples at the positions, e.g. the seed; a state of another order is refused.

    Example:
        >>> leases = Leases(100, workers=[1, 2], unit=10)
        >>> leases.ask(1, epoch=0), leases.ask(2, epoch=0)
        (Lease(epoch=0, start=0, stop=10), Lease(epoch=0, start=10, stop=20))
        >>> leases.ask(2, epoch=0), leases.ask(2, epoch=0)  # rank 2 has used up its first lease, its second
        (Lease(epoch=0, start=20, stop=30), Lease(epoch=0, start=30, stop=50))
        >>> leases.lost(1)
        >>> leases.ask(2, epoch=0), leases.unfinished(0)
        (Lease(epoch=0, start=0, stop=10), [(0, 10), (50, 100)])
    """

    def __init__(
        self, size: int, workers: Iterable[int], *, unit: int = 1, patient: bool = True, order: str = ""
    ) -> None:
        self.size, self.unit = whole_number("size", size, 0), whole_number("unit", unit, 1)
        self.patient, self.order = patient, order
        self._workers = {whole_number("a rank of workers", rank, 0): Holder() for rank in workers}
        self._gone: dict[int, str] = {}  # ranks that may no longer ask, and why
        self._waiting: dict[int, None] = {}  # ranks, in the order in which they asked
        self._open_epochs: dict[int, EpochRecord] = {}  # begun and not complete
        self._complete = Ranges()  # epochs

    # -- calls of workers -----------------------------------------------------------------------------

    def ask(self, rank: int, epoch: int, unused: int = 0) -> Lease | Unanswered | None:
        """Record that `rank` has used up its leases of this epoch, and answer with its next one.

        Args:
            rank: of the worker.
            epoch: the worker's present one.
            unused: the number of positions at the end of its leases that it keeps and has yet to use.

        Returns:
            A lease; None, if the epoch is over for this worker, or if it has positions left and no more are
            free now; or WAIT: then `answers` returns a lease or None later.

        Raises:
            ProtocolError: `rank` may not ask this: e.g. it is gone, still waits, or asks about a past epoch.
        """
        worker = self._living(rank, f"asked about epoch {epoch}")
        if rank in self._waiting:
            raise ProtocolError(
                f"leases: rank {rank} asked about epoch {epoch}, but it still waits for its answer "
                f"about epoch {worker.epoch}; expected no question before the answer"
            )
        if epoch < worker.epoch:
            raise ProtocolError(
                f"leases: rank {rank} asked about epoch {epoch} after epoch {worker.epoch}; "
                f"expected {worker.epoch} or a later one"
            )
        used = worker.size - unused if epoch == worker.epoch else -unused
        self._check(rank, used, worker)
        self._settle(worker, used, keeps=unused > 0)
        worker.turn_to(epoch)
        self._forget()
        if (answer := self._next(worker)) is WAIT:
            self._waiting[rank] = None
        return answer

    def give_back(self, rank: int, used: int | None = None) -> None:
        """Take back the unused positions of `rank`, which left its epoch early and may ask about others.

        Args:
            rank: of the worker.
            used: the number of positions of its leases that it has used; None: unknown, take back all.
        """
        worker = self._living(rank, "gave its lease back")
        self._check(rank, used or 0, worker)
        self._settle(worker, used or 0)
        self._waiting.pop(rank, None)

    def leave(self, rank: int, used: int | None = None) -> None:
        """Take back the unused positions of `rank`, see `give_back`; it has finished, and asks no more."""
        self.give_back(rank, used)
        self._remove(rank, "left")

    def lost(self, rank: int) -> None:
        """Record that `rank` died: its whole lease is owed. Does nothing if the rank is already gone."""
        if rank in self._gone:
            return
        self._settle(self._living(rank, "was lost"), 0, died=True)
        self._remove(rank, "was lost")

    def admit(self, rank: int) -> None:
        """Lease to one more rank from now on: in the place of a dead one."""
        self._gone.pop(rank, None)
        earliest = min((worker.epoch for worker in self._workers.values()), default=0)
        self._workers.setdefault(rank, Holder(earliest))

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over from a ledger that is lost, from a `state` that may be old.

        All that was leased then is owed, until each worker has said what it has used and holds: `know`.
        """
        self.load(state)
        self._replace_workers(self.living)

    def know(self, rank: int, epoch: int, used: Mapping[int, Iterable[Range]], held: Iterable[Lease]) -> None:
        """Note what a living worker has had of a lost ledger; all do so before any asks.

        Args:
            rank: of the worker.
            epoch: the one it asked about last.
            used: the positions it has used, by epoch.
            held: its leases, in the order of use.
        """
        if rank not in self._workers:
            return
        self._workers[rank].turn_to(epoch)
        for of, ranges in used.items():
            for start, stop in ranges if of not in self._complete else ():
                record = self._open_epochs.setdefault(of, EpochRecord(self.size))
                record.remove(start, stop)
                record.used.add(start, stop)
        for lease in held:
            if lease.epoch in self._complete:  # the worker has not heard that it was the last
                self._complete.remove(lease.epoch, lease.epoch + 1)
                self._open_epochs[lease.epoch] = record = EpochRecord(self.size)
                record.free.remove(0, self.size)
                record.used.add(0, self.size)
            record = self._open_epochs.setdefault(lease.epoch, EpochRecord(self.size))
            record.remove(lease.start, lease.stop)
            self._workers[rank].leases.append(lease)
        for of in [of for of, record in self._open_epochs.items() if record.complete]:
            del self._open_epochs[of]
            self._complete.add(of, of + 1)

    def answers(self) -> list[tuple[int, Lease | None]]:
        """Return the answers for waiting workers that are now ready, in the order in which they asked."""
        answers: list[tuple[int, Lease | None]] = []
        for rank in self._waiting:
            answer = self._next(self._workers[rank])
            if answer is not WAIT:
                answers.append((rank, answer))
        for rank, _ in answers:
            del self._waiting[rank]
        return answers

    # -- inspection and state -------------------------------------------------------------------------

    @property
    def living(self) -> tuple[int, ...]:
        """The ranks that may still ask, sorted."""
        return tuple(sorted(self._workers))

    @property
    def waiting(self) -> tuple[int, ...]:
        """The ranks waiting for an answer, in the order in which they asked."""
        return tuple(self._waiting)

    def held(self, rank: int) -> tuple[Lease, ...]:
        """Return the leases of `rank`, for a worker that resumes in the middle of them."""
        return tuple(self._workers[rank].leases) if rank in self._workers else ()

    def unfinished(self, epoch: int) -> list[Range]:
        """Return the positions of an epoch not reported as used, as sorted ranges."""
        if epoch in self._complete:
            return []
        return self._open_epochs.get(epoch, EpochRecord(self.size)).unused(self._leased()[epoch])

    def validate(self) -> None:
        """Check every invariant; tests do so after each call."""
        leased, open_epochs, workers = self._leased(), self._open_epochs, self._workers
        for holds, what in (
            (set(leased) <= set(open_epochs), "every lease is of an open epoch"),
            (not any(epoch in self._complete for epoch in open_epochs), "no epoch is both open and complete"),
            (not any(record.complete for record in open_epochs.values()), "open epochs are not used up"),
            (set(self._waiting) <= set(workers), "only living workers wait"),
            (not any(self.held(rank) for rank in self._waiting), "a waiting worker holds no lease"),
            (
                all(one.epoch <= w.epoch for w in workers.values() for one in w.leases),
                "no lease is of a later epoch than its worker's",
            ),
            (all(0 <= w.used <= w.seen for w in workers.values()), "used is at most seen"),
        ):
            if not holds:
                raise AssertionError(f"broken invariant: {what}")
        for epoch, record in self._open_epochs.items():
            record.validate(leased[epoch])

    def state(self) -> State:
        """Return the status of each position, and the leases and waits of each living worker."""
        return self._identity() | {
            "complete": [list(epochs) for epochs in self._complete],
            "epochs": {str(epoch): record.state() for epoch, record in sorted(self._open_epochs.items())},
            "workers": {str(rank): worker.state() for rank, worker in sorted(self._workers.items())},
            "waiting": list(self._waiting),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume from `state`.

        With the same living workers this is exact, also in mid-epoch: each holds its leases or waits as
        before; additional workers hold nothing. If one of them is missing, all leased positions are owed,
        and no worker waits.

        Raises:
            ConfigurationError: it is of another size, unit or order, or damaged; nothing has changed then.
        """
        parts = {"complete": [[int]], "epochs": Mapping, "workers": Mapping, "waiting": [int]}
        require(OWNER, state, **self._identity(), **parts)
        saved = Leases(self.size, (), unit=self.unit)
        try:
            saved._fill(state)
        except ConfigurationError:
            raise
        except (AssertionError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"the saved state of {OWNER} is damaged: {error}; resume from an earlier checkpoint"
            ) from error
        if not set(saved.living) <= set(self.living):
            saved._replace_workers(self.living)
        for rank in self.living:
            saved._workers.setdefault(rank, Holder())
        self._open_epochs, self._complete = saved._open_epochs, saved._complete
        self._workers, self._waiting = saved._workers, saved._waiting

    # -- internals ------------------------------------------------------------------------------------

    def _identity(self) -> State:
        """Return all that must be equal in a saved state, so that its positions mean the same samples."""
        return {"size": self.size, "unit": self.unit, "order": self.order}

    def _living(self, rank: int, did: str) -> Holder:
        if rank in self._workers:
            return self._workers[rank]
        if rank in self._gone:
            why = f"after it {self._gone[rank]}; expected nothing more"
            raise ProtocolError(f"leases: rank {rank} {did} {why}")
        raise ProtocolError(f"leases: rank {rank} {did}; expected one of its workers {list(self.living)}")

    def _check(self, rank: int, used: int, worker: Holder) -> None:
        if not 0 <= used <= worker.size:
            what = f"{used} positions of {worker.leases}; expected 0 to {worker.size}"
            raise ProtocolError(f"leases: rank {rank} reported to have used {what}")

    def _next(self, worker: Holder) -> Lease | Unanswered | None:
        if not self.size:
            return None
        earlier = sorted(epoch for epoch in self._open_epochs if epoch < worker.epoch)
        for epoch in (worker.epoch, *earlier):
            if epoch in self._complete:
                continue
            record, late = self._open_epochs.setdefault(epoch, EpochRecord(self.size)), epoch < worker.epoch
            part = record.take(worker.most(record.left(late=late), self.unit), late=late)
            if part is not None:
                worker.take(lease := Lease(epoch, *part))
                return lease
        held = any(other.holds_of(worker.epoch) for other in self._workers.values())
        return WAIT if self.patient and held and not worker.leases else None

    def _settle(self, worker: Holder, used: int, *, died: bool = False, keeps: bool = False) -> None:
        """Record the positions that `worker` has used; it `keeps` the rest, or the ledger gets it."""
        for holder in self._workers.values():
            holder.seen += used if holder.leases else 0
        worker.used += used
        leases, worker.leases = worker.leases, []
        for lease in leases:
            middle = min(lease.start + used, lease.stop)
            used -= middle - lease.start
            record = self._open_epochs[lease.epoch]
            record.used.put(lease.start, middle)
            if keeps and middle < lease.stop:
                worker.leases.append(Lease(lease.epoch, middle, lease.stop))
            else:
                # Leases of an earlier epoch are always owed positions, and stay owed.
                rest = record.owed if died or lease.epoch < worker.epoch else record.free
                for start, stop in self._without_holder(lease, middle):
                    rest.add(start, stop)
            if record.complete:
                del self._open_epochs[lease.epoch]
                self._complete.add(lease.epoch, lease.epoch + 1)

    def _without_holder(self, lease: Lease, start: int) -> Ranges:
        """Return the rest of a lease, from `start` on: without what others hold or have used.

        They do where a lost ledger had it back already, and the worker has not heard that.
        """
        rest = Ranges([(start, lease.stop)])
        taken = [*self._leased()[lease.epoch], *self._open_epochs[lease.epoch].used]
        for first, end in taken:
            if first < lease.stop and end > start:
                rest.remove(first, end)
        return rest

    def _forget(self) -> None:
        """Drop all but the last few epochs that no worker can ask about any more."""
        earliest, leased = min(worker.epoch for worker in self._workers.values()), self._leased()
        over = [epoch for epoch in sorted(self._open_epochs) if epoch < earliest and epoch not in leased]
        for epoch in [epoch for epoch in over if not self._open_epochs[epoch].owed.total][:-_REMEMBERED]:
            del self._open_epochs[epoch]

    def _remove(self, rank: int, how: str) -> None:
        self._gone[rank] = how
        del self._workers[rank]
        self._waiting.pop(rank, None)

    def _leased(self) -> dict[int, list[Range]]:
        leased: dict[int, list[Range]] = defaultdict(list)
        for worker in self._workers.values():
            for lease in worker.leases:
                leased[lease.epoch].append((lease.start, lease.stop))
        return leased

    def _fill(self, state: Mapping[str, Any]) -> None:
        """Load a state of which only the outermost level was checked."""
        self._complete = Ranges(state["complete"])
        for epoch, record in state["epochs"].items():
            self._open_epochs[int(epoch)] = EpochRecord.of(self.size, f"{OWNER}, epoch {epoch}", record)
        for rank, worker in state["workers"].items():
            self._workers[int(rank)] = Holder.of(f"{OWNER}, rank {rank}", worker)
        self._waiting = dict.fromkeys(state["waiting"])
        self.validate()

    def _replace_workers(self, workers: Iterable[int]) -> None:
        """Continue with other workers; treat the former ones as dead."""
        for worker in self._workers.values():
            self._settle(worker, 0, died=True)
        self._workers, self._waiting = {rank: Holder() for rank in workers}, {}
