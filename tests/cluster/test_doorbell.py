"""The bell that ends a pause: heard at once, harmless unheard, and fine enough for short pauses."""

from __future__ import annotations

import os
import resource
import select

import pytest

import nnlo_common.cluster.transport._doorbell as module
from nnlo_common.cluster.transport._doorbell import Doorbell


@pytest.fixture(params=["low descriptor", "high descriptor"])
def bell(request):
    """A bell, also with a descriptor that select cannot wait for."""
    held = []
    if request.param == "high descriptor":
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if hard != resource.RLIM_INFINITY and hard < 1200:
            pytest.skip(f"only {hard} open files are allowed here")
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
        while not held or held[-1] < 1024:
            held.append(os.dup(0))
    bell = Doorbell()
    yield bell
    bell.close()
    for descriptor in held:
        os.close(descriptor)


def test_a_ring_ends_the_pause(bell):
    other = Doorbell()
    other.ring(bell.address)
    other.ring(bell.address)
    assert bell.wait(30)
    assert not bell.wait(0)  # both rings were heard
    other.close()


def test_short_pauses_are_not_rounded_up(bell, monkeypatch):
    """poll's limit is in whole milliseconds, so a pause of 20 us must go another way."""
    asked = []
    real = select.select
    monkeypatch.setattr(module.select, "select", lambda *args: asked.append(args[3]) or real(*args[:3], 0))
    monkeypatch.setattr(module.time, "sleep", asked.append)
    assert not bell.wait(20e-6)
    assert asked == [20e-6]


def test_nobody_hears_a_bell_that_is_gone(bell):
    other = Doorbell()
    address = other.address
    other.close()
    bell.ring(address)
    bell.ring("")
    assert not bell.wait(0)
