"""What a wrapper does where it is one of several ranks: it ties the user's model to a part in a training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from nnlo_common import ConfigurationError, Report
from nnlo_common._flat import Vector
from nnlo_common._forking import advise_on_fork
from nnlo_common._joining import Member, Plan, join
from nnlo_common.algorithms import Algorithm
from nnlo_common.transport._endpoint import RankWorld
from nnlo_torch._bridge import Bridge, BufferBridge, named_parameters
from nnlo_torch._center import CenterOptimizer
from nnlo_torch._modules import buffers_of
from nnlo_torch._options import options_of, wire

__all__ = ["Team"]


class Team:
    """One rank's place among several.

    Attributes:
        rank: this rank's number.
        size: how many ranks there are.
        member: its part.
        bridge: its model as flat vectors.
        broken: a step has failed half-way, so that the training cannot be left in good order.
        over: the training is over.
        before_epoch_ends: called when this worker ends its epoch.

    Args:
        optimizer: the user's.
        algorithm: how it is exchanged.
        world: the ranks.
        servers: how many of them serve.
        modules: what the parameters belong to, for the buffers and the names.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        algorithm: Algorithm,
        world: RankWorld,
        *,
        servers: int,
        modules: Sequence[torch.nn.Module],
    ) -> None:
        self.optimizer, self.rank, self.size = optimizer, world.rank, world.size
        self._runs = algorithm.optimizer_runs
        named = named_parameters(optimizer, modules)
        self.bridge = bridge = Bridge(named, gradients=self._runs != "worker")
        buffers = buffers_of(modules)
        self._buffers = BufferBridge(buffers) if buffers else None

        def at_center(place: slice) -> CenterOptimizer | None:
            return CenterOptimizer(optimizer, bridge, place) if self._runs == "center" else None

        plan = Plan(
            algorithm=algorithm,
            parameters=bridge.parameters,
            gradient=bridge.gradient,
            servers=servers,
            center_optimizer=at_center,
            buffers=None if self._buffers is None else self._buffers.flat,
            options=2 * len(options_of(optimizer)),
        )
        self.member: Member = join(world, plan)
        self._part = self.member.part
        if self.member.threads is not None:
            torch.set_num_threads(self.member.threads)
        self.broken = self.over = False
        self.before_epoch_ends: Callable[[], object] | None = None
        self._started = self._epoch_open = self._schedules = False
        self._samples = self._samples_before = self._steps_in_epoch = 0
        self._options = options_of(optimizer)
        if world.own_process:
            advise_on_fork(lambda: algorithm.lag > 0 and not self.serves and not self.over)

    @property
    def serves(self) -> bool:
        """Whether this rank serves the centre instead of training."""
        return self.member.server is not None

    @property
    def share(self) -> tuple[int, int]:
        """Which of how many workers this rank is; -1 on a server."""
        return -1 if self.member.worker is None else self.member.worker, self.member.workers

    @property
    def stopped(self) -> bool:
        """Whether the server asks to end."""
        return self._part.stopped

    def stop(self) -> None:
        """Ask all to end; what a worker says does not count."""
        self._part.stop()

    def report(self) -> Report:
        """Return what this rank has seen so far."""
        return self._part.report()

    def take(self, samples: int) -> None:
        """Count samples that this rank has taken."""
        self._samples += samples

    def watch(self, call: Callable[[], object], every_s: float) -> None:
        """Do something from time to time while this rank serves."""
        self._part.watch(call, every_s)

    def ask(self, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """Ask the first server."""
        # A server's own questions about leases are answered at once: before it lets in anybody who takes one.
        if not (self.serves and content["ask"] == "lease"):
            self.start()
        return self._part.ask(content)[0]

    # -- the course of a training ---------------------------------------------------------------------

    def start(self) -> None:
        """Take up the part, if that has not been done."""
        if self.over:
            raise ConfigurationError("the training is over; make a new optimizer")
        if not self._started:
            self._started = True
            self.bridge.absorb()  # 16-bit weights may have been loaded since
            self._part.start()
            self.bridge.publish()

    def begin_epoch(self) -> None:
        """Begin an epoch; on a server serve it to its end."""
        self.start()
        self.end_epoch()
        if self.serves:
            self._part.end_epoch()
            self._publish()
            return
        self._epoch_open = True
        self._part.begin_epoch()
        self.bridge.publish()
        if not self._schedules:
            self._options = options_of(self.optimizer)

    def step(self, weight: float, change_gradient: Callable[[Bridge], object]) -> None:
        """Make one step with the gradients that lie in the model."""
        self.start()
        if self._runs == "worker":
            self.bridge.check()
        else:
            self.bridge.collect()
            change_gradient(self.bridge)
        self.broken = True  # until the step is done: one that fails half-way cannot be left in good order
        if self._runs == "center":
            self._send_options()
        self._part.count_samples(self._samples)
        self._part.step(weight, self._local_step if self._runs == "worker" else None)
        self._steps_in_epoch += 1
        self.broken = False
        self.bridge.publish()

    def end_epoch(self) -> None:
        """End the epoch that is open, if one is.

        A loader that fetches ahead has used up its sampler before the last steps are made, so the end of an
        epoch is known for certain only when the next thing begins.
        """
        if self._epoch_open:
            self._epoch_open = False
            if self.before_epoch_ends is not None:
                self.before_epoch_ends()
            self._part.count_samples(self._samples)
            self._average_buffers(adopt=True)
            self._part.end_epoch()
            self._samples_before, self._steps_in_epoch = self._samples, 0

    def close(self) -> None:
        """Leave in good order; a server serves until all workers have left."""
        self.start()
        self.over = True
        self.end_epoch()
        self._part.finish(self._publish if self.serves else self.bridge.publish)
        self.bridge.publish()
        self.member.disengage()

    # -- the centre on any rank -----------------------------------------------------------------------

    @contextmanager
    def center(self, *, when_all_are_there: bool) -> Iterator[None]:
        """Let the model have the centre's parameters and buffers.

        Args:
            when_all_are_there: as they are when all have finished the epoch, the same on all ranks.
        """
        self.start()
        if when_all_are_there:
            self.end_epoch()
        vector = self.bridge.parameters.vector
        center = np.empty_like(vector)
        if when_all_are_there:
            self._part.view(center)
        elif self.serves:
            self._part.look(center)
        else:
            self._part.look(center)
            self._average_buffers(adopt=False)
        if self.serves:
            yield  # the model is the centre
            return
        own = vector.copy()
        own_buffers = self._swap_buffers(None)
        try:
            self._swap(center)
            yield
        finally:
            self._swap(own)
            self._swap_buffers(own_buffers)

    def mean(self, values: Mapping[str, float], weight: float) -> dict[str, float]:
        """Return the means over all ranks; each gets the same."""
        self.start()
        self.end_epoch()  # which a server serves to its end before it asks, too
        answer = self.ask({"ask": "mean", "values": dict(values), "weight": weight})
        return dict(answer["means"])

    # -- inside ---------------------------------------------------------------------------------------

    def _local_step(self) -> None:
        self.bridge.publish()  # an exchange may have come first
        self.optimizer.step()
        self.bridge.absorb()

    def _send_options(self) -> None:
        """Tell the servers what a scheduler has changed between two steps, for they do not see batches.

        What changes between epochs the server's own scheduler changes, too.
        """
        options = options_of(self.optimizer)
        if options != self._options:
            self._options, self._schedules = options, True
            self._part.configure(wire(options))

    def _swap(self, vector: Vector) -> None:
        np.copyto(self.bridge.parameters.vector, vector)
        self.bridge.publish()

    def _average_buffers(self, *, adopt: bool) -> None:
        """Bring this worker's buffers, if it has trained at all, and take the mean of all."""
        if self._buffers is None:
            return
        weight = self._samples - self._samples_before or self._steps_in_epoch
        self._buffers.gather()
        brought = self._buffers.flat.vector if weight else None
        _, mean = self._part.ask({"ask": "average", "weight": weight}, brought)
        if adopt:
            np.copyto(self._buffers.flat.vector, mean)
            self._buffers.scatter()

    def _swap_buffers(self, vector: Vector | None) -> Vector | None:
        """Give the model these buffers, or the mean of all; return those it had."""
        if self._buffers is None:
            return None
        self._buffers.gather()
        own = self._buffers.flat.vector.copy()
        if vector is None:
            _, vector = self._part.ask({"ask": "average", "weight": 0})
        np.copyto(self._buffers.flat.vector, vector)
        self._buffers.scatter()
        return own

    def _publish(self) -> None:
        """On a server: let the model be the centre."""
        self.bridge.publish()
        if self._buffers is not None:
            self._swap_buffers(None)
