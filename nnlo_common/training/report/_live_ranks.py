"""Live ranks: what all ranks of a run do now, from its folder; its files may be half written or hostile."""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from nnlo_common.base._file_access import RANKS, new_file, of_rank, read_whole, readable_file, usable
from nnlo_common.base._limited_formats import parsed_json
from nnlo_common.training._rank_parts import TrainingReport, serves, speaks, stands_by
from nnlo_common.training.report._course import Moment

__all__ = ["LIVE", "LiveFile", "LiveRank", "LiveRun", "read_live"]

# -- live file: what a rank does now, in a small file of the run's folder, for `nnlo top` --------------

LIVE = "live.json"
_LOG = logging.getLogger(__name__)
_MOST_LOST = 20
_FEWEST_S = 0.5  # a shorter time says little about a share of it


class LiveFile:
    """Replaces this rank's file at an interval; a training neither waits for it nor ends because it cannot.

    The rank notes where it is, and a thread writes: so a rank that waits for others still shows a sign of
    life, and a slow disk holds up nobody.

    Args:
        folder: of the run.
        rank: this rank's number.
        role: "alone", "server 0", "worker 0", ...
        host: the machine.
        every_s: the interval.
        clock: returns the time, for intervals.
        wall: returns the seconds since 1970.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     live = LiveFile(folder, 1, "worker 0", "a")
        ...     live.note(Moment(epoch=1), TrainingReport(samples=40), {"loss": 0.5})
        ...     live.write()
        ...     found = json.loads(Path(folder, "ranks", "live.rank1.json").read_text())
        ...     live.end()
        >>> found["role"], found["samples"], found["scores"]
        ('worker 0', 40, {'loss': 0.5})
    """

    def __init__(
        self,
        folder: str | Path,
        rank: int,
        role: str,
        host: str,
        *,
        every_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._path = usable(f"run={str(folder)!r}", of_rank(folder, LIVE, rank))
        self._fixed = {"rank": rank, "role": role, "host": host, "process": os.getpid(), "every_s": every_s}
        self._fixed["began"] = wall()
        self._every_s, self._clock, self._wall = every_s, clock, wall
        self._noted: dict[str, Any] = {"epoch": 1, "samples": 0, "scores": {}}
        self._first_loss: float | None = None
        self._moved_s, self._moved, self._longest_s = clock(), wall(), 0.0
        self._last_s, self._samples, self._cpu_s = clock(), 0, time.process_time()
        self._broken, self._abandoned, self._over = False, False, threading.Event()
        # One file is written at a time, by the thread or by what ends it.
        self._writing = threading.Lock()
        atexit.register(self.end)

    def take_over(self, role: str) -> None:
        """Write another role from now on."""
        self._fixed["role"] = role

    def start(self) -> None:
        """Write at the interval from now on, in a thread."""
        threading.Thread(target=self._repeat, name="nnlo live file", daemon=True).start()

    def begin_at(self, samples: int) -> None:
        """Count the pace from here: an earlier start has done so many samples."""
        self._last_s, self._samples = self._clock(), samples

    def note(self, moment: Moment, report: TrainingReport, scores: Mapping[str, float]) -> None:
        """Keep where this rank is, for the next write.

        Args:
            moment: where the training is.
            report: this rank's counts.
            scores: its loss and other metrics of late, by name.
        """
        known = {name: value if math.isfinite(value) else None for name, value in scores.items()}
        if self._first_loss is None:
            self._first_loss = known.get("loss")
        place, before = (moment.epoch, report.samples, report.exchanges), self._noted
        if place != (before["epoch"], before["samples"], before.get("exchanges", 0)):
            now_s = self._clock()
            self._longest_s = max(self._longest_s, now_s - self._moved_s)
            self._moved_s, self._moved = now_s, self._wall()
        self._noted = {
            "epoch": moment.epoch,
            "epochs": moment.epochs,
            "share": moment.share,
            "samples": report.samples,
            "exchanges": report.exchanges,
            "staleness": moment.staleness,
            "left_s": moment.left_s,
            "scores": known,
            "first_loss": self._first_loss,
            "lost": list(report.lost[:_MOST_LOST]),
        }

    def write(self) -> None:
        """Write what was noted last, unless this rank has ended."""
        with self._writing:
            if not self._over.is_set():
                self._put({**self._paced(), "state": "training"})

    def end(self) -> None:
        """Write that this rank has ended."""
        atexit.unregister(self.end)
        with self._writing:
            if not self._over.is_set():
                self._over.set()
                self._put({**self._noted, "state": "ended"})

    def _paced(self) -> dict[str, Any]:
        noted, now_s, cpu_s = self._noted, self._clock(), time.process_time()
        seconds = now_s - self._last_s
        pace: dict[str, float] = {}
        if seconds > _FEWEST_S:
            pace["samples_per_second"] = round((noted["samples"] - self._samples) / seconds, 3)
            pace["cpu_share"] = round((cpu_s - self._cpu_s) / seconds, 3)
            self._last_s, self._samples, self._cpu_s = now_s, noted["samples"], cpu_s
        return {**noted, **pace}

    def end_with(self, owner: object) -> None:
        """End when `owner` is gone, which nobody may close: a script that has failed, or a fit."""
        weakref.finalize(owner, self._abandon).atexit = False

    def _abandon(self) -> None:
        # A garbage collection calls it, which may have interrupted anything: no lock here, the thread ends.
        self._abandoned = True

    def _repeat(self) -> None:
        while not self._broken and not self._over.wait(self._every_s):
            if self._abandoned:
                self.end()
            else:
                self.write()

    def _put(self, facts: Mapping[str, Any]) -> None:
        if self._broken:
            return
        times = {"time": self._wall(), "moved": self._moved, "longest_s": self._longest_s}
        fresh = self._path.with_suffix(".part")
        try:
            # Renamed, so that no reader sees half a file; not synchronised with the disk, which takes long.
            with new_file(fresh) as file:
                file.write(json.dumps({**self._fixed, **times, **facts}).encode())
            fresh.replace(self._path)
        except OSError as error:
            self._broken = True
            _LOG.warning("%s cannot be written (%s): `nnlo top` does not see this rank", self._path, error)


#: The file of `nnlo train` that says that a run is complete.
_COMPLETE = "history.json"
_FACTS = "facts.jsonl"
_LARGEST, _TAIL, _FAR = 1 << 16, 1 << 14, 1 << 20
_LARGEST_NUMBER = 1e15
_TOGETHER_S = 30.0  # a live file is written more often than that
_APART_S = 10.0  # by which the ranks of one start begin at most
_MOST_SCORES, _LONGEST, _DIGITS = 50, 80, 7


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRank:
    """What one rank does now.

    Attributes:
        rank: its number.
        role: "alone", "server 0", "worker 0", ...
        host: the machine; empty: unknown.
        began_s: when its process began, in seconds since 1970; 0: unknown.
        ended: whether it has left the training.
        time_s: when it last showed a sign of life, in seconds since 1970.
        moved_s: when it last made a step or, on a server, heard of one.
        longest_s: the longest time between two steps so far.
        followed: whether all this is from its facts, which tell of no step.
        epoch: its epoch, from 1.
        epochs: how many there will be; None: unknown.
        share: how much of the epoch is done; None: unknown.
        samples: how many it has taken; on a server all workers together.
        rate: samples in a second, of late.
        cpu_share: how much of a core it uses, of late; None: unknown.
        staleness: of the contributions to a server in this epoch; None: unknown.
        left_s: the estimated seconds to the end; None: unknown.
        scores: its loss and other metrics, by name; None: not a finite number.
        first_loss: its first loss.
        lost: a line for each rank that died, on a server.
    """

    rank: int
    role: str
    host: str = ""
    began_s: float = 0.0
    ended: bool = False
    time_s: float
    moved_s: float
    longest_s: float = 0.0
    followed: bool = False
    epoch: int = 1
    epochs: int | None = None
    share: float | None = None
    samples: float = 0.0
    rate: float = 0.0
    cpu_share: float | None = None
    staleness: float | None = None
    left_s: float | None = None
    scores: Mapping[str, float | None] = field(default_factory=dict)
    first_loss: float | None = None
    lost: Sequence[str] = ()

    @property
    def serves(self) -> bool:
        """Whether it serves instead of training."""
        return serves(self.role)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """What a run does now.

    Attributes:
        folder: of its files.
        now_s: when they were read, in seconds since 1970.
        complete: whether the run has its result.
        ranks: those that have written, in order.
        unreadable: a line for each file that cannot be read.
    """

    folder: Path
    now_s: float
    complete: bool = False
    ranks: Sequence[LiveRank] = ()
    unreadable: Sequence[str] = ()

    @property
    def center(self) -> LiveRank | None:
        """The rank that speaks for all: the last one, which has taken over from those before it."""
        return next((one for one in reversed(self.ranks) if speaks(one.role)), None)

    @property
    def ended(self) -> bool:
        """Whether all its ranks have left."""
        return self.complete or (bool(self.ranks) and all(one.ended for one in self.ranks))

    @property
    def rate(self) -> float:
        """Samples in a second of all workers together."""
        return sum(one.rate for one in self.ranks if not one.serves and not one.ended)

    @property
    def scores(self) -> dict[str, float | None]:
        """The mean scores of the workers now, and those of the centre after its last epoch."""
        center = self.center
        found = {} if center is None else dict(center.scores)
        losses = [one.scores.get("loss") for one in self.ranks if not one.serves and "loss" in one.scores]
        if losses:
            known = [one for one in losses if one is not None]
            found = {"loss": sum(known) / len(known) if len(known) == len(losses) else None} | {
                name: value for name, value in found.items() if name != "loss"
            }
        return found


def read_live(folder: Path, now_s: float | None = None) -> LiveRun:
    """Read what the ranks of a run have written last; nothing in the folder raises an error.

    Args:
        folder: of the run.
        now_s: the time, in seconds since 1970; None: now.
    """
    ranks, unreadable = dict[int, LiveRank](), list[str]()
    for name, read in ((_FACTS, _followed), (LIVE, _live)):
        for path, rank in _of_ranks(folder / RANKS, name):
            try:
                if (found := read(path, rank)) is not None and _is_newer(found, ranks.get(rank)):
                    ranks[rank] = found
            except FileNotFoundError:
                continue  # replaced or removed meanwhile
            except (OSError, ValueError) as error:
                unreadable.append(_plain(f"{path.name}: {getattr(error, 'strerror', None) or error}"))
    began_s = max((one.began_s for one in ranks.values()), default=0.0)
    return LiveRun(
        folder=folder,
        now_s=time.time() if now_s is None else now_s,
        complete=_COMPLETE in _names(folder),
        # Those of an earlier start, which had more ranks, are left out.
        ranks=[ranks[rank] for rank in sorted(ranks) if ranks[rank].time_s > began_s - _APART_S],
        unreadable=unreadable,
    )


def _is_newer(found: LiveRank, known: LiveRank | None) -> bool:
    """Whether a live file is of this start of the run, and not of one before the last fact."""
    return known is None or found.time_s > known.time_s - _TOGETHER_S


def _of_ranks(folder: Path, name: str) -> Iterator[tuple[Path, int]]:
    """Yield the files of the ranks, with the rank of each."""
    stem, _, ending = name.rpartition(".")
    for one in _names(folder):
        number = one.removeprefix(f"{stem}.rank").removesuffix(f".{ending}")
        plain = number.isascii() and number.isdecimal() and len(number) < _DIGITS
        if plain and one == f"{stem}.rank{number}.{ending}":
            yield folder / one, int(number)


def _names(folder: Path) -> list[str]:
    try:
        return sorted(one.name for one in folder.iterdir())
    except OSError:
        return []


def _live(path: Path, rank: int) -> LiveRank:
    """Read a live file."""
    found = _table(read_whole(path, _LARGEST))
    lost, scores = found.get("lost"), found.get("scores")
    return LiveRank(
        rank=rank,
        role=_text(found, "role") or f"rank {rank}",
        host=_text(found, "host"),
        began_s=_number(found, "began") or 0.0,
        ended=found.get("state") == "ended",
        time_s=_known(found, "time"),
        moved_s=_known(found, "moved"),
        longest_s=_number(found, "longest_s") or 0.0,
        epoch=int(_known(found, "epoch")),
        epochs=None if (epochs := _number(found, "epochs")) is None else int(epochs),
        share=_number(found, "share"),
        samples=_known(found, "samples"),
        rate=_number(found, "samples_per_second") or 0.0,
        cpu_share=_number(found, "cpu_share"),
        staleness=_number(found, "staleness"),
        left_s=_number(found, "left_s"),
        scores=_scores(scores),
        first_loss=_number(found, "first_loss"),
        lost=[_plain(str(one)) for one in lost] if isinstance(lost, list) else (),
    )


def _followed(path: Path, rank: int) -> LiveRank | None:
    """Read the begin and the end of a file of facts; None: it has no line yet."""
    with readable_file(path) as file:
        head = file.readline(_FAR)
        if not head.endswith(b"\n"):
            return None
        tail = _end_of(file, _TAIL, len(head))
        start, last = _table(head), dict[str, Mapping[str, Any]]()
        before: Mapping[str, Any] = {}
        for line in map(_line, tail.split(b"\n")):
            what = str(line.get("what"))
            before = last.get("sample", {}) if what == "sample" else before
            last[what] = line
        rare = ["epoch", *(["role"] if stands_by(_text(start, "role")) else [])]
        if any(what not in last for what in rare):  # many samples lie between two of them
            far = _end_of(file, _FAR, len(head))
            for what in rare:
                place = far.rfind(f'{{"what": "{what}"'.encode())
                last.setdefault(what, {} if place < 0 else _line(far[place:].partition(b"\n")[0]))
    epoch, sample = last.get("epoch", {}), last.get("sample", {})
    newest = max((_number(one, "time") or 0.0 for one in (start, *last.values())), default=0.0)
    metrics, finished = epoch.get("metrics"), _number(epoch, "epoch")
    return LiveRank(
        rank=rank,
        role=_text(last.get("role", {}), "role") or _text(start, "role") or f"rank {rank}",
        host=_text(start, "host"),
        ended="end" in last and (_number(last["end"], "time") or 0.0) >= newest,
        time_s=newest,
        moved_s=newest,
        followed=True,
        epoch=1 if finished is None else int(finished) + 2,
        samples=_counted(sample),
        rate=_rate(before, sample),
        staleness=_number(sample, "mean_staleness"),
        scores=_scores(metrics),
        lost=[_text(last["lost"], "text")] if "lost" in last else (),
    )


def _end_of(file: BinaryIO, size: int, begin: int) -> bytes:
    """Return the last bytes of a file, at most so many, without what is before `begin`."""
    file.seek(max(begin, file.seek(0, os.SEEK_END) - size))
    return file.read(size)


def _line(line: bytes) -> Mapping[str, Any]:
    """Return a line of facts; the first of a tail and the last of a killed rank are cut off."""
    try:
        return _table(line)
    except ValueError:
        return {}


def _counted(sample: Mapping[str, Any]) -> float:
    return _number(sample, "samples") or _number(sample, "batches") or 0.0


def _rate(before: Mapping[str, Any], sample: Mapping[str, Any]) -> float:
    seconds = (_number(sample, "seconds") or 0.0) - (_number(before, "seconds") or 0.0)
    return max(_counted(sample) - _counted(before), 0.0) / seconds if seconds > 0 else 0.0


def _table(data: bytes) -> Mapping[str, Any]:
    found = parsed_json(data)
    if not isinstance(found, Mapping):
        raise ValueError("it holds no table")  # noqa: TRY004 - the reader's own kind of error
    return found


def _scores(found: Any) -> dict[str, float | None]:
    if not isinstance(found, Mapping):
        return {}
    return {_plain(str(name)): _number(found, name) for name in [*found][:_MOST_SCORES]}


def _number(found: Mapping[str, Any], name: str) -> float | None:
    """Return a number that a display can take, else None."""
    value = found.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _LARGEST_NUMBER:
        return None
    return float(value)


def _known(found: Mapping[str, Any], name: str) -> float:
    if (value := _number(found, name)) is None or value < 0:
        raise ValueError(f"{name!r} is missing in it, or no number")
    return value


def _text(found: Mapping[str, Any], name: str) -> str:
    value = found.get(name)
    return _plain(value) if isinstance(value, str) else ""


def _plain(text: str) -> str:
    """Return a text in one short line, without control characters, which could change the terminal."""
    shown = "".join(one if one.isprintable() else "?" for one in text[: _LONGEST + 1])
    return shown if len(shown) <= _LONGEST else shown[: _LONGEST - 3] + "..."
