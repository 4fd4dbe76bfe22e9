"""Wire formats: what is applied is what was sent, up to what the sender still keeps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnlo_common import AGN, EAMSGD, EASGD, GEM, SGD, DiLoCo, Downpour, DynSGD, LocalSGD, Steady, Synchronous
from nnlo_common.algorithms import Algorithm
from nnlo_common.base._errors import ConfigurationError, DivergedError, ProtocolError
from nnlo_common.base._flat_vector import PRESENT, FlatVector, Frame, laid_out
from nnlo_common.protocol import Kind, Message, Received, Send, Server, Shard, Wire, Worker
from nnlo_common.protocol._wire import WireEnd
from nnlo_common.testing import MemoryCluster, RandomOrder, VirtualTree, train_virtually
from nnlo_common.testing._virtual import tree_machines
from nnlo_common.training._participant import Participant

pytestmark = pytest.mark.sampled(4)

WIRES = ("bfloat16", "float16", "int8", "topk")
SIZE = 300  # a full row of int8, and one that is not full


def downpour(wire: str, size: int = SIZE) -> Wire:
    return Wire(Downpour(wire=wire), FlatVector.of([np.zeros(size, "f4")]).layout, slice(0, size))


def packed_in(end: WireEnd, frame: Frame) -> np.ndarray:
    """Write the vector in a frame down in its place, as a reply that leaves at once."""
    packed, put = end.packing_in_place(frame)
    put(slice(0, packed.size))
    return packed


def vectors(seed: int, size: int, scale: float) -> np.ndarray:
    """Vectors whose numbers differ by orders of magnitude, some of them 0."""
    draw = np.random.default_rng(seed)
    numbers = draw.standard_normal((7, size)) * 10.0 ** draw.uniform(-4, 2, size) * scale
    return np.where(draw.random((7, size)) < 0.1, 0, numbers).astype(np.float32)


# -- formats, against independent computations ----------------------------------------------------------


def sent_once(wire: str, vector: np.ndarray) -> np.ndarray:
    ends = downpour(wire, vector.size)
    there = Frame(vector.size)
    packed = ends.end(serves=False).pack(vector, there.vector)
    return ends.end(serves=True).unpack_in_place(packed, there).copy()


def nearest(vector: np.ndarray, bits: int) -> np.ndarray:
    """The nearest numbers with so many significant bits, ties away from 0."""
    part, power = np.frexp(vector.astype(np.float64))
    scaled = part * 2.0**bits
    return np.ldexp(np.sign(scaled) * np.floor(np.abs(scaled) + 0.5) / 2.0**bits, power)


def test_bfloat16_is_the_nearest_number_of_eight_bits() -> None:
    vector = vectors(1, 1000, 1.0)[0]
    np.testing.assert_array_equal(sent_once("bfloat16", vector), nearest(vector, 8))


def test_float16_is_the_nearest_number_within_its_range() -> None:
    vector = vectors(2, 1000, 1.0)[0]
    vector[:3] = 1e6, -1e6, 1e-9
    expected = nearest(vector, 11)
    expected[:3] = 65504, -65504, 0
    normal = (np.abs(expected) >= 2.0**-14) | (expected == 0)
    np.testing.assert_array_equal(sent_once("float16", vector)[normal], expected[normal])


def test_int8_is_a_whole_number_of_steps_of_its_row() -> None:
    vector = vectors(3, 1000, 1.0)[0]
    for start in range(0, 1000, 256):
        row = vector[start : start + 256].astype(np.float64)
        step = np.abs(row).max() / 127
        np.testing.assert_allclose(
            sent_once("int8", vector)[start : start + 256], np.rint(row / step) * step, rtol=3e-7, atol=0
        )


def test_topk_is_the_largest_numbers() -> None:
    vector = np.random.default_rng(4).standard_normal(1000).astype(np.float32)
    sent = sent_once("topk", vector)
    order = np.argsort(-np.abs(vector))
    np.testing.assert_array_equal(np.sort(np.flatnonzero(sent)), np.sort(order[:250]))
    np.testing.assert_array_equal(sent[order[:250]], vector[order[:250]])


def test_topk_sends_fewer_with_each_message_down_to_a_hundredth() -> None:
    end, room = downpour("topk", 10_000).end(serves=False), np.zeros(10_000, np.float32)
    vector = np.random.default_rng(5).standard_normal(10_000).astype(np.float32)
    numbers = [(end.pack(vector, room).size - 3) // 2 for _ in range(300)]
    assert numbers[0] == 2500
    assert numbers[128] == pytest.approx(500, abs=2)
    assert numbers[256:] == [100] * 44
    assert sorted(numbers, reverse=True) == numbers


def test_topk_of_a_long_vector_looks_at_a_sample_first() -> None:
    vector = np.random.default_rng(6).standard_normal(200_000).astype(np.float32)
    sent = sent_once("topk", vector)
    order = np.argsort(-np.abs(vector))
    np.testing.assert_array_equal(np.sort(np.flatnonzero(sent)), np.sort(order[:50_000]))


@pytest.mark.parametrize(
    ("wire", "most"), [("bfloat16", 2.0), ("float16", 2.0), ("int8", 1.02), ("topk", 2.0)]
)
def test_a_number_takes_as_many_bytes_as_the_table_says(wire: str, most: float) -> None:
    packed = downpour(wire, 10_000).end(serves=False).pack(vectors(7, 10_000, 1.0)[0], np.zeros(10_000, "f4"))
    assert packed.nbytes <= most * 10_000 + 16


# -- nothing is lost ------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=60)
@given(
    wire=st.sampled_from(WIRES),
    seed=st.integers(0, 999),
    size=st.integers(64, 1200),
    scale=st.sampled_from([1e-30, 1e-6, 1.0, 1e4, 1e30]),
)
def test_all_steps_arrive_but_for_the_residual(wire: str, seed: int, size: int, scale: float) -> None:
    ends = downpour(wire, size)
    worker, server, there = ends.end(serves=False), ends.end(serves=True), Frame(size)
    applied, sent = np.zeros(size), np.zeros(size)
    for vector in vectors(seed, size, scale):
        before = vector.copy()
        applied += server.unpack_in_place(worker.pack(vector, there.vector), there)
        sent += vector
        np.testing.assert_array_equal(vector, before)  # it is the worker's own
        largest = np.abs(sent).max() + np.abs(worker.up.residual).max()
        np.testing.assert_allclose(applied + worker.up.residual, sent, rtol=0, atol=4e-6 * largest)


@pytest.mark.slow
@settings(max_examples=60)
@given(
    wire=st.sampled_from(WIRES),
    seed=st.integers(0, 999),
    size=st.integers(64, 1200),
    start=st.floats(-1e3, 1e3, width=32),
)
def test_replies_are_differences_to_what_the_worker_has(
    wire: str, seed: int, size: int, start: float
) -> None:
    ends = downpour(wire, size)
    worker, server, there = ends.end(serves=False), ends.end(serves=True), Frame(size)
    center = np.full(size, start, np.float32)
    worker.begin(center)
    server.begin(center)
    for step in vectors(seed, size, 1e-2):
        center += step
        off = np.abs(center - server.down.reference)
        there.vector[:] = center
        got = worker.unpack_in_place(packed_in(server, there), there)
        np.testing.assert_array_equal(got, server.down.reference)  # both sides know the same
        rounding = 2 * np.spacing(np.abs(center))
        assert (np.abs(center - got) <= off.max() / 200 + rounding).all()


def gradient(x: np.ndarray, rank: int) -> np.ndarray:
    return x - np.linspace(-1, 1, x.size) * (1 + rank / 8)


def kept(run: Any) -> np.ndarray:
    """What the workers have not sent yet."""
    return sum(
        np.concatenate([one._wire.up.residual for one in worker.shard_clients]).astype(np.float64)
        for worker in run.workers
    )


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("lag", [0, 2])
def test_a_centre_moves_by_all_gradients_but_for_the_residuals(wire: str, servers: int, lag: int) -> None:
    made: list[np.ndarray] = []

    def noted(x: np.ndarray, rank: int) -> np.ndarray:
        made.append(gradient(x, rank).astype(np.float32))
        return made[-1]

    run = train_virtually(
        Downpour(wire=wire, lag=lag),
        noted,
        [np.zeros(200, "f4"), np.ones(150, "f4")],
        workers=3,
        steps=[12, 9, 7],
        servers=servers,
        optimizer=SGD(0.01),
        schedule=RandomOrder(4),
    )
    start = np.concatenate([np.zeros(200), np.ones(150)])
    expected = start - 0.01 * (np.sum(made, axis=0, dtype=np.float64) - kept(run))
    np.testing.assert_allclose(run.center, expected, atol=2e-6)


@pytest.mark.parametrize("wire", ["bfloat16", "float16", "int8"])
def test_elastic_exchanges_keep_the_total_but_for_the_residuals(wire: str) -> None:
    begin = [np.linspace(-1, 1, 300) * rank for rank in (1, 2, 3)]
    run = train_virtually(
        EASGD(every=1, alpha=0.2, wire=wire),
        lambda x, rank: 0 * x,
        np.zeros(300, "f4"),
        workers=3,
        begin=begin,
        steps=6,
    )
    total = run.center + np.sum(run.parameters, axis=0, dtype=np.float64)
    held = sum(end.down.residual.astype(np.float64) for end in run.servers[0]._wires.values())
    np.testing.assert_allclose(total - held, np.sum(begin, axis=0), atol=1e-5)


@pytest.mark.parametrize("wire", ["bfloat16", "float16", "int8"])
def test_local_progress_is_not_lost_where_the_mean_replaces_the_weights(wire: str) -> None:
    def slope(x: np.ndarray, rank: int) -> np.ndarray:
        return np.linspace(0.1, 1, x.size) + 0 * x

    run = train_virtually(
        LocalSGD(every=2, wire=wire), slope, np.zeros(300, "f4"), workers=2, steps=40, local=lambda: SGD(0.1)
    )
    expected = -40 * 0.1 * np.linspace(0.1, 1, 300)
    np.testing.assert_allclose(run.center + kept(run) / 2, expected, atol=2e-5)


# -- trainings ------------------------------------------------------------------------------------------


def algorithms(wire: str) -> Iterator[Algorithm]:
    for make, options in (
        (Downpour, {}),
        (Downpour, {"n_push": 2, "n_fetch": 3}),
        (Downpour, {"lag": 2}),
        (AGN, {"every": 2, "local_learning_rate": 0.1}),
        (DynSGD, {}),
        (EASGD, {"every": 2}),
        (EASGD, {"every": 1, "lag": 1}),
        (EASGD, {"every": 1, "synchronous": True}),
        (EAMSGD, {"learning_rate": 0.05, "every": 2}),
        (Synchronous, {}),
        (LocalSGD, {"every": 2}),
        (DiLoCo, {"every": 2}),
        (DiLoCo, {"every": 2, "lag": 1}),
        (Steady, {}),
    ):
        if wire not in make.refused_wires:
            yield make(**options, wire=wire)


CASES = [one for wire in WIRES for one in algorithms(wire)]


def trained(rule: Algorithm, steps: list[list[int]], rate: float = 0.05, **options: Any) -> Any:
    by_worker = rule.optimizer_runs == "worker"
    return train_virtually(
        rule,
        gradient,
        [np.zeros(200, "f4"), np.ones(100, "f4")],
        workers=2,
        servers=2,
        steps=steps,
        optimizer=SGD(rate, momentum=0.5) if rule.optimizer_runs == "center" else None,
        local=(lambda: SGD(rate)) if by_worker else None,
        schedule=RandomOrder(3) if "resume" not in options else None,
        **options,
    )


@pytest.mark.parametrize("rule", CASES, ids=Algorithm.describe)
def test_every_algorithm_finds_the_place_that_it_finds_in_float32(rule: Algorithm) -> None:
    # A number that topk sends each hundredth time moves as by a hundred times the learning rate.
    topk = rule.wire == "topk"
    steps, rate = ([[350, 350]] * 2, 0.004) if topk else ([[60, 60]] * 2, 0.05)
    found, plain = (trained(one, steps, rate) for one in (rule, replace(rule, wire="float32")))
    limit = 0.06 if topk else 0.02
    assert np.abs(found.center - plain.center).max() < limit * np.abs(plain.center).max()


@pytest.mark.parametrize("rule", CASES, ids=Algorithm.describe)
def test_a_resumed_training_is_the_same_training(rule: Algorithm) -> None:
    options: dict[str, Any] = {"leave": False}
    first = trained(rule, [[7], [7]], **options)
    saved = first.state()
    one, other = (trained(rule, [[6], [6]], resume=saved, **options) for _ in range(2))
    np.testing.assert_array_equal(one.center, other.center)
    # The same again without a stop; round robin gives both the same order.
    whole = train_whole(rule)
    np.testing.assert_array_equal(whole[0], whole[1])


def train_whole(rule: Algorithm) -> tuple[np.ndarray, np.ndarray]:
    """The centre after two epochs, once in one run and once with a stop between."""
    by_worker = rule.optimizer_runs == "worker"
    common: dict[str, Any] = {
        "workers": 2,
        "optimizer": SGD(0.05, momentum=0.5) if rule.optimizer_runs == "center" else None,
        "local": (lambda: SGD(0.05)) if by_worker else None,
        "leave": False,
    }
    start = [np.zeros(200, "f4"), np.ones(100, "f4")]
    whole = train_virtually(rule, gradient, start, steps=[[5, 6], [5, 6]], **common)
    first = train_virtually(rule, gradient, start, steps=[[5], [5]], **common)
    second = train_virtually(rule, gradient, start, steps=[[6], [6]], resume=first.state(), **common)
    return whole.center, second.center


@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
def test_a_tree_of_servers_keeps_the_total_on_both_of_its_levels(wire: str) -> None:
    start = FlatVector.of([np.zeros(300, "f4")])
    machines, workers = tree_machines(
        EASGD(sub_servers=2, sub_every=2, every=1, wire=wire), start, [[1, 3, 4], [2, 5, 6]]
    )

    def program(rank: int) -> Iterator[Any]:
        worker = workers[rank]
        yield from worker.join()
        worker.parameters.vector[:] = np.linspace(0, 1, 300) * rank
        for _ in range(5):
            worker.gradient.vector[:] = 0
            yield from worker.step()
        yield from worker.leave()

    VirtualTree(machines, workers, {rank: program(rank) for rank in workers}, check=True).run()
    total = sum(one.rule.center.astype(np.float64) for one in machines.values())
    total += sum(one.parameters.vector.astype(np.float64) for one in workers.values())
    held = sum(
        end.down.residual.astype(np.float64) for one in machines.values() for end in one._wires.values()
    )
    np.testing.assert_allclose(total - held, np.linspace(0, 1, 300) * 18, atol=2e-5)


@pytest.mark.parametrize("algorithm", [Downpour(wire="int8"), Downpour(wire="topk", topk_momentum=0.9)])
def test_what_waits_on_a_worker_outlives_its_server(algorithm: Downpour) -> None:
    x, g = (FlatVector.of([np.linspace(1, 2, SIZE, dtype=np.float32)]) for _ in range(2))
    worker = Worker(1, algorithm, x, g, [Shard(0, 0, slice(0, SIZE), (2,))], workers=1)
    (client,) = worker.shard_clients

    def hear_center(rank: int, value: float) -> None:
        frame = Frame(SIZE)
        frame.vector[:] = value
        worker.deliver(Received(Message(Kind.CENTER, rank, 0, vector=frame.vector), frame))

    next(worker.join())
    hear_center(0, 0.0)
    sent = next(action for action in worker.step() if isinstance(action, Send))
    if sent.fill is not None and sent.message.vector is not None:
        sent.fill(slice(0, sent.message.vector.size))
    up = client.state()["wire"]["up"]
    assert up["residual"].any()
    next(worker.go_on_without(0))
    hear_center(2, 3.0)
    wire = client.state()["wire"]
    assert all(np.array_equal(wire["up"][name], value) for name, value in up.items())
    assert (wire["down"]["reference"] == 3).all()


@pytest.mark.parametrize("wire", WIRES)
def test_all_ranks_of_groups_stay_equal(wire: str) -> None:
    """Two groups of two, as threads: the lead's packed replies are broadcast."""

    def program(world: Any) -> np.ndarray:
        start = [np.zeros(200, "f4"), np.ones(100, "f4")]
        with Participant(Downpour(wire=wire), start, optimizer=SGD(0.1), group_size=2, world=world) as me:
            for _ in me.batches(range(24)):
                for point, slope in zip(me.point, me.gradients, strict=True):
                    slope[:] = point - 0.5
                me.step()
            found = np.concatenate([one.ravel() for one in me.parameters])
        return found.copy()

    with MemoryCluster(5) as cluster:
        center, *others = cluster.run(program)
    np.testing.assert_array_equal(others[0], others[1])
    np.testing.assert_array_equal(others[2], others[3])
    assert np.abs(center - 0.5).max() < (0.5 if wire == "topk" else 0.2)


