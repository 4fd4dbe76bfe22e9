"""Hosts of the ranks: each rank's host, its number there, its cores and its GPU.

    every rank:  describe_here()  ->  {"host": "a", "cores": 2, "core_mask": "0x3", "gpus": 1}
                        |   gathered over all ranks by whoever owns the transport
                        v
                 locate(reports)  ->  (Place(rank=0, ...), Place(rank=1, ...), ...)

GPUs are counted without any framework, because asking one would initialise CUDA in every process, the
servers' included, and would do it before a device is chosen.
"""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nnlo_common.base._errors import ConfigurationError

__all__ = ["Place", "crowded_hosts", "describe_here", "locate", "place_table", "text_table", "visible_gpus"]

_VISIBILITY = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one rank lives.

    Attributes:
        rank: its number among all ranks.
        host: the name of its host; ranks with the same name share one node.
        local_rank: its number among the ranks on that host, in rank order.
        local_size: how many ranks are on that host.
        cores: how many cores this process may use (its affinity, not what the machine has).
        host_cores: how many different cores the ranks on that host may use together.
        gpus: how many GPUs this process sees.
        gpu: ``local_rank % gpus``, so 0 where exactly one is visible; None where none is.

    Example:
        >>> place = Place(rank=5, host="b", local_rank=1, local_size=4, cores=8, host_cores=32, gpus=4, gpu=1)
        >>> place.host, place.gpu
        ('b', 1)
    """

    rank: int
    host: str
    local_rank: int
    local_size: int
    cores: int
    host_cores: int
    gpus: int
    gpu: int | None


def describe_here() -> dict[str, int | str]:
    """Report where this process lives, as plain JSON values that any transport can gather.

    Returns:
        ``host``, ``cores``, ``core_mask`` and ``gpus``. The mask (bit ``i`` set: core ``i`` is allowed) lets
        `locate` tell four ranks bound to a core each from four ranks crowded on the same core.

    Example:
        >>> sorted(describe_here())
        ['core_mask', 'cores', 'gpus', 'host']
    """
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    allowed: set[int] = affinity(0) if affinity else set(range(os.cpu_count() or 1))
    mask = sum(1 << core for core in allowed)
    return {
        "host": socket.gethostname(),
        "cores": len(allowed),
        "core_mask": hex(mask),
        "gpus": visible_gpus(os.environ),
    }


def visible_gpus(environment: Mapping[str, str], root: Path = Path("/")) -> int:
    """Count the GPUs that a framework in this process would see.

    A visibility variable hides devices as the GPU libraries read it: unset hides nothing, an empty one hides
    all, a comma list shows its entries up to the first invalid one (``-1``, ``NoDevFiles``). Where several
    are set the shortest list decides, since HIP picks among what ROCR has left. Where none is set the
    devices of the NVIDIA driver are counted.

    Args:
        environment: the variables of the process.
        root: where ``/proc`` and ``/dev`` are found.

    Example:
        >>> visible_gpus({"CUDA_VISIBLE_DEVICES": "4,11"}), visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"})
        (2, 0)
    """
    listed = [_listed_gpus(environment[name]) for name in _VISIBILITY if name in environment]
    if listed:
        return min(listed)
    from_driver = len(list(root.glob("proc/driver/nvidia/gpus/*")))
    # Some containers pass the device nodes through but hide the driver's part of /proc.
    return from_driver or len(list(root.glob("dev/nvidia[0-9]*")))


def _listed_gpus(value: str) -> int:
    """Return the length of a visibility list up to its first invalid entry."""
    count = 0
    for entry in value.split(","):
        name = entry.strip()
        if not (name.isdecimal() or name.startswith(("GPU-", "MIG-"))):
            break
        count += 1
    return count


def locate(reports: Sequence[Mapping[str, int | str]]) -> tuple[Place, ...]:
    """Find the place of every rank from the reports of all of them.

    Args:
        reports: what `describe_here` returned on rank 0, 1, 2, ... ``core_mask`` may be missing; the first
            ``cores`` cores are assumed then.

    Raises:
        ConfigurationError: a report lacks a key or holds an impossible value.

    Example:
        >>> reports = [{"host": host, "cores": 2, "gpus": 2} for host in ("a", "b", "a")]
        >>> [(place.host, place.local_rank, place.gpu) for place in locate(reports)]
        [('a', 0, 0), ('b', 0, 0), ('a', 1, 1)]
    """
    residents: dict[str, list[int]] = defaultdict(list)
    masks: dict[str, int] = defaultdict(int)
    for rank, report in enumerate(reports):
        _check(rank, report)
        host, assumed = str(report["host"]), hex((1 << int(report["cores"])) - 1)
        residents[host].append(rank)
        masks[host] |= int(str(report.get("core_mask", assumed)), 16)
    return tuple(
        _place(rank, report, residents[str(report["host"])], masks[str(report["host"])].bit_count())
        for rank, report in enumerate(reports)
    )


def _place(rank: int, report: Mapping[str, int | str], residents: list[int], host_cores: int) -> Place:
    """Return the place of one rank among the residents of its host."""
    local_rank, gpus = residents.index(rank), int(report["gpus"])
    return Place(
        rank=rank,
        host=str(report["host"]),
        local_rank=local_rank,
        local_size=len(residents),
        cores=int(report["cores"]),
        host_cores=host_cores,
        gpus=gpus,
        gpu=local_rank % gpus if gpus else None,
    )


def _check(rank: int, report: Mapping[str, int | str]) -> None:
    """Refuse a report that no rank can have sent."""
    missing = [key for key in ("host", "cores", "gpus") if key not in report]
    if missing:
        raise ConfigurationError(
            f"rank {rank}: its report {dict(report)!r} lacks {', '.join(missing)}; "
            "send what describe_here() returned there"
        )
    for key, least in (("cores", 1), ("gpus", 0)):
        value = report[key]
        if not isinstance(value, int) or value < least:
            raise ConfigurationError(
                f"rank {rank}: {key}={value!r} in its report; it must be at least {least}"
            )


def crowded_hosts(places: Sequence[Place]) -> tuple[str, ...]:
    """Name the hosts whose ranks together have fewer cores than there are ranks.

    A host is crowded where ``local_size > host_cores``; more ranks than cores is the commonest reason why
    a distributed run is slower than a plain one.

    Example:
        >>> crowded_hosts(locate([{"host": "a", "cores": 2, "gpus": 0}] * 5))
        ('host a: 5 ranks share 2 cores',)
    """
    found = {place.host: (place.local_size, place.host_cores) for place in places}
    return tuple(
        f"host {host}: {ranks} ranks share {cores} core{'s' if cores > 1 else ''}"
        for host, (ranks, cores) in found.items()
        if ranks > cores
    )


def place_table(places: Sequence[Place]) -> str:
    """Print where the ranks live, with one last line for every crowded host.

    Example:
        >>> print(place_table(locate([{"host": "node7", "cores": 1, "gpus": 1}] * 2)))
        rank  host   local rank  cores  GPU
           0  node7           0      1    0
           1  node7           1      1    0
        host node7: 2 ranks share 1 core
    """
    rows = [(place.rank, place.host, place.local_rank, place.cores, place.gpu) for place in places]
    table = text_table(("rank", "host", "local rank", "cores", "GPU"), rows)
    return "\n".join([table, *crowded_hosts(places)])


def text_table(header: Sequence[str], rows: Sequence[Sequence[int | str | None]]) -> str:
    """Align rows under a header: text to the left, numbers to the right, ``-`` for None.

    Args:
        header: the title of each column.
        rows: the cells; a column is numeric when it holds no text.

    Example:
        >>> print(text_table(("rank", "role"), [(9, "server"), (10, "worker 0")]))
        rank  role
           9  server
          10  worker 0
    """
    columns = list(zip(header, *rows, strict=True))
    widths = [max(len(_shown(cell)) for cell in column) for column in columns]
    textual = [any(isinstance(cell, str) for cell in column[1:]) for column in columns]
    lines = []
    for row in (header, *rows):
        padded = [
            _shown(cell).ljust(width) if left else _shown(cell).rjust(width)
            for cell, width, left in zip(row, widths, textual, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def _shown(cell: int | str | None) -> str:
    """Return the text of one table cell."""
    return "-" if cell is None else str(cell)
