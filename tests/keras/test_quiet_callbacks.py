"""Which callbacks can look at the weights of a worker between batches."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras", reason="the environment for MPICH has no frameworks")

import nnlo_keras as nk  # noqa: E402
from nnlo_keras._callback_lists import undisturbed  # noqa: E402

pytestmark = pytest.mark.framework("keras")


class AtBatches(keras.callbacks.Callback):
    """Looks at weights between batches."""

    def on_train_batch_end(self, batch, logs=None):
        """Look."""


class AtEpochs(keras.callbacks.Callback):
    """Looks at weights between epochs."""

    def on_epoch_end(self, epoch, logs=None):
        """Look."""


@pytest.mark.parametrize(
    ("before", "behind", "expected"),
    [
        ([], [], True),
        ([keras.callbacks.History()], [keras.callbacks.TerminateOnNaN()], True),
        ([nk.WarmUp(1)], [nk.Report("unused")], True),
        ([], [AtEpochs()], True),
        ([AtEpochs()], [], False),
        ([], [AtBatches()], False),
        ([AtBatches()], [], False),
        ([], [keras.callbacks.LambdaCallback(on_train_batch_end=print)], False),
        ([], [keras.callbacks.LambdaCallback(on_epoch_end=print)], True),
    ],
)
def test_nobody_elses_callback_sees_memory_that_changes(before, behind, expected):
    ours = nk.Distribute()
    assert undisturbed([*before, ours, *behind], ours) is expected
