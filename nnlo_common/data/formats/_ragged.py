"""Rows of unequal length, brought to one length."""

from __future__ import annotations

import numpy as np

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.data._source import Array
from nnlo_common.data.formats._format import Ragged

__all__ = ["fill_padded"]


def fill_padded(rows: Ragged, pad: int, out: Array) -> None:
    """Fill an array with the first `pad` entries of each row, and zeros after them.

    Example:
        >>> out = np.empty((3, 2))
        >>> fill_padded(Ragged(np.arange(4.0), np.array([1, 0, 3])), 2, out)
        >>> out.tolist()
        [[0.0, 0.0], [0.0, 0.0], [1.0, 2.0]]
    """
    content, counts = rows
    if len(counts) != len(out) or (counts < 0).any() or counts.sum() != len(content):
        raise ConfigurationError(
            f"the counts of {len(counts)} rows, {int(counts.sum())} entries in all, do not fit {len(out)} "
            f"rows of {len(content)} entries"
        )
    place = np.arange(pad)
    there = place < counts[:, None]
    first = np.cumsum(counts) - counts
    out[...] = 0
    out[there] = content[(first[:, None] + place)[there]]
