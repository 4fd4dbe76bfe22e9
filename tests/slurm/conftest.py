"""One Slurm for all tests of a file; a test that breaks a node starts one of its own."""

from __future__ import annotations

import pytest

from tests.helpers.slurm import slurm


@pytest.fixture(scope="module")
def batch(tmp_path_factory):
    with slurm(tmp_path_factory.mktemp("slurm")) as started:
        yield started
