"""Files that a script writes by `model.save`: a warning, as all ranks write the same file."""

from __future__ import annotations

import functools
import inspect
import re
import threading
import weakref
from collections.abc import Callable
from typing import Any

import keras

from nnlo_common.plugin import Session, names_rank, path_of, warn

__all__ = ["warn_of_saves"]

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
