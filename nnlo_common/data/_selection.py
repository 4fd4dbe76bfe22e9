"""Samples to use: cuts, as an expression of columns (``pt > 20 and abs(eta) < 2.5``), or balanced classes.

The expression is parsed, and only what is listed here is done: it cannot run code.
"""

from __future__ import annotations

import ast
import fnmatch
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from nnlo_common.base._errors import ConfigurationError, plural
from nnlo_common.data._preparation import texts_of
from nnlo_common.data._source import Array, Field
from nnlo_common.data.formats._format import TEXT, shown

__all__ = ["NamedColumns", "Selection", "evenly", "requests", "value_of_each"]

# -- classes of the samples: one value for each, and what makes all of them come equally often ----------

# Read rows of one-hot labels in pieces and keep only their classes.
_COUNTED = 1 << 16
_MOST_CLASSES, _MOST_TIMES = 1000, 10_000


class _Valued(Protocol):
    """A source of samples whose only features are the values."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def take(self, start: int, stop: int) -> Any:
        """Return the samples [start, stop) as a batch."""


def value_of_each(source: _Valued, asked: str) -> Array:
    """Return one value for each sample: a number, a text, or of one-hot rows the class.

    Args:
        source: of the values; given `TEXTS_STAY` if these may be texts.
        asked: the option and the name that it has, for errors.

    Raises:
        ConfigurationError: a sample has more than one value, or one that is no text beside texts.
    """
    starts = range(0, len(source), _COUNTED)
    known: dict[str, str] = {}
    return np.concatenate([_values(source, start, asked, known) for start in starts])


def _values(source: _Valued, start: int, asked: str, known: dict[str, str]) -> Array:
    """Return the values of some samples; equal texts are one object, that of `known`."""
    (rows,) = source.take(start, min(start + _COUNTED, len(source)))
    if isinstance(rows, tuple):
        raise ConfigurationError(
            f"{asked} is a group of {len(rows)} datasets; name a dataset with one value for each sample"
        )
    values: Array = rows
    text = values.dtype == TEXT
    if not text and values.ndim == 2 and values.shape[1] > 1 and _one_hot(values):
        return np.asarray(values.argmax(1))
    if values.shape not in {(len(values),), (len(values), 1)}:
        raise ConfigurationError(
            f"{asked} has rows of shape {list(values.shape[1:])}, which are not one-hot; name a dataset with "
            "one value for each sample"
        )
    if not text:
        return values.reshape(-1)
    try:
        return np.array([known.setdefault(one, one) for one in texts_of(values)], TEXT)
    except (ConfigurationError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{asked}: {error}") from None


def _one_hot(rows: Array) -> bool:
    return bool(np.isin(rows, (0, 1)).all() and (rows.sum(1) == 1).all())


def evenly(values: Array, asked: str) -> Iterator[npt.NDArray[np.int64]]:
    """Yield rising numbers of samples, first all of them, then those of rare classes again and again.

    Together each class has as many as the largest; the samples of a class differ by at most one in how often
    they come.

    Args:
        values: the class of each sample.
        asked: the option and the name that it has, for errors.

    Raises:
        ConfigurationError: these are no classes, or one is so rare that it could only be learnt by heart.

    Example:
        >>> [one.tolist() for one in evenly(np.array([0, 0, 1, 0, 1, 0, 0]), "balance='label'")]
        [[0, 1, 2, 3, 4, 5, 6], [2, 4], [2]]
    """
    classes, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    with np.errstate(invalid="ignore"):
        text = classes.dtype == TEXT
        whole = np.full(len(classes), True) if text else np.isfinite(classes) & (np.floor(classes) == classes)
    if len(classes) > _MOST_CLASSES or not whole.all():
        example = classes.tolist()[int(whole.argmin())]
        raise ConfigurationError(
            f"{asked} has {plural(len(classes), 'different value')}, such as {example!r:.60}: these are no "
            "classes; name the column of the classes, which are whole numbers or texts"
        )
    times, more = np.divmod(counts.max(), counts)
    if (rarest := times.max()) > _MOST_TIMES:
        index = int(times.argmax())
        raise ConfigurationError(
            f"{asked}: {plural(int(counts[index]), 'sample')} of {len(values)} with the value "
            f"{classes.tolist()[index]!r:.60} would come {rarest} times; leave it out by select=, or give it "
            "a weight"
        )
    # The place of each sample among those of its class; `more` of these, evenly spread, come once more.
    order = np.argsort(which, kind="stable")
    place = np.empty(len(values), np.int64)
    place[order] = np.arange(len(values)) - np.repeat(np.cumsum(counts) - counts, counts)
    once_more = place * more[which] % counts[which] < more[which]
    left, wanted = np.arange(len(values)), times[which] + once_more
    while len(left):
        yield left
        again = wanted > 1
        left, wanted = left[again], wanted[again] - 1


# -- names of columns as users write them: one, several beside each other, or a pattern ----------------

_PATTERN = frozenset("*?[")


@dataclass(frozen=True, slots=True)
class NamedColumns:
    """The columns of one name.

    Attributes:
        names: of the columns.
        stacked: whether they are one input, side by side.
    """

    names: tuple[str, ...]
    stacked: bool = False


def requests(side: str, asked: Any, known: Callable[[], Sequence[str]]) -> list[NamedColumns]:
    """Return the columns that each name stands for.

    Args:
        side: the option that names them.
        asked: a name, or several.
        known: returns the names that the first file has.

    Raises:
        ConfigurationError: it is not a name, or a pattern that matches nothing.

    Example:
        >>> found = requests("features", ["pt,eta", "hits_*"], lambda: ["pt", "eta", "hits_x", "hits_y"])
        >>> [one.names for one in found]
        [('pt', 'eta'), ('hits_x', 'hits_y')]
    """
    names: list[Any] = list(asked) if isinstance(asked, Sequence) and not isinstance(asked, str) else [asked]
    if not names or not all(isinstance(name, str) and name.strip("/") and "\0" not in name for name in names):
        raise ConfigurationError(
            f"{side}={asked!r}: give the name of a dataset or a group in the files, or several names"
        )
    return [_request(side, name, known) for name in names]


def _request(side: str, name: str, known: Callable[[], Sequence[str]]) -> NamedColumns:
    if "," not in name and not _PATTERN & set(name):
        return NamedColumns((name,))
    there = known()
    if name in there:  # also with such a character
        return NamedColumns((name,))
    found: list[str] = []
    for part in map(str.strip, name.split(",")):
        matching = [part]
        if _PATTERN & set(part):
            matching = fnmatch.filter(there, part)
        if not part or not matching:
            raise ConfigurationError(
                f"{side}={name!r}: {part!r} names no column; the first file has {shown(there)}"
            )
        found += matching
    if twice := [one for index, one in enumerate(found) if one in found[:index]]:
        raise ConfigurationError(f"{side}={name!r} names {twice[0]!r} twice; name each column once")
    return NamedColumns(tuple(found), stacked=True)


_LONGEST, _DEEPEST, _LARGEST = 2000, 50, 1e300
# Samples looked at together.
_PIECE = 1 << 16
_BINARY: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: np.true_divide,
    ast.Mod: np.mod,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_UNARY: Mapping[type[ast.AST], Callable[[Any], Any]] = {
    ast.USub: operator.neg,  # of Python, so that a number that is written takes the type of a column
    ast.UAdd: operator.pos,
    ast.Not: np.logical_not,
}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "abs": np.abs,
    "cos": np.cos,
    "cosh": np.cosh,
    "exp": np.exp,
    "isfinite": np.isfinite,
    "log": np.log,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "sin": np.sin,
    "sinh": np.sinh,
    "sqrt": np.sqrt,
}
# What makes whole numbers that their type may not hold, and the first number that 64 bits do not.
_WRAPPING = {operator.add, operator.sub, operator.mul, operator.neg}
_TOO_LARGE = 2**63
_HOW = "write e.g. 'pt > 20 and abs(eta) < 2.5'"


#: Comparisons of a column with a number, turned around where the number comes first.
_TURNED: Mapping[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.Gt,
    ast.LtE: ast.GtE,
    ast.Gt: ast.Lt,
    ast.GtE: ast.LtE,
    ast.Eq: ast.Eq,
}


class _Sized(Protocol):
    """A source of samples."""

    @property
    def fields(self) -> Sequence[Field]:
        """The columns."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def take(self, start: int, stop: int) -> Any:
        """Return the samples [start, stop) as a batch."""

    def bounds(self, name: str, start: int, stop: int) -> tuple[float, float] | None:
        """Return the least and the largest number of a column in these samples; None: unknown."""


