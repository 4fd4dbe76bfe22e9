"""Predictions and tiles write the files of a training, so that `nnlo top` and `nnlo report` show them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest

from nnlo_common import ConfigurationError
from nnlo_common.commands._top import run_top
from nnlo_common.commands.report._report_command import run_report
from nnlo_common.data import Reading
from nnlo_common.inference import (
    PredictKeywords,
    PredictOptions,
    TileKeywords,
    TileOptions,
    infer_over_tiles,
    predict_rows,
)
from nnlo_common.plugin import watched_use
from nnlo_common.testing import InjectedFault
from nnlo_common.training.report._live_ranks import read_live
from tests.helpers.threads import on_ranks

DATA = np.random.default_rng(0).standard_normal((1003, 4)).astype("f4")


class Same:
    """A model that returns what it gets."""

    def __init__(self, fails_at=None):
        self.fails_at, self.calls = fails_at, 0

    def begin(self, batch):
        self.calls += 1
        if self.calls == self.fails_at:
            raise InjectedFault("here")
        return batch

    def result(self, handle):
        return handle


def predicted(folder, out, world=None, model=None):
    with watched_use(folder, world) as watch:
        options = PredictOptions(batch_size=10, watch=watch)
        return predict_rows(model or Same(), DATA, out, options, world=world, model="m")


@pytest.mark.parametrize("size", [1, 3])
def test_top_and_report_show_a_prediction(size, tmp_path, capsys):
    pytest.importorskip("rich")
    folder = tmp_path / "run"
    on_ranks(size, lambda world: predicted(folder, tmp_path / "y.npy", world))
    found = read_live(folder)
    assert found.ended
    assert sum(one.samples for one in found.ranks) == len(DATA)
    assert found.center.share == 1.0
    assert [one.role for one in found.ranks] == [["alone"], ["lead", "worker 1", "worker 2"]][size > 1]
    assert run_top(str(folder), once=True) == 0
    assert "100 %" in capsys.readouterr().out
    assert run_report([str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert "Ranks" in page
    assert "samples" in page
    told = capsys.readouterr().out
    assert "validation" not in told, "it is no training"


def test_top_and_report_show_tiles(tmp_path):
    folder = tmp_path / "run"
    volume = np.arange(24.0 * 31, dtype="f4").reshape(24, 31)
    with watched_use(folder, None) as watch:
        options = TileOptions(tile=8, margin=0, batch_size=2, watch=watch)
        result = infer_over_tiles(Same(), volume, tmp_path / "y.npy", options, world=None, model="m")
    (rank,) = read_live(folder).ranks
    assert rank.samples == result.tiles
    assert rank.share == 1.0


def test_nothing_is_written_before_the_job_is_checked(tmp_path):
    (tmp_path / "y.npy").touch()
    with pytest.raises(ConfigurationError, match="exists already"):
        predicted(tmp_path / "run", tmp_path / "y.npy")
    assert [one.name for one in tmp_path.iterdir()] == ["y.npy"]


def test_a_failed_job_has_ended_and_the_next_goes_on(tmp_path):
    folder, out = tmp_path / "run", tmp_path / "y.npy"
    with pytest.raises(InjectedFault):
        predicted(folder, out, model=Same(fails_at=70))
    assert read_live(folder).ended
    assert not out.exists()
    predicted(folder, out)
    lines = [json.loads(line) for line in (folder / "ranks/facts.rank0.jsonl").read_text().splitlines()]
    assert [line["what"] for line in lines if line["what"] != "sample"] == [
        "start",
        "end",
        "start",
        "epoch",
        "end",
    ]
    assert 0 < next(line["samples"] for line in lines if line["what"] == "epoch") < len(DATA)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "run").touch()
    with pytest.raises(ConfigurationError, match=r"cannot write .*run"):
        predicted(tmp_path / "run", tmp_path / "y.npy")


@pytest.mark.parametrize(
    ("keywords", "options"), [(PredictKeywords, PredictOptions), (TileKeywords, TileOptions)]
)
def test_keywords_are_the_options(keywords, options):
    """Editors see the keywords; what they do is in the options."""
    hints = get_type_hints(keywords)
    for name in Reading.__annotations__:
        hints.pop(name, None)
    known = get_type_hints(options)
    names = [one.name for one in dataclasses.fields(options) if one.name != "watch"]
    assert sorted(hints) == sorted(names)
    assert {name: known[name] for name in names} == hints


def test_the_command_has_a_folder_of_its_own(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")
    from nnlo_common.commands._cli import main

    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text("import torch\n\ndef get_model():\n    return torch.nn.Linear(4, 2)\n")
    torch.save({"weight": torch.ones(2, 4), "bias": torch.zeros(2)}, "w.pt")
    np.save("x.npy", DATA)
    words = [
        "predict",
        "net.py",
        "--from",
        "w.pt",
        "--data",
        "x.npy",
        "--features-name",
        "array",
        "--out",
        "y.npy",
    ]
    for more in ([], ["--overwrite"]):
        assert main([*words, *more]) == 0
        lines = Path("y.npy.run/ranks/facts.rank0.jsonl").read_text().splitlines()
        assert sum('"start"' in line for line in lines) == 1
    assert main([*words, "--overwrite", "--run", "watched"]) == 0
    assert Path("watched/ranks/live.rank0.json").exists()
