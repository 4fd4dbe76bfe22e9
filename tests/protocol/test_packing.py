"""Long vectors leave while they are packed and are unpacked while they arrive, with the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from nnlo_common import EAMSGD, EASGD, SGD, DiLoCo, Downpour, FlatVector, Frame, LocalSGD, Steady, Synchronous
from nnlo_common.algorithms import Algorithm
from nnlo_common.base._block_threads import InOrder
from nnlo_common.base._flat_vector import PRESENT, PartWork, laid_out
from nnlo_common.protocol import Kind, Message, Received, Send, Server, Shard, Wire, _wire
from nnlo_common.protocol._shard_client import ShardClient
from nnlo_common.protocol._wire import WireEnd
from tests.protocol.test_parts import assert_same, trained
from tests.protocol.test_wire import packed_in

WIRES = ("bfloat16", "float16", "int8")
SIZES = (64, 256, 700, 1283)


@pytest.fixture(autouse=True)
def _short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_wire, "_BLOCK", 256)


def wire_of(name: str, size: int, algorithm: type[Algorithm] = Downpour) -> Wire:
    layout = laid_out([("a", (size - 40,), "f4", 1), ("b", (17,), "f4", 2)], padded=True)
    return Wire(algorithm(wire=name), layout, slice(0, layout.size))


def cuts(size: int, seed: int) -> list[slice]:
    """A vector of so many numbers in uneven parts, some of them short."""
    draw = np.random.default_rng(seed)
    inner = sorted(draw.choice(np.arange(1, size), min(size - 1, 5), replace=False).tolist())
    return [slice(start, stop) for start, stop in zip([0, *inner], [*inner, size], strict=True)]


def messages(wire: Wire, seed: int, count: int = 4) -> Iterator[np.ndarray]:
    draw = np.random.default_rng(seed)
    for _ in range(count):
        vector = draw.standard_normal(wire.size).astype(np.float32) * np.float32(10 ** draw.uniform(-3, 3))
        vector[wire.marks] = PRESENT
        yield vector


@pytest.mark.parametrize("absent", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", WIRES)
def test_a_part_of_a_contribution_is_complete_once_it_is_filled(name: str, size: int, absent: bool) -> None:
    wire = wire_of(name, size)
    one, other = wire.end(serves=False), wire.end(serves=False)
    for number, vector in enumerate(messages(wire, 1)):
        if absent and number % 2:
            vector[: wire.marks[0] + 1] = 0
        whole = one.pack(vector, np.zeros(one.room(), "f4"))
        packed, fill = other.packing(vector, room := np.full(one.room(), np.nan, "f4"))
        assert packed.size == wire.packed_size
        for part in cuts(packed.size, number):
            fill(part)
            np.testing.assert_array_equal(room[: part.stop].view("u1"), whole[: part.stop].view("u1"))
        assert_same(one.state(), other.state())


def filling(frame: Frame, vector: np.ndarray, filled: list[slice]) -> PartWork:
    def fill(part: slice) -> None:
        filled.append(part)
        frame.vector[: vector.size][part] = vector[part]

    return fill


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("algorithm", [Downpour, EASGD, LocalSGD])
@pytest.mark.parametrize("name", WIRES)
def test_a_reply_is_packed_in_its_place_while_its_numbers_are_made(
    name: str, algorithm: type[Algorithm], size: int, in_order: bool
) -> None:
    wire = wire_of(name, size, algorithm)
    one, other, worker = wire.end(serves=True), wire.end(serves=True), wire.end(serves=False)
    start = np.linspace(-1, 1, wire.size, dtype=np.float32)
    for end in (one, other, worker):
        end.begin(start)
    for number, vector in enumerate(messages(wire, 2)):
        there, here = Frame(wire.size + 64), Frame(wire.size + 64)
        there.vector[: wire.size] = vector
        whole = packed_in(one, there)
        here.vector[:] = np.nan
        filled: list[slice] = []
        fill = filling(here, vector, filled)
        packed, put = other.packing_in_place(here, InOrder(fill) if in_order else fill)
        for part in cuts(packed.size, number):
            put(part)
            np.testing.assert_array_equal(packed[: part.stop].view("u1"), whole[: part.stop].view("u1"))
        assert [part.start for part in filled] == [0, *(part.stop for part in filled[:-1])]
        assert filled[-1].stop == wire.size
        assert_same(one.state(), other.state())
        check_arrival(worker, packed.copy(), other, wire, number)


def check_arrival(worker: WireEnd, sent: np.ndarray, server: WireEnd, wire: Wire, seed: int) -> None:
    """Let a reply arrive in parts; its numbers are those that arrive at once."""
    state = worker.state()
    state = {**state, "down": {name: np.copy(value) for name, value in state["down"].items()}}
    twin, frame = wire.end(serves=False), Frame(wire.size + 64)
    twin.load({**twin.state(), "down": {**state["down"], "sent": int(state["down"]["sent"])}})
    frame.vector[: sent.size] = sent
    expected = twin.unpack_in_place(frame.vector[: sent.size], frame).copy()

    room, out = worker.memory(sent.size), np.full(wire.size, np.nan, np.float32)
    room[:] = np.nan

    def coming() -> Iterator[tuple[slice, np.ndarray] | None]:
        for part in cuts(sent.size, seed + 9):
            yield None
            room[part] = sent[part]
            yield part, room[part]

    waits, stop = 0, 0
    for one in worker.arriving(coming(), room, out):
        if one is None:
            waits += 1
            continue
        place, numbers = one
        assert place.start == stop
        stop = place.stop
        np.testing.assert_array_equal(numbers, expected[place])
    assert (waits, stop) == (len(cuts(sent.size, seed + 9)), wire.size)
    np.testing.assert_array_equal(out, expected)
    if server.down.reference.size:
        np.testing.assert_array_equal(out, server.down.reference)
        np.testing.assert_array_equal(worker.down.reference, server.down.reference)


@pytest.mark.parametrize("wrong", ["format", "length", "bytes", "too long"])
def test_a_reply_of_another_wire_is_refused_while_it_arrives(wrong: str) -> None:
    wire = wire_of("int8", 700)
    end = wire_of("bfloat16", 700).end(serves=True) if wrong == "format" else wire.end(serves=True)
    there = Frame(wire.size + 64)
    packed = packed_in(end, there).copy()
    if wrong == "length":
        packed.view(np.uint32)[1] += 1
    elif wrong == "bytes":
        packed = packed[:-1]
    worker = wire.end(serves=False)
    if wrong == "too long":
        with pytest.raises(ValueError, match="it has 5000 numbers"):
            worker.memory(5000)
        return
    parts = [(slice(0, packed.size), packed)]
    with pytest.raises(ValueError, match="it has"):
        list(worker.arriving(parts, packed, np.zeros(wire.size, "f4")))


RULES = [
    make(**options, wire=name)
    for name in ("bfloat16", "int8", "topk")
    for make, options in (
        (Downpour, {}),
        (Downpour, {"lag": 2}),
        (Downpour, {"n_push": 2, "n_fetch": 3}),
        (Downpour, {"warm_start": 3}),
        (Steady, {}),
        (EASGD, {"every": 1}),
        (EASGD, {"every": 2, "lag": 1}),
        (EASGD, {"every": 1, "synchronous": True}),
        (Synchronous, {}),
        (LocalSGD, {"every": 2}),
        (DiLoCo, {"every": 2}),
    )
    if name not in make.refused_wires
]


@pytest.mark.parametrize("rule", RULES, ids=Algorithm.describe)
def test_a_packed_training_by_parts_is_the_same_training(rule: Algorithm) -> None:
    arrays = [np.linspace(-1, 1, 700, dtype="f4"), np.ones(433, "f4")]
    by_parts, whole = (trained(rule, 1, by_parts=each, arrays=arrays) for each in (True, False))
    assert_same(by_parts, whole)


def test_a_centre_moves_as_its_packed_reply_is_sent() -> None:
    """Not before: the rest of the numbers is made while the first part is on its way."""
    rule = Downpour(wire="int8")
    center = rule.center(np.zeros(1024, "f4"), 1, SGD(1.0))
    wire = Wire(rule, FlatVector.of([np.zeros(1024, "f4")]).layout, slice(0, 1024))
    server = Server(center, [1], by_parts=True, wire=wire)
    server.handle(Received(Message(Kind.JOIN, 1, 0), Frame(1100)))
    frame = Frame(1100)
    packed = wire.end(serves=False).pack(np.ones(1024, "f4"), frame.vector)
    (send,) = server.handle(Received(Message(Kind.EXCHANGE, 1, 1, vector=packed), frame))
    assert isinstance(send, Send)
    assert send.fill is not None
    assert send.message.vector is not None
    assert not center.center.any()
    send.fill(slice(0, 60))  # 240 of 1048 bytes
    assert (center.center[:256] == -1).all()
    assert not center.center[256:].any()
    send.fill(slice(60, send.message.vector.size))
    assert (center.center == -1).all()


def joined(algorithm: Algorithm) -> tuple[ShardClient, FlatVector, FlatVector, WireEnd, Frame]:
    """A worker with the centre, its parameters and gradient; the server's end, and a frame for replies."""
    start = FlatVector.of([np.zeros(1024, "f4")])
    wire, mine, gradient = Wire(algorithm, start.layout, slice(0, 1024)), FlatVector(start.layout), start
    client = ShardClient(1, Shard(0, 0, slice(0, 1024)), algorithm.worker(1024, 1), mine, gradient, wire=wire)
    client.join()
    server, frame = wire.end(serves=True), Frame(1100)
    server.begin(start.vector)
    client.receive(Received(Message(Kind.CENTER, 0, 0, vector=frame.vector[:1024]), frame))
    return client, mine, gradient, server, frame


