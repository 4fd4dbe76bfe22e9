"""Time limit of a search: decide whether another trial would end in time.

The rule: a trial is begun if the longest so far, begun now, would end in time. Trials under way count with
the time they have taken up to now; the first ones have nothing to go by and are begun.
"""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Iterable, Mapping

from nnlo_common.base._errors import ConfigurationError

__all__ = ["TimeLeft", "end_of"]

# What the ranks and the launcher may take to leave, before Slurm ends them.
_SLURMS_MARGIN_S = 60.0


class TimeLeft:
    """How long trials take, and how long there is.

    Args:
        end_s: when the search has to be over; None: there is no such time.
        longest_s: how long the longest trial has taken that is known of.

    Example:
        >>> time = TimeLeft(end_s=100.0)
        >>> time.suffices(now_s=60.0, began_s=[])
        True
        >>> time.took(50.0)
        >>> time.suffices(now_s=60.0, began_s=[]), time.suffices(now_s=40.0, began_s=[0.0])
        (False, True)
    """

    def __init__(self, end_s: float | None = None, longest_s: float = 0.0) -> None:
        self._end_s = math.inf if end_s is None else end_s
        self.longest_s = longest_s

    def took(self, seconds: float) -> None:
        """Note how long a trial has taken."""
        self.longest_s = max(self.longest_s, seconds)

    @property
    def told(self) -> str:
        """Why no trial is begun any more."""
        return f"the longest has taken {self.longest_s:.0f} s, and there is less time left"

    def over(self, now_s: float) -> bool:
        """Say whether the time is up."""
        return now_s > self._end_s

    def suffices(self, now_s: float, began_s: Iterable[float]) -> bool:
        """Say whether to begin a trial.

        Args:
            now_s: the time.
            began_s: when those under way have begun.
        """
        longest_s = max([self.longest_s, *(now_s - began for began in began_s)])
        return now_s + longest_s <= self._end_s


def end_of(
    until: float | str | datetime.datetime | None, now_s: float, environment: Mapping[str, str] = os.environ
) -> float | None:
    """Return when a search has to be over, in seconds since 1970.

    Args:
        until: seconds from now; a time; or "slurm", for a minute before the end of Slurm's job.
        now_s: the time now.
        environment: the variables that Slurm sets.

    Raises:
        ConfigurationError: it is no such thing, or the job is not Slurm's.

    Example:
        >>> end_of(90, now_s=1000.0), end_of("slurm", 0.0, {"SLURM_JOB_END_TIME": "5060"})
        (1090.0, 5000.0)
    """
    if until is None:
        return None
    if isinstance(until, datetime.datetime):
        return until.timestamp()
    if until == "slurm":
        said = environment.get("SLURM_JOB_END_TIME", "")
        if not said.isdecimal():
            raise ConfigurationError(
                f"until='slurm': SLURM_JOB_END_TIME is {said!r}, which is no time; Slurm sets it in its jobs "
                "(since version 22.05). Elsewhere give seconds, or a datetime"
            )
        return int(said) - _SLURMS_MARGIN_S
    if isinstance(until, int | float) and not isinstance(until, bool) and until > 0:
        return now_s + float(until)
    raise ConfigurationError(f"until={until!r}: give seconds from now, a datetime, or 'slurm'")