# -- marks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", WIRES)
def test_a_mark_arrives_whatever_is_rounded(wire: str) -> None:
    pieces = [
        ("a", (40,), "float32", 1),
        ("b", (7,), "float32", 2),
        ("c", (), "float32", 3),
        ("d", (90,), "float32", 4),
    ]
    layout = laid_out(pieces, padded=True)
    place = slice(48, layout.size)  # the first is on another server
    ends = Wire(Downpour(wire=wire), layout, place)
    marks = layout.marks()[1:] - 48
    np.testing.assert_array_equal(ends.marks, marks)
    worker, server, there = ends.end(serves=False), ends.end(serves=True), Frame(ends.size)
    for present in ((1, 0, 1), (0, 1, 1), (0, 0, 0), (3, 0, 2)):
        vector = np.random.default_rng(8).standard_normal(ends.size).astype(np.float32)
        vector[marks] = np.float32(present) * PRESENT
        got = server.unpack_in_place(worker.pack(vector, there.vector), there)
        np.testing.assert_array_equal(got[marks] > 0, np.array(present) > 0)
        assert (got[marks] <= 4 * PRESENT).all()


@pytest.mark.parametrize(("wire", "momentum"), [*((wire, 0.0) for wire in WIRES), ("topk", 0.9)])
def test_what_waits_for_an_array_without_a_gradient_is_kept(wire: str, momentum: float) -> None:
    """Optimizers skip such an array: PyTorch's leave its momentum, too, as it is."""
    layout = laid_out([("a", (150,), "f4", 1), ("b", (70,), "f4", 2), ("c", (90,), "f4", 3)], padded=True)
    ends = Wire(Downpour(wire=wire, topk_momentum=momentum), layout, slice(0, layout.size))
    worker, server, there = ends.end(serves=False), ends.end(serves=True), Frame(layout.size)
    draw = np.random.default_rng(3)
    applied, sent, velocity = np.zeros((3, layout.size))
    for step in range(60):
        vector = np.zeros(layout.size, np.float32)
        for index, (one, mark) in enumerate(zip(layout.segments, layout.marks(), strict=True)):
            if (step + index) % 3:
                vector[one.place], vector[mark] = draw.standard_normal(one.size), PRESENT
                velocity[one.place] = momentum * velocity[one.place] + vector[one.place]
                sent[one.place] += velocity[one.place]
        got = server.unpack_in_place(worker.pack(vector, there.vector), there)
        for one, mark in zip(layout.segments, layout.marks(), strict=True):
            if got[mark] > 0:
                applied[one.place] += got[one.place]
            else:
                assert not got[one.place].any()
    assert np.abs(sent).max() > 5
    for one in layout.segments:
        arrived = applied[one.place] + worker.up.residual[one.place]
        np.testing.assert_allclose(arrived, sent[one.place], atol=2e-4)


