"""Keras half of `nnlo train`; it uses the plug-in as a user's script would."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import keras
import numpy as np

import nnlo_keras
from nnlo_common import ConfigurationError
from nnlo_common.plugin import (
    RunPlan,
    all_metrics,
    assigned,
    brief,
    launched,
    rises,
    seed_random,
    speaks,
    stop_rules,
    whole,
)
from nnlo_keras._hdf5 import H5Sequence

__all__ = ["Training", "forget", "load", "seed"]

_CHECKPOINT = "checkpoint"
#: What `compile` understands besides the names of `keras.metrics`.
_SPOKEN = ("accuracy", "acc", "crossentropy", "ce")


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


class Training:
    """A training with Keras; see `nnlo_common.commands.train._run_plan.Trainer`.

    Args:
        plan: what it is to be.
    """

    def __init__(self, plan: RunPlan) -> None:
        settings = plan.settings
        self._plan, self._settings = plan, settings
        self._model = self.model = plan.loaded.model
        inner = _optimizer(plan)
        # Keras holds it in 32 bits; told by as many figures as were given.
        self.learning_rate = float(str(np.float32(keras.ops.convert_to_numpy(inner.learning_rate))))
        options: dict[str, Any] = {"servers": settings.servers, **settings.algorithm}
        self._inner, wrapper = inner, getattr(nnlo_keras, plan.wrapper)(inner, **options)
        self._loss, self._metrics = _loss(plan), [_metric(plan, name) for name in settings.metrics]
        data, share = plan.data, {"shuffle": settings.shuffle, "servers": settings.servers}
        self._train = self._sequence(data.train, **share, **data.reading)
        whole = {"shuffle": False, "shard": False}
        self._val = self._sequence(data.val, **whole, **data.val_reading) if data.val else None
        self._model.compile(optimizer=wrapper, loss=self._loss, metrics=self._metrics)
        measured = _tried(self._model, *plan.data.first(), self._loss)
        self._stop_by = stop_rules(settings, measured, self._val is not None)
        self.metrics = all_metrics(measured, self._val is not None)
        self._distribute = nnlo_keras.Distribute(stall_timeout_s=settings.stall_timeout)
        world = launched()
        self.role = "alone" if world is None else assigned(world, settings.servers).title

    def join(self) -> None:
        """Do nothing: `fit` joins."""

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

    def close(self) -> None:
        """Close the files."""
        for sequence in (self._train, self._val):
            if sequence is not None:
                sequence.close()

    def _sequence(self, files: Sequence[str], **options: Any) -> H5Sequence:
        settings = self._settings
        return H5Sequence(files, batch_size=settings.batch, seed=settings.seed, **options)

    def _callbacks(self, folder: Path) -> list[Any]:
        settings = self._settings
        found: list[Any] = []
        if settings.early_stopping is not None:
            mode = "max" if rises(self._stop_by) else "min"
            found.append(
                keras.callbacks.EarlyStopping(self._stop_by, patience=settings.early_stopping, mode=mode)
            )
        if settings.target is not None:
            found.append(_Target(self._distribute, settings.target))
        if settings.checkpoint is not None:
            found.append(nnlo_keras.Checkpoint(folder / _CHECKPOINT, every=settings.checkpoint))
        if settings.monitor:
            found.append(nnlo_keras.Monitor(folder / "monitor.jsonl"))
        if settings.timeline:
            found.append(nnlo_keras.Timeline(folder / "timeline.json"))
        if self._plan.watch is not None:
            found.append(_Watch(self._plan.watch))
        return found


class _Watch(keras.callbacks.Callback):
    """Tells whoever watches of each epoch."""

    def __init__(self, watch: Callable[[int, Mapping[str, float]], object]) -> None:
        super().__init__()
        self._watch = watch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Tell."""
        self._watch(epoch, {name: float(value) for name, value in (logs or {}).items()})


class _Target(keras.callbacks.Callback):
    """Ends the training when the centre is good enough."""

    def __init__(self, distribute: nnlo_keras.Distribute, target: Any) -> None:
        super().__init__()
        self._distribute, self._target = distribute, target

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Look; a worker's own metrics do not count."""
        value = (logs or {}).get(self._target.metric)
        if speaks(self._distribute.role) and value is not None and self._target(float(value)):
            self.model.stop_training = True


def _optimizer(plan: RunPlan) -> Any:
    base = keras.optimizers.Optimizer
    found = [one for name, one in vars(keras.optimizers).items() if name[0] != "_" and inspect.isclass(one)]
    return plan.made_optimizer([one for one in found if issubclass(one, base) and one is not base])


def _loss(plan: RunPlan) -> Any:
    name = plan.settings.loss
    own = plan.from_module(name)
    if own is not None:
        return own
    try:
        return keras.losses.get(name)
    except (TypeError, ValueError):
        known = [one for one in dir(keras.losses) if one[0].islower() and one not in ("get", "serialize")]
        raise plan.unknown("--loss", name, [one for one in known if one != "deserialize"]) from None


def _metric(plan: RunPlan, name: str) -> Any:
    own = plan.from_module(name)
    if own is not None or name in _SPOKEN:
        return own or name
    try:
        keras.metrics.get(name)
    except (TypeError, ValueError):
        known = [one for one in dir(keras.metrics) if one[0].isupper() and one not in ("Metric", "Mean")]
        raise plan.unknown("--metrics", name, [*_SPOKEN[:1], *known]) from None
    return name


def _tried(model: Any, x: Any, y: Any, loss: Any) -> list[str]:
    """Try the model on some samples, and return the names of what is measured.

    Raises:
        ConfigurationError: model, samples and loss do not fit together.
    """
    try:
        output = model(x, training=False)
        _check_alike(output, y, loss)
        model.compute_loss(x=x, y=y, y_pred=output, training=False)
        measured = list(model.compute_metrics(x, y, output))
        model.reset_metrics()
    except Exception as error:  # whatever a layer or a loss raises
        raise ConfigurationError(
            f"the model and the samples do not fit: features {_shapes(x)}, labels {_shapes(y)}, and the "
            f"model takes {_shapes(model.inputs) if getattr(model, 'inputs', None) else 'anything'}"
            f" and gives {_shapes(model.outputs) if getattr(model, 'outputs', None) else 'anything'}\n"
            f"{type(error).__name__}: {brief(str(error))}\n"
            "Choose another --loss, --features-name or --labels-name, or adapt the arrays by get_features() "
            "or get_labels() of a Python file"
        ) from None
    return ["loss", *(name for name in measured if name != "loss")]


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
