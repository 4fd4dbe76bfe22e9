"""MPI endpoints without any training: rank 0 serves, all others talk with it. Says which checks went well."""

import sys
import time
from unittest.mock import patch

import numpy as np
from mpi4py import MPI

from nnlo_common import FlatVector
from nnlo_common.cluster._hosts import Place
from nnlo_common.cluster.transport._endpoint import Link
from nnlo_common.cluster.transport._mpi4py import World
from nnlo_common.cluster.transport._mpi_world import MPIWorld
from nnlo_common.cluster.transport._parts import PART
from nnlo_common.protocol import Kind, Message

world = MPIWorld(World())
rank, workers = world.rank, range(1, world.size)


LARGE = (1 << 21) + 7  # a vector of longer parts


def endpoint(size, depth=1, shards=1, world=world):
    """Open an endpoint; every worker has a link to rank 0 for each shard."""
    peers = workers if rank == 0 else [0]
    links = [Link(peer, shard, size, depth, serving=rank == 0) for peer in peers for shard in range(shards)]
    return world.open(links)


def message(kind, sequence=1, vector=None, shard=0):
    return Message(kind, rank, sequence, 2**40 + sequence, 7, 0.5, shard, vector=vector)


def together():
    MPI.COMM_WORLD.Barrier()


def numbers(size, of=rank):
    """Different on every rank and at every place."""
    return np.arange(size, dtype="f4") + np.float32(of) / 4


def order():
    """A long message, a header, a short one and a header arrive in this order, in both directions."""
    size, kinds = 1_000_000, [Kind.PUSH, Kind.PULL, Kind.COMMIT, Kind.LEAVE]
    here = endpoint(size, depth=4)
    for turn in range(5):
        if rank:
            for index, kind in enumerate(kinds):
                vector = {0: numbers(size), 2: numbers(3)}.get(index)
                here.send(0, message(kind, 10 * turn + index, vector))
            for index in range(4):
                event = here.receive()
                assert event.message.sequence == 10 * turn + index, (turn, index, event.message)
                assert event.message.kind is [Kind.CENTER, Kind.ACK, Kind.CENTER, Kind.ACK][index]
                if index in (0, 2):
                    assert np.array_equal(event.message.vector, numbers([size, 0, 3][index]) * 2)
                here.release(0, event.frame)
        else:
            came = {worker: [] for worker in workers}
            while any(len(events) < 4 for events in came.values()):
                event = here.receive()
                came[event.message.sender].append(event)
            for worker, events in came.items():
                found = [(event.message.kind, event.message.sequence) for event in events]
                assert found == [(kind, 10 * turn + index) for index, kind in enumerate(kinds)], found
                for index, event in enumerate(events):
                    vector = event.message.vector
                    if index in (0, 2):
                        assert np.array_equal(vector, numbers([size, 0, 3][index], worker))
                        vector *= 2
                    kind = Kind.ACK if vector is None else Kind.CENTER
                    here.send(worker, message(kind, event.message.sequence, vector), event.frame)
    here.close()


