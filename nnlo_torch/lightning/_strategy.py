"""Strategy: Lightning's `Trainer.fit` as one rank's part of a training."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_only

from nnlo_common.plugin import launched, own_gpu
from nnlo_torch._foreign_loops import leads, refuse_layout, sharded
from nnlo_torch._joint import collective
from nnlo_torch._wrapper import Wrapper, current
from nnlo_torch.lightning._compat import with_sampler
from nnlo_torch.lightning._epoch_end import Serve, StopTogether
from nnlo_torch.lightning._refusals import refuse

__all__ = ["Strategy"]


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
            self._gpu = own_gpu(self._world, servers, server_gpu=True) or 0
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
