"""Shares of a rank's time, from the timeline that it has written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

__all__ = ["TimeShares", "time_shares"]

#: The kinds of time, in the order in which a figure stacks them.
KINDS = ("computing", "exchanging", "serving", "validating", "waiting", "other")
_COMPUTED = ("batch", "step")
_EXCHANGED = ("exchange", "begin epoch", "end epoch", "ask", "join", "leave")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeShares:
    """Where the time of a rank went.

    Attributes:
        seconds: by kind, see `KINDS`; "waiting" is for other ranks.
        batch_s: the median time of a batch: its data and its gradient; None: this rank has computed none.
    """

    seconds: Mapping[str, float]
    batch_s: float | None

    @property
    def total_s(self) -> float:
        """All of it."""
        return sum(self.seconds.values())

    def share(self, kind: str) -> float:
        """Return the part of the time that went into a kind, from 0 to 1."""
        return self.seconds.get(kind, 0.0) / self.total_s if self.total_s else 0.0


@dataclass(slots=True)
class _Span:
    name: str
    begin: float
    end: float
    own: float  # without the spans within it
    waited: float
    inner: list[_Span] = field(default_factory=list)


def time_shares(events: Sequence[Any]) -> TimeShares:
    """Return the shares of one rank's time.

    An event within another counts once, as what it is.

    Args:
        events: of a timeline, as its file has them.

    Raises:
        ValueError: they are not those of a timeline.

    Example:
        >>> batch = {"name": "batch", "ph": "X", "ts": 0.0, "dur": 3e6}
        >>> exchange = {"name": "exchange", "ph": "X", "ts": 3e6, "dur": 1e6, "args": {"waited_ms": 900.0}}
        >>> time_shares([batch, exchange]).share("waiting")
        0.225
    """
    spans = sorted(map(_span, _complete(events)), key=lambda one: (one.begin, -one.end))
    around: list[_Span] = []
    for one in spans:
        while around and around[-1].end <= one.begin:
            around.pop()
        if around:
            around[-1].own -= min(one.end, around[-1].end) - one.begin
            around[-1].inner.append(one)
        around.append(one)
    seconds = dict.fromkeys(KINDS, 0.0)
    for one in spans:
        waited = min(max(0.0, one.waited - sum(inner.waited for inner in one.inner)), max(one.own, 0.0))
        seconds["waiting"] += waited
        seconds[_kind(one.name)] += max(one.own, 0.0) - waited
    batches = [one.end - one.begin for one in spans if one.name == "batch"]
    return TimeShares(seconds=seconds, batch_s=median(batches) if batches else None)


def _complete(events: Sequence[Any]) -> list[Mapping[str, Any]]:
    """Return the events that have a duration."""
    if not isinstance(events, list) or not all(isinstance(one, Mapping) for one in events):
        raise ValueError("is no list of events")
    return [one for one in events if one.get("ph") == "X"]


def _span(event: Mapping[str, Any]) -> _Span:
    facts = event.get("args", {})
    waited = facts.get("waited_ms", 0) if isinstance(facts, Mapping) else None
    numbers = event.get("ts"), event.get("dur"), waited
    if not all(isinstance(one, int | float) for one in numbers) or not isinstance(event.get("name"), str):
        raise ValueError(f"has an event that is none of a timeline: {event!s:.80}")
    begin_us, lasts_us, waited_ms = map(float, numbers)  # type: ignore[arg-type]
    end = (begin_us + lasts_us) / 1e6
    return _Span(event["name"], begin_us / 1e6, end, lasts_us / 1e6, waited_ms / 1e3)


def _kind(name: str) -> str:
    if name in _COMPUTED:
        return "computing"
    if name in _EXCHANGED:
        return "exchanging"
    return {"serve": "serving", "validation": "validating", "look": "validating"}.get(name, "other")
