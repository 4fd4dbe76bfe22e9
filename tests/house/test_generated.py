"""Stubs and tables that `make generated` writes are those of the declarations."""

from __future__ import annotations

import runpy

import pytest

from nnlo_common.algorithms._found import ALGORITHMS
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


def test_the_table_of_algorithms_has_every_option_of_each() -> None:
    shown: dict[str, set[tuple[str, ...]]] = {}
    for name, *row in GENERATED["rows_of_algorithms"]():
        told = shown.setdefault(name or next(reversed(shown)), set())
        told.add(tuple(row))
    common = shown.pop("all, unless said below")
    assert {row[0] for row in common} == {"`lag`", "`wire`", "`topk_momentum`", "`topk_nesterov`"}
    own = {name: rows for name, rows in shown.items() if ":" not in name}
    for name, rows in shown.items():
        own_name, _, parent = name.partition(": as ")
        algorithm = ALGORITHMS[own_name.strip("`").lower()]
        inherited = own[parent.removesuffix(", but")] if parent else set()
        for row in GENERATED["own_rows"](algorithm):
            known = [one for one in rows if one[0] == row[0]] or [
                one for one in inherited | common if one[0] == row[0]
            ]
            assert known == [row], f"{own_name}: {row[0]}"
    assert len(shown) == len(ALGORITHMS)
