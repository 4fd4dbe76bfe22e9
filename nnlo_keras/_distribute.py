"""Distribute: the callback that lets `fit` take part in a training of several ranks."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import keras

from nnlo_common import ConfigurationError, PeerLostError, TrainingReport
from nnlo_common.plugin import (
    Algorithm,
    RankWorld,
    Session,
    Trained,
    launched,
    say,
    speaks,
    stands_by,
    warn,
)
from nnlo_keras._callback_lists import (
    bring_back,
    drop_center_callbacks,
    refuse_averages,
    refuse_backup,
    refuse_loading,
    restored_first,
    undisturbed,
    warn_of_saves,
)
from nnlo_keras._callbacks._rank_callback import RankCallback
from nnlo_keras._compat import (
    arguments_of_fit,
    batch_size_of_fit,
    begin_with,
    callbacks_of_fit,
    data_of_fit,
    deal_passes,
    ending_epoch,
    first_epoch,
    is_spread,
    make_data_again,
    strategy_of,
    synchronise,
    unvalidated,
    validated,
    without_data,
)
from nnlo_keras._exchanges import BatchSizes, Exchanges, Passes, Rates
from nnlo_keras._group_exchanges import GroupExchanges, local_step_of, refuse_in_groups
from nnlo_keras._model_optimizers import (
    any_wrapper_in,
    assign_variables,
    attach,
    build,
    detach,
    refuse_constraints,
    wrappers_in,
)
from nnlo_keras._sequence_feed import SequenceFeed
from nnlo_keras._served_epochs import ServedEpochs, batches_of_all, done
from nnlo_keras._shard import another_share, can_be_another_share, warn_of_data
from nnlo_keras._snapshot import Decisions, until
from nnlo_keras._weights import KerasCenterOptimizer, RateOption, Statistics, Weights
from nnlo_keras._wrapper import StepMode, Wrapper

__all__ = ["Distribute"]

# A server steps its part of the centre with its own rate.
_OF_EACH_SERVER = keras.callbacks.ReduceLROnPlateau
_PLACE = "give Distribute() to fit() in a list of callbacks: callbacks=[nnlo_keras.Distribute(), ...]"


# It is one class because Keras calls one callback; what a worker, a group and a server do are `Exchanges`,
# `GroupExchanges` and `ServedEpochs`.
class Distribute(keras.callbacks.Callback):
    """Lets `fit` take part in a training of several ranks; in a process alone it does nothing.

    On a worker it exchanges at the ends of batches. On a server the model is the centre: each epoch of `fit`
    serves until the workers have finished one, then validates, so other callbacks see the centre there.
    On workers it turns off the progress bar and callbacks that write files, stop the training or change the
    learning rate by metrics (ModelCheckpoint, BackupAndRestore, CSVLogger, TensorBoard, EarlyStopping,
    ReduceLROnPlateau), and SwapEMAWeights.

    At the end all ranks have the centre's weights.

    A model with its own `train_step` may have several optimizers: wrap all alike, and build each with the
    variables that it trains.

    Args:
        world: the ranks; None: MPI's if a launcher has started this process, else this process alone.

    Example:
        >>> import numpy as np
        >>> import nnlo_keras
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile(optimizer=nnlo_keras.Downpour(keras.optimizers.SGD(0.1)), loss="mse")
        >>> distribute = Distribute()
        >>> x = np.ones((4, 1), "f4")
        >>> history = model.fit(x, x, batch_size=2, epochs=1, callbacks=[distribute], verbose=0)
        >>> distribute.role
        'alone'
    """

    drives_training = True

    def __init__(self, *, world: RankWorld | None = None) -> None:
        super().__init__()
        self._world = world
        self._team: Session | None = None
        self._exchanges: Exchanges | None = None  # on a worker
        self._served: ServedEpochs | None = None  # on a server
        self._statistics: Statistics | None = None
        self._restore: list[Callable[[], object]] = []
        self._epochs_left = range(0)
        self._epoch, self._in_epoch, self._ends = 0, False, False
        self._may_train = False  # this rank, a spare
        self._turned: Callable[[Any], object] | None = None  # lets a worker serve from now on
        self._stays: _Stays | None = None  # of a spare that may train
        self._dropped = list[Any]()  # callbacks that come back if this rank takes over
        self._container: Any = None  # the list of `fit`
        self._order = list[Any]()  # all callbacks, those too
        self._late = list[Any]()  # of those: which Keras does not yet tell that the epoch ends
        self._validate_again: list[Callable[[], object]] = []
        self._batches: int | None = None  # in an epoch of all workers
        self._first = 0.0  # of all batches, before a checkpoint
        self._feed: SequenceFeed | None = None  # if `fit` trains on Batches
        self._rank_callbacks: list[RankCallback] = []
        self._report = TrainingReport()
        self.role = "alone"

    def __deepcopy__(self, memo: dict[int, Any]) -> Distribute:
        return type(self)(world=self._world)

    @property
    def report(self) -> TrainingReport:
        """This rank's counts of the last training."""
        return self._report if self._team is None else self._team.report()

    @property
    def team(self) -> Session | None:
        """This rank's session in a training of several ranks; None outside of one."""
        return self._team

    @property
    def epoch_made(self) -> float | None:
        """The share of this epoch's progress that is made; None: progress does not end epochs."""
        exchanges = self._exchanges
        return None if exchanges is None or exchanges.passes is None else exchanges.passes.epoch_made

    @property
    def batches_in_epoch(self) -> int:
        """Number of batches that this worker has trained on in this epoch."""
        return 0 if self._exchanges is None else self._exchanges.in_epoch

    @property
    def feed(self) -> SequenceFeed | None:
        """The Batches that `fit` trains on, if it does."""
        return self._feed

    def state(self) -> dict[str, Any] | None:
        """Return this worker's position in its epoch; None if this rank does not exchange."""
        return None if self._exchanges is None else self._exchanges.state()

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume where `state` was returned; call it after the epoch has begun."""
        if self._exchanges is not None:
            self._exchanges.load(state)

    def settle(self) -> None:
        """On a server whose training has ended: set the centre to the model as it was at the end."""
        if self._served is not None:
            self._served.settle()

    def leave(self) -> None:
        """Leave the training, at any point in an epoch."""
        if self._team is not None:
            self._team.close()
            self._release(self._team)

    @property
    def speaks(self) -> bool:
        """Whether this rank prints and saves for all: its model is the centre, or it is alone."""
        return speaks(self.role)

    def save(self, path: str | Path, **options: Any) -> None:
        """Save the model once, on the rank whose model is the centre; other ranks go on without waiting.

        Call it on all ranks, after `fit` or in a callback.

        Args:
            path: a `.keras` file; one that ends with `.weights.h5` has the weights only.
            options: other arguments of `model.save`, or of `model.save_weights`.

        Raises:
            ConfigurationError: `fit` has not begun.
        """
        if self.model is None:
            raise ConfigurationError(
                f"distribute.save({str(path)!r}) before fit(), which tells it the model and the role of this "
                "rank; call it afterwards"
            )
        if self.speaks:
            save = self.model.save_weights if str(path).endswith(".weights.h5") else self.model.save
            save(path, **options)

    def say(self, text: str) -> None:
        """Print `text` once: on the rank whose model is the centre."""
        say(self.role, text)

    # -- what fit calls -------------------------------------------------------------------------------

    def set_model(self, model: Any) -> None:
        """Remove callbacks that are not for this rank, before any of them has begun."""
        super().set_model(model)
        container, wrapper = callbacks_of_fit(), any_wrapper_in(model)
        world = self._world or launched()
        if container is None or wrapper is None or world is None or world.size == 1:
            return  # `on_train_begin` reports what is missing
        if wrapper.ranks.servers > 1:
            refuse_loading(container, wrapper.ranks.servers)
        if wrapper.ranks.servers == 0:
            refuse_backup(container)
        on_center = wrapper.algorithm.optimizer_runs == "center"
        refuse_averages(container, type(wrapper).__name__, wrapper.ranks.servers, on_center=on_center)
        role = wrapper.topology(world).assignment(world.rank).title
        if speaks(role):
            restored_first(container)
        elif role.startswith("server"):
            drop_center_callbacks(container, but=_OF_EACH_SERVER)
        else:
            # Without a server each rank has the averages.
            but = () if wrapper.ranks.servers else keras.callbacks.SwapEMAWeights
            self._order, self._dropped = [*container.callbacks], drop_center_callbacks(container, but=but)

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Join the training."""
        wrappers = wrappers_in(self.model)
        world = self._world or launched()
        for wrapper in wrappers.values():
            wrapper.mode = StepMode.ALONE
            wrapper.several = world is not None and world.size > 1
        attach(self.model, [*wrappers.values()])
        container = self._container = callbacks_of_fit()
        callbacks = [] if container is None else container.callbacks
        self._rank_callbacks = [one for one in callbacks if isinstance(one, RankCallback)]
        self._feed, self._epochs_left, self._may_train = SequenceFeed.of_fit(), range(0), False
        self._epoch, self._in_epoch, self._ends, self._turned, self._stays = 0, False, False, None, None
        if world is None or world.size == 1:
            self._prepare("alone")
        elif container is None:
            raise ConfigurationError(f"Distribute() was called outside fit()'s list of callbacks; {_PLACE}")
        else:
            build(self.model)
            assign_variables(self.model, wrappers)
            self._take_part(world, container, list(wrappers.values()))
        for one in self._rank_callbacks:
            one.after_start(self)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Begin an epoch."""
        self._epoch, self._epochs_left = epoch, range(epoch + 1, self.params.get("epochs") or 0)
        self._in_epoch = True
        if self._stays is not None:
            self._look_for_place(self._stays)
        if self._served is not None:
            self._served.begin_epoch(epoch, last=not self._epochs_left)
        elif self._exchanges is not None:
            self._exchanges.begin_epoch()
        if self._feed is not None:
            self._feed.begin_epoch(epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Take the batch, and record the weights before it, if the algorithm needs them."""
        if self._feed is not None:
            self._feed.begin_batch()  # it may ask a server, and a new one brings other weights
        if self._exchanges is not None:
            self._exchanges.begin_batch()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Exchange, if one is due."""
        team, feed, exchanges = self._team, self._feed, self._exchanges
        if self._served is not None:
            self._served.end_batch()
        if team is None or exchanges is None:
            return
        if threading.current_thread() is not threading.main_thread() and self._world is None:
            raise ConfigurationError(f"Keras called Distribute() outside the main thread; {_PLACE}")
        before = exchanges.in_epoch
        if feed is not None:
            exchanges.repeat(feed.repeats(before))
        exchanges.end_batch(batch, idle=feed is not None and feed.idle)
        if self._served is not None:  # since this exchange
            self._served.end_batch()
            return
        if self._statistics is not None:
            self._statistics.add_batches(exchanges.in_epoch - before)
        if team.stopped:
            self.model.stop_training = True
        elif feed is not None:
            feed.end_batch()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """End the epoch: send the remaining gradients and the metrics."""
        self.end_exchanges(epoch, logs)
        if self._exchanges is not None:
            self._exchanges.close_epoch()
        if self._served is not None:
            if self._served.inside:
                self._end_inside(self._served, epoch, logs)
            self._served.end_epoch()
        self._in_epoch = False

    def end_exchanges(self, epoch: int, logs: Any) -> None:
        """On a worker: make the last exchange of this epoch, if it was not made yet."""
        if self._exchanges is not None:
            self._exchanges.end_epoch(epoch, logs, last=not self._epochs_left)

    def on_train_end(self, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Leave with the centre's weights."""
        team, served, self._ends = self._team, self._served, True
        if team is None:
            return
        if served is not None and self.model.stop_training:
            team.stop()
        for one in self._rank_callbacks:
            one.before_end()
        if served is not None:
            served.end()
        self._pass_epochs(team)
        if self._exchanges is not None:
            self._exchanges.last_round()
        else:
            team.last_round()
        for one in self._rank_callbacks:
            one.after_epochs()
        if self._served is not None:  # perhaps only since the last epoch
            team.settle_center(self._served.settle)
        elif isinstance(self._exchanges, GroupExchanges) and not team.member.servers:
            self._exchanges.copy_from_lead(self._statistics)
        else:
            team.take_over_center()
        team.close()
        for one in self._rank_callbacks:
            one.after_leaving()
        self._release(team)

    # -- joining and leaving a training ---------------------------------------------------------------

    def _take_part(self, world: RankWorld, container: Any, wrappers: Sequence[Wrapper]) -> None:
        calm = undisturbed(container.callbacks, self)
        team, weights = self._join(world, wrappers)
        rates = Rates(self.model, team)
        serve = partial(self._serve, team, weights, wrappers, rates)
        if not team.serves:
            self._turned = serve
            self._train(team, weights, wrappers, rates, container, undisturbed=calm)
            return
        others, self._restore = self._restore, []
        serve(container)
        if (data := data_of_fit()) is not None:
            self._restore.append(without_data(data, inside=False))  # its own has another end, or none
        if self._may_train:
            train = partial(self._train, team, weights, wrappers, Rates(self.model, team), container)
            self._stays = _Stays(partial(train, undisturbed=calm), self._restore)
            self._restore = [self._stays.end]
        self._restore = [*others, *self._restore]

    def _train(
        self,
        team: Session,
        weights: Weights,
        wrappers: Sequence[Wrapper],
        rates: Rates,
        container: Any,
        *,
        undisturbed: bool,
    ) -> None:
        """Let the epochs of `fit` train from now on."""
        for wrapper in wrappers:
            wrapper.mode = _mode_of_training(wrapper)
        sizes = BatchSizes.of(self.model, steps_matter=wrappers[0].mode is StepMode.LOCAL)
        self._served = None
        if team.member.group is None:
            self._exchanges = Exchanges(team, weights, wrappers, rates, sizes, undisturbed=undisturbed)
            if self._exchanges.ahead is not None:
                self._restore.append(self._exchanges.ahead.release)
        else:
            grouped = GroupExchanges(team, weights, wrappers, rates, sizes=sizes, model=self.model)
            self._exchanges = grouped
            self._restore += grouped.take_over(container, self)
        if self._statistics is not None:
            self._restore += self._statistics.count(wrappers[0])
        if not speaks(self.role):  # only the rank with the centre validates
            self._validate_again = unvalidated(self.model)
            self._restore += self._validate_again
        if self._feed is not None:
            self._restore += self._feed.lease(self.model, team)
        self._restore += self._deal(team)

    def _look_for_place(self, stays: _Stays) -> None:
        """Train from this epoch on if this rank, a spare, is called to a dead worker's place."""
        team = self._team
        assert team is not None  # this rank takes part
        if not team.take_place():
            return
        self._stays = None
        stays.end()
        self._restore.remove(stays.end)
        if self._feed is not None:
            self._feed.train(*team.share)
        own = another_share if self._feed is None else lambda data, *_: data
        make_data_again(data_of_fit(), lambda data: own(data, *team.share))
        self.model.make_train_function()
        stays.train()

    def _serve(
        self, team: Session, weights: Weights, wrappers: Sequence[Wrapper], rates: Rates, container: Any
    ) -> None:
        """Let the epochs of `fit` serve from now on."""
        for wrapper in wrappers:
            wrapper.mode = StepMode.SERVE
        served = ServedEpochs(
            self.model, team, weights, rates, self._rank_callbacks, batches=self._batches, first=self._first
        )
        self._served, self._exchanges = served, None
        self._restore += served.take_over(container, self)
        if not team.has_turned:
            return
        weights.detach()
        rates.take_over()
        if self._feed is not None:
            self._feed.serve()
        if self._in_epoch:
            served.begin_inside(self._epoch, last=not self._epochs_left)
        if (data := data_of_fit()) is not None:
            self._restore.append(without_data(data, inside=self._in_epoch))

    def _go_on(self, team: Session, container: Any, back: Sequence[Any]) -> None:
        """Let callbacks go on where the dead server's were, with the epochs that it has not ended before."""
        # This epoch is not in the history yet, even if the dead server has ended it.
        known = self._epoch + (not self._in_epoch and not ending_epoch())
        decisions, told = Decisions(container), until(team.inherited or {}, known)
        missed = decisions.missed(told)
        found = validated(self.model, container, max(missed)) if missed else {}
        decisions.go_on_from(told, self._epoch, found)

        def end_missed() -> None:
            for epoch, logs in missed.items():
                given = {**logs, **found}
                for one in back:
                    one.on_epoch_end(epoch, given)
                decisions.complete(epoch, given)

        if self._served is not None:
            self._served.decide(end_missed)

    def _end_inside(self, served: ServedEpochs, epoch: int, logs: Any) -> None:
        """End an epoch in whose end this rank, a worker before, has begun to serve: as a server does."""
        found: dict[str, Any] = {**served.end_inside()}
        logs = {} if logs is None else logs
        if not any(name.startswith("val_") for name in logs):
            found |= validated(self.model, callbacks_of_fit(), epoch)
        logs.update(found)  # the callbacks after this one are given the same
        late, self._late = self._late, []
        for one in late:
            one.on_epoch_end(epoch, logs)

    def _deal(self, team: Session) -> list[Callable[[], object]]:
        """Let each epoch of a worker have all batches that it takes; return functions that undo it.

        An epoch goes on until its progress is made, if that is what ends it. A rank of a group that has fewer
        batches than the others repeats some.
        """
        data, feed, exchanges = data_of_fit(), self._feed, self._exchanges
        assert exchanges is not None  # a worker has them
        leased = None if feed is None or not feed.dynamic else feed
        again = 0 if leased else _lacking(team, data)
        if not team.counts_progress:
            if not again:
                return []
            size = None
        else:
            size = None if feed is None else float(feed.size)
            if leased is None and (data is None or data.steps_per_epoch):
                raise ConfigurationError(
                    f"{type(self.model.optimizer).__name__} ends an epoch by its progress, but fit() was "
                    'given steps_per_epoch; leave it out, or give the wrapper passes="fixed"'
                )
        about = float((batch_size_of_fit() or 0) * (getattr(data, "num_batches", None) or 0) * team.share[1])
        passes = exchanges.passes = Passes(team, size, again, about=about)
        if leased is not None:
            leased.take_passes(passes.over)
            return []
        return [deal_passes(data, passes.over, exchanges.end_pass, again=again, tell=exchanges.repeat)]

    def _join(self, world: RankWorld, wrappers: Sequence[Wrapper]) -> tuple[Session, Weights]:
        if strategy_of(self.model) is not None:
            raise ConfigurationError(
                "this model was made in a TensorFlow distribution strategy; remove the strategy: nnlo "
                "distributes the training itself, with one replica on each rank"
            )
        around = keras.distribution.distribution()
        if around is not None or any(map(is_spread, self.model.variables)):
            kind = "a keras.distribution" if around is None else f"keras.distribution.{type(around).__name__}"
            raise ConfigurationError(
                f"{kind} is around this model; leave it out, or make the model after "
                "keras.distribution.set_distribution(None): nnlo distributes the training itself, with one "
                "device on each rank"
            )
        first = wrappers[0]
        local, grouped = first.algorithm.optimizer_runs == "worker", first.ranks.grouped
        if grouped:
            refuse_in_groups(self.model, wrappers)
        if (grouped or not local) and any(wrapper.sum is None for wrapper in wrappers):
            raise ConfigurationError(
                "this optimizer was built before nnlo knew the ranks; make a new one for this training"
            )
        topology = first.topology(world)
        ranks = sum(map(len, topology.cell_of(world.rank).groups))
        refuse_constraints(wrappers, alone=ranks == 1 and not first.algorithm.lag)
        self._prepare(topology.assignment(world.rank).title)
        weights = Weights(self.model, wrappers)
        self._statistics = Statistics.of(self.model, weights.variables)
        trained = Trained(
            model=weights,
            buffers=self._statistics,
            options=RateOption(wrappers),
            center_optimizer=partial(self._center_optimizer, wrappers, weights),
            local_step=local_step_of(wrappers, weights) if grouped else None,
            moved_outside=not grouped and (local or first.moves_locally),  # within the training step
            given_sums=not grouped and not local,
        )
        same = {
            "optimizer": ", ".join(map(_described, wrappers)),
            "epochs": self.params.get("epochs") or 0,
            "meetings": [type(one).__name__ for one in self._rank_callbacks if one.meets],
        }
        team = self._team = Session(first.algorithm, world, first.ranks, trained, same)
        self.role = team.role
        team.when_taking_over(self._take_over)
        warn_of_saves(self.model, team)
        for wrapper in wrappers:
            wrapper.mode = StepMode.SERVE if team.serves else _mode_of_training(wrapper)
        for one in self._rank_callbacks:
            one.before_part(self)
        self._refuse_to_wait_at_start(first.algorithm)
        # Before `start`, which may keep a worker waiting.
        self._agree_on_first_epoch(team)
        warn_of_data(team)
        self._batches, self._first = batches_of_all(team, self.params, self._feed), done(team)
        self._agree_on_spares(team, first)
        team.start()
        return team, weights

    def _center_optimizer(
        self, wrappers: Sequence[Wrapper], weights: Weights, place: slice
    ) -> KerasCenterOptimizer:
        """Return what steps this part of the centre; a worker that begins to serve is within its `fit`."""
        synchronise(self.model)
        weights.detach()
        return KerasCenterOptimizer(wrappers, weights, place)

    def _refuse_to_wait_at_start(self, algorithm: Algorithm) -> None:
        """Refuse callbacks that wait for all workers before the first batch if some join later."""
        alone = algorithm.commits_alone()
        meeting = [type(one).__name__ for one in self._rank_callbacks if one.meets_at_start]
        if alone and meeting:
            error = ConfigurationError(
                f"{meeting[0]}() needs all ranks before the first batch, but warm_start={alone} lets one "
                "worker train alone first; leave out either the callback or warm_start"
            )
            error.collective = True  # all ranks have the same callbacks
            raise error

    def _take_over(self) -> None:
        """Let this rank print and write what the dead one did; if it is a worker, let it serve, too."""
        team, container = self._team, self._container
        assert team is not None  # there is one that takes over
        self.role = team.role
        for one in self._rank_callbacks:
            one.role = self.role
        for undo in self._validate_again:
            undo()
            self._restore.remove(undo)
        self._validate_again = []
        if not (team.serves or self.speaks):
            return  # it trains in the place of a dead worker
        if team.has_turned and self._turned is not None:
            self._turned(container)
        back, self._dropped = self._dropped, []
        if not self.speaks:
            back = [one for one in back if isinstance(one, _OF_EACH_SERVER)]
        if container is not None and not self._ends:
            # The bar of a server counts the batches of others, and is made before the training.
            not_for_it = keras.callbacks.ProgbarLogger if self._served is not None else ()
            back = [one for one in back if not isinstance(one, not_for_it)]
            bring_back(back, container, self, self._epoch, self._order)
            self._late = back if ending_epoch() else []
        if team.has_turned:
            for one in self._rank_callbacks:
                one.begin_to_serve()
            if container is not None and not self._ends:
                self._go_on(team, container, back)

    def _prepare(self, role: str) -> None:
        for one in self._rank_callbacks:
            one.before_start(role)

    def _agree_on_first_epoch(self, team: Session) -> None:
        """Begin on all ranks with the epoch that BackupAndRestore has restored on the first server."""
        own = first_epoch(self.model)  # a `Checkpoint` has set it, on each rank
        first = team.agree({"epoch": own}, weight=float(speaks(self.role)))["epoch"]
        if not math.isnan(first):
            begin_with(self.model, int(first))
        elif any(isinstance(one, keras.callbacks.BackupAndRestore) for one in self._dropped):
            raise PeerLostError(
                0, "the server has died before it had told which epoch its backup goes on with"
            )

    def _agree_on_spares(self, team: Session, wrapper: Wrapper) -> None:
        """Let spares train in the places of dead workers where all of them can; say where they cannot."""
        if wrapper.ranks.spares <= wrapper.ranks.servers:
            return  # the first of each server stay for it
        spare = stands_by(team.role)
        given = arguments_of_fit()
        shared = all(can_be_another_share(given.get(name)) for name in ("x", "y", "sample_weight"))
        mine = float(self._feed is not None or shared)
        able = team.agree({"able": mine}, weight=float(spare))["able"] == 1
        team.let_spares_train(may=able)
        self._may_train = able and spare
        if not able and speaks(team.role):
            warn(
                f"spares={wrapper.ranks.spares}, but fit() was given data whose shares only you know, so "
                "spares do not take the places of dead workers; give it nnlo_keras.shard(..., "
                f"spares={wrapper.ranks.spares}), without a cache behind it, or nnlo_keras.Batches"
            )

    def _pass_epochs(self, team: Session) -> None:
        """Take part in the remaining epochs after an early stop, as far as other ranks wait for this one."""
        if not team.member.servers:
            return  # all ranks have stopped together
        for epoch in self._epochs_left:
            for one in self._rank_callbacks:
                one.before_empty_epoch(epoch)
            if not team.serves:
                team.begin_epoch()
                team.end_epoch()
            elif team.member.servers > 1:
                # Servers wait for each other at the end of each epoch, and another may have stopped later.
                team.begin_epoch()

    def _release(self, team: Session) -> None:
        self._report, self._team, self._feed = team.report(), None, None
        self._exchanges = self._served = self._statistics = self._turned = self._container = None
        self._stays = None
        for undo in reversed(self._restore):
            undo()
        self._restore.clear()
        detach(self.model, [*wrappers_in(self.model).values()])


