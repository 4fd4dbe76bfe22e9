"""Partition of a search's ranks, and arguments that do not go together."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from nnlo_common.base._errors import ConfigurationError, plural, warn
from nnlo_common.base._limited_formats import table_of
from nnlo_common.cluster._gpus import choose_gpu, search_turns
from nnlo_common.cluster._hosts import describe_here, locate
from nnlo_common.cluster._threads import limit_threads
from nnlo_common.cluster.transport._endpoint import DivisibleWorld

__all__ = ["agree", "cut_blocks", "cut_teams", "refuse_conflicts", "refuse_spares"]

# -- checks for conflicting arguments of `optimize`; `nnlo tune` applies them earlier -------------------


def refuse_conflicts(
    sampler: object,
    *,
    lockstep: bool,
    elastic: bool,
    search_ranks: int,
    spares: int,
    in_sequence: bool,
    instead: str = "",
) -> None:
    """Refuse arguments that keep a search from repeating, or samplers that several ranks cannot share.

    Args:
        sampler: a name, or an Optuna sampler.
        lockstep: whether the search must repeat.
        elastic: whether idle ranks join running trials at its end.
        search_ranks: how many ranks only choose parameters.
        spares: how many ranks wait to take over from a dead coordinator.
        in_sequence: whether the sampler's next choice continues from its last one.
        instead: another remedy for a grid, appended to the message.

    Raises:
        ConfigurationError: two arguments conflict.
    """
    if lockstep and search_ranks:
        raise ConfigurationError(
            f"lockstep=True with search_ranks={search_ranks}: in lock-step each choice depends on the one "
            "before, so ranks cannot choose at the same time; leave one of them out"
        )
    if lockstep and elastic:
        raise ConfigurationError(
            "lockstep=True with elastic=True: timing decides which ranks join which trial, and so changes "
            "its result; leave one of them out"
        )
    refuse_spares(spares, lockstep=lockstep, elastic=elastic)
    if lockstep and isinstance(sampler, str) and sampler == "grid":
        raise ConfigurationError(
            'lockstep=True with sampler="grid": what is left of a grid depends on which trials have just '
            f"begun. Leave lockstep out{instead}"
        )
    if search_ranks and in_sequence:
        name = repr(sampler) if isinstance(sampler, str) else type(sampler).__name__
        raise ConfigurationError(
            f"search_ranks={search_ranks} with {name}, which continues from its last choice, so several "
            "ranks would choose the same values. It chooses fast; leave search_ranks out"
        )


def refuse_spares(spares: int, *, lockstep: bool = False, elastic: bool = False) -> None:
    """Refuse spares in a search that no other rank could go on with.

    Raises:
        ConfigurationError: two arguments conflict.
    """
    for name, given in {"lockstep": lockstep, "elastic": elastic}.items():
        if spares and given:
            raise ConfigurationError(
                f"{name}=True with spares={spares} is not possible: a spare would have to know more than "
                "it is sent; leave one of them out"
            )


# -- partition of a job's ranks: the coordinator, search ranks, blocks, and a block's teams for its folds


def agree(
    world: DivisibleWorld, block_size: int, facts: dict[str, Any], search_ranks: int = 0, spares: int = 0
) -> list[tuple[int, ...]]:
    """Check that all ranks agree and split them into blocks; all ranks raise the same error.

    Raises:
        ConfigurationError: the ranks have different scripts, or cannot be split.
        ProtocolError: what a rank has sent is malformed.
    """
    mine = {"facts": {"block_size": block_size, **facts}, "here": describe_here()}
    everyone = []
    for rank, text in enumerate(world.gather_text(json.dumps(mine))):
        whose = f"what rank {rank} says about itself"
        told = table_of(text, mine, whose)
        everyone.append({name: table_of(json.dumps(told[name]), mine[name], whose) for name in mine})
    for rank, other in enumerate(everyone):
        for name, value in everyone[0]["facts"].items():
            if other["facts"][name] != value:
                raise ConfigurationError(
                    f"optimize: {name} is {value!r} on rank 0 but {other['facts'][name]!r} on rank {rank} "
                    f"(host {other['here']['host']}); give all {world.size} ranks the same script"
                )
    places = locate([one["here"] for one in everyone])
    blocks = cut_blocks([place.host for place in places], block_size, search_ranks, spares)
    if world.own_process:
        limit_threads(places[world.rank].local_size, places[world.rank].host_cores)
        choose_gpu(places, world.rank, search_turns(search_ranks, spares))
    if spares and world.rank == 0 and not world.survives_loss:
        warn(
            f"spares={spares}, but here the job ends with any rank that dies; start it by mpiexec "
            "--with-ft ulfm of Open MPI 5, or leave spares out"
        )
    return blocks


def cut_blocks(
    hosts: Sequence[str], block_size: int, search_ranks: int = 0, spares: int = 0
) -> list[tuple[int, ...]]:
    """Split the ranks into blocks, except the first, which coordinates, the search ranks, and the spares.

    As many blocks as possible lie on a single host; ranks left over on the hosts form the other blocks.

    Args:
        hosts: the host of every rank.
        block_size: ranks per block.
        search_ranks: how many ranks choose parameters.
        spares: how many ranks, the last ones, wait to take over from a dead coordinator.

    Raises:
        ConfigurationError: ranks would be left over or missing.

    Example:
        >>> cut_blocks(["a", "a", "a", "a", "b", "b", "b"], 2)
        [(1, 2), (4, 5), (3, 6)]
    """
    size = len(hosts)
    training = size - 1 - search_ranks - spares
    if training % block_size or training < block_size:
        raise ConfigurationError(_arithmetic(size, block_size, search_ranks, spares))
    residents: dict[str, list[int]] = defaultdict(list)
    for rank in range(1 + search_ranks, size - spares):
        residents[hosts[rank]].append(rank)
    blocks, rest = [], []
    for ranks in residents.values():
        whole = len(ranks) // block_size * block_size
        blocks += [tuple(ranks[start : start + block_size]) for start in range(0, whole, block_size)]
        rest += ranks[whole:]
    return blocks + [tuple(rest[start : start + block_size]) for start in range(0, len(rest), block_size)]


def cut_teams(blocks: Sequence[tuple[int, ...]], folds: int) -> list[tuple[int, ...]]:
    """Split every block into one team per fold; keep it one team if it does not divide evenly.

    Example:
        >>> cut_teams([(1, 2, 3, 4), (5, 6, 7, 8)], 2), cut_teams([(1, 2, 3)], 2)
        ([(1, 2), (3, 4), (5, 6), (7, 8)], [(1, 2, 3)])
    """
    size = len(blocks[0])
    each = size if size % folds else size // folds
    return [block[start : start + each] for block in blocks for start in range(0, size, each)]


def _arithmetic(size: int, block_size: int, search_ranks: int, spares: int) -> str:
    """Explain why the ranks cannot be split, and suggest numbers that can."""
    ranks = size - 1 - search_ranks - spares
    below = ranks // block_size
    sizes = sorted({1 + search_ranks + spares + max(count, 1) * block_size for count in (below, below + 1)})
    divisors = [value for value in range(1, ranks + 1) if ranks % value == 0]
    near = sorted(sorted(divisors, key=lambda value: abs(value - block_size))[:2])
    fewer = ranks < block_size
    problem = (
        f"fewer than block_size={block_size}"
        if fewer
        else f"which is not a multiple of block_size={block_size}"
    )
    searchers = f" - {search_ranks} search ranks" if search_ranks else ""
    searchers += f" - {plural(spares, 'spare')}" if spares else ""
    keeping = [f"block_size={' or '.join(map(str, near))}"] if near else []
    fewer_searchers = [
        count
        for count in range(search_ranks)
        if size - 1 - count - spares >= block_size and (size - 1 - count - spares) % block_size == 0
    ]
    keeping += [f"search_ranks={fewer_searchers[-1]}"] if fewer_searchers else []
    keep = f", or keep {size} with {' or '.join(keeping)}" if keeping else ""
    return (
        f"{size} ranks cannot be cut into blocks: {size} - 1 coordinator{searchers} = {ranks} ranks, "
        f"{problem}. Start {' or '.join(map(str, sizes))} ranks{keep}"
    )
