"""Participation of a rank in a training: epochs, evaluation, means, stopping and leaving."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from nnlo_common import ConfigurationError, TrainingReport
from nnlo_common.plugin import AnswerT, Periodic, Query, See, Session, say, speaks, whole
from nnlo_torch._background import start
from nnlo_torch._evaluation import Sums, evaluating, samples_in
from nnlo_torch._flat_model import FlatModel
from nnlo_torch._modules import modules_of
from nnlo_torch._step_weights import Draws, StepWeights

__all__ = ["AveragedWeights", "Participation"]

_Batch = TypeVar("_Batch")
_Result = TypeVar("_Result")


class AveragedWeights(torch.nn.Module):
    """A second model that only the server moves."""

    def bring(self, team: Session) -> None:
        """Give all ranks the server's (collective)."""
        raise NotImplementedError


class Participation:
    """One rank's part in a training, as the script sees it; in a process alone, the whole training.

    Attributes:
        role: "alone", "worker 0", "server 0", ...
    """

    role: str
    param_groups: list[dict[str, Any]]
    _opt_called: bool
    _team: Session | None
    _model: torch.nn.Module | None
    _found: list[torch.nn.Module] | None
    _watch: Periodic | None
    _forget_end: Callable[[], None]

    _flat_model: FlatModel | None

    def _begin_participation(self) -> None:
        """Begin as a process alone."""
        self._team = self._model = self._found = self._watch = None
        self._stopped = self._agreed = self._looping = self._evaluating = False
        self._steps = self._samples = self._samplers = self._epochs_begun = 0
        self._aside: list[Future[Any]] = []
        self._after_commit: list[Callable[[], object]] = []
        self._after_serving: list[Callable[[], object]] = []
        self._averages: list[AveragedWeights] = []
        self._step_weights = StepWeights()

    @property
    def serves(self) -> bool:
        """Whether this rank serves the centre instead of training."""
        return self._team is not None and self._team.serves

    @property
    def share(self) -> tuple[int, int]:
        """This worker's number and the number of workers; on a server the first is negative."""
        return (0, 1) if self._team is None else self._team.share

    def epoch(self, batches: Iterable[_Batch]) -> Iterator[_Batch]:
        """Loop over this worker's batches of an epoch; a server serves the epoch and gets none.

        Use it for loaders without a `ShardSampler`: an `IterableDataset` with worker processes, or any other
        iterable.

        Args:
            batches: this worker's batches; see `ShardIterable`.
        """
        self.begin_epoch()
        if self.serves:
            return
        self._looping = True
        try:
            for batch in batches:
                if self.stopped:
                    break
                self._count(samples_in(batch))
                yield batch
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
        self._epochs_begun += 1
        self._collect_aside(wait=False)
        if self._team is not None:
            self._team.begin_epoch()
            if self.serves:
                self._opt_called = True  # keeps schedulers from warning that `step` was never called
                self._run(self._after_serving)

    def draws(self) -> Draws:
        """Begin a sampler's run, for `take`; samplers call this in their first `next`."""
        return self._step_weights.draws()

    def take(self, samples: int, draws: Draws | None = None) -> None:
        """Count samples that this rank has taken; samplers call this.

        Args:
            samples: their number.
            draws: the sampler's run, if a loader may draw ahead of the loop.
        """
        if not self._looping:
            self._count(samples, draws)

    def _count(self, samples: int, draws: Draws | None = None) -> None:
        self._samples += samples
        if self._team is not None:
            self._team.take(samples)
            (self._step_weights if draws is None else draws).add(samples)

    @contextmanager
    def center_weights(self) -> Iterator[None]:
        """Give the model the centre's parameters and buffers within a `with` block.

        On a server rank, and in a process alone, the model has them anyway.
        """
        if self._team is None:
            yield
            return
        with self._team.center(when_all_are_there=False):
            yield

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Give the model the centre at the end of this epoch, in `eval()` mode and without gradients.

        Call it on all ranks after the same epoch: it waits until all workers have finished that epoch. All
        ranks see the same parameters, and no rank trains meanwhile. See `evaluate`.
        """
        with evaluating([*self._modules(), *self._averages]):
            if self._team is None:
                yield
                return
            with self._team.center(when_all_are_there=True):
                for one in self._averages:
                    one.bring(self._team)
                self._evaluating = True
                try:
                    yield
                finally:
                    self._evaluating = False

    def evaluate(
        self, measure: Callable[[_Batch], Mapping[str, Any]], batches: Iterable[_Batch]
    ) -> dict[str, float]:
        """Evaluate the centre at the end of an epoch on all ranks together; each returns the same numbers.

        Each rank measures its share of the samples. The means over all samples are exact: each batch is
        weighted by its number of samples.

        Args:
            measure: returns the means over one batch, by name.
            batches: this rank's batches; `ShardSampler(..., evaluation=True)` yields each sample once.

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
        sums = Sums()
        with self.evaluation():
            for batch in batches:
                sums.add(batch, measure(batch))
        return self.mean(sums.means(), sums.samples)

    def mean(self, values: Mapping[str, Any], weight: float = 1.0) -> dict[str, float]:
        """Return weighted means over all ranks; every rank must call it.

        Args:
            values: this rank's numbers, by name; the same names on all ranks.
            weight: this rank's weight, e.g. the number of samples behind its numbers.
        """
        numbers = {name: float(value) for name, value in values.items()}
        self._agreed = True
        if self._team is None:
            return numbers
        means = self._team.mean(numbers, float(weight))
        return {name: means[name] for name in [*numbers, *(name for name in means if name not in numbers)]}

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
        if not speaks(self.role):
            return None
        future = start(validate, model, then, wait=self._team is None)
        self._aside.append(future)
        self._collect_aside(wait=False)
        return future

    def number_sampler(self) -> int:
        """Return the next sampler number; equal on all ranks if all use their samplers in the same order."""
        self._samplers += 1
        return self._samplers

    def ask(self, query: Query[AnswerT]) -> AnswerT:
        """Send a query to the first server; samplers call this."""
        assert self._team is not None  # a process alone has no server to query
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
            ConfigurationError: there are several servers, so that no rank has the whole centre.

        Example:
            >>> import nnlo_torch
            >>> critic = torch.nn.Linear(1, 1)
            >>> optimizer = nnlo_torch.Downpour(torch.optim.RMSprop(critic.parameters(), lr=5e-5))
            >>> def clip():
            ...     for weight in critic.parameters():
            ...         weight.clamp_(-0.01, 0.01)
            >>> optimizer.after_commit(clip)
        """
        if self._team is not None and self._team.member.servers > 1:
            raise ConfigurationError(
                f"after_commit() needs the whole centre on one rank, but servers={self._team.member.servers} "
                "share it; use servers=1"
            )
        self._after_commit.append(call)
        if self._team is not None and self._team.member.server is not None:
            self._team.member.server.after_commit = self._committed

    def _committed(self) -> None:
        """Run what a script does after a step, with the centre in the model."""
        if self._flat_model is None:
            self._run(self._after_commit)
            return
        self._flat_model.publish()
        self._run(self._after_commit)
        self._flat_model.absorb_changes()

    def watch(self, call: Callable[[], object], every_s: float = 1.0) -> None:
        """Call `call` periodically: on a server while it serves, in a process alone between steps."""
        if self._team is None:
            self._watch = Periodic(call, every_s)
        else:
            self._team.watch(call, every_s)

    @property
    def due(self) -> bool:
        """Whether the next step exchanges with other ranks."""
        return self._team is not None and self._team.due

    def observe(self, see: See) -> None:
        """Pass each later operation with other ranks to `see`; `Timeline` uses this."""
        if self._team is not None:
            self._team.observe(see)

    def report(self) -> TrainingReport:
        """Return this rank's counts so far."""
        if self._team is None:
            return TrainingReport(steps=self._steps, samples=self._samples)
        return self._team.report()

    @property
    def stopped(self) -> bool:
        """Whether the training is to end now; if so, samplers yield nothing more."""
        return self._stopped or (self._team is not None and self._team.stopped)

    def stop(self) -> None:
        """End the training on all ranks, each at its next exchange.

        Call it on every rank, as in `if accuracy > 0.9: optimizer.stop()`. After `evaluate` all ranks have
        the same numbers, so each stops at once. Otherwise the rank whose model is the centre decides, and
        calls on the others do nothing.
        """
        if self._team is None or self._agreed:
            self._stopped = True
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
            with whole(Path(path)) as fresh:
                torch.save(what, fresh)

    def close(self) -> None:
        """Leave the training; a server serves until all workers have left. Runs at script exit, too."""
        self._collect_aside(wait=True)
        if self._team is None or self._team.over or self._team.broken:
            return
        self._team.close()
        self._forget_end()
        if self.serves:
            self._run(self._after_serving)

    # -- inside ---------------------------------------------------------------------------------------

    def _modules(self) -> list[torch.nn.Module]:
        """Return the modules that hold the parameters; searched once, in about 0.1 s."""
        if self._model is not None:
            return [self._model]
        if self._found is None:
            self._found = modules_of(tensor for group in self.param_groups for tensor in group["params"])
        return self._found

    def _run(self, calls: Iterable[Callable[[], object]]) -> None:
        with torch.no_grad():
            for call in calls:
                call()

    def _collect_aside(self, *, wait: bool) -> None:
        for future in list(self._aside):
            if wait or future.done():
                self._aside.remove(future)
                future.result()
