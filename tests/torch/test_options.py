"""What the wrappers of PyTorch offer of each algorithm, against references of a few lines."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest

from nnlo_common import ConfigurationError, algorithms
from tests.helpers.threads import on_ranks

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")
import nnlo_torch as nt  # noqa: E402
from nnlo_torch import _schedules  # noqa: E402
from tests.helpers import torch_cases as cases  # noqa: E402

pytestmark = pytest.mark.framework("torch")

RATE, MOMENTUM = 0.05, 0.9
X, Y = cases.data()


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=RATE, **options)


def nesterov(model):
    return sgd(model, momentum=MOMENTUM, nesterov=True)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


def batch(index):
    start = 6 * index % 54
    return X[start : start + 6], Y[start : start + 6]


def gradient(model, index):
    """The gradients of a batch, in new tensors."""
    return torch.autograd.grad(cases.loss_of(model, *batch(index)), list(model.parameters()))


def values(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def give(model, gradients):
    for parameter, one in zip(model.parameters(), gradients, strict=True):
        parameter.grad = one.clone()


def take(model, other):
    model.load_state_dict(copy.deepcopy(other.state_dict()))


def add(first, second):
    return [one + other for one, other in zip(first, second, strict=True)] if first else list(second)


def trained(wrapper, make, steps, *, local=None, epochs=1, then=lambda optimizer: None, **options):
    """The centre and the worker's weights before each step and at the end, of a training with one worker."""

    def program(world):
        model = cases.model_of()
        given = {"local": local(model)} if callable(local) else {"local": local} if local is not None else {}
        optimizer = wrapper(make(model), model=model, world=world, **given, **options)
        path = []
        for epoch in range(epochs):
            for index in optimizer.epoch(torch.arange(epoch * steps, epoch * steps + steps)[:, None]):
                path.append(values(model))
                optimizer.zero_grad()
                cases.loss_of(model, *batch(int(index))).backward()
                optimizer.step()
        then(optimizer)
        optimizer.close()
        path.append(values(model))
        return path

    server, worker = on_ranks(2, program)
    return server[-1], torch.stack(worker)


def close(first, second):
    torch.testing.assert_close(first, second, rtol=2e-5, atol=2e-6)


# --- Downpour: local steps, pushes and fetches of their own ------------------------------------------------


def downpour(make, steps, *, n_push, n_fetch, local=None, epochs=1):
    """The paper's algorithm with one worker: what the centre is, and where each gradient is taken."""
    center, worker = cases.model_of(), cases.model_of()
    optimizer, own = make(center), local(worker) if local else None
    path = []
    for epoch in range(epochs):
        total: list[Any] = []
        for step in range(1, steps + 1):
            path.append(values(worker))
            raw = gradient(worker, epoch * steps + step - 1)
            total = add(total, raw)
            if own is not None:
                give(worker, raw)
                own.step()
            if step % n_push == 0 or step == steps:
                give(center, total)
                optimizer.step()
                total = []
            if step % n_fetch == 0 or step == steps:
                take(worker, center)
    return values(center), torch.stack([*path, values(worker)])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("local", [None, 0.02, adam, nesterov])
@pytest.mark.parametrize(("n_push", "n_fetch"), [(1, 1), (3, 3), (1, 3), (2, 4), (3, 1), (4, 2)])
def test_downpour_pushes_fetches_and_steps_locally_as_the_paper_has_it(make, local, n_push, n_fetch):
    moved = (lambda model: torch.optim.SGD(model.parameters(), lr=local)) if local == 0.02 else local
    expected = downpour(make, 10, n_push=n_push, n_fetch=n_fetch, local=moved, epochs=2)
    found = trained(nt.Downpour, make, 10, n_push=n_push, n_fetch=n_fetch, local=local, epochs=2)
    close(found[0], expected[0])
    close(found[1], expected[1])


def test_every_is_both_unless_one_is_said():
    model = cases.model_of()
    rule = nt.Downpour(sgd(model), every=4, n_fetch=2).algorithm
    assert (rule.n_push, rule.n_fetch, rule.schedule) == (4, 2, "aligned")


