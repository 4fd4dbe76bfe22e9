"""Wake-up sockets: end a pause at once, do no harm when gone, and allow short pauses."""

from __future__ import annotations

import os
import resource
import select

import pytest

import nnlo_common.cluster.transport._backoff as module
from nnlo_common.cluster.transport._backoff import Wakeup


@pytest.fixture(params=["low descriptor", "high descriptor"])
def wakeup(request):
    """A wake-up socket, also with a descriptor that select cannot wait for."""
    held = []
    if request.param == "high descriptor":
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if hard != resource.RLIM_INFINITY and hard < 1200:
            pytest.skip(f"only {hard} open files are allowed here")
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
        while not held or held[-1] < 1024:
            held.append(os.dup(0))
    wakeup = Wakeup(bytes(16))
    yield wakeup
    wakeup.close()
    for descriptor in held:
        os.close(descriptor)


def test_a_wake_up_ends_the_pause(wakeup):
    other = Wakeup(bytes(16))
    other.wake(wakeup.address)
    other.wake(wakeup.address)
    assert wakeup.wait(30)
    assert not wakeup.wait(0)  # one wait takes both wake-ups
    other.close()


def test_short_pauses_are_not_rounded_up(wakeup, monkeypatch):
    """poll's limit is in whole milliseconds, so a pause of 20 us must go another way."""
    asked = []
    real = select.select
    monkeypatch.setattr(module.select, "select", lambda *args: asked.append(args[3]) or real(*args[:3], 0))
    monkeypatch.setattr(module.time, "sleep", asked.append)
    assert not wakeup.wait(20e-6)
    assert asked == [20e-6]


def test_waking_a_closed_socket_does_nothing(wakeup):
    other = Wakeup(bytes(16))
    address = other.address
    other.close()
    wakeup.wake(address)
    wakeup.wake("")
    assert not wakeup.wait(0)
