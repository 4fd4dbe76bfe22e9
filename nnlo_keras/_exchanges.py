"""Exchanges of a worker with the centre, between the batches of its `fit`.

They are kept out of the training step because a compiled step cannot do input and output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from nnlo_common import ConfigurationError
from nnlo_common.plugin import GradientsAhead, NoteQuery, Session, Vector
from nnlo_keras._callbacks._rank_callback import numbers
from nnlo_keras._compat import data_of_fit, samples_counted, synchronise
from nnlo_keras._weights import Weights
from nnlo_keras._wrapper import StepMode, Wrapper, wrapper_of

__all__ = ["BatchSizes", "Exchanges", "Passes", "Rates"]

# -- learning rates that a callback has set on the server, sent to the workers -------------------------


class Rates:
    """Sends workers the learning rate that a callback on the server has set by its metrics.

    Rates set at the beginning of an epoch or batch are set by every rank itself. So the server sends only
    changes made between the last batch of an epoch and the next epoch.

    Args:
        model: the model; callbacks set the rate of `model.optimizer`, if that is wrapped.
        team: this rank's session.
    """

    def __init__(self, model: Any, team: Session) -> None:
        self._model, self._team = model, team
        self._rate = 0.0  # last rate sent or received; 0: none
        self._before: float | None = None  # the rate before callbacks saw an epoch's metrics
        self._decided = False  # whether a callback has changed it since

    def see_batch(self) -> None:
        """On a server: record the rate before callbacks see an epoch's metrics."""
        self._before = self._set

    def see_epoch(self) -> None:
        """On a server: check whether a callback has changed the rate."""
        self._decided = self._set != self._before

    def send(self) -> None:
        """On a server: send the rate if a callback has changed it."""
        rate = self._set or 0.0
        if rate != self._rate:
            self._rate = rate if self._decided else 0.0
            self._team.tell_rate(self._rate)

    def receive(self) -> None:
        """On a worker: set the rate that the server has sent, once; callbacks here may change it again."""
        if self._team.told_rate == self._rate:
            return
        self._rate, wrapper = self._team.told_rate, wrapper_of(self._model.optimizer)
        if self._rate and wrapper is not None:
            # A rate set through the wrapper is sent to the server. Bypass the wrapper, so as not to send the
            # server's own rate back, unless a callback here has sent another meanwhile.
            optimizer = wrapper.inner_optimizer if wrapper.rate_set is None else wrapper
            optimizer.learning_rate = self._rate

    def take_over(self) -> None:
        """On a worker that serves from now on: go on with the rate that the dead server has sent."""
        self._rate, wrapper = self._team.told_rate, wrapper_of(self._model.optimizer)
        if self._rate and wrapper is not None:
            wrapper.learning_rate = self._rate

    @property
    def _set(self) -> float | None:
        """The rate that a callback has set on this rank."""
        wrapper = wrapper_of(self._model.optimizer)
        return None if wrapper is None else wrapper.rate_set


# -- numbers of batches and samples that `fit` has trained on, as far as Keras exposes them ------------


