"""Plan of a training: everything that is known without a framework, for the framework's `_train` module."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np

from nnlo_common.base._errors import ConfigurationError, plural
from nnlo_common.cluster._topology import Cell
from nnlo_common.commands.train._job import brief
from nnlo_common.commands.train._model_file import Loaded
from nnlo_common.commands.train._option import nearest
from nnlo_common.commands.train._python_file import asked
from nnlo_common.commands.train._settings import MODES, RatePlan, Settings
from nnlo_common.data import FileSource, Reading, list_files, portion
from nnlo_common.data._listing import without_tree
from nnlo_common.data._preparation import PREPARATIONS, TEXTS_STAY, Preparation, Vocabulary
from nnlo_common.data._selection import value_of_each
from nnlo_common.data._source import Array
from nnlo_common.data.formats._found import check_remote, format_of
from nnlo_common.search.block._folds import Indices, split
from nnlo_common.training._scaling import scale_lr

__all__ = [
    "Data",
    "RunPlan",
    "check_exchanges",
    "check_files",
    "data_of",
    "part_of_preparation",
    "parts",
    "prepared",
    "side_of",
    "unknown_part",
]

# -- folds of the samples in files: those to train on and those to validate with -----------------------


def parts(files: Sequence[str], reading: Reading, settings: Settings) -> tuple[Indices, Indices]:
    """Return the samples to train on and to validate with; every seed has the same, so trials compare.

    Args:
        files: of all samples.
        reading: options of the reader.
        settings: with the fold, and the datasets that it is cut by.

    Raises:
        ConfigurationError: a dataset is missing or unsuitable, or there are too few samples or groups.
    """
    assert settings.parts is not None  # the caller has checked --fold and --hold-out
    held, folds = settings.parts
    with closing(FileSource(files, **reading)) as source:
        samples = len(source)
    labels = _column("--fold-labels", settings.fold_labels, files, reading)
    groups = _column("--fold-groups", settings.fold_groups, files, reading)
    try:
        validating = [split(samples, folds, fold, labels=labels, groups=groups)[1] for fold in held]
    except ConfigurationError as error:
        asked = (("--fold-labels", settings.fold_labels), ("--fold-groups", settings.fold_groups))
        by = " and ".join(f"{flag} {name}" for flag, name in asked if name)
        raise ConfigurationError(f"{by}: {error}" if by else str(error)) from None
    validation = np.sort(np.concatenate(validating))
    return np.setdiff1d(np.arange(samples), validation), validation


def _column(flag: str, name: str | None, files: Sequence[str], reading: Reading) -> Array | None:
    """Return one value for each sample."""
    if name is None:
        return None
    given: Reading = {}
    if "select" in reading:
        given["select"] = reading["select"]
    if "stage_to" in reading:
        given |= {"stage_to": reading["stage_to"], "copy_command": reading["copy_command"]}
    own: Reading = {"features": name, "vocabulary": TEXTS_STAY, **given}
    try:
        if name == "get_labels":  # what the training gets
            own["features"] = reading.get("labels") or "labels"
            if reading.get("adapt_labels") is not None:
                own["adapt_features"] = reading["adapt_labels"]
                own["vocabulary"] = _vocabulary_of_all(files, reading, given)
        source = FileSource(files, **own)
    except ConfigurationError as error:
        raise ConfigurationError(f"{flag} {name}: {error}") from None
    with closing(source):
        return value_of_each(source, f"{flag} {name}")


def _vocabulary_of_all(files: Sequence[str], reading: Reading, given: Reading) -> Vocabulary | None:
    """Return the indices that an adaptor gets: if they are not yet known, of the values of all samples."""
    asked = reading.get("vocabulary")
    if isinstance(asked, Vocabulary | str | Path):
        return asked if isinstance(asked, Vocabulary) else Vocabulary.load(asked)
    if not asked:
        return None
    own: Reading = {"features": reading["features"], "labels": reading.get("labels"), "vocabulary": asked}
    if "pad" in reading:
        own["pad"] = reading["pad"]
    own |= given
    with closing(FileSource(files, **own)) as source:
        part = Vocabulary.part(source, [(0, len(source))], asked)
    return Vocabulary.of_parts([part], asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The samples of a training.

    Attributes:
        train: files to train on.
        val: files to validate with; empty: no validation.
        reading: options for reading the files to train on.
        val_reading: options for reading the files to validate with.
    """

    train: tuple[str, ...]
    val: tuple[str, ...]
    reading: Reading
    val_reading: Reading

    def first(self) -> tuple[Any, Any]:
        """Return features and labels of two samples, the same on all ranks, so that all checks agree."""
        with closing(FileSource(self.train, **self.reading)) as source:
            features, labels, *_ = source.take(0, min(2, len(source)))
        return features, labels

    def count(self) -> int:
        """Return how many samples there are to train on."""
        with closing(FileSource(self.train, **self.reading)) as source:
            return len(source)


