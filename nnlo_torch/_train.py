"""PyTorch half of `nnlo train`; it uses the plug-in as a user's script does."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import nnlo_torch
from nnlo_common import ConfigurationError
from nnlo_common.plugin import RunPlan, Trainer, running, seed_random, speaks
from nnlo_torch._advise import TorchProbed
from nnlo_torch._evaluation import Sums
from nnlo_torch._hdf5 import Batches, tensors_of
from nnlo_torch._inference import TorchCompute, checksum
from nnlo_torch._inference import running as running_models
from nnlo_torch._rate_schedule import RateSchedule
from nnlo_torch._start_weights import fill
from nnlo_torch._train_parts import function_of, weighted_of
from nnlo_torch._wrapper import Wrapper

__all__ = ["fill", "forget", "load", "placed", "prepare", "seed", "tile_parts"]

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
        make: Any = getattr(nnlo_torch, self._plan.wrapper)
        settings = self._settings
        options = {"model": self._model, **settings.ranks.given(), **settings.algorithm}
        self._wrapper = make(self._optimizer, **options)
        self.role = self._wrapper.role
        if settings.rates:
            self._rates = RateSchedule(self._plan.rates, self._wrapper, self._stopping.mode)

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
        scores = self._of_weights(optimizer.mean(sums.means(), sums.samples))
        own = self._of_weights(sums.means())
        measured, weights = Sums(), None
        if self._val is not None or self._stopping.by is not None:
            with optimizer.evaluation():
                for batch in self._val or ():
                    measured.add(batch, self._measure(batch))
                if self._stopping.by is not None and speaks(self.role):
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
            self._scores(output, *y)
            self._model.train(training)
            if getattr(loss, "shape", None) != ():
                raise ValueError(f"the loss is {type(loss).__name__} {loss!r:.60}, and not one number")

    def _checkpoint(self, folder: Path, so_far: _ScoreHistory) -> nnlo_torch.Checkpoint | None:
        """Return the checkpoint, if there is one."""
        every = self._settings.checkpoint
        if every is None:
            return None
        return nnlo_torch.Checkpoint(folder, self._joined, also={"course": so_far}, epochs=every)


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
