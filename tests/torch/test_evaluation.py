"""The centre evaluated on all ranks together, and what a training and a model keep through it."""

from __future__ import annotations

import collections
import copy
import functools
import math
import threading

import pytest

from nnlo_common import ConfigurationError, DivergedError
from nnlo_common.testing import InjectedFault
from tests.helpers.threads import on_ranks

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import nnlo_torch as nt  # noqa: E402
from tests.helpers import torch_cases as cases  # noqa: E402
from tests.helpers.torch_cases import WRAPPERS  # noqa: E402

pytestmark = pytest.mark.framework("torch")

TIMEOUT_S = 180.0
X, Y = cases.data()
LAYOUTS = [(1, 1), (1, 2), (2, 2)]  # servers, workers


class Mixed(torch.nn.Module):
    """Running statistics, dropout, buffers of several kinds, and a part that stays in `eval()` mode."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(5, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.drop = torch.nn.Dropout(0.5)
        self.frozen = torch.nn.Sequential(torch.nn.BatchNorm1d(6), torch.nn.Dropout(0.5))
        self.head = torch.nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("level", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        cases.initialised(self)
        self.frozen.eval()

    def forward(self, x):
        if self.training:
            self.calls += 1
            self.scratch += x.mean()
        return self.head(self.frozen(self.drop(torch.tanh(self.norm(self.first(x))))))


def everything(model):
    """All that a model is: weights, buffers, gradients and the modes of its parts."""
    tensors = {name: value.detach().clone() for name, value in model.named_parameters()}
    tensors |= {name: value.clone() for name, value in model.named_buffers()}
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return tensors, gradients, [part.training for part in model.modules()]


def assert_same(first, second):
    for one, other in zip(first[:2], second[:2], strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert (value is None) == (other[name] is None), name
            assert value is None or torch.equal(value, other[name]), name
    assert first[2] == second[2]


def wrapped(world, model, wrapper="Downpour", rate=0.05, **options):
    plain = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.5 if wrapper == "GEM" else 0.0)
    return getattr(nt, wrapper)(plain, model=model, world=world, **WRAPPERS[wrapper], **options)


def loader_of(optimizer, *, samples=60, batch=4, evaluation=False):
    data = TensorDataset(X[:samples], Y[:samples])
    sampler = nt.ShardSampler(data, seed=3, evaluation=evaluation, optimizer=optimizer)
    return DataLoader(data, batch, sampler=sampler)


def train_on(model, optimizer, batch):
    optimizer.zero_grad()
    cases.loss_of(model, *batch).backward()
    optimizer.step()


def train(model, optimizer, loader):
    for batch in loader:
        train_on(model, optimizer, batch)


def measure(model):
    def measured(batch):
        outputs = model(batch[0])
        hits = (outputs.argmax(1) == batch[1]).float().mean()
        return {"loss": torch.nn.functional.cross_entropy(outputs, batch[1]), "hits": hits}

    return measured


def alone(model, center, samples):
    """What the centre, as a rank saw it, gives on the whole set at once."""
    model = copy.deepcopy(model)
    model.load_state_dict(center)
    model.eval()
    with torch.no_grad():
        return {name: float(value) for name, value in measure(model)((X[:samples], Y[:samples])).items()}


# --- the same numbers everywhere ---------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("servers", "workers"), LAYOUTS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_all_ranks_get_the_numbers_of_the_centre_on_the_whole_set(wrapper, servers, workers):
    """After each epoch, and before the first; with shares that are uneven and batches that are, too."""
    samples = 59

    def program(world):
        model = Mixed()
        optimizer = wrapped(world, model, wrapper, servers=servers)
        training, evaluation = loader_of(optimizer), loader_of(optimizer, samples=samples, evaluation=True)
        seen = []

        def evaluate():
            model.train()
            model.frozen.eval()
            optimizer.mean({})  # ends the epoch: what is left of it is contributed, and the centre fetched
            before = everything(model)
            center = {}

            def noted(batch):
                center.update(copy.deepcopy(model.state_dict()))
                assert not any(part.training for part in model.modules())
                assert not torch.is_grad_enabled()
                return measure(model)(batch)

            numbers = optimizer.evaluate(noted, evaluation)
            after = everything(model)
            if not optimizer.serves:  # a worker's buffers become the mean of all when its epoch ends
                for tensors in (before[0], after[0]):
                    for name, buffer in model.named_buffers():
                        if buffer.is_floating_point() and name != "scratch":
                            del tensors[name]
                assert_same(before, after)
            middle = everything(model)
            assert optimizer.evaluate(noted, evaluation) == numbers  # again, and nothing has changed
            assert_same(middle, everything(model))
            seen.append((numbers, center))

        evaluate()
        for _ in range(2):
            train(model, optimizer, training)
            evaluate()
        optimizer.close()
        return seen

    results = on_ranks(servers + workers, program)
    for turn in range(3):
        numbers, center = results[0][turn]
        assert math.isfinite(numbers["loss"])
        for other, its_center in (seen[turn] for seen in results):
            assert other == numbers
            for name in ("first.weight", "head.bias", "norm.running_mean", "norm.running_var"):
                assert torch.equal(center[name], its_center[name]), name
        assert numbers == pytest.approx(alone(Mixed(), center, samples), rel=1e-5, abs=1e-6)
    assert results[0][0][0] != results[0][1][0] != results[0][2][0]


@pytest.mark.parametrize("samples", [0, 1, 2, 3, 7])
def test_shares_may_be_empty(samples):
    def program(world):
        model = cases.model_of()
        optimizer = wrapped(world, model)
        train(model, optimizer, loader_of(optimizer))
        evaluation = loader_of(optimizer, samples=samples, batch=2, evaluation=True)
        numbers = optimizer.evaluate(measure(model), evaluation)
        with optimizer.evaluation():
            center = copy.deepcopy(model.state_dict())
        optimizer.close()
        return numbers, center

    results = on_ranks(4, program)
    numbers, center = results[0]
    assert all(other == numbers for other, _ in results)
    if samples:
        assert numbers == pytest.approx(alone(cases.model_of(), center, samples), rel=1e-5)
    else:
        assert numbers == {}


def test_alone_an_evaluation_is_of_the_model_itself():
    model = Mixed()
    optimizer = wrapped(None, model)
    train(model, optimizer, loader_of(optimizer))
    before = everything(model)
    numbers = optimizer.evaluate(measure(model), loader_of(optimizer, samples=59, evaluation=True))
    assert numbers == pytest.approx(alone(model, model.state_dict(), 59), rel=1e-5)
    assert_same(before, everything(model))
    with optimizer.center_weights():
        assert_same(before, everything(model))


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (torch.tensor(0.5), r"numbers by name, .*but .* of type Tensor.*\{\"loss\": loss\}"),
        (0.5, r"numbers by name, .*but .* of type float"),
        ({"loss": torch.ones(2)}, r"'loss' is tensor\(\[1., 1.\]\), which is not one number"),
        ({"loss": None}, r"'loss' is None, which is not one number"),
        ({1: 2.0}, r"the score 2.0 has the name 1, which is an int; name it by a text, e.g. '1'"),
    ],
)
def test_what_is_no_number_by_name_is_refused(values, problem, tmp_path):
    optimizer = wrapped(None, Mixed())
    with pytest.raises(ConfigurationError, match=problem):
        optimizer.evaluate(lambda batch: values, [torch.ones(2)])
    with pytest.raises(ConfigurationError, match=problem):
        optimizer.mean(values)
    with pytest.raises(ConfigurationError, match=problem):
        nt.Report(optimizer, tmp_path).epoch(values)


def test_a_batch_without_samples_changes_no_mean():
    optimizer = wrapped(None, Mixed())
    batches = [torch.ones(2), torch.ones(0), torch.full((2,), 3.0)]
    assert optimizer.evaluate(lambda x: {"x": x.mean()}, batches) == {"x": 2.0}
    assert optimizer.evaluate(lambda x: {"x": x.mean()}, batches[1:2]) == {}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_mean_is_weighted_and_ends_the_epoch(size):
    """As in a loop that wants the training loss of an epoch: the server has no samples, so no mean."""

    def program(world):
        model = cases.model_of()
        optimizer = wrapped(world, model)
        loader, means = loader_of(optimizer), []
        for _ in range(2):
            total, count = 0.0, 0
            for x, y in loader:
                train_on(model, optimizer, (x, y))
                total, count = total + float(x.sum()), count + len(x)
            means.append(optimizer.mean({"x": total / count if count else math.nan}, weight=count))
        optimizer.close()
        return means

    results = [program(None)] if size == 1 else on_ranks(1 + size - 1, program)
    want = {"x": pytest.approx(float(X.sum()) / 60, rel=1e-5)}
    assert all(means == [want, want] for means in results)


@pytest.mark.parametrize("size", [1, 3])
def test_the_mean_of_what_has_no_weight_is_nan_on_all_ranks(size):
    def program(world):
        optimizer = wrapped(world, cases.model_of())
        mean = optimizer.mean({"x": 2.0}, weight=0)
        optimizer.close()
        return mean

    results = [program(None)] if size == 1 else on_ranks(size, program)
    assert [mean.keys() for mean in results] == [{"x"}] * size
    assert all(math.isnan(mean["x"]) for mean in results)


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf, "x", None, torch.ones(2)], ids=repr)
def test_a_weight_of_a_mean_that_is_no_number_of_samples_is_refused(weight):
    optimizer = wrapped(None, Mixed())
    with pytest.raises(ConfigurationError, match=r"weight = .* must be a finite number of at least 0"):
        optimizer.mean({"x": 2.0}, weight=weight)
    assert optimizer.mean({"x": 2.0}, weight=torch.tensor(3)) == {"x": 2.0}


def test_different_names_are_refused():
    def program(world):
        optimizer = wrapped(world, cases.model_of())
        optimizer.mean({f"of rank {world.rank}": 1.0})

    with pytest.raises(ConfigurationError, match="use the same names on all ranks"):
        on_ranks(2, program)


def test_too_many_names_are_refused():
    def program(world):
        optimizer = wrapped(world, cases.model_of())
        optimizer.mean({f"the accuracy of class {number}": 0.5 for number in range(2000)})

    with pytest.raises(ConfigurationError, match="bytes of JSON are more than"):
        on_ranks(2, program)


# --- what the model keeps ----------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_look_at_the_centre_in_mid_epoch_leaves_a_worker_as_it_was(wrapper):
    """Looking changes no bit of the training."""

    def program(world, *, looks):
        model = Mixed()
        model.drop.p = 0.0  # all ranks draw from one random state
        optimizer = wrapped(world, model, wrapper)
        for number, batch in enumerate(loader_of(optimizer)):
            train_on(model, optimizer, batch)
            if looks and number % 3 == 0:
                before = everything(model)
                with optimizer.center_weights():
                    assert [part.training for part in model.modules()] == before[2]
                    center = everything(model)[0]
                assert_same(before, everything(model))
                assert all(value.isfinite().all() for value in center.values())
        optimizer.close()
        return everything(model)

    plain = on_ranks(2, lambda world: program(world, looks=False))
    looked = on_ranks(2, lambda world: program(world, looks=True))
    for first, second in zip(plain, looked, strict=True):
        assert_same(first, second)


@pytest.mark.parametrize("block", ["center_weights", "evaluation"])
def test_an_error_in_a_block_gives_a_worker_its_weights_back(block):
    def program(world):
        model = Mixed()
        optimizer = wrapped(world, model, "EASGD")
        train(model, optimizer, loader_of(optimizer))
        optimizer.mean({})
        before = everything(model)
        with pytest.raises(KeyError), getattr(optimizer, block)():
            raise KeyError
        assert_same(before, everything(model))
        assert torch.is_grad_enabled()
        optimizer.close()

    on_ranks(3, program)


# --- with slow and dead ranks ------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapper", ["Downpour", "Synchronous", "LocalSGD"])
@pytest.mark.parametrize("point", ["send EPOCH", "send VIEW", "send ASK"])
def test_an_evaluation_waits_for_a_slow_worker(wrapper, point):
    """Rank 2 is held until rank 1 has asked for the mean, or can go no further."""
    gates = []

    def program(world):
        model = cases.model_of()
        optimizer = wrapped(world, model, wrapper)
        train(model, optimizer, loader_of(optimizer))
        if world.rank == 1:
            gates[0].set()
        numbers = optimizer.evaluate(measure(model), loader_of(optimizer, samples=59, evaluation=True))
        with optimizer.evaluation():
            center = copy.deepcopy(model.state_dict())
        optimizer.close()
        return numbers, center

    results = on_ranks(3, program, prepare=lambda cluster: gates.append(cluster.hold(2, point)))
    numbers, center = results[0]
    assert all(other == numbers for other, _ in results)
    assert numbers == pytest.approx(alone(cases.model_of(), center, 59), rel=1e-5)


@pytest.mark.parametrize("point", ["send EPOCH", "send VIEW", "send ASK", "receive ANSWER"])
def test_an_evaluation_does_without_the_dead(point):
    def program(world):
        model = cases.model_of()
        optimizer = wrapped(world, model)
        train(model, optimizer, loader_of(optimizer))
        numbers = optimizer.evaluate(measure(model), loader_of(optimizer, samples=59, evaluation=True))
        optimizer.close()
        return numbers

    server, dead, living = on_ranks(3, program, prepare=lambda cluster: cluster.fail(1, point))
    assert isinstance(dead, InjectedFault)
    assert server == living
    assert math.isfinite(server["loss"])


# --- stopping ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("servers", "workers"), LAYOUTS)
@pytest.mark.parametrize("wrapper", ["Downpour", "Synchronous", "EASGD"])
def test_after_an_evaluation_all_stop_at_once(wrapper, servers, workers):
    def program(world):
        model = cases.model_of()
        optimizer = wrapped(world, model, wrapper, servers=servers)
        loader, counts = loader_of(optimizer), []
        for epoch in range(4):
            counts.append(0)
            for batch in loader:
                train_on(model, optimizer, batch)
                counts[-1] += 1
            optimizer.evaluate(measure(model), loader_of(optimizer, evaluation=True))
            if epoch == 1:
                optimizer.stop()
            assert optimizer.stopped == (epoch >= 1)
        optimizer.close()
        return counts

    results = on_ranks(servers + workers, program)
    whole = math.ceil(60 / workers / 4)
    assert results[:servers] == [[0, 0, 0, 0]] * servers
    assert results[servers:] == [[whole, whole, 0, 0]] * workers


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_stop_at_the_server_reaches_each_worker_within_one_exchange(wrapper):
    """They come to their next epoch only when it has stopped, and make one round of it at most."""
    every = WRAPPERS[wrapper].get("every", 1)
    stopped = threading.Event()

    def program(world):
        model = cases.model_of()
        optimizer = wrapped(world, model, wrapper)
        loader, counts = loader_of(optimizer), []
        for epoch in range(3):
            counts.append(0)
            for batch in loader:
                if epoch == 1:
                    stopped.wait(TIMEOUT_S)
                train_on(model, optimizer, batch)
                counts[-1] += 1
            if epoch == 0 and optimizer.serves:
                optimizer.stop()
                stopped.set()
        optimizer.close()
        return counts

    _, *workers = on_ranks(3, program)
    for first, second, third in workers:
        assert first == 8
        # Synchronous workers begin their epoch with the centre of the last one's end, and hear of it there.
        assert (wrapper != "Synchronous") <= second <= every
        assert third == 0


def test_breaking_out_of_the_epochs_ends_in_good_order_on_all_ranks():
    """Whoever hears of the stop leaves its loop over epochs; the others may be an epoch behind."""

    def program(world):
        model = cases.model_of()
        optimizer = wrapped(world, model)
        epochs = 0
        for epoch in range(10):
            train(model, optimizer, loader_of(optimizer))
            epochs += 1
            if epoch == 2:
                optimizer.stop()  # the server decides
            if optimizer.stopped:
                break
        optimizer.close()
        return epochs

    server, *workers = on_ranks(4, program)
    assert server == 3
    assert all(3 <= epochs <= 10 for epochs in workers)


# --- beside the serving ------------------------------------------------------------------------------------


def test_a_validation_runs_while_the_next_epoch_is_served():
    """It ends only when the server has taken up exchanges of the next epoch."""
    going_on = threading.Event()

    def look_on(optimizer, exchanges):
        if optimizer.report().exchanges >= exchanges:
            going_on.set()

    def program(world):
        model = Mixed()
        optimizer = wrapped(world, model)
        loader, snapshots = loader_of(optimizer), []

        def validate(center):
            assert going_on.wait(TIMEOUT_S)
            assert not any(part.training for part in center.modules())
            assert not torch.is_grad_enabled()
            return everything(center)[0]

        for epoch in range(3):
            if epoch == 1:
                later = optimizer.report().exchanges + 4
                optimizer.watch(functools.partial(look_on, optimizer, later), every_s=0)
            train(model, optimizer, loader)
            if epoch == 0:
                before = everything(model)[0]
                future = optimizer.aside(validate, model)
                assert (future is None) == (not optimizer.serves)
                snapshots.append(future)
        optimizer.close()
        if future is None:
            return
        center = future.result()
        assert all(torch.equal(center[name], value) for name, value in before.items())
        assert not torch.equal(center["head.bias"], model.head.bias)

    on_ranks(3, program)


def test_alone_a_validation_is_made_at_once():
    model = cases.model_of()
    optimizer = wrapped(None, model)
    results = []
    future = optimizer.aside(lambda center: 3, model, then=results.append)
    assert future.done()
    assert (future.result(), results) == (3, [3])
    with pytest.raises(ZeroDivisionError):
        optimizer.aside(lambda center: 1 / 0, model)


def test_what_follows_a_validation_may_stop_the_training():
    stopped = threading.Event()

    def program(world):
        model = cases.model_of()
        optimizer = wrapped(world, model)
        counts = []

        def stop(result):
            assert result == 1.0
            optimizer.stop()
            stopped.set()

        for epoch in range(4):
            counts.append(0)
            for batch in loader_of(optimizer):
                train_on(model, optimizer, batch)
                counts[-1] += 1
                if epoch == 1:
                    stopped.wait(TIMEOUT_S)
            if epoch == 0:
                optimizer.aside(lambda center: 1.0, model, then=stop)
        optimizer.close()
        return counts

    server, *workers = on_ranks(3, program)
    assert server == [0] * 4
    for first, second, *rest in workers:
        assert first == 8
        assert 1 <= second <= 2
        assert rest == [0, 0]


@pytest.mark.parametrize("when", ["epoch", "close"])
def test_an_error_of_a_validation_surfaces(when):
    failed = threading.Event()

    def program(world):
        model = cases.model_of()
        optimizer = wrapped(world, model)

        def validate(center):
            failed.set()
            raise ValueError("no such file")

        train(model, optimizer, loader_of(optimizer))
        future = optimizer.aside(validate, model)
        if future is not None:
            assert isinstance(future.exception(TIMEOUT_S), ValueError)
        if when == "epoch":
            train(model, optimizer, loader_of(optimizer))
        else:
            optimizer.close()

    with pytest.raises(ValueError, match="no such file") as caught:
        on_ranks(2, program)
    assert failed.is_set()
    assert any("rank 0" in note for note in caught.value.__notes__)


def test_a_watch_looks_on_while_a_server_serves():
    def program(world):
        model = cases.model_of()
        optimizer = wrapped(world, model)
        seen = []
        optimizer.watch(lambda: seen.append(optimizer.report().exchanges), every_s=0)
        train(model, optimizer, loader_of(optimizer))
        optimizer.close()
        return seen

    server, worker = on_ranks(2, program)
    assert worker == []
    assert server == sorted(server)
    assert {0, 7, 15} <= set(server)


# --- diverged ----------------------------------------------------------------------------------------------


def head_only():
    """A large part that is frozen before a small head, as in fine tuning."""
    model = torch.nn.Sequential(torch.nn.Linear(5, 100), torch.nn.Linear(100, 100), torch.nn.Linear(100, 3))
    model[:2].requires_grad_(False)
    return model


MODELS = {"all": cases.model_of, "head only": head_only, "one number": lambda: torch.nn.Linear(5, 3)}


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # which numpy gives, with GEM
@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_centre_is_kept_from_what_has_diverged(wrapper, make, number):
    centers = {}

    def program(world):
        model = make()
        optimizer = wrapped(world, model, wrapper)
        centers[world.rank] = optimizer._flat_model.parameters.vector
        for step, (x, y) in enumerate(loader_of(optimizer)):
            optimizer.zero_grad()
            (cases.loss_of(model, x, y) * (number if step == 4 else 1.0)).backward()
            optimizer.step()
        optimizer.close()

    with pytest.raises(DivergedError, match=r"rank 1 sent NaN or infinity to the centre"):
        on_ranks(2, program)
    assert torch.from_numpy(centers[0]).isfinite().all()


# --- buffers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_with_one_worker_the_buffers_are_its_own_bit_for_bit(wrapper):
    def program(world):
        model = Mixed()
        model.drop.p = 0.0
        optimizer = wrapped(world, model, wrapper)
        buffers = []
        for _ in range(2):
            train(model, optimizer, loader_of(optimizer))
            optimizer.mean({})
            buffers.append({name: value.clone() for name, value in model.named_buffers()})
        optimizer.close()
        return buffers

    server, worker = on_ranks(2, program)
    for center, own in zip(server, worker, strict=True):
        for name in ("norm.running_mean", "norm.running_var"):
            assert torch.equal(center[name], own[name])
            assert not torch.equal(own[name], dict(Mixed().named_buffers())[name])
    # What is counted, what is no number and what is not saved stays each rank's own.
    assert [center["calls"].item() for center in server] == [0, 0]
    assert [own["calls"].item() for own in worker] == [15, 30]
    assert [center["scratch"].tolist() for center in server] == [[0.0, 0.0]] * 2
    assert worker[1]["scratch"].abs().min() > 0


@pytest.mark.parametrize("servers", [1, 2])
def test_buffers_are_weighted_by_the_samples_of_an_epoch(servers):
    """A buffer that nobody knows anything of is set to a known number just before the epoch ends."""
    samples = 7  # 4 for the first worker, 3 for the second

    def program(world):
        model = Mixed()
        optimizer = wrapped(world, model, servers=servers)
        seen = []
        for epoch in range(2):
            train(model, optimizer, loader_of(optimizer, samples=samples))
            worker = optimizer.share[0]
            if worker >= 0:
                model.level.fill_(10.0 * (epoch + 1) + worker)
            with optimizer.evaluation():
                seen.append((model.level[0].item(), model.calls.item(), model.scratch.clone()))
            assert worker < 0 or model.training
        optimizer.close()
        return seen

    results = on_ranks(servers + 2, program)
    want = [10 * (epoch + 1) + 3 / 7 for epoch in range(2)]
    for rank, seen in enumerate(results):
        assert [mean for mean, *_ in seen] == pytest.approx(want, rel=1e-6)
        steps = int(rank >= servers)
        assert [calls for _, calls, _ in seen] == [steps, 2 * steps]
        assert all(bool(scratch.any()) == (steps > 0) for *_, scratch in seen)


@pytest.mark.parametrize("servers", [1, 2])
def test_who_looks_late_sees_the_buffers_of_its_own_epoch(servers):
    """The first worker has ended its second epoch when the other one asks for the buffers of the first."""
    ahead = threading.Event()

    def program(world):
        reach, passed = world.reach, collections.Counter()

        def reached(point):
            reach(point)
            passed[point] += 1
            if world.rank == servers and passed["send VIEW"] > servers:
                ahead.set()
            elif world.rank == servers + 1 and point == "send ASK" and passed[point] == 3:
                assert ahead.wait(20)

        world.reach = reached
        model = Mixed()
        optimizer = wrapped(world, model, servers=servers)
        seen = []
        for epoch in range(2):
            train(model, optimizer, loader_of(optimizer))
            if optimizer.share[0] >= 0:
                model.level.fill_(10.0 * (epoch + 1) + optimizer.share[0])
            with optimizer.evaluation():
                seen.append(model.level[0].item())
        optimizer.close()
        return seen

    assert on_ranks(servers + 2, program) == [pytest.approx([10.5, 20.5], abs=0.1)] * (servers + 2)
    assert ahead.is_set()


def test_a_worker_that_has_no_share_brings_no_buffers():
    def program(world):
        model = Mixed()
        optimizer = wrapped(world, model)
        train(model, optimizer, loader_of(optimizer, samples=2, batch=2))
        if optimizer.share[0] == 0:
            model.level.fill_(5.0)
        elif optimizer.share[0] > 0:
            model.level.fill_(-100.0)
        with optimizer.evaluation():
            center = model.level[0].item()
        optimizer.close()
        return center

    def one_sample_only(world):
        model = Mixed()
        optimizer = wrapped(world, model)
        sampler = nt.ShardSampler(range(1), optimizer=optimizer)
        for _ in sampler:
            train_on(model, optimizer, (X[:4], Y[:4]))
            model.level.fill_(5.0)
        if optimizer.share[0] == 1:
            model.level.fill_(-100.0)
        with optimizer.evaluation():
            center = model.level[0].item()
        optimizer.close()
        return center

    assert on_ranks(2, program) == [5.0, 5.0]
    assert on_ranks(3, one_sample_only) == [5.0, 5.0, 5.0]


def test_buffers_of_a_synchronous_training_do_not_depend_on_who_is_first():
    def centre(last):
        gates = []

        def program(world):
            if world.rank == 3 - last:
                reach = world.reach

                def reached(point):
                    reach(point)
                    if point == "send EPOCH":
                        gates[0].set()

                world.reach = reached
            model = Mixed()
            model.drop.p = 0.0
            optimizer = wrapped(world, model, "Synchronous")
            for _ in range(2):
                train(model, optimizer, loader_of(optimizer))
            optimizer.close()
            return model.norm.running_mean.clone()

        # It asks first as the epoch begins, and brings its buffers as it ends.
        return on_ranks(3, program, prepare=lambda cluster: gates.append(cluster.hold(last, "send ASK", 2)))[
            0
        ]

    assert torch.equal(centre(last=1), centre(last=2))
