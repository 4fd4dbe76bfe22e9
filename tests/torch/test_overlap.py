"""Gradients that leave while the backward pass makes the rest: the same training, bit for bit."""

from __future__ import annotations

import pytest

from nnlo_common import ConfigurationError
from nnlo_common.testing import InjectedFault, MemoryCluster
from tests.helpers.jobs import mpiexec
from tests.helpers.paths import PROGRAMS

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")

import nnlo_torch as nt  # noqa: E402
from nnlo_common.plugin import Session  # noqa: E402

pytestmark = pytest.mark.framework("torch")
EPOCHS, SAMPLES, BATCH = 3, 22, 3
FUNCTIONAL = torch.nn.functional


@pytest.fixture(autouse=True)
def _all_is_worth_sending(monkeypatch):
    monkeypatch.setattr("nnlo_common.training._gradients_ahead._WORTH_SENDING", 1)
    monkeypatch.setattr("nnlo_common.training._gradients_ahead._WORTH_A_PART", 14)


class Net(torch.nn.Module):
    """Parameters that are trained, frozen, and used now and then."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(3, 7)
        self.frozen = torch.nn.Linear(7, 7).requires_grad_(False)
        self.seldom = torch.nn.Linear(7, 7)
        self.last = torch.nn.Linear(7, 2)

    def forward(self, inputs, *, seldom):
        hidden = self.frozen(torch.tanh(self.first(inputs)))
        return self.last(torch.tanh(self.seldom(hidden) if seldom else hidden))


def plain(model, optimizer, batch, step):
    optimizer.zero_grad()
    loss(model, batch, step).backward()
    optimizer.step()


def in_place(model, optimizer, batch, step):
    optimizer.zero_grad(set_to_none=False)
    loss(model, batch, step).backward()
    optimizer.step()


def clipped(model, optimizer, batch, step):
    optimizer.zero_grad()
    loss(model, batch, step).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()


def replaced(model, optimizer, batch, step):
    optimizer.zero_grad()
    loss(model, batch, step).backward()
    model.last.bias.grad = torch.full((2,), 0.5)
    optimizer.step()


def unfrozen(model, optimizer, batch, step):
    model.seldom.requires_grad_(step >= 4)
    model.first.requires_grad_(step < 8)
    model.frozen.requires_grad_(step >= 4)
    optimizer.zero_grad()
    loss(model, batch, step).backward()
    optimizer.step()


def removed(model, optimizer, batch, step):
    optimizer.zero_grad()
    loss(model, batch, step).backward()
    model.last.bias.grad = None
    optimizer.step()


def hidden(model, optimizer, batch, step):
    optimizer.zero_grad()
    loss(model, batch, step).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data.mul_(0.5)  # PyTorch counts no change
    optimizer.step()


def added_up(model, optimizer, batch, step):
    loss(model, batch, step).backward()
    if step % 2 == 0:
        optimizer.step()
        optimizer.zero_grad()


def left_out(model, optimizer, batch, step):
    optimizer.zero_grad()
    loss(model, batch, step).backward()
    if step % 3 != 1:
        optimizer.step()


def closure(model, optimizer, batch, step):
    def found():
        optimizer.zero_grad()
        value = loss(model, batch, step)
        value.backward()
        return value

    optimizer.step(found)


LOOPS = [plain, in_place, clipped, replaced, unfrozen, removed, hidden, added_up, left_out, closure]


def loss(model, batch, step):
    inputs, labels = batch
    return FUNCTIONAL.cross_entropy(model(inputs, seldom=step % 4 != 2), labels)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(wrapper, loop, *, workers=2, optimizer=sgd, faults=(), spares=0, size=None, **options):
    """Train on so many workers; return the model's numbers on each rank, and how often what was sent."""
    servers = options.setdefault("servers", 1)
    torch.manual_seed(3)  # which ranks, threads of this process, share
    state = Net().state_dict()
    data = torch.utils.data.TensorDataset(torch.randn(SAMPLES, 3), torch.randint(0, 2, (SAMPLES,)))

    def program(world):
        model = Net()
        model.load_state_dict(state)
        parameters = [
            {"params": [*model.first.parameters(), *model.frozen.parameters()]},
            {"params": [*model.seldom.parameters(), *model.last.parameters()], "lr": 0.05},
        ]
        wrapped = wrapper(optimizer(parameters), model=model, world=world, spares=spares, **options)
        schedule = torch.optim.lr_scheduler.LambdaLR(wrapped, lambda step: 0.99**step)
        sampler = nt.ShardSampler(data, optimizer=wrapped, seed=1)
        loader = torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=sampler)
        for _ in range(EPOCHS):
            for step, batch in enumerate(loader):
                loop(model, wrapped, batch, step)
                schedule.step()  # its rates pass what has left
            wrapped.mean({"rank": 1.0})
        wrapped.close()
        return wrapped.role, torch.cat([one.detach().flatten() for one in model.parameters()]).numpy()

    with MemoryCluster(servers + workers + spares if size is None else size) as cluster:
        for fault in faults:
            cluster.fail(*fault)
        results = cluster.run(program, 60)
        sent = dict(cluster.points._reached)
    return results, sent


