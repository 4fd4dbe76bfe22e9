"""Compare the accuracy that packed messages reach with that of float32, at equal samples; print a table.

python benchmarks/wire_accuracy.py --data FOLDER --assert            # Fashion-MNIST, the full set in FOLDER
python benchmarks/wire_accuracy.py jedi --assert                     # JEDI-net on toy jets

Each row is a job of 1 server and 2 workers, `accuracy_torch.py` or `accuracy_jedi.py`, with the options that
docs/accuracy.md has found for float32. A wire is "met" if its mean accuracy over the seeds is at most 0.3
percentage points below that of float32 with the same options, 0.5 with topk.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

from accuracy_all import mpiexec

MOST = {"bfloat16": 0.3, "float16": 0.3, "int8": 0.3, "topk": 0.5}
SGD = ["--algorithm", "downpour", "--learning-rate", "0.02", "--momentum", "0.5"]
ADAM = ["--algorithm", "downpour", "--optimizer", "adam", "--momentum", "0.5"]
ROUNDED = ("float32", "bfloat16", "float16", "int8")
#: Script, and rows: options of the job, and wires.
COMPARED = {
    "torch": [
        ([*ADAM, "--batch", "50", "--learning-rate", "0.004"], (*ROUNDED, "topk")),
        ([*SGD, "--batch", "50"], ("float32", "topk")),
        (
            ["--algorithm", "easgd", "--batch", "50", "--learning-rate", "0.1", "--every", "4"],
            ("float32", "int8"),
        ),
    ],
    "jedi": [([*ADAM, "--batch", "20", "--learning-rate", "0.002"], (*ROUNDED, "topk"))],
}


def options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=COMPARED, nargs="?", default="torch")
    parser.add_argument("--seeds", nargs="+", default=["1", "2", "3"])
    parser.add_argument("--epochs")
    parser.add_argument("--data", help="a folder with the full Fashion-MNIST, or with jets")
    parser.add_argument("--only", nargs="+", help="these wires, beside float32")
    parser.add_argument("--output", type=Path, help="append the rows to this file, too")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds that one job may take")
    parser.add_argument("--assert", dest="insist", action="store_true", help="fail unless all are met")
    return parser.parse_args()


def run(chosen, settings, wire):
    """Run one job; return the accuracy of each seed in per cent."""
    script = Path(__file__).with_name(f"accuracy_{chosen.what}.py")
    command = [mpiexec(), "--oversubscribe", "-n", "3", sys.executable, script, *settings, "--wire", wire]
    command += ["--seeds", *chosen.seeds]
    for name, value in (("--epochs", chosen.epochs), ("--data", chosen.data)):
        command += [] if value is None else [name, value]
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=chosen.timeout, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("seed=")]
    return [100 * float(dict(word.split("=") for word in line.split())["accuracy"]) for line in lines]


def main():
    chosen, missed = options(), 0

    def say(text):
        print(text, flush=True)
        if chosen.output is not None:
            with chosen.output.open("a") as file:
                file.write(f"{text}\n")

    say("| options | wire | accuracy of each seed, % | mean, % | to float32, points | |")
    say("|---|---|---|---|---|---|")
    for settings, wires in COMPARED[chosen.what]:
        usual = 0.0
        for wire in wires:
            if chosen.only and wire not in ("float32", *chosen.only):
                continue
            found = run(chosen, settings, wire)
            mean = statistics.mean(found)
            usual = mean if wire == "float32" else usual
            off = mean - usual
            met = wire == "float32" or off >= -MOST[wire]
            missed += not met
            verdict = "" if wire == "float32" else "met" if met else "missed"
            seeds = ", ".join(f"{one:.2f}" for one in found)
            say(f"| `{' '.join(settings)}` | {wire} | {seeds} | {mean:.2f} | {off:+.2f} | {verdict} |")
    return int(chosen.insist and missed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
