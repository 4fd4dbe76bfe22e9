"""Live table: what the ranks of a run do now, drawn by rich."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from nnlo_common.base._errors import MissingExtraError
from nnlo_common.training.report._course import duration, in_order, spaced
from nnlo_common.training.report._live_ranks import LiveRank, LiveRun

__all__ = ["Screen", "alarms", "is_live", "live_table", "rich_module", "silence_s", "summary", "table"]

# -- alarms: what is wrong with a running training, in words -------------------------------------------

#: Seconds for which a rank may show no sign of life; those for which it may make no step, which may also be
#: so many times its longest break between two steps.
_SILENT_S, _STILL_S, _TIMES = 30.0, 60.0, 3.0
#: A worker with less than this share of the others' samples is behind, and so does not wait for them.
_BEHIND = 0.9
#: The share of a core that a server uses when it is at its limit.
_BUSY = 0.9
_MOST = 10


def alarms(run: LiveRun) -> list[str]:
    """Return what is wrong, the most important first; nothing for a run in good order.

    Args:
        run: what its ranks do now.
    """
    if run.ended:
        return [f"{line}" for one in run.ranks for line in _lost(one)]
    found = [line for one in run.ranks for line in _lost(one)]
    found += [*_silent(run), *_diverging(run), *_busy(run)]
    found += [f"a file cannot be read: {line}" for line in run.unreadable]
    return found[:_MOST] + ([f"and {len(found) - _MOST} more"] if len(found) > _MOST else [])


def silence_s(run: LiveRun, rank: LiveRank) -> float:
    """Return the seconds since a rank's last sign of life, by the clocks of its host and of this one."""
    return max(run.now_s - rank.time_s, 0.0)


def _lost(rank: LiveRank) -> Iterator[str]:
    for line in rank.lost:
        yield f"lost: {line}"


def _silent(run: LiveRun) -> Iterator[str]:
    """Tell of ranks that are gone."""
    there = [one for one in run.ranks if not one.ended]
    silent = [one for one in there if silence_s(run, one) > _SILENT_S]
    if silent and len(silent) == len(there):
        least = min(silence_s(run, one) for one in silent)
        yield f"stalled: no rank has shown a sign of life for {duration(least)}; the job may be dead"
        return
    for one in silent:
        yield f"stalled: {_name(one)} has shown no sign of life for {duration(silence_s(run, one))}"
    yield from _still(run, [one for one in there if one not in silent and not one.followed])


def _still(run: LiveRun, there: list[LiveRank]) -> Iterator[str]:
    """Tell of ranks that live and make no steps; a worker that is ahead may wait for the others."""
    still = [one for one in there if _rest_s(run, one) > max(_STILL_S, _TIMES * one.longest_s)]
    if still and len(still) == len(there):
        least = min(_rest_s(run, one) for one in still)
        yield f"stalled: no rank has made a step for {duration(least)}, though all live"
        return
    most = median([one.samples for one in run.ranks if not one.serves] or [0])
    for one in still:
        if not one.serves and one.samples < _BEHIND * most:
            yield f"stalled: {_name(one)} lives, but has made no step for {duration(_rest_s(run, one))}"


def _rest_s(run: LiveRun, rank: LiveRank) -> float:
    return max(run.now_s - rank.moved_s, 0.0)


def _diverging(run: LiveRun) -> Iterator[str]:
    advice = "lower the learning rate, or let workers exchange more often"
    for one in run.ranks:
        if "loss" not in one.scores or one.ended:
            continue
        loss, first = one.scores["loss"], one.first_loss
        if loss is None:
            yield f"diverging: the loss of {_name(one)} is no finite number; {advice}"
        elif first is not None and loss > first + abs(first):
            yield f"diverging: the loss of {_name(one)} is {loss:.4g}, and was {first:.4g} at first; {advice}"


def _busy(run: LiveRun) -> Iterator[str]:
    workers = sum(not one.serves for one in run.ranks)
    for one in run.ranks:
        if (
            one.serves
            and not one.ended
            and workers > 1
            and one.cpu_share is not None
            and one.cpu_share > _BUSY
        ):
            yield (
                f"busy: {_name(one)} uses {100 * one.cpu_share:.0f} % of a core, so workers may wait for it; "
                "use more servers, a larger every, or groups of ranks"
            )


def _name(rank: LiveRank) -> str:
    return f"{rank.role} (rank {rank.rank}{' on ' if rank.host else ''}{rank.host})"


# -- terminal: lines that may change, and a table of results -------------------------------------------


class Screen:
    """Lines on a terminal; the last one may still change.

    Args:
        stream: the output; None: standard output.
        live: lines may change; otherwise only final lines are written.
    """

    def __init__(self, stream: TextIO | None = None, *, live: bool) -> None:
        self._stream, self._live, self._shown = stream, live, 0

    def show(self, line: str) -> None:
        """Write a line that the next one replaces."""
        if self._live:
            self._write(line, "")

    def settle(self, line: str) -> None:
        """Write a line that stays."""
        self._write(line, "\n")

    def _write(self, line: str, end: str) -> None:
        stream = sys.stdout if self._stream is None else self._stream
        padded = f"\r{line.ljust(self._shown)}" if self._shown else line
        self._shown = len(line) if not end else 0
        stream.write(padded + end)
        stream.flush()


