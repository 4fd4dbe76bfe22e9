"""Files that ranks write: one for each rank, complete or absent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nnlo_common.base._errors import ConfigurationError

__all__ = ["of_rank", "usable", "whole"]


def of_rank(path: str | Path, rank: int) -> Path:
    """Return a path with the rank in its name, so that every rank writes its own file.

    Example:
        >>> of_rank("monitor.jsonl", 2).name
        'monitor.rank2.jsonl'
    """
    path = Path(path)
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def usable(asked: str, path: Path) -> Path:
    """Make the folder of `path` and return `path`; refuse it before the training if it is not writable.

    Args:
        asked: the option that named the file, for the error message.
        path: of the file.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = error.strerror
    else:
        if os.access(path.parent, os.W_OK) and not path.is_dir():
            return path
        problem = "it is a folder" if path.is_dir() else "no permission"
    raise ConfigurationError(f"{asked} cannot write {path} ({problem}); name a file in a writable folder")


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, and rename it to `path` at the end: no reader sees half a file.

    An error removes the temporary file.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with whole(Path(folder, "result.json")) as fresh:
        ...         _ = fresh.write_text("{}")
        ...     [one.name for one in Path(folder).iterdir()]
        ['result.json']
    """
    fresh = path.with_name(f"{path.stem}.part{path.suffix}")
    try:
        yield fresh
        with fresh.open("rb") as file:  # otherwise a power cut may leave the new name on an empty file
            os.fsync(file.fileno())
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
