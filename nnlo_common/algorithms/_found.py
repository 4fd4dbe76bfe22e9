"""Registry of algorithms: each class of `Algorithm` in a module of this folder, found when it is imported.

So a new algorithm is one new file. The stub beside this module, which `make generated` writes, has the same
names for editors, type checkers and the site.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator, Mapping
from typing import Final

from nnlo_common.algorithms._rule import Algorithm


def _algorithms() -> Iterator[type[Algorithm]]:
    folder = sys.modules[__name__.rpartition(".")[0]]
    for found in pkgutil.iter_modules(folder.__path__):
        module = importlib.import_module(f"{folder.__name__}.{found.name}")
        for one in [*vars(module).values()]:
            here = isinstance(one, type) and one.__module__ == module.__name__
            if here and issubclass(one, Algorithm) and not inspect.isabstract(one):
                yield one


#: The algorithms by name in small letters, as `nnlo train --mode` has them.
ALGORITHMS: Final[Mapping[str, type[Algorithm]]] = {
    one.__name__.lower(): one for one in sorted(_algorithms(), key=lambda one: one.__name__.lower())
}
#: The modules that they are written in; later they say the public one.
HOMES: Final[Mapping[str, str]] = {one.__name__: one.__module__ for one in ALGORITHMS.values()}
__all__ = [one.__name__ for one in ALGORITHMS.values()]
globals().update({one.__name__: one for one in ALGORITHMS.values()})
