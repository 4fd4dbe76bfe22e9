"""Work in pieces over ranks: the first rank shares it out, computes too, and notes what is done.

    every rank ─► the first      AskPieces (I begin my last piece), PieceDone (a piece is written)
    the first ─► the one that asked     NextPieces (its next pieces)
    the first ─► all             AllDone (all is written; the result)

Requirements that shaped this module:

* A slow rank gets fewer pieces, and the pieces of a dead one are done by others: the ledger of leases
  decides, as for samples of a training. A position of it is a piece that is left.
* A piece counts as done when it is written. A lease is settled by what is written, not by what is computed.
* One process alone runs the same loop without messages.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self, TypeAlias

from nnlo_common.base._errors import ConfigurationError, PeerLostError, ProtocolError
from nnlo_common.base._limited_formats import content_of, malformed, message_of, parsed_json
from nnlo_common.cluster.transport._endpoint import Mail, RankWorld
from nnlo_common.data import WAIT, Leases
from nnlo_common.protocol import Lost

__all__ = ["Following", "PieceCoordinator", "PieceJob", "PieceWork", "run_pieces"]

_COORDINATOR = 0
_LARGEST_TEXT = 2**28
#: Returns the piece after the present one, as far as it is known by now.
Following: TypeAlias = Callable[[], int | None]


class PieceJob(Protocol):
    """The record of all pieces; used on the first rank only."""

    @property
    def left(self) -> Sequence[int]:
        """The pieces that are not done yet, in the order in which to do them."""

    def note(self, piece: int, note: Any) -> None:
        """Record a piece as done, with what its rank noted (JSON)."""

    def finish(self) -> Any:
        """Complete the result once all is done; return what every rank gets (JSON)."""


class PieceWork(Protocol):
    """One rank's way to do a piece."""

    def begin(self, piece: int, following: Following) -> Iterator[None]:
        """Compute a piece; yield now and then, so that other ranks are answered."""

    def finished(self, *, wait: bool) -> list[tuple[int, Any]]:
        """Return the pieces written since the last call, in order, each with a note; `wait` for all."""


@dataclass(frozen=True, slots=True)
class AskPieces:
    """I need pieces soon."""


@dataclass(frozen=True, slots=True)
class PieceDone:
    """A piece is written.

    Attributes:
        piece: its number.
        note: what its rank says about it.
    """

    piece: int
    note: Any


@dataclass(frozen=True, slots=True)
class NextPieces:
    """The answer to `AskPieces`.

    Attributes:
        pieces: to do next; none: nothing is free now.
        over: all is done, as far as this rank is concerned.
    """

    pieces: tuple[int, ...]
    over: bool


@dataclass(frozen=True, slots=True)
class AllDone:
    """The result is complete.

    Attributes:
        result: of `PieceJob.finish`.
    """

    result: Any


_Message: TypeAlias = AskPieces | PieceDone | NextPieces | AllDone
_KINDS: tuple[type[Any], ...] = (AskPieces, PieceDone, NextPieces, AllDone)


