"""Queries and answers on the wire: JSON with every field checked, followed by float32 numbers.

The JSON is that of `nnlo_common.base._json_codec`; vectors travel unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import numpy as np

from nnlo_common.base._errors import ConfigurationError, ProtocolError
from nnlo_common.base._flat_vector import Vector
from nnlo_common.base._json_codec import as_list, content_of, malformed, message_of
from nnlo_common.protocol._query_messages import Answer, Query

__all__ = ["QUERY_NUMBERS", "packed", "read_answer", "read_query", "unpacked", "written"]

#: Room for the JSON of a query or an answer, counted in float32 numbers.
QUERY_NUMBERS = 4096

_MessageT = TypeVar("_MessageT")


def written(message: Query[Any] | Answer, room: Vector) -> Vector:
    """Write a query or an answer into `room`; return the used part."""
    return packed(content_of(message, beside=["numbers"]), getattr(message, "numbers", None), room)


def read_query(kinds: Iterable[type[Query[Any]]], vector: Vector, whose: str) -> Query[Any]:
    """Read a query of one of these kinds; `whose` names it in errors.

    Raises:
        ProtocolError: it is of another kind, or a field is missing, unknown or of the wrong type.
    """
    return _read(kinds, vector, whose)


def read_answer(kind: type[Answer], vector: Vector, whose: str) -> Answer:
    """Read an answer of this kind; raises like `read_query`."""
    return _read((kind,), vector, whose)


def packed(content: Mapping[str, Any], numbers: Vector | None, room: Vector) -> Vector:
    """Write the content as JSON, then the numbers, into `room`; return the used part."""
    text = json.dumps(content, separators=(",", ":"), default=as_list).encode()
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


def _read(kinds: Iterable[type[_MessageT]], vector: Vector, whose: str) -> _MessageT:
    try:
        content, numbers = unpacked(vector)
    except ValueError as error:
        raise malformed(whose, error) from error
    message = message_of(kinds, content, whose, {"numbers": numbers})
    if numbers.size and not hasattr(message, "numbers"):
        kind = type(message).__name__
        raise ProtocolError(f"{whose}, {kind!r}, has {numbers.size} numbers after its JSON; expected none")
    return message
