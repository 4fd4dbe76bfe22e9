"""Checks of traces by the rules of the trace event format."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

PHASES = {"X", "M", "C", "s", "f"}

#: Self times by process and kind: the duration of each span less those of the spans right within it.
SELF_TIMES = """
WITH inside AS (
  SELECT one.id, one.pid, one.cat, one.dur, (
    SELECT around.id FROM span AS around
    WHERE around.pid = one.pid AND around.tid = one.tid AND around.id != one.id
      AND around.ts <= one.ts AND around.ts + around.dur >= one.ts + one.dur
      AND (around.dur > one.dur OR around.id > one.id)
    ORDER BY around.dur, around.id LIMIT 1
  ) AS parent
  FROM span AS one WHERE one.tid = 0
)
SELECT inside.pid, inside.cat, SUM(inside.dur - COALESCE(
  (SELECT SUM(child.dur) FROM inside AS child WHERE child.parent = inside.id), 0))
FROM inside GROUP BY inside.pid, inside.cat
"""


def problems_in(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what breaks a rule: fields, spans that overlap without nesting, arrows with one end."""
    found = []
    tracks: dict[tuple[int, int], list[Mapping[str, Any]]] = defaultdict(list)
    arrows: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        needed = {"name", "ph", "pid", "tid"} | ({"ts"} if event["ph"] != "M" else set())
        needed |= {"X": {"dur"}, "C": {"args"}, "M": {"args"}, "s": {"id", "cat"}, "f": {"id", "cat", "bp"}}[
            event["ph"]
        ]
        if event["ph"] not in PHASES or not needed <= event.keys() or event.get("dur", 0) < 0:
            found.append(f"{event} lacks something")
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
        if event["ph"] in "sf":
            arrows[event["id"]].append(event)
    for track, spans in tracks.items():
        open_spans: list[Mapping[str, Any]] = []
        for one in sorted(spans, key=lambda one: (one["ts"], -one["dur"])):
            while open_spans and open_spans[-1]["ts"] + open_spans[-1]["dur"] <= one["ts"]:
                open_spans.pop()
            if open_spans and open_spans[-1]["ts"] + open_spans[-1]["dur"] < one["ts"] + one["dur"]:
                found.append(f"{one} on {track} overlaps {open_spans[-1]}")
            open_spans.append(one)
    for number, ends in arrows.items():
        phases = sorted(one["ph"] for one in ends)
        if phases != ["f", "s"] or len({(one["name"], one["cat"]) for one in ends}) > 1:
            found.append(f"arrow {number} has the ends {ends}")
        for one in ends:
            around = tracks[one["pid"], one["tid"]]
            if not any(span["ts"] <= one["ts"] <= span["ts"] + span["dur"] for span in around):
                found.append(f"{one} is in no span")
    return found


def backwards_s(events: Sequence[Mapping[str, Any]]) -> float:
    """Return by how much the arrows go backwards in time at most; below 0 if none does."""
    begins = {one["id"]: one["ts"] for one in events if one["ph"] == "s"}
    return max((begins[one["id"]] - one["ts"]) / 1e6 for one in events if one["ph"] == "f")


def self_times(events: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, float]]:
    """Return the seconds by kind of each process's first thread, worked out by SQLite."""
    spans = [
        (one["pid"], one["tid"], one["cat"], one["ts"], one["dur"]) for one in events if one["ph"] == "X"
    ]
    times: dict[int, dict[str, float]] = defaultdict(dict)
    with sqlite3.connect(":memory:") as database:
        database.execute("CREATE TABLE span (id INTEGER PRIMARY KEY, pid, tid, cat, ts, dur)")
        database.executemany("INSERT INTO span (pid, tid, cat, ts, dur) VALUES (?, ?, ?, ?, ?)", spans)
        database.execute("CREATE INDEX by_time ON span (pid, tid, ts)")
        for pid, kind, micros in database.execute(SELF_TIMES):
            times[pid][kind] = micros / 1e6
    database.close()
    return times
