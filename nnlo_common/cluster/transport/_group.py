"""Group: the ranks of one logical worker, as one of them sees the others, on every transport."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from nnlo_common.base._flat_vector import Vector

__all__ = ["Group", "Numbers", "Transfer"]

#: A few numbers that the ranks of a group compare.
Numbers: TypeAlias = npt.NDArray[np.float64]


class Transfer(Protocol):
    """A broadcast under way."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is complete here; False after `timeout_s`: call it again."""


class Group(Protocol):
    """The ranks of one logical worker; all of them call each method, in the same order.

    Attributes:
        index: this rank's number in the group; 0 is the lead.
        ranks: the numbers of all its ranks in the training, by index.
    """

    index: int
    ranks: tuple[int, ...]

    def gather(self, numbers: Numbers) -> Numbers:
        """Return the numbers of all ranks, a row for each; all ranks pass equally many."""

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes of all ranks, by index; each rank may pass another number."""

    def add_up(self, vector: Vector) -> None:
        """Replace the vector by the sum over all ranks, with the same bits on each.

        Call it after a `gather`, so that no rank waits long in it.
        """

    def broadcast(self, data: npt.NDArray[np.uint8]) -> Transfer:
        """Begin to copy the lead's bytes into those of the others; do not change them meanwhile."""

    def barrier(self) -> None:
        """Return once all ranks have called it; what they wrote to shared memory before is then seen."""

    def twin(self) -> Group:
        """Return another group of the same ranks, which another thread may use.

        Raises:
            ConfigurationError: only one thread may use the transport.
        """

    def communicator(self) -> Any:
        """Return the MPI communicator of these ranks; None if they are threads."""

    def close(self) -> None:
        """Release its resources."""
