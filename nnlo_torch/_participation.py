"""Participation of a wrapper besides stepping: one rank's part in a training, with a view of the centre."""

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
from nnlo_torch._modules import modules_of
from nnlo_torch._step_weights import Draws, StepWeights

__all__ = ["Participation"]

_Batch = TypeVar("_Batch")
_Result = TypeVar("_Result")


class Participation:
    """One rank's part in a training, as the script sees it; alone it is all of the training.

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

    def _begin_participation(self) -> None:
        """Begin alone."""
        self._team = self._model = self._found = self._watch = None
        self._stopped = self._agreed = self._looping = self._evaluating = False
        self._steps = self._samples = self._samplers = self._epochs_begun = 0
        self._aside: list[Future[Any]] = []
        self._step_weights = StepWeights()

    @property
    def serves(self) -> bool:
        """Whether this rank serves the centre instead of training."""
        return self._team is not None and self._team.serves

    @property
    def share(self) -> tuple[int, int]:
        """Which of how many workers this rank is; a server is none of them."""
        return (0, 1) if self._team is None else self._team.share

    def epoch(self, batches: Iterable[_Batch]) -> Iterator[_Batch]:
        """Loop over this worker's batches of an epoch; a server serves the epoch and gets none.

        For loaders that have no `ShardSampler`: of an `IterableDataset` with processes of its own, or of
        anything that can be looped over.

        Args:
            batches: what this worker takes; see `ShardIterable`.
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
        """Begin an epoch: on a server rank serve it to its end; samplers call this."""
        if self._looping:
            return  # `epoch` has begun it
        if self._evaluating and self._team is not None:
            error = ConfigurationError(
                "an epoch was begun inside evaluate(), by the loader that it loops over; give that one "
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
                self._opt_called = True  # so a scheduler sees that steps were made, though not by `step`

    def draws(self) -> Draws:
        """Begin a run of a sampler, for `take`; samplers call this in their first `next`."""
        return self._step_weights.draws()

    def take(self, samples: int, draws: Draws | None = None) -> None:
        """Count samples that this rank has taken; samplers call this.

        Args:
            samples: how many.
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
        """Let the model have the centre's parameters and buffers for the length of a `with` block.

        On a server rank, and alone, it has them anyway.
        """
        if self._team is None:
            yield
            return
        with self._team.center(when_all_are_there=False):
            yield

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Let the model be the centre at the end of this epoch, in `eval()` mode and without gradients.

        All ranks call it after the same epoch (it waits until all workers have finished that) and see the
        same parameters, while nobody trains. See `evaluate`.
        """
        with evaluating(self._modules()):
            if self._team is None:
                yield
                return
            with self._team.center(when_all_are_there=True):
                self._evaluating = True
                try:
                    yield
                finally:
                    self._evaluating = False

    def evaluate(
        self, measure: Callable[[_Batch], Mapping[str, Any]], batches: Iterable[_Batch]
    ) -> dict[str, float]:
        """Evaluate the centre at the end of an epoch on all ranks together; each returns the same numbers.

        Every rank looks at its share of the samples, and the means over all samples are exact: a batch counts
        by its samples, whatever their number.

        Args:
            measure: returns the means over one batch, by name.
            batches: this rank's; a loader with a `ShardSampler(..., evaluation=True)` has each sample once.

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
        """Return the weighted means of numbers over all ranks, on all ranks; every rank has to call it.

        Args:
            values: this rank's, by name; the same names everywhere.
            weight: how much they count, e.g. the number of samples they are means of.
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
        """Validate a copy of the centre while the training goes on.

        On the rank whose model is the centre this copies the model as it is now and starts `validate(copy)`
        in a thread, which runs while the next epoch is served; alone it validates at once. Other ranks do
        nothing. An error is raised when the next epoch begins.

        Args:
            validate: called with the copy, in `eval()` mode.
            model: the model.
            then: called with the result, in that thread; it may call `stop()`.

        Returns:
            The result that is to come; None where nothing is done.
        """
        if not speaks(self.role):
            return None
        future = start(validate, model, then, wait=self._team is None)
        self._aside.append(future)
        self._collect_aside(wait=False)
        return future

    def number_sampler(self) -> int:
        """Return the number of one more sampler; the same on all ranks where all use theirs in one order."""
        self._samplers += 1
        return self._samplers

    def ask(self, query: Query[AnswerT]) -> AnswerT:
        """Ask the first server something; samplers do."""
        assert self._team is not None  # nobody asks where there is nobody else
        return self._team.ask(query)

    def before_epoch_ends(self, call: Callable[[], object]) -> None:
        """Have `call` called each time this rank ends an epoch; samplers do."""
        if self._team is not None:
            self._team.before_epoch_ends = call

    def watch(self, call: Callable[[], object], every_s: float = 1.0) -> None:
        """Call something from time to time: where this rank serves, while it does; alone, between steps."""
        if self._team is None:
            self._watch = Periodic(call, every_s)
        else:
            self._team.watch(call, every_s)

    @property
    def due(self) -> bool:
        """Whether the next step exchanges with other ranks."""
        return self._team is not None and self._team.due

    def observe(self, see: See) -> None:
        """Have `see` told of everything that this rank does with others from now on; `Timeline` does."""
        if self._team is not None:
            self._team.observe(see)

    def report(self) -> TrainingReport:
        """Return what this rank has seen so far."""
        if self._team is None:
            return TrainingReport(steps=self._steps, samples=self._samples)
        return self._team.report()

    @property
    def stopped(self) -> bool:
        """Whether training is to end now; samplers yield nothing any more then."""
        return self._stopped or (self._team is not None and self._team.stopped)

    def stop(self) -> None:
        """End the training on all ranks, each at its next exchange.

        Call it on every rank, as in `if accuracy > 0.9: optimizer.stop()`. After `evaluate` all ranks know
        the same numbers, so each stops at once. Else the rank whose model is the centre decides, and calls on
        the others do nothing.
        """
        if self._team is None or self._agreed:
            self._stopped = True
        if self._team is not None:
            self._team.stop()

    def say(self, text: str) -> None:
        """Print `text` once: on the rank whose model is the centre."""
        say(self.role, text)

    def save(self, what: object, path: str | Path) -> None:
        """Save something with `torch.save`, once: on the rank whose model is the centre; whole or not at all.

        Args:
            what: e.g. `{"model": model.state_dict(), "optimizer": optimizer.state_dict()}`.
            path: of the file.
        """
        if speaks(self.role):
            with whole(Path(path)) as fresh:
                torch.save(what, fresh)

    def close(self) -> None:
        """Leave in good order; a server serves until all workers have. The end of the script does it too."""
        self._collect_aside(wait=True)
        if self._team is None or self._team.over or self._team.broken:
            return
        self._team.close()
        self._forget_end()

    # -- inside ---------------------------------------------------------------------------------------

    def _modules(self) -> list[torch.nn.Module]:
        """The modules that hold the parameters; looked for once, which takes a tenth of a second."""
        if self._model is not None:
            return [self._model]
        if self._found is None:
            self._found = modules_of(tensor for group in self.param_groups for tensor in group["params"])
        return self._found

    def _collect_aside(self, *, wait: bool) -> None:
        for future in list(self._aside):
            if wait or future.done():
                self._aside.remove(future)
                future.result()
