"""Two optimizers in one script, as a GAN has them, and two trainings one after another."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest

from nnlo_common import ConfigurationError

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn  # noqa: E402

import nnlo_torch as nt  # noqa: E402
from nnlo_torch import _flat_model  # noqa: E402
from tests.helpers import torch_cases as cases  # noqa: E402
from tests.helpers.threads import on_ranks  # noqa: E402

pytestmark = [pytest.mark.framework("torch"), pytest.mark.sampled(2)]

X, _ = cases.data()
EPOCHS, BATCHES, BATCH, CRITIC_STEPS = 2, 8, 6, 2


def adam_of(model, lr=0.01):
    return torch.optim.Adam(model.parameters(), lr=lr, betas=(0.5, 0.9))


def sgd_of(model, lr=0.05):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)


class Pair:
    """A generator and a critic, and what moves them."""

    between = torch.nn.BatchNorm1d

    def __init__(self, wrap=lambda one, **options: one, make=adam_of, dtype=torch.float32, **options):
        self.generator = cases.initialised(
            torch.nn.Sequential(torch.nn.Linear(2, 8), self.between(8), torch.nn.Linear(8, 5))
        ).to(dtype)
        self.critic = cases.initialised(
            torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        ).to(dtype)
        self.dtype = dtype
        self.of_generator = wrap(make(self.generator), **options)
        self.of_critic = wrap(make(self.critic, lr=0.02), **options)

    def batch(self, index, size=BATCH):
        """One iteration; the generator's backward pass leaves gradients in the critic, as usual."""
        real = X[size * index :][:size].to(self.dtype)
        noise = X[size * index :][:size, :2].flip(0).to(self.dtype)
        for _ in range(CRITIC_STEPS):
            self.of_critic.zero_grad()
            fake = self.generator(noise).detach()
            (
                self.critic(fake).mean() - self.critic(real).mean() + self.critic(real).square().mean()
            ).backward()
            self.of_critic.step()
        self.of_generator.zero_grad()
        (-self.critic(self.generator(noise)).mean()).backward()
        self.of_generator.step()

    def both_at_once(self, index, size=BATCH):
        """Both backward passes come before both steps: one step must not disturb the other's gradients."""
        noise = X[size * index :][:size, :2].to(self.dtype)
        self.of_critic.zero_grad()
        self.of_generator.zero_grad()
        score = self.critic(self.generator(noise)).square().mean()
        score.backward()
        self.of_generator.step()
        self.of_critic.step()

    def values(self):
        return [*cases.values(self.generator), *cases.values(self.critic)]

    def states(self):
        return copy.deepcopy([self.of_generator.state_dict(), self.of_critic.state_dict()])


def plain(make=adam_of, how="batch", size=BATCH, batches=BATCHES):
    pair = Pair(make=make)
    for _ in range(EPOCHS):
        for index in range(batches):
            if how == "batch":
                pair.batch(index, size)
            else:
                getattr(pair, how)(index)
    return pair


def trained(
    world, wrap, *, make=adam_of, how="batch", then=lambda pair: None, dtype=torch.float32, **options
):
    pair = Pair(wrap, make, dtype, world=world, **options)
    for _ in range(EPOCHS):
        for index in nt.ShardSampler(range(BATCHES), shuffle=False, optimizer=pair.of_critic):
            getattr(pair, how)(index)
    then(pair)
    pair.of_generator.close()
    return pair


@pytest.mark.sampled(5)
@pytest.mark.parametrize("make", [adam_of, sgd_of])
@pytest.mark.parametrize("how", ["batch", "both_at_once"])
@pytest.mark.parametrize(("name", "options"), [("Downpour", {}), ("Synchronous", {}), ("DynSGD", {}),
                                               ("Downpour", {"lag": 0, "local": None})])  # fmt: skip
def test_with_one_worker_two_networks_have_the_bits_of_the_plain_loop(name, options, how, make, monkeypatch):
    monkeypatch.setattr(_flat_model, "_LARGE", 0)  # gradients that one optimizer alone would move at once
    expected = plain(make, how)
    server, worker = on_ranks(
        2, lambda world: trained(world, getattr(nt, name), make=make, how=how, **options)
    )
    assert cases.same(server.values(), expected.values())
    assert cases.same(worker.values(), expected.values())
    assert cases.same(server.states(), expected.states())
    assert cases.same(server.generator[1].running_var, expected.generator[1].running_var)


