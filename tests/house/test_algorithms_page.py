"""The table of options in docs/algorithms.md says what the code has, for each front end."""

from __future__ import annotations

import inspect
import re
import typing
from dataclasses import MISSING, fields

import pytest

from nnlo_common import algorithms
from nnlo_common.algorithms import Algorithm, _mixins
from nnlo_common.commands.train._algorithm_options import LEFT_OUT, MODES
from tests.helpers.paths import DOCS

PAGE = DOCS / "algorithms.md"
COLUMNS = ("core", "torch", "Keras", "nnlo train")
CLASSES = [
    one
    for name in algorithms.__all__
    if issubclass(one := getattr(algorithms, name), Algorithm) and not inspect.isabstract(one)
]
#: What a wrapper calls otherwise than the algorithm, or has besides.
CALLED = {("Downpour", "local_learning_rate"): "local"}
OWN = {"Downpour": {"every"}}
#: What is None in a wrapper, which then takes another option's value or the optimizer's.
FOLLOWS = {("Downpour", "n_push"), ("Downpour", "n_fetch"), ("AGN", "local_learning_rate")}


def rows():
    """The table: for each algorithm and option, what each column says."""
    found = {}
    algorithm = ""
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 6 and cells[1].startswith("`"):
            algorithm = cells[0].strip("`") or algorithm
            found[algorithm, cells[1].strip("`")] = dict(zip(COLUMNS, cells[2:], strict=True))
    return found


def options_of(one):
    """The names of an algorithm's options, of the core and of the wrappers."""
    return {field.name for field in fields(one)} | OWN.get(one.__name__, set())


def taken(wrapper):
    """What a wrapper takes besides an optimizer and what all wrappers take."""
    common = {"optimizer", "options", "servers", "name"}
    # Of the class itself, Python up to 3.11.4 gives the signature of Keras' __new__.
    return set(inspect.signature(wrapper.__init__).parameters) - common - {"self"}


def says(algorithm, option, column, names):
    """Fail unless the column says "yes" exactly where the name is there; else it gives a reason."""
    cell = rows()[algorithm, option][column]
    called = CALLED.get((algorithm, option), option)
    place = f"docs/algorithms.md: {algorithm}, {option}, column {column}"
    if called in names:
        expected = "yes" if called == option else f"`{called}`"
        assert cell == expected, f"{place}: it is there"
    else:
        assert len(cell) > 4, f"{place}: say why it is not there"


def test_every_option_of_every_algorithm_has_a_row_and_no_other():
    expected = {(one.__name__, option) for one in CLASSES for option in options_of(one)}
    assert rows().keys() == expected, "docs/algorithms.md: one row for each option of each algorithm"


@pytest.mark.parametrize("one", CLASSES, ids=lambda one: one.__name__)
def test_the_core_has_what_the_table_says(one):
    for option in options_of(one):
        cell = rows()[one.__name__, option]["core"]
        if option in {field.name for field in fields(one)}:
            assert cell == "yes", (one.__name__, option)
        else:
            assert len(cell) > 4, (one.__name__, option)


@pytest.mark.framework("torch")
@pytest.mark.parametrize("one", CLASSES, ids=lambda one: one.__name__)
def test_the_wrappers_of_pytorch_have_what_the_table_says(one):
    import nnlo_torch

    names = taken(getattr(nnlo_torch, one.__name__))
    for option in options_of(one):
        says(one.__name__, option, "torch", names)
    assert names <= {CALLED.get((one.__name__, option), option) for option in options_of(one)}


@pytest.mark.framework("keras")
@pytest.mark.slow
@pytest.mark.parametrize("one", CLASSES, ids=lambda one: one.__name__)
def test_the_wrappers_of_keras_have_what_the_table_says(one):
    import nnlo_keras

    names = taken(getattr(nnlo_keras, one.__name__))
    for option in options_of(one):
        says(one.__name__, option, "Keras", names)
    assert names <= {CALLED.get((one.__name__, option), option) for option in options_of(one)}


@pytest.mark.parametrize("one", CLASSES, ids=lambda one: one.__name__)
def test_the_command_has_what_the_table_says(one):
    mode = MODES[one.__name__.lower()]
    for option in options_of(one):
        says(one.__name__, option, "nnlo train", mode.options)
    left_out = LEFT_OUT.get(one.__name__.lower(), {})
    assert left_out.keys() == {
        option for option in options_of(one) if CALLED.get((one.__name__, option), option) not in mode.options
    }
    for option, reason in left_out.items():
        assert rows()[one.__name__, option]["nnlo train"] == reason


def test_each_algorithm_is_told_of():
    text = PAGE.read_text()
    for one in CLASSES:
        assert re.search(rf"`{one.__name__}`", text), one


@pytest.mark.parametrize("one", CLASSES, ids=lambda one: one.__name__)
def test_the_constructors_of_wrappers_have_the_types_and_defaults_of_the_algorithm(one):
    make = getattr(_mixins, f"{one.__name__}Mixin").__init__
    taken, types = inspect.signature(make).parameters, typing.get_type_hints(make)
    own_types = typing.get_type_hints(one)
    compared = [option for option in fields(one) if option.name in taken]
    assert compared
    for option in compared:
        expected = (own_types[option.name], None if option.default is MISSING else option.default)
        if (one.__name__, option.name) in FOLLOWS:
            expected = (own_types[option.name] | None, None)
        assert (types[option.name], taken[option.name].default) == expected, option.name


@pytest.mark.parametrize("one", CLASSES, ids=lambda one: one.__name__)
def test_the_constructors_of_wrappers_explain_each_option_in_their_order(one):
    make = getattr(_mixins, f"{one.__name__}Mixin").__init__
    explained = re.findall(r"^ {12}(\w+): ", make.__doc__, re.MULTILINE)
    assert explained == list(inspect.signature(make).parameters)[1:]
