"""`nnlo trace`: one trace from those of all ranks."""

from __future__ import annotations

import json
import re

import pytest

from nnlo_common.base._spans import Finished
from nnlo_common.commands._cli import main
from nnlo_common.training.report._trace_file import Trace, trace_path
from tests.helpers.traces import problems_in


def message(rank, begin_s, **facts):
    return Finished("main", "send" if "sends" in facts else "apply", "PUSH", begin_s, begin_s + 1, facts)


def write(folder):
    """Two ranks: rank 1 sends the messages 3, 5 and twice 7, rank 0 has taken all but 5, and one more."""
    for rank, what, numbers in ((0, "takes", (7, 3, 7, 9)), (1, "sends", (3, 5, 7, 7))):
        trace = Trace(trace_path(folder, rank), rank, f"rank {rank}")
        for place, number in enumerate(numbers):
            trace.add(message(rank, 10.0 * rank + 2 * place, **{what: (1 - rank, 0, "PUSH", number)}))
        trace.count("queue", 1.0)
        trace.flush()


def merged_in(folder):
    assert main(["trace", str(folder)]) == 0
    return json.loads((folder / "trace.json").read_text())["traceEvents"]


def test_arrows_keep_both_ends_and_those_with_one_are_dropped(tmp_path, capsys):
    write(tmp_path)  # rank 1 sends the first 7 at 14 s, and rank 0 has taken it at 0 s
    events = merged_in(tmp_path)
    told = capsys.readouterr().out
    assert "20 events of 2 ranks, without 2 messages whose other end is missing" in told
    assert re.search(
        r"arrows go back in time by up to (1399|1400)\d\.\d ms: the clocks of the hosts have", told
    )
    assert problems_in(events) == []
    arrows = {}
    for event in events:
        if event["ph"] in "sf":
            arrows.setdefault(event["id"], {})[event["ph"]] = event["ts"]
    assert len(arrows) == 3
    assert all(ends.keys() == {"s", "f"} for ends in arrows.values())


def test_a_file_that_was_cut_off_is_read_to_there(tmp_path):
    write(tmp_path)
    whole = len(merged_in(tmp_path))
    path = trace_path(tmp_path, 0)
    path.write_text(path.read_text().rstrip()[:-20])
    assert whole - 3 <= len(merged_in(tmp_path)) < whole


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "has no timeline (ranks/timeline.rank0.json): train with --timeline"),
        ('[\n{"a": 1]}\n]\n', "timeline.rank0.json, line 2: "),
        ("[\n3}\n]\n", "timeline.rank0.json, line 2: "),
        ('[\n{"ph": "s", "id": [1]}\n]\n', "timeline.rank0.json, line 2: is no event"),
        ('[\n{"ph": "X", "pid": {}}\n]\n', "timeline.rank0.json, line 2: is no event"),
    ],
)
def test_what_is_no_timeline_is_refused(content, expected, tmp_path, capsys):
    if content is not None:
        trace_path(tmp_path, 0).parent.mkdir()
        trace_path(tmp_path, 0).write_text(content)
    assert main(["trace", str(tmp_path)]) == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "trace.json").exists()