def test_without_local_steps_gradients_are_taken_at_the_centre_that_was_fetched():
    _, path = trained(nt.Downpour, sgd, 8, every=4)
    assert torch.equal(path[0], path[3])
    assert not torch.equal(path[3], path[4])
    _, path = trained(nt.Downpour, sgd, 8, every=4, local=0.01)
    assert not torch.equal(path[0], path[1])


@pytest.mark.parametrize("wrong", [-0.1, float("nan"), float("inf"), True, "sgd", [0.1]])
def test_what_makes_no_local_steps_is_refused(wrong):
    with pytest.raises(ConfigurationError, match=r"local=.* must be a learning rate, a torch optimizer over"):
        nt.Downpour(sgd(cases.model_of()), local=wrong)


def test_a_local_optimizer_has_the_same_parameters():
    model = cases.model_of()
    with pytest.raises(
        ConfigurationError, match=r"has 4 parameters that yours does not have, and lacks 4 of yours"
    ):
        nt.Downpour(sgd(model), local=adam(cases.model_of()))
    fewer = torch.optim.Adam(list(model.parameters())[:-1])
    with pytest.raises(
        ConfigurationError, match=r"has 0 parameters that yours does not have, and lacks 1 of yours"
    ):
        nt.Downpour(sgd(model), local=fewer)
    with pytest.raises(ConfigurationError, match="cannot wrap LBFGS"):
        nt.Downpour(sgd(model), local=torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ConfigurationError, match="cannot wrap another wrapper"):
        nt.Downpour(sgd(model), local=nt.Downpour(sgd(model)))


def test_ranks_with_other_local_optimizers_are_refused():
    def program(world):
        model = cases.model_of()
        local = (adam if world.rank else sgd)(model)
        with pytest.raises(ConfigurationError, match="local"):
            nt.Downpour(sgd(model), local=local, model=model, world=world)

    on_ranks(2, program)


def test_a_schedule_of_the_local_optimizer_is_quiet_where_that_does_not_step():
    def program(world):
        model = cases.model_of()
        local = adam(model)
        optimizer = nt.Downpour(sgd(model), local=local, every=2, model=model, world=world)
        schedule = torch.optim.lr_scheduler.ExponentialLR(local, 0.5)
        for _ in optimizer.epoch(torch.arange(4)[:, None]):
            optimizer.zero_grad()
            cases.loss_of(model, *batch(0)).backward()
            optimizer.step()
        schedule.step()  # a warning is an error
        optimizer.close()
        return local.param_groups[0]["lr"]

    assert on_ranks(2, program) == [0.005, 0.005]
    assert program(None) == 0.005


# --- EASGD and EAMSGD --------------------------------------------------------------------------------------


def eamsgd(steps, *, every, alpha):
    """Algorithm 2 with one worker: where each gradient is taken, and x and the centre at the end."""
    worker = cases.model_of()
    x = [parameter.detach().clone() for parameter in worker.parameters()]
    center = [one.clone() for one in x]
    speed = [torch.zeros_like(one) for one in x]
    path = []
    for step in range(steps):
        with torch.no_grad():
            for parameter, one, its in zip(worker.parameters(), x, speed, strict=True):
                parameter.copy_(one + MOMENTUM * its)
        path.append(values(worker))
        raw = gradient(worker, step)
        if step % every == 0:
            pull = [alpha * (one - other) for one, other in zip(x, center, strict=True)]
            x = [one - its for one, its in zip(x, pull, strict=True)]
            center = [one + its for one, its in zip(center, pull, strict=True)]
        speed = [MOMENTUM * its - RATE * one for its, one in zip(speed, raw, strict=True)]
        x = add(x, speed)
    flat = [torch.cat([one.flatten() for one in vector]) for vector in (center, x)]
    return flat[0], torch.stack([*path, flat[1]])


@pytest.mark.parametrize(("every", "alpha"), [(1, 0.3), (3, 0.9), (5, 0.2)])
def test_eamsgd_is_algorithm_2(every, alpha):
    expected = eamsgd(12, every=every, alpha=alpha)
    found = trained(nt.EAMSGD, nesterov, 12, every=every, alpha=alpha)
    close(found[0], expected[0])
    close(found[1], expected[1])


