"""`Batches` and `Samples` of every format: resumed in mid-epoch they go on where they were."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")
for package in ("h5py", "pyarrow", "uproot", "zarr"):
    pytest.importorskip(package, reason="the environment for MPICH has no readers of files")

import nnlo_torch as nt  # noqa: E402
from tests.helpers.format_files import FORMATS, make  # noqa: E402

pytestmark = pytest.mark.framework("torch")


@pytest.mark.parametrize("kind", FORMATS)
def test_an_epoch_is_resumed_where_it_was(kind, tmp_path):
    n = np.arange(20)
    columns = {"x": np.stack([n, n * 2], 1).astype("f4"), "n": n}
    files = [make(kind, tmp_path / name, {key: one[some] for key, one in columns.items()})
             for name, some in (("a", slice(0, 7)), ("b", slice(7, 20)))]  # fmt: skip
    options = {"features": "x", "labels": "n", "batch_size": 3, "block": 2, "window": 2}

    def numbers(batches):
        found = []
        for x, labels in batches:
            assert (x[:, 0] == labels).all()
            found.append(labels.tolist())
        return found

    whole = nt.Batches(files, **options)
    epochs = [numbers(whole) for _ in range(2)]
    assert [sorted(number for batch in one for number in batch) for one in epochs] == [list(range(20))] * 2
    begun = nt.Batches(files, **options)
    numbers(begun)
    first = [labels.tolist() for _, (_, labels) in zip(range(3), begun, strict=False)]
    state = begun.state_dict()
    resumed = nt.Batches(files, **options, cache="memory")
    resumed.load_state_dict(state)
    assert first + numbers(resumed) == epochs[1]
    samples = nt.Samples(files, features="x", labels="n")
    loader = torch.utils.data.DataLoader(
        samples, batch_size=4, sampler=nt.ShardSampler(samples, shuffle=True)
    )
    assert sorted(int(one) for _, labels in loader for one in labels) == list(range(20))
    for one in (whole, begun, resumed, samples):
        one.close()
