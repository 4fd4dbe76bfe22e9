"""Saved checkpoint: read and verify a complete checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nnlo_common.training.checkpoint._manifest import MANIFEST, DamagedError, Manifest

__all__ = ["SavedCheckpoint"]


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
        manifest = Manifest.read(_content(folder / MANIFEST))
        if manifest.number != number:
            raise DamagedError(f"{MANIFEST} belongs to checkpoint {manifest.number}")
        return cls(folder, manifest)

    def read(self, name: str) -> bytes:
        """Return the content of one file.

        Raises:
            DamagedError: it is missing or damaged.
        """
        entry = self.manifest.files.get(name)
        if entry is None:
            raise DamagedError(f"{name} is not in it")
        data = _content(self.folder / name)
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
            self.read(name)

    def strangers(self) -> list[str]:
        """Return the names in its folder that do not belong to it."""
        return sorted(
            one.name for one in self.folder.iterdir() if one.name not in {MANIFEST, *self.manifest.files}
        )


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise DamagedError(f"{path.name} is missing") from error
    except OSError as error:
        raise DamagedError(f"{path.name} cannot be read ({error.strerror})") from error
