"""Ranks that read one compressed file through the cache; each tells what it decoded and what it holds."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from mpi4py import MPI

from nnlo_common.data import FileBatches, FileSource
from nnlo_common.data._memory_cache import cached_mb

world, folder = MPI.COMM_WORLD, Path(sys.argv[1])
decoded: list[int] = []
decode = FileSource._decode


def counting(source, start, stop, out):
    decoded.append(stop - start)
    decode(source, start, stop, out)


FileSource._decode = counting
batches = FileBatches(str(folder / "a.h5"), "these", trained_on=True, features="x", batch_size=50)
batches.take_share(world.rank, world.size)
seen = [sum(len(x) for (x,) in batches.epoch(epoch)) for epoch in range(3)]
world.Barrier()
lines = Path("/proc/self/smaps").read_text().split("memfd:nnlo-samples")[1:]
shared_kb = sum(int(part.partition("Pss:")[2].split()[0]) for part in lines)
facts = {"decoded": sum(decoded), "seen": seen, "pss_mb": shared_kb / 1000, "cached_mb": cached_mb()}
world.Barrier()  # all have looked
Path(folder, f"rank{world.rank}.json").write_text(json.dumps(facts))
world.Barrier()
if len(sys.argv) > 2:
    os.kill(os.getpid(), 9)
batches.close()
