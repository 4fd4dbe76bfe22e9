"""What a training shows while it runs: lines at least every 10 s, on one rank, in one order."""

from __future__ import annotations

import io
import re
import sys
from functools import partial
from itertools import pairwise

import pytest

from nnlo_common.training._rank_parts import TrainingReport, say
from nnlo_common.training.report._course import Course
from nnlo_common.training.report._live_ranks import read_live
from nnlo_common.training.report._progress_display import ProgressDisplay

SAMPLES, BATCH, BATCH_S = 700, 7, 0.7


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def trained(clock, display, epochs):
    """Train on batches of 7 samples and 0.7 s, validate for 30 s after each epoch; yield after each look."""
    samples = 0
    for _ in range(epochs):
        for _ in range(SAMPLES // BATCH):
            clock.now_s += BATCH_S
            samples += BATCH
            display.look(partial(TrainingReport, samples=samples), partial(dict, loss=1.0 / samples))
            yield
        for _ in range(30):
            clock.now_s += 1.0
            display.look(partial(TrainingReport, samples=samples))
            yield
        display.end_epoch(TrainingReport(samples=samples), {"val_loss": 0.5, "accuracy": 0.25, "loss": 1.0})


def shown(capsys, role="alone", **options):
    clock = Clock()
    course = Course(epochs=2, samples=SAMPLES, clock=clock)
    display = ProgressDisplay(0, role, course, clock=clock, **options)
    found = []
    for _ in trained(clock, display, 2):
        text = capsys.readouterr().out
        found += [(clock.now_s, line) for line in text.splitlines()]
    found += [(clock.now_s, line) for line in capsys.readouterr().out.splitlines()]
    display.end()
    return found


LINE = (
    r"epoch   \d/2  [ \d]{3} % +\d+ samples/s  loss [\d.]{6}(  accuracy 0\.2500 \| val_loss 0\.5000)?"
    r"(  \d+:\d\d left)?"
)


def test_a_line_comes_at_least_every_ten_seconds_in_one_order(capsys):
    found = shown(capsys)
    times = [0.0, *(at_s for at_s, _ in found)]
    assert max(later - earlier for earlier, later in pairwise(times)) <= 10.0
    assert all(re.fullmatch(LINE, line) for _, line in found)
    # 11 batches of 0.7 s are not yet 9 s, 13 are: 91 of 700 samples in 9.1 s, so 200 s in all less these, and
    # nothing yet of the validation.
    assert found[0] == (
        pytest.approx(9.1),
        f"epoch   1/2   13 %         10 samples/s  loss {1 / 91:.4f}  2:11 left",
    )
    assert found[-1][1].startswith("epoch   2/2  100 %          7 samples/s  loss 1.0000  accuracy 0.2500 | ")


def test_an_epoch_without_samples_has_no_share():
    course = Course(epochs=2, samples=0)
    assert course.now(TrainingReport()).share is None
    assert course.end_epoch(TrainingReport()).share == 1.0


@pytest.mark.parametrize("role", ["worker 0", "server 1"])
def test_other_ranks_are_silent(role, capsys):
    assert not shown(capsys, role)


def test_a_live_line_is_replaced(capsys):
    clock = Clock()
    display = ProgressDisplay(0, "server 0", Course(clock=clock), clock=clock, live=True, every_s=0.5)
    for samples in (7, 14):
        clock.now_s += 0.5
        display.look(partial(TrainingReport, samples=samples, exchanges=3, mean_staleness=1.5))
    display.end_epoch(TrainingReport(samples=14), {"loss": 1.0})
    first, second, last = capsys.readouterr().out.split("\r")
    assert first == second == "epoch   1         14 samples/s  staleness 1.50"
    assert last.endswith("loss 1.0000\n")


def test_a_look_before_its_time_reads_nothing():
    clock = Clock()
    display = ProgressDisplay(0, "alone", Course(clock=clock), clock=clock)
    display.look(lambda: pytest.fail("read"), lambda: pytest.fail("read"))


def test_the_line_has_the_loss_of_all_workers_where_they_write_it(tmp_path, capsys):
    clocks = [Clock() for _ in range(3)]
    displays = [
        ProgressDisplay(rank, role, Course(samples=SAMPLES, clock=clock), run=tmp_path, clock=clock)
        for rank, (role, clock) in enumerate(zip(("server 0", "worker 0", "worker 1"), clocks, strict=True))
    ]
    for rank, loss in ((1, 0.25), (2, 0.75)):
        clocks[rank].now_s = 1.0
        displays[rank].look(lambda: TrainingReport(samples=35), lambda loss=loss: {"loss": loss})
        displays[rank].end()
    clocks[0].now_s = 9.0
    displays[0].look(lambda: TrainingReport(samples=70))
    assert "10 %" in (line := capsys.readouterr().out)
    assert "loss 0.5000" in line
    displays[0].end()
    assert [(one.role, one.samples, one.ended) for one in read_live(tmp_path).ranks] == [
        ("server 0", 70, True),
        ("worker 0", 35, True),
        ("worker 1", 35, True),
    ]


@pytest.mark.parametrize("installed", [True, False])
def test_on_a_terminal_the_table_of_all_ranks_takes_the_place_of_the_line(
    installed, tmp_path, capsys, monkeypatch
):
    if installed:
        pytest.importorskip("rich", reason="the environment for MPICH has no rich")
        monkeypatch.setenv("FORCE_COLOR", "1")
    else:
        monkeypatch.setitem(sys.modules, "rich", None)
    clock = Clock()
    display = ProgressDisplay(0, "alone", Course(clock=clock), run=tmp_path, live=True, clock=clock)
    clock.now_s = 2.0
    display.look(lambda: TrainingReport(samples=14))
    display.end_epoch(TrainingReport(samples=14), {"loss": 1.0})
    display.end()
    text = capsys.readouterr().out
    assert ("last sign" in text) is installed
    assert text.count("epoch   1") == (1 if installed else 2)


def test_a_line_is_one_write_so_that_no_other_ranks_comes_between(monkeypatch):
    written, stream = [], io.StringIO()
    stream.write = written.append
    monkeypatch.setattr(sys, "stdout", stream)
    say("alone", "epoch 1")
    assert [text for text in written if text] == ["epoch 1\n"]
