"""Elastic tree in torch: bits of NumPy, also after a checkpoint; evaluation, leases, schedulers, refusals."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from nnlo_common import ConfigurationError
from nnlo_common.testing import MemoryCluster
from nnlo_common.training.checkpoint import Store
from tests.helpers.trees import START, TREE, WORKERS, commits_of, numbers_of

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")
import nnlo_torch as nt  # noqa: E402

pytestmark = pytest.mark.framework("torch")

EPOCHS, STEPS = 3, 17


class Place(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.place = torch.nn.Parameter(torch.from_numpy(START.copy()))

    def forward(self, target):
        return (0.25 * (self.place - target) ** 2).sum()


def train(world, folder=None, wrapper=None, **options):
    """Train towards the rank's number; what this rank ends with, and its commits up to each checkpoint."""
    model = Place()
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = (wrapper or nt.EASGD)(sgd, model=model, world=world, **{**TREE, **options})
    data = torch.zeros(WORKERS * STEPS)
    loader = torch.utils.data.DataLoader(data, sampler=nt.ShardSampler(data, optimizer=optimizer))
    checkpoint = nt.Checkpoint(folder, optimizer, batches=7, keep=99) if folder else None
    server, marks, centers = optimizer._team.member.server, [], []
    commits = [] if server is None else commits_of(server)
    if server is not None:
        state = server.state
        server.state = lambda: (marks.append(len(commits)), state())[1]
    for epoch in range(EPOCHS) if checkpoint is None else checkpoint.epochs(EPOCHS):
        if not centers:  # once, before anybody trains: all have joined
            optimizer._team.start()
            world.gather_text(f"all begin epoch {epoch}")
        for _ in loader if checkpoint is None else checkpoint.batches(loader):
            optimizer.zero_grad()
            model(float(world.rank)).backward()
            optimizer.step()
        with optimizer.evaluation():
            centers.append(model.place.detach().numpy().copy())
    optimizer.close()
    own = model.place.detach().numpy() if server is None else server.rule.center
    return {"own": own.copy(), "commits": commits, "marks": marks, "centers": centers, "role": optimizer.role}


def check(ranks, commits):
    expected = numbers_of(commits, EPOCHS * STEPS)
    for one in ranks:  # evaluate() sees the top's centre of the same moment on all ranks
        np.testing.assert_array_equal(one["centers"], ranks[0]["centers"], err_msg=one["role"])
    for rank, vector in ((0, expected.top), *expected.subs.items(), *expected.workers.items()):
        np.testing.assert_array_equal(ranks[rank]["own"][:3], vector, err_msg=f"rank {rank}")


def test_it_is_the_reference_bit_for_bit():
    with MemoryCluster(8) as cluster:
        ranks = cluster.run(train)
    check(ranks, {rank: ranks[rank]["commits"] for rank in (0, 1, 4)})


@pytest.mark.slow
@pytest.mark.parametrize("newer", [0, 2])
def test_a_checkpoint_holds_the_centres_of_all_levels(tmp_path, newer):
    """Resumed from a checkpoint in the middle, all numbers are those of a training without a break."""
    with MemoryCluster(8) as cluster:
        first = cluster.run(lambda world: train(world, tmp_path))
    last = Store(tmp_path).newest().manifest.number
    for number in range(last - newer + 1, last + 1):
        shutil.rmtree(Store(tmp_path).path(number))
    with MemoryCluster(8) as cluster:
        again = cluster.run(lambda world: train(world, tmp_path))
    servers = (0, 1, 4)
    assert {len(first[rank]["marks"]) for rank in servers} == {last}
    kept = {rank: first[rank]["commits"][: first[rank]["marks"][-1 - newer]] for rank in servers}
    check(again, {rank: kept[rank] + again[rank]["commits"] for rank in servers})
    if newer:
        assert sum(len(again[rank]["commits"]) for rank in servers)


@pytest.mark.parametrize(
    "wrapper", [nt.Downpour, nt.Synchronous, nt.LocalSGD, nt.DynSGD, nt.AGN, nt.DiLoCo, nt.GEM]
)
def test_other_algorithms_are_refused_with_the_reason(wrapper):
    sgd = torch.optim.SGD(Place().parameters(), lr=0.5, momentum=0.9 if wrapper is nt.GEM else 0)
    with pytest.raises(
        ConfigurationError, match=r"sub_servers is for EASGD and EAMSGD only: .* use servers=M"
    ):
        wrapper(sgd, sub_servers=2)


def test_leases_and_means_are_asked_of_the_top_server():
    def program(world):
        model = Place()
        optimizer = nt.EASGD(torch.optim.SGD(model.parameters(), lr=0.5), model=model, world=world, **TREE)
        data = torch.arange(143)
        sampler = nt.ShardSampler(data, optimizer=optimizer, assignment="dynamic")
        taken, mean = [], 0.0
        for _ in range(2):
            for x in torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler):
                optimizer.zero_grad()
                model(1.0).backward()
                optimizer.step()
                taken += x.tolist()
            mean = optimizer.mean({"rank": world.rank})["rank"]
        optimizer.close()
        return taken, mean

    with MemoryCluster(8) as cluster:
        ranks = cluster.run(program)
    assert sorted(one for taken, _ in ranks for one in taken) == sorted([*range(143)] * 2)
    assert {mean for _, mean in ranks} == {3.5}


def test_what_needs_the_whole_centre_is_refused():
    def make(world):
        model = Place()
        optimizer = nt.EASGD(torch.optim.SGD(model.parameters(), lr=0.5), model=model, world=world, **TREE)
        optimizer.after_commit(lambda: None)

    with MemoryCluster(5) as cluster, pytest.raises(ConfigurationError, match="but sub_servers=2 share it"):
        cluster.run(make)
