"""Watched use of a model: predicting and tiling write the files of a training, for `top` and `report`."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nnlo_common.cluster._hosts import describe_here
from nnlo_common.cluster.transport._endpoint import RankWorld
from nnlo_common.inference import Watch
from nnlo_common.inference._running import PiecePace
from nnlo_common.training._rank_parts import TrainingReport
from nnlo_common.training.report._course import Moment
from nnlo_common.training.report._facts_writer import FactsWriter, RankPlace
from nnlo_common.training.report._live_ranks import LiveFile

__all__ = ["watched_use"]


@contextmanager
def watched_use(folder: str | Path | None, world: RankWorld | None) -> Iterator[Watch]:
    """Write what this rank does while the body uses a model: facts of its time, and where it is now.

    Args:
        folder: of the run; None: write nothing.
        world: the ranks; None: this process alone.

    Raises:
        ConfigurationError: the folder cannot be written.
    """
    if folder is None:
        yield Watch()
        return
    watch = _WatchedUse(folder, world)
    try:
        yield watch
        watch.complete()
    finally:
        watch.close()


class _WatchedUse(Watch):
    """Counts a rank's batches, and writes its files."""

    def __init__(self, folder: str | Path, world: RankWorld | None) -> None:
        self._folder, self._rank = folder, 0 if world is None else world.rank
        self._role = "lead" if self._rank == 0 else f"worker {self._rank}"
        if world is None or world.size == 1:
            self._role = "alone"
        self._samples = self._batches = 0
        self._share: float | None = None
        self._left_s: float | None = None
        self._pace = PiecePace()
        self._files: tuple[FactsWriter, LiveFile] | None = None

    def begin(self) -> None:
        """Begin both files."""
        here = describe_here()
        host, cores = str(here["host"]), int(here["cores"])
        place = RankPlace(rank=self._rank, role=self._role, host=host, cores=cores)
        facts = FactsWriter(self._folder, None, self._counts, place=place)
        live = LiveFile(self._folder, self._rank, self._role, host)
        self._files = facts, live
        live.start()

    def batch(self, samples: int) -> None:
        """Count a batch."""
        self._samples += samples
        self._batches += 1
        self._note()

    def pieces(self, done: int, pieces: int) -> None:
        """Take note of how much of all is written."""
        self._share = done / max(pieces, 1)
        self._left_s = self._pace.left_s(done, pieces, time.perf_counter())
        self._note()

    def complete(self) -> None:
        """Write what this rank has done in all."""
        if self._files is not None:
            self._files[0].epoch(0, {"samples": self._samples}, math.nan, {})

    def close(self) -> None:
        """End both files."""
        if self._files is not None:
            facts, live = self._files
            facts.close()
            live.end()

    def _note(self) -> None:
        moment = Moment(epoch=1, epochs=1, share=self._share, left_s=self._left_s)
        if self._files is not None:
            self._files[1].note(moment, self._counts(), {})

    def _counts(self) -> TrainingReport:
        return TrainingReport(steps=self._batches, samples=self._samples)
