"""Participation of a rank in a training: epochs, evaluation, means, stopping and leaving."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from nnlo_common import ConfigurationError, TrainingReport
from nnlo_common.plugin import (
    MOST_PASSES,
    AnswerT,
    Periodic,
    Query,
    Session,
    function_given,
    has_center,
    say,
    span,
    speaks,
    warn,
    whole_file,
)
from nnlo_torch._background import start
from nnlo_torch._evaluation import Sums, counted, evaluating, numbers_of, weight_of
from nnlo_torch._flat_model import FlatModel, modules_of
from nnlo_torch._given_data import read, warn_of_same_data
from nnlo_torch._joint import AveragedWeights, JointTraining, collective
from nnlo_torch._schedules import steps_of_one_process
from nnlo_torch._step_weights import Draws, StepWeights

__all__ = ["Participation", "leave_with_center"]

_Batch = TypeVar("_Batch")
_Result = TypeVar("_Result")
_Value = TypeVar("_Value")


class Shared(Generic[_Value]):
    """An attribute that all wrappers of a training have in common."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name.lstrip("_")

    def __get__(self, one: Any, owner: type | None = None) -> _Value:
        value: _Value = getattr(one._joint, self._name)
        return value

    def __set__(self, one: Any, value: _Value) -> None:
        setattr(one._joint, self._name, value)


