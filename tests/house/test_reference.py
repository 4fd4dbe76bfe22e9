"""Reference pages of the site: every public name has an entry, and an example that runs."""

from __future__ import annotations

import ast
import copy
import doctest
import importlib
import pickle
import re
import subprocess
import sys
import typing

import pytest

import nnlo_common
from nnlo_common import testing
from tests.helpers.paths import DOCS, ROOT

PAGES = {
    "nnlo_common": "common",
    "nnlo_common.simulation": "simulation",
    "nnlo_common.testing": "testing",
    "nnlo_keras": "keras",
    "nnlo_keras.tune": "keras",
    "nnlo_torch": "torch",
    "nnlo_torch.huggingface": "torch",
    "nnlo_torch.lightning": "torch",
}
FRAMEWORKS = {"nnlo_keras": "keras", "nnlo_torch": "torch"}


def public_names(module):
    """`__all__`, read without an import, since other packages may be missing; stubs know the rest."""
    path = ROOT.joinpath(*module.split("."), "__init__.py")
    names = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names += ast.literal_eval(node.value)
        if isinstance(node, ast.AugAssign):  # __all__ += _found.__all__
            stub = re.search(rf"from (\S+){node.value.value.id} import \*|$", path.read_text())[1]
            stub = f"{stub}{node.value.value.id}".replace(".", "/")
            names += re.findall(r'^    "(\w+)",$', (ROOT / f"{stub}.pyi").read_text(), re.MULTILINE)
    assert names, f"{module} has no __all__"
    return names


def entries(module):
    """The names of a module that its page lists."""
    text = (DOCS / "reference" / f"{PAGES[module]}.md").read_text()
    names = (name.rpartition(".") for name in re.findall(r"^::: (\S+)$", text, re.MULTILINE))
    return [name for of, _, name in names if of == module]


each_module_at_hand = pytest.mark.parametrize(
    "module",
    [
        pytest.param(name, marks=pytest.mark.framework(FRAMEWORKS[top]) if top in FRAMEWORKS else ())
        for name in PAGES
        if (top := name.partition(".")[0]) and not name.endswith(("lightning", "huggingface"))
    ],
)


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
@each_module_at_hand
def test_each_public_name_has_an_example(module):
    assert not list(without_example(importlib.import_module(module)))


def as_imported(thing):
    """The module that a public thing says, and what one gets if one imports it from there."""
    return getattr(importlib.import_module(thing.__module__), thing.__name__, None)


@each_module_at_hand
def test_each_public_name_says_its_public_module(module):
    things = [getattr(importlib.import_module(module), name) for name in public_names(module)]
    assert not [one for one in things if one.__module__ not in PAGES or as_imported(one) is not one]
    assert all(pickle.loads(pickle.dumps(one)) is one and copy.copy(one) is one for one in things)


@pytest.mark.parametrize("kind", [nnlo_common.EASGD, nnlo_common.FlatVector, testing.VirtualCluster])
def test_types_of_a_public_class_are_known_where_it_says_that_it_is(kind):
    assert not [one for one in typing.get_type_hints(kind).values() if isinstance(one, str)]


@pytest.mark.framework("keras")
def test_a_star_takes_the_tuner_where_its_packages_are():
    starred = {}
    exec("from nnlo_keras import *", starred)
    assert starred["MPITuner"].__module__ == "nnlo_keras"


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "keras"])
def test_without_its_framework_a_package_names_the_pip_line(framework):
    code = f"import sys; sys.modules['{framework}'] = None; import nnlo_{framework}"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == (
        f"nnlo_common.MissingExtraError: nnlo_{framework} needs the package '{framework}', which is not "
        f"installed. Install it with: pip install 'nnlo[{framework}]'"
    )
