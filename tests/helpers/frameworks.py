"""Frameworks that tests compare with, as `NNLO_TEST_FRAMEWORKS` names them."""

from __future__ import annotations

import os
from importlib import metadata

import pytest

__all__ = ["FRAMEWORKS", "since"]

# Which frameworks must be compared with, e.g. "torch,keras" (the Makefile sets it). A name in it whose
# package is missing fails, so that no suite can silently skip the comparisons.
FRAMEWORKS = {name for name in os.environ.get("NNLO_TEST_FRAMEWORKS", "").split(",") if name}


def since(package: str, version: str, what: str) -> pytest.MarkDecorator:
    """Mark a test of what a package has had only since some version; older ones are supported too."""
    try:
        installed = metadata.version(package)
    except metadata.PackageNotFoundError:
        installed = "0"
    older = numbers(installed) < numbers(version)
    return pytest.mark.skipif(older, reason=f"{package} {installed}: {what} since {version}")


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, without zeros at its end."""
    found = [int(part) for part in version.partition("+")[0].split(".")]
    while found and not found[-1]:
        found.pop()
    return tuple(found)
