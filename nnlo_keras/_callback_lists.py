"""Removal and reordering of callbacks, so that only the rank with the centre writes, stops and reports."""

from __future__ import annotations

import functools
import inspect
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras

from nnlo_common import ConfigurationError
from nnlo_common.plugin import Session, names_rank, path_of, warn
from nnlo_keras._callbacks._rank_callback import RankCallback

__all__ = [
    "bring_back",
    "drop_center_callbacks",
    "last_of",
    "own_logs",
    "refuse_averages",
    "refuse_backup",
    "refuse_loading",
    "restored_first",
    "undisturbed",
    "warn_of_saves",
]

# -- files that a script writes by `model.save`: a warning, as all ranks write the same file -----------

_WITH = ", where distribute is the Distribute() that fit was given"
_METHODS = ("save", "save_weights", "export")
#: Packages that choose the rank that saves.
_CHOOSING = {"keras", "keras_tuner", "nnlo_common", "nnlo_keras"}
#: A part of a path that `tempfile` has named, differently on each rank.
_TEMPORARY = re.compile(r"(^|[/\\])tmp[a-z0-9_]{8}([/\\]|$)")


def warn_of_saves(model: Any, team: Session) -> None:
    """Warn once if the script saves the model on the second rank, by a method of the model.

    Keras scripts save after `fit`, so this lasts as long as the model.

    Args:
        model: the model that trains.
        team: this rank's session.
    """
    if team.rank == 1:
        _saves.watch(model, team.rank)


class _SavedModels:
    """Replaces the saving methods of `keras.Model` while a watched model lives, and restores them afterwards.

    A method that somebody else has replaced meanwhile stays as it is.
    """

    def __init__(self) -> None:
        # Reentrant: a garbage collection within it may end another watch.
        self._lock = threading.RLock()
        self._watched: dict[int, int] = {}  # the ranks, by the ids of their models
        self._replaced: dict[str, tuple[Any, Any]] = {}

    def watch(self, model: Any, rank: int) -> None:
        with self._lock:
            if id(model) not in self._watched:
                weakref.finalize(model, self._forget, id(model))
            self._watched[id(model)] = rank
            for name in _METHODS:
                before = getattr(keras.Model, name)
                if name not in self._replaced or self._replaced[name][1] is not before:
                    ours = _looking(before, functools.partial(self._look, name))
                    self._replaced[name] = before, ours
                    setattr(keras.Model, name, ours)

    def _forget(self, model: int) -> None:
        with self._lock:
            self._watched.pop(model, None)
            if self._watched:
                return
            for name, (before, ours) in self._replaced.items():
                if getattr(keras.Model, name) is ours:
                    setattr(keras.Model, name, before)
            self._replaced.clear()

    def _look(self, method: str, model: Any, file: Any, module: str) -> None:
        rank, path = self._watched.get(id(model)), path_of(file)
        if rank is None or path is None or module.partition(".")[0] in _CHOOSING:
            return
        if names_rank(path, rank) or _TEMPORARY.search(path):
            return
        self._watched.pop(id(model), None)
        warn(
            f"rank {rank} writes {path} by model.{method}, and all other ranks that run this line write the "
            f"same file at the same time; write {_instead(method, path)}"
        )


def _instead(method: str, path: str) -> str:
    if method == "export":
        return f'if distribute.speaks: model.export("{path}"){_WITH}'
    return f'distribute.save("{path}"), which writes once{_WITH}'


def _looking(before: Callable[..., Any], look: Callable[[Any, Any, str], None]) -> Callable[..., Any]:
    @functools.wraps(before)
    def save(self: Any, *args: Any, **kwargs: Any) -> Any:
        frame = inspect.currentframe()
        caller = None if frame is None else frame.f_back
        module = "" if caller is None else str(caller.f_globals.get("__name__", ""))
        look(self, args[0] if args else kwargs.get("filepath"), module)
        return before(self, *args, **kwargs)

    return save


_saves = _SavedModels()


#: Callbacks only for the rank with the centre: they write files, stop the training, decide by metrics, or
#: have averages of the centre.
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
        "SwapEMAWeights",
        "TensorBoard",
    )
    if hasattr(keras.callbacks, name)
)

_BETWEEN_BATCHES = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")


def drop_center_callbacks(container: Any, but: type | tuple[type, ...] = ()) -> list[Any]:
    """Remove the callbacks for the centre from a rank's list, except those of some classes; return them.

    They come back only where this rank takes over from the one that has them: the list belongs to this `fit`
    or, if the user made it, to trainings of this rank.
    """
    everyone = container.callbacks
    container.callbacks = [one for one in everyone if isinstance(one, but) or not _is_for_the_centre(one)]
    return [one for one in everyone if one not in container.callbacks]


