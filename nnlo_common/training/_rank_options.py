"""Options of a rank: what a user says of the ranks of a training, declared once and passed whole.

A new option is a field here, with its type in `RankArguments`, and the place that uses it: `join` in
`_joining.py` knows role and plan of every rank. One that decides which rank does what is in `Roles` of
`cluster/_topology.py`, too, which uses it; `shard`, `Batches` and the like take it from there. The
wrappers of both frameworks and what Keras saves of them, `Participant`, `nnlo train`, the comparison of ranks
before a start and the stubs for editors take it from the declaration.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, TypedDict, cast

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._options import Declared, declared, option
from nnlo_common.cluster._topology import Roles
from nnlo_common.training._all_reduce import ALL_REDUCES, WayName, ways_of

__all__ = [
    "RANK_OPTIONS",
    "RankArguments",
    "RankOptions",
    "checked_roles",
    "rank_options_for",
    "roles_taken_from",
]


class RankArguments(TypedDict, total=False):
    """The fields of `RankOptions`, for signatures."""

    servers: int
    group_size: int | None
    all_reduce: WayName
    stall_timeout_s: float | None
    spares: int
    heir: bool | None
    overlap: bool


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """What a user says of the ranks of a training; equal on all of them.

    Example:
        >>> RankOptions(servers=0).grouped, RankOptions(group_size=2).describe()
        (True, 'servers=1, group_size=2')
    """

    servers: int = option(
        1,
        "number of ranks that serve the centre, each a part of it; 0: none, and all ranks are one group that "
        "steps the optimizer with the mean gradient",
        least=0,
    )
    group_size: int | None = option(
        None,
        "ranks that train as one worker, each step with the mean of their gradients, weighted by their "
        "samples; else 1, or all with servers=0",
        least=1,
    )
    all_reduce: WayName = option(  # noqa: RUF009
        "auto",
        "how these ranks add up their gradients; auto is the fastest of shared and mpi that works here",
    )
    stall_timeout_s: float | None = option(
        None,
        "drop a worker that is silent so many seconds on its turn if the rest can continue, or end the job; "
        "else it is only named",
    )
    spares: int = option(
        0,
        "number of ranks, the last ones, that hold copies of servers' states and serve in the place of one "
        "that has died; those that no server needs take the places of dead workers; mpiexec --with-ft ulfm",
        least=0,
    )
    heir: bool | None = option(
        None,
        "the first worker holds a copy of the server's state, and serves in its place once it has died, with "
        "several servers as many workers, one for each; else it does so under mpiexec --with-ft ulfm, where "
        "it can and memory allows",
    )
    overlap: bool = option(
        False,
        "send a gradient to the servers while the backward pass makes the rest of it; PyTorch on CPUs, also "
        "under Keras, an exchange in each step, lag=0",
    )

    def __post_init__(self) -> None:
        for name, one in RANK_OPTIONS.items():
            value = getattr(self, name)
            if one.choices and value not in one.choices:
                ways = ", ".join(f"{way!r} ({ALL_REDUCES[way].text})" for way in ALL_REDUCES)
                raise ConfigurationError(f"{name}={value!r} is not known; use one of {ways}")
            if not one.holds(value):
                unless = ", or None" if one.default is None else ""
                raise ConfigurationError(
                    f"{name}={value!r} is not possible: it must be {one.expected}{unless}"
                )
            object.__setattr__(self, name, one.exact(value))
        if self.all_reduce != "auto" and self.servers and self.group_size is None:
            raise ConfigurationError(
                f"all_reduce={self.all_reduce!r} was given, but there are no groups whose gradients could be "
                "added up: give group_size=, or servers=0 so that all ranks are one group, or leave "
                "all_reduce out"
            )
        if self.stall_timeout_s is not None and not self.servers:
            raise ConfigurationError(
                f"stall_timeout_s={self.stall_timeout_s:g} with servers=0 is not possible: nobody watches "
                "the ranks of one group, which wait for each other. Leave it out, or have a server"
            )
        self._check_heir()

    def _check_heir(self) -> None:
        """Refuse a worker that serves in a dead server's place where none can."""
        others = {"servers": self.servers == 0, "group_size": self.group_size not in (None, 1)}
        others |= {"spares": self.spares > 0}
        for name in [name for name, given in others.items() if given and self.heir]:
            raise ConfigurationError(
                f"heir=True with {name}={getattr(self, name)} is not possible: a worker of one rank takes "
                f"the place of a server, where there is no spare. Leave heir or {name} out"
            )

    @classmethod
    def taken_from(cls, given: dict[str, Any], user: str, framework: str = "") -> Self:
        """Take the options of ranks out of a user's keyword arguments.

        Args:
            given: the arguments; those of ranks are removed.
            user: the name of what was given them, for messages.
            framework: the package of a wrapper; empty: none.

        Raises:
            ConfigurationError: one is not possible, or not with this framework or machine.
        """
        try:
            found = cls(**{name: given.pop(name) for name in RANK_OPTIONS if name in given})
            found._check_for(framework)
        except ConfigurationError as error:
            raise ConfigurationError(f"{user}: {error}") from None
        return found

    def _check_for(self, framework: str) -> None:
        """Refuse what only the wrappers of another framework have, or what this machine lacks."""
        ways = ways_of(framework)
        if self.all_reduce not in ways:
            way = ALL_REDUCES[self.all_reduce]
            raise ConfigurationError(
                f"all_reduce={self.all_reduce!r} ({way.text}) is possible only with the wrappers of "
                f"{way.framework}; use one of {', '.join(map(repr, ways))}"
            )
        ALL_REDUCES[self.all_reduce].check()
        if self.overlap and not framework:
            raise ConfigurationError(
                "overlap=True is possible only with the wrappers of nnlo_torch and nnlo_keras: PyTorch alone "
                "says when a gradient is made; leave overlap out, or use lag=1"
            )

    @property
    def grouped(self) -> bool:
        """Whether the ranks of a training form groups."""
        return self.servers == 0 or self.group_size not in (None, 1)

    def roles(self, sub_servers: int | Literal["host"] = 0) -> Roles:
        """Return what of these decides which rank does what.

        Args:
            sub_servers: as the algorithm has them.
        """
        of_ranks = {name: getattr(self, name) for name in RANK_OPTIONS if name in Roles.__annotations__}
        return cast(Roles, {**of_ranks, "sub_servers": sub_servers})

    def given(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, and the number of servers."""
        every = {name: getattr(self, name) for name in RANK_OPTIONS}
        return {
            name: value
            for name, value in every.items()
            if name == "servers" or value != RANK_OPTIONS[name].default
        }

    def describe(self) -> str:
        """Return these as text, equal for equal options."""
        return ", ".join(f"{name}={value!r}" for name, value in self.given().items())


#: The declarations by name.
RANK_OPTIONS: Mapping[str, Declared] = declared(RankOptions)


def checked_roles(user: str, given: Roles) -> Roles:
    """Return what was given of `Roles`, each with its default if it was not.

    Args:
        user: the function that was given them, for messages.
        given: its keyword arguments.

    Raises:
        ConfigurationError: one is not possible.

    Example:
        >>> checked_roles("shard()", {"servers": 2})
        {'servers': 2, 'group_size': None, 'spares': 0, 'sub_servers': 0}
    """
    every: dict[str, Any] = {**given}
    roles = roles_taken_from(every, user)
    for name in every:
        raise TypeError(f"{user} got an unexpected keyword argument {name!r}")
    return roles


def roles_taken_from(given: dict[str, Any], user: str) -> Roles:
    """Take `Roles` out of a user's keyword arguments, which are others, too; see `checked_roles`."""
    found = {name: given.pop(name) for name in Roles.__annotations__ if name in given}
    sub_servers = found.pop("sub_servers", 0)
    return RankOptions.taken_from(found, user).roles(sub_servers)


@functools.cache
def rank_options_for(framework: str) -> Mapping[str, Declared]:
    """Return the declarations for the wrappers of a framework, which may have fewer ways to add up."""
    ways: Any = Literal.__getitem__(ways_of(framework))
    one = RANK_OPTIONS["all_reduce"]
    return {**RANK_OPTIONS, "all_reduce": replace(one, type=ways)}