class Selection:
    """The samples that fulfil an expression.

    Args:
        text: names of columns, numbers, comparisons, `and`, `or`, `not`, arithmetic, and functions such as
            abs and sqrt; None: all samples.

    Attributes:
        columns: the columns that it looks at.

    Raises:
        ConfigurationError: it has anything else in it.

    Example:
        >>> Selection("pt > 20 and abs(eta) < 2.5").columns
        ['eta', 'pt']
    """

    def __init__(self, text: str | None) -> None:
        self._text, self.columns = text, list[str]()
        self._tree: ast.expr | None = None
        if text is None:
            return
        if not isinstance(text, str) or not text.strip() or len(text) > _LONGEST:
            self._refuse("it is no expression of columns")
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            self._refuse("it is no expression")
        names: set[str] = set()
        self._check(self._tree, names, 0)
        if not names:
            self._refuse("it names no column")
        self.columns = sorted(names)
        self._limits = [*_limits(self._tree)]

    def __bool__(self) -> bool:
        return self._tree is not None

    def numbers(self, source: _Sized) -> npt.NDArray[np.int64]:
        """Return the numbers of the samples that fulfil it.

        Args:
            source: of its columns.

        Raises:
            ConfigurationError: none does, or a column has more than one number for a sample.
        """
        found = []
        for start in range(0, len(source), _PIECE):
            stop = min(start + _PIECE, len(source))
            if self._excludes(source, start, stop):
                continue
            (arrays,) = source.take(start, stop)
            for name, array in zip(self.columns, arrays, strict=True):
                if array.ndim != 1:
                    self._refuse(f"{name} has samples of shape {array.shape[1:]}, not one number each")
            values = dict(zip(self.columns, arrays, strict=True))
            assert self._tree is not None  # the caller asks only then
            try:
                with np.errstate(all="ignore"):
                    fulfilled = np.broadcast_to(np.asarray(self._value(self._tree, values)), stop - start)
            except (TypeError, ValueError, OverflowError) as error:
                self._refuse(str(error))
            found.append(start + np.flatnonzero(fulfilled))
        numbers = np.concatenate([*found, np.empty(0, np.int64)]).astype(np.int64)
        if not len(numbers):
            self._refuse(f"none of {len(source)} samples fulfils it")
        return numbers

    def _excludes(self, source: _Sized, start: int, stop: int) -> bool:
        """Return whether no sample of these can fulfil it, as the file says; then none of them is read."""
        dtypes = {field.name: field.dtype for field in source.fields}
        for name, kind, limit in self._limits:
            found = source.bounds(name, start, stop)
            if found is None or name not in dtypes:
                continue
            # As an array of the column's type they are rounded in the comparison as its numbers are.
            bounds = np.array(found, dtypes[name])
            with np.errstate(all="ignore"):
                if issubclass(kind, ast.Eq):
                    possible = (bounds[:1] <= limit) & (bounds[1:] >= limit)
                else:
                    possible = _BINARY[kind](bounds, limit)
            if not possible.any():
                return True
        return False

    def _check(self, tree: ast.AST, names: set[str], depth: int) -> None:
        """Refuse what is not listed, and collect the names of columns."""
        if depth > _DEEPEST:
            self._refuse("it is nested too deeply")
        name = _column(tree)
        if name is not None:
            names.add(name)
            return
        match tree:
            case ast.Constant(value=bool() | int() | float() as value) if abs(value) < _LARGEST:
                parts: list[ast.AST] = []
            case ast.BoolOp():
                parts = [*tree.values]
            case ast.BinOp() if type(tree.op) in _BINARY:
                parts = [tree.left, tree.right]
            case ast.UnaryOp() if type(tree.op) in _UNARY:
                parts = [tree.operand]
            case ast.Compare() if all(type(one) in _BINARY for one in tree.ops):
                parts = [tree.left, *tree.comparators]
            case ast.Call(func=ast.Name(id=called), keywords=[]) if called in _FUNCTIONS:
                parts = [*tree.args]
                if len(parts) != (2 if called in ("maximum", "minimum") else 1):
                    self._refuse(f"{called} has {len(parts)} arguments")
            case ast.Call(func=ast.Name(id=called)):
                self._refuse(f"there is no function {called!r}; there are {', '.join(_FUNCTIONS)}")
            case _:
                self._refuse(f"{ast.unparse(tree)!r:.60} is not possible in it")
        for part in parts:
            self._check(part, names, depth + 1)

    def _value(self, tree: ast.AST, values: Mapping[str, Any]) -> Any:
        found: Any = values.get(_column(tree) or "")
        match tree:
            case ast.Constant():
                found = tree.value
            case ast.BoolOp():
                combine = np.logical_and if isinstance(tree.op, ast.And) else np.logical_or
                parts = [self._value(one, values) for one in tree.values]
                found = combine.reduce(np.broadcast_arrays(*parts))
            case ast.BinOp():
                found = _exact(
                    _BINARY[type(tree.op)], self._value(tree.left, values), self._value(tree.right, values)
                )
            case ast.UnaryOp():
                found = _exact(_UNARY[type(tree.op)], self._value(tree.operand, values))
            case ast.Compare():
                sides = [self._value(one, values) for one in (tree.left, *tree.comparators)]
                compared = [
                    _BINARY[type(one)](*sides[index : index + 2]) for index, one in enumerate(tree.ops)
                ]
                found = np.logical_and.reduce(np.broadcast_arrays(*compared))
            case ast.Call(func=ast.Name(id=called)):
                found = _exact(_FUNCTIONS[called], *(self._value(one, values) for one in tree.args))
        return found

    def _refuse(self, why: str) -> NoReturn:
        raise ConfigurationError(f"select={self._text!r:.80}: {why}; {_HOW}")


