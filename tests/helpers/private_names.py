"""The rule that private parts of other projects are touched in modules called `_compat.py` only.

A name with one leading underscore is ours where we define it. What an object is cannot be told from the text,
so a name counts as that of the object if

* it is read of `self`, `cls` or `super()`, and the class or one of its family defines it: the classes of ours
  above and below it, and those above these, for the sake of mixins;
* it is read of something else, and this module defines it, or a class or module of ours that it imports does.

Strings count as names, for `getattr` and its kin. A module called `src` is private, too.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.helpers.paths import ROOT

PACKAGES = ("nnlo_common", "nnlo_keras", "nnlo_torch")
PRIVATE = re.compile(r"_(?!_)\w*[a-zA-Z]\w*(?<!__)")
DOCUMENTED = {"os._exit"}  # a function for everybody, whatever its name

Problems = Iterator[tuple[int, str]]


def is_private(name: str) -> bool:
    return PRIVATE.fullmatch(name) is not None


@dataclass
class Class:
    """A class of ours: the names that it defines, and what it derives from."""

    names: set[str] = field(default_factory=set)
    bases: set[str] = field(default_factory=set)


@dataclass
class Module:
    """A module of ours: the names that it defines, its classes, and what it imports of ours."""

    names: set[str] = field(default_factory=set)
    classes: dict[str, Class] = field(default_factory=dict)
    imports: set[tuple[str, str]] = field(default_factory=set)  # modules, and names in them


def _targets(node: ast.AST) -> Iterator[str]:
    """The names that a statement defines where it stands."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id


def _class(tree: ast.ClassDef) -> Class:
    found = Class(bases={ast.unparse(base).split("[")[0].rpartition(".")[2] for base in tree.bases})
    for node in ast.walk(tree):
        found.names |= set(_targets(node))
        own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if own and node.value.id in ("self", "cls") and isinstance(node.ctx, ast.Store):
            found.names.add(node.attr)
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
            found.names |= {one.value for one in ast.walk(node) if isinstance(one, ast.Constant)}
    return found


def module_of(tree: ast.Module) -> Module:
    found = Module()
    for node in ast.walk(tree):
        found.names |= set(_targets(node))
        if isinstance(node, ast.ClassDef):
            found.classes[node.name] = _class(node)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
            found.imports |= {(node.module, alias.name) for alias in node.names}
            found.names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.alias) and node.asname:
            found.names.add(node.asname)
    return found


@functools.cache
def _ours() -> dict[str, Module]:
    paths = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): module_of(
            ast.parse(path.read_text())
        )
        for path in paths
    }


class _Families:
    """Classes by their names, with those above and below them; asked for the same again and again."""

    def __init__(self, classes: dict[str, list[Class]]) -> None:
        self.classes = classes
        self.above = functools.cache(self._above)
        self.of_class = functools.cache(self._of_class)

    def of(self, names: set[str]) -> set[str]:
        """The names that these classes define."""
        return {member for name in names for one in self.classes.get(name, ()) for member in one.names}

    def _above(self, name: str) -> set[str]:
        """A class and those that it derives from."""
        found, waiting = set(), [name]
        while waiting:
            one = waiting.pop()
            if one not in found:
                found.add(one)
                waiting += [base for each in self.classes.get(one, ()) for base in each.bases]
        return found

    def _of_class(self, name: str, others: bool) -> set[str]:
        """The names of a class's family; with `others` those of its family without it."""
        below = {one for one in self.classes if name in self.above(one)}
        family = {name} | {above for one in below for above in self.above(one)}
        return self.of(family - {name} if others else family)


@functools.cache
def _families_of_ours() -> _Families:
    classes: dict[str, list[Class]] = {}
    for one in _ours().values():
        for name, found in one.classes.items():
            classes.setdefault(name, []).append(found)
    return _Families(classes)


class _Names:
    """Which names are ours, seen from one module."""

    def __init__(self, module: Module) -> None:
        families = _families_of_ours()
        new = {name: one for name, one in module.classes.items() if one not in families.classes.get(name, ())}
        if new:  # a module that is not in a file
            known = families.classes
            families = _Families(known | {name: [*known.get(name, ()), one] for name, one in new.items()})
        self.of_class = families.of_class
        self.everywhere = set(module.names)
        for name in module.classes:
            self.everywhere |= families.of(families.above(name))
        for imported, name in module.imports:
            there = _ours().get(f"{imported}.{name}") or _ours().get(imported)
            if name in families.classes:
                self.everywhere |= families.of(families.above(name))
            elif there is not None and f"{imported}.{name}" in _ours():
                self.everywhere |= there.names


def foreign_private(name: str, tree: ast.Module) -> Problems:
    """Private parts of another project outside of `_compat.py`."""
    if name.endswith("/_compat.py"):
        return
    yield from _imports(tree)
    names = _Names(module_of(tree))
    yield from _touches(tree, names, None)


def _imports(tree: ast.Module) -> Problems:
    for node in ast.walk(tree):
        dotted = []
        if isinstance(node, ast.Import):
            dotted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            dotted = [f"{node.module}.{alias.name}" for alias in node.names]
        for one in dotted:
            parts = one.split(".")
            if parts[0] not in PACKAGES and any(is_private(part) or part == "src" for part in parts):
                yield node.lineno, f"imports {one}, which is private; put it into _compat.py"


def _touches(node: ast.AST, names: _Names, within: str | None) -> Problems:
    if isinstance(node, ast.ClassDef):
        within = node.name
    touched = None
    if isinstance(node, ast.Attribute):
        if node.attr == "src" and isinstance(node.value, ast.Name):
            touched = ast.unparse(node)
        elif is_private(node.attr) and (path := ast.unparse(node)) not in DOCUMENTED:
            known, of = names.everywhere, ast.unparse(node.value)
            if within is not None and of in ("self", "cls", "super()"):
                known = names.of_class(within, of == "super()")
            touched = path if node.attr not in known else None
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and is_private(node.value):
        touched = repr(node.value) if node.value not in names.everywhere else None
    if touched is not None:
        yield node.lineno, f"{touched} is private, and not ours; put it into _compat.py"
    part = isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("endswith", "removesuffix")
    )
    for child in ast.iter_child_nodes(node):
        if not (part and isinstance(child, ast.Constant)):
            yield from _touches(child, names, within)
