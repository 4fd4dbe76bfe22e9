"""Facts about an MPI library as readable text; pure, so that tests can pass in any library's."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["cuda_aware", "one_line"]


def one_line(version: str) -> str:
    """Return name and version from the many lines of `MPI_Get_library_version`."""
    first = " ".join(version.strip("\0 \n").split("\n")[0].split())
    return first.split(", package:")[0].rstrip(",").replace("MPICH Version: ", "MPICH ")


def cuda_aware(library: str, env: Mapping[str, str], query: bool | None) -> bool | None:
    """Return the library's own answer, or for Cray's library the environment variable that decides."""
    if "CRAY" in library.upper():
        switch = env.get("MPICH_GPU_SUPPORT_ENABLED")
        return query if switch is None else switch == "1"
    return query
