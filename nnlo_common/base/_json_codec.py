"""Strict JSON codec for frozen dataclasses: checks every field that it reads.

    Message(run=3, lease=Lease(0, 8))   ◄─►   {"kind": "Message", "run": 3, "lease": [0, 8]}

JSON writes enough digits of a float to read back the same float.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from nnlo_common.base._errors import ProtocolError
from nnlo_common.base._limited_formats import parsed_json

__all__ = ["as_list", "content_of", "malformed", "message_of", "table_of"]

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
