"""The checkpoint round on the first server: what is saved when, whoever asks, dies, leaves or is late."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnlo_common import ProtocolError
from nnlo_common.protocol import Lost
from nnlo_common.protocol._checkpoint_round import (
    AllPaused,
    AnswerDraftQuery,
    AskForPause,
    CheckpointRequested,
    CheckpointRound,
    CloseDraft,
    CopyOwn,
    DraftAsked,
    DraftOpened,
    Due,
    NothingMore,
    OpenDraft,
    PartReported,
    Turned,
    WarnSkipped,
    WriteOwn,
)
from nnlo_common.protocol._query_messages import DraftAnswer, PartQuery

WORKERS, SERVERS = frozenset({2, 3}), frozenset({0, 1})


def paused(pauses: int = 1) -> AllPaused:
    return AllPaused(pauses, WORKERS | {1}, WORKERS)


def part(rank: int, number: int = 1, trouble: str = "") -> PartQuery:
    return PartQuery(number=number, file=f"rank{rank}", size=rank, blake2b="", trouble=trouble)


def reported(rank: int, number: int = 1, trouble: str = "") -> PartReported:
    return PartReported(rank, part(rank, number, trouble))


def told(rank: int, number: int | None, *, end: bool = False, recalled: bool = False) -> AnswerDraftQuery:
    return AnswerDraftQuery(rank, DraftAnswer(number=number, end=end, recalled=recalled))


OPENED = DraftOpened(1, recalled=False)
WISHED = [CheckpointRequested(end=False, busy=False), paused(), OPENED]
ALL_IN = [reported(rank) for rank in (1, 2, 3)]
TURNED = "has taken a dead server's place before it had written its part"
CLOSED = CloseDraft(tuple(part(rank) for rank in range(4)), "")

# What has happened, what happens now, and what is to be done.
TRANSITIONS = {
    "a wish asks for a pause": ([], CheckpointRequested(end=False, busy=False), [AskForPause()]),
    "a second one does not": (
        [CheckpointRequested(end=False, busy=False)],
        CheckpointRequested(end=False, busy=False),
        [],
    ),
    "nor the last, where a pause is asked for": (
        [CheckpointRequested(end=False, busy=False)],
        CheckpointRequested(end=True, busy=False),
        [],
    ),
    "what is due needs no wish": ([], Due(last=False), []),
    "a pause that nobody saves in": ([], paused(), []),
    "the pause that was wished for": (
        [CheckpointRequested(end=False, busy=False)],
        paused(),
        [CopyOwn(), OpenDraft()],
    ),
    "the pause of what is due": ([Due(last=False)], paused(), [CopyOwn(), OpenDraft()]),
    "only the next pause": ([*WISHED, reported(0), *ALL_IN], paused(2), []),
    "the disk has taken the draft": (WISHED[:2], OPENED, [WriteOwn()]),
    "the disk has not": (WISHED[:2], DraftOpened(None, recalled=False), []),
    "who asks is told": (WISHED, DraftAsked(2, 0), [told(2, 1)]),
    "who asks where nobody saves is told, too": ([paused()], DraftAsked(2, 0), [told(2, None)]),
    "who asks before the draft is open waits": (WISHED[:2], DraftAsked(2, 0), []),
    "and is told then": ([*WISHED[:2], DraftAsked(2, 0)], OPENED, [WriteOwn(), told(2, 1)]),
    "also that there is none": (
        [*WISHED[:2], DraftAsked(2, 0)],
        DraftOpened(None, recalled=False),
        [told(2, None)],
    ),
    "who knows of a pause before the first server waits": (
        [CheckpointRequested(end=False, busy=False)],
        DraftAsked(1, 1),
        [],
    ),
    "and is told when that knows": ([DraftAsked(1, 1)], paused(), [told(1, None)]),
    "the dead are not told": ([*WISHED[:2], DraftAsked(2, 0), Lost(2)], OPENED, [WriteOwn()]),
    "all but one have reported": ([*WISHED, reported(0), reported(1)], reported(2), []),
    "all have": ([*WISHED, reported(0), *ALL_IN[:2]], reported(3), [CLOSED]),
    "all have, the first server last": ([*WISHED, *ALL_IN], reported(0), [CLOSED]),
    "a report of an earlier draft": ([*WISHED, reported(0), *ALL_IN[:2]], reported(3, number=0), []),
    "a report where none is open": ([], reported(3), []),
    "one could not write": (
        [*WISHED, reported(0), *ALL_IN[:2]],
        reported(3, trouble="full"),
        [CloseDraft((part(0), part(1), part(2)), "full")],
    ),
    "one has died": (
        [*WISHED, reported(0), *ALL_IN[:2]],
        Lost(3),
        [CloseDraft((part(0), part(1), part(2)), "rank 3 has died before it had written its part")],
    ),
    "one has died after its report": ([*WISHED, *ALL_IN, Lost(3)], reported(0), [CLOSED]),
    "one leaves without a report": (
        [*WISHED, reported(0), *ALL_IN[:2]],
        NothingMore(3),
        [CloseDraft((part(0), part(1), part(2)), "rank 3 has not written its part")],
    ),
    "a wish while parts are awaited": (WISHED, CheckpointRequested(end=False, busy=False), [WarnSkipped()]),
    "a wish while the disk is at work": ([], CheckpointRequested(end=False, busy=True), [WarnSkipped()]),
    "a wish when it is idle": (
        [*WISHED, reported(0), *ALL_IN],
        CheckpointRequested(end=False, busy=False),
        [AskForPause()],
    ),
    "the last is not left out": (WISHED, CheckpointRequested(end=True, busy=False), [AskForPause()]),
    "a pause while another server's part is": (
        [*WISHED, reported(0), *ALL_IN[1:], Due(last=False)],
        paused(2),
        [CopyOwn()],
    ),
    "when that is": (
        [*WISHED, reported(0), *ALL_IN[1:], Due(last=False), paused(2)],
        reported(1),
        [CLOSED, OpenDraft()],
    ),
    "a worker that pauses again without a report is not waited for": (
        [*WISHED, reported(0), *ALL_IN[:2], Due(last=False)],
        paused(2),
        [
            CopyOwn(),
            CloseDraft((part(0), part(1), part(2)), "rank 3 has not written its part"),
            OpenDraft(),
        ],
    ),
    "one that knows where to write serves by now": (
        [*WISHED, DraftAsked(3, 0), reported(0), *ALL_IN[:2]],
        Turned(3),
        [],
    ),
    "one that does not": (
        [*WISHED[:2], OPENED, DraftAsked(1, 1), DraftAsked(2, 0), reported(0), *ALL_IN[:2]],
        Turned(3),
        [CloseDraft((part(0), part(1), part(2)), f"rank 3 {TURNED}")],
    ),
    "one that asks": ([*WISHED[:2], DraftAsked(3, 0), Turned(3)], OPENED, [WriteOwn(), told(3, 1)]),
    "one does before the draft is open": (
        [*WISHED[:2], Turned(3), OPENED, DraftAsked(1, 1), DraftAsked(2, 0), reported(0), *ALL_IN[:1]],
        reported(2),
        [CloseDraft((part(0), part(1), part(2)), f"rank 3 {TURNED}")],
    ),
    "and a checkpoint that the disk has not taken leaves no trouble to the next": (
        [*WISHED[:2], Turned(3), DraftOpened(None, recalled=False), *WISHED, reported(0), *ALL_IN[:2]],
        reported(3),
        [CLOSED],
    ),
    "one that had saved for the last time before it took a dead server's place is not waited for": (
        [NothingMore(1), *WISHED, reported(0), reported(2)],
        reported(3),
        [
            CloseDraft(
                (part(0), part(2), part(3)), "rank 1 has taken a dead server's place after its last part"
            )
        ],
    ),
    "a draft is ordered once": ([CheckpointRequested(end=False, busy=False), paused()], Lost(3), []),
    "all leave": (
        [CheckpointRequested(end=True, busy=False), paused(), OPENED],
        DraftAsked(2, 0),
        [told(2, 1, end=True)],
    ),
    "all are recalled": (
        [Due(last=False), paused(), DraftOpened(1, recalled=True)],
        DraftAsked(2, 0),
        [told(2, 1, end=True, recalled=True)],
    ),
    "not after the last": (
        [Due(last=True), paused(), DraftOpened(1, recalled=True)],
        DraftAsked(2, 0),
        [told(2, 1)],
    ),
    "not where a signal ends it": (
        [CheckpointRequested(end=True, busy=False), paused(), DraftOpened(1, recalled=True)],
        DraftAsked(2, 0),
        [told(2, 1, end=True)],
    ),
}


@pytest.mark.parametrize("name", TRANSITIONS)
def test_what_happens_then(name: str) -> None:
    before, event, expected = TRANSITIONS[name]
    machine = CheckpointRound(0)
    for earlier in before:
        machine.handle(earlier)
        machine.validate()
    assert machine.handle(event) == expected
    machine.validate()


@pytest.mark.parametrize("before", [[], [CheckpointRequested(end=False, busy=False)], WISHED], ids=len)
def test_a_draft_that_was_not_ordered_is_refused(before: list) -> None:
    machine = CheckpointRound(0)
    for event in before:
        machine.handle(event)
    with pytest.raises(ProtocolError, match="draft 7 was opened, but none was requested"):
        machine.handle(DraftOpened(7, recalled=False))


# --- in any order ----------------------------------------------------------------------------------------


@dataclass
class Rank:
    """A worker, or another server: it pauses, asks, writes and reports; and may die or leave instead."""

    doing: str = "training"  # asking, writing, and training again
    heard: list[int] = field(default_factory=list)  # what it writes, or has written and not reported
    behind: bool = False  # a server that does not know yet that all pause
    known: int = 0  # pauses


@dataclass
class Cluster:
    """The first server's round, its disk, and all other ranks, in an order that is drawn."""

    draw: random.Random
    workers: int
    servers: int
    disk_fails: bool
    machine: CheckpointRound = field(default_factory=lambda: CheckpointRound(0))

    def __post_init__(self) -> None:
        self.ranks = {rank: Rank() for rank in range(1, self.servers + self.workers)}
        self.saved_by: dict[int, set[int]] = {}  # who has begun to write to a draft
        self.closed: dict[int, CloseDraft] = {}
        self.pauses = self.drafts = 0
        self.own: int | None = None  # what the first server's thread writes
        self.copied = False
        self.open: int | None = None
        self.wanted = 0
        self.turned: set[int] = set()  # workers that serve by now

    def do(self, event) -> None:
        actions = self.machine.handle(event)
        for action in actions:
            self.perform(action)
        self.machine.validate()

    def perform(self, action) -> None:
        if isinstance(action, AskForPause):
            self.wanted += 1
        elif isinstance(action, CopyOwn):
            self.copied = True
        elif isinstance(action, OpenDraft):
            assert self.copied
            assert self.own is None  # its thread has done what it was given
            assert self.open is None
            failed = self.disk_fails and self.draw.random() < 0.3
            self.drafts += not failed
            self.open = None if failed else self.drafts
            self.do(DraftOpened(self.open, recalled=self.draw.random() < 0.2))
        elif isinstance(action, WriteOwn):
            self.own, self.copied = self.open, False
            self.saved_by[self.open] = {0}
        elif isinstance(action, AnswerDraftQuery):
            rank = self.ranks[action.rank]
            assert rank.doing == "asking"
            rank.doing, number = "training", action.answer.number
            if number is not None:
                assert number == self.open
                rank.heard.append(number)
                self.saved_by[number].add(action.rank)
        elif isinstance(action, CloseDraft):
            assert self.own is None
            self.closed[self.open], self.open = action, None

    def write_own(self) -> None:
        number, self.own = self.own, None
        self.do(reported(0, number, self.trouble()))

    def trouble(self) -> str:
        return "full" if self.disk_fails and self.draw.random() < 0.2 else ""

    @property
    def training(self) -> list[int]:
        """The workers that are there."""
        return [rank for rank in self.ranks if rank >= self.servers and rank not in self.turned]

    def report(self, rank: int) -> None:
        self.do(reported(rank, self.ranks[rank].heard.pop(0), self.trouble()))

    def pause(self) -> None:
        """All workers pause, most after they have reported; another server hears of it sooner or later."""
        for rank in self.training:
            if self.ranks[rank].heard and self.draw.random() < 0.9:
                self.report(rank)
        self.pauses += 1
        servers = [self.ranks[rank] for rank in self.ranks if rank < self.servers or rank in self.turned]
        early = [server for server in servers if self.draw.random() < 0.3]
        for server in servers:
            server.behind = True
        for server in early:
            self.hear(server)
        workers = frozenset(range(self.servers, self.servers + self.workers))
        if self.own is not None and self.machine.wanted:
            self.write_own()
        self.do(AllPaused(self.pauses, frozenset(self.ranks), workers))
        turns = self.draw.random() < 0.1
        for rank in self.draw.sample(self.training, len(self.training)):
            if turns and len(self.training) > 1:
                turns = False
                self.turn(rank)
                continue
            self.ranks[rank].doing = "asking"
            self.do(DraftAsked(rank, 0))

    def hear(self, server: Rank) -> None:
        """Another server sees that all pause: it reports first, and asks."""
        rank = next(rank for rank, one in self.ranks.items() if one is server)
        server.behind = False
        while server.heard:
            self.report(rank)
        server.doing = "asking"
        server.known += 1
        self.do(DraftAsked(rank, self.pauses))

    def possible(self) -> list:
        """What may happen next."""
        quiet = all(one.doing == "training" and not one.behind for one in self.ranks.values())
        events = [self.pause] * (quiet and bool(self.training))
        wish = (
            Due(last=self.draw.random() < 0.2)
            if self.draw.random() < 0.5
            else CheckpointRequested(end=False, busy=False)
        )
        events += [lambda: self.do(wish)] * quiet
        events += [self.write_own] * (self.own is not None)
        for rank, one in self.ranks.items():
            if one.behind:
                events.append(lambda one=one: self.hear(one))
            elif one.heard and one.doing == "training":
                events.append(lambda rank=rank: self.report(rank))
        events += [self.die] * (len(self.training) > 1 and (self.machine.opening or self.draw.random() < 0.1))
        events += [self.leave] * (len(self.training) > 1 and quiet and self.draw.random() < 0.2)
        return events

    def die(self) -> None:
        rank = self.draw.choice(self.training)
        del self.ranks[rank]
        self.do(Lost(rank))

    def turn(self, rank: int) -> None:
        """A worker takes the place of another server; it reports what it has written before."""
        dead = [one for one in self.ranks if one < self.servers]
        if dead:
            del self.ranks[dead[0]]
            self.do(Lost(dead[0]))
        self.turned.add(rank)
        self.do(Turned(rank))

    def leave(self) -> None:
        """A worker leaves in good order, or a script forgets to report."""
        rank = self.draw.choice(self.training)
        if self.ranks[rank].heard and self.draw.random() < 0.7:
            self.report(rank)
        del self.ranks[rank]
        self.do(NothingMore(rank))

    def end(self) -> None:
        """All ranks come to the end: what is under way there arrives."""
        for _ in range(9):
            if self.own is not None:
                self.write_own()
            for rank, one in list(self.ranks.items()):
                if one.behind:
                    self.hear(one)
                if one.doing == "training" and one.heard:
                    self.report(rank)
        for rank in self.ranks:
            assert self.ranks[rank].doing == "training", "a rank waits for ever"
            self.do(NothingMore(rank))


