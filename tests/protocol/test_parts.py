"""A server that leaves commits to the `fill` of its replies makes the same training, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from nnlo_common import AGN, EAMSGD, EASGD, GEM, SGD, DiLoCo, Downpour, DynSGD, LocalSGD, Steady, Synchronous
from nnlo_common.algorithms import Algorithm
from nnlo_common.base._flat_vector import FlatVector, Frame
from nnlo_common.cluster.transport._group_endpoints import LeadEndpoint
from nnlo_common.protocol import (
    Activity,
    Kind,
    Lost,
    Message,
    Received,
    Send,
    Server,
    Shard,
    Wire,
    Worker,
    _server,
    decode,
    encode,
)
from nnlo_common.protocol._events import Part, given
from nnlo_common.search.block._block_world import _BlockEndpoint
from nnlo_common.testing import RandomOrder, VirtualCluster

RULES: list[Algorithm] = [
    Downpour(),
    Downpour(lag=2),
    Downpour(n_push=2, n_fetch=3),
    Downpour(warm_start=3),
    DynSGD(),
    AGN(every=2, local_learning_rate=0.1),
    EASGD(every=1),
    EASGD(every=2, lag=1),
    EASGD(every=1, synchronous=True),
    EAMSGD(learning_rate=0.1),
    GEM(learning_rate=0.1),
    Synchronous(),
    LocalSGD(every=2),
    DiLoCo(every=2),
    Steady(),
    Steady(lag=1),
]


ARRAYS = (np.linspace(-1, 1, 7, dtype="f4"), np.ones(4, "f4"))


def trained(
    rule: Algorithm, seed: int, *, by_parts: bool, arrays: Sequence[np.ndarray] = ARRAYS
) -> list[object]:
    """All that three workers and two servers are at the end, and how often parts were computed."""
    layout = FlatVector.of(arrays).layout
    places = layout.cut(2)
    shards = [Shard(index, index, place) for index, place in enumerate(places)]

    def program(worker: Worker) -> Activity:
        yield from worker.join()
        for epoch in range(2):
            yield from worker.begin_epoch()
            for step in range(5):
                noise = np.random.default_rng([worker.rank, epoch, step]).standard_normal(layout.size)
                worker.gradient.vector[:] = worker.gradient_point() + noise.astype("f4")
                yield from worker.step()
            yield from worker.finish_epoch()
        if rule.trains_in_rounds:
            yield from worker.last_round()
        yield from worker.leave()

    ranks = range(2, 5)
    start = FlatVector.of(arrays).vector
    rules = [rule.center(start[s.place].copy(), 3, SGD(0.1, momentum=0.5)) for s in shards]
    for one in rules:
        one.share(layout.size)
    servers = [
        Server(
            one,
            ranks,
            rank=s.server,
            shard=s.index,
            depth=rule.lag + 1,
            by_parts=by_parts,
            wire=Wire(rule, layout, s.place),
        )
        for s, one in zip(shards, rules, strict=True)
    ]
    workers = {
        rank: Worker(
            rank, rule, FlatVector.of(arrays), FlatVector.of(arrays), shards, workers=3, local=SGD(0.1)
        )
        for rank in ranks
    }
    programs = {rank: program(worker) for rank, worker in workers.items()}
    VirtualCluster(servers, workers, programs, schedule=RandomOrder(seed), check=True).run()
    return [*(one.state() for one in servers), *(one.state() for one in workers.values())]


def assert_same(one: object, other: object) -> None:
    if isinstance(one, dict):
        assert isinstance(other, dict)
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list):
        assert isinstance(other, list)
        assert len(one) == len(other)
        for item, same in zip(one, other, strict=True):
            assert_same(item, same)
    else:
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rule", RULES, ids=Algorithm.describe)
def test_a_training_by_parts_is_the_same_training(rule: Algorithm, seed: int) -> None:
    assert_same(trained(rule, seed, by_parts=True), trained(rule, seed, by_parts=False))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("rule", RULES, ids=Algorithm.describe)
def test_a_training_whose_replies_are_sent_from_the_centre_is_the_same(
    rule: Algorithm, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = trained(rule, seed, by_parts=True)
    monkeypatch.setattr(_server, "_LONG", 0)
    assert_same(trained(rule, seed, by_parts=True), copied)


def test_a_reply_is_sent_from_the_centre_where_that_is_all_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_server, "_LONG", 3)

    def lends(rule: Algorithm, size: int = 4, workers: int = 1) -> bool:
        center = rule.center(np.zeros(size, "f4"), workers, SGD(1.0))
        server = Server(center, range(1, workers + 1), by_parts=True)
        for worker in range(1, workers + 1):
            server.handle(received(Kind.JOIN, 0, sender=worker))
        for worker in range(1, workers + 1):
            sends = server.handle(received(Kind.EXCHANGE, 1, np.ones(size, "f4"), worker))
        assert len(sends) == workers
        return all(isinstance(one, Send) and one.message.vector is server.rule.center for one in sends)

    assert lends(Downpour())
    assert lends(Synchronous(), workers=3)
    assert lends(LocalSGD())
    assert not lends(Downpour(), size=3)
    assert not lends(EASGD(every=1))


def test_a_reply_is_copied_where_another_commit_follows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_server, "_LONG", 0)
    rule = Synchronous(lag=1).center(np.zeros(4, "f4"), 2, SGD(1.0))
    server = Server(rule, [1, 2], by_parts=True, depth=2)
    for worker in (1, 2):
        server.handle(received(Kind.JOIN, 0, sender=worker))
    for sequence in (1, 2):  # with a lag a worker may be a step ahead of one that dies
        assert server.handle(received(Kind.EXCHANGE, sequence, np.ones(4, "f4"))) == []
    sends = [one.message.vector for one in server.handle(Lost(2)) if isinstance(one, Send)]
    assert [vector.tolist() for vector in sends if vector is not None] == [[-1] * 4, [-2] * 4]
    assert sends[1] is rule.center


def received(kind: Kind, sequence: int, vector: np.ndarray | None = None, sender: int = 1) -> Received:
    frame = Frame(4 if vector is None else vector.size)
    if vector is not None:
        frame.vector[:] = vector
    message = Message(kind, sender, sequence, vector=None if vector is None else frame.vector)
    return Received(decode(frame, encode(message, frame)), frame)


def serving(workers: int = 1, *, after_commit: Callable[[], object] | None = None) -> Server:
    rule = EASGD(every=1, alpha=0.5).center(np.zeros(4, "f4"), workers, None)
    server = Server(rule, range(1, workers + 1), by_parts=True)
    server.after_commit = after_commit
    server.handle(received(Kind.JOIN, 0))
    return server


def exchanged(server: Server) -> Send:
    send, *_ = server.handle(received(Kind.EXCHANGE, 1, np.full(4, 2, "f4")))
    assert isinstance(send, Send)
    return send


def test_the_centre_moves_while_the_reply_is_filled() -> None:
    server = serving()
    send = exchanged(server)
    assert server.rule.clock == send.message.clock == 1
    assert not server.rule.center.any()
    assert send.fill is not None
    send.fill(slice(0, 3))
    assert server.rule.center.tolist() == [1, 1, 1, 0]
    send.fill(slice(3, 4))
    assert server.rule.center.tolist() == [1, 1, 1, 1]
    assert send.message.vector is not None
    assert send.message.vector.tolist() == [1, 1, 1, 1]


def test_what_is_called_after_a_commit_sees_the_whole_centre() -> None:
    seen: list[list[float]] = []
    server = serving(after_commit=lambda: seen.append(server.rule.center.tolist()))
    send = exchanged(server)
    assert seen == [[1, 1, 1, 1]]
    assert send.fill is not None  # the reply may still be made by parts
    send.fill(slice(0, 4))
    assert server.rule.center.tolist() == [1, 1, 1, 1]


def test_a_worker_that_joins_meanwhile_gets_a_whole_centre() -> None:
    rule = Downpour(warm_start=1).center(np.zeros(4, "f4"), 2, SGD(1.0))
    server = Server(rule, [1, 2], by_parts=True)
    server.handle(received(Kind.JOIN, 0))
    assert server.handle(received(Kind.JOIN, 0, sender=2)) == []  # it waits for the first commit
    reply, welcome = server.handle(received(Kind.EXCHANGE, 1, np.ones(4, "f4")))
    assert isinstance(reply, Send)
    assert isinstance(welcome, Send)
    assert welcome.rank == 2
    assert welcome.message.vector is not None
    assert welcome.message.vector.tolist() == [-1, -1, -1, -1]


def arriving(*parts: tuple[slice, list[float]] | None) -> Received:
    """A long reply of four numbers whose parts come in this order; None: one lets itself be waited for."""
    event = received(Kind.CENTER, 1, np.zeros(4, "f4"))

    def arrival(into: np.ndarray | None) -> Iterator[Part | None]:
        for one in parts:
            yield from [None] if one is None else given([(one[0], np.array(one[1], "f4"))], into)

    return Received(event.message, event.frame, arrival)


LATE = ((slice(0, 2), [1.0, 2.0]), None, None, (slice(2, 4), [3.0, 4.0]))


def test_a_reply_can_be_received_whole() -> None:
    event = arriving(*LATE).whole()
    assert event.parts is None
    assert event.message.vector is not None
    assert event.message.vector.tolist() == [1, 2, 3, 4]
    assert event.whole() == event


@pytest.mark.parametrize("long", [True, False])
def test_a_reply_can_be_received_where_it_belongs(long: bool) -> None:
    mine = np.zeros(4, "f4")
    event = arriving(*LATE) if long else received(Kind.CENTER, 1, np.array([1, 2, 3, 4], "f4"))
    for place, numbers in event.arriving(mine):
        assert np.shares_memory(numbers, mine)
        assert numbers.tolist() == mine[place].tolist() == [1, 2, 3, 4][place]
    assert mine.tolist() == [1, 2, 3, 4]
    assert not list(received(Kind.ACK, 1).arriving(mine))  # it has no vector


def test_a_rule_that_does_more_than_replace_gets_every_part_to_see() -> None:
    for rule in RULES:
        does_more = isinstance(rule, EASGD | EAMSGD | DiLoCo)
        assert rule.worker(4, 3).replaces != does_more, rule


def test_a_reply_can_be_watched_while_it_arrives() -> None:
    said: list[str] = []
    event = arriving(*LATE).watched(lambda: said.append("waits"), lambda: said.append("comes"))
    event = event.watched(lambda: said.append("also"))
    assert [place.stop for place, _ in event.arriving()] == [2, 4]
    assert said == ["comes", "waits", "also", "waits", "also", "comes"]


class Coming:
    """An endpoint that receives one reply."""

    def __init__(self, event: Received) -> None:
        self.event: Received | None = event
        self.send = self.send_ahead = self.withdraw = lambda *_: None
        self.release = self.flush = self.abandon = lambda *_: None

    def receive(self, timeout_s: float | None = None) -> Received | None:
        event, self.event = self.event, None
        return event


class Casting:
    """A group whose broadcasts are noted."""

    def __init__(self) -> None:
        self.cast: list[bytes] = []

    def broadcast(self, memory: np.ndarray) -> Casting:
        self.cast.append(memory.tobytes())
        return self

    def wait(self) -> None:
        pass


def test_the_lead_of_a_group_looks_up_while_a_reply_arrives() -> None:
    group = Casting()
    lead = LeadEndpoint(Coming(arriving(*LATE)), group, asking=7)  # type: ignore[arg-type]
    assert [lead.receive(0.1), lead.receive(0.1)] == [None, None]
    assert group.cast == []  # its members get the whole
    event = lead.receive(0.1)
    assert isinstance(event, Received)
    assert event.parts is None
    assert group.cast[1] == np.array([1, 2, 3, 4], "f4").tobytes()
    assert lead.receive(0.1) is None

    lead = LeadEndpoint(Coming(arriving(*LATE)), group, asking=7)  # type: ignore[arg-type]
    assert isinstance(lead.receive(), Received)  # without a limit it waits


def test_a_block_looks_for_alarms_while_a_reply_arrives() -> None:
    class Alarmed:
        checks = 0

        def check(self) -> None:
            self.checks += 1

    channel = Alarmed()
    here = _BlockEndpoint(Coming(arriving(*LATE)), channel, [0, 1], 2)  # type: ignore[arg-type]
    event = here.receive(1.0)
    assert isinstance(event, Received)
    before = channel.checks
    event.whole()
    assert channel.checks == before + 2
