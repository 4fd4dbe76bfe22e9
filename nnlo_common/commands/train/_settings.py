"""Every option of `nnlo train` but those of the algorithms, and which of them do not go together."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from nnlo_common.algorithms import Algorithm
from nnlo_common.base._errors import ConfigurationError
from nnlo_common.commands.train._algorithm_options import MODES, algorithm_of, mode_options
from nnlo_common.commands.train._option import Given, Option, OptionKind, nearest

__all__ = ["OPTIONS", "SEARCHABLE", "Settings", "Target", "option", "settings_of"]


@dataclass(frozen=True, slots=True)
class Target:
    """A metric that is good enough.

    Attributes:
        metric: its name.
        above: whether it has to be above the value, or below.
        value: which.
    """

    metric: str
    above: bool
    value: float

    def __call__(self, value: float) -> bool:
        """Say whether a value of the metric is good enough."""
        return value > self.value if self.above else value < self.value


def option(group: str, kind: OptionKind, help: str, *, default: Any = None, **facts: Any) -> Any:  # noqa: A002
    """Return the field of an option."""
    metadata = {"group": group, "kind": kind, "help": help, **facts}
    if kind is OptionKind.PAIRS:
        return field(default_factory=dict, metadata=metadata)
    if kind is OptionKind.WORDS:
        return field(default=(), metadata=metadata)
    return field(default=default, metadata=metadata)


MODEL, DATA, TRAINING, ALGORITHM, RANKS, OUTPUT = (
    "Model",
    "Data",
    "Training",
    "Algorithm",
    "Ranks",
    "What is kept",
)
_NESTEROV = "--optimizer sgd --momentum 0.9 --optimizer-option nesterov=true"
_WORD, _WORDS, _WHOLE, _REAL, _FLAG = (
    OptionKind.WORD,
    OptionKind.WORDS,
    OptionKind.WHOLE,
    OptionKind.REAL,
    OptionKind.FLAG,
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a training is to be; each field is an option, whose help says what it does."""

    model: str = option(
        *(
            MODEL,
            _WORD,
            "Keras JSON, .keras, or a Python file whose get_model() returns a Keras or torch model",
        ),
        metavar="FILE",
    )
    model_params: dict[str, Any] = option(  # noqa: RUF009
        MODEL, OptionKind.PAIRS, "arguments for get_model() of a Python file", metavar="NAME=VALUE"
    )
    allow_pickle: bool = option(
        *(MODEL, _FLAG, "take model files that run code when loaded: .pkl, .pt, Lambda layers"), default=False
    )

    train: tuple[str, ...] = option(
        *(DATA, _WORDS, "HDF5 files to train on: paths, patterns or list files; else get_train() says which"),
        metavar="FILE",
    )
    val: tuple[str, ...] = option(
        DATA,
        _WORDS,
        "HDF5 files to validate the centre with, after each epoch; else get_val()",
        metavar="FILE",
    )
    features_name: tuple[str, ...] = option(
        *(DATA, _WORDS, "the dataset or group of the features; else get_features(), else 'features'"),
        metavar="NAME",
    )
    labels_name: tuple[str, ...] = option(
        *(DATA, _WORDS, "the dataset or group of the labels; else get_labels(), else 'labels'"),
        metavar="NAME",
    )
    fold: str | None = option(
        *(DATA, _WORD, "validate with this part of the samples and train on the others, e.g. 1/5"),
        metavar="I/K",
    )
    fold_labels: str | None = option(
        *(DATA, _WORD, "stratify: each part has its share of every value of this dataset, e.g. labels"),
        metavar="NAME",
    )
    fold_groups: str | None = option(
        *(DATA, _WORD, "samples with the same value of this dataset, e.g. a run, are in the same part"),
        metavar="NAME",
    )
    batch: int = option(DATA, _WHOLE, "samples in a batch of one worker", metavar="N", default=100, least=1)
    shuffle: bool = option(DATA, _FLAG, "another order of the samples in each epoch", default=True)
    check_finite: bool = option(DATA, _FLAG, "refuse NaN and infinity where they are read", default=False)
    cache: str | None = option(
        DATA, _WORD, "copy the files to a folder of each host first, once for all its ranks", metavar="FOLDER"
    )
    copy_command: tuple[str, ...] | None = option(
        *(DATA, OptionKind.COMMAND, "what copies a file there, e.g. 'xrdcp {src} {dst}'; no shell runs it"),
        metavar="LINE",
    )

    loss: str = option(
        TRAINING, _WORD, "the framework's name for it, or a function of the Python file", metavar="NAME"
    )
    metrics: tuple[str, ...] = option(
        TRAINING, _WORDS, "the same for what is only measured, e.g. accuracy", metavar="NAME"
    )
    epochs: int = option(
        TRAINING, _WHOLE, "how often each sample is trained on", metavar="N", default=1, least=1
    )
    optimizer: str = option(TRAINING, _WORD, "the framework's name for it", metavar="NAME", default="sgd")
    learning_rate: float | None = option(
        TRAINING, _REAL, "of the optimizer; else the framework's", metavar="X", above=0
    )
    momentum: float | None = option(TRAINING, _REAL, "of the optimizer", metavar="X", least=0, below=1)
    optimizer_option: dict[str, Any] = option(  # noqa: RUF009
        TRAINING, OptionKind.PAIRS, "what else the optimizer takes", metavar="NAME=VALUE"
    )
    seed: int = option(
        TRAINING,
        _WHOLE,
        "of first weights and orders of samples",
        metavar="N",
        default=0,
        least=0,
        below=2**32,
    )
    early_stopping: int | None = option(
        TRAINING, _WHOLE, "stop after so many epochs without a better metric", metavar="EPOCHS", least=1
    )
    early_stopping_metric: str | None = option(
        TRAINING, _WORD, "that metric (val_loss, or loss without --val)", metavar="NAME"
    )
    target_metric: str | None = option(
        TRAINING, _WORD, "stop when it is reached, e.g. 'val_accuracy > 0.9'", metavar="CONDITION"
    )

    mode: str = option(
        *(ALGORITHM, _WORD, "how workers and centre exchange"),
        metavar="NAME",
        default="downpour",
        choices=tuple(MODES),
    )
    algorithm: dict[str, Any] = field(default_factory=dict)

    servers: int = option(
        RANKS,
        _WHOLE,
        "how many of the ranks share the serving of the centre",
        metavar="N",
        default=1,
        least=1,
    )
    max_gpus: int | None = option(
        RANKS, _WHOLE, "use at most so many GPUs of each host; 0: none", metavar="N", least=0
    )
    stall_timeout: int | None = option(
        RANKS, _WHOLE, "give up a worker that is silent so long; else it is only named", metavar="S", least=1
    )

    run: str | None = option(
        *(OUTPUT, _WORD, "a new folder for the result; else runs/MODEL-1, -2, ..."), metavar="FOLDER"
    )
    checkpoint: int | None = option(
        *(OUTPUT, _WHOLE, "save all ranks every N epochs (1); the same command goes on. FOLDER: as --run"),
        metavar="N|FOLDER",
        bare="1",
        least=1,
    )
    monitor: bool = option(
        OUTPUT, _FLAG, "a line per epoch and rank: speed, memory, staleness", default=False
    )
    timeline: bool = option(OUTPUT, _FLAG, "a trace of each rank for ui.perfetto.dev", default=False)
    log_level: str = option(
        *(OUTPUT, _WORD, "what is told while it trains"),
        metavar="NAME",
        default="warning",
        choices=("debug", "info", "warning", "error"),
    )

    def __post_init__(self) -> None:
        for problem in self._contradictions():
            raise ConfigurationError(problem)
        _ = self.rule(), self.target, self.part  # refuse what is not possible

    def rule(self) -> Algorithm:
        """Return the algorithm; it refuses options that are not possible."""
        return algorithm_of(self.mode, self.algorithm)

    @property
    def target(self) -> Target | None:
        """The target metric, read."""
        if self.target_metric is None:
            return None
        found = re.fullmatch(r"\s*(\w+)\s*([<>])\s*([-+.\w]+)\s*", self.target_metric)
        wanted = Option(name="target_metric", group="", kind=OptionKind.REAL, help="")
        if found is None:
            Given(self.target_metric).refuse(wanted, "must be like 'val_accuracy > 0.9' or 'val_loss < 0.1'")
        return Target(found[1], found[2] == ">", Given(found[3]).read(wanted))

    @property
    def part(self) -> tuple[int, int] | None:
        """Which fold of how many, from 0."""
        if self.fold is None:
            return None
        found = re.fullmatch(r"\s*(\d+)\s*/\s*(\d+)\s*", self.fold)
        if found is None or int(found[2]) < 2 or not 1 <= int(found[1]) <= int(found[2]):
            Given(self.fold).refuse(OPTIONS["fold"], "must be like 1/5, the first of five parts, to 5/5")
        return int(found[1]) - 1, int(found[2])

    def _contradictions(self) -> list[str]:
        found = [
            (not self.model, "--model is missing: name a Keras JSON, a .keras file or a Python file"),
            (not self.loss, "--loss is missing: name one, e.g. --loss categorical_crossentropy"),
            (
                self.copy_command is not None and self.cache is None,
                "--copy-command says how to copy, but not where to; add --cache FOLDER",
            ),
            (
                self.early_stopping_metric is not None and self.early_stopping is None,
                "--early-stopping-metric says by what to stop, but not when; add --early-stopping EPOCHS",
            ),
            (
                self.checkpoint is not None and self.run is None,
                "--checkpoint needs --run FOLDER, where the same command finds what it has saved",
            ),
            (
                self.fold is not None and bool(self.val),
                "--fold takes what validates from the samples of --train; leave --val out, or --fold",
            ),
            (
                self.fold is None and bool(self.fold_labels or self.fold_groups),
                f"--fold-{'labels' if self.fold_labels else 'groups'} is for parts; add --fold, e.g. 1/5",
            ),
            (
                self.mode == "gem" and self.optimizer.lower() != "sgd",
                f"--mode gem follows a momentum SGD, no {self.optimizer}; use --optimizer sgd --momentum 0.9",
            ),
            (
                self.mode == "eamsgd"
                and (self.optimizer.lower() != "sgd" or self.optimizer_option.get("nesterov") is not True),
                f"--mode eamsgd follows an SGD with Nesterov momentum; use {_NESTEROV}",
            ),
            (
                {"alpha", "beta"} <= self.algorithm.keys(),
                "--alpha takes the place of --beta (alpha = beta / workers); give one of the two",
            ),
        ]
        return [problem for wrong, problem in found if wrong]


