"""Log file of a rank: messages of nnlo's loggers and warnings, with host and rank in name and header."""

from __future__ import annotations

import io
import logging
import os
import shlex
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from nnlo_common.base._file_access import append_file
from nnlo_common.base._whole_files import usable

__all__ = ["LOGGERS", "logged_to"]

#: The loggers of the packages.
LOGGERS = ("nnlo_common", "nnlo_keras", "nnlo_torch")
_FORM = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


@contextmanager
def logged_to(
    folder: str | Path, rank: int, size: int, host: str, *, asked: str
) -> Iterator[logging.Handler]:
    """Write the messages and warnings of this process to a file of its own, as they come.

    The levels of the loggers stay as they are; a message that a logger drops is not written.

    Args:
        folder: of the files; it is made.
        rank: this rank's number.
        size: how many ranks there are.
        host: this rank's machine.
        asked: the option that named the folder, for the error message.

    Raises:
        ConfigurationError: the file cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with logged_to(folder, 1, 3, "node07", asked="--log-dir"):
        ...         logging.getLogger("nnlo_common").warning("a server is late")
        ...     (path,) = Path(folder).iterdir()
        ...     name, (head, line) = path.name, path.read_text().splitlines()
        >>> name, head[:30], line[24:]
        ('rank1.node07.log', '# rank 1 of 3 on node07, proce', 'WARNING nnlo_common: a server is late')
    """
    path = usable(f"{asked} {folder}", Path(folder) / f"rank{rank}.{host}.log")
    with io.TextIOWrapper(append_file(path), "utf-8", errors="backslashreplace", line_buffering=True) as file:
        _begin(file, rank, size, host)
        handler = logging.StreamHandler(file)
        handler.setFormatter(logging.Formatter(_FORM))
        for name in LOGGERS:
            logging.getLogger(name).addHandler(handler)
        shown: Any = warnings.showwarning

        def show(message: Any, category: Any, filename: str, line: int, *rest: Any) -> None:
            told = f"{filename}:{line}: {category.__name__}: {message}"
            handler.emit(logging.LogRecord("warnings", logging.WARNING, filename, line, told, None, None))
            shown(message, category, filename, line, *rest)

        setattr(warnings, "showwarning", show)  # noqa: B010 - its type is narrower than its use
        try:
            yield handler
        finally:
            if vars(warnings)["showwarning"] is show:
                warnings.showwarning = shown
            for name in LOGGERS:
                logging.getLogger(name).removeHandler(handler)


def _begin(file: TextIO, rank: int, size: int, host: str) -> None:
    """Write the header; a resumed run has one for each start."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    command = shlex.join(sys.argv)
    file.write(f"# rank {rank} of {size} on {host}, process {os.getpid()}, {now}: {command}\n")
