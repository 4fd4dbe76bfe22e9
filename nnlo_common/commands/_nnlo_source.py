"""Python files written for NNLO (2019): what they define, in our words; nothing of them is run."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from typing import Any

__all__ = ["data_in_our_words", "space_in_our_words"]

_RANGES = ("Real", "Integer", "Categorical")
_DATA = ("Data", "H5Data", "FrameData")


def space_in_our_words(tree: ast.Module) -> str:
    """Return a get_space() for the `parameter_range` of a file; empty if there is none.

    Example:
        >>> text = "parameter_range = [Real(1e-4, 0.1, 'log-uniform', name='rate'), Integer(8, 64, name='n')]"
        >>> print(space_in_our_words(ast.parse(text)))
        def get_space():
            return {"rate": (0.0001, 0.1, "log"), "n": (8, 64)}
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and any(_named(one) == "parameter_range" for one in node.targets):
            calls = [one for one in ast.walk(node.value) if isinstance(one, ast.Call)]
            found = ", ".join(_range(one) for one in calls if _named(one.func) in _RANGES)
            return f"def get_space():\n    return {{{found}}}"
    return ""


def data_in_our_words(tree: ast.Module) -> str:
    r"""Return functions in place of a class of samples of NNLO; empty if there is none.

    Example:
        >>> text = "from nnlo.train.data import H5Data\nclass Jets(H5Data):\n    features_name = 'jets'"
        >>> print(data_in_our_words(ast.parse(text)))
        def get_features():
            return "jets", lambda x: x  # a dataset of the files, and what is made of its arrays
        def get_labels():
            return "labels"
    """
    imports = any(name.partition(".")[0] == "nnlo" for name in _imported(tree))
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    if not imports or not any(_named(base) in _DATA for one in classes for base in one.bases):
        return ""
    features = json.dumps(_text_of(tree, "features_name") or "features")
    labels = json.dumps(_text_of(tree, "labels_name") or "labels")
    return (
        f"def get_features():\n    return {features}, lambda x: x  "
        "# a dataset of the files, and what is made of its arrays\n"
        f"def get_labels():\n    return {labels}"
    )


def _range(call: ast.Call) -> str:
    kind = _named(call.func)
    places = ("categories",) if kind == "Categorical" else ("low", "high", "prior")
    told: dict[str, Any] = dict(zip(places, map(_literal, call.args), strict=False))
    told |= {one.arg: _literal(one.value) for one in call.keywords if one.arg}
    name = json.dumps(told.get("name") or "NAME")
    if kind == "Categorical":
        choices = told.get("categories")
        return f"{name}: {json.dumps([*choices]) if isinstance(choices, list | tuple) else '[...]'}"
    ends = [one for one in (told.get("low"), told.get("high")) if isinstance(one, int | float)]
    if len(ends) < 2:
        return f"{name}: (LOW, HIGH)"
    low, high = (float(one) if kind == "Real" else one for one in ends)
    log = ', "log"' if told.get("prior") == "log-uniform" else ""
    return f"{name}: ({low}, {high}{log})"


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def _text_of(tree: ast.Module, name: str) -> str:
    """Return the text that a name or an argument of that name has anywhere in the file."""
    for node in ast.walk(tree):
        argument = isinstance(node, ast.keyword) and node.arg == name
        if argument or (isinstance(node, ast.Assign) and any(_named(one) == name for one in node.targets)):
            value = _literal(node.value)  # type: ignore[attr-defined]
            if isinstance(value, str):
                return value
    return ""


def _named(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _literal(node: ast.expr) -> object:
    try:
        found: object = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return found
