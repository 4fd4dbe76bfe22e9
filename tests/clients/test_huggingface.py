"""Hugging Face's Trainer on several ranks: all end with the same, and what cannot work is refused by name."""

from __future__ import annotations

import json
import os

import pytest
import torch
import transformers

import nnlo_torch.huggingface as nh
from nnlo_common import ConfigurationError
from nnlo_torch.huggingface import _compat, _trainer
from tests.helpers.jobs import mpiexec
from tests.helpers.paths import ROOT

PROGRAM = ROOT / "tests" / "clients" / "huggingface_ranks.py"
CHANGED = f"transformers {transformers.__version__} has changed: mend nnlo_torch/huggingface/_compat.py"


def accounts(*cases, ranks=4):
    """What all ranks of one job tell alike, by case, and what is each rank's own."""
    run = mpiexec(ranks, PROGRAM, ",".join(cases), timeout_s=400)
    assert run.returncode == 0, run.stderr
    told = [json.loads(part) for line in run.stdout.splitlines() for part in line.split("account ")[1:]]
    own = {case: [one.pop("own") for one in told if one["case"] == case] for case in cases}
    for one in told:
        assert one == next(other for other in told if other["case"] == one["case"])
    return {one["case"]: one for one in told}, own


@pytest.mark.mpi
@pytest.mark.extended
@pytest.mark.timeout(500)
def test_all_ranks_end_with_the_same_scores_steps_and_best_checkpoint():
    alike, own = accounts("uneven", "accumulate", "limit", "early", "steps", "plateau", "rounds", "resumed")
    assert all(len(ranks) == 4 for ranks in own.values())
    # 98 samples on 3 workers in batches of 8: two have 5 batches, one has 4.
    steps = {"accumulate": 9, "limit": 7, "resumed": 20, "early": alike["early"]["step"]}
    for case, account in alike.items():
        assert account["step"] == steps.get(case, 15), case
        assert account["loss"] == pytest.approx(account["score"]), case
        assert account["best"].startswith("/"), case
    assert alike["early"]["step"] < alike["early"]["steps"] == 200
    for case in ("uneven", "accumulate", "rounds", "resumed"):
        # The server, and the workers with 5 batches, are at the end of their schedules.
        assert [one["at"] for one in own[case]].count(alike[case]["step"]) == 3, case


@pytest.mark.mpi
@pytest.mark.extended
@pytest.mark.timeout(500)
def test_steps_and_schedules_that_follow_progress_are_those_of_one_process():
    alike, own = accounts("steady", "steady_resumed")
    # 98 samples in batches of 8 are 13 steps of one process.
    for case, epochs in {"steady": 3, "steady_resumed": 4}.items():
        assert (alike[case]["step"], alike[case]["epoch"]) == (13 * epochs, epochs), case
        # The server, and who ends the epoch; another worker does not see what comes after its last batch.
        places = sorted(one["at"] for one in own[case])
        assert places[-2:] == 2 * [13 * epochs], case
        assert places[0] >= 13 * (epochs - 1), case


@pytest.mark.skipif(not hasattr(transformers, "GreedyLR"), reason="this version has no such schedule")
@pytest.mark.mpi
@pytest.mark.extended
@pytest.mark.timeout(500)
def test_a_schedule_by_metrics_is_stepped_by_evaluations_on_all_ranks():
    _, own = accounts("greedy")
    assert [one["at"] for one in own["greedy"]] == [3] * 4


@pytest.mark.mpi
@pytest.mark.extended
@pytest.mark.timeout(500)
def test_groups_make_the_steps_of_one_process_with_the_large_batch():
    """With a server, and without one, where the first rank trains and evaluates; all ranks alike."""
    found, own = accounts("groups", "lead", "lead_resumed", "whole_lead", "whole_group")
    assert all(len(ranks) == 4 for ranks in own.values())
    # 98 samples in batches of 8: no sample is left out, so that the largest share, 33 of 3 ranks and 25 of 4,
    # makes 5 and 4 batches in an epoch, and all ranks as many; "groups" steps every other batch.
    assert (found["groups"]["step"], found["lead_resumed"]["step"]) == (9, 16)
    assert found["lead"]["step"] < found["lead"]["steps"] == 160
    for account in found.values():
        assert account["loss"] == pytest.approx(account["score"])
    alone, _ = accounts("alone_lead", "alone_group", ranks=1)
    for kind in ("lead", "group"):
        expected, is_ = alone[f"alone_{kind}"], found[f"whole_{kind}"]
        assert is_["step"] == expected["step"]
        assert is_["sum"] == pytest.approx(expected["sum"], rel=1e-3, abs=1e-4)
        assert is_["loss"] == pytest.approx(expected["loss"], rel=1e-3)


