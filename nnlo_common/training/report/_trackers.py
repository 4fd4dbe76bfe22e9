"""Trackers: TensorBoard, MLflow and Weights & Biases; one run for a job, a series for each rank."""

from __future__ import annotations

import importlib
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from nnlo_common.base._errors import ConfigurationError, MissingExtraError

__all__ = ["TRACKERS", "Trackers"]

#: Numbers by name, for each rank by its role.
Series: TypeAlias = Mapping[str, Mapping[str, float | None]]
#: Takes a step and its numbers.
_Log: TypeAlias = Callable[[int, Series], object]

_LOG = logging.getLogger(__name__)
_LAST_S = 30.0  # how long the end of a training waits for a tracker


class Trackers:
    """Hands the numbers of a training to trackers, in a thread: a slow server holds up no training.

    Only the rank whose model is the centre makes them. The first error of a tracker is logged and ends it.

    Args:
        names: of `TRACKERS`.
        folder: of the run.
        asked: the option that named them, for the error message.

    Raises:
        ConfigurationError: a name is unknown.
        MissingExtraError: the package of one is not installed.
    """

    def __init__(self, names: Sequence[str], folder: Path, asked: str = "log_to") -> None:
        for name in names:
            if name not in TRACKERS:
                raise ConfigurationError(f"{asked} {name!r}: give one of {', '.join(TRACKERS)}")
        # All are imported before any begins a run: a missing one is refused before the training.
        packages = {name: _package(name, f"{asked} {name}") for name in names}
        self._open = {name: TRACKERS[name][2](package, folder) for name, package in packages.items()}
        self._waiting: queue.SimpleQueue[tuple[int, Series] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._repeat, name="nnlo trackers", daemon=True)
        self._thread.start()

    def log(self, step: int, series: Series) -> None:
        """Pass numbers on.

        Args:
            step: how many samples all workers have taken.
            series: the numbers by name, for each rank by its role; those that are not finite are left out.
        """
        finite = {
            role: {name: one for name, one in values.items() if one is not None and math.isfinite(one)}
            for role, values in series.items()
        }
        self._waiting.put((step, finite))

    def close(self) -> None:
        """Pass the last numbers on, and end the runs."""
        self._waiting.put(None)
        self._thread.join(_LAST_S)

    def _repeat(self) -> None:
        while (given := self._waiting.get()) is not None:
            self._each(given)
        self._each(None)

    def _each(self, given: tuple[int, Series] | None) -> None:
        for name, (log, end) in list(self._open.items()):
            try:
                end() if given is None else log(*given)
            except Exception as error:  # whatever a tracker raises, the training goes on
                _LOG.warning("%s gets no more numbers of this training: %s", name, error)
                del self._open[name]


def _package(name: str, feature: str) -> Any:
    module, package, _ = TRACKERS[name]
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingExtraError(feature, package, name) from None


def _tensorboard(package: Any, folder: Path) -> tuple[_Log, Callable[[], object]]:
    """Write event files, a folder for each rank, so that TensorBoard shows each as a line in one plot."""
    writers: dict[str, Any] = {}

    def log(step: int, series: Series) -> None:
        for role, values in series.items():
            if role not in writers:
                writers[role] = package.SummaryWriter(str(folder / "tensorboard" / role.replace(" ", "-")))
            for name, value in values.items():
                writers[role].add_scalar(name, value, step)
            writers[role].flush()

    def end() -> None:
        for one in writers.values():
            one.close()

    return log, end


def _mlflow(package: Any, folder: Path) -> tuple[_Log, Callable[[], object]]:
    """Log to the server of MLFLOW_TRACKING_URI, else to a database in the folder of the run."""
    address = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.resolve() / 'mlflow.db'}"
    client = package.MlflowClient(tracking_uri=address)
    title = os.environ.get("MLFLOW_EXPERIMENT_NAME", "nnlo")
    found = client.get_experiment_by_name(title)
    experiment = client.create_experiment(title) if found is None else found.experiment_id
    run = client.create_run(experiment, run_name=folder.resolve().name).info.run_id

    def log(step: int, series: Series) -> None:
        now_ms = int(1000 * time.time())
        metric = package.entities.Metric
        told = [metric(name, value, now_ms, step) for name, value in _flat(series).items()]
        client.log_batch(run, metrics=told)

    return log, lambda: client.set_terminated(run)


def _wandb(package: Any, folder: Path) -> tuple[_Log, Callable[[], object]]:
    """Write a run that `wandb sync` uploads; WANDB_MODE=online sends it at once."""
    run = package.init(
        project=os.environ.get("WANDB_PROJECT", "nnlo"),
        name=folder.resolve().name,
        dir=str(folder),
        mode=os.environ.get("WANDB_MODE", "offline"),
    )
    return lambda step, series: run.log(_flat(series), step=step), run.finish


def _flat(series: Series) -> dict[str, float | None]:
    """Return all numbers by role and name.

    Example:
        >>> _flat({"worker 0": {"loss": 0.5}})
        {'worker 0/loss': 0.5}
    """
    return {f"{role}/{name}": value for role, values in series.items() for name, value in values.items()}


#: By name: the module, its package, and what begins a run.
TRACKERS: Mapping[str, tuple[str, str, Callable[[Any, Path], tuple[_Log, Callable[[], object]]]]] = {
    "tensorboard": ("tensorboardX", "tensorboardX", _tensorboard),
    "mlflow": ("mlflow", "mlflow", _mlflow),
    "wandb": ("wandb", "wandb", _wandb),
}
