"""Findings about the measurements between the ranks."""

from __future__ import annotations

from collections.abc import Sequence

from nnlo_common.commands.doctor._finding import Finding, note, ok
from nnlo_common.commands.doctor._link_speed import LinkSpeed
from nnlo_common.commands.doctor._units import bandwidth, seconds

__all__ = ["check_clocks", "check_messages"]

# TCP over 1 Gbit/s Ethernet. A cluster network is ten times better in both.
_SLOW_LATENCY_S = 40e-6
_SLOW_BANDWIDTH = 0.2e9
# Hosts that synchronise their clocks differ by less.
_LARGE_OFFSET_S = 0.1


def check_messages(links: Sequence[LinkSpeed], home: str, ranks: int) -> Finding:
    """Check that the network between the hosts is the fast one.

    Args:
        links: the measurements.
        home: the host of rank 0.
        ranks: how many there are in all.
    """
    latencies = [link.latency_s for link in links]
    text = f"a small message takes {seconds(min(latencies))}"
    if max(latencies) > 1.5 * min(latencies):
        text += f" to {seconds(max(latencies))}"
    if len(links) < ranks - 1:
        text += f"; measured with {len(links)} of {ranks - 1} ranks, one on each host"
    for link in links:
        flow = max(link.bandwidth.values())
        if link.host != home and (link.latency_s > _SLOW_LATENCY_S or flow < _SLOW_BANDWIDTH):
            slow = (
                f"{seconds(link.latency_s)} and {bandwidth(flow)} to {link.host}, as slow as plain Ethernet"
            )
            return note(
                "messages", slow, "If there is a faster network, ask why this MPI library does not use it."
            )
    return ok("messages", text)


def check_clocks(links: Sequence[LinkSpeed]) -> Finding:
    """Check that timestamps of different hosts can be compared."""
    link = max(links, key=lambda link: abs(link.clock_offset_s) + link.clock_error_s)
    offset, error = abs(link.clock_offset_s), link.clock_error_s
    if offset - error > _LARGE_OFFSET_S:
        text = f"rank {link.rank} on {link.host} differs from rank 0 by {seconds(offset)} ± {seconds(error)}"
        return note("clocks", text, "Timelines and logs of these hosts do not match; have NTP looked at.")
    return ok("clocks", f"agree within {seconds(offset + error)}")
