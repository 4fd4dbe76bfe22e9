"""Groups in torch: k ranks with batches of b make the steps of one rank with batches of k b."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from nnlo_common.data import epoch_order, share
from tests.helpers.threads import on_ranks

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")

import nnlo_torch as nt  # noqa: E402
from tests.helpers import torch_cases as cases  # noqa: E402

pytestmark = pytest.mark.framework("torch")

SIZE, BATCH, EPOCHS = 53, 4, 2  # neither 2 nor 3 ranks divide the samples, nor do batches divide a share
CLOSE = {"rtol": 1e-4, "atol": 2e-6}


def wrapped(world, name="Downpour", *, model=None, make=None, **options):
    model = cases.model_of() if model is None else model
    plain = (make or cases.OPTIMIZERS["momentum" if name == "GEM" else "sgd"])(model)
    if name == "GEM":
        plain = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    if name == "EAMSGD":
        plain = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
    return model, getattr(nt, name)(plain, model=model, world=world, **options)


def flat(model):
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).clone()


def close(found, expected):
    return torch.allclose(found, expected, **CLOSE)


def backward(model, indices):
    inputs, targets = cases.data()
    loss = cases.loss_of(model, inputs[indices], targets[indices])
    loss.backward()


def train(
    world, name="Downpour", *, batch=BATCH, size=SIZE, before_step=lambda model: None, workers=0, **options
):
    """Train on a shuffled data set with a sampler; the final parameters, and the samples of each epoch."""
    model, optimizer = wrapped(world, name, **options)
    loader = torch.utils.data.DataLoader(
        range(size),
        batch_size=batch,
        sampler=nt.ShardSampler(range(size), optimizer=optimizer),
        num_workers=workers,
    )
    seen = []
    for _ in range(EPOCHS):
        seen.append([])
        for indices in loader:
            optimizer.zero_grad()
            backward(model, indices)
            before_step(model)
            optimizer.step()
            seen[-1] += indices.tolist()
    optimizer.close()
    return flat(model), seen


def train_large(world, name="Downpour", *, k, size=SIZE, before_step=lambda model: None, **options):
    """The same with one rank in place of each group of k, and batches k times as large."""
    model, optimizer = wrapped(world, name, **options)
    for epoch in range(EPOCHS):
        order = epoch_order(size, seed=0, epoch=epoch, shuffle=True)
        mine = [order[at] for at in share(size, max(optimizer.share[0], 0), optimizer.share[1])]
        batches = [mine[start : start + k * BATCH] for start in range(0, len(mine), k * BATCH)]
        for indices in optimizer.epoch(batches, samples=len):
            optimizer.zero_grad()
            backward(model, indices)
            before_step(model)
            optimizer.step()
    optimizer.close()
    return flat(model)


NAMES = [*cases.WRAPPERS, "EAMSGD"]


def options_of(name):
    return cases.WRAPPERS.get(name, {"every": 2, "beta": 0.5})


@pytest.mark.parametrize(("k", "servers"), [(2, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("name", NAMES)
def test_one_group_is_one_rank_with_the_large_batch(name, k, servers):
    options = options_of(name) | {"servers": servers}
    found = on_ranks(servers + k, lambda world: train(world, name, group_size=k, **options))
    expected = on_ranks(servers + 1, lambda world: train_large(world, name, k=k, **options))
    assert not close(expected[-1], flat(cases.model_of()))
    for rank in range(servers + k):
        assert close(found[rank][0], expected[min(rank, servers)])
        assert rank < servers or torch.equal(found[rank][0], found[-1][0])


@pytest.mark.parametrize(
    ("k", "servers", "workers", "size"),
    [*((*layout, size) for layout in [(3, 1, 0), (2, 0, 0)] for size in range(48, 52)), (2, 1, 1, 49)],
)
def test_so_it_is_where_some_ranks_have_a_batch_less(k, servers, workers, size):
    """With 49 samples and two ranks one has 6 batches of 4, and the other one more, of one sample."""
    options = {"size": size, "servers": servers}
    found = on_ranks(
        servers + k, lambda world: train(world, "Synchronous", group_size=k, workers=workers, **options)
    )
    options["servers"] = 1
    expected = on_ranks(servers + 1, lambda world: train_large(world, "Synchronous", k=k, **options))
    for vector, _ in found[servers:]:
        assert close(vector, expected[-1])
        assert torch.equal(vector, found[-1][0])


@pytest.mark.parametrize("size", [49, 50])
def test_a_loop_may_drop_incomplete_batches_or_make_its_own(size):
    def program(world):
        _, optimizer = wrapped(world, servers=0)
        sampler = nt.ShardSampler(range(size), optimizer=optimizer, shuffle=False)
        loader = torch.utils.data.DataLoader(range(size), batch_size=4, sampler=sampler, drop_last=True)
        dropped, own = [one.tolist() for one in loader], list(sampler)
        optimizer.close()
        return dropped, own

    first, second = on_ranks(2, program)
    assert [*map(len, first[0])] == [*map(len, second[0])] == [4] * 6
    assert len(first[1]) == len(second[1]) == size // 2  # nobody tells where a batch begins


@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize("name", ["Downpour", "EASGD", "LocalSGD"])
def test_so_it_is_with_exchanges_under_way(name, lag):
    options = options_of(name) | {"lag": lag}
    found = on_ranks(3, lambda world: train(world, name, group_size=2, **options))
    expected = on_ranks(2, lambda world: train_large(world, name, k=2, **options))
    assert close(found[1][0], expected[1])
    assert torch.equal(found[1][0], found[2][0])


@pytest.mark.parametrize("name", NAMES)
def test_members_stay_equal_bit_for_bit(name):
    found = on_ranks(5, lambda world: train(world, name, group_size=2, **options_of(name)))
    for lead in (1, 3):
        assert torch.equal(found[lead][0], found[lead + 1][0])
        assert not close(found[lead][0], flat(cases.model_of()))


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("optimizer", cases.OPTIMIZERS)
def test_without_a_server_a_group_is_one_process_with_the_large_batch(optimizer, k):
    make = cases.OPTIMIZERS[optimizer]
    found = on_ranks(k, lambda world: train(world, "Synchronous", make=make, servers=0))
    expected = train_large(None, "Synchronous", k=k, make=make)
    for vector, _ in found:
        assert close(vector, expected)
        assert torch.equal(vector, found[0][0])


@pytest.mark.parametrize("name", NAMES)
def test_without_a_server_every_wrapper_is_the_plain_optimizer(name):
    found = on_ranks(2, lambda world: train(world, name, servers=0, **options_of(name)))
    assert close(found[0][0], train_large(None, name, k=2, **options_of(name)))


# --- the data --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "k", "servers"), [(5, 2, 1), (7, 3, 1), (3, 3, 0), (4, 2, 2)])
def test_samples_go_to_one_rank_each_and_ranks_of_a_group_make_equally_many_steps(size, k, servers):
    options = {"servers": servers, "group_size": k}
    found = on_ranks(size, lambda world: train(world, **options))
    for epoch in range(EPOCHS):
        shares = [seen[epoch] for _, seen in found[servers:]]
        dealt = [sample for one in shares for sample in one]
        assert sorted(set(dealt)) == [*range(SIZE)]
        for lead in range(0, len(shares), k):
            steps = {-(-len(one) // BATCH) for one in shares[lead : lead + k]}
            assert len(steps) == 1
        # A rank without a sample for the last step has one again, in a batch of its own.
        assert len(dealt) - SIZE <= sum(len(one) % BATCH == 1 for one in shares)


@pytest.mark.parametrize("k", [2, 3])
def test_a_groups_iterable_yields_equally_many_batches_to_each_rank(k):
    def program(world):
        _, optimizer = wrapped(world, group_size=k)
        data = nt.ShardIterable(range(SIZE), optimizer=optimizer)
        items = list(data)
        batches = [one.tolist() for one in torch.utils.data.DataLoader(data, batch_size=BATCH)]
        optimizer.close()
        return items, batches

    _, *shares = on_ranks(1 + 2 * k, program)
    dealt = [item for one, _ in shares for item in one]  # no loader: nobody tells where a batch begins
    assert len(dealt) == len(set(dealt)) > SIZE - 2 * k
    batched = [item for _, one in shares for batch in one for item in batch]
    assert sorted(set(batched)) == [*range(SIZE)]
    for lead in range(0, 2 * k, k):
        assert len({len(one) for one, _ in shares[lead : lead + k]}) == 1
        assert len({len(one) for _, one in shares[lead : lead + k]}) == 1
    assert len(batched) - SIZE == sum(one[-1] in before[-1:] for (_, before), (_, one) in pairwise(shares))


@pytest.mark.parametrize("k", [2, 3])
def test_files_are_divided_among_the_ranks_of_groups(k, tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(SIZE)

    def program(world):
        _, optimizer = wrapped(world, group_size=k)
        batches = nt.H5Batches(str(tmp_path / "a.h5"), features="x", batch_size=4, optimizer=optimizer)
        taken = [x.tolist() for (x,) in batches]
        batches.close()
        optimizer.close()
        return taken

    _, *shares = on_ranks(1 + 2 * k, program)
    dealt = [item for one in shares for batch in one for item in batch]
    assert sorted(set(dealt)) == [*range(SIZE)]
    assert len(dealt) - SIZE < 2 * k
    for lead in range(0, 2 * k, k):
        assert len({len(one) for one in shares[lead : lead + k]}) == 1


# --- what loops do with gradients ------------------------------------------------------------------------


@pytest.mark.parametrize("servers", [0, 1])
def test_gradients_are_the_groups_when_backward_returns_so_clipping_is_right(servers):
    def clip(model):
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        assert norm > 0.05

    found = on_ranks(servers + 2, lambda world: train(world, servers=servers, group_size=2, before_step=clip))
    expected = on_ranks(
        servers + 1, lambda world: train_large(world, k=2, servers=max(servers, 1), before_step=clip)
    )
    assert close(found[-1][0], expected[-1])


@pytest.mark.parametrize("servers", [0, 1])
def test_unequal_batches_count_by_their_samples(servers):
    def mine(indices, optimizer):
        return [(indices[:3], indices[3:])[optimizer.share[0]]]

    options = {"servers": servers, "group_size": 2}
    found = on_ranks(servers + 2, lambda world: weighted(world, mine, **options))
    expected = on_ranks(servers + 1, lambda world: weighted(world, lambda i, _: [i], servers=max(servers, 1)))
    assert close(found[-1], expected[-1])


def weighted(world, parts, **options):
    """Steps with batches of unequal sizes, which the loop counts itself."""
    model, optimizer = wrapped(world, "Synchronous", **options)
    indices = torch.arange(48).reshape(3, 16)
    if not optimizer.serves:
        rows = [parts(row, optimizer) for row in indices]
        for batches in optimizer.epoch(rows, samples=lambda batches: sum(map(len, batches))):
            optimizer.zero_grad()
            for batch in batches:
                backward(model, batch)
            optimizer.step()
    else:
        list(optimizer.epoch([]))
    optimizer.close()
    return flat(model)


@pytest.mark.parametrize("no_sync", [False, True])
def test_gradients_of_several_batches_add_up(no_sync):
    def program(world, parts, servers):
        model, optimizer = wrapped(world, "Synchronous", servers=servers)
        for step in optimizer.epoch(range(3)):
            optimizer.zero_grad()
            rows = parts(torch.arange(48).reshape(3, 16)[step], optimizer)
            if no_sync:
                with optimizer.no_sync():
                    backward(model, rows[0])
            else:
                backward(model, rows[0])
            backward(model, rows[1])
            optimizer.step()
        optimizer.close()
        return flat(model)

    def mine(indices, optimizer):
        quarters = indices.reshape(4, 4)
        rank = optimizer.share[0]
        return quarters[rank], quarters[2 + rank]

    found = on_ranks(2, lambda world: program(world, mine, 0))
    expected = program(None, lambda indices, _: (indices[:8], indices[8:]), 1)
    assert torch.equal(*found)
    assert close(found[0], expected)


def test_parts_of_a_model_that_only_some_ranks_use():
    """Rank 0 uses b, rank 1 c, nobody d: as with one batch of both; d gets no gradient."""

    def model_of():
        layers = {name: torch.nn.Linear(200, 200, bias=False) for name in "abcd"}
        model = cases.initialised(torch.nn.ModuleDict(layers))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.2)
        return model

    def loss(model, name, inputs):
        return model[name](model["a"](inputs)).square().mean()

    def program(world):
        model = model_of()
        plain = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        optimizer = nt.Synchronous(plain, model=model, world=world, servers=0)
        inputs = torch.linspace(-1, 1, 800).reshape(4, 200)
        for _ in optimizer.epoch(range(3)):
            optimizer.zero_grad()
            if world is None:
                (0.5 * (loss(model, "b", inputs[:2]) + loss(model, "c", inputs[2:]))).backward()
            elif world.rank == 0:
                loss(model, "b", inputs[:2]).backward()
            else:
                loss(model, "c", inputs[2:]).backward()
            optimizer.step()
        without = [name for name, one in model.named_parameters() if one.grad is None]
        optimizer.close()
        return flat(model), without, model["d"].weight.detach().clone()

    expected, without, untouched = program(None)
    assert without == ["d.weight"]
    for vector, none, left_alone in on_ranks(2, program):
        assert close(vector, expected)
        assert none == without
        assert torch.equal(left_alone, untouched)


def test_a_rank_without_any_gradient_and_gradients_set_by_hand():
    def program(world):
        model, optimizer = wrapped(world, "Synchronous", servers=0)
        for _ in optimizer.epoch(range(2)):
            optimizer.zero_grad()
            if world.rank == 0:
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        optimizer.close()
        return flat(model)

    first, second = on_ranks(2, program)
    assert torch.equal(first, second)
    assert torch.allclose(first, flat(cases.model_of()) - 2 * 0.1 * 0.5)


def test_a_scaler_skips_the_same_steps_on_all_ranks():
    def program(world):
        model, optimizer = wrapped(world, "Synchronous", servers=0)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        scales, inputs = [], cases.data()[0]
        for step in optimizer.epoch(range(6)):
            optimizer.zero_grad()
            factor = float("inf") if (step, world.rank) in ((1, 0), (4, 1)) else 1.0
            scaler.scale(model(inputs[step : step + 4]).square().mean() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        optimizer.close()
        return flat(model), scales, optimizer.report().steps

    first, second = on_ranks(2, program)
    assert torch.equal(first[0], second[0])
    assert first[1] == second[1] == [4.0, 2.0, 2.0, 4.0, 2.0, 2.0]
    assert first[2] == second[2] == 4


def test_a_closure_and_half_precision_weights():
    def program(world, rows):
        model = cases.initialised(torch.nn.Linear(5, 3)).to(torch.bfloat16)
        optimizer = nt.Synchronous(
            torch.optim.SGD(model.parameters(), lr=0.5), model=model, world=world, servers=0
        )
        inputs = cases.data()[0].to(torch.bfloat16)

        def closure():
            optimizer.zero_grad()
            loss = model(inputs[rows(optimizer)]).float().square().mean()
            loss.backward()
            return loss

        for _ in optimizer.epoch(range(3)):
            optimizer.step(closure)
        optimizer.close()
        return flat(model).float()

    halves = [slice(0, 8), slice(8, 16)]
    first, second = on_ranks(2, lambda world: program(world, lambda one: halves[one.rank]))
    assert torch.equal(first, second)
    assert torch.allclose(first, program(None, lambda _: slice(0, 16)), atol=0.02)


# --- the rest of a training without a server ---------------------------------------------------------------


def test_without_a_server_ranks_evaluate_stop_and_average_together(capsys):
    def program(world):
        model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
        cases.initialised(model)
        with torch.no_grad():
            model[0].weight += world.rank  # the lead's parameters are the start
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = nt.Synchronous(plain, model=model, world=world, servers=0)
        ema = nt.EMA(optimizer, model, decay=0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        inputs, targets = cases.data()
        loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(inputs, targets),
            batch_size=7,
            sampler=nt.ShardSampler(inputs, optimizer=optimizer),
        )
        held = nt.ShardSampler(inputs, evaluation=True, optimizer=optimizer)
        scores, epochs = [], 0
        for _ in range(5):
            for x, y in loader:
                optimizer.zero_grad()
                cases.loss_of(model, x, y).backward()
                optimizer.step()
            scheduler.step()
            epochs += 1
            scores.append(
                optimizer.evaluate(
                    lambda rows: {"loss": cases.loss_of(model, inputs[rows], targets[rows])},
                    torch.utils.data.DataLoader(range(60), batch_size=9, sampler=held),
                )
            )
            optimizer.say(f"epoch {epochs}")
            if epochs == 3:
                optimizer.stop()
            if optimizer.stopped:
                break
        with optimizer.evaluation():
            buffers = model[1].running_mean.clone()
        averaged = flat(ema)
        optimizer.close()
        report = optimizer.report()
        return flat(model), scores, buffers, averaged, epochs, (optimizer.role, report.steps, report.samples)

    first, second = on_ranks(2, program)
    assert torch.equal(first[0], second[0])
    assert first[1] == second[1]
    assert first[1][-1]["loss"] < first[1][0]["loss"]
    assert torch.equal(first[2], second[2])
    assert torch.equal(first[3], second[3])
    assert not torch.equal(first[3], first[0])
    assert (first[4], second[4]) == (3, 3)
    assert first[5] == ("lead", 15, 90)
    assert second[5] == ("worker 0, member 1", 15, 90)
    assert capsys.readouterr().out == "epoch 1\nepoch 2\nepoch 3\n"


def test_servers_hear_of_the_samples_of_whole_groups():
    def program(world):
        _, optimizer = wrapped(world, group_size=2)
        sampler = nt.ShardSampler(range(40), optimizer=optimizer)
        loader = torch.utils.data.DataLoader(range(40), batch_size=4, sampler=sampler)
        for indices in loader:
            optimizer.zero_grad()
            backward(optimizer._model, indices)
            optimizer.step()
        means = optimizer.mean({"rank": optimizer.rank}, weight=1 + optimizer.rank)
        optimizer.close()
        return optimizer.report().samples, means["rank"]

    found = on_ranks(5, program)
    assert [samples for samples, _ in found] == [40, 10, 10, 10, 10]
    assert {mean for _, mean in found} == {sum(r * (1 + r) for r in range(5)) / 15}