class _Stays:
    """What lets a spare's `fit` go on as a spare's, until it is called to a dead worker's place.

    Attributes:
        train: lets it train.

    Args:
        train: see above.
        undo: undo what lets it serve.
    """

    def __init__(self, train: Callable[[], object], undo: Sequence[Callable[[], object]]) -> None:
        self.train, self._undo = train, undo

    def end(self) -> None:
        """End it."""
        for undo in reversed(self._undo):
            undo()


def _mode_of_training(wrapper: Wrapper) -> StepMode:
    local = wrapper.algorithm.optimizer_runs == "worker"
    return StepMode.KEEP if wrapper.ranks.grouped else StepMode.LOCAL if local else StepMode.ACCUMULATE


def _lacking(team: Session, data: Any) -> int:
    """Return how many batches this rank has less than another of its group (collective); 0: or unknown."""
    group = team.member.group
    if group is None:
        return 0
    mine = int(getattr(data, "num_batches", None) or 0)
    numbers = group.compare(mine, 0)[:, 0]
    return int(numbers.max()) - mine if numbers.all() else 0


def _described(wrapper: Wrapper) -> str:
    """Describe the optimizer; all ranks must agree on it, besides the algorithm."""
    kind, local = type(wrapper.inner_optimizer).__name__, wrapper.local_optimizer
    if local is not None:
        return f"{kind}, local {type(local).__name__}"
    return f"{kind}, local={wrapper.local_rate}" if wrapper.local_rate else kind
