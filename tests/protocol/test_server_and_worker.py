"""The protocol: what is on the wire, who may say what when, and that nothing hangs, is lost or is doubled."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nnlo_common import (
    AGN,
    EAMSGD,
    EASGD,
    GEM,
    SGD,
    ConfigurationError,
    DiLoCo,
    Downpour,
    DroppedError,
    DynSGD,
    FlatVector,
    Frame,
    LocalSGD,
    MissingExtraError,
    NNLOError,
    PeerLostError,
    ProtocolError,
    Synchronous,
)
from nnlo_common.algorithms import Algorithm, Ask
from nnlo_common.cluster.transport._endpoint import MemberLostError
from nnlo_common.protocol import (
    Action,
    Compute,
    Kind,
    Lost,
    Message,
    Received,
    Release,
    Send,
    Server,
    Shard,
    ShardClient,
    Standing,
    Story,
    Wait,
    Worker,
    decode,
    encode,
)
from nnlo_common.protocol._messages import WITH_VECTOR
from nnlo_common.testing import Interleaved, RandomOrder, Replay, VirtualCluster, VirtualRun, train_virtually

F4 = np.float32


# --- on the wire -----------------------------------------------------------------------------------------

RANKS, COUNTS = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
MESSAGES = st.builds(
    Message,
    kind=st.sampled_from(Kind),
    sender=RANKS,
    sequence=COUNTS,
    clock=COUNTS,
    pulled_at=COUNTS,
    scalar=st.floats(allow_nan=False),
    shard=RANKS,
    stop=st.booleans(),
    mark=st.booleans(),
    samples=COUNTS,
    vector=st.none(),
    pause=st.booleans(),
)


@settings(max_examples=200)
@given(MESSAGES, st.lists(st.floats(width=32, allow_nan=False), max_size=5), st.integers(0, 3))
def test_a_message_survives_the_wire(message: Message, numbers: list[float], room: int) -> None:
    frame = Frame(len(numbers) + room)
    frame.vector[:] = 77
    if message.kind in WITH_VECTOR:
        message = message._replace(vector=frame.vector[: len(numbers)])
        message.vector[:] = numbers
    sent = encode(message, frame)
    assert sent == 64 + (4 * len(numbers) if message.kind in WITH_VECTOR else 0)
    arrived = Frame(len(numbers) + room)
    arrived.bytes[:sent] = frame.bytes[:sent]
    received = decode(arrived, sent)
    for field in Message._fields:
        if field != "vector":
            assert getattr(received, field) == getattr(message, field)
    if message.vector is None:
        assert received.vector is None
    else:
        assert received.vector.tobytes() == message.vector.tobytes()
        assert np.shares_memory(received.vector, arrived.vector) or not numbers


def test_the_header_is_what_it_has_always_been() -> None:
    """Little-endian, 64 bytes, these numbers for the kinds: so that versions can tell each other apart."""
    message = Message(
        Kind.EXCHANGE, 3, 2**40 + 1, 5, 4, 0.5, shard=2, stop=True, samples=6, vector=np.zeros(7, F4)
    )
    frame = Frame(7)
    assert encode(message, frame) == 64 + 28
    expected = b"nnlo" + bytes([1, 2]) + struct.pack("<HII", 1, 3, 2)
    expected += struct.pack("<QQQQdQ", 2**40 + 1, 5, 4, 7, 0.5, 6)
    assert bytes(frame.header) == expected
    kinds = ["JOIN", "EXCHANGE", "PUSH", "PULL", "LOCK", "COMMIT", "EPOCH", "LEAVE", "CENTER", "ACK"]
    kinds += ["VIEW", "OPTIONS", "ASK", "ANSWER", "PAUSE", "PAUSED", "DROPPED", "SAMPLE", "COPY", "PLACE"]
    kinds += ["TURN", "CALL", "WITHDRAWN", "ROUND"]
    assert [kind.name for kind in Kind] == kinds
    assert [int(kind) for kind in Kind] == list(range(1, 25))


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda frame: 63, "received 63 bytes, less than a header of 64; does other code send"),
        (lambda frame: 0, "received 0 bytes"),
        (
            lambda frame: frame.header.__setitem__(0, 0x4E),
            "starts with b'Nnlo.*Run the same nnlo on all ranks",
        ),
        (lambda frame: frame.header.__setitem__(4, 2), "expected b'nnlo', version 1"),
        (lambda frame: frame.header.__setitem__(4, 0), "expected b'nnlo', version 1"),
        (lambda frame: frame.header.__setitem__(5, 0), "starts with"),
        (lambda frame: frame.header.__setitem__(5, max(Kind) + 1), "starts with"),
        (lambda frame: 64 + 4 * 2, "PUSH from rank 3 announces 3 numbers, but 72 bytes"),
        (lambda frame: 64, "announces 3 numbers, but 64 bytes"),
        (lambda frame: 64 + 4 * 4, "announces 3 numbers, but 80 bytes"),
        (lambda frame: frame.header.__setitem__(40, 9), "announces 9 numbers"),
    ],
)
def test_bytes_that_are_no_message_are_refused(damage: Callable[[Frame], Any], problem: str) -> None:
    frame = Frame(5)
    sent = encode(Message(Kind.PUSH, sender=3, sequence=1, vector=frame.vector[:3]), frame)
    assert decode(frame, sent).sender == 3
    size = damage(frame)
    with pytest.raises(ProtocolError, match=problem):
        decode(frame, sent if size is None else size)


def test_more_numbers_than_there_is_room_for_are_refused() -> None:
    big, small = Frame(5), Frame(3)
    encode(Message(Kind.PUSH, sender=3, sequence=1, vector=big.vector), big)
    small.header[:] = big.header
    for size in (None, 64 + 4 * 5):
        with pytest.raises(ProtocolError, match=r"announces 5 numbers.*the frame holds 3 numbers"):
            decode(small, size)


@pytest.mark.parametrize(
    "thing",
    [
        Message(Kind.JOIN, 1, 1),
        Received(Message(Kind.JOIN, 1, 1), Frame(0)),
        Lost(1),
        Send(1, Message(Kind.JOIN, 1, 1)),
        Release(1, Frame(0)),
        Wait(),
        Compute(),
        Shard(0, 0, slice(0, 1)),
    ],
    ids=lambda thing: type(thing).__name__,
)
def test_messages_events_and_actions_are_frozen_and_slotted(thing: Any) -> None:
    assert not hasattr(thing, "__dict__")
    for name in thing.__match_args__:
        with pytest.raises(AttributeError):
            setattr(thing, name, None)
    with pytest.raises((AttributeError, TypeError)):
        thing.surplus = 1


# --- errors ----------------------------------------------------------------------------------------------

ARGUMENTS: dict[type, tuple[Any, ...]] = {
    MissingExtraError: ("training with Keras", "keras", "keras"),
    ProtocolError: ("it went wrong", ["received JOIN", "sent CENTER"]),
    PeerLostError: (3, "died"),
    MemberLostError: (3, "died"),
    DroppedError: (3, 0, 30.0),
}


def errors(kind: type[NNLOError] = NNLOError) -> Iterator[type[NNLOError]]:
    yield kind
    for one in kind.__subclasses__():
        if one.__module__.partition(".")[0] == "nnlo_common":
            yield from errors(one)


@pytest.mark.parametrize("kind", list(errors()), ids=lambda kind: kind.__name__)
def test_every_error_survives_pickling(kind: type[NNLOError]) -> None:
    error = kind(*ARGUMENTS.get(kind, ("what was asked, what was found, what to do",)))
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(error, protocol))
        assert type(again) is kind
        assert str(again) == str(error) != ""
        assert vars(again) == vars(error)
    assert isinstance(error, NNLOError)


def test_the_story_of_an_error_is_what_happened_last() -> None:
    story = Story("server rank 7", length=3)
    for index in range(5):
        story.tell("received", Message(Kind.PUSH, sender=index, sequence=1, clock=2, pulled_at=1))
    story.tell("lost rank", 4)
    assert story.lines() == [
        "received PUSH from 3, sequence 1, clock 2, pulled at 1",
        "received PUSH from 4, sequence 1, clock 2, pulled at 1",
        "lost rank 4",
    ]
    text = str(story.error("that was wrong"))
    assert text.splitlines()[0] == "server rank 7: that was wrong"
    assert text.endswith("  lost rank 4")


# --- a server and its workers, message by message --------------------------------------------------------


class Table:
    """A server and workers that have not joined yet; every message is carried as a transport carries it."""

    def __init__(self, algorithm: Algorithm, workers: int = 2, size: int = 2, **options: Any) -> None:
        start = np.arange(size, dtype=F4)
        self.algorithm, self.size = algorithm, size
        self.server = Server(
            algorithm.center(start.copy(), workers, SGD(1.0)),
            range(1, workers + 1),
            depth=algorithm.lag + 1,
            **options,
        )
        self.workers = {
            rank: Worker(
                rank,
                algorithm,
                FlatVector.of([start * 0]),
                FlatVector.of([np.full(size, F4(rank))]),
                [Shard(0, 0, slice(0, size))],
                workers=workers,
            )
            for rank in range(1, workers + 1)
        }

    def __getitem__(self, rank: int) -> ShardClient:
        return self.workers[rank].shard_clients[0]

    def carry(self, message: Message) -> Received:
        frame = Frame(max(self.size, 0 if message.vector is None else message.vector.size))
        if message.vector is not None:
            frame.vector[: message.vector.size] = message.vector
        return Received(decode(frame, encode(message, frame)), frame)

    def hear(self, message: Message) -> list[Action]:
        """Let the server handle `message`, and hand its replies to nobody."""
        actions = self.server.handle(self.carry(message))
        self.server.validate()
        return actions

    def all(self, actions: Sequence[Action]) -> None:
        """Perform everything that a worker's actions lead to."""
        for action in actions:
            if isinstance(action, Send) and action.rank == 0:
                self.all(self.hear(action.message))
            elif isinstance(action, Send):
                self.all(self[action.rank].receive(self.carry(action.message)))

    def joined(self, *ranks: int) -> Table:
        for rank in ranks or self.workers:
            self.all(self[rank].join())
        return self

    def request(self, rank: int, what: str = "exchange") -> Message:
        """The next request of a worker; nobody has heard it yet."""
        (action, *_) = getattr(self[rank], what)()
        assert isinstance(action, Send)
        return action.message


