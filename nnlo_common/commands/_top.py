"""`nnlo top`: read what the ranks have written, draw it, wait, again. It writes nothing and needs no MPI."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nnlo_common.base._errors import ConfigurationError, MissingExtraError
from nnlo_common.commands.train._job import REFUSED, tell
from nnlo_common.training.report._live_ranks import LiveRun, read_live
from nnlo_common.training.report._live_table import live_table, rich_module

__all__ = ["run_top"]

_AROUND = 12  # lines of a screen that are kept for alarms and the prompt
_FEWEST = 3
_WIDTH = 200  # where the output is no terminal


def run_top(
    run: str, *, once: bool = False, every_s: float = 2.0, wait: Callable[[float], object] = time.sleep
) -> int:
    """Show the ranks of a run until it ends or a key interrupts; return the exit status.

    Args:
        run: its folder.
        once: print one table and end; so it is, too, where the output is no terminal.
        every_s: seconds between two looks.
        wait: waits so many seconds.
    """
    folder = Path(run)
    try:
        rich = rich_module("nnlo top")
        found = _look(folder)
    except (ConfigurationError, MissingExtraError) as error:
        tell(str(error), "top")
        return REFUSED
    console = rich.console.Console(highlight=False)
    if once or not console.is_terminal:
        if not console.is_terminal:
            console.width = max(console.width, _WIDTH)
        console.print(live_table(found))
        return 0
    try:
        _follow(rich, console, folder, every_s, wait)
    except ConfigurationError as error:  # somebody has removed it
        tell(str(error), "top")
        return REFUSED
    except KeyboardInterrupt:
        return 0
    return 0


def _follow(rich: Any, console: Any, folder: Path, every_s: float, wait: Callable[[float], object]) -> None:
    with rich.live.Live(console=console, auto_refresh=False) as live:
        while True:
            found = _look(folder)
            live.update(live_table(found, max(_FEWEST, console.height - _AROUND)), refresh=True)
            if found.ended:
                return
            wait(every_s)


def _look(folder: Path) -> LiveRun:
    """Read a run once, and refuse what is none.

    Raises:
        ConfigurationError: it is no folder of a run, or its ranks have written nothing yet.
    """
    if not folder.is_dir():
        raise ConfigurationError(f"{folder}: there is no such folder; name the folder of a run")
    found = read_live(folder)
    if not found.ranks and not found.unreadable:
        raise ConfigurationError(
            f"{folder} has no ranks/live.rank0.json: no rank has written there yet. `nnlo train` writes one "
            "for each rank; in a script give run=FOLDER to Progress"
        )
    return found
