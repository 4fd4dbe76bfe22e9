"""Every example in a docstring runs."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import nnlo_common

# Importing this one loads mpi4py; its examples run in the tests under mpiexec.
NEEDS_MPI = {
    "nnlo_common.cluster.transport._mpi4py",
    "nnlo_common.cluster.transport._mpi",
    "nnlo_common.cluster.transport._mpi_world",
    "nnlo_common.__main__",
    "nnlo_common.commands.bench.__main__",
    "nnlo_common.commands.bench._exchange",
    "nnlo_common.commands.bench._idle",
}
MODULES = sorted(
    info.name
    for info in pkgutil.walk_packages(nnlo_common.__path__, "nnlo_common.")
    if info.name not in NEEDS_MPI
)


def test_the_transports_are_among_them():
    assert {"nnlo_common.testing._memory", "nnlo_common.testing._virtual"} <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
