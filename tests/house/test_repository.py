"""The rules of the repository: who may import what, how files look, which versions must agree."""

from __future__ import annotations

import ast
import functools
import gc
import hashlib
import importlib
import inspect
import os
import re
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

import nnlo_common
from tests.helpers.paths import ROOT
from tests.helpers.private_names import foreign_private

PACKAGES = ("nnlo_common", "nnlo_keras", "nnlo_torch")
FRAMEWORKS = {"jax", "keras", "tensorflow", "torch"}
MPI_MODULE = "nnlo_common/cluster/transport/_mpi4py.py"
PICKLE_MODULE = "nnlo_common/commands/train/_pickled.py"  # reads what a user has asked for by --allow-pickle

# The rooms of the core, lowest first: each imports only those before it.
ROOMS = (
    *("base", "algorithms", "data", "protocol", "simulation", "cluster", "inference", "training", "search"),
    "commands",
)
# Names of both front ends: wrappers, called like the algorithms, and what users see beside them.
# `Trainer` is Hugging Face's name for the part of its scripts that the adapter replaces.
FRONT_ENDS = {
    *nnlo_common.algorithms.__all__,
    *("Batches", "Checkpoint", "LARC", "LARS", "Progress", "Report", "Trainer", "Wrapper"),
}
SEAM = ("nnlo_common", "nnlo_common.plugin")  # what framework packages know of the core
RIDDLE = re.compile(r"(What|Who|Whose|Whom|Whether|How|Where|When|Which)\b")

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

Problems = Iterator[tuple[int, str]]
Rule = Callable[[str, ast.Module], Problems]


def parse(*folders: str) -> dict[str, ast.Module]:
    return {name: tree for folder in folders for name, tree in parsed(folder).items()}


@functools.cache
def parsed(folder: str) -> dict[str, ast.Module]:
    """The modules of a folder, which each rule looks at and none changes."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    gc.disable()  # of millions of nodes none is garbage: looking for it takes four fifths of the time
    try:
        return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in paths}
    finally:
        gc.freeze()
        gc.enable()


def problems(rule: Rule, trees: dict[str, ast.Module]) -> list[str]:
    """Every breach of a rule, written so that an editor can jump to it."""
    return [f"{name}:{line}: {text}" for name, tree in trees.items() for line, text in rule(name, tree)]


def check(rule: Rule, *folders: str) -> None:
    if found := problems(rule, parse(*folders)):
        pytest.fail("\n".join(found), pytrace=False)


def imported(tree: ast.Module) -> Problems:
    """The top-level packages that a module imports anywhere in it, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.lineno, node.module.split(".")[0]


def packages_below(name: str) -> list[str]:
    """The dotted names of a package and of the packages inside it."""
    inits = sorted((ROOT / name).rglob("__init__.py"))
    return [".".join(path.parent.relative_to(ROOT).parts) for path in inits]


# Who may import what.


def forbidden_import(name: str, tree: ast.Module) -> Problems:
    package = name.split("/", maxsplit=1)[0]
    forbidden = {
        "nnlo_common": FRAMEWORKS | {"nnlo_keras", "nnlo_torch"},
        "nnlo_keras": {"nnlo_torch"},
        "nnlo_torch": {"nnlo_keras", "keras", "tensorflow", "jax"},
    }[package]
    if name != MPI_MODULE:
        forbidden = forbidden | {"mpi4py"}
    for line, module in imported(tree):
        if module in forbidden:
            yield line, f"imports {module}"


def test_each_package_imports_only_what_it_may_know() -> None:
    check(forbidden_import, *PACKAGES)


def imported_modules(tree: ast.Module) -> Problems:
    """The dotted names that a module imports of ours, each as far as it may be a module, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def room_of(dotted: str) -> str | None:
    """The room that a module of the core lies in."""
    parts = dotted.split(".")
    return parts[1] if parts[0] == "nnlo_common" and len(parts) > 1 and parts[1] in ROOMS else None


def upward_import(name: str, tree: ast.Module) -> Problems:
    own = room_of(dotted_name(name))
    for line, module in imported_modules(tree):
        other = room_of(module)
        if own is not None and other is not None and ROOMS.index(other) > ROOMS.index(own):
            yield line, f"{own} imports {module}"


def beside_the_seam(name: str, tree: ast.Module) -> Problems:
    if not name.startswith("nnlo_common/"):
        for line, module in imported_modules(tree):
            through = room_of(module) is None and {module, module.rpartition(".")[0]} & set(SEAM)
            if module.startswith("nnlo_common") and not through:
                yield line, f"imports {module}, not through nnlo_common.plugin"


def riddle(name: str, tree: ast.Module) -> Problems:
    if RIDDLE.match(ast.get_docstring(tree) or ""):
        yield 1, "the module docstring asks a question; begin it with a noun or a verb"


def changed_search_path(name: str, tree: ast.Module) -> Problems:
    """Tests find each other by `tests.`; nothing else is put before what is installed."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"sys.path.insert", "sys.path.append"}:
            yield node.lineno, "changes sys.path; import it as tests.ROOM.MODULE"


