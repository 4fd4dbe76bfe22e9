"""Lightning's loop on several ranks: all end with the same, and what cannot work is refused by name."""

from __future__ import annotations

import json
from datetime import timedelta

import lightning
import pytest
import torch
from lightning.pytorch import callbacks
from torch.utils.data import DataLoader, IterableDataset

import nnlo_torch as nt
from nnlo_common import ConfigurationError
from nnlo_torch._foreign_loops import sharded
from nnlo_torch.lightning._compat import with_sampler
from nnlo_torch.lightning._strategy import refuse
from tests.helpers.jobs import mpiexec
from tests.helpers.paths import ROOT

PROGRAM = ROOT / "tests" / "clients" / "lightning_ranks.py"


def accounts(*cases, ranks=4):
    """What each rank of one job tells, by case."""
    run = mpiexec(ranks, PROGRAM, ",".join(cases), timeout_s=500)
    assert run.returncode == 0, run.stderr
    told = [json.loads(part) for line in run.stdout.splitlines() for part in line.split("account ")[1:]]
    return {case: [one for one in told if one["case"] == case] for case in cases}


def shared(ranks):
    """What all ranks must have alike."""
    own = [rank.pop("own") for rank in ranks]
    assert len(ranks) == 4
    assert all(rank == ranks[0] for rank in ranks), ranks
    return ranks[0], own


@pytest.mark.mpi
@pytest.mark.extended
@pytest.mark.timeout(600)
def test_all_ranks_end_with_the_same_and_the_counts_of_a_worker():
    found = accounts("uneven", "decay", "epochs", "plateau", "accumulate", "manual", "unvalidated", "rounds")
    # 98 samples on 3 workers in batches of 8: two have 5 batches, one has 4.
    steps = {"accumulate": 9}
    for case, ranks in found.items():
        account, own = shared(ranks)
        assert account["step"] == steps.get(case, 15), case
        assert account["epoch"] == 3, case
        assert f"epoch=2-step={account['step']}-loss={account['loss']:.4f}" in account["best"], case
        if case in ("uneven", "decay", "accumulate", "epochs"):
            # The server, and the workers with 5 batches, are at one place of their schedules.
            most = max(one["at"][0] for one in own)
            rates = {round(one["rate"], 12) for one in own if one["at"] == [most]}
            assert (sum(one["at"] == [most] for one in own), len(rates)) == (4 if case == "epochs" else 3, 1)
        if case == "plateau":
            assert [one["rate"] for one in own] == 4 * [pytest.approx(0.05 * 0.1**3)]


@pytest.mark.mpi
@pytest.mark.extended
@pytest.mark.timeout(600)
def test_all_ranks_stop_together_resume_and_train_twice():
    found = accounts("limit", "early", "rare", "stopped", "resumed", "twice", "elastic", "processes")
    ends = {case: shared(ranks)[0] for case, ranks in found.items()}
    assert (ends["limit"]["step"], ends["limit"]["epoch"]) == (7, 2)
    assert 1 < ends["early"]["epoch"] < 40
    assert 1 < ends["rare"]["epoch"] < 40
    assert ends["rare"]["epoch"] % 2 == 0
    assert (ends["stopped"]["step"], ends["stopped"]["epoch"]) == (10, 2)
    assert (ends["resumed"]["step"], ends["resumed"]["epoch"]) == (20, 4)
    assert ends["twice"]["validated"] == pytest.approx(ends["twice"]["score"])
    assert ends["processes"]["step"] == 15


@pytest.mark.mpi
@pytest.mark.extended
@pytest.mark.timeout(600)
def test_schedules_that_follow_progress_are_at_the_steps_of_one_process_on_all_ranks():
    found = accounts("steady", "steady_resumed")
    # 98 samples in batches of 8 are 13 steps of one process.
    for case, steps in {"steady": 39, "steady_resumed": 52}.items():
        _, own = shared(found[case])
        # The server, and who ends the epoch; another worker does not see what comes after its last batch.
        places = sorted(one["at"][0] for one in own)
        assert places[-2:] == [steps, steps], case
        assert places[0] >= steps - 13, case


