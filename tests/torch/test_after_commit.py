"""What a plain loop does after a step happens on the server after each commit: averages, clipping."""

from __future__ import annotations

import copy
import re
import threading
import warnings

import numpy as np
import pytest

from nnlo_common import ConfigurationError
from nnlo_common.protocol import Kind, Received
from nnlo_common.training._server_rank import ServerRank

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn  # noqa: E402

import nnlo_torch as nt  # noqa: E402
from tests.helpers import torch_cases as cases  # noqa: E402
from tests.helpers.threads import on_ranks  # noqa: E402

pytestmark = pytest.mark.framework("torch")

X, Y = cases.data()
DECAY, EPOCHS, STEPS = 0.7, 2, 10


def normalised():
    return cases.initialised(
        torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
    )


def adam_of(model):
    return torch.optim.Adam(model.parameters(), lr=0.02)


def sgd_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step_of(model, optimizer, index, size=6):
    optimizer.zero_grad()
    x, y = X[size * index :][:size], Y[size * index :][:size]
    torch.nn.functional.cross_entropy(model(x.to(next(model.parameters()).dtype)).float(), y).backward()
    optimizer.step()


def train(model, optimizer, *, after_epoch=lambda: None, steps=STEPS):
    for _ in range(EPOCHS):
        for index in nt.ShardSampler(range(steps), shuffle=False, optimizer=optimizer):
            step_of(model, optimizer, index)
        after_epoch()


