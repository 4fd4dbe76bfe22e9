"""GPU of a rank: Keras uses the one that is its turn among the ranks of its host, or the CPU."""

from __future__ import annotations

import importlib
from typing import Any, Unpack

import keras

from nnlo_common import ConfigurationError
from nnlo_common.plugin import RankWorld, Roles, checked_roles, launched, own_gpu, warn, when_chosen

__all__ = ["use_gpu"]


def use_gpu(
    *,
    server_gpu: bool = False,
    world: RankWorld | None = None,
    **roles: Unpack[Roles],
) -> int | None:
    """Let Keras use this rank's GPU only, and return its number, or None on the CPU (collective).

    Call it before the first model. Workers of one host take the GPUs they see in turn; with one GPU visible
    for each rank, as Slurm's `--gpus-per-task=1` has it, that one. A server or sub-server uses the CPU.
    TensorFlow takes memory as it needs it, not the whole GPU. A process alone has its first GPU; a trial of
    `optimize` or `MPITuner` has the GPU that the search has chosen for this rank, without this call.

    Args:
        server_gpu: whether servers and sub-servers, too, get a GPU: one that no worker uses, if there is one.
        world: the ranks; None: MPI's if a launcher has started this process, else this process alone.
        roles: options of the wrapper that decide which rank does what, as `servers` and `group_size`.

    Raises:
        ConfigurationError: TensorFlow has used its devices already.

    Example:
        >>> number = use_gpu()
        >>> model = keras.Sequential([keras.layers.Dense(1)])
    """
    given = checked_roles("use_gpu()", roles)
    number = own_gpu(world or launched(), server_gpu=server_gpu, **given)
    return number if _USES[keras.backend.backend()](number) else None


_SCOPES: list[Any] = []


def _use_tensorflow(number: int | None) -> bool:
    tensorflow: Any = importlib.import_module("tensorflow")
    gpus = tensorflow.config.list_physical_devices("GPU")
    own = gpus[number : number + 1] if number is not None else []
    try:
        if gpus:
            tensorflow.config.set_visible_devices(own, "GPU")
        for gpu in own:
            tensorflow.config.experimental.set_memory_growth(gpu, True)
    except RuntimeError as error:
        raise ConfigurationError(
            f"TensorFlow has used its devices before this rank's GPU was chosen ({error}); call use_gpu(), "
            "or begin the search, before the first model and the first tensor"
        ) from None
    return bool(own)


def _use_torch(number: int | None) -> bool:
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return False
    if number is None:
        scope = keras.device("cpu")  # Keras puts everything on the GPU otherwise
        scope.__enter__()
        _SCOPES.append(scope)  # which would end with its last reference
    else:
        torch.cuda.set_device(number)
    return number is not None


def _use_jax(number: int | None) -> bool:
    jax: Any = importlib.import_module("jax")
    gpus = [one for one in jax.local_devices() if one.platform in ("gpu", "cuda", "rocm")]
    own = gpus[number : number + 1] if number is not None else []
    if gpus:
        jax.config.update("jax_default_device", own[0] if own else jax.local_devices(backend="cpu")[0])
    return bool(own)


_USES = {"tensorflow": _use_tensorflow, "torch": _use_torch, "jax": _use_jax}


def _use(number: int) -> None:
    try:
        _USES[keras.backend.backend()](number)
    except ConfigurationError as error:  # the search goes on with the devices as they are
        warn(str(error))


when_chosen(_use)
