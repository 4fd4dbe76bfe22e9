"""Trainings with Lightning after which every rank tells what it has; all must have the same."""

from __future__ import annotations

import warnings

import lightning
import torch
from lightning.pytorch import callbacks
from torch.utils.data import DataLoader, TensorDataset

import nnlo_torch as nt
import nnlo_torch.lightning as nl
from nnlo_common.plugin import launched
from tests.clients.common import blobs, run_cases

warnings.filterwarnings("ignore")


class Small(lightning.LightningModule):
    def __init__(self, wrapper=nt.Downpour, schedule=None, *, manual=False, **options) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.LayerNorm(4))
        self.wrapper, self.schedule, self.options = wrapper, schedule, options
        self.automatic_optimization = not manual
        self.stops_at = None

    def training_step(self, batch, index):
        loss = torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, on_step=True)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        if self.stops_at == (self.current_epoch, index):
            self.trainer.should_stop = True
        return loss

    def validation_step(self, batch, _):
        loss = torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("val_loss", loss)

    def configure_optimizers(self):
        optimizer = self.wrapper(torch.optim.SGD(self.parameters(), lr=0.05), **self.options)
        if self.schedule is None:
            return optimizer
        interval, make = self.schedule
        return [optimizer], [
            {"scheduler": make(optimizer, self.trainer), "interval": interval, "monitor": "val_loss"}
        ]


def loaders(samples=98, **options):
    options = {"batch_size": 8, "shuffle": True, **options}
    return DataLoader(TensorDataset(*blobs(samples)), **options), DataLoader(
        TensorDataset(*blobs(64, seed=1)), batch_size=32
    )


def whole(folder, ranks=1, **options):
    """Train on samples that 3 and 4 ranks divide, in order, in batches as large as those of so many ranks."""
    torch.manual_seed(2)  # whatever this process has trained before
    loading = {"samples": 96, "shuffle": False, "batch_size": 8 * ranks}
    return fit(Small(**options), folder, loading=loading)[:2]


def fit(module, folder, *, validates=True, path=None, loading=None, more=(), **options):
    """Train; return this rank's account of it, and the trainer."""
    lightning.seed_everything(1, verbose=False)
    best = callbacks.ModelCheckpoint(
        folder, "{epoch}-{step}-{loss:.4f}", monitor="val_loss" if validates else "loss",
        save_last=True, save_top_k=1,
    )  # fmt: skip
    options = {"max_epochs": 3, **options}
    trainer = lightning.Trainer(
        accelerator="cpu", strategy=nl.Strategy(), logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[best, *more], **options,
    )  # fmt: skip
    training, held_out = loaders(**(loading or {}))
    trainer.fit(module, training, held_out if validates else None, ckpt_path=path)
    schedules = [one.scheduler for one in trainer.lr_scheduler_configs]
    account = {
        "sum": [value.double().sum().item() for value in module.state_dict().values()],
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "best": best.best_model_path,
        "last": best.last_model_path,
        "score": float(best.best_model_score),
        "names": sorted(trainer.callback_metrics.keys() - {"loss_step"}),
        "loss": float(trainer.callback_metrics["loss_epoch"]),
    }
    own = {"rate": trainer.optimizers[0].param_groups[0]["lr"], "at": [one.last_epoch for one in schedules]}
    return account, own, trainer


def one_cycle(optimizer, trainer):
    steps = int(trainer.estimated_stepping_batches)
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)


def decay(optimizer, _):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)


def plateau(optimizer, _):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)


def resumed(folder, **options):
    account, *_ = fit(Small(schedule=("step", decay), **options), folder, max_epochs=2)
    again, own, _ = fit(
        Small(schedule=("step", decay), **options), folder, max_epochs=4, path=account["last"]
    )
    return again, own


def stopped_by_one(folder, **options):
    module = Small(**options)
    world = launched()
    if world is not None and world.rank == 2:
        module.stops_at = (1, 0)
    return fit(module, folder, max_epochs=50)[:2]


def twice(folder, **options):
    """A trainer goes on after another training has ended in this process."""
    fit(Small(**options), folder, max_epochs=1)
    account, own, trainer = fit(Small(**options), folder, max_epochs=2)
    scores = trainer.validate(Small(), dataloaders=loaders()[1], ckpt_path=account["best"], verbose=False)
    return account | {"validated": scores[0]["val_loss"]}, own


PROCESSES = {"num_workers": 1, "multiprocessing_context": "forkserver"}

CASES = {
    "uneven": lambda folder: fit(Small(schedule=("step", one_cycle)), folder)[:2],
    "decay": lambda folder: fit(Small(schedule=("step", decay)), folder)[:2],
    "epochs": lambda folder: fit(Small(schedule=("epoch", decay)), folder)[:2],
    "plateau": lambda folder: fit(Small(schedule=("epoch", plateau)), folder)[:2],
    "accumulate": lambda folder: fit(Small(schedule=("step", decay)), folder, accumulate_grad_batches=2)[:2],
    "limit": lambda folder: fit(Small(), folder, max_steps=7, max_epochs=-1)[:2],
    "early": lambda folder: fit(
        Small(), folder, max_epochs=40, more=[callbacks.EarlyStopping("val_loss", patience=0, min_delta=0.02)]
    )[:2],
    "rare": lambda folder: fit(
        Small(), folder, max_epochs=40, check_val_every_n_epoch=2,
        more=[callbacks.EarlyStopping("val_loss", patience=0, min_delta=0.1)],
    )[:2],
    "unvalidated": lambda folder: fit(Small(), folder, validates=False)[:2],
    "manual": lambda folder: fit(Small(manual=True), folder)[:2],
    "processes": lambda folder: fit(Small(), folder, loading=PROCESSES)[:2],
    "steady": lambda folder: fit(Small(nt.Steady, schedule=("step", one_cycle)), folder)[:2],
    "steady_resumed": lambda folder: resumed(folder, wrapper=nt.Steady),
    "rounds": lambda folder: fit(Small(nt.LocalSGD, every=3), folder)[:2],
    "elastic": lambda folder: fit(Small(nt.EASGD, every=2, beta=0.9), folder)[:2],
    "groups": lambda folder: fit(Small(schedule=("step", decay), group_size=3), folder)[:2],
    "whole_lead": lambda folder: whole(folder, servers=0),
    "whole_group": lambda folder: whole(folder, group_size=3),
    "alone_lead": lambda folder: whole(folder, 4),
    "alone_group": lambda folder: whole(folder, 3),
    "lead": lambda folder: fit(Small(schedule=("step", decay), servers=0), folder)[:2],
    "lead_twice": lambda folder: twice(folder, servers=0),
    "lead_stops": lambda folder: stopped_by_one(folder, servers=0),
    "lead_resumed": lambda folder: resumed(folder, servers=0),
    "resumed": resumed,
    "stopped": stopped_by_one,
    "twice": twice,
}  # fmt: skip


if __name__ == "__main__":
    run_cases(CASES)
