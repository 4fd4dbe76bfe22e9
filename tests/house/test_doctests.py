"""Every example in a docstring runs."""

from __future__ import annotations

import ast
import doctest
import importlib
from pathlib import Path
from types import ModuleType

import pytest

from nnlo_common.base import _flat_vector
from tests.helpers.paths import ROOT

# Importing this one loads mpi4py; its examples run in the tests under mpiexec.
NEEDS_MPI = {
    "nnlo_common.cluster.transport._mpi4py",
    "nnlo_common.cluster.transport._mpi",
    "nnlo_common.cluster.transport._mpi_world",
    "nnlo_common.__main__",
    "nnlo_common.commands.bench.__main__",
    "nnlo_common.commands.bench._exchange",
    "nnlo_common.commands.bench._idle",
}
# Adapters for packages that the environment of the tests does not have.
ADAPTERS = ("nnlo_torch.lightning", "nnlo_torch.huggingface")


def modules_of(package):
    """The names of a package and of all modules in it that have examples to run."""
    paths = (path.relative_to(ROOT).with_suffix("") for path in (ROOT / package).rglob("*.py"))
    names = sorted(".".join(path.parts).removesuffix(".__init__") for path in paths)
    return [name for name in names if name not in NEEDS_MPI and not name.startswith(ADAPTERS)]


MODULES = modules_of("nnlo_common")


def test_the_transports_are_among_them():
    assert {"nnlo_common.testing._memory", "nnlo_common.testing._virtual"} <= set(MODULES)


def examples(module):
    """The examples of a module, of what it defines: public classes say another module than theirs."""
    finder, names = doctest.DocTestFinder(exclude_empty=True), vars(module)
    yield from finder.find(ModuleType(module.__name__, module.__doc__), globs=dict(names))
    for node in ast.parse(Path(module.__file__).read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found = finder.find(names[node.name], node.name, module=False, globs=dict(names))
            yield from (one for one in found if "._" not in one.name)  # another's, under a name of ours


def test_examples_of_methods_are_among_them():
    assert {"Layout", "Layout.cut"} <= {one.name for one in examples(_flat_vector)}


@pytest.mark.parametrize(
    "name",
    [
        *MODULES,
        *(pytest.param(name, marks=pytest.mark.framework("torch")) for name in modules_of("nnlo_torch")),
        *(pytest.param(name, marks=pytest.mark.framework("keras")) for name in modules_of("nnlo_keras")),
    ],
)
# Keras 3.15 itself, with NumPy 2: Variable.__array__ takes no copy argument.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*(currentThread|getName).* is deprecated")  # keras-tuner's
@pytest.mark.filterwarnings("ignore:.*google._upb.*:DeprecationWarning")
def test_examples_run(name):
    runner = doctest.DocTestRunner()
    for example in examples(importlib.import_module(name)):
        runner.run(example)
    assert not runner.summarize(verbose=False).failed
