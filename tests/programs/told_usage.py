"""A program under GNU time, or under what tells the same where that is not installed."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

folder, *command = sys.argv[1:]
rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or "0"
told, words = Path(folder) / f"usage.rank{rank}.txt", [sys.executable, *command]
if (gnu_time := shutil.which("time")) is not None:
    os.execv(gnu_time, [gnu_time, "-v", "-o", str(told), *words])
_, status, used = os.wait4(os.posix_spawn(sys.executable, words, os.environ), 0)
told.write_text(
    f"User time (seconds): {used.ru_utime}\nSystem time (seconds): {used.ru_stime}\n"
    f"Maximum resident set size (kbytes): {used.ru_maxrss}\n"
)
sys.exit(os.waitstatus_to_exitcode(status))
