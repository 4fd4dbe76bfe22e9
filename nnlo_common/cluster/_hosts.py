"""Hosts of the ranks: each rank's host, its number there, its cores and its GPU.

    every rank:  describe_here()  ->  {"host": "a", "cores": 2, "core_mask": "0x3", "gpus": 1}
                        |   gathered over all ranks by the transport
                        v
                 locate(reports)  ->  (Place(rank=0, ...), Place(rank=1, ...), ...)

GPUs are counted without a framework: a framework would initialise CUDA in every process, servers included,
before a device is chosen.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nnlo_common.base._errors import ConfigurationError, ProtocolError, plural
from nnlo_common.base._limited_formats import table_of

__all__ = [
    "ClockOffset",
    "Place",
    "VISIBILITY",
    "clock_offset",
    "crowded_hosts",
    "describe_here",
    "gathered_offset",
    "gathered_places",
    "locate",
    "place_table",
    "text_table",
    "visible_gpus",
]

# -- differences between the clocks of hosts -----------------------------------------------------------

#: At least so many rounds; more on busy hosts, until all ranks know their clocks as well as this.
_ROUNDS, _MOST_ROUNDS, _GOOD_S = 8, 100, 2.5e-4


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """Difference between this host's clock and that of the first rank.

    Attributes:
        ahead_s: how far this clock is ahead.
        error_s: the most by which that may be wrong.
    """

    ahead_s: float = 0.0
    error_s: float = 0.0


def clock_offset(readings: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Estimate how far another clock is ahead, and the error of the estimate.

    The other clock was read between sending and receiving, so the quickest round trip is the most accurate.

    Args:
        readings: own clock when asking, the other clock, own clock when the answer arrived.

    Example:
        >>> clock_offset([(0.0, 8.0, 4.0), (10.0, 16.0, 12.0)])
        (5.0, 1.0)
    """
    asked, other, answered = min(readings, key=lambda reading: reading[2] - reading[0])
    return other - (asked + answered) / 2, (answered - asked) / 2


def gathered_offset(
    gather: Callable[[str], list[str]], rank: int, clock: Callable[[], float] = time.time
) -> ClockOffset:
    """Measure how far this rank's clock is ahead of the first rank's (collective).

    Nobody leaves a gather before all have entered it. So this rank has left after the first has entered, and
    the first has left after this one has entered: two bounds in each round, and the closest ones count. Where
    hosts are busy, ranks leave late, and there are more rounds.

    Args:
        gather: gives every rank the texts of all ranks.
        rank: this rank's number.
        clock: returns the time in seconds.

    Example:
        >>> gathered_offset(lambda text: [text], 0)
        ClockOffset(ahead_s=0.0, error_s=0.0)
    """
    lowest, highest = float("-inf"), float("inf")
    entered_s = left_s = 0.0
    for turn in range(_MOST_ROUNDS + 1):
        before_s, entered_s = entered_s, clock()
        error_s = abs(highest - lowest) / 2 if rank else 0.0
        texts = gather(f"{entered_s!r} {left_s!r} {error_s!r}")
        first_entered_s, first_left_s, _ = _read(0, texts[0])
        left_s = clock()
        highest = min(highest, left_s - first_entered_s)
        if turn:  # the first rank says when it has left the last round
            lowest = max(lowest, before_s - first_left_s)
        # All ranks read the same, so all end with the same round.
        if turn >= _ROUNDS and all(_read(*one)[2] <= _GOOD_S for one in enumerate(texts)):
            break
    if rank == 0:
        return ClockOffset()
    return ClockOffset((lowest + highest) / 2, abs(highest - lowest) / 2)


def _read(rank: int, text: str) -> tuple[float, float, float]:
    try:
        entered_s, left_s, error_s = map(float, text.split())
    except ValueError:
        raise ProtocolError(
            f"rank {rank} sent {text[:60]!r} in place of its clock; run the same nnlo on all ranks"
        ) from None
    return entered_s, left_s, error_s


