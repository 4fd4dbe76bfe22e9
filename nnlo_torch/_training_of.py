"""Training that a sampler or a data set belongs to."""

from __future__ import annotations

from nnlo_common import ConfigurationError
from nnlo_common.plugin import launched
from nnlo_torch._participation import Participation
from nnlo_torch._wrapper import Wrapper, current, wrapper_given

__all__ = ["can_lease", "group_fact", "member_of", "training_of"]


class PlainLoop(Participation):
    """Part of a process alone whose optimizer is not wrapped."""

    rank, size, role = 0, 1, "alone"

    def __init__(self) -> None:
        self._begin_participation()


_PLAIN_LOOP = PlainLoop()


def group_fact(training: Participation) -> dict[str, int]:
    """Return the size of groups for a saved position in the data; nothing without groups."""
    return {"group_size": training.group_size} if training.group_size > 1 else {}


def can_lease(training: Participation) -> bool:
    """Return whether there is a server to lease samples from; one worker alone has them all anyway."""
    team = training._team
    return team is not None and team.member.servers > 0


def member_of(training: Participation) -> tuple[int, int]:
    """Return this rank's number in its group, and the size of groups."""
    group = None if training._team is None else training._team.member.group
    return 0 if group is None else group.index, training.group_size


def training_of(optimizer: Wrapper | None, what: str) -> Participation:
    """Return the given wrapper, else the one made last, else the part of a plain loop in a process alone.

    Args:
        optimizer: the wrapper that the user has given.
        what: the user, for errors.

    Raises:
        ConfigurationError: there are several ranks, but no wrapper.
    """
    training = current() if optimizer is None else wrapper_given(optimizer, what)
    if training is None and launched() is not None:
        raise ConfigurationError(
            f"{what} was used before an optimizer was wrapped, so its training is unknown; wrap the "
            "optimizer first (nnlo_torch.Downpour(...)), or pass optimizer="
        )
    return training or _PLAIN_LOOP
