"""Time to one process's accuracy: Steady beside one process, DDP over gloo and Horovod, all runs counted.

    python benchmarks/time_to_accuracy.py [--problems cnn jets] [--rounds 3] [--slow 3] [--data FOLDER]

One process trains with its settings; the mean of its accuracies is the target. Each competitor then makes
the runs that somebody makes who does not know better: first with the same settings, then with those that are
advised, until a run is within --margin points of the target. Their times add up. With --slow 3 each batch of
one worker takes three times as long. One thread a rank; the time is that of the loop over epochs, without
imports, data and tests. How long one process takes beside another one tells what the host has left for two.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from settings_problems import BATCH, PROBLEMS, accuracy, given, loss_of
from torch.utils.data import DataLoader, TensorDataset

import nnlo_torch as nt

HERE = Path(__file__).resolve()
#: The runs that each competitor makes, in turn: the rate is multiplied, perhaps after a warm-up of an epoch.
ATTEMPTS = {
    "one process": [("plain", 1.0, False)],
    "Steady, 1 server, 2 workers": [("steady", 1.0, False)],
    "Steady, 2 ranks without a server": [("together", 1.0, False)],
    "DDP over gloo, 2 ranks": [("ddp", 1.0, False), ("ddp", 2.0, False), ("ddp", 2.0, True)],
    "Horovod, 2 ranks": [("horovod", 1.0, False), ("horovod", 2.0, False), ("horovod", 2.0, True)],
}
_REPORTER = 0  # the peers leave it to the script which rank reports
RANKS = {"plain": 1, "steady": 3, "together": 2, "ddp": 2, "horovod": 2}


def parallel(kind, model, optimizer):
    """Return the model and the optimizer to train with, this rank's number and those that train."""
    if kind in ("steady", "together"):
        optimizer = nt.Steady(optimizer, servers=0 if kind == "together" else 1)
        return model, optimizer, optimizer.share
    if kind == "ddp":
        rank, size = (int(os.environ[f"OMPI_COMM_WORLD_{name}"]) for name in ("RANK", "SIZE"))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": str(rank), "WORLD_SIZE": str(size)}
        torch.distributed.init_process_group("gloo")
        return torch.nn.parallel.DistributedDataParallel(model), optimizer, (rank, size)
    if kind == "horovod":
        import horovod.torch as hvd

        hvd.init()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        return model, optimizer, (hvd.rank(), hvd.size())
    return model, optimizer, (0, 1)


def train(chosen):
    """Train on this rank; print the time and the accuracy on the rank that has the result."""
    torch.set_num_threads(1)
    torch.manual_seed(chosen.seed)
    kind, problem = chosen.run, PROBLEMS[chosen.problems[0]]
    rows, epochs = given(chosen, chosen.problems[0])
    model = problem.network()
    inner = torch.optim.SGD(model.parameters(), lr=chosen.factor * problem.rates["sgd"], momentum=0.9)
    wrapped, optimizer, (rank, size) = parallel(kind, model, inner)
    data = TensorDataset(rows.x, rows.y)
    if kind in ("ddp", "horovod"):
        sampler = torch.utils.data.DistributedSampler(data, size, rank, seed=chosen.seed)
    else:
        sampler = nt.ShardSampler(data, seed=chosen.seed)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    slow, warm = chosen.slow if rank == size - 1 and size > 1 else 1.0, len(loader) if chosen.warm else 0
    began, steps = time.perf_counter(), 0
    for epoch in range(epochs):
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        for x, y in loader:
            start = time.perf_counter()
            if steps < warm:
                for group in inner.param_groups:
                    group["lr"] = (
                        group["initial_lr"] / chosen.factor * (1 + (chosen.factor - 1) * steps / warm)
                    )
            optimizer.zero_grad()
            loss_of(wrapped(x), y).backward()
            if slow > 1:
                time.sleep((slow - 1) * (time.perf_counter() - start))
            optimizer.step()
            steps += 1
        cosine.step()
    seconds = time.perf_counter() - began
    if kind in ("steady", "together"):
        with optimizer.evaluation():  # waits for the last worker
            seconds = time.perf_counter() - began
            tell(seconds, model, rows, here=optimizer.serves or optimizer.role == "lead")
        optimizer.close()
    else:
        tell(seconds, model, rows, here=rank == _REPORTER)