def test_whole_vectors_travel_as_they_lie() -> None:
    def sent(algorithm: Algorithm) -> tuple[Worker, Send]:
        worker = Table(algorithm).joined().workers[1]
        (action, *_) = worker.shard_clients[0].exchange()
        assert isinstance(action, Send)
        assert action.frame is None or action.frame.vector is action.message.vector
        return worker, action

    worker, action = sent(Downpour())
    assert action.frame is worker.gradient.frame
    worker, action = sent(EASGD(alpha=0.3, every=1))
    assert action.frame is worker.parameters.frame
    worker, action = sent(Downpour(lag=1))  # the worker fills its gradient anew meanwhile
    assert action.frame in worker.shard_clients[0].outgoing_frames


def test_a_piece_of_a_vector_has_no_frame() -> None:
    x, gradient = (FlatVector.of([np.ones(2, F4), np.ones(2, F4)]) for _ in range(2))
    shards = [Shard(0, 0, slice(0, 2)), Shard(1, 1, slice(2, 4))]
    worker = Worker(2, Downpour(), x, gradient, shards, workers=1)
    for shard, shard_client in zip(shards, worker.shard_clients, strict=True):
        shard_client.join()
        center = Message(Kind.CENTER, shard.server, 0, shard=shard.index, vector=np.ones(2, F4))
        shard_client.receive(Received(center, Frame(2)))
        (action, *_) = shard_client.exchange()
        assert isinstance(action, Send)
        assert action.frame is None


