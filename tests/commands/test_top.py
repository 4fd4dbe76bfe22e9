"""`nnlo top`: what it reads, when it raises an alarm, and the table it draws."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from nnlo_common import ConfigurationError
from nnlo_common.base._spans import KINDS
from nnlo_common.commands._cli import main
from nnlo_common.commands._top import _follow
from nnlo_common.training._rank_parts import TrainingReport
from nnlo_common.training.report._course import Course
from nnlo_common.training.report._facts_writer import FactsFile
from nnlo_common.training.report._live_ranks import LiveFile, LiveRank, LiveRun, read_live
from nnlo_common.training.report._live_table import alarms, live_table, rich_module, summary
from tests.helpers.paths import ROOT

NOW = 1000.0
A_MOMENT_S = 0.5
NEEDS_RICH = "the environment for MPICH has no rich"


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s

    def later(self, seconds):
        self.now_s += seconds


def rank(number, role, **facts):
    return LiveRank(rank=number, role=role, **{"host": "a", "time_s": NOW - 1, "moved_s": NOW - 2, **facts})


SERVER = rank(0, "server 0", cpu_share=0.3, epoch=2, epochs=5, share=0.25, staleness=1.5, left_s=65.0)
WORKERS = [
    rank(
        number,
        f"worker {number - 1}",
        rate=100.0 * number,
        samples=70,
        scores={"loss": 0.25 * number},
        first_loss=2.0,
    )
    for number in (1, 2, 3)
]


def run_of(*ranks, **facts):
    return LiveRun(folder=Path("runs/net-1"), now_s=NOW, ranks=ranks or [SERVER, *WORKERS], **facts)


def changed(worker, **facts):
    return [SERVER, *(replace(one, **facts) if one is worker else one for one in WORKERS)]


PLANTED = {
    "a silent worker": (
        changed(WORKERS[1], time_s=NOW - 31),
        r"^stalled: worker 1 \(rank 2 on a\) has shown no sign of life for 0:31$",
    ),
    "a dead job": (
        [replace(one, time_s=NOW - 100 - one.rank) for one in (SERVER, *WORKERS)],
        r"^stalled: no rank has shown a sign of life for 1:40; the job may be dead$",
    ),
    "a worker that hangs": (
        changed(WORKERS[1], moved_s=NOW - 61, samples=9),
        r"^stalled: worker 1 \(rank 2 on a\) lives, but has made no step for 1:01$",
    ),
    "a job that hangs": (
        [replace(one, moved_s=NOW - 70 - one.rank) for one in (SERVER, *WORKERS)],
        r"^stalled: no rank has made a step for 1:10, though all live$",
    ),
    "a lost rank": ([replace(SERVER, lost=["rank 2 on a died"]), *WORKERS], r"^lost: rank 2 on a died$"),
    "a loss that rises": (
        changed(WORKERS[0], scores={"loss": 4.1}),
        r"^diverging: the loss of worker 0 \(rank 1 on a\) is 4\.1, and was 2 at first; lower the learning",
    ),
    "a loss that is no number": (
        changed(WORKERS[2], scores={"loss": None}),
        r"^diverging: the loss of worker 2 .* is no finite number",
    ),
    "a server at its limit": (
        [replace(SERVER, cpu_share=0.97), *WORKERS],
        r"^busy: server 0 .* uses 97 % of a core, .* use more servers",
    ),
}


@pytest.mark.parametrize(("ranks", "expected"), PLANTED.values(), ids=PLANTED)
def test_a_planted_cause_is_the_only_alarm(ranks, expected):
    (told,) = alarms(run_of(*ranks))
    assert re.search(expected, told)


HEALTHY = {
    "as it should be": [SERVER, *WORKERS],
    "no longer break than before": changed(WORKERS[1], moved_s=NOW - 100, longest_s=40.0, samples=9),
    "a worker that waits for the others": changed(WORKERS[1], moved_s=NOW - 100),
    "a rank whose facts tell of no step": changed(
        WORKERS[1], followed=True, time_s=NOW - 29, moved_s=NOW - 99
    ),
    "a worker that has ended": changed(WORKERS[1], time_s=NOW - 100, ended=True),
    "a loss below 0": changed(WORKERS[1], first_loss=-5.0, scores={"loss": -1.0}),
    "one process": [rank(0, "alone", cpu_share=1.0)],
    "one worker": [replace(SERVER, cpu_share=1.0), WORKERS[0]],
}


@pytest.mark.parametrize("ranks", HEALTHY.values(), ids=HEALTHY)
def test_a_healthy_run_has_no_alarm(ranks):
    assert alarms(run_of(*ranks)) == []


def test_a_run_in_one_line_has_the_rate_of_all_workers_and_their_mean_loss():
    told = summary(run_of())
    assert told == "net-1  epoch 2/5  25 %  600 samples/s  loss 0.5  staleness 1.50  1:05 left"
    assert "loss nan" in summary(run_of(*changed(WORKERS[0], scores={"loss": None})))
    assert "complete" in summary(run_of(complete=True))


def test_what_a_rank_writes_is_read_again(tmp_path):
    clock, wall = Clock(), Clock()
    wall.later(NOW)
    live = LiveFile(tmp_path, 3, "worker 2", "b", clock=clock, wall=wall)
    course = Course(epochs=5, samples=700, clock=clock)
    for seconds, samples in ((3.0, 30), (7.0, 135)):
        clock.later(seconds)
        wall.later(seconds)
        report = TrainingReport(samples=samples, exchanges=4, mean_staleness=0.5)
        live.note(course.now(report), report, {"loss": 30.0 / samples, "bad": float("nan")})
        live.write()
    clock.later(5.0)
    wall.later(5.0)
    live.note(course.now(report), report, {"loss": 30.0 / samples, "bad": float("nan")})  # it waits
    live.write()
    (found,) = read_live(tmp_path).ranks
    assert (found.rank, found.role, found.host, found.ended) == (3, "worker 2", "b", False)
    assert (found.time_s, found.moved_s, found.longest_s) == (NOW + 15, NOW + 10, 7.0)
    assert (found.epoch, found.epochs, found.share) == (1, 5, pytest.approx(135 / 700))
    assert (found.samples, found.rate) == (135, 0.0)
    assert found.left_s == pytest.approx(15 / (135 / 700) * (5 - 135 / 700))
    assert found.scores == {"loss": pytest.approx(2 / 9), "bad": None}
    assert (found.first_loss, found.staleness) == (1.0, 0.5)
    live.end()
    assert read_live(tmp_path).ended
    assert [one.name for one in (tmp_path / "ranks").iterdir()] == ["live.rank3.json"]


def test_the_rate_is_that_since_the_last_write(tmp_path):
    clock = Clock()
    live = LiveFile(tmp_path, 0, "alone", "a", clock=clock)
    for seconds, samples, rate in ((3.0, 30, 10.0), (7.0, 135, 15.0), (0.1, 136, 0.0), (1.9, 155, 10.0)):
        clock.later(seconds)
        live.note(Course().now(TrainingReport()), TrainingReport(samples=samples), {})
        live.write()
        assert read_live(tmp_path).ranks[0].rate == rate  # 0: too short a time to tell
    live.end()


def test_a_training_goes_on_where_its_live_file_cannot_be_written(tmp_path, caplog):
    live = LiveFile(tmp_path / "run", 0, "alone", "a")
    (tmp_path / "run/ranks").rmdir()
    for _ in range(2):
        live.write()
    live.end()
    (told,) = [one.getMessage() for one in caplog.records]
    assert re.search(r"live\.rank0\.json cannot be written \(.*: `nnlo top` does not see this rank$", told)


def test_facts_are_enough(tmp_path):
    lines = [
        {"what": "start", "time": NOW, "rank": 1, "role": "worker 0", "host": "b"},
        *({"what": "epoch", "time": NOW + 1, "epoch": one, "metrics": {"loss": 0.5}} for one in range(250)),
        {"what": "sample", "time": NOW + 3, "seconds": 3.0, "samples": 30, "mean_staleness": 1.5},
        {"what": "sample", "time": NOW + 10, "seconds": 10.0, "samples": 135, "mean_staleness": 1.25},
    ]
    path = tmp_path / "ranks/facts.rank1.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"what": "end", "ti')
    assert path.stat().st_size > 1 << 14  # only the begin and the end are read
    (found,) = read_live(tmp_path).ranks
    assert (found.role, found.host, found.ended, found.time_s) == ("worker 0", "b", False, NOW + 10)
    assert (found.epoch, found.samples, found.rate, found.staleness) == (251, 135, 15.0, 1.25)
    assert found.scores == {"loss": 0.5}
    with path.open("a") as file:
        file.write('me": 0}\n' + json.dumps({"what": "end", "time": NOW + 11}) + "\n")
    assert read_live(tmp_path).ended
    path.write_text("")
    assert not read_live(tmp_path).ranks


def test_after_the_first_epoch_the_facts_tell_of_the_second(tmp_path):
    facts = FactsFile(tmp_path, 0)
    facts.add("start", role="alone")
    for what, expected in (("sample", 1), ("epoch", 2)):
        facts.add(what, epoch=0, seconds=1.0, samples=10)
        assert [one.epoch for one in read_live(tmp_path).ranks] == [expected]


def test_facts_of_a_long_epoch_tell_of_the_epoch_before_and_of_the_role(tmp_path):
    facts = FactsFile(tmp_path, 0)
    facts.add("start", role="spare 3", config={"layers": ["dense"] * 10_000})
    facts.add("role", role="server 0")
    facts.add("epoch", epoch=4, metrics={"loss": 0.5})
    for second in range(100):
        facts.add("sample", seconds=float(second), samples=second, spent=dict.fromkeys(KINDS, 0.1))
    (found,) = read_live(tmp_path).ranks
    assert (found.epoch, found.role, found.scores) == (6, "server 0", {"loss": 0.5})
    assert (found.samples, found.rate) == (99, 1.0)


def test_files_that_cannot_be_read_are_named_and_hide_no_others(tmp_path):
    LiveFile(tmp_path, 0, "alone", "a").write()
    (tmp_path / "ranks/live.rank1.json").write_text('{"epoch": 1, "ti')
    (tmp_path / "ranks/live.rank2.json").write_text(json.dumps({"epoch": 1, "moved": 1, "time": "\x1b[2J"}))
    os.mkfifo(tmp_path / "ranks/live.rank4.json")
    (tmp_path / "ranks/live.rank5.json").write_text("[" * 70_000)
    (tmp_path / "ranks/live.rank1e3.json").write_text("")
    found = read_live(tmp_path)
    assert [one.rank for one in found.ranks] == [0]
    assert [one.partition(":")[0] for one in found.unreadable] == [f"live.rank{n}.json" for n in (1, 2, 4, 5)]
    assert len([one for one in alarms(found) if "cannot be read" in one]) == 4


def test_texts_of_others_do_not_change_the_terminal(tmp_path):
    rich_console = pytest.importorskip("rich.console", reason=NEEDS_RICH)
    told = {
        "epoch": 1,
        "time": 1,
        "moved": 1,
        "samples": 1,
        "role": "\x1b[2J[red]worker\n0",
        "host": "h" * 500,
    }
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks/live.rank0.json").write_text(json.dumps(told | {"scores": {"lo\x07ss": 1.0}}))
    console = rich_console.Console(width=200, record=True, file=io.StringIO())
    console.print(live_table(read_live(tmp_path)))
    text = console.export_text()
    assert "?[2J[red]worker?0" in text
    assert "\x1b" not in text
    assert "\x07" not in text


def test_only_the_most_silent_ranks_are_shown_where_there_is_little_room():
    rich_console = pytest.importorskip("rich.console", reason=NEEDS_RICH)
    console = rich_console.Console(width=120, record=True, file=io.StringIO())
    console.print(live_table(run_of(*changed(WORKERS[1], time_s=NOW - 9)), most=1))
    text = console.export_text()
    assert "worker 1" in text
    assert "0:09" in text
    assert "and 3 more ranks" in text


# -- the command ---------------------------------------------------------------------------------------


def planted(folder):
    for one, role in enumerate(("server 0", "worker 0", "worker 1")):
        live = LiveFile(folder, one, role, f"host-{one}")
        report = TrainingReport(samples=350, exchanges=7, mean_staleness=1.25)
        live.note(Course(epochs=3, samples=700).now(report), report, {"loss": 0.5} if one else {})
        live.write()


def test_once_prints_a_table_and_changes_nothing(tmp_path, capsys):
    pytest.importorskip("rich", reason=NEEDS_RICH)
    folder = tmp_path / "net-1"
    planted(folder)
    before = {one.name: one.read_bytes() for one in folder.rglob("*.*")}
    assert main(["top", str(folder), "--once"]) == 0
    head, columns, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith("net-1  epoch 1/3  50 %")
    heads = ["rank", "role", "host", "epoch", "samples/s", "loss", "staleness", "left"]
    heads += ["last", "step", "last", "sign"]
    assert columns.split() == heads
    assert [row.split()[:4] for row in rows] == [
        ["0", "server", "0", "host-0"],
        ["1", "worker", "0", "host-1"],
        ["2", "worker", "1", "host-2"],
    ]
    assert {one.name: one.read_bytes() for one in folder.rglob("*.*")} == before


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda folder: folder.rmdir(), "there is no such folder"),
        (lambda folder: None, "no rank has written"),
    ],
    ids=["no folder", "an empty folder"],
)
def test_what_is_no_run_is_refused(make, told, tmp_path, capsys):
    pytest.importorskip("rich", reason=NEEDS_RICH)
    folder = tmp_path / "run"
    folder.mkdir()
    make(folder)
    assert main(["top", str(folder)]) == 2
    assert re.search(f"^nnlo top: .*{told}", capsys.readouterr().err)


def test_a_missing_package_is_named_with_its_pip_line(tmp_path, capsys, monkeypatch):
    planted(tmp_path)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert main(["top", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "nnlo top needs the package 'rich'" in error
    assert "pip install 'nnlo[report]'" in error


@pytest.mark.extended
def test_on_a_terminal_the_table_follows_the_run_to_its_end(tmp_path):
    pytest.importorskip("rich", reason=NEEDS_RICH)
    planted(tmp_path)
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "110", "LINES": "30", "NO_COLOR": "1"}
    words = [sys.executable, "-c", "import sys; from nnlo_common.commands._cli import main; sys.exit(main())"]
    shown = b""
    with subprocess.Popen(
        [*words, "top", str(tmp_path), "--every", "0.1"],
        stdout=follower, stderr=follower, stdin=subprocess.DEVNULL, env=environment, cwd=ROOT,
    ) as command:  # fmt: skip
        os.close(follower)
        while b"host-2" not in shown:
            shown += os.read(leader, 4096)
        assert command.poll() is None  # it follows
        (tmp_path / "history.json").write_text("{}")
        while True:
            try:
                more = os.read(leader, 4096)
            except OSError:  # the end of a terminal
                break
            if not more:
                break
            shown += more
        assert command.wait() == 0
    os.close(leader)
    assert b"50 %" in shown
    assert b"\x1b[" in shown  # drawn in place
    assert b"complete" in shown


def test_a_folder_that_is_removed_ends_the_table(tmp_path):
    rich_console = pytest.importorskip("rich.console", reason=NEEDS_RICH)
    planted(tmp_path / "run")
    console = rich_console.Console(file=io.StringIO(), force_terminal=True)
    removals = iter([lambda: shutil.rmtree(tmp_path / "run")])
    with pytest.raises(ConfigurationError, match="there is no such folder"):
        _follow(rich_module("top"), console, tmp_path / "run", 0.0, lambda _: next(removals)())


def test_ranks_of_a_start_that_had_more_are_not_shown(tmp_path):
    wall = Clock()
    for start, ranks in enumerate((3, 1, 1)):
        live = [LiveFile(tmp_path, rank, f"worker {rank}", "a", wall=wall) for rank in range(ranks)]
        for one in live:
            one.write()
        assert [one.rank for one in read_live(tmp_path).ranks] == [*range(ranks)], start
        wall.later(60.0)  # and it is killed
    live[0].end()
    assert read_live(tmp_path).ended


def test_a_rank_has_ended_even_if_its_thread_was_writing_at_that_moment(tmp_path):
    writes, goes_on = threading.Event(), threading.Event()

    def wall():
        if threading.current_thread().name == "writer":
            writes.set()
            goes_on.wait()
        return NOW

    live = LiveFile(tmp_path, 0, "worker 0", "a", clock=Clock(), wall=wall)
    writer, ender = threading.Thread(target=live.write, name="writer"), threading.Thread(target=live.end)
    writer.start()
    writes.wait()
    ender.start()
    ender.join(A_MOMENT_S)  # in which an end that does not wait for the writer is over
    goes_on.set()
    writer.join()
    ender.join()
    live.write()

    assert json.loads((tmp_path / "ranks/live.rank0.json").read_text())["state"] == "ended"
