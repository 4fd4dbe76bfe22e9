"""A Python file with a model: checked, imported and called, with errors that name its lines."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._file_access import read_whole
from nnlo_common.commands.train._job import brief
from nnlo_common.commands.train._option import nearest

__all__ = [
    "adapting",
    "asked",
    "check_no_old_space",
    "check_source",
    "data_in_our_words",
    "frameworks_in",
    "import_file",
    "made_model",
    "parameters_of",
    "running",
    "space_in_our_words",
    "users_line",
]

# -- python files written for NNLO (2019): what they define, in our words; nothing of them is run ------

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


_NAME = "nnlo_train_model"
_FRAMEWORKS = ("keras", "torch")
#: Folders of Python itself, and of nnlo.
_NOT_USERS = [
    *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")),
    *(Path(__file__).parents[3] / name for name in ("nnlo_common", "nnlo_keras", "nnlo_torch")),
]
_LARGEST = 10_000_000  # bytes of a Python file


def check_source(path: Path) -> None:
    """Refuse a file that is not Python or has no get_model, without running it."""
    tree = _parsed(path)
    names, bound = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        elif isinstance(node, ast.alias):
            bound.add(node.asname or node.name)
    if words := data_in_our_words(tree):
        raise ConfigurationError(
            f"--model {path} has a class of samples of NNLO; here write, without an import of nnlo,\n{words}"
        )
    if not {"get_model", "*"} & (names | bound):
        raise ConfigurationError(
            f"--model {path} has no get_model{nearest('get_model', names)}; write a function get_model() "
            "that returns the model"
        )


def check_no_old_space(path: Path) -> None:
    """Refuse the `parameter_range` of NNLO in a file without get_space(), and say what to write."""
    tree = _parsed(path)
    has = any(isinstance(one, ast.FunctionDef) and one.name == "get_space" for one in ast.walk(tree))
    if not has and (words := space_in_our_words(tree)):
        raise ConfigurationError(
            f"--model {path} has the parameter_range of NNLO; here write, without importing skopt,\n{words}"
        )


def frameworks_in(path: Path) -> list[str]:
    """Return the frameworks that a file imports, so that they can be seeded before it runs."""
    found = set()
    for node in ast.walk(_parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return [name for name in _FRAMEWORKS if name in found]


def _parsed(path: Path) -> ast.Module:
    try:
        return ast.parse(read_whole(path, _LARGEST), str(path))
    except OSError as error:
        raise ConfigurationError(
            f"--model {path} cannot be read ({error.strerror}); name a Python file"
        ) from None
    except SyntaxError as error:
        raise ConfigurationError(f"--model {path}, line {error.lineno}: {error.msg}; fix the file") from None
    except (ValueError, RecursionError, MemoryError) as error:  # of zero bytes, and of deep nesting
        raise ConfigurationError(f"--model {path} is not Python ({error}); name a Python file") from None


def import_file(path: Path) -> ModuleType:
    """Import a Python file, with its own folder on the path as for a script."""
    if sys.path[:1] != [str(path.parent)]:  # a search imports the file many times
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(_NAME, path)
    assert spec is not None  # the file ends in .py
    assert spec.loader is not None
    module = sys.modules[_NAME] = importlib.util.module_from_spec(spec)
    with running(path, "while it was imported"):
        spec.loader.exec_module(module)
    return module


def made_model(module: ModuleType, path: Path, params: Mapping[str, Any]) -> Any:
    """Call get_model with the parameters and return the model."""
    make = getattr(module, "get_model", None)
    if not callable(make):
        raise ConfigurationError(
            f"--model {path}: get_model is {make!r}, which cannot be called; write a function get_model() "
            "that returns the model"
        )
    _check_params(make, path, params)
    with running(path, "by get_model()"):
        return make(**params)


def asked(module: ModuleType | None, path: Path, name: str) -> Any:
    """Call another function of the file and return its result; None if the file has no such function."""
    function: Callable[[], Any] | None = getattr(module, name, None)
    if function is None:
        return None
    with running(path, f"by {name}()"):
        return function()


def parameters_of(function: Callable[..., Any] | None) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function, by name; none if there is no function, or it is written in C."""
    try:
        return {} if function is None else inspect.signature(function).parameters
    except ValueError:
        return {}


def _check_params(make: Callable[..., Any], path: Path, params: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(make)
    except ValueError:  # a function written in C has no signature
        return
    try:
        signature.bind(**params)
    except TypeError as error:
        names = list(signature.parameters)
        unknown = [name for name in params if name not in names]
        meant = nearest(unknown[0], names) if unknown else ""
        raise ConfigurationError(
            f"--model {path}: get_model{signature} does not take --model-params "
            f"{' '.join(f'{name}={value}' for name, value in params.items()) or '(none)'}: {error}{meant}"
        ) from None


@contextmanager
def running(path: Path, when: str) -> Iterator[None]:
    """Run code of a user's file with an empty stdin; its errors name the file and line."""
    standard_input = sys.stdin
    with open(os.devnull) as nothing:  # noqa: PTH123 - as a stream
        sys.stdin = nothing
        try:
            yield
        except (Exception, SystemExit) as error:
            raise ConfigurationError(_error_text(path, when, error)) from None
        finally:
            sys.stdin = standard_input


def users_line(error: BaseException) -> str:
    """Return file, line and source of the user's own code that an error comes from; empty: there is none.

    Code of the user is what neither Python, nor installed packages, nor nnlo have.
    """
    frames = [one for one in traceback.extract_tb(error.__traceback__) if _is_users(one.filename)]
    if not frames:
        return ""
    last = frames[-1]
    return f"{last.filename}, line {last.lineno}, in {last.name}: {last.line}"


@contextmanager
def adapting() -> Iterator[None]:
    """Name the line of the user's own function in an error about what it makes of the samples."""
    try:
        yield
    except ConfigurationError as error:
        where = "" if error.__cause__ is None else users_line(error.__cause__)
        if not where:
            raise
        raise ConfigurationError(f"{where}\n{error}") from None


def _is_users(file: str) -> bool:
    path = Path(file)
    installed = {"site-packages", "dist-packages"} & {*path.parts}
    return path.is_file() and not installed and not any(map(path.is_relative_to, _NOT_USERS))


def _error_text(path: Path, when: str, error: BaseException) -> str:
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)
    ]
    where = f"--model {path}" + (f", line {lines[-1]}" if lines else "")
    if isinstance(error, SystemExit):
        return (
            f"{where}: sys.exit({error.code!r}) was called {when}; return instead, or raise an error that "
            "says why"
        )
    if isinstance(error, EOFError):
        return f"{where}: it reads from the terminal {when}, which no rank has; pass --model-params instead"
    kind = type(error).__name__
    return f"{where}: {kind} was raised {when}: {brief(str(error)) or 'no message'}\nFix the file there"
