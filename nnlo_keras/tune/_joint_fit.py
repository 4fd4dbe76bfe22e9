"""Joint `fit` of a trial by several ranks, each on its share, with the same history."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import keras_tuner
import numpy as np

from nnlo_common import ConfigurationError
from nnlo_common.plugin import RankWorld
from nnlo_keras._distribute import Distribute
from nnlo_keras._model_optimizers import any_wrapper_in
from nnlo_keras.tune._data import shared

__all__ = ["fit_together"]


class _Fatal(ConfigurationError, keras_tuner.errors.FatalValueError):
    """Error at which keras-tuner ends a search."""


def fit_together(
    model: Any,
    world: RankWorld,
    args: tuple[Any, ...],
    options: Mapping[str, Any],
    *,
    block_size: int,
    shard: bool,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments for this rank's `fit`, and make `fit` return the first rank's history.

    Args:
        model: the built model.
        world: the ranks that train it.
        args: the positional arguments of `search`.
        options: its keyword arguments, with the callbacks.
        block_size: the ranks per trial that the user asked for.
        shard: whether to deal out the samples.

    Raises:
        ConfigurationError: the model's optimizer is not wrapped; this ends the search.
    """
    wrapper = any_wrapper_in(model)
    if wrapper is None:
        found = type(model.optimizer).__name__
        raise _Fatal(
            f"block_size={block_size} trains each trial on {block_size} ranks, but build() returns a model "
            f"with a plain {found}; wrap it there, e.g. nnlo_keras.Downpour({found}(...)), or give MPITuner "
            'distribute="downpour", or block_size=1'
        )
    callbacks = options["callbacks"]
    if not any(isinstance(one, Distribute) for one in callbacks):
        callbacks = [*callbacks, Distribute()]
    _share_history(model, world)
    options = {**options, "callbacks": callbacks}
    return shared(args, options, wrapper.ranks) if shard else (args, options)


def _share_history(model: Any, world: RankWorld) -> None:
    """Make `fit` return the first rank's history on all ranks; the first rank validates."""
    fit: Callable[..., Any] = model.fit

    def fit_and_share(*args: Any, **options: Any) -> Any:
        history = fit(*args, **options)
        mine = {"epoch": history.epoch, "history": history.history} if world.rank == 0 else {}
        answer = json.loads(world.gather_text(json.dumps(mine, default=_plain))[0])
        history.epoch, history.history = answer["epoch"], answer["history"]
        return history

    model.fit = fit_and_share


def _plain(value: Any) -> Any:
    return np.asarray(value).tolist()
