"""Alarms: what is wrong with a running training, in words."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from nnlo_common.training.report._course import duration
from nnlo_common.training.report._live_ranks import LiveRank, LiveRun

__all__ = ["alarms", "silence_s"]

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
