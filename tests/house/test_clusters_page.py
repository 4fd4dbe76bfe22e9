"""The scripts in docs/clusters.md are read by a shell; those for Slurm are run in `tests/slurm`."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.helpers.pages import code
from tests.helpers.paths import DOCS

PAGE = (DOCS / "clusters.md").read_text()
SCRIPTS = code("bash", "docs/clusters.md")


@pytest.mark.parametrize("script", SCRIPTS, ids=range(len(SCRIPTS)))
def test_a_shell_can_read_it(script):
    read = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert (read.returncode, read.stderr) == (0, "")


def test_every_script_of_slurm_is_in_the_table_of_what_was_run():
    names = re.findall(r"#SBATCH --job-name=(\w+)", PAGE)
    table = re.findall(r"^\| (.*?) \| Slurm \|", PAGE, re.MULTILINE)
    assert sorted(names) == sorted(re.findall(r"`(\w+)`", " ".join(table)))
