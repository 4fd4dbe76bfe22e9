"""Steady in torch loops: progress ends epochs, schedules follow it, and what it cannot have is refused."""

from __future__ import annotations

import copy
from collections import Counter

import numpy as np
import pytest

from nnlo_common.algorithms._paced import PacedOptimizer
from nnlo_common.testing import MemoryCluster

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")
import nnlo_torch as nt  # noqa: E402
from nnlo_torch import _schedules  # noqa: E402

pytestmark = [pytest.mark.framework("torch"), pytest.mark.sampled(2)]

SIZE, BATCH, EPOCHS = 103, 10, 3


class Numbered(torch.utils.data.Dataset):
    """Samples of a noisy line, each with its number."""

    def __init__(self, noise: float = 2.0) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(SIZE, 4, generator=generator)
        self.y = self.x.sum(1, keepdim=True) + noise * torch.randn(SIZE, 1, generator=generator)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index):
        return self.x[index], self.y[index], index


def model_of():
    model = torch.nn.Linear(4, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.1, -0.2, 0.3, 0.0]]))
        model.bias.zero_()
    return model


def plain(model, name="momentum"):
    if name == "adam":
        return torch.optim.Adam(model.parameters(), lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.0 if name == "without momentum" else 0.9)


def trained(world=None, *, whole=False, schedule=None, epochs=EPOCHS, name="momentum", **options):
    """Train; return for each epoch the samples used here, the progress and the learning rate."""
    torch.set_num_threads(1)
    model, data = model_of(), Numbered()
    optimizer = nt.Steady(plain(model, name), world=world, **options)
    if whole:
        inner = torch.utils.data.BatchSampler(torch.utils.data.RandomSampler(data), BATCH, drop_last=False)
        sampler = nt.ShardSampler(inner, optimizer=optimizer, unit=1)
        loader = torch.utils.data.DataLoader(data, batch_sampler=sampler)
    else:
        sampler = nt.ShardSampler(data, optimizer=optimizer, unit=BATCH)
        loader = torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=sampler)
    scheduler = None if schedule is None else schedule(optimizer, len(loader))
    found = []
    for _ in range(epochs):
        used = Counter()
        for x, y, index in loader:
            used.update(index.tolist())
            optimizer.zero_grad()
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
        optimizer.mean({})  # all are at the end of the epoch: none has begun the next one
        report = optimizer.report()
        found.append((used, report.progress, optimizer.param_groups[0]["lr"]))
    steps = None if scheduler is None else scheduler.last_epoch
    optimizer.close()
    return {
        "role": optimizer.role,
        "epochs": found,
        "steps": steps,
        "report": optimizer.report(),
        "model": model,
    }


def on_ranks(size, **options):
    with MemoryCluster(size) as cluster:
        return cluster.run(lambda world: trained(world, **options), timeout_s=60)


def together(results, epoch):
    return sum((one["epochs"][epoch][0] for one in results), Counter())


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_one_worker_has_the_bits_of_the_plain_loop(name):
    alone = trained(name=name)["model"]
    server, worker = on_ranks(2, name=name)
    for one in (server, worker):
        assert torch.equal(one["model"].weight, alone.weight)
        assert torch.equal(one["model"].bias, alone.bias)
    assert [sum(together([server, worker], epoch).values()) for epoch in range(EPOCHS)] == [SIZE] * EPOCHS


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (3, {}),
        (4, {}),
        (4, {"name": "adam"}),
        (5, {"servers": 2}),
        (3, {"every": 2}),
        (3, {"lag": 1}),
        (4, {"synchronous": True}),
        (3, {"servers": 0}),
        (5, {"group_size": 2}),
        (3, {"whole": True}),
        (3, {"whole": True, "servers": 0}),
    ],
    ids=str,
)
def test_an_epoch_ends_when_its_progress_is_made(ranks, options):
    results = on_ranks(ranks, **options)
    lead = next(one for one in results if one["role"] in ("server 0", "lead"))
    every, passed = options.get("every", 1), 0.0
    for epoch in range(EPOCHS):
        progress = lead["epochs"][epoch][1]
        # At most a step of all workers too much, which is worth less than its samples.
        assert (epoch + 1) * (SIZE - 1) <= progress <= (epoch + 1) * (SIZE + ranks * BATCH * every)
        passed += sum(together(results, epoch).values()) / SIZE
    assert passed > EPOCHS
    gain = lead["report"].gain
    assert gain.workers == ranks - options.get("servers", 1)
    # A late mean of several gradients may be worth less than one gradient of one process.
    assert 1 / every / (options.get("lag", 0) + 1) <= gain.gain <= gain.workers
    assert str(gain).startswith(f"{gain.workers} workers did the work of ")


