"""GPUs of the ranks: which GPU of its host each rank uses, in turn.

`nnlo train` and `nnlo tune` hide all others from a rank, before its framework is loaded (`share_host`). In a
script the framework is there already, so its package is told the number instead (`choose_gpu`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import replace
from typing import TypeAlias, Unpack

from nnlo_common.cluster._hosts import VISIBILITY, Place, describe_here, gathered_places
from nnlo_common.cluster._threads import limit_threads
from nnlo_common.cluster._topology import Roles, Topology
from nnlo_common.cluster.transport._endpoint import RankWorld

__all__ = ["GpuTurns", "choose_gpu", "own_gpu", "search_turns", "share_host", "train_turns", "when_chosen"]

#: The GPU of its host that each rank gets, of those that may be used; None: no GPU.
GpuTurns: TypeAlias = Callable[[Sequence[Place]], Sequence[int | None]]
_LOG = logging.getLogger(__name__)


def train_turns(*, server_gpu: bool = True, **roles: Unpack[Roles]) -> GpuTurns:
    """Return the turns of a training: the ranks of a host take GPUs in turn, workers first.

    Args:
        server_gpu: whether servers take a turn, too.
        roles: what decides which rank is a server.
    """

    def turns(places: Sequence[Place]) -> list[int | None]:
        hosts = [place.host for place in places]
        topology = Topology.of_training(hosts, **roles)
        found = topology.gpus(places)
        serves = [one.role.serves and not server_gpu for one in topology.assignments]
        return [None if out else gpu for out, gpu in zip(serves, found, strict=True)]

    return turns


def search_turns(search_ranks: int, spares: int = 0) -> GpuTurns:
    """Return the turns of a search: training ranks of a host take GPUs in turn, other ranks get none.

    Args:
        search_ranks: how many ranks, after the first, only choose parameters.
        spares: how many ranks, the last ones, wait to take over from a dead coordinator.
    """

    def turns(places: Sequence[Place]) -> list[int | None]:
        found: list[int | None] = [None] * len(places)
        trained = Counter[str]()
        for place in places[1 + search_ranks : len(places) - spares]:
            found[place.rank] = trained[place.host] % place.gpus if place.gpus else None
            trained[place.host] += 1
        return found

    return turns


def share_host(
    places: Sequence[Place], rank: int, most: int | None, env: MutableMapping[str, str], turns: GpuTurns
) -> None:
    """Give a rank its share of its host's cores, and one GPU; a single rank gets all allowed GPUs.

    Call it before a framework is loaded.

    Args:
        places: the hosts of all ranks.
        rank: the number of this one.
        most: how many GPUs of each host may be used; None: all.
        env: the variables of the process.
        turns: chooses the GPUs, if there are several ranks.

    Example:
        >>> from nnlo_common.cluster._hosts import locate
        >>> env = {"CUDA_VISIBLE_DEVICES": "4,5,6"}
        >>> share_host(locate([{"host": "a", "cores": 8, "gpus": 3}]), 0, 2, env, train_turns())
        >>> env
        {'CUDA_VISIBLE_DEVICES': '4,5'}
    """
    here, alone = places[rank], len(places) == 1
    if not alone:
        limit_threads(here.local_size, here.host_cores, env=env)
    if not here.gpus or (alone and most is None):
        return
    allowed = [replace(place, gpus=place.gpus if most is None else min(place.gpus, most)) for place in places]
    wanted = range(allowed[rank].gpus) if alone else [turns(allowed)[rank]]
    name = next((one for one in VISIBILITY if one in env), VISIBILITY[0])
    seen = env.get(name, ",".join(map(str, range(here.gpus)))).split(",")
    env[name] = ",".join(seen[turn].strip() for turn in wanted if turn is not None)


class _Choice:
    """The GPU that was chosen for this process, and what its frameworks do about it."""

    gpu: int | None = None
    uses: list[Callable[[int], object]] = []  # noqa: RUF012 - one list of the process


def when_chosen(use: Callable[[int], object]) -> None:
    """Call `use` with the number of this process' GPU, among those it sees, when it is chosen or at once."""
    _Choice.uses.append(use)
    if _Choice.gpu is not None:
        use(_Choice.gpu)


def choose_gpu(places: Sequence[Place], rank: int, turns: GpuTurns) -> int | None:
    """Choose this process' GPU for a search, and tell its frameworks; return its number among those it sees.

    Args:
        places: the hosts of all ranks.
        rank: the number of this one.
        turns: chooses the GPUs.
    """
    _Choice.gpu = turns(places)[rank]
    if _Choice.gpu is not None:
        _log_choice(places[rank], _Choice.gpu)
        for use in _Choice.uses:
            use(_Choice.gpu)
    return _Choice.gpu


def _log_choice(here: Place, gpu: int | None) -> None:
    if gpu is not None:
        _LOG.info("rank %d on %s uses GPU %d of %d", here.rank, here.host, gpu, here.gpus)


def own_gpu(world: RankWorld | None, *, server_gpu: bool, **roles: Unpack[Roles]) -> int | None:
    """Choose this rank's GPU for a training (collective); return its number among those it sees.

    In a trial of a search the GPU is that which the search has chosen, for blocks share hosts.

    Args:
        world: the ranks; None: this process trains alone, and uses the first GPU it sees if no search has
            chosen one.
        server_gpu: whether servers use one, too.
        roles: what decides which rank is a server.
    """
    if world is None:
        first = 0 if describe_here()["gpus"] else None
        return first if _Choice.gpu is None else _Choice.gpu
    if world.of_trial:
        return None if world.rank < roles.get("servers", 1) and not server_gpu else _Choice.gpu
    places = gathered_places(world.gather_text)
    gpu = train_turns(server_gpu=server_gpu, **roles)(places)[world.rank]
    _log_choice(places[world.rank], gpu)
    return gpu
