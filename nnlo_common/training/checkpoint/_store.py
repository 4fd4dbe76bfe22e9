"""The folder of a run: one folder in it for each checkpoint, complete or not there."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nnlo_common.base._arguments import whole_number
from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._warnings import warn
from nnlo_common.training.checkpoint._manifest import MANIFEST, DamagedError, Entry, Manifest
from nnlo_common.training.checkpoint._reading import SavedCheckpoint

__all__ = ["Draft", "Store", "refused"]

_NAME = re.compile(r"checkpoint-(\d{6,})")
_PART = re.compile(r"checkpoint-\d{6,}\.part")
_FILE = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)+")


@dataclass(frozen=True)
class Draft:
    """A checkpoint that is being written, by one process or by several, each with files of its own.

    Attributes:
        folder: where to; it has another name until all is written.
        number: the checkpoint's.
        files: what was written here.
    """

    folder: Path
    number: int
    files: dict[str, Entry] = field(default_factory=dict)

    def write(self, name: str, data: bytes) -> None:
        """Write a file, down to the disk.

        Raises:
            OSError: as the system says.
        """
        if not _FILE.fullmatch(name) or name == MANIFEST or name in self.files:
            raise ConfigurationError(f"a checkpoint cannot have (another) file {name!r}")
        _write(self.folder / name, data)
        self.files[name] = Entry.of(data)


class Store:
    """Keeps the checkpoints of a run.

    Each is written under another name first: its files, then the manifest with their sizes and checksums,
    and only then it gets its name. So whenever the writer is killed, or the disk is full, the checkpoint
    before is as good as it was.

    Args:
        folder: of the run; what else lies there is left alone.
        keep: how many to keep, of the last; besides the best.
        better: whether lower ("min") or higher ("max") scores are better.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = Store(folder)
        ...     saved = [store.save({"state.txt": text}, {"steps": 10}) for text in (b"one", b"two")]
        ...     newest = Store(folder).newest()
        ...     newest.manifest.number, newest.read("state.txt"), newest.manifest.facts
        (2, b'two', {'steps': 10})
    """

    def __init__(self, folder: str | Path, *, keep: int = 3, better: Literal["min", "max"] = "min") -> None:
        if better not in ("min", "max"):
            raise ConfigurationError(f"better={better!r} is not possible: it must be 'min' or 'max'")
        self.folder, self.keep, self.better = Path(folder), whole_number("keep", keep, 1), better
        self._warned: set[str] = set()
        #: Takes warnings about what could not be written.
        self.tell: Callable[[str], object] = warn

    # -- writing --------------------------------------------------------------------------------------

    def save(self, files: Mapping[str, bytes], facts: Mapping[str, Any], score: float | None = None) -> bool:
        """Write a checkpoint from one process; return whether that succeeded. See `begin` and `commit`."""
        draft = self.begin()
        if draft is None:
            return False
        try:
            for name, data in files.items():
                draft.write(name, data)
        except OSError as error:
            self.abandon(draft, refused(error))
            return False
        return self.commit(draft, facts, score)

    def begin(self) -> Draft | None:
        """Begin a checkpoint, and remove what a writer that was killed has left.

        What the system refuses (the disk is full, the folder read-only) is warned of, once for each trouble
        until a checkpoint succeeds, and None is returned: a training is worth more than a checkpoint of it.
        """
        draft = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in list(self.folder.iterdir()):
                if _PART.fullmatch(path.name):
                    shutil.rmtree(path)
            number = max(self._numbers(), default=0) + 1
            draft = self.draft(number)
            draft.folder.mkdir()
        except OSError as error:
            self._warn(refused(error))
            return None
        return draft

    def draft(self, number: int) -> Draft:
        """Return the checkpoint that another process has begun, to write one's own files to."""
        return Draft(self.folder / f"{_name(number)}.part", number)

    def path(self, number: int) -> Path:
        """Return the folder of a checkpoint."""
        return self.folder / _name(number)

    def commit(self, draft: Draft, facts: Mapping[str, Any], score: float | None = None) -> bool:
        """Complete a checkpoint, remove those that are too old, and return whether it is there now.

        Args:
            draft: with the entries of all files, also of those that others have written.
            facts: which training it is of, and how far that was; JSON.
            score: how good the model is, if that is known.
        """
        manifest = Manifest(number=draft.number, files=dict(draft.files), facts=facts, score=score)
        final = self.folder / _name(draft.number)
        try:
            _write(draft.folder / MANIFEST, manifest.written())
            _sync(draft.folder)
            draft.folder.rename(final)
        except OSError as error:
            self.abandon(draft, refused(error))
            return False
        try:
            _sync(self.folder)
            self._prune()
        except OSError as error:
            self._warn(refused(error))
        else:
            self._warned.clear()
        return True

    def abandon(self, draft: Draft, trouble: str) -> None:
        """Remove what was written of a checkpoint that cannot be completed, and warn."""
        shutil.rmtree(draft.folder, ignore_errors=True)
        self._warn(trouble)

    # -- reading --------------------------------------------------------------------------------------

    def newest(self) -> SavedCheckpoint | None:
        """Return the newest checkpoint that is whole; None where there is none at all.

        Every file is read and compared with its checksum. Where newer ones are damaged a warning says which
        of their files, and how.

        Raises:
            ConfigurationError: there are checkpoints, but all are damaged.
        """
        found: list[str] = []
        for number in sorted(self._numbers(), reverse=True):
            try:
                checkpoint = SavedCheckpoint.open(self.folder / _name(number), number)
                checkpoint.verify()
            except DamagedError as error:
                found.append(f"{_name(number)} is damaged: {error}")
                continue
            if found:
                told = "; ".join(found)
                warn(f"{self.folder}: {told}; {_name(number)} is whole and is used instead")
            strangers = checkpoint.strangers()
            if strangers:
                warn(f"{checkpoint.folder}: {', '.join(strangers)} does not belong there; left alone")
            return checkpoint
        if found:
            raise ConfigurationError(
                f"{self.folder} was asked for a checkpoint to go on from, but none is whole: "
                f"{'; '.join(found)}. Name another folder, or delete this one to begin anew"
            )
        return None

    def last(self) -> int:
        """Return the number of the newest checkpoint that is complete, unread; 0 where there is none."""
        for number in sorted(self._numbers(), reverse=True):
            with contextlib.suppress(DamagedError):
                return SavedCheckpoint.open(self.path(number), number).manifest.number
        return 0

    # -- inside ---------------------------------------------------------------------------------------

    def _numbers(self) -> list[int]:
        """The numbers of all checkpoints, damaged ones too."""
        if not self.folder.is_dir():
            return []
        matches = [_NAME.fullmatch(path.name) for path in self.folder.iterdir()]
        return [int(match[1]) for match in matches if match]

    def _prune(self) -> None:
        """Remove all but the last ones and the best; what is no checkpoint of ours is kept."""
        kept = sorted(self._numbers())[-self.keep :]
        whole: dict[int, SavedCheckpoint] = {}
        for number in self._numbers():
            with contextlib.suppress(DamagedError):
                whole[number] = SavedCheckpoint.open(self.folder / _name(number), number)
        scores = {number: one.manifest.score for number, one in whole.items()}
        scored = {
            number: score for number, score in scores.items() if score is not None and score - score == 0
        }
        sign = 1 if self.better == "min" else -1
        best = min(scored, key=lambda number: (sign * scored[number], -number), default=None)
        for number, checkpoint in whole.items():
            if number not in kept and number != best:
                _remove(checkpoint)

    def _warn(self, trouble: str) -> None:
        if trouble not in self._warned:
            self._warned.add(trouble)
            self.tell(
                f"no checkpoint could be written to {self.folder}: {trouble}. The one before stays as it is, "
                "and the training goes on"
            )


def _name(number: int) -> str:
    return f"checkpoint-{number:06d}"


def refused(error: OSError) -> str:
    """Say why the disk has not taken something, and what to do."""
    return f"{error.strerror or error}; free some space or make the folder writable"


def _remove(checkpoint: SavedCheckpoint) -> None:
    """Remove a checkpoint under another name, so that nobody takes what is left of it for one."""
    if checkpoint.strangers():
        # The folder stays, with what is not ours; without its manifest it is no checkpoint.
        for name in (MANIFEST, *checkpoint.manifest.files):
            (checkpoint.folder / name).unlink(missing_ok=True)
        checkpoint.folder.rename(checkpoint.folder.with_name(f"{checkpoint.folder.name}.left"))
        return
    part = checkpoint.folder.with_name(f"{checkpoint.folder.name}.part")
    checkpoint.folder.rename(part)
    shutil.rmtree(part)


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Have the names in a folder on the disk, or a power cut may leave a name with nothing behind it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