def _options() -> dict[str, Option]:
    found: dict[str, Option] = {}
    for one in fields(Settings):
        if one.name == "algorithm":
            found |= mode_options()
        else:
            default = None if one.default in (MISSING, ()) else one.default
            found[one.name] = Option(name=one.name, default=default, **one.metadata)
    return found


#: All options by name, in the order of the help.
OPTIONS: Mapping[str, Option] = _options()
_FIXED = frozenset({"metrics", "optimizer_option", "seed", "early_stopping_metric", "target_metric"})
#: The names of those that a search may choose.
SEARCHABLE: Sequence[str] = [
    name
    for name, one in OPTIONS.items()
    if (one.group in (TRAINING, ALGORITHM) or name in ("batch", "shuffle", "servers")) and name not in _FIXED
]


def settings_of(given: Mapping[str, Given]) -> Settings:
    """Return the settings that were given by name.

    Raises:
        ConfigurationError: one is unknown, is not what it should be, or does not go with the others.
    """
    values: dict[str, Any] = {}
    for name, one in given.items():
        if name not in OPTIONS:
            raise ConfigurationError(
                f"{one.place} has no option {name!r}{nearest(name, OPTIONS)} (nnlo train --help has them all)"
            )
        values[name] = one.read(OPTIONS[name])
    mode = values.get("mode", OPTIONS["mode"].default)
    algorithm = {name: values.pop(name) for name in mode_options() if name in values}
    for name in algorithm:
        if name not in MODES[mode].options:
            having = ", ".join(other for other, facts in MODES.items() if name in facts.options)
            own = ", ".join(MODES[mode].options)
            raise ConfigurationError(
                f"{given[name].place} gives {name!r}, an option of --mode {having}, but the mode is "
                f"{mode!r}, which has {own}; leave it out, or choose another --mode"
            )
    return Settings(**values, algorithm=algorithm)
