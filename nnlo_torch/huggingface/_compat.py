"""Private parts of transformers that the adapter uses, each behind a function named after its purpose.

If a new version has changed one, a `ConfigurationError` names it and the version.
`tests/clients/test_huggingface.py` fails on the changed part before a user meets it.
`LoopHooks` has the private methods of the Trainer's loop that the adapter replaces, under public names.
"""

from __future__ import annotations

import logging
from typing import Any

import transformers

from nnlo_common.plugin import OtherProject

__all__ = ["LoopHooks", "add_loss", "silence_empty_epochs", "total_loss"]

_TRANSFORMERS = OtherProject("transformers", "nnlo_torch/huggingface/_compat.py")
_REPLACED = ("_get_train_sampler", "_save_checkpoint", "_finalize_training")
for _name in _REPLACED:
    if not hasattr(transformers.Trainer, _name):
        raise _TRANSFORMERS.changed(f"Trainer has no {_name} any more")


class LoopHooks:
    """Parts of the Trainer's loop; a class that derives from it and from a Trainer may replace them."""

    def training_sampler(self, sampler: Any) -> Any:
        """Return the sampler of the training, made from the Trainer's own."""
        return sampler

    def before_saving(self) -> bool:
        """Return whether this rank saves a checkpoint."""
        return True

    def after_saving(self) -> None:
        """Do what follows a checkpoint."""

    def before_finishing(self) -> None:
        """Do what follows the last epoch."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return self.training_sampler(super()._get_train_sampler(*args, **kwargs))  # type: ignore[misc]

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        if self.before_saving():
            super()._save_checkpoint(*args, **kwargs)  # type: ignore[misc]
        self.after_saving()

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self.before_finishing()
        return super()._finalize_training(*args, **kwargs)  # type: ignore[misc]


@_TRANSFORMERS.uses("_tr_loss", "_total_loss_scalar")
def total_loss(trainer: Any) -> float:
    """Return the sum of the losses of all steps so far."""
    return float(trainer._total_loss_scalar) + float(trainer._tr_loss)


@_TRANSFORMERS.uses("_tr_loss")
def add_loss(trainer: Any, loss: float) -> None:
    """Count losses of steps that other ranks made."""
    trainer._tr_loss += loss


def silence_empty_epochs() -> None:
    """Keep the Trainer from warning that an epoch had no sample, which a server's never has."""
    logging.getLogger("transformers.trainer").addFilter(_has_samples)


def _has_samples(record: logging.LogRecord) -> bool:
    return "not to be a single sample" not in record.getMessage()
