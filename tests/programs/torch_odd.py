"""Ordinary training scripts in which something odd happens, often on one rank only.

Each case says "ready" when what it provokes is about to begin, and "done" if it comes to its end.
"""

import atexit
import functools
import json
import os
import sys
import threading
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

import nnlo_torch as nt
from nnlo_common import ConfigurationError, DivergedError
from tests.helpers.torch_cases import initialised

torch.set_num_threads(1)
LONG = 1_000_000  # samples; nobody waits for the end of such an epoch


def nothing(*_):
    """What happens where nothing is to happen."""


def network(wide=5):
    return initialised(
        torch.nn.Sequential(torch.nn.Linear(wide, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    )


class Samples(Dataset):
    """Samples made when asked for; any number of them costs nothing."""

    def __init__(self, size, at_sample=nothing):
        self.size, self.at_sample = size, at_sample

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        changed = self.at_sample(index)
        x = torch.full((5,), index % 7 / 7.0) if changed is None else changed
        return x, index % 3


def sgd(model, lr=0.05):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def loss_of(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def ready():
    print("ready", flush=True)


def train(
    wrap=nt.Downpour,
    *,
    samples=60,
    at_step=nothing,
    at_epoch_end=nothing,
    loss=loss_of,
    dataset=None,
    epochs=3,
    lr=0.05,
    sampler=None,
    evaluates=None,
    loader=None,
    **options,
):
    """The loop that the cases vary; returns the optimizer and the samples this rank has seen."""
    model = network()
    optimizer = wrap(sgd(model, lr), **options)
    data = dataset or Samples(samples)
    batches = DataLoader(
        data,
        batch_size=5,
        sampler=nt.ShardSampler(data, optimizer=optimizer, **(sampler or {})),
        **(loader or {}),
    )
    seen = 0
    for epoch in range(epochs):
        for step, batch in enumerate(batches):
            at_step(optimizer, model, epoch, step)
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
            seen += len(batch[1])
        at_epoch_end(optimizer, model, epoch)
        if evaluates is not None:
            evaluates(optimizer, model, data)
    return optimizer, model, seen


def evaluate(optimizer, model, data, measure=None):
    share = nt.ShardSampler(data, evaluation=True, optimizer=optimizer)
    batches = DataLoader(data, batch_size=5, sampler=share)
    return optimizer.evaluate(measure or (lambda batch: {"loss": loss_of(model, batch)}), batches)


def on(rank, what, *, epoch=1, step=1):
    """What is to be done on one rank at one step."""

    def at_step(optimizer, model, now_epoch, now_step):
        if (optimizer.rank, now_epoch, now_step) == (rank, epoch, step):
            ready()
            what()

    return at_step


def on_server(what):
    """What is to be done on the first server at the end of the second epoch."""

    def at_epoch_end(optimizer, model, epoch):
        if optimizer.role == "server 0" and epoch == 1:
            ready()
            what()

    return at_epoch_end


def raises():
    raise ValueError("no such sample")


def sleep():
    time.sleep(600)


# -- signals: a case says "ready" and its process ids, and goes on -------------------------------------


def tell(optimizer, *_):
    print(f"pid {optimizer.rank} {os.getpid()}", flush=True)


def during_epoch():
    def at_step(optimizer, model, epoch, step):
        if optimizer.rank == 1 and step == 3:
            ready()

    def wrap(inner):
        optimizer = nt.Downpour(inner)
        tell(optimizer)
        return optimizer

    train(wrap, samples=LONG, at_step=at_step)


def between_epochs():
    def validate(optimizer, model, epoch):
        if optimizer.role == "server 0":
            ready()
            sleep()

    train(at_epoch_end=validate)


def during_first_step():
    def at_step(optimizer, model, epoch, step):
        if optimizer.rank == 1:
            ready()
        sleep()

    train(at_step=at_step)


def during_evaluate():
    def slow(batch):
        time.sleep(0.2)
        return {"x": 1.0}

    def evaluates(optimizer, model, data):
        ready()
        evaluate(optimizer, model, Samples(LONG), slow)

    train(evaluates=evaluates)


# -- exceptions and exits ------------------------------------------------------------------------------


def worker_raises():
    train(at_step=on(1, raises))


def all_workers_raise():
    def at_step(optimizer, model, epoch, step):
        if step == 2:
            ready()
            raise NameError("name 'los' is not defined")

    train(at_step=at_step)


def all_raise_before():
    ready()
    raise FileNotFoundError("no data under /scratch/data")


def server_raises():
    train(at_epoch_end=on_server(raises))


def bad_sample(index):
    if index == 25:
        raise ValueError("no such sample")


def getitem_raises():
    ready()
    train(dataset=Samples(60, bad_sample))


def getitem_raises_in_a_process():
    ready()
    train(dataset=Samples(60, bad_sample), loader={"num_workers": 2})


def aside_raises():
    def validate(snapshot):
        ready()
        raises()

    def beside(optimizer, model, epoch):
        if epoch == 0:
            optimizer.aside(validate, model)

    train(at_epoch_end=beside, epochs=20)


def aside_raises_in_the_last_epoch():
    def validate(snapshot):
        time.sleep(0.3)
        ready()
        raises()

    train(at_epoch_end=lambda optimizer, model, epoch: optimizer.aside(validate, model), epochs=1)
    print("done", flush=True)


def aside_raises_in_a_long_epoch():
    def validate(snapshot):
        time.sleep(0.3)
        ready()
        raises()

    model = network()
    optimizer = nt.Downpour(sgd(model))
    for data in (Samples(60), Samples(LONG)):
        for batch in DataLoader(data, batch_size=5, sampler=nt.ShardSampler(data)):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
        optimizer.aside(validate, model)


def worker_exits():
    train(at_step=on(1, lambda: sys.exit(3)))


def worker_exits_from_a_long_training():
    train(at_step=on(1, lambda: sys.exit(3), epoch=0), samples=LONG)


def worker_exits_with_words():
    train(at_step=on(1, lambda: sys.exit("out of quota")))


def train_until_one_leaves(what, left):
    """Train; rank 1 does something in its second epoch, and rank 2 begins its third once rank 1 has left."""
    left = Path(left)
    if rank_and_size()[0] == 1:
        atexit.register(left.touch)  # registered before the training, so called after it

    def at_step(optimizer, model, epoch, step):
        on(1, what)(optimizer, model, epoch, step)
        while optimizer.rank == 2 and epoch == 2 and not left.exists():
            time.sleep(0.01)

    train(at_step=at_step)


def worker_exits_quietly(left):
    train_until_one_leaves(sys.exit, left)
    print("done", flush=True)


def server_exits():
    train(at_epoch_end=on_server(lambda: sys.exit(3)))


def worker_dies():
    train(at_step=on(1, lambda: os._exit(5)))


def worker_dies_quietly():
    train(at_step=on(1, lambda: os._exit(0)))


def server_dies():
    train(at_epoch_end=on_server(lambda: os._exit(5)))


def caught(left):
    try:
        train_until_one_leaves(raises, left)
    except ValueError as error:
        print(f"caught: {error}", flush=True)
    print("done", flush=True)


def thread_raises():
    def validate(optimizer, model, epoch):
        if optimizer.rank == 1 and epoch == 0:
            ready()
            threading.Thread(target=raises, name="mine").start()

    train(at_epoch_end=validate, epochs=10**6)


# -- models and options that differ --------------------------------------------------------------------


class Reordered(torch.nn.Module):
    def __init__(self, first):
        super().__init__()
        for name in ("a", "b") if first else ("b", "a"):
            setattr(self, name, torch.nn.Linear(3, 3))


class Normed(torch.nn.Module):
    def __init__(self, normed):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        if normed:
            self.norm = torch.nn.BatchNorm1d(3, affine=False)


def seeded(**options):
    return initialised(torch.nn.Linear(3, 2, **options))


def wrapped(model, wrap=nt.Downpour, lr=0.1, make=torch.optim.SGD, **options):
    return wrap(make(model.parameters(), lr=lr), **options)


DIFFER = {
    "shape": lambda odd: wrapped(torch.nn.Linear(3 + odd, 2)),
    "dtype": lambda odd: wrapped(torch.nn.Linear(3, 2).to(torch.bfloat16 if odd else torch.float32)),
    "order": lambda odd: wrapped(Reordered(odd)),
    "number": lambda odd: wrapped(torch.nn.Linear(3, 2, bias=not odd)),
    "buffers": lambda odd: wrapped(Normed(odd)),
    "normed": lambda odd: wrapped(torch.nn.BatchNorm1d(3) if odd else torch.nn.Linear(3, 2)),
    "options": lambda odd: wrapped(torch.nn.Linear(3, 2), nt.EASGD, every=20 + odd),
    "servers": lambda odd: wrapped(torch.nn.Linear(3, 2), servers=1 + odd),
    "wrapper": lambda odd: wrapped(torch.nn.Linear(3, 2), nt.EASGD if odd else nt.Downpour),
    "optimizer": lambda odd: wrapped(
        torch.nn.Linear(3, 2), make=torch.optim.Adam if odd else torch.optim.SGD
    ),
}
COMMON = {
    "all_servers": lambda size: wrapped(seeded(), servers=size),
    "more_servers_than_parameters": lambda size: wrapped(seeded(bias=False), servers=2),
    "other_starts": lambda size: wrapped(torch.nn.Linear(3, 2), servers=2),
    "backup": lambda size: wrapped(torch.nn.Linear(3, 2), nt.Synchronous, backup=size),
    "double": lambda size: wrapped(torch.nn.Linear(3, 2).double()),
    "lbfgs": lambda size: wrapped(torch.nn.Linear(3, 2), make=torch.optim.LBFGS),
    "every": lambda size: wrapped(torch.nn.Linear(3, 2), every=0),
}


def rank_and_size():
    from nnlo_common.cluster._connecting import find_launch

    launch = find_launch(os.environ)
    return launch.rank, launch.size


def differ():
    """All differences in one job: each rank catches the refusal and goes on to the next."""
    rank, size = rank_and_size()
    for name, make in DIFFER.items():
        for odd in (0, size - 1):
            try:
                make(rank == odd)
            except ConfigurationError as error:
                print(f"{name}, odd rank {odd}, on rank {rank}: {error}", flush=True)
            else:
                print(f"{name}, odd rank {odd}, on rank {rank}: not noticed", flush=True)
                os._exit(1)


def common():
    """All refusals that are the same on all ranks."""
    rank, size = rank_and_size()
    for name, make in COMMON.items():
        try:
            make(size)
        except ConfigurationError as error:
            print(f"{name} on rank {rank}: {error}", flush=True)


def one_differs(name):
    rank, size = rank_and_size()
    ready()
    DIFFER[name](rank == size - 1)


def one_common(name):
    _, size = rank_and_size()
    ready()
    COMMON[name](size)


def second_wrapper():
    first = wrapped(network())
    ready()
    wrapped(network(), nt.EASGD)
    first.close()


# -- numbers that are not finite -----------------------------------------------------------------------


def finite(model):
    return all(torch.isfinite(parameter).all() for parameter in model.parameters())


def diverge(wrap, *, bad=None, **options):
    kept = []

    def at_step(optimizer, model, epoch, step):
        if not kept:
            ready()
            kept.append(model)

    def remember(inner):
        kept_optimizer = wrap(inner)
        if kept_optimizer.role == "server 0":
            kept.append(kept_optimizer._modules()[0])
        return kept_optimizer

    data = Samples(2000, bad or nothing)
    try:
        train(remember, dataset=data, at_step=at_step, **options)
    except DivergedError:
        model = kept[0]
        print(f"the centre is finite: {finite(model)}", flush=True)
        raise


def nan_sample(index):
    return torch.full((5,), float("nan")) if index == 77 else None


WRAPS = {
    "Downpour": nt.Downpour,
    "EASGD": functools.partial(nt.EASGD, every=2),
    "GEM": nt.GEM,
    "Synchronous": nt.Synchronous,
    "AGN": functools.partial(nt.AGN, every=2),
    "DynSGD": nt.DynSGD,
    "LocalSGD": functools.partial(nt.LocalSGD, every=2),
    "DiLoCo": functools.partial(nt.DiLoCo, every=2),
}


def nan_data(name):
    diverge(WRAPS[name], bad=nan_sample)


def large_rate(name):
    def squared(model, batch):
        return (model[2](model[0](batch[0])) ** 2).mean()

    diverge(WRAPS[name], lr=30.0, loss=squared, epochs=100)


def nan_in_a_head():
    """Of a model that is frozen but for its small head, nearly all gradients are zeros."""
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 1000), torch.nn.Tanh(), torch.nn.Linear(1000, 1000), torch.nn.Linear(1000, 3)
    )
    for parameter in model[:3].parameters():
        parameter.requires_grad_(False)
    ready()
    optimizer = nt.Downpour(sgd(model))
    data = Samples(200, nan_sample)
    try:
        for batch in DataLoader(data, batch_size=5, sampler=nt.ShardSampler(data)):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    except DivergedError:
        print(f"the centre is finite: {finite(model)}", flush=True)
        raise


# -- loops that disagree -------------------------------------------------------------------------------


def only(condition):
    def evaluates(optimizer, model, data):
        if condition(optimizer.rank):
            evaluate(optimizer, model, data)

    ready()
    train(samples=1500, evaluates=evaluates)
    print("done", flush=True)


def other_names():
    ready()
    train(
        evaluates=lambda optimizer, model, data: evaluate(
            optimizer, model, data, lambda batch: {"loss" if optimizer.rank else "mse": 1.0}
        )
    )


def training_sampler_in_evaluate():
    def evaluates(optimizer, model, data):
        batches = DataLoader(data, batch_size=5, sampler=nt.ShardSampler(data, optimizer=optimizer))
        optimizer.evaluate(lambda batch: {"loss": loss_of(model, batch)}, batches)

    ready()
    train(evaluates=evaluates)
    print("done", flush=True)


def no_sampler():
    model = network()
    optimizer = nt.Downpour(sgd(model))
    ready()
    for batch in DataLoader(Samples(20), batch_size=5):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


# -- what simply works ---------------------------------------------------------------------------------


def report(name, optimizer, seen, extra=""):
    print(f"{name}: rank {optimizer.rank} saw {seen} {extra}".strip(), flush=True)


def small():
    """Data sets smaller than the number of workers, dealt out and leased, with evaluation."""
    for wrap in ("Downpour", "Synchronous", "LocalSGD"):
        for assignment in ("static", "dynamic"):
            for size in (0, 1, 3):
                losses = []

                def evaluates(optimizer, model, data, losses=losses):
                    losses.append(evaluate(optimizer, model, data))

                optimizer, _, seen = train(
                    WRAPS[wrap], samples=size, sampler={"assignment": assignment}, evaluates=evaluates
                )
                optimizer.close()
                report(f"{wrap} {assignment} {size}", optimizer, seen, json.dumps(losses))
    print("done", flush=True)


def tiny_batches():
    """Batches larger than the share, and `drop_last` with shares of less than a batch."""
    for drop_last in (False, True):
        model = network()
        optimizer = nt.Downpour(sgd(model))
        data = Samples(9)
        seen = 0
        for _ in range(3):
            loader = DataLoader(
                data, 50 if not drop_last else 5, sampler=nt.ShardSampler(data), drop_last=drop_last
            )
            for batch in loader:
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
                seen += len(batch[1])
            evaluate(optimizer, model, data)
        optimizer.close()
        report(f"drop_last={drop_last}", optimizer, seen)
    print("done", flush=True)


def loops():
    """Breaking out of an epoch, stopping in the middle, means without evaluation, no `close`."""
    for assignment in ("static", "dynamic"):
        model = network()
        optimizer = nt.Downpour(sgd(model))
        data = Samples(200)
        loader = DataLoader(data, 5, sampler=nt.ShardSampler(data, assignment=assignment, unit=8))
        seen = 0
        for _ in range(4):
            for step, batch in enumerate(loader):
                if step == 3 + optimizer.rank:
                    break
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
                seen += len(batch[1])
            evaluate(optimizer, model, data)
        optimizer.close()
        report(f"break {assignment}", optimizer, seen)

    def stops(optimizer, model, epoch, step):
        if epoch == 1 and step == 1:
            optimizer.stop()

    optimizer, _, seen = train(at_step=stops)
    optimizer.close()
    report("stop on workers", optimizer, seen)
    from mpi4py import MPI

    def stops_and_tells(optimizer, model, epoch):
        if epoch == 1:
            optimizer.stop()
            if optimizer.serves:
                for worker in (1, 2):
                    MPI.COMM_WORLD.send("stopped", worker)

    def waits_for_it(optimizer, model, epoch, step):
        if (epoch, step) == (3, 0):
            MPI.COMM_WORLD.recv(source=0)

    optimizer, _, seen = train(at_step=waits_for_it, at_epoch_end=stops_and_tells, epochs=9)
    optimizer.close()
    report("stop on the server", optimizer, seen)
    means = []
    optimizer, _, seen = train(
        at_epoch_end=lambda optimizer, model, epoch: means.append(optimizer.mean({"x": optimizer.rank}))
    )
    report("mean", optimizer, seen, json.dumps(means))
    optimizer.close()
    optimizer, _, seen = train()
    report("not closed", optimizer, seen)
    print("done", flush=True)


def loaders():
    """Loaders with processes of their own: forked, kept, and not forked."""
    for context, persistent in (("fork", False), ("fork", True), ("forkserver", True)):
        mine = {"num_workers": 2, "multiprocessing_context": context, "persistent_workers": persistent}
        optimizer, _, seen = train(loader=mine, epochs=2)
        optimizer.close()
        report(f"{context} {persistent}", optimizer, seen)
    print("done", flush=True)


def adversaries():
    """Two optimizers in one training, then, without a word, another training of both networks."""
    for wrap in (nt.Downpour, nt.LocalSGD):
        first, second = network(), network()
        of_first, of_second = wrapped(first, wrap), wrapped(second, wrap, make=torch.optim.Adam)
        data = Samples(60)
        seen = 0
        for _ in range(2):
            for batch in DataLoader(data, 5, sampler=nt.ShardSampler(data)):
                for model, optimizer in ((first, of_first), (second, of_second)):
                    optimizer.zero_grad()
                    loss_of(model, batch).backward()
                    optimizer.step()
                seen += len(batch[1])
        losses = [evaluate(of_first, model, data) for model in (first, second)]
        report(wrap.__name__, of_second, seen, json.dumps([losses, of_first.report().steps]))
    print("done", flush=True)


def main():
    name, *rest = sys.argv[1:]
    special = {
        "server_only_evaluates": lambda: only(lambda rank: rank == 0),
        "workers_only_evaluate": lambda: only(lambda rank: rank > 0),
        "one_worker_evaluates": lambda: only(lambda rank: rank != 2),
    }
    special.get(name, globals().get(name))(*rest)


if __name__ == "__main__":
    main()
