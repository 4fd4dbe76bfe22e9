"""Folder of a run: one subfolder for each complete checkpoint."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from nnlo_common.base._arguments import whole_number
from nnlo_common.base._errors import ConfigurationError, is_out_of_memory, warn
from nnlo_common.base._file_access import new_file, opened_folder, read_whole, readable_file, remove_tree
from nnlo_common.base._limited_formats import DEEPEST, LARGEST_JSON, MOST_DIGITS, npz_arrays, parsed_json
from nnlo_common.training.checkpoint._manifest import (
    MANIFEST,
    DamagedError,
    Entry,
    Manifest,
    is_file_name,
    new_digest,
)

__all__ = ["Draft", "SavedCheckpoint", "Store", "packed_tree", "refused", "unpacked_tree"]

# -- saved checkpoint: read and verify a complete checkpoint -------------------------------------------

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


# -- states as bytes: arrays in an npz, the rest as JSON inside it; loading never runs code ------------

_TREE = "tree"  # the entry of the npz that holds the JSON
_ARRAY = "array:"  # in the JSON, in place of an array
_TEXT = "text:"  # before every text, so that none is mistaken for an array


def packed_tree(tree: Mapping[str, Any]) -> bytes:
    """Return a tree of numbers, texts and arrays as bytes; floats keep every bit, tuples become lists.

    Raises:
        ConfigurationError: a value is of another type.

    Example:
        >>> unpacked_tree(packed_tree({"clock": 3, "x": np.ones(2), "name": None}))
        {'clock': 3, 'x': array([1., 1.]), 'name': None}
    """
    arrays: dict[str, Any] = {}
    text = json.dumps(_taken_apart(tree, arrays, "the state", DEEPEST - 1))
    arrays[_TREE] = np.frombuffer(text.encode(), np.uint8)
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def unpacked_tree(data: bytes) -> dict[str, Any]:
    """Return the tree that was packed.

    Raises:
        ConfigurationError: the bytes are not a packed tree.
    """
    try:
        arrays = npz_arrays(data)
        tree = _put_together(parsed_json(arrays[_TREE].tobytes()), arrays)
    except (ValueError, KeyError) as error:
        raise ConfigurationError(f"a saved state cannot be read ({error}); is it damaged?") from error
    if not isinstance(tree, dict):
        raise ConfigurationError(
            f"a saved state cannot be read (it is a {type(tree).__name__}, not a mapping); is it damaged?"
        )
    return tree


def _taken_apart(value: Any, arrays: dict[str, Any], where: str, levels: int) -> Any:
    """Return a value with names in place of arrays; refuse what `unpacked_tree` would not read."""
    if not levels or (isinstance(value, int) and abs(value) >= 10**MOST_DIGITS):
        raise ConfigurationError(
            f"{where:.200} is nested more than {DEEPEST} levels deep, or a number of more than {MOST_DIGITS} "
            "digits, which cannot be saved"
        )
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        name = f"{len(arrays)}"
        arrays[name] = value
        return _ARRAY + name
    if isinstance(value, str):
        return _TEXT + value
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {
            key: _taken_apart(item, arrays, f"{where}[{key!r}]", levels - 1) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_taken_apart(item, arrays, f"{where}[{i}]", levels - 1) for i, item in enumerate(value)]
    raise ConfigurationError(
        f"{where} is a {type(value).__name__}, which cannot be saved; "
        "use only numbers, texts, arrays, lists and mappings with texts for keys"
    )


def _put_together(value: Any, arrays: Mapping[str, Any]) -> Any:
    if isinstance(value, str):
        kind, rest = value[: len(_TEXT)], value[len(_TEXT) :]
        return rest if kind == _TEXT else arrays[value.removeprefix(_ARRAY)]
    if isinstance(value, list):
        return [_put_together(item, arrays) for item in value]
    if isinstance(value, dict):
        return {key: _put_together(item, arrays) for key, item in value.items()}
    return value


_NAME = re.compile(r"checkpoint-([0-9]{6,18})")
_PART = re.compile(r"checkpoint-([0-9]{6,18})\.(part|gone)")  # being written, or being removed
# Of the disk, and of a machine without memory: a checkpoint fails then, but not the training.
_REFUSALS = (OSError, MemoryError)


@dataclass(frozen=True)
class Draft:
    """A checkpoint being written, by one process or by several, each with its own files.

    Attributes:
        folder: its folder, under a temporary name until all is written.
        number: the checkpoint's number.
        files: the entries of the files written here.
    """

    folder: Path
    number: int
    files: dict[str, Entry] = field(default_factory=dict)

    def write(self, name: str, data: bytes) -> None:
        """Write a file and sync it to disk.

        Raises:
            OSError: the system cannot write it.
        """
        if not is_file_name(name) or name in self.files:
            raise ConfigurationError(f"a checkpoint cannot have a file (or a second file) named {name!r}")
        _write(self.folder, name, data)
        self.files[name] = Entry.of(data)


class Store:
    """Keeps the checkpoints of a run.

    Each is written under a temporary name: its files, then the manifest with their sizes and checksums. Then
    the folder is renamed. If the writer is killed, or the disk is full, the previous checkpoint stays intact.

    Args:
        folder: the run's folder; other files in it are left alone.
        keep: the number of latest checkpoints to keep, besides the best.
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
        self._begun = 0  # the highest number of this object's checkpoints, completed or not
        #: Called with warnings about failed writes.
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
        except _REFUSALS as error:
            self.abandon(draft, refused(error))
            return False
        return self.commit(draft, facts, score)

    def begin(self) -> Draft | None:
        """Begin a checkpoint, and remove the leftovers of killed writers.

        Its number is new even if its predecessor was never completed, or was abandoned: a writer that was
        taken for dead may still go on with that one, and finds it gone.

        If the system refuses (disk full, folder read-only, no memory), warn and return None, because a failed
        checkpoint must not end the training. Each problem is warned of once until a checkpoint succeeds.
        """
        draft = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            number = max([self._begun, *self._numbers(), *self.remove_leftovers()]) + 1
            draft = self.draft(number)
            draft.folder.mkdir()
            self._begun = number
        except _REFUSALS as error:
            self.warn_once(refused(error))
            return None
        return draft

    def remove_leftovers(self) -> list[int]:
        """Remove what killed writers have left; return the numbers of these checkpoints."""
        numbers = []
        for path in list(self.folder.iterdir()):
            if match := _PART.fullmatch(path.name):
                numbers.append(int(match[1]))
                with contextlib.suppress(FileNotFoundError):  # its writer lives, and was faster
                    _set_aside_and_remove(path)
        return numbers

    def draft(self, number: int) -> Draft:
        """Return the draft that another process has begun, to write this process's files to."""
        return Draft(self.folder / f"{_name(number)}.part", number)

    def path(self, number: int) -> Path:
        """Return the folder of a checkpoint."""
        return self.folder / _name(number)

    def commit(self, draft: Draft, facts: Mapping[str, Any], score: float | None = None) -> bool:
        """Complete a checkpoint, remove old ones, and return whether it succeeded.

        Args:
            draft: with the entries of all files, including those of other processes.
            facts: the identity of the training, and its progress; JSON.
            score: the model's score, if known.
        """
        manifest = Manifest(number=draft.number, files=dict(draft.files), facts=facts, score=score)
        final = self.folder / _name(draft.number)
        try:
            _write(draft.folder, MANIFEST, manifest.written())
            _sync(draft.folder)
            draft.folder.rename(final)
        except _REFUSALS as error:
            self.abandon(draft, refused(error))
            return False
        try:
            _sync(self.folder)
            self._prune()
        except _REFUSALS as error:
            self.warn_once(refused(error))
        else:
            self._warned.clear()
        return True

    def abandon(self, draft: Draft, trouble: str) -> None:
        """Remove a draft that cannot be completed, and warn."""
        shutil.rmtree(draft.folder, ignore_errors=True)
        self.warn_once(trouble)

    # -- reading --------------------------------------------------------------------------------------

    def newest(
        self, unusable: Mapping[int, str] | None = None, tell: Callable[[str], object] = warn
    ) -> SavedCheckpoint | None:
        """Return the newest undamaged checkpoint; None if there is no checkpoint.

        Every file is compared with its checksum. If newer checkpoints are damaged, a warning names their
        damaged files and the problems.

        Args:
            unusable: problems of checkpoints that could not be loaded, by number; they are passed over.
            tell: called with the warnings.

        Raises:
            ConfigurationError: there are checkpoints, but all are damaged.
        """
        found: list[str] = []
        for number in sorted(self._numbers(), reverse=True):
            if unusable and number in unusable:
                found.append(f"{_name(number)} is damaged: {unusable[number]}")
                continue
            try:
                checkpoint = SavedCheckpoint.open(self.folder / _name(number), number)
                checkpoint.verify()
            except DamagedError as error:
                found.append(f"{_name(number)} is damaged: {error}")
                continue
            if found:
                told = "; ".join(found)
                tell(f"{self.folder}: {told}; resuming from {_name(number)} instead, which is undamaged")
            strangers = checkpoint.strangers()
            if strangers:
                tell(f"{checkpoint.folder}: ignored files that do not belong there: {', '.join(strangers)}")
            return checkpoint
        if found:
            raise ConfigurationError(
                f"cannot resume from {self.folder}: all its checkpoints are damaged: {'; '.join(found)}. "
                "Choose another folder, or delete this one to start anew"
            )
        return None

    def last(self) -> int:
        """Return the number of the newest checkpoint with a readable manifest; 0 if there is none."""
        for number in sorted(self._numbers(), reverse=True):
            with contextlib.suppress(DamagedError):
                return SavedCheckpoint.open(self.path(number), number).manifest.number
        return 0

    # -- inside ---------------------------------------------------------------------------------------

    def _numbers(self) -> list[int]:
        """Return the numbers of all checkpoints, including damaged ones."""
        if not self.folder.is_dir():
            return []
        matches = [_NAME.fullmatch(path.name) for path in self.folder.iterdir()]
        return [int(match[1]) for match in matches if match]

    def _prune(self) -> None:
        """Remove all but the last checkpoints and the best; keep folders without a valid manifest."""
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

    def warn_once(self, trouble: str) -> None:
        """Warn that no checkpoint could be written; once for each problem until a checkpoint succeeds."""
        if trouble not in self._warned:
            self._warned.add(trouble)
            self.tell(
                f"no checkpoint could be written to {self.folder}: {trouble}. The previous checkpoint is "
                "kept, and the training continues"
            )


