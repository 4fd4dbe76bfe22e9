"""Saving of this rank's part of each checkpoint while the training runs.

    all pause ─► each rank copies its state ─► all resume training
                      └─ a thread writes it ─► report to the first server ─► after all reports: the manifest

Only a rank's main thread sends messages: a worker reports its thread's writes at its next batch boundary, a
server within half a second. The first server schedules all of it: `nnlo_common.protocol._checkpoint_round`.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import mmap
import resource
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from nnlo_common.base._errors import is_out_of_memory, warn
from nnlo_common.base._flat_vector import Vector
from nnlo_common.base._spans import Spans, record, recorder, span
from nnlo_common.protocol import Answers, Handlers, Lost
from nnlo_common.protocol import _checkpoint_round as rounds
from nnlo_common.protocol._query_messages import (
    Answer,
    DraftAnswer,
    DraftQuery,
    NothingMoreQuery,
    PartQuery,
    ReturnQuery,
    WantCheckpointQuery,
)
from nnlo_common.training._group_worker import GroupTrainer
from nnlo_common.training._rank_parts import has_center, speaks
from nnlo_common.training._server_rank import ServerRank
from nnlo_common.training._session import Session
from nnlo_common.training.checkpoint import Draft, Entry, Store
from nnlo_common.training.checkpoint._store import refused

__all__ = ["SavedRank", "Saving", "Writer", "saving_on"]

# -- writer thread: runs one job at a time while the training continues --------------------------------

_NAME = "nnlo-checkpoint"
# Python needs less than this, besides the stack, to begin a thread.
_BEGINNING_BYTES = 16 << 20


class Writer:
    """Runs one job at a time in a thread; `start` waits for the previous job.

    The thread is not a daemon, so that a program does not end before all is written. Without memory for a
    thread `start` runs the job itself.

    Example:
        >>> writer, done = Writer(), []
        >>> writer.start(lambda: done.append("first"))
        >>> writer.start(lambda: done.append("second"))
        >>> _ = writer.wait()
        >>> done, writer.busy
        (['first', 'second'], False)
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether a job is running."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, job: Callable[[], object]) -> None:
        """Run `job` after the previous one."""
        self.wait()
        thread = threading.Thread(target=self._do_beside, args=(job, recorder()), name=_NAME)
        try:
            _check_memory()
            thread.start()
        except (OSError, RuntimeError, MemoryError):  # no memory, or too many threads
            self._do(job)
        else:
            self._thread = thread

    def wait(self) -> float:
        """Wait for the job and return the seconds waited; re-raise the job's exception."""
        thread, self._thread = self._thread, None
        begun_s = time.monotonic()
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return 0.0 if thread is None else time.monotonic() - begun_s

    def _do_beside(self, job: Callable[[], object], spans: Spans | None) -> None:
        record(None if spans is None else spans.beside("checkpoint"))
        self._do(job)

    def _do(self, job: Callable[[], object]) -> None:
        try:
            with span("checkpoint", "writes"):
                job()
        except BaseException as error:  # `wait` raises it
            self._error = error


def _check_memory() -> None:
    """Raise an OSError if there is no memory for a thread.

    Python waits for ever for a thread that fails before its first line.
    """
    stack = threading.stack_size() or resource.getrlimit(resource.RLIMIT_STACK)[0]
    size = _BEGINNING_BYTES + (0 if stack == resource.RLIM_INFINITY else stack)
    mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()


def wait_for_all() -> None:
    """Wait for the writes of aborted trainings in this process."""
    for thread in threading.enumerate():
        if thread.name == _NAME and thread.is_alive():  # joining a thread that is just starting would fail
            thread.join()


_LOG = logging.getLogger(__name__)

# Warn of a wait for the disk that is longer than this.
_LONG_WAIT_S = 1.0


