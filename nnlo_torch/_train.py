"""PyTorch half of `nnlo train`; it uses the plug-in as a user's script does."""

from __future__ import annotations

import gc
import inspect
import math
import os
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch.optim import lr_scheduler

import nnlo_torch
from nnlo_common import ConfigurationError, MissingExtraError
from nnlo_common.plugin import (
    RatePlan,
    RunPlan,
    Trainer,
    has_center,
    npz_arrays,
    read_whole,
    readable_file,
    running,
    seed_random,
    speaks,
)
from nnlo_torch._advise import TorchProbed
from nnlo_torch._evaluation import Sums, numbers_of
from nnlo_torch._hdf5 import Batches, tensors_of
from nnlo_torch._inference import TorchCompute, checksum
from nnlo_torch._inference import running as running_models
from nnlo_torch._wrapper import Wrapper

__all__ = [
    "Function",
    "RateSchedule",
    "accuracy",
    "fill",
    "forget",
    "function_of",
    "load",
    "placed",
    "prepare",
    "seed",
    "tile_parts",
    "weighted_of",
]

# -- losses and metrics of PyTorch by name, for `nnlo train` -------------------------------------------

#: A function of a model's output and the labels.
Function: TypeAlias = Callable[[Any, Any], Any]
# Losses whose labels are the numbers of classes.
_OF_CLASSES = ("cross_entropy", "nll_loss", "CrossEntropyLoss", "NLLLoss")