def is_live(env: Mapping[str, str] = os.environ, stream: TextIO | None = None) -> bool:
    """Return whether output goes to an interactive terminal, not to a batch job or test run.

    Open MPI gives its ranks a terminal even if the output goes to a file, so check other signs, too.
    """
    if "OMPI_COMM_WORLD_RANK" in env and not _launcher_shows():
        return False
    stream = sys.stdout if stream is None else stream
    batch = ("CI", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
    return stream.isatty() and env.get("TERM", "dumb") != "dumb" and not any(map(env.get, batch))


def _launcher_shows() -> bool:
    """Return whether the launcher, which forwards the output, writes to a terminal; True if unknown."""
    try:
        return str(Path(f"/proc/{os.getppid()}/fd/1").readlink()).startswith(("/dev/pts", "/dev/tty"))
    except OSError:  # another user's, or no Linux
        return True


def table(rows: Mapping[str, str]) -> str:
    """Return names and values in two columns.

    Example:
        >>> print(table({"time": "2.1 s", "samples": "16 000"}))
        time      2.1 s
        samples  16 000
    """
    names, values = max(map(len, rows), default=0), max(map(len, rows.values()), default=0)
    return "\n".join(f"{name.ljust(names)}  {value.rjust(values)}" for name, value in rows.items())


_HEADS = ("rank", "role", "host", "epoch", "samples/s", "loss", "staleness", "left", "last step", "last sign")
_TEXTS = 3  # so many columns are texts, the others numbers


def rich_module(feature: str) -> Any:
    """Return rich.

    Args:
        feature: what needs it.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import rich
        import rich.console
        import rich.live
        import rich.table
        import rich.text
    except ImportError:
        raise MissingExtraError(feature, "rich", "report") from None
    return rich


def live_table(run: LiveRun, most: int | None = None) -> Any:
    """Return the table of a run with its alarms, for rich to print.

    Args:
        run: what its ranks do now.
        most: how many ranks to show at most, the most silent ones; None: all.
    """
    rich = rich_module("a table of a run")
    table = rich.table.Table(box=None, pad_edge=False, expand=False)
    for number, head in enumerate(_HEADS):
        table.add_column(head, justify="left" if 0 < number < _TEXTS else "right", no_wrap=True)
    shown = [*run.ranks]
    if most is not None and len(shown) > most:
        worst = sorted(shown, key=lambda one: (one.ended, -silence_s(run, one)))[:most]
        shown = [one for one in shown if one in worst]
    for one in shown:
        table.add_row(*(rich.text.Text(cell) for cell in _cells(run, one)))
    parts: list[Any] = [rich.text.Text(summary(run), style="bold", overflow="fold"), table]
    if len(shown) < len(run.ranks):
        parts.append(rich.text.Text(f"and {len(run.ranks) - len(shown)} more ranks"))
    parts += [rich.text.Text(line, style="red") for line in alarms(run)]
    return rich.console.Group(*parts)


def summary(run: LiveRun) -> str:
    """Return a run in one line: how far, how fast, how good, how long still.

    Example:
        >>> from pathlib import Path
        >>> facts = {"epoch": 2, "epochs": 3, "share": 0.5, "rate": 40, "left_s": 65}
        >>> rank = LiveRank(rank=0, role="alone", time_s=9, moved_s=9, **facts)
        >>> summary(LiveRun(folder=Path("runs/net-1"), now_s=10, ranks=[rank]))
        'net-1  epoch 2/3  50 %  40 samples/s  1:05 left'
    """
    center, parts = run.center, [run.folder.resolve().name]
    if center is not None:
        of = "" if center.epochs is None else f"/{center.epochs}"
        parts.append(f"epoch {center.epoch}{of}")
        if center.share is not None:
            parts.append(f"{100 * center.share:.0f} %")
    if run.ended:
        parts.append("complete" if run.complete else "ended")
    else:
        parts.append(f"{spaced(run.rate)} samples/s")
    scores = run.scores
    parts += [f"{name} {_score(scores[name])}" for name in in_order(scores)]
    if center is not None and not run.ended:
        if center.staleness is not None:
            parts.append(f"staleness {center.staleness:.2f}")
        if center.left_s is not None:
            parts.append(f"{duration(center.left_s)} left")
    return "  ".join(parts)


def _cells(run: LiveRun, one: LiveRank) -> tuple[str, ...]:
    of = "" if one.epochs is None else f"/{one.epochs}"
    done = "" if one.share is None else f" {100 * one.share:.0f} %"
    return (
        str(one.rank),
        one.role,
        one.host,
        f"{one.epoch}{of}{done}",
        spaced(one.rate) if not one.ended else "",
        _score(one.scores["loss"]) if "loss" in one.scores else "",
        "" if one.staleness is None else f"{one.staleness:.2f}",
        "" if one.left_s is None or one.ended else duration(one.left_s),
        "" if one.ended else duration(run.now_s - one.moved_s),
        "ended" if one.ended else duration(silence_s(run, one)),
    )


def _score(value: float | None) -> str:
    return "nan" if value is None else f"{value:.4g}"
