"""Fashion-MNIST of the examples: the same on every machine, whatever is installed there."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys

import numpy as np
import pytest
from fashion_data import FILES, load

from tests.helpers.paths import EXAMPLES


@pytest.fixture
def full_set(tmp_path):
    """A full set of one image, where Keras would keep it."""
    folder = tmp_path / ".keras" / "datasets" / "fashion-mnist"
    folder.mkdir(parents=True)
    for key, name in FILES.items():
        shape = (1, 28, 28) if key.startswith("x") else (1,)
        head = bytes([0, 0, 8, len(shape)]) + np.array(shape, ">i4").tobytes()
        (folder / name).write_bytes(gzip.compress(head + bytes(int(np.prod(shape)))))
    return folder


@pytest.mark.slow
def test_an_installed_full_set_is_not_looked_for(tmp_path, full_set):
    line = [sys.executable, "-c", "import fashion_data; print(fashion_data.load().source)"]
    home = os.environ | {"HOME": str(tmp_path)}
    done = subprocess.run(line, cwd=EXAMPLES, env=home, capture_output=True, text=True, check=True)
    assert done.stdout == "fashion_mnist_2500.npz (embedded subset)\n"


def test_the_full_set_is_read_from_the_folder_that_is_named(full_set):
    data = load(str(full_set))
    assert (data.x_train.shape, data.y_test.shape, data.source) == ((1, 784), (1,), str(full_set))


def test_a_folder_without_a_file_is_refused_by_the_name_of_the_file(full_set):
    (full_set / FILES["y_test"]).unlink()
    with pytest.raises(SystemExit, match=r"--data .*: there is no t10k-labels-idx1-ubyte.gz in it; name the"):
        load(str(full_set))
