"""Train with one process's settings, unchanged, on many simulated workers; print the tables in Markdown.

python benchmarks/settings_kept.py --data /usr/share/datasets/fashion-mnist --to settings.jsonl --assert
python benchmarks/settings_kept.py --problems cnn --workers 1 8 --rules steady --seeds 1 --to settings.jsonl
python benchmarks/settings_kept.py --tune --problems cnn    # the learning rates of one process

The virtual cluster runs nnlo's own servers and workers in one thread; torch computes the gradients. Each
finished training is a line of --to, and is not done again, so a long table can be made in pieces.
`settings_kept_mpi.py` runs the same trainings under mpiexec.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from settings_problems import BATCH, GRID, PROBLEMS, accuracy, given, loss_of

from nnlo_common import SGD, Adam, Downpour, FlatVector, LocalSGD, Steady, Synchronous
from nnlo_common.protocol import Compute, Server, Shard, Worker
from nnlo_common.testing import ByTime, VirtualCluster

RULES = {
    "steady": Steady(),
    "downpour": Downpour(),
    "synchronous": Synchronous(),
    "localsgd": LocalSGD(every=4),
}
# More passes than this times those of one process end a training.
MOST_PASSES = 20
# Points below one process, up to so many workers.
DEMANDED = {1: 0.0, 16: 0.5, 32: 1.0}


class Run(NamedTuple):
    """One training.

    Attributes:
        factor: times the tuned learning rate.
        slow: how much slower the last worker is.
    """

    problem: str
    optimizer: str
    rule: str
    workers: int
    seed: int
    factor: float = 1.0
    slow: float = 1.0


class Training:
    """The data, network and settings of one run.

    Attributes:
        samples: taken by all workers so far.
        whole: samples of progress that the training makes.
        optimizers: those whose learning rate follows the schedule.
    """

    def __init__(self, run, rows, *, epochs, rate):
        self.run, self.rows, self.peak = run, rows, rate
        self.samples, self.whole = 0, epochs * len(rows.x)
        torch.manual_seed(run.seed)
        self.model = PROBLEMS[run.problem].network()
        parameters = list(self.model.parameters())
        self.flat = FlatVector.of([one.detach().numpy().copy() for one in parameters])
        self.slopes = FlatVector(self.flat.layout)
        for one, place, slope in zip(parameters, self.flat.views(), self.slopes.views(), strict=True):
            one.data, one.grad = torch.from_numpy(place), torch.from_numpy(slope)
        self.start = self.flat.vector.copy()
        self._draw = np.random.default_rng(run.seed)
        self._order = np.empty(0, np.int64)
        self.optimizers, self.diverged = [], False

    def optimizer(self):
        """Make an optimizer, of the centre or of a worker."""
        made = SGD(self.peak, momentum=0.9) if self.run.optimizer == "sgd" else Adam(self.peak)
        self.optimizers.append(made)
        return made

    def follow_schedule(self, progress):
        """Set the learning rate: a cosine of progress."""
        part = min(progress / self.whole, 1.0)
        for one in self.optimizers:
            one.learning_rate = self.peak * (1 + math.cos(math.pi * part)) / 2

    def gradient(self, point):
        """Return the gradient of the next batch."""
        if len(self._order) < BATCH:
            self._order = np.concatenate([self._order, self._draw.permutation(len(self.rows.x))])
        batch, self._order = torch.from_numpy(self._order[:BATCH]), self._order[BATCH:]
        self.samples += BATCH
        self.flat.vector[:], self.slopes.vector[:] = point, 0
        loss = loss_of(self.model(self.rows.x[batch]), self.rows.y[batch])
        self.diverged = self.diverged or not math.isfinite(float(loss.detach()))
        loss.backward()
        return self.slopes.vector

    def watch(self, center):
        """See the centre before each batch; here not at all."""

    def measure(self, center):
        """Return the accuracy of the centre, in per cent."""
        self.flat.vector[:] = center
        return accuracy(self.model, self.rows.x_test, self.rows.y_test)


def train(run, rows, *, epochs, rate):
    """Train in the virtual cluster; return what is known of it afterwards."""
    begun = time.perf_counter()
    # The mean over the workers' batches is a larger batch; all else is left alone.
    scaled = math.sqrt(run.workers) if run.rule == "synchronous" else 1.0
    training = Training(run, rows, epochs=epochs, rate=rate * run.factor * scaled)
    server = cluster_of(run, training)
    made = server.rule.gain_report()
    passes = training.samples / len(rows.x)
    reached = math.nan if training.diverged else training.measure(server.rule.center)
    return {
        "accuracy": reached,
        "passes": passes,
        "faster": run.workers * epochs / passes,
        "shortened": made.shortened if made else 0.0,
        "worth_having": made.worth_having if made else None,
        "rate": rate * run.factor,
        "seconds": time.perf_counter() - begun,
    }


def cluster_of(run, training):
    """Run 1 server and the workers to the end; return the server."""
    algorithm, ranks = RULES[run.rule], range(1, run.workers + 1)
    local = algorithm.optimizer_runs == "worker"
    inner = None if local else training.optimizer()
    server = Server(algorithm.center(training.start.copy(), run.workers, inner), ranks, depth=1)
    shard = [Shard(0, server=0, place=slice(0, training.start.size))]
    workers = {
        rank: Worker(
            rank,
            algorithm,
            FlatVector.of(training.flat.views()),
            FlatVector(training.flat.layout),
            shard,
            workers=run.workers,
            local=training.optimizer() if local else None,
        )
        for rank in ranks
    }
    programs = {rank: program(worker, server, training) for rank, worker in workers.items()}
    speeds = ByTime(run.seed, compute_s=lambda draw, rank: takes(run, rank) * (1 + draw.expovariate(10)))
    with np.errstate(over="ignore", invalid="ignore"):
        VirtualCluster([server], workers, programs, schedule=speeds).run()
    return server


def takes(run, rank):
    """Return the time that a worker takes for a gradient, at least."""
    return run.slow if rank == run.workers > 1 else 1.0


def program(worker, server, training):
    """Train until the progress is made; by rules that do not count it, until the samples are used."""
    run = training.run
    by_progress = run.rule == "steady" and run.workers > 1
    together, own = run.rule in ("synchronous", "localsgd"), 0
    whole = getattr(RULES[run.rule], "every", 1)  # whole rounds of LocalSGD
    share = math.ceil(training.whole / BATCH / run.workers / whole) * whole
    worker.set_weight(BATCH)
    yield from worker.join()
    while not training.diverged:
        progress = server.rule.progress if by_progress else training.samples
        ended = own >= share if together else progress >= training.whole
        if ended or training.samples >= MOST_PASSES * training.whole:
            break
        yield Compute()
        training.watch(server.rule.center)
        training.follow_schedule(progress)
        worker.gradient.vector[:] = training.gradient(worker.gradient_point())
        own += 1
        yield from worker.step()
    yield from worker.leave()


def wanted(chosen):
    """Return the runs of the table, the most telling first."""
    found = []
    for seed in chosen.seeds:
        for workers in sorted(chosen.workers, key=lambda n: (n > 1, -n)):
            for name in chosen.problems:
                for optimizer in chosen.optimizers:
                    found += runs_of(chosen, name, optimizer, workers, seed)
    return sorted(found, key=lambda one: (one.seed, one.rule != "steady", one.factor * one.slow != 1))


def runs_of(chosen, name, optimizer, workers, seed):
    usual = [Run(name, optimizer, rule, workers, seed) for rule in chosen.rules]
    if workers == 1:
        usual = [Run(name, optimizer, "steady", 1, seed)]
    steady = Run(name, optimizer, "steady", workers, seed)
    if not chosen.hard or workers not in (1, *chosen.hard):
        return usual
    slow = [steady._replace(slow=4.0)] if workers > 1 else []
    return [*usual, *slow, *(steady._replace(factor=one) for one in (0.5, 2.0))]


def read(path):
    """Return the finished runs of a file; later lines replace earlier ones."""
    found = {}
    if path.exists():
        for line in path.read_text().splitlines():
            one = json.loads(line)
            found[Run(**{name: one[name] for name in Run._fields})] = one
    return found


def points(found, run):
    """Return accuracies minus those of one process with the same settings, for each seed that has both."""
    differences = []
    for other, one in found.items():
        alone = run._replace(rule="steady", workers=1, slow=1.0, seed=other.seed)
        if other._replace(seed=0) == run._replace(seed=0) and alone in found:
            reached = 0.0 if math.isnan(one["accuracy"]) else one["accuracy"]  # diverged
            differences.append(reached - found[alone]["accuracy"])
    return differences


def mean_of(found, run, key):
    values = [one[key] for other, one in found.items() if other._replace(seed=0) == run._replace(seed=0)]
    return statistics.mean(values) if values else math.nan


def shown(differences):
    """Return their mean, and the lowest and highest."""
    if not differences:
        return ""
    spread = f" ({min(differences):+.2f} to {max(differences):+.2f})" if len(differences) > 1 else ""
    return f"{statistics.mean(differences):+.2f}{spread}"


def table(heads, lines):
    return "\n".join(f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(heads), *lines))


def usual_table(found):
    """Return the table of unchanged settings."""
    heads = ["problem, one process, %", "workers", "`Steady`, points", "passes", "times faster"]
    heads += ["`Downpour`, points", "`Synchronous`, rate x sqrt(W)", "`LocalSGD`, every=4"]
    lines = []
    for name, optimizer, workers in settings(found):
        run = Run(name, optimizer, "steady", workers, 0)
        if workers == 1 or not points(found, run):
            continue
        alone = f"{name}, {optimizer}, {mean_of(found, run._replace(workers=1), 'accuracy'):.2f}"
        work = [f"{mean_of(found, run, key):.1f}" for key in ("passes", "faster")]
        others = [shown(points(found, run._replace(rule=rule))) for rule in list(RULES)[1:]]
        lines.append([alone, str(workers), shown(points(found, run)), *work, *others])
    return table(heads, lines)


def hard_table(found):
    """Return the table of slow workers and other learning rates."""
    heads = ["problem", "workers", "one worker 4 times slower", "half of the rate", "twice the rate"]
    lines = []
    for name, optimizer, workers in settings(found):
        run = Run(name, optimizer, "steady", workers, 0)
        hard = [run._replace(slow=4.0), run._replace(factor=0.5), run._replace(factor=2.0)]
        cells = [shown(points(found, one)) for one in hard]
        if workers > 1 and any(cells):
            lines.append([f"{name}, {optimizer}", str(workers), *cells])
    return table(heads, lines)


def settings(found):
    """Return problem, optimizer and number of workers of all runs, in order."""
    order = list(PROBLEMS)
    several = {(one.problem, one.optimizer, one.workers) for one in found}
    return sorted(several, key=lambda one: (order.index(one[0]), one[1] != "sgd", one[2]))


def missed(found):
    """Return what is farther below one process than demanded."""
    lines, steady = [], {one._replace(seed=0) for one in found if one.rule == "steady" and one.workers > 1}
    for run in sorted(steady):
        allowed = next(value for most, value in DEMANDED.items() if run.workers <= most)
        differences = points(found, run)
        if differences and statistics.mean(differences) < -allowed:
            hard = f"rate x {run.factor:g}, slowest x {run.slow:g}"
            lines.append(
                f"{run.problem}, {run.optimizer}, {run.workers} workers, {hard}: {shown(differences)}"
            )
    return lines


def tune(chosen):
    """Train one process with each learning rate of the grid; measure on a part of the training samples."""
    for name in chosen.problems:
        rows, epochs = given(chosen, name)
        rows = rows.validating()
        for optimizer in chosen.optimizers:
            run, cells = Run(name, optimizer, "steady", 1, 100), []
            for rate in GRID[optimizer]:
                one = train(run, rows, epochs=epochs, rate=rate)
                cells.append(f"{rate:g}: {one['accuracy']:.2f} ({one['seconds']:.0f} s)")
            print(f"{name}, {optimizer}: {', '.join(cells)}", flush=True)


def options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", choices=PROBLEMS, nargs="+", default=list(PROBLEMS))
    parser.add_argument("--optimizers", choices=["sgd", "adam"], nargs="+", default=["sgd", "adam"])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--rules", choices=RULES, nargs="+", default=list(RULES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument(
        "--hard",
        type=int,
        nargs="*",
        default=[8, 16],
        help="numbers of workers that train with a slow one, and with half and twice the learning rate, too",
    )
    parser.add_argument("--data", help="a folder with the full Fashion-MNIST; else the embedded subset")
    parser.add_argument("--samples", type=int, help="to train on")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--to", type=Path, default=Path("settings_kept.jsonl"), help="finished trainings")
    parser.add_argument("--tune", action="store_true", help="compare learning rates of one process instead")
    parser.add_argument("--show", action="store_true", help="print the tables of --to and train nothing")
    parser.add_argument("--assert", dest="insist", action="store_true", help="fail unless all is met")
    return parser.parse_args()


def main():
    chosen = options()
    torch.set_num_threads(1)
    if chosen.tune:
        tune(chosen)
        return
    found = read(chosen.to)
    for run in [] if chosen.show else wanted(chosen):
        if run in found:
            continue
        rows, epochs = given(chosen, run.problem)
        rate = PROBLEMS[run.problem].rates[run.optimizer]
        found[run] = run._asdict() | train(run, rows, epochs=epochs, rate=rate)
        with chosen.to.open("a") as file:
            file.write(json.dumps(found[run]) + "\n")
        print(json.dumps(found[run]), flush=True)
    print(usual_table(found), hard_table(found), sep="\n\n")
    lines = missed(found)
    for line in lines:
        print(f"missed: {line}")
    if chosen.insist and lines:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
