"""Options of the algorithms: the wrappers and `nnlo train` have what is declared, and the docs tell it."""

from __future__ import annotations

import inspect
import re
import typing
from dataclasses import fields

import pytest

from nnlo_common.algorithms._found import ALGORITHMS
from nnlo_common.base._options import declared
from nnlo_common.commands.train._settings import MODES
from nnlo_common.training._rank_options import rank_options_for
from tests.helpers.paths import DOCS

each_algorithm = pytest.mark.parametrize("one", ALGORITHMS.values(), ids=lambda one: one.__name__)
#: Options that all wrappers of a framework take, and one that only that framework has.
SHARED = {
    "torch": {*rank_options_for("nnlo_torch"), "world", "model"},
    "keras": {*rank_options_for("nnlo_keras"), "name"},
}
frameworks = [
    pytest.param("torch", marks=pytest.mark.framework("torch")),
    pytest.param("keras", marks=[pytest.mark.framework("keras"), pytest.mark.slow]),
]


def constructor(framework, one):
    package = pytest.importorskip(f"nnlo_{framework}")
    # Of the class itself, Python up to 3.11.4 gives the signature of Keras' __new__.
    return getattr(package, one.__name__).__init__


@pytest.mark.parametrize("framework", frameworks)
@each_algorithm
def test_a_wrapper_has_the_declared_options_and_those_of_all_wrappers(framework, one):
    taken = inspect.signature(constructor(framework, one)).parameters
    known = one.wrapper_options()
    assert taken.keys() == {"self", "optimizer", *known, *SHARED[framework]}
    for name, option in known.items():
        assert taken[name].default == option.wrapper_default
        allowed = typing.get_args(taken[name].annotation) or (taken[name].annotation,)
        assert option.type in allowed or set(typing.get_args(option.type)) <= set(allowed), name


@pytest.mark.parametrize("framework", frameworks)
@each_algorithm
def test_a_constructor_explains_each_option_in_its_order(framework, one):
    make = constructor(framework, one)
    explained = re.findall(r"^ {4}(\w+): ", make.__doc__, re.MULTILINE)
    assert explained == list(inspect.signature(make).parameters)[1:]


@each_algorithm
def test_the_command_has_the_declared_options(one):
    assert MODES[one.__name__.lower()].options.keys() == one.wrapper_options().keys()


@each_algorithm
def test_each_option_is_declared_whole(one):
    for field in fields(one):
        option = declared(one)[field.name]
        assert option.help, f"{one.__name__}.{field.name}: declare it by option(), with its help"
        assert option.expected, f"{one.__name__}.{field.name}: which values may it have?"
        assert option.fixed is None or option.absent


@each_algorithm
def test_each_algorithm_is_told_of(one):
    assert re.search(rf"`{one.__name__}`", (DOCS / "algorithms.md").read_text())
