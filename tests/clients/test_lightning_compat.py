"""The parts of Lightning that are not public are still what `nnlo_torch.lightning._compat` takes them for."""

from __future__ import annotations

from datetime import timedelta

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, SequentialSampler

from nnlo_common import ConfigurationError
from nnlo_torch.lightning import _compat

CHANGED = f"Lightning {lightning.__version__} has changed: mend nnlo_torch/lightning/_compat.py"


class Own(DataLoader):
    """A loader of a user's own class."""


def test_a_loader_is_made_again_with_another_sampler():
    loader = Own(range(6), batch_size=2, drop_last=True)
    sampler = SequentialSampler(range(4))
    again = _compat.with_sampler(loader, sampler)
    assert type(again) is Own, f"{CHANGED}: the loader is of another class"
    assert (again.sampler, again.batch_size, again.drop_last) == (sampler, 2, True), CHANGED


class Logs(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.found, self.stepped = {}, 0

    def training_step(self, batch, index):
        self.log("both", float(index), on_step=True, on_epoch=True)
        self.log("kept", float(index), on_step=False, on_epoch=True, logger=False)
        self.log("step", float(index))
        return self.layer(batch).mean()

    def on_train_epoch_end(self):
        self.found = {name: (value, logs) for name, value, logs in _compat.epoch_means(self.trainer)}
        _compat.count_logged_steps(self.trainer, 5)
        self.stepped = self.trainer.fit_loop.epoch_loop._batches_that_stepped

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore")
def test_the_means_of_an_epoch_are_known_and_whether_they_are_logged():
    module = Logs()
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(torch.ones(3, 1)))
    expected = {"both": (1.0, False), "both_epoch": (1.0, True), "kept": (1.0, False)}
    assert module.found == expected, f"{CHANGED}: means of an epoch are elsewhere"
    assert module.stepped == 3 + 5, f"{CHANGED}: the steps of loggers are counted elsewhere"


@pytest.mark.parametrize(
    ("options", "within"),
    [
        ({}, False),
        ({"every_n_epochs": 2}, False),
        ({"every_n_train_steps": 3}, True),
        ({"train_time_interval": timedelta(seconds=1)}, True),
    ],
)
def test_a_checkpoint_tells_when_it_saves(options, within):
    found = _compat.is_saved_within_epochs(ModelCheckpoint(**options))
    assert found is within, f"{CHANGED}: ModelCheckpoint keeps its options elsewhere"


class Bare:
    """Has none of the private parts."""


def trainer_with(part):
    trainer = Bare()
    trainer.fit_loop = Bare()
    trainer.fit_loop.epoch_loop = part
    return trainer


@pytest.mark.parametrize(
    ("use", "part"),
    [
        (lambda bare: list(_compat.epoch_means(trainer_with(bare))), "_results"),
        (lambda bare: _compat.count_logged_steps(trainer_with(bare), 1), "_batches_that_stepped"),
        (_compat.is_saved_within_epochs, "_every_n_train_steps"),
    ],
)
def test_a_part_that_is_gone_is_named(use, part):
    with pytest.raises(ConfigurationError, match=rf"lightning .* has changed: Bare has no {part} any more"):
        use(Bare())


def test_a_function_that_is_gone_is_named(monkeypatch):
    monkeypatch.delattr(_compat.loaders, "_update_dataloader")
    with pytest.raises(ConfigurationError, match=r"has no _update_dataloader any more"):
        _compat.with_sampler(DataLoader(range(2)), SequentialSampler(range(2)))
