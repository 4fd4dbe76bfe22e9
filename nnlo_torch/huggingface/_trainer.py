"""Trainer of Hugging Face as one rank's part of a training."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState

from nnlo_common.plugin import is_number, launched, warn
from nnlo_torch._foreign_loops import (
    center_tells,
    leads,
    most,
    options_of,
    refuse_layout,
    share_buffers,
    stop_together,
)
from nnlo_torch._joint import collective
from nnlo_torch._participation import leave_with_center
from nnlo_torch._sampler import ShardSampler
from nnlo_torch._wrapper import Wrapper
from nnlo_torch.huggingface._compat import LoopHooks, add_loss, silence_empty_epochs, total_loss

__all__ = ["Agree", "ArgumentsMixin", "CatchUp", "Trainer", "TrainerMixin", "TrainingArguments", "begin"]

# -- end of an epoch: the server catches up with the workers' steps; then all ranks do the same --------


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
        self._epoch, self._options = state.epoch or 0.0, options_of(self._trainer.wrapper)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the workers' steps on all ranks alike, and step the server's scheduler as often."""
        trainer, wrapper = self._trainer, self._trainer.wrapper
        if wrapper.serves:
            control.should_training_stop = False  # the loop took an epoch without a batch for the end of data
        made, epoch = state.global_step - self._steps, state.epoch or 0.0
        if wrapper.counts_progress and not wrapper.serves:  # in steps of one process, as schedules do
            whole = trainer.updates
            made = min(wrapper.batches_made(made), whole) if control.should_training_stop else whole
            epoch = self._epoch + made / whole
        counts = most(wrapper, {"steps": made, "epoch": epoch})
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
            if "metrics" not in inspect.signature(schedule.step).parameters:
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


# -- state of accelerate for one rank: each trains by itself, and rank 0 prints and saves --------------

# Variables by which accelerate would set up torch.distributed between the ranks, and shard by itself.
_PREFIXES = ("OMPI_COMM_WORLD_", "PMI_", "MV2_COMM_WORLD_")
_NAMES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}


def begin(*, cpu: bool = False) -> None:
    """Make accelerate see a process of its own on every rank; call it before `Accelerator(...)`.

    `is_main_process`, `print` and `save` are those of rank 0, which has the centre. In a process alone it
    does nothing. `TrainingArguments` of this module calls it.

    Args:
        cpu: as that of `Accelerator`.
    """
    world = launched()  # MPI needs the variables
    if world is None:
        return
    hosts = world.gather_text(world.host)
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if _is_launchers(name)}
    try:
        state = PartialState(cpu=cpu)
    finally:
        os.environ.update(hidden)
    if state.num_processes != 1:
        raise collective(
            f"accelerate has been set up for {state.num_processes} processes before; call "
            "nnlo_torch.huggingface.begin() first"
        )
    state.process_index = world.rank
    state.local_process_index = hosts[: world.rank].count(world.host)


def _is_launchers(name: str) -> bool:
    return name in _NAMES or name.startswith(_PREFIXES)


class ArgumentsMixin:
    """Makes the arguments of any Trainer those of one rank: `class A(ArgumentsMixin, TrainingArguments)`."""

    def __post_init__(self) -> None:
        """Begin, and refuse what several ranks cannot do."""
        own: Any = self
        if launched() is not None:
            if own.auto_find_batch_size:
                raise collective(
                    "auto_find_batch_size=True retries with smaller batches on one rank only; find the size "
                    "in a process alone, then set per_device_train_batch_size"
                )
            begin(cpu=bool(own.use_cpu))
            given = own.accelerator_config
            if given is not None and not isinstance(given, dict):
                raise collective("accelerator_config must be a dict or None with several ranks")
            own.accelerator_config = {**(given or {}), "use_configured_state": True}
        super().__post_init__()  # type: ignore[misc]


@dataclass
class TrainingArguments(ArgumentsMixin, transformers.TrainingArguments):
    """Transformers' arguments, for a rank; in a process alone nothing changes."""