class PieceCoordinator:
    """Shares out the pieces; pure: the same calls give the same answers.

    Args:
        job: the record of all pieces.
        ranks: those that work.

    Example:
        >>> class Three:
        ...     left = (4, 5, 6)
        ...     def note(self, piece, note):
        ...         print("done", piece)
        >>> one = PieceCoordinator(Three(), [0, 1])
        >>> one.ask(0), one.ask(1)
        (NextPieces(pieces=(4,), over=False), NextPieces(pieces=(5,), over=False))
        >>> one.lost(1)
        >>> one.done(0, 4, None)
        done 4
        >>> one.ask(0)
        NextPieces(pieces=(5,), over=False)
    """

    def __init__(self, job: PieceJob, ranks: Iterable[int]) -> None:
        self._job = job
        self._pieces = list(job.left)
        self._positions = {piece: position for position, piece in enumerate(self._pieces)}
        self._done: set[int] = set()
        self._ledger = Leases(len(self._pieces), ranks)
        self._held: dict[int, list[int]] = {rank: [] for rank in ranks}  # positions that are not written
        self.working = set(self._held)

    def ask(self, rank: int) -> NextPieces | None:
        """Return a rank's next pieces; None: `answers` has them later."""
        while True:
            held = self._held[rank]
            lease = self._ledger.ask(rank, 0, unused=self._unused(rank))
            if lease is WAIT:
                return None
            if lease is None:
                return self._told(rank, NextPieces((), over=not held))
            # A dead rank may have written some of them.
            fresh = [at for at in range(lease.start, lease.stop) if at not in self._done]
            held += fresh
            if fresh:
                return NextPieces(tuple(self._pieces[at] for at in fresh), over=False)

    def done(self, rank: int, piece: int, note: Any) -> None:
        """Record that a rank has written a piece."""
        position = self._positions.get(piece)
        if position is None:
            raise ProtocolError(f"rank {rank} has done piece {piece}, which nobody asked for")
        if position in self._held.get(rank, ()):
            self._held[rank].remove(position)
        if position not in self._done:
            self._done.add(position)
            self._job.note(piece, note)

    def lost(self, rank: int) -> None:
        """Record that a rank died: others do its pieces."""
        if rank in self._held:
            self._ledger.lost(rank)
            del self._held[rank]
            self.working.discard(rank)

    def answers(self) -> list[tuple[int, NextPieces]]:
        """Return the answers that are ready for waiting ranks."""
        found: list[tuple[int, NextPieces]] = []
        for rank, lease in self._ledger.answers():
            fresh = (
                [] if lease is None else [at for at in range(lease.start, lease.stop) if at not in self._done]
            )
            self._held[rank] += fresh
            if lease is None:
                found.append((rank, self._told(rank, NextPieces((), over=True))))
            elif fresh:
                found.append((rank, NextPieces(tuple(self._pieces[at] for at in fresh), over=False)))
            elif (again := self.ask(rank)) is not None:
                found.append((rank, again))
        return found

    def _unused(self, rank: int) -> int:
        """Return how many positions of a rank's leases, from the first that is not written, are not used."""
        held = set(self._held[rank])
        leased = [at for lease in self._ledger.held(rank) for at in range(lease.start, lease.stop)]
        return next((len(leased) - place for place, at in enumerate(leased) if at in held), 0)

    def _told(self, rank: int, work: NextPieces) -> NextPieces:
        if work.over:
            self.working.discard(rank)
        return work


def run_pieces(world: RankWorld | None, job: PieceJob | None, work: PieceWork) -> Any:
    """Do all pieces of a job, on all ranks together (collective); return the result of `PieceJob.finish`.

    Args:
        world: the ranks; None: this process alone.
        job: the record of all pieces, on the first rank.
        work: this rank's way to do one.

    Raises:
        PeerLostError: the first rank died.
    """
    with _link(world, job) as link:
        pending: deque[int] = deque()
        asked = dry = False

        def take(*, wait: bool) -> bool:
            """Take an answer, if there is one; return whether all is over."""
            nonlocal asked, dry
            answer = link.answer(wait=wait) if asked else None
            if answer is not None:
                asked, dry = False, not answer.pieces
                pending.extend(answer.pieces)
            return answer is not None and answer.over

        def ask() -> None:
            nonlocal asked
            if not asked:
                link.ask()
                asked = True

        def following() -> int | None:
            take(wait=False)
            return pending[0] if pending else None

        while True:
            if not pending:
                # Who waits has written all of its pieces, and said so: others may wait for them.
                link.report(work.finished(wait=True))
                ask()
            if take(wait=not pending):
                break
            if pending:
                piece = pending.popleft()
                if not pending and not dry:
                    ask()  # while it is computed, so that the next one is there at its end
                for _ in work.begin(piece, following):
                    link.report(work.finished(wait=False))
                    link.serve()
        return link.end()


class _WorkLink(AbstractContextManager["_WorkLink"]):
    """A rank's connection to the coordinator."""

    def ask(self) -> None:
        raise NotImplementedError

    def answer(self, *, wait: bool) -> NextPieces | None:
        raise NotImplementedError

    def report(self, done: Iterable[tuple[int, Any]]) -> None:
        raise NotImplementedError

    def serve(self) -> None:
        """Answer other ranks."""

    def end(self) -> Any:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None