def _name(number: int) -> str:
    return f"checkpoint-{number:06d}"


def refused(error: Exception) -> str:
    """Describe why a checkpoint cannot be written, and what to do; raise any other error again."""
    if is_out_of_memory(error):
        return "Out of memory; a checkpoint needs as much as the state for a copy, and once more to pack it"
    if isinstance(error, OSError):
        return f"{error.strerror or error}; free some space or make the folder writable"
    raise error


def _remove(checkpoint: SavedCheckpoint) -> None:
    """Remove a checkpoint after renaming it, so that a partly removed one is never read."""
    if checkpoint.strangers():
        # Keep the folder with the other files; without its manifest it is no checkpoint.
        with opened_folder(checkpoint.folder) as here:
            for name in (MANIFEST, *checkpoint.manifest.files):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=here)
        checkpoint.folder.rename(checkpoint.folder.with_name(f"{checkpoint.folder.name}.left"))
        return
    _set_aside_and_remove(checkpoint.folder)


def _set_aside_and_remove(folder: Path) -> None:
    """Rename a folder before it is removed, so that whoever completes it has it whole or not at all."""
    gone = folder.with_suffix(".gone")
    if folder != gone:
        remove_tree(gone)
        folder.rename(gone)
    remove_tree(gone)


def _write(folder: Path, name: str, data: bytes) -> None:
    with opened_folder(folder) as here, new_file(name, folder=here) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Sync a folder's names to disk; without it a power cut may leave a name without content."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
