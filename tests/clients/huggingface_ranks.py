"""Trainings with Hugging Face's Trainer after which every rank tells what it has."""

from __future__ import annotations

import logging
import warnings

import torch
import transformers
from torch.utils.data import Dataset

import nnlo_torch as nt
import nnlo_torch.huggingface as nh
from tests.clients.common import blobs, run_cases

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)


class Points(Dataset):
    def __init__(self, samples: int, seed: int = 0) -> None:
        self.x, self.y = blobs(samples, seed=seed)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int):
        return {"x": self.x[index], "labels": self.y[index]}


class InOrder(nh.Trainer):
    """Takes the samples in order."""

    def training_sampler(self, sampler):
        return super().training_sampler(torch.utils.data.SequentialSampler(self.train_dataset))


class Linear(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)

    def forward(self, x, labels=None):
        outputs = self.layer(x)
        return {"loss": torch.nn.functional.cross_entropy(outputs, labels), "logits": outputs}


def train(folder, *, wrap=nt.Downpour, resume=None, patience=None, samples=98, kind=nh.Trainer, **options):
    transformers.set_seed(1)
    options = {
        "eval_strategy": "epoch", "save_strategy": "epoch", "logging_strategy": "epoch",
        "num_train_epochs": 3,
        "load_best_model_at_end": True, "metric_for_best_model": "loss", "learning_rate": 0.05,
        "per_device_train_batch_size": 8, **options,
    }  # fmt: skip
    arguments = nh.TrainingArguments(
        str(folder),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=0,
        **options,
    )
    trainer = kind(
        Linear(), arguments, train_dataset=Points(samples), eval_dataset=Points(64, 1), wrap=wrap,
        callbacks=[] if patience is None else [transformers.EarlyStoppingCallback(1, patience)],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    state = trainer.state
    account = {
        "sum": [value.double().sum().item() for value in trainer.model.state_dict().values()],
        "step": state.global_step,
        "steps": state.max_steps,
        "epoch": state.epoch,
        "best": state.best_model_checkpoint,
        "score": state.best_metric,
        "loss": trainer.evaluate()["eval_loss"],
    }
    schedule = trainer.lr_scheduler
    return account, {"at": schedule.last_epoch, "rate": schedule.optimizer.param_groups[0]["lr"]}


def resumed(folder, wrap=nt.Downpour):
    options = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 12, "wrap": wrap}
    train(folder, num_train_epochs=2, **options)
    return train(folder, num_train_epochs=4, resume=True, **options)


def led(optimizer):
    return nt.Synchronous(optimizer, servers=0)


def grouped(optimizer):
    return nt.Downpour(optimizer, group_size=3)


def whole(folder, ranks=1, **options):
    """Train on samples that 3 and 4 ranks divide, in order, in batches as large as those of so many ranks."""
    return train(folder, samples=96, kind=InOrder, per_device_train_batch_size=8 * ranks, **options)


CASES = {
    "uneven": train,
    "accumulate": lambda folder: train(folder, gradient_accumulation_steps=2),
    "limit": lambda folder: train(folder, max_steps=7),
    "early": lambda folder: train(folder, num_train_epochs=40, patience=0.02),
    "steps": lambda folder: train(
        folder, eval_strategy="steps", save_strategy="steps", eval_steps=2, save_steps=2
    ),
    "plateau": lambda folder: train(folder, lr_scheduler_type="reduce_lr_on_plateau"),
    "greedy": lambda folder: train(folder, lr_scheduler_type="greedy"),
    "steady": lambda folder: train(folder, wrap=nt.Steady, lr_scheduler_type="linear"),
    "steady_resumed": lambda folder: resumed(folder, nt.Steady),
    "rounds": lambda folder: train(folder, wrap=lambda optimizer: nt.LocalSGD(optimizer, every=3)),
    "groups": lambda folder: train(folder, wrap=grouped, gradient_accumulation_steps=2),
    "lead": lambda folder: train(folder, wrap=led, num_train_epochs=40, patience=0.02),
    "lead_resumed": lambda folder: resumed(folder, led),
    "whole_lead": lambda folder: whole(folder, wrap=led),
    "whole_group": lambda folder: whole(folder, wrap=grouped),
    "alone_lead": lambda folder: whole(folder, 4),
    "alone_group": lambda folder: whole(folder, 3),
    "resumed": resumed,
}


if __name__ == "__main__":
    run_cases(CASES)
