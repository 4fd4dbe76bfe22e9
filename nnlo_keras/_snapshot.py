"""Snapshot of one rank's variables, random states and callbacks in a Keras training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import keras
import numpy as np

from nnlo_common import ConfigurationError
from nnlo_common.plugin import packed_tree, random_numbers
from nnlo_keras._compat import EMA_SWAPPED, global_seeds
from nnlo_keras._variable_layout import memory_of

__all__ = [
    "Decisions",
    "assign",
    "check_random",
    "load_random",
    "random_states",
    "until",
    "untrained",
    "values_of",
]

#: Attributes of Keras's own callbacks on which their later decisions depend.
_SEEN = (
    "wait",
    "stopped_epoch",
    "best",
    "best_epoch",
    "best_weights",
    "cooldown_counter",
    EMA_SWAPPED,
)
#: Methods of a user's callback whose state is saved.
_OWN = ("state_dict", "load_state_dict")
_DECIDING = (
    keras.callbacks.EarlyStopping,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.SwapEMAWeights,
)


def values_of(variables: Iterable[Any]) -> list[Any]:
    """Return the values of variables; 16-bit floats unknown to NumPy as float32."""
    arrays = [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]
    return [array.astype(np.float32) if array.dtype.kind == "V" else array for array in arrays]


def assign(variables: Sequence[Any], values: Sequence[Any], what: str) -> None:
    """Assign the values that `values_of` returned.

    Raises:
        ConfigurationError: the variables have other shapes.
    """
    here, there = ([tuple(one.shape) for one in some] for some in (variables, values))
    if here != there:
        raise ConfigurationError(
            f"{what} were saved with the shapes {there}, but have the shapes {here} now; make the same model "
            "and optimizer"
        )
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def untrained(model: Any, trained: Iterable[Any]) -> list[Any]:
    """Return a model's variables except `trained`: statistics, frozen weights, seed generators' states."""
    known = {memory_of(variable) for variable in trained}
    return [variable for variable in model.variables if memory_of(variable) not in known]


def random_states() -> dict[str, Any]:
    """Return the states of all random generators that a script may use, as far as they are accessible."""
    seeds = global_seeds()
    states = {**random_numbers.random_states(), "keras": None if seeds is None else values_of([seeds.state])}
    if keras.backend.backend() == "torch":
        import torch

        states["torch"] = torch.get_rng_state().numpy().copy()
    return states


def load_random(states: Mapping[str, Any]) -> None:
    """Restore the random generators' states."""
    if states["keras"] is not None:
        # Creating the Keras generator draws from Python's, whose state is restored afterwards.
        seeds = global_seeds(make=True)
        assign([seeds.state], states["keras"], "the seeds of Keras")
    random_numbers.load_random(states)
    if "torch" in states:
        import torch

        torch.set_rng_state(torch.from_numpy(states["torch"]))


def check_random(states: Mapping[str, Any]) -> None:
    """Refuse states that the generators cannot have; change none.

    Raises:
        ValueError: there is one.
        TypeError: there is one.
        RuntimeError: there is one.
    """
    random_numbers.check_random(states)
    if states["keras"] is not None and not all(isinstance(one, np.ndarray) for one in states["keras"]):
        raise TypeError("the seeds of Keras are no arrays")
    if "torch" in states and keras.backend.backend() == "torch":
        import torch

        torch.Generator().set_state(torch.from_numpy(states["torch"]))


