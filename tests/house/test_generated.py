"""Stubs and tables that `make generated` writes are those of the declarations."""

from __future__ import annotations

import runpy

import pytest

from tests.helpers.paths import ROOT

GENERATED = runpy.run_path(str(ROOT / ".ci" / "generated.py"))


@pytest.mark.slow
@pytest.mark.framework("torch")
@pytest.mark.framework("keras")
def test_nothing_that_is_generated_is_stale() -> None:
    files = GENERATED["generated"]()
    assert {"nnlo_torch/_wrappers.pyi", "nnlo_keras/_wrappers.pyi"} <= files.keys()
    stale = [path for path, text in files.items() if (ROOT / path).read_text() != text]
    assert not stale, "run make generated"


def test_the_tables_of_the_docs_are_not_stale() -> None:
    for page, rows in (("docs/algorithms.md", "rows_of_algorithms"), ("docs/train.md", "rows_of_train")):
        text = GENERATED["with_table"](page, GENERATED[rows]())
        assert (ROOT / page).read_text() == text, f"{page}: run make generated"
