"""Progress thread: one holder of the endpoint at a time, and no message lost at a hand-over."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import deque

import pytest

from nnlo_common.cluster.transport._backoff import Wakeup
from nnlo_common.cluster.transport._progress_thread import OverlappedEndpoint
from tests.helpers.paths import ROOT
from tests.helpers.threads import no_new_threads

LONG_S = 60.0  # for what must happen; nothing takes that long
THREAD = "nnlo-progress"


class FakeEndpoint:
    """An endpoint whose messages arrive when polled; fails if two threads use it at once."""

    longest_s = 200e-6
    leaving = near = False

    def __init__(self, wakeup=None):
        self.wakeup = wakeup or Wakeup(bytes(16))
        self.under_way = 0
        self.ready = deque()
        self.sent = self.taken = 0
        self.closed = self.flushed = False
        self.fault = None
        self.seen = threading.Semaphore(0)  # released by each poll
        self.go_on = threading.Event()  # a poll waits for it
        self.go_on.set()
        self._inside = threading.Lock()

    @property
    def busy(self):
        return self.under_way > 0

    def poll(self):
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

    def send(self, peer, message, frame=None, fill=None):
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
def inner():
    with no_new_threads():
        inner = FakeEndpoint()
        yield inner
    inner.wakeup.close()


@pytest.fixture
def here(inner):
    endpoint = OverlappedEndpoint(inner)
    yield endpoint
    endpoint.stop()


def test_the_owner_sends_and_the_thread_takes_in_the_reply(inner, here):
    here.send(0, None)
    assert here.polls == 0  # the owner holds the endpoint
    here.flush()
    assert inner.seen.acquire(timeout=LONG_S)
    assert here.receive() == 0  # waits for the poll in progress
    assert (inner.sent, here.polls) == (1, 1)


def test_without_messages_in_flight_flush_hands_nothing_over(inner, here):
    here.flush()
    here.send(0, None)
    assert here.receive() == 0
    here.flush()
    here.flush()
    here.close()
    assert here.polls == 0
    assert inner.closed


def test_the_thread_sleeps_after_a_while_without_messages(inner, here, monkeypatch):
    monkeypatch.setattr("nnlo_common.cluster.transport._progress_thread._LINGER_S", 0.0)
    for turn in range(100):  # asleep or just about to: it never misses a hand-over
        here.send(0, None)
        here.flush()
        assert inner.seen.acquire(timeout=LONG_S)
        assert here.receive() == turn
    assert here.polls == 100


def test_the_owner_waits_for_a_poll_in_progress(inner, here):
    inner.go_on.clear()
    here.send(0, None)
    here.flush()
    assert inner.seen.acquire(timeout=LONG_S)
    owner = threading.Thread(target=here.send, args=(0, None))
    owner.start()
    owner.join(0.01)
    assert owner.is_alive()
    inner.go_on.set()
    owner.join(LONG_S)
    assert inner.sent == 2
    assert here.receive() == 0


def test_many_hand_overs_lose_and_double_no_message(inner, here):
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
def test_an_error_in_the_thread_is_raised_by_the_owners_next_calls(inner, here, call):
    inner.fault = OSError("the network is gone")
    here.send(0, None)
    here.flush()
    assert inner.seen.acquire(timeout=LONG_S)
    arguments = {"send": (0, None), "receive": (), "release": (0, None)}[call]
    for _ in range(2):
        with pytest.raises(OSError, match="the network is gone"):
            getattr(here, call)(*arguments)
    assert inner.sent == 1


def test_closing_does_not_hide_an_error_and_ends_the_thread(inner):
    here = OverlappedEndpoint(inner)
    inner.fault = OSError("the network is gone")
    here.send(0, None)
    here.flush()
    assert inner.seen.acquire(timeout=LONG_S)
    with pytest.raises(OSError, match="the network is gone"):
        here.close()
    assert not inner.closed


def test_closing_waits_for_a_poll_and_ends_the_thread(inner):
    here = OverlappedEndpoint(inner)
    inner.go_on.clear()
    here.send(0, None)
    here.flush()
    assert inner.seen.acquire(timeout=LONG_S)
    closing = threading.Thread(target=here.close)
    closing.start()
    closing.join(0.01)
    assert closing.is_alive()
    assert not inner.closed
    inner.go_on.set()
    closing.join(LONG_S)
    assert inner.closed


def test_brief_absences_do_not_wake_the_thread(inner, here, monkeypatch):
    """Waking the thread would cost a short step more than it saves."""
    monkeypatch.setattr("nnlo_common.cluster.transport._progress_thread._BRIEF_S", LONG_S)
    monkeypatch.setattr("nnlo_common.cluster.transport._progress_thread._BRIEF_PAUSE_S", 1e-5)
    inner.near = True
    for turn in range(300):
        here.send(0, None)
        here.flush()
        assert here.receive() == turn
    assert here.polls == 0


def test_an_absence_longer_than_usual_wakes_the_thread(inner, here):
    inner.near, here._absence_s = True, 0.0
    here.send(0, None)
    here.flush()
    assert inner.seen.acquire(timeout=LONG_S)
    assert here.receive() == 0
    assert 0 < here._absence_s < LONG_S


def test_without_the_thread_flush_completes_all_sends(inner, here):
    here.stop()
    here.send(0, None)
    here.flush()
    assert inner.flushed
    assert here.receive() == 0


class CountingWakeup(Wakeup):
    """Counts the wake-ups sent through it by this process."""

    def __init__(self):
        super().__init__(bytes(16))
        self.woken = threading.Semaphore(0)

    def wake(self, address):
        self.woken.release()
        super().wake(address)


def test_a_wake_up_for_the_owner_is_passed_on():
    """Once: the thread must not wake itself again and again while the owner computes."""
    with no_new_threads():
        inner, other = FakeEndpoint(CountingWakeup()), Wakeup(bytes(16))
        here = OverlappedEndpoint(inner)
        here.send(0, None)
        here.flush()
        assert inner.seen.acquire(timeout=LONG_S)
        assert here.receive() == 0  # the owner holds the endpoint; the thread still sleeps on the socket
        other.wake(inner.wakeup.address)
        assert inner.wakeup.woken.acquire(timeout=LONG_S)
        while not here._asleep:
            pass
        assert inner.wakeup.wait(LONG_S)
        assert not inner.wakeup.woken.acquire(blocking=False)
        here.close()
        inner.wakeup.close()
        other.close()


UNCLOSED = """
import sys
from tests.cluster.test_progress_thread import FakeEndpoint
from nnlo_common.cluster.transport._progress_thread import OverlappedEndpoint
here = OverlappedEndpoint(FakeEndpoint())
here.send(0, None)
here.flush()
if sys.argv[1] == "fail":
    raise SystemExit(3)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [("end", 0), ("fail", 3)])
def test_an_endpoint_that_is_never_closed_does_not_keep_the_program(how, code):
    line = [sys.executable, "-c", UNCLOSED, how]
    here = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(line, env=here, capture_output=True, text=True, timeout=LONG_S, check=False)
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # Python 3.12: the process has threads
def test_a_forked_process_has_no_thread_and_ends(inner, here):
    inner.go_on.clear()
    here.send(0, None)
    here.flush()
    assert inner.seen.acquire(timeout=LONG_S)  # amid a poll
    child = os.fork()
    if child == 0:
        here.stop()  # as at the end of a program
        os._exit(sum(thread.name == THREAD for thread in threading.enumerate()))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    inner.go_on.set()
    assert here.receive() == 0
