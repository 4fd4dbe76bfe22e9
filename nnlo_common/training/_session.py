"""Session: one rank's side of a training, for any framework (`_collectives` has the interface)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from nnlo_common.algorithms import Algorithm
from nnlo_common.algorithms._rule import GradientSum
from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._flat_vector import Apart, FlatVector, Vector
from nnlo_common.base._spans import span
from nnlo_common.base._state_tree import State, require
from nnlo_common.cluster._threads import advise_on_fork
from nnlo_common.cluster.transport._endpoint import RankWorld
from nnlo_common.protocol import Server
from nnlo_common.protocol._query_messages import AnswerT, LedgerQuery, Query
from nnlo_common.training._collectives import Collectives, Model, Trained, wired
from nnlo_common.training._group_worker import GroupTrainer
from nnlo_common.training._heir_rank import HeirRank
from nnlo_common.training._joining import Member, join
from nnlo_common.training._plan import TrainingPlan
from nnlo_common.training._rank_options import RankOptions
from nnlo_common.training._rank_parts import TrainingReport, speaks
from nnlo_common.training._server_rank import ServerRank
from nnlo_common.training._spare_rank import PlacedRank, SpareRank
from nnlo_common.training._worker_rank import WorkerRank

__all__ = ["Session", "ShownModel"]

# -- model of a rank, and what it shows of its vector: that of a server moves on while it serves -------


class ShownModel:
    """Copies between a model and its vector, of which only a part may be the model's own memory.

    Parameters that do not share that memory show the vector as it was when it was last published, and those
    of 16 bits hold less than it does.

    Args:
        model: the model.
        server: the state machine of the vector's shard; None on a worker.
        moved_here: the user's optimizer moves a worker's parameters, so a script may, too.
        moved_outside: the framework moves a worker's parameters by itself between steps.
    """

    def __init__(self, model: Model, server: Server | None, *, moved_here: bool, moved_outside: bool) -> None:
        self._model, self._server = model, server
        self._moved_here, self._moved_outside = moved_here, moved_outside
        self._shown = -1  # commits of the centre that a server's model shows

    def serve(self, server: Server) -> None:
        """Show the centre of this state machine from now on: this rank was a worker, and serves."""
        self._server = server

    def train(self) -> None:
        """Show this rank's own parameters from now on: it was a spare, and trains."""
        self._server = None

    def publish(self) -> None:
        """Copy the vector into the parameters."""
        self._model.publish()
        self._shown = 0 if self._server is None else self._server.rule.clock

    def take_up(self) -> None:
        """Copy the parameters into their vector if the framework moves them by itself."""
        if self._moved_outside:
            self._model.absorb()

    def take_changes(self) -> None:
        """Take over what was changed in the model, where that counts.

        On a server between epochs: while it serves, its model shows an earlier centre. On a worker where
        more than exchanges moves the parameters.
        """
        if self._server is not None:
            if self._shown == self._server.rule.clock:
                self._model.absorb_changes()
        elif self._moved_outside:
            self._model.absorb()
        elif self._moved_here:
            self._model.absorb_changes()


def _at_work(team: weakref.ref[Session], lag: int) -> Callable[[], bool]:
    """Return a check whether a background thread moves messages; False once the session is gone."""

    def look() -> bool:
        there = team()
        return there is not None and lag > 0 and not there.serves and not there.over

    return look


_COUNTS = ("samples", "samples_before", "steps_in_epoch", "epochs", "epoch_open")  # saved besides the part


