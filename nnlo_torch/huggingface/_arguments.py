"""State of accelerate for one rank: each trains by itself, and rank 0 prints and saves."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import transformers
from accelerate import PartialState

from nnlo_common.plugin import launched
from nnlo_torch._joint import collective

__all__ = ["ArgumentsMixin", "TrainingArguments", "begin"]

# Variables by which accelerate would set up torch.distributed between the ranks, and shard by itself.
_PREFIXES = ("OMPI_COMM_WORLD_", "PMI_", "MV2_COMM_WORLD_")
_NAMES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}


def begin(*, cpu: bool = False) -> None:
    """Make accelerate see a process of its own on every rank; call it before `Accelerator(...)`.

    `is_main_process`, `print` and `save` are those of rank 0, which has the centre. In a process alone it
    does nothing. `TrainingArguments` of this module calls it.

    Args:
        cpu: as that of `Accelerator`.
    """
    world = launched()  # MPI needs the variables
    if world is None:
        return
    hosts = world.gather_text(world.host)
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if _is_launchers(name)}
    try:
        state = PartialState(cpu=cpu)
    finally:
        os.environ.update(hidden)
    if state.num_processes != 1:
        raise collective(
            f"accelerate has been set up for {state.num_processes} processes before; call "
            "nnlo_torch.huggingface.begin() first"
        )
    state.process_index = world.rank
    state.local_process_index = hosts[: world.rank].count(world.host)


def _is_launchers(name: str) -> bool:
    return name in _NAMES or name.startswith(_PREFIXES)


class ArgumentsMixin:
    """Makes the arguments of any Trainer those of one rank: `class A(ArgumentsMixin, TrainingArguments)`."""

    def __post_init__(self) -> None:
        """Begin, and refuse what several ranks cannot do."""
        own: Any = self
        if launched() is not None:
            if own.auto_find_batch_size:
                raise collective(
                    "auto_find_batch_size=True retries with smaller batches on one rank only; find the size "
                    "in a process alone, then set per_device_train_batch_size"
                )
            begin(cpu=bool(own.use_cpu))
            given = own.accelerator_config
            if given is not None and not isinstance(given, dict):
                raise collective("accelerator_config must be a dict or None with several ranks")
            own.accelerator_config = {**(given or {}), "use_configured_state": True}
        super().__post_init__()  # type: ignore[misc]


@dataclass
class TrainingArguments(ArgumentsMixin, transformers.TrainingArguments):
    """Transformers' arguments, for a rank; in a process alone nothing changes."""
