"""Look-ahead: choose as few trials in advance as keep every block busy.

What is chosen early knows of fewer results. Where trials end one by one a few are enough; where they take
equally long, so that blocks end at once, it may take one for each block.
"""

from __future__ import annotations

__all__ = ["LookAhead"]

_BLOCKS_PER_AHEAD = 8
# Optuna's samplers choose by chance until they know so many results, so nothing is lost with these.
_BY_CHANCE = 10


class LookAhead:
    """Learns how many trials to choose ahead.

    At first, when nothing is known of results, these are up to ten. Over as many trials as there are blocks
    it is counted how often none was ready, and how many were left at least: so many more, or fewer, are
    chosen from then on.

    Attributes:
        depth: how many.

    Args:
        blocks: how many blocks there are.
        most: how many trials to choose ahead at most; None: as many as blocks.

    Example:
        >>> ahead = LookAhead(16)
        >>> for ready in [10, 9, 8, 7, 6, 5, 4, 3, 2, 1] + 6 * [0]:  # all blocks end at once
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
        self.depth = max(self._fewest, min(blocks, _BY_CHANCE))
        self._count, self._missed, self._spare = 0, 0, blocks

    def taken(self, ready: int) -> None:
        """Count that a block has got a trial, when so many were ready."""
        self._count += 1
        self._missed += not ready
        self._spare = min(self._spare, max(0, ready - 1))
        if self._count == self._blocks:
            depth = self.depth + self._missed - self._spare
            self.depth = max(self._fewest, min(self._most, depth))
            self._count, self._missed, self._spare = 0, 0, self._blocks
