"""Parsers of JSON, TOML, YAML and npz that anybody may have written, and exact numbers in JSON.

Each has limits on size, nesting and digits, so that no input takes all memory or time, and raises only
ValueError, with a reason that fits into a reader's own message. Every reader of files calls these.
"""

from __future__ import annotations

import ast
import io
import json
import math
import os
import re
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt

from nnlo_common.base._errors import ProtocolError
from nnlo_common.base._file_access import readable_file

__all__ = [
    "DEEPEST",
    "LARGEST_JSON",
    "LARGEST_OPTIONS",
    "LARGEST_TOML",
    "LARGEST_YAML",
    "MOST_DIGITS",
    "as_list",
    "check_stored",
    "content_of",
    "malformed",
    "mapped_array",
    "message_of",
    "npz_arrays",
    "parsed_json",
    "parsed_toml",
    "parsed_yaml",
    "table_of",
]

# -- parsers of JSON, TOML, YAML and npz for content that anybody may have written ----------------------

#: Levels of lists and tables in each other.
DEEPEST = 100
#: Digits of a whole number; more do not fit into a float.
MOST_DIGITS = 308
#: Bytes of a JSON or TOML file, and of files of options. PyYAML takes a second for each 100 kB.
LARGEST_JSON, LARGEST_TOML, LARGEST_OPTIONS, LARGEST_YAML = 100_000_000, 10_000_000, 1_000_000, 300_000
_LONGEST_HEADER = 10_000  # bytes of an array's header in an npz, as in NumPy
# Tomllib takes time and memory by the square of the parts in one dotted name.
_DOTTED = re.compile(
    r"""(?<![\w-])(?:(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){%d}""" % DEEPEST  # noqa: UP031
)


def parsed_json(data: bytes | str, largest: int = LARGEST_JSON) -> Any:
    """Parse JSON.

    Args:
        data: the JSON, in UTF-8.
        largest: bytes, or characters, that are still parsed.

    Raises:
        ValueError: it is not JSON, or beyond a limit.

    Example:
        >>> parsed_json("[" * 200 + "]" * 200)
        Traceback (most recent call last):
        ValueError: it is nested too deeply: more than 100 levels
    """
    _check_size(len(data), largest)
    with _value_errors():
        found = json.loads(data, parse_int=_whole)
    _check_depth(found)
    return found


def parsed_toml(text: str) -> dict[str, Any]:
    """Parse TOML.

    Raises:
        ValueError: it is not TOML, or beyond a limit.
    """
    _check_size(len(text), LARGEST_TOML)
    if _DOTTED.search(text):
        raise ValueError(f"a name has more than {DEEPEST} parts with dots between them")
    with _value_errors():
        found = tomllib.loads(text)
    _check_depth(found)
    return found


def parsed_yaml(text: str, loader: Any, own_error: type[Exception]) -> Any:
    """Parse YAML.

    Args:
        text: the YAML.
        loader: one of PyYAML's loaders.
        own_error: PyYAML's error, which names a line; it is raised unchanged.

    Raises:
        ValueError: it is beyond a limit, or has a value that PyYAML cannot convert.
    """
    _check_size(len(text), LARGEST_YAML)
    with _value_errors(but=own_error):
        found = loader(text).get_single_data()
    _check_depth(found)
    return found