def dotted_name(name: str) -> str:
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def circles(trees: dict[str, ast.Module]) -> list[list[str]]:
    """Modules that import each other, however many are between them and wherever the import stands."""
    modules = {dotted_name(name): tree for name, tree in trees.items()}
    arrows = {
        own: {
            target
            for _, module in imported_modules(tree)
            for target in [module if module in modules else module.rpartition(".")[0]]
            if target in modules and target != own
        }
        for own, tree in modules.items()
    }

    def reached(start: str) -> set[str]:
        found, waiting = set(), [start]
        while waiting:
            for target in arrows[waiting.pop()] - found:
                found.add(target)
                waiting.append(target)
        return found

    reach = {module: reached(module) for module in modules}
    groups = {
        tuple(sorted(other for other in reach[module] if module in reach[other]))
        for module in modules
        if module in reach[module]
    }
    return [list(group) for group in sorted(groups)]


def test_a_room_imports_only_rooms_below_it() -> None:
    check(upward_import, "nnlo_common")


def test_framework_packages_know_the_core_by_its_seam_only() -> None:
    check(beside_the_seam, "nnlo_keras", "nnlo_torch")


def test_module_docstrings_say_what_is_there() -> None:
    check(riddle, *PACKAGES)


def test_tests_change_no_search_path() -> None:
    check(changed_search_path, "tests")


def test_what_a_shell_or_a_launcher_says_changes_no_test() -> None:
    disturbing = ("PYTHONUNBUFFERED", "PYTHONWARNINGS", "NNLO_MPI", "PMIX_RANK", "SLURM_PROCID")
    said = dict.fromkeys((*disturbing, "NNLO_TEST_STARTS"), "always")
    look = f"import os, tests.conftest; print(*[name for name in {list(said)} if name in os.environ])"
    command, env = [sys.executable, "-c", look], os.environ | said
    left = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=True)
    assert left.stdout.split() == ["NNLO_TEST_STARTS"]


def test_no_modules_import_each_other() -> None:
    assert circles(parse(*PACKAGES)) == []


def test_a_circle_is_seen() -> None:
    planted = {
        "nnlo_common/base/_a.py": "from nnlo_common.base._b import x",
        "nnlo_common/base/_b.py": "def f():\n    from nnlo_common.base import _c",
        "nnlo_common/base/_c.py": "from nnlo_common.base._a import y",
        "nnlo_common/base/_d.py": "from nnlo_common.base._a import y",
    }
    trees = {name: ast.parse(text) for name, text in planted.items()}
    assert circles(trees) == [["nnlo_common.base._a", "nnlo_common.base._b", "nnlo_common.base._c"]]


def listed_modules(text: str) -> list[str]:
    """The modules that a package's docstring lists, each before what it holds."""
    return re.findall(r"(?:^|\s{2,})(_[a-z]\w*)(?=\s{2,}\S)", text, re.MULTILINE)


def test_a_package_lists_modules_that_are_there() -> None:
    assert listed_modules("_a  one\n    _b_c   two    _d  three, as _e does") == ["_a", "_b_c", "_d"]
    gone = {
        (path.parent.name, name)
        for package in PACKAGES
        for path in (ROOT / package).rglob("__init__.py")
        for name in listed_modules(ast.get_docstring(ast.parse(path.read_text())) or "")
        if not (path.parent / f"{name}.py").exists() and not (path.parent / name).is_dir()
    }
    assert not gone


def test_each_room_says_what_it_holds() -> None:
    for room in ROOMS:
        doc = importlib.import_module(f"nnlo_common.{room}").__doc__ or ""
        assert "May import:" in doc, room
        assert "Must not know:" in doc, room


@pytest.mark.slow
def test_importing_the_core_and_its_command_needs_numpy_and_nothing_else() -> None:
    code = f"""
import sys, sysconfig, numpy, numpy.random
sysconfig.get_config_vars()  # whose module is not among those of the standard library
before = set(sys.modules)
import {", ".join(packages_below("nnlo_common"))}, nnlo_common.commands._cli
after = {{name.split(".")[0] for name in set(sys.modules) - before}}
print(*sorted(after - set(sys.stdlib_module_names) - {{"numpy", "nnlo_common"}}))
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == []


# What code may not do.


def unsafe(name: str, tree: ast.Module) -> Problems:
    calls = ("pickle.load", "pickle.loads", "pickle.Unpickler", "os.system", "eval", "exec")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in calls and name != PICKLE_MODULE:
            yield node.lineno, ast.unparse(node.func)
        elif isinstance(node, ast.keyword) and node.arg in {"shell", "allow_pickle"}:
            if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                yield node.lineno, f"{node.arg}={ast.unparse(node.value)}"
        elif isinstance(node, ast.ExceptHandler) and node.type is None:
            yield node.lineno, "bare except"


def asks_for_rank_zero(name: str, tree: ast.Module) -> Problems:
    """Whether a script treats rank 0 as special: `if rank == 0`, `if not comm.rank` and their kin."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [ast.unparse(side) for side in (node.left, *node.comparators)]
            special = "0" in sides and any(is_rank(side) for side in sides)
        elif isinstance(node, ast.UnaryOp):
            special = is_rank(ast.unparse(node.operand))
        else:
            continue
        if special:
            yield node.lineno, ast.unparse(node)