DOWNPOUR, SYNCHRONOUS, LOCKED = Downpour(), Synchronous(), GEM(learning_rate=1.0)
PUSHES, PULLS = Downpour(n_push=1, n_fetch=9), Downpour(n_push=9, n_fetch=1, schedule="aligned")


def of_size(size: int | None) -> Callable[[Table], Message]:
    vector = None if size is None else np.zeros(size, F4)
    return lambda t: t.request(1)._replace(vector=vector)


def said_twice(rank: int, what: str = "exchange") -> Callable[[Table], Message]:
    def say(t: Table) -> Message:
        message = t.request(rank, what)
        t.hear(message)
        return message

    return say


def in_the_name_of_2(what: str = "exchange") -> Callable[[Table], Message]:
    return lambda t: t.request(1, what)._replace(sender=2)


def join_after_leaving(t: Table) -> Message:
    join = t.request(1, "join")
    t.all(t.hear(join))
    t.hear(t.request(1, "leave"))
    return join


def contribute_after_leaving(t: Table) -> Message:
    late = t.request(1)
    t.hear(late._replace(kind=Kind.LEAVE, vector=None))
    return late._replace(sequence=late.sequence + 1)


def leave_with_a_reply_due(t: Table) -> Message:
    asked = t.request(1)
    t.hear(asked)
    return Message(Kind.LEAVE, 1, asked.sequence + 1)


def commit_unasked(t: Table) -> Message:
    return t.request(1)._replace(kind=Kind.COMMIT, vector=np.zeros(2, F4))


def commit_under_the_lock_of_2(t: Table) -> Message:
    t.hear(t.request(2))
    return commit_unasked(t)


ALL, FIRST, SECOND = (1, 2), (1,), (2,)
TO_SERVERS: list[tuple[str, Algorithm, tuple[int, ...], Callable[[Table], Message], str]] = [
    # What is wrong, with which algorithm, who has joined, what is said then, how it is refused.
    (
        "unknown rank",
        DOWNPOUR,
        ALL,
        lambda t: t.request(1)._replace(sender=9),
        r"not one of this server's workers \[1, 2\]",
    ),
    ("CENTER", DOWNPOUR, ALL, lambda t: t.request(1)._replace(kind=Kind.CENTER), "which only servers send"),
    ("ACK", DOWNPOUR, ALL, lambda t: Message(Kind.ACK, 1, 2), "rank 1 sent ACK, which only servers send"),
    ("a gap", DOWNPOUR, ALL, lambda t: [t.request(1), t.request(1)][1], "lost or doubled"),
    ("repeated", DOWNPOUR, ALL, said_twice(1), "lost or doubled"),
    ("an old one", DOWNPOUR, ALL, lambda t: t.request(1)._replace(sequence=0), "lost or doubled"),
    (
        "of the future",
        DOWNPOUR,
        ALL,
        lambda t: t.request(1)._replace(pulled_at=1),
        "pulled at clock 1, but the clock is only 0",
    ),
    ("too long", DOWNPOUR, ALL, of_size(3), "rank 1 sent 3 numbers for a centre of 2; do all ranks build"),
    ("too short", DOWNPOUR, ALL, of_size(1), "rank 1 sent 1 numbers for a centre of 2"),
    ("no numbers", DOWNPOUR, ALL, of_size(None), "rank 1 sent 0 numbers for a centre of 2"),
    ("another shard's", DOWNPOUR, ALL, lambda t: t.request(1)._replace(shard=1), "shard 1"),
    (
        "exchange too early",
        DOWNPOUR,
        FIRST,
        in_the_name_of_2(),
        "2 sent EXCHANGE, but expected: it has not asked",
    ),
    ("pull too early", PULLS, FIRST, in_the_name_of_2(), "2 sent PULL, but expected: it has not asked"),
    ("leave too early", DOWNPOUR, FIRST, in_the_name_of_2("leave"), "2 sent LEAVE, but expected"),
    ("epoch too early", DOWNPOUR, FIRST, in_the_name_of_2("finish_epoch"), "2 sent EPOCH, but expected"),
    ("joined twice", DOWNPOUR, SECOND, said_twice(1, "join"), "rank 1 sent"),
    ("joined twice, queuing", Downpour(warm_start=5), FIRST, said_twice(2, "join"), "rank 2 sent"),
    ("joined after leaving", DOWNPOUR, SECOND, join_after_leaving, "rank 1 sent"),
    ("spoke after leaving", DOWNPOUR, ALL, contribute_after_leaving, "but left: it has left normally"),
    (
        "left unanswered",
        SYNCHRONOUS,
        ALL,
        leave_with_a_reply_due,
        "1 left with replies outstanding or the lock held",
    ),
    (
        "left with the lock",
        LOCKED,
        ALL,
        leave_with_a_reply_due,
        "1 left with replies outstanding or the lock held",
    ),
    ("committed unasked", LOCKED, ALL, commit_unasked, "sent COMMIT without the lock; rank None holds it"),
    (
        "another's lock",
        LOCKED,
        ALL,
        commit_under_the_lock_of_2,
        "sent COMMIT without the lock; rank 2 holds it",
    ),
]