def test_no_sample_is_used_twice_more_often_than_another():
    results = on_ranks(4)
    for epoch in range(EPOCHS):
        used = together(results, epoch)
        counts = [used[index] for index in range(SIZE)]
        # A worker gives back at most a lease at an epoch's end.
        assert max(counts) - min(counts) <= 2
        assert sum(count < max(counts) - 1 for count in counts) <= 3 * BATCH


def test_passes_of_fixed_number_use_each_sample_once():
    results = on_ranks(4, passes="fixed")
    for epoch in range(EPOCHS):
        assert together(results, epoch) == Counter(range(SIZE))


@pytest.mark.parametrize("whole", [False, True])
def test_a_schedule_by_batch_follows_progress(whole):
    def one_cycle(optimizer, batches):
        assert batches == 11
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=EPOCHS * batches)

    alone = trained(schedule=one_cycle, whole=whole)
    assert alone["steps"] == 33
    for one in on_ranks(4, schedule=one_cycle, whole=whole):
        if "worker" in one["role"]:
            assert one["steps"] == 33
            for epoch in range(EPOCHS):
                assert one["epochs"][epoch][2] == pytest.approx(alone["epochs"][epoch][2])


@pytest.mark.parametrize("options", [{}, {"servers": 0}], ids=str)
def test_a_schedule_may_set_a_momentum_that_was_zero(options):
    def one_cycle(optimizer, batches):  # it cycles the momentum, too
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=EPOCHS * batches)

    for one in on_ranks(3, schedule=one_cycle, name="without momentum", **options):
        assert one["model"].weight.isfinite().all()
        assert not torch.equal(one["model"].weight, model_of().weight)


class Around(torch.optim.Optimizer):
    """An optimizer around another, as accelerate makes it."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def step(self, closure=None):
        return self.optimizer.step(closure)


def scheduled(world, *, around=lambda optimizer: optimizer, state=None, **options):
    """Train two epochs with a schedule by batch; return the role, and the schedule's state after each."""
    torch.set_num_threads(1)
    model, data = model_of(), Numbered()
    wrapper = nt.Steady(plain(model), world=world, **options)
    sampler = nt.ShardSampler(data, optimizer=wrapper, unit=BATCH)
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=sampler)
    optimizer = around(wrapper)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
    if state is not None:
        schedule.load_state_dict(state)
    found = []
    for _ in range(2):
        for x, y, _ in loader:
            wrapper.zero_grad()
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
            schedule.step()
        found.append(copy.deepcopy(schedule.state_dict()))
    wrapper.close()
    return wrapper.role, found


def places(size, **options):
    """The places of the workers' schedules after each epoch."""
    with MemoryCluster(size) as cluster:
        ranks = cluster.run(lambda world: scheduled(world, **options), timeout_s=60)
    return [[one["last_epoch"] for one in states] for role, states in ranks if role != "server 0"]


@pytest.mark.parametrize("options", [{}, {"servers": 0}], ids=str)
def test_a_schedule_made_for_an_optimizer_around_ours_follows_progress(options):
    assert all(one == [11, 22] for one in places(3, around=Around, **options))


class Paces:
    """A training of two epochs of 30 samples in batches of 10, one progress after the other."""

    counts_progress = True

    def __init__(self):
        self.paces, self._within = (0, 0.0, 0.0, 0.0), False

    def in_epoch(self):
        return self._within

    def due(self, schedule, epoch, progress, *, within):
        self.paces, self._within = (epoch, progress, 30.0, 10.0), within
        return _schedules._due(schedule)


def test_after_the_last_batch_a_schedule_by_batch_makes_what_is_left_and_one_by_epoch_a_step(monkeypatch):
    optimizer, paces = plain(model_of()), Paces()
    by_batch, by_epoch = (torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0) for _ in range(2))
    monkeypatch.setattr(_schedules, "_trainings", {id(optimizer): lambda: paces})
    assert _schedules._due(by_batch) == 1  # before the first step nothing is known
    for epoch in range(2):
        assert [paces.due(by_batch, epoch, made, within=True) for made in (8.0, 22.0)] == [0, 2]
        # Loops that take a batch ahead are told of the end before they train on the last one.
        assert paces.due(by_batch, epoch, 31.0, within=False) == 1
        assert paces.due(by_epoch, epoch, 31.0, within=False) == 1


def test_a_schedule_by_batch_goes_on_in_another_training():
    with MemoryCluster(3) as cluster:
        ranks = cluster.run(lambda world: scheduled(world, servers=0), timeout_s=60)
    state = ranks[0][1][-1]
    assert places(3, state=state, servers=0) == [[33, 44]] * 3


