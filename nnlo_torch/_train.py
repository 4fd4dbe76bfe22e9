"""What `nnlo train` needs to know of PyTorch; it uses the plug-in as a script of a user's would."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

import nnlo_torch
from nnlo_common import ConfigurationError, EarlyStopping, Target
from nnlo_common._roles import speaks
from nnlo_common._train._job import brief
from nnlo_common._train._module import running
from nnlo_common._train._plan import Plan, rises, stop_rules
from nnlo_torch._evaluation import Sums
from nnlo_torch._hdf5 import H5Batches
from nnlo_torch._train_parts import function_of, optimizer_of
from nnlo_torch._wrapper import Wrapper

__all__ = ["Training", "load", "seed"]

_CHECKPOINT = "checkpoint.pt"


def seed(number: int) -> None:
    """Seed everything that a script with PyTorch draws from."""
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 - users' code draws from it
    torch.manual_seed(number)


def load(path: Path, trusted: bool) -> Any:
    """Return the module that a file of `torch.save` holds, which the user has said to trust.

    Args:
        path: of the file.
        trusted: whether it may bring code.
    """
    with running(path, "while it was loaded"):
        model = torch.load(path, map_location="cpu", weights_only=not trusted)
    if isinstance(model, Mapping):
        raise ConfigurationError(
            f"--model {path} holds weights, but not the model that they are for; give a Python file whose "
            "get_model() makes it, and loads them"
        )
    return model


class Training:
    """A training with PyTorch; see `nnlo_common._train._plan.Trainer`.

    Args:
        plan: what it is to be.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan, self._settings = plan, plan.settings
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = plan.loaded.model.to(self._device)
        self._loss = function_of(plan, "--loss", plan.settings.loss)
        self._metrics = {name: function_of(plan, "--metrics", name) for name in plan.settings.metrics}
        self._optimizer = optimizer_of(plan, self._model)
        self.learning_rate = float(self._optimizer.param_groups[0]["lr"])
        self._train = self._batches(plan.data.train, shuffle=plan.settings.shuffle)
        self._val = self._batches(plan.data.val, evaluation=True) if plan.data.val else None
        self._try()
        self._stop_by = stop_rules(plan.settings, ["loss", *self._metrics], self._val is not None)
        self._wrapper: Wrapper | None = None
        self.role = "alone"

    def join(self) -> None:
        """Wrap the optimizer, which joins the others."""
        make: Any = getattr(nnlo_torch, self._plan.wrapper)
        settings = self._settings
        options = {"model": self._model, "servers": settings.servers, **settings.algorithm}
        self._wrapper = make(self._optimizer, stall_timeout_s=settings.stall_timeout, **options)
        self.role = self._wrapper.role

    def report(self) -> dict[str, Any]:
        """Return what this rank has seen of the exchanges."""
        return asdict(self._joined.report())

    def train(self, folder: Path) -> dict[str, list[float]]:
        """Train, and return the scores: a worker's own, elsewhere the workers' means and the centre's."""
        optimizer, settings = self._joined, self._settings
        history = self._resumed(folder / _CHECKPOINT)
        own: dict[str, list[float]] = {}
        told = self._told(folder, len(history.get("loss", [])))
        enough = self._stops()
        for epoch in range(len(history.get("loss", [])), settings.epochs):
            sums = self._epoch()
            scores = optimizer.mean(sums.means(), sums.samples)
            if self._val is not None:
                scores |= {
                    f"val_{name}": value
                    for name, value in optimizer.evaluate(self._measure, self._val).items()
                }
            _append(history, scores)
            _append(own, sums.means())
            for one in told:
                one.epoch(scores)
            stop = any(reached(scores) for reached in enough)
            if settings.checkpoint is not None:
                last = stop or epoch + 1 == settings.epochs
                if (epoch + 1) % settings.checkpoint == 0 or last:
                    self._save_checkpoint(folder / _CHECKPOINT, history)
            if stop:
                optimizer.stop()
                break
        optimizer.close()
        return history if speaks(self.role) else own

    def save(self, folder: Path) -> Path:
        """Write the weights."""
        self._joined.save(self._model.state_dict(), folder / "weights.pt")
        return folder / "weights.pt"

    # -- inside ---------------------------------------------------------------------------------------

    @property
    def _joined(self) -> Wrapper:
        assert self._wrapper is not None  # join comes first
        return self._wrapper

    def _batches(self, files: Any, **options: Any) -> H5Batches:
        settings = self._settings
        return H5Batches(
            files, batch_size=settings.batch, seed=settings.seed, **options, **self._plan.data.reading
        )

    def _told(self, folder: Path, done: int) -> list[Any]:
        """What is told of each epoch, after so many."""
        found: list[Any] = [nnlo_torch.Progress(self._joined, live=False, initial_epoch=done)]
        if self._settings.monitor:
            found.append(nnlo_torch.Monitor(self._joined, folder / "monitor.jsonl", initial_epoch=done))
        if self._settings.timeline:
            found.append(nnlo_torch.Timeline(self._joined, folder / "timeline.json", initial_epoch=done))
        return found

    def _epoch(self) -> Sums:
        """Train on this worker's batches of an epoch; on a server serve it."""
        optimizer, sums = self._joined, Sums()
        self._model.train()
        for x, y in map(self._moved, self._train):
            optimizer.zero_grad()
            output = self._output(x)
            loss = self._loss(output, y)
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                sums.add((x, y), {"loss": loss, **self._scores(output, y)})
        return sums

    def _measure(self, batch: Any) -> dict[str, Any]:
        x, y = self._moved(batch)
        output = self._output(x)
        return {"loss": self._loss(output, y), **self._scores(output, y)}

    def _scores(self, output: Any, y: Any) -> dict[str, Any]:
        return {name: measure(output, y) for name, measure in self._metrics.items()}

    def _output(self, x: Any) -> Any:
        return self._model(*x) if isinstance(x, tuple) else self._model(x)

    def _moved(self, batch: Any) -> Any:
        """The batch where the model is, with floats as wide as its own: files have what they have."""
        if isinstance(batch, Mapping):
            return {name: self._moved(one) for name, one in batch.items()}
        if isinstance(batch, tuple | list):
            return tuple(map(self._moved, batch))
        batch = batch.to(self._device)
        return batch.to(torch.get_default_dtype()) if batch.is_floating_point() else batch

    def _try(self) -> None:
        """Try model, loss and metrics on two samples.

        Raises:
            ConfigurationError: they do not fit together.
        """
        x, y = self._moved(_tensors(self._plan.data.first()))
        training = self._model.training
        try:
            self._model.eval()
            with warnings.catch_warnings(), torch.no_grad():
                # Of labels that would be broadcast against the output torch only warns.
                warnings.filterwarnings("error", "Using a target size")
                output = self._output(x)
                loss = self._loss(output, y)
                self._scores(output, y)
            if getattr(loss, "shape", None) != ():
                raise ValueError(f"the loss is {type(loss).__name__} {loss!r:.60}, and not one number")
        except Exception as error:  # whatever a layer or a loss raises
            raise ConfigurationError(
                f"the model, the samples and --loss {self._settings.loss} do not fit: features {_shapes(x)}, "
                f"labels {_shapes(y)}\n{type(error).__name__}: {brief(str(error))}\n"
                "Choose another --loss, --features-name or --labels-name, or adapt the arrays by "
                "get_features() or get_labels() of the Python file"
            ) from None
        finally:
            self._model.train(training)

    def _stops(self) -> list[Callable[[Mapping[str, float]], bool]]:
        settings = self._settings
        found: list[Callable[[Mapping[str, float]], bool]] = []
        if settings.early_stopping is not None:
            early = EarlyStopping(
                patience=settings.early_stopping, mode="max" if rises(self._stop_by) else "min"
            )
            found.append(lambda scores: early(scores[self._stop_by]))
        if settings.target is not None:
            target = settings.target
            reached = Target(above=target.value) if target.above else Target(below=target.value)
            found.append(lambda scores: reached(scores[target.metric]))
        return found

    def _save_checkpoint(self, path: Path, history: Mapping[str, list[float]]) -> None:
        optimizer = self._joined
        state = {
            "model": self._model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "history": dict(history),
        }
        optimizer.save(state, path)

    def _resumed(self, path: Path) -> dict[str, list[float]]:
        """Load what a checkpoint has, on all ranks; return its history, empty where there is none."""
        if self._settings.checkpoint is None:
            return {}
        there = self._joined.mean({"ranks": float(path.exists())})["ranks"]
        if there == 0:
            return {}
        if there < 1:
            raise ConfigurationError(
                f"--run {path.parent} has a checkpoint that not all ranks can see; name a folder that they "
                "share"
            )
        try:
            state = torch.load(path, map_location=self._device, weights_only=True)
            self._model.load_state_dict(state["model"])
            self._joined.load_state_dict(state["optimizer"])
        except Exception as error:  # torch raises many kinds for what is damaged
            raise ConfigurationError(
                f"{path} cannot be loaded ({brief(str(error))}); delete the folder, or name another by --run"
            ) from None
        history: dict[str, list[float]] = state["history"]
        self._train.set_epoch(len(history["loss"]))
        return history


def _append(history: dict[str, list[float]], scores: Mapping[str, float]) -> None:
    for name, value in scores.items():
        history.setdefault(name, []).append(float(value))


def _tensors(some: Any) -> Any:
    """Arrays as tensors; several as a tuple."""
    if isinstance(some, Mapping):
        return {name: _tensors(one) for name, one in some.items()}
    return tuple(map(_tensors, some)) if isinstance(some, tuple | list) else torch.as_tensor(some)


def _shapes(some: Any) -> str:
    if isinstance(some, Mapping):
        some = tuple(some.values())
    if isinstance(some, tuple | list):
        return ", ".join(map(_shapes, some))
    return f"{str(some.dtype).removeprefix('torch.')} {(None, *some.shape[1:])}"
