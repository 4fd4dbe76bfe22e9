"""An algorithm is one file: one that is planted in a copy of nnlo trains everywhere, with its options."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.helpers.paths import ROOT

pytestmark = [pytest.mark.framework("torch"), pytest.mark.framework("keras"), pytest.mark.slow]

ALGORITHM = '''
"""Planted by a test: Downpour whose centre scales each gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nnlo_common.algorithms._downpour import DownpourCenter, DownpourWorker
from nnlo_common.base._options import option
from nnlo_common.algorithms._rule import Algorithm, Contribution


class TillerCenter(DownpourCenter):
    """c <- Optimizer(c, zeal a)."""

    def __init__(self, center, optimizer, zeal):
        super().__init__(center, optimizer)
        self.zeal = np.float32(zeal)

    def apply(self, contributions: Sequence[Contribution]) -> None:
        """Scale, then step."""
        for contribution in contributions:
            contribution.vector *= self.zeal
        super().apply(contributions)

    def apply_by_parts(self, contribution):
        """Return None: it needs the whole vector."""
        return None


@dataclass(frozen=True, kw_only=True)
class Tiller(Algorithm):
    """Tiller: a planted algorithm.

    Attributes:
        every: steps between exchanges.
        zeal: factor of each gradient.
    """

    every: int = option(1, "steps of a worker between exchanges", least=1)
    zeal: float = option(1.0, "planted factor of each gradient", least=0, below=2)

    def worker(self, size, workers):
        """Make the worker's half."""
        return DownpourWorker(size, n_push=self.every, n_fetch=self.every, first_push=self.every - 1)

    def center(self, center, workers, optimizer):
        """Make the centre's half."""
        return TillerCenter(center, self._needs_optimizer(optimizer), self.zeal)
'''
DECLARED = "    scales_by_staleness: ClassVar[bool] = True\n"
OPTION = '    sown: bool = option(True, "planted option of an algorithm that is there", absent="")\n'


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What a copy of nnlo does that has one more algorithm, and one more option of another."""
    copy, folder = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("folder")
    for name in ("nnlo_common", "nnlo_torch", "nnlo_keras", ".ci"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "docs").mkdir()
    for page in ("algorithms.md", "train.md"):
        shutil.copy(ROOT / "docs" / page, copy / "docs")
    (copy / "nnlo_common/algorithms/_tiller.py").write_text(ALGORITHM)
    other = copy / "nnlo_common/algorithms/_dynsgd.py"
    assert DECLARED in other.read_text()
    other.write_text(other.read_text().replace(DECLARED, DECLARED + OPTION))
    program = ROOT / "tests" / "programs" / "planted_algorithm.py"
    command = [sys.executable, str(program), str(folder / "seen.json")]
    env = os.environ | {"PYTHONPATH": str(copy), "KERAS_BACKEND": "torch"}
    done = subprocess.run(command, cwd=folder, env=env, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / "seen.json").read_text())
    assert found["at"] == str(copy)
    return found


def test_it_is_public_where_the_others_are(seen):
    modules = ["nnlo_common", "nnlo_common", "nnlo_torch", "nnlo_keras"]
    assert seen["public"] == [[True, module] for module in modules]


def test_it_trains_virtually_in_both_frameworks_and_by_the_command(seen):
    assert seen["virtual"] == [0.25]  # 1 (1 - 0.5) (1 - 0.5)
    assert seen["torch"] == seen["keras"] == [True, True]
    assert seen["same"]


def test_its_options_are_told_and_checked(seen):
    assert "Tiller: zeal=3 is not possible: it must be at least 0 and below 2" in seen["refused"]
    assert "Tiller: zeal=3.0 is not possible: it must be at least 0 and below 2" in seen["command"]
    words = " ".join(seen["help"].split())
    assert "--zeal" in words
    assert "tiller (1.0): planted factor of each gradient" in words
    for signature in seen["signatures"][::2]:
        assert "every: int = 1, zeal: float = 1.0, lag: int = 0" in signature
        assert "servers: int = 1" in signature
    assert seen["docs"][0].startswith("Tiller: a planted algorithm.")
    assert "zeal: planted factor of each gradient." in seen["docs"][1]
    assert seen["saved"] == 0.25
    assert seen["examples"] == [[4, 0], [3, 0]]


def test_what_is_generated_has_it(seen):
    row = "|  | `zeal` | `1.0` | at least 0 and below 2 | planted factor of each gradient | yes |"
    assert row in seen["generated"]["docs/algorithms.md"]
    assert "| `--zeal` |  | tiller (1.0): planted" in seen["generated"]["docs/train.md"]
    assert "_tiller import Tiller as Tiller" in seen["generated"]["nnlo_common/algorithms/_found.pyi"]
    for framework in ("torch", "keras"):
        stub = seen["generated"][f"nnlo_{framework}/_wrappers.pyi"]
        assert "class Tiller(Wrapper):" in stub
        assert "zeal: float = 1.0" in stub


def test_another_option_of_an_algorithm_is_one_line_of_its_file(seen):
    for signature in seen["signatures"][1::2]:
        assert "sown: bool = True" in signature
    assert "--sown" in seen["help"]
    row = "|  | `sown` | `True` | `True` or `False` | planted option of an algorithm that is there | yes |"
    told = seen["generated"]["docs/algorithms.md"]
    assert row in told or row.replace("|  |", "| `DynSGD` |") in told
    assert all(
        "sown: bool = True" in seen["generated"][f"nnlo_{one}/_wrappers.pyi"] for one in ("torch", "keras")
    )
