"""Ledger of leases on a server: who may take which part of an epoch, so that speed decides the shares."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from nnlo_common.base._arguments import whole_number
from nnlo_common.base._errors import ConfigurationError, ProtocolError
from nnlo_common.base._state_tree import State, require
from nnlo_common.data.leasing._epoch import Page
from nnlo_common.data.leasing._holder import Holder
from nnlo_common.data.leasing._lease import WAIT, Lease, Unanswered
from nnlo_common.data.leasing._ranges import Range, Ranges

__all__ = ["Leases"]

_REMEMBERED = 8  # epochs that all have broken off
OWNER = "the leases"  # in errors about saved states


class Leases:
    """Hands out the positions of epochs in ranges, to whoever asks: a slow worker gets less of them.

    It is a pure state machine: the same calls give the same answers. A worker asks for a lease, uses it
    up, asks for the next one (a little before, if it reads ahead), and so on until it is told None; it may
    then ask about a later epoch while others are still in this one. A lease is about half of what its worker
    will use of all that is left, if it goes on taking its share of the work; that is measured anew in each
    epoch, from a lease of one unit on. So leases grow, then shrink, and all end at about the same time,
    however slow some are; late is only who becomes slow in the midst of a large lease.

    Each position of an epoch is given out once, but for these:

    * A worker died (`lost`). All of its lease is owed: given out again in that epoch or, where nobody asks
      about that epoch any more, at the end of a later one, the oldest first; such a lease has its own,
      earlier epoch. What the dead worker had used of it is then used twice.
    * A worker broke out of its loop (`give_back`, `leave`, or it asks about a later epoch at once). What it
      has not used is free again for whoever still asks about that epoch, and for nobody else: an epoch
      that all have broken off is not made up for later. (Part of a lease that was owed is owed again.)

    `unfinished` tells what of an epoch was not used; of epochs that all have broken off, for the last few
    only (the others count as not begun, so that the ledger stays small). A patient ledger has a worker wait
    rather than end its epoch while anybody holds something of this epoch or an earlier one, so nothing is
    left behind while somebody lives and asks. After each call ask for `answers`, as it may have set waiting
    workers free.

    Args:
        size: how many positions each epoch has.
        workers: the ranks that may ask.
        unit: leases are multiples of it: the batch size, so that no worker has a smaller batch in
            mid-epoch. Smaller ones come at the end of the epoch and of what was given back in mid-unit.
        patient: have workers wait for what others may still leave behind, rather than end their epoch.
        order: says what the positions mean, such as the seed; a state of another order is refused.

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
        self._gone: dict[int, str] = {}  # ranks that may not ask any more, and why
        self._waiting: dict[int, None] = {}  # ranks, in the order in which they asked
        self._pages: dict[int, Page] = {}  # the epochs that were begun and are not complete
        self._complete = Ranges()  # epochs

    # -- what workers do ------------------------------------------------------------------------------

    def ask(self, rank: int, epoch: int, unused: int = 0) -> Lease | Unanswered | None:
        """Take note that `rank` has used up its leases of this epoch, and answer with its next one.

        Args:
            rank: of the worker.
            epoch: that it is in.
            unused: how many positions of its leases, the last ones, it has yet to use, and keeps.

        Returns:
            A lease; None, if the epoch is over for this worker, or if it has some left and there are no
            more now; or WAIT, and then `answers` will have one or the other.

        Raises:
            ProtocolError: that cannot be, e.g. `rank` is gone or still waits, or the epoch is over for it.
        """
        worker = self._living(rank, f"asked about epoch {epoch}")
        if rank in self._waiting:
            raise ProtocolError(
                f"leases: rank {rank} asked about epoch {epoch}, but it still waits for its answer "
                f"about epoch {worker.epoch}; a worker asks again when it is answered"
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
        """Take back what `rank` has not used: it broke out of its epoch, and may ask about others.

        Args:
            rank: of the worker.
            used: how many positions of its leases it has used; None: not known, all of them come back.
        """
        worker = self._living(rank, "gave its lease back")
        self._check(rank, used or 0, worker)
        self._settle(worker, used or 0)
        self._waiting.pop(rank, None)

    def leave(self, rank: int, used: int | None = None) -> None:
        """Take back what `rank` has not used, as `give_back` does; it has left in good order."""
        self.give_back(rank, used)
        self._depart(rank, "left")

    def lost(self, rank: int) -> None:
        """Take note that `rank` died: all of its lease is owed to the others. Who is gone cannot die."""
        if rank in self._gone:
            return
        self._settle(self._living(rank, "was lost"), 0, died=True)
        self._depart(rank, "was lost")

    def answers(self) -> list[tuple[int, Lease | None]]:
        """Answer those waiting workers that can now be answered, in the order in which they asked."""
        answers: list[tuple[int, Lease | None]] = []
        for rank in self._waiting:
            answer = self._next(self._workers[rank])
            if answer is not WAIT:
                answers.append((rank, answer))
        for rank, _ in answers:
            del self._waiting[rank]
        return answers

    # -- what others may ask --------------------------------------------------------------------------

    @property
    def living(self) -> tuple[int, ...]:
        """The ranks that may still ask, in order."""
        return tuple(sorted(self._workers))

    @property
    def waiting(self) -> tuple[int, ...]:
        """The ranks that wait for an answer, in the order in which they asked."""
        return tuple(self._waiting)

    def held(self, rank: int) -> tuple[Lease, ...]:
        """Return the leases that `rank` has, for a worker that is resumed in the middle of them."""
        return tuple(self._workers[rank].leases) if rank in self._workers else ()

    def unfinished(self, epoch: int) -> list[Range]:
        """Return the positions of an epoch that were not reported as used, as ranges in order."""
        if epoch in self._complete:
            return []
        return self._pages.get(epoch, Page(self.size)).unused(self._leased()[epoch])

    def validate(self) -> None:
        """Check every invariant; tests call it after each call."""
        leased, pages, workers = self._leased(), self._pages, self._workers
        for holds, what in (
            (set(leased) <= set(pages), "leases are of epochs that are begun and not complete"),
            (not any(epoch in self._complete for epoch in pages), "an epoch is complete or is not"),
            (not any(page.complete for page in pages.values()), "complete epochs have no page"),
            (set(self._waiting) <= set(workers), "only the living wait"),
            (not any(self.held(rank) for rank in self._waiting), "who waits holds nothing"),
            (all(one.epoch <= w.epoch for w in workers.values() for one in w.leases), "nobody is ahead"),
            (all(0 <= w.used <= w.seen for w in workers.values()), "nobody uses more than all do"),
        ):
            if not holds:
                raise AssertionError(f"broken invariant: {what}")
        for epoch, page in self._pages.items():
            page.validate(leased[epoch])

    def state(self) -> State:
        """Return where each position is, and what each living worker holds or waits for."""
        return self._meaning() | {
            "complete": [list(epochs) for epochs in self._complete],
            "epochs": {str(epoch): page.state() for epoch, page in sorted(self._pages.items())},
            "workers": {str(rank): worker.state() for rank, worker in sorted(self._workers.items())},
            "waiting": list(self._waiting),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue where the ledger that gave `state` stood.

        With the same living workers that is exact, in mid-epoch, too: each is taken to hold or to wait
        for what it did; who comes besides them holds nothing. Where one of them is missing, all that was
        leased is owed, and nobody waits.

        Raises:
            ConfigurationError: it is of another size, unit or order, or damaged; nothing was changed then.
        """
        parts = {"complete": [[int]], "epochs": Mapping, "workers": Mapping, "waiting": [int]}
        require(OWNER, state, **self._meaning(), **parts)
        saved = Leases(self.size, (), unit=self.unit)
        try:
            saved._fill(state)
        except ConfigurationError:
            raise
        except (AssertionError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"the saved state of {OWNER} was asked for, but it is damaged: {error}; "
                "resume from an earlier checkpoint"
            ) from error
        if not set(saved.living) <= set(self.living):
            saved._disown(self.living)
        for rank in self.living:
            saved._workers.setdefault(rank, Holder())
        self._pages, self._complete = saved._pages, saved._complete
        self._workers, self._waiting = saved._workers, saved._waiting

    # -- how it is done -------------------------------------------------------------------------------

    def _meaning(self) -> State:
        """What has to be equal, or a position in a state would mean another sample."""
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
            raise ProtocolError(f"leases: rank {rank} says that it used {what}")

    def _next(self, worker: Holder) -> Lease | Unanswered | None:
        if not self.size:
            return None
        earlier = sorted(epoch for epoch in self._pages if epoch < worker.epoch)
        for epoch in (worker.epoch, *earlier):
            if epoch in self._complete:
                continue
            page, late = self._pages.setdefault(epoch, Page(self.size)), epoch < worker.epoch
            part = page.take(worker.most(page.left(late=late), self.unit), late=late)
            if part is not None:
                worker.take(lease := Lease(epoch, *part))
                return lease
        held = any(other.holds_of(worker.epoch) for other in self._workers.values())
        return WAIT if self.patient and held and not worker.leases else None

    def _settle(self, worker: Holder, used: int, *, died: bool = False, keeps: bool = False) -> None:
        """Book what `worker` has used of its leases, and put the rest where it belongs, or leave it."""
        for holder in self._workers.values():
            holder.seen += used if holder.leases else 0
        worker.used += used
        leases, worker.leases = worker.leases, []
        for lease in leases:
            middle = min(lease.start + used, lease.stop)
            used -= middle - lease.start
            page = self._pages[lease.epoch]
            page.used.add(lease.start, middle)
            if keeps and middle < lease.stop:
                worker.leases.append(Lease(lease.epoch, middle, lease.stop))
            else:
                # Of an earlier epoch only what is owed is given out, and it stays owed.
                rest = page.owed if died or lease.epoch < worker.epoch else page.free
                rest.add(middle, lease.stop)
            if page.complete:
                del self._pages[lease.epoch]
                self._complete.add(lease.epoch, lease.epoch + 1)

    def _forget(self) -> None:
        """Keep no more than the last few pages that nobody will ask about any more."""
        earliest, leased = min(worker.epoch for worker in self._workers.values()), self._leased()
        over = [epoch for epoch in sorted(self._pages) if epoch < earliest and epoch not in leased]
        for epoch in [epoch for epoch in over if not self._pages[epoch].owed.total][:-_REMEMBERED]:
            del self._pages[epoch]

    def _depart(self, rank: int, how: str) -> None:
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
        """Take over a state whose form was not yet checked in depth."""
        self._complete = Ranges(state["complete"])
        for epoch, page in state["epochs"].items():
            self._pages[int(epoch)] = Page.of(self.size, f"{OWNER}, epoch {epoch}", page)
        for rank, worker in state["workers"].items():
            self._workers[int(rank)] = Holder.of(f"{OWNER}, rank {rank}", worker)
        self._waiting = dict.fromkeys(state["waiting"])
        self.validate()

    def _disown(self, workers: Iterable[int]) -> None:
        """Go on with other workers: those there were are as good as dead."""
        for worker in self._workers.values():
            self._settle(worker, 0, died=True)
        self._workers, self._waiting = {rank: Holder() for rank in workers}, {}
