"""Paths that scripts write models to: whether every rank writes the same one."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

__all__ = ["names_rank", "path_of"]


def path_of(file: Any) -> str | None:
    """Return the path that is written to; None: there is none, or each rank has another.

    Example:
        >>> path_of(Path("model.pt")), path_of(3)
        ('model.pt', None)
    """
    if type(file).__module__ == "tempfile":
        return None
    named = file if isinstance(file, str | os.PathLike) else getattr(file, "name", None)
    return os.fsdecode(named) if isinstance(named, str | bytes | os.PathLike) else None


def names_rank(path: str, rank: int) -> bool:
    """Return whether the file or its folder is named after the rank or the first worker.

    Example:
        >>> names_rank("run/model-1.pt", 1), names_rank("run/model.pt", 1), names_rank("worker0/model.pt", 1)
        (True, False, True)
    """
    last = "/".join(Path(path).parts[-2:])
    return re.search(rf"(?<!\d)0*{rank}(?!\d)|worker\D?0(?!\d)", last, re.IGNORECASE) is not None
