"""Look-ahead: choose just enough trials in advance to keep every block busy.

A trial chosen early is chosen with fewer results. If trials end one by one, a few are enough; if all blocks
end together, each may need one.
"""

from __future__ import annotations

__all__ = ["LookAhead"]

_BLOCKS_PER_AHEAD = 8


class LookAhead:
    """Adapts how many trials to choose ahead.

    It starts with few: Optuna's samplers draw at random until they have ten results, so each trial chosen
    early is one more that is drawn at random. Over every `blocks` trials it counts how often none was ready
    (choose that many more), and how many were spare at least (choose that many fewer).

    Attributes:
        depth: how many trials to choose ahead.

    Args:
        blocks: the number of blocks.
        most: the largest depth; None: the number of blocks.

    Example:
        >>> ahead = LookAhead(16)
        >>> for ready in [3, 2, 1] + 13 * [0]:  # all blocks end at once
        ...     ahead.taken(ready)
        >>> ahead.depth
        16
        >>> for ready in 16 * [16]:  # one by one
        ...     ahead.taken(ready)
        >>> ahead.depth
        3
    """

    def __init__(self, blocks: int, most: int | None = None) -> None:
        self._most = blocks if most is None else most
        self._blocks, self._fewest = blocks, 1 + blocks // _BLOCKS_PER_AHEAD
        self.depth = self._fewest
        self._count, self._missed, self._spare = 0, 0, blocks

    def taken(self, ready: int) -> None:
        """Count a trial taken by a block while `ready` trials were ready."""
        self._count += 1
        self._missed += not ready
        self._spare = min(self._spare, max(0, ready - 1))
        if self._count == self._blocks:
            depth = self.depth + self._missed - self._spare
            self.depth = max(self._fewest, min(self._most, depth))
            self._count, self._missed, self._spare = 0, 0, self._blocks
