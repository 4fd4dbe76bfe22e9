"""Keras half of `nnlo train`; it uses the plug-in as a user's script would."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import keras
import numpy as np

import nnlo_keras
from nnlo_common import ConfigurationError
from nnlo_common.plugin import RunPlan, Trainer, assigned, brief, launched, seed_random, speaks, whole
from nnlo_keras._hdf5 import H5Sequence

__all__ = ["forget", "load", "prepare", "seed"]

#: What `compile` understands besides the names of `keras.metrics`.
_SPOKEN = ("accuracy", "acc", "crossentropy", "ce")
_NO_LOSSES = ("get", "serialize", "deserialize")


def seed(number: int) -> None:
    """Seed everything that Keras draws from."""
    if keras.backend.backend() == "tensorflow":
        keras.utils.set_random_seed(number)
        return
    # On other back ends that would load TensorFlow, if it is installed, which takes seconds.
    seed_random(number)
    if keras.backend.backend() == "torch":
        torch = importlib.import_module("torch")
        torch.manual_seed(number)


def load(path: Path, trusted: bool) -> Any:
    """Return the model of a JSON or .keras file, whose description has been looked at.

    Args:
        path: of the file.
        trusted: whether it may bring code.
    """
    try:
        if path.suffix == ".json":
            told = json.loads(path.read_text("utf-8"))
            model = keras.saving.deserialize_keras_object(told, safe_mode=not trusted)
        else:
            model = keras.models.load_model(path, compile=False, safe_mode=not trusted)
    except Exception as error:  # whatever Keras raises for what it cannot build
        raise ConfigurationError(
            f"--model {path}: Keras {keras.__version__} cannot make the model of it: {brief(str(error))}\n"
            "Make the file anew with this version, or give a Python file with get_model()"
        ) from None
    return model


def forget() -> None:
    """Give back what models of before hold; layers of the next are named as those of a first one."""
    keras.utils.clear_session()


def prepare(plan: RunPlan) -> KerasTrainer:
    """Return the training that is planned."""
    return KerasTrainer(plan)


class KerasTrainer(Trainer):
    """A training with Keras.

    Args:
        plan: what it is to be.
    """

    def __init__(self, plan: RunPlan) -> None:
        super().__init__(plan)
        settings = plan.settings
        self._model, self._inner = self.model, plan.made_optimizer(keras.optimizers)
        # Keras holds it in 32 bits; told by as many figures as were given.
        self.learning_rate = float(str(np.float32(keras.ops.convert_to_numpy(self._inner.learning_rate))))
        options: dict[str, Any] = {"servers": settings.servers, **settings.algorithm}
        wrapper = getattr(nnlo_keras, plan.wrapper)(self._inner, **options)
        self._loss, self._metrics = _loss(plan), [_metric(plan, name) for name in settings.metrics]
        self._open(H5Sequence, {"servers": settings.servers}, {"shuffle": False, "shard": False})
        self._model.compile(optimizer=wrapper, loss=self._loss, metrics=self._metrics)
        self._note_metrics(self._tried(*plan.data.first()))
        self._distribute = nnlo_keras.Distribute(stall_timeout_s=settings.stall_timeout)
        world = launched()
        self.role = "alone" if world is None else assigned(world, settings.servers).title

    def report(self) -> dict[str, Any]:
        """Return what this rank has seen of the exchanges; `Distribute` counts batches, not samples."""
        if self.role == "alone":
            return {}
        told = asdict(self._distribute.report)
        return {"batches": told.pop("samples")} | told

    def train(self, folder: Path) -> dict[str, list[float]]:
        """Fit, and return the history: on a server with the centre's metrics, on a worker with its own."""
        fitted = self._model.fit(
            self._train,
            epochs=self._settings.epochs,
            validation_data=self._val,
            callbacks=[self._distribute, *self._callbacks(folder)],
            verbose=2 if self._plan.watch is None else 0,
        )
        return {name: [float(value) for value in values] for name, values in fitted.history.items()}

    def save(self, folder: Path) -> Path:
        """Write the model with the optimizer itself, so that it can be loaded without nnlo."""
        self._model.compile(optimizer=self._inner, loss=self._loss, metrics=self._metrics)
        with whole(folder / "model.keras") as fresh:
            self._model.save(fresh)
        return folder / "model.keras"

    def _tried(self, x: Any, y: Any) -> list[str]:
        """Try the model on some samples, and return the names of what is measured.

        Raises:
            ConfigurationError: model, samples and loss do not fit together.
        """
        model = self._model
        ends = [getattr(model, name, None) for name in ("inputs", "outputs")]
        takes, gives = (_shapes(end) if end else "anything" for end in ends)
        with self._trying(_shapes(x), _shapes(y), f", and the model takes {takes} and gives {gives}"):
            output = model(x, training=False)
            _check_alike(output, y, self._loss)
            model.compute_loss(x=x, y=y, y_pred=output, training=False)
            measured = list(model.compute_metrics(x, y, output))
            model.reset_metrics()
        return ["loss", *(name for name in measured if name != "loss")]

    def _callbacks(self, folder: Path) -> list[Any]:
        settings = self._settings
        found: list[Any] = []
        if settings.early_stopping is not None:
            patience, mode = settings.early_stopping, self._stop_mode
            found.append(keras.callbacks.EarlyStopping(self._stop_by, patience=patience, mode=mode))
        if settings.target is not None:
            found.append(keras.callbacks.LambdaCallback(on_epoch_end=self._stop_at_target))
        if settings.checkpoint is not None:
            found.append(nnlo_keras.Checkpoint(folder / "checkpoint", every=settings.checkpoint))
        if settings.monitor:
            found.append(nnlo_keras.Monitor(folder / "monitor.jsonl"))
        if settings.timeline:
            found.append(nnlo_keras.Timeline(folder / "timeline.json"))
        if self._plan.watch is not None:
            found.append(keras.callbacks.LambdaCallback(on_epoch_end=self._tell))
        return found

    def _tell(self, epoch: int, logs: Mapping[str, Any]) -> None:
        """Tell whoever watches of an epoch."""
        assert self._plan.watch is not None  # else nobody would ask
        self._plan.watch(epoch, {name: float(value) for name, value in logs.items()})

    def _stop_at_target(self, _epoch: int, logs: Mapping[str, Any]) -> None:
        """End the training when the centre is good enough; a worker's own metrics do not count."""
        assert self._settings.target is not None  # else nobody would ask
        metric, reached = self._settings.target
        if speaks(self._distribute.role) and metric in logs and reached(float(logs[metric])):
            self._model.stop_training = True


