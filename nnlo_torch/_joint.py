"""Joint training of several wrappers, as a GAN has them: what they share, and which belong together."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch

from nnlo_common import ConfigurationError
from nnlo_common.plugin import (
    ALGORITHMS,
    GradientsAhead,
    Periodic,
    RankOptions,
    RankWorld,
    Session,
    readable,
)
from nnlo_torch._center import TorchCenterOptimizer
from nnlo_torch._flat_model import FlatModel
from nnlo_torch._group_gradients import GroupGradients
from nnlo_torch._hand_changes import HandChanges
from nnlo_torch._step_weights import StepWeights

__all__ = ["AveragedWeights", "JointTraining", "collective", "joint_training"]

#: The latest training of each world: each trial of a search has one, the whole job has `_HERE`.
_latest: weakref.WeakKeyDictionary[Any, weakref.ref[JointTraining]] = weakref.WeakKeyDictionary()


def collective(text: str) -> ConfigurationError:
    """Return an error that all ranks raise alike."""
    error = ConfigurationError(text)
    error.collective = True
    return error


class _Here:
    """Key of this process."""


_HERE = _Here()


class AveragedWeights(torch.nn.Module):
    """A second model that only the server moves."""

    def bring(self, team: Session) -> None:
        """Give all ranks the server's (collective)."""
        raise NotImplementedError


