"""The benchmarks: what they are asked for is checked, and they run."""

from __future__ import annotations

import sys
from xml.etree import ElementTree

import pytest

from nnlo_common.commands.bench.__main__ import main
from nnlo_common.commands.bench._scaling import ScalingFigures, drawn, tables
from tests.helpers.jobs import mpiexec


def asked(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    return main()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            ["idle", "--seconds", "0"],
            "argument --seconds: '0' is not possible: it must be a finite number above 0",
        ),
        (["idle", "--seconds=-1"], "argument --seconds: '-1' is not possible"),
        (["idle", "--seconds", "nan"], "argument --seconds: 'nan' is not possible"),
        (["idle", "--seconds", "inf"], "argument --seconds: 'inf' is not possible"),
        (["idle", "--seconds", "long"], "argument --seconds: 'long' is not possible"),
        (
            ["exchange", "--rounds", "0"],
            "argument --rounds: '0' is not possible: it must be a whole number of at",
        ),
        (["exchange", "--rounds", "1.5"], "argument --rounds: '1.5' is not possible"),
        (["exchange", "--rounds", "inf"], "argument --rounds: 'inf' is not possible"),
        (
            ["exchange", "--megabytes", "1", "0"],
            "argument --megabytes: '0' is not possible: it must be a finite",
        ),
        (["exchange", "--megabytes=-1"], "argument --megabytes: '-1' is not possible"),
        (["exchange", "--megabytes", "1e-6"], "argument --megabytes: '1e-6' is not possible"),
        (["scaling", "--workers", "1", "65"], "argument --workers: '65' is not possible: it must be a whole"),
        (["scaling", "--workers", "1.5"], "argument --workers: '1.5' is not possible"),
        (["nothing"], "invalid choice: 'nothing'"),
    ],
)
def test_what_cannot_be_measured_is_refused(monkeypatch, capsys, arguments, problem):
    with pytest.raises(SystemExit) as refusal:
        asked(monkeypatch, *arguments)
    assert refusal.value.code == 2
    assert problem in capsys.readouterr().err


def test_without_an_mpiexec_the_line_to_use_is_complete(monkeypatch, tmp_path):
    python = str(tmp_path / "python")
    monkeypatch.setattr(sys, "executable", python)
    monkeypatch.setenv("NNLO_MPI", "off")
    with pytest.raises(SystemExit, match="there is no mpiexec beside") as refusal:
        asked(monkeypatch, "idle", "--seconds", "2")
    line = f"mpiexec -n 2 {python} -m nnlo_common.commands.bench idle --seconds 2"
    assert str(refusal.value).splitlines()[-1].strip() == line


@pytest.mark.mpi
@pytest.mark.slow
def test_another_number_of_ranks_is_refused_once_with_the_line_to_use():
    done = mpiexec(3, "-m", "nnlo_common.commands.bench", "idle", "--seconds", "2")
    assert done.returncode != 0
    assert done.stderr.count("this benchmark needs 2 ranks, not 3") == 1
    assert f"mpiexec -n 2 {sys.executable} -m nnlo_common.commands.bench idle --seconds 2" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.sampled(3)
@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (["idle", "--seconds", "0.1"], ["server: waited", "reply to a 64-byte gradient"]),
        (
            ["exchange", "--rounds", "1", "--megabytes", "0.001", "4e-6"],
            ["ping-pong", "additions", "Downpour"],
        ),
    ],
    ids=["idle", "exchange"],
)
def test_two_ranks_measure(arguments, printed):
    done = mpiexec(2, "-m", "nnlo_common.commands.bench", *arguments)
    assert done.returncode == 0, done.stderr
    assert all(words in done.stdout for words in printed)


def test_weak_and_strong_scaling_are_never_mixed():
    found = [
        ScalingFigures("strong", "Downpour", 1, 1, 4, 0.5, 0.4, 0.0),
        ScalingFigures("weak", "EASGD", 4, 1, 32, 0.875, 0.8, 0.0),
        ScalingFigures("weak", "EASGD", 1, 4, 4, 0.75, 0.7, 0.0),
    ]
    weak, strong = tables(found).split("\n\nStrong scaling")
    assert weak.splitlines()[2:] == [
        "| ranks that compute | 4 | 32 |",
        "|---|---|---|",
        "| EASGD, every=10, servers=4 |  | 0.88 |",
        "| EASGD, every=10, servers=1, groups of 4 | 0.75 |  |",
    ]
    assert strong.splitlines()[-1] == "| Downpour, every step, servers=1 | 0.50 |"
    picture = ElementTree.fromstring(drawn(found))
    lines = picture.findall("{http://www.w3.org/2000/svg}polyline")
    left, middle = 50, 430  # of the two halves
    assert [middle <= float(line.get("points").split(",")[0]) for line in lines] == [False, False, True]
    assert all(float(line.get("points").split(",")[0]) >= left for line in lines)


@pytest.mark.mpi
@pytest.mark.extended
def test_a_study_goes_on_where_it_was_cut(tmp_path):
    results, picture = tmp_path / "scaling.jsonl", tmp_path / "scaling.svg"
    line = ["-m", "nnlo_common.commands.bench", "scaling", "--workers", "3", "--seconds", "2"]
    counts = []
    for _ in range(2):
        done = mpiexec(7, *line, "--results", str(results), "--picture", str(picture))
        assert done.returncode == 0, done.stderr
        counts.append(len(results.read_text().splitlines()))
    assert 0 < counts[0] < counts[1]
    assert len(set(results.read_text().splitlines())) == counts[1]
    assert "| ranks that compute | 3 |" in done.stdout
    assert picture.read_text().startswith("<svg")
