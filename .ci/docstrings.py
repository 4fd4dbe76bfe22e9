"""Extension of griffe, which reads docstrings for the site: examples are code, and equations are MathML."""

from __future__ import annotations

import re
from typing import Any

import griffe
from latex2mathml.converter import convert


class ReadableDocstrings(griffe.Extension):
    """Rewrites docstrings as they are loaded, so that browsers show them without any script."""

    def on_instance(self, *, obj: griffe.Object | griffe.Alias, **_others: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring is not None:
            # griffe takes only the plural for a section of code.
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r":math:`([^`]+)`", self._mathml, text)

    def _mathml(self, found: re.Match[str]) -> str:
        # The span keeps an equation at the start of a line within its paragraph.
        return f"<span>{convert(' '.join(found[1].split()))}</span>"