def bring_back(
    callbacks: Sequence[Any], container: Any, driver: Any, epoch: int, order: Sequence[Any]
) -> None:
    """Put callbacks into a list whose training is in this epoch; they begin here.

    Args:
        callbacks: the callbacks.
        container: the list.
        driver: the `Distribute` in it; none of them comes after it.
        epoch: the number of the epoch.
        order: the list as it was when they were in it.
    """
    # A new list: Keras may be going through the present one.
    found = [*container.callbacks]
    for one in reversed(callbacks):
        later = (other for other in order[order.index(one) + 1 :] if other in found and other is not driver)
        found.insert(min(found.index(next(later, driver)), found.index(driver)), one)
    container.callbacks = found
    for one in callbacks:
        one.set_params(driver.params)
        one.set_model(driver.model)
        if not isinstance(one, keras.callbacks.BackupAndRestore):  # it would load the weights of its backup
            one.on_train_begin()
        one.on_epoch_begin(epoch)


def _is_for_the_centre(callback: Any) -> bool:
    # Optuna's prunes by a metric, too; its package need not be installed.
    return isinstance(callback, _FOR_THE_CENTRE) or type(callback).__name__ == "KerasPruningCallback"


def refuse_loading(container: Any, servers: int) -> None:
    """Refuse callbacks that load earlier weights if there are several servers, each with a part only.

    Raises:
        ConfigurationError: there is one; raised on all ranks.
    """
    for one in container.callbacks:
        if isinstance(one, keras.callbacks.BackupAndRestore):
            asked = "BackupAndRestore"
        elif isinstance(one, keras.callbacks.EarlyStopping) and one.restore_best_weights:
            asked = "EarlyStopping(restore_best_weights=True)"
        else:
            continue
        error = ConfigurationError(
            f"{asked} was given with servers={servers}, but each server has only a part of the training and "
            "would restore earlier weights without the others; use servers=1"
        )
        error.collective = True  # all ranks have the same callbacks
        raise error


def refuse_averages(container: Any, name: str, servers: int, *, on_center: bool) -> None:
    """Refuse callbacks that put an optimizer's averages into the centre, if they are not of the centre.

    Args:
        container: the callbacks.
        name: the algorithm's.
        servers: their number.
        on_center: whether the optimizer, which keeps the averages, steps the centre.

    Raises:
        ConfigurationError: there is one; raised on all ranks.
    """
    if not servers or not any(isinstance(one, keras.callbacks.SwapEMAWeights) for one in container.callbacks):
        return
    if not on_center:
        problem = (
            f"with {name}, but the averages of its optimizer are of each worker's own weights, not of the "
            "centre; use an algorithm whose optimizer runs on the centre, such as Downpour, or servers=0"
        )
    elif servers > 1:
        problem = (
            f"with servers={servers}, but each server has only the averages of its part of the centre; use "
            "servers=1"
        )
    else:
        return
    error = ConfigurationError(f"SwapEMAWeights was given {problem}")
    error.collective = True  # all ranks have the same callbacks
    raise error


def refuse_backup(container: Any) -> None:
    """Refuse BackupAndRestore without a server: it would restore the optimizer on one rank only.

    Raises:
        ConfigurationError: it was given; raised on all ranks.
    """
    if any(isinstance(one, keras.callbacks.BackupAndRestore) for one in container.callbacks):
        error = ConfigurationError(
            "BackupAndRestore was given with servers=0, but it would restore the optimizer on the first rank "
            "only; use nnlo_keras.Checkpoint"
        )
        error.collective = True  # all ranks have the same callbacks
        raise error


def restored_first(container: Any) -> None:
    """Move callbacks that load weights at the start of a training to the front of a server's list."""
    loads = keras.callbacks.BackupAndRestore
    container.callbacks = sorted(container.callbacks, key=lambda one: not isinstance(one, loads))


def undisturbed(callbacks: Sequence[Any], ours: Any) -> bool:
    """Return whether no other callback can read weights from an epoch's first batch to the end of `ours`.

    Keras's own callbacks do not, and nnlo's handle it.
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
    """Move `callback` to the end of the list; return functions that undo it."""
    everything = container.callbacks
    container.callbacks = [*(one for one in everything if one is not callback), callback]

    def as_before() -> None:
        container.callbacks = everything

    return [as_before]


def own_logs(model: Any) -> list[Callable[[], object]]:
    """Let a server's `fit` report the metrics that serving returned; its own have seen no batch."""
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