class BatchSizes:
    """Counts the batches and the samples of each execution of a `fit`.

    Keras numbers batches as if each execution were full, and does not pass batch sizes to callbacks.

    Args:
        batches: `fit`'s epoch iterator; None if it was not found.
        model: the model.
        steps_matter: whether `model.optimizer` counts each batch as a step.
    """

    def __init__(self, batches: Any, model: Any, *, steps_matter: bool) -> None:
        self._fit, self._model, self._steps_matter = batches, model, steps_matter
        self._adapter = getattr(batches, "data_adapter", None)
        self._seen, self._steps = 0, 0.0  # samples and steps of this epoch, if Keras has to be queried
        self._again = 0  # batches at the end of each pass over the data that are in it already

    @classmethod
    def of(cls, model: Any, *, steps_matter: bool) -> BatchSizes:
        """Make it for the running `fit`, found on the call stack."""
        return cls(data_of_fit(), model, steps_matter=steps_matter)

    @property
    def per_execution(self) -> int:
        """Number of batches in a full execution."""
        return int(getattr(self._fit, "steps_per_execution", None) or 1)

    def begin_epoch(self, *, again: int = 0) -> None:
        """Start counting an epoch.

        Args:
            again: so many batches of each pass over the data follow at its end once more.
        """
        self._seen, self._steps, self._again = 0, self._steps_made(), again

    def batches(self, first: int, last: int) -> int:
        """Return the real number of batches of an execution that Keras numbers from `first` to `last`."""
        if last == first:
            return 1
        number = getattr(self._fit, "num_batches", None)
        if number:
            return max(0, min(last + 1, number) - first)
        if self._steps_matter:  # the last execution of an epoch of unknown length
            before, self._steps = self._steps, self._steps_made()
            return min(last + 1 - first, int(self._steps - before))
        return last + 1 - first

    def samples(self, first: int, count: int) -> float:
        """Return the number of samples in these batches, or `count` if Keras exposes no sizes."""
        size = getattr(self._adapter, "batch_size", None)
        number = getattr(self._adapter, "num_batches", None)
        if size and number and not getattr(self._fit, "steps_per_epoch", None):
            first %= number + self._again  # of this pass
            partial = getattr(self._adapter, "partial_batch_size", None) or size
            return float(size * count + (partial - size if first < number <= first + count else 0))
        synchronise(self._model)
        before, self._seen = self._seen, samples_counted(self._model)
        return float(self._seen - before if self._seen > before else count)

    def _steps_made(self) -> float:
        if not self._steps_matter or self.per_execution == 1:
            return 0.0
        synchronise(self._model)
        return float(keras.ops.convert_to_numpy(self._model.optimizer.iterations))


class Passes:
    """The passes over the data that an epoch of a worker takes: one, or as many as its progress asks for.

    Attributes:
        made: those of this epoch.
        size: the number of samples in a pass of all workers; None: as soon as one is over.
        again: the batches of a pass that repeat another's.

    Args:
        team: this rank's session.
        size: see above.
        again: see above.
        about: the size as far as it is known before a pass is over; 0: it is not.
    """

    def __init__(self, team: Session, size: float | None, again: int, *, about: float = 0.0) -> None:
        self._team, self.size, self.again, self.made, self._about = team, size, again, 0, about

    def over(self) -> bool:
        """Whether the epoch is over, as far as it is known."""
        if self._team.has_turned:
            return True
        if not self._team.counts_progress:
            return self._team.stopped or self.made > 0
        return self._team.stopped or (self.size is not None and self._team.progress[1] >= self.size)

    @property
    def epoch_made(self) -> float | None:
        """The share of this epoch's progress that is made; None: unknown, or progress does not end epochs."""
        size = self.size or self._about
        if not self._team.counts_progress or not size:
            return None
        return min(1.0, self._team.progress[1] / size)

    def end(self, weight: float) -> None:
        """End a pass in which this worker has had samples of this weight: each has about as many."""
        self.made += 1
        if self.size is None:
            workers = self._team.share[1] // self._team.member.group_size
            self.size = weight * workers


