"""Rank 0 runs the doctor; rank 1 is in the job but never answers."""

from __future__ import annotations

import sys
import time

from nnlo_common._cli import main
from nnlo_common._doctor import _run
from nnlo_common._startup import connect

_run._STEP_S = 1.0
world = connect()
assert world is not None
if world.rank == 1:
    time.sleep(60)
sys.exit(main(["doctor"]))