class TrainerMixin(LoopHooks):
    """Makes any Trainer one rank's part of a training: `class T(TrainerMixin, Seq2SeqTrainer)`.

    Rank 0 serves: it gets no batch, evaluates the centre alone, saves and logs. With servers=0 it trains like
    the others, and does that, too. All ranks get its scores, so callbacks decide alike. In a process alone
    nothing changes but the optimizer's wrapper.

    Args:
        arguments: those of the Trainer.
        wrap: wraps the optimizer that the Trainer makes, e.g. `nnlo_torch.Downpour`; None: `optimizers=` has
            a wrapped one.
        options: those of the Trainer.
    """

    def __init__(
        self, *arguments: Any, wrap: Callable[[torch.optim.Optimizer], Wrapper] | None = None, **options: Any
    ) -> None:
        self.wrap, self.several = wrap, launched() is not None
        self.updates = 1  # of an epoch
        self.wrapper: Wrapper | None = None
        super().__init__(*arguments, **options)
        own: Any = self
        if not self.several:
            return
        if own.args.process_index != launched().rank:  # type: ignore[union-attr]
            raise collective(
                "the Trainer's arguments know nothing of the other ranks; make them with "
                "nnlo_torch.huggingface.TrainingArguments"
            )
        if own.args.n_gpu > 1:
            raise collective(
                f"this rank sees {own.args.n_gpu} GPUs, and the Trainer would use all of them; show each "
                "rank one, by CUDA_VISIBLE_DEVICES"
            )
        own.callback_handler.callbacks.insert(0, CatchUp(self))
        own.add_callback(Agree(self))

    def create_optimizer(self, *arguments: Any, **options: Any) -> Any:
        """Make the optimizer, and wrap it."""
        own: Any = self
        made = own.optimizer is None
        super().create_optimizer(*arguments, **options)  # type: ignore[misc]
        if made and self.wrap is not None:
            own.optimizer = self.wrap(own.optimizer)
        inner = getattr(own.optimizer, "optimizer", None)  # accelerate's wrapper hides ours
        found = next((one for one in (own.optimizer, inner) if isinstance(one, Wrapper)), None)
        if self.several and found is None:
            raise collective(
                f"the Trainer's optimizer, a {type(own.optimizer).__name__}, is not wrapped; pass e.g. "
                "wrap=nnlo_torch.Downpour"
            )
        if found is not None:
            refuse_layout(found, "nnlo_torch.huggingface")
        self.wrapper = found if self.several else None
        if self.wrapper is not None and self.wrapper.serves:
            silence_empty_epochs()
        return own.optimizer

    def get_train_dataloader(self) -> Any:
        """Return the loader of this rank's share."""
        if not self.several:
            return super().get_train_dataloader()  # type: ignore[misc]
        self.create_optimizer()  # the share depends on it
        return super().get_train_dataloader()  # type: ignore[misc]

    def training_sampler(self, sampler: Any) -> Any:
        """Return a sampler of this rank's share."""
        if self.wrapper is None:
            return sampler
        if sampler is None:
            raise collective(
                "the training's data set has no length, so it cannot be shared among workers; give one with "
                "a length"
            )
        return ShardSampler(sampler, optimizer=self.wrapper)

    def set_initial_training_values(self, *arguments: Any, **options: Any) -> Any:
        """Return the Trainer's counts: epochs, steps per epoch and all steps as on the first worker."""
        values = super().set_initial_training_values(*arguments, **options)  # type: ignore[misc]
        if self.wrapper is None:
            return values
        epochs, updates, examples, samples, batch, in_epoch, steps = values
        alike = most(self.wrapper, {"epochs": epochs, "updates": updates, "steps": steps}, of_all=True)
        self.updates = round(alike["updates"])
        return (
            round(alike["epochs"]), self.updates, examples, samples, batch, in_epoch,
            round(alike["steps"]),
        )  # fmt: skip

    def evaluate(self, *arguments: Any, **options: Any) -> Any:
        """Evaluate the centre; in a training on rank 0 only, and all ranks return its scores."""
        own: Any = self
        wrapper = self.wrapper
        if wrapper is None or not own.is_in_train:
            return super().evaluate(*arguments, **options)  # type: ignore[misc]
        if not leads(wrapper):
            scores = center_tells(wrapper, {})
            own.control = own.callback_handler.on_evaluate(own.args, own.state, own.control, scores)
            return scores
        self.wrapper = None  # evaluates several data sets by itself
        try:
            scores = super().evaluate(*arguments, **options)  # type: ignore[misc]
        finally:
            self.wrapper = wrapper
        center_tells(wrapper, {name: float(value) for name, value in scores.items() if is_number(value)})
        return scores

    def before_saving(self) -> bool:
        """Return whether this rank saves: the one with the centre."""
        return self.wrapper is None or leads(self.wrapper)

    def after_saving(self) -> None:
        """Wait for the files, and note the best checkpoint on workers, too."""
        if self.wrapper is None:
            return
        self.wrapper.mean({}, 0.0)
        state: Any = self.state  # type: ignore[attr-defined]
        if not leads(self.wrapper) and state.best_global_step:
            folder = Path(self.args.output_dir) / f"checkpoint-{state.best_global_step}"  # type: ignore[attr-defined]
            if folder.exists():
                state.best_model_checkpoint = str(folder)

    def before_finishing(self) -> None:
        """Leave with the centre's weights on all ranks."""
        if self.wrapper is not None:
            leave_with_center(self.wrapper)
            self.wrapper = None

    def hyperparameter_search(self, *arguments: Any, **options: Any) -> Any:
        """Search in a process alone; refused with several ranks."""
        if self.several:
            raise collective(
                "hyperparameter_search() does not work with several ranks: only rank 0 would choose; use "
                "nnlo_torch.optimize"
            )
        return super().hyperparameter_search(*arguments, **options)  # type: ignore[misc]


class Trainer(TrainerMixin, transformers.Trainer):
    """Transformers' Trainer for several ranks; see `TrainerMixin`."""
