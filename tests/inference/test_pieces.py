"""Sharing out of pieces: each is done by the living, whatever the order of events, and noted once."""

from __future__ import annotations

import heapq
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnlo_common import PeerLostError, ProtocolError
from nnlo_common.inference._pieces import PieceCoordinator, run_pieces
from nnlo_common.testing import InjectedFault
from tests.helpers.threads import on_ranks, ranks


class Record:
    """Notes of pieces; some may be done already."""

    def __init__(self, left):
        self.left, self.noted = list(left), []

    def note(self, piece, note):
        self.noted.append((piece, note))

    def finish(self):
        return [list(one) for one in sorted(self.noted)]


class Doing:
    """A rank's way to do a piece: it is written some pieces later, as by a thread that lags."""

    def __init__(self, rank, lag=0, dies_at=None, log=None, ready=lambda: True):
        self.rank, self.lag, self.dies_at, self.log, self.ready = rank, lag, dies_at, log, ready
        self.computed, self.seen = [], []

    def begin(self, piece, following):
        self.seen.append(piece)
        if len(self.seen) == self.dies_at:
            raise InjectedFault(f"rank {self.rank} dies")
        yield
        following()
        while not self.ready():  # the first rank answers the others meanwhile
            time.sleep(1e-4)
            yield
        self.computed.append(piece)

    def finished(self, *, wait):
        keep = 0 if wait else self.lag
        done = self.computed[: max(len(self.computed) - keep, 0)]
        self.computed = self.computed[len(done) :]
        if self.log is not None:
            self.log.extend((self.rank, piece) for piece in done)
        return [(piece, self.rank) for piece in done]


@settings(max_examples=15)
@given(st.data())
def test_pieces_are_done_once_by_the_living_in_any_order_of_events(data):
    pieces = data.draw(st.lists(st.integers(0, 99), unique=True, max_size=12))
    size = data.draw(st.integers(1, 5))
    record = Record(pieces)
    coordinator = PieceCoordinator(record, range(size))
    held = {rank: [] for rank in range(size)}  # in order
    asks, waiting = set(range(size)), set()
    over: set[int] = set()

    def answer(rank, work):
        waiting.discard(rank)
        held[rank] += work.pieces
        if work.over:
            assert not held[rank]
            over.add(rank)
        elif work.pieces or held[rank]:
            asks.add(rank) if held[rank] else None

    while len(over) < len(held):
        able = [("ask", rank) for rank in held if rank not in waiting | over]
        able += [("done", rank) for rank in held if held[rank]]
        able += [("dies", rank) for rank in held if rank and len(held) > 1 and rank not in over]
        what, rank = data.draw(st.sampled_from(able))
        if what == "ask":
            found = coordinator.ask(rank)
            waiting.add(rank) if found is None else answer(rank, found)
        elif what == "done":
            coordinator.done(rank, held[rank].pop(0), None)
        else:
            coordinator.lost(rank)
            del held[rank]
            waiting.discard(rank)
        for other, found in coordinator.answers():
            answer(other, found)
    assert Counter(piece for piece, _ in record.noted) == Counter(pieces)
    assert not coordinator.working


def test_a_piece_that_nobody_asked_for_is_refused():
    with pytest.raises(ProtocolError, match="piece 7, which nobody asked for"):
        PieceCoordinator(Record([1]), [0]).done(0, 7, None)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("lag", [0, 2])
def test_ranks_do_all_pieces_together(size, lag):
    record = Record(range(17))

    def program(world):
        return run_pieces(world, record if world.rank == 0 else None, Doing(world.rank, lag))

    found = on_ranks(size, program)
    assert found == [record.finish()] * size
    assert sorted(piece for piece, _ in record.noted) == list(range(17))


def test_the_next_piece_is_there_before_one_ends():
    """A rank that asked only between its pieces waited for the first one after every second piece."""
    record, known = Record(range(12)), []

    class Waiting(Doing):
        def begin(self, piece, following):
            self.computed.append(piece)
            limit = time.monotonic() + 10
            if self.rank == 0:
                while len(known) < 5:  # it answers meanwhile
                    time.sleep(1e-4)
                    yield
            elif len(known) < 5:
                while following() is None and time.monotonic() < limit:
                    time.sleep(1e-4)
                    yield
                known.append(following())
            yield

    on_ranks(2, lambda world: run_pieces(world, None if world.rank else record, Waiting(world.rank)))
    assert None not in known


@pytest.mark.parametrize("size", [1, 3])
def test_nothing_left_ends_at_once(size):
    record = Record([])
    on_ranks(size, lambda world: run_pieces(world, record if not world.rank else None, Doing(world.rank)))
    assert record.noted == []


@pytest.mark.parametrize("dies_at", [1, 2, 3])
@pytest.mark.parametrize("lag", [0, 2])
def test_others_do_the_pieces_of_a_dead_rank(dies_at, lag):
    record, log = Record(range(20)), []
    begun = [dies_at == 1] * 3

    def program(world):
        def ready():
            """All have a piece before any goes on, so that the one that is to die gets some."""
            begun[world.rank] = True
            return all(begun)

        dies = dies_at if world.rank == 2 else None
        return run_pieces(world, None if world.rank else record, Doing(world.rank, lag, dies, log, ready))

    with ranks(3) as cluster:
        cluster.run(program)
    assert sorted(piece for piece, _ in record.noted) == list(range(20))
    assert sum(rank == 2 for rank, _ in log) < dies_at


def test_the_death_of_the_first_rank_is_named():
    record = Record(range(20))

    def program(world):
        dies = 2 if world.rank == 0 else None
        return run_pieces(world, record if world.rank == 0 else None, Doing(world.rank, dies_at=dies))

    with (
        pytest.raises(PeerLostError, match=r"shared out the work\. Rerun the same command"),
        ranks(3) as cluster,
    ):
        cluster.run(program)


def test_a_slow_rank_gets_fewer_and_all_end_together():
    """In virtual time: a piece takes one second on two ranks, and three on the third."""
    record, costs = Record(range(300)), (1.0, 1.0, 3.0)
    coordinator = PieceCoordinator(record, range(3))
    queues = {rank: list(coordinator.ask(rank).pieces) for rank in range(3)}
    events, waiting = [(0.0, rank) for rank in range(3)], set()
    ends, over = dict.fromkeys(range(3), 0.0), set()

    def take(rank, found):
        queues[rank] += found.pieces
        over.update({rank} if found.over else ())
        if rank in waiting:
            waiting.discard(rank)
            heapq.heappush(events, (now, rank))

    while events:
        now, rank = heapq.heappop(events)
        if len(queues[rank]) <= 1 and rank not in over:
            found = coordinator.ask(rank)
            if found is None:
                waiting.add(rank)
            else:
                take(rank, found)
        if queues[rank]:
            ends[rank] = now + costs[rank]
            coordinator.done(rank, queues[rank].pop(0), rank)
            heapq.heappush(events, (ends[rank], rank))
        for other, found in coordinator.answers():
            take(other, found)
    shares = Counter(rank for _, rank in record.noted)
    assert sum(shares.values()) == 300
    best = 300 / sum(1 / cost for cost in costs)
    assert max(ends.values()) < 1.05 * best
    assert 100 * max(costs) / max(ends.values()) > 2, "beside equal shares"
