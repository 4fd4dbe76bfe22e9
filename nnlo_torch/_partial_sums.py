"""Sums over a worker's part divided by the size of the whole data set: a warning, from the loop's source."""

from __future__ import annotations

import ast
import inspect
import sysconfig
import textwrap
import weakref
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import torch

from nnlo_common.plugin import warn

__all__ = ["warn_of_partial_sums"]

_OURS = {"nnlo_common", "nnlo_torch", "torch"}
_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("purelib", "platlib", "stdlib"))
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_MISSING = object()


#: The functions that were looked at, for each sampler.
_known: weakref.WeakKeyDictionary[Any, set[CodeType]] = weakref.WeakKeyDictionary()


def warn_of_partial_sums(sampler: object) -> None:
    """Warn if a function that loops over a sampler's loader divides by the length of the loader's data set.

    It reads the sources of the functions on the call stack, each once, and runs no code of theirs.

    Args:
        sampler: the sampler, which begins an epoch.
    """
    known = _known.setdefault(sampler, set())
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code not in known:
            known.add(frame.f_code)
            if _is_of_script(frame):
                _look_at(frame, sampler)
        frame = frame.f_back


def _look_at(frame: FrameType, sampler: object) -> None:
    code = frame.f_code
    for loader, line in _divisions(_tree_of(frame)):
        if _is_fed_by(_value_of(loader, frame), sampler):
            name = ast.unparse(loader)
            warn(
                f"{code.co_filename}:{code.co_firstlineno + line - 1} divides by len({name}.dataset), but "
                f"the loop over {name} gets only this worker's part of the data set, so a sum over it is "
                "divided by the size of the whole; write "
                'optimizer.mean({"loss": total / max(count, 1)}, count)["loss"] after the loop, with the sum '
                "and the number of the samples that the loop has had"
            )


def _is_of_script(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package not in _OURS and not frame.f_code.co_filename.startswith(_INSTALLED)


def _tree_of(frame: FrameType) -> ast.AST:
    """Return the syntax of a function, or of a module; nothing if there is no source."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(frame)))
    except (OSError, TypeError, SyntaxError, ValueError, IndexError, RecursionError):
        return ast.Module(body=[], type_ignores=[])


def _divisions(tree: ast.AST) -> Iterator[tuple[ast.expr, int]]:
    """Yield the divisions by `len(X.dataset)`, or by a name for it: X, and the line."""
    nodes = [*_of_one_scope(tree)]
    named: dict[str, list[ast.expr | None]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    named.setdefault(target.id, []).append(_owner_of(node.value))
    for node in nodes:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            divisor = node.right
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
            divisor = node.value
        else:
            continue
        owners = named.get(divisor.id, []) if isinstance(divisor, ast.Name) else [_owner_of(divisor)]
        if len(owners) == 1 and owners[0] is not None:
            yield owners[0], divisor.lineno


def _of_one_scope(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function, or of a module, without those of the functions inside."""
    body = getattr(tree, "body", [])
    whole_function = len(body) == 1 and isinstance(body[0], _SCOPES)
    waiting = [*ast.iter_child_nodes(body[0] if whole_function else tree)]
    while waiting:
        node = waiting.pop(0)
        yield node
        if not isinstance(node, _SCOPES):
            waiting += ast.iter_child_nodes(node)


def _owner_of(value: ast.expr) -> ast.expr | None:
    """Return X of `len(X.dataset)`."""
    if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "len"):
        return None
    measured = value.args[0] if len(value.args) == 1 else None
    return measured.value if isinstance(measured, ast.Attribute) and measured.attr == "dataset" else None


def _value_of(name: ast.expr, frame: FrameType) -> Any:
    """Return the value of a name, or of an attribute of one, without running any code."""
    if isinstance(name, ast.Name):
        return frame.f_locals.get(name.id, frame.f_globals.get(name.id, _MISSING))
    if isinstance(name, ast.Attribute):
        return inspect.getattr_static(_value_of(name.value, frame), name.attr, _MISSING)
    return _MISSING


def _is_fed_by(loader: Any, sampler: object) -> bool:
    if not isinstance(loader, torch.utils.data.DataLoader):
        return False
    of_batches = vars(loader).get("batch_sampler")
    within = inspect.getattr_static(of_batches, "sampler", None)
    return any(one is sampler for one in (vars(loader).get("sampler"), of_batches, within))
