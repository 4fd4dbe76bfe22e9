"""Parts that predicting and tiling share: agreement, the record of pieces, a writing thread, progress."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy.typing as npt

from nnlo_common.base._arguments import whole_in
from nnlo_common.base._errors import ConfigurationError, NNLOError
from nnlo_common.base._spans import span
from nnlo_common.cluster.transport._endpoint import RankWorld
from nnlo_common.inference._journal import ResultJournal
from nnlo_common.inference.sinks import PieceWriter, Region, Regions, Sink

__all__ = [
    "PiecePace",
    "PieceProgress",
    "RecordedJob",
    "PiecesOut",
    "ResultKeywords",
    "ResultOptions",
    "Watch",
    "WriteQueue",
    "agreed",
    "array_share",
    "open_journal",
    "share_of",
    "teller",
    "together",
]

_EVERY_S = 10.0
_MOST_WRITES = 4  # batches that wait for the disk


@contextmanager
def together(world: RankWorld | None) -> Iterator[None]:
    """Run the body on each rank, and continue only if it succeeded on all (collective).

    Raises:
        ConfigurationError: on all ranks alike, with the problem of the first rank that has one.
    """
    problem, cause = "", None
    try:
        yield
    except NNLOError as error:
        problem, cause = str(error) or type(error).__name__, error
        if world is None:
            error.collective = True
            raise
    if world is None:
        return
    told = world.gather_text(problem, patient=True)
    found = next(((rank, text) for rank, text in enumerate(told) if text), None)
    if found is not None:
        alike = len(set(told)) == 1
        refusal = ConfigurationError(found[1] if alike else f"rank {found[0]}: {found[1]}")
        refusal.collective = True
        raise refusal from cause


def agreed(world: RankWorld | None, facts: Mapping[str, Any]) -> None:
    """Refuse ranks that would compute different things (collective).

    Args:
        world: the ranks.
        facts: what each of them computes (JSON).

    Raises:
        ConfigurationError: on all ranks.
    """
    if world is None:
        return
    every = [json.loads(text) for text in world.gather_text(json.dumps(facts))]
    for rank, theirs in enumerate(every):
        for name in facts:
            if theirs.get(name) != every[0].get(name):
                advice = ""
                if name == "model":
                    advice = (
                        "; load the same weights on all ranks, or predict in `with "
                        "optimizer.evaluation():`, where all ranks have the centre"
                    )
                error = ConfigurationError(
                    f"rank {rank} has another {name} than rank 0: {theirs.get(name)!r:.80}, not "
                    f"{every[0].get(name)!r:.80}{advice}"
                )
                error.collective = True
                raise error


class RecordedJob:
    """The pieces of a result in a sink, with the journal of those that are written; on the first rank.

    Args:
        pieces: how many there are.
        sink: of the result.
        regions: the parts of the arrays that a piece fills.
        journal: on the disk; None: nothing outlives this process.
        share: the pieces that this job does.
        progress: is told how many are done.
        order: the pieces in the order in which to do them; None: by their numbers.
    """

    def __init__(
        self,
        pieces: int,
        sink: Sink,
        regions: Callable[[int], Regions],
        journal: ResultJournal | None,
        *,
        share: range | None = None,
        progress: Callable[[int, int], object] = lambda done, pieces: None,
        order: Sequence[int] | None = None,
    ) -> None:
        self._pieces, self._sink, self._regions, self._journal = pieces, sink, regions, journal
        known = {} if journal is None else journal.notes
        self._notes = {piece: note for piece, note in known.items() if piece < pieces and sink.has(piece)}
        mine = range(pieces) if share is None else share
        asked = mine if order is None else [piece for piece in order if piece in mine]
        self.left = [piece for piece in asked if piece not in self._notes]
        self._mine, self._progress = len(mine), progress
        self._done = self._mine - len(self.left)

    def note(self, piece: int, note: Any) -> None:
        """Record a piece as done."""
        if self._journal is not None:
            self._journal.note(piece, note)
        self._notes[piece] = note
        self._done += 1
        self._progress(self._done, self._mine)

    def finish(self) -> Any:
        """Complete the result if all pieces are there, also those of other jobs; return the notes."""
        if self._journal is not None and self._journal.path.exists():
            return {"missing": 0, "notes": []}  # another job of the array has completed it
        if self._journal is not None:
            self._journal.read()
            self._notes |= self._journal.notes
            # Virtual datasets would read zeros where a part is not there.
            self._notes = {piece: note for piece, note in self._notes.items() if self._sink.has(piece)}
        missing = self._pieces - sum(piece < self._pieces for piece in self._notes)
        if missing and self._journal is not None and self._mine == self._pieces:
            raise ConfigurationError(
                f"{missing} pieces of {self._journal.path} were written, but are not there: name a file that "
                "all ranks see, on a shared file system, then run the same command"
            )
        if missing:
            return {"missing": missing, "notes": []}
        if self._journal is None or self._journal.finishes():
            self._sink.finish(self._pieces, self._regions)
        return {"missing": 0, "notes": [self._notes[piece] for piece in range(self._pieces)]}


class WriteQueue:
    """Writes in a thread, in order, while the next batch is computed.

    An error of the thread is raised by the next call.

    Example:
        >>> queue, written = WriteQueue(), []
        >>> queue.put(lambda: written.append("a batch"))
        >>> queue.end(7, "its note", lambda: written.append("the end"))
        >>> queue.finished(wait=True), written
        ([(7, 'its note')], ['a batch', 'the end'])
        >>> queue.close()
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="nnlo writes")
        self._waiting: deque[tuple[Future[Any], tuple[int, Any] | None]] = deque()
        self._done: list[tuple[int, Any]] = []

    def put(self, call: Callable[[], object]) -> None:
        """Write soon."""
        self._add(call, None)

    def end(self, piece: int, note: Any, call: Callable[[], object]) -> None:
        """Complete a piece soon."""
        self._add(call, (piece, note))

    def finished(self, *, wait: bool) -> list[tuple[int, Any]]:
        """Return the pieces completed since the last call; `wait` for all."""
        while self._waiting and (wait or self._waiting[0][0].done()):
            self._take()
        found, self._done = self._done, []
        return found

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _add(self, call: Callable[[], object], end: tuple[int, Any] | None) -> None:
        while len(self._waiting) >= _MOST_WRITES:
            self._take()
        self._waiting.append((self._thread.submit(call), end))

    def _take(self) -> None:
        future, end = self._waiting.popleft()
        with span("wait", "waits for the writer"):
            future.result()
        if end is not None:
            self._done.append(end)


