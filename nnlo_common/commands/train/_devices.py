"""Devices for a rank: choose them before a framework is loaded, which reads the choice once."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import replace

from nnlo_common.cluster._arrangement import Arrangement
from nnlo_common.cluster._hosts import Place
from nnlo_common.cluster._threads import limit_threads
from nnlo_common.cluster._topology import Topology

__all__ = ["choose_gpu", "see_gpu", "share_host"]

_VISIBILITY = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def share_host(
    places: Sequence[Place], rank: int, servers: int, most: int | None, env: MutableMapping[str, str]
) -> None:
    """Give a rank its share of the cores and of the GPUs of its host.

    Args:
        places: where all ranks are.
        rank: which one this is.
        servers: how many of them serve.
        most: how many GPUs of each host may be used; None: all.
        env: the variables of the process.
    """
    if len(places) > 1:
        limit_threads(places[rank].local_size, places[rank].host_cores, env=env)
    choose_gpu(places, rank, servers, most, env)


def choose_gpu(
    places: Sequence[Place], rank: int, servers: int, most: int | None, env: MutableMapping[str, str]
) -> None:
    """Let a rank see one GPU, the ranks of a host by turns; alone it sees as many as it may.

    Example:
        >>> from nnlo_common.cluster._hosts import locate
        >>> env = {"CUDA_VISIBLE_DEVICES": "4,5,6"}
        >>> choose_gpu(locate([{"host": "a", "cores": 8, "gpus": 3}] * 3), 2, 1, 2, env)
        >>> env
        {'CUDA_VISIBLE_DEVICES': '5'}
    """
    allowed = [replace(place, gpus=place.gpus if most is None else min(place.gpus, most)) for place in places]
    if not places[rank].gpus or (len(places) == 1 and most is None):
        return
    if len(places) == 1:
        see_gpu(places[rank].gpus, range(allowed[rank].gpus), env)
        return
    turn = Topology.plan(len(places), Arrangement(servers=servers)).gpus(allowed)[rank]
    see_gpu(places[rank].gpus, [] if turn is None else [turn], env)


def see_gpu(gpus: int, turns: Iterable[int], env: MutableMapping[str, str]) -> None:
    """Let this process see some of the GPUs that it sees now.

    Args:
        gpus: how many these are.
        turns: which of them.
        env: the variables of the process.
    """
    name = next((one for one in _VISIBILITY if one in env), _VISIBILITY[0])
    seen = env.get(name, ",".join(map(str, range(gpus)))).split(",")
    env[name] = ",".join(seen[turn].strip() for turn in turns)
