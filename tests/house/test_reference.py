"""Reference pages of the site: every public name has an entry, and an example that runs."""

from __future__ import annotations

import ast
import doctest
import importlib
import re

import pytest

from tests.helpers.paths import DOCS, ROOT

PAGES = {
    "nnlo_common": "common",
    "nnlo_common.testing": "testing",
    "nnlo_keras": "keras",
    "nnlo_keras.tune": "keras",
    "nnlo_torch": "torch",
    "nnlo_torch.huggingface": "torch",
    "nnlo_torch.lightning": "torch",
}
FRAMEWORKS = {"nnlo_keras": "keras", "nnlo_torch": "torch"}


def public_names(module):
    """`__all__`, read without an import, since other packages may be missing."""
    path = ROOT.joinpath(*module.split("."), "__init__.py")
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    raise AssertionError(f"{module} has no __all__")


def entries(module):
    """The names of a module that its page lists."""
    text = (DOCS / "reference" / f"{PAGES[module]}.md").read_text()
    names = (name.rpartition(".") for name in re.findall(r"^::: (\S+)$", text, re.MULTILINE))
    return [name for of, _, name in names if of == module]


@pytest.mark.parametrize("module", PAGES)
def test_each_public_name_has_an_entry(module):
    assert sorted(entries(module)) == sorted(public_names(module))


def without_example(module):
    """The public names without an example of their own; errors have their place in the tree of errors."""
    for name in public_names(module.__name__):
        thing = getattr(module, name)
        text = (vars(thing).get("__doc__") if isinstance(thing, type) else thing.__doc__) or ""
        is_error = isinstance(thing, type) and issubclass(thing, Exception)
        if not is_error and not doctest.DocTestParser().get_examples(text):
            yield name


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.framework(FRAMEWORKS[top]) if top in FRAMEWORKS else ())
        for name in PAGES
        if (top := name.partition(".")[0]) and not name.endswith(("lightning", "huggingface"))
    ],
)
def test_each_public_name_has_an_example(name):
    assert not list(without_example(importlib.import_module(name)))
