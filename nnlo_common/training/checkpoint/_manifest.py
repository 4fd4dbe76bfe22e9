"""Manifest of a checkpoint: its files, their lengths and their checksums."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["MANIFEST", "DamagedError", "Entry", "Manifest"]

#: Written last: without it there is no checkpoint.
MANIFEST = "manifest.json"
_FORMAT = 1


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
        if len(data) != self.size:
            return f"has {len(data)} bytes, not {self.size}"
        return None if _digest(data) == self.blake2b else "has other content than was written"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Manifest of a checkpoint.

    Attributes:
        number: of the checkpoint; each is one above the last.
        files: the entries by name.
        facts: the identity of the training, and its progress.
        score: the model's score, if known.

    Example:
        >>> manifest = Manifest(number=1, files={"a": Entry.of(b"")}, facts={"epoch": 3})
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
            content = json.loads(data)
            version, checksum = content.pop("format"), content.pop("checksum")
            files = {name: Entry(**entry) for name, entry in content.pop("files").items()}
            manifest = cls(files=files, **content)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedError(f"{MANIFEST} cannot be read") from error
        if version != _FORMAT:
            raise DamagedError(f"{MANIFEST} was written by another version of nnlo")
        if manifest.written() != data or checksum != _checksum({"format": version, **asdict(manifest)}):
            raise DamagedError(f"{MANIFEST} was changed after it was written")
        return manifest


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _checksum(content: Mapping[str, Any]) -> str:
    return _digest(json.dumps(content, sort_keys=True).encode())
