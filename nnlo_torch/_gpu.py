"""Device of a rank: its GPU, in turn with the other ranks of its host, or the CPU."""

from __future__ import annotations

from typing import Unpack

import torch

from nnlo_common.plugin import RankWorld, Roles, checked_roles, launched, own_gpu, when_chosen

__all__ = ["device"]


def device(
    *,
    server_gpu: bool = False,
    world: RankWorld | None = None,
    **roles: Unpack[Roles],
) -> torch.device:
    """Return this rank's device, for its model and its batches (collective).

    Workers of one host take the GPUs they see in turn; with one GPU visible for each rank, as Slurm's
    `--gpus-per-task=1` has it, that one. A server or sub-server is on the CPU. The GPU becomes the current
    one, so that `.cuda()` means it, too. A process alone has its first GPU; a trial of a search has the GPU
    that the search has chosen for this rank. Without GPUs this is the CPU.

    Args:
        server_gpu: whether servers and sub-servers, too, get a GPU: one that no worker uses, if there is one.
        world: the ranks; None: MPI's if a launcher has started this process, else this process alone.
        roles: options of the wrapper that decide which rank does what, as `servers` and `group_size`.

    Example:
        >>> model = torch.nn.Linear(3, 1).to(device())
    """
    given = checked_roles("device()", roles)
    number = own_gpu(world or launched(), server_gpu=server_gpu, **given)
    if number is None or not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def _use(number: int) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(number)


when_chosen(_use)  # a trial that calls no device() has it, too