@pytest.mark.parametrize(
    ("algorithm", "ranks", "say", "problem"),
    [row[1:] for row in TO_SERVERS],
    ids=[row[0] for row in TO_SERVERS],
)
def test_a_server_refuses_what_the_protocol_does_not_allow(
    algorithm: Algorithm, ranks: tuple[int, ...], say: Callable[[Table], Message], problem: str
) -> None:
    table = Table(algorithm).joined(*ranks)
    message = say(table)
    before = table.server.rule.center.copy()
    with pytest.raises(ProtocolError, match=problem) as refusal:
        table.hear(message)
    assert str(refusal.value).startswith("server rank 0, shard 0: ")
    assert "recent events, oldest first" in str(refusal.value)
    assert f"received JOIN from {ranks[0]}" in refusal.value.story[0]
    assert f"received {message.kind.name} from {message.sender}" in refusal.value.story[-1]
    assert np.array_equal(table.server.rule.center, before)


def reply(kind: Kind, size: int | None = None, **changes: Any) -> Callable[[Message], Message]:
    """Answer a request with a message of this kind."""
    vector = None if size is None else np.ones(size, F4)
    return lambda request: Message(
        kind, **{"sender": 0, "sequence": request.sequence, "vector": vector, **changes}
    )


TO_WORKERS: dict[str, tuple[Algorithm, str, Callable[[Message], Message], str]] = {
    # What the worker has asked (it has joined before), what it gets, how it is refused.
    "an ACK for an exchange": (DOWNPOUR, "exchange", reply(Kind.ACK), "ACK"),
    "an ACK for a pull": (PULLS, "exchange", reply(Kind.ACK), "ACK"),
    "an ACK for a lock": (LOCKED, "exchange", reply(Kind.ACK), "ACK"),
    "a centre for a push": (PUSHES, "exchange", reply(Kind.CENTER, 2), "CENTER"),
    "a kind only workers send": (
        DOWNPOUR,
        "exchange",
        reply(Kind.EXCHANGE, 2),
        "EXCHANGE, which only workers send",
    ),
    "another sequence": (
        DOWNPOUR,
        "exchange",
        reply(Kind.CENTER, 2, sequence=9),
        "sequence 9; expected a reply to",
    ),
    "too long": (DOWNPOUR, "exchange", reply(Kind.CENTER, 3), "3 numbers"),
    "too short": (DOWNPOUR, "exchange", reply(Kind.CENTER, 1), "1 numbers"),
    "of somebody else": (DOWNPOUR, "exchange", reply(Kind.CENTER, 2, sender=5), "rank 5"),
    "nothing was asked": (DOWNPOUR, "", reply(Kind.CENTER, 2, sequence=2), "expected a reply to no request"),
    "an epoch needs no reply": (DOWNPOUR, "finish_epoch", reply(Kind.ACK), "expected a reply to no request"),
}


@pytest.mark.parametrize("name", TO_WORKERS)
def test_a_worker_refuses_what_the_protocol_does_not_allow(name: str) -> None:
    algorithm, what, answer, problem = TO_WORKERS[name]
    table = Table(algorithm).joined()
    request = table.request(1, what) if what else Message(Kind.JOIN, 1, 1)
    before = table.workers[1].parameters.vector.copy()
    with pytest.raises(ProtocolError, match=problem) as refusal:
        table[1].receive(table.carry(answer(request)))
    assert str(refusal.value).startswith("worker rank 1, shard 0: ")
    assert "sent JOIN from 1" in refusal.value.story[0]
    assert "received" in refusal.value.story[-1]
    assert np.array_equal(table.workers[1].parameters.vector, before)


def test_a_reply_that_comes_twice_is_refused() -> None:
    table = Table(DOWNPOUR).joined()
    (answer,) = table.hear(table.request(1))
    table[1].receive(table.carry(answer.message))
    with pytest.raises(ProtocolError, match="expected a reply to no request"):
        table[1].receive(table.carry(answer.message))


def test_a_first_join_is_answered_with_the_centre_and_a_resumed_one_without() -> None:
    table = Table(DOWNPOUR)
    joining = table.request(1, "join")
    with pytest.raises(ProtocolError, match="ACK"):  # or it would start from nothing
        table[1].receive(table.carry(reply(Kind.ACK)(joining)))
    resumed = Table(DOWNPOUR)
    resumed[1].load(table.joined(2)[2].state())
    joining = resumed.request(1, "join")
    with pytest.raises(ProtocolError, match="CENTER"):  # or else it would lose its parameters
        resumed[1].receive(resumed.carry(reply(Kind.CENTER, 2)(joining)))


def test_a_reply_about_a_shard_that_does_not_exist_is_refused() -> None:
    table = Table(DOWNPOUR).joined()
    request = table.request(1)
    with pytest.raises(ProtocolError, match="shard 1"):
        table.workers[1].deliver(table.carry(reply(Kind.CENTER, 2, shard=1)(request)))


