"""Code in the README and in the pages of docs/."""

from __future__ import annotations

import re

from tests.helpers.paths import ROOT

__all__ = ["code"]


def code(language: str, page: str = "README.md") -> list[str]:
    """The blocks of a page in this language, e.g. of "docs/data.md"."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
