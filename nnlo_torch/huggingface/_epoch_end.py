"""End of an epoch: the server catches up with the workers' steps; then all ranks do the same."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from nnlo_common.plugin import warn
from nnlo_torch._foreign_loops import leads, most, options_of, share_buffers, stop_together
from nnlo_torch.huggingface._compat import add_loss, total_loss

__all__ = ["Agree", "CatchUp"]


class CatchUp(transformers.TrainerCallback):
    """First of all callbacks: those after it see an epoch as if this rank had trained it.

    Args:
        trainer: this rank's, with a wrapper.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Remember the counts before the epoch."""
        self._steps, self._loss = state.global_step, total_loss(self._trainer)
        self._options = options_of(self._trainer.wrapper)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the workers' steps on all ranks alike, and step the server's scheduler as often."""
        trainer, wrapper = self._trainer, self._trainer.wrapper
        if wrapper.serves:
            control.should_training_stop = False  # the loop took an epoch without a batch for the end of data
        counts = most(wrapper, {"steps": state.global_step - self._steps, "epoch": state.epoch or 0})
        steps = round(counts["steps"])
        own = total_loss(trainer) - self._loss  # 0 on a server
        brought = {} if wrapper.serves else {"loss": own}
        loss = wrapper.mean(brought, 0.0 if wrapper.serves else 1.0)["loss"]
        share_buffers(wrapper)
        state.global_step, state.epoch = self._steps + steps, counts["epoch"]
        if leads(wrapper):
            add_loss(trainer, loss - own)
        if wrapper.serves:
            control.should_log = True
            schedule = trainer.lr_scheduler
            if not isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
                # Workers have sent the rates that their schedulers set; begin where they began.
                for group, options in zip(wrapper.param_groups, self._options, strict=True):
                    group.update(options)
                for _step in range(steps):
                    schedule.step()


class Agree(transformers.TrainerCallback):
    """Last of all callbacks: what is due on one rank is done on all, at the end of the epoch.

    Args:
        trainer: this rank's, with a wrapper.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._warned = trainer, False
        self._evaluates = self._saves = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Put off an evaluation or a checkpoint to the end of the epoch."""
        self._evaluates |= control.should_evaluate
        self._saves |= control.should_save
        if (control.should_evaluate or control.should_save) and not self._warned:
            self._warned = True
            if self._trainer.wrapper.share[0] == 0:
                warn(
                    "eval_strategy='steps' and save_strategy='steps' act at the end of the epoch with "
                    "several ranks: within it each worker is at another step"
                )
        control.should_evaluate = control.should_save = False
        stop = bool(control.should_training_stop)
        control.should_training_stop = stop_together(self._trainer.wrapper, stop=stop)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Evaluate, save and stop if one rank is to."""
        told = most(
            self._trainer.wrapper,
            {
                "evaluate": self._evaluates or control.should_evaluate,
                "save": self._saves or control.should_save,
                "stop": control.should_training_stop,
            },
            of_all=True,
        )
        self._evaluates = self._saves = False
        control.should_evaluate, control.should_save = told["evaluate"] > 0, told["save"] > 0
        control.should_training_stop = told["stop"] > 0