WRAPPERS = {
    "downpour": (nt.Downpour, {"workers": 1}),
    "several servers": (nt.Downpour, {"workers": 1, "servers": 3}),
    "adam": (nt.Downpour, {"workers": 1, "optimizer": lambda given: torch.optim.Adam(given, lr=0.01)}),
    "dynsgd": (nt.DynSGD, {"workers": 1}),
    "agn": (nt.AGN, {"workers": 1, "every": 1}),
    "steady": (nt.Steady, {"workers": 1}),
    "together": (nt.Synchronous, {"workers": 3}),
    "together, two servers": (nt.Synchronous, {"workers": 2, "servers": 2}),
}


@pytest.mark.filterwarnings("ignore:overlap=True brings nothing here")
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.sampled(24)
def test_a_training_ends_with_the_same_bits(name, loop):
    wrapper, options = WRAPPERS[name]
    expected, before = train(wrapper, loop, **options)
    found, sent = train(wrapper, loop, **options, overlap=True)
    assert [role for role, _ in found] == [role for role, _ in expected]
    for (_, one), (_, other) in zip(found, expected, strict=True):
        assert one.tobytes() == other.tobytes()
    assert not any(what == "send AHEAD" for _, what in before)
    assert any(what == "send AHEAD" for _, what in sent)
    assert any(what == "send WITHDRAWN" for _, what in sent) == (
        loop in (clipped, replaced, removed, hidden, added_up, left_out)
    )


def test_what_has_left_for_a_server_that_has_died_leaves_again_as_a_whole(monkeypatch):
    """Its vector has no long gradients: those have left from where autograd had made them."""
    expected, _ = train(nt.Downpour, plain, workers=1)
    deaths = iter(range(10_000))
    monkeypatch.setattr("nnlo_common.training._session.Session.losses", property(lambda _: next(deaths)))
    with pytest.warns(RuntimeWarning, match="overlap=True brings nothing here"):
        found, sent = train(nt.Downpour, plain, workers=1, overlap=True)
    assert sent[1, "send WITHDRAWN"] == 3
    assert found[0][1].tobytes() == expected[0][1].tobytes()


def test_a_long_gradient_leaves_from_where_it_is_made_unless_something_else_reads_it(monkeypatch):
    seen = []
    leave = Session.send_ahead

    def noted(team, start, apart=()):
        seen.append([place.stop - place.start for place, _ in apart])
        leave(team, start, apart)

    monkeypatch.setattr(Session, "send_ahead", noted)
    train(nt.Downpour, plain, workers=1, overlap=True)
    assert [49] in seen
    assert [14] in seen
    assert all(size >= 14 for sizes in seen for size in sizes)
    seen.clear()
    train(nt.AGN, plain, workers=1, overlap=True, every=1)  # whose worker steps with it, too
    assert seen
    assert not any(seen)


def test_what_has_left_is_what_arrives():
    """Else the test above could not fail: a change that nobody can see does not arrive."""

    def well_hidden(model, optimizer, batch, step):
        optimizer.zero_grad()
        loss(model, batch, step).backward()
        model.first.weight.grad.data[0, 2] = 3.0  # none of the numbers that are compared
        optimizer.step()

    (expected, _), (found, _) = (
        train(nt.Downpour, well_hidden, workers=1, overlap=overlap) for overlap in (False, True)
    )
    assert expected[0][1].tobytes() != found[0][1].tobytes()


