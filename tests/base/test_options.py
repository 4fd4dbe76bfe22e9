"""Options that are declared: what they may be, for each kind of type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest

from nnlo_common.base._options import declared, option


@dataclass(frozen=True)
class Options:
    """One option of each kind."""

    whole: int = option(1, "a number", least=1)
    part: float | None = option(None, "a share", least=0, below=1)
    yes: bool = option(False, "a choice")
    kind: Literal["a", "b"] = option("a", "a name")
    text: str = option("", "any text")


CASES = {
    "whole": ([1, 7], [0, 1.5, "1", None, True], "a whole number of at least 1"),
    "part": ([0, 0.5, None], [1, -0.1, "0.5"], "at least 0 and below 1"),
    "yes": ([True, False], [1, "yes", None], "True or False"),
    "kind": (["a", "b"], ["c", 1, None], "'a' or 'b'"),
    "text": (["", "anything"], [5, None, ["a"]], "a text"),
}


@pytest.mark.parametrize("name", CASES)
def test_an_option_holds_what_its_type_says(name):
    one = declared(Options)[name]
    right, wrong, said = CASES[name]
    assert all(one.holds(value) for value in right)
    assert [value for value in wrong if one.holds(value)] == []
    assert said in one.expected
