"""Arrays of batches that nobody uses any more are filled again; those in use never are."""

import numpy as np
import pytest

from nnlo_common.data import Arrays, Batches
from nnlo_common.data._spare_arrays import SpareArrays

FLOAT = np.dtype("f4")


@pytest.mark.parametrize("hold", [lambda x: x, lambda x: x[1:], lambda x: x.T.ravel()[:1], memoryview])
def test_an_array_that_anything_holds_is_not_filled_again(hold):
    spare = SpareArrays(most=3)
    held = [hold(spare.get((3,), FLOAT)) for _ in range(5)]
    places = {np.asarray(one).__array_interface__["data"][0] for one in held}
    assert len(places) == 5


def test_a_tensor_holds_its_array():
    torch = pytest.importorskip("torch")
    spare = SpareArrays(most=2)
    held = [torch.from_numpy(spare.get((3,), FLOAT))[1:] for _ in range(4)]
    assert len({one.data_ptr() for one in held}) == 4


def test_an_array_that_nobody_holds_is_filled_again():
    spare = SpareArrays(most=3)
    places = {spare.get((3,), FLOAT).__array_interface__["data"][0] for _ in range(10)}
    assert len(places) == 1
    one, two = spare.get((3,), FLOAT), spare.get((3,), FLOAT)
    place = one.__array_interface__["data"][0]
    del one  # the oldest, while the latest is in use
    assert spare.get((3,), FLOAT).__array_interface__["data"][0] == place
    assert two.shape == (3,)


def test_another_shape_has_an_array_of_its_own():
    spare = SpareArrays(most=3)
    spare.get((3,), FLOAT)
    assert spare.get((2,), FLOAT).shape == (2,)
    assert spare.get((3,), FLOAT).shape == (3,)


def test_a_longer_array_takes_the_place_of_shorter_ones():
    spare = SpareArrays(most=3)
    spare.get((1, 2), FLOAT)
    places = {spare.get((9, 2), FLOAT).__array_interface__["data"][0] for _ in range(5)}
    assert len(places) == 1


def test_batches_that_are_held_keep_their_numbers():
    rows = np.arange(1000 * 7, dtype=np.float32).reshape(1000, 7)
    batches = Batches(Arrays(rows, rows[:, 0].copy()), batch_size=6, shuffle=True, block=5, window=4)
    for epoch in range(3):
        held = [(x[2:], y, x[2:].copy(), y.copy()) for x, y in batches.epoch(epoch)]
        held = held[::2]  # the others are filled again
        list(batches.epoch(epoch + 1))
        for x, y, first_x, first_y in held:
            np.testing.assert_array_equal(x, first_x)
            np.testing.assert_array_equal(y, first_y)
    batches.close()
