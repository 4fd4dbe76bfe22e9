"""Files that ranks write: each its own, and whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nnlo_common.base._errors import ConfigurationError

__all__ = ["of_rank", "usable", "whole"]


def of_rank(path: str | Path, rank: int) -> Path:
    """Return a path with the rank in its name, so that every rank writes a file of its own.

    Example:
        >>> of_rank("monitor.jsonl", 2).name
        'monitor.rank2.jsonl'
    """
    path = Path(path)
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def usable(asked: str, path: Path) -> Path:
    """Return a path whose folder exists and can be written to, or refuse it before a training is spent.

    Args:
        asked: how the user asked for it.
        path: the file's.
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
    """Give a name to write to, which becomes `path` when all is written: nobody ever sees half a file.

    Where that fails nothing is left of it.

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
        with fresh.open("rb") as file:  # or a power cut may leave the new name with nothing behind it
            os.fsync(file.fileno())
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
