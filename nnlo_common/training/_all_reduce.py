"""Ways in which the ranks of a group add up their gradients: `all_reduce=` of the wrappers.

A new way is its name and its line here, and its reducer.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.cluster.transport._endpoint import Group
from nnlo_common.training._reducers import MPIReducer, Reducer, SharedReducer

__all__ = ["ALL_REDUCES", "Way", "WayName", "reducer_of", "ways_of"]

_LOG = logging.getLogger(__name__)

WayName: TypeAlias = Literal["auto", "mpi", "shared", "thread", "torch", "horovod"]


@dataclass(frozen=True)
class Way:
    """A way to add up the gradients of a group.

    Attributes:
        text: what it is.
        home: the module and class of its reducer; empty: the choice is made among others.
        framework: the only package whose wrappers have it; empty: all.
    """

    text: str
    home: str = ""
    framework: str = ""

    @property
    def reducer(self) -> type[Reducer]:
        """The class of its reducer; imported when it is used."""
        module, _, name = self.home.partition(":")
        return cast(type[Reducer], getattr(importlib.import_module(module), name))

    def check(self) -> None:
        """Refuse it where what it needs is missing, before ranks meet."""
        if self.framework:
            self.reducer.check()


_OURS, _TORCH = "nnlo_common.training._reducers", "nnlo_torch"

#: All ways, and what they are.
ALL_REDUCES: Mapping[str, Way] = {
    "auto": Way("the fastest of 'shared' and 'mpi' that works here"),
    "mpi": Way("the MPI library, in pieces", f"{_OURS}:MPIReducer"),
    "shared": Way("memory that all ranks of a host see", f"{_OURS}:SharedReducer"),
    "thread": Way(
        "the MPI library, in a thread while the backward pass runs", f"{_OURS}:ThreadReducer", _TORCH
    ),
    "torch": Way("torch.distributed, with gloo", "nnlo_torch._torch_reducer:TorchReducer", _TORCH),
    "horovod": Way("Horovod", "nnlo_torch._horovod_reducer:HorovodReducer", _TORCH),
}


def ways_of(framework: str) -> tuple[str, ...]:
    """Return the names of the ways that a package's wrappers have."""
    return tuple(name for name, way in ALL_REDUCES.items() if way.framework in ("", framework))


def reducer_of(name: WayName, group: Group, *, one_host: bool) -> Reducer:
    """Return the reducer of a group, and show the choice (collective over the group).

    Args:
        name: as in `ALL_REDUCES`.
        group: the ranks.
        one_host: whether all ranks of the group are processes of one host.

    Raises:
        ConfigurationError: it cannot be had.
    """
    reason = ""
    reducer: Reducer | None = None
    if name == "shared" or (name == "auto" and one_host):
        try:
            reducer = SharedReducer(group)
        except ConfigurationError as error:  # raised on all ranks of the group
            reason = f", because {error}"
    elif name != "auto":
        reducer = ALL_REDUCES[name].reducer(group)
    reducer = MPIReducer(group) if reducer is None else reducer
    if group.index == 0:
        _LOG.log(
            logging.WARNING if reason and name != "auto" else logging.INFO,
            "the gradients of ranks %s are added up by %s (all_reduce=%r)%s",
            list(group.ranks),
            ALL_REDUCES[reducer.name].text,
            reducer.name,
            reason,
        )
    return reducer
