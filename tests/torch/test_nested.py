"""Rows of unequal length as nested tensors: the entries of the files, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")
pa = pytest.importorskip("pyarrow", reason="the environment for MPICH has no readers of files")
import pyarrow.parquet as pq  # noqa: E402

import nnlo_torch as nt  # noqa: E402
from nnlo_common import ConfigurationError  # noqa: E402

pytestmark = pytest.mark.framework("torch")


def test_batches_of_a_file_have_the_entries_of_each_row(tmp_path):
    draw = np.random.default_rng(0)
    rows = [draw.random(length).astype("f4") for length in draw.integers(0, 6, 23)]
    pq.write_table(pa.table({"hits": rows, "n": np.arange(23)}), tmp_path / "a.parquet")
    batches = nt.Batches(
        str(tmp_path / "a.parquet"), features="hits", labels="n", pad=6, mask=True, batch_size=5, shuffle=True
    )
    seen = 0
    for (hits, mask), numbers in batches:
        found = nt.nested(hits, mask)
        assert found.layout is torch.jagged
        for row, number in zip(found.unbind(), numbers.tolist(), strict=True):
            np.testing.assert_array_equal(row.numpy(), rows[number])
            seen += 1
    assert seen == 23
    batches.close()


def test_a_network_computes_the_same_with_and_without_filling():
    torch.manual_seed(0)
    lengths = torch.tensor([2, 5, 1])
    mask = torch.arange(5) < lengths[:, None]
    rows = torch.randn(3, 5, 4) * mask[..., None]
    layer = torch.nn.Linear(4, 3)
    nested = layer(nt.nested(rows, mask))
    padded = layer(rows) * mask[..., None]
    for row, filled, length in zip(nested.unbind(), padded, lengths, strict=True):
        torch.testing.assert_close(row, filled[:length])
    (by_nested,) = torch.autograd.grad(nested.values().square().sum(), layer.weight)
    (by_padded,) = torch.autograd.grad(padded.square().sum(), layer.weight)
    torch.testing.assert_close(by_nested, by_padded)


@pytest.mark.parametrize(
    "mask", [torch.ones(3, 4, dtype=torch.bool), torch.ones(3, 5), torch.ones(3, dtype=torch.bool)]
)
def test_a_mask_of_other_rows_is_refused(mask):
    with pytest.raises(ConfigurationError, match=r"the rows have the shape \[3, 5, 2\], and the mask"):
        nt.nested(torch.ones(3, 5, 2), mask)
