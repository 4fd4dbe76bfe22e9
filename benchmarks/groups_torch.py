"""Compare `servers=0`, by each `all_reduce=`, to DistributedDataParallel over gloo, Horovod and a plain loop.

mpiexec -n 2 python benchmarks/groups_torch.py          # shares of the plain loop's samples per second

All run in one program, in turns, so that they see the same machine; each rank runs the plain loop at the same
time as the others. Set OMP_NUM_THREADS=1, and leave a core to each rank. Horovod takes part where installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import socket
import statistics
import time

import torch
from mpi4py import MPI

import nnlo_torch as nt

BATCH = 100
#: Width of the hidden layers, by name.
SIZES = {"90k": 200, "1.8M": 900, "11M": 2300}
HOROVOD = importlib.util.find_spec("horovod") is not None
#: Ways to train; small letters are values of `all_reduce=`.
WAYS = ("mpi", "shared", "thread", "torch", *(("horovod", "Horovod") if HOROVOD else ()), "DDP")


def model_of(width):
    """A perceptron with two hidden layers."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(200, width),
        torch.nn.ReLU(),
        torch.nn.Linear(width, width),
        torch.nn.ReLU(),
        torch.nn.Linear(width, 10),
    )


def plain(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def rate_of(model, optimizer, seconds):
    """Return the samples per second of this rank; all ranks make equally many steps."""
    x, y = torch.randn(BATCH, 200), torch.randint(0, 10, (BATCH,))

    def step():
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    begun = time.perf_counter()
    for _ in range(5):
        step()
    own = max(5, int(5 * seconds / (time.perf_counter() - begun)))
    steps = MPI.COMM_WORLD.allreduce(own, MPI.MIN)
    MPI.COMM_WORLD.Barrier()
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    return BATCH * steps / (time.perf_counter() - begun)


def nnlo_rate(width, seconds, way):
    """Return the rate of this rank with `servers=0`, and what prints on one rank."""
    model = model_of(width)
    optimizer = nt.Synchronous(plain(model), model=model, servers=0, all_reduce=way)
    found = rate_of(model, optimizer, seconds)
    optimizer.close()
    return found, optimizer.say


def horovod_rate(width, seconds):
    """Return the rate of this rank with Horovod's own optimizer."""
    import horovod.torch as hvd

    hvd.init()
    model = model_of(width)
    optimizer = hvd.DistributedOptimizer(plain(model), named_parameters=model.named_parameters())
    found = rate_of(model, optimizer, seconds)
    hvd.shutdown()
    return found


def rates(width, seconds, ways):
    """Return the rates of this rank in one round, by the way of training, and what prints on one rank."""
    model = model_of(width)
    found = {"plain": rate_of(model, plain(model), seconds)}
    for way in ways:
        if way == "DDP":
            parallel = torch.nn.parallel.DistributedDataParallel(
                model_of(width), gradient_as_bucket_view=True
            )
            found["DDP, gloo"] = rate_of(parallel, plain(parallel), seconds)
        elif way == "Horovod":
            found["Horovod"] = horovod_rate(width, seconds)
        else:
            found[way], say = nnlo_rate(width, seconds, way)
    return found, say


def main():
    chosen = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    chosen.add_argument("--rounds", type=int, default=5)
    chosen.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    chosen.add_argument("--sizes", nargs="+", choices=SIZES, default=[*SIZES])
    chosen.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    options = chosen.parse_args()
    comm = MPI.COMM_WORLD
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = comm.bcast(free.getsockname()[1])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=comm.rank, world_size=comm.size)
    for name in options.sizes:
        rounds = []
        for _ in range(options.rounds):
            own, say = rates(SIZES[name], options.seconds, options.ways)
            rounds.append(comm.allgather(own))
        lines = []
        for way in rounds[0][0]:
            shares = [statistics.mean(one[way] / one["plain"] for one in ranks) for ranks in rounds]
            lines.append(f"{way} {statistics.median(shares):.2f} [{min(shares):.2f}, {max(shares):.2f}]")
        base = statistics.median(statistics.mean(one["plain"] for one in ranks) for ranks in rounds)
        say(f"{name}: plain {base:.0f} samples/s of each rank; shares of it: {', '.join(lines)}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
