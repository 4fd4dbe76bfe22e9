"""Queries beside the exchange, and what answers them: the second protocol, with the first server.

Queries are few (an epoch's end, a range of samples), so they travel as JSON, with numbers behind it where
there are many; see `_query_wire`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, get_args

import numpy as np

from nnlo_common.base._flat_vector import Vector
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
    "Query",
    "ReadLedgerQuery",
    "SampledData",
    "WantCheckpointQuery",
]


def _none() -> Vector:
    return np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a rank is told; this one says only that it was heard."""


AnswerT = TypeVar("AnswerT", bound=Answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Query(Generic[AnswerT]):
    """What a rank asks; between the brackets is what answers it."""

    @classmethod
    def answered_by(cls) -> type[Answer]:
        """Return the kind of answer."""
        kind: type[Answer] = get_args(cls.__orig_bases__[0])[0]  # type: ignore[attr-defined]
        return kind


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveQuery(Query[Answer]):
    """I take part in nothing any more that others wait for; answered at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodbyeQuery(Query[Answer]):
    """I ask nothing any more; answered at once."""


# -- means and copies -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanAnswer(Answer):
    """Weighted means, and the sum of the weights."""

    means: Mapping[str, float]
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanQuery(Query[MeanAnswer]):
    """The means of all ranks' values, please; answered once all have asked.

    Attributes:
        values: mine, by name.
        weight: how much they count.
        epochs: after how many I ask; None: at no epoch's end.
    """

    values: Mapping[str, float]
    weight: float
    epochs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LastRoundQuery(MeanQuery):
    """How many steps no round has had, and then that all have made the last one; answered like a mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochMeanQuery(Query[MeanAnswer]):
    """The means of all workers' values of an epoch of this training; answered once all have brought theirs.

    Attributes:
        epoch: counted from 0; None: I bring no more, so wait for me no longer.
    """

    epoch: int | None
    values: Mapping[str, float]
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteQuery(Query[MeanAnswer]):
    """The means of what workers have noted up to an epoch; my values are a note; answered at once."""

    epoch: int
    values: Mapping[str, float]
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastAnswer(Answer):
    """What the first server has brought."""

    values: Mapping[str, Any]
    numbers: Vector = field(default_factory=_none, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastQuery(Query[BroadcastAnswer]):
    """What the first server brings, please; answered once all have asked."""

    values: Mapping[str, Any]
    numbers: Vector = field(default_factory=_none, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageAnswer(Answer):
    """Averages, and how often statistics were moved."""

    numbers: Vector = field(default_factory=_none, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageQuery(Query[AverageAnswer]):
    """The average of the vectors that workers have brought; answered at once.

    Attributes:
        views: how often I have met all others to see the centre.
        weight: how much my vector counts.
        epoch: which epoch it ends.
        start: it is what I begin with, and does not count itself.
        instead: it is what all get, instead of an average.
        takes: I go on from the answer.
        numbers: my vector, and how often its statistics were moved; empty: I only ask.
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
    """What a sampler divides; the same on all ranks, or a position would mean another sample.

    Attributes:
        sampler: its name, which is that of its ledger.
        size: how many positions an epoch has.
        unit: leases are multiples of it.
        order: what the positions mean, such as the seed.
    """

    sampler: str
    size: int
    unit: int
    order: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerQuery(Query[AnswerT]):
    """What is asked about the leases of a sampler; the first query that names one opens its ledger."""

    data: SampledData


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseAnswer(Answer):
    """The next lease; None: the epoch is over for you, or you have some left."""

    lease: Lease | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseQuery(LedgerQuery[LeaseAnswer]):
    """My next lease in this epoch; `unused` positions of the last ones I have yet to use."""

    epoch: int
    unused: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveBackQuery(LedgerQuery[Answer]):
    """I give back what is left of my leases."""

    left: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLeasesAnswer(Answer):
    """The leases that you have, in the order in which you use them."""

    leases: tuple[Lease, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLeasesQuery(LedgerQuery[HeldLeasesAnswer]):
    """Which leases do I have?"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerAnswer(Answer):
    """The ledger's state."""

    state: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLedgerQuery(LedgerQuery[LedgerAnswer]):
    """The ledger's state, to be saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadLedgerQuery(LedgerQuery[Answer]):
    """Let the ledger go on from this state."""

    state: Mapping[str, Any]


# -- checkpoints ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WantCheckpointQuery(Query[Answer]):
    """A checkpoint is due here; `end`: and all are to leave after it."""

    end: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftAnswer(Answer):
    """Where your part goes.

    Attributes:
        number: of the checkpoint that was begun at the pause; None: none was.
        end: all leave now.
        recalled: for a search, which has more ranks go on.
    """

    number: int | None
    end: bool
    recalled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftQuery(Query[DraftAnswer]):
    """Which checkpoint does my part belong to? Answered once it is begun on the disk.

    Attributes:
        pauses: how many of all workers I know of: another server may see that all pause before the first.
    """

    pauses: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartQuery(Query[Answer]):
    """My part of a checkpoint is on the disk, or cannot be written.

    Attributes:
        number: of the checkpoint.
        file: the name of the part.
        size: its length.
        blake2b: its checksum.
        trouble: why it could not be written; empty: it was.
    """

    number: int
    file: str = ""
    size: int = 0
    blake2b: str = ""
    trouble: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NothingMoreQuery(Query[Answer]):
    """I have nothing more to report of what I have written."""