def test_loops_that_change_each_gradient_are_told_once_and_send_with_the_step():
    with pytest.warns(RuntimeWarning, match="overlap=True brings nothing here") as told:
        _, sent = train(nt.Downpour, clipped, workers=1, overlap=True)
    assert len([one for one in told if "overlap" in str(one.message)]) == 1
    assert sent[1, "send WITHDRAWN"] == 3
    assert sent[1, "send EXCHANGE"] > 10


def test_a_step_that_is_left_out_now_and_then_is_no_reason_to_stop():
    _, sent = train(nt.Downpour, left_out, workers=1, overlap=True)
    assert sent[1, "send WITHDRAWN"] > 5


@pytest.mark.usefixtures("_copies_at_once")
@pytest.mark.parametrize("point", ["send AHEAD", "send EXCHANGE"])
@pytest.mark.parametrize("rank", [0, 2])
def test_the_others_go_on_when_a_rank_dies_between_a_part_and_its_message(rank, point):
    """The server, whose place the first worker takes, or a worker."""
    point = "receive EXCHANGE" if rank == 0 else point
    results, sent = train(
        nt.Synchronous, plain, workers=3, overlap=True, heir=True, faults=[(rank, point, 9)]
    )
    assert [number for number, one in enumerate(results) if isinstance(one, InjectedFault)] == [rank]
    living = [one for one in results if not isinstance(one, InjectedFault)]
    assert living[0][0] == "server 0"
    if rank == 2:
        assert living[1][1].tobytes() == living[2][1].tobytes()
    else:
        assert sent[2, "send AHEAD"] > 9


@pytest.mark.usefixtures("_copies_at_once")
def test_a_spare_that_trains_sends_ahead_too():
    results, sent = train(
        nt.Synchronous, plain, workers=2, overlap=True, spares=2, faults=[(2, "send EPOCH", 1)]
    )
    assert results[4][0] == "worker 1"
    assert sent[4, "send AHEAD"] > 1


REFUSED = {
    "in groups": (nt.Downpour, {"group_size": 2, "size": 3}),
    r"in groups: all_reduce='thread'": (nt.Synchronous, {"servers": 0, "size": 2}),
    "with sub_servers": (nt.EASGD, {"sub_servers": 1, "size": 4}),
    "with lag=1, which hides": (nt.Downpour, {"lag": 1}),
    "with wire='int8', which needs": (nt.Downpour, {"wire": "int8"}),
    r"with Downpour\(every=2\): it does not send": (nt.Downpour, {"every": 2}),
    r"with EASGD\(.*\): it does not send": (nt.EASGD, {}),
    r"with LocalSGD\(.*\): it does not send": (nt.LocalSGD, {}),
    "with Steady and servers=2: it needs numbers of the whole": (nt.Steady, {"servers": 2}),
}


@pytest.mark.parametrize("problem", REFUSED)
def test_what_cannot_be_had_is_refused_by_name(problem):
    wrapper, options = REFUSED[problem]
    with pytest.raises(ConfigurationError, match=f"overlap=True is not possible {problem}"):
        train(wrapper, plain, overlap=True, **options)


def test_parameters_that_are_copied_are_refused_by_name():
    def program(world):
        model = torch.nn.Linear(3, 2).to(torch.bfloat16)
        nt.Downpour(torch.optim.SGD(model.parameters(), lr=0.1), world=world, overlap=True)

    with MemoryCluster(2) as cluster, pytest.raises(ConfigurationError, match="weight is bfloat16 on cpu"):
        cluster.run(program, 60)


def test_several_optimizers_are_refused():
    def program(world):
        first, second = (torch.nn.Linear(3, 2) for _ in range(2))
        kept = nt.Downpour(torch.optim.SGD(first.parameters(), lr=0.1), world=world, overlap=True)
        nt.Downpour(torch.optim.SGD(second.parameters(), lr=0.1), world=world, overlap=True)
        kept.close()

    with MemoryCluster(2) as cluster, pytest.raises(ConfigurationError, match="several optimizers cannot"):
        cluster.run(program, 60)


@pytest.mark.mpi
@pytest.mark.slow
def test_ranks_of_a_job_end_with_the_same_bits():
    printed = {
        overlap: mpiexec(4, PROGRAMS / "overlap_torch.py", str(int(overlap))).stdout
        for overlap in (False, True)
    }
    assert printed[True] == printed[False] != ""
