"""Ways in which the ranks of a group add up their gradients in torch: `all_reduce=` of the wrappers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

from nnlo_common.plugin import AllReduce, Group, Reducer, ThreadReducer
from nnlo_torch._horovod_reducer import HorovodReducer, refuse_without_horovod

__all__ = ["AllReduceName", "all_reduce_of"]

AllReduceName: TypeAlias = Literal["auto", "mpi", "shared", "thread", "torch", "horovod"]


def all_reduce_of(user: str, name: str, servers: int, group_size: int | None) -> AllReduce:
    """Return the way of this name; refuse what cannot be had, before ranks meet."""
    found = AllReduce.of(user, name, servers, group_size, _MAKERS)
    if name == "horovod":
        refuse_without_horovod()
    return found


def _by_torch(group: Group) -> Reducer:
    from nnlo_torch._torch_reducer import TorchReducer  # not every torch has torch.distributed

    return TorchReducer(group)


_MAKERS: Mapping[str, Callable[[Group], Reducer]] = {
    "thread": ThreadReducer,
    "torch": _by_torch,
    "horovod": HorovodReducer,
}
