"""Model files: checked without a framework, then loaded with the framework that they need."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from nnlo_common.base._errors import ConfigurationError, MissingExtraError
from nnlo_common.base._file_access import read_whole, readable_file
from nnlo_common.base._limited_formats import LARGEST_JSON, LARGEST_OPTIONS, parsed_json
from nnlo_common.commands.train._job import brief
from nnlo_common.commands.train._pickled import unpickled
from nnlo_common.commands.train._python_file import (
    asked,
    check_source,
    frameworks_in,
    import_file,
    made_model,
)

__all__ = [
    "Loaded",
    "ModelSettings",
    "SUFFIXES",
    "check_model",
    "check_weights_file",
    "choose_back_end",
    "chosen_back_end",
    "fill",
    "installed_back_ends",
    "load_model",
    "plug_in",
    "weights_file",
]

# -- back end that Keras will run on, found without loading Keras ---------------------------------------


def chosen_back_end(env: Mapping[str, str]) -> str:
    """Return the back end that the user has chosen by a variable or in Keras' file; empty: none.

    Args:
        env: the variables of the process.

    Example:
        >>> chosen_back_end({"KERAS_BACKEND": "jax"})
        'jax'
    """
    if name := env.get("KERAS_BACKEND"):
        return name
    file = Path(env.get("KERAS_HOME", "~/.keras")).expanduser() / "keras.json"
    try:
        name = parsed_json(read_whole(file, LARGEST_OPTIONS)).get("backend")
    except (OSError, ValueError, AttributeError):
        return ""
    # Keras writes this file at its first import, so its default "tensorflow" is not a choice.
    return name if isinstance(name, str) and name != "tensorflow" else ""


def installed_back_ends() -> list[str]:
    """Return the back ends that are installed, the lightest to begin with first."""
    return [name for name in ("torch", "tensorflow", "jax") if importlib.util.find_spec(name) is not None]


# -- weights that a training begins with: `--from`, checked without a framework, then loaded with it ---

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


_INFLATED = 20  # how much larger than the file its parts may be
_PICKLES = (".pkl", ".pickle", ".pt", ".pth")
_REMEDY = "make it with model.to_json() or model.save('model.keras')"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A loaded model.

    Attributes:
        model: a Keras model or a torch module.
        framework: "keras" or "torch".
        name: for the folder of the run.
        path: of the file.
        module: the Python file; None for other files.
    """

    model: Any
    framework: str
    name: str
    path: Path
    module: ModuleType | None = None


class ModelSettings(Protocol):
    """The settings of a command that a model comes from."""

    @property
    def model(self) -> str: ...
    @property
    def model_params(self) -> dict[str, Any]: ...
    @property
    def from_(self) -> str | None: ...
    @property
    def allow_pickle(self) -> bool: ...
    @property
    def seed(self) -> int: ...


def check_model(settings: ModelSettings) -> Path:
    """Check the model file without a framework; return its path."""
    path = Path(settings.model).expanduser().resolve()
    _check_readable(path)
    suffix = path.suffix.lower()
    if suffix == ".py":
        check_source(path)
        return path
    if settings.model_params:
        raise ConfigurationError(
            f"--model-params are arguments for get_model() of a Python file, but --model {path} is not one"
        )
    if suffix == ".json":
        _check_layers(path, _content(path, LARGEST_JSON), settings.allow_pickle)
    elif suffix == ".keras":
        _check_layers(path, _config_in(path), settings.allow_pickle)
    elif suffix in _PICKLES:
        if not settings.allow_pickle:
            raise ConfigurationError(
                f"--model {path} is a pickle, which can run any code when loaded; give a Python file "
                "with get_model(), or add --allow-pickle if you trust it"
            )
    else:
        raise ConfigurationError(
            f"--model {path} ends in {suffix or 'nothing'}; it must be .json, .keras or .py, or, with "
            f"--allow-pickle, {', '.join(_PICKLES)}"
        )
    return path


def _check_readable(path: Path) -> None:
    try:
        with readable_file(path) as file:
            if file.read(1):
                return
        problem = "it is empty"
    except IsADirectoryError:
        problem = "it is a folder"
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or str(error)
    raise ConfigurationError(f"--model {path} cannot be read ({problem}); name the file of a model")


def _content(path: Path, largest: int) -> bytes:
    try:
        return read_whole(path, largest)
    except OSError as error:
        raise ConfigurationError(
            f"--model {path} cannot be read ({error.strerror}); name the file of a model"
        ) from None


