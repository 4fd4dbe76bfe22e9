"""Recorded signals, also with `Interrupts` that are left out of order."""

from __future__ import annotations

import os
import signal

from nnlo_common.base._signals import Interrupts


def test_who_ends_late_takes_nothing_from_who_has_begun_since():
    before = signal.getsignal(signal.SIGUSR1)
    failed, now = Interrupts(), Interrupts()
    failed.__enter__()
    now.__enter__()
    failed.__exit__(None, None, None)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert now.came
    assert not failed.came
    now.__exit__(None, None, None)
    now.__exit__(None, None, None)
    assert signal.getsignal(signal.SIGUSR1) is before
