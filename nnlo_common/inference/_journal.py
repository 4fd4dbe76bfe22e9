"""ResultJournal of a result that many ranks write: what it is, and which pieces are written, on the disk.

    scores.h5               appears when all is done
    scores.h5.parts/
        manifest.json       what is computed, from what, with what: another job may only continue the same
        done.jsonl          a line for each piece that is written; its end may be torn by a kill
        ...                 the parts of the sink

A line is appended when its piece is on the disk, so that the same command after a kill does the others only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._file_access import (
    append_file,
    hold_lock,
    new_folder,
    read_whole,
    release_lock,
    remove_tree,
    write_whole,
)
from nnlo_common.base._limited_formats import LARGEST_JSON, parsed_json

__all__ = ["ResultJournal", "full_disk", "parts_folder"]

_MANIFEST, _DONE = "manifest.json", "done"
_KIND = "nnlo.inference"
_LARGEST_JOURNAL = 2**32


def parts_folder(path: Path) -> Path:
    """Return the folder beside a result for its parts."""
    return path.with_name(path.name + ".parts")


def full_disk(path: Path, error: OSError) -> ConfigurationError:
    """Return the error about a result that cannot be written further."""
    return ConfigurationError(
        f"{path} cannot be written further ({error.strerror or error}); make room, then rerun the same "
        "command: what is written stays"
    )


class ResultJournal:
    """The record of the pieces that are written.

    Args:
        path: of the result.
        facts: all that determines its numbers (JSON); another job must have the same to continue.
        share: names the part of the pieces that this job does, of a job array; empty: all.

    Attributes:
        notes: what was noted about each piece that is written, by its number.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for piece in (0, 1):
        ...         with ResultJournal(Path(folder, "y.h5"), {"rows": 7}) as journal:
        ...             journal.note(piece, {"rows": 3})
        ...     journal.notes
        {0: {'rows': 3}, 1: {'rows': 3}}
    """

    def __init__(self, path: Path, facts: Mapping[str, Any], share: str = "") -> None:
        self.path, self.folder, self.notes = path, parts_folder(path), dict[int, Any]()
        self._facts = {"kind": _KIND, **json.loads(json.dumps(facts))}
        self._file = self.folder / f"{_DONE}{f'.{share}' if share else ''}.jsonl"
        self._lock = self.folder / f"in-use{f'.{share}' if share else ''}"
        self._open: Any = None

    def begin(self, *, overwrite: bool = False) -> bool:
        """Begin the result, or continue it; return whether it is continued.

        Raises:
            ConfigurationError: it exists, is another one, or cannot be written.
        """
        try:
            if overwrite:
                self._remove()
            elif self.path.exists() or self.path.is_symlink():
                raise ConfigurationError(
                    f"{self.path} exists already; name another file, delete it, or overwrite it with "
                    "--overwrite (overwrite=True)"
                )
            new_folder(self.folder)
            hold_lock(self._lock, f"writing {self.path}", "file")
            continued = self._check_same()
            if not continued:
                write_whole(self.folder / _MANIFEST, json.dumps(self._facts, indent=1))
            self.read()
            self._open = append_file(self._file)
            self._open.write(b"\n")  # ends a line that a kill has torn
        except OSError as error:
            raise ConfigurationError(
                f"{self.path} cannot be written ({error.strerror or error}); name a file in a writable folder"
            ) from None
        return continued

    def read(self) -> None:
        """Read the notes that all jobs have written."""
        for file in sorted(self.folder.glob(f"{_DONE}*.jsonl")):
            for line in read_whole(file, _LARGEST_JOURNAL, follow=False).splitlines():
                with suppress(ValueError):  # torn
                    found = parsed_json(line)
                    if isinstance(found, dict) and type(found.get("piece")) is int:
                        self.notes[found["piece"]] = found.get("note")

    def note(self, piece: int, note: Any) -> None:
        """Record a piece as written."""
        self.notes[piece] = note
        try:
            self._open.write(json.dumps({"piece": piece, "note": note}).encode() + b"\n")
            self._open.flush()
        except OSError as error:
            raise full_disk(self.path, error) from None

    def finishes(self) -> bool:
        """Return whether this job completes the result, and no other one of its array."""
        try:
            hold_lock(self.folder / "in-use.end", f"completing {self.path}", "file")
        except ConfigurationError:
            return False
        return not self.path.exists()

    def close(self) -> None:
        """Close the file, and let other jobs continue."""
        if self._open is not None:
            with suppress(OSError):
                self._open.close()
            self._open = None
            release_lock(self._lock)
            release_lock(self.folder / "in-use.end")

    def forget(self) -> None:
        """Remove the record of a complete result, and the folder if nothing else is in it."""
        self.close()
        with suppress(OSError):
            for file in (*self.folder.glob(f"{_DONE}*.jsonl"), *self.folder.glob("in-use*")):
                file.unlink()
            if {one.name for one in self.folder.iterdir()} == {_MANIFEST}:
                remove_tree(self.folder)

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_same(self) -> bool:
        """Return whether the folder has a result under way; refuse another one."""
        file = self.folder / _MANIFEST
        if not file.exists():
            # Another job of an array may begin at the same time.
            if any(not one.name.startswith(("in-use", "manifest")) for one in self.folder.iterdir()):
                raise ConfigurationError(
                    f"{self.folder} is not a folder that nnlo has begun; name another file than {self.path}"
                )
            return False
        there = self._there()
        for name in [*there, *self._facts]:
            if there.get(name) != self._facts.get(name):
                raise ConfigurationError(
                    f"{self.folder} has another result under way: its {name} is {there.get(name)!r:.80}, "
                    f"here it is {self._facts.get(name)!r:.80}; name another file, or begin anew with "
                    "--overwrite (overwrite=True)"
                )
        return True

    def _there(self) -> dict[str, Any]:
        file = self.folder / _MANIFEST
        try:
            found = parsed_json(read_whole(file, LARGEST_JSON, follow=False))
        except ValueError as error:
            raise ConfigurationError(f"{file} is damaged ({error}); remove {self.folder}") from None
        if not isinstance(found, dict) or found.get("kind") != _KIND:
            raise ConfigurationError(f"{file} is not one of nnlo's; name another file than {self.path}")
        return found

    def _remove(self) -> None:
        """Remove an earlier result with its parts; the parts only if they are ours."""
        if self.folder.is_dir() and not self.folder.is_symlink():
            if (self.folder / _MANIFEST).exists():
                self._there()
            elif any(self.folder.iterdir()):
                raise ConfigurationError(
                    f"{self.folder} is not a folder that nnlo has begun; remove it yourself"
                )
            hold_lock(self._lock, f"writing {self.path}", "file")
            release_lock(self._lock)
            remove_tree(self.folder)
        if self.path.is_dir() and not self.path.is_symlink() and self.path.suffix != ".zarr":
            raise ConfigurationError(f"{self.path} is a folder; name a file")
        if self.path.exists() or self.path.is_symlink():
            remove_tree(self.path)
