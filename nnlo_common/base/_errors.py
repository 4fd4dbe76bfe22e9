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

import errno
import warnings
from collections.abc import Sequence
from typing import Any

__all__ = [
    "ConfigurationError",
    "DivergedError",
    "DroppedError",
    "MissingExtraError",
    "NNLOError",
    "PeerLostError",
    "ProtocolError",
    "StartupError",
    "is_out_of_memory",
    "plural",
    "warn",
]

# -- errors that say that memory is used up, whichever library raises them -----------------------------

# Names of torch's and tensorflow's errors, because no framework is imported here.
_OUT_OF_MEMORY = {"OutOfMemoryError", "ResourceExhaustedError"}
# Texts in JAX's generic error, and in torch's error for host memory.
_SAID = ("RESOURCE_EXHAUSTED", "out of memory", "can't allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or the one that it replaced, says that memory is used up.

    Example:
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("CUDA error: out of memory"))
        (True, True)
        >>> is_out_of_memory(ValueError())
        False
    """
    if isinstance(error, MemoryError) or _OUT_OF_MEMORY & {kind.__name__ for kind in type(error).__mro__}:
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    if isinstance(error, RuntimeError) and any(text in str(error) for text in _SAID):
        return True
    earlier = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return earlier is not None and is_out_of_memory(earlier)


# -- warnings without one of our source lines, which mean nothing to a user ----------------------------

#: Warnings already shown: each text is shown once, unless filters say otherwise.
_SHOWN: dict[str | tuple[Any, ...], int] = {}


def warn(text: str) -> None:
    """Warn of a problem that does not stop the training.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as seen:
        ...     warnings.simplefilter("always")
        ...     warn("the disk is full")
        >>> str(seen[0].message), seen[0].filename
        ('the disk is full', 'nnlo')
    """
    warnings.warn_explicit(text, RuntimeWarning, "nnlo", 0, registry=_SHOWN)


# -- numbers with their noun ---------------------------------------------------------------------------


def plural(number: int, noun: str) -> str:
    """Return a number and a noun in the form that goes with it.

    Example:
        >>> plural(1, "worker"), plural(3, "worker"), plural(2, "batch")
        ('1 worker', '3 workers', '2 batches')
    """
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith(('s', 'x', 'tch', 'sh')) else 's'}"


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