@pytest.mark.mpi
@pytest.mark.extended
@pytest.mark.timeout(600)
def test_groups_make_the_steps_of_one_process_with_the_large_batch():
    """With a server, and without one, where the first rank trains and validates; all ranks alike."""
    groups = accounts(
        "groups", "lead", "lead_twice", "lead_stops", "lead_resumed", "whole_lead", "whole_group"
    )
    ends = {case: shared(ranks)[0] for case, ranks in groups.items()}
    # 98 samples in batches of 8: no sample is left out, so that the largest share, 33 of 3 ranks and 25 of 4,
    # makes 5 and 4 steps in an epoch, and all ranks as many.
    assert {case: ends[case]["step"] for case in ("groups", "lead", "lead_twice", "lead_stops")} == {
        "groups": 15, "lead": 12, "lead_twice": 8, "lead_stops": 5,
    }  # fmt: skip
    assert ends["lead_twice"]["validated"] == pytest.approx(ends["lead_twice"]["score"])
    assert (ends["lead_resumed"]["step"], ends["lead_resumed"]["epoch"]) == (16, 4)
    alone = accounts("alone_lead", "alone_group", ranks=1)
    for kind in ("lead", "group"):
        found, (expected,) = ends[f"whole_{kind}"], alone[f"alone_{kind}"]
        assert found["step"] == expected["step"]
        assert found["sum"] == pytest.approx(expected["sum"], rel=1e-4, abs=1e-5)
        for name in ("score", "loss"):
            assert found[name] == pytest.approx(expected[name], rel=1e-4)


def trainer(*, more=(), **options):
    return lightning.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=list(more), **options
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"val_check_interval": 0.5}, "val_check_interval=0.5"),
        ({"val_check_interval": 5, "check_val_every_n_epoch": None}, "check_val_every_n_epoch=None"),
        ({"more": [callbacks.ModelCheckpoint(every_n_train_steps=3)]}, "every_n_train_steps"),
        (
            {"more": [callbacks.ModelCheckpoint(train_time_interval=timedelta(1))]},
            "train_time_interval",
        ),
        ({"more": [callbacks.LearningRateMonitor("step")]}, "LearningRateMonitor"),
        ({"more": [callbacks.DeviceStatsMonitor()]}, "DeviceStatsMonitor"),
        ({"more": [callbacks.StochasticWeightAveraging(0.1)]}, "StochasticWeightAveraging"),
        ({"more": [callbacks.BackboneFinetuning()]}, "BackboneFinetuning"),
        ({"more": [callbacks.BatchSizeFinder()]}, "BatchSizeFinder"),
        ({"more": [callbacks.LearningRateFinder()]}, "LearningRateFinder"),
        ({"more": [callbacks.ModelPruning("l1_unstructured")]}, "ModelPruning"),
        *(
            ({"more": [getattr(callbacks, name)(*arguments)]}, name)
            for name, arguments in {"EMAWeightAveraging": (), "ThroughputMonitor": (len,)}.items()
            if hasattr(callbacks, name)  # older versions have fewer
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_work_is_refused_by_name(options, says):
    with pytest.raises(ConfigurationError, match=says) as found:
        refuse(trainer(**options))
    assert found.value.collective


@pytest.mark.filterwarnings("ignore")
def test_the_other_stock_callbacks_are_taken():
    taken = [
        callbacks.EarlyStopping("loss"),
        callbacks.GradientAccumulationScheduler({0: 2}),
        callbacks.LambdaCallback(),
        callbacks.LearningRateMonitor("epoch"),
        callbacks.ModelCheckpoint(),
        callbacks.ModelSummary(),
        callbacks.OnExceptionCheckpoint("."),
        callbacks.SpikeDetection(),
        callbacks.Timer("00:01:00:00"),
    ]
    refuse(trainer(more=taken))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.fixture
def wrapper():
    return nt.Downpour(torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda wrapper: [1, 2], "a list yields the training batches"),
        (lambda wrapper: DataLoader(Stream()), "Stream"),
        (
            lambda wrapper: DataLoader(range(4), sampler=nt.ShardSampler(range(4)), num_workers=1),
            "leave the sampler out",
        ),
        (lambda wrapper: DataLoader(range(4), batch_sampler=[[0, 1], [2, 3]]), "batch_sampler=nnlo_torch"),
    ],
)
def test_a_loader_that_cannot_be_shared_is_refused(wrapper, make, says):
    with pytest.raises(ConfigurationError, match=says):
        sharded(make(wrapper), wrapper, with_sampler)


def test_a_loader_before_the_wrapper_is_refused():
    with pytest.raises(ConfigurationError, match="before an optimizer was wrapped"):
        sharded(DataLoader(range(4)), None, with_sampler)


def test_a_loader_keeps_its_order_and_gets_a_share(wrapper):
    loader = sharded(DataLoader(range(4), batch_size=2), wrapper, with_sampler)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
    assert isinstance(loader.sampler, nt.ShardSampler)


def test_a_stream_begins_epochs_by_the_wrapper(wrapper):
    stream = DataLoader(nt.ShardIterable(range(3)), batch_size=2)
    loader = sharded(stream, wrapper, with_sampler)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2]]
    assert wrapper.report().steps == 0
