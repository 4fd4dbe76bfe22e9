"""Strategy: Lightning's `Trainer.fit` as one rank's part of a training."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from lightning.pytorch import callbacks
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.callbacks import (
    Callback,
    Checkpoint,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
)
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_only

from nnlo_common.plugin import launched, own_gpu
from nnlo_torch._foreign_loops import (
    center_tells,
    leads,
    most,
    options_of,
    refuse_layout,
    sharded,
    share_buffers,
    stop_together,
)
from nnlo_torch._joint import collective
from nnlo_torch._participation import leave_with_center
from nnlo_torch._wrapper import Wrapper, current
from nnlo_torch.lightning._compat import count_logged_steps, epoch_means, is_saved_within_epochs, with_sampler

__all__ = ["Serve", "StopTogether", "Strategy", "refuse"]

# -- end of an epoch: the server catches up with the workers and validates; then all ranks agree -------

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
        paced = self._paced_schedules(trainer)
        places = {name: schedule.last_epoch for name, schedule in paced.items()}
        counts = most(self._wrapper, {"batches": batches, "steps": steps, "whole": whole, **places})
        most_batches, most_steps = round(counts["batches"]), round(counts["steps"])
        scheduled = self._wrapper.serves and trainer.lightning_module.automatic_optimization
        if scheduled and any(one.interval == "step" for one in trainer.lr_scheduler_configs):
            # Workers have sent the rates that their schedulers set; begin where they began.
            for group, options in zip(self._wrapper.param_groups, self._options, strict=True):
                group.update(options)
        for number in range(batches, most_batches):
            loop.batch_progress.increment_by(1, is_last_batch=number + 1 == most_batches)
            if scheduled and not paced:
                loop.update_lr_schedulers("step", update_plateau_schedulers=False)
        for name, schedule in paced.items() if scheduled else ():
            for _step in range(round(counts[name]) - schedule.last_epoch):
                schedule.step()
        manual, automatic = loop.manual_optimization, loop.automatic_optimization
        if trainer.lightning_module.automatic_optimization:
            automatic.optim_progress.optimizer.step.increment_by(most_steps - steps)
        else:
            manual.optim_step_progress.increment_by(most_steps - steps)
        count_logged_steps(trainer, most_steps - steps)
        if scheduled and counts["whole"]:
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        return most_batches > 0

    def _paced_schedules(self, trainer: Any) -> dict[str, Any]:
        """Return the schedules by step that follow progress: they make other steps than the loop."""
        if not self._wrapper.counts_progress:
            return {}
        found = [one.scheduler for one in trainer.lr_scheduler_configs if one.interval == "step"]
        return {
            f"schedule {number}": one
            for number, one in enumerate(found)
            if isinstance(one, torch.optim.lr_scheduler.LRScheduler)
            and not isinstance(one, torch.optim.lr_scheduler.ReduceLROnPlateau)
        }

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


# -- options and callbacks of Lightning that cannot work where batches and centre are on different ranks.

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


class Strategy(SingleDeviceStrategy):
    """Strategy of Lightning's `Trainer` for nnlo; the same script runs with `python` and with `mpiexec`.

    Wrap the optimizer in `configure_optimizers`. Rank 0 serves: it gets no batch, and after each epoch
    validates the centre alone, saves it and logs. With servers=0 it trains like the others, and does that,
    too. All ranks get its numbers, so `EarlyStopping`, `ModelCheckpoint` and plateau schedulers decide alike.
    In a process alone nothing changes.

    Args:
        device: this rank's device; None: the CPU, or a CUDA device if the Trainer uses CUDA: ranks of a host
            take them in turn, servers last.
        servers: the number of servers, as of the wrapper.
        seed: seed of the order of samples, which differs between epochs; equal on all ranks.
        options: those of Lightning's `SingleDeviceStrategy`, e.g. a precision plugin.

    Example:
        Trainer(strategy=nnlo_torch.lightning.Strategy(), max_epochs=10).fit(module, loader)
    """

    strategy_name = "nnlo"

    def __init__(
        self, device: torch.device | str | None = None, *, servers: int = 1, seed: int = 0, **options: Any
    ) -> None:
        super().__init__(device="cpu", **options)
        self._world, self._seed = launched(), seed
        self._device = None if device is None else torch.device(device)
        self._wrapper: Wrapper | None = None
        self._setting_up, self._gpu = False, 0
        self._added: tuple[Callback, ...] = ()
        #: Whether all ranks are at the end of an epoch, and may talk to each other.
        self.together = False
        if self._world is not None:
            hosts = self._world.gather_text(self._world.host)
            self.global_rank = self._world.rank
            self.local_rank = hosts[: self.global_rank].count(self._world.host)
            self._gpu = own_gpu(self._world, server_gpu=True, servers=servers) or 0
            self.node_rank = list(dict.fromkeys(hosts)).index(self._world.host)
            rank_zero_only.rank = self.global_rank

    @property
    def is_global_zero(self) -> bool:
        """Whether this rank saves and logs: the one with the centre."""
        return not self.global_rank

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""
        if self._device is None:
            cuda = isinstance(self.accelerator, CUDAAccelerator)
            self._device = torch.device("cuda", self._gpu) if cuda else torch.device("cpu")
        return self._device

    @property
    def wrapper(self) -> Wrapper:
        """The wrapper of this training."""
        assert self._wrapper is not None  # used only within a training of several ranks
        return self._wrapper

    def setup_environment(self) -> None:
        """Begin the part of a run in which all ranks do the same."""
        super().setup_environment()
        self._setting_up = self._world is not None
        if self._world is not None:
            rank_zero_only.rank = self.global_rank  # the Trainer may have set another

    def setup(self, trainer: Any) -> None:
        """Make the optimizers, and add what serves and agrees at the end of each epoch."""
        fitting = trainer.state.fn == "fit" and self._world is not None
        if fitting:
            refuse(trainer)
        self._wrapper = None
        super().setup(trainer)
        self._setting_up = False
        if fitting:
            self._wrapper = self._wrapped()
            self._added = Serve(self), StopTogether(self)
            trainer.callbacks.insert(0, self._added[0])
            trainer.callbacks.append(self._added[1])

    def teardown(self) -> None:
        """Remove what `setup` added."""
        trainer: Any = None if self.lightning_module is None else self.lightning_module.trainer
        for added in self._added:
            trainer.callbacks.remove(added)
        self._added, self.together, self._setting_up = (), False, False
        super().teardown()

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return a loader of this rank's share; that of a server serves. Validation is not shared."""
        trainer = self.lightning_module.trainer
        if self._world is None or not trainer.training:
            return dataloader
        wrapper = self._wrapper
        if wrapper is None:  # `estimated_stepping_batches` in `configure_optimizers`
            wrapper = current()
        return sharded(dataloader, wrapper, with_sampler, seed=self._seed)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks while a run is set up; later they meet at the ends of epochs only."""
        super().barrier(name)
        if self._setting_up and self._world is not None:
            self._world.gather_text("")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return what rank `src` has, e.g. the folder of checkpoints, while a run is set up."""
        if not self._setting_up or self._world is None:
            return obj
        texts = self._world.gather_text(json.dumps(obj, default=os.fspath))
        return obj if src == self.global_rank else json.loads(texts[src])

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002 - its name
        """Return the decision of the rank with the centre at the end of an epoch, else this rank's own."""
        if not self.together:
            return bool(super().reduce_boolean_decision(decision, all))
        own = float(leads(self.wrapper))
        return bool(self.wrapper.mean({"decision": float(decision)}, own)["decision"])

    def _wrapped(self) -> Wrapper:
        if not self.optimizers or not all(isinstance(one, Wrapper) for one in self.optimizers):
            raise collective(
                f"configure_optimizers returned {[type(one).__name__ for one in self.optimizers]}, but with "
                "several ranks every optimizer must be wrapped; return e.g. nnlo_torch.Downpour(...)"
            )
        wrapper: Wrapper = self.optimizers[0]
        refuse_layout(wrapper, "nnlo_torch.lightning")
        return wrapper
