"""Saved checkpoint: read and verify a complete checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from nnlo_common.base._file_access import opened_folder, read_whole, readable_file
from nnlo_common.base._limited_formats import LARGEST_JSON
from nnlo_common.training.checkpoint._manifest import MANIFEST, DamagedError, Entry, Manifest, new_digest

__all__ = ["SavedCheckpoint"]

_PIECE = 1 << 24  # bytes that are compared at once


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint on disk.

    Attributes:
        folder: the checkpoint's folder.
        manifest: its manifest.
    """

    folder: Path
    manifest: Manifest

    @classmethod
    def open(cls, folder: Path, number: int) -> SavedCheckpoint:
        """Read the manifest only.

        Raises:
            DamagedError: it is missing, damaged, or that of another checkpoint.
        """
        with _reported(MANIFEST), opened_folder(folder) as here:
            data = read_whole(MANIFEST, LARGEST_JSON, follow=False, folder=here)
        manifest = Manifest.read(data)
        if manifest.number != number:
            raise DamagedError(f"{MANIFEST} belongs to checkpoint {manifest.number}")
        return cls(folder, manifest)

    def read(self, name: str) -> bytes:
        """Return the content of one file.

        Raises:
            DamagedError: it is missing or damaged.
        """
        with self._opened(name) as (file, entry):
            data = file.read(entry.size + 1)
        problem = entry.problem(data)
        if problem is not None:
            raise DamagedError(f"{name} {problem}")
        return data

    def verify(self) -> None:
        """Read all files.

        Raises:
            DamagedError: one of them is missing or damaged.
        """
        for name in self.manifest.files:
            digest = new_digest()
            with self._opened(name) as (file, entry):
                while piece := file.read(_PIECE):
                    digest.update(piece)
            problem = entry.problem_of_digest(digest.hexdigest())
            if problem is not None:
                raise DamagedError(f"{name} {problem}")

    def strangers(self) -> list[str]:
        """Return the names in its folder that do not belong to it."""
        return sorted(
            one.name for one in self.folder.iterdir() if one.name not in {MANIFEST, *self.manifest.files}
        )

    @contextmanager
    def _opened(self, name: str) -> Iterator[tuple[BinaryIO, Entry]]:
        """Yield a file of the right size, and its entry."""
        entry = self.manifest.files.get(name)
        if entry is None:
            raise DamagedError(f"{name} is not in it")
        with _reported(name), opened_folder(self.folder) as here:
            file = readable_file(name, follow=False, folder=here)
        with _reported(name), file:
            problem = entry.problem_of_size(os.fstat(file.fileno()).st_size)
            if problem is not None:
                raise DamagedError(f"{name} {problem}")
            yield file, entry


@contextmanager
def _reported(name: str) -> Iterator[None]:
    """Report a file that cannot be read as damage."""
    try:
        yield
    except FileNotFoundError as error:
        raise DamagedError(f"{name} is missing") from error
    except OSError as error:
        raise DamagedError(f"{name} cannot be read ({error.strerror})") from error
    except MemoryError as error:
        raise DamagedError(f"{name} needs more memory than there is") from error
