"""What a spare or an heir costs while nobody dies, and how long workers stand still when the server does.

python benchmarks/spare_cost.py
python benchmarks/spare_cost.py --parameters 10000000 --rounds 9
python benchmarks/spare_cost.py --heir --every-ms 20

Two workers exchange with one server by `Downpour` and Adam as fast as they can, or after steps that take so
long, with a spare (or an heir) and without, by turns: the pace of the job with it beside that without, and
the memory of the server. Then the server is killed in the middle, and the longest time without a step counts.
It needs Open MPI, and a machine that does nothing else; with fewer cores than ranks the spare takes time from
the others.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

from nnlo_common import Adam, Downpour, Participant

WORKERS = 2
#: Who has copies of the server's state.
WAYS = {"nobody": {}, "a spare": {"spares": 1}, "an heir": {"heir": True}}


def train(given: argparse.Namespace) -> None:
    """Train on this rank, and print what it has seen as JSON."""
    steps, longest_s, began_s = 0, 0.0, time.perf_counter()
    dies_after_s, copied = given.dies_after, {"heir": False} | WAYS[given.train]
    me = Participant(Downpour(), [np.zeros(given.parameters, "f4")], optimizer=Adam(1e-3), **copied)
    with me:
        if me.role == "server 0" and dies_after_s is not None:
            timer = threading.Timer(dies_after_s, lambda: os.kill(os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()
        began_s = last_s = time.perf_counter()
        for _ in me.batches(range(10**9)):
            time.sleep(given.every_ms / 1e3)
            me.gradients[0][:1] = me.point[0][:1] - 1
            me.step()
            now_s = time.perf_counter()
            longest_s, last_s, steps = max(longest_s, now_s - last_s), now_s, steps + 1
            if now_s - began_s > given.seconds:
                break
    took_s, used = time.perf_counter() - began_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    found = {"role": me.role, "pace": steps / took_s, "longest_s": longest_s, "memory_mb": used}
    print(f"{json.dumps(found)}\n", end="", flush=True)


def job(way: str, given: argparse.Namespace, dies_after_s: float | None = None) -> list[dict[str, float]]:
    """Run a job; return what its ranks have seen."""
    spares = WAYS[way].get("spares", 0)
    command = [Path(sys.executable).with_name("mpiexec"), "--with-ft", "ulfm", "--oversubscribe"]
    command += ["-n", str(1 + WORKERS + spares), sys.executable, __file__, "--train", way]
    command += ["--parameters", str(given.parameters), "--seconds", str(given.seconds)]
    command += ["--every-ms", str(given.every_ms)]
    command += [] if dies_after_s is None else ["--dies-after", str(dies_after_s)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def pace(found: list[dict[str, float]]) -> float:
    """Return the steps a second of all workers."""
    return sum(one["pace"] for one in found)


def shown(values: list[float]) -> str:
    """Return the median and the spread."""
    return f"{statistics.median(values):.3g} [{min(values):.3g}, {max(values):.3g}]"


def main() -> None:
    """Measure, and print a row for docs/failures.md."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--parameters", type=int, default=1_000_000)
    options.add_argument("--seconds", type=float, default=8.0)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--heir", action="store_true")
    options.add_argument("--every-ms", type=float, default=0.0)
    options.add_argument("--train", choices=WAYS, help=argparse.SUPPRESS)
    options.add_argument("--dies-after", type=float, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.train is not None:
        train(given)
        return
    way = "an heir" if given.heir else "a spare"
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, {given.parameters} parameters")
    paces, memory, stalls = [], [], []
    for _ in range(given.rounds):
        without, spared = job("nobody", given), job(way, given)
        paces.append(pace(spared) / pace(without))
        server = [next(one for one in found if one["role"] == "server 0") for found in (spared, without)]
        memory.append(server[0]["memory_mb"] - server[1]["memory_mb"])
        died = job(way, given, given.seconds / 2)
        stalls.append(max(one["longest_s"] for one in died if str(one["role"]).startswith("worker")))
    print(f"pace with {way}, beside that without: {shown(paces)}")
    print(f"memory of the server, more: {shown(memory)} MB")
    print(f"longest time without a step when the server dies: {shown(stalls)} s")


if __name__ == "__main__":
    main()
