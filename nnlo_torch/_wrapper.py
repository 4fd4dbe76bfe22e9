"""What all wrappers share: a torch optimizer around the user's own that takes part in a training."""

from __future__ import annotations

import atexit
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch

from nnlo_common import ConfigurationError, Report
from nnlo_common._joining import Member, Plan, join, launched
from nnlo_common._roles import Working, say
from nnlo_common.algorithms import Algorithm
from nnlo_common.transport._endpoint import RankWorld
from nnlo_torch._bridge import Bridge, named_parameters
from nnlo_torch._center import CenterOptimizer

__all__ = ["Wrapper", "current"]

_LOG = logging.getLogger(__name__)
_REFUSED = {
    "LBFGS": "it evaluates the model several times a step",
    "SparseAdam": "it needs sparse gradients, which are not exchanged",
}
_current: weakref.ref[Wrapper] | None = None


def current() -> Wrapper | None:
    """Return the wrapper made last, if it still exists: the training that samplers belong to."""
    return None if _current is None else _current()


class Wrapper(torch.optim.Optimizer):
    """An optimizer around yours; its parameter groups *are* yours, so schedulers set your learning rates.

    Started alone it does exactly what yours does. In a training of several ranks it exchanges with the
    servers in `step`; on a server rank yours steps the centre, if the algorithm says so.

    Attributes:
        optimizer: yours.
        algorithm: how it is exchanged.
        rank: this rank's number.
        role: "alone", "worker 0", "server 0", ...

    Args:
        optimizer: any dense optimizer of `torch.optim`, made but not stepped yet.
        algorithm: the options of the algorithm.
        servers: how many ranks share the serving of the centre.
        world: the ranks; None: MPI's if a launcher has started this process, else this process alone.
    """

    _step_supports_amp_scaling: ClassVar[bool] = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        algorithm: Algorithm,
        *,
        servers: int = 1,
        world: RankWorld | None = None,
    ) -> None:
        _refuse(optimizer, type(self).__name__)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.optimizer, self.algorithm = optimizer, algorithm
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        self.rank, self.role = 0, "alone"
        self.weight = 1.0
        self._member: Member | None = None
        self._bridge: Bridge | None = None
        self._started = self._over = self._epoch_open = self._stopped = self._broken = False
        world = world or launched()
        if world is not None and world.size > 1:
            self._join(world, servers)
        global _current  # noqa: PLW0603 - samplers find their training by it
        _current = weakref.ref(self)

    # -- an ordinary optimizer ------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step with the gradients that lie in the parameters."""
        if self._member is None or self._bridge is None:
            return self.optimizer.step() if closure is None else self.optimizer.step(closure)
        if self.serves:
            raise ConfigurationError(
                f"rank {self.rank} serves the centre, but its loop has got a batch; give the DataLoader "
                "sampler=nnlo_torch.ShardSampler(dataset), which serves there instead"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._start()
        bridge = self._bridge
        bridge.collect()
        self._before_exchange(bridge)
        self._broken = True  # until the step is done: one that fails half-way cannot be left in good order
        self._member.part.step(self.weight, self._local_step if self._steps_locally else None)
        self._broken = False
        bridge.publish()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients; in a training of several ranks their memory stays."""
        if self._bridge is None:
            self.optimizer.zero_grad(set_to_none)
        else:
            self._bridge.clear()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, before the training has begun only."""
        if getattr(self, "_bridge", None) is not None:
            raise ConfigurationError(
                f"{type(self).__name__}: parameters were added after wrapping; the ranks have agreed on the "
                "model by then. Give all parameters to the optimizer before you wrap it"
            )
        if hasattr(self, "optimizer"):
            self.optimizer.add_param_group(param_group)
        else:
            super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state."""
        self.optimizer.load_state_dict(state_dict)
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r}, {self.algorithm.describe()}, {self.role})"

    # -- a part in a training -------------------------------------------------------------------------

    @property
    def serves(self) -> bool:
        """Whether this rank serves the centre instead of training."""
        return self._member is not None and self._member.server is not None

    @property
    def share(self) -> tuple[int, int]:
        """Which of how many workers this rank is; a server is none of them."""
        if self._member is None:
            return 0, 1
        return -1 if self._member.worker is None else self._member.worker, self._member.workers

    def begin_epoch(self) -> None:
        """Begin an epoch: on a server rank serve it to its end; samplers call this."""
        if self._member is None or self._bridge is None:
            return
        self._start()
        self._end_epoch()
        if self.serves:
            self._member.part.end_epoch()
            self._bridge.publish()
            self._opt_called = True  # so a scheduler sees that steps were made, though not by `step`
        else:
            self._epoch_open = True

    @contextmanager
    def center_weights(self) -> Iterator[None]:
        """Let the model have the centre's parameters for the length of a `with` block.

        On a server rank, and alone, it has them anyway.
        """
        if self._member is None or self._bridge is None or not isinstance(self._member.part, Working):
            yield
            return
        self._start()
        vector = self._bridge.parameters.vector
        own, center = vector.copy(), np.empty_like(vector)
        self._member.part.look(center)
        try:
            np.copyto(vector, center)
            self._bridge.publish()
            yield
        finally:
            np.copyto(vector, own)
            self._bridge.publish()

    def report(self) -> Report:
        """Return what this rank has seen so far."""
        return Report() if self._member is None else self._member.part.report()

    @property
    def stopped(self) -> bool:
        """Whether training is to end now; samplers yield nothing any more then."""
        return self._stopped if self._member is None else self._member.part.stopped

    def stop(self) -> None:
        """End the training on all ranks, each at its next exchange.

        Call it on every rank, as in `if accuracy > 0.9: optimizer.stop()`: the rank whose model is the
        centre decides, calls on the others do nothing.
        """
        if self._member is None:
            self._stopped = True
        else:
            self._member.part.stop()

    def say(self, text: str) -> None:
        """Print `text` once: on the rank whose model is the centre."""
        say(self.role, text)

    def close(self) -> None:
        """Leave in good order; a server serves until all workers have. The end of the script does it too."""
        if self._member is None or self._bridge is None or self._over or self._broken:
            return
        self._start()
        self._over = True
        self._end_epoch()
        self._member.part.finish()
        self._bridge.publish()
        self._member.disengage()
        atexit.unregister(self.close)

    # -- inside ---------------------------------------------------------------------------------------

    @property
    def _steps_locally(self) -> bool:
        return self.algorithm.optimizer_runs == "worker"

    def _before_exchange(self, bridge: Bridge) -> None:
        """What a wrapper does to the collected gradient."""

    def _local_step(self) -> None:
        bridge = self._bridge
        assert bridge is not None  # step has seen to it
        bridge.publish()  # an exchange may have come first
        with bridge.only_used():
            self.optimizer.step()
        bridge.absorb()

    def _join(self, world: RankWorld, servers: int) -> None:
        bridge = Bridge(named_parameters(self.optimizer))

        def at_center(place: slice) -> CenterOptimizer | None:
            if self.algorithm.optimizer_runs != "center":
                return None
            return CenterOptimizer(self.optimizer, bridge, place)

        plan = Plan(
            algorithm=self.algorithm,
            parameters=bridge.parameters,
            gradient=bridge.gradient,
            servers=servers,
            center_optimizer=at_center,
        )
        self._member, self._bridge = join(world, plan), bridge
        self.rank, self.role = world.rank, self._member.role
        if self._member.threads is not None:
            torch.set_num_threads(self._member.threads)
        if world.own_process:  # the end of the script is the end of the training
            atexit.register(self.close)

    def _start(self) -> None:
        if self._over:
            raise ConfigurationError(f"{type(self).__name__}: the training is over; make a new optimizer")
        if not self._started and self._member is not None and self._bridge is not None:
            self._started = True
            self._member.part.start()
            self._bridge.publish()

    def _end_epoch(self) -> None:
        # A loader that fetches ahead has used up its sampler before the last steps are made, so the end of
        # an epoch is known for certain only when the next thing begins.
        if self._epoch_open and self._member is not None:
            self._epoch_open = False
            self._member.part.end_epoch()


def _refuse(optimizer: torch.optim.Optimizer, wrapper: str) -> None:
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(
            f"{wrapper} wraps a torch optimizer, not a {name}; pass e.g. torch.optim.SGD(...)"
        )
    if isinstance(optimizer, Wrapper):
        raise ConfigurationError(f"{wrapper} cannot wrap another wrapper, {name}; wrap the inner one alone")
    if name in _REFUSED:
        raise ConfigurationError(f"{wrapper} cannot wrap {name}: {_REFUSED[name]}; use another optimizer")
