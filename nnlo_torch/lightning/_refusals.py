"""Options and callbacks of Lightning that cannot work where batches and centre are on different ranks."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint

from nnlo_torch._joint import collective
from nnlo_torch.lightning._compat import is_saved_within_epochs

__all__ = ["refuse"]

_SEES_BATCHES = "it looks at batches, and the rank with the centre and the loggers gets none"
_CALLBACKS = {
    "BaseFinetuning": "it changes the optimizer's parameters after the ranks have agreed on them; freeze "
    "parameters in the module's constructor",
    "BatchSizeFinder": "it trains by itself; find the batch size in a process alone",
    "DeviceStatsMonitor": f"{_SEES_BATCHES}; use nnlo_torch.Report",
    "LearningRateFinder": "it trains by itself; find the rate in a process alone",
    "ModelPruning": "it replaces parameters that the ranks have agreed on; prune after the training",
    "StochasticWeightAveraging": "it trains with another scheduler and averages on each rank by itself; "
    "nnlo_torch.LocalSGD and EASGD average weights over the workers",
    "ThroughputMonitor": f"{_SEES_BATCHES}; use nnlo_torch.Report",
    "WeightAveraging": f"{_SEES_BATCHES}; nnlo_torch.LocalSGD and EASGD average weights over the workers",
}


def refuse(trainer: Any) -> None:
    """Refuse, by name, what would silently do nothing or hang in a training of several ranks."""
    if trainer.val_check_interval != 1.0 or trainer.check_val_every_n_epoch is None:
        raise collective(
            f"Trainer(val_check_interval={trainer.val_check_interval!r}, check_val_every_n_epoch="
            f"{trainer.check_val_every_n_epoch!r}) validates within an epoch, but the centre is validated at "
            "the end of one; leave val_check_interval out, and use check_val_every_n_epoch=1, 2, ..."
        )
    for callback in trainer.callbacks:
        for name, reason in _CALLBACKS.items():
            if isinstance(callback, getattr(callbacks, name, ())):
                raise collective(f"{type(callback).__name__} does not work with several ranks: {reason}")
        if isinstance(callback, ModelCheckpoint) and is_saved_within_epochs(callback):
            raise collective(
                "ModelCheckpoint(every_n_train_steps=..., train_time_interval=...) saves within an epoch, "
                "but the rank with the centre counts no steps there; use every_n_epochs"
            )
        if isinstance(callback, LearningRateMonitor) and callback.logging_interval == "step":
            raise collective(
                "LearningRateMonitor(logging_interval='step') does not work with several ranks: "
                f"{_SEES_BATCHES}; use logging_interval='epoch'"
            )