def is_rank(expression: str) -> bool:
    return re.fullmatch(r"(.*[._])?rank(\(\))?", expression, re.IGNORECASE) is not None


def test_the_packages_do_nothing_unsafe() -> None:
    check(unsafe, *PACKAGES)


def test_private_parts_of_others_are_touched_in_compat_modules_only() -> None:
    check(foreign_private, *PACKAGES)


def test_examples_run_unchanged_on_every_rank() -> None:
    check(asks_for_rank_zero, "examples", "benchmarks")


@pytest.mark.parametrize(
    ("rule", "line", "breach"),
    [
        (forbidden_import, "import torch.nn", True),
        (forbidden_import, "def f():\n    from mpi4py import MPI", True),
        (forbidden_import, "from .torch import x", False),
        (unsafe, "import pickle; pickle.loads(b'')", True),
        (unsafe, "numpy.load(path, allow_pickle=True)", True),
        (unsafe, "numpy.load(path, allow_pickle=False)", False),
        (unsafe, "subprocess.run('ls', shell=True)", True),
        (unsafe, "try:\n    f()\nexcept:\n    raise", True),
        (unsafe, "model.load(path)", False),
        (asks_for_rank_zero, "if rank == 0: f()", True),
        (asks_for_rank_zero, "if 0 != comm.Get_rank(): f()", True),
        (asks_for_rank_zero, "if not MPI.COMM_WORLD.rank: f()", True),
        (asks_for_rank_zero, "print(rank, count == 0, not done)", False),
        (upward_import, "from nnlo_common.cluster._hosts import Place", True),
        (upward_import, "def f():\n    from nnlo_common import training", True),
        (upward_import, "from nnlo_common.algorithms import EASGD", False),
        (foreign_private, "import keras.src.backend", True),
        (foreign_private, "def f():\n    from keras.src import backend", True),
        (foreign_private, "from optuna._gp.prior import X", True),
        (foreign_private, "from torch.nn.modules.batchnorm import _BatchNorm", True),
        (foreign_private, "import keras\nkeras.src.backend.x()", True),
        (foreign_private, "torch._foreach_add_(a, b)", True),
        (foreign_private, "def f(trainer):\n    return trainer._hidden", True),
        (foreign_private, "class A:\n    def f(self):\n        self.model._hidden = 1", True),
        (foreign_private, "class A:\n    def f(self):\n        return self._optimizer._hidden", True),
        (foreign_private, "class A(keras.Layer):\n    def f(self):\n        return self._hidden", True),
        (foreign_private, "class A(L):\n    def _f(self):\n        return super()._f()", True),
        (foreign_private, "class A:\n    _x = 1\nclass B(A):\n    def f(self):\n        self._x", False),
        (foreign_private, "class A:\n    def f(self, other):\n        self._x = other._x", False),
        (foreign_private, "class A:\n    __slots__ = ('_x',)\n    def f(self):\n        self._x", False),
        (foreign_private, "class A(M, L):\n    _x = 1\nclass M:\n    def f(self):\n        self._x", False),
        (foreign_private, "class A(L):\n    def f(self):\n        self._x = 1\ndef g(l):\n    l._y", True),
        (foreign_private, "getattr(trainer, '_hidden', None)", True),
        (foreign_private, "setattr(trainer, '_hidden', 1)", True),
        (foreign_private, "vars(trainer)['_hidden']", True),
        (foreign_private, "hasattr(trainer, '__array__'), name.endswith('_loss'), f'_{name}_step'", False),
        (foreign_private, "os._exit(1), keras.__version__, _", False),
        (changed_search_path, "import sys\nsys.path.insert(0, '.')", True),
        (riddle, '"""Whether there is time."""', True),
        (riddle, '"""Time that is left."""', False),
    ],
)
def test_a_breach_is_seen(rule: Rule, line: str, breach: bool) -> None:
    assert bool(problems(rule, {"nnlo_common/protocol/_x.py": ast.parse(line)})) is breach


