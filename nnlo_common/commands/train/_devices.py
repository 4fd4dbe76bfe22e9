"""Devices for a rank: chosen before the framework is loaded, because it reads the choice once."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from nnlo_common.cluster._arrangement import Arrangement
from nnlo_common.cluster._hosts import Place
from nnlo_common.cluster._threads import limit_threads
from nnlo_common.cluster._topology import Topology

__all__ = ["GpuTurns", "share_host", "train_turns"]

#: The GPU of its host that each rank gets, of those that may be used; None: no GPU.
GpuTurns: TypeAlias = Callable[[Sequence[Place]], Sequence[int | None]]
_VISIBILITY = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


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
        >>> share_host(locate([{"host": "a", "cores": 8, "gpus": 3}]), 0, 2, env, train_turns(1))
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
    name = next((one for one in _VISIBILITY if one in env), _VISIBILITY[0])
    seen = env.get(name, ",".join(map(str, range(here.gpus)))).split(",")
    env[name] = ",".join(seen[turn].strip() for turn in wanted if turn is not None)


def train_turns(servers: int) -> GpuTurns:
    """Return the turns of a training: the ranks of a host take GPUs in turn, workers first.

    Args:
        servers: the number of server ranks.
    """
    return lambda places: Topology.plan(len(places), Arrangement(servers=servers)).gpus(places)
