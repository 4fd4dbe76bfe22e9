"""Queries to the first server and their answers: the second protocol, separate from the exchange.

Queries are rare (an epoch's end, a range of samples), so they travel as JSON, followed by numbers where there
are many; see the packing below.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, get_args

import numpy as np

from nnlo_common.base._errors import ConfigurationError, ProtocolError
from nnlo_common.base._flat_vector import Vector
from nnlo_common.base._limited_formats import as_list, content_of, malformed, message_of
from nnlo_common.data import Lease

__all__ = [
    "Answer",
    "AnswerT",
    "AverageAnswer",
    "AverageQuery",
    "BroadcastAnswer",
    "BroadcastQuery",
    "DraftAnswer",
    "DraftQuery",
    "EpochMeanQuery",
    "GiveBackQuery",
    "GoodbyeQuery",
    "HeldLeasesAnswer",
    "HeldLeasesQuery",
    "LastRoundQuery",
    "LeaseAnswer",
    "LeaseQuery",
    "LeaveQuery",
    "LedgerAnswer",
    "LedgerQuery",
    "LoadLedgerQuery",
    "MeanAnswer",
    "MeanQuery",
    "NoteQuery",
    "NothingMoreQuery",
    "PartQuery",
    "PauseAnswer",
    "PauseQuery",
    "PlaceAnswer",
    "PlaceQuery",
    "QUERY_NUMBERS",
    "Query",
    "ReadLedgerQuery",
    "ReturnQuery",
    "SampledData",
    "WantCheckpointQuery",
    "packed",
    "read_answer",
    "read_query",
    "unpacked",
    "written",
]


def _none() -> Vector:
    return np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Answer to a query; the base class only acknowledges it."""


