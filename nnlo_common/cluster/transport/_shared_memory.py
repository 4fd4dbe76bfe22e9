"""Memory that all ranks of a group see, if they are on one host.

It is a file without a name in the host's memory file system. MPI offers such memory, too, as a window; but
opening one makes Open MPI print errors about networks that a machine does not have, and fails in ways that
differ between libraries. A file says why it cannot be had, and the ranks then agree to do without.
"""

from __future__ import annotations

import mmap
import os
import secrets
from pathlib import Path

import numpy as np

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._file_access import shared_file
from nnlo_common.base._flat_vector import Vector
from nnlo_common.cluster.transport._endpoint import Group

__all__ = ["shared_memory"]

_FOLDER = Path("/dev/shm")


def shared_memory(group: Group, size: int, folder: Path = _FOLDER) -> list[Vector]:
    """Return memory of each rank of a group, by index; all ranks see all of it (collective).

    Args:
        group: the ranks.
        size: the number of zeroed float32 numbers of each rank.
        folder: a file system in memory.

    Raises:
        ConfigurationError: it cannot be had; raised on all ranks of the group.
    """
    count = 4 * size * len(group.ranks)
    own, problem = folder / f"nnlo-{secrets.token_hex(16)}", ""
    memory: mmap.mmap | None = None
    if group.index == 0:
        memory, problem = _mapped(own, count, create=True)
    name, problem = group.gather_bytes(f"{own}\n{problem}".encode())[0].decode().split("\n", 1)
    path = folder / Path(name).name
    try:
        if group.index and not problem:
            memory, problem = _mapped(path, count, create=False)
        problems = [one.decode() for one in group.gather_bytes(problem.encode())]
    finally:
        if group.index == 0:
            path.unlink(missing_ok=True)
    for rank, found in zip(group.ranks, problems, strict=True):
        if found:
            raise ConfigurationError(f"rank {rank} cannot share memory with its group ({found})")
    assert memory is not None  # else there is a problem
    vector = np.frombuffer(memory, np.float32)
    return [vector[start : start + size] for start in range(0, vector.size, size)]


def _mapped(path: Path, count: int, *, create: bool) -> tuple[mmap.mmap | None, str]:
    """Return the memory, or why it cannot be had."""
    try:
        descriptor = shared_file(path, create=create)
        try:
            if create:
                os.posix_fallocate(descriptor, 0, count)  # a full file system would kill the process later
            return mmap.mmap(descriptor, count), ""
        finally:
            os.close(descriptor)
    except (OSError, ValueError, AttributeError) as error:
        return None, " ".join(str(error).split())
