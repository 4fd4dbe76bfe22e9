"""Data that a script gives to `optimizer.epoch`: a warning if every worker trains on all of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch

from nnlo_common.plugin import NoteQuery, Session, all_same, as_values, mark_of, span, warn

__all__ = ["read", "warn_of_same_data"]

# -- batches of any loader, with the time that they take -----------------------------------------------

_Batch = TypeVar("_Batch")


def read(batches: Iterable[_Batch]) -> Iterator[_Batch]:
    """Yield the batches; the time to get each is that of reading."""
    source = iter(batches)
    while True:
        with span("read", "batch"):
            try:
                batch = next(source)
            except StopIteration:
                return
        yield batch


def warn_of_same_data(team: Session, batches: Any) -> None:
    """Warn, once and on one worker, of a loader that gives the same whole data set to all workers.

    No worker waits for another: each sends the server a mark of its data, and the last one sees all marks.

    Args:
        team: the session of a worker.
        batches: what the worker loops over in its first epoch.
    """
    _, workers = team.share
    mark = mark_of(batches.dataset, parts=_parts) if workers > 1 and _gives_all(batches) else 0
    if not mark:
        return
    answer = team.ask(NoteQuery(epoch=0, values=as_values(mark), weight=1))
    if answer.weight == workers and all_same(answer.means):
        warn(
            f"optimizer.epoch() was given a DataLoader of the same data on all {workers} workers, so each "
            f"trains on all samples, and an epoch has each {workers} times; give each worker its share: "
            "DataLoader(data, sampler=nnlo_torch.ShardSampler(data))"
        )


def _gives_all(batches: Any) -> bool:
    """Return whether a loader draws each sample of a data set once; a sampler of the user's may share."""
    if not isinstance(batches, torch.utils.data.DataLoader):
        return False
    if type(batches.batch_sampler) not in (torch.utils.data.BatchSampler, type(None)):
        return False
    sampler: Any = batches.sampler
    if type(sampler) is torch.utils.data.RandomSampler:
        return not sampler.replacement and sampler.num_samples == len(batches.dataset)  # type: ignore[arg-type]
    return type(sampler) is torch.utils.data.SequentialSampler


def _parts(data: object) -> list[Any]:
    return [*getattr(data, "__dict__", {}).values()]
