"""Notebooks of docs/: each runs as one script of its cells and prints what it shows."""

from __future__ import annotations

import json
import runpy

import pytest

from tests.helpers.paths import DOCS, ROOT
from tests.house.test_pages import broken

NOTEBOOKS = sorted(path.relative_to(ROOT).as_posix() for path in DOCS.rglob("*.ipynb"))
RUNNER = runpy.run_path(str(ROOT / "pictures" / "notebook.py"))


def printed(cell):
    return "".join("".join(output.get("text", "")) for output in cell["outputs"])


def drawn(cell):
    return [output["data"]["image/svg+xml"] for output in cell["outputs"] if "data" in output]


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_prints_what_it_shows(name):
    pytest.importorskip("plotly", reason="the environment for MPICH has no plotly")
    notebook = json.loads((ROOT / name).read_text())
    for cell, text, value in RUNNER["run"](notebook):
        assert text == printed(cell)
        assert hasattr(value, "to_image") == bool(drawn(cell))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_committed_with_its_outputs(name):
    cells = [cell for cell in json.loads((ROOT / name).read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert all(picture.startswith("<svg") for cell in cells for picture in drawn(cell))
    assert sum(len(picture) for cell in cells for picture in drawn(cell)) < 200_000


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_links_of_a_notebook_have_an_end(name):
    cells = json.loads((ROOT / name).read_text())["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    assert not list(broken(name, text))


def test_a_cell_gives_what_it_prints_and_its_last_value():
    cells = [{"cell_type": "markdown"}, {"cell_type": "code", "source": ["x = 2\n", "print(x)\n", "x + 1"]}]
    assert [(text, value) for _, text, value in RUNNER["run"]({"cells": cells})] == [("2\n", 3)]
