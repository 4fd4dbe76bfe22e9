"""Plan of a job of tiles: what it will read, hold, compute and take, before anything is computed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from nnlo_common.inference._tile_run import TileRun
from nnlo_common.inference.sinks import Region

__all__ = ["TilePlan", "job_script", "planned_tiles"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TilePlan:
    """What a job of tiles will do.

    Attributes:
        tiles: how many there are.
        pieces: in which the result is written.
        looks: how often the model gets a tile: with flips, and those that several pieces need.
        margin: for each axis.
        measured: whether the margin was measured.
        volume_bytes: of the volume.
        read_bytes: that are asked of the file.
        chunk_bytes: that the file system has to read for it, in whole chunks; None: the file has none.
        result_bytes: that are written, without compression.
        memory_bytes: that a rank holds at most, beside the model and what it needs within.
        flop: floating-point operations of all; None: unknown.
        seconds: that one rank takes, by the time of one tile.
    """

    tiles: int
    pieces: int
    looks: int
    margin: tuple[int, ...]
    measured: bool
    volume_bytes: int
    read_bytes: int
    chunk_bytes: int | None
    result_bytes: int
    memory_bytes: int
    flop: float | None
    seconds: float

    def lines(self, ranks: int) -> Iterator[str]:
        """Yield the plan for people."""
        margin = " x ".join(map(str, self.margin)) + (" (measured)" if self.measured else "")
        yield f"tiles    {self.tiles}, margin {margin}; the model looks at {self.looks}"
        yield f"pieces   {self.pieces}, each written once"
        chunks = "" if self.chunk_bytes is None else f", {_size(self.chunk_bytes)} in whole chunks"
        factor = self.read_bytes / max(self.volume_bytes, 1)
        yield f"reads    {_size(self.read_bytes)} of {_size(self.volume_bytes)} ({factor:.2f} times){chunks}"
        yield f"writes   {_size(self.result_bytes)}"
        yield f"memory   {_size(self.memory_bytes)} for each rank, beside the model"
        if self.flop is not None:
            yield f"computes {self.flop:.3g} floating-point operations"
        hours = self.seconds / 3600 / max(ranks, 1)
        who = "1 rank" if ranks <= 1 else f"{ranks} ranks"
        yield f"takes    about {hours:.2g} hours on {who}, as one tile takes here"


def planned_tiles(run: TileRun) -> TilePlan:
    """Return the plan of a job."""
    volume, tiling = run.volume, run.tiling
    read = chunks = looks = largest = 0
    inner = 0
    for piece in range(tiling.pieces):
        region, needed = tiling.piece(piece), run.input_of(piece)[1]
        voxels = _voxels(needed)
        read += voxels * volume.voxel_bytes
        if volume.chunks is not None:
            chunks += _whole_chunks(needed, volume.chunks, volume.shape) * volume.voxel_bytes
        largest, inner = max(largest, voxels), max(inner, _voxels(region))
        looks += sum(1 for _ in tiling.tiles_of(region))
    if run.options.blend != "crop":
        looks = tiling.tiles  # on one rank; others compute some of their neighbours' again
    looks *= volume.items * len(run.flips)
    tile = math.prod(tiling.tile)
    outputs = run.score_bytes
    batch = min(run.options.batch_size, tiling.tiles)
    some = (0, tiling.pieces // 2)
    piece_tiles = max(sum(1 for _ in tiling.tiles_of(tiling.piece(at))) for at in some)
    weights = inner * 4 + tile * 4 if run.options.blend != "crop" else 0
    memory = 2 * largest * volume.voxel_bytes + batch * tile * (2 * volume.voxel_bytes + 2 * outputs)
    memory += (
        piece_tiles * tile * outputs + inner * outputs + weights + 3 * math.ceil(inner * run.voxel_bytes)
    )
    flops: Any = getattr(run.compute, "flops", None)
    sample = np.zeros((1, volume.channels, *tiling.tile), volume.dtype)
    return TilePlan(
        tiles=tiling.tiles * volume.items,
        pieces=run.pieces,
        looks=looks,
        margin=tiling.margin,
        measured=run.field is not None and run.options.margin is None,
        volume_bytes=math.prod(volume.shape) * volume.items * volume.voxel_bytes,
        read_bytes=read * volume.items,
        chunk_bytes=chunks * volume.items if volume.chunks is not None else None,
        result_bytes=sum(math.prod(one.shape) * one.dtype.itemsize for one in run.wholes.values()),
        memory_bytes=memory,
        flop=None if flops is None else flops(sample) * looks,
        seconds=run.tile_seconds() / len(run.flips) * looks,
    )


def job_script(command: str, ranks: int, hours: float) -> str:
    """Return a batch script of Slurm for a job of ranks; as a comment, one of an array without MPI.

    Args:
        command: of the job, without `--plan`.
        ranks: how many.
        hours: that it takes.

    Example:
        >>> print(job_script("nnlo tile net.pt --data v.h5 --out y.h5", 8, 1.6))
        #!/bin/sh
        #SBATCH --ntasks=8 --time=0-04
        # The same script again continues after the time limit.
        srun --mpi=pmix nnlo tile net.pt --data v.h5 --out y.h5
        # Without MPI: sbatch --array=1-8, and the line
        # nnlo tile net.pt --data v.h5 --out y.h5 --part auto
    """
    limit = max(math.ceil(2 * hours), 1)
    return "\n".join(
        [
            "#!/bin/sh",
            f"#SBATCH --ntasks={ranks} --time={limit // 24}-{limit % 24:02}",
            "# The same script again continues after the time limit.",
            f"srun --mpi=pmix {command}",
            f"# Without MPI: sbatch --array=1-{ranks}, and the line",
            f"# {command} --part auto",
        ]
    )


def _voxels(region: Region) -> int:
    return math.prod(one.stop - one.start for one in region)


def _whole_chunks(region: Region, chunks: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Return the voxels of all chunks that a region touches."""
    return math.prod(
        min(-(-one.stop // chunk) * chunk, size) - one.start // chunk * chunk
        for one, chunk, size in zip(region, chunks, shape, strict=True)
    )


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