# Of the samples to train on, to measure what prepares them.
_PIECES = 64
#: Losses by the names of the other framework: named and not taken, since what they expect of the model may
#: differ. PyTorch's cross entropy takes logits, Keras' by default probabilities.
OTHER_FRAMEWORK = {
    "torch": {
        "binary_crossentropy": "binary_cross_entropy",
        "categorical_crossentropy": "cross_entropy, of outputs without a softmax",
        "huber": "huber_loss",
        "mae": "l1_loss",
        "mean_absolute_error": "l1_loss",
        "mean_squared_error": "mse_loss",
        "mse": "mse_loss",
        "sparse_categorical_crossentropy": "cross_entropy, of outputs without a softmax",
    },
    "keras": {
        "binary_cross_entropy": "binary_crossentropy",
        "cross_entropy": "categorical_crossentropy, or sparse_categorical_crossentropy for whole numbers as "
        "labels; both of outputs after a softmax",
        "huber_loss": "huber",
        "l1_loss": "mean_absolute_error",
        "mse_loss": "mean_squared_error",
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The plan of a training.

    Attributes:
        settings: all options.
        loaded: the model.
        data: the samples.
        watch: called on each rank after each epoch, with its number and this rank's metrics, on the server
            those of the centre; None: print progress instead.
    """

    settings: Settings
    loaded: Loaded
    data: Data
    watch: Callable[[int, Mapping[str, float]], object] | None = None

    @property
    def rate_scale(self) -> float:
        """What `--scale-rate` multiplies the learning rate by, on these ranks."""
        settings = self.settings
        if settings.scale_rate == "none":
            return 1.0
        return scale_lr(
            1.0,
            rule=settings.scale_rate,
            asynchronous=bool(settings.ranks.servers) and not settings.rule().steps_together,
            **settings.roles,
        )

    @property
    def rates(self) -> RatePlan:
        """The learning rates of the epochs; a warm-up to a scaled rate begins at that of one process."""
        plan, scale = self.settings.rates, self.rate_scale
        return replace(plan, start=1 / scale) if scale > 1 else plan

    def from_module(self, name: str) -> Callable[..., Any] | None:
        """Return the function of this name in the Python file, e.g. a loss; None if there is none."""
        found = getattr(self.loaded.module, name, None)
        return found if callable(found) else None

    def unknown(self, asked_for: str, name: str, known: Sequence[str]) -> ConfigurationError:
        """Return the error for an unknown name."""
        framework = {"keras": "Keras", "torch": "PyTorch"}[self.loaded.framework]
        also = ", nor in the Python file" if self.loaded.module is not None else ""
        other = OTHER_FRAMEWORK[self.loaded.framework].get(name)
        meant = f"; {framework} calls it {other}" if other else nearest(name, known)
        return ConfigurationError(
            f"{asked_for} {name}: not found in {framework}{also}{meant}\n{framework} has {', '.join(known)}"
        )

    def resolved(self, asked_for: str, name: str, find: Callable[[str], Any], known: Sequence[str]) -> Any:
        """Look up a name in the Python file, then in the framework.

        Args:
            asked_for: the option that names it.
            name: as it was given.
            find: finds it in the framework, or raises.
            known: all names in the framework.

        Raises:
            ConfigurationError: neither has it.
        """
        own = self.from_module(name)
        if own is not None:
            return own
        try:
            return find(name)
        except (KeyError, TypeError, ValueError):
            raise self.unknown(asked_for, name, known) from None

    def made_optimizer(
        self, module: ModuleType, first: Sequence[Any] = (), called: Mapping[str, str] | None = None
    ) -> Any:
        """Make the optimizer of the settings.

        Args:
            module: of the framework's optimizers, with their base class `Optimizer`.
            first: positional arguments before the options.
            called: the framework's names of our options, if they differ.

        Raises:
            ConfigurationError: the name is unknown, or the optimizer does not take the options.
        """
        base = module.Optimizer
        classes = [one for name, one in vars(module).items() if name[0] != "_" and inspect.isclass(one)]
        found = [one for one in classes if issubclass(one, base) and one is not base]
        settings, known = self.settings, {one.__name__.lower(): one for one in found}
        make = known.get(settings.optimizer.lower())
        if make is None:
            names = sorted(one.__name__ for one in known.values())
            raise self.unknown("--optimizer", settings.optimizer, names)
        options = {
            (called or {}).get(name, name): value for name, value in settings.optimizer_options.items()
        }
        taken = [*inspect.signature(make).parameters][len(first) :]
        for name in options:
            if name not in taken or name == "kwargs":
                raise ConfigurationError(
                    f"--optimizer {make.__name__} takes no {name!r}{nearest(name, taken)}\n"
                    f"It takes {', '.join(taken)}"
                )
        try:
            return make(*first, **options)
        except (TypeError, ValueError) as error:
            told = f"--optimizer {make.__name__} with {options}: {brief(str(error))}"
            raise ConfigurationError(told) from None

    def wrapped(self, optimizer: Any, package: ModuleType, **options: Any) -> Any:
        """Put around an optimizer what the settings say: rates of layers, and the algorithm.

        Args:
            optimizer: of the framework.
            package: ours for it.
            options: further ones of its wrappers.
        """
        settings = self.settings
        if settings.layer_rates is not None:
            trust = {} if settings.trust is None else {"trust": settings.trust}
            optimizer = getattr(package, settings.layer_rates.upper())(optimizer, **trust)
        make = getattr(package, MODES[settings.mode].algorithm.__name__)
        return make(optimizer, **options, **settings.ranks.given(), **settings.algorithm)


def check_files(settings: Settings) -> None:
    """Refuse empty lists, missing files, and names that nothing here opens, without opening any file."""
    for flag, files in (("--train", settings.train), ("--val", settings.val)):
        listed = list_files(files) if files else ()
        check_remote(() if settings.stage_to is not None else listed)
        for path in listed:
            if "://" in path and settings.stage_to is None and not format_of([path]).remote:
                raise ConfigurationError(f"{flag} {path} is remote; add --cache FOLDER and --copy-command")
            if "://" not in path and not os.path.lexists(without_tree(path)):
                raise ConfigurationError(f"{flag} {path}: there is no such file; fix the path or the list")


def data_of(settings: Settings, loaded: Loaded) -> Data:
    """Return the samples that the options name, else those of the Python file."""
    files = {}
    for flag, given, function in (
        ("--train", settings.train, "get_train"),
        ("--val", settings.val, "get_val"),
    ):
        found = given or asked(loaded.module, loaded.path, function) or ()
        found = (found,) if isinstance(found, str | Path) else found
        if not isinstance(found, list | tuple) or not all(isinstance(one, str | Path) for one in found):
            raise ConfigurationError(
                f"--model {loaded.path}: {function}() returned {found!r:.80}; return paths or patterns"
            )
        files[flag] = tuple(map(str, found))
    if not files["--train"]:
        raise ConfigurationError("--train is missing: name files, a pattern, or a list file")
    reading = cast(Reading, settings.reading("all"))
    reading["features"], adapt_features = side_of(loaded, "features", settings.features_name)
    reading["labels"], adapt_labels = side_of(loaded, "labels", settings.labels_name)
    reading |= {"adapt_features": adapt_features, "adapt_labels": adapt_labels}
    if settings.weights_name is not None:
        reading["weights"] = settings.weights_name
    if settings.stage_to is not None:
        reading |= {"stage_to": settings.stage_to, "copy_command": settings.copy_command}
    else:
        reading["cache"] = settings.memory_cache
    if settings.parts is not None:
        return _folded(files["--train"], reading, settings)
    return Data(train=files["--train"], val=files["--val"], reading=reading, val_reading=reading)


def part_of_preparation(data: Data, name: str, asked: Any, rank: int, ranks: int) -> list[Any]:
    """Return what a rank finds, in its pieces of the training samples, for a preparation.

    The pieces are the same for any number of ranks, so that the sums have the same bits.
    """
    with closing(FileSource(data.train, **data.reading)) as source:
        first, last = portion(_PIECES, rank, ranks)
        pieces = [portion(len(source), piece, _PIECES) for piece in range(first, last)]
        return PREPARATIONS[name].part(source, pieces, asked)


def prepared(data: Data, name: str, asked: Any, parts: Sequence[Sequence[Any]]) -> tuple[Data, Preparation]:
    """Return the data with a preparation, and that, from the parts of all ranks."""
    found = PREPARATIONS[name].of_parts(parts, asked)
    also = cast(Reading, {name: found})
    return replace(data, reading={**data.reading, **also}, val_reading={**data.val_reading, **also}), found


def unknown_part(data: Data, rank: int, ranks: int) -> dict[str, list[int]]:
    """Return how many values a rank finds in its part of the samples to validate with, and how many unknown.

    Args:
        data: with a vocabulary.
        rank: this one.
        ranks: their number.
    """
    with closing(FileSource(data.val, **data.val_reading)) as source:
        found = source.values(*portion(len(source), rank, ranks))
    return {name: [sum(counts.values()), counts.get(None, 0)] for name, counts in found.items()}


def _folded(files: tuple[str, ...], reading: Reading, settings: Settings) -> Data:
    training, validation = parts(files, reading, settings)
    return Data(
        train=files,
        val=files,
        reading={**reading, "samples": training},
        val_reading={**reading, "samples": validation},
    )


def side_of(loaded: Loaded, side: str, given: tuple[str, ...]) -> tuple[Any, Any]:
    """Return the dataset names of the features or labels, and the function that adapts the arrays."""
    found = asked(loaded.module, loaded.path, f"get_{side}")
    name, adaptor = found if isinstance(found, tuple) and len(found) == 2 else (found or side, None)
    if not isinstance(name, str) or not (adaptor is None or callable(adaptor)):
        raise ConfigurationError(
            f"--model {loaded.path}: get_{side}() returned {found!r:.80}; return the name of a dataset, "
            "or a pair of it and a function that adapts the arrays (or None)"
        )
    return (name if not given else given[0] if len(given) == 1 else given), adaptor


def check_exchanges(plan: RunPlan, cell: Cell) -> None:
    """Refuse a training too short for one exchange: its centre would never move.

    Args:
        plan: of the training.
        cell: the ranks that train.
    """
    settings = plan.settings
    rule = settings.rule()
    needed = rule.steps_until_move()
    if not needed:
        return
    share, batch = math.ceil(plan.data.count() / len(cell.workers)), settings.batch * len(cell.groups[0])
    steps = settings.epochs * math.ceil(share / batch)
    every: int = getattr(rule, "every", needed)
    if needed > steps:
        less = every + steps - needed
        raise ConfigurationError(
            f"--mode {settings.mode} exchanges every {every} steps of a worker, but each has {steps} "
            f"steps: {share} samples in batches of {batch}, {settings.epochs} times; the centre "
            f"would not move{' until the training ends' if rule.trains_in_rounds else ''}. Give "
            + (f"--every {less} or less, or more --epochs" if less else "more --epochs")
        )
    if cell.branches:
        _check_top(settings, rule.exchanges_until_top(), cell, steps // every)


def _check_top(settings: Settings, needed: int, cell: Cell, times: int) -> None:
    """Refuse a training too short for an exchange of the smallest branch of a tree with the top."""
    workers = min(map(len, cell.branches)) - 1
    exchanges = workers * times
    if needed > exchanges:
        raise ConfigurationError(
            f"--sub-every {needed} is not possible here: {plural(workers, 'worker')} of a sub-server "
            f"make {plural(exchanges, 'exchange')} in {settings.epochs} epochs, so it would never exchange "
            f"with the top server. Give --sub-every {exchanges} or less, or more --epochs"
        )
