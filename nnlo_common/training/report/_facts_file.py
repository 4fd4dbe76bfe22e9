"""Facts of a run: a file of JSON lines for each rank, as they happen; docs/internals.md has the format."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._file_access import append_file, readable_file
from nnlo_common.base._limited_formats import parsed_json
from nnlo_common.base._whole_files import RANKS, of_rank, usable

__all__ = ["FactsFile", "facts_files", "read_facts"]

_LOG = logging.getLogger(__name__)
_NAME = "facts.jsonl"
#: A line beyond it is none of ours.
_LONGEST = 1 << 20


class FactsFile:
    """Appends lines to this rank's file; each is one write, so that a killed process leaves whole lines.

    A line that cannot be written, as on a full disk, is left out.

    Args:
        folder: of the run.
        rank: this rank's number.
        asked: the option that named the folder, for the error message.

    Raises:
        ConfigurationError: the file cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     FactsFile(folder, 1).add("epoch", epoch=0, metrics={"loss": float("nan")})
        ...     ((path, rank),) = facts_files(Path(folder))
        ...     (line,) = read_facts(path)
        >>> path.name, rank, line["what"], line["metrics"]
        ('facts.rank1.jsonl', 1, 'epoch', {'loss': None})
    """

    def __init__(self, folder: str | Path, rank: int, asked: str = "") -> None:
        self.path = usable(asked or f"Report({str(folder)!r})", of_rank(folder, _NAME, rank))
        self._broken = False

    def add(self, what: str, **facts: Any) -> None:
        """Append a line.

        Args:
            what: its kind: "start", "epoch", "sample", "stall", "lost", "diverged" or "end".
            facts: by name; numbers that are not finite become null.
        """
        line = {"what": what, "time": round(time.time(), 6), **facts}
        try:
            with append_file(self.path) as file:
                file.write(f"{json.dumps(_finite(line), default=str)}\n".encode())
        except (OSError, MemoryError) as error:
            if not self._broken:
                self._broken = True
                _LOG.warning("%s cannot be written (%s); the training goes on", self.path, error)


def facts_files(folder: Path) -> Iterator[tuple[Path, int]]:
    """Yield the files of all ranks in a run's folder, with the rank of each, in no order."""
    for path in (folder / RANKS).glob("facts.rank*.jsonl"):
        number = path.name.removeprefix("facts.rank").removesuffix(".jsonl")
        if number.isdecimal() and len(number) < 7:
            yield path, int(number)


def read_facts(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the lines of a file; the last one may be cut off, where a rank was killed.

    Raises:
        ConfigurationError: it cannot be read, or another line is damaged.
    """
    try:
        with readable_file(path) as file:
            number, line = 0, file.readline(_LONGEST)
            while line:
                number, following = number + 1, file.readline(_LONGEST)
                if line != b"\n":
                    found = _parsed(path, number, line, is_last=not following)
                    if found is None:
                        return
                    yield found
                line = following
    except OSError as error:
        raise ConfigurationError(f"{path}: {error}") from None


def _parsed(path: Path, number: int, line: bytes, *, is_last: bool) -> Mapping[str, Any] | None:
    try:
        found = parsed_json(line)
    except ValueError as error:
        if is_last and not line.endswith(b"\n"):
            return None
        raise ConfigurationError(f"{path}, line {number}: {error}; remove that line") from None
    if not isinstance(found, Mapping) or not isinstance(found.get("what"), str):
        raise ConfigurationError(f"{path}, line {number}: is none of a report; remove that line")
    return found


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value
