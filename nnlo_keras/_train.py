"""Keras half of `nnlo train`; it uses the plug-in as a user's script does."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import keras
import numpy as np

import nnlo_keras
from nnlo_common import ConfigurationError
from nnlo_common.plugin import (
    LARGEST_JSON,
    RunPlan,
    Stopping,
    Trainer,
    brief,
    has_center,
    parsed_json,
    read_whole,
    speaks,
    whole,
)
from nnlo_keras._advise import KerasProbed
from nnlo_keras._compat import seed_generators as seed
from nnlo_keras._compat import synchronise
from nnlo_keras._hdf5 import Batches
from nnlo_keras._inference import KerasCompute, checksum

__all__ = ["fill", "forget", "load", "placed", "prepare", "seed", "tile_parts"]

#: Metrics that `compile` accepts besides the names of `keras.metrics`.
_COMPILE_NAMES = ("accuracy", "acc", "crossentropy", "ce")
_NO_LOSSES = ("get", "serialize", "deserialize")


def load(path: Path, trusted: bool) -> Any:
    """Return the model of a JSON or .keras file that `check_model` has accepted.

    Args:
        path: of the file.
        trusted: whether it may contain code.
    """
    try:
        if path.suffix == ".json":
            told = parsed_json(read_whole(path, LARGEST_JSON))
            model = keras.saving.deserialize_keras_object(told, safe_mode=not trusted)
        else:
            model = keras.models.load_model(path, compile=False, safe_mode=not trusted)
    except Exception as error:  # Keras raises errors of many types here
        raise ConfigurationError(
            f"--model {path}: Keras {keras.__version__} cannot build the model: {brief(str(error))}\n"
            "Save the model again with this version, or give a Python file with get_model()"
        ) from None
    return model


def fill(model: Any, path: Path, trusted: bool) -> None:  # noqa: ARG001 - Keras reads only weights here
    """Load the weights of a `.keras`, `.weights.h5` or `.h5` file into a model, all of them."""
    if not model.built:
        raise ConfigurationError(
            f"--from {path}: get_model() returned a model that has no weights yet; give it an Input, or "
            "call it once"
        )
    model.load_weights(path)


def placed(model: Any) -> Any:
    """Return a model: Keras has made it where it is."""
    return model


def tile_parts(model: Any, precision: str | None) -> Any:
    """Return a model as the core calls it with tiles, its checksum, and the context to run it in."""
    if precision is not None:
        raise ConfigurationError("--precision is for PyTorch; a Keras model has its own dtype policy")
    return KerasCompute(model, tiles=True), checksum([model]), nullcontext()


def forget() -> None:
    """Free the memory of earlier models, and restart the numbering of layer names."""
    keras.utils.clear_session()


def prepare(plan: RunPlan) -> KerasTrainer:
    """Return the training that is planned."""
    return KerasTrainer(plan)


class KerasTrainer(Trainer):
    """A training with Keras.

    Args:
        plan: of the training.
    """

    def __init__(self, plan: RunPlan) -> None:
        super().__init__(plan)
        settings = plan.settings
        self._model, self._inner = self.model, plan.made_optimizer(keras.optimizers)
        # Keras holds it in 32 bits; the text has only the significant digits.
        self.learning_rate = float(str(np.float32(keras.ops.convert_to_numpy(self._inner.learning_rate))))
        if (scale := plan.rate_scale) != 1:
            self._inner.learning_rate = self.learning_rate * scale
        wrapper = plan.wrapped(self._inner, nnlo_keras)
        self._loss, self._metrics = _loss(plan), [_metric(plan, name) for name in settings.metrics]
        self._open(Batches, settings.roles, {"shuffle": False, "shard": False})
        # With weights in the files metrics are weighted, too.
        measured = "metrics" if settings.weights_name is None else "weighted_metrics"
        self._compiled: dict[str, Any] = {"loss": self._loss, measured: self._metrics}
        self._model.compile(optimizer=wrapper, **self._compiled)
        self._note_metrics(self._tried(*plan.data.first()))
        self._distribute = nnlo_keras.Distribute()

    @property
    def role(self) -> str:
        """This rank's part: "alone", "server 0", "worker 0", ..."""
        return self._distribute.role

    def probed(self) -> KerasProbed:
        """Return what `nnlo advise` asks of the training."""
        return KerasProbed(self._model, self._loss, self._inner, self._train, validated=self._val is not None)

    def report(self) -> dict[str, Any]:
        """Return this rank's report on the exchanges; `Distribute` counts batches, not samples."""
        if self.role == "alone":
            return {}
        told = asdict(self._distribute.report)
        return {"batches": told.pop("samples")} | told

    def train(self, folder: Path) -> dict[str, list[float]]:
        """Fit, and return the history: on a server with the centre's metrics, on a worker with its own."""
        ending = _Ending(self._stopping, self._distribute)
        fitted = self._model.fit(
            self._train,
            epochs=self._settings.epochs,
            validation_data=self._val,
            callbacks=[self._distribute, ending, *self._callbacks(folder)],
            verbose=0,  # `Progress` shows more
        )
        if speaks(self._distribute.role) and self._note_end(len(fitted.epoch), ending.epoch):
            self._model.set_weights(ending.weights)
        return {name: [float(value) for value in values] for name, values in fitted.history.items()}

    def save(self, folder: Path) -> Path:
        """Write the model with the unwrapped optimizer, so that it loads without nnlo."""
        self._model.compile(optimizer=self._inner, **self._compiled)
        with whole(folder / "model.keras") as fresh:
            self._model.save(fresh)
        return folder / "model.keras"

    def _tried(self, x: Any, y: Any) -> list[str]:
        """Try the model on some samples, and return the names of the metrics.

        Raises:
            ConfigurationError: model, samples and loss do not fit together.
        """
        model = self._model
        ends = [getattr(model, name, None) for name in ("inputs", "outputs")]
        takes, gives = (_shapes(end) if end else "anything" for end in ends)
        with self._trying(_shapes(x), _shapes(y), f", and the model takes {takes} and gives {gives}"):
            output = model(x, training=False)
            _check_shapes(output, y, self._loss)
            model.compute_loss(x=x, y=y, y_pred=output, training=False)
            measured = model.compute_metrics(x, y, output)
            model.reset_metrics()
        for name, value in measured.items():
            if np.ndim(found := keras.ops.convert_to_numpy(value)):
                raise ConfigurationError(
                    f"--metrics {name} gives {np.size(found)} numbers, but an epoch "
                    "has one of each metric; leave it out"
                )
        return ["loss", *(name for name in measured if name != "loss")]

    def _callbacks(self, folder: Path) -> list[Any]:
        settings = self._settings
        found: list[Any] = []
        found += self._rate_callbacks()
        if settings.checkpoint is not None:
            checkpoint = nnlo_keras.Checkpoint(folder / "checkpoint", every=settings.checkpoint)
            checkpoint.still_ends = self._stopping.replay
            found.append(checkpoint)
        traces: dict[str, Any] = {"timeline": settings.timeline, "profile": settings.profile}
        found.append(nnlo_keras.Report(folder, config=self._config, **traces))
        if self._plan.watch is None:
            found.append(nnlo_keras.Progress(folder, log_to=settings.log_to))
        else:
            found.append(keras.callbacks.LambdaCallback(on_epoch_end=self._report_epoch))
        return found

    def _rate_callbacks(self) -> list[Any]:
        """Return callbacks that set the learning rate."""
        plan, found = self._plan.rates, list[Any]()
        if plan.warm_up:
            found.append(nnlo_keras.WarmUp(plan.warm_up, start=plan.start))
        if plan.kind == "plateau":
            rules = {"mode": self._stopping.mode, "factor": plan.factor, "patience": plan.every}
            by = self._stopping.plateau_by
            found.append(keras.callbacks.ReduceLROnPlateau(by, min_delta=0.0, **rules))
        elif plan:
            rate, warm = self.learning_rate * self._plan.rate_scale, plan.warm_up
            found.append(
                keras.callbacks.LearningRateScheduler(lambda epoch: rate * plan.part(max(epoch - warm, 0)))
            )
        return found

    def _report_epoch(self, epoch: int, logs: Mapping[str, Any]) -> None:
        """Report an epoch to the plan's `watch`."""
        assert self._plan.watch is not None  # else this is not a callback
        self._plan.watch(epoch, {name: float(value) for name, value in logs.items()})


