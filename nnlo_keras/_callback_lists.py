"""Quieting of `fit` on ranks that do not speak: no files, validation, progress bars or metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from nnlo_common import ConfigurationError
from nnlo_keras._callbacks._rank_callback import RankCallback

__all__ = [
    "last_of",
    "own_logs",
    "drop_center_callbacks",
    "refuse_loading",
    "restored_first",
    "undisturbed",
]

#: Callbacks that are for the rank that has the centre: they write, stop, or decide by what they see.
_FOR_THE_CENTRE = tuple(
    getattr(keras.callbacks, name)
    for name in (
        "BackupAndRestore",
        "CSVLogger",
        "EarlyStopping",
        "ModelCheckpoint",
        "ProgbarLogger",
        "ReduceLROnPlateau",
        "RemoteMonitor",
        "TensorBoard",
    )
    if hasattr(keras.callbacks, name)
)

_BETWEEN_BATCHES = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")


def drop_center_callbacks(container: Any, but: type | tuple[type, ...] = ()) -> None:
    """Take the callbacks out of a rank's list that are for the centre, but those of some classes.

    For good: the list is the one `fit`'s own or, if the user has made it, for other trainings of that rank.
    """
    container.callbacks = [
        one for one in container.callbacks if isinstance(one, but) or not isinstance(one, _FOR_THE_CENTRE)
    ]


def refuse_loading(container: Any, servers: int) -> None:
    """Refuse callbacks that load weights of an earlier time where no server has all that belongs to them.

    Raises:
        ConfigurationError: there is one; it is said on all ranks.
    """
    for one in container.callbacks:
        if isinstance(one, keras.callbacks.BackupAndRestore):
            asked = "BackupAndRestore"
        elif isinstance(one, keras.callbacks.EarlyStopping) and one.restore_best_weights:
            asked = "EarlyStopping(restore_best_weights=True)"
        else:
            continue
        error = ConfigurationError(
            f"{asked} was asked for with servers={servers}, but each server has a part of the training only, "
            "and would go back by itself; use servers=1"
        )
        error.collective = True  # all ranks have the same callbacks
        raise error


def restored_first(container: Any) -> None:
    """Let a server's list begin with what loads weights as the training begins: they are the centre's."""
    loads = keras.callbacks.BackupAndRestore
    container.callbacks = sorted(container.callbacks, key=lambda one: not isinstance(one, loads))


def undisturbed(callbacks: Sequence[Any], ours: Any) -> bool:
    """Return whether no other callback can look at weights from an epoch's first batch to the end of `ours`.

    Those of Keras do not, and those of nnlo know how to.
    """
    place = next(index for index, one in enumerate(callbacks) if one is ours)
    return not any(
        _overrides(one, hook)
        for index, one in enumerate(callbacks)
        if index != place and _foreign(one)
        for hook in (*_BETWEEN_BATCHES, *(["on_epoch_end"] if index < place else []))
    )


def _foreign(callback: Any) -> bool:
    of_keras = type(callback).__module__.startswith("keras.")
    return isinstance(callback, keras.callbacks.LambdaCallback) or not (
        of_keras or isinstance(callback, RankCallback)
    )


def _overrides(callback: Any, hook: str) -> bool:
    return getattr(getattr(callback, hook), "__func__", None) is not getattr(keras.callbacks.Callback, hook)


def last_of(container: Any, callback: Any) -> list[Callable[[], object]]:
    """Let `callback` be the last that is called; return what undoes it."""
    everything = container.callbacks
    container.callbacks = [*(one for one in everything if one is not callback), callback]

    def as_before() -> None:
        container.callbacks = everything

    return [as_before]


def own_logs(model: Any) -> list[Callable[[], object]]:
    """Let a server's `fit` report what serving returned, not metrics that have seen no batch."""
    evaluate = type(model).evaluate

    def evaluated(*args: Any, **options: Any) -> Any:
        del model.get_metrics_result
        try:
            return evaluate(model, *args, **options)
        finally:
            model.get_metrics_result = dict

    model.get_metrics_result = dict
    model.evaluate = evaluated

    def undo() -> None:
        for name in ("get_metrics_result", "evaluate"):
            if name in vars(model):
                delattr(model, name)

    return [undo]