def _loss(plan: RunPlan) -> Any:
    known = [one for one in dir(keras.losses) if one[0].islower() and one not in _NO_LOSSES]
    return plan.resolved("--loss", plan.settings.loss, keras.losses.get, known)


def _metric(plan: RunPlan, name: str) -> Any:
    known = [one for one in dir(keras.metrics) if one[0].isupper() and one not in ("Metric", "Mean")]
    return plan.resolved("--metrics", name, _measured, [*_SPOKEN[:1], *known])


def _measured(name: str) -> str:
    """The name of a metric, which each `compile` makes anew; an error where there is none."""
    if name not in _SPOKEN:
        keras.metrics.get(name)
    return name


def _check_alike(output: Any, labels: Any, loss: Any) -> None:
    """Refuse labels that Keras would broadcast against the output: a loss is computed all the same."""
    name = getattr(loss, "__name__", type(loss).__name__).lower()
    own = getattr(loss, "__module__", "").startswith("keras.")
    shapes = [tuple(getattr(one, "shape", ())) for one in (output, labels)]
    if not own or "sparse" in name or "ctc" in name or not all(shapes):
        return
    plain = [tuple(size for size in shape[1:] if size != 1) for shape in shapes]
    if plain[0] != plain[1]:
        raise ValueError(f"{name} compares an output of {shapes[0]} with labels of {shapes[1]}")


def _shapes(some: Any) -> str:
    shapes = [str((None, *one.shape[1:])) for one in keras.tree.flatten(some)]
    return ", ".join(shapes)