def test_a_worker_unpacks_what_has_come_while_it_waits_for_the_rest() -> None:
    client, mine, gradient, server, frame = joined(Downpour(wire="int8"))
    gradient.vector[:] = 1
    client.begin_step()
    client.exchange()
    frame.vector[:1024] = np.linspace(1, 2, 1024)
    packed = packed_in(server, frame).copy()
    there: list[int] = []

    def coming(into: np.ndarray | None) -> Iterator[tuple[slice, np.ndarray]]:
        assert into is not None
        for part in (slice(0, 140), slice(140, packed.size)):
            there.append(int(np.count_nonzero(mine.vector)))
            into[part] = packed[part]
            yield part, into[part]

    reply = Message(Kind.CENTER, 0, 1, vector=frame.vector[: packed.size])
    client.receive(Received(reply, frame, coming))
    assert there == [0, 512]  # of 1048 bytes 560 had come
    np.testing.assert_array_equal(mine.vector, server.down.reference)


@pytest.mark.parametrize("algorithm", [EASGD(every=1), EAMSGD(every=1, learning_rate=0.1)], ids=str)
def test_what_leaves_is_what_a_worker_had_before_it_took_an_earlier_reply(algorithm: Algorithm) -> None:
    client, mine, _, server, frame = joined(replace(algorithm, lag=1, wire="bfloat16"))
    client.begin_step()
    client.exchange()
    client.end_step()
    frame.vector[:1024] = 3
    packed = packed_in(server, frame)
    client.receive(Received(Message(Kind.CENTER, 0, 1, vector=packed), frame))
    mine.vector[:] = 1  # by local steps
    client.begin_step()
    first, *_ = client.exchange()
    assert mine.vector[0] != 1, "it has taken the reply"
    assert isinstance(first, Send)
    assert first.message.vector is not None
    assert first.frame is not None
    if first.fill is not None:
        first.fill(slice(0, first.message.vector.size))
    arrived = server.unpack_in_place(first.message.vector, Frame(1100))
    np.testing.assert_array_equal(arrived, 1)