def _config_in(path: Path) -> bytes:
    try:
        with readable_file(path) as file, zipfile.ZipFile(file) as archive:
            if archive.getinfo("config.json").file_size > LARGEST_JSON:
                raise ConfigurationError(f"--model {path} has a config.json too large for a model; {_REMEDY}")
            size = os.fstat(file.fileno()).st_size
            claimed = sum(one.file_size for one in archive.infolist())
            if claimed > _INFLATED * size + LARGEST_JSON:  # Keras does not compress
                raise ConfigurationError(
                    f"--model {path} has {size} bytes, but claims {claimed} in its parts; {_REMEDY}"
                )
            damaged = archive.testzip()
            if damaged is None:
                return archive.read("config.json")
            problem = f"{damaged} in it is damaged"
    except KeyError:
        problem = "there is no config.json in it"
    except ConfigurationError:
        raise
    except Exception as error:  # zipfile raises errors of many types for a damaged archive
        problem = str(error) or type(error).__name__
    raise ConfigurationError(f"--model {path} is not a complete .keras file ({problem}); {_REMEDY}")


def _check_layers(path: Path, text: bytes, allow: bool) -> None:
    """Refuse JSON that does not describe a Keras model, or that would run code from the file."""
    try:
        found = parsed_json(text)
    except ValueError as error:
        raise ConfigurationError(f"--model {path} is not valid JSON ({error}); {_REMEDY}") from None
    if not isinstance(found, dict) or not isinstance(found.get("config"), dict) or "class_name" not in found:
        raise ConfigurationError(
            f"--model {path} is JSON without class_name and config, so not a Keras model; {_REMEDY}"
        )
    for one in _described(found):
        name, module = one.get("class_name"), one.get("module")
        told = one.get("config")
        own = told.get("name") if isinstance(told, dict) else None
        if name in ("Lambda", "__lambda__") and not allow:
            raise ConfigurationError(
                f"--model {path}: {f'the layer {own!r}' if own else 'a part of it'} is a Lambda, which "
                "runs code from the file; write the layer as a class in a Python file with "
                "get_model(), or add --allow-pickle if you trust it"
            )
        if isinstance(module, str) and module.partition(".")[0] not in ("keras", "builtins"):
            raise ConfigurationError(
                f"--model {path} has a {name!r} of {module}, which is not in Keras; give a Python file "
                "whose get_model() imports it"
            )


def _described(found: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects of classes in a description."""
    waiting = [found]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            if "class_name" in one:
                yield one
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one


def load_model(settings: ModelSettings, path: Path) -> Loaded:
    """Load the model with its framework, after seeding."""
    module, suffix = None, path.suffix.lower()
    if suffix == ".py":
        for framework in frameworks_in(path):
            plug_in(framework).seed(settings.seed)
        module = import_file(path)
        model = made_model(module, path, settings.model_params)
    elif suffix in (".pkl", ".pickle"):
        model = unpickled(path)
    else:
        framework = "torch" if suffix in _PICKLES else "keras"
        plug_in(framework).seed(settings.seed)
        model = plug_in(framework).load(path, settings.allow_pickle)
    framework = _framework(model, path, "get_model() returned" if module else "it holds")
    if (weights := weights_file(settings)) is not None:
        fill(plug_in(framework), framework, model, weights, settings.allow_pickle)
    # Seed again for the training; loading a pickle has not seeded at all.
    plug_in(framework).seed(settings.seed)
    name = asked(module, path, "get_name") or path.stem
    if not isinstance(name, str):
        raise ConfigurationError(f"--model {path}: get_name() returned {name!r}; return a text")
    return Loaded(
        model=model,
        framework=framework,
        name=re.sub(r"[^\w-]+", "_", name)[:60] or "model",
        path=path,
        module=module,
    )


def _framework(model: Any, path: Path, said: str) -> str:
    """Return the framework of a model; test for Keras first, as a Keras model on torch is a torch module."""
    bases = [f"{one.__module__}.{one.__qualname__}" for one in type(model).__mro__]
    if any(re.fullmatch(r"keras\..*\.Model", base) for base in bases):
        return "keras"
    if "torch.nn.modules.module.Module" in bases:
        return "torch"
    raise ConfigurationError(
        f"--model {path}: {said} {f'{model!r:.80}' if model is not None else 'None'}, of the type "
        f"{type(model).__name__}, which is neither keras.Model nor torch.nn.Module; return the model itself"
    )


def plug_in(framework: str) -> Any:
    """Return the `_train` module of a framework.

    Raises:
        ConfigurationError: the framework cannot be loaded.
        MissingExtraError: it is not installed.
    """
    name = f"nnlo_{framework}._train"
    if name in sys.modules:
        return sys.modules[name]
    if importlib.util.find_spec(framework) is None:
        raise MissingExtraError("this model", framework, framework)
    if framework == "keras":
        choose_back_end(os.environ)
    try:
        return importlib.import_module(name)
    except MissingExtraError:
        raise
    except ImportError as error:
        raise ConfigurationError(f"{framework} cannot be loaded ({error})") from None


def choose_back_end(env: MutableMapping[str, str]) -> None:
    """Choose an installed back end for Keras, if the user has chosen none and TensorFlow is not installed.

    Args:
        env: the variables of the process.
    """
    here = installed_back_ends()
    if here and "tensorflow" not in here and "keras" not in sys.modules and not chosen_back_end(env):
        env["KERAS_BACKEND"] = here[0]