def test_eamsgd_between_exchanges_is_the_optimizer_itself():
    """PyTorch's Nesterov momentum keeps the look-ahead point as the weights, as the model has it here."""
    model = cases.model_of()
    plain, path = nesterov(model), []
    for step in range(6):
        path.append(values(model))
        give(model, gradient(model, step))
        plain.step()
    close(trained(nt.EAMSGD, nesterov, 6, every=100)[1][:-1], torch.stack(path))


def test_eamsgd_follows_the_learning_rates_of_groups_and_schedules():
    def program(world):
        model = cases.model_of()
        first, *others = model.parameters()
        groups = [{"params": [first], "lr": 0.1}, {"params": others}]
        plain = torch.optim.SGD(groups, lr=RATE, momentum=MOMENTUM, nesterov=True)
        optimizer = nt.EAMSGD(plain, every=100, model=model, world=world)
        for index in optimizer.epoch(torch.arange(5)[:, None]):
            optimizer.param_groups[0]["lr"] = 0.1 if index < 3 else 0.0
            optimizer.zero_grad()
            cases.loss_of(model, *batch(int(index))).backward()
            optimizer.step()
        weights = values(model)
        optimizer.close()
        return weights

    # Constant rates up to there are those of PyTorch; after that its momentum has them in another place.
    model = cases.model_of()
    speed = [torch.zeros_like(parameter) for parameter in model.parameters()]
    x = [parameter.detach().clone() for parameter in model.parameters()]
    for index in range(5):
        raw = gradient(model, index)
        rates = [0.1 if index < 3 else 0.0, RATE, RATE, RATE]
        speed = [MOMENTUM * its - rate * one for its, rate, one in zip(speed, rates, raw, strict=True)]
        x = add(x, speed)
        with torch.no_grad():
            for parameter, one, its in zip(model.parameters(), x, speed, strict=True):
                parameter.copy_(one + MOMENTUM * its)
    close(on_ranks(2, program)[1], values(model))


def test_the_centre_of_eamsgd_is_seen_and_given_back():
    def program(world):
        model = cases.model_of()
        optimizer = nt.EAMSGD(nesterov(model), every=2, alpha=0.5, model=model, world=world)
        seen = []
        for index in optimizer.epoch(torch.arange(5)[:, None]):
            optimizer.zero_grad()
            cases.loss_of(model, *batch(int(index))).backward()
            optimizer.step()
            before = values(model)
            with optimizer.center_weights():
                seen.append(values(model))
            assert torch.equal(values(model), before)
        optimizer.evaluate(lambda one: {"there": 1.0}, [torch.ones(1)])
        optimizer.close()
        return seen

    first, _, third, _, last = on_ranks(2, program)[1]
    assert torch.equal(first, values(cases.model_of()))
    assert not torch.equal(third, first)
    assert not torch.equal(last, third)


NOT_NESTEROV = {
    "plain": (sgd, "with momenta"),
    "momentum only": (lambda model: sgd(model, momentum=0.9), "without nesterov"),
    "Adam": (adam, "it got Adam"),
    "weight decay": (lambda model: sgd(model, momentum=0.9, nesterov=True, weight_decay=0.1), "weight_decay"),
    "maximize": (lambda model: sgd(model, momentum=0.9, nesterov=True, maximize=True), "maximize"),
    "two momenta": (
        lambda model: torch.optim.SGD(
            [
                {"params": [one], "momentum": 0.5 + 0.1 * index}
                for index, one in enumerate(model.parameters())
            ],
            lr=0.1,
            momentum=0.9,
            nesterov=True,
        ),
        "with momenta",
    ),
    "a model": (lambda model: model, "it got Sequential"),
}


@pytest.mark.parametrize(("make", "expected"), NOT_NESTEROV.values(), ids=NOT_NESTEROV)
def test_eamsgd_refuses_what_is_no_nesterov_momentum(make, expected):
    with pytest.raises(
        ConfigurationError, match=r"^EAMSGD needs a torch.optim.SGD with nesterov=True and one momentum"
    ) as error:
        nt.EAMSGD(make(cases.model_of()))
    assert expected in str(error.value)