def accuracy(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the share of samples whose highest output is their class; labels are numbers or one-hot rows."""
    if output.ndim < 2 or output.shape[1] < 2:
        raise ValueError("accuracy needs an output for each of several classes; write one in the Python file")
    return (output.argmax(1) == _classes(output, labels)).float().mean()


def _classes(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the numbers of classes in labels, which may be one-hot rows or have a column of their own."""
    if labels.shape == output.shape:
        return labels.argmax(1)
    # Compared with the rows of the output, a column would be broadcast.
    return labels.squeeze(1) if labels.ndim == output.ndim else labels


def function_of(plan: RunPlan, flag: str, name: str) -> Function:
    """Look up a loss or metric in the Python file, then in PyTorch."""
    functions = {one: getattr(torch.nn.functional, one) for one in dir(torch.nn.functional) if _is_loss(one)}
    classes = {one: getattr(torch.nn, one) for one in dir(torch.nn) if one.endswith("Loss")}
    measures = {} if flag == "--loss" else {"accuracy": accuracy}
    known = measures | functions | classes

    def made(one: str) -> Function:
        loss = known[one]() if inspect.isclass(known[one]) else known[one]
        return _with_classes(loss) if one in _OF_CLASSES else loss

    found: Function = plan.resolved(flag, name, made, [*known])
    return found


def weighted_of(plan: RunPlan, flag: str, name: str) -> Callable[[Any, Any, Any], torch.Tensor]:
    """Look up a loss or metric, as a function of output, labels and weights.

    It returns the sum of the weighted values of all samples, divided by their number: so the sums of batches
    add up to that of the whole, however it is divided.
    """
    own = plan.from_module(name)
    if own is not None:
        if _places(own) < 3:
            raise ConfigurationError(
                f"{flag} {name}: the function in the Python file takes no weights; give it a third argument, "
                "the samples' weights, and return the sum of the weighted values divided by their number"
            )
        found: Callable[[Any, Any, Any], torch.Tensor] = own
        return found
    each = (
        _correct if name == "accuracy" and flag != "--loss" else _of_each(function_of(plan, flag, name), name)
    )

    def weighted(output: Any, labels: Any, weights: torch.Tensor) -> torch.Tensor:
        values = each(output, labels)
        if values.ndim == 0 or len(values) != len(weights):
            raise ValueError(f"{name} has no value for each sample, so it cannot be weighted")
        return (values.reshape(len(values), -1).mean(1) * weights).sum() / len(weights)

    return weighted


def _of_each(loss: Function, name: str) -> Function:
    """Return a loss of PyTorch that has a value for each sample."""
    functional: Any = getattr(torch.nn.functional, name, None)
    kind: Any = getattr(torch.nn, name, None)
    if functional is not None:
        loss = partial(functional, reduction="none")
    elif kind is not None:
        loss = kind(reduction="none")
    return _with_classes(loss) if name in _OF_CLASSES else loss


def _correct(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    accuracy(output, labels)  # refuses what has no classes
    return (output.argmax(1) == _classes(output, labels)).float()


def _places(function: Callable[..., Any]) -> int:
    """Return how many arguments a function takes by their place."""
    kinds = [one.kind for one in inspect.signature(function).parameters.values()]
    return 3 if inspect.Parameter.VAR_POSITIONAL in kinds else len([one for one in kinds if one <= 1])


def _is_loss(name: str) -> bool:
    return name[0] != "_" and (name.endswith("_loss") or "cross_entropy" in name or name == "kl_div")


def _with_classes(loss: Function) -> Function:
    """Widen integer labels to int64: these losses take no narrower integers, which files often have."""

    def wide(output: Any, labels: Any) -> Any:
        return loss(output, labels if labels.is_floating_point() else labels.long())

    return wide


# -- weights of a file, loaded into a module for `nnlo train --from`; no file runs code unless it is
# trusted.

#: Names under which scripts save the weights beside other things.
_NESTED = ("state_dict", "model_state_dict", "model")


def fill(model: torch.nn.Module, path: Path, trusted: bool) -> None:
    """Load the weights of a file into a model, all of them.

    Args:
        model: the model.
        path: a `.pt`, `.pth`, `.safetensors` or `.npz` file.
        trusted: whether it may contain code.
    """
    read = {".safetensors": _of_safetensors, ".npz": _of_npz}.get(path.suffix.lower())
    found = _of_torch(path, trusted) if read is None else read(path)
    if isinstance(found, torch.nn.Module):
        found = found.state_dict()
    if isinstance(found, Mapping):
        found = next((found[name] for name in _NESTED if isinstance(found.get(name), Mapping)), found)
    if not isinstance(found, Mapping) or not found:
        raise ConfigurationError(
            f"--from {path} holds {type(found).__name__} data and no weights by name; save model.state_dict()"
        )
    model.load_state_dict(found)


def _of_torch(path: Path, trusted: bool) -> Any:
    with readable_file(path) as file:
        try:
            return torch.load(file, map_location="cpu", weights_only=not trusted)
        except pickle.UnpicklingError:
            if trusted:
                raise
            raise ConfigurationError(
                f"--from {path} is not only weights: loading it can run any code; save model.state_dict(), "
                "or add --allow-pickle if you trust it"
            ) from None


def _of_safetensors(path: Path) -> Any:
    try:
        from safetensors.torch import load
    except ImportError:
        raise MissingExtraError(f"--from {path}", "safetensors", "safetensors") from None
    return load(_content(path))


def _of_npz(path: Path) -> Any:
    return {name: torch.from_numpy(array) for name, array in npz_arrays(_content(path)).items()}


def _content(path: Path) -> bytes:
    return read_whole(path, os.stat(path).st_size)  # noqa: PTH116 - as large as it is


# -- learning rates of `nnlo train --schedule` and `--warm-up` -----------------------------------------
# A rate depends only on the epoch, the batch and the metrics so far, so a resumed training needs no
# state. The schedulers of PyTorch for a warm-up and a plateau step an optimizer of a single number, whose
# rate is copied.


class RateSchedule:
    """Sets the learning rates of an optimizer.

    Args:
        plan: the options.
        optimizer: to set.
        mode: "max" if the metric of a plateau should rise, else "min".
    """

    def __init__(self, plan: RatePlan, optimizer: torch.optim.Optimizer, mode: Literal["min", "max"]) -> None:
        self._plan, self._mode, self._optimizer = plan, mode, optimizer
        self._base = float(optimizer.param_groups[0]["lr"])
        self._warm: list[float] = []

    def begin_epoch(self, epoch: int, batches: int, seen: Sequence[float]) -> None:
        """Set the rate of an epoch.

        Args:
            epoch: its number, from 0.
            batches: of each epoch of this worker.
            seen: the metric of a plateau after each epoch so far.
        """
        plan = self._plan
        if epoch < plan.warm_up:
            if not self._warm:
                self._warm = self._warming(plan.warm_up * batches)
            self._at = epoch * batches
            self.begin_batch(0)
            return
        self._warm = []
        self._set(self._scheduled(epoch - plan.warm_up, seen[plan.warm_up :]))

    def begin_batch(self, batch: int) -> None:
        """Set the rate of a batch of a warm-up."""
        if self._warm:
            self._set(self._warm[min(self._at + batch, len(self._warm) - 1)])

    @property
    def rate(self) -> float:
        """The rate as it is."""
        return float(self._optimizer.param_groups[0]["lr"])

    def _warming(self, steps: int) -> list[float]:
        steps = max(steps, 1)
        model, scheduler = self._model(
            lambda one: lr_scheduler.LinearLR(one, self._plan.start, total_iters=steps)
        )
        return [_next(model, scheduler) for _ in range(steps + 1)]

    def _scheduled(self, epoch: int, seen: Sequence[float]) -> float:
        plan = self._plan
        if plan.kind == "plateau":
            # Keras reduces after `every` epochs without improvement, PyTorch after its patience and one more.
            optimizer, scheduler = self._model(
                lambda one: lr_scheduler.ReduceLROnPlateau(
                    one, self._mode, plan.factor, plan.every - 1, threshold=0, threshold_mode="abs"
                )
            )
            for value in seen:
                scheduler.step(value)
            return float(optimizer.param_groups[0]["lr"])
        return self._base * plan.part(epoch)

    def _model(self, make: Any) -> tuple[torch.optim.Optimizer, Any]:
        """Return an optimizer of one number with the first rate, and its scheduler."""
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], self._base)
        return optimizer, make(optimizer)

    def _set(self, rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = rate


def _next(optimizer: torch.optim.Optimizer, scheduler: Any) -> float:
    """Return the rate, and step to the next one."""
    rate = float(optimizer.param_groups[0]["lr"])
    optimizer.step()  # a scheduler warns if it is stepped first
    scheduler.step()
    return rate


_WEIGHT = "mean weight"


def seed(number: int) -> None:
    """Seed all random generators that a PyTorch script uses."""
    seed_random(number)
    torch.manual_seed(number)


def load(path: Path, trusted: bool) -> Any:
    """Return the module in a file of `torch.save`.

    Args:
        path: of the file.
        trusted: whether it may contain code.
    """
    with running(path, "while it was loaded"):
        model = torch.load(path, map_location="cpu", weights_only=not trusted)
    if isinstance(model, Mapping):
        raise ConfigurationError(
            f"--model {path} holds weights without their model; give a Python file whose get_model() makes "
            f"the model, and the weights by --from {path}"
        )
    return model


def placed(model: Any) -> Any:
    """Return a model on the GPU, if this rank has one."""
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def tile_parts(model: Any, precision: str | None) -> Any:
    """Return a model as the core calls it with tiles, its checksum, and the context to run it in."""
    return TorchCompute(model, precision), checksum([model]) + (precision or ""), running_models([model])


def forget() -> None:
    """Free the memory of earlier models."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def prepare(plan: RunPlan) -> TorchTrainer:
    """Return the training that is planned."""
    return TorchTrainer(plan)


class TorchTrainer(Trainer):
    """A training with PyTorch.

    Args:
        plan: of the training.
    """

    def __init__(self, plan: RunPlan) -> None:
        super().__init__(plan)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = self.model = plan.loaded.model.to(self._device)
        if not any(one.requires_grad for one in self._model.parameters()):
            raise ConfigurationError(
                f"--model {plan.loaded.path}: the model has no parameters to train; leave requires_grad of "
                "some as True"
            )
        self._weighted = plan.settings.weights_name is not None
        of = weighted_of if self._weighted else function_of
        self._loss = of(plan, "--loss", plan.settings.loss)
        self._metrics = {name: of(plan, "--metrics", name) for name in plan.settings.metrics}
        self._optimizer = plan.made_optimizer(
            torch.optim, [self._model.parameters()], {"learning_rate": "lr"}
        )
        self.learning_rate = float(self._optimizer.param_groups[0]["lr"])
        for group in self._optimizer.param_groups:
            group["lr"] *= plan.rate_scale
        self._open(Batches, {}, {"evaluation": True})
        self._try()
        self._note_metrics(["loss", *self._metrics])
        self._wrapper: Wrapper | None = None
        self._progress: nnlo_torch.Progress | None = None
        self._rates: RateSchedule | None = None

    def join(self) -> None:
        """Wrap the optimizer, which joins the other ranks."""
        self._wrapper = self._plan.wrapped(self._optimizer, nnlo_torch, model=self._model)
        if self._settings.rates:
            self._rates = RateSchedule(self._plan.rates, self._wrapper, self._stopping.mode)

    @property
    def role(self) -> str:
        """This rank's part: "alone", "server 0", "worker 0", ..."""
        return "alone" if self._wrapper is None else self._wrapper.role

    def probed(self) -> TorchProbed:
        """Return what `nnlo advise` asks of the training."""
        model, batches = self._model, self._train
        return TorchProbed(
            model,
            lambda output, y: self._loss(output, *y),  # labels, and perhaps weights
            ((x, tuple(y)) for x, *y in map(self._moved, _endless(batches))),
            self._optimizer,
            validated=self._val is not None,
            samples=batches.size,
        )

    def report(self) -> dict[str, Any]:
        """Return this rank's report on the exchanges."""
        return asdict(self._joined.report())

    def train(self, folder: Path) -> dict[str, list[float]]:
        """Train, and return the scores: on a worker its own, else the workers' means and the centre's."""
        optimizer, stopping, so_far = self._joined, self._stopping, _ScoreHistory()
        stops = False
        checkpoint = self._checkpoint(folder / "checkpoint", so_far)
        callbacks: list[Any] = []
        report: nnlo_torch.Report | None = None
        epochs = self._settings.epochs
        for epoch in range(epochs) if checkpoint is None else checkpoint.epochs(epochs):
            if report is None:  # `checkpoint.epochs` has now loaded the checkpoint
                callbacks, report = self._callbacks(folder, epoch), self._report(folder, epoch)
                stops = bool(stopping.replay(so_far.center))
            if stops:
                break
            scores, own, weights = self._scored(so_far, checkpoint)
            for one in callbacks:
                one.epoch(scores)
            report.epoch(scores, own=None if optimizer.serves else own)
            if self._plan.watch is not None:
                self._plan.watch(epoch, scores)
            if stopping.see(scores):
                so_far.best = {"epoch": epoch, "weights": weights}
            if stops := bool(stopping.why):
                optimizer.stop()
        if report is None:
            stopping.replay(so_far.center)
        optimizer.close()
        if self._progress is not None:
            self._progress.close()
        if self._note_end(len(so_far.center.get("loss", [])), so_far.best["epoch"]) and speaks(self.role):
            self._model.load_state_dict(so_far.best["weights"])
        return so_far.center if speaks(self.role) else so_far.own

    def save(self, folder: Path) -> Path:
        """Write the weights."""
        self._joined.save(self._model.state_dict(), folder / "weights.pt")
        return folder / "weights.pt"

    # -- inside ---------------------------------------------------------------------------------------

    @property
    def _joined(self) -> Wrapper:
        assert self._wrapper is not None  # join comes first
        return self._wrapper

    def _report(self, folder: Path, done: int) -> nnlo_torch.Report:
        settings = self._settings
        return nnlo_torch.Report(
            self._joined,
            folder,
            config=self._config,
            timeline=settings.timeline,
            profile=settings.profile,
            initial_epoch=done,
        )

    def _callbacks(self, folder: Path, done: int) -> list[Any]:
        """Return the callbacks of the epochs, after `done` epochs."""
        found: list[Any] = []
        if self._plan.watch is None:
            self._progress = nnlo_torch.Progress(
                self._joined,
                initial_epoch=done,
                run=folder,
                epochs=self._settings.epochs,
                samples=self._train.size,
                log_to=self._settings.log_to,
            )
            found.append(self._progress)
        return found

    def _scored(
        self, so_far: _ScoreHistory, checkpoint: nnlo_torch.Checkpoint | None
    ) -> tuple[dict[str, float], dict[str, float], dict[str, Any] | None]:
        """Train an epoch; return its scores, this rank's own, and the weights of the centre to be kept."""
        optimizer, sums = self._joined, self._epoch(so_far, checkpoint)
        # In an epoch that steps of the one before have filled nobody trains.
        none = dict.fromkeys(["loss", *self._metrics], math.nan)
        scores = none | self._of_weights(optimizer.mean(sums.means(), sums.samples))
        own = ({} if optimizer.serves else none) | self._of_weights(sums.means())
        measured, weights = Sums(), None
        if self._val is not None or self._stopping.by is not None:
            with optimizer.evaluation():
                for batch in self._val or ():
                    measured.add(batch, self._measure(batch))
                if self._stopping.by is not None and has_center(self.role):
                    weights = _copied(self._model.state_dict())
        if self._val is not None:
            means = self._of_weights(optimizer.mean(measured.means(), measured.samples))
            scores |= {f"val_{name}": value for name, value in means.items()}
        if self._rates is not None:
            scores["learning_rate"] = self._rates.rate
        _append(so_far.center, scores)
        _append(so_far.own, own)
        so_far.sums = Sums()
        return scores, own, weights

    def _epoch(self, so_far: _ScoreHistory, checkpoint: nnlo_torch.Checkpoint | None) -> Sums:
        """Train on this worker's batches of an epoch; on a server serve it."""
        optimizer, sums, rates = self._joined, so_far.sums, self._rates
        self._model.train()
        if rates is not None:
            seen = so_far.center.get(self._stopping.plateau_by, [])
            rates.begin_epoch(len(so_far.center.get("loss", [])), len(self._train), seen)
        loader = self._train if checkpoint is None else checkpoint.batches(self._train)
        for index, (x, *y) in enumerate(map(self._moved, loader)):
            if rates is not None:  # a training that resumes within an epoch has had its first batches
                rates.begin_batch(optimizer.batches_made(index if checkpoint is None else checkpoint.batch))
            optimizer.zero_grad()
            output = self._output(x)
            loss = self._loss(output, *y)
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                scores = {"loss": loss, **self._scores(output, *y)}
                sums.add((x, y), scores)
            if self._progress is not None:
                self._progress.note(self._of_weights(scores))
        return sums

    def _measure(self, batch: Any) -> dict[str, Any]:
        x, *y = self._moved(batch)
        output = self._output(x)
        return {"loss": self._loss(output, *y), **self._scores(output, *y)}

    def _scores(self, output: Any, *y: Any) -> dict[str, Any]:
        scores = {name: measure(output, *y) for name, measure in self._metrics.items()}
        return {**scores, _WEIGHT: y[1].mean()} if self._weighted else scores

    def _of_weights(self, scores: Mapping[str, Any]) -> dict[str, Any]:
        """Return the weighted means of the metrics: so far they are divided by the number of samples."""
        if not self._weighted:
            return dict(scores)
        mean = float(scores.get(_WEIGHT, 0.0)) or 1.0
        known = {name: one for name, one in scores.items() if name != _WEIGHT}
        return {name: one if name == "loss" else one / mean for name, one in known.items()}

    def _output(self, x: Any) -> Any:
        return self._model(*x) if isinstance(x, tuple) else self._model(x)

    def _moved(self, batch: Any) -> Any:
        """Return the batch on the model's device, with floats of the default type."""
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
        x, y = self._moved(tensors_of(self._plan.data.first()))
        training = self._model.training
        with self._trying(_shapes(x), _shapes(y)), warnings.catch_warnings(), torch.no_grad():
            # torch only warns about labels that are broadcast against the output.
            warnings.filterwarnings("error", "Using a target size")
            self._model.eval()
            output = self._output(x)
            y = [y, torch.ones(len(x[0] if isinstance(x, tuple) else x))] if self._weighted else [y]
            y = self._moved(y)
            loss = self._loss(output, *y)
            numbers_of(self._scores(output, *y))
            self._model.train(training)
            if getattr(loss, "shape", None) != ():
                raise ValueError(f"the loss is {type(loss).__name__} {loss!r:.60}, and not one number")

    def _checkpoint(self, folder: Path, so_far: _ScoreHistory) -> nnlo_torch.Checkpoint | None:
        """Return the checkpoint, if there is one."""
        every = self._settings.checkpoint
        if every is None:
            return None
        checkpoint = nnlo_torch.Checkpoint(folder, self._joined, also={"course": so_far}, epochs=every)
        checkpoint.still_ends = lambda: bool(self._stopping.replay(so_far.center))
        return checkpoint


class _ScoreHistory:
    """Progress of a training.

    Attributes:
        center: the scores of each epoch, the same on all ranks.
        own: the scores of this worker.
        sums: of the current epoch.
        best: the best epoch by early stopping and, where the centre is, its weights.
    """

    def __init__(self) -> None:
        self.center: dict[str, list[float]] = {}
        self.own: dict[str, list[float]] = {}
        self.sums = Sums()
        self.best: dict[str, Any] = {"epoch": None, "weights": None}

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"center": self.center, "own": self.own, "sums": self.sums.state(), "best": self.best}

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume from a state."""
        self.center, self.own, self.best = state["center"], state["own"], state["best"]
        self.sums.load(state["sums"])


def _endless(batches: Batches) -> Iterator[Any]:
    while True:
        yield from batches


def _copied(weights: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: one.clone() if isinstance(one, torch.Tensor) else deepcopy(one) for name, one in weights.items()
    }


def _append(history: dict[str, list[float]], scores: Mapping[str, float]) -> None:
    for name, value in scores.items():
        history.setdefault(name, []).append(float(value))


def _shapes(some: Any) -> str:
    if isinstance(some, Mapping):
        some = tuple(some.values())
    if isinstance(some, tuple | list):
        return ", ".join(map(_shapes, some))
    return f"{str(some.dtype).removeprefix('torch.')} {(None, *some.shape[1:])}"
