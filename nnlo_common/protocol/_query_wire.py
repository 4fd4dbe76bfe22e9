"""Queries and answers on the wire: JSON with every field checked, followed by float32 numbers.

JSON writes enough digits of a float to read back the same float; vectors travel unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import astuple, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np

from nnlo_common.base._errors import ConfigurationError, ProtocolError
from nnlo_common.base._flat_vector import Vector
from nnlo_common.protocol._query_messages import Answer, Query

__all__ = ["QUERY_NUMBERS", "packed", "read_answer", "read_query", "unpacked", "written"]

#: Room for the JSON of a query or an answer, counted in float32 numbers.
QUERY_NUMBERS = 4096


def written(message: Query[Any] | Answer, room: Vector) -> Vector:
    """Write a query or an answer into `room`; return the used part."""
    kind: Any = type(message)
    content = {name: getattr(message, name) for name in _hints(kind) if name != "numbers"}
    return packed({"kind": kind.__name__, **content}, getattr(message, "numbers", None), room)


def read_query(kinds: Iterable[type[Query[Any]]], vector: Vector, whose: str) -> Query[Any]:
    """Read a query of one of these kinds; `whose` names it in errors.

    Raises:
        ProtocolError: it is of another kind, or a field is missing, unknown or of the wrong type.
    """
    query: Query[Any] = _read(kinds, vector, whose)
    return query


def read_answer(kind: type[Answer], vector: Vector, whose: str) -> Answer:
    """Read an answer of this kind; raises like `read_query`."""
    answer: Answer = _read((kind,), vector, whose)
    return answer


def packed(content: Mapping[str, Any], numbers: Vector | None, room: Vector) -> Vector:
    """Write the content as JSON, then the numbers, into `room`; return the used part."""
    text = json.dumps(content, separators=(",", ":"), default=_as_list).encode()
    start = 1 + -(-len(text) // 4)
    if start > QUERY_NUMBERS:
        raise ConfigurationError(
            f"{content.get('kind', 'an answer')!r}: {len(text)} bytes of JSON are more than the "
            f"{4 * QUERY_NUMBERS} that a query holds; use fewer or shorter names"
        )
    room[:1].view(np.uint32)[0] = len(text)
    room[1:start].view(np.uint8)[: len(text)] = np.frombuffer(text, np.uint8)
    stop = start if numbers is None else start + numbers.size
    if numbers is not None:
        np.copyto(room[start:stop], numbers)
    return room[:stop]


def unpacked(vector: Vector) -> tuple[dict[str, Any], Vector]:
    """Read what `packed` wrote; the numbers are a view.

    Raises:
        ValueError: the vector was not written by `packed`.
    """
    length = int(vector[:1].view(np.uint32)[0]) if vector.size else 0
    start = 1 + -(-length // 4)
    if start > vector.size:
        raise ValueError(f"it announces {length} bytes of JSON, but has {4 * vector.size} bytes")
    content: dict[str, Any] = json.loads(vector[1:start].view(np.uint8)[:length].tobytes())
    return content, vector[start:]


def _read(kinds: Iterable[Any], vector: Vector, whose: str) -> Any:
    try:
        content, numbers = unpacked(vector)
    except ValueError as error:
        raise ProtocolError(f"{whose} is malformed: {error}; do all ranks run the same nnlo?") from error
    known = {kind.__name__: kind for kind in kinds}
    name = content.pop("kind", None) if isinstance(content, dict) else None
    if name not in known:
        raise ProtocolError(f"{whose} is of kind {name!r}; expected one of {sorted(known)}")
    hints = dict(_hints(known[name]))
    if hints.pop("numbers", None) is None and numbers.size:
        raise ProtocolError(f"{whose}, {name!r}, has {numbers.size} numbers after its JSON; expected none")
    if content.keys() != hints.keys():
        raise ProtocolError(f"{whose}, {name!r}, has the fields {sorted(content)}; expected {sorted(hints)}")
    for one, hint in hints.items():
        try:
            content[one] = _typed(content[one], hint)
        except TypeError:
            expected = getattr(hint, "__name__", hint)
            problem = f"has {one}={content[one]!r}; expected {expected}"
            raise ProtocolError(f"{whose}, {name!r}, {problem}") from None
    return known[name](**content, **({"numbers": numbers} if "numbers" in _hints(known[name]) else {}))


@cache
def _hints(kind: Any) -> Mapping[str, Any]:
    """The types of the fields of a message, by name."""
    hints = get_type_hints(kind)
    return {one.name: hints[one.name] for one in fields(kind)}


def _typed(value: Any, hint: Any) -> Any:
    """Convert a JSON value to the type of its field; TypeError if it does not fit."""
    arguments = get_args(hint)
    if hint is Any or (hint is type(None) and value is None):
        return value
    if get_origin(hint) is UnionType:
        return None if value is None else _typed(value, arguments[0])
    if get_origin(hint) is tuple and isinstance(value, list):
        return tuple(_typed(item, arguments[0]) for item in value)
    if get_origin(hint) is Mapping and isinstance(value, dict):
        return {name: _typed(item, arguments[1]) for name, item in value.items()}
    if is_dataclass(hint) and isinstance(value, list) and len(value) == len(fields(hint)):
        items = zip(value, _hints(hint).values(), strict=True)  # type: ignore[arg-type]
        return hint(*(_typed(item, one) for item, one in items))  # type: ignore[operator]
    # JSON may write a whole float as an int; `type` keeps out bool, which isinstance takes for an int.
    if type(value) not in ((int, float) if hint is float else (hint,)):
        raise TypeError
    return value


def _as_list(value: object) -> Any:
    """Convert a dataclass (a lease, or `SampledData`) for JSON."""
    if is_dataclass(value) and not isinstance(value, type):
        return astuple(value)
    raise TypeError(f"{value!r} is a {type(value).__name__}, which JSON cannot write")
