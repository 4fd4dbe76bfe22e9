"""Join the job and say what was found; the ranks' texts arrive whole and in order."""

from __future__ import annotations

import sys

from nnlo_common.cluster._connecting import connect, require_threads

world = connect()
if world is None:
    print("alone, mpi4py loaded:", "mpi4py" in sys.modules)
    sys.exit()
require_threads(world, "SERIALIZED")
texts = world.gather_text("é" * world.rank)
assert texts == ["é" * rank for rank in range(world.size)], texts
if world.rank == 0:
    print(f"{world.size} ranks, {world.library}, {world.thread_level}")
    print(f"ulfm {world.ulfm_built()} {world.has_ulfm()}, cuda {world.cuda_aware()}")