def tell(seconds, model, rows, *, here):
    """Print the time and the accuracy if this rank has the result."""
    if here:
        line = {"seconds": seconds, "accuracy": accuracy(model, rows.x_test, rows.y_test)}
        print(json.dumps(line), flush=True)


def free_port():
    """Return a port that is free now; one that the last run has used may be closing yet."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def begun(chosen, kind, problem, seed, *, factor=1.0, warm=False):
    """Begin one training; return its process."""
    own = [str(HERE), "--run", kind, "--problems", problem, "--factor", str(factor), "--seed", str(seed)]
    own += [
        "--slow",
        str(chosen.slow),
        *(["--data", chosen.data] if chosen.data else []),
        *(["--warm"] if warm else []),
    ]
    if chosen.samples:
        own += ["--samples", str(chosen.samples)]
    mpiexec = [str(Path(sys.executable).with_name("mpiexec")), "--oversubscribe", "-n", str(RANKS[kind])]
    command = [*(mpiexec if RANKS[kind] > 1 else []), sys.executable, *own]
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_PORT": free_port()}
    return subprocess.Popen(command, env=surroundings, stdout=subprocess.PIPE, text=True)


def told(process):
    """Return what a training told."""
    output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{' '.join(process.args)} ended with {process.returncode}")
    return next(json.loads(line) for line in output.splitlines() if line.startswith("{"))


def compare(chosen, problem):
    """Print the table of a problem."""
    competitors = dict(ATTEMPTS)
    try:
        import horovod  # noqa: F401
    except ImportError:
        competitors.pop("Horovod, 2 ranks")
    print(f"\n{problem}, one worker {chosen.slow:g} times as slow; load {os.getloadavg()[0]:.2f}", flush=True)
    plain = [told(begun(chosen, "plain", problem, seed)) for seed in range(chosen.rounds)]
    both = [begun(chosen, "plain", problem, seed) for seed in (0, 1)]
    crowded = statistics.mean(told(one)["seconds"] for one in both)
    target = statistics.mean(one["accuracy"] for one in plain) - chosen.margin
    alone = statistics.median(one["seconds"] for one in plain)
    print(
        f"target {target:.2f} %; one process takes {alone:.1f} s, beside another one {crowded:.1f} s\n",
        flush=True,
    )
    print("| trained by | runs: factor of the rate, accuracy % | seconds, all runs | to one process |")
    print("|---|---|---|---|", flush=True)
    for name, attempts in competitors.items():
        totals, shown, reached = [0.0] * chosen.rounds, [], False
        for kind, factor, warm in attempts:
            runs = plain
            if kind != "plain":
                runs = [
                    told(begun(chosen, kind, problem, seed, factor=factor, warm=warm))
                    for seed in range(chosen.rounds)
                ]
            totals = [total + one["seconds"] for total, one in zip(totals, runs, strict=True)]
            right = statistics.mean(one["accuracy"] for one in runs)
            shown.append(f"{factor:g}{' with warm-up' if warm else ''}: {right:.2f}")
            if reached := right >= target:
                break
        middle = statistics.median(totals)
        times = alone / middle
        spread = f"{middle:.1f} [{min(totals):.1f}, {max(totals):.1f}]"
        print(
            f"| {name} | {'; '.join(shown)} | {spread if reached else 'not reached'} | {times:.2f} |",
            flush=True,
        )
    print(f"\nload {os.getloadavg()[0]:.2f} after")


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--problems", nargs="+", default=["cnn", "jets"], choices=PROBLEMS)
    options.add_argument("--rounds", type=int, default=3, help="seeds of each run")
    options.add_argument(
        "--slow", type=float, default=1.0, help="how many times as long one worker's batches take"
    )
    options.add_argument(
        "--margin", type=float, default=0.25, help="points below one process that count as reached"
    )
    options.add_argument("--data", help="folder of Fashion-MNIST")
    options.add_argument("--samples", type=int, help="of the problem; as many steps are made")
    options.add_argument("--run", choices=RANKS, help=argparse.SUPPRESS)
    options.add_argument("--factor", type=float, default=1.0, help=argparse.SUPPRESS)
    options.add_argument("--warm", action="store_true", help=argparse.SUPPRESS)
    options.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    options.add_argument("--epochs", type=int, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.run:
        train(chosen)
        return
    for problem in chosen.problems:
        compare(chosen, problem)


if __name__ == "__main__":
    main()