class SavedRank(Protocol):
    """One rank's state in a checkpoint; the `Checkpoint` of each framework package implements it.

    The methods are private because users see that class, too.
    """

    def _collect(self) -> Mapping[str, Any]:
        """Return this rank's state, which is copied."""

    def _pack(self, tree: Mapping[str, Any]) -> bytes:
        """Turn the state into bytes."""

    def _unpack(self, data: bytes) -> dict[str, Any]:
        """Return the state that `_pack` turned into bytes."""

    def _facts(self) -> Mapping[str, Any]:
        """Return the identity of the training, and its progress."""

    def _load(self, tree: Mapping[str, Any], facts: Mapping[str, Any], *, anew: bool) -> None:
        """Load a state.

        Args:
            tree: this rank's own; for a worker that starts anew the first worker's; what `_alone` returned;
                or, if one process has saved it, that process's, which has no session's state as "team".
            facts: those of the checkpoint.
            anew: this rank starts at the centre, because the workers have changed.
        """

    def _alone(
        self, center: Mapping[str, Any], worker: Mapping[str, Any], *, vector: Vector
    ) -> dict[str, Any]:
        """Return the state that a process alone loads from a training of several ranks.

        Args:
            center: the state of the rank whose model is the centre.
            worker: that of the first worker.
            vector: the centre.
        """

    def _leave(self) -> None:
        """Leave the training normally."""


class Saving:
    """Saves checkpoints of a process that trains alone.

    Args:
        store: the run's checkpoints.
        rank: this rank's number.
        state: its state.
        file: the name of its file.

    Attributes:
        score: the model's score for the next checkpoint.
        ending: all ranks leave after the last checkpoint.
        recalled: they leave because a search resumes with more ranks, not because of a signal.
    """

    def __init__(self, store: Store, rank: int, state: SavedRank, file: str) -> None:
        self.score: float | None = None
        self.ending = self.recalled = False
        self._store, self._rank, self._state, self._file = store, rank, state, file
        self._writer = Writer()
        self._waited_long = False  # the warning was given
        self._warnings: list[str] = []  # warnings of the thread
        self._written: PartQuery | None = None  # the thread's report
        self._former: Saving | None = None
        store.tell = self._warnings.append  # the main thread warns, not the writer's

    def want(self, *, end: bool) -> None:
        """Save now; with several ranks, a worker's call makes all save at their next batch boundary."""
        self.save()
        self.ending = end

    def save(self, *, last: bool = False, between: bool = False) -> bool:  # noqa: ARG002 - some need it
        """Save together with all other ranks; all call it between two batches.

        Args:
            last: the training ends here, so a search cannot resume it with more ranks.
            between: all ranks save between two epochs.

        Returns:
            False on a worker whose pause was cancelled because others need it first.
        """
        self._wait()
        pack, facts, score = self._copy(), self._state._facts(), self.score

        def write() -> None:
            try:
                files = {self._file: pack()}
            except Exception as error:
                self._store.warn_once(refused(error))
            else:
                self._store.save(files, facts, score)

        self._writer.start(write)
        return True

    def go_on_from(self, former: Saving) -> None:
        """Go on where another object has saved for this rank."""

    def settle(self) -> None:
        """Report the thread's finished writes; call it between any two batches."""
        if self._former is not None:
            self._former.settle()
        if self._writer.busy:
            return
        self._writer.wait()
        warnings, self._warnings[:] = list(self._warnings), []
        for text in warnings:
            warn(text)
        written, self._written = self._written, None
        self._tell(written)

    def hear_of_end(self) -> None:
        """Hear whether all ranks leave now, on a rank that is not told."""

    def finish(self) -> None:
        """Wait until all ranks have finished their writes; every rank calls it."""
        self._wait()

    def _tell(self, written: PartQuery | None) -> None:
        """Report a finished write to the first server, if there is one."""

    def _wait(self) -> None:
        """Wait for this rank's thread."""
        if self._former is not None:
            self._former._wait()
        waited_s = self._writer.wait()
        if waited_s > _LONG_WAIT_S and not self._waited_long:
            self._waited_long = True
            _LOG.warning(
                "nnlo: rank %d waited %.1f s for the previous checkpoint to be written to %s; save less "
                "often, or to a faster disk",
                *(self._rank, waited_s, self._store.folder),
            )
        self.settle()

    def _copy(self) -> Callable[[], bytes]:
        """Copy the state; return what packs the copy, or says that there was no memory for it."""
        try:
            tree = copy.deepcopy(self._state._collect())
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return _fail_for_memory  # without `error`, whose frames hold what was copied so far
        return lambda: self._state._pack(tree)

    def _start(self, draft: Draft, pack: Callable[[], bytes]) -> None:
        """Write a part in the thread."""

        def write() -> None:
            try:
                draft.write(self._file, pack())
            except Exception as error:
                # The store's folder, not the draft's: the same trouble is told once, whatever the number.
                where = f"{refused(error)} ({self._store.folder})"
                told = f"rank {self._rank} on host {socket.gethostname()}: {where}"
                self._written = PartQuery(number=draft.number, trouble=told)
                return
            entry = draft.files[self._file]
            self._written = PartQuery(
                number=draft.number, file=self._file, size=entry.size, blake2b=entry.blake2b
            )

        self._writer.start(write)