class Decisions:
    """State of a `fit`'s callbacks: the history, and the values that their decisions depend on.

    Args:
        container: the callbacks.

    Raises:
        ConfigurationError: a callback has only one of state_dict() and load_state_dict().
    """

    def __init__(self, container: Any) -> None:
        self._callbacks = [] if container is None else container.callbacks
        for one in self._callbacks:
            has = [name for name in _OWN if callable(getattr(one, name, None))]
            if len(has) == 1:
                raise ConfigurationError(
                    f"the callback {type(one).__name__} has only {has[0]}(), but a checkpoint needs "
                    f"{' and '.join(f'{name}()' for name in _OWN)}; define both or neither"
                )
        histories = [one for one in self._callbacks if isinstance(one, keras.callbacks.History)]
        self._history = histories[-1] if histories else None

    def state(self, *, own: bool = True) -> dict[str, Any]:
        """Return the state for a checkpoint, that of the user's callbacks if `own`."""
        history = self._history
        return {
            "epochs": [] if history is None else list(history.epoch),
            "history": {}
            if history is None
            else {name: list(map(_plain, values)) for name, values in history.history.items()},
            "seen": [
                {name: getattr(one, name) for name in _SEEN if hasattr(one, name)} for one in self._deciding()
            ],
            "own": [[type(one).__name__, _own_state(one)] for one in self._own()] if own else [],
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuse the state of other callbacks.

        Raises:
            ConfigurationError: the callbacks with a state_dict() are not the same, in the same order; or the
                state has attributes that are never saved.
        """
        if strange := {name for seen in state["seen"] for name in seen} - {*_SEEN}:
            raise ConfigurationError(
                f"the saved callbacks have the attributes {sorted(strange)}, which are never saved; is the "
                "state damaged?"
            )
        there, here = [name for name, _ in state["own"]], [type(one).__name__ for one in self._own()]
        if there != here:
            raise ConfigurationError(
                f"the callbacks with a state_dict() were {there} when the checkpoint was made, but are "
                f"{here} now; pass fit() the same ones in the same order"
            )

    def load(self, state: Mapping[str, Any], epoch: int) -> None:
        """Restore the state before this epoch; call it after all callbacks have begun."""
        history = self._history
        if history is not None:
            history.epoch, history.history = list(state["epochs"]), dict(state["history"])
        deciding = self._deciding()
        if len(deciding) == len(state["seen"]):
            for one, seen in zip(deciding, state["seen"], strict=True):
                vars(one).update(seen)
        for one, (_, seen) in zip(self._own(), state["own"], strict=True):
            one.load_state_dict(seen)
        self._log_from(state, epoch)

    def _log_from(self, state: Mapping[str, Any], epoch: int) -> None:
        """Let files of logged epochs have those before this one, and no others."""
        for one in self._callbacks:
            if isinstance(one, keras.callbacks.CSVLogger):
                if one.append:
                    _forget_rows(one, epoch)
                else:
                    self._log_again(one, state)

    def told(self) -> dict[str, Any]:
        """Return the state for the rank that goes on in this one's place, whose list has another order."""
        state = self.state(own=False)
        for seen in state["seen"]:
            seen.pop(EMA_SWAPPED, None)  # that one has the centre as it was served
        deciding = [type(one).__name__ for one in self._deciding()]
        own = []
        for one in self._own():
            with suppress(ConfigurationError):  # it cannot be packed: there it begins anew
                own.append([type(one).__name__, _own_state(one)])
        return state | {
            "seen": [list(pair) for pair in zip(deciding, state["seen"], strict=True)],
            "own": own,
        }

    def missed(self, told: Mapping[str, Any]) -> dict[int, dict[str, float]]:
        """Return this rank's own metrics of the epochs that another's `told` does not know."""
        history, known = self._history, told.get("epochs", ())
        if history is None or not hasattr(history, "epoch"):  # it has not begun
            return {}
        return {
            epoch: {name: values[place] for name, values in history.history.items() if place < len(values)}
            for place, epoch in enumerate(history.epoch)
            if epoch not in known
        }

    def go_on_from(self, told: Mapping[str, Any], epoch: int, found: Mapping[str, float]) -> None:
        """Go on from what `told` has returned on the rank in whose place this one goes on, in this epoch.

        Args:
            told: see above; empty: nothing.
            epoch: the number of the epoch.
            found: metrics of the validation at the end of the epochs before this one that `told` lacks.
        """
        missed, history = self.missed(told), self._history
        if history is not None and hasattr(history, "epoch"):
            values = {name: list(one) for name, one in told.get("history", {}).items()}
            for logs in missed.values():
                for name, value in {**logs, **found}.items():
                    if name in values or not told:
                        values.setdefault(name, []).append(value)
            history.epoch, history.history = [*told.get("epochs", ()), *missed], values
        for callback, seen in _paired(self._deciding(), told.get("seen", ())):
            callback.__dict__.update(seen)
        for callback, seen in _paired(self._own(), told.get("own", ())):
            callback.load_state_dict(seen)
        if told:
            self._log_from(told, min([epoch, *missed]))

    def complete(self, epoch: int, logs: Mapping[str, Any]) -> None:
        """Add what callbacks have put into an epoch's metrics to the history, where it has no number yet."""
        if self._history is not None:
            place = self._history.epoch.index(epoch)
            for name, values in self._history.history.items():
                if len(values) == place and name in logs:
                    values.append(logs[name])

    def _deciding(self) -> list[Any]:
        return [one for one in self._callbacks if isinstance(one, _DECIDING)]

    def _own(self) -> list[Any]:
        return [one for one in self._callbacks if hasattr(one, _OWN[0])]

    def _log_again(self, logger: Any, state: Mapping[str, Any]) -> None:
        """Rewrite the earlier epochs' rows: the logger has started a new file."""
        epochs, history = state["epochs"], state["history"]
        for place, epoch in enumerate(epochs):
            logs = {name: values[place] for name, values in history.items() if len(values) == len(epochs)}
            logger.on_epoch_end(epoch, logs)


def until(told: Mapping[str, Any], epoch: int) -> Mapping[str, Any]:
    """Return what `Decisions.told` has told, with the history before this epoch."""
    count = sum(one < epoch for one in told.get("epochs", ()))
    if not told or count == len(told["epochs"]):
        return told
    history = {name: values[:count] for name, values in told["history"].items()}
    return {**told, "epochs": told["epochs"][:count], "history": history}


def _paired(callbacks: Iterable[Any], told: Iterable[Sequence[Any]]) -> Iterator[tuple[Any, Any]]:
    """Give each callback with what another rank has told of one of its class."""
    left = list(told)
    for one in callbacks:
        found = next((pair for pair in left if pair[0] == type(one).__name__), None)
        if found is not None:
            left.remove(found)
            yield one, found[1]


def _forget_rows(logger: Any, epoch: int) -> None:
    """Remove the rows at the end of the file from `epoch` on: these epochs run again.

    Rows further up may belong to other trainings.
    """
    rows, separator = Path(logger.filename).read_bytes().splitlines(keepends=True), logger.sep.encode()
    while rows and (at := rows[-1].partition(separator)[0]).isdigit() and int(at) >= epoch:
        rows.pop()
    logger.csv_file.truncate(sum(map(len, rows)))


def _own_state(callback: Any) -> Any:
    """Return the state of a user's callback; refuse one that cannot be saved."""
    state, name = callback.state_dict(), type(callback).__name__
    try:
        packed_tree({f"{name}.state_dict()": state})
    except ConfigurationError as error:
        raise ConfigurationError(f"the callback {name} cannot be saved in a checkpoint: {error}") from None
    return state


def _plain(value: Any) -> Any:
    return float(value) if np.ndim(value) == 0 else np.asarray(value)
