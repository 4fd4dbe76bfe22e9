"""Options of algorithms in lines for people."""

from __future__ import annotations

import pytest

from nnlo_common import EASGD, DiLoCo, Downpour, DynSGD, Synchronous
from nnlo_common.training._plan import readable


@pytest.mark.parametrize(
    ("algorithm", "line"),
    [
        (Downpour(), "Downpour()"),
        (Downpour(schedule="aligned"), "Downpour()"),
        (Downpour(n_push=4, n_fetch=4, schedule="aligned"), "Downpour(every=4)"),
        (Downpour(n_push=4, n_fetch=4), "Downpour(n_push=4, n_fetch=4)"),
        (Downpour(n_push=4, lag=1, schedule="aligned"), "Downpour(lag=1, n_push=4, schedule='aligned')"),
        (EASGD(every=3), "EASGD(every=3)"),
        (DynSGD(), "DynSGD()"),
        (Synchronous(), "Synchronous()"),
        (DiLoCo(every=7), "DiLoCo(every=7)"),
    ],
)
def test_a_line_has_what_was_given(algorithm, line):
    assert readable(algorithm.describe()) == line
    assert readable(repr(algorithm)) == line


@pytest.mark.parametrize(
    "line",
    ["", "none", "SGD(lr=0.1)", "Downpour(x)", "Downpour(other=1)", "Error(a=1)", "a (b)"],
)
def test_what_is_no_algorithm_stays(line):
    assert readable(line) == line
