"""Lightning's private parts that the adapter uses, each behind a function named after its purpose.

If a new Lightning has changed one, a `ConfigurationError` names it and the version.
`tests/clients/test_lightning_compat.py` fails on the changed part before a user meets it.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities import data as loaders

from nnlo_common.plugin import OtherProject

__all__ = ["count_logged_steps", "epoch_means", "is_saved_within_epochs", "with_sampler"]

_LIGHTNING = OtherProject("lightning", "nnlo_torch/lightning/_compat.py")


@_LIGHTNING.uses("_update_dataloader")
def with_sampler(loader: Any, sampler: Any) -> Any:
    """Return the same loader, also of a subclass, with another sampler."""
    return loaders._update_dataloader(loader, sampler)


@_LIGHTNING.uses("_results")
def epoch_means(trainer: Any) -> list[tuple[str, float, bool]]:
    """Return what the training of this epoch logged, as means: name, value, and whether loggers get it."""
    values = trainer.fit_loop.epoch_loop._results.metrics(False)
    return [(name, float(value), name in values["log"]) for name, value in values["callback"].items()]


@_LIGHTNING.uses("_batches_that_stepped")
def count_logged_steps(trainer: Any, steps: int) -> None:
    """Move the x axis of loggers by `steps`."""
    trainer.fit_loop.epoch_loop._batches_that_stepped += steps


@_LIGHTNING.uses("_every_n_train_steps", "_train_time_interval")
def is_saved_within_epochs(checkpoint: Any) -> bool:
    """Return whether a ModelCheckpoint saves between the ends of epochs."""
    return bool(checkpoint._every_n_train_steps) or checkpoint._train_time_interval is not None