class Exchanges:
    """Counts a worker's batches, and exchanges when one is due.

    Args:
        team: this rank's session.
        weights: the model's weights.
        wrappers: the wrapped optimizers; all of one kind, with the same options.
        rates: receives the learning rates that the server sends.
        sizes: the batch sizes.
        undisturbed: whether no other callback reads the weights between batches.

    Attributes:
        in_epoch: number of batches so far in this epoch.
        weight_in_epoch: the weight of these, in a group of all its ranks' too: their samples, if known.
        passes: those over the data; None: each epoch is one.
        ahead: sends gradients while they are made, if this worker is to.
    """

    def __init__(
        self,
        team: Session,
        weights: Weights,
        wrappers: Sequence[Wrapper],
        rates: Rates,
        sizes: BatchSizes,
        *,
        undisturbed: bool,
    ) -> None:
        self._team, self._weights, self._wrappers, self._rates = team, weights, wrappers, rates
        self._sizes = sizes
        self._sums = wrappers[0].mode is StepMode.ACCUMULATE
        self._frozen_here = self._sums and not wrappers[0].moves_locally  # only exchanges change weights
        self._attaches = undisturbed and self._frozen_here
        self._steps_here = wrappers[0].algorithm.local_optimizer() is not None
        self._exchange_first = team.algorithm.exchanges_first()
        if self._steps_here and sizes.per_execution > 1:
            raise ConfigurationError(
                f"{type(wrappers[0]).__name__} needs the gradient of each batch, but compile() was given "
                f"steps_per_execution={sizes.per_execution}; leave steps_per_execution out"
            )
        overlaps = wrappers[0].ranks.overlap and not team.serves
        self.ahead = GradientsAhead(team, weights.leaving()) if overlaps else None
        self.in_epoch = 0
        self.passes: Passes | None = None
        self._repeats = (
            False  # whether the batch has no weight, because another rank of the group has it, too
        )
        self.weight_in_epoch = 0.0
        self._weight = 0.0  # of the batches since the last contribution
        self._batch = -1  # the last batch of this epoch
        self._open = False  # whether an epoch is running
        self._before: Vector | None = None  # weights before an epoch's first batch
        self._begun: Vector | None = None  # weights before an execution, if these are exchanged

    def state(self) -> dict[str, Any]:
        """Return this worker's position in its epoch."""
        gradient = None
        if self._sums and self._team.gathered:
            self._weights.collect()
            gradient = self._weights.gradient.vector.copy()
        return {"in_epoch": self.in_epoch, "weight": self._weight, "gradient": gradient}

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume where `state` was returned; call it after the epoch has begun."""
        self.in_epoch, self._weight = state["in_epoch"], state["weight"]
        if state["gradient"] is not None:
            self._weights.resume(state["gradient"])

    def begin_epoch(self) -> None:
        """Begin an epoch together with all workers."""
        self._batch, self.in_epoch, self.weight_in_epoch, self._open = -1, 0, 0.0, True
        self._sizes.begin_epoch(again=0 if self.passes is None else self.passes.again)
        if self.passes is not None:
            self.passes.made = 0
        self._team.begin_epoch()
        if self._attaches and not self._team.serves:
            self._weights.attach()

    def end_pass(self) -> None:
        """End a pass over the data."""
        if self.passes is not None:
            self.passes.end(self.weight_in_epoch)

    def repeat(self, repeats: bool) -> None:
        """Note whether the next batch repeats one that another rank of the group has."""
        self._repeats = repeats

    def begin_batch(self) -> None:
        """Record the weights before an execution, if they are needed."""
        if self._frozen_here and self.in_epoch == 0:
            self._before = self._weights.parameters.vector.copy()
        if (
            self._exchange_first
            and not self._sums
            and self._team.worker.due_within(self._sizes.per_execution)
        ):
            self._weights.absorb()
            self._begun = self._weights.parameters.vector.copy()

    def end_batch(self, batch: int, *, idle: bool) -> None:
        """Exchange, if one is due.

        Args:
            batch: number of the last batch; with `steps_per_execution` Keras calls this once per execution.
            idle: whether the batch had no data.
        """
        if self._before is not None:
            self._refuse_changes(self._before)
        first, self._batch = self._batch + 1, batch
        done = 0 if idle else self._sizes.batches(first, batch)
        self.in_epoch += done
        if self._team.stopped or not done:
            return
        self._team.take(done)
        weight = self._sizes.samples(first, done) if self._team.algorithm.weighs else float(done)
        self._weight += weight
        self.weight_in_epoch += weight
        for _ in range(done - 1):
            self._team.pass_step()
        if self._steps_here or self._team.due:
            self._step()
        else:
            self._team.pass_step()
        if self._team.serves:  # since this step
            return
        if self._wrappers[0].algorithm.optimizer_runs == "nowhere":
            self._weights.synchronise()
            for one in self._wrappers:
                # Nothing steps the optimizer, so count this worker's batches for its schedule.
                one.inner_optimizer.iterations.assign_add(done)
        self._begun = None
        self._rates.receive()

    def end_epoch(self, epoch: int, logs: Any, *, last: bool) -> None:
        """Send the remaining gradients and the metrics; a second call does nothing.

        Args:
            epoch: its number.
            logs: the metrics.
            last: whether this is the last epoch.
        """
        if not self._open:
            return
        self._open = False
        left = self._sums and self._team.gathered > 0
        if left:
            self._weights.collect()
            self._change_gradient()
            self._team.worker.add_weight(self._taken_weight())
        values = numbers(logs) if self.in_epoch else {}  # this worker had no batches
        self._team.ask(NoteQuery(epoch=epoch, values=values, weight=self.in_epoch or 1))
        self._team.end_epoch()
        if self._team.serves:  # since this worker ends its epoch
            return
        self._weights.detach()
        if left:
            self._weights.clear()
        if last:
            self.last_round()

    def close_epoch(self) -> None:
        """Finish the epoch after all other callbacks; a single worker has nothing left to do."""

    def last_round(self) -> None:
        """Commit the training since the last round to the centre; once, together with all ranks."""
        if self._weight and not self._team.serves:
            self._team.worker.add_weight(self._taken_weight())
        self._team.last_round()

    def _refuse_changes(self, before: Vector) -> None:
        """Refuse a training step that changes weights itself: the next exchange would silently undo it.

        Checked once per epoch, which costs next to nothing.
        """
        self._before = None
        if changed := self._weights.changed_since(before):
            raise ConfigurationError(
                f"the weight {changed!r} was changed within the training step or by a callback, but with "
                "this algorithm only the server's optimizer may change it, and the next exchange would undo "
                "the change; to clip weights give the layer a kernel_constraint, or use an algorithm whose "
                "optimizer runs on workers, such as LocalSGD"
            )

    def _step(self) -> None:
        """Exchange, for all batches since the previous exchange."""
        if self.ahead is not None:
            self.ahead.settle()
        if self._sums:
            self._team.step(self._taken_weight(), self._change_gradient)
            if self._steps_here or not self._team.gathered:
                self._weights.clear()
        elif self._exchange_first:
            self._exchange_as_begun()
        else:
            self._team.step(self._taken_weight(), lambda: None)
        self._constrain()

    def _exchange_as_begun(self) -> None:
        """Exchange the weights from before the execution, then add the execution's change to the result."""
        assert self._begun is not None  # begin_batch recorded it for the due exchange
        vector = self._weights.parameters.vector
        self._weights.absorb()
        moved = vector - self._begun
        np.copyto(vector, self._begun)

        def move() -> None:
            np.add(vector, moved, out=vector)

        self._team.step(self._taken_weight(), lambda: None, move)

    def _constrain(self) -> None:
        """Apply constraints, from which an exchange may have moved the weights that a worker moves itself."""
        if not (self._frozen_here or self._team.serves) and self._weights.constrain():
            self._weights.publish()

    def _taken_weight(self) -> float:
        weight, self._weight = self._weight, 0.0
        return weight or 1.0

    def _change_gradient(self) -> None:
        for wrapper, place in zip(self._wrappers, self._weights.places, strict=True):
            if wrapper.algorithm.optimizer_runs == "nowhere":  # nothing else applies the learning rate
                self._weights.gradient.vector[place] *= np.float32(wrapper.current_rate)
