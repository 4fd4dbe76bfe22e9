"""Spans of a thread's time by kind; every layer marks them, and one recorder for each thread adds them up.

    with span("wait", "the answer to MeanQuery"):
        ...

costs a look-up while no recorder is on. A span may lie within another: each moment counts once, as the kind
of the innermost one, so that the times by kind add up to the time since the recorder was switched on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self, TypeAlias

__all__ = [
    "Finished",
    "KINDS",
    "STAGES",
    "Sink",
    "Span",
    "SpanKind",
    "Spans",
    "StageKind",
    "record",
    "recorder",
    "span",
    "stage",
]

SpanKind: TypeAlias = Literal[
    "compute", "wait", "pack", "send", "receive", "apply", "read", "checkpoint", "validate", "idle"
]

#: Stages of reading, within "read" and in the threads that read ahead: waiting for the file, decoding, the
#: user's function, and mixing.
STAGES: tuple[str, ...] = ("disk", "decode", "adapt", "mix")
#: What is marked: "fetch" is both "disk" and "decode", told apart by the processor time of the thread.
StageKind: TypeAlias = Literal["fetch", "adapt", "mix"]

#: The kinds, in the order in which a figure stacks them. "compute" is also all that nothing else has marked.
KINDS: tuple[SpanKind, ...] = (
    "compute",
    "wait",
    "pack",
    "send",
    "receive",
    "apply",
    "read",
    "checkpoint",
    "validate",
    "idle",
)


class Finished(NamedTuple):
    """A span that has ended.

    Attributes:
        track: names its thread.
        kind: of the time.
        name: what was done.
        begin_s: its begin, in seconds of the clock.
        end_s: its end.
        facts: further facts: a message that it "sends" or "takes".
    """

    track: str
    kind: SpanKind
    name: str
    begin_s: float
    end_s: float
    facts: Mapping[str, Any]


#: Receives each span when it has ended.
Sink: TypeAlias = Callable[[Finished], object]

_HERE = threading.local()
# Between two spans; shorter pieces of computing get no event of their own.
_SHORTEST_S = 20e-6
_NOTHING: Mapping[str, Any] = {}
_SCHEDULED = Path("/proc/thread-self/schedstat")


class Spans:
    """Recorder of one thread's spans.

    Args:
        sink: receives each finished span, for a trace; None: only add up.
        track: the name of this thread in a trace.
        clock: returns the time in seconds.

    Attributes:
        began_s: when it was made.
        stages: seconds by stage of reading, also of threads that read ahead.
        reading: facts about what is read, for advice.

    Example:
        >>> ticks = iter([0.0, 3.0, 5.0, 6.0, 10.0])
        >>> spans = Spans(clock=lambda: next(ticks))
        >>> spans.begin("validate")
        >>> spans.begin("wait")
        >>> spans.end("wait"), spans.end("validate")
        (None, None)
        >>> [spans.spent(10.0)[kind] for kind in ("compute", "validate", "wait")]
        [3.0, 6.0, 1.0]
    """

    def __init__(
        self,
        sink: Sink | None = None,
        *,
        track: str = "main",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.sink, self.track, self._clock = sink, track, clock
        self._spent: dict[SpanKind, float] = dict.fromkeys(KINDS, 0.0)
        self._around: list[tuple[SpanKind, float]] = []  # the open spans, with their begins
        self._kind: SpanKind = "compute"
        self.stages: dict[str, float] = dict.fromkeys(STAGES, 0.0)
        self.reading: dict[str, float | str] = {}
        self.began_s = self._since = self._bare_since = clock()

    def begin(self, kind: SpanKind) -> None:
        """Begin a span within the one that is open."""
        now_s = self._clock()
        self._spent[self._kind] += now_s - self._since
        if self.sink is not None and not self._around:
            self._add_bare(now_s)
        self._around.append((self._kind, now_s))
        self._kind, self._since = kind, now_s

    def end(self, name: str, facts: Mapping[str, Any] = _NOTHING) -> None:
        """End the span that was begun last."""
        now_s = self._clock()
        kind = self._kind
        self._spent[kind] += now_s - self._since
        self._kind, begin_s = self._around.pop()
        self._since = now_s
        if self.sink is not None:
            self.sink(Finished(self.track, kind, name, begin_s, now_s, facts))
            if not self._around:
                self._bare_since = now_s

    def cut(self) -> float:
        """End the piece of computing that is under way, so that an epoch ends between two events."""
        now_s = self._clock()
        if self.sink is not None and not self._around:
            self._add_bare(now_s)
            self._bare_since = now_s
        return now_s

    def spent(self, until_s: float | None = None) -> dict[SpanKind, float]:
        """Return the seconds by kind; another thread may call it, too, and sees about the same.

        Args:
            until_s: up to this moment, which no span has passed; None: now.
        """
        found, kind, since_s = dict(self._spent), self._kind, self._since
        found[kind] += max(0.0, (self._clock() if until_s is None else until_s) - since_s)
        return found

    def beside(self, track: str) -> Spans:
        """Return a recorder for another thread that does a part of this one's work."""
        other = Spans(self.sink, track=track, clock=self._clock)
        other.stages, other.reading = self.stages, self.reading
        return other

    def now_s(self) -> float:
        """Return the time of its clock."""
        return self._clock()

    def _add_bare(self, now_s: float) -> None:
        if self.sink is not None and now_s - self._bare_since >= _SHORTEST_S:
            self.sink(Finished(self.track, "compute", "compute", self._bare_since, now_s, _NOTHING))


