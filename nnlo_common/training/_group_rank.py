"""One rank's side of its group: the mean gradient, and checks that all ranks of the group are alike."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from nnlo_common.algorithms._gain import MemberNorms
from nnlo_common.base._errors import ConfigurationError, warn
from nnlo_common.base._flat_vector import Layout, Vector, looks_finite, telling_places
from nnlo_common.base._spans import span
from nnlo_common.cluster.transport._endpoint import Group, GroupCalls
from nnlo_common.training._all_reduce import MPIReducer, Reducer
from nnlo_common.training._lasting_group import LastingGroup

__all__ = ["GroupRank", "Meeting"]


class Meeting(enum.IntEnum):
    """A point of a training that all ranks of a group reach together; its words complete an error."""

    BEGIN = enum.auto()
    GRADIENT = enum.auto()
    STEP = enum.auto()
    BEGIN_EPOCH = enum.auto()
    END_EPOCH = enum.auto()
    LAST_ROUND = enum.auto()
    LOOK = enum.auto()
    ASK = enum.auto()
    LEASE = enum.auto()
    PAUSE = enum.auto()
    LEAVE = enum.auto()
    AGREE = enum.auto()
    COPY = enum.auto()

    @property
    def words(self) -> str:
        """What a rank does there."""
        return _WORDS[self]


_WORDS = {
    Meeting.BEGIN: "begins the training",
    Meeting.GRADIENT: "brings a gradient",
    Meeting.STEP: "makes a step",
    Meeting.BEGIN_EPOCH: "begins an epoch",
    Meeting.END_EPOCH: "ends its epoch",
    Meeting.LAST_ROUND: "closes the last round",
    Meeting.LOOK: "asks for the centre, as in evaluate()",
    Meeting.ASK: "asks all ranks for something, as in mean()",
    Meeting.LEASE: "asks for a lease of samples",
    Meeting.PAUSE: "pauses for a checkpoint",
    Meeting.LEAVE: "leaves the training",
    Meeting.AGREE: "ends a batch or an epoch",
    Meeting.COPY: "takes over the first rank's numbers",
}


class GroupRank:
    """One rank's side of its group.

    Attributes:
        group: the transport's side; its `ranks` and `index` are those of the living, if the group lasts.
        reducer: adds up the gradients.
        index: this rank's number in the group as it was made, by which data are dealt out.
        size: the number of its ranks then.
        samples: the number of samples that all its ranks had taken at the last gradient.
        weight: the weight of all its ranks in the last mean.
        norms: measures the gradients of the ranks and their mean, if the algorithm asks for it.
        squares: what the ranks have measured of their own gradients, as of the last meeting.
        on_divergence: called on the lead before the warning about a step that is not finite.

    Args:
        group: the transport's side.
        reducer: makes what adds up the gradients of a group; None: the MPI library does.
        layout: of the gradients, to say on which rank one is not finite; None: nobody says it.
        lasting: the others go on when a rank of the group dies: whichever it is, or any but the first.
    """

    def __init__(
        self,
        group: Group,
        reducer: Callable[[Group], Reducer] | None = None,
        layout: Layout | None = None,
        *,
        lasting: Literal["", "any", "led"] = "",
    ) -> None:
        self.index, self.size = group.index, len(group.ranks)
        self._make_reducer: Callable[[Group], Reducer] = MPIReducer if reducer is None else reducer
        self.reducer = self._make_reducer(group)
        self.group: GroupCalls = group
        self._sum = np.zeros(0, np.float32)  # of a group that lasts: its ranks keep their own gradients
        if lasting:
            self.group = lasts = LastingGroup(group, any_leads=lasting == "any")
            lasts.on_renewal = self._renew
        self._steps = 0
        self._share: float | None = None
        if layout is not None:
            self.reducer.fit(layout)
        whole = slice(0, 0 if layout is None else layout.size)
        self._telling = np.sort(telling_places(layout, whole)) if layout else np.zeros(0, np.int64)
        self._finite = True  # this rank's own gradient, before the mean
        self._finite_ranks, self._told = np.ones(self.size, np.bool_), False
        self.samples, self.weight = 0, 0.0
        self.norms: MemberNorms | None = None
        self.squares: list[float] = [0.0] * self.size
        self._brought = self.size  # ranks that have brought the last gradient
        self.on_divergence: Callable[[str], object] = str

    @property
    def leads(self) -> bool:
        """Whether this rank is the first of those that live."""
        return self.group.index == 0

    def when_lost(self, call: Callable[[Sequence[int]], object]) -> None:
        """Register `call` for deaths in a group that lasts; it is given the ranks that are gone."""
        if isinstance(self.group, LastingGroup):
            self.group.on_loss.append(call)

    def need_all(self) -> None:
        """End with the next rank that dies, as if the group did not last (collective)."""
        if isinstance(self.group, LastingGroup):
            self.group.need_all()

    def _renew(self, group: Group) -> None:
        self.reducer.close()
        self.reducer = self._make_reducer(group)

    def meet(self, meeting: Meeting, first: float = 0, second: float = 0) -> npt.NDArray[np.float64]:
        """Wait for the others of the group at the same point; return both values of all, a row for each.

        Raises:
            ConfigurationError: they are at different points; raised on all ranks of the group.
        """
        # Equally many numbers at all points, so that ranks at different points understand each other.
        with span("wait", f"the group, which {meeting.words}"):
            square = 0.0 if self.norms is None else self.norms.own
            everyone = self.group.gather(
                np.array([meeting, self._steps, first, second, self._finite, square], np.float64)
            )
        for index, row in enumerate(everyone):
            if (row[:2] != everyone[0, :2]).any():
                raise ConfigurationError(self._apart(everyone, index))
        self._steps += meeting is Meeting.STEP
        self._finite_ranks, self.squares = everyone[:, 4] > 0, everyone[:, 5].tolist()
        return everyone[:, 2:4]

    def mean(self, gradient: Vector, weight: float, samples: float = 0) -> None:
        """Replace the gradient by its weighted mean over the group.

        Args:
            gradient: this rank's gradient, the mean over its own samples.
            weight: the weight of this rank's gradient, e.g. its number of samples.
            samples: the number of samples that this rank has taken so far.

        Raises:
            ConfigurationError: the weights make no mean; raised on all ranks of the group.
        """
        if isinstance(self.group, LastingGroup):
            self._lasting_mean(self.group, gradient, weight, samples)
            return
        self.begin_mean(weight, samples)
        self.add_part(gradient, slice(0, gradient.size))
        self.end_mean(gradient)

    def _lasting_mean(self, lasting: LastingGroup, gradient: Vector, weight: float, samples: float) -> None:
        """Make the mean beside the gradient, which stays as it is until no death can break it off."""
        if self._sum.size != gradient.size:
            self._sum = np.zeros(gradient.size, np.float32)
        total, whole = self._sum, slice(0, gradient.size)

        def attempt(group: Group) -> Vector:
            self.group = group
            try:
                # Once all have met here, nobody needs the last mean any more.
                self.begin_mean(weight, samples)
                np.copyto(total, gradient)
                self.add_part(total, whole)
                self.end_mean(total)
            finally:
                self.group = lasting
            return total

        def unpack(data: bytes) -> Vector:
            np.copyto(total, np.frombuffer(data, np.float32))
            if self.norms is not None:
                self.norms.take_mean(total)
            return total

        np.copyto(gradient, lasting.run(attempt, lambda mean: mean.tobytes(), unpack))

    def begin_mean(self, weight: float, samples: float = 0) -> None:
        """Begin the mean of a gradient that is made part by part; see `mean`."""
        self._finite = True
        if self.norms is not None:
            self.norms.begin()
        weights, counts = self.meet(Meeting.GRADIENT, weight, samples).T
        self._brought = weights.size
        total = float(weights.sum())
        if not (weights >= 0).all() or not 0 < total < np.inf:
            raise ConfigurationError(
                f"the weights of a step in the group of ranks {list(self.group.ranks)} are "
                f"{weights.tolist()}; all must be at least 0, and one above"
            )
        self.weight = total
        equal = bool((weights == weights[0]).all())
        self._share = None if equal else weight / total
        self.samples = int(counts.sum())

    def add_part(self, gradient: Vector, place: slice) -> None:
        """Begin to add up a part of the gradient; leave it alone until `end_mean`."""
        part = gradient[place]
        if self._finite and self._share != 0:
            first, last = np.searchsorted(self._telling, [place.start, place.stop])
            self._finite = looks_finite(gradient, self._telling[first:last])
        if self.norms is not None:
            self.norms.add(gradient, place)
        if self._share:
            np.multiply(part, np.float32(self._share), out=part)
        elif self._share is not None:
            part.fill(0)  # whatever it holds, NaN included
        if self.reducer.overlaps:
            self.reducer.start(part, place.start)
        else:
            with span("wait", "the sum of the gradients"):
                self.reducer.start(part, place.start)

    def end_mean(self, gradient: Vector) -> None:
        """Return once the gradient, whose parts have all been given to `add_part`, is the mean."""
        if self.reducer.overlaps:
            with span("wait", "the sum of the gradients"):
                self.reducer.finish()
        if self._share is None:
            np.divide(gradient, np.float32(self._brought), out=gradient)
        if self.norms is not None:
            self.norms.take_mean(gradient)

    def tell_finite(self, gradient: Vector) -> None:
        """Warn once if a step is made with a mean that is not finite; name the ranks that have brought it.

        Call it after the meeting at the step. What a loop has skipped or mended before it is no matter: a
        `GradScaler` meets infinity on purpose.
        """
        if self._told or not self.leads or self._finite_ranks.all() or looks_finite(gradient, self._telling):
            return
        self._told = True
        pairs = zip(self.group.ranks, self._finite_ranks, strict=True)
        brought = " and ".join(str(rank) for rank, finite in pairs if not finite)
        text = (
            f"the gradient of rank {brought} is not finite (NaN or infinity) in step {self._steps}, so "
            f"neither is the mean of its group: all ranks of {list(self.group.ranks)} make this step alike. "
            "Look at the loss and the data there; a smaller learning rate or clipping may help"
        )
        self.on_divergence(text)
        warn(text)

    def compare(self, first: float, second: float) -> npt.NDArray[np.float64]:
        """Return two values of all ranks, a row for each (collective)."""
        return self.meet(Meeting.AGREE, first, second)

    def agree(self, *, stop: bool, rate: float) -> tuple[bool, float]:
        """Return whether any rank of the group wants to stop, and the lead's learning rate (collective)."""
        everyone = self.meet(Meeting.AGREE, stop, rate)
        return bool(everyone[:, 0].any()), float(everyone[0, 1])

    def bytes_of_lead(self, data: bytes = b"") -> bytes:
        """Return what the lead passes (collective); call it after a meeting."""
        return self.group.gather_bytes(data)[0]

    def copy_from_lead(self, vector: Vector) -> None:
        """Copy the lead's numbers to all ranks of the group (collective)."""
        self.meet(Meeting.COPY)
        self.broadcast(vector)

    def broadcast(self, vector: Vector) -> None:
        """Copy the lead's numbers to all ranks of the group, without a meeting (collective)."""
        with span("wait", "the lead's numbers"):
            self.group.broadcast(vector.view(np.uint8)).wait()

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes of all ranks (collective)."""
        with span("wait", "the group's bytes"):
            return self.group.gather_bytes(data)

    def meet_alike(self, meeting: Meeting, parameters: Vector) -> None:
        """Wait for the others at the same point; raise if the parameters differ between the ranks."""
        # Whose NaN a sum holds depends on the order in which a rank adds: they are one number here.
        known = np.where(np.isnan(parameters), np.float32(np.nan), parameters)
        digest = hashlib.blake2b(known.data, digest_size=8).digest()
        first, second = np.frombuffer(digest, np.uint32).tolist()  # exact in a float64
        everyone = self.meet(meeting, first, second)
        for rank, other in zip(self.group.ranks, everyone, strict=True):
            if (other != everyone[0]).any():
                raise ConfigurationError(
                    f"the parameters of rank {rank} differ from those of rank {self.group.ranks[0]} of the "
                    f"same group after {self._steps} steps, though all ranks of a group make the same steps: "
                    "change the model and the options of its optimizer on all ranks alike, and use no "
                    "optimizer that draws random numbers of its own"
                )

    def _apart(self, everyone: npt.NDArray[np.float64], index: int) -> str:
        told = [
            f"rank {self.group.ranks[one]} {Meeting(int(everyone[one, 0])).words} after "
            f"{int(everyone[one, 1])} steps"
            for one in (0, index)
        ]
        return (
            f"{told[0]}, but {told[1]}: the ranks of a group must make the same steps together. Deal out the "
            "data so that each has equally many batches (ShardSampler, nnlo_keras.shard, Participant.batches "
            "and the like do), and call evaluate(), mean() and step() on all of them"
        )
