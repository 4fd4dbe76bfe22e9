"""Manifest of a checkpoint: its files, their lengths and their checksums."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from nnlo_common.base._arguments import is_number, is_whole
from nnlo_common.base._limited_formats import parsed_json

__all__ = ["MANIFEST", "DamagedError", "Entry", "Manifest", "is_file_name", "new_digest"]

#: Written last: without it there is no checkpoint.
MANIFEST = "manifest.json"
_FORMAT = 1
_FILE = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)+")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_LONGEST = 200  # characters in a file's name


class DamagedError(Exception):
    """A checkpoint differs from what was written; the message names the file and the problem."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Size and checksum of one file, as it was written.

    Example:
        >>> entry = Entry.of(b"abc")
        >>> entry.problem(b"abc"), entry.problem(b"ab"), entry.problem(b"xyz")
        (None, 'has 2 bytes, not 3', 'has other content than was written')
    """

    size: int
    blake2b: str

    @classmethod
    def of(cls, data: bytes) -> Entry:
        """Return the entry of a file with this content."""
        return cls(len(data), _digest(data))

    def problem(self, data: bytes) -> str | None:
        """Describe how this content differs from what was written; None if it does not."""
        return self.problem_of_size(len(data)) or self.problem_of_digest(_digest(data))

    def problem_of_size(self, size: int) -> str | None:
        """Describe how this size differs from what was written; None if it does not."""
        return None if size == self.size else f"has {size} bytes, not {self.size}"

    def problem_of_digest(self, digest: str) -> str | None:
        """Describe how this checksum differs from what was written; None if it does not."""
        return None if digest == self.blake2b else "has other content than was written"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Manifest of a checkpoint.

    Attributes:
        number: of the checkpoint; each is one above the last.
        files: the entries by name.
        facts: the identity of the training, and its progress.
        score: the model's score, if known.

    Example:
        >>> manifest = Manifest(number=1, files={"rank0.json": Entry.of(b"")}, facts={"epoch": 3})
        >>> Manifest.read(manifest.written()) == manifest
        True
    """

    number: int
    files: Mapping[str, Entry]
    facts: Mapping[str, Any] = field(default_factory=dict)
    score: float | None = None

    def written(self) -> bytes:
        """Return the manifest as readable JSON, with its own checksum."""
        content = {"format": _FORMAT, **asdict(self)}
        return json.dumps({**content, "checksum": _checksum(content)}, indent=1).encode()

    @classmethod
    def read(cls, data: bytes) -> Manifest:
        """Parse the bytes that `written` returned.

        Raises:
            DamagedError: they are damaged, or of another version.
        """
        try:
            content = parsed_json(data)
            version, checksum = content.pop("format"), content.pop("checksum")
            files = {name: Entry(**entry) for name, entry in content.pop("files").items()}
            manifest = cls(files=files, **content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedError(f"{MANIFEST} cannot be read") from error
        if version != _FORMAT:
            raise DamagedError(f"{MANIFEST} was written by another version of nnlo")
        if manifest.written() != data or checksum != _checksum({"format": version, **asdict(manifest)}):
            raise DamagedError(f"{MANIFEST} was changed after it was written")
        if problem := manifest._problem():
            raise DamagedError(f"{MANIFEST} {problem}")
        return manifest

    def _problem(self) -> str | None:
        """Describe what no writer of checkpoints would have written; None if all is right."""
        if not is_whole(self.number, 1):
            return f"has the number {self.number!r:.60}"
        facts: object = self.facts  # JSON may hold anything
        if not isinstance(facts, Mapping):
            return "has no facts about its training"
        if self.score is not None and not is_number(self.score):
            return f"has the score {self.score!r:.60}"
        for name, entry in self.files.items():
            if not is_file_name(name):
                return f"names the file {name!r:.60}, which cannot be in a checkpoint"
            if not is_whole(entry.size, 0) or not _is_digest(entry.blake2b):
                return f"has no size or checksum of {name}"
        return None


def is_file_name(name: str) -> bool:
    """Return whether a file of a checkpoint may have this name: without folders, with a suffix."""
    return name != MANIFEST and len(name) <= _LONGEST and _FILE.fullmatch(name) is not None


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def _digest(data: bytes) -> str:
    return new_digest(data).hexdigest()


def new_digest(data: bytes = b"") -> hashlib.blake2b:
    """Return the checksum of files, to be updated."""
    return hashlib.blake2b(data, digest_size=16)


def _checksum(content: Mapping[str, Any]) -> str:
    return _digest(json.dumps(content, sort_keys=True).encode())
