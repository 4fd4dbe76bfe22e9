"""The three parts a rank can have in a training: it works, it serves, or it is alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from nnlo_common._drive import perform, serve, work
from nnlo_common._errors import ConfigurationError, PeerLostError
from nnlo_common._flat import FlatVector, Vector
from nnlo_common._noise_scale import NoiseScale
from nnlo_common._optimizer import VectorOptimizer
from nnlo_common.protocol import Event, Kind, Lost, Message, Server, Shard, Worker, check_weight
from nnlo_common.transport._endpoint import Endpoint

__all__ = ["Alone", "Part", "Report", "Serving", "Working", "say"]

#: Moves the parameters of a worker, as a framework's optimizer does.
LocalStep: TypeAlias = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a rank has seen of a training.

    Attributes:
        steps: gradients computed here.
        exchanges: contributions that this rank's shard of the centre has taken up.
        dropped: contributions that came too late (synchronous training with backup workers).
        mean_staleness: how many commits old a contribution was, on average.
        noise_scale: the gradient noise scale of this rank's shard (synchronous training only).
    """

    steps: int = 0
    exchanges: int = 0
    dropped: int = 0
    mean_staleness: float = 0.0
    noise_scale: float | None = None


def say(role: str, text: str) -> None:
    """Print `text` if this is the one rank that speaks for all: the one whose parameters are the centre."""
    if role in ("alone", "server 0"):
        print(text, flush=True)


class Part(Protocol):
    """What a rank does at each turn of an ordinary training loop."""

    def start(self) -> None:
        """Take up the part."""

    def step(self, weight: float, local_step: LocalStep | None = None) -> None:
        """Make one step with the gradient that lies ready; `local_step` moves the parameters, if given."""

    def end_epoch(self) -> None:
        """Tell, or wait for, the end of an epoch."""

    def point(self) -> Vector:
        """Where the next gradient is to be taken."""

    @property
    def stopped(self) -> bool:
        """Whether training is to end now."""

    def stop(self) -> None:
        """Let training end; only the rank that holds the centre decides that."""

    def report(self) -> Report:
        """What was seen so far."""

    def finish(self) -> None:
        """Leave in good order."""


class Alone:
    """Trains plainly: a world of one."""

    def __init__(self, parameters: FlatVector, gradient: FlatVector, optimizer: VectorOptimizer) -> None:
        self._parameters, self._gradient, self._optimizer = parameters, gradient, optimizer
        self._steps = 0
        self.stopped = False

    def start(self) -> None:
        """Nobody has to be asked."""

    def step(self, weight: float, local_step: LocalStep | None = None) -> None:  # noqa: ARG002
        """Step the optimizer."""
        check_weight(0, weight)
        self._optimizer.step(self._parameters.vector, self._gradient.vector)
        self._steps += 1

    def end_epoch(self) -> None:
        """Nobody has to be told."""

    def point(self) -> Vector:
        """Return the parameters, or what lies ahead of them."""
        ahead: Callable[[Vector], Vector] | None = getattr(self._optimizer, "gradient_point", None)
        return self._parameters.vector if ahead is None else ahead(self._parameters.vector)

    def stop(self) -> None:
        """Make no more steps."""
        self.stopped = True

    def report(self) -> Report:
        """Return the steps made."""
        return Report(steps=self._steps)

    def finish(self) -> None:
        """Nobody has to be told."""


class Working:
    """Computes gradients and exchanges with the servers."""

    def __init__(self, endpoint: Endpoint, worker: Worker) -> None:
        self._endpoint, self._worker = endpoint, worker
        self._steps = 0

    def start(self) -> None:
        """Join; returns once the centre has come."""
        work(self._endpoint, self._worker, self._worker.join())

    def step(self, weight: float, local_step: LocalStep | None = None) -> None:
        """Make one step, with the exchange that is due."""
        self._worker.set_weight(weight)
        work(self._endpoint, self._worker, self._worker.step(local_step))
        self._steps += 1

    def end_epoch(self) -> None:
        """Tell the servers."""
        work(self._endpoint, self._worker, self._worker.finish_epoch())

    def point(self) -> Vector:
        """Return the parameters, or what lies ahead of them."""
        return self._worker.gradient_point()

    @property
    def stopped(self) -> bool:
        """Whether a server has asked to end, in its latest reply."""
        return self._worker.stop_requested

    def stop(self) -> None:
        """Do nothing: this rank sees its own parameters, not the centre."""

    def look(self, into: Vector) -> None:
        """Copy the centre as it is now into `into`; the training does not notice."""
        work(self._endpoint, self._worker, self._worker.look(into))

    def report(self) -> Report:
        """Return the steps made."""
        return Report(steps=self._steps)

    def finish(self) -> None:
        """Leave."""
        work(self._endpoint, self._worker, self._worker.leave())
        self._endpoint.close()


