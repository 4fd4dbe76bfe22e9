"""Time limit of a search: decide whether another trial would end in time.

Begin a trial only if the longest trial so far, begun now, would end in time. Running trials count with their
time up to now. The first trials begin in any case, as nothing is known yet.
"""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Iterable, Mapping

from nnlo_common.base._arguments import whole_in
from nnlo_common.base._errors import ConfigurationError

__all__ = ["TimeLeft", "end_of"]

# Time for the ranks and the launcher to exit before Slurm kills them.
_SLURMS_MARGIN_S = 60.0
_TELL_THE_END = (
    'export SLURM_JOB_END_TIME=$(date -d "$(squeue --noheader --jobs=$SLURM_JOB_ID --format=%e)" +%s)'
)


class TimeLeft:
    """Time that trials take and time that is left.

    Args:
        end_s: when the search must be over; None: no limit.
        longest_s: the time of the longest trial known.

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
        """Record how long a trial took."""
        self.longest_s = max(self.longest_s, seconds)

    @property
    def told(self) -> str:
        """The reason why no more trials begin."""
        return f"the longest took {self.longest_s:.0f} s, and less time is left"

    def over(self, now_s: float) -> bool:
        """Return whether the time is up."""
        return now_s > self._end_s

    def suffices(self, now_s: float, began_s: Iterable[float]) -> bool:
        """Return whether to begin another trial.

        Args:
            now_s: the time.
            began_s: when the running trials began.
        """
        longest_s = max([self.longest_s, *(now_s - began for began in began_s)])
        return now_s + longest_s <= self._end_s


def end_of(
    until: float | str | datetime.datetime | None, now_s: float, environment: Mapping[str, str] = os.environ
) -> float | None:
    """Return when a search must be over, in seconds since 1970.

    Args:
        until: seconds from now; a time; or "slurm", for one minute before the Slurm job ends.
        now_s: the time now.
        environment: the variables that Slurm sets.

    Raises:
        ConfigurationError: `until` is none of these, or Slurm did not start this job.

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
        end = whole_in(said)
        if end is None:
            raise ConfigurationError(
                f"until='slurm': SLURM_JOB_END_TIME is {said!r:.60}, not a time. Slurm 22.05 does not set "
                f"it: put `{_TELL_THE_END}` into the job script before srun. Elsewhere give seconds or a "
                "datetime"
            )
        return end - _SLURMS_MARGIN_S
    if isinstance(until, int | float) and not isinstance(until, bool) and until > 0:
        return now_s + float(until)
    raise ConfigurationError(f"until={until!r}: give seconds from now, a datetime, or 'slurm'")
