"""nnlo_torch: wrapped optimizers in ordinary loops, alone, with threads as ranks, and under mpiexec."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest

from nnlo_common import EASGD, ConfigurationError
from nnlo_common.algorithms import option
from nnlo_common.testing import MemoryCluster
from tests.helpers.frameworks import since
from tests.helpers.jobs import mpiexec
from tests.helpers.misspelt_options import MISSPELT, assert_answered, assert_subclass_has_options_of_its_own
from tests.helpers.paths import EXAMPLES, PROGRAMS

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")
import nnlo_torch as nt  # noqa: E402
from nnlo_common.training import _collectives as _framework  # noqa: E402
from nnlo_torch import _flat_model  # noqa: E402
from tests.helpers import torch_cases as cases  # noqa: E402
from tests.helpers.torch_cases import WRAPPERS  # noqa: E402

pytestmark = pytest.mark.framework("torch")


def weights(model):
    return torch.cat([p.detach().float().flatten() for p in model.parameters()]).numpy().copy()


def loop(model, optimizer, sampler, *, batch=7, epochs=2, scheduler=None):
    x, y = cases.data()
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, y), batch_size=batch, sampler=sampler
    )
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            cases.loss_of(model, inputs, targets).backward()
            optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return weights(model)


def plain(make, model=None, **options):
    model = cases.model_of() if model is None else model
    return loop(model, make(model), nt.ShardSampler(range(cases.SAMPLES), seed=3), **options)


def on_ranks(size, wrap, *, model_of=cases.model_of, make=None, servers=1, **options):
    """The centre as each rank sees it at the end of the same loop on threads as ranks."""
    make = make or cases.OPTIMIZERS["sgd"]

    def program(world):
        model = model_of()
        optimizer = wrap(make(model), world=world, servers=servers)
        loop(model, optimizer, nt.ShardSampler(range(cases.SAMPLES), seed=3, optimizer=optimizer), **options)
        with optimizer.center_weights():
            center = weights(model)
        optimizer.close()
        return center, weights(model), optimizer.report()

    with MemoryCluster(size) as cluster:
        return cluster.run(program, timeout_s=30)


@pytest.mark.parametrize("name", cases.OPTIMIZERS)
def test_alone_a_wrapper_is_the_plain_optimizer(name):
    make = cases.OPTIMIZERS[name]
    wrapped = plain(lambda model: nt.Downpour(make(model)))
    assert np.array_equal(wrapped, plain(make))


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("width", [16, 100_000])  # the long one is stepped in chunks, and sent in parts
def test_one_worker_under_mpi_has_the_bits_of_the_plain_loop(tmp_path, width):
    done = mpiexec(2, PROGRAMS / "torch_bits.py", str(tmp_path), "Downpour", str(width), timeout_s=90)
    assert done.returncode == 0, done.stderr
    for name, make in cases.OPTIMIZERS.items():
        want = plain(make, cases.model_of(width))
        for rank in (0, 1):
            center = np.load(tmp_path / f"{name}.rank{rank}.npz")["center"]
            assert np.array_equal(center, want), (name, rank)


@pytest.mark.mpi
@pytest.mark.slow
def test_synchronous_workers_under_mpi_are_one_large_batch(tmp_path):
    """Two workers take every other sample, in batches of 6: together the plain loop's batches of 12."""
    done = mpiexec(3, PROGRAMS / "torch_bits.py", str(tmp_path), "Synchronous", "16", timeout_s=90)
    assert done.returncode == 0, done.stderr
    for name, make in cases.OPTIMIZERS.items():
        center = np.load(tmp_path / f"{name}.rank0.npz")["center"]
        # Adam and its like divide by the gradient, which makes much of a rounded zero.
        np.testing.assert_allclose(center, plain(make, batch=12), rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("name", cases.OPTIMIZERS)
def test_one_worker_has_the_bits_of_the_plain_loop_with_any_number_of_servers(name, servers):
    make = cases.OPTIMIZERS[name]
    want = plain(make)
    for center, own, _ in on_ranks(servers + 1, nt.Downpour, make=make, servers=servers):
        assert np.array_equal(center, want)
        assert np.array_equal(own, want)


@pytest.mark.parametrize("name", WRAPPERS)
def test_every_wrapper_trains_on_three_workers(name):
    def make(model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)

    def wrap(optimizer, **options):
        return getattr(nt, name)(optimizer, **WRAPPERS[name], **options)

    (center, own, report), *workers = on_ranks(4, wrap, make=make, epochs=6)
    assert np.array_equal(center, own)  # the server's model is the centre
    assert report.exchanges > 0
    assert sum(worker[2].steps for worker in workers) == 6 * 9  # three shares of 20, in batches of 7
    model = cases.model_of()
    x, y = cases.data()
    before = cases.loss_of(model, x, y)
    torch.nn.utils.vector_to_parameters(torch.from_numpy(center), model.parameters())
    assert cases.loss_of(model, x, y) < before - 0.02


def test_schedulers_set_the_rate_where_the_optimizer_runs():
    def make(model):
        return torch.optim.SGD(model.parameters(), lr=0.2)

    def program(world):
        model = cases.model_of()
        optimizer = nt.Downpour(make(model), world=world)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.1)
        sampler = nt.ShardSampler(range(cases.SAMPLES), seed=3, optimizer=optimizer)
        loop(model, optimizer, sampler, scheduler=scheduler)
        optimizer.close()
        return weights(model), optimizer.optimizer.param_groups[0]["lr"]

    with MemoryCluster(2) as cluster:
        (center, rate), _ = cluster.run(program, timeout_s=30)
    model = cases.model_of()
    optimizer = make(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.1)
    sampler = nt.ShardSampler(range(cases.SAMPLES), seed=3)
    want = loop(model, optimizer, sampler, scheduler=schedule)
    assert rate == pytest.approx(0.002)
    assert np.array_equal(center, want)