def test_a_vector_without_padding_has_no_marks() -> None:
    layout = FlatVector.of([np.zeros(100, "f4"), np.zeros(30, "f4")]).layout
    assert Wire(Downpour(wire="int8"), layout, slice(0, 130)).marks.size == 0


# -- what cannot be sent, or read -----------------------------------------------------------------------


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_arrives_as_such(wire: str, bad: float) -> None:
    vector = np.ones(SIZE, np.float32)
    vector[0] = bad
    assert not np.isfinite(sent_once(wire, vector)[0])
    vector[:] = bad
    assert not np.isfinite(sent_once(wire, vector)).any()


@pytest.mark.parametrize("wire", WIRES)
def test_a_server_refuses_a_gradient_of_nan(wire: str) -> None:
    def program(world: Any) -> None:
        with Participant(Downpour(wire=wire), [np.ones(100, "f4")], optimizer=SGD(0.1), world=world) as me:
            for _ in me.batches(range(3)):
                me.gradients[0][:] = np.nan
                me.step()

    with MemoryCluster(2) as cluster, pytest.raises(DivergedError, match="NaN or infinity"):
        cluster.run(program)


@pytest.mark.slow
@settings(max_examples=150)
@given(
    wire=st.sampled_from(WIRES),
    noise=st.binary(max_size=2000),
    keep=st.integers(0, 1200),
    seed=st.integers(0, 9),
)
def test_damaged_bytes_are_refused_or_read_as_numbers(wire: str, noise: bytes, keep: int, seed: int) -> None:
    ends = downpour(wire)
    there = Frame(2 * SIZE)
    raw = ends.end(serves=False).pack(vectors(seed, SIZE, 1.0)[0], np.zeros(SIZE, "f4")).tobytes()
    damaged = (raw[:keep] + noise)[: 4 * ((len(raw[:keep]) + len(noise)) // 4)]
    packed = np.frombuffer(damaged, np.float32)
    try:
        got = ends.end(serves=True).unpack_in_place(packed, there)
    except ValueError:
        return
    assert got.size == SIZE


def test_a_server_names_who_sent_what_cannot_be_read() -> None:
    rule = Downpour(wire="int8")
    layout = FlatVector.of([np.zeros(100, "f4")]).layout
    server = Server(
        rule.center(np.zeros(100, "f4"), 1, SGD(0.1)), [1], wire=Wire(rule, layout, slice(0, 100))
    )
    frame = Frame(100)
    server.handle(Received(Message(Kind.JOIN, 1, 0), frame))
    message = Message(Kind.EXCHANGE, 1, 1, vector=frame.vector[:100])
    with pytest.raises(
        ProtocolError, match=r"rank 1 sent a vector that cannot be read .*have all ranks one wire"
    ):
        server.handle(Received(message, frame))
    np.testing.assert_array_equal(server.rule.center, 0)


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (GEM, {"wire": "int8"}, "GEM: wire='int8' is not possible: its commit is scaled to the centre"),
        (GEM, {"wire": "bfloat16"}, "GEM: wire='bfloat16' is not possible"),
        (
            EASGD,
            {"wire": "topk"},
            "EASGD: wire='topk' is not possible: the centre would pull at weights of long ago",
        ),
        (EAMSGD, {"wire": "topk", "learning_rate": 0.1}, "EAMSGD: wire='topk' is not possible"),
        (Steady, {"wire": "topk"}, "Steady: wire='topk' is not possible: its gain compares"),
        (LocalSGD, {"wire": "topk"}, "LocalSGD: wire='topk' is not possible: what a worker keeps of a round"),
        (DiLoCo, {"wire": "topk"}, "DiLoCo: wire='topk' is not possible"),
        (LocalSGD, {"wire": "int8", "lag": 1}, "LocalSGD: wire='int8' with lag=1 is not possible"),
        (Downpour, {"wire": "int4"}, "wire='int4' is not possible: it must be 'float32' or 'bfloat16'"),
        (Downpour, {"wire": 8}, "wire=8 is not possible"),
        (Downpour, {"wire": None}, "wire=None is not possible"),
    ],
)
def test_what_cannot_be_sent_so_is_refused_by_name(make: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        make(**options)


def test_weights_never_travel_as_their_largest_numbers() -> None:
    class Yours(EASGD):
        refused_wires: ClassVar = {}

    with pytest.raises(ConfigurationError, match="Yours: wire='topk' is not possible: it sends weights"):
        Yours(wire="topk")


def test_a_group_without_servers_has_no_wire() -> None:
    def program(world: Any) -> None:
        with Participant(
            Synchronous(wire="int8"), [np.ones(100, "f4")], optimizer=SGD(0.1), servers=0, world=world
        ):
            raise AssertionError("it begins")

    with MemoryCluster(2) as cluster, pytest.raises(ConfigurationError, match="wire='int8' with servers=0"):
        cluster.run(program)


def test_ranks_with_different_wires_are_named() -> None:
    def program(world: Any) -> None:
        wire = "int8" if world.rank else "float32"
        with Participant(Downpour(wire=wire), [np.ones(100, "f4")], optimizer=SGD(0.1), world=world):
            raise AssertionError("it begins")

    with MemoryCluster(2) as cluster, pytest.raises(ConfigurationError, match="wire='int8'"):
        cluster.run(program)


def test_a_state_of_another_wire_is_refused() -> None:
    def run(wire: str, **options: Any) -> Any:
        rule = Downpour(wire=wire)
        return train_virtually(
            rule,
            gradient,
            np.zeros(100, "f4"),
            workers=1,
            steps=2,
            optimizer=SGD(0.1),
            leave=False,
            **options,
        )

    for one, other in (("float32", "int8"), ("int8", "float32")):
        with pytest.raises(ConfigurationError, match=f"another wire than '{other}'"):
            run(other, resume=run(one).state())
    with pytest.raises(ConfigurationError, match="resume with"):
        run("bfloat16", resume=run("topk").state())


def test_float32_is_quiet() -> None:
    assert "wire" not in Downpour().describe()
    assert "wire='int8'" in Downpour(wire="int8").describe()
    assert (
        "wire"
        not in train_virtually(
            Downpour(), gradient, np.zeros(100, "f4"), workers=1, steps=1, optimizer=SGD(0.1), leave=False
        )
        .workers[0]
        .shard_clients[0]
        .state()
    )


def test_a_short_vector_travels_in_float32() -> None:
    rule = Downpour(wire="int8")
    layout = FlatVector.of([np.zeros(63, "f4")]).layout
    assert not Wire(rule, layout, slice(0, 63)).packs
