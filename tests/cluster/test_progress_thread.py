"""The thread that looks after a door: who has it when, and that nothing gets lost in between."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import deque

import pytest

from nnlo_common.cluster.transport._doorbell import Doorbell
from nnlo_common.cluster.transport._progress import OverlappedEndpoint
from tests.helpers.paths import ROOT
from tests.helpers.threads import no_new_threads

LONG_S = 60.0  # for what must happen; nothing takes that long
THREAD = "nnlo-progress"


class Door:
    """Messages that arrive when they are looked for; notices when two use it at once."""

    longest_s = 200e-6
    leaving = near = False

    def __init__(self, bell=None):
        self.bell = bell or Doorbell()
        self.under_way = 0
        self.ready = deque()
        self.sent = self.taken = 0
        self.closed = self.flushed = False
        self.fault = None
        self.seen = threading.Semaphore(0)  # released by each look
        self.go_on = threading.Event()  # a look waits for it
        self.go_on.set()
        self._inside = threading.Lock()

    @property
    def busy(self):
        return self.under_way > 0

    def look(self):
        with self._alone():
            self.seen.release()
            assert self.go_on.wait(LONG_S)
            if self.fault is not None:
                raise self.fault
            if self.under_way:
                self.under_way -= 1
                self.ready.append(self.taken)
                self.taken += 1
            return self.busy

    def send(self, peer, message, frame=None):
        with self._alone():
            self.sent += 1
            self.under_way += 1

    def receive(self, timeout_s=None):
        with self._alone():
            if not self.ready and self.under_way:
                self.under_way -= 1
                self.ready.append(self.taken)
                self.taken += 1
            return self.ready.popleft() if self.ready else None

    def release(self, peer, frame):
        with self._alone():
            pass

    def flush(self):
        with self._alone():
            self.flushed = True

    def close(self):
        with self._alone():
            self.closed = True

    def _alone(self):
        assert self._inside.acquire(blocking=False), "two at once"
        return _Leaving(self._inside)


class _Leaving:
    def __init__(self, lock):
        self._lock = lock

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._lock.release()


@pytest.fixture
def door():
    with no_new_threads():
        door = Door()
        yield door
    door.bell.close()


@pytest.fixture
def here(door):
    endpoint = OverlappedEndpoint(door)
    yield endpoint
    endpoint.end()


def test_the_owner_sends_and_the_thread_takes_in_the_reply(door, here):
    here.send(0, None)
    assert here.looks == 0  # the owner has the door
    here.flush()
    assert door.seen.acquire(timeout=LONG_S)
    assert here.receive() == 0  # waits for the look that is under way
    assert (door.sent, here.looks) == (1, 1)


def test_nothing_under_way_is_nothing_to_hand_over(door, here):
    here.flush()
    here.send(0, None)
    assert here.receive() == 0
    here.flush()
    here.flush()
    here.close()
    assert here.looks == 0
    assert door.closed


def test_the_thread_sleeps_when_there_has_been_nothing_for_a_while(door, here, monkeypatch):
    monkeypatch.setattr("nnlo_common.cluster.transport._progress._LINGER_S", 0.0)
    for turn in range(100):  # asleep or just about to: it never misses a hand-over
        here.send(0, None)
        here.flush()
        assert door.seen.acquire(timeout=LONG_S)
        assert here.receive() == turn
    assert here.looks == 100


def test_the_owner_waits_for_a_look_that_is_under_way(door, here):
    door.go_on.clear()
    here.send(0, None)
    here.flush()
    assert door.seen.acquire(timeout=LONG_S)
    owner = threading.Thread(target=here.send, args=(0, None))
    owner.start()
    owner.join(0.01)
    assert owner.is_alive()
    door.go_on.set()
    owner.join(LONG_S)
    assert door.sent == 2
    assert here.receive() == 0


def test_changing_hands_many_times_loses_and_doubles_nothing(door, here):
    got = []
    for turn in range(3000):
        here.send(0, None)
        here.flush()
        if turn % 3:
            got.append(here.receive())
    while len(got) < 3000:
        got.append(here.receive())
    assert got == list(range(3000))


@pytest.mark.parametrize("call", ["send", "receive", "release"])
def test_what_goes_wrong_in_the_thread_is_raised_by_the_owners_next_calls(door, here, call):
    door.fault = OSError("the network is gone")
    here.send(0, None)
    here.flush()
    assert door.seen.acquire(timeout=LONG_S)
    arguments = {"send": (0, None), "receive": (), "release": (0, None)}[call]
    for _ in range(2):
        with pytest.raises(OSError, match="the network is gone"):
            getattr(here, call)(*arguments)
    assert door.sent == 1


def test_closing_does_not_hide_an_error_and_ends_the_thread(door):
    here = OverlappedEndpoint(door)
    door.fault = OSError("the network is gone")
    here.send(0, None)
    here.flush()
    assert door.seen.acquire(timeout=LONG_S)
    with pytest.raises(OSError, match="the network is gone"):
        here.close()
    assert not door.closed


def test_closing_waits_for_a_look_and_ends_the_thread(door):
    here = OverlappedEndpoint(door)
    door.go_on.clear()
    here.send(0, None)
    here.flush()
    assert door.seen.acquire(timeout=LONG_S)
    closing = threading.Thread(target=here.close)
    closing.start()
    closing.join(0.01)
    assert closing.is_alive()
    assert not door.closed
    door.go_on.set()
    closing.join(LONG_S)
    assert door.closed


def test_who_is_soon_back_is_left_alone(door, here, monkeypatch):
    """Waking the thread would cost a short step more than it saves."""
    monkeypatch.setattr("nnlo_common.cluster.transport._progress._BRIEF_S", LONG_S)
    monkeypatch.setattr("nnlo_common.cluster.transport._progress._NAP_S", 1e-5)
    door.near = True
    for turn in range(300):
        here.send(0, None)
        here.flush()
        assert here.receive() == turn
    assert here.looks == 0


def test_who_stays_away_after_all_is_not_left_alone(door, here):
    door.near, here._absence_s = True, 0.0
    here.send(0, None)
    here.flush()
    assert door.seen.acquire(timeout=LONG_S)
    assert here.receive() == 0
    assert 0 < here._absence_s < LONG_S


def test_without_the_thread_the_owner_waits_until_all_has_left(door, here):
    here.end()
    here.send(0, None)
    here.flush()
    assert door.flushed
    assert here.receive() == 0


class PassedOn(Doorbell):
    """A bell that counts what is rung on it from this very process."""

    def __init__(self):
        super().__init__()
        self.rung = threading.Semaphore(0)

    def ring(self, address):
        self.rung.release()
        super().ring(address)


def test_a_ring_for_the_owner_is_passed_on():
    """Once: the thread must not hear its own ring again and again while the owner computes."""
    with no_new_threads():
        door, other = Door(PassedOn()), Doorbell()
        here = OverlappedEndpoint(door)
        here.send(0, None)
        here.flush()
        assert door.seen.acquire(timeout=LONG_S)
        assert here.receive() == 0  # the owner has the door; the thread still dozes on the bell
        other.ring(door.bell.address)
        assert door.bell.rung.acquire(timeout=LONG_S)
        while not here._asleep:
            pass
        assert door.bell.wait(LONG_S)
        assert not door.bell.rung.acquire(blocking=False)
        here.close()
        door.bell.close()
        other.close()


UNCLOSED = """
import sys
from tests.cluster.test_progress_thread import Door
from nnlo_common.cluster.transport._progress import OverlappedEndpoint
here = OverlappedEndpoint(Door())
here.send(0, None)
here.flush()
if sys.argv[1] == "fail":
    raise SystemExit(3)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [("end", 0), ("fail", 3)])
def test_a_door_that_is_never_closed_does_not_keep_the_program(how, code):
    line = [sys.executable, "-c", UNCLOSED, how]
    here = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(line, env=here, capture_output=True, text=True, timeout=LONG_S, check=False)
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # Python 3.12: the process has threads
def test_a_forked_process_has_no_thread_and_ends(door, here):
    door.go_on.clear()
    here.send(0, None)
    here.flush()
    assert door.seen.acquire(timeout=LONG_S)  # amid a look
    child = os.fork()
    if child == 0:
        here.end()  # as at the end of a program
        os._exit(sum(thread.name == THREAD for thread in threading.enumerate()))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    door.go_on.set()
    assert here.receive() == 0
