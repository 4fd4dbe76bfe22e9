"""A Lightning module with the stock callbacks, a schedule per step, clipping, and the best checkpoint."""

from __future__ import annotations

import tempfile
import warnings
from datetime import timedelta
from pathlib import Path

import lightning
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

from tests.clients.common import WRAPPED, blobs, finish

if WRAPPED:
    import nnlo_torch as nt
    import nnlo_torch.lightning as nl

warnings.filterwarnings("ignore")


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 4)
        )
        self.save_hyperparameters()

    def _losses(self, batch, name):
        outputs = self.network(batch[0])
        loss = torch.nn.functional.cross_entropy(outputs, batch[1])
        accuracy = (outputs.argmax(dim=1) == batch[1]).float().mean()
        self.log_dict({f"{name}_loss": loss, f"{name}_accuracy": accuracy}, on_epoch=True, on_step=False)
        return loss

    def training_step(self, batch):
        return self._losses(batch, "train")

    def validation_step(self, batch):
        self._losses(batch, "val")

    def test_step(self, batch):
        self._losses(batch, "test")

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=5e-3)
        if WRAPPED:
            optimizer = nt.Downpour(optimizer)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    training = DataLoader(TensorDataset(*blobs(1024)), batch_size=32, shuffle=True)
    held_out = DataLoader(TensorDataset(*blobs(512, seed=1)), batch_size=128)
    tested = DataLoader(TensorDataset(*blobs(512, seed=2)), batch_size=128)
    seen: list[float] = []
    best = callbacks.ModelCheckpoint(folder / "best", monitor="val_loss", save_top_k=2, save_last=True)
    trainer = lightning.Trainer(
        max_epochs=8,
        accelerator="cpu",
        logger=CSVLogger(folder),
        gradient_clip_val=1.0,
        enable_progress_bar=False,
        callbacks=[
            callbacks.EarlyStopping("val_loss", patience=5),
            best,
            callbacks.LearningRateMonitor(logging_interval="epoch"),
            callbacks.Timer(duration=timedelta(minutes=5)),
            callbacks.GradientAccumulationScheduler({0: 1}),
            callbacks.ModelSummary(max_depth=2),
            callbacks.LambdaCallback(
                on_train_epoch_end=lambda trainer, _: seen.append(float(trainer.callback_metrics["val_loss"]))
            ),
        ],
        **({"strategy": nl.Strategy()} if WRAPPED else {}),
    )
    trainer.fit(Classifier(), training, held_out)
    assert len(seen) == trainer.current_epoch == 8
    assert best.best_model_score == min(seen), (best.best_model_score, seen)
    (scores,) = trainer.test(ckpt_path="best", dataloaders=tested, verbose=False)
    finish(trainer.is_global_zero, accuracy=scores["test_accuracy"], loss=scores["test_loss"])


if __name__ == "__main__":
    main()