class _PartSaving(Saving):
    """Saves the part of a worker, or of a server other than the first; reports to the first server."""

    def __init__(self, store: Store, team: Session, state: SavedRank, file: str) -> None:
        super().__init__(store, team.rank, state, file)
        self._team, team.before_close = team, self.finish
        self._trains = not team.serves
        if team.serving is not None:
            team.serving.keeper = self

    def go_on_from(self, former: Saving) -> None:
        """Report the last writes of what saved this rank's part before: the first server may await them."""
        self._former = former

    def want(self, *, end: bool) -> None:
        """Make all ranks save at their next batch boundary; does nothing on a server."""
        if not self._team.serves:
            self._team.ask(WantCheckpointQuery(end=end))

    def save(self, *, last: bool = False, between: bool = False) -> bool:  # noqa: ARG002 - some need it
        """Save together with all other ranks; False on a worker whose pause was cancelled."""
        self._wait()
        if self._trains and self._team.serves:  # since this was called; another saves in its place
            return False
        if not self._team.pause(between=between):
            return False
        if not self._team.serves:
            self.all_pause()
        return True

    def all_pause(self) -> None:
        """Copy the state, and write it if the first server has begun a checkpoint."""
        pack = self._copy()
        self._wait()
        # This server may see a pause before the first server does.
        pauses = 0 if self._team.serving is None else self._team.serving.pauses
        answer: DraftAnswer = self._team.ask(DraftQuery(pauses=pauses))
        self.ending, self.recalled = answer.end, answer.recalled
        if answer.number is not None:
            self._start(self._store.draft(answer.number), pack)

    def finish(self) -> None:
        """Wait for this rank's part, and announce that no more will come."""
        self._wait()
        self._team.ask(NothingMoreQuery())
        self._wait()

    def _tell(self, written: PartQuery | None) -> None:
        if written is not None:
            self._team.ask(written)


class _SpareSaving(_PartSaving):
    """Saves nothing: the servers do, as long as they live."""

    def save(self, *, last: bool = False, between: bool = False) -> bool:  # noqa: ARG002 - some need it
        """Only count, so that this rank knows what is left to do when it takes over."""
        return self._team.pause(between=between)

    def finish(self) -> None:
        """Announce that no parts come; finish as the server does if this rank takes over meanwhile."""
        super().finish()
        now = self._team.before_close
        if now is not None and now != self.finish:
            now()

    def hear_of_end(self) -> None:
        """Hear whether all ranks leave after the last checkpoint."""
        answer: DraftAnswer = self._team.ask(DraftQuery(pauses=0))
        self.ending, self.recalled = answer.end, answer.recalled


