"""Differences between the clocks of hosts, by the times of gathers."""

from __future__ import annotations

import random
import threading

import pytest

from nnlo_common.base._errors import ProtocolError
from nnlo_common.cluster._hosts import gathered_offset

AHEAD_S = (0.0, 7.25, -3.5, 0.001)


class Hosts:
    """Ranks whose clocks differ, and gathers that take time; the moments are drawn from a seed."""

    def __init__(self, seed, late_s):
        self._late_s, self.reads = late_s, 0
        self._draw, self._meeting = random.Random(seed), threading.Barrier(len(AHEAD_S))
        self._texts = [""] * len(AHEAD_S)
        self.true_s = [1e9 + self._draw.random() for _ in AHEAD_S]

    def gather(self, rank, text):
        self._texts[rank] = text
        if self._meeting.wait() == 0:
            all_there_s = max(self.true_s)
            late_s = [self._late_s * self._draw.random() ** 3 for _ in AHEAD_S]  # seldom late by much
            self.true_s = [all_there_s + 1e-4 + one for one in late_s]
        self._meeting.wait()
        found = list(self._texts)
        self._meeting.wait()
        return found

    def clock(self, rank):
        self.reads += rank == 0
        self.true_s[rank] += 1e-6  # reading it takes a moment
        return self.true_s[rank] + AHEAD_S[rank]


@pytest.mark.parametrize(("late_s", "reads"), [(2e-4, 18), (2e-2, None)], ids=["idle hosts", "busy hosts"])
@pytest.mark.parametrize("seed", range(5))
def test_the_clocks_of_hosts_are_compared_to_within_the_error_that_is_told(seed, late_s, reads):
    hosts, found = Hosts(seed, late_s), {}

    def work(rank):
        found[rank] = gathered_offset(lambda text: hosts.gather(rank, text), rank, lambda: hosts.clock(rank))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(AHEAD_S))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank, ahead_s in enumerate(AHEAD_S):
        assert abs(found[rank].ahead_s - ahead_s) <= found[rank].error_s + 1e-6
        assert found[rank].error_s <= 2.5e-4  # though the ranks begin up to a second apart
    assert hosts.reads == reads or (reads is None and 18 < hosts.reads < 200)


def test_a_text_that_is_no_clock_is_named():
    with pytest.raises(ProtocolError, match=r"rank 0 sent 'hello' in place of its clock"):
        gathered_offset(lambda text: ["hello"], 1)
