"""Extension of griffe, which reads docstrings for the site: examples are code, and equations are MathML."""

from __future__ import annotations

import re
from typing import Any

import griffe
from latex2mathml.converter import convert

#: Where packages get the names that only a stub knows, since they are found at import.
FOUND = {"nnlo_common": "algorithms._found", "nnlo_keras": "_wrappers", "nnlo_torch": "_wrappers"}


class ReadableDocstrings(griffe.Extension):
    """Rewrites docstrings as they are loaded, so that browsers show them without any script."""

    def on_package(self, *, pkg: griffe.Module, **_others: Any) -> None:
        """Let a package have what it takes by a star from a module of names that are found at import."""
        found = pkg[FOUND[pkg.name]] if pkg.name in FOUND else None
        for name in () if found is None else map(str, found.exports or ()):
            if name not in pkg.members:
                pkg.set_member(name, griffe.Alias(name, target=f"{found.path}.{name}"))

    def on_instance(self, *, obj: griffe.Object | griffe.Alias, **_others: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring is not None:
            # griffe takes only the plural for a section of code.
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r":math:`([^`]+)`", self._mathml, text)

    def _mathml(self, found: re.Match[str]) -> str:
        # The span keeps an equation at the start of a line within its paragraph.
        return f"<span>{convert(' '.join(found[1].split()))}</span>"