class _FirstSaving(Saving):
    """Saves the first server's part, and performs the actions of the checkpoint round."""

    def __init__(self, store: Store, team: Session, serving: ServerRank, state: SavedRank, file: str) -> None:
        super().__init__(store, team.rank, state, file)
        self._team, self._serving, team.before_close = team, serving, self.finish
        self._round = rounds.CheckpointRound(team.rank, takes_over=not speaks(team.member.role))
        self._warned_skipped = False  # the warning was given
        self._copied: tuple[Callable[[], bytes], Mapping[str, Any], float | None] = bytes, {}, None
        self._draft: tuple[Draft, Mapping[str, Any], float | None] | None = None
        self.handlers: Handlers = {
            WantCheckpointQuery: self._request,
            DraftQuery: self._ask,
            PartQuery: lambda rank, part: self._heard(rank, rounds.PartReported(rank, part)),
            NothingMoreQuery: lambda rank, _: self._heard(rank, rounds.NothingMore(rank)),
        }
        self._saves: dict[int, int] = {}  # by rank, where this one has taken over from a dead server
        serving.keeper = self
        assert serving.service is not None  # this is the first server
        serving.service.add(self)

    def returned(self, rank: int, told: ReturnQuery) -> None:
        """Hear how often a rank has saved together with the server that has died."""
        self._saves[rank] = told.saves

    def retired(self, rank: int) -> None:
        """Stop waiting for what a worker would have written that serves another shard by now."""
        self._handle(rounds.Turned(rank))

    def gone(self, rank: int, *, lost: bool) -> Answers:
        """Stop waiting for parts of this rank."""
        self._handle(Lost(rank) if lost else rounds.NothingMore(rank))
        return []

    def want(self, *, end: bool) -> None:
        """Do nothing: only workers request checkpoints."""

    def save(self, *, last: bool = False, between: bool = False) -> bool:
        """Save together with all other ranks, unless they have done so with a server that has died."""
        self._wait()
        service = self._serving.service
        assert service is not None  # this is the first server
        self._serving.wait_until(lambda: service.heard)
        if between and self._saves and self._saves[self._rank] < max(self._saves.values()):
            self._saves[self._rank] += 1
            service.pauses.numbers.append(0)
            return True
        self._handle(rounds.Due(last))
        return self._team.pause(between=between)

    def all_pause(self) -> None:
        """Save, if the pause is for a checkpoint."""
        serving = self._serving
        if self._round.wanted:
            self._wait()
        for rank in serving.lost():  # a death may have completed the pause
            self._handle(Lost(rank))
        savers, workers = frozenset(serving.saving()), frozenset(serving.workers())
        self._handle(rounds.AllPaused(serving.pauses, savers, workers))
        # The script must know the outcome. Other servers may still have to report earlier parts.
        serving.wait_until(lambda: not self._round.opening)

    def finish(self) -> None:
        """Wait until all ranks have reported their parts, and the checkpoint is on disk."""
        self._wait()
        self._serving.wait_until(lambda: self._round.closed)
        self._wait()
        if self._saves and self._store.folder.is_dir():
            with contextlib.suppress(OSError):  # of the server that has died
                self._store.remove_leftovers()

    def _request(self, rank: int, query: WantCheckpointQuery) -> Answers:
        self.settle()
        return self._heard(rank, rounds.CheckpointRequested(query.end, self._writer.busy))

    def _ask(self, rank: int, query: DraftQuery) -> Answers:
        self._handle(rounds.DraftAsked(rank, query.pauses))
        return []  # the round answers later

    def _heard(self, rank: int, event: rounds.RoundEvent) -> Answers:
        self._handle(event)
        return [(rank, Answer())]

    def _tell(self, written: PartQuery | None) -> None:
        if written is not None:
            self._handle(rounds.PartReported(self._rank, written))

    def _handle(self, event: rounds.RoundEvent) -> None:
        for action in self._round.handle(event):
            self._perform(action)

    def _perform(self, action: rounds.RoundAction) -> None:
        match action:
            case rounds.AskForPause():
                self._serving.want_pause()
            case rounds.WarnSkipped():
                self._warn_skipped()
            case rounds.CopyOwn():
                self._copied = self._copy(), self._state._facts(), self.score
            case rounds.OpenDraft():
                self._open()
            case rounds.WriteOwn():
                assert self._draft is not None  # _open has set it
                self._start(self._draft[0], self._copied[0])
            case rounds.AnswerDraftQuery(rank, answer):
                self._serving.tell([(rank, answer)])
            case rounds.CloseDraft(parts, trouble):
                self._close(parts, trouble)

    def _open(self) -> None:
        self._wait()
        draft, (_, facts, score) = self._store.begin(), self._copied
        self._draft = None if draft is None else (draft, facts, score)
        # A search can resume with more ranks only if the algorithm allows other workers.
        recalled = self._team.world.recalled and not self._team.algorithm.tied_to_workers
        self._handle(rounds.DraftOpened(None if draft is None else draft.number, recalled))
        self.ending, self.recalled = self._round.end, self._round.recalled
        if draft is None:
            self.settle()  # warns of the reason

    def _close(self, parts: tuple[PartQuery, ...], trouble: str) -> None:
        assert self._draft is not None  # _open has set it
        draft, facts, score = self._draft
        for part in parts:
            draft.files[part.file] = Entry(part.size, part.blake2b)
        if trouble:
            self._writer.start(lambda: self._store.abandon(draft, trouble))
        else:
            self._writer.start(lambda: self._store.commit(draft, facts, score))

    def _warn_skipped(self) -> None:
        level = logging.DEBUG if self._warned_skipped else logging.WARNING
        self._warned_skipped = True
        _LOG.log(
            level,
            "nnlo: skipped a checkpoint, because the previous one is still being written to %s; save less "
            "often, or to a faster disk",
            self._store.folder,
        )