class Odd(torch.nn.Module):
    """Frozen, unused, tied and 16-bit parameters in one model."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(5, 8)
        self.frozen = torch.nn.Linear(8, 8)
        self.unused = torch.nn.Linear(3, 3)
        self.last = torch.nn.Linear(8, 8, bias=False)
        self.head = torch.nn.Linear(8, 3)
        self.last.weight = self.frozen.weight  # tied
        for parameter in self.frozen.parameters():
            parameter.requires_grad_(False)
        cases.initialised(self)

    def forward(self, x):
        return self.head(torch.tanh(self.last(torch.tanh(self.frozen(self.first(x))))))


def test_frozen_unused_and_tied_parameters_are_left_alone():
    def make(model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    want = plain(make, Odd())
    for center, _, _ in on_ranks(2, nt.Downpour, model_of=Odd, make=make):
        assert np.array_equal(center, want)


class Views(torch.nn.Module):
    """Parameters that are parts of one tensor."""

    def __init__(self, *places, trained=True):
        super().__init__()
        base = torch.zeros(4, 6)
        for name, place in zip("ab", places, strict=True):
            one = torch.nn.Parameter(base[place], requires_grad=trained or name == "a")
            self.register_parameter(name, one)


@pytest.mark.parametrize(
    "places", [(np.s_[:3], np.s_[2:]), (np.s_[:, ::2], np.s_[:, 4:]), (np.s_[:], np.s_[3])], ids=str
)
@pytest.mark.parametrize("trained", [True, False])
def test_parameters_that_share_memory_are_refused(places, trained):
    def program(world):
        model = Views(*places, trained=trained)
        trains = [one for one in model.parameters() if one.requires_grad]
        nt.Downpour(torch.optim.SGD(trains, lr=0.1), model=model, world=world)

    with (
        MemoryCluster(2) as cluster,
        pytest.raises(ConfigurationError, match=r"'[ab]' and '[ab]' share memory.*one Parameter.*clone\(\)"),
    ):
        cluster.run(program, timeout_s=30)


@pytest.mark.parametrize(
    "places", [(np.s_[:2], np.s_[2:]), (np.s_[:, ::2], np.s_[:, 1::2]), (np.s_[:, :3], np.s_[:, 3:])], ids=str
)
def test_parts_of_one_tensor_without_a_number_in_common_are_trained(places):
    def program(world):
        model = Views(*places)
        optimizer = nt.Downpour(torch.optim.SGD(model.parameters(), lr=0.5), world=world)
        for _ in optimizer.epoch(range(2)):
            (model.a.sum() - model.b.sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        return model.a.max().item(), model.b.min().item()

    with MemoryCluster(2) as cluster:
        assert cluster.run(program, timeout_s=30) == [(-1.0, 1.0)] * 2


def test_frozen_parameters_do_not_decay_at_the_centre():
    def frozen():
        model = cases.model_of()
        model[0].weight.requires_grad_(False)
        return model

    make = cases.OPTIMIZERS["adamw"]
    want = plain(make, frozen())
    for center, _, _ in on_ranks(2, nt.Downpour, model_of=frozen, make=make):
        assert np.array_equal(center, want)


def test_on_workers_unused_parameters_do_not_decay():
    """An optimizer passes over parameters without a gradient; zeros would let weight decay at them."""

    def make(model):
        return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)

    def wrap(optimizer, **options):
        return nt.EASGD(optimizer, every=1000, **options)

    *_, (_, own, _) = on_ranks(2, wrap, model_of=Odd, make=make)
    assert np.array_equal(own, plain(make, Odd()))


def test_16_bit_models_have_a_float32_centre():
    def model_of():
        return cases.model_of().to(torch.bfloat16)

    def program(world):
        model = model_of()
        optimizer = nt.Downpour(torch.optim.SGD(model.parameters(), lr=0.05), world=world)
        sampler = nt.ShardSampler(range(cases.SAMPLES), optimizer=optimizer)
        x, y = cases.data()
        for _ in range(3):
            for index in sampler:
                optimizer.zero_grad()
                inputs = x[index : index + 1].to(torch.bfloat16)
                cases.loss_of(model, inputs, y[index : index + 1]).backward()
                optimizer.step()
        optimizer.close()
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        return np.concatenate([v.ravel() for v in optimizer._flat_model.parameters.views()]), weights(model)

    with MemoryCluster(2) as cluster:
        (center, rounded), (worker, _) = cluster.run(program, timeout_s=30)
    as_model = torch.from_numpy(center).to(torch.bfloat16).float().numpy()
    assert not np.array_equal(center, as_model)  # it really has more digits
    assert np.array_equal(rounded, as_model)
    assert np.array_equal(worker, center)


def test_a_loop_without_the_sampler_is_named():
    def program(world):
        model = cases.model_of()
        optimizer = nt.Downpour(torch.optim.SGD(model.parameters(), lr=0.1), world=world)
        cases.loss_of(model, *cases.data()).backward()
        optimizer.step()

    with MemoryCluster(2) as cluster, pytest.raises(ConfigurationError, match="sampler=nnlo_torch"):
        cluster.run(program, timeout_s=30)


def test_changed_memory_is_named():
    def program(world):
        model = cases.model_of()
        optimizer = nt.Downpour(torch.optim.SGD(model.parameters(), lr=0.1), world=world)
        for _ in nt.ShardSampler(range(8), optimizer=optimizer):
            cases.loss_of(model, *(part[:1] for part in cases.data())).backward()
            model[2].weight.data = model[2].weight.data.clone()
            optimizer.step()

    with (
        MemoryCluster(2) as cluster,
        pytest.raises(ConfigurationError, match="the memory of 2\\.weight was replaced"),
    ):
        cluster.run(program, timeout_s=30)


def test_sparse_gradients_are_refused_by_name():
    def program(world):
        model = torch.nn.Embedding(4, 2, sparse=True)
        optimizer = nt.Downpour(torch.optim.SGD(model.parameters(), lr=0.1), world=world)
        for index in nt.ShardSampler(range(4), optimizer=optimizer):
            optimizer.zero_grad()
            model.weight.grad = None
            model(torch.tensor([index])).sum().backward()
            optimizer.step()

    with MemoryCluster(2) as cluster, pytest.raises(ConfigurationError, match="sparse"):
        cluster.run(program, timeout_s=30)


@pytest.mark.parametrize(
    ("wrap", "words"),
    [
        (lambda p: nt.Downpour(torch.optim.LBFGS(p)), "cannot wrap LBFGS"),
        (lambda p: nt.Downpour(torch.optim.SparseAdam(p)), "cannot wrap SparseAdam"),
        (lambda p: nt.Downpour(nt.EASGD(torch.optim.SGD(p, lr=0.1))), "cannot wrap another wrapper"),
        (nt.Downpour, "wraps a torch optimizer, not a list"),
        (lambda p: nt.GEM(torch.optim.Adam(p)), "needs a torch.optim.SGD"),
        (lambda p: nt.GEM(torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)), "nesterov"),
        (lambda p: nt.Downpour(torch.optim.SGD(p, lr=0.1), every=0), "at least 1"),
    ],
)
def test_what_cannot_be_wrapped_is_named(wrap, words):
    with pytest.raises(ConfigurationError, match=words):
        wrap(list(torch.nn.Linear(2, 2).parameters()))


@since("torch", "2.6", "optimizers take names")
def test_other_models_on_other_ranks_are_refused():
    def program(world):
        model = torch.nn.Linear(2 + (world.rank == 1), 1)
        nt.Downpour(torch.optim.SGD(model.named_parameters(), lr=0.1), world=world)

    with (
        MemoryCluster(3) as cluster,
        pytest.raises(
            ConfigurationError, match=r"'weight' float32\[1, 2\] here and 'weight' float32\[1, 3\]"
        ),
    ):
        cluster.run(program, timeout_s=30)


def test_double_parameters_are_refused():
    def program(world):
        model = torch.nn.Linear(2, 1).double()
        nt.Downpour(torch.optim.SGD(model.parameters(), lr=0.1), world=world)

    with MemoryCluster(2) as cluster, pytest.raises(ConfigurationError, match="float64"):
        cluster.run(program, timeout_s=30)


def test_clipping_accumulation_and_closures_work_as_in_a_plain_loop():
    x, y = cases.data()

    def train(model, optimizer, indices):
        for index in indices:
            optimizer.zero_grad()
            for part in (x[index : index + 1], x[index : index + 1] * 2):  # accumulated
                cases.loss_of(model, part, y[index : index + 1]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()

            def closure(index=index):
                optimizer.zero_grad(set_to_none=False)
                loss = cases.loss_of(model, x[index : index + 1], y[index : index + 1])
                loss.backward()
                return loss

            assert optimizer.step(closure).item() > 0

    def program(world):
        model = cases.model_of()
        optimizer = nt.Downpour(torch.optim.Adam(model.parameters(), lr=0.01), world=world)
        train(model, optimizer, nt.ShardSampler(range(20), seed=3, optimizer=optimizer))
        optimizer.close()
        return weights(model)

    model = cases.model_of()
    train(model, torch.optim.Adam(model.parameters(), lr=0.01), nt.ShardSampler(range(20), seed=3))
    with MemoryCluster(2) as cluster:
        for got in cluster.run(program, timeout_s=30):
            assert np.array_equal(got, weights(model))


@pytest.mark.parametrize("size", [0, 1, 2, 7, 60])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_every_sample_is_seen_exactly_once_per_epoch(size, workers):
    def program(world):
        model = torch.nn.Linear(1, 1)
        optimizer = nt.Downpour(torch.optim.SGD(model.parameters(), lr=0.1), world=world)
        sampler = nt.ShardSampler(range(size), optimizer=optimizer)
        epochs = [list(sampler) for _ in range(2)]
        if not optimizer.serves:
            assert all(len(indices) == len(sampler) for indices in epochs)
        optimizer.close()
        return epochs

    with MemoryCluster(workers + 1) as cluster:
        server, *shares = cluster.run(program, timeout_s=30)
    assert server == [[], []]
    for epoch in range(2):
        assert sorted(index for share in shares for index in share[epoch]) == list(range(size))
    if size > 2:
        assert [share[0] for share in shares] != [share[1] for share in shares]


@pytest.mark.parametrize("workers", [0, 1])
def test_stopping_at_the_centre_stops_all(workers):
    def program(world):
        model = cases.model_of()
        optimizer = nt.Downpour(torch.optim.SGD(model.parameters(), lr=0.1), world=world)
        counts = []
        for epoch in range(4):
            counts.append(0)
            for index in nt.ShardSampler(range(30), optimizer=optimizer):
                optimizer.zero_grad()
                cases.loss_of(model, *(part[index : index + 1] for part in cases.data())).backward()
                optimizer.step()
                counts[-1] += 1
            if epoch == 1:
                optimizer.stop()
        optimizer.close()
        return counts

    if not workers:
        assert program(None) == [30, 30, 0, 0]
        return
    with MemoryCluster(workers + 1) as cluster:
        for counts in cluster.run(program, timeout_s=30)[1:]:
            assert counts == [30, 30, 1, 0]  # one step to hear of it


def test_the_order_depends_on_seed_and_epoch_only():
    one, same, other = (nt.ShardSampler(range(30), seed=seed) for seed in (5, 5, 6))
    first = list(one)
    assert first == list(same)
    assert first != list(other)
    again = list(one)
    assert first != again
    same.set_epoch(1)
    assert list(same) == again


def test_mpi4py_is_not_loaded_for_a_single_process():
    program = (
        "import sys, torch, nnlo_torch as nt\n"
        "m = torch.nn.Linear(2, 1)\n"
        "o = nt.EASGD(torch.optim.SGD(m.parameters(), lr=0.1))\n"
        "m(torch.ones(1, 2)).sum().backward()\n"
        "o.step()\n"
        "sys.exit('mpi4py' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    ["downpour", *(pytest.param(name, marks=pytest.mark.extended) for name in ("easgd", "diloco"))],
)
def test_the_example_trains_on_three_ranks(algorithm):
    example = EXAMPLES / "fashion_torch.py"
    done = mpiexec(3, example, "--algorithm", algorithm)
    assert done.returncode == 0, done.stderr
    accuracies = [float(value) for value in re.findall(r"epoch .* accuracy ([0-9.]+)", done.stdout)]
    assert len(accuracies) == 8
    assert max(accuracies) > 0.6
    rows = ["accuracy of the centre", "time", "samples", "exchanges", "mean staleness"]
    assert all(re.search(rf"^{row} +\d", done.stdout, re.MULTILINE) for row in rows)
    assert re.search(r"samples +16 000$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize("every", [1, 2])
def test_gradients_that_travel_from_where_they_are_made_are_the_copied_ones(lag, every, monkeypatch):
    def wrap(optimizer, **options):
        return nt.Downpour(optimizer, lag=lag, every=every, **options)

    copied = on_ranks(2, wrap, epochs=3)
    monkeypatch.setattr(_framework, "_BEYOND_CACHE", 0)
    monkeypatch.setattr(_flat_model, "_LARGE", 0)
    lent = on_ranks(2, wrap, epochs=3)
    for (center, own, _), (expected, expected_own, _) in zip(lent, copied, strict=True):
        assert np.array_equal(center, expected)
        assert np.array_equal(own, expected_own)


@pytest.mark.parametrize("kept_from", [0, 4])
def test_a_gradient_that_is_kept_while_it_travels_is_copied_or_named(kept_from, monkeypatch):
    """From the first step on it is seen in time; later it is an error, for what travels was changed."""
    monkeypatch.setattr(_framework, "_BEYOND_CACHE", 0)
    monkeypatch.setattr(_flat_model, "_LARGE", 0)

    def train(model, optimizer, indices):
        x, y = cases.data()
        for step, index in enumerate(indices):
            cases.loss_of(model, x[index : index + 1], y[index : index + 1]).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step < kept_from)

    def program(world):
        model = cases.model_of()
        optimizer = nt.Downpour(torch.optim.SGD(model.parameters(), lr=0.1), lag=1, world=world)
        train(model, optimizer, nt.ShardSampler(range(20), optimizer=optimizer))
        optimizer.close()
        return weights(model)

    with MemoryCluster(2) as cluster:
        if kept_from:
            with pytest.raises(
                ConfigurationError, match="was kept and changed after a step while it was still being sent"
            ):
                cluster.run(program, timeout_s=30)
        else:
            assert np.isfinite(cluster.run(program, timeout_s=30)[0]).all()


def test_a_rate_that_changes_after_an_epochs_last_batch_reaches_the_centre():
    def make(model):
        return torch.optim.SGD(model.parameters(), lr=1, momentum=0)  # whole numbers, as some write them

    def per_batch(model, optimizer, indices):
        x, y = cases.data()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.01)
        for _ in range(2):
            for index in indices:
                optimizer.zero_grad()
                cases.loss_of(model, x[index : index + 1], y[index : index + 1]).backward()
                optimizer.step()
                schedule.step()

    def program(world):
        model = cases.model_of()
        optimizer = nt.Downpour(make(model), world=world)
        per_batch(model, optimizer, nt.ShardSampler(range(10), seed=3, optimizer=optimizer))
        optimizer.close()
        return weights(model)

    model = cases.model_of()
    per_batch(model, make(model), nt.ShardSampler(range(10), seed=3))
    with MemoryCluster(2) as cluster:
        center, _ = cluster.run(program, timeout_s=30)
    assert np.array_equal(center, weights(model))


@pytest.mark.parametrize("asked_on", [0, 1])
def test_a_stop_on_one_of_several_servers_stops_all(asked_on):
    def program(world):
        model = cases.model_of()
        optimizer = nt.Downpour(torch.optim.SGD(model.parameters(), lr=0.1), servers=2, world=world)
        sampler = nt.ShardSampler(range(20), optimizer=optimizer)
        for epoch in range(50):
            for index in sampler:
                optimizer.zero_grad()
                cases.loss_of(model, *(part[index : index + 1] for part in cases.data())).backward()
                optimizer.step()
            if world.rank == asked_on and epoch == 1:
                optimizer.stop()
            if optimizer.stopped:
                break
        optimizer.close()
        return epoch

    with MemoryCluster(4) as cluster:
        assert max(cluster.run(program, timeout_s=30)) < 10


@pytest.mark.parametrize("assignment", ["static", "dynamic"])
def test_a_break_in_the_last_epoch_leaves_in_good_order(assignment):
    def program(world):
        model = cases.model_of()
        optimizer = nt.Downpour(torch.optim.SGD(model.parameters(), lr=0.1), world=world)
        sampler = nt.ShardSampler(range(40), assignment=assignment, unit=8, optimizer=optimizer)
        for step, index in enumerate(sampler):
            cases.loss_of(model, *(part[index : index + 1] for part in cases.data())).backward()
            optimizer.step()
            if step == 2:
                break
        optimizer.close()

    with MemoryCluster(3) as cluster:
        cluster.run(program, timeout_s=30)


def test_saving_is_done_once_and_whole(tmp_path):
    def program(world):
        model = cases.model_of()
        optimizer = nt.EASGD(torch.optim.SGD(model.parameters(), lr=0.1), world=world)
        list(nt.ShardSampler(range(4), optimizer=optimizer))
        with torch.no_grad():
            model[0].bias.fill_(world.rank)
        optimizer.save(model.state_dict(), tmp_path / "run.pt")
        optimizer.close()

    with MemoryCluster(3) as cluster:
        cluster.run(program, timeout_s=30)
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]
    assert torch.load(tmp_path / "run.pt", weights_only=True)["0.bias"].eq(0).all()


def test_a_sampler_with_a_random_state_of_its_own_is_refused_on_several_ranks():
    inner = torch.utils.data.RandomSampler(range(8), generator=torch.Generator().manual_seed(0))

    def program(world):
        model = cases.model_of()
        optimizer = nt.Downpour(torch.optim.SGD(model.parameters(), lr=0.1), world=world)
        list(nt.ShardSampler(torch.utils.data.BatchSampler(inner, 2, False), optimizer=optimizer))

    with (
        MemoryCluster(2) as cluster,
        pytest.raises(ConfigurationError, match="RandomSampler has a generator of its own"),
    ):
        cluster.run(program, timeout_s=30)


@MISSPELT
def test_a_misspelt_option_is_answered_with_the_nearest(wrong, advice):
    assert_answered(nt.EASGD, torch.optim.SGD(cases.model_of().parameters(), lr=0.1), wrong, advice)


def test_a_subclass_of_a_wrapper_may_have_options_of_its_own():
    assert_subclass_has_options_of_its_own(nt.EASGD, torch.optim.SGD(cases.model_of().parameters(), lr=0.1))


@dataclass(frozen=True, kw_only=True)
class Careful(EASGD):
    """An algorithm of a user's own."""

    care: float = option(0.5, "how careful", least=0, below=1)


