"""Parts shared by the adapters for training loops of other packages: loaders and messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from nnlo_common.plugin import speaks
from nnlo_torch._iterable import ShardIterable
from nnlo_torch._joint import collective
from nnlo_torch._sampler import ShardSampler
from nnlo_torch._wrapper import Wrapper

__all__ = [
    "EpochBatches",
    "EpochServer",
    "center_tells",
    "leads",
    "most",
    "options_of",
    "refuse_layout",
    "sharded",
    "share_buffers",
    "stop_together",
]


class EpochServer:
    """Loader of a server rank: iterating serves an epoch and yields nothing.

    Args:
        sampler: begins the epoch.
        batches: the number of batches of the first worker, which schedulers are made from.
    """

    def __init__(self, sampler: Iterable[Any], batches: int) -> None:
        self.sampler, self._batches = sampler, batches

    def __iter__(self) -> Iterator[Any]:
        # Lazily: loops make iterators long before they take the first batch.
        yield from self.sampler

    def __len__(self) -> int:
        return self._batches


class EpochBatches:
    """Loader over an iterable data set: each loop is an epoch of the wrapper.

    It has no length, so that Lightning takes one batch ahead to know which is the last.

    Args:
        wrapper: begins the epoch; a server serves it and yields nothing.
        loader: yields this worker's batches.
    """

    def __init__(self, wrapper: Wrapper, loader: Iterable[Any]) -> None:
        self._wrapper, self._loader = wrapper, loader

    def __iter__(self) -> Iterator[Any]:
        return self._wrapper._epoch(self._loader, ahead=1)


def sharded(
    loader: Any,
    wrapper: Wrapper | None,
    rebuilt: Callable[[Any, Any], Any],
    **options: Any,
) -> Any:
    """Return a loader of this rank's share of each epoch.

    Args:
        loader: the user's DataLoader, which knows nothing of other ranks.
        wrapper: the wrapper of this training; None: it is not made yet.
        rebuilt: makes the same loader with another sampler.
        options: those of `ShardSampler`.
    """
    if wrapper is None:
        raise collective(
            "a loader was asked for before an optimizer was wrapped, so its share is unknown; wrap the "
            "optimizer first (nnlo_torch.Downpour(...)), then ask for the number of steps"
        )
    if not isinstance(loader, torch.utils.data.DataLoader):
        raise collective(
            f"a {type(loader).__name__} yields the training batches, but only a DataLoader can be shared "
            "among workers; give one, for a stream one of nnlo_torch.ShardIterable(...)"
        )
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        if not isinstance(loader.dataset, ShardIterable):
            raise collective(
                f"the data set of the training, a {type(loader.dataset).__name__}, is an IterableDataset, of "
                "which each worker would get all; wrap it in nnlo_torch.ShardIterable(...)"
            )
        return EpochBatches(wrapper, loader)
    given = loader.sampler, loader.batch_sampler
    own = next((one for one in given if isinstance(one, ShardSampler)), None)
    if own is not None and loader.num_workers:
        raise collective(
            "the training's DataLoader has a ShardSampler and num_workers, and the loop opens the loader "
            "before the first epoch; leave the sampler out, it is added for you"
        )
    if own is None and type(loader.batch_sampler) not in (torch.utils.data.BatchSampler, type(None)):
        raise collective(
            f"the training's DataLoader has a {type(loader.batch_sampler).__name__}; share its batches by "
            "batch_sampler=nnlo_torch.ShardSampler(your_batch_sampler)"
        )
    inner: Any = loader.sampler
    sampler = own or ShardSampler(inner, optimizer=wrapper, **options)
    if wrapper.serves:
        size = getattr(loader.batch_sampler, "batch_size", None) or 1
        whole = bool(loader.drop_last)
        batches = len(loader) if own is not None else (len(sampler) + (0 if whole else size - 1)) // size
        return EpochServer(sampler, batches)
    return loader if own is not None else rebuilt(loader, sampler)


def refuse_layout(wrapper: Wrapper, package: str) -> None:
    """Refuse several servers: one rank has to validate and save the whole model.

    Spares stay spares, and workers workers: these loops decide once whether a rank gets batches.

    Args:
        wrapper: that of this training.
        package: that has the loop, for the message.
    """
    if wrapper._team is None:
        return
    wrapper._team.let_spares_train(may=False)
    member = wrapper._team.member
    if wrapper._joint.ranks.heir:
        raise collective(
            f"heir=True is not possible with {package}, whose loop cannot begin to serve within an epoch; "
            "use spares=1, which needs one rank more"
        )
    wrapper._team.refuse_heirs()
    if member.sub_servers or member.servers > 1:
        name = "sub_servers" if member.sub_servers else "servers"
        raise collective(
            f"{package} needs one rank that validates and saves, but {name}={getattr(member, name)}; leave "
            f"{name}= out, or use servers=0"
        )


def leads(wrapper: Wrapper) -> bool:
    """Return whether this rank validates and saves: the server, or without one the first rank."""
    return speaks(wrapper.role)


def share_buffers(wrapper: Wrapper) -> None:
    """Without a server: give all ranks the averaged buffers, at the end of an epoch (collective)."""
    team = wrapper._team
    if team is not None and not team.member.servers:
        team.end_epoch()
        team.take_buffers()


def stop_together(wrapper: Wrapper, *, stop: bool) -> bool:
    """Return whether a rank of this one's group is to stop; all of a group call it after each batch."""
    group = None if wrapper._team is None else wrapper._team.member.group
    return stop if group is None else group.agree(stop=stop, rate=0)[0]


def center_tells(wrapper: Wrapper, values: Mapping[str, float]) -> dict[str, float]:
    """Give all ranks the numbers of the rank that validates (collective)."""
    return wrapper.mean(values, 1.0) if leads(wrapper) else wrapper.mean({}, 0.0)


def most(wrapper: Wrapper, values: Mapping[str, float], *, of_all: bool = False) -> dict[str, float]:
    """Return the largest number of any worker, or of any rank, by name (collective)."""
    counts = of_all or not wrapper.serves
    counted = wrapper.size if of_all else wrapper.share[1]
    found = {}
    for name, value in values.items():  # one by one: with many ranks all would not fit into a message
        own = {str(rank): float(value) * (rank == wrapper.rank) for rank in range(wrapper.size)}
        means = wrapper.mean(own if counts else {}, 1.0 if counts else 0.0)
        found[name] = counted * max(means.values())
    return found


def options_of(wrapper: Wrapper) -> list[dict[str, Any]]:
    """Return what schedulers may change of the parameter groups."""
    return [
        {name: value for name, value in group.items() if name != "params"} for group in wrapper.param_groups
    ]