def npz_arrays(data: bytes) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of an npz that `np.savez` wrote; arrays of objects are refused.

    Raises:
        ValueError: it is none, is damaged, or declares more than it holds.

    Example:
        >>> file = io.BytesIO()
        >>> np.savez(file, x=np.arange(3))
        >>> npz_arrays(file.getvalue())
        {'x': array([0, 1, 2])}
    """
    found: dict[str, npt.NDArray[Any]] = {}
    with _value_errors(), zipfile.ZipFile(io.BytesIO(data)) as archive:
        for member in _stored_members(archive, len(data)):
            found[member.filename.removesuffix(".npy")] = _array(archive.read(member))
    return found


def mapped_array(path: str | Path, *, follow: bool = True) -> npt.NDArray[Any]:
    """Return the array of an .npy file, mapped into memory; arrays of objects are refused.

    Args:
        path: of the file.
        follow: it may be a link.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is none, or declares more than it holds.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile(suffix=".npy") as file:
        ...     np.save(file, np.arange(3))
        ...     file.flush()
        ...     mapped_array(file.name).tolist()
        [0, 1, 2]
    """
    with _value_errors(but=OSError), readable_file(path, follow=follow) as file:
        version = np.lib.format.read_magic(file)
        if version not in _HEADERS:
            raise ValueError(f"its format is of version {version}")
        shape, fortran, dtype = _HEADERS[version](file, max_header_size=_LONGEST_HEADER)
        if dtype.hasobject:
            raise ValueError("it holds Python objects, which could run code")
        begin, size = file.tell(), os.fstat(file.fileno()).st_size
        if math.prod(shape) * dtype.itemsize != size - begin:
            raise ValueError(f"it claims {shape!r:.60} of {dtype}, but has {size - begin} bytes")
        order: Literal["C", "F"] = "F" if fortran else "C"
        if not math.prod(shape):
            return np.empty(shape, dtype, order)
        return np.memmap(file, dtype, "r", begin, shape, order)


_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def check_stored(data: bytes) -> None:
    """Refuse a zip archive with compressed members, or with more in it than its size.

    Raises:
        ValueError: it is such an archive, or none.
    """
    with _value_errors(), zipfile.ZipFile(io.BytesIO(data)) as archive:
        _stored_members(archive, len(data))


def _stored_members(archive: zipfile.ZipFile, size: int) -> list[zipfile.ZipInfo]:
    """Return the members of an archive of `size` bytes, none of which can be larger when it is read."""
    members = archive.infolist()
    for one in members:
        if one.compress_type != zipfile.ZIP_STORED or one.flag_bits & 1:
            raise ValueError(f"{one.filename!r:.60} in it is compressed or encrypted, which nnlo never does")
        if not 0 <= one.file_size <= size:
            raise ValueError(f"{one.filename!r:.60} in it claims {one.file_size} bytes of {size}")
    if (total := sum(one.file_size for one in members)) > size:
        raise ValueError(f"its parts claim {total} bytes of {size}")
    if len({one.filename for one in members}) < len(members):
        raise ValueError("two of its parts have one name")
    return members


def _array(data: bytes) -> npt.NDArray[Any]:
    """Return the array of an npy file, after comparing its declared with its real size."""
    if data[:6] != b"\x93NUMPY" or len(data) < 12 or data[6] not in (1, 2, 3):
        raise ValueError("an array in it has no header of NumPy")
    length = 2 if data[6] == 1 else 4
    begin = 8 + length
    end = begin + int.from_bytes(data[8:begin], "little")
    if end > len(data) or end - begin > _LONGEST_HEADER:
        raise ValueError(f"the header of an array in it claims {end - begin} bytes")
    header = ast.literal_eval(data[begin:end].decode("utf-8" if data[6] == 3 else "latin1"))
    if not isinstance(header, dict) or header.keys() != {"descr", "fortran_order", "shape"}:
        raise ValueError("the header of an array in it is not NumPy's")
    dtype, shape = np.lib.format.descr_to_dtype(header["descr"]), header["shape"]
    if dtype.hasobject:
        raise ValueError("an array in it holds Python objects, which could run code")
    if not isinstance(shape, tuple) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"an array in it has the shape {shape!r:.60}")
    if not dtype.itemsize or math.prod(shape) * dtype.itemsize != len(data) - end:
        raise ValueError(f"an array in it claims {shape!r:.60} of {dtype}, but has {len(data) - end} bytes")
    array = np.frombuffer(data, dtype, offset=end).reshape(
        shape, order="F" if header["fortran_order"] else "C"
    )
    return array.copy(order="K")


def _whole(text: str) -> int:
    if len(text.removeprefix("-")) > MOST_DIGITS:
        raise ValueError(f"it has a whole number of {len(text)} digits; at most {MOST_DIGITS} are read")
    return int(text)


def _check_size(size: int, largest: int) -> None:
    if size > largest:
        raise ValueError(f"it has {size} bytes, and more than {largest} are not read")


def _check_depth(found: Any) -> None:
    """Refuse values nested so deeply that walking through them would fail, and whole numbers too large."""
    level, depth = [found], 0
    while level:
        if depth > DEEPEST:
            raise ValueError(f"it is nested too deeply: more than {DEEPEST} levels")
        if any(type(one) is int and abs(one) >= 10**MOST_DIGITS for one in level):
            raise ValueError(f"it has a whole number of more than {MOST_DIGITS} digits")
        level = [item for one in level for item in _items(one)]
        depth += 1


def _items(one: Any) -> Iterator[Any]:
    if isinstance(one, dict):
        yield from one.values()
        # Keys of YAML may be tuples.
        yield from (key for key in one if not isinstance(key, str))
    elif isinstance(one, list | tuple | set):
        yield from one


@contextmanager
def _value_errors(but: type[Exception] = ValueError) -> Iterator[None]:
    """Turn whatever a parser raises about its input into a ValueError, except `but`."""
    try:
        yield
    except (ValueError, but):
        raise
    except RecursionError:
        raise ValueError(f"it is nested too deeply: more than {DEEPEST} levels") from None
    except MemoryError:
        raise ValueError("it needs more memory than there is") from None
    except Exception as error:  # parsers raise errors of many types for what they do not expect
        raise ValueError(f"{type(error).__name__}: {error}") from error


# -- strict JSON codec for frozen dataclasses: checks every field that it reads -------------------------

_MessageT = TypeVar("_MessageT")


def content_of(message: Any, *, beside: Iterable[str] = ()) -> dict[str, Any]:
    """Return the fields of a message by name, and its class as `kind`, without the fields `beside`."""
    kind: Any = type(message)
    return {"kind": kind.__name__} | {
        name: getattr(message, name) for name in _hints(kind) if name not in beside
    }


def message_of(
    kinds: Iterable[type[_MessageT]], content: object, whose: str, beside: Mapping[str, Any] | None = None
) -> _MessageT:
    """Return the message of one of these kinds that a JSON value holds.

    Args:
        kinds: the classes that it may be of.
        content: the JSON value.
        whose: names the message in errors.
        beside: values that travelled beside the JSON, for the fields of these names.

    Raises:
        ProtocolError: it is of another kind, or a field is missing, unknown or of the wrong type.
    """
    beside = beside or {}
    known: dict[str, Any] = {kind.__name__: kind for kind in kinds}
    values = dict(content) if isinstance(content, dict) else {}
    name = values.pop("kind", None)
    if not isinstance(name, str) or name not in known:
        raise ProtocolError(f"{whose} is of kind {name!r}; expected one of {sorted(known)}")
    every = _hints(known[name])
    hints = {field: hint for field, hint in every.items() if field not in beside}
    if values.keys() != hints.keys():
        raise ProtocolError(f"{whose}, {name!r}, has the fields {sorted(values)}; expected {sorted(hints)}")
    for field, hint in hints.items():
        try:
            values[field] = _typed(values[field], hint)
        except ValueError:
            expected = hint if get_args(hint) else hint.__name__
            problem = f"has {field}={values[field]!r}; expected {expected}"
            raise ProtocolError(f"{whose}, {name!r}, {problem}") from None
    values |= {field: beside[field] for field in beside if field in every}
    message: _MessageT = known[name](**values)
    return message


def table_of(text: str, names: Iterable[str], whose: str) -> dict[str, Any]:
    """Return the JSON object in a text of another rank.

    Args:
        text: the text.
        names: what the object must have; it may have more.
        whose: names the text in errors.

    Raises:
        ProtocolError: it is no JSON object, or lacks a name.
    """
    try:
        content = parsed_json(text)
    except ValueError as error:
        raise malformed(whose, error) from error
    if not isinstance(content, dict) or not content.keys() >= set(names):
        found = sorted(content) if isinstance(content, dict) else f"a {type(content).__name__}"
        raise malformed(whose, ValueError(f"it has {found} instead of {sorted(names)}"))
    return content


def as_list(value: object) -> Any:
    """Convert a dataclass within a message for JSON: to a list of its fields."""
    if is_dataclass(value) and not isinstance(value, type):
        return astuple(value)
    raise TypeError(f"{value!r} is a {type(value).__name__}, which JSON cannot write")


def malformed(whose: str, error: ValueError) -> ProtocolError:
    """Return the error about a message that is not JSON."""
    return ProtocolError(f"{whose} is malformed: {error}; do all ranks run the same nnlo?")


@cache
def _hints(kind: Any) -> Mapping[str, Any]:
    """The types of the fields of a message, by name."""
    hints = get_type_hints(kind)
    return {one.name: hints[one.name] for one in fields(kind)}


def _typed(value: Any, hint: Any) -> Any:
    """Convert a JSON value to the type of its field; ValueError if it does not fit."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any or (hint is type(None) and value is None):
        return value
    if origin is UnionType:
        return _typed_as_one(value, arguments)
    if origin is tuple and isinstance(value, list):
        endless = arguments[-1] is ...
        return tuple(_typed_each(value, arguments[:1] * len(value) if endless else arguments))
    if origin is Mapping and isinstance(value, dict):
        return {name: _typed(item, arguments[1]) for name, item in value.items()}
    if is_dataclass(hint) and isinstance(value, list):
        return hint(*_typed_each(value, _hints(hint).values()))  # type: ignore[arg-type, operator]
    # JSON may write a whole float as an int; `type` keeps out bool, which isinstance takes for an int.
    if type(value) not in ((int, float) if hint is float else (hint,)):
        raise ValueError
    return value


def _typed_each(values: list[Any], hints: Iterable[Any]) -> list[Any]:
    return [_typed(value, hint) for value, hint in zip(values, hints, strict=True)]


def _typed_as_one(value: Any, hints: Iterable[Any]) -> Any:
    for hint in hints:
        try:
            return _typed(value, hint)
        except ValueError:
            continue
    raise ValueError