@pytest.mark.parametrize(
    ("before", "action", "problem"),
    [
        ([], "exchange", "cannot exchange now: the worker has not joined"),
        ([], "finish_epoch", "cannot finish an epoch now: the worker has not joined"),
        ([], "leave", "cannot leave now: the worker has not joined"),
        (["join"], "join", "cannot join now: the worker has asked to join"),
        (["join"], "exchange", "cannot exchange now: the worker has asked to join and waits"),
        (["join"], "leave", "cannot leave now: the worker has asked to join and waits"),
        (["joined"], "join", "cannot join now: the worker has joined"),
        (["joined", "exchange"], "leave", "cannot leave now: 1 replies are not absorbed"),
        (["joined", "leave"], "leave", "cannot leave now: the worker has left"),
        (["joined", "leave"], "exchange", "cannot exchange now: the worker has left"),
        (["joined", "leave"], "finish_epoch", "cannot finish an epoch now: the worker has left"),
        (["joined", "leave"], "join", "cannot join now: the worker has left"),
    ],
)
def test_a_worker_says_nothing_that_the_protocol_does_not_allow(
    before: list[str], action: str, problem: str
) -> None:
    table = Table(DOWNPOUR)
    for step in before:
        table.joined() if step == "joined" else table.request(1, step)
    with pytest.raises(ProtocolError, match=problem) as refusal:
        getattr(table[1], action)()
    assert len(refusal.value.story) >= len(before)


def test_a_state_is_loaded_before_joining() -> None:
    table = Table(DOWNPOUR).joined()
    with pytest.raises(ProtocolError, match="cannot load a state now: the worker has joined"):
        table[1].load(table[2].state())


# --- locks -----------------------------------------------------------------------------------------------


def granted(actions: Sequence[Action]) -> list[int]:
    return [action.rank for action in actions if isinstance(action, Send)]


def commit(request: Message) -> Message:
    return request._replace(kind=Kind.COMMIT, sequence=request.sequence + 1, vector=np.ones(2, F4))


def test_the_lock_goes_round_in_the_order_it_was_asked_for() -> None:
    table = Table(LOCKED, workers=4).joined()
    asked = {rank: table.request(rank) for rank in (3, 1, 4, 2)}
    assert granted(table.hear(asked[3])) == [3]
    assert [granted(table.hear(asked[rank])) for rank in (1, 4, 2)] == [[], [], []]
    for holder, following in ((3, [1]), (1, [4]), (4, [2]), (2, [])):
        actions = table.hear(commit(asked[holder]))
        assert granted(actions) == following
        assert [action.rank for action in actions if isinstance(action, Release)] == [holder]
    assert table.server.rule.center.tolist() == [4, 5]
    assert table.server.rule.clock == 4


def test_a_lock_whose_holder_dies_is_free_again_and_the_dead_are_skipped() -> None:
    table = Table(LOCKED, workers=5).joined()
    asked = {rank: table.request(rank) for rank in (1, 2, 3, 4)}
    for request in asked.values():
        table.hear(request)
    assert granted(table.server.handle(Lost(3))) == []  # waited for it
    assert granted(table.server.handle(Lost(1))) == [2]  # had it
    assert granted(table.hear(commit(asked[2]))) == [4]
    assert granted(table.server.handle(Lost(4))) == []  # had it, and nobody waits
    table.server.validate()
    assert granted(table.hear(table.request(5))) == [5]
    assert table.server.rule.center.tolist() == [1, 2]  # one commit: the dead made none


# --- stopping, epochs, weights, other servers ---------------------------------------------------------------


@pytest.mark.parametrize(
    "algorithm", [DOWNPOUR, SYNCHRONOUS, LOCKED, PUSHES, PULLS, EASGD(every=1), Downpour(lag=2)]
)
def test_the_wish_to_stop_comes_with_the_next_reply_of_any_kind(algorithm: Algorithm) -> None:
    table = Table(algorithm, workers=2).joined()
    table.server.stopping = True
    requests = [table.request(rank) for rank in (1, 2)]
    assert not any(worker.stop_requested for worker in table.workers.values())
    for request in requests:
        table.all(table.hear(request))
    assert all(worker.stop_requested for worker in table.workers.values())


@pytest.mark.parametrize(
    "algorithm", [DOWNPOUR, SYNCHRONOUS, LOCKED, PUSHES, PULLS, EASGD(every=1), Downpour(lag=2)]
)
def test_a_learning_rate_comes_with_the_next_reply_of_any_kind(algorithm: Algorithm) -> None:
    table = Table(algorithm, workers=2).joined()
    for rate in (0.25, 1e-300, 0.0):
        table.server.set_rate(rate)
        for request in [table.request(rank) for rank in (1, 2)]:
            table.all(table.hear(request))
        for worker in table.workers.values():
            assert worker.rate == rate
            for shard_client in worker.shard_clients:
                shard_client.settle()


def test_who_joins_is_told_the_learning_rate_and_contributes_with_its_own_weight() -> None:
    table = Table(SYNCHRONOUS)
    table.server.set_rate(0.25)
    table.joined()
    assert [worker.rate for worker in table.workers.values()] == [0.25, 0.25]
    assert [table.request(rank).share for rank in (1, 2)] == [1.0, 1.0]


