"""The doctor on a machine where mpi4py is not installed."""

from __future__ import annotations

import importlib.metadata
import sys

installed = importlib.metadata.version


def version(name: str) -> str:
    if name == "mpi4py":
        raise importlib.metadata.PackageNotFoundError(name)
    return installed(name)


sys.modules["mpi4py"] = None  # type: ignore[assignment]
importlib.metadata.version = version

from nnlo_common.commands._cli import main  # noqa: E402  after the installation was changed

sys.exit(main(["doctor"]))