def test_synchronous_easgd_pulls_all_workers_at_once():
    """Equations 3 and 4: each worker and the centre move by what they were before."""

    def program(world):
        model = cases.model_of()
        optimizer = nt.EASGD(sgd(model), every=1, alpha=0.25, synchronous=True, model=model, world=world)
        worker, _ = optimizer.share
        for _ in optimizer.epoch([torch.ones(1)] * 3):
            optimizer.zero_grad()
            cases.loss_of(model, *batch(worker)).backward()
            optimizer.step()
        optimizer.close()
        return values(model)

    models = [cases.model_of() for _ in range(2)]
    center = values(models[0])
    for _ in range(3):
        pulls = []
        for worker, model in enumerate(models):
            give(model, gradient(model, worker))
            sgd(model).step()
            pulls.append(0.25 * (values(model) - center))
            torch.nn.utils.vector_to_parameters(values(model) - pulls[-1], model.parameters())
        center = center + pulls[0] + pulls[1]
    server, *workers = on_ranks(3, program)
    close(server, center)
    for found, model in zip(workers, models, strict=True):
        close(found, values(model))


# --- GEM ---------------------------------------------------------------------------------------------------


def test_gem_with_every_takes_the_mean_of_the_gradients():
    momentum = {"momentum": MOMENTUM}

    def means(model, step):
        for parameter, one in zip(
            model.parameters(), add(gradient(model, 2 * step), gradient(model, 2 * step + 1)), strict=True
        ):
            parameter.grad = one / 2

    def program(world):
        model = cases.model_of()
        optimizer = nt.GEM(sgd(model, **momentum), model=model, world=world)
        for index in optimizer.epoch(torch.arange(4)[:, None]):
            optimizer.zero_grad()
            means(model, int(index))
            optimizer.step()
        optimizer.close()
        return values(model)

    center, path = trained(nt.GEM, lambda model: sgd(model, **momentum), 8, every=2)
    expected = on_ranks(2, program)
    close(center, expected[0])
    close(path[-1], expected[1])


# --- options as they arrive --------------------------------------------------------------------------------

OPTIONS = {
    "Downpour": {"every": 3, "local": 0.1, "warm_start": 2, "lag": 1},
    "Synchronous": {"backup": 1, "lag": 1},
    "EASGD": {"every": 3, "alpha": 0.1, "beta_per": "step", "order": "paper", "synchronous": True, "lag": 1},
    "EAMSGD": {"every": 3, "beta": 0.5, "beta_per": "step", "synchronous": True, "lag": 1},
    "GEM": {"every": 3, "kappa": 2.0, "clip": None, "primed": False, "lag": 1},
    "AGN": {"every": 3, "local_learning_rate": 0.1, "lag": 1},
    "DynSGD": {"every": 3, "lag": 1},
    "LocalSGD": {"every": 3, "warmup": 2, "lag": 1},
    "DiLoCo": {"every": 3, "outer_learning_rate": 0.5, "outer_momentum": 0.5, "lag": 1},
}
MADE = {"EAMSGD": nesterov, "GEM": lambda model: sgd(model, momentum=MOMENTUM)}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_reach_the_algorithm(name):
    given = dict(OPTIONS[name])
    rule = getattr(nt, name)(MADE.get(name, sgd)(cases.model_of()), **given).algorithm
    if name == "Downpour":
        every, rate = given.pop("every"), given.pop("local")
        given |= {"n_push": every, "n_fetch": every, "schedule": "aligned", "local_learning_rate": rate}
    if name in ("EAMSGD", "GEM"):
        given |= {"learning_rate": 1.0, "momentum": MOMENTUM}
    assert rule == getattr(algorithms, name)(**given)


@pytest.mark.parametrize("name", OPTIONS)
def test_alone_it_is_the_optimizer_that_it_wraps(name):
    paths = []
    for wrap in (False, True):
        model = cases.model_of()
        optimizer = MADE.get(name, adam)(model)
        if wrap:
            optimizer = getattr(nt, name)(optimizer, **OPTIONS[name])
        for step in range(5):
            give(model, gradient(model, step))
            optimizer.step()
        paths.append(values(model))
    assert torch.equal(*paths)


