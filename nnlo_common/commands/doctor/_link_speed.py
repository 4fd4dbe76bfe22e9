"""Measurements between ranks: latency, bandwidth and clock differences.

Rank 0 measures one partner after the other. Waiting ranks sleep, so that on a crowded host they take no cores
from the pair being measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from nnlo_common.cluster._hosts import clock_offset

if TYPE_CHECKING:
    from nnlo_common.cluster.transport._mpi4py import MPI

__all__ = ["Effort", "FULL", "LinkSpeed", "QUICK", "measure_links", "partners_of"]

_MB = 1_000_000
_TAG = 1
_WARM_UP = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Amount of measuring.

    Attributes:
        small_rounds: round trips of 8 bytes.
        large: sizes in bytes, each with its number of round trips.
        clock_rounds: readings of the partner's clock.
    """

    small_rounds: int
    large: tuple[tuple[int, int], ...]
    clock_rounds: int


FULL = Effort(small_rounds=300, large=((_MB, 20), (16 * _MB, 6)), clock_rounds=100)
QUICK = Effort(small_rounds=50, large=((_MB, 5),), clock_rounds=20)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeed:
    """Measurements between rank 0 and one other rank.

    Attributes:
        rank: the other rank.
        host: its host.
        latency_s: one way of a small message, the median.
        bandwidth: bytes per second, by the size of the message, the median.
        clock_offset_s: its clock minus that of rank 0.
        clock_error_s: the error of that offset, half the quickest round trip.
    """

    rank: int
    host: str
    latency_s: float
    bandwidth: dict[int, float]
    clock_offset_s: float
    clock_error_s: float


def partners_of(hosts: Sequence[str], most: int = 16) -> tuple[int, ...]:
    """Choose the ranks to measure: all, or one on each host if there are more than `most`.

    Args:
        hosts: the host of each rank.
        most: the largest number of ranks that are all measured.

    Example:
        >>> partners_of(["a", "a", "b", "b"]), partners_of(["a", "a", "a", "b", "b"], most=3)
        ((1, 2, 3), (1, 3))
    """
    others = range(1, len(hosts))
    if len(others) <= most:
        return tuple(others)
    first_on_host: dict[str, int] = {}
    for rank in others:
        first_on_host.setdefault(hosts[rank], rank)
    return tuple(sorted(first_on_host.values()))


def measure_links(
    comm: MPI.Intracomm, hosts: Sequence[str], effort: Effort, report: Callable[[str], None]
) -> list[LinkSpeed]:
    """Measure rank 0 against its partners (collective).

    Args:
        comm: the ranks; their messages are kept apart from the caller's.
        hosts: the host of each rank.
        effort: how much to measure.
        report: called with the name of each step, so that the watchdog can name a hang.

    Returns:
        The links on rank 0; an empty list on other ranks.
    """
    private = comm.Dup()
    rank = private.Get_rank()
    links = []
    for partner in partners_of(hosts):
        if rank == 0:
            report(f"measuring messages between rank 0 ({hosts[0]}) and rank {partner} ({hosts[partner]})")
            links.append(_measure(private, partner, hosts[partner], effort))
        elif rank == partner:
            _answer(private, effort)
    report("waiting for all ranks after the measurement")
    _wait_quietly(private.Ibarrier().Test)
    private.Free()
    return links


def _measure(comm: MPI.Intracomm, partner: int, host: str, effort: Effort) -> LinkSpeed:
    _bounce(comm, partner, 8, _WARM_UP, first=True)
    small = _bounce(comm, partner, 8, effort.small_rounds, first=True)
    bandwidth = {}
    for size, rounds in effort.large:
        _bounce(comm, partner, size, 1, first=True)
        bandwidth[size] = size / (statistics.median(_bounce(comm, partner, size, rounds, first=True)) / 2)
    offset, error = clock_offset(_read_clock(comm, partner, effort.clock_rounds))
    return LinkSpeed(
        rank=partner,
        host=host,
        latency_s=statistics.median(small) / 2,
        bandwidth=bandwidth,
        clock_offset_s=offset,
        clock_error_s=error,
    )


def _answer(comm: MPI.Intracomm, effort: Effort) -> None:
    _wait_quietly(lambda: comm.Iprobe(source=0, tag=_TAG))
    _bounce(comm, 0, 8, _WARM_UP + effort.small_rounds, first=False)
    for size, rounds in effort.large:
        _bounce(comm, 0, size, 1 + rounds, first=False)
    clock = np.empty(1)
    for _ in range(effort.clock_rounds):
        comm.Recv(clock, source=0, tag=_TAG)
        clock[0] = time.time()
        comm.Send(clock, dest=0, tag=_TAG)


def _bounce(comm: MPI.Intracomm, partner: int, size: int, rounds: int, *, first: bool) -> list[float]:
    """Send a message there and back; return the seconds of each round trip, valid on the first rank."""
    message = np.zeros(size, dtype=np.uint8)
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        if first:
            comm.Send(message, dest=partner, tag=_TAG)
        comm.Recv(message, source=partner, tag=_TAG)
        times.append(time.perf_counter() - began)
        if not first:
            comm.Send(message, dest=partner, tag=_TAG)
    return times


def _read_clock(comm: MPI.Intracomm, partner: int, rounds: int) -> list[tuple[float, float, float]]:
    clock = np.empty(1)
    readings = []
    for _ in range(rounds):
        asked = time.time()
        comm.Send(clock, dest=partner, tag=_TAG)
        comm.Recv(clock, source=partner, tag=_TAG)
        readings.append((asked, float(clock[0]), time.time()))
    return readings


def _wait_quietly(done: Callable[[], bool]) -> None:
    while not done():
        time.sleep(0.001)