def test_with_several_servers_the_first_tells_the_learning_rate() -> None:
    x, g = (FlatVector.of([np.zeros(2, F4), np.zeros(2, F4)]) for _ in range(2))
    places = [segment.place for segment in x.layout.segments]
    shards = [Shard(index, index, place) for index, place in enumerate(places)]
    worker = Worker(2, DOWNPOUR, x, g, shards, workers=1)
    for shard_client, rate in zip(worker.shard_clients, (0.5, 0.25), strict=True):
        (joining,) = shard_client.join()
        assert isinstance(joining, Send)
        vector = np.zeros(shard_client.parameters.size, F4)
        index = shard_client.shard.index
        welcome = Message(Kind.CENTER, index, 0, scalar=rate, shard=index, vector=vector)
        shard_client.receive(Received(welcome, Frame(vector.size)))
    assert worker.rate == 0.5


def test_a_learning_rate_set_at_the_centre_outdoes_what_workers_have_told_before() -> None:
    table = Table(DOWNPOUR).joined()
    peer = table.server.peers[1]
    for rate, kept in ((0.0, True), (0.5, False)):
        table.all(table[1].options(np.ones(2, F4)))
        table.server.set_rate(rate)
        assert (peer.options is not None) is kept
    table.all(table[1].options(np.ones(2, F4)))
    assert peer.options is not None  # the latest word is the worker's again


def test_who_joins_a_server_that_stops_is_told_so() -> None:
    table = Table(DOWNPOUR)
    table.server.stopping = True
    table.joined()
    assert all(worker.stop_requested for worker in table.workers.values())


def test_what_is_dropped_as_stale_is_told_to_stop_too() -> None:
    table = Table(Synchronous(backup=1), workers=3).joined()
    requests = [table.request(rank) for rank in (1, 2, 3)]
    for request in requests[:2]:
        table.all(table.hear(request))
    table.server.stopping = True
    table.all(table.hear(requests[2]))
    assert table.server.peers[3].dropped == 1
    assert [table.workers[rank].stop_requested for rank in (1, 2, 3)] == [False, False, True]


@pytest.mark.parametrize(
    "algorithm",
    [
        DOWNPOUR,
        Downpour(lag=2),
        SYNCHRONOUS,
        Synchronous(backup=1),
        LOCKED,
        LocalSGD(every=3),
        DiLoCo(every=2),
        EASGD(synchronous=True, every=2),
    ],
    ids=Algorithm.describe,
)
@pytest.mark.parametrize("seed", range(4))
def test_a_run_that_is_stopped_ends_in_good_order(algorithm: Algorithm, seed: int) -> None:
    """Every worker trains until it is told to stop; the server wishes it after some commits."""
    table = Table(algorithm, workers=3)

    def program(worker: Worker) -> Iterator[Action]:
        yield from worker.join()
        for _ in itertools.takewhile(lambda _: not worker.stop_requested, range(50)):
            yield Compute()
            table.server.stopping |= table.server.rule.clock >= 7
            worker.gradient.vector[:] = 0.01
            yield from worker.step()
        yield from worker.leave()

    programs = {rank: program(worker) for rank, worker in table.workers.items()}
    VirtualCluster([table.server], table.workers, programs, schedule=Interleaved(seed), check=True).run()
    assert table.server.finished
    assert 7 <= table.server.rule.clock <= 7 + 3 * (algorithm.lag + 2)


def test_epochs_are_finished_when_everybody_who_is_still_there_has_finished_them() -> None:
    table = Table(DOWNPOUR, workers=3)
    server = table.server
    assert server.peers.have_finished(0)
    table.joined(1, 2)
    for rank, done in ((1, False), (1, False), (2, False)):
        assert granted(table.hear(table.request(rank, "finish_epoch"))) == []  # nobody waits for a reply
        assert server.peers.have_finished(1) is done  # rank 3 may still come
    table.joined(3)
    table.hear(table.request(3, "finish_epoch"))
    assert (server.peers.have_finished(1), server.peers.have_finished(2)) == (True, False)
    table.hear(table.request(2, "leave"))
    assert not server.peers.have_finished(2)
    server.handle(Lost(3))
    assert server.peers.have_finished(2)  # rank 1 alone is left
    assert not server.peers.have_finished(3)
    assert not server.finished
    table.hear(table.request(1, "leave"))
    assert server.finished


@pytest.mark.parametrize("weight", [0, 0.0, -1, float("nan"), float("inf"), -float("inf")])
def test_a_weight_is_a_finite_number_above_0(weight: float) -> None:
    worker = Table(SYNCHRONOUS).workers[2]
    worker.set_weight(3)
    with pytest.raises(
        ConfigurationError, match=f"rank 2: weight={weight!r} must be a finite number above 0"
    ):
        worker.set_weight(weight)
    assert worker.shard_clients[0].weight == 3


def test_weights_travel_with_the_contribution() -> None:
    table = Table(SYNCHRONOUS).joined()
    table.workers[1].set_weight(3.0)
    for rank in (1, 2):
        table.all(table[rank].exchange())
    assert table.server.rule.center.tolist() == [0 - (3 * 1 + 2) / 4, 1 - (3 * 1 + 2) / 4]


