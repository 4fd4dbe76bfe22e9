"""Learning rate and epochs of a script for one process, scaled for the ranks that train together."""

from __future__ import annotations

import math
from typing import Literal, Unpack

from nnlo_common.base._arguments import is_number, whole_number
from nnlo_common.base._errors import ConfigurationError
from nnlo_common.cluster._topology import Roles
from nnlo_common.cluster.transport._endpoint import RankWorld
from nnlo_common.training._joining import launched, planned
from nnlo_common.training._rank_options import checked_roles

__all__ = ["epochs_per_rank", "scale_lr"]


def scale_lr(
    rate: float,
    *,
    rule: Literal["linear", "square_root", "none"] = "linear",
    asynchronous: bool = False,
    world: RankWorld | None = None,
    **roles: Unpack[Roles],
) -> float:
    """Return a learning rate for the larger batch that several ranks make together.

    A step of `Synchronous` has the batches of all ranks that train, so the rate of one process is multiplied
    by their number (Goyal et al., 2017, arXiv:1706.02677); let it rise to that over the first epochs. With an
    asynchronous algorithm each worker steps by itself, and only the ranks of its group share a step. A
    process alone keeps its rate.

    Args:
        rate: the learning rate of one process, with the batch size of one rank.
        rule: "linear" in the number of ranks; or "square_root", which suits Adam (Malladi et al., 2022,
            arXiv:2205.10287) and very large batches; "none": the rate stays, for an option of a script.
        asynchronous: whether each worker steps by itself, as with `Downpour`, `EASGD` or `GEM`.
        world: the ranks; None: MPI's if a launcher has started this process, else this process alone.
        roles: options of the wrapper that decide which rank does what, as `servers` and `group_size`.

    Raises:
        ConfigurationError: the rate or the rule is none, or the ranks cannot be arranged like this.

    Example:
        >>> scale_lr(0.1, servers=0)  # on 4 ranks: 0.4, or 0.2 with rule="square_root"
        0.1
    """
    if not is_number(rate) or not 0 < rate < math.inf:
        raise ConfigurationError(f"rate={rate!r} is not possible: use a number above 0, as the optimizer has")
    if rule not in ("linear", "square_root", "none"):
        raise ConfigurationError(f"rule={rule!r} is not possible: use 'linear', 'square_root' or 'none'")
    trained, size = _training_ranks(world or launched(), checked_roles("scale_lr()", roles))
    together = size if asynchronous else trained
    return rate * {"linear": together, "square_root": math.sqrt(together), "none": 1}[rule]


def epochs_per_rank(
    epochs: int,
    *,
    world: RankWorld | None = None,
    **roles: Unpack[Roles],
) -> int:
    """Return the number of epochs after which all ranks together have seen as many samples as one process.

    Use it only where each rank goes through all the data, in an order of its own, as scripts for Horovod do
    that divide nothing. With `ShardSampler`, `shard`, `Batches` and the like the ranks go through the data
    together, and the number of epochs stays as it is. Rounded up, at least 1.

    Args:
        epochs: the number for one process.
        world: the ranks; None: MPI's if a launcher has started this process, else this process alone.
        roles: options of the wrapper that decide which rank does what, as `servers` and `group_size`.

    Raises:
        ConfigurationError: the number is none, or the ranks cannot be arranged like this.

    Example:
        >>> epochs_per_rank(10, servers=0)  # on 4 ranks: 3
        10
    """
    trained, _ = _training_ranks(world or launched(), checked_roles("epochs_per_rank()", roles))
    return math.ceil(whole_number("epochs", epochs, 1) / trained)


def _training_ranks(world: RankWorld | None, roles: Roles) -> tuple[int, int]:
    """Return how many ranks train, and how many of them share a step of one worker."""
    if world is None:
        return 1, 1
    groups = planned(world, roles).cell_of(world.rank).groups
    return sum(map(len, groups)), len(groups[0])