class Ranks:
    """The world of a rank that has no others to talk to."""

    rank, size, host = 1, 3, "here"

    def gather_text(self, text):
        return [text] * self.size


@pytest.fixture
def several(monkeypatch):
    for module in (_trainer, _trainer):
        monkeypatch.setattr(module, "launched", Ranks)


def arguments(folder, **options):
    return nh.TrainingArguments(str(folder), use_cpu=True, report_to=[], **options)


def test_accelerate_sees_one_process_and_the_rank(several, monkeypatch, tmp_path):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    made = arguments(tmp_path)
    assert (made.world_size, made.process_index, made.local_process_index) == (1, 1, 1)
    assert not made.should_save
    assert os.environ["OMPI_COMM_WORLD_SIZE"] == "3"


def test_automatic_batch_sizes_are_refused(several, tmp_path):
    with pytest.raises(ConfigurationError, match="auto_find_batch_size"):
        arguments(tmp_path, auto_find_batch_size=True)


def test_a_search_is_refused(several, tmp_path):
    trainer = nh.Trainer(torch.nn.Linear(1, 1), arguments(tmp_path))
    with pytest.raises(ConfigurationError, match="hyperparameter_search"):
        trainer.hyperparameter_search()


def test_an_optimizer_that_is_not_wrapped_is_refused(several, tmp_path):
    trainer = nh.Trainer(torch.nn.Linear(1, 1), arguments(tmp_path))
    with pytest.raises(ConfigurationError, match="is not wrapped"):
        trainer.create_optimizer()


def test_arguments_of_transformers_itself_are_refused(several, tmp_path):
    plain = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(ConfigurationError, match=r"nnlo_torch\.huggingface\.TrainingArguments"):
        nh.Trainer(torch.nn.Linear(1, 1), plain)


class Evaluated:
    """A Trainer within its training, whose metrics are not all numbers."""

    is_in_train = True

    def evaluate(self):
        return {"eval_loss": 0.5, "eval_of_classes": [0.25, 0.75], "eval_best": "cat", "epoch": 1}


class Leading(nh.TrainerMixin, Evaluated):
    def __init__(self):
        self.wrapper = "of the training"


def test_metrics_that_are_no_numbers_stay_on_the_rank_that_evaluates(monkeypatch):
    told = []
    monkeypatch.setattr(_trainer, "leads", lambda wrapper: True)
    monkeypatch.setattr(_trainer, "center_tells", lambda wrapper, values: told.append(values))
    assert Leading().evaluate() == Evaluated().evaluate()
    assert told == [{"eval_loss": 0.5, "epoch": 1.0}]


# -- the parts of transformers that are not public ---------------------------------------------------


class Recorded(_compat.LoopHooks, transformers.Trainer):
    """Notes when the loop calls the adapter."""

    def training_sampler(self, sampler):
        self.called = [f"sampler {type(sampler).__name__}"]
        return sampler

    def before_saving(self):
        self.called.append(f"save {_compat.total_loss(self) > 0}")
        return False

    def after_saving(self):
        self.called.append("saved")

    def before_finishing(self):
        before = _compat.total_loss(self)
        _compat.add_loss(self, 2.0)
        self.called.append(f"finish {_compat.total_loss(self) - before:.3f}")


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x):
        return {"loss": self.layer(x).square().mean() + 1}


@pytest.mark.filterwarnings("ignore")
def test_the_loop_calls_what_the_adapter_replaces(tmp_path):
    options = transformers.TrainingArguments(
        str(tmp_path),
        use_cpu=True,
        report_to=[],
        num_train_epochs=1,
        save_strategy="epoch",
        disable_tqdm=True,
    )
    trainer = Recorded(Model(), options, train_dataset=[{"x": torch.ones(1)}] * 4)
    trainer.train()
    assert trainer.called == ["sampler RandomSampler", "save True", "saved", "finish 2.000"], CHANGED
    assert not list(tmp_path.glob("checkpoint-*"))


def test_the_warning_of_an_epoch_without_a_sample_is_left_out():
    import inspect

    assert "not to be a single sample" in inspect.getsource(transformers.trainer), CHANGED
    assert transformers.trainer.logger.name == "transformers.trainer", CHANGED


class Bare:
    """Has none of the private parts."""


@pytest.mark.parametrize(
    ("use", "part"),
    [(_compat.total_loss, "_total_loss_scalar"), (lambda bare: _compat.add_loss(bare, 1.0), "_tr_loss")],
)
def test_a_part_that_is_gone_is_named(use, part):
    with pytest.raises(
        ConfigurationError, match=rf"transformers .* has changed: Bare has no {part} any more"
    ):
        use(Bare())