class CarefulOptimizer(nt.Wrapper, algorithm=Careful):
    """A wrapper with a name and a docstring of its own."""


@pytest.mark.filterwarnings("ignore:You are using `torch.load` with:FutureWarning")  # of the copy's tensors
def test_an_algorithm_of_ones_own_has_a_wrapper():
    optimizer = CarefulOptimizer(torch.optim.SGD(cases.model_of().parameters(), lr=0.1), care=0.25, servers=1)
    assert optimizer.algorithm == Careful(care=0.25)
    assert pickle.loads(pickle.dumps(optimizer)).algorithm == optimizer.algorithm
    with pytest.raises(
        ConfigurationError, match="Careful: care=1 is not possible: it must be at least 0 and"
    ):
        nt.wrapper(Careful)(torch.optim.SGD(cases.model_of().parameters(), lr=0.1), care=1)
    with pytest.raises(TypeError, match=r"Careful\(\) got an unexpected .* 'car'; did you mean 'care'?"):
        nt.wrapper(Careful)(torch.optim.SGD(cases.model_of().parameters(), lr=0.1), car=1)
    assert nt.wrapper(EASGD) is nt.EASGD
    assert nt.wrapper(Careful).__doc__.startswith("An algorithm of a user's own.")


@pytest.mark.parametrize(
    "make",
    [
        lambda plain, _: nt.Checkpoint("run", plain),
        lambda plain, wrapper: nt.Checkpoint("run", [wrapper, plain]),
        lambda plain, _: nt.EMA(plain, cases.model_of()),
        lambda plain, _: nt.Report(plain, "run"),
        lambda plain, _: nt.Progress(plain),
        lambda plain, _: list(nt.ShardSampler(range(4), optimizer=plain)),
        lambda plain, _: list(nt.ShardIterable(range(4), optimizer=plain)),
    ],
)
def test_what_needs_a_wrapper_refuses_a_plain_optimizer(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain, inner = (torch.optim.SGD(cases.model_of().parameters(), lr=0.1) for _ in range(2))
    told = r"needs a wrapper .*, but was given an object of type SGD; wrap .*nnlo_torch\.Downpour"
    with pytest.raises(ConfigurationError, match=told):
        make(plain, nt.Downpour(inner))
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda model: [model], "model is of type list; pass the torch.nn.Module"),
        (lambda model: model[0].weight, "model is of type Parameter; pass the torch.nn.Module"),
        (lambda model: cases.model_of(), "model is a Sequential without any parameter of the optimizer"),
    ],
)
def test_a_model_that_owns_no_parameter_is_refused(size, make, problem):
    def program(world):
        model = cases.model_of()
        nt.Downpour(torch.optim.SGD(model.parameters(), lr=0.1), model=make(model), world=world)

    with pytest.raises(ConfigurationError, match=problem):
        program(None) if size == 1 else MemoryCluster(size).run(program, 60)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("size", [1, 2])
def test_parameters_that_wait_for_a_first_batch_are_refused(size):
    def program(world):
        model = torch.nn.Sequential(torch.nn.LazyLinear(2))
        nt.Downpour(torch.optim.SGD(model.parameters(), lr=0.1), model=model, world=world)

    if size == 1:
        program(None)  # as without a wrapper
        return
    with pytest.raises(ConfigurationError, match=r"0\.weight has no shape yet.* a batch before you wrap"):
        MemoryCluster(size).run(program, 60)
