"""The one place where pickles are read: runs code from the file, so only if --allow-pickle was given."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from nnlo_common.commands.train._python_file import running

__all__ = ["unpickled"]


def unpickled(path: Path) -> Any:
    """Return what a pickle holds, which the user has said to trust."""
    with running(path, "while it was unpickled"), path.open("rb") as file:
        return pickle.load(file)
