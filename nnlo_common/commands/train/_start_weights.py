"""Weights that a training begins with: `--from`, checked without a framework, then loaded with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._file_access import readable_file
from nnlo_common.commands.train._job import brief

__all__ = ["SUFFIXES", "check_weights_file", "fill", "weights_file"]

#: The files of weights of each framework; a folder of a run has the first.
SUFFIXES = {
    "keras": (".keras", ".weights.h5", ".h5"),
    "torch": (".pt", ".pth", ".safetensors", ".npz"),
}
_OF_RUN = ("model.keras", "weights.pt")
_ALL = ", ".join([*SUFFIXES["keras"], *SUFFIXES["torch"]])


class _From(Protocol):
    @property
    def from_(self) -> str | None: ...


def weights_file(settings: _From) -> Path | None:
    """Return the file that `--from` names; of the folder of a run, its model."""
    if settings.from_ is None:
        return None
    path = Path(settings.from_).expanduser().resolve()
    if not path.is_dir():
        return path
    found = next((path / name for name in _OF_RUN if (path / name).is_file()), None)
    if found is None:
        raise ConfigurationError(
            f"--from {path} is a folder without {' or '.join(_OF_RUN)}; name the folder of a run that is "
            "complete, or a file of weights"
        )
    return found


def check_weights_file(settings: _From) -> None:
    """Refuse a file of `--from` that cannot be read, or is no file of weights, without a framework."""
    path = weights_file(settings)
    if path is None:
        return
    if not path.name.lower().endswith((*SUFFIXES["keras"], *SUFFIXES["torch"])):
        raise ConfigurationError(
            f"--from {path} ends in {path.suffix or 'nothing'}; it must be the folder of a run, or one of "
            f"{_ALL}"
        )
    try:
        with readable_file(path) as file:
            problem = "" if file.read(1) else "it is empty"
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or str(error)
    if problem:
        raise ConfigurationError(f"--from {path} cannot be read ({problem}); name a file of weights")


def fill(plug_in: Any, framework: str, model: Any, path: Path, trusted: bool) -> None:
    """Load weights into a model.

    Args:
        plug_in: the `_train` module of the framework.
        framework: of the model.
        model: to fill.
        path: of the weights.
        trusted: whether the file may contain code.

    Raises:
        ConfigurationError: the file is of the other framework, or does not fit the model.
    """
    if not path.name.lower().endswith(SUFFIXES[framework]):
        raise ConfigurationError(
            f"--from {path} is not a file of weights for {framework}, which the model is of; name one of "
            f"{', '.join(SUFFIXES[framework])}"
        )
    try:
        plug_in.fill(model, path, trusted)
    except (ConfigurationError, ImportError):
        raise
    except Exception as error:  # the frameworks raise errors of many types here
        raise ConfigurationError(
            f"--from {path} does not fit the model: {brief(str(error)) or type(error).__name__}\n"
            "Make the same model, e.g. with the same --model-params, or name other weights"
        ) from None