class Span:
    """A span of this thread.

    Args:
        spans: the thread's recorder.
        kind: of the time.
        name: for a trace.

    Attributes:
        facts: for a trace; may be set until it ends.
    """

    __slots__ = ("_kind", "_name", "_spans", "facts")

    def __init__(self, spans: Spans, kind: SpanKind, name: str) -> None:
        self._spans, self._kind, self._name = spans, kind, name
        self.facts: Mapping[str, Any] = _NOTHING

    def __enter__(self) -> Self:
        self._spans.begin(self._kind)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._spans.end(self._name, self.facts)


class _Off:
    """A span that nobody records."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


_OFF = _Off()


def span(kind: SpanKind, name: str = "") -> Span | _Off:
    """Return a span of this thread for a `with` block, which gets None while no recorder is on.

    Args:
        kind: of the time.
        name: for a trace; empty: the kind.

    Example:
        >>> with span("read"):
        ...     samples = [1, 2, 3]
    """
    spans: Spans | None = getattr(_HERE, "spans", None)
    return _OFF if spans is None else Span(spans, kind, name or kind)


class _Stage:
    """A stage of reading, in this thread."""

    __slots__ = ("_cpu_s", "_kind", "_queued_s", "_spans", "_wall_s")

    def __init__(self, spans: Spans, kind: StageKind) -> None:
        self._spans, self._kind = spans, kind

    def __enter__(self) -> None:
        if self._kind == "fetch":
            self._cpu_s, self._queued_s = time.thread_time(), _queued_s()
        self._wall_s = self._spans.now_s()

    def __exit__(self, *_: object) -> None:
        seconds = self._spans.now_s() - self._wall_s
        stages = self._spans.stages
        if self._kind == "fetch":
            computed_s = min(time.thread_time() - self._cpu_s, seconds)
            stages["decode"] += computed_s
            # Waiting for a core is no fault of the disk: the report has a verdict of its own on that.
            stages["disk"] += max(0.0, seconds - computed_s - (_queued_s() - self._queued_s))
        else:
            stages[self._kind] += seconds


def _queued_s() -> float:
    """Return how long this thread has waited for a core; 0: unknown."""
    try:
        return int(_SCHEDULED.read_bytes().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):  # no Linux, or no descriptor is left
        return 0.0


def stage(kind: StageKind) -> _Stage | _Off:
    """Return a stage of reading for a `with` block."""
    spans: Spans | None = getattr(_HERE, "spans", None)
    return _OFF if spans is None else _Stage(spans, kind)


def recorder() -> Spans | None:
    """Return this thread's recorder, if one is on."""
    found: Spans | None = getattr(_HERE, "spans", None)
    return found


def record(spans: Spans | None) -> None:
    """Record this thread's spans from now on; None: no longer."""
    _HERE.spans = spans