def test_a_schedule_by_epoch_is_left_alone():
    def program(world):
        torch.set_num_threads(1)
        model = model_of()
        optimizer = nt.Steady(plain(model), world=world)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for _ in range(2):
            for x, y, _ in torch.utils.data.DataLoader(
                Numbered(), batch_size=BATCH, sampler=nt.ShardSampler(Numbered(), optimizer=optimizer)
            ):
                optimizer.zero_grad()
                ((model(x) - y) ** 2).mean().backward()
                optimizer.step()
            scheduler.step()
        optimizer.close()
        return optimizer.param_groups[0]["lr"]

    with MemoryCluster(3) as cluster:
        assert cluster.run(program, timeout_s=60) == [0.0025] * 3


def test_any_other_optimizer_has_the_gain_alone():
    def program(world):
        torch.set_num_threads(1)
        model, data = model_of(), Numbered()
        optimizer = nt.Steady(torch.optim.RMSprop(model.parameters(), lr=0.01), world=world)
        loader = torch.utils.data.DataLoader(
            data, batch_size=BATCH, sampler=nt.ShardSampler(data, optimizer=optimizer)
        )
        for _ in range(2):
            for x, y, _ in loader:
                optimizer.zero_grad()
                ((model(x) - y) ** 2).mean().backward()
                optimizer.step()
        report = optimizer.report()
        optimizer.close()
        return report.gain, optimizer.param_groups[0]["lr"]

    with MemoryCluster(4) as cluster:
        results = cluster.run(program, timeout_s=60)
    assert results[0][0].gain > 1
    assert {rate for _, rate in results} == {0.01}  # the scaled rate is taken back


@pytest.mark.parametrize(
    ("optimizer", "problem"),
    [
        (lambda p: torch.optim.Adam(p, amsgrad=True), "cannot wrap Adam with amsgrad=True"),
        (
            lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.5),
            "cannot wrap SGD with dampening=0.5",
        ),
    ],
)
def test_options_that_its_steps_do_not_have_are_refused_by_name(optimizer, problem):
    with pytest.raises(Exception, match=problem):
        nt.Steady(optimizer(model_of().parameters()))


def test_two_optimizers_are_refused_by_name():
    def program(world):
        first, second = model_of(), model_of()
        kept = nt.Steady(plain(first), world=world)
        with pytest.raises(Exception, match="cannot use Steady: its gain compares neighbouring gradients"):
            nt.Steady(plain(second), world=world)
        kept.close()

    with MemoryCluster(2) as cluster:
        cluster.run(program, timeout_s=60)