def test_guests_see_the_centre_that_an_epoch_has_ended_with_and_only_look() -> None:
    table = Table(SYNCHRONOUS, other_servers=[8, 9], record=True).joined()
    server = table.server
    assert server.pulled_by([8, 9], 0)
    assert table.hear(Message(Kind.PULL, 8, 1)) == []  # which has not ended yet
    table.hear(table.request(1, "finish_epoch"))
    _, early = table.hear(table.request(2, "finish_epoch"))
    assert not server.pulled_by([8, 9], 1)
    before = copy.deepcopy(server.peers)
    (late,) = table.hear(Message(Kind.PULL, 9, 1))
    for other_server, answer in ((8, early), (9, late)):
        assert (answer.rank, answer.message.kind) == (other_server, Kind.CENTER)
        assert answer.message.vector.tolist() == [0, 1]
    assert server.pulled_by([8, 9], 1)
    assert server.peers == before
    assert server.awaited == 2
    assert server.handled == [1, 2, 1, 2]  # a replay needs no other_servers
    with pytest.raises(ProtocolError, match=r"rank 9 sent .*, but is not one of this server's workers"):
        table.hear(Message(Kind.PUSH, 9, 2, vector=np.zeros(2, F4)))


def test_the_frame_of_a_request_carries_its_reply() -> None:
    """No memory is taken per message, and none is lost: what comes in goes out or is given back."""
    table = Table(SYNCHRONOUS).joined()
    events = [table.carry(table.request(rank)) for rank in (1, 2)]
    assert table.server.handle(events[0]) == []
    replies = table.server.handle(events[1])
    assert [action.frame for action in replies] == [event.frame for event in events]
    leaving = table.carry(Message(Kind.EPOCH, 1, events[0].message.sequence + 1))
    (action,) = table.server.handle(leaving)
    assert isinstance(action, Release)
    assert action.frame is leaving.frame


# --- any order: nothing hangs, nothing is lost, nothing is doubled ---------------------------------------


def center_optimizer(algorithm: Algorithm, rate: float) -> SGD | None:
    """What steps the centre, where an optimizer does."""
    steps_center = algorithm.optimizer_runs == "center" or isinstance(algorithm, DiLoCo)
    return SGD(rate) if steps_center else None


ALGORITHMS: dict[str, Algorithm] = {
    "downpour": Downpour(),
    "downpour, dean": Downpour(n_push=3, n_fetch=2),
    "downpour, aligned": Downpour(n_push=2, n_fetch=2, schedule="aligned"),
    "downpour, warm start": Downpour(warm_start=3),
    "synchronous": Synchronous(),
    "synchronous, backup": Synchronous(backup=1),
    "dynsgd": DynSGD(),
    "agn": AGN(every=2, local_learning_rate=0.0),
    "gem": GEM(learning_rate=1.0),
    "easgd": EASGD(every=2, beta=0.5),
    "easgd, paper": EASGD(every=2, beta=0.5, order="paper"),
    "easgd, synchronous": EASGD(every=1, beta=0.5, synchronous=True),
    "eamsgd": EAMSGD(every=2, beta=0.5, learning_rate=1.0, momentum=0.0),
    "local sgd": LocalSGD(every=2, warmup=1),
    "diloco": DiLoCo(every=2),
}
#: Rules whose centre is minus the sum of what was pushed, or a known share of it.
PUSHING = [
    name for name in ALGORITHMS if name.split(",")[0] in ("downpour", "synchronous", "dynsgd", "agn", "gem")
]


@dataclasses.dataclass(frozen=True)
class Trial:
    """One training in any order in which every step of every worker has a coordinate of its own."""

    name: str
    steps: tuple[int, ...]
    lag: int
    servers: int
    losses: dict[int, int]
    seed: int

    @property
    def algorithm(self) -> Algorithm:
        return replace(ALGORITHMS[self.name], lag=self.lag)

    def run(self, schedule: Any = None) -> VirtualRun:
        workers, longest = len(self.steps), max(self.steps) + 1
        unit = np.eye(workers * longest, dtype=F4)
        done: Counter[int] = Counter()

        def gradient(x: np.ndarray, rank: int) -> np.ndarray:
            done[rank] += 1
            return np.tile(unit[(rank - self.servers) * longest + done[rank] - 1], self.servers)

        return train_virtually(
            self.algorithm,
            gradient,
            [np.zeros(len(unit), F4) for _ in range(self.servers)],
            workers=workers,
            steps=list(self.steps),
            servers=self.servers,
            optimizer=center_optimizer(self.algorithm, 1.0),
            local=lambda: SGD(1.0),
            losses={self.servers + worker: handled for worker, handled in self.losses.items()},
            schedule=Interleaved(self.seed) if schedule is None else schedule,
            check=True,
        )

    def contributions(self, worker: int) -> list[list[int]]:
        """Which steps' gradients each contribution of a worker holds, by asking the rule itself."""
        rule, open_steps, result = self.algorithm.worker(1, len(self.steps)), [], []
        for step in range(self.steps[worker]):
            ask = rule.due()
            open_steps.append(step)
            if ask in (Ask.EXCHANGE, Ask.PUSH):
                result.append(open_steps)
                open_steps = []
            elif ask is Ask.LOCK:  # the gradient that is applied is `lag` steps old
                result.append([step - self.lag])
            rule.advance()
        return result


def trials(names: Sequence[str]) -> st.SearchStrategy[Trial]:
    @st.composite
    def draw_trial(draw: st.DrawFn) -> Trial:
        name = draw(st.sampled_from(names))
        steps = tuple(draw(st.lists(st.integers(0, 5), min_size=2, max_size=4)))
        servers = 1 if "backup" in name else draw(st.integers(1, 2))
        workers = st.integers(0, len(steps) - 1)
        losses = draw(st.dictionaries(workers, st.integers(0, 8 * servers), max_size=2))
        return Trial(name, steps, draw(st.integers(0, 2)), servers, losses, draw(st.integers(0, 999)))

    return draw_trial()


