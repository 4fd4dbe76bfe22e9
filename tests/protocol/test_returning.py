"""Queries when their service dies: nobody waits for an answer that others have had, no sample is lost."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnlo_common import ProtocolError
from nnlo_common.base._flat_vector import Frame
from nnlo_common.data import WAIT, Lease, Leases
from nnlo_common.protocol import Averages, Lost, Message, Received, Release, Send
from nnlo_common.protocol._lease_queries import Leasing
from nnlo_common.protocol._queries import (
    Broadcasts,
    EpochMeans,
    Means,
    Notes,
    QueryClient,
    QueryService,
)
from nnlo_common.protocol._query_messages import (
    QUERY_NUMBERS,
    BroadcastQuery,
    EpochMeanQuery,
    GiveBackQuery,
    LeaseQuery,
    LeaveQuery,
    MeanQuery,
    NoteQuery,
    SampledData,
)

SERVER, SPARE, WORKERS = 0, 4, (1, 2, 3)
DATA = SampledData(sampler="s", size=97, unit=5, order="seed 1")


class Ranks:
    """Clients and a service that hand each other messages, each when the test says so."""

    def __init__(self):
        self.clients = {rank: QueryClient(rank, SERVER, 1) for rank in (*WORKERS, SPARE)}
        self.service = self.serve(SERVER, (SERVER, *WORKERS, SPARE))
        self.to_service: list[Message] = []
        self.answers: list[Send] = []

    def serve(self, rank, members):
        workers = [one for one in members if one in WORKERS and one != rank]
        self.leasing, self.notes = Leasing(workers, patient=True), Notes()
        self.averages = Averages(np.zeros(0, "f4"))
        parts = [Means(members), EpochMeans(workers), Broadcasts(members, rank), self.notes, self.leasing]
        return QueryService(rank, 1, members, [*parts, self.averages])

    def ask(self, rank, query):
        self.send(self.clients[rank].ask(query))

    def send(self, actions):
        for action in actions:
            if isinstance(action, Send):
                message = action.message
                vector = None if message.vector is None else message.vector.copy()
                self.to_service.append(message.with_vector(vector))

    def handle_all(self):
        while self.to_service:
            message = self.to_service.pop(0)
            frame = Frame(QUERY_NUMBERS + 64)
            frame.vector[: message.vector.size] = message.vector
            event = Received(message.with_vector(frame.vector[: message.vector.size]), frame)
            self.answers += [one for one in self.service.handle(event) if isinstance(one, Send)]

    def deliver(self, ranks=(*WORKERS, SPARE)):
        """Deliver the answers of these ranks; those of others are lost."""
        while self.answers:
            answer = self.answers.pop(0)
            if answer.rank in ranks:
                message = answer.message.with_vector(answer.message.vector.copy())
                actions = self.clients[answer.rank].handle(Received(message, answer.frame))
                assert isinstance(actions[0], Release)
                self.send(actions)
        self.handle_all()
        if self.answers:
            self.deliver(ranks)

    def die(self, order=WORKERS, state=None, *, heir=None):
        """The service dies with all messages under way, and the spare takes over, or a worker, the heir."""
        self.to_service, self.answers = [], []
        spare = self.clients[SPARE if heir is None else heir]
        if heir is not None:
            spare.drop()  # an heir asks for no more samples
        self.service = self.serve(spare.rank, (spare.rank, *order))
        if state is not None:
            self.leasing.load(state)
        self.answers += [one for one in self.service.take_over(spare.told()) if isinstance(one, Send)]
        if spare.open is not None:
            self.service.ask(spare.open)
        for rank in order:
            self.send(self.clients[rank].return_to(spare.rank))
            self.handle_all()
            self.deliver()


@given(
    answered=st.sets(st.sampled_from((*WORKERS, SPARE))),
    asked=st.sets(st.sampled_from((*WORKERS, SPARE))),
    order=st.permutations(WORKERS),
    kind=st.sampled_from(["mean", "broadcast"]),
)
@settings(max_examples=200, deadline=None)
def test_each_rank_gets_the_answer_of_a_collective_once(answered, asked, order, kind):
    """The service dies before all have asked, or when some have been answered."""
    ranks = Ranks()

    def query(rank, round_):
        if kind == "mean":
            return MeanQuery(values={"v": float(10 * round_ + rank)}, weight=1.0)
        numbers = np.full(3, 10 * round_ + rank, "f4")
        return BroadcastQuery(values={"of": round_}, numbers=numbers)

    everyone = (*WORKERS, SPARE)
    complete = asked == set(everyone)
    for rank in sorted(asked):
        ranks.ask(rank, query(rank, 1))
    ranks.handle_all()
    if complete:
        ranks.answers += [one for one in ranks.service.ask(query(SERVER, 1)) if isinstance(one, Send)]
    ranks.deliver(answered if complete else ())
    had = {rank for rank in asked if ranks.clients[rank].answer is not None}
    ranks.die(order)
    for rank in everyone:
        if rank not in asked:
            if rank == SPARE:
                ranks.answers += [one for one in ranks.service.ask(query(rank, 1)) if isinstance(one, Send)]
            else:
                ranks.ask(rank, query(rank, 1))
                ranks.handle_all()
    ranks.deliver()
    found = [ranks.clients[rank].answer for rank in WORKERS]
    assert None not in found
    own = ranks.clients[SPARE].answer if SPARE in had else ranks.service.answer
    assert own is not None
    if kind == "mean":
        assert len({one.means["v"] for one in [*found, own]}) == 1
    else:
        assert len({(one.values["of"], one.numbers.tobytes()) for one in [*found, own]}) == 1
    # The next one takes all ranks again.
    ranks.service.ask(query(SPARE, 2))
    for rank in WORKERS:
        ranks.ask(rank, query(rank, 2))
    ranks.handle_all()
    ranks.deliver()
    if kind == "mean":
        assert {ranks.clients[rank].answer.means["v"] for rank in WORKERS} == {20 + (1 + 2 + 3 + 4) / 4}


def test_means_of_an_epoch_and_notes_are_kept():
    ranks = Ranks()
    for rank in WORKERS:
        ranks.ask(rank, EpochMeanQuery(epoch=0, values={"loss": float(rank)}, weight=1.0))
    ranks.handle_all()
    ranks.deliver((1,))
    ranks.ask(1, NoteQuery(epoch=0, values={"n": 5.0}, weight=2.0))
    ranks.handle_all()
    ranks.deliver((1,))
    notes = ranks.notes.state()
    ranks.die()
    ranks.notes.load(notes)
    assert [ranks.clients[rank].answer.means for rank in (2, 3)] == [{"loss": 2.0}] * 2
    ranks.ask(2, NoteQuery(epoch=0, values={"n": 2.0}, weight=1.0))
    ranks.handle_all()
    ranks.deliver()
    assert ranks.clients[2].answer.means == {"n": 4.0}


def test_a_spare_that_is_epochs_behind_still_gets_the_means_that_workers_have_had():
    """A spare's own epochs may take longer than the workers'."""
    ranks = Ranks()
    for epoch in range(3):
        for rank in WORKERS:
            ranks.ask(rank, EpochMeanQuery(epoch=epoch, values={"loss": float(epoch + rank)}, weight=1.0))
        ranks.handle_all()
        ranks.deliver()
    ranks.ask(SPARE, EpochMeanQuery(epoch=0, values={}, weight=0))
    ranks.handle_all()
    ranks.deliver()
    ranks.die()
    for epoch in (1, 2):
        ranks.service.ask(EpochMeanQuery(epoch=epoch, values={}, weight=0))
        assert ranks.service.answer.means == {"loss": epoch + 2.0}


def test_the_notes_of_a_worker_that_serves_by_now_count_no_more():
    notes = Notes()
    for rank, loss in ((1, 4.0), (2, 1.0)):
        notes.ask(rank, NoteQuery(epoch=0, values={"loss": loss}, weight=1))
    ((_, before),) = notes.ask(SERVER, NoteQuery(epoch=0, values={}, weight=0))
    ((_, after),) = notes.ask(1, NoteQuery(epoch=1, values={}, weight=0))
    assert (before.means, after.means) == ({"loss": 2.5}, {"loss": 1.0})


def test_a_rank_that_has_left_is_not_waited_for():
    ranks = Ranks()
    ranks.ask(3, LeaveQuery())
    ranks.handle_all()
    ranks.deliver()
    ranks.die()
    for rank in (1, 2):
        ranks.ask(rank, MeanQuery(values={"v": float(rank)}, weight=1.0))
    ranks.handle_all()
    ranks.service.ask(MeanQuery(values={"v": 6.0}, weight=1.0))
    assert ranks.service.answer.means == {"v": 3.0}


@pytest.mark.parametrize("dropped", [False, True])
def test_a_rank_that_dies_before_all_have_returned_is_not_answered(dropped):
    """Its query has waited for those that had not returned yet."""
    ranks = Ranks()
    ranks.service = ranks.serve(SPARE, (SPARE, *WORKERS))
    ranks.service.take_over(ranks.clients[SPARE].told())
    ranks.ask(1, MeanQuery(values={"v": 100.0}, weight=1.0))
    ranks.to_service.clear()  # it went to the dead service
    ranks.send(ranks.clients[1].return_to(SPARE))
    ranks.handle_all()
    ranks.deliver((1,))  # it asks again now
    if dropped:
        ranks.service.drop(1, 9.0)
    else:
        ranks.service.handle(Lost(1))
    for rank in (2, 3):
        ranks.send(ranks.clients[rank].return_to(SPARE))
        ranks.ask(rank, MeanQuery(values={"v": float(rank)}, weight=1.0))
        ranks.handle_all()
        ranks.deliver((2, 3))
    ranks.answers += ranks.service.ask(MeanQuery(values={"v": 7.0}, weight=1.0))
    assert ranks.service.answer.means == {"v": 4.0}
    ranks.deliver((2, 3))
    assert ranks.clients[2].answer.means == {"v": 4.0}


def test_nobody_returns_to_a_rank_that_has_not_taken_over():
    ranks = Ranks()
    ranks.send(ranks.clients[1].return_to(SERVER))
    with pytest.raises(ProtocolError, match="has not taken over"):
        ranks.handle_all()


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_each_sample_is_leased_once_whatever_the_copy_knew(data):
    """Workers lease, use and give back; the service dies with an old copy, or with none.

    What an heir has used since the copy is leased again, as that of a dead worker; nothing else is.
    """
    ranks, used, state = Ranks(), Counter(), None
    of_heir, heir = Counter(), data.draw(st.sampled_from([None, *WORKERS]))
    held: dict[int, list[int]] = {rank: [] for rank in WORKERS}
    epochs = dict.fromkeys(WORKERS, 0)

    def note(rank, numbers):
        (of_heir if rank == heir else used).update((epochs[rank], one) for one in numbers)

    def take(rank):
        """Use up what the rank holds, and ask for more; return whether there is more."""
        note(rank, held[rank])
        held[rank] = []
        ranks.ask(rank, LeaseQuery(data=DATA, epoch=epochs[rank]))
        ranks.handle_all()
        ranks.deliver()

    def see(rank):
        answer = ranks.clients[rank].answer
        if answer is None or not hasattr(answer, "lease"):
            return None
        lease = answer.lease
        if lease is not None:
            held[rank] = [*range(lease.start, lease.stop)]
        return lease

    waiting = set()
    for rank in data.draw(st.lists(st.sampled_from(WORKERS), max_size=25)):
        if rank in waiting:
            continue
        if data.draw(st.booleans()) and held[rank] and data.draw(st.booleans()):
            left = data.draw(st.integers(0, len(held[rank])))
            note(rank, held[rank][: len(held[rank]) - left])
            held[rank] = []
            ranks.ask(rank, GiveBackQuery(data=DATA, left=left))
            ranks.handle_all()
            ranks.deliver()
            continue
        take(rank)
        if ranks.clients[rank].busy:
            waiting.add(rank)
        else:
            see(rank)
        if data.draw(st.booleans()):
            state = ranks.leasing.state()
    living = [rank for rank in WORKERS if rank != heir]
    ranks.die(data.draw(st.permutations(living)), state, heir=heir)
    for rank in waiting:
        assert not held[rank]
    over = set()
    for turn in range(400):
        rank = living[turn % len(living)]
        if rank in over or ranks.clients[rank].busy:
            continue
        if rank in waiting:
            waiting.discard(rank)
            if see(rank) is None:
                over.add(rank)
            continue
        take(rank)
        if ranks.clients[rank].busy:
            waiting.add(rank)
        elif see(rank) is None:
            over.add(rank)
    assert over == set(living)
    assert {one for _, one in used + of_heir} == set(range(97))
    assert set(used.values()) <= {1}
    if state is None:
        assert {one for _, one in used} == set(range(97))  # no copy knew what an heir has used
    if heir is None:
        assert set(used.values()) == {1}


def test_positions_of_a_dead_worker_since_the_copy_are_leased_again():
    leases = Leases(10, workers=[1, 2], unit=2)
    leases.ask(1, 0)
    state = leases.state()
    leases.ask(1, 0)  # it has used up its first lease since
    again = Leases(10, workers=[1, 2], unit=2)
    again.restore(state)
    again.lost(1)
    again.know(2, 0, {}, [])
    again.validate()
    assert again.unfinished(0) == [(0, 10)]


def test_what_a_worker_knows_is_right_where_a_copy_is_older():
    leases = Leases(10, workers=[1, 2], unit=2)
    first = leases.ask(1, 0)
    state = leases.state()
    again = Leases(10, workers=[1, 2], unit=2)
    again.restore(state)
    again.know(1, 0, {0: [(first.start, first.stop)]}, [])
    again.know(2, 0, {0: [(2, 10)]}, [])
    again.validate()
    assert again.unfinished(0) == []
    assert again.state()["complete"] == [[0, 1]]


def test_the_last_lease_of_a_complete_epoch_is_used_once_if_its_answer_is_lost():
    """The dead service has counted it as used, and the copy knows that; the worker asks once more."""
    leases = Leases(10, workers=[1, 2], unit=5)
    first, second = leases.ask(1, 0), leases.ask(2, 0)
    assert leases.ask(2, 0) is WAIT
    assert leases.ask(1, 0) is None
    assert leases.answers() == [(2, None)]
    state = leases.state()
    assert state["complete"] == [[0, 1]]
    again = Leases(10, workers=[1, 2], unit=5)
    again.restore(state)
    again.know(1, 0, {}, [first])  # it has not heard that the epoch is over
    again.know(2, 0, {0: [(second.start, second.stop)]}, [])
    again.validate()
    assert again.held(1) == (first,)
    assert again.ask(2, 0) is WAIT
    assert again.ask(1, 0) is None
    assert again.answers() == [(2, None)]
    assert again.state()["complete"] == [[0, 1]]


def test_what_was_given_back_and_leased_anew_is_not_free_once_more_if_the_answer_is_lost():
    leases = Leases(10, workers=[1, 2], unit=5)
    first = leases.ask(1, 0)
    state = leases.state()
    leases.give_back(1, used=1)  # the answer is lost
    rest = leases.ask(2, 0)
    assert rest.start == 1
    again = Leases(10, workers=[1, 2], unit=5)
    again.restore(state)
    again.know(1, 0, {}, [first])
    again.know(2, 0, {}, [rest])
    again.give_back(1, used=1)  # once more
    again.validate()
    taken = []
    while isinstance(lease := again.ask(2, 0), Lease):
        taken += range(lease.start, lease.stop)
    assert taken == [*range(rest.stop, 10)]
    again.validate()
    assert again.state()["complete"] == [[0, 1]]