def interrupted(folder, world, *, stop_at=None, epochs=3, name="adam", **options):
    """Train with checkpoints; the first worker fails before its batch `stop_at`."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model, data = model_of(), Numbered()
    optimizer = nt.Steady(plain(model, name), world=world, **options)
    loader = torch.utils.data.DataLoader(
        data, batch_size=BATCH, sampler=nt.ShardSampler(data, optimizer=optimizer, unit=BATCH)
    )
    checkpoint = nt.Checkpoint(folder, optimizer, batches=3)
    used, done = Counter(), 0
    for _ in checkpoint.epochs(epochs):
        for x, y, index in checkpoint.batches(loader):
            done += 1
            due = stop_at is not None and done >= stop_at and optimizer.share[0] == 0
            if due and list(folder.glob("checkpoint-*/manifest.json")):
                raise KeyboardInterrupt
            used.update(index.tolist())
            optimizer.zero_grad()
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
        optimizer.mean({}, 0)
    report = optimizer.report()
    optimizer.close()
    state = optimizer.optimizer.state_dict()["state"] if optimizer.serves else {}
    return model.weight.detach().clone(), used, report, state


def killed_and_resumed(folder, size, *, after=None, **options):
    with pytest.raises(KeyboardInterrupt), MemoryCluster(size) as cluster:
        cluster.run(lambda world: interrupted(folder, world, stop_at=14, **options), timeout_s=60)
    with MemoryCluster(after or size) as cluster:
        return cluster.run(lambda world: interrupted(folder, world, **options), timeout_s=60)


def straight(folder, size, **options):
    with MemoryCluster(size) as cluster:
        return cluster.run(lambda world: interrupted(folder, world, **options), timeout_s=60)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["momentum", "adam"])
@pytest.mark.parametrize(("size", "options"), [(2, {}), (3, {"servers": 0})], ids=["one worker", "servers=0"])
def test_killed_within_an_epoch_it_resumes_with_the_same_bits(tmp_path, size, options, name):
    again = killed_and_resumed(tmp_path / "run", size, name=name, **options)
    whole = straight(tmp_path / "straight", size, name=name, **options)
    for one, other in zip(again, whole, strict=True):
        assert torch.equal(one[0], other[0])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"synchronous": True}], ids=str)
def test_several_workers_killed_within_an_epoch_go_on_from_its_progress(tmp_path, options):
    results = killed_and_resumed(tmp_path / "run", 4, **options)
    progress = results[0][2].progress
    assert EPOCHS * (SIZE - 1) <= progress <= EPOCHS * (SIZE + 4 * BATCH)
    # What the first run had used until its checkpoint is not used again in that pass.
    used = sum((one[1] for one in results), Counter())
    assert sum(used.values()) < 4 * EPOCHS * SIZE


@pytest.mark.slow
@pytest.mark.parametrize("after", [2, 3, 5])
def test_another_number_of_workers_resumes_with_the_momentum(tmp_path, after):
    results = killed_and_resumed(tmp_path / "run", 4, after=after)
    assert after == 2 or results[0][2].progress >= EPOCHS * (SIZE - 1)  # one worker needs no count
    state = results[0][3]
    assert set(state[0]) == {"step", "exp_avg", "exp_avg_sq"}
    assert float(state[0]["step"]) > EPOCHS * SIZE / BATCH
    assert float(state[0]["exp_avg_sq"].abs().max()) > 0


@pytest.mark.parametrize("name", ["momentum", "adam"])
@pytest.mark.parametrize("options", [{}, {"servers": 0}], ids=str)
def test_schedules_are_obeyed_after_a_state_was_loaded(name, options):
    def program(world):
        torch.set_num_threads(1)
        model, data = model_of(), Numbered()
        optimizer = nt.Steady(plain(model, name), world=world, **options)
        sampler = nt.ShardSampler(data, optimizer=optimizer, unit=BATCH)
        loader = torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=sampler)
        optimizer.load_state_dict(optimizer.state_dict())
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        for x, y, _ in loader:
            optimizer.zero_grad()
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
        optimizer.close()
        return model

    with MemoryCluster(3) as cluster:
        for model in cluster.run(program, timeout_s=60):
            assert torch.equal(model.weight, model_of().weight)


@pytest.mark.parametrize("options", [{}, {"servers": 0}], ids=str)
def test_a_copy_knows_how_often_its_optimizer_has_stepped(options):
    def program(world):
        torch.set_num_threads(1)
        model, data = model_of(), Numbered()
        optimizer = nt.Steady(plain(model, "adam"), world=world, **options)
        sampler = nt.ShardSampler(data, optimizer=optimizer, unit=BATCH)
        for x, y, _ in torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=sampler):
            optimizer.zero_grad()
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
        optimizer.close()
        steps = [float(one["step"]) for one in copy.deepcopy(optimizer).state.values()]
        return optimizer.role, steps, optimizer.report().steps

    with MemoryCluster(3) as cluster:
        role, steps, _ = cluster.run(program, timeout_s=60)[0]
    assert role in ("server 0", "lead")
    assert len(steps) == 2
    assert min(steps) == max(steps) > 2


@pytest.mark.parametrize("name", ["momentum", "adam"])
@pytest.mark.parametrize("watched", [False, True], ids=["after epochs", "after commits"])
def test_a_script_on_the_server_sees_the_optimizer_of_one_process(monkeypatch, name, watched):
    begin, commits, seen = PacedOptimizer.begin, [], []

    def noted(paced, *arguments):
        move = begin(paced, *arguments)
        commits.append(paced)
        assert paced.units != (1, 1), "sums"
        return move

    def program(world):
        torch.set_num_threads(1)
        model, data = model_of(), Numbered()
        optimizer = nt.Steady(plain(model, name), world=world)

        def look():
            if optimizer.serves and commits:
                state = optimizer.optimizer.state_dict()["state"][0]
                mean = state["momentum_buffer" if name == "momentum" else "exp_avg"].numpy().ravel()
                assert mean.any()
                assert np.array_equal(mean, commits[-1].velocity[: mean.size] * commits[-1].units[0])
                seen.append(len(commits))

        if watched:
            optimizer.after_commit(look)
        sampler = nt.ShardSampler(data, optimizer=optimizer, unit=BATCH)
        for _ in range(2):
            for x, y, _ in torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=sampler):
                optimizer.zero_grad()
                ((model(x) - y) ** 2).mean().backward()
                optimizer.step()
            optimizer.mean({})
            look()
        optimizer.close()
        look()

    monkeypatch.setattr(PacedOptimizer, "begin", noted)
    with MemoryCluster(3) as cluster:
        cluster.run(program, timeout_s=60)
    assert len(seen) == 3 + (len(commits) if watched else 0)
