"""The ranks of a search: the block and fold of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nnlo_common.cluster._hosts import Place
from nnlo_common.cluster._topology import Arrangement
from nnlo_common.commands.train._settings import Settings
from nnlo_common.commands.tune._request import in_flags
from nnlo_common.search._partition import cut_blocks
from nnlo_common.training._rank_options import RankOptions

__all__ = ["BlockLayout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """Division of the ranks of a search.

    Attributes:
        blocks: the ranks of each; empty for a single process.
        parallel: how many folds of a trial are trained side by side.
        search_ranks: how many ranks, after the first, only choose parameters.
    """

    blocks: Sequence[Sequence[int]] = ()
    parallel: int = 1
    search_ranks: int = 0

    @classmethod
    def of(
        cls, places: Sequence[Place], block_size: int | None, folds: int, search_ranks: int = 0
    ) -> BlockLayout:
        """Cut the ranks into blocks, except the coordinator and the search ranks.

        Raises:
            ConfigurationError: ranks would be left over or missing.
        """
        if len(places) == 1:
            return cls()
        size = max(1, len(places) - 1 - search_ranks) if block_size is None else block_size
        with in_flags():
            blocks = cut_blocks([place.host for place in places], size, search_ranks)
        return cls(blocks=blocks, parallel=folds if size % folds == 0 else 1, search_ranks=search_ranks)

    @property
    def cell_size(self) -> int:
        """How many ranks train one model."""
        return len(self.blocks[0]) // self.parallel if self.blocks else 1

    def check(self, settings: Settings) -> None:
        """Refuse a training that does not fit the ranks of a block."""
        if self.cell_size == 1:
            return
        ranks = settings.ranks
        servers, group_size = ranks.servers, ranks.group_size or 1
        if servers == 0:
            Arrangement.of_training(self.cell_size, servers=0, group_size=ranks.group_size)
            return
        arrangement = Arrangement(
            blocks=len(self.blocks), folds=self.parallel, servers=servers, group_size=group_size
        )
        arrangement.check(1 + sum(map(len, self.blocks)))
        settings.rule().check((self.cell_size - servers) // group_size, servers)

    def block_of(self, rank: int) -> int:
        """Return the number of a rank's block; 0 for ranks outside all blocks."""
        return next((index for index, block in enumerate(self.blocks) if rank in block), 0)

    def cell_of(self, rank: int) -> Sequence[int]:
        """Return the ranks that train one model with this one.

        Example:
            >>> layout = BlockLayout(blocks=[(1, 2, 3, 4)], parallel=2)
            >>> layout.cell_of(0), layout.cell_of(4)
            ((0,), (3, 4))
        """
        for block in self.blocks:
            if rank in block:
                start = block.index(rank) // self.cell_size * self.cell_size
                return block[start : start + self.cell_size]
        return (rank,)

    def summary(self, ranks: RankOptions, folds: int) -> str:
        """Return a description in one line."""
        servers, group_size = ranks.servers, ranks.group_size
        if not self.blocks:
            return "one process trains trial after trial"
        size = self.cell_size
        groups = f" in groups of {group_size}" if servers and (group_size or 1) > 1 else ""
        cell = f"{servers} serving and {size - servers} training{groups}" if servers else f"{size} together"
        cell = "1 rank alone" if size == 1 else cell
        several = f" {self.parallel} folds, each" if self.parallel > 1 else ""
        serial = ", fold after fold" if folds > self.parallel else ""
        count = len(self.blocks)
        blocks = "1 block" if count == 1 else f"{count} blocks"
        searching = "" if not self.search_ranks else f"{self.search_ranks} choosing, "
        return f"1 coordinator, {searching}{blocks} of{several} {cell}{serial}"
