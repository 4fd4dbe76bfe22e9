"""Which cases of Optuna's own suites are of the extended ring."""

from __future__ import annotations

import re

import pytest

#: Suites whose sampler fits a Gaussian process for each case, for seconds.
PROCESSES = {"TestBayesianWithAProcess", "TestSeededProcess"}


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what `-m` does not select
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave pairs of two different distributions to the extended ring; each is paired with itself always."""
    for item in items:
        suite = getattr(item, "cls", None)
        if suite is None or suite.__name__ not in PROCESSES:
            continue
        pair = re.fullmatch(
            r"test_sample_relative_numerical\[y_distribution(\d)-x_distribution(\d)\]", item.name
        )
        if pair and pair[1] != pair[2]:
            item.add_marker(pytest.mark.extended)