class _Ending(keras.callbacks.Callback):
    """Stops the training by the centre's metrics, and puts the weights of the best epoch aside.

    Args:
        stopping: the rules.
        distribute: has this rank's part.

    Attributes:
        epoch: the best epoch, from 0; None: there is none.
        weights: those of its end, where the centre is.
    """

    def __init__(self, stopping: Stopping, distribute: nnlo_keras.Distribute) -> None:
        super().__init__()
        self._stopping, self._distribute = stopping, distribute
        self.epoch: int | None = None
        self.weights: list[Any] = []

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Look at the metrics; those of a worker do not count."""
        if not has_center(self._distribute.role):
            return
        if self._stopping.see({name: float(value) for name, value in (logs or {}).items()}):
            synchronise(self.model)
            self.epoch, self.weights = epoch, self.model.get_weights()
        if self._stopping.why:
            self.model.stop_training = True

    def state_dict(self) -> dict[str, Any]:
        """Return the best epoch for a checkpoint; the rules themselves follow from the history."""
        return {"epoch": self.epoch, "weights": self.weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a checkpoint."""
        self.epoch, self.weights = state["epoch"], list(state["weights"])
        if speaks(self._distribute.role):
            self._stopping.replay(self.model.history.history)


def _loss(plan: RunPlan) -> Any:
    known = [one for one in dir(keras.losses) if one[0].islower() and one not in _NO_LOSSES]
    return plan.resolved("--loss", plan.settings.loss, keras.losses.get, known)


def _metric(plan: RunPlan, name: str) -> Any:
    known = [one for one in dir(keras.metrics) if one[0].isupper() and one not in ("Metric", "Mean")]
    return plan.resolved("--metrics", name, _measured, [*_COMPILE_NAMES[:1], *known])


def _measured(name: str) -> str:
    """Return the name of a metric, for each `compile` to make a new one; raise if it is unknown."""
    if name not in _COMPILE_NAMES:
        keras.metrics.get(name)
    return name


def _check_shapes(output: Any, labels: Any, loss: Any) -> None:
    """Refuse labels that Keras would silently broadcast against the output."""
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
