"""A training that can be interrupted and started again."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras

import nnlo_common
from nnlo_common import ConfigurationError
from nnlo_common._files import usable, whole
from nnlo_common._numbers import whole_number
from nnlo_keras._callbacks._companion import Companion, numbers
from nnlo_keras._callbacks._sharing import share
from nnlo_keras._wrapper import wrapper_of

if TYPE_CHECKING:
    from nnlo_keras._distribute import Distribute

__all__ = ["Checkpoint"]

# Within model.keras, so that a model and what is known about it cannot be of different epochs.
_ENTRY = "progress.json"
_ANEW = "name another folder, or delete this one to begin anew"


class Checkpoint(Companion):
    """Saves the training, and goes on where it was when the same command is started again.

    The rank that has the centre writes `model.keras`, an ordinary Keras file, and `progress.json`, for you to
    read: epoch, versions, algorithm, history. Each replaces the one before only when it is complete, so that
    the training may be killed at any time. Started again, that rank loads weights and optimizer, the others
    get all of it from there, and all go on with the next epoch; the folder has to be on that rank's host
    only. A training that is complete returns at once; one that a callback has stopped goes on.

    A folder that belongs to another training (told by the shapes and types of the weights, the optimizer and
    the algorithm with its options) or is damaged is refused, and never written to.

    Not kept yet: what workers have besides the centre (their own weights and optimizers, where the algorithm
    has such), the algorithm's own state (the outer momentum of DiLoCo), the position within an epoch, the
    states of shuffling and of other callbacks. With several servers it is refused, since each has a part of
    the optimizer.

    Args:
        folder: where to; made if it is not there.
        every: epochs between two; the last is saved in any case.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> x = np.ones((4, 1))
        >>> def train(folder):
        ...     model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        ...     return model.fit(x, x, epochs=3, callbacks=[Checkpoint(folder)], verbose=0).epoch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     train(folder), train(folder)
        ([0, 1, 2], [])
    """

    meets = True

    def __init__(self, folder: str | Path, every: int = 1) -> None:
        super().__init__()
        self.folder, self.every = Path(folder), whole_number("every", every, 1)

    def before_start(self, role: str) -> None:
        """Load what there is, where the model will be the centre."""
        super().before_start(role)
        self._epoch, self._history = 0, dict[str, list[float]]()
        wrapper = wrapper_of(self.model.optimizer)
        if wrapper is not None and wrapper.servers > 1:
            raise ConfigurationError(
                f"Checkpoint({str(self.folder)!r}) was asked for with servers={wrapper.servers}, but keeps "
                "the optimizer of one server only so far; use servers=1"
            )
        if self.has_center:
            usable(f"Checkpoint({str(self.folder)!r})", self._model_file)
            self._load()

    def after_start(self, distribute: Distribute | None) -> None:
        """Let all ranks begin where the training was."""
        super().after_start(distribute)
        if self.team is not None:
            self._epoch = self.team.copied({"epoch": self._epoch})["epoch"]
            if self._epoch:
                share(self.model, self.team)
        # What fit looks at when it begins to count epochs.
        self.model._initial_epoch = self._epoch or None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save, if it is time to."""
        for name, value in numbers(logs).items():
            self._history.setdefault(name, []).append(value)
        last = self.model.stop_training or epoch + 1 == self.params.get("epochs")
        if self.has_center and ((epoch + 1) % self.every == 0 or last):
            self._save(epoch + 1)

    def on_train_end(self, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Let another fit count for itself."""
        self.model._initial_epoch = None

    @property
    def _model_file(self) -> Path:
        return self.folder / "model.keras"

    def _facts(self) -> dict[str, Any]:
        """What tells this training from others."""
        optimizer, algorithm = self.model.optimizer, "none"
        wrapper = wrapper_of(optimizer)
        if wrapper is not None:
            optimizer = wrapper.inner_optimizer
            options = ", ".join(f"{name}={value!r}" for name, value in wrapper._own.items())
            algorithm = f"{type(wrapper).__name__}({options})"
        weights = [f"{weight.dtype}{list(weight.shape)}" for weight in self.model.weights]
        return {"algorithm": algorithm, "optimizer": type(optimizer).__name__, "weights": weights}

    def _save(self, epochs: int) -> None:
        versions = {"keras": keras.__version__, "nnlo": nnlo_common.__version__}
        progress = {"epoch": epochs, **versions, **self._facts(), "history": self._history}
        text = json.dumps(progress, indent=1)
        with whole(self._model_file) as fresh:
            self.model.save(fresh)
            with zipfile.ZipFile(fresh, "a") as archive:
                archive.writestr(_ENTRY, text)
        with whole(self.folder / "progress.json") as fresh:
            fresh.write_text(text)

    def _load(self) -> None:
        if not self._model_file.exists():
            if (self.folder / "progress.json").exists():
                raise self._refusal("has progress.json, but model.keras is missing")
            return
        progress = self._read()
        for name, fact in self._facts().items():
            there, here = progress.get(name), fact
            if there != here:
                if isinstance(there, list):
                    there, here = _first_difference(there, here)
                raise self._refusal(f"is of another training: {name} is {there} there, but {here} here")
        if not self.model.optimizer.built:
            self.model.optimizer.build(self.model.trainable_variables)
        try:
            self.model.load_weights(self._model_file)
        except (OSError, ValueError, KeyError) as error:
            raise self._refusal(f"has a model.keras that Keras cannot load ({error})") from error
        self._epoch, self._history = progress["epoch"], progress["history"]

    def _read(self) -> dict[str, Any]:
        """Return what is known about the saved model, having checked that the file is whole."""
        try:
            with zipfile.ZipFile(self._model_file) as archive:
                damaged = archive.testzip()
                if damaged is not None:
                    raise self._refusal(f"has a damaged model.keras ({damaged})")
                if _ENTRY not in archive.namelist():
                    raise self._refusal("has a model.keras that no Checkpoint has written")
                progress: dict[str, Any] = json.loads(archive.read(_ENTRY))
        except (zipfile.BadZipFile, OSError, json.JSONDecodeError) as error:
            raise self._refusal(f"has a damaged model.keras ({error})") from error
        return progress

    def _refusal(self, found: str) -> ConfigurationError:
        return ConfigurationError(f"Checkpoint({str(self.folder)!r}): the folder {found}; {_ANEW}")


def _first_difference(there: list[str], here: list[str]) -> tuple[str, str]:
    for index, (one, other) in enumerate(zip(there, here, strict=False)):
        if one != other:
            return f"{one} (number {index})", other
    return f"{len(there)} of them", f"{len(here)}"
