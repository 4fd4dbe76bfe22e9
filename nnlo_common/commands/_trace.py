"""`nnlo trace`: merge the traces of a run's ranks into one, with the arrows that have both ends."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._file_access import RANKS, readable_file, usable, whole_file
from nnlo_common.base._limited_formats import parsed_json
from nnlo_common.commands.train._job import REFUSED, tell
from nnlo_common.training.report._trace_file import OLDER

__all__ = ["backwards_ms", "merged", "run_trace"]

# -- events of all ranks of a run in one trace ---------------------------------------------------------

_LONGEST = 1 << 16  # no event of ours is as long
_NAMES = ("id", "name", "pid", "tid")  # by which events are told apart


def merged(folder: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the events of all ranks in a run's folder, and how many arrows had one end only.

    An arrow whose other end is missing is dropped: its message was under way when a rank was killed, or the
    other rank's trace no longer has it.

    Raises:
        ConfigurationError: there is no trace, or one is damaged.
    """
    paths = sorted(_files(folder))
    if not paths:
        raise ConfigurationError(
            f"{folder} has no timeline (ranks/timeline.rank0.json): train with --timeline, or with "
            "Report(..., timeline=True) in a script"
        )
    events: list[dict[str, Any]] = []
    ends: dict[Any, tuple[deque[dict[str, Any]], deque[dict[str, Any]]]]
    ends = defaultdict(lambda: (deque(), deque()))
    names: set[tuple[Any, ...]] = set()
    for path in paths:
        for event in _events(path):
            phase = event.get("ph")
            if phase in ("s", "f"):
                ends[event.get("id"), event.get("name")][phase == "f"].append(event)
            elif phase == "M":
                name = (event.get("pid"), event.get("tid"), event.get("name"))
                if name not in names:  # both halves of a trace have it
                    names.add(name)
                    events.append(event)
            else:
                events.append(event)
    dropped = 0
    for number, (starts, takes) in enumerate(ends.values()):
        dropped += abs(len(starts) - len(takes))
        # A number may come again, e.g. that of a second pause; the first end belongs to the first start.
        for turn, (start, taken) in enumerate(zip(_in_time(starts), _in_time(takes), strict=False)):
            own = {"id": number + turn * len(ends)}
            events += [start | own, taken | own]
    return events, dropped


def backwards_ms(events: Sequence[Mapping[str, Any]]) -> float:
    """Return by how much arrows go back in time at most: the least by which clocks of hosts differ."""
    begins = {event["id"]: _time(event) for event in events if event.get("ph") == "s"}
    back = (begins[event["id"]] - _time(event) for event in events if event.get("ph") == "f")
    return max(0.0, max(back, default=0.0) / 1e3)


def _files(folder: Path) -> Iterator[Path]:
    for path in (folder / RANKS).glob("timeline.rank*.json"):
        number = path.name.removeprefix("timeline.rank").removesuffix(".json").removesuffix(f".{OLDER}")
        if number.isdecimal():
            yield path


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a file, each in a line; the last one may be cut off, where a disk was full."""
    try:
        with readable_file(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(_LONGEST), b""), 1):
                text = line.strip().strip(b",")
                if text in (b"[", b"]", b""):
                    continue
                event = _parsed(path, number, text.removeprefix(b"["))
                if event is not None:
                    yield event
    except OSError as error:
        raise ConfigurationError(f"{path}: {error}") from None


def _parsed(path: Path, number: int, text: bytes) -> dict[str, Any] | None:
    try:
        found = parsed_json(text)
    except ValueError as error:
        if not text.endswith(b"}"):
            return None
        raise ConfigurationError(f"{path}, line {number}: {error}; remove that line") from None
    if not isinstance(found, Mapping) or any(isinstance(found.get(name), list | dict) for name in _NAMES):
        raise ConfigurationError(f"{path}, line {number}: is no event; remove that line")
    return dict(found)


def _in_time(ends: deque[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(ends, key=_time)


def _time(event: Mapping[str, Any]) -> float:
    found = event.get("ts")
    return float(found) if isinstance(found, int | float) else 0.0


_TRACE = "trace.json"
#: Clocks of hosts are compared at the start to within about this.
_CLOSE_MS = 1.0


def run_trace(run: str, output: str | None = None) -> int:
    """Write one trace of a run; return the exit status.

    Args:
        run: its folder.
        output: the file to write; None: trace.json in that folder.
    """
    try:
        path = Path(run) / _TRACE if output is None else Path(output)
        events, dropped = merged(Path(run))
        with whole_file(usable(str(path), path)) as file:
            file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
            for number, event in enumerate(events):
                text = json.dumps(event, separators=(",", ":"))
                file.write(f"{',' if number else ''}{text}\n".encode())
            file.write(b"]}\n")
    except ConfigurationError as error:
        tell(str(error), "trace")
        return REFUSED
    ranks = {event.get("pid") for event in events}
    lost = f", without {dropped} messages whose other end is missing" if dropped else ""
    print(f"nnlo trace: {path}, {len(events)} events of {len(ranks)} ranks{lost}")
    if (back_ms := backwards_ms(events)) > _CLOSE_MS:
        print(
            f"arrows go back in time by up to {back_ms:.1f} ms: the clocks of the hosts have drifted apart "
            "since the start"
        )
    print("open it with https://ui.perfetto.dev, which keeps it on this computer, or chrome://tracing")
    return 0