@pytest.mark.slow
@settings(max_examples=150)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 3), st.booleans(), st.integers(60, 90))
def test_in_any_order_nobody_waits_for_ever_and_a_checkpoint_has_all_parts_or_a_reason(
    seed: int, workers: int, servers: int, disk_fails: bool, events: int
) -> None:
    cluster = Cluster(random.Random(seed), workers, servers, disk_fails)
    for _ in range(events):
        possible = cluster.possible()
        if not possible:
            break
        cluster.draw.choice(possible)()
    cluster.end()
    assert cluster.machine.closed
    assert sorted(cluster.closed) == list(range(1, cluster.drafts + 1))
    for number, closed in cluster.closed.items():
        wrote = {int(one.file.removeprefix("rank")) for one in closed.parts}
        assert all(one.number == number for one in closed.parts)
        assert wrote <= cluster.saved_by[number]
        if not closed.trouble:
            assert wrote == cluster.saved_by[number]
            assert 0 in wrote


def test_a_worker_that_serves_now_saves_though_the_worker_is_gone():
    machine = CheckpointRound(1, takes_over=True)
    for event in (Lost(0), Lost(1), Due(last=False)):
        assert machine.handle(event) == []
    assert machine.handle(AllPaused(1, WORKERS, WORKERS)) == [CopyOwn(), OpenDraft()]
    assert machine.handle(OPENED) == [WriteOwn()]
    for rank in sorted(WORKERS):
        assert machine.handle(DraftAsked(rank, 1)) == [told(rank, 1)]
        assert machine.handle(reported(rank)) == []
    assert machine.handle(reported(1)) == [CloseDraft((part(1), part(2), part(3)), "")]
    machine.validate()
