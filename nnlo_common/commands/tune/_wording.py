"""Wording of `optimize`'s refusals for the command line: flags in place of its arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from nnlo_common.base._errors import ConfigurationError

__all__ = ["in_flags"]

_ARGUMENT = re.compile(r"\b(block_size|elastic|export|lockstep|sampler|search_ranks)(?:=True|(=)|(?= out\b))")
_NAMES = {"block_size": "block-size", "sampler": "hyper-opt", "search_ranks": "search-ranks"}


@contextmanager
def in_flags() -> Iterator[None]:
    """Let what is refused inside name flags.

    Example:
        >>> with in_flags():
        ...     raise ConfigurationError("search_ranks=2: leave search_ranks out")
        Traceback (most recent call last):
        nnlo_common.ConfigurationError: --search-ranks 2: leave --search-ranks out
    """
    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError(_ARGUMENT.sub(_flag, str(error))) from None


def _flag(found: re.Match[str]) -> str:
    return f"--{_NAMES.get(found[1], found[1])}{' ' if found[2] else ''}"