class Session:
    """One rank's side of a training.

    It is one class because it is the one order of things: the model, the part in the training, the buffers
    and the options change in turn, and each method says in which. What each of them does is theirs.

    Attributes:
        rank: this rank's number.
        size: the number of ranks.
        member: this rank's membership.
        model: its model.
        shown: the same model, and what it shows of its vector.
        algorithm: how workers and centre exchange.
        world: the ranks.
        serving: its part, if it is a server.
        broken: a step has failed half-way, so the training cannot be left normally.
        over: the training is over.
        has_turned: this rank has begun to serve in an epoch that its script is still in: no step counts.
        uncounted: returns the samples taken by this rank since its last call, if `take` does not count them.
        before_epoch_ends: called when this worker ends its epoch.
        before_close: called before this rank leaves, while it may still ask.
        sends_gradients: workers send gradients; otherwise their optimizers run there.
        gradient_made: is given each gradient of this worker before it is sent.

    Args:
        algorithm: how workers and centre exchange.
        world: the ranks.
        ranks: what the user says of them.
        trained: the model, and what moves it.
        same: what else must be equal on all ranks; see `TrainingPlan`.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        world: RankWorld,
        ranks: RankOptions,
        trained: Trained,
        same: Mapping[str, Any],
    ) -> None:
        model, buffers, options = trained.model, trained.buffers, trained.options
        self.rank, self.size, self.model = world.rank, world.size, model
        self.algorithm, self.world, self._move = algorithm, world, trained.local_step
        self._runs, self._options = algorithm.optimizer_runs_at(ranks.servers), options
        ahead = ranks.servers > 0 and hasattr(algorithm.local_optimizer(), "gradient_point")
        steps_center = algorithm.optimizer_runs == "center"
        plan = TrainingPlan(
            algorithm=algorithm,
            parameters=model.parameters,
            gradient=model.gradient,
            own_parameters=FlatVector(model.parameters.layout) if ahead else None,
            given_sums=trained.given_sums,
            ranks=ranks,
            center_optimizer=trained.center_optimizer if steps_center else lambda place: None,
            buffers=None if buffers is None else buffers.flat,
            moving=() if buffers is None else buffers.layers,
            updates=None if buffers is None else buffers.moves().total,
            options=2 * len(options.read()),
            same=same,
        )
        self.member: Member = join(world, plan)
        part = self._part = self.member.part
        self.serving = part if isinstance(part, ServerRank) else None
        self._worker = part if isinstance(part, WorkerRank | GroupTrainer) else None
        # If gradients are taken ahead of the parameters, the model holds that point.
        self._own_parameters = plan.own_parameters
        self._parameters = None if self.serves else plan.own_parameters
        self._collectives = Collectives(self._part, model, buffers, speaks=lambda: speaks(self.role))
        self.broken = self.over = self.has_turned = self._leaving = False
        self.before_epoch_ends: Callable[[], object] | None = None
        self.uncounted: Callable[[], int] = lambda: 0
        self.before_close: Callable[[], object] | None = None
        self.sends_gradients = self._runs != "worker"
        self.gradient_made: Callable[[FlatVector], object] | None = None
        self._started = self._epoch_open = self._resumed_in_epoch = self._loaded = self._rounds_over = False
        self._samples = self._samples_before = self._steps_in_epoch = self._epochs = 0
        self._known_options = options.read()
        here, outside = self._runs == "worker", trained.moved_outside
        self.shown = ShownModel(model, self.member.server, moved_here=here, moved_outside=outside)
        self._final: Vector | None = None  # the final centre that a worker has taken over
        self._watched: list[tuple[Callable[[], object], float]] = []
        self.when_taking_over(self._take_over)
        if isinstance(part, WorkerRank):
            part.on_moving = self._show
        world.at_meeting(self.end_epoch)
        if world.own_process:
            advise_on_fork(_at_work(weakref.ref(self), algorithm.lag))

    @property
    def serves(self) -> bool:
        """Whether this rank serves the centre instead of training."""
        return self.member.server is not None

    def let_spares_train(self, *, may: bool = True) -> None:
        """Set whether spares train in the places of dead workers; all ranks call it, before the first epoch.

        The script's loop must take batches also on a rank that has had none in earlier epochs.
        """
        if self.serving is not None:
            self.serving.spare_calls.allowed = may

    def refuse_heirs(self) -> None:
        """Let no worker take a dead server's place; all ranks call it, before the first epoch."""
        if self.member.heirs and isinstance(self._part, WorkerRank | ServerRank):
            self._part.refuse_heirs()

    @property
    def role(self) -> str:
        """The name of its role; it changes when this rank takes over from a dead one."""
        part = self._part
        return (isinstance(part, SpareRank | PlacedRank | GroupTrainer) and part.role) or self.member.role

    @property
    def holds_copy(self) -> bool:
        """Whether this rank, a worker, serves once the server has died."""
        return isinstance(self._part, HeirRank)

    @property
    def has_heir(self) -> bool:
        """Whether this rank is a server whose place a worker takes."""
        return self.member.heirs and self.serving is not None and self.serving.sends_copies

    def leave_to_heir(self, script: State) -> None:
        """On a server: keep what the script of the rank that takes its place needs, for the next copy."""
        if self.serving is not None:
            self.serving.script_state = script

    @property
    def inherited(self) -> State | None:
        """On a rank that has taken over: what the dead server's script has left to it."""
        return None if self.serving is None else self.serving.script_state

    def when_taking_over(self, call: Callable[[], object]) -> None:
        """Register `call` for when this rank takes over from a dead server, worker or lead."""
        if isinstance(self._part, SpareRank | HeirRank | GroupTrainer):
            self._part.on_taking_over.append(call)

    def _take_over(self) -> None:
        if isinstance(self._part, HeirRank):
            self._turn(self._part)
        self.shown.publish()  # the centre of the copy

    def _turn(self, heir: HeirRank) -> None:
        """Serve from now on; this rank was a worker."""
        serving = heir.serving
        assert serving is not None  # it has taken over
        self._part = self._collectives.part = self.serving = serving
        self._worker = self._parameters = self.before_epoch_ends = None
        self.member = replace(self.member, part=serving, server=serving.server, worker=None)
        self.has_turned = True
        self.shown.serve(serving.server)
        for call, every_s in self._watched:
            serving.watch(call, every_s)

    def take_place(self) -> bool:
        """Train from now on in the place of a dead worker, if this rank is a spare that the server calls.

        `begin_epoch` does so, too; a script that must know before calls this one instead, between two epochs.

        Returns:
            Whether it does.
        """
        spare = self._part
        trains = spare.take_place() if isinstance(spare, SpareRank) else None
        if trains is None:
            return False
        self._part = self._collectives.part = self._worker = trains
        self.serving, self._parameters = None, self._own_parameters
        self.member = replace(self.member, part=trains, server=None, worker=trains.index)
        self.shown.train()
        trains.on_moving = self._show
        trains.start()
        self._show()
        for call in spare.on_taking_over if isinstance(spare, SpareRank) else ():
            call()
        return True

    @property
    def worker(self) -> WorkerRank | GroupTrainer:
        """This worker's part; raises on a server."""
        if self._worker is None:
            raise ConfigurationError(
                f"rank {self.rank} made a step, but it serves the centre; make steps only inside the loop "
                "over batches"
            )
        return self._worker

    @property
    def share(self) -> tuple[int, int]:
        """This rank's index among all that train, and their number; the index is -1 on a server."""
        return self.member.share

    @property
    def stopped(self) -> bool:
        """Whether the server asks to end."""
        return self._part.stopped

    @property
    def counts_progress(self) -> bool:
        """Whether an epoch ends when the progress of one epoch is made, not after a pass over the samples."""
        member = self.member
        return self.algorithm.counts_progress(member.workers * member.group_size)

    @property
    def progress(self) -> tuple[int, int]:
        """The progress of all workers as last heard, and of this epoch, in samples of one process."""
        return (0, 0) if self._worker is None else self._worker.progress

    def stop(self) -> None:
        """Ask all to end; ignored on a worker."""
        self._part.stop()

    def report(self) -> TrainingReport:
        """Return this rank's report so far."""
        return self._part.report()

    def take(self, samples: int) -> None:
        """Count samples taken by this rank."""
        self._samples += samples

    def watch(self, call: Callable[[], object], every_s: float) -> None:
        """Call a function periodically while this rank serves."""
        self._watched.append((call, every_s))
        if self.serving is not None:
            self.serving.watch(call, every_s)

    def ask(self, query: Query[AnswerT]) -> AnswerT:
        """Ask the first server."""
        # A server's own lease queries need no start: they are answered at once, before any worker leases.
        if not (self.serves and isinstance(query, LedgerQuery)):
            self.start()
        return self._part.ask(query)

    def copied(self, values: Mapping[str, Any], vector: Vector | None = None) -> Mapping[str, Any]:
        """Return the first server's values and copy its numbers into `vector` (collective)."""
        self.start()
        return self._collectives.copied(values, vector)

    # -- the course of a training ---------------------------------------------------------------------

    def start(self) -> None:
        """Start the part, unless it has started."""
        if self.over and not self._leaving:
            raise ConfigurationError("the training is over; make a new optimizer")
        if not self._started:
            self._started = True
            if not self._loaded:
                self.model.absorb()  # 16-bit weights may have been loaded since the plan was made
            self._part.start()
            self._show()

    def begin_epoch(self, *, takes_place: bool = True) -> None:
        """Begin an epoch; on a server, serve it to its end.

        Args:
            takes_place: a spare may begin to train; else `take_place` has been called before.
        """
        self.start()
        self.end_epoch()
        self.has_turned = False
        if self.serves and takes_place:
            self.take_place()
        if self._serves_by_now():
            self._serve_epoch()
            return
        self._epoch_open = True
        if self._resumed_in_epoch:
            self._resumed_in_epoch = False
            return  # continues an epoch begun before the checkpoint
        if self._part.begin_epoch() and not self.serves:
            self._show()
        if self._epochs:
            self._collectives.take_buffers()  # workers that step together have all sent theirs by now
        else:
            self._collectives.tell_start()
        if self._serves_by_now():
            self.end_epoch()

    def _serves_by_now(self) -> bool:
        """Whether this rank serves; the call before may have changed that."""
        return self.serves

    def _serve_epoch(self) -> None:
        """On a server, serve an epoch to its end."""
        self._part.end_epoch()
        self._end_served_epoch()

    def _end_served_epoch(self) -> None:
        self._epochs += 1
        self._publish()

    def step(
        self,
        weight: float,
        change_gradient: Callable[[], object],
        local_step: Callable[[], object] | None = None,
    ) -> None:
        """Make one step with the model's gradients.

        Args:
            weight: its weight in a mean over workers, including the passed steps before it.
            change_gradient: changes the collected gradient.
            local_step: moves the parameters in their vector; None: use the session's.
        """
        self.start()
        if self.has_turned:
            return
        worker = self.worker
        if not self.sends_gradients:
            self.model.check()
        else:
            with span("pack", "gradient"):
                self.model.collect()
                change_gradient()
            if self.gradient_made is not None:
                self.gradient_made(self.model.gradient)
        if local_step is None:
            self.shown.take_up()
        self.broken = True  # until the step is done: after a step that fails half-way, do not leave normally
        if self._runs == "center":
            self._send_options()
        self.take(self.uncounted())
        worker.count_samples(self._samples)
        if local_step is None and self._move is not None:
            local_step = self._local_step
        moves = worker.moves or local_step is not None
        worker.step(weight, local_step)
        self._steps_in_epoch += 1
        self.broken = False
        if self.serving is not None:
            if not self._epoch_open:  # the loop has no epochs: the others end theirs when they leave
                server = self.serving.server
                self.serving.wait_until(lambda: server.finished)
            self.end_epoch()
            return
        # Switch vectors only after a contribution: a gathered gradient is added to in place.
        if len(self.model.gradients) > 1 and not worker.gathered and self.model.turn():
            worker.use_gradient(self.model.gradient)
        if moves:
            self._show()

    @property
    def may_leave_apart(self) -> bool:
        """Whether nothing reads the next gradient in its vector, so that it may leave from elsewhere."""
        leaves = self._started and isinstance(self._worker, WorkerRank) and self._worker.may_leave_apart
        return leaves and self.gradient_made is None

    @property
    def losses(self) -> int:
        """How many servers have died; what has left for them is lost."""
        return self._worker.losses if isinstance(self._worker, WorkerRank) else 0

    def send_ahead(self, start: int, apart: Apart = ()) -> None:
        """Begin to send the next step's gradient, which is made behind `start` and changes no more there.

        Args:
            start: the place in the gradient.
            apart: what of it lies outside of the vector, where it `may_leave_apart`.
        """
        if self._started and isinstance(self._worker, WorkerRank):
            self._worker.send_ahead(start, apart)

    def withdraw(self) -> None:
        """Let what was sent ahead count for nothing: the gradient has changed since."""
        if self._started and isinstance(self._worker, WorkerRank):
            self._worker.withdraw()

    def sum_by(self, make: Callable[[], GradientSum]) -> None:
        """Add up this worker's gradients elsewhere, unless anything but their sum is needed.

        Args:
            make: makes the sum; its `add` is given the model's gradient vector, which need not hold any.
        """
        if isinstance(self._worker, WorkerRank) and self._move is None and self.member.group is None:
            self._worker.sum_by(make)

    @property
    def due(self) -> bool:
        """Whether the next step must be made; otherwise it may be passed."""
        return self._worker is not None and self._worker.due

    @property
    def gathered(self) -> int:
        """The number of steps since the last contribution."""
        return 0 if self._worker is None else self._worker.gathered

    def pass_step(self) -> None:
        """Count a step made elsewhere; an exchange due in it happens in the next `step`."""
        self.worker.pass_step()
        self._steps_in_epoch += 1

    def end_epoch(self) -> None:
        """End the open epoch, if there is one.

        A loader that fetches ahead exhausts its sampler before the last steps are made, so an epoch ends only
        when the next operation begins.
        """
        if not self._epoch_open:
            return
        self._epoch_open = False
        if self.before_epoch_ends is not None:
            self.before_epoch_ends()
        if not self.serves:
            self.take(self.uncounted())
            self.worker.count_samples(self._samples)
            self._bring_buffers()
        if self.serves:  # since the epoch was begun
            self._serve_epoch()
            return
        # Then the epoch's end exchanges and moves the parameters.
        if self.sends_gradients:
            self.shown.take_up()
        self._part.end_epoch()
        if self._serves_by_now():
            self._end_served_epoch()
            return
        if self.sends_gradients:
            self._show()
        self._epochs += 1
        self._samples_before, self._steps_in_epoch = self._samples, 0

    def take_buffers(self) -> None:
        """Load the averaged buffers into the model; without servers all ranks call it together."""
        self._collectives.take_buffers()

    def last_round(self) -> None:
        """Contribute the steps since the last round to the centre, if the algorithm trains in rounds.

        All ranks call it after the last epoch; only the first call counts.
        """
        if self._rounds_over or not self.algorithm.trains_in_rounds:
            return
        self._rounds_over = True
        if self.serving is not None:
            self.serving.end_epochs()  # else the round would wait for a spare that was called after the last
        if not self._collectives.agree_on_last_round(self.gathered):
            return
        if self.serves:
            self._collectives.end_last_round()
            self._part.last_round()
            self._publish()
            return
        self.shown.take_up()
        self._part.last_round()
        self._show()
        self._collectives.end_last_round()
        if self._serves_by_now():
            self._publish()

    def close(self) -> None:
        """Leave normally; a server serves until all workers have left."""
        self.start()
        self.end_epoch()
        trained = not self.serves
        if self.before_close is not None:
            self.before_close()
        if trained and self.serves and self.before_close is not None:
            self.before_close()  # that of a server
        self.last_round()
        self.over = self._leaving = True  # a rank that takes over meanwhile may still save
        self._part.finish(lambda: self._publish() if self.serves else self.shown.publish())
        self._leaving = False
        if self._parameters is not None:
            np.copyto(self.model.parameters.vector, self._parameters.vector)
        if self._final is not None:  # leaving absorbs late replies, which may have overwritten it
            np.copyto(self.model.parameters.vector, self._final)
        self.model.publish()
        self.member.disengage()

    @property
    def told_rate(self) -> float:
        """The learning rate set on the first server, from its latest reply; 0: none."""
        return self._part.told_rate

    def tell_rate(self, rate: float) -> None:
        """On a server, send workers a rate with all replies, in place of their own options; 0: send none."""
        if self.serving is not None:
            self.serving.tell_rate(rate)

    def set_local_rate(self, rate: float) -> None:
        """Set the learning rate of the algorithm's own optimizer, on a worker."""
        if self._worker is not None:
            self._worker.set_local_rate(rate)

    # -- checkpoints ----------------------------------------------------------------------------------

    @property
    def pause_requested(self) -> bool:
        """Whether this worker must pause at its next batch boundary."""
        return self._worker is not None and self._worker.pause_requested

    def pause(self, *, between: bool = False) -> bool:
        """Wait until all workers are at a batch boundary; False on a worker: the pause was cancelled.

        Args:
            between: all ranks call it, between two epochs.
        """
        self.start()
        if self.serves:
            self.end_epoch()  # one in which this rank has begun to serve
        return self._part.pause(between=between)

    def state(self) -> State:
        """Return what this rank's next step depends on, but for the framework's state; exact in a pause."""
        self.shown.take_changes()
        counts = {name: getattr(self, f"_{name}") for name in _COUNTS}
        # The servers have not heard of options that a scheduler has set since the last step.
        state = {"part": self._part.state(), "known_options": list(self._known_options), **counts}
        return state | {"buffers": self._collectives.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; call it before any other operation.

        Raises:
            ConfigurationError: it was saved with other options or another model.
        """
        counts = {name: type(getattr(self, f"_{name}")) for name in _COUNTS}
        require("a rank", state, part=Mapping, known_options=[float], buffers=Mapping, **counts)
        self.model.absorb()
        self._part.load(state["part"])
        self._collectives.load(state["buffers"])
        for name in _COUNTS:
            setattr(self, f"_{name}", state[name])
        self._resumed_in_epoch, self._epoch_open = self._epoch_open, False
        self._known_options = tuple(state["known_options"])
        self._loaded = True
        self._show()

    def load_for_others(self, state: Mapping[str, Any] | None, epochs: int) -> None:
        """Resume with other workers at the centre in a server's `state`; None: the model is the centre."""
        if state is None:
            self.model.absorb()
        if isinstance(self._worker, WorkerRank):
            self._worker.begin_after(epochs)
        if isinstance(self._part, ServerRank | GroupTrainer):
            if state is None:
                self._part.load_center(epochs, self._collectives.counted_from_here())
            else:
                self._part.load_for_others(state["part"])
        self._epochs = epochs
        self._loaded = True
        self.shown.publish()

    # -- the centre on any rank -----------------------------------------------------------------------

    @contextmanager
    def center(self, *, when_all_are_there: bool) -> Iterator[None]:
        """Put the centre's parameters and buffers into the model for a `with` block.

        Args:
            when_all_are_there: wait until all have finished the epoch, so that all ranks get the same.
        """
        self.start()
        if when_all_are_there:
            self.end_epoch()
        self.shown.take_up()
        center = np.empty_like(self.model.parameters.vector)
        served = self.serves
        if when_all_are_there:
            self._part.view(center)
        else:
            self._part.look(center)
        if self.serves and not served:
            self._publish()
        if not self.serves and not when_all_are_there:
            self._bring_buffers()
        # The model of a server is the centre.
        with nullcontext() if self.serves else self._collectives.lent(center):
            self._collectives.views += when_all_are_there
            yield

    def take_over_center(self) -> None:
        """Load the final centre into a worker's model; all workers call it after their last step."""
        self.start()
        self.end_epoch()
        self._collectives.meet()  # all workers have ended
        self._collectives.meet()  # the servers have settled the centre
        self._final = self._collectives.take_center()

    def settle_center(self, settle: Callable[[], object]) -> None:
        """On a server, set the final centre by calling `settle`, after the last step of all workers.

        Workers call `take_over_center` meanwhile. All ranks get this model's buffers.
        """
        self._collectives.meet()
        settle()
        self._collectives.bring_buffers(1, instead=True)
        self._collectives.meet()

    def agree(self, values: Mapping[str, float], weight: float) -> dict[str, float]:
        """Return the means over all ranks, without `start`, which may keep a worker waiting."""
        return self._collectives.mean(values, weight, self._epochs)

    def mean(self, values: Mapping[str, float], weight: float) -> dict[str, float]:
        """Return the means over all ranks; all ranks get the same."""
        self.start()
        self.end_epoch()  # servers serve the epoch to its end before they ask
        return self._collectives.mean(values, weight, self._epochs)

    def _local_step(self) -> None:
        assert self._move is not None  # step() checks it
        self.model.publish()  # an exchange may have come first
        self._move()
        self.model.absorb()

    def _show(self) -> None:
        """Put the point of the next gradient into the model."""
        with span("receive", "shows the parameters"):
            if self._parameters is not None:
                np.copyto(self.model.parameters.vector, self._part.point())
            self.shown.publish()

    def _send_options(self) -> None:
        """Send the servers the options that a scheduler has changed since the last step."""
        options = self._options.read()
        if options != self._known_options:
            self._known_options = options
            self.worker.configure(wired(options))

    def _bring_buffers(self) -> None:
        """Send this worker's buffers to be averaged, if it has made a step in this epoch."""
        weight = self._samples - self._samples_before or self._steps_in_epoch
        self._collectives.bring_buffers(weight, self._epochs)

    def _publish(self) -> None:
        """On a server, put the centre into the model."""
        self.shown.publish()
        self._collectives.take_buffers()