def framed():
    """Vectors in frames leave from where they are: the header is written in front of them."""
    flats = [FlatVector.of([numbers(5)]), FlatVector.of([numbers(5) + 100])]
    here = endpoint(5)
    for turn in range(20):
        if rank:
            flat = flats[turn % 2]
            flat.vector += 1
            here.send(0, message(Kind.EXCHANGE, turn, flat.vector), flat.frame)
            assert bytes(flat.frame.header[:4]) == b"nnlo"
            event = here.receive()
            assert np.array_equal(event.message.vector, flat.vector * 2)
            here.release(0, event.frame)
        else:
            for _ in workers:
                event = here.receive()
                got, at = event.message, event.message.sequence
                assert np.array_equal(got.vector, numbers(5, got.sender) + at // 2 + 1 + 100 * (at % 2)), got
                got.vector[:] *= 2
                here.send(got.sender, message(Kind.CENTER, at, got.vector), event.frame)
    here.close()


def slices():
    """A piece of a vector is copied: what lies around it stays, and changing it afterwards does no harm."""
    flat = FlatVector.of([numbers(5)])
    places = [slice(0, 3), slice(3, 5)]
    peers = workers if rank == 0 else [0]
    here = world.open([Link(p, shard, 3 - shard, 1, rank == 0) for p in peers for shard in (0, 1)])
    if rank:
        for shard, place in reversed(list(enumerate(places))):
            here.send(0, message(Kind.PUSH, 1, flat.vector[place], shard))
            flat.vector[place] = -1
        assert bytes(flat.frame.header) == bytes(64)
        for _ in places:
            event = here.receive()
            assert (event.message.kind, event.message.vector) == (Kind.ACK, None)
            here.release(0, event.frame)
    else:
        for _ in range(2 * len(workers)):
            event = here.receive()
            got = event.message
            assert np.array_equal(got.vector, numbers(5, got.sender)[places[got.shard]]), got
            assert event.frame.vector.size == 3 - got.shard  # it came in its own shard's memory
            here.send(got.sender, message(Kind.ACK, 1, shard=got.shard), event.frame)
    here.close()


def one_way():
    """Many messages without a reply: none is lost, and the sender's vector may change at once."""
    here, vector = endpoint(4), numbers(4)
    if rank:
        for sequence in range(100):
            if sequence % 3:
                here.send(0, message(Kind.COMMIT, sequence, vector))
                vector += 1
            else:
                here.send(0, message(Kind.EPOCH, sequence))
    else:
        seen = dict.fromkeys(workers, 0)
        for _ in range(100 * len(workers)):
            event = here.receive()
            got = event.message
            assert got.sequence == seen[got.sender]
            if got.sequence % 3:
                made = got.sequence - got.sequence // 3 - 1
                assert np.array_equal(got.vector, numbers(4, got.sender) + made), got
            else:
                assert (got.kind, got.vector) == (Kind.EPOCH, None)
            seen[got.sender] += 1
            here.release(got.sender, event.frame)
    here.close()


def header():
    """Everything in the header arrives; a message without a vector leaves the frame's numbers alone."""
    here = endpoint(2)
    if rank:
        here.send(0, message(Kind.JOIN, 2**63))
        here.release(0, here.receive().frame)
    for _ in workers if rank == 0 else ():
        event = here.receive()
        got = event.message
        assert (got.kind, got.sequence, got.clock, got.pulled_at) == (Kind.JOIN, 2**63, 2**40 + 2**63, 7)
        assert (got.scalar, got.shard, got.stop, got.vector) == (0.5, 0, False, None)
        assert event.frame.vector.tolist() == [0, 0]
        here.send(got.sender, message(Kind.ACK, 0), event.frame)
    here.close()


def frames():
    """However many messages: the memory they lie in is that of the links, `depth` each."""
    here, seen = endpoint(2, depth=2), set()
    for turn in range(50):
        if rank:
            here.send(0, message(Kind.PULL, turn))
            event = here.receive()
            assert event.message.vector.tolist() == [turn, rank]
            here.release(0, event.frame)
        for _ in workers if rank == 0 else ():
            event = here.receive()
            event.frame.vector[:] = event.message.sequence, event.message.sender
            answer = message(Kind.CENTER, event.message.sequence, event.frame.vector)
            here.send(event.message.sender, answer, event.frame)
            seen.add(id(event.frame))
        seen.add(id(event.frame))
    assert len(seen) <= 2 * (1 if rank else len(workers))
    here.close()


def posted():
    """Closing withdraws the receives that nothing came for, and frees the communicator.

    MPICH has about two thousand communicators: with most of them taken, none may be left behind.
    """
    taken = [MPI.COMM_SELF.Dup() for _ in range(1950)]
    for _ in range(150):
        endpoint(1, depth=2).close()
    for comm in taken:
        comm.Free()


def unread():
    """Closing is possible although a message came that nobody has looked at."""
    here = endpoint(4)
    if rank:
        here.send(0, message(Kind.COMMIT, 1, numbers(4)))
    together()
    here.close()


def big():
    """20 MB there and back, changed on the way, from all workers at once."""
    size = 5_000_000
    flat = FlatVector.of([numbers(size)])
    here = endpoint(size)
    for turn in range(3):
        if rank:
            here.send(0, message(Kind.EXCHANGE, turn, flat.vector), flat.frame)
            event = here.receive()
            assert np.array_equal(event.message.vector, numbers(size) + (turn + 1))
            np.copyto(flat.vector, event.message.vector)
            here.release(0, event.frame)
        for _ in workers if rank == 0 else ():
            event = here.receive()
            event.message.vector[:] += 1
            answer = message(Kind.CENTER, turn, event.message.vector)
            here.send(event.message.sender, answer, event.frame)
    here.close()


def timeout():
    """Nothing comes in time, and what comes later is not lost."""
    here = endpoint(1)
    for seconds in (0.0, 0.05):
        start = time.perf_counter()
        assert here.receive(seconds) is None
        assert seconds <= time.perf_counter() - start < 10
    together()
    if rank:
        here.send(0, message(Kind.LEAVE, 9))
    for _ in workers if rank == 0 else ():
        event = here.receive(10)
        assert event.message.sequence == 9
        here.release(event.message.sender, event.frame)
    here.close()


def several():
    """Doors that are open at the same time do not hear each other; they may be closed in any order."""
    endpoints = [endpoint(3) for _ in range(3)]
    if rank:
        for index in (2, 0, 1):
            endpoints[index].send(0, message(Kind.COMMIT, index, numbers(3) + 10 * index))
    for index in (0, 1, 2) if rank == 0 else ():
        for _ in workers:
            event = endpoints[index].receive()
            assert event.message.sequence == index
            assert np.array_equal(event.message.vector, numbers(3, event.message.sender) + 10 * index)
            endpoints[index].release(event.message.sender, event.frame)
        assert endpoints[index].receive(0) is None
    for index in (1, 2, 0):
        endpoints[index].close()


def foreign():
    """What the program itself sends on its communicator, with our very tags, comes to the program."""
    comm = MPI.COMM_WORLD.Dup()
    theirs = np.full(40, 77, "u1")
    here = endpoint(4, depth=2, world=MPIWorld(World(comm)))
    peers = workers if rank == 0 else [0]
    sent = [comm.Isend(theirs, peer, tag) for peer in peers for tag in range(4)]
    if rank:
        here.send(0, message(Kind.EXCHANGE, 1, numbers(4)))
        event = here.receive()
        assert event.message.vector.tolist() == [9] * 4
        here.release(0, event.frame)
    for _ in workers if rank == 0 else ():
        event = here.receive()
        assert np.array_equal(event.message.vector, numbers(4, event.message.sender))
        event.message.vector[:] = 9
        answer = message(Kind.CENTER, 1, event.message.vector)
        here.send(event.message.sender, answer, event.frame)
    assert here.receive(0) is None
    here.close()
    for peer in peers:
        for tag in range(4):
            buffer = np.zeros(40, "u1")
            comm.Recv(buffer, peer, tag)
            assert (buffer == 77).all()
    MPI.Request.Waitall(sent)
    comm.Free()


def empty():
    """A shard may be empty: its vector has no numbers, but it is there."""
    here = endpoint(0)
    if rank:
        here.send(0, message(Kind.EXCHANGE, 1, np.empty(0, "f4")))
        event = here.receive()
        assert event.message.vector.size == 0
        here.release(0, event.frame)
    for _ in workers if rank == 0 else ():
        event = here.receive()
        assert event.message.vector.size == 0
        answer = message(Kind.CENTER, 1, event.message.vector)
        here.send(event.message.sender, answer, event.frame)
    here.close()


def by_parts():
    """A long reply is sent while it is computed, and arrives part by part."""
    for size in (PART, PART + 7, 5 * PART - 1, LARGE):
        here = endpoint(size, shards=2)
        flats = [FlatVector.of([numbers(size)]) for _ in range(2)]
        for turn in range(3):
            if rank:
                for shard, flat in enumerate(flats):
                    here.send(0, message(Kind.EXCHANGE, turn, flat.vector, shard), flat.frame)
                for _ in flats:
                    event = here.receive()
                    assert (event.parts is None) == (size == PART)
                    found, memory, stop = np.zeros(size, "f4"), set(), 0
                    for place, part in event.arriving(found if turn == 1 else None):
                        assert place.start in (None, stop)
                        stop = place.stop
                        assert np.shares_memory(part, found) == (turn == 1)
                        if turn != 1:
                            found[place] = part
                            memory.add(part.ctypes.data)
                    assert np.array_equal(found, numbers(size) * (turn + 2) + event.message.shard)
                    assert len(memory) <= 5  # however long the reply is
                    here.release(0, event.frame)
            for _ in range(2 * len(workers)) if rank == 0 else ():
                event = here.receive()
                got, filled = event.message, []

                def fill(part, got=got, filled=filled):
                    assert part.start == (filled[-1].stop if filled else 0)
                    filled.append(part)
                    got.vector[part] *= got.sequence + 2
                    got.vector[part] += got.shard

                answer = message(Kind.CENTER, got.sequence, got.vector, got.shard)
                here.send(got.sender, answer, event.frame, fill)
                assert filled[-1].stop == size  # all is computed when `send` returns
                assert len(filled) == (9 if size == LARGE else -(-size // PART))
        here.close()


def lent():
    """A worker reads a reply where the centre lies; the server gets no message that may change it before."""
    for size, filled in ((3, True), (PART, False), (5 * PART - 1, True), (LARGE, False), (LARGE, True)):
        here, alone = of_cores(size, crowded=False), MPI.COMM_WORLD.Dup()
        flat, center = FlatVector.of([numbers(size)]), np.zeros(size, "f4")
        for turn in range(3):
            if rank:
                if rank > 1:
                    alone.recv(source=rank - 1)  # that one is in the middle of its reply
                here.send(0, message(Kind.EXCHANGE, turn, flat.vector), flat.frame)
                event, found, told = here.receive(), np.zeros(size, "f4"), rank == world.size - 1
                for place, part in event.arriving():
                    if not told:
                        alone.send(None, rank + 1)
                        time.sleep(0.05)  # if it could, the next worker's message would change the centre
                    told = True
                    found[place] = part
                assert (found == (world.size - 1) * turn + rank).all(), (size, turn)
                here.release(0, event.frame)
                alone.Barrier()
                continue
            for worker in workers:
                event = here.receive()
                assert event.message.sender == worker

                def fill(part, center=center):
                    center[part] += 1

                if not filled:
                    fill(slice(0, size))
                answer = message(Kind.CENTER, turn, center)
                here.send(worker, answer, event.frame, fill if filled else None)
            alone.Barrier()
        here.close()
        alone.Free()


def not_lent():
    """A worker that does not read on holds up nobody whose message is there, or who needs a core."""
    size = 5 * PART - 1
    for crowded in (False, True):
        here, alone = of_cores(size, crowded=crowded), MPI.COMM_WORLD.Dup()
        flat, center = FlatVector.of([numbers(size)]), np.zeros(size, "f4")
        if rank:
            if rank > 1:  # after the server has the first one, or when the one before has a part of its reply
                alone.recv(source=rank - 1 if crowded else 0)
            here.send(0, message(Kind.EXCHANGE, 1, flat.vector), flat.frame)
            if rank > 1 and not crowded:
                here.poll()
                alone.send(None, 0)
            event, found, later = here.receive(), np.zeros(size, "f4"), rank + 1
            for place, part in event.arriving():
                if not place.start and later < world.size:
                    if crowded:
                        alone.send(None, later)
                    alone.recv(source=later)  # that one has all of its reply
                found[place] = part
            assert (found == rank).all()
            if rank > 1:
                alone.send(None, rank - 1)
            here.release(0, event.frame)
        else:
            first = here.receive()
            for worker in workers[1:] if not crowded else ():
                alone.send(None, worker)
                alone.recv(source=worker)
            for worker in workers:
                event = first if worker == 1 else here.receive()
                assert event.message.sender == worker
                center += 1
                here.send(worker, message(Kind.CENTER, 1, center), event.frame)
        here.close()
        alone.Free()


def of_cores(size, *, crowded):
    """Open an endpoint on a host with fewer cores than ranks, or with one for each."""
    with patch.object(Place, "crowded", crowded):
        return endpoint(size)


def kept_whole():
    """A reply that a thread may receive comes whole, as does one that is kept; both are computed once."""
    for depth in (1, 3):
        here = endpoint(3 * PART, depth=depth)
        flat = FlatVector.of([numbers(3 * PART)])
        if rank:
            here.send(0, message(Kind.EXCHANGE, 1, flat.vector), flat.frame)
            event = here.receive()
            assert (event.parts is None) == (depth == 3)
            assert np.array_equal(event.whole().message.vector, numbers(3 * PART) + 1)
            here.release(0, event.frame)
        for _ in workers if rank == 0 else ():
            event = here.receive()
            vector = event.message.vector
            answer = message(Kind.CENTER, 1, vector)
            here.send(event.message.sender, answer, event.frame, lambda part, v=vector: add_one(v, part))
        here.close()


def add_one(vector, part):
    vector[part] += 1


def released_early():
    """Who gives a reply back in the middle of it gets the next one whole and right."""
    here = endpoint(9 * PART)
    flat = FlatVector.of([numbers(9 * PART)])
    for turn in range(3):
        if rank:
            here.send(0, message(Kind.EXCHANGE, turn, flat.vector), flat.frame)
            event = here.receive()
            if turn == 1:
                assert np.array_equal(event.whole().message.vector, numbers(9 * PART) + 1)
            else:
                next(event.arriving())
            here.release(0, event.frame)
        for _ in workers if rank == 0 else ():
            event = here.receive()
            vector = event.message.vector
            answer = message(Kind.CENTER, turn, vector)
            here.send(event.message.sender, answer, event.frame, lambda part, v=vector: add_one(v, part))
    here.close()


def closed_early():
    """An endpoint that closes in the middle of a reply takes the rest, so that the server can close, too."""
    here = endpoint(9 * PART)
    flat = FlatVector.of([numbers(9 * PART)])
    if rank:
        here.send(0, message(Kind.EXCHANGE, 1, flat.vector), flat.frame)
        next(here.receive().arriving())
    for _ in workers if rank == 0 else ():
        event = here.receive()
        answer = message(Kind.CENTER, 1, event.message.vector)
        here.send(event.message.sender, answer, event.frame, lambda part: None)
    here.close()


AHEAD_TURNS = ("none", "some", "all, others pass", "changed", "twice", "another vector", "apart")


def ahead():
    """A vector leaves part by part ahead of its message: that has its numbers, and others may pass."""
    for size in (PART - 1, PART + 7, 5 * PART - 1, LARGE):
        peers = workers if rank == 0 else [0]
        here = world.open([Link(p, shard, size, 1, rank == 0, ahead=size) for p in peers for shard in (0, 1)])
        frames = [FlatVector.of([numbers(size)]), FlatVector.of([numbers(size + 5)])]
        for turn, what in enumerate(AHEAD_TURNS):
            if rank:
                for shard, flat in enumerate(frames):
                    send_ahead(
                        here, what, turn, shard, flat, flat.vector[3 : 3 + size] if shard else flat.vector
                    )
                for _ in frames:
                    event = here.receive()
                    got, first = event.whole().message, 3 * event.message.shard
                    expected = numbers(size) + first + turn + 1
                    assert np.array_equal(got.vector, expected), (size, what, got)
                    here.release(0, event.frame)
            left = 2 * len(workers) if rank == 0 else 0  # others may be in the next turn
            while left:
                event = here.receive()
                got = event.message
                if got.kind is Kind.OPTIONS:
                    assert np.array_equal(got.vector, numbers(3, got.sender))
                    here.release(got.sender, event.frame)
                    continue
                expected = numbers(size, got.sender) + 3 * got.shard + got.sequence
                assert np.array_equal(got.vector, expected), (size, AHEAD_TURNS[got.sequence], got)
                answer = message(Kind.CENTER, got.sequence, got.vector, got.shard)
                here.send(got.sender, answer, event.frame, lambda part, v=got.vector: add_one(v, part))
                left -= 1
        together()
        if rank:  # a gradient whose step is never made
            here.send_ahead(0, 0, frames[0].vector, size // 2)
            here.send(0, message(Kind.LEAVE))
        for _ in workers if rank == 0 else ():
            event = here.receive()
            assert event.message.kind is Kind.LEAVE
            here.release(event.message.sender, event.frame)
        here.close()


def send_ahead(here, what, turn, shard, flat, vector):
    """Send a vector, whose numbers grow by one in each turn, in the way of this turn."""
    size = vector.size
    np.copyto(vector, numbers(size) + 3 * shard + turn)
    frame = None if shard else flat.frame
    starts = {"some": (size - 1, 2 * size // 3, size // 2), "twice": (size // 3, size // 4)}
    for start in starts.get(what, () if what == "none" else (size // 2, 0)):
        apart = []
        if what == "apart":  # most of it, but neither the first numbers nor the last ones
            place = slice(start + 3, (size if start else size // 2) - 5)
            apart = [(place, vector[place].copy())]
            vector[place] = -1
        here.send_ahead(0, shard, vector, start, apart)
    if what == "all, others pass":
        here.send(0, message(Kind.OPTIONS, turn, numbers(3), shard))
    if what == "changed":
        vector += 1
        here.withdraw(0, shard)
        vector -= 1
    if what == "twice":
        here.withdraw(0, shard)
        here.withdraw(0, shard)
        here.send_ahead(0, shard, vector, 1)
    if what == "another vector":
        vector, frame = vector.copy(), None
    here.send(0, message(Kind.EXCHANGE, turn, vector, shard), frame)


CHECKS = [
    ahead,
    by_parts,
    lent,
    not_lent,
    kept_whole,
    released_early,
    closed_early,
    order,
    framed,
    slices,
    one_way,
    header,
    frames,
    unread,
    big,
    timeout,
    several,
    foreign,
    empty,
    posted,
]

if __name__ == "__main__":
    disengage = world.engage()
    for check in CHECKS:
        if len(sys.argv) < 2 or check.__name__ in sys.argv[1:]:
            check()
            together()
            if rank == 0:
                print(f"<{check.__name__}>", flush=True)
    disengage()