class JointTraining:
    """What the wrappers of one training share.

    Attributes:
        members: the wrappers, in the order in which they were made; none in a process alone, where each
            trains by itself.
        halt: set once the training is stopped; alone, wrappers that would be members share both events.
        beginning: set once the training has begun.
        options: the algorithm and the other options that its wrappers have in common, as text.
        ranks: what the user says of the ranks.
        group_gradients: makes the mean gradients of this rank's group, if it is in one.
        gradients_ahead: sends gradients while they are made, if this worker is to.
        settled: the name of what relies on the members as they are; empty: another may still join.
        active: the member that makes the step.
        watches: the periodic calls of a process alone.
        glances: called after each batch of an evaluation.
        seen: the numbers of steps and samples when the last epoch began.
        all_evaluating: whether all modules were in `eval()` mode then.
        centers: the centre's optimizers, on a server.
        at_end: called when this rank has left.
        at_taking_over: called with its new role when this rank, a spare or a worker, takes over.
        at_loading: called with the epoch once a checkpoint has been loaded.
        scores: what `mean` and `evaluate` have returned since the last epoch that was reported.
        reported: whether a `Report` was made.
        pass_size: the number of samples in a pass, as the last sampler has told; 0: unknown.
        largest_step: the most samples that a step has had.
        skips: the loop comes back to where it was saved, so its batches do not count.
        end: ends the training for another one (collective).
        forget_end: cancels the call of `close` at the script's end.
        forget_saves: ends the watch over `torch.save`.
    """

    def __init__(self) -> None:
        self.members: list[Any] = []  # wrappers; their module imports this one
        self.options, self.ranks = "", RankOptions()
        self.group_gradients: GroupGradients | None = None
        self.gradients_ahead: GradientsAhead | None = None
        self.settled, self.active = "", 0
        self.team: Session | None = None
        self.flat_model: FlatModel | None = None
        self.hand_changes: HandChanges | None = None
        self.centers: list[TorchCenterOptimizer] = []
        self.found: list[torch.nn.Module] | None = None
        self.watches: list[Periodic] = []
        self.glances: list[Callable[[], object]] = []
        self.halt, self.beginning = threading.Event(), threading.Event()
        self.agreed = self.looping = self.evaluating = False
        self.steps = self.samples = self.samplers = self.epochs_begun = 0
        self.asides: list[Future[Any]] = []
        self.seen, self.all_evaluating = (0, 0), False
        self.after_serving: list[Callable[[], object]] = []
        self.averages: list[AveragedWeights] = []
        self.at_end: list[Callable[[], object]] = []
        self.at_taking_over: list[Callable[[str], object]] = []
        self.at_loading: list[Callable[[int], object]] = []
        self.scores: dict[str, float] = {}
        self.reported = self.skips = False
        self.pass_size = self.largest_step = 0.0
        self.step_weights = StepWeights()
        self.end: Callable[[], None] = lambda: None
        self.forget_end: Callable[[], None] = lambda: None
        self.forget_saves: Callable[[], None] = lambda: None

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """Count no batches in a block."""
        self.skips = True
        try:
            yield
        finally:
            self.skips = False

    @property
    def stopping(self) -> bool:
        """Whether this rank has stopped the training."""
        return self.halt.is_set()

    @stopping.setter
    def stopping(self, stopping: bool) -> None:
        (self.halt.set if stopping else self.halt.clear)()

    @property
    def trained(self) -> bool:
        """Whether the training has begun."""
        return self.beginning.is_set()

    @trained.setter
    def trained(self, trained: bool) -> None:
        if trained != self.beginning.is_set():  # set in each step
            (self.beginning.set if trained else self.beginning.clear)()

    @property
    def over(self) -> bool:
        """Whether the training has ended."""
        return self.team is not None and (self.team.over or self.team.broken)

    @property
    def moved(self) -> list[Any]:
        """The members whose parameters the last commit has moved, on a server."""
        if not self.centers:
            return self.members
        return [self.members[index] for index in self.centers[0].stepped]

    def take_over(self) -> None:
        """Let this rank, a spare or a worker, print and write what the server did."""
        assert self.team is not None  # there is one that takes over
        for one in self.members:
            one.role = self.team.role
        for call in self.at_taking_over:
            call(self.team.role)

    def told(self, scores: dict[str, float]) -> dict[str, float]:
        """Keep scores for a report, and return them."""
        self.scores |= scores
        return scores

    def finish(self) -> None:
        """Call what waits for the end, once."""
        while self.at_end:
            self.at_end.pop()()

    def release(self) -> None:
        """Let go of the parameters and of the wrappers: samplers look for a wrapper that still exists."""
        if self.group_gradients is not None:
            self.group_gradients.release()
            self.group_gradients = None
        if self.gradients_ahead is not None:
            self.gradients_ahead.release()
            self.gradients_ahead = None
        if self.flat_model is not None:
            self.flat_model.release()
        for center in self.centers:
            center.release()
        self.centers.clear()
        self.forget_saves()
        self.members, self.found = [], None
        self.end = self.forget_end = self.forget_saves = lambda: None

    def accept(self, wrapper: Any, options: str) -> None:
        """Refuse a wrapper that cannot join these members."""
        name = type(wrapper).__name__
        if self.options != options:
            raise collective(
                f"a training with {readable(self.options)} is open on this rank, and {readable(options)} was "
                "made: the wrappers of one training must be of one kind with the same options. If the other "
                "one is over, call optimizer.close() on its wrapper first"
            )
        if wrapper.algorithm.one_optimizer:
            *others, last = (one.__name__ for one in ALGORITHMS.values() if not one.one_optimizer)
            raise collective(
                f"a training with several optimizers cannot use {name}: {wrapper.algorithm.one_optimizer}; "
                f"use {', '.join(others)} or {last}, or call optimizer.close() on the first wrapper if its "
                "training is over"
            )
        if self.ranks.overlap:
            raise collective(
                "a training with several optimizers cannot have overlap=True: a backward pass may make "
                "gradients of several, of which one steps; leave overlap out, or call optimizer.close() on "
                "the first wrapper if its training is over"
            )
        if self.settled:
            raise collective(
                f"{self.settled} uses the training of a wrapper, and another wrapper was made after it; make "
                "all wrappers of the training first"
            )
        if self.overlaps(wrapper):
            raise collective(
                f"this {name} was given parameters of another wrapper in the same training; give each "
                "parameter to one of them, or call optimizer.close() on the first if its training is over"
            )

    def overlaps(self, wrapper: Any) -> bool:
        """Return whether a wrapper has parameters of these members."""
        taken = {id(tensor) for one in self.members for tensor in _parameters(one)}
        return any(id(tensor) in taken for tensor in _parameters(wrapper))


def joint_training(wrapper: Any, world: RankWorld | None, ranks: RankOptions) -> JointTraining:
    """Return the training that a new wrapper joins: an open one that has not begun, or a new one.

    An earlier training that has begun is ended, as if its wrapper had been closed (collective).

    Args:
        wrapper: the new wrapper.
        world: the ranks; None: alone.
        ranks: what the user says of them.
    """
    options = f"{wrapper.algorithm.describe()}, {ranks.describe()}"
    apart = world is not None and (world.of_trial or not world.own_process)
    key: Any = world if apart else _HERE
    known = _latest.get(key)
    joint = None if known is None else known()
    if joint is not None and not joint.over:
        if joint.trained and joint.team is not None:
            joint.end()
        elif not joint.trained and joint.team is not None:
            joint.accept(wrapper, options)
            return joint
    before, joint = joint, JointTraining()
    if world is None and before is not None and not before.trained and before.options == options:
        joint.halt, joint.beginning = before.halt, before.beginning
    joint.options, joint.ranks = options, ranks
    _latest[key] = weakref.ref(joint)
    return joint


def _parameters(wrapper: Any) -> list[torch.Tensor]:
    return [tensor for group in wrapper.param_groups for tensor in group["params"]]
