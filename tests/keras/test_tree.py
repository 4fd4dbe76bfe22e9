"""Elastic tree in Keras: bits of NumPy, validation on the top server, early stopping, static shards."""

from __future__ import annotations

import numpy as np
import pytest

from nnlo_common import ConfigurationError
from nnlo_common.testing import MemoryCluster
from tests.helpers.trees import START, TREE, WORKERS, commits_of, numbers_of

keras = pytest.importorskip("keras", reason="the environment for MPICH has no frameworks")
import nnlo_keras as nk  # noqa: E402

pytestmark = pytest.mark.framework("keras")

EPOCHS, STEPS = 2, 17


class Place(keras.layers.Layer):
    """Its output is its three weights, for every sample."""

    def build(self, shape):
        self.place = self.add_weight(shape=(3,), initializer="zeros", name="place")

    def call(self, x):
        return self.place + 0.0 * x


class Begun(keras.callbacks.Callback):
    """Waits until all ranks have joined, and notes the commits from there."""

    def __init__(self, world, distribute):
        super().__init__()
        self.world, self.distribute_now, self.commits = world, distribute, []

    def on_train_begin(self, logs=None):
        server = self.distribute_now._team.member.server
        self.commits = [] if server is None else commits_of(server)
        self.world.gather_text("all have joined")


def distance(target, found):
    """A loss with the gradient 0.5 (place - target) for a batch of one."""
    return keras.ops.sum(0.25 * (found - target) ** 2, axis=-1)


def train(world, epochs=EPOCHS, callbacks=(), **options):
    model = keras.Sequential([keras.Input((3,)), Place()])
    model.set_weights([START])
    optimizer = nk.EASGD(keras.optimizers.SGD(0.5), **{**TREE, **options})
    model.compile(optimizer=optimizer, loss=distance, jit_compile=False)
    x, y = np.zeros((WORKERS * STEPS, 3), np.float32), np.full((WORKERS * STEPS, 3), world.rank, np.float32)
    x, y = nk.shard(x, y, world=world, sub_servers=2)
    distribute = nk.Distribute(world=world)
    begun = Begun(world, distribute)
    held = np.zeros((4, 3), np.float32)
    history = model.fit(
        x,
        y,
        batch_size=1,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        validation_data=(held, held),
        callbacks=[*callbacks, distribute, begun],
    )
    place = keras.ops.stop_gradient(model.weights[0].value)
    values = place.tolist() if hasattr(place, "tolist") else place.numpy()
    return {
        "own": np.array(values, np.float32),
        "commits": begun.commits,
        "history": history.history,
    }


def test_it_is_the_reference_bit_for_bit():
    with MemoryCluster(8) as cluster:
        ranks = cluster.run(train)
    expected = numbers_of({rank: ranks[rank]["commits"] for rank in (0, 1, 4)}, EPOCHS * STEPS)
    for rank in (0, 1, 4):  # the top's centre on all that serve
        np.testing.assert_array_equal(ranks[rank]["own"], expected.top, err_msg=f"rank {rank}")
    assert len(ranks[0]["history"]["val_loss"]) == EPOCHS
    last = 0.25 * (expected.top.astype(float) ** 2).sum()
    assert ranks[0]["history"]["val_loss"][-1] == pytest.approx(last, rel=1e-5)


def test_early_stopping_on_the_top_server_ends_all():
    stopping = keras.callbacks.EarlyStopping
    with MemoryCluster(5) as cluster:
        ranks = cluster.run(
            lambda world: train(
                world, epochs=50, callbacks=[stopping(baseline=0.0, patience=2)], sub_every=1000
            )
        )
    assert len(ranks[0]["history"]["val_loss"]) < 50


@pytest.mark.parametrize("wrapper", [nk.Downpour, nk.LocalSGD])
def test_other_algorithms_are_refused_with_the_reason(wrapper):
    with pytest.raises(
        ConfigurationError, match=r"sub_servers is for EASGD and EAMSGD only: .* use servers=M"
    ):
        wrapper(keras.optimizers.SGD(0.5), sub_servers=2)