AnswerT = TypeVar("AnswerT", bound=Answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Query(Generic[AnswerT]):
    """Query of a rank; the type parameter is its answer."""

    @classmethod
    def answered_by(cls) -> type[Answer]:
        """Return the type of the answer."""
        kind: type[Answer] = get_args(cls.__orig_bases__[0])[0]  # type: ignore[attr-defined]
        return kind


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveQuery(Query[Answer]):
    """The sender takes no further part in collective queries; answered at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodbyeQuery(Query[Answer]):
    """The sender's last query; answered at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnQuery(Query[Answer]):
    """Tells a query service that takes over from a dead one what the sender has had; answered at once.

    Attributes:
        answered: the number of collective queries that were answered.
        last: the last of their answers, without its numbers.
        means: the means of epochs, by epoch: a server that has validated for long may still ask for any.
        ended: the sender sends no more values of epochs.
        left: the sender takes no further part in collective queries.
        leases: for each sampler what the sender has used and still holds.
        saves: how often it has saved together with all ranks between two epochs.
        numbers: those of the last answer.
    """

    answered: int
    last: Mapping[str, Any] | None
    means: Mapping[str, Any]
    ended: bool
    left: bool
    leases: Mapping[str, Any]
    saves: int = 0
    numbers: Vector = field(default_factory=_none, compare=False)


# -- means and copies -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanAnswer(Answer):
    """Weighted means, and the sum of the weights."""

    means: Mapping[str, float]
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanQuery(Query[MeanAnswer]):
    """Asks for the means of all ranks' values; answered once all have asked.

    Attributes:
        values: the sender's, by name.
        weight: their weight.
        epochs: the number of finished epochs, at an epoch's end; None: elsewhere.
    """

    values: Mapping[str, float]
    weight: float
    epochs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LastRoundQuery(MeanQuery):
    """Sends the steps since the last round, then that the last round is made; answered like a mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochMeanQuery(Query[MeanAnswer]):
    """Asks for the means of all workers' values of an epoch; answered once all workers have sent theirs.

    Attributes:
        epoch: counted from 0; None: the sender has no more values, so do not wait for it.
    """

    epoch: int | None
    values: Mapping[str, float]
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteQuery(Query[MeanAnswer]):
    """Stores the values as a note, and asks for the means of all notes up to an epoch; answered at once."""

    epoch: int
    values: Mapping[str, float]
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastAnswer(Answer):
    """Values of the first server."""

    values: Mapping[str, Any]
    numbers: Vector = field(default_factory=_none, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastQuery(Query[BroadcastAnswer]):
    """Asks for the first server's values; answered once all have asked."""

    values: Mapping[str, Any]
    numbers: Vector = field(default_factory=_none, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageAnswer(Answer):
    """Averages, followed by the update counts of statistics."""

    numbers: Vector = field(default_factory=_none, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageQuery(Query[AverageAnswer]):
    """Asks for the average of the workers' vectors; answered at once.

    Attributes:
        views: how often the sender has viewed the centre together with all others.
        weight: the weight of its vector.
        epoch: the epoch that the vector ends.
        start: the vector is the sender's start, and does not enter the average.
        instead: the vector replaces the average for all ranks.
        takes: the sender continues from the answer.
        numbers: its vector, followed by the update counts of statistics; empty: it only asks.
    """

    views: int
    weight: float = 0
    epoch: int = 0
    start: bool = False
    instead: bool = False
    takes: bool = False
    numbers: Vector = field(default_factory=_none, compare=False)


# -- leases -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SampledData:
    """Data that a sampler divides; equal on all ranks, or a position would mean different samples.

    Attributes:
        sampler: the name of the sampler and of its ledger.
        size: the number of positions in an epoch.
        unit: leases are multiples of it.
        order: how positions map to samples, such as the seed.
        passes: an epoch takes several passes over the data, and no worker waits between two.
    """

    sampler: str
    size: int
    unit: int
    order: str
    passes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerQuery(Query[AnswerT]):
    """Query about the leases of a sampler; the first one opens the sampler's ledger."""

    data: SampledData


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseAnswer(Answer):
    """The next lease; None: the epoch is over for the asker, or it still holds leases."""

    lease: Lease | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseQuery(LedgerQuery[LeaseAnswer]):
    """Asks for the next lease in this epoch; the sender has `unused` positions left of earlier leases."""

    epoch: int
    unused: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveBackQuery(LedgerQuery[Answer]):
    """Gives back the last `left` positions of the sender's leases."""

    left: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLeasesAnswer(Answer):
    """The leases that the asker holds, in order of use."""

    leases: tuple[Lease, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLeasesQuery(LedgerQuery[HeldLeasesAnswer]):
    """Asks for the leases that the sender holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerAnswer(Answer):
    """The ledger's state."""

    state: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLedgerQuery(LedgerQuery[LedgerAnswer]):
    """Asks for the ledger's state, to save it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadLedgerQuery(LedgerQuery[Answer]):
    """Restores the ledger from this state."""

    state: Mapping[str, Any]


# -- checkpoints ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WantCheckpointQuery(Query[Answer]):
    """Asks for a checkpoint; `end`: all ranks leave after it."""

    end: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftAnswer(Answer):
    """Checkpoint that the asker's part belongs to.

    Attributes:
        number: of the checkpoint begun at the pause; None: none was begun.
        end: all ranks leave now.
        recalled: they leave because a search resumes with more ranks.
    """

    number: int | None
    end: bool
    recalled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftQuery(Query[DraftAnswer]):
    """Asks which checkpoint the sender's part belongs to; answered once it is begun on disk.

    Attributes:
        pauses: the number of the pause; another server may see one before the first does. 0: the last.
    """

    pauses: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartQuery(Query[Answer]):
    """Reports that the sender's part of a checkpoint is on disk, or could not be written.

    Attributes:
        number: of the checkpoint.
        file: the name of the part.
        size: its length.
        blake2b: its checksum.
        trouble: the reason if it could not be written, else empty.
    """

    number: int
    file: str = ""
    size: int = 0
    blake2b: str = ""
    trouble: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NothingMoreQuery(Query[Answer]):
    """Announces that the sender has reported all its parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseAnswer(Answer):
    """Number of the pause in which all ranks have saved between two epochs; None: it has not come yet."""

    number: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseQuery(Query[PauseAnswer]):
    """Asks for the pause of a save between two epochs; a server does that has taken over from a dead one.

    Attributes:
        saves: which of these saves it is, from 1.
    """

    saves: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceAnswer(Answer):
    """Answer to a `PlaceQuery`.

    Attributes:
        place: the dead worker; None: the sender stays a spare in this epoch.
        pauses: the number of the last pause.
    """

    place: int | None
    pauses: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceQuery(Query[PlaceAnswer]):
    """A spare asks before each epoch whether it trains in the place of a dead worker from now on.

    Attributes:
        epochs: those that are finished.
    """

    epochs: int


# -- queries and answers on the wire: JSON with every field checked, followed by float32 numbers -------
# The JSON is that of `nnlo_common.base._limited_formats`; vectors travel unchanged.

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