def _exact(compute: Callable[..., Any], *sides: Any) -> Any:
    """Return what a function gives, of whole numbers with a sign and 64 bits: smaller ones wrap around.

    Raises:
        OverflowError: the result has more bits.
    """
    arrays = [np.asarray(one) for one in sides]
    if any(one.dtype.kind not in "biu" for one in arrays):
        return compute(*sides)
    # A number that is written takes the type of the other side, and large unsigned ones have no sign.
    large = [one.dtype == np.uint64 and one.max(initial=0) >= _TOO_LARGE for one in arrays]
    whole = [
        side if type(side) is int or too_large else array.astype(np.int64)
        for side, array, too_large in zip(sides, arrays, large, strict=True)
    ]
    if compute in _WRAPPING:
        about = np.abs(compute(*(one.astype(np.float64) for one in arrays)))
        if any(large) or (about >= _TOO_LARGE).any():
            raise OverflowError("its whole numbers are beyond 64 bits with a sign; multiply one by 1.0")
    return compute(*whole)


def _limits(tree: ast.AST) -> Iterator[tuple[str, type[ast.AST], float]]:
    """Yield what each sample must fulfil: a column, a comparison, and a number.

    NaN fulfils none of these comparisons, so it does not matter that files leave it out of their bounds.
    """
    if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And):
        for part in tree.values:
            yield from _limits(part)
    if not isinstance(tree, ast.Compare):
        return
    sides = [tree.left, *tree.comparators]
    for index, one in enumerate(tree.ops):
        left, right = sides[index : index + 2]
        kind: type[ast.AST] = type(one)
        if _column(right) is not None:
            left, right, kind = right, left, _TURNED.get(kind, type(one))
        name, number = _column(left), _number(right)
        if name is not None and number is not None and kind in _TURNED:
            yield name, kind, number


def _number(tree: ast.AST) -> float | None:
    """Return a number that is written, perhaps with a sign."""
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
        number = _number(tree.operand)
        return None if number is None else -number
    if isinstance(tree, ast.Constant) and isinstance(tree.value, int | float):
        return tree.value
    return None


def _column(tree: ast.AST) -> str | None:
    """Return the name of a column, which may have dots in it."""
    if isinstance(tree, ast.Name):
        return tree.id
    if isinstance(tree, ast.Attribute):
        before = _column(tree.value)
        return None if before is None else f"{before}.{tree.attr}"
    return None
