"""Recorded signals, also with `Interrupts` that are left out of order."""

from __future__ import annotations

import os
import signal
import threading

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


def test_a_signal_gets_its_handler_back_though_another_thread_has_left_last():
    came = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: came.append(number))
    try:
        ours = Interrupts()
        ours.__enter__()
        thread = threading.Thread(target=ours.__exit__, args=(None, None, None))  # as garbage collection may
        thread.start()
        thread.join()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert came == [signal.SIGUSR1]
        assert not ours.came
        with Interrupts() as again:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert again.came
        os.kill(os.getpid(), signal.SIGUSR1)
        assert came == [signal.SIGUSR1] * 2
    finally:
        signal.signal(signal.SIGUSR1, before)