@pytest.mark.slow
@settings(max_examples=250)
@given(trials(list(ALGORITHMS)))
def test_in_any_order_nothing_hangs_and_every_contribution_is_counted_once(trial: Trial) -> None:
    run = trial.run()
    for server in run.servers:
        counted = [peer.commits for peer in server.peers.values()]
        assert sum(counted) == server.staleness.total()
        assert server.finished
        for worker, peer in enumerate(server.peers.values()):
            made, taken = len(trial.contributions(worker)), peer.commits + peer.dropped
            if peer.standing is Standing.LOST:
                assert worker in trial.losses
                assert taken <= made
            else:
                assert peer.standing is Standing.LEFT
                assert taken == made
            assert peer.dropped == 0 or "backup" in trial.name
        if (
            trial.name.split(",")[0] in ("downpour", "dynsgd", "agn", "gem", "eamsgd")
            or trial.name == "easgd"
        ):
            assert server.rule.clock == sum(counted)
            assert max(server.staleness, default=0) <= max(0, sum(counted) - 1)
    if trial.losses:
        return  # a trace does not say when, between which requests, a worker died
    replayed = trial.run(Replay(run.trace))
    assert replayed.center.tobytes() == run.center.tobytes()
    assert all(a.tobytes() == b.tobytes() for a, b in zip(replayed.parameters, run.parameters, strict=True))


@pytest.mark.slow
@settings(max_examples=250)
@given(trials(PUSHING))
@example(Trial("gem", (4, 4), 2, 1, {}, 0))
def test_the_centre_holds_exactly_what_was_pushed(trial: Trial) -> None:
    """Each step pushes a 1 into a coordinate of its own, so none can be lost, doubled or mixed up."""
    run, longest = trial.run(), max(trial.steps) + 1
    for server in run.servers:
        center = server.rule.center.reshape(len(trial.steps), longest)
        divisors: Counter[int] = Counter()
        for worker, peer in enumerate(server.peers.values()):
            held = np.flatnonzero(center[worker]).tolist()
            contributions = trial.contributions(worker)
            if peer.dropped:  # which of its steps came too late depends on the order
                assert len(held) == peer.commits
            else:
                assert held == sorted(itertools.chain(*contributions[: peer.commits]))
            divisors.update((-1 / center[worker][held]).round(3).tolist())
        if trial.name.startswith("synchronous"):
            np.testing.assert_allclose(center.sum(), -server.rule.clock, rtol=1e-6)
        elif trial.name == "dynsgd":
            assert divisors == {stale + 1: count for stale, count in server.staleness.items()}
        else:
            assert set(divisors) <= {2.0 if trial.name == "agn" else 1.0}


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("name", ["downpour", "dynsgd", "gem", "easgd"])
def test_in_turns_a_contribution_is_as_stale_as_there_are_others(name: str, workers: int) -> None:
    """After the first turn each is p - 1 commits old: what a worker commits itself makes it no staler."""
    algorithm = EASGD(every=1, beta=0.5) if name == "easgd" else ALGORITHMS[name]
    run = train_virtually(
        algorithm,
        lambda x, rank: x,
        [1.0],
        workers=workers,
        steps=4,
        optimizer=center_optimizer(algorithm, 0.1),
        local=lambda: SGD(0.1),
    )
    first = Counter(range(workers))
    assert run.servers[0].staleness == first + Counter({workers - 1: 3 * workers})


@pytest.mark.parametrize("name", ["easgd", "easgd, paper", "easgd, synchronous", "eamsgd"])
@pytest.mark.parametrize("lag", [0, 1, 2])
def test_elastic_exchanges_move_what_is_there_and_make_nothing(name: str, lag: int) -> None:
    """Once all have joined, centre and workers together hold what the local steps have moved."""
    for seed, servers in itertools.product(range(5), (1, 2)):
        trial = Trial(name, (4, 2, 5), lag, servers, {}, seed)
        run = trial.run(RandomOrder(seed))
        total = (run.center + np.sum(run.parameters, axis=0)).reshape(servers, 3, 6)
        made = [[-1.0] * steps + [0.0] * (6 - steps) for steps in trial.steps]
        np.testing.assert_allclose(total, [made] * servers, atol=2e-6)


@pytest.mark.parametrize("name", ["local sgd", "diloco"])
@pytest.mark.parametrize("lag", [0, 1, 2])
def test_averaging_gives_each_step_its_share_once(name: str, lag: int) -> None:
    """After the last exchange the centre has moved by the mean of what everybody did."""
    for seed, servers in itertools.product(range(5), (1, 2)):
        algorithm = {"local sgd": LocalSGD(every=2, lag=lag), "diloco": DiLoCo(every=2, lag=lag)}[name]
        unit = iter(np.tile(np.eye(24, dtype=F4), (1, servers)))
        run = train_virtually(
            algorithm,
            lambda x, rank, unit=unit: next(unit),
            [np.zeros(24, F4) for _ in range(servers)],
            workers=4,
            steps=6,
            servers=servers,
            optimizer=center_optimizer(algorithm, 1.0),
            local=lambda: SGD(1.0),
            schedule=Interleaved(seed),
        )
        np.testing.assert_allclose(run.center, np.full(24 * servers, -0.25), rtol=1e-5)
        np.testing.assert_allclose(run.parameters, [run.center] * 4, atol=1e-5)
