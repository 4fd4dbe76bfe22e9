"""The benchmark of accuracy runs, alone and under mpiexec; what it finds on the full data is in its page."""

from __future__ import annotations

import re
import sys

import pytest

from tests.helpers.jobs import alone, mpiexec
from tests.helpers.paths import BENCHMARKS

pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")
pytest.importorskip("keras", reason="the environment for MPICH has no frameworks")

pytestmark = [pytest.mark.framework("torch"), pytest.mark.framework("keras")]

TINY = ["--epochs", "1", "--batch", "50", "--learning-rate", "0.02", "--seeds", "1", "2"]

import accuracy_all as comparison  # noqa: E402
import accuracy_options  # noqa: E402
import toy_jets  # noqa: E402


def lines(done):
    """The line of each seed as a dict, and the summary."""
    assert done.returncode == 0, done.stderr
    *seeds, summary = done.stdout.splitlines()
    assert summary.startswith("summary mean=")
    found = [dict(pair.split("=") for pair in line.split()) for line in seeds]
    assert [one["seed"] for one in found] == ["1", "2"]
    assert {one["samples"] for one in found} == {"2000"}
    assert all(0.1 <= float(one["accuracy"]) <= 1 for one in found)
    return found


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "keras"])
def test_it_runs_alone(framework):
    first, second = lines(alone(BENCHMARKS / f"accuracy_{framework}.py", *TINY))
    assert first["exchanges"] == "0"
    assert first["accuracy"] != second["accuracy"]  # seeds do something


@pytest.mark.extended
@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "more", "exchanges"),
    [
        ("easgd", ["--every", "5"], "8"),
        pytest.param("downpour", ["--optimizer", "adam"], "40", marks=pytest.mark.extended),
        pytest.param("gem", ["--kappa", "1.5"], "40", marks=pytest.mark.extended),
    ],
)
@pytest.mark.parametrize("framework", ["torch", pytest.param("keras", marks=pytest.mark.extended)])
def test_it_runs_on_three_ranks(framework, algorithm, more, exchanges):
    script = BENCHMARKS / f"accuracy_{framework}.py"
    found = lines(mpiexec(3, script, "--algorithm", algorithm, *more, *TINY))
    assert [one["exchanges"] for one in found] == [exchanges, exchanges]


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.mpi)])
def test_it_runs_with_jedi_net(tmp_path, ranks):
    for part, seed in (("train", 1), ("val", 2)):
        toy_jets.provide(tmp_path / part, 500, files=2, seed=seed)
    script = BENCHMARKS / "accuracy_jedi.py"
    some = ["--data", str(tmp_path), "--epochs", "2", "--validation", "100", "--seeds", "1", "--batch", "20"]
    done = alone(script, *some) if ranks == 1 else mpiexec(ranks, script, "--algorithm", "gem", *some)
    assert done.returncode == 0, done.stderr
    (line,) = re.findall(r"^seed=1 accuracy=0\.\d+ .*$", done.stdout, re.MULTILINE)
    assert "samples=800 " in line
    assert f"exchanges={0 if ranks == 1 else 40} " in line


@pytest.mark.parametrize("what", comparison.COMPARED)
def test_what_is_compared_can_be_told_to_the_benchmark(what, monkeypatch):
    single, together = comparison.COMPARED[what]
    assert {name.partition(",")[0] for name in together} == {"downpour", "easgd", "gem"}
    for name, settings in (single | together).items():
        algorithm = ["--algorithm", name.partition(",")[0]] if name in together else []
        monkeypatch.setattr(sys, "argv", ["accuracy.py", *algorithm, *settings])
        accuracy_options.options("What is compared.")


def row(name, *accuracies):
    found = {"samples": "9", "exchanges": "3", "staleness": "1.5"}
    return comparison.Row(name, ["--x", "1"], [found | {"accuracy": str(value)} for value in accuracies])


def test_the_table_compares_means_in_points():
    singles = [row("one process, SGD", 0.90, 0.92), row("one process, Adam", 0.7)]
    text = comparison.table(singles, [row("easgd", 0.9, 0.9)])
    head, _, sgd, adam, easgd = text.splitlines()
    assert head.count("|") == sgd.count("|") == easgd.count("|")
    assert sgd == "| one process, SGD | `--x 1` | 90.00, 92.00 | 91.00 | +0.00 | 9 |  |  |"
    assert "| -21.00 |" in adam
    assert easgd == "| easgd | `--x 1` | 90.00, 90.00 | 90.00 | -1.00 | 9 | 3 | 1.50 |"


@pytest.mark.parametrize(
    ("reached", "arguments", "met", "status"),
    [
        ("0.9201", ["--assert"], True, 0),
        ("0.8999", ["--assert"], False, 1),
        ("0.8999", [], False, 0),
        ("0.8999", ["--assert", "--within", "2"], True, 0),
    ],
)
def test_the_verdict(monkeypatch, capsys, reached, arguments, met, status):
    monkeypatch.setattr(sys, "argv", ["accuracy_all.py", "--algorithms", "gem", *arguments])
    monkeypatch.setattr(comparison, "mpiexec", lambda: "mpiexec")
    accuracy = {"one process, SGD": "0.91", "one process, Adam": "0.9", "gem": reached}
    monkeypatch.setattr(comparison, "run", lambda name, *_: row(name, accuracy[name]))
    if status:
        with pytest.raises(SystemExit) as end:
            comparison.main()
        assert end.value.code == status
    else:
        comparison.main()
    assert capsys.readouterr().out.splitlines()[-1].endswith("met" if met else "missed")


@pytest.mark.extended
@pytest.mark.slow
def test_a_job_that_fails_is_not_compared(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["accuracy_all.py", "--data", "nowhere"])
    with pytest.raises(SystemExit, match="one process, SGD failed with exit status 1"):
        comparison.main()