@pytest.mark.parametrize(("name", "options"), [("EASGD", {"every": 10**6}), ("LocalSGD", {"every": 10**6}),
                                               ("DiLoCo", {"every": 10**6})])  # fmt: skip
def test_on_a_worker_each_optimizer_moves_its_own_network(name, options):
    expected = plain()
    states = []
    on_ranks(
        2,
        lambda world: trained(
            world,
            getattr(nt, name),
            then=lambda pair: (
                None if pair.of_critic.serves else states.append((pair.values(), pair.states()))
            ),
            **options,
        ),
    )
    assert cases.same(states, [(expected.values(), expected.states())])


def test_a_round_of_local_sgd_averages_both_networks():
    """With one worker the mean of each round is the worker itself."""
    expected = plain()
    server, worker = on_ranks(2, lambda world: trained(world, nt.LocalSGD, every=3))
    for pair in (server, worker):
        torch.testing.assert_close(pair.values(), expected.values(), rtol=1e-6, atol=1e-7)


def test_two_synchronous_workers_train_as_a_plain_loop_with_batches_of_both():
    def program(world, wrap, size, batches):
        pair = Pair.__new__(Pair)
        generator = cases.initialised(
            torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 5))
        )
        pair.generator, pair.dtype = generator, torch.float32
        pair.critic = cases.initialised(
            torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        )
        pair.of_generator, pair.of_critic = wrap(adam_of(generator)), wrap(adam_of(pair.critic, lr=0.02))
        for _ in range(EPOCHS):
            for index in batches(pair):
                pair.batch(index, size)
        return pair

    def distributed(world):
        def batches(pair):
            return nt.ShardSampler(range(BATCHES), shuffle=False, optimizer=pair.of_generator)

        pair = program(world, lambda one: nt.Synchronous(one, world=world), BATCH, batches)
        pair.of_critic.close()
        return pair.values()

    center = on_ranks(3, distributed)[0]

    def rows(pair):
        return range(BATCHES // 2)

    whole = program(None, lambda one: one, 2 * BATCH, rows)
    # `noise` is flipped within a batch, which changes its order only.
    torch.testing.assert_close(center, whole.values(), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("size", [1, 2])
def test_schedulers_and_averages_belong_to_one_of_the_optimizers(size):
    """An average of the generator moves only when the generator does."""

    def program(world, wrap, averaged, rows):
        pair = Pair(wrap)
        schedule = torch.optim.lr_scheduler.ExponentialLR(pair.of_generator, gamma=0.5)
        average, update = averaged(pair)
        for _ in range(EPOCHS):
            for index in rows(pair):
                pair.batch(index)
                update()
            schedule.step()
        return pair, average

    def in_plain(pair):
        average = AveragedModel(pair.generator, multi_avg_fn=get_ema_multi_avg_fn(0.7))
        return average, lambda: average.update_parameters(pair.generator)

    def distributed(world):
        pair, average = program(
            world,
            lambda one: nt.Downpour(one, world=world),
            lambda pair: (nt.EMA(pair.of_generator, pair.generator, 0.7), lambda: None),
            lambda pair: nt.ShardSampler(range(BATCHES), shuffle=False, optimizer=pair.of_generator),
        )
        pair.of_critic.close()
        return pair.values(), copy.deepcopy(dict(average.state_dict()))

    expected, average = program(None, lambda one: one, in_plain, lambda pair: range(BATCHES))
    found = [distributed(None)] if size == 1 else on_ranks(size, distributed)
    assert cases.same(found[0], (expected.values(), dict(average.state_dict())))


def test_16_bit_networks_join_one_after_the_other():
    server, *_ = on_ranks(3, lambda world: trained(world, nt.Downpour, dtype=torch.bfloat16, make=sgd_of))
    assert {value.dtype for value in server.values()} == {torch.bfloat16}
    assert all(value.isfinite().all() for value in server.values())
    start = Pair(make=sgd_of, dtype=torch.bfloat16).values()
    assert not any(torch.equal(one, other) for one, other in zip(server.values()[4:], start[4:], strict=True))


def test_two_servers_share_both_networks():
    pairs = on_ranks(4, lambda world: trained(world, nt.Downpour, servers=2))
    assert cases.same(pairs[0].values(), pairs[1].values())


def test_either_wrapper_evaluates_means_stops_and_closes():
    def program(world):
        pair = Pair(nt.Downpour, world=world)
        means, seen = [], 0
        for epoch in range(5):
            for index in nt.ShardSampler(range(BATCHES), optimizer=pair.of_generator):
                pair.batch(index)
                seen += 1
            means.append(pair.of_critic.mean({"x": world.rank}, world.rank))
            if epoch == 1:
                pair.of_generator.mean({})
                pair.of_critic.stop()
        assert pair.of_generator.stopped
        assert pair.of_generator.report() == pair.of_critic.report()
        pair.of_critic.close()
        pair.of_generator.close()
        return means[0], seen

    found = on_ranks(3, program)
    assert [mean for mean, _ in found] == [{"x": pytest.approx(5 / 3)}] * 3
    assert sum(seen for _, seen in found) == 2 * BATCHES


# -- refusals -----------------------------------------------------------------------------------------


def refusal(program, size=2):
    with pytest.raises(ConfigurationError) as refused:
        on_ranks(size, program)
    return str(refused.value)


def two(first, second, *, between=lambda optimizer: None, same=False):
    def program(world):
        one, other = cases.model_of(), cases.model_of()
        optimizer = first(one, world)
        between(optimizer)
        second(one if same else other, world)

    return program


def downpour(model, world, **options):
    return nt.Downpour(sgd_of(model), world=world, **options)


def test_wrappers_of_another_kind_or_with_other_options_are_refused():
    said = refusal(two(downpour, lambda model, world: nt.EASGD(sgd_of(model), world=world)))
    assert "one kind with the same options" in said
    assert "Downpour(" in said
    assert "EASGD(" in said
    assert "optimizer.close()" in said
    said = refusal(two(downpour, lambda model, world: downpour(model, world, every=3)))
    assert "Downpour(), servers=1 is open on this rank, and Downpour(every=3), servers=1 was made" in said
    assert "servers=2" in refusal(two(downpour, lambda m, w: downpour(m, w, servers=2)), size=3)


@pytest.mark.parametrize("name", ["GEM", "AGN", "EAMSGD"])
def test_algorithms_that_mix_the_steps_are_refused(name):
    def wrap(model, world):
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, nesterov=name == "EAMSGD")
        return getattr(nt, name)(inner, world=world)

    assert f"several optimizers cannot use {name}" in refusal(two(wrap, wrap))


def test_a_parameter_of_both_is_refused():
    assert "parameters of another wrapper" in refusal(two(downpour, downpour, same=True))


@pytest.mark.parametrize("what", ["Report", "Checkpoint"])
def test_what_relies_on_one_wrapper_comes_after_all_wrappers(what, tmp_path):
    def between(optimizer):
        made = {"Report": lambda: nt.Report(optimizer, tmp_path)}
        made.get(what, lambda: nt.Checkpoint(tmp_path / "run", optimizer))()

    assert f"{what} uses the training of a wrapper" in refusal(two(downpour, downpour, between=between))


@pytest.mark.parametrize("given", [lambda pair: pair.of_critic, lambda pair: [pair.of_generator] * 2, list])
def test_a_checkpoint_of_some_of_the_optimizers_is_refused(tmp_path, given):
    def program(world):
        pair = Pair(nt.Downpour, world=world)
        nt.Checkpoint(tmp_path, given(pair) if given is not list else [])

    said = refusal(program)
    assert "this training has " in said
    assert "nnlo_torch.Checkpoint(folder, [first, second])" in said


# -- checkpoints --------------------------------------------------------------------------------------


class Broken(Exception):
    """The training is interrupted here."""


def checkpointed(
    world, folder, wrap, *, stop_at=None, epochs=3, momentum=False, turned=False, averages=False, **options
):
    """Train with a checkpoint after each 3 batches and each epoch, perhaps up to a batch; all that counts."""
    pair = Pair(wrap, sgd_of if momentum else adam_of, world=world, **options)
    wrappers = [pair.of_generator, pair.of_critic]
    also = {"schedule": torch.optim.lr_scheduler.StepLR(pair.of_critic, 2)}
    if averages:
        also["averages"] = nt.EMA(pair.of_generator, pair.generator, decay=0.5)
    sampler = nt.ShardSampler(range(4 * BATCHES), shuffle=False, optimizer=pair.of_critic)
    loader = torch.utils.data.DataLoader(range(4 * BATCHES), batch_size=2, sampler=sampler)
    checkpoint = nt.Checkpoint(folder, wrappers[::-1] if turned else wrappers, also=also, batches=3)
    done = 0
    for _ in checkpoint.epochs(epochs):
        for batch in checkpoint.batches(loader):
            # Other ranks write their parts when they get to it.
            if stop_at is not None and done >= stop_at and list(folder.glob("checkpoint-*/manifest.json")):
                raise Broken
            pair.batch(int(batch[0]) // 4)
            done += 1
        also["schedule"].step()
    steps = pair.of_critic.report().steps
    pair.of_generator.close()
    averaged = cases.values(also["averages"].module) if averages and pair.of_critic.serves else []
    return done, [pair.values(), pair.states(), steps, averaged]


def resumed(size, folder, stop_at, **options):
    """What the ranks have after a training that was interrupted, and their batches since."""

    def program(world, **more):
        return checkpointed(world if size > 1 else None, folder, **options, **more)

    with pytest.raises(Broken):
        on_ranks(size, lambda world: program(world, stop_at=stop_at))
    return on_ranks(size, program)


KINDS = [
    (1, "Downpour", {}),
    (1, "EASGD", {"every": 2}),
    (2, "Downpour", {}),
    (2, "Downpour", {"every": 3, "momentum": True}),
    (2, "Downpour", {"averages": True}),
    (2, "EASGD", {"every": 3}),
    (2, "LocalSGD", {"every": 3}),
    (3, "Synchronous", {}),
    (4, "Synchronous", {"momentum": True}),
    (4, "Synchronous", {"servers": 2}),
]


@pytest.mark.filterwarnings("ignore:this is the optimizer's state of one of several parts")
@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    ("size", "name", "options", "stop_at"),
    [(*kind, stop_at) for kind in KINDS for stop_at in (3, 7, 12)],
    ids=str,
)
def test_two_optimizers_go_on_bit_for_bit(tmp_path, size, name, options, stop_at):
    options = {**options, "wrap": getattr(nt, name)}
    straight = on_ranks(
        size, lambda world: checkpointed(world if size > 1 else None, tmp_path / "straight", **options)
    )
    again = resumed(size, tmp_path / "run", stop_at, **options)
    for (whole, expected), (rest, found) in zip(straight, again, strict=True):
        assert cases.same(found, expected)
        assert whole == 0 or 0 < rest < whole


def test_with_other_workers_two_optimizers_go_on_at_the_centre(tmp_path):
    options = {"wrap": nt.EASGD, "every": 2}
    for size, epochs, batches in ((3, 1, 8), (4, 2, 6)):
        _, *workers = on_ranks(
            size, lambda world, epochs=epochs: checkpointed(world, tmp_path, epochs=epochs, **options)
        )
        assert {done for done, _ in workers} <= {batches, batches - 1}


def test_the_order_of_the_list_does_not_matter_among_ranks(tmp_path):
    first = on_ranks(2, lambda world: checkpointed(world, tmp_path, nt.Downpour, epochs=1))
    again = on_ranks(2, lambda world: checkpointed(world, tmp_path, nt.Downpour, epochs=1, turned=True))
    assert [done for done, _ in again] == [0, 0]
    assert cases.same([seen[:2] for _, seen in again], [seen[:2] for _, seen in first])


@pytest.mark.parametrize("size", [1, 2])
def test_the_checkpoint_of_one_optimizer_is_not_that_of_two(tmp_path, size):
    def alone(world):
        pair = Pair()
        optimizer = nt.Downpour(pair.of_critic, world=world if size > 1 else None)
        for _ in nt.Checkpoint(tmp_path, optimizer).epochs(1):
            pass
        optimizer.close()

    on_ranks(size, alone)
    with pytest.raises(ConfigurationError, match="the optimizer is Adam there, but Adam and Adam here"):
        on_ranks(size, lambda world: checkpointed(world if size > 1 else None, tmp_path, nt.Downpour))


# -- one training after another -----------------------------------------------------------------------


def step_of(model, optimizer, index):
    optimizer.zero_grad()
    cases.loss_of(model, X[BATCH * index :][:BATCH], torch.arange(BATCH) % 3).backward()
    optimizer.step()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", cases.WRAPPERS)
def test_two_trainings_follow_each_other(name):
    """The second trains only the head of the model that the first has left at the centre, on all ranks."""

    def program(world):
        model, frozen = cases.model_of(), []
        for part in (model, model[2]):
            inner = torch.optim.SGD(part.parameters(), lr=0.05, momentum=0.5)
            optimizer = getattr(nt, name)(inner, world=world, **cases.WRAPPERS[name])
            frozen.append(cases.values(model[0]))
            for _ in range(EPOCHS):
                for index in nt.ShardSampler(range(BATCHES), optimizer=optimizer):
                    step_of(model, optimizer, index)
        optimizer.close()
        assert cases.same(cases.values(model[0]), frozen[1])
        return frozen, cases.values(model), optimizer.report().steps

    server, *workers = on_ranks(3, program)
    before, after = server[0]
    assert all(cases.same(worker[0][1], after) for worker in workers)
    assert not cases.same(before, after)
    assert [worker[2] for worker in workers] == [EPOCHS * BATCHES // 2] * 2


def test_a_wrapper_made_inside_a_loop_over_batches_is_refused():
    def program(world):
        model = cases.model_of()
        optimizer = downpour(model, world)
        for index in nt.ShardSampler(range(BATCHES), optimizer=optimizer):
            step_of(model, optimizer, index)
            downpour(cases.model_of(), world)

    assert "made within the loop over the batches" in refusal(program)


def test_alone_wrappers_of_one_kind_stop_together_and_others_do_not():
    first, second, third = (nt.Downpour(sgd_of(cases.model_of())) for _ in range(3))
    other = nt.EASGD(sgd_of(cases.model_of()))
    first.stop()
    assert [one.stopped for one in (first, second, third, other)] == [True, True, True, False]
    later = nt.EASGD(sgd_of(cases.model_of()))
    list(other.epoch(range(1)))
    last = nt.EASGD(sgd_of(cases.model_of()))
    other.stop()
    assert [one.stopped for one in (other, later, last)] == [True, True, False]
    assert [one.report().steps for one in (first, other)] == [0, 0]


@pytest.mark.parametrize("name", ["Downpour", "EASGD"])
def test_after_a_training_a_sampler_without_a_wrapper_is_that_of_a_plain_loop(name):
    """A wrapper that was closed and dropped is gone, at once."""

    def program(world):
        model = cases.model_of()
        optimizer = getattr(nt, name)(sgd_of(model), world=world)
        nt.EMA(optimizer, model)
        gone = weakref.ref(optimizer)
        for index in nt.ShardSampler(range(BATCHES), optimizer=optimizer):
            step_of(model, optimizer, index)
        optimizer.close()
        del optimizer
        return gone() is None

    gc.disable()
    try:
        assert on_ranks(2, program) == [True, True]
    finally:
        gc.enable()


def test_alone_a_wrapper_that_is_not_used_any_more_is_freed_at_once():
    optimizer = nt.Downpour(sgd_of(cases.model_of()))
    gone = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert gone() is None
    finally:
        gc.enable()


# -- in groups ----------------------------------------------------------------------------------------


class WithoutStatistics(Pair):
    """Its means over the batch are no part of the network."""

    between = torch.nn.Softplus


@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", ["batch", "both_at_once"])
@pytest.mark.parametrize(
    ("k", "name", "options"),
    [
        (2, "Synchronous", {"servers": 0}),
        (3, "Downpour", {"servers": 0, "all_reduce": "thread"}),
        (2, "Downpour", {"group_size": 2}),
        (3, "DynSGD", {"group_size": 3}),
        (2, "EASGD", {"group_size": 2, "every": 10**6}),
    ],
)
def test_a_group_makes_the_steps_of_one_process_with_the_large_batch(k, name, options, how):
    """The generator's backward pass leaves gradients of the critic behind, which no step may use."""
    batches, size = 4, 4

    def program(world):
        pair = WithoutStatistics(getattr(nt, name), sgd_of, world=world, **options)
        for _ in range(EPOCHS):
            for index in nt.ShardSampler(range(k * batches), shuffle=False, optimizer=pair.of_critic):
                getattr(pair, how)(index, size)
        pair.of_generator.close()
        return pair.values()

    expected = WithoutStatistics(make=sgd_of)
    begun = expected.values()
    for _ in range(EPOCHS):
        for index in range(batches):
            getattr(expected, how)(index, k * size)
    _, *found = on_ranks(options.get("servers", 1) + k, program)
    for values in found:
        assert cases.same(values, found[0])
        pairs = list(zip(values, expected.values(), begun, strict=True))
        assert all(torch.allclose(one, other, rtol=1e-4, atol=2e-6) for one, other, _ in pairs)
        assert any(not torch.allclose(one, before, atol=1e-4) for one, _, before in pairs)
