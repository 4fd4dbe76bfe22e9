"""Retreat: a training whose gradients grow faster than the brake allows goes back to where it was calm.

With W workers gradients arrive late, and a learning rate that one process bears may be too high. The brake
makes the growth slow and does not end it, for its running mean grows, too. In the first steps of a sound
training gradients grow as well, so smaller steps on mere suspicion would cost each training much. What no
sound training shows are gradients that are many times too long one after the other. Then the centre goes
back, forgets its velocity, and makes steps of half the length, which come back to their length slowly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from nnlo_common.algorithms._gain import Gain
from nnlo_common.base._flat_vector import Vector
from nnlo_common.base._state_tree import Stateful

__all__ = ["Retreat"]

# The strain is a running mean over about so many contributions.
_REMEMBERED = 10
# Contributions that are 2^2 times too long are never those of a sound training.
_LOST = 2.0
# Nor is a mean square that has grown so many times at the edge of stability, unless steps of a hundredth of
# their length leave it growing: then it is not they that make it grow.
_GROWN, _LEAST = 64.0**2, 0.01
# Where they are 2^0.3 times too long at most, the centre may be kept, once in so many rounds of all workers.
_CALM, _ROUNDS = 0.3, 20
# A retreat halves the steps, and each round lengthens them by a hundredth while it is calm.
_SLOWER, _RECOVERS = 0.5, 0.01


class Retreat(Stateful):
    """The place that a diverging training goes back to, and how long its steps may be.

    Attributes:
        kept: the centre when it was last seen calm, or at the start; empty if nothing is braked, for then
            nothing is seen.
        begun: whether anything was kept.
        gain: the estimate of signal and noise then.
        strain: the running mean of log2 of how many times too long contributions were.
        throttle: the factor of all steps.
        since: contributions since the centre was kept.
        commits: commits since the last retreat.
        times: the number of retreats.

    Args:
        size: the number of coordinates of the centre.
        gain: its estimate of signal and noise, before any contribution.

    Example:
        >>> center, gain = np.ones(2, np.float32), Gain(2, brake=1.5)
        >>> retreat = Retreat(2, gain)
        >>> retreat.keep(center, gain, workers=1)
        >>> center[:] = 1e9
        >>> [retreat.needed(1 / 64, gain, workers=1) for _ in range(4)]
        [False, False, False, True]
        >>> retreat.go_back(center, gain)
        >>> center, retreat.throttle
        (array([1., 1.], dtype=float32), 0.5)
    """

    saved = ("kept", "begun", "gain", "strain", "throttle", "since", "commits", "times")

    def __init__(self, size: int, gain: Gain) -> None:
        self.kept: Vector = np.zeros(size if gain.brake else 0, np.float32)
        self.begun = not gain.brake
        self.gain = Gain(gain.before.size, brake=gain.brake)
        self.strain, self.throttle = 0.0, 1.0
        self.since = self.commits = self.times = 0

    def outdates(self, staleness: int) -> bool:
        """Note a contribution; return whether it was computed at a place that the centre has left.

        Args:
            staleness: commits since its worker last fetched the centre.
        """
        self.commits += 1
        return self.times > 0 and staleness >= self.commits

    def needed(self, shorter: float, gain: Gain, *, workers: int) -> bool:
        """Note by how much a contribution is shortened; return whether the training is lost."""
        self.strain += (-math.log2(max(shorter, 1e-30)) - self.strain) / _REMEMBERED
        if not gain.unease:
            self.throttle = min(1.0, self.throttle * math.exp(_RECOVERS / workers))
        self.since += 1
        grown = self.gain.pairs > 0 and gain.square > self.gain.square * _GROWN
        return self.strain > _LOST or (grown and gain.unease > 0 and self.throttle > _LEAST)

    def keep(self, center: Vector, gain: Gain, *, workers: int) -> None:
        """Keep the centre as it is before a commit, if it is time and the training is calm."""
        if not self.begun:
            np.copyto(self.kept, center)
            self.begun = True
        if not self.gain.pairs and gain.pairs >= _REMEMBERED:  # of the centre as it was at the start
            self.gain.load(gain.state())
        if self.kept.size and self.since >= _ROUNDS * workers and not gain.unease and self.strain < _CALM:
            np.copyto(self.kept, center)
            self.gain.load(gain.state())
            self.since = 0

    def check(self, state: object) -> None:
        """Refuse a state that `load` cannot use."""
        if not self._of_others(state):
            super().check(state)

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; begin anew if it is of one worker and this of several."""
        if not self._of_others(state):
            super().load(state)

    def _of_others(self, state: object) -> bool:
        kept = state.get("kept") if isinstance(state, Mapping) else None
        return isinstance(kept, np.ndarray) and bool(kept.size) != bool(self.kept.size)

    def go_back(self, center: Vector, gain: Gain) -> None:
        """Put the centre and the estimate back, and halve the steps from here on."""
        np.copyto(center, self.kept)
        gain.load(self.gain.state())
        self.throttle *= _SLOWER
        self.strain, self.since, self.commits = 0.0, 0, 0
        self.times += 1