class _GroupSaving(Saving):
    """Saves the part of a rank of a training without servers.

    All ranks save at the same batch boundary, and complete the checkpoint at a later one, when all have
    written their parts; the lead begins and completes it.
    """

    def __init__(
        self, store: Store, team: Session, trainer: GroupTrainer, state: SavedRank, file: str
    ) -> None:
        super().__init__(store, team.rank, state, file)
        self._team, self._trainer, team.before_close = team, trainer, self.finish
        self._open: tuple[Draft, Mapping[str, Any], float | None] | None = None
        self._reported = PartQuery(number=0)  # this rank's part of it
        self._wants_end = False

    def want(self, *, end: bool) -> None:
        """Make all ranks save at the next batch boundary but one."""
        self._wants_end |= end
        self._trainer.want_pause()

    def save(self, *, last: bool = False, between: bool = False) -> bool:  # noqa: ARG002 - as with servers
        """Save together with all other ranks."""
        self._wait()
        self._complete()
        self._team.pause()
        tree, facts, score = self._copy(), self._state._facts(), self.score
        draft = self._store.begin() if self._trainer.leads else None
        mine = {"number": None if draft is None else draft.number, "end": self._wants_end}
        everyone = [json.loads(one) for one in self._trainer.take_together(json.dumps(mine).encode())]
        self.ending = any(one["end"] for one in everyone)
        number = everyone[0]["number"]
        if number is not None:
            draft = draft or self._store.draft(number)
            self._open = draft, facts, score
            self._start(draft, tree)
        return True

    def settle(self) -> None:
        """Report this thread's finished write; complete the checkpoint if all ranks have written theirs."""
        super().settle()
        if self._trainer.all_written:
            self._complete()

    def finish(self) -> None:
        """Wait until all ranks have finished their writes."""
        self._wait()
        self._complete()

    def _tell(self, written: PartQuery | None) -> None:
        if written is not None:
            self._reported = written
            self._trainer.tell_written()

    def _complete(self) -> None:
        """Complete the open checkpoint, if there is one (collective)."""
        if self._open is None:
            return
        (draft, facts, score), self._open = self._open, None
        mine = {"file": self._reported.file, "size": self._reported.size, "trouble": self._reported.trouble}
        mine["blake2b"] = self._reported.blake2b
        everyone = [json.loads(one) for one in self._trainer.take_together(json.dumps(mine).encode())]
        if not self._trainer.leads:
            return
        trouble = next((one["trouble"] for one in everyone if one["trouble"]), "")
        if trouble:
            self._store.abandon(draft, trouble)
            return
        for one in everyone:
            draft.files[one["file"]] = Entry(one["size"], one["blake2b"])
        self._store.commit(draft, facts, score)


def _fail_for_memory() -> bytes:
    raise MemoryError


def saving_on(store: Store, team: Session | None, state: SavedRank, file: str) -> Saving:
    """Return the `Saving` for this rank's role.

    Args:
        store: the run's checkpoints.
        team: this rank's session; None: alone.
        state: its state.
        file: the name of its file.
    """
    if team is None:
        return Saving(store, 0, state, file)
    if not team.member.servers and isinstance(trainer := team.worker, GroupTrainer):
        return _GroupSaving(store, team, trainer, state, file)
    if team.serving is not None and speaks(team.role):
        return _FirstSaving(store, team, team.serving, state, file)
    if has_center(team.role):
        return _SpareSaving(store, team, state, file)
    return _PartSaving(store, team, state, file)
