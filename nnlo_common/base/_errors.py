"""Exceptions that nnlo raises on purpose.

    NNLOError
    ├── ConfigurationError   an option, array or layout that cannot work (also a ValueError)
    ├── MissingExtraError    a feature needs a package that is not installed (also an ImportError)
    ├── StartupError         the launcher, the MPI library and the processes do not fit together
    ├── ProtocolError        a message that the protocol does not allow; carries the recent event log
    ├── DivergedError        the numbers to exchange contain NaN or infinity
    ├── PeerLostError        another rank died or stopped answering
    └── DroppedError         the others have dropped this rank, because it was silent for too long

    try:
        optimizer = nnlo_common.algorithms.EASGD(alpha=2.0)
    except nnlo_common.NNLOError as error:
        print(error)

Every message says what was asked, what was found and what to do. All errors can be pickled, to travel
between processes.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "ConfigurationError",
    "DivergedError",
    "DroppedError",
    "MissingExtraError",
    "NNLOError",
    "PeerLostError",
    "ProtocolError",
    "StartupError",
]


class NNLOError(Exception):
    """Base of every error that nnlo raises on purpose.

    Attributes:
        collective: all ranks raise the same error, so one report is enough.
        said: another rank has already reported the error; this rank exits without a message.
    """

    collective: bool = False
    said: bool = False


class ConfigurationError(NNLOError, ValueError):
    """An option, an array or a layout of ranks that cannot work; raised before any training starts."""


class MissingExtraError(NNLOError, ImportError):
    """A feature needs a package that is not installed; the message holds the pip line."""

    def __init__(self, feature: str, package: str, extra: str, then: str = "") -> None:
        super().__init__(feature, package, extra, then)
        self.feature, self.package, self.extra, self.then = feature, package, extra, then

    def __str__(self) -> str:
        return (
            f"{self.feature} needs the package {self.package!r}, which is not installed. "
            f"Install it with: pip install 'nnlo[{self.extra}]'{self.then}"
        )


class StartupError(NNLOError, RuntimeError):
    """The launcher, the MPI library and the processes do not fit together."""


class ProtocolError(NNLOError, RuntimeError):
    """A message that the protocol does not allow here.

    Attributes:
        problem: what was wrong.
        story: the recent events of the state machine that refused the message, oldest first.
    """

    def __init__(self, problem: str, story: Sequence[str] = ()) -> None:
        super().__init__(problem, tuple(story))
        self.problem, self.story = problem, tuple(story)

    def __str__(self) -> str:
        if not self.story:
            return self.problem
        return "\n  ".join([self.problem, "recent events, oldest first:", *self.story])


class DivergedError(NNLOError, ArithmeticError):
    """The numbers to exchange contain NaN or infinity; the centre has not been changed by them."""


class PeerLostError(NNLOError, RuntimeError):
    """Another rank died or stopped answering."""

    def __init__(self, rank: int, problem: str) -> None:
        super().__init__(rank, problem)
        self.rank, self.problem = rank, problem

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.problem}"


class DroppedError(NNLOError, RuntimeError):
    """The others have dropped this rank, because it was silent for too long; they continue without it.

    Attributes:
        rank: this rank.
        server: the server that has dropped it.
        after_s: how long this rank had been silent.
    """

    def __init__(self, rank: int, server: int, after_s: float) -> None:
        super().__init__(rank, server, after_s)
        self.rank, self.server, self.after_s = rank, server, after_s

    def __str__(self) -> str:
        return (
            f"rank {self.rank} was dropped by rank {self.server} after {self.after_s:.0f} s of silence, so "
            "it ends; the others continue"
        )
