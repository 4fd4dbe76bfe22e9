"""Code in the README and in the pages of docs/."""

from __future__ import annotations

import re

from tests.helpers.paths import ROOT

__all__ = ["code"]


def code(language: str, page: str = "README.md", section: str | None = None) -> list[str]:
    """The blocks of a page in this language, e.g. of "docs/data.md", or of one section of it."""
    text = (ROOT / page).read_text()
    if section is not None:
        (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