def _link(world: RankWorld | None, job: PieceJob | None) -> _WorkLink:
    if world is None or world.size == 1:
        assert job is not None
        return _FirstRank(job, None, 1)
    if not hasattr(world, "mail"):
        raise ConfigurationError(
            "several ranks of a trial cannot share a prediction; predict after the search, or with one rank "
            "for each trial"
        )
    mail: Mail = world.mail()
    if world.rank != _COORDINATOR:
        return _OtherRank(mail)
    assert job is not None
    return _FirstRank(job, mail, world.size)


class _FirstRank(_WorkLink):
    """The first rank's connection: it has the coordinator."""

    def __init__(self, job: PieceJob, mail: Mail | None, size: int) -> None:
        self._job, self._mail = job, mail
        self._coordinator = PieceCoordinator(job, range(size))
        self._answer: NextPieces | None = None
        self._living = set(range(1, size))

    def ask(self) -> None:
        self._answer = self._coordinator.ask(_COORDINATOR)
        self._send_answers()

    def answer(self, *, wait: bool) -> NextPieces | None:
        while wait and self._answer is None:
            self._take_in(None)
        answer, self._answer = self._answer, None
        return answer

    def report(self, done: Iterable[tuple[int, Any]]) -> None:
        for piece, note in done:
            self._coordinator.done(_COORDINATOR, piece, note)

    def serve(self) -> None:
        while self._take_in(0):
            pass

    def end(self) -> Any:
        while self._coordinator.working:
            self._take_in(None)
        result = self._job.finish()
        if self._mail is not None:
            for rank in sorted(self._living):
                self._mail.send(rank, _to_text(AllDone(result)))
            self._mail.close()
        return result

    def _take_in(self, timeout_s: float | None) -> bool:
        """Receive and answer one message; return whether there was one."""
        received = None if self._mail is None else self._mail.receive(timeout_s)
        if received is None:
            return False
        if isinstance(received, Lost):
            self._living.discard(received.rank)
            self._coordinator.lost(received.rank)
        else:
            rank, text = received
            message = _from_text(text, f"the message from rank {rank}")
            if isinstance(message, PieceDone):
                self._coordinator.done(rank, message.piece, message.note)
            elif isinstance(message, AskPieces) and (answer := self._coordinator.ask(rank)) is not None:
                self._send(rank, answer)
        self._send_answers()
        return True

    def _send_answers(self) -> None:
        for rank, answer in self._coordinator.answers():
            self._send(rank, answer)

    def _send(self, rank: int, answer: NextPieces) -> None:
        if rank == _COORDINATOR:
            self._answer = answer
        elif self._mail is not None:
            self._mail.send(rank, _to_text(answer))


class _OtherRank(_WorkLink):
    """Another rank's connection."""

    def __init__(self, mail: Mail) -> None:
        self._mail = mail

    def ask(self) -> None:
        self._mail.send(_COORDINATOR, _to_text(AskPieces()))

    def answer(self, *, wait: bool) -> NextPieces | None:
        message = self._receive(wait=wait)
        assert message is None or isinstance(message, NextPieces)
        return message

    def report(self, done: Iterable[tuple[int, Any]]) -> None:
        for piece, note in done:
            self._mail.send(_COORDINATOR, _to_text(PieceDone(piece, note)))

    def end(self) -> Any:
        message = self._receive(wait=True)
        assert isinstance(message, AllDone)
        self._mail.close()
        return message.result

    def _receive(self, *, wait: bool) -> _Message | None:
        while True:
            received = self._mail.receive(None if wait else 0)
            if received is None:
                return None
            if not isinstance(received, Lost):
                return _from_text(received[1], f"the message from rank {received[0]}")
            if received.rank == _COORDINATOR:
                raise PeerLostError(
                    _COORDINATOR,
                    "has died; it shared out the work. Rerun the same command: what is written stays",
                )


def _to_text(message: _Message) -> str:
    return json.dumps(content_of(message))


def _from_text(text: str, whose: str) -> _Message:
    try:
        content = parsed_json(text, _LARGEST_TEXT)
    except ValueError as error:
        raise malformed(whose, error) from error
    found: _Message = message_of(_KINDS, content, whose)
    return found
