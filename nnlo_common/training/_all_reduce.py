"""Choice of the way in which the ranks of a group add up their gradients: `all_reduce=` of the wrappers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Self

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.cluster.transport._group import Group
from nnlo_common.training._reducers import MPIReducer, Reducer, SharedReducer

__all__ = ["ALL_REDUCES", "AUTO", "AllReduce", "MakeReducer"]

_LOG = logging.getLogger(__name__)

#: Makes the reducer of a framework.
MakeReducer = Callable[[Group], Reducer]

#: All ways, and what they are.
ALL_REDUCES: Mapping[str, str] = {
    "auto": "the fastest of 'shared' and 'mpi' that works here",
    "mpi": "the MPI library, in pieces",
    "shared": "memory that all ranks of a host see",
    "thread": "the MPI library, in a thread while the backward pass runs",
    "torch": "torch.distributed, with gloo",
    "horovod": "Horovod",
}


@dataclass(frozen=True)
class AllReduce:
    """A way to add up the gradients of a group, as a user has chosen it.

    Attributes:
        name: its name in `ALL_REDUCES`.
        makers: makes the reducers that a framework has besides those of the core.
    """

    name: str = "auto"
    makers: Mapping[str, MakeReducer] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        user: str,
        name: object,
        servers: int,
        group_size: int | None,
        makers: Mapping[str, MakeReducer] | None = None,
    ) -> Self:
        """Return the way of this name; refuse one that `user` cannot have.

        Args:
            user: the name of the wrapper, for the message.
            name: what was asked for.
            servers: the number of servers.
            group_size: the number of ranks of each worker; None: not given.
            makers: makes the reducers that the framework has besides "mpi" and "shared".

        Raises:
            ConfigurationError: it is unknown, or means nothing without groups.
        """
        asked, known = f"{user}: all_reduce={name!r}", ["auto", "mpi", "shared", *(makers or {})]
        if not isinstance(name, str) or name not in ALL_REDUCES:
            ways = ", ".join(f"{way!r} ({ALL_REDUCES[way]})" for way in known)
            raise ConfigurationError(f"{asked} is not known; use one of {ways}")
        if name not in known:
            raise ConfigurationError(
                f"{asked} ({ALL_REDUCES[name]}) is possible only with the wrappers of nnlo_torch; use one of "
                f"{', '.join(map(repr, known))}"
            )
        if name != "auto" and servers and group_size is None:
            raise ConfigurationError(
                f"{asked} was given, but there are no groups whose gradients could be added up: give "
                "group_size=, or servers=0 so that all ranks are one group, or leave all_reduce out"
            )
        return cls(name, makers or {})

    def reducer(self, group: Group, *, one_host: bool) -> Reducer:
        """Return the reducer of a group, and show the choice (collective over the group).

        Args:
            group: the ranks.
            one_host: whether all ranks of the group are processes of one host.

        Raises:
            ConfigurationError: it cannot be had.
        """
        reason = ""
        reducer: Reducer | None = None
        if self.name == "shared" or (self.name == "auto" and one_host):
            try:
                reducer = SharedReducer(group)
            except ConfigurationError as error:  # raised on all ranks of the group
                reason = f", because {error}"
        elif self.name in self.makers:
            reducer = self.makers[self.name](group)
        reducer = MPIReducer(group) if reducer is None else reducer
        if group.index == 0:
            _LOG.log(
                logging.WARNING if reason and self.name != "auto" else logging.INFO,
                "the gradients of ranks %s are added up by %s (all_reduce=%r)%s",
                list(group.ranks),
                ALL_REDUCES[reducer.name],
                reducer.name,
                reason,
            )
        return reducer


AUTO = AllReduce()
