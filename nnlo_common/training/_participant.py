"""Participant: one rank of a training without a framework; every rank runs the same script."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import numpy.typing as npt

from nnlo_common.algorithms import Algorithm
from nnlo_common.algorithms._vector_optimizer import VectorOptimizer, fitted
from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._file_access import new_file
from nnlo_common.base._flat_vector import FlatVector, Vector
from nnlo_common.cluster.transport._endpoint import RankWorld
from nnlo_common.protocol import Server
from nnlo_common.training._group_worker import GroupTrainer
from nnlo_common.training._heir_rank import HeirRank
from nnlo_common.training._joining import Member, join, launched
from nnlo_common.training._plan import TrainingPlan
from nnlo_common.training._rank_options import RankArguments, RankOptions
from nnlo_common.training._rank_parts import Alone, RankPart, TrainingReport, say
from nnlo_common.training._server_rank import ServerRank
from nnlo_common.training._spare_rank import SpareRank

__all__ = ["Participant", "Recording"]

# -- replay log: the order in which a server handled requests, which is all that a replay needs --------


class Recording:
    """File for a server's order, written when the training is over.

    Args:
        path: the file, as the user names it; servers other than the first append their shard.
        server: the server whose order is written.

    Raises:
        ConfigurationError: the file cannot be written; checked at the start.
    """

    def __init__(self, path: Path, server: Server) -> None:
        self._server = server
        self._final = path.with_name(f"{path.name}.shard{server.shard}") if server.shard else path
        self._fresh = self._final.with_name(f"{self._final.name}.part")
        try:
            new_file(self._fresh).close()
        except OSError as error:
            raise ConfigurationError(
                f"log_order={str(path)!r} cannot be written ({error.strerror}); choose a file in an existing "
                "folder that is writable on the server's host"
            ) from None

    def write(self) -> None:
        """Write the order atomically."""
        content = {"shard": self._server.shard, "handled": self._server.handled}
        with new_file(self._fresh) as file:
            file.write(json.dumps(content).encode())
        self._fresh.replace(self._final)


_Batch = TypeVar("_Batch")


class Participant:
    """Takes part in a distributed training, in the role that this rank is assigned.

    The same script runs on every rank. Started with `python` it trains alone; with `mpiexec -n 3` one rank
    serves the centre and two train.

    Args:
        algorithm: how workers and centre exchange, e.g. `EASGD(every=10)`.
        arrays: the initial parameters; equal shapes on all ranks. Each server's shard of the centre starts
            with that server's values.
        optimizer: the ordinary optimizer; it runs where the algorithm says, on the centre or the worker.
        names: the arrays' names in error messages.
        world: the ranks; None: MPI's if a launcher has started this process, else this process alone.
        log_order: a file for the order of all requests, for a replay in the virtual cluster; not written
            when alone.
        ranks: what the ranks do: `servers`, `group_size`, `all_reduce` and `stall_timeout_s`, as of the
            wrappers of the frameworks.

    Attributes:
        rank: this rank's number.
        size: the number of ranks.
        role: "alone", "server 0", "worker 0", ...; in groups also "worker 0, member 1", ..., and with
            servers=0 "lead" on rank 0.
        table: all ranks with their hosts and roles, as text; empty alone.

    Example:
        >>> import numpy as np
        >>> from nnlo_common import SGD, Downpour
        >>> with Participant(Downpour(), [np.ones(2, "f4")], optimizer=SGD(0.5)) as me:
        ...     for epoch in range(2):
        ...         for batch in me.batches([1, 2, 3]):
        ...             me.gradients[0][:] = me.point[0]  # of |x|^2 / 2
        ...             me.step()
        >>> me.parameters[0]
        array([0.015625, 0.015625], dtype=float32)
    """

    def __init__(
        self,
        algorithm: Algorithm,
        arrays: Sequence[npt.NDArray[Any]],
        *,
        optimizer: VectorOptimizer | None = None,
        names: Sequence[str] | None = None,
        world: RankWorld | None = None,
        log_order: str | Path | None = None,
        **ranks: Unpack[RankArguments],
    ) -> None:
        _check_arguments(algorithm, optimizer)
        self.algorithm, self.optimizer = algorithm.with_momentum_of(optimizer), optimizer
        given: dict[str, Any] = {**ranks}
        self._ranks = RankOptions.taken_from(given, "Participant")
        for name in given:
            raise TypeError(f"Participant() got an unexpected keyword argument {name!r}")
        self._flat = FlatVector.of(arrays, names)
        self._gradient = FlatVector(self._flat.layout)
        self._world, self._log_order = world, None if log_order is None else Path(log_order)
        self._part: RankPart | None = None
        self._member: Member | None = None
        self._recording: Recording | None = None  # on a server
        self.rank, self.size, self.role, self.table = 0, 1, "alone", ""
        self._over = self._epoch_open = False
        self._has_turned = False  # this rank has begun to serve in this epoch: no step counts
        self._weight = 0.0  # of the steps in this epoch
        self._repeats = False  # whether the batch is another rank's, too

    @property
    def parameters(self) -> tuple[Vector, ...]:
        """The parameters, as views in the arrays' shapes; on a server rank they are the centre."""
        return tuple(self._flat.views())

    @property
    def gradients(self) -> tuple[Vector, ...]:
        """The gradients; fill them before each `step`: `me.gradients[0][:] = ...`."""
        return tuple(self._gradient.views())

    @property
    def point(self) -> tuple[Vector, ...]:
        """The point to take the gradient at: the parameters, or a point ahead of them (EAMSGD)."""
        vector = self._running.point()
        return tuple(vector[segment.place].reshape(segment.shape) for segment in self._flat.layout.segments)

    def batches(self, batches: Iterable[_Batch]) -> Iterator[_Batch]:
        """Yield this worker's share of an epoch's batches: every p-th one.

        On a server rank this serves the epoch and yields nothing. Uneven shares are fine: no rank waits for a
        worker without batches.

        A group of k ranks takes k batches in a row for each step, one on each rank. Where fewer are left at
        the end of an epoch, the other ranks get one of these again, and their steps have no weight.

        Where progress ends an epoch (see `Steady`), `batches` are iterated again until it is made, each time
        with another worker's share; an iterator is not.
        """
        self._end_open_epoch()
        self._take_place()
        self._has_turned, self._epoch_open = False, True
        self._running.begin_epoch()
        self._weight, size = 0.0, math.inf
        for again in count():
            before = self._weight
            for batch in self._share(batches, again):
                if self._running.stopped or self._has_turned or self._running.progress[1] >= size:
                    break
                yield batch
            # Each worker has about as much in a pass.
            size = min(size, self._weight * (1 if self._member is None else self._member.workers))
            over = not self._counts_progress or self._running.stopped or self._running.progress[1] >= size
            if over or self._has_turned or self._weight == before or isinstance(batches, Iterator):
                break
        self._repeats = False
        self._end_open_epoch()

    @property
    def _counts_progress(self) -> bool:
        member = self._member
        if member is None or member.worker is None:
            return False
        return self.algorithm.counts_progress(member.workers * member.group_size)

    def _share(self, batches: Iterable[_Batch], again: int) -> Iterable[_Batch]:
        """Return the batches of this rank in a pass."""
        member = self._member
        if member is None:
            return batches
        if member.worker is None:
            return ()
        first = (member.worker + again) % member.workers
        rounds = _in_groups(batches, member.group_size)
        return map(self._mine, islice(rounds, first, None, member.workers))

    def _mine(self, batches: tuple[_Batch, ...]) -> _Batch:
        """Return this rank's batch of those of its group."""
        group = None if self._member is None else self._member.group
        index = 0 if group is None else group.index
        self._repeats = index >= len(batches)
        return batches[-1 if self._repeats else index]

    def step(self, weight: float = 1.0) -> None:
        """Make one step with the gradient in `gradients`.

        Args:
            weight: this step's share in a mean over workers, e.g. the number of samples.
        """
        if self._has_turned:
            return
        weight = 0.0 if self._repeats else weight
        running, group = self._running, None if self._member is None else self._member.group
        if group is not None:
            group.mean(self._gradient.vector, weight)
        running.step(weight)
        self._weight += weight if group is None else group.weight
        if isinstance(self._part, SpareRank):  # since this step
            self._end_open_epoch()

    @property
    def stopped(self) -> bool:
        """Whether training ends now; `batches` then yields nothing more."""
        return self._running.stopped

    def stop(self) -> None:
        """End the training on all ranks, each at its next exchange.

        Call it on every rank, as in `if accuracy > 0.9: me.stop()`. Only the call on the rank whose
        parameters are the centre counts.
        """
        self._running.stop()

    def say(self, text: str) -> None:
        """Print `text` on one rank only, the one whose parameters are the centre."""
        if self._part is not None:
            say(self.role, text)

    def report(self) -> TrainingReport:
        """Return this rank's report so far; also after the `with` block."""
        return self._running.report() if self._part is None else self._part.report()

    def __enter__(self) -> Self:
        # On every rank, so that all raise the same errors, even where the optimizer is not needed.
        plain = self.algorithm.alone(self.optimizer)
        if self.optimizer is not None and self.algorithm.optimizer_runs == "nowhere":
            raise ConfigurationError(
                f"{type(self.algorithm).__name__} steps by itself and would ignore "
                f"optimizer={self.optimizer!r}; leave it out"
            )
        world = self._world or launched()
        if world is None or world.size == 1:
            self._part = Alone(self._flat, self._gradient, self._fitted(plain))
        else:
            self.rank, self.size = world.rank, world.size
            self._member = join(world, self._plan(plain))
            self._part, self.role, self.table = self._member.part, self._member.role, self._member.table
            if isinstance(self._part, SpareRank | HeirRank | GroupTrainer):
                self._part.on_taking_over.append(self._take_over)
            if isinstance(self._part, ServerRank):
                self._part.spare_calls.allowed = True
            server = None if isinstance(self._part, SpareRank) else self._member.server
            if self._log_order is not None and server is not None:
                self._recording = Recording(self._log_order, server)
        self._over = self._epoch_open = False
        self._part.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error, do not leave: the others would take it for a normal end. The end of this process
        # aborts the job, even if the error is caught further up.
        if kind is None:
            self._end_open_epoch()
            self._running.finish()
            if self._member is not None:
                self._member.disengage()
            if self._recording is not None:
                self._recording.write()
        self._over = True

    def _take_over(self) -> None:
        if isinstance(self._part, HeirRank) and self._part.serving is not None and self._member is not None:
            self._part = self._part.serving
            self._member = replace(self._member, part=self._part, server=self._part.server, worker=None)
            self._has_turned = True
        assert isinstance(self._part, SpareRank | GroupTrainer)  # no other takes over
        self.role = self._part.role

    def _take_place(self) -> None:
        """Train from now on in the place of a dead worker, if this rank is a spare that the server calls."""
        trains = self._part.take_place() if isinstance(self._part, SpareRank) else None
        if trains is not None and self._member is not None:
            self._part, self.role = trains, trains.role
            self._member = replace(self._member, part=trains, server=None, worker=trains.index)
            trains.start()

    def _end_open_epoch(self) -> None:
        """End the open epoch; after a `break` it stays open until the next one begins."""
        running, is_open, self._epoch_open = self._running, self._epoch_open, False
        if is_open:
            running.end_epoch()

    @property
    def _running(self) -> RankPart:
        if self._part is None or self._over:
            raise ConfigurationError(
                "this Participant is used outside its `with` block; move the call inside"
            )
        return self._part

    def _fitted(self, optimizer: VectorOptimizer, place: slice | None = None) -> VectorOptimizer:
        layout = self._flat.layout
        return fitted(optimizer, layout, slice(0, layout.size) if place is None else place)

    def _plan(self, plain: VectorOptimizer) -> TrainingPlan:
        given, runs = self.optimizer, self.algorithm.optimizer_runs

        def at_center(place: slice) -> VectorOptimizer | None:
            return self._fitted(given, place) if runs == "center" and given is not None else None

        return TrainingPlan(
            algorithm=self.algorithm,
            parameters=self._flat,
            gradient=self._gradient,
            ranks=self._ranks,
            center_optimizer=at_center,
            local_optimizer=self._fitted(plain) if runs == "worker" else None,
            alone_optimizer=None if self._ranks.servers else self._fitted(plain),
            record=self._log_order is not None,
        )


def _in_groups(batches: Iterable[_Batch], size: int) -> Iterator[tuple[_Batch, ...]]:
    """Yield the batches, as many as a group has ranks at a time, or those that are left."""
    source = iter(batches)
    while group := tuple(islice(source, size)):
        yield group


def _check_arguments(algorithm: object, optimizer: object) -> None:
    if not isinstance(algorithm, Algorithm):
        raise ConfigurationError(f"algorithm={algorithm!r} is not an Algorithm; pass one, e.g. Downpour()")
    if optimizer is not None and not isinstance(optimizer, VectorOptimizer):
        raise ConfigurationError(
            f"optimizer={optimizer!r} is not an optimizer of nnlo_common; pass one, e.g. SGD(0.1)"
        )