#: The variables by which GPUs are hidden from a process.
VISIBILITY = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The host of one rank, and its share of it.

    Attributes:
        rank: the number among all ranks.
        host: the host name; ranks with the same name share one node.
        local_rank: the number among the ranks on that host, in rank order.
        local_size: how many ranks are on that host.
        cores: how many cores this process may use (its affinity, not all of the machine's).
        host_cores: how many different cores the ranks on that host may use together.
        gpus: how many GPUs this process sees.
        gpu: ``local_rank % gpus``; None if it sees no GPU.

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

    @property
    def crowded(self) -> bool:
        """Whether the host has fewer cores than ranks: one that waits must leave its core to others."""
        return self.local_size > self.host_cores


def describe_here() -> dict[str, int | str]:
    """Report this process's host, cores and GPUs as plain JSON values that any transport can gather.

    Returns:
        ``host``, ``cores``, ``core_mask`` and ``gpus``. By the mask (bit ``i`` set: core ``i`` is allowed)
        `locate` distinguishes four ranks on a core each from four ranks on the same core.

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

    Reads visibility variables as the GPU libraries do: unset hides nothing, empty hides all, a comma list
    shows its entries up to the first invalid one (``-1``, ``NoDevFiles``). If several are set the shortest
    list decides, since HIP selects from ROCR's list. If none is set, counts the NVIDIA driver's devices.

    Args:
        environment: the variables of the process.
        root: the folder that holds ``/proc`` and ``/dev``.

    Example:
        >>> visible_gpus({"CUDA_VISIBLE_DEVICES": "4,11"}), visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"})
        (2, 0)
    """
    listed = [_listed_gpus(environment[name]) for name in VISIBILITY if name in environment]
    if listed:
        return min(listed)
    from_driver = len(list(root.glob("proc/driver/nvidia/gpus/*")))
    # Some containers pass the device nodes through but hide the driver's files in /proc.
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
        reports: the results of `describe_here` on rank 0, 1, 2, ... Without ``core_mask`` the first ``cores``
            cores are assumed.

    Raises:
        ConfigurationError: a report lacks a key or has an impossible value.

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


def gathered_places(gather: Callable[[str], list[str]]) -> tuple[Place, ...]:
    """Find the place of every rank (collective).

    Args:
        gather: gives every rank the texts of all ranks.

    Raises:
        ProtocolError: what a rank has sent is malformed.
    """
    reports = enumerate(gather(json.dumps(describe_here())))
    return locate([table_of(text, (), f"the place of rank {rank}") for rank, text in reports])


def _place(rank: int, report: Mapping[str, int | str], residents: list[int], host_cores: int) -> Place:
    """Return the place of one rank among the ranks of its host."""
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
    """Refuse an impossible report."""
    missing = [key for key in ("host", "cores", "gpus") if key not in report]
    if missing:
        raise ConfigurationError(
            f"rank {rank}: the report {dict(report)!r} lacks {', '.join(missing)}; "
            "pass what describe_here() returned on that rank"
        )
    for key, least in (("cores", 1), ("gpus", 0)):
        value = report[key]
        if not isinstance(value, int) or value < least:
            raise ConfigurationError(
                f"rank {rank}: {key}={value!r} in its report; it must be at least {least}"
            )


def crowded_hosts(places: Sequence[Place]) -> tuple[str, ...]:
    """Describe the hosts with more ranks than cores.

    That is the commonest reason why a distributed run is slower than a plain one.

    Example:
        >>> crowded_hosts(locate([{"host": "a", "cores": 2, "gpus": 0}] * 5))
        ('host a: 5 ranks share 2 cores',)
    """
    found = {place.host: (place.local_size, place.host_cores) for place in places if place.crowded}
    return tuple(
        f"host {host}: {plural(ranks, 'rank')} share {plural(cores, 'core')}"
        for host, (ranks, cores) in found.items()
    )


def place_table(places: Sequence[Place]) -> str:
    """Return a table of all ranks and their hosts, with a last line for each crowded host.

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
        rows: the cells; a column without text is numeric.

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
