"""Worker: its parameters, its step, and a client for each server of the centre."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from nnlo_common.algorithms import Algorithm
from nnlo_common.algorithms._rule import GradientSum
from nnlo_common.algorithms._vector_optimizer import VectorOptimizer
from nnlo_common.base._errors import ConfigurationError, ProtocolError
from nnlo_common.base._flat_vector import FlatVector, Vector
from nnlo_common.base._spans import span
from nnlo_common.base._state_tree import State, require
from nnlo_common.protocol._events import Action, Received, Wait
from nnlo_common.protocol._shard_client import Phase, Shard, ShardClient, shards_without
from nnlo_common.protocol._waiting_requests import heed
from nnlo_common.protocol._wire import Wire

__all__ = ["Activity", "Worker", "check_weight"]

#: One activity of a worker: perform the actions in the order it yields them; on `Wait`, deliver an event.
Activity: TypeAlias = Iterator[Action]


def check_weight(rank: int, weight: float) -> None:
    """Raise if `weight` is not a finite number above 0."""
    if not 0 < weight < float("inf"):
        raise ConfigurationError(f"rank {rank}: weight={weight!r} must be a finite number above 0")


class Worker:
    """A worker's half of the training, over all shards; like `Server` it does no input or output.

    Methods that take several messages return an `Activity`: an iterator of actions that the caller performs.
    When it yields `Wait`, the caller must `deliver` the next reply before continuing.

    Attributes:
        parameters: the flat vector x.
        gradient: the flat vector g; fill it, at `gradient_point()`, before each `step`.
        shard_clients: one for each shard.

    Args:
        rank: the worker's rank.
        algorithm: makes the rule of each shard.
        parameters: x.
        gradient: g.
        shards: the shards of the centre.
        workers: the number of workers.
        members: the number of ranks of each.
        local: moves the parameters in each step.
        given_sums: in each `step`, `gradient` holds the sum over all steps since the last contribution; steps
            in between may be passed (`pass_step`).

    Example:
        >>> import numpy as np
        >>> from nnlo_common.algorithms import EASGD
        >>> x, g = (FlatVector.of([np.zeros(3, "f4")]) for _ in range(2))
        >>> worker = Worker(1, EASGD(), x, g, [Shard(0, server=0, place=slice(0, 3))], workers=1)
        >>> [type(action).__name__ for action, _ in zip(worker.join(), range(2))]
        ['Send', 'Wait']
    """

    def __init__(
        self,
        rank: int,
        algorithm: Algorithm,
        parameters: FlatVector,
        gradient: FlatVector,
        shards: Sequence[Shard],
        *,
        workers: int,
        members: int = 1,
        local: VectorOptimizer | None = None,
        given_sums: bool = False,
    ) -> None:
        self.rank, self.parameters, self.gradient = rank, parameters, gradient
        self.local = algorithm.local_optimizer() or local
        self.shard_clients = [
            ShardClient(
                rank,
                shard,
                algorithm.worker(shard.place.stop - shard.place.start, workers),
                parameters,
                gradient,
                wire=Wire(algorithm, parameters.layout, shard.place),
                alone=len(shards) == 1,
            )
            for shard in shards
        ]
        for shard_client in self.shard_clients:
            shard_client.rule.given_sums = given_sums
        self._exchange_first = self.shard_clients[0].rule.exchange_first
        self._places = algorithm.sampled(gradient.vector.size, workers * members) if len(shards) > 1 else None
        self._given_sums = given_sums
        self._sampled = GradientSum(0 if self._places is None else self._places.size)
        self._epochs = 0  # finished

    @property
    def stop_requested(self) -> bool:
        """Whether a server has asked to finish."""
        return any(shard_client.stop_requested for shard_client in self.shard_clients)

    @property
    def pause_requested(self) -> bool:
        """Whether the first server has asked, in its latest reply, to pause at the next batch boundary."""
        return self.shard_clients[0].pause_requested and not self.shard_clients[0].pause_cancelled

    @property
    def paused(self) -> bool:
        """Whether the last `pause` was granted; otherwise it was cancelled."""
        return all(shard_client.paused for shard_client in self.shard_clients)

    @property
    def rate(self) -> float:
        """The first server's latest learning rate; 0: none."""
        return self.shard_clients[0].rate

    @property
    def progress(self) -> tuple[int, int]:
        """The progress of the centre in the first server's latest reply, and of this epoch, in samples."""
        return self.shard_clients[0].progress

    def gradient_point(self) -> Vector:
        """Return the point of the next gradient: the parameters, or a point ahead of them (EAMSGD)."""
        point = getattr(self.local, "gradient_point", None)
        return self.parameters.vector if point is None else point(self.parameters.vector)

    def set_weight(self, weight: float) -> None:
        """Set the share in a mean that each later step has, e.g. its number of samples."""
        check_weight(self.rank, weight)
        for shard_client in self.shard_clients:
            shard_client.weight = weight

    def add_weight(self, weight: float) -> None:
        """Add the weight of passed steps to the share of the next contribution."""
        check_weight(self.rank, weight)
        for shard_client in self.shard_clients:
            shard_client.add_weight(weight)

    def count_samples(self, total: int) -> None:
        """Set the number of samples this worker has taken so far."""
        for shard_client in self.shard_clients:
            shard_client.samples = total

    def tell_wait(self, share: float) -> None:
        """Set the share of its time that this worker has spent in exchanges, for the epoch's end."""
        for shard_client in self.shard_clients:
            shard_client.waited = share

    def join(self) -> Activity:
        """Join all servers and start from the centre."""
        yield from self._all(ShardClient.join)

    def join_first(self) -> Activity:
        """Join the first server alone: pauses that it grants from now on wait for this rank, too."""
        yield from self._all(ShardClient.join, self.shard_clients[:1])

    def join_others(self, pauses: int) -> Activity:
        """Join the other servers.

        Args:
            pauses: the number of the last pause that the first server has granted without this rank.
        """
        others = self.shard_clients[1:]
        for shard_client in others:
            shard_client.pauses = pauses
        yield from self._all(ShardClient.join, others)

    def ahead(self, start: int = 0) -> Iterator[tuple[Shard, Vector, int]]:
        """Give each shard whose part of the next step's gradient may leave now, as far as it is made.

        Args:
            start: the place in the gradient behind which all is made.

        Returns:
            The shard, its part of the gradient, and the place in that part behind which all is made.
        """
        for shard_client in self.shard_clients:
            vector = shard_client.ahead(start)
            if vector is not None:
                shard = shard_client.shard
                yield shard, vector, max(start - shard.place.start, 0)

    def step(self, local_step: Callable[[], object] | None = None) -> Activity:
        """Make one step with the gradient in `gradient`.

        Args:
            local_step: moves the parameters in place of the local optimizer; a framework's optimizer.
        """
        for shard_client in self.shard_clients:
            shard_client.begin_step()
        self._sample()
        if self._exchange_first:
            yield from self._all(ShardClient.exchange)
        if local_step is not None:
            with span("apply", "local step"):
                local_step()
        elif self.local is not None:
            with span("apply", "local step"):
                self.local.step(self.parameters.vector, self.gradient.vector)
        if not self._exchange_first:
            yield from self._all(ShardClient.exchange)
        for shard_client in self.shard_clients:
            shard_client.end_step()

    def go_on_without(self, rank: int) -> Activity:
        """Go on after the death of a rank that serves or could: with the next one that can.

        Raises:
            PeerLostError: there is none.
        """
        shards = shards_without([one.shard for one in self.shard_clients], rank)
        for shard_client, shard in zip(self.shard_clients, shards, strict=True):
            if shard.server == shard_client.shard.server:
                shard_client.shard = shard
            else:
                yield from shard_client.go_on_without(shard)
        while any(shard_client.phase is Phase.JOINING for shard_client in self.shard_clients):
            yield Wait()

    @property
    def keeps_own(self) -> bool:
        """Whether its parameters stay when another rank takes a server's place."""
        return self.shard_clients[0].rule.keeps_own

    def begin_after(self, epochs: int) -> None:
        """Note that the servers count these epochs as finished, though this worker has not made them."""
        for shard_client in self.shard_clients:
            shard_client.epochs = epochs

    def begin_in_place(self, epochs: int, views: int, pauses: int) -> None:
        """Begin where the others are, in the place of a dead worker; see `ShardClient.begin_in_place`."""
        self._epochs = epochs
        for shard_client in self.shard_clients:
            shard_client.begin_in_place(epochs, views, pauses)

    def use_gradient(self, gradient: FlatVector) -> None:
        """Take the next gradient from another vector.

        After the first call, call it after each step, and reuse a vector only when its contribution has been
        answered: gradients are sent without a copy.
        """
        self.gradient = gradient
        for shard_client in self.shard_clients:
            shard_client.use_gradient(gradient)

    @property
    def due(self) -> bool:
        """Whether the next step exchanges, or the rule must see its gradient."""
        return any(shard_client.due is not None for shard_client in self.shard_clients)

    def due_within(self, steps: int) -> bool:
        """Whether one of the next steps exchanges."""
        return any(shard_client.due_within(steps) for shard_client in self.shard_clients)

    @property
    def gathered(self) -> int:
        """The number of steps since the last contribution."""
        return max(shard_client.rule.gathered for shard_client in self.shard_clients)

    def pass_step(self) -> None:
        """Count a step made elsewhere; the vectors need not hold its numbers.

        An exchange due in it happens in the next `step`.
        """
        for shard_client in self.shard_clients:
            shard_client.pass_step()

    def last_round(self) -> Activity:
        """Contribute the steps since the last round, if the algorithm trains in rounds."""
        yield from self._all(ShardClient.last_round)
        yield from self._drain()
        yield from self._all(ShardClient.settle)

    def look(self, into: Vector, *, when_all_are_there: bool = False) -> Activity:
        """Copy the current centre into `into`, without changing this worker's parameters.

        Args:
            into: the destination.
            when_all_are_there: wait until all workers have finished as many epochs as this one.
        """
        yield from self._drain()  # a server may answer a look before a contribution that still waits
        for shard_client in self.shard_clients:
            place = into[shard_client.shard.place]
            yield from shard_client.look(place, when_all_are_there=when_all_are_there)
        yield from self._seen()

    def configure(self, values: Vector) -> Activity:
        """Send all servers options for this worker's later contributions."""
        for shard_client in self.shard_clients:
            yield from shard_client.options(values)

    @property
    def epochs(self) -> int:
        """The number of finished epochs."""
        return self._epochs

    @property
    def refreshes(self) -> bool:
        """Whether the next epoch starts from the centre at the end of the last one."""
        return self._epochs > 0 and self.shard_clients[0].rule.refreshes

    def begin_epoch(self) -> Activity:
        """Begin an epoch; workers that step together start from the centre at the last epoch's end."""
        if self.refreshes:
            yield from self._all(ShardClient.settle)  # finish_epoch has received all replies
            yield from self._all(ShardClient.refresh)
            yield from self._seen()

    def finish_epoch(self) -> Activity:
        """Contribute the rest of the epoch, and report its end to all servers."""
        if self._places is not None and self.gathered:
            self._hand_out_sample(self._places)
        yield from self._all(ShardClient.contribute_rest)
        yield from self._drain()  # every server must have committed this epoch's contributions
        yield from self._all(ShardClient.finish_epoch)
        self._epochs += 1

    def pause(self, granted: Callable[[], object] = lambda: None) -> Activity:
        """Wait between two steps until all workers pause and nothing is under way; then the state is exact.

        The server cancels the pause if other workers need this one first; check `paused`.

        Args:
            granted: called when the first server has granted it, so that it is not cancelled any more.
        """
        # Ask the first server alone first: if a worker died meanwhile, servers asked at once could cancel the
        # pauses of different workers, which would then wait for each other. The others only wait for all.
        first, *others = self.shard_clients
        yield from self._ask_to_pause([first])
        if first.paused:
            granted()
            yield from self._ask_to_pause(others, first)

    def leave(self) -> Activity:
        """Absorb all open replies and leave all servers."""
        yield from self._drain()
        yield from self._all(ShardClient.settle)
        yield from self._all(ShardClient.leave)

    def let_go(self) -> list[Action]:
        """Release what is not absorbed: this rank is a worker no more."""
        return [action for shard_client in self.shard_clients for action in shard_client.let_go()]

    def deliver(self, event: Received) -> list[Action]:
        """Hand a reply to the client of its shard.

        Raises:
            DroppedError: the others have dropped this rank.
        """
        heed(event.message, self.rank)
        shard = event.message.shard
        if shard >= len(self.shard_clients):
            raise ProtocolError(
                f"worker rank {self.rank}: rank {event.message.sender} sent a reply for shard {shard}, but "
                f"the centre has {len(self.shard_clients)} shards"
            )
        return self.shard_clients[shard].receive(event)

    def validate(self) -> None:
        """Check every invariant of every shard client."""
        for shard_client in self.shard_clients:
            shard_client.validate()

    def state(self) -> State:
        """Return the parameters and the state of the local optimizer and of every shard client."""
        return {
            "epochs": self._epochs,
            "sampled": self._sampled.state(),
            "parameters": self.parameters.vector.copy(),
            "local": None if self.local is None else self.local.state(),
            "shard_clients": [shard_client.state() for shard_client in self.shard_clients],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume from the `state` of a worker; call it before `join`.

        Raises:
            ConfigurationError: it was saved with other options, another model, another number of servers
                or another local optimizer; nothing is changed then.
        """
        owner = f"worker rank {self.rank}"
        local = type(None) if self.local is None else Mapping
        parts = {"parameters": self.parameters.vector, "local": local, "shard_clients": [Mapping]}
        parts["sampled"] = Mapping
        require(owner, state, epochs=int, **parts)
        if len(state["shard_clients"]) != len(self.shard_clients):
            raise ConfigurationError(
                f"{owner}: the state was saved with {len(state['shard_clients'])} servers, but this training "
                f"has {len(self.shard_clients)}; resume with the same number of servers"
            )
        for shard_client, saved in zip(self.shard_clients, state["shard_clients"], strict=True):
            shard_client.check(saved)
        self._sampled.check(state["sampled"])
        if self.local is not None:
            self.local.load(state["local"])  # first, because it may raise
        for shard_client, saved in zip(self.shard_clients, state["shard_clients"], strict=True):
            shard_client.load(saved)
        np.copyto(self.parameters.vector, state["parameters"])
        self._epochs = state["epochs"]
        self.begin_after(self._epochs)
        self._sampled.load(state["sampled"])

    def _sample(self) -> None:
        """Take the sampled coordinates of this step's gradient, for servers that have a part of it each."""
        if self._places is None:
            return
        if not self._given_sums:
            self._sampled.add(self.gradient.vector.take(self._places))
        if self.due:
            self._hand_out_sample(self._places)

    def _hand_out_sample(self, places: npt.NDArray[np.int64]) -> None:
        if self._given_sums:
            self._sampled.add(self.gradient.vector.take(places))
        sample = self._sampled.take() / np.float32(max(self.gathered, 1))
        for shard_client in self.shard_clients:
            shard_client.sample = sample

    def _ask_to_pause(
        self, shard_clients: Sequence[ShardClient], first: ShardClient | None = None
    ) -> Activity:
        for shard_client in shard_clients:
            yield from shard_client.pause(first)
        while any(shard_client.pausing for shard_client in shard_clients):
            yield Wait()

    def _seen(self) -> Activity:
        """Wait until no look at the centre is under way."""
        while any(shard_client.looking for shard_client in self.shard_clients):
            yield Wait()

    def _drain(self) -> Activity:
        """Wait until no reply is under way."""
        while any(shard_client.unanswered for shard_client in self.shard_clients):
            yield Wait()

    def _all(
        self,
        what: Callable[[ShardClient], list[Action]],
        shard_clients: Sequence[ShardClient] | None = None,
    ) -> Activity:
        shard_clients = self.shard_clients if shard_clients is None else shard_clients
        for shard_client in shard_clients:
            yield from what(shard_client)
        while any(shard_client.blocked for shard_client in shard_clients):
            yield Wait()
