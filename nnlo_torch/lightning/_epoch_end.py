"""End of an epoch: the server catches up with the workers and validates; then all ranks agree."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import Callback, Checkpoint, EarlyStopping

from nnlo_torch._foreign_loops import center_tells, leads, most, options_of, share_buffers, stop_together
from nnlo_torch._joint import collective
from nnlo_torch._participation import leave_with_center
from nnlo_torch.lightning._compat import count_logged_steps, epoch_means

__all__ = ["Serve", "StopTogether"]

_LOGGED, _KEPT = "logged ", "kept "  # whether loggers get a mean, as part of its name between ranks


class Serve(Callback):
    """First of all callbacks: those after it see an epoch as if this rank had trained and validated it.

    Args:
        strategy: this rank's.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy, self._wrapper = strategy, strategy.wrapper
        self._validated, self._leads = False, leads(self._wrapper)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse several loaders, and leave validation to the end of the epoch, on one rank."""
        if isinstance(trainer.train_dataloader, dict | list | tuple):
            raise collective(
                f"{len(trainer.train_dataloader)} training loaders at once cannot be shared among workers; "
                "make one loader of a data set that yields all parts of a batch"
            )
        loop = trainer.fit_loop.epoch_loop.val_loop
        vars(loop).pop("run", None)  # of a training that failed
        self._validate = loop.run
        if not self._wrapper.serves:  # a server has no last batch, after which the loop would validate
            loop.run = list
        self._mark(trainer)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Remember the counts before the epoch."""
        self._mark(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Catch up with the workers, validate the centre, and give all ranks its numbers."""
        self._strategy.together = True
        if not self._catch_up(trainer):
            return  # resumed at the end of an epoch, which no worker has trained
        share_buffers(self._wrapper)
        self._average(pl_module, trainer)
        if not trainer.enable_validation or (trainer.current_epoch + 1) % trainer.check_val_every_n_epoch:
            return
        self._validated = False
        if self._leads:
            trainer.validating = True
            self._validate()
            trainer.training = True
            if not self._validated:
                self._tell(trainer)  # no batches, so `on_validation_end` was not called
        elif self._tell(trainer):
            for one in trainer.callbacks:
                if isinstance(one, EarlyStopping | Checkpoint):
                    one.on_validation_end(trainer, pl_module)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Give all ranks the numbers before other callbacks decide by them."""
        if not trainer.sanity_checking:
            self._validated = True
            self._tell(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave with the centre's weights on all ranks."""
        vars(trainer.fit_loop.epoch_loop.val_loop).pop("run", None)
        leave_with_center(self._wrapper)

    # -- inside ---------------------------------------------------------------------------------------

    def _mark(self, trainer: Any) -> None:
        self._batches = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        self._steps, self._samples = trainer.global_step, self._wrapper.report().samples
        self._options = options_of(self._wrapper)

    def _catch_up(self, trainer: Any) -> bool:
        """Bring all ranks to the same counts, so that limits hold and files have the same names everywhere.

        Also step the server's schedulers as often as the workers': its checkpoint holds their position.
        """
        loop = trainer.fit_loop.epoch_loop
        batches = loop.batch_progress.total.ready - self._batches
        steps = trainer.global_step - self._steps
        whole = loop.batch_progress.is_last_batch
        counts = most(self._wrapper, {"batches": batches, "steps": steps, "whole": whole})
        most_batches, most_steps = round(counts["batches"]), round(counts["steps"])
        scheduled = self._wrapper.serves and trainer.lightning_module.automatic_optimization
        if scheduled and any(one.interval == "step" for one in trainer.lr_scheduler_configs):
            # Workers have sent the rates that their schedulers set; begin where they began.
            for group, options in zip(self._wrapper.param_groups, self._options, strict=True):
                group.update(options)
        for number in range(batches, most_batches):
            loop.batch_progress.increment_by(1, is_last_batch=number + 1 == most_batches)
            if scheduled:
                loop.update_lr_schedulers("step", update_plateau_schedulers=False)
        manual, automatic = loop.manual_optimization, loop.automatic_optimization
        if trainer.lightning_module.automatic_optimization:
            automatic.optim_progress.optimizer.step.increment_by(most_steps - steps)
        else:
            manual.optim_step_progress.increment_by(most_steps - steps)
        count_logged_steps(trainer, most_steps - steps)
        if scheduled and counts["whole"]:
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        return most_batches > 0

    def _average(self, pl_module: Any, trainer: Any) -> None:
        """Log the workers' means of this epoch on all ranks, so that all monitor the same."""
        own = {}
        if not self._wrapper.serves:
            own = {(_LOGGED if logs else _KEPT) + name: value for name, value, logs in epoch_means(trainer)}
        samples = self._wrapper.report().samples - self._samples
        means = self._wrapper.mean(own, 0.0 if self._wrapper.serves else float(samples))
        for kind in (_LOGGED, _KEPT):
            values = {name.removeprefix(kind): one for name, one in means.items() if name.startswith(kind)}
            pl_module.log_dict(values, on_step=False, on_epoch=True, batch_size=1, logger=kind == _LOGGED)
        trainer.callback_metrics.keys()  # reading them keeps them, also while the validation has its own

    def _tell(self, trainer: Any) -> bool:
        """Give all ranks the metrics of the one that validates; return whether it has validated."""
        own = {f"metric {name}": float(value) for name, value in trainer.callback_metrics.items()}
        told = center_tells(self._wrapper, own | {"validated": float(self._validated)})
        if not self._leads:
            device = self._strategy.root_device
            trainer.callback_metrics.update(
                {
                    name.removeprefix("metric "): torch.tensor(value, device=device)
                    for name, value in told.items()
                    if name.startswith("metric ")
                }
            )
        return bool(told["validated"])


class StopTogether(Checkpoint):
    """Last of all callbacks: if one rank is to stop, all do. Lightning calls a `Checkpoint` last.

    Args:
        strategy: this rank's.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Stop with the others of this rank's group, which make equally many steps."""
        trainer.should_stop = stop_together(self._strategy.wrapper, stop=bool(trainer.should_stop))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop with the others."""
        stop = self._strategy.wrapper.mean({"stop": float(trainer.should_stop)}, 1.0)["stop"]
        trainer.should_stop = stop > 0
        self._strategy.together = False
