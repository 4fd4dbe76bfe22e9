"""Rank 0 runs the doctor; rank 1 is in the job but never answers."""

from __future__ import annotations

import sys
import time

from nnlo_common.cluster._connecting import connect
from nnlo_common.commands._cli import main
from nnlo_common.commands.doctor import _doctor_command

_doctor_command._STEP_S = 1.0
world = connect()
assert world is not None
if world.rank == 1:
    time.sleep(60)
sys.exit(main(["doctor"]))
