"""Trainer of Hugging Face as one rank's part of a training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from nnlo_common.plugin import launched
from nnlo_torch._foreign_loops import center_tells, leads, most, refuse_layout
from nnlo_torch._joint import collective
from nnlo_torch._participation import leave_with_center
from nnlo_torch._sampler import ShardSampler
from nnlo_torch._wrapper import Wrapper
from nnlo_torch.huggingface._compat import LoopHooks, silence_empty_epochs
from nnlo_torch.huggingface._epoch_end import Agree, CatchUp

__all__ = ["Trainer", "TrainerMixin"]


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
        return (
            round(alike["epochs"]), round(alike["updates"]), examples, samples, batch, in_epoch,
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
        center_tells(wrapper, {name: float(value) for name, value in scores.items()})
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
