"""The benchmark of settings left alone, on a tiny case; what it finds is in docs/accuracy.md."""

from __future__ import annotations

import json
import math
import sys

import pytest

from tests.helpers.jobs import alone, mpiexec
from tests.helpers.paths import BENCHMARKS

pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")

pytestmark = pytest.mark.framework("torch")

import settings_kept as benchmark  # noqa: E402
import settings_problems  # noqa: E402

TINY = ["--optimizers", "adam", "--seeds", "1", "--samples", "200", "--epochs", "1"]


def main(monkeypatch, capsys, *arguments):
    """Run the benchmark here; return what it prints."""
    monkeypatch.setattr(sys, "argv", ["settings_kept.py", *map(str, arguments)])
    benchmark.main()
    return capsys.readouterr().out


def test_a_table_is_made_in_pieces(monkeypatch, capsys, tmp_path):
    to = tmp_path / "runs.jsonl"
    some = ["--problems", "cnn", *TINY, "--hard", "--to", to]
    main(monkeypatch, capsys, *some, "--workers", "1")
    main(monkeypatch, capsys, *some, "--workers", "1", "4")
    runs = [json.loads(line) for line in to.read_text().splitlines()]
    assert [(one["rule"], one["workers"]) for one in runs] == [
        ("steady", 1),
        *((rule, 4) for rule in ("steady", "downpour", "synchronous", "localsgd")),
    ]
    assert [one["passes"] for one in runs] == [1.0, pytest.approx(3, abs=2), 1.0, 1.0, 4.0]
    assert all(8 <= one["accuracy"] <= 100 for one in runs)
    usual, hard = main(monkeypatch, capsys, "--show", "--to", to).split("\n\n")
    assert len(usual.splitlines()) == 3
    assert len(hard.splitlines()) == 2


@pytest.mark.parametrize("problem", settings_problems.PROBLEMS)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_each_problem_trains_with_a_slow_worker(problem, optimizer):
    rows = settings_problems.rows_of(problem, None, 100)
    run = benchmark.Run(problem, optimizer, "steady", 2, 1, slow=4.0)
    found = benchmark.train(run, rows, epochs=1, rate=settings_problems.PROBLEMS[problem].rates[optimizer])
    assert found["accuracy"] > 0
    assert found["faster"] == pytest.approx(2 / found["passes"])


def finished(workers, seed, accuracy, **more):
    run = benchmark.Run("cnn", "sgd", "steady", workers, seed, **more)
    return run, run._asdict() | {"accuracy": accuracy, "passes": 2.0, "faster": 8.0}


def test_points_are_differences_of_equal_seeds_and_rates():
    usual = [finished(1, 1, 80.0), finished(1, 2, 90.0), finished(16, 1, 79.0), finished(16, 2, 90.5)]
    found = dict([*usual, finished(1, 1, 70.0, factor=2.0), finished(16, 1, math.nan, factor=2.0)])
    assert "| cnn, sgd, 85.00 | 16 | -0.25 (-1.00 to +0.50) | 2.0 | 8.0 |  |" in benchmark.usual_table(found)
    assert benchmark.hard_table(found).splitlines()[-1] == "| cnn, sgd | 16 |  |  | -70.00 |"
    assert benchmark.missed(found) == ["cnn, sgd, 16 workers, rate x 2, slowest x 1: -70.00"]


@pytest.mark.extended
@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_it_runs_under_mpiexec(ranks):
    script = BENCHMARKS / "settings_kept_mpi.py"
    done = alone(script, *TINY) if ranks == 1 else mpiexec(ranks, script, *TINY)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["workers"] == max(ranks - 1, 1)
    assert 1 <= found["passes"] <= ranks