def test_alone_a_local_optimizer_does_nothing():
    model = cases.model_of()
    before, local = values(model), adam(model)
    optimizer = nt.Downpour(torch.optim.SGD(model.parameters(), lr=0.0), local=local)
    give(model, gradient(model, 0))
    optimizer.step()
    assert torch.equal(values(model), before)
    assert not local.state
    copied = copy.deepcopy(optimizer)
    assert copied.local is not local
    assert copied.local.param_groups[0]["params"][0] is copied.param_groups[0]["params"][0]


@pytest.mark.parametrize(
    ("name", "factor"),
    [("SGD", 8), ("Adam", 1), ("AdamW", 1), ("RMSprop", 1), ("Adagrad", 1), ("Adadelta", 1)],
)
def test_a_sum_of_gradients_makes_longer_steps_of_sgd_only(name, factor):
    """Apart from epsilon, as docs/algorithms.md says."""
    moved = []
    for scale in (1.0, 8.0):
        model = cases.model_of()
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-3)
        before, slopes = values(model), gradient(model, 0)
        for step in range(3):
            give(model, [100 * scale * (1 + step) * slope for slope in slopes])
            optimizer.step()
        moved.append((values(model) - before).norm().item())
    assert moved[1] / moved[0] == pytest.approx(factor, rel=0.01)


# --- checkpoints -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Downpour", {"every": 3, "local": adam}),
        ("Downpour", {"every": 4, "n_fetch": 2, "local": 0.02}),
        ("EAMSGD", {"every": 3, "alpha": 0.3}),
        ("GEM", {"every": 3}),
    ],
)
def test_a_training_that_is_resumed_has_the_bits_of_one_that_was_not(name, options, tmp_path):
    def train(folder, epochs):
        def program(world):
            model = cases.model_of()
            given = {key: value(model) if callable(value) else value for key, value in options.items()}
            make = MADE.get(name, adam)
            optimizer = getattr(nt, name)(make(model), model=model, world=world, **given)
            sampler = nt.ShardSampler(X, optimizer=optimizer)
            loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), 7, sampler=sampler)
            done = 0
            checkpoint = nt.Checkpoint(folder, optimizer)
            for _ in checkpoint.epochs(epochs):
                for x, y in checkpoint.batches(loader):
                    optimizer.zero_grad()
                    cases.loss_of(model, x, y).backward()
                    optimizer.step()
                    done += 1
            optimizer.close()
            return values(model), done

        return on_ranks(2, program)

    whole = train(tmp_path / "whole", 3)
    train(tmp_path / "parts", 1)
    parts = train(tmp_path / "parts", 3)
    for (first, _), (second, _) in zip(whole, parts, strict=True):
        assert torch.equal(first, second)
    assert 3 * parts[1][1] == 2 * whole[1][1] > 0


def test_a_checkpoint_with_another_local_optimizer_is_refused(tmp_path):
    def train(make):
        model = cases.model_of()
        optimizer = nt.Downpour(sgd(model), local=make(model))
        for _ in nt.Checkpoint(tmp_path, optimizer).epochs(1):
            pass

    train(adam)
    with pytest.raises(
        ConfigurationError, match="the optimizer is SGD, local Adam there, but SGD, local SGD"
    ):
        train(sgd)


def test_ranks_that_are_threads_may_follow_progress_at_once(monkeypatch):
    """As in the virtual cluster: none may change what another one goes through."""
    second = threading.Thread(target=_schedules.follow_progress, args=(lambda: None, object()))

    def meanwhile():
        if second.ident is None:
            second.start()
            second.join(0.1)  # it waits for its turn
        return True

    monkeypatch.setattr(_schedules, "_trainings", {-1: meanwhile, -2: meanwhile})
    _schedules.follow_progress(lambda: None, object())
    second.join()
    assert _schedules._trainings.keys() >= {-1, -2}
