"""Facts about an MPI library, made readable; pure, so that foreign libraries can be tested."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["cuda_aware", "one_line"]


def one_line(version: str) -> str:
    """Name and number out of what `MPI_Get_library_version` says, which runs over many lines."""
    first = " ".join(version.strip("\0 \n").split("\n")[0].split())
    return first.split(", package:")[0].rstrip(",").replace("MPICH Version: ", "MPICH ")


def cuda_aware(library: str, env: Mapping[str, str], query: bool | None) -> bool | None:
    """Combine what the library's query says with the switch that Cray's library obeys instead."""
    if "CRAY" in library.upper():
        switch = env.get("MPICH_GPU_SUPPORT_ENABLED")
        return query if switch is None else switch == "1"
    return query
