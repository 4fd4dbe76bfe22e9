"""Reading of pickles, which runs code from the file: only with --allow-pickle, and only here."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from nnlo_common.base._file_access import readable_file
from nnlo_common.commands.train._python_file import running

__all__ = ["unpickled"]


def unpickled(path: Path) -> Any:
    """Return the contents of a pickle that the user trusts."""
    with running(path, "while it was unpickled"), readable_file(path) as file:
        return pickle.load(file)