def plain_average(make=normalised, size=6, steps=STEPS):
    """The averages of a plain loop over all batches."""
    model = make()
    optimizer, average = adam_of(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for _ in range(EPOCHS):
        for index in range(steps):
            step_of(model, optimizer, index, size)
            average.update_parameters(model)
    return average


def averaged(world, wrap=nt.Downpour, make=normalised, inner=adam_of, steps=STEPS, **options):
    model = make()
    optimizer = wrap(inner(model), world=world, model=model, **options)
    ema = nt.EMA(optimizer, model, DECAY)
    train(model, optimizer, steps=steps)
    optimizer.close()
    return copy.deepcopy(ema.state_dict())


def test_alone_an_average_has_the_bits_of_the_plain_loop():
    assert cases.same(dict(averaged(None)), dict(plain_average().state_dict()))


def test_with_one_worker_the_servers_average_has_the_bits_of_the_plain_loop():
    """The buffers, too: at the end of the training they are those of the plain loop."""
    found, stale = on_ranks(2, averaged)
    assert cases.same(dict(found), dict(plain_average().state_dict()))
    assert stale["n_averaged"] == 0


def test_two_synchronous_workers_average_as_a_plain_loop_with_batches_of_both():
    def program(world):
        model = cases.model_of()
        optimizer = nt.Synchronous(adam_of(model), world=world)
        ema = nt.EMA(optimizer, model, DECAY)
        train(model, optimizer)
        optimizer.close()
        return ema.n_averaged.item(), cases.values(ema.module)

    count, found = on_ranks(3, program)[0]
    average = plain_average(cases.model_of, size=12, steps=STEPS // 2)
    assert count == average.n_averaged == EPOCHS * STEPS // 2
    torch.testing.assert_close(found, cases.values(average.module), rtol=1e-4, atol=1e-5)


WRAPPERS = {**cases.WRAPPERS, "EAMSGD": {"every": 2}}


@pytest.mark.parametrize("name", WRAPPERS)
def test_every_algorithm_averages_its_centre_after_each_commit(name):
    """Against numbers of the centre that are read from its vector, without the model."""

    def program(world):
        model = cases.model_of()
        inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=name == "EAMSGD")
        optimizer = getattr(nt, name)(inner, world=world, model=model, **WRAPPERS[name])
        path = []
        optimizer.after_commit(lambda: path.append(optimizer._flat_model.parameters.vector.copy()))
        ema = nt.EMA(optimizer, model, DECAY)
        train(model, optimizer)
        optimizer.close()
        places = [segment.place for segment in optimizer._flat_model.parameters.layout.segments]
        return path, cases.values(ema.module), optimizer.report().exchanges, ema.n_averaged.item(), places

    (path, found, exchanges, count, places), *workers = on_ranks(3, program)
    quorum = 2 if name in ("Synchronous", "LocalSGD", "DiLoCo") else 1
    assert len(path) == count == exchanges / quorum
    assert count > 3
    average = path[0].astype(np.float64)
    for one in path[1:]:
        average = DECAY * average + (1 - DECAY) * one
    for value, place in zip(found, places, strict=True):
        expected = torch.from_numpy(average[place]).float()
        torch.testing.assert_close(value.flatten(), expected, rtol=1e-5, atol=1e-6)
    assert [worker[3] for worker in workers] == [0, 0]


# -- changes ------------------------------------------------------------------------------------------


def clipping(model, limit=0.05):
    def clip():
        for parameter in model.parameters():
            parameter.clamp_(-limit, limit)

    return clip


def clipped(world, wrap, make=cases.model_of, **options):
    model = make()
    optimizer = wrap(sgd_of(model), world=world, **options)
    optimizer.after_commit(clipping(model))
    seen = []

    for _ in range(EPOCHS):
        for index in nt.ShardSampler(range(STEPS), shuffle=False, optimizer=optimizer):
            step_of(model, optimizer, index)
            seen.append(max(float(value.abs().max()) for value in cases.values(model)))
    optimizer.close()
    return cases.values(model), seen


@pytest.mark.parametrize("size", [1, 2])
def test_weights_clipped_after_each_commit_are_those_of_a_plain_loop_that_clips_after_each_step(size):
    model = cases.model_of()
    optimizer = sgd_of(model)
    for _ in range(EPOCHS):
        for index in range(STEPS):
            step_of(model, optimizer, index)
            with torch.no_grad():
                clipping(model)()
    if size == 1:
        found = [clipped(None, nt.Downpour)]
    else:
        found = on_ranks(2, lambda world: clipped(world, nt.Downpour))
    assert all(cases.same(values, cases.values(model)) for values, _ in found)


@pytest.mark.parametrize("name", ["Downpour", "Synchronous", "DynSGD"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_centre_and_what_workers_fetch_stay_clipped(name, dtype):
    def program(world):
        return clipped(world, getattr(nt, name), lambda: cases.model_of().to(dtype))

    (center, _), *workers = on_ranks(3, program)
    assert max(float(value.abs().max()) for value in center) < 0.0501
    assert all(max(seen) < 0.0501 for _, seen in workers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_function_that_changes_nothing_leaves_the_bits_of_the_training(dtype):
    """Of 16-bit models, too, whose centre has more digits than the model that the function sees."""

    def program(world, *, calls):
        model = cases.model_of().to(dtype)
        optimizer = nt.Downpour(sgd_of(model), world=world)
        if calls:
            optimizer.after_commit(lambda: None)
        train(model, optimizer)
        optimizer.close()
        return optimizer._flat_model.parameters.vector.copy()

    first, second = (on_ranks(2, lambda world, c=calls: program(world, calls=c)) for calls in (False, True))
    assert np.array_equal(first[0], second[0])


# -- evaluation ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [cases.model_of, normalised])
def test_all_ranks_evaluate_the_servers_average(make):
    def program(world):
        model = make()
        optimizer = nt.Downpour(adam_of(model), world=world)
        ema = nt.EMA(optimizer, model, DECAY)
        held_out = nt.ShardSampler(range(STEPS), evaluation=True, optimizer=optimizer)
        scores = []

        def measure(index):
            assert not ema.module.training
            return {"loss": cases.loss_of(ema, X[6 * index :][:6], Y[6 * index :][:6])}

        def evaluate():
            scores.append(optimizer.evaluate(measure, torch.tensor(list(held_out))))
            if optimizer.serves:
                ema.eval()
                scores.append({"loss": cases.loss_of(ema, X, Y).item()})
                ema.train()

        train(model, optimizer, after_epoch=evaluate)
        optimizer.close()
        return scores

    server, *workers = on_ranks(3, program)
    assert all(scores == server[::2] for scores in workers)
    for together, here in zip(server[::2], server[1::2], strict=True):
        assert together["loss"] == pytest.approx(here["loss"], rel=1e-5)
    assert server[0] != server[2]


def test_a_worker_refuses_an_average_that_it_does_not_have():
    def program(world):
        model = cases.model_of()
        optimizer = nt.Downpour(adam_of(model), world=world)
        ema = nt.EMA(optimizer, model)
        train(model, optimizer, after_epoch=lambda: ema(X))
        optimizer.close()

    with pytest.raises(
        ConfigurationError, match=r"rank \d trains, but the server keeps the averages; .*evaluat"
    ):
        on_ranks(3, program)


CALLS = {
    "after_commit(): call": lambda optimizer: optimizer.after_commit(5),
    "watch(): call": lambda optimizer: optimizer.watch(5),
    "evaluate(): measure": lambda optimizer: optimizer.evaluate(5, []),
    "evaluate(): samples": lambda optimizer: optimizer.evaluate(lambda batch: {}, [], samples=5),
    "aside(): validate": lambda optimizer: optimizer.aside(5, torch.nn.Linear(1, 1)),
    "aside(): then": lambda optimizer: optimizer.aside(print, torch.nn.Linear(1, 1), 5),
    "epoch(): samples": lambda optimizer: optimizer.epoch([], samples=5),
    "Progress(): loss": lambda optimizer: nt.Progress(optimizer, loss=5),
    "LARS(): adapts": lambda optimizer: nt.LARS(optimizer.optimizer, adapts=5),
    "advise(): loss": lambda optimizer: nt.advise(torch.nn.Linear(1, 1), 5, [], optimizer),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_no_function_is_refused_at_once(name):
    optimizer = nt.Downpour(sgd_of(torch.nn.Linear(1, 1)))
    with pytest.raises(ConfigurationError, match=re.escape(f"{name}=5 is not a function; give the function")):
        CALLS[name](optimizer)


@pytest.mark.parametrize("what", ["after_commit", "EMA"])
def test_several_servers_are_refused(what):
    def program(world):
        model = cases.model_of()
        optimizer = nt.Downpour(adam_of(model), world=world, servers=2)
        return nt.EMA(optimizer, model) if what == "EMA" else optimizer.after_commit(lambda: None)

    with pytest.raises(ConfigurationError, match=r"after_commit\(\) needs the whole centre.*servers=2"):
        on_ranks(3, program)


@pytest.mark.parametrize("decay", [-0.1, 1.5, float("nan"), "x", None, True])
def test_an_impossible_decay_is_refused(decay):
    model = cases.model_of()
    with pytest.raises(ConfigurationError, match=r"decay=.* must be from 0 to 1"):
        nt.EMA(nt.Downpour(adam_of(model)), model, decay)


def test_an_average_of_what_is_no_module_is_refused():
    model = cases.model_of()
    with pytest.raises(ConfigurationError, match="EMA: model is of type Adam"):
        nt.EMA(nt.Downpour(adam_of(model)), adam_of(model))


# -- checkpoints --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
def test_a_resumed_training_goes_on_with_its_averages(size, tmp_path):
    def program(world, folder, epochs):
        model = normalised()
        optimizer = nt.Downpour(adam_of(model), world=world, model=model)
        ema = nt.EMA(optimizer, model, DECAY)
        checkpoint = nt.Checkpoint(folder, optimizer, also={"ema": ema})
        loader = torch.utils.data.DataLoader(
            torch.arange(STEPS), batch_size=None, sampler=nt.ShardSampler(range(STEPS), optimizer=optimizer)
        )
        for _ in checkpoint.epochs(epochs):
            for index in checkpoint.batches(loader):
                step_of(model, optimizer, int(index))
        optimizer.close()
        return copy.deepcopy(dict(ema.state_dict()))

    def run(folder, epochs):
        if size == 1:
            return program(None, folder, epochs)
        return on_ranks(size, lambda world: program(world, folder, epochs))[0]

    run(tmp_path / "resumed", 1)
    resumed, whole = run(tmp_path / "resumed", 3), run(tmp_path / "whole", 3)
    assert whole["n_averaged"] == 3 * STEPS
    assert cases.same(resumed, whole)


# -- a rank whose loop is over before that of the others --------------------------------------------


def said(size, epochs_of, *, wrap=nt.Downpour, stop=False, before_step=lambda rank, epoch: None, **options):
    """The warnings of a training in which each rank loops over its own number of epochs."""

    def program(world):
        model = cases.model_of()
        optimizer = wrap(sgd_of(model), world=world, **options)
        for epoch in range(epochs_of(world.rank)):
            for index in nt.ShardSampler(range(STEPS), optimizer=optimizer):
                before_step(world.rank, epoch)
                step_of(model, optimizer, index)
            if stop and epoch == 1:
                optimizer.stop()
        optimizer.close()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        on_ranks(size, program)
    return [str(one.message) for one in caught]


def steps_from_epoch(first, after):
    """Hold all steps of epoch `first` and later back until `after` has happened."""

    def wait(rank, epoch):
        assert epoch < first or after.wait(60), f"rank {rank} waited for ever in epoch {epoch}"

    return wait


def test_a_server_that_leaves_before_the_workers_warns_once(monkeypatch):
    left, finish = threading.Event(), ServerRank.finish

    def finish_and_tell(self, *args):
        left.set()
        finish(self, *args)  # nothing is served before it has noted that this rank leaves

    monkeypatch.setattr(ServerRank, "finish", finish_and_tell)
    (text,) = said(3, lambda rank: 1 if rank == 0 else 4, before_step=steps_from_epoch(1, left))
    assert text.startswith("rank 0 has left the training after epoch 1, but rank ")
    assert "trains in epoch 2. A server gets no batch" in text
    assert "on all ranks" in text


def test_a_worker_that_leaves_before_the_others_is_named_once(monkeypatch):
    left, handle = threading.Event(), ServerRank._handle

    def handle_and_tell(self, event):
        handle(self, event)
        if isinstance(event, Received) and event.message.kind is Kind.LEAVE:
            left.set()

    monkeypatch.setattr(ServerRank, "_handle", handle_and_tell)
    (text,) = said(3, lambda rank: 2 if rank == 2 else 4, before_step=steps_from_epoch(2, left))
    assert text.startswith("rank 2 has left the training after epoch 2, but rank 1 trains in epoch 3")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", cases.WRAPPERS)
@pytest.mark.parametrize("stop", [False, True])
def test_ranks_that_leave_together_say_nothing(name, stop):
    assert said(3, lambda rank: 3, wrap=getattr(nt, name), stop=stop, **cases.WRAPPERS[name]) == []