class Serving:
    """Holds one shard of the centre; between epochs its parameters are the whole centre.

    Args:
        endpoint: this rank's door.
        server: the state machine; its centre is a view of `parameters`.
        parameters: the model's parameters on this rank.
        others: the shards that other servers hold.
    """

    def __init__(
        self, endpoint: Endpoint, server: Server, parameters: FlatVector, others: Sequence[Shard]
    ) -> None:
        self._endpoint, self._server, self._parameters = endpoint, server, parameters
        self._others = {shard.index: shard for shard in others}
        self._epochs = self._pulls = 0
        self._missing: set[int] = set()

    def start(self) -> None:
        """Serve until every worker has asked to join, so that all ranks get here together."""
        serve(self._endpoint, self._handle, lambda: self._server.gathered)

    def step(self, weight: float, local_step: LocalStep | None = None) -> None:  # noqa: ARG002
        """Refuse: a server gets no batches."""
        raise ConfigurationError(
            f"rank {self._server.rank} serves the centre; make steps inside the loop over batches"
        )

    def end_epoch(self) -> None:
        """Serve until every worker that is still there has finished one more epoch."""
        self._epochs += 1
        serve(self._endpoint, self._handle, lambda: self._server.epoch_finished(self._epochs))
        self._assemble()

    def point(self) -> Vector:
        """Return the centre."""
        return self._parameters.vector

    @property
    def stopped(self) -> bool:
        """Whether the workers are being asked to end."""
        return self._server.stopping

    def stop(self) -> None:
        """Ask each worker to end, in the next reply to it."""
        self._server.stopping = True

    def report(self) -> Report:
        """Return what the shard has seen."""
        staleness, peers = self._server.staleness, self._server.peers.values()
        count = sum(staleness.values())
        mean = sum(stale * times for stale, times in staleness.items()) / count if count else 0.0
        noise: NoiseScale | None = getattr(self._server.rule, "noise_scale", None)
        return Report(
            exchanges=count,
            dropped=sum(peer.dropped for peer in peers),
            mean_staleness=mean,
            noise_scale=noise.value if noise is not None and noise.count else None,
        )

    def finish(self) -> None:
        """Serve until every worker has left."""
        serve(self._endpoint, self._handle, lambda: self._server.finished)
        self._assemble()
        self._endpoint.close()

    def _assemble(self) -> None:
        """Get the other servers' shards, and give them ours: then the parameters are the whole centre."""
        self._pulls += 1
        self._missing = set(self._others)
        for shard in self._others.values():
            request = Message(Kind.PULL, self._server.rank, self._pulls, shard=shard.index)
            self._endpoint.send(shard.server, request)
        serve(self._endpoint, self._handle, self._assembled)

    def _assembled(self) -> bool:
        return not self._missing and self._server.pulled_by_guests(self._pulls)

    def _handle(self, event: Event) -> None:
        if isinstance(event, Lost):
            if event.rank in self._server.peers:
                perform(self._endpoint, self._server.handle(event))
            elif any(event.rank == shard.server for shard in self._others.values()):
                raise PeerLostError(event.rank, "its part of the centre is lost with it")
        elif event.message.shard == self._server.shard:
            perform(self._endpoint, self._server.handle(event))
        else:
            shard = self._others[event.message.shard]
            np.copyto(self._parameters.vector[shard.place], event.frame.vector)
            self._missing.discard(shard.index)
            self._endpoint.release(shard.server, event.frame)