@pytest.mark.parametrize(
    ("line", "breach"),
    [
        ("from nnlo_common.training._session import Session", True),
        ("import nnlo_common.protocol", True),
        ("from nnlo_common import training", True),
        ("from nnlo_common.algorithms import Algorithm", True),
        ("from nnlo_common.plugin import Session", False),
        ("from nnlo_common import EASGD", False),
    ],
)
def test_a_way_around_the_seam_is_seen(line: str, breach: bool) -> None:
    assert bool(problems(beside_the_seam, {"nnlo_torch/_x.py": ast.parse(line)})) is breach


# How files look.


def test_modules_are_one_subject_each() -> None:
    lengths = {
        path.relative_to(ROOT): len(path.read_text().splitlines())
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py"
    }
    assert not {path: length for path, length in lengths.items() if length > 800}
    assert statistics.median(lengths.values()) < 300  # a subject each, not a hundred lines each


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_says_that_it_is_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()


def shared_names(trees: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Classes of one name in several modules; the front ends may call the same thing alike."""
    homes: dict[str, list[str]] = {}
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name.lstrip("_"), []).append(name)
    return {
        name: where
        for name, where in homes.items()
        if len(where) > 1
        and not (name in FRONT_ENDS and len({one.partition("/")[0] for one in where}) == len(where))
    }


def test_no_two_classes_have_one_name() -> None:
    assert not shared_names(parse(*PACKAGES))


def test_a_shared_name_is_seen() -> None:
    one, other = ast.parse("class Page: ..."), ast.parse("def f():\n    class _Page: ...")
    planted = {"nnlo_common/base/_a.py": one, "nnlo_common/base/_b.py": other}
    assert shared_names(planted) == {"Page": list(planted)}
    assert not shared_names(
        {"nnlo_keras/_a.py": ast.parse("class GEM: ..."), "nnlo_torch/_a.py": ast.parse("class GEM: ...")}
    )


# Public names.


def is_explained(name: str, thing: object) -> bool:
    if not (isinstance(thing, ModuleType) or inspect.isclass(thing) or inspect.isroutine(thing)):
        return True  # a constant has no docstring of its own
    doc = thing.__doc__ or ""
    return bool(doc.strip()) and not doc.startswith(f"{name}(")  # a dataclass writes this by itself


def check_public_names(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__doc__
    names = list(getattr(module, "__all__", ()))
    assert names in (sorted(set(names)), sorted(set(names), key=str.casefold)), "__all__ is not sorted"
    assert not [name for name in names if not hasattr(module, name)], "in __all__, but not there"
    assert not [name for name in names if not is_explained(name, getattr(module, name))], "no docstring"


@pytest.mark.parametrize("package", packages_below("nnlo_common"))
def test_public_names_of_the_core_exist_and_are_explained(package: str) -> None:
    check_public_names(package)


@pytest.mark.slow
@pytest.mark.parametrize(
    "package",
    [
        pytest.param("nnlo_keras", marks=pytest.mark.framework("keras")),
        pytest.param("nnlo_torch", marks=pytest.mark.framework("torch")),
    ],
)
def test_public_names_of_the_plug_ins_exist_and_are_explained(package: str) -> None:
    check_public_names(package)


# Versions and other facts that are written down twice.


def test_the_changelog_knows_the_version() -> None:
    headings: list[str] = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    releases = [heading for heading in headings if heading != "Unreleased"]
    base, dev, _ = nnlo_common.__version__.partition(".dev")
    if dev:
        assert headings[0] == "Unreleased"
        assert base not in releases, "a version that is out cannot be in the making"
    else:
        assert releases[0] == base


def pins(requirements: list[str]) -> dict[str, str]:
    return dict(requirement.split("==") for requirement in requirements if "==" in requirement)


def test_the_hooks_have_the_pins_of_the_check_extra() -> None:
    check = pins(PYPROJECT["project"]["optional-dependencies"]["check"])
    hooks = re.findall(r'"([\w-]+)==([\w.]+)"', (ROOT / ".pre-commit-config.yaml").read_text())
    assert {"ruff", "codespell"} <= {tool for tool, _ in hooks}
    for tool, version in hooks:
        assert check.get(tool, version) == version, tool


def test_what_is_packed_is_there() -> None:
    targets = PYPROJECT["tool"]["hatch"]["build"]["targets"]
    patterns = [*targets["sdist"]["include"], *targets["wheel"]["packages"]]
    assert not [pattern for pattern in patterns if not list(ROOT.glob(pattern.removeprefix("/")))]


def test_make_help_names_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE) == phony.split()


def test_the_vendored_data_are_those_the_notice_speaks_of() -> None:
    data = ROOT / "examples" / "data"
    (expected,) = re.findall(r"sha256 (\w+)", (data / "LICENSE.fashion-mnist").read_text())
    assert hashlib.sha256((data / "fashion_mnist_2500.npz").read_bytes()).hexdigest() == expected