class PiecePace:
    """The pace at which pieces are written, since this was first told of them.

    Example:
        >>> pace = PiecePace()
        >>> pace.left_s(1, 10, now_s=0.0), pace.left_s(4, 10, now_s=6.0)
        (None, 12.0)
    """

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None

    def left_s(self, done: int, pieces: int, now_s: float) -> float | None:
        """Return how long the rest takes; None: unknown."""
        if self._first is None:
            self._first = now_s, done
        began_s, first = self._first
        return (now_s - began_s) * (pieces - done) / (done - first) if done > first else None


class PieceProgress:
    """Prints how far a job is, at most every 10 seconds.

    Args:
        what: the command, for the line.
        clock: returns the time.
    """

    def __init__(self, what: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self._what, self._clock, self._last_s = what, clock, clock()
        self._pace = PiecePace()

    def __call__(self, done: int, pieces: int) -> None:
        """Take note of the number of pieces that are done."""
        now_s = self._clock()
        left_s = self._pace.left_s(done, pieces, now_s)
        if done < pieces and now_s - self._last_s < _EVERY_S:
            return
        self._last_s = now_s
        left = f", about {_duration(left_s)} left" if left_s is not None and done < pieces else ""
        print(f"{self._what}: {100 * done / max(pieces, 1):.0f} %{left}", file=sys.stderr, flush=True)


class Watch:
    """Is told how far a job is; this one tells nobody."""

    def begin(self) -> None:
        """Get ready: all has been checked, and the first piece is next."""

    def batch(self, samples: int) -> None:
        """Take note of samples, or tiles, that this rank has computed."""

    def pieces(self, done: int, pieces: int) -> None:
        """Take note, on the first rank, of how many pieces are written by all ranks."""


class ResultKeywords(TypedDict, total=False):
    """Options of `ResultOptions`, for callers that pass them on."""

    dtype: Literal["float16", "float32", "float64"] | None
    compression: str | None
    overwrite: bool
    part: str | None
    progress: bool


@dataclass(frozen=True, kw_only=True)
class ResultOptions:
    """How the result of a prediction or of tiles is made and written.

    Attributes:
        dtype: of the floats that are written; None: as the model has them.
        compression: of an .h5 file, "gzip" or "lzf".
        overwrite: remove an earlier result.
        part: do this part of the work only, e.g. "2/5", or "auto" in a job array of Slurm; the last job
            completes the file.
        progress: print how far it is.
        watch: is told how far it is, too.

    Example:
        >>> ResultOptions(dtype="float16").overwrite
        False
    """

    dtype: Literal["float16", "float32", "float64"] | None = None
    compression: str | None = None
    overwrite: bool = False
    part: str | None = None
    progress: bool = False
    watch: Watch = Watch()  # noqa: RUF009 - it has no state

    def __post_init__(self) -> None:
        if self.dtype not in (None, "float16", "float32", "float64"):
            raise ConfigurationError(f"dtype={self.dtype!r}: give float16, float32 or float64, or nothing")


def teller(called: str, watch: Watch, *, progress: bool) -> Callable[[int, int], object]:
    """Return what is told how many pieces are written: the watch, and the terminal if asked for.

    Args:
        called: the job, for its line.
        watch: is told, too.
        progress: print how far it is.
    """
    if not progress:
        return watch.pieces
    line = PieceProgress(called)

    def tell(done: int, pieces: int) -> None:
        line(done, pieces)
        watch.pieces(done, pieces)

    return tell


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def share_of(pieces: int, part: tuple[int, int] | None) -> range | None:
    """Return the pieces of one job of an array; None: all.

    Example:
        >>> share_of(10, (2, 3)), share_of(10, (3, 3))
        (range(3, 6), range(6, 10))
    """
    if part is None:
        return None
    number, of = part
    return range((number - 1) * pieces // of, number * pieces // of)


def array_share(text: str | None, env: Mapping[str, str]) -> tuple[int, int] | None:
    """Return which job of an array this is, from 1, and how many there are; None: there is no array.

    Args:
        text: "2/5", or "auto": as the batch system says (Slurm's array).
        env: the variables of the process.

    Raises:
        ConfigurationError: it is neither, or the batch system says nothing.

    Example:
        >>> task = {"SLURM_ARRAY_TASK_ID": "4", "SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_COUNT": "8"}
        >>> array_share("auto", task)
        (4, 8)
    """
    if text is None:
        return None
    if text == "auto":
        try:
            first, count = (int(env[f"SLURM_ARRAY_TASK_{name}"]) for name in ("MIN", "COUNT"))
            number, of = int(env["SLURM_ARRAY_TASK_ID"]) - first + 1, count
        except (KeyError, ValueError):
            raise ConfigurationError(
                "--part auto: there is no SLURM_ARRAY_TASK_ID here; submit with sbatch --array=1-N, or give "
                "the part by hand, e.g. --part 2/5"
            ) from None
    else:
        parts = [whole_in(word.strip()) for word in text.split("/")]
        one, other = parts if len(parts) == 2 else (None, None)
        if one is None or other is None:
            raise ConfigurationError(
                f"--part {text:.60}: give a number and how many there are, e.g. 2/5, or auto"
            )
        number, of = one, other
    if not 1 <= number <= of:
        raise ConfigurationError(f"--part {number}/{of}: the first part is 1/{of}, the last {of}/{of}")
    return number, of


def open_journal(
    path: Path,
    facts: Mapping[str, Any],
    world: RankWorld | None,
    *,
    part: tuple[int, int] | None,
    overwrite: bool,
    first: Callable[[], object],
) -> ResultJournal:
    """Begin or continue the result on the first rank, before any other writes (collective).

    Args:
        path: of the result.
        facts: of the result.
        world: the ranks.
        part: of a job array.
        overwrite: remove an earlier result.
        first: makes what pieces are written to.
    """
    journal = ResultJournal(path, facts, "" if part is None else f"{part[0]}-of-{part[1]}")
    if part is not None and overwrite:
        raise ConfigurationError(
            "--overwrite in a job of an array would remove what the others write; delete the result before"
        )
    with together(world):
        if world is None or not world.rank:
            journal.begin(overwrite=overwrite)
            try:
                first()
            except BaseException:
                journal.close()
                raise
    return journal


class PiecesOut:
    """Writes a rank's pieces behind its computing, each as a whole or not at all.

    Args:
        sink: writes them.
        regions: returns what a piece fills of each whole.
    """

    def __init__(self, sink: Sink, regions: Callable[[int], Regions]) -> None:
        self._sink, self._regions, self._queue = sink, regions, WriteQueue()
        self._writer: PieceWriter | None = None

    def begin(self, piece: int) -> None:
        """Begin a piece soon."""
        self._queue.put(lambda: self._open(piece))

    def write(self, name: str, region: Region, array: npt.NDArray[Any]) -> None:
        """Write a part of it soon."""
        self._queue.put(lambda: self._writing.write(name, region, array))

    def end(self, piece: int, note: Any) -> None:
        """Complete it soon."""
        self._queue.end(piece, note, self._close)

    def finished(self, *, wait: bool) -> list[tuple[int, Any]]:
        """Return the pieces that are written since the last call; `wait` for all."""
        return self._queue.finished(wait=wait)

    def close(self) -> None:
        """End the thread; drop a piece that is not complete."""
        self._queue.close()
        if self._writer is not None:
            self._writer.discard()

    @property
    def _writing(self) -> PieceWriter:
        assert self._writer is not None  # begin() comes first
        return self._writer

    def _open(self, piece: int) -> None:
        self._writer = self._sink.begin(piece, self._regions(piece))

    def _close(self) -> None:
        self._writing.close()
        self._writer = None