class Participation:
    """One rank's part in a training, as the script sees it; in a process alone, the whole training.

    It is one class because a script has one optimizer in its hands, which answers all that may be asked of a
    training; what several of them share is in `JointTraining`.

    Attributes:
        rank: this rank's number.
        size: the number of ranks.
        role: "alone", "worker 0", "server 0", ...
    """

    rank: int
    size: int
    role: str
    param_groups: list[dict[str, Any]]
    _opt_called: bool
    _model: torch.nn.Module | None
    _joint: JointTraining

    _team = Shared[Session | None]()
    _flat_model = Shared[FlatModel | None]()
    _stopping = Shared[bool]()
    _agreed = Shared[bool]()
    _looping = Shared[bool]()
    _evaluating = Shared[bool]()
    _steps = Shared[int]()
    _samples = Shared[int]()
    _samplers = Shared[int]()
    _epochs_begun = Shared[int]()
    _asides = Shared[list[Future[Any]]]()
    _after_serving = Shared[list[Callable[[], object]]]()
    _averages = Shared[list[AveragedWeights]]()
    _step_weights = Shared[StepWeights]()

    def _begin_participation(self) -> None:
        """Begin as a process alone."""
        self._joint = JointTraining()
        self._model = None
        self._after_commit: list[Callable[[], object]] = []
        self._repeats = False  # whether the batch to be counted is one that another rank has, too

    @property
    def serves(self) -> bool:
        """Whether this rank serves the centre instead of training."""
        team = self._joint.team
        return team is not None and team.serves

    @property
    def share(self) -> tuple[int, int]:
        """This rank's number among those that train, and their number; on a server the first is negative."""
        return (0, 1) if self._team is None else self._team.share

    @property
    def group_size(self) -> int:
        """The number of ranks of each worker."""
        return 1 if self._team is None else self._team.member.group_size

    @property
    def counts_progress(self) -> bool:
        """Whether an epoch ends when the progress of one epoch is made; see `Steady`."""
        return self._team is not None and self._team.counts_progress

    def passes(
        self, epoch: int, size: Callable[[], float], begin: int = 0, *, shared: bool = False
    ) -> Iterator[int]:
        """Number the passes over the samples that an epoch takes: one, or as many as its progress asks for.

        Samplers deal a pass for each number, in an order of its own, and end it early once `made`.

        Args:
            epoch: the number of the epoch.
            size: returns the number of samples in a pass, once one has ended.
            begin: passes of this epoch made before, on resuming.
            shared: workers lease from each pass, so that others may have taken all of one.
        """
        if not self.counts_progress:
            yield epoch
            return
        for again in count(begin):
            seen = self._samples
            yield epoch * MOST_PASSES + again
            # Otherwise there is nothing for this worker in any pass.
            dealt = self._samples > seen or (shared and size() > 0)
            if self.ended or self.made(size()) or not dealt:
                return

    def made(self, size: float) -> bool:
        """Whether the progress of an epoch of so many samples is made."""
        self._joint.pass_size = float(size)
        return self.counts_progress and self._team is not None and self._team.progress[1] >= size

    def ending(self, size: float) -> Callable[[], bool]:
        """Return what tells samplers, asked for each sample, whether an epoch of so many samples is over."""
        joint, team = self._joint, self._joint.team
        halted, joint.pass_size = joint.halt.is_set, float(size)
        if team is None:
            return halted
        if not self.counts_progress:
            return lambda: halted() or team.stopped or team.has_turned
        return lambda: halted() or team.stopped or team.has_turned or team.progress[1] >= size

    def epoch(
        self, batches: Iterable[_Batch], *, samples: Callable[[_Batch], int] | None = None
    ) -> Iterator[_Batch]:
        """Loop over this worker's batches of an epoch; a server serves the epoch and gets none.

        Use it for loaders without a `ShardSampler`: an `IterableDataset` with worker processes, or any other
        iterable. `optimizer.epoch(range(n))` is an epoch of n batches without a loader on each worker, as in
        reinforcement learning, where the loop makes its own data. A step weighs as many samples as its
        batches have, and a batch whose number of samples is unknown counts as one.

        Where progress ends an epoch (see `Steady`), `batches` are iterated again until the epoch's progress
        is made: that of this worker's samples in a pass, times the number of workers. An iterator and a range
        are not.

        Args:
            batches: this worker's batches; see `ShardIterable`.
            samples: returns the number of samples in a batch; None: see `evaluate`.
        """
        function_given("epoch(): samples", samples, may_miss=True)
        return self._epoch(batches, samples)

    def _epoch(
        self, batches: Iterable[_Batch], samples: Callable[[_Batch], int] | None = None, ahead: int = 0
    ) -> Iterator[_Batch]:
        """Loop as `epoch` does, for a loop that always takes so many batches ahead of its steps."""
        self.begin_epoch()
        if self.serves:
            return
        if self._team is not None and self._epochs_begun == 1:
            warn_of_same_data(self._team, batches)
        self._looping = True
        sizes = [0.0]
        try:
            for _ in self.passes(0, lambda: sizes[0]) if _can_repeat(batches) else (0,):
                held: list[int] = []  # samples of the batches that the loop has not come to
                given = 0
                for batch in read(batches):
                    if self.ended or (sizes[0] and self.made(sizes[0])):
                        break
                    found = counted(batch) if samples is None else samples(batch)
                    held.append(0 if self._repeats else 1 if found is None else found)
                    given += held[-1]
                    self._repeats = False
                    if len(held) > ahead:
                        self._count(held.pop(0))
                    yield batch
                for number in held:
                    self._count(number)
                # Each worker has about as many samples in a pass.
                sizes[0] = sizes[0] or float(given) * self.share[1]
        finally:
            self._looping = False

    def begin_epoch(self) -> None:
        """Begin an epoch; a server rank serves it to its end. Samplers call this."""
        if self._looping:
            return  # `epoch` has already begun it
        if self._evaluating and self._team is not None:
            error = ConfigurationError(
                "the loader passed to evaluate() began a training epoch; give this loader "
                "sampler=nnlo_torch.ShardSampler(dataset, evaluation=True)"
            )
            error.collective = True
            raise error
        self._agreed = False
        self._joint.trained = True
        self._notice_validation()
        self._epochs_begun += 1
        self._collect_aside(wait=False)
        if self._team is not None:
            self._team.shown.take_changes()
            self._team.begin_epoch()
            if self.serves:
                for one in self._joint.members:
                    one._opt_called = True  # keeps schedulers from warning that `step` was never called
                self._run(self._after_serving)

    @property
    def evaluating(self) -> bool:
        """Whether this rank is within `evaluation`."""
        return self._evaluating

    @property
    def looping(self) -> bool:
        """Whether `epoch` counts the samples of the batches, in place of a sampler."""
        return self._looping

    def draws(self) -> Draws:
        """Begin a sampler's run, for `take`; samplers call this in their first `next`."""
        return self._step_weights.draws()

    def take(self, samples: int, draws: Draws | None = None) -> None:
        """Count samples that this rank has taken; samplers call this.

        Args:
            samples: their number; 0: the batch repeats what another has, and its step has no weight.
            draws: the sampler's run, if a loader may draw ahead of the loop.
        """
        if self._looping:
            self._repeats = not samples
        else:
            self._count(samples, draws)

    def taking(self, draws: Draws) -> Callable[[int], object]:
        """Return `take` for the run of a sampler that takes sample by sample."""
        joint = self._joint
        if self._looping or joint.team is None:
            return lambda samples: self.take(samples, draws)

        def take(samples: int) -> None:
            joint.samples += samples
            draws.add(samples)

        return take

    def _count(self, samples: int, draws: Draws | None = None) -> None:
        if self._joint.skips:
            return
        self._samples += samples
        if draws is None and not samples:
            self._step_weights.add_empty()
        else:
            (self._step_weights if draws is None else draws).add(samples)

    @contextmanager
    def center_weights(self) -> Iterator[None]:
        """Give the model the centre's parameters and buffers within a `with` block.

        On a server rank, and in a process alone, the model has them anyway.
        """
        if self._team is None:
            yield
            return
        self._joint.trained = True
        self._team.shown.take_changes()
        with self._team.center(when_all_are_there=False):
            yield

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Give the model the centre at the end of this epoch, in `eval()` mode and without gradients.

        Call it on all ranks after the same epoch: it waits until all workers have finished that epoch. All
        ranks see the same parameters, and no rank trains meanwhile. See `evaluate`.
        """
        with span("validate"), evaluating([*self._modules(), *self._averages]):
            if self._team is None:
                yield
                return
            self._joint.trained = True
            self._team.shown.take_changes()
            with self._team.center(when_all_are_there=True):
                for one in self._averages:
                    one.bring(self._team)
                self._evaluating = True
                try:
                    yield
                finally:
                    self._evaluating = False

    def evaluate(
        self,
        measure: Callable[[_Batch], Mapping[str, Any]],
        batches: Iterable[_Batch],
        *,
        samples: Callable[[_Batch], int] | None = None,
    ) -> dict[str, float]:
        """Evaluate the centre at the end of an epoch on all ranks together; each returns the same numbers.

        Each rank measures its share of the samples. The means over all samples are exact: each batch is
        weighted by its number of samples.

        Args:
            measure: returns the means over one batch, by name.
            batches: this rank's batches; `ShardSampler(..., evaluation=True)` yields each sample once.
            samples: returns the number of samples in a batch; None: its graphs, its `batch_size`, or the
                first dimension of its first tensor.

        Returns:
            The means over all samples, by name.

        Example:
            >>> model = torch.nn.Linear(1, 1)
            >>> import nnlo_torch
            >>> optimizer = nnlo_torch.Downpour(torch.optim.SGD(model.parameters(), lr=0.1))
            >>> batches = [torch.tensor([[1.0], [2.0]]), torch.tensor([[6.0]])]
            >>> optimizer.evaluate(lambda x: {"x": x.mean()}, batches)
            {'x': 3.0}
        """
        function_given("evaluate(): measure", measure)
        function_given("evaluate(): samples", samples, may_miss=True)
        sums = Sums()
        with self.evaluation():
            for batch in batches:
                sums.add(batch, measure(batch), None if samples is None else samples(batch))
                self._run(self._joint.glances)
        return self.mean(sums.means(), sums.samples)

    def mean(self, values: Mapping[str, Any], weight: float = 1.0) -> dict[str, float]:
        """Return weighted means over all ranks; every rank must call it.

        Args:
            values: this rank's numbers, by name; the same names on all ranks.
            weight: this rank's weight, e.g. the number of samples behind its numbers. Where no rank has any,
                the means are NaN.
        """
        numbers, share = numbers_of(values), weight_of(weight)
        self._agreed = True
        if self._team is None:
            return self._joint.told(numbers if share else dict.fromkeys(numbers, math.nan))
        self._joint.trained = True
        means = self._team.mean(numbers, share)
        return self._joint.told({name: means[name] for name in dict.fromkeys([*numbers, *means])})

    def aside(
        self,
        validate: Callable[[torch.nn.Module], _Result],
        model: torch.nn.Module,
        then: Callable[[_Result], object] | None = None,
    ) -> Future[_Result] | None:
        """Validate a copy of the centre while the training continues.

        The rank whose model is the centre copies the model now and runs `validate(copy)` in a thread while it
        serves the next epoch. A process alone validates at once. Other ranks do nothing. An error in
        `validate` is raised when the next epoch begins.

        Args:
            validate: called with the copy, in `eval()` mode.
            model: the model.
            then: called with the result, in that thread; it may call `stop()`.

        Returns:
            The future result; None on ranks that do nothing.
        """
        function_given("aside(): validate", validate)
        function_given("aside(): then", then, may_miss=True)
        if not has_center(self.role):
            return None
        future = start(validate, model, then, wait=self._team is None)
        self._asides.append(future)
        self._collect_aside(wait=False)
        return future

    def number_sampler(self) -> int:
        """Return the next sampler number; equal on all ranks if all use their samplers in the same order."""
        self._samplers += 1
        return self._samplers

    def ask(self, query: Query[AnswerT]) -> AnswerT:
        """Send a query to the first server; samplers call this."""
        assert self._team is not None  # a process alone has no server to query
        self._joint.trained = True
        return self._team.ask(query)

    def before_epoch_ends(self, call: Callable[[], object]) -> None:
        """Register `call`, to be called each time this rank ends an epoch; samplers call this."""
        if self._team is not None:
            self._team.before_epoch_ends = call

    def after_commit(self, call: Callable[[], object]) -> None:
        """Call a function each time that the centre has moved, where it has moved, without gradients.

        With several ranks that is on the server, after each commit: with `Downpour`, `DynSGD`, `Synchronous`
        and `AGN` after each step of your optimizer, with the others after each exchange. `model` is the
        centre then, except for its buffers, which are those of the last epoch's end. What the function
        changes in the parameters is changed in the centre, and workers get it with their next fetch. A
        process alone calls it after each step.

        Use it for all that a plain loop does after `step()`: averages of the weights (see `EMA`), clipping.
        Call this on all ranks; the function itself runs on the server only.

        Args:
            call: the function.

        Raises:
            ConfigurationError: there are several servers, so that no rank has the whole centre, or this is no
                function.

        Example:
            >>> import nnlo_torch
            >>> critic = torch.nn.Linear(1, 1)
            >>> optimizer = nnlo_torch.Downpour(torch.optim.RMSprop(critic.parameters(), lr=5e-5))
            >>> def clip():
            ...     for weight in critic.parameters():
            ...         weight.clamp_(-0.01, 0.01)
            >>> optimizer.after_commit(clip)
        """
        function_given("after_commit(): call", call)
        member = None if self._team is None else self._team.member
        if member is not None and (member.servers > 1 or member.sub_servers):
            name = "sub_servers" if member.sub_servers else "servers"
            found = f"but {name}={getattr(member, name)} share it; use servers=1"
            raise ConfigurationError(f"after_commit() needs the whole centre on one rank, {found}")
        self._after_commit.append(call)
        self._follow_commits()

    def _follow_commits(self) -> None:
        server = None if self._team is None else self._team.member.server
        if server is not None and any(one._after_commit for one in self._joint.members):
            server.after_commit = self._committed

    def _committed(self) -> None:
        """Run what a script does after a step, with the centre in the model of a server."""
        assert self._flat_model is not None  # a process alone commits nothing
        self._flat_model.publish()
        for one in self._joint.moved:
            self._run(one._after_commit)
        self._flat_model.absorb_changes()

    def watch(self, call: Callable[[], object], every_s: float = 1.0) -> None:
        """Call `call` periodically: on a server while it serves, in a process alone between steps."""
        function_given("watch(): call", call)
        if self._team is None:
            self._joint.watches.append(Periodic(call, every_s))
        else:
            self._settle("watch()")
            self._team.watch(call, every_s)

    @property
    def due(self) -> bool:
        """Whether the next step exchanges with other ranks."""
        return self._team is not None and self._team.due

    def report(self) -> TrainingReport:
        """Return this rank's counts so far."""
        if self._team is None:
            return TrainingReport(steps=self._steps, samples=self._step_weights.received)
        return self._team.report()

    @property
    def paces(self) -> tuple[int, float, float, float]:
        """Earlier epochs, the progress of this one, the samples in an epoch and in a step; 0: unknown."""
        progress = 0 if self._team is None else self._team.progress[1]
        return self._epochs_begun - 1, progress, self._joint.pass_size, self._joint.largest_step

    def batches_made(self, batches: int) -> int:
        """Return the batches of one process that this epoch's progress is worth; else those made here.

        Args:
            batches: those that this rank has made in this epoch.
        """
        _, progress, size, batch = self.paces
        if not self.counts_progress or not size or not batch:
            return batches
        return steps_of_one_process(0, progress, size, batch)

    @property
    def stopped(self) -> bool:
        """Whether the training is to end now; if so, samplers yield nothing more."""
        return self._stopping or (self._team is not None and self._team.stopped)

    @property
    def ended(self) -> bool:
        """Whether samplers yield nothing more in this epoch: this rank has stopped, or serves since."""
        return self.stopped or (self._team is not None and self._team.has_turned)

    def stop(self) -> None:
        """End the training on all ranks, each at its next exchange.

        Call it on every rank, as in `if accuracy > 0.9: optimizer.stop()`. After `evaluate` all ranks have
        the same numbers, so each stops at once. Otherwise the rank whose model is the centre decides, and
        calls on the others do nothing.
        """
        if self._team is None or self._agreed:
            self._stopping = True
        if self._team is not None:
            self._team.stop()

    def say(self, text: str) -> None:
        """Print `text` once: on the rank whose model is the centre."""
        say(self.role, text)

    def save(self, what: object, path: str | Path) -> None:
        """Save something with `torch.save`, atomically, only on the rank whose model is the centre.

        Args:
            what: e.g. `{"model": model.state_dict(), "optimizer": optimizer.state_dict()}`.
            path: the file.
        """
        if speaks(self.role):
            with whole_file(Path(path)) as file:
                torch.save(what, file)

    def close(self) -> None:
        """Leave the training; a server serves until all workers have left. Runs at script exit, too."""
        self._collect_aside(wait=True)
        try:
            self._leave()
        finally:
            self._joint.finish()

    def _leave(self) -> None:
        if self._team is None or self._team.over or self._team.broken:
            return
        self._joint.trained = True
        self._team.shown.take_changes()
        self._team.close()
        if self.serves:
            self._run(self._after_serving)
        if self._team.member.server is not None:
            self._team.member.server.after_commit = None
        self._joint.forget_end()
        self._joint.release()

    # -- inside ---------------------------------------------------------------------------------------

    def _modules(self) -> list[torch.nn.Module]:
        """Return the modules that hold the parameters; searched once, in about 0.1 s."""
        joint = self._joint
        if joint.found is None:
            members: Sequence[Participation] = joint.members or [self]
            found = [one._model for one in members if one._model is not None]
            rest = [one for one in members if one._model is None]
            if rest:
                found += modules_of(
                    tensor for one in rest for group in one.param_groups for tensor in group["params"]
                )
            joint.found = list({id(module): module for module in found}.values())
        return joint.found

    def _notice_validation(self) -> None:
        """Warn of a validation loop over a training sampler: it begins an epoch, which trains nothing."""
        joint = self._joint
        if self._team is None:
            return
        steps, samples = self.report().steps, self._samples
        # A worker that had batches but made no step, with its whole model in `eval()` mode.
        idle = joint.all_evaluating and samples > joint.seen[1] and steps == joint.seen[0]
        joint.all_evaluating = not any(part.training for part in self._modules())
        joint.seen = (steps, samples)
        if (idle and self.share[0] == 0) or (not torch.is_grad_enabled() and speaks(self.role)):
            warn(
                "a training epoch was begun by a validation loop (in eval() mode or under torch.no_grad(), "
                "without a step): each worker sees only its part of the data there, a server nothing. "
                "Give that loader sampler=nnlo_torch.ShardSampler(dataset, evaluation=True), and evaluate "
                "with scores = optimizer.evaluate(lambda batch: {...}, loader)"
            )

    def _settle(self, what: str) -> None:
        """Let no other wrapper join this training any more: `what` relies on it as it is."""
        self._joint.settled = self._joint.settled or what

    def in_epoch(self) -> bool:
        """Return whether a loop over this worker's batches is under way."""
        return self._looping or self._step_weights.receiving

    def _end_for_another(self) -> None:
        """End this training because a wrapper of another one was made; all ranks get the final centre."""
        if self.in_epoch():
            raise collective(
                "a wrapper was made within the loop over the batches of another; a training is open on this "
                "rank already: make all its wrappers before its first epoch, or call optimizer.close() after "
                "its last"
            )
        if self._team is not None and not self.serves:
            self._team.end_epoch()
        leave_with_center(self)

    def _run(self, calls: Iterable[Callable[[], object]]) -> None:
        with torch.no_grad():
            for call in calls:
                call()

    def _collect_aside(self, *, wait: bool) -> None:
        for future in list(self._asides):
            if wait or future.done():
                self._asides.remove(future)
                future.result()


def _can_repeat(batches: Iterable[Any]) -> bool:
    """Whether a loop over these batches is a pass over data: an iterator ends, and a range is no data."""
    return not isinstance(batches, Iterator | range)


def leave_with_center(part: Participation) -> None:
    """Leave the training; afterwards the model of every rank is the centre (collective)."""
    team = part._team
    if team is not None and not team.over:
        team.shown.take_changes()
        team.last_round()
        if part.serves:
            team.settle_center(lambda: None)
        else:
            team.take_over_center()
    part.close()
