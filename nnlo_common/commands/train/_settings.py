"""Options of `nnlo train` except those of the algorithms, and the conflicts between them."""

from __future__ import annotations

import keyword
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from nnlo_common.algorithms import Algorithm
from nnlo_common.algorithms._found import ALGORITHMS
from nnlo_common.base._arguments import whole_in
from nnlo_common.base._errors import ConfigurationError
from nnlo_common.cluster._topology import Cell, Roles, Topology
from nnlo_common.commands.train._option import (
    Given,
    Option,
    OptionKind,
    kind_of,
    nearest,
    option,
    options_of,
)
from nnlo_common.data._memory_cache import CACHES, CacheKind
from nnlo_common.data._preparation import StatisticsName
from nnlo_common.data.formats._found import listed_formats
from nnlo_common.training._early_stopping import Target
from nnlo_common.training._rank_options import RANK_OPTIONS, RankOptions
from nnlo_common.training.report._profiled_steps import ProfiledSteps
from nnlo_common.training.report._trackers import TRACKERS

__all__ = [
    "AlgorithmMode",
    "GROUP",
    "MODES",
    "MODE_OPTIONS",
    "MOMENTUM",
    "MOMENTUM_MODES",
    "OF_TREES",
    "OPTIONS",
    "RATES",
    "RatePlan",
    "SEARCHABLE",
    "Settings",
    "algorithm_of",
    "settings_of",
    "value_of",
]

# -- options of the algorithms, as they declare them, for `nnlo train` ---------------------------------

GROUP = "Algorithm"


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmMode:
    """An algorithm that `--mode` names.

    Attributes:
        algorithm: its class; both plug-ins have a wrapper of that name.
        options: by name.
    """

    algorithm: type[Algorithm]
    options: Mapping[str, Option]


def _options(algorithm: type[Algorithm]) -> dict[str, Option]:
    """The options of one algorithm."""
    return {
        name: Option(name=name, group=GROUP, help=one.help, default=one.wrapper_default, **kind_of(one.type))
        for name, one in algorithm.wrapper_options().items()
    }


#: The algorithms by name.
MODES: Mapping[str, AlgorithmMode] = {
    name: AlgorithmMode(algorithm=one, options=_options(one)) for name, one in ALGORITHMS.items()
}
#: The algorithms that take an SGD with momentum only.
MOMENTUM_MODES = tuple(name for name, one in ALGORITHMS.items() if one.made_of)


def _joined(name: str) -> Option:
    """Merge an option of several algorithms into one, with the meaning and default for each."""
    having = {mode: facts.options[name] for mode, facts in MODES.items() if name in facts.options}
    (usual, _), *_ = Counter(one.help for one in having.values()).most_common(1)
    meanings: dict[str, list[str]] = {}
    for mode, one in having.items():
        default = {True: "yes", False: "no"}[one.default] if one.kind is OptionKind.FLAG else one.default
        meanings.setdefault(one.help, []).append(mode if default is None else f"{mode} ({default})")
    text = "; ".join(
        meaning if meaning == usual and len(having) == len(MODES) else f"{', '.join(modes)}: {meaning}"
        for meaning, modes in meanings.items()
    )
    return replace(one, help=text, default=None, metavar="|".join(one.choices))


#: An option for each name that any algorithm has.
MODE_OPTIONS: Mapping[str, Option] = {
    name: _joined(name) for name in sorted({name for mode in MODES.values() for name in mode.options})
}


def algorithm_of(mode: str, options: Mapping[str, Any]) -> Algorithm:
    """Return the algorithm with these options; it refuses invalid ones.

    Example:
        >>> algorithm_of("easgd", {"every": 5}).every
        5
    """
    return MODES[mode].algorithm.of_options(options)


# -- learning rates: the defaults of the optimizers, and how a rate changes in the course of a training.

#: The rates of optimizers whose defaults differ between the frameworks, or are poor.
RATES: Mapping[str, float] = {"sgd": 0.01, "adagrad": 0.01, "adadelta": 1.0, "rmsprop": 0.001}
#: The momentum of SGD for algorithms that are made of it.
MOMENTUM = 0.9
_FACTORS = {"step": 0.1, "exponential": 0.9, "inverse": 0.5, "plateau": 0.1}
_PATIENCE = 5
#: The power of the polynomial decay, that of LARS (You et al. 2017).
_POWER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RatePlan:
    """The learning rates of a training.

    Attributes:
        kind: "cosine", "step", "exponential", "inverse", "linear", "polynomial" or "plateau"; None: the rate
            stays.
        factor: of a decay.
        every: epochs of a step, or without improvement on a plateau.
        warm_up: epochs of the warm-up, before the schedule begins.
        length: epochs after it.
        start: fraction of the rate that the warm-up begins with.

    Example:
        >>> RatePlan.of("step", None, None, 2, 11).every
        3
    """

    kind: str | None
    factor: float
    every: int
    warm_up: int
    length: int
    start: float = 0.1

    @classmethod
    def of(
        cls, kind: str | None, decay: float | None, every: int | None, warm_up: int | None, epochs: int
    ) -> RatePlan:
        """Return the schedule of some options, with their defaults."""
        length = max(epochs - (warm_up or 0), 1)
        return cls(
            kind=kind,
            factor=_FACTORS.get(kind or "", 1.0) if decay is None else decay,
            every=every or (_PATIENCE if kind == "plateau" else max(length // 3, 1)),
            warm_up=warm_up or 0,
            length=length,
        )

    def contradictions(self, decay: float | None, every: int | None, epochs: int) -> Iterator[str]:
        """Yield what is wrong with the options."""
        if decay is not None and self.kind not in _FACTORS:
            yield f"--decay is the factor of --schedule {', '.join(_FACTORS)}; add one, or leave it out"
        if every is not None and self.kind not in ("step", "plateau"):
            yield "--decay-every belongs to --schedule step or plateau; add one of them, or leave it out"
        if self.warm_up >= epochs:
            yield f"--warm-up {self.warm_up} takes all of --epochs {epochs}; give more epochs, or less of it"

    def part(self, epoch: int) -> float:
        """Return the rate of an epoch after the warm-up, as a part of the first one; not for a plateau.

        Args:
            epoch: from 0, the first one after the warm-up.

        Example:
            >>> plan = RatePlan.of("inverse", None, None, None, 10)
            >>> [round(plan.part(epoch), 3) for epoch in range(4)]
            [1.0, 0.5, 0.333, 0.25]
        """
        done = min(epoch / self.length, 1.0)
        parts = {
            "cosine": lambda: (1 + math.cos(math.pi * done)) / 2,
            "linear": lambda: 1 - done,
            "polynomial": lambda: (1 - done) ** _POWER,
            "step": lambda: self.factor ** (epoch // self.every),
            "exponential": lambda: self.factor**epoch,
            # 1/t; with another factor the second epoch has that part of the rate.
            "inverse": lambda: 1 / (1 + epoch * (1 / self.factor - 1)),
        }
        return parts[self.kind]() if self.kind in parts else 1.0

    def __bool__(self) -> bool:
        return self.kind is not None or self.warm_up > 0


MODEL, DATA, TRAINING, RANKS, OUTPUT = "Model", "Data", "Training", "Ranks", "What is kept"
_MOMENTUM = f"--optimizer sgd --momentum {MOMENTUM}"
_MOST_PARTS = 100  # a hold-out is made of some of at most so many
_NESTEROV = f"{_MOMENTUM} --optimizer-option nesterov=true"


#: The options of ranks, as flags: a time in seconds ends with _s there, and has the placeholder S here.
RANK_FLAGS: Mapping[str, Option] = {
    (flag := name.removesuffix("_s")): Option(
        name=flag,
        group=RANKS,
        help=one.help,
        default=one.default,
        metavar="S" if name != flag else "",
        least=one.least,
        above=one.above if one.least is None and name != flag else None,
        **kind_of(one.type),
    )
    for name, one in RANK_OPTIONS.items()
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a training; each field is an option, whose help describes it."""

    model: str = option(
        MODEL, "Keras JSON, .keras, or a Python file whose get_model() returns a Keras or torch model", "FILE"
    )
    model_params: dict[str, Any] = option(  # noqa: RUF009
        MODEL, "arguments for get_model() of a Python file", default=dict
    )
    from_: str | None = option(
        MODEL, "begin with the weights in this file, or in the folder of another run", "FILE|RUN"
    )
    allow_pickle: bool = option(
        MODEL, "take model files that run code when loaded: .pkl, .pt, Lambda layers", default=False
    )

    train: tuple[str, ...] = option(
        DATA,
        f"files to train on: paths, patterns or list files, of {listed_formats()}; of a ROOT file FILE:TREE; "
        "else get_train()",
        "FILE",
        (),
    )
    val: tuple[str, ...] = option(
        DATA, "files to validate the centre with, after each epoch; else get_val()", "FILE", ()
    )
    features_name: tuple[str, ...] = option(
        DATA,
        "the column (HDF5 dataset) or group of the features; several side by side: pt,eta or jet_*; else "
        "get_features(), else 'features'",
        default=(),
    )
    labels_name: tuple[str, ...] = option(
        DATA, "the column or group of the labels; else get_labels(), else 'labels'", default=()
    )
    weights_name: str | None = option(
        DATA, "the column of the samples' weights, in the loss and in the metrics, also in validation"
    )
    select: str | None = option(
        DATA, "use the samples that fulfil this, e.g. 'pt > 20 and abs(eta) < 2.5'", "CUT", reader="all"
    )
    balance: str | None = option(
        DATA,
        "train on samples of rare classes more often: each value of this column comes equally often",
        reader="training",
    )
    pad: int | None = option(
        DATA,
        "bring rows of unequal length to this length: with zeros, or cut off",
        "N",
        least=1,
        reader="all",
    )
    mask: bool = option(
        DATA, "let a mask follow each such input: true where a row has an entry", default=False, reader="all"
    )
    bucket: bool = option(
        DATA,
        "make batches of rows of like length, each filled up to its own longest only",
        default=False,
        reader="training",
    )
    vocabulary: tuple[str, ...] = option(
        DATA,
        "columns of texts, or of whole numbers that are categories, to turn into indices from 1, by a list "
        "kept with the run; 0: unknown. COLUMN:N allows for N different values (10000)",
        "COLUMN",
        (),
        reader="all",
    )
    standardize: StatisticsName | None = option(  # noqa: RUF009
        DATA,
        "bring each feature to mean 0 and spread 1, by numbers kept with the run; quantiles: to median 0 and "
        "a spread that far outliers do not change",
        bare="spread",
    )
    fold: str | None = option(
        DATA, "validate with this part of the samples and train on the others, e.g. 1/5", "I/K"
    )
    hold_out: float | None = option(
        DATA, "validate with this share of the samples and train on the others, e.g. 0.2", above=0, below=1
    )
    fold_labels: str | None = option(
        DATA,
        "stratify: each part has its share of every value of this dataset, e.g. labels; "
        "get_labels: of what that function makes of it",
    )
    fold_groups: str | None = option(
        DATA, "samples with the same value of this dataset, e.g. a run, are in the same part"
    )
    batch: int = option(DATA, "samples in a batch of one worker", default=100, least=1)
    shuffle: bool = option(DATA, "a new order of the samples in each epoch", default=True, reader="training")
    check_finite: bool = option(
        DATA, "refuse NaN and infinity where they are read", default=False, reader="all"
    )
    cache: str | None = option(
        DATA,
        "memory: keep the decoded samples in the memory of each host, once for all its ranks (auto: if they "
        "are compressed and fit; none); FOLDER: copy the files there first",
        "WHERE",
    )
    copy_command: tuple[str, ...] | None = option(
        DATA,
        "the command that copies a file there, e.g. 'xrdcp {src} {dst}'; run without a shell",
        "LINE",
        kind=OptionKind.COMMAND,
    )

    loss: str = option(TRAINING, "the framework's name of the loss, or a function of the Python file")
    metrics: tuple[str, ...] = option(
        TRAINING, "metrics to measure, named like --loss, e.g. accuracy", default=()
    )
    epochs: int = option(TRAINING, "passes over the samples", default=1, least=1)
    optimizer: str = option(TRAINING, "the framework's name of the optimizer", default="sgd")
    learning_rate: float | None = option(
        TRAINING,
        "of the optimizer (sgd 0.01, adagrad 0.01, adadelta 1, rmsprop 0.001, others as in the framework)",
        above=0,
    )
    momentum: float | None = option(
        TRAINING, f"of the optimizer; {', '.join(MOMENTUM_MODES)} ({MOMENTUM})", least=0, below=1
    )
    optimizer_option: dict[str, Any] = option(  # noqa: RUF009
        TRAINING, "further options of the optimizer", default=dict
    )
    layer_rates: Literal["lars", "larc"] | None = option(
        TRAINING,
        "scale each layer's learning rate by the ratio of its norm to that of its gradient, for very large "
        "batches; larc never exceeds the optimizer's rate",
    )
    trust: float | None = option(TRAINING, "the factor of --layer-rates (0.001)", above=0)
    scale_rate: Literal["none", "linear", "square_root"] = option(
        TRAINING, "multiply the learning rate for the larger batch that ranks make together", default="none"
    )
    schedule: (
        Literal["cosine", "linear", "polynomial", "step", "exponential", "inverse", "plateau"] | None
    ) = option(TRAINING, "how the learning rate changes from epoch to epoch; else it stays")
    decay: float | None = option(
        TRAINING, "factor of step (0.1), exponential (0.9), inverse (0.5) and plateau (0.1)", above=0, below=1
    )
    decay_every: int | None = option(
        TRAINING, "epochs: of a step (a third of all), or without a better metric for plateau (5)", least=1
    )
    warm_up: int | None = option(
        TRAINING,
        "epochs in which the learning rate rises, batch by batch, from a tenth, or from that of one process",
        "EPOCHS",
        least=1,
    )
    seed: int = option(TRAINING, "of the weights and the order of samples", default=0, least=0, below=2**32)
    early_stopping: int | None = option(
        TRAINING,
        "stop after so many epochs without a better metric; keep the best weights",
        "EPOCHS",
        least=1,
    )
    early_stopping_metric: str | None = option(
        TRAINING, "that metric, and that of --schedule plateau (val_loss, or loss without --val)"
    )
    target_metric: str | None = option(
        TRAINING, "stop when a metric reaches this, e.g. 'val_accuracy > 0.9'", "CONDITION"
    )

    mode: str = option(GROUP, "how workers and centre exchange", default="steady", choices=tuple(MODES))
    algorithm: dict[str, Any] = field(default_factory=dict, metadata={"options": MODE_OPTIONS})

    ranks: RankOptions = field(default_factory=RankOptions, metadata={"options": RANK_FLAGS})
    max_gpus: int | None = option(RANKS, "use at most so many GPUs of each host; 0: none", least=0)

    run: str | None = option(OUTPUT, "a new folder for the result; else runs/MODEL-1, -2, ...", "FOLDER")
    checkpoint: int | None = option(
        OUTPUT,
        "save all ranks every N epochs (1); rerun to resume. FOLDER: as --run",
        "N|FOLDER",
        bare="1",
        least=1,
    )
    timeline: bool = option(OUTPUT, "a trace of each rank for ui.perfetto.dev", default=False)
    profile: str | None = option(
        OUTPUT, "profile steps 10 to 20 of ranks 1 and 3 by the framework: 10-20@1,3", "STEPS[@RANKS]"
    )
    log_level: Literal["debug", "info", "warning", "error"] = option(
        OUTPUT, "the lowest level of messages to print", default="warning"
    )
    log_to: tuple[str, ...] = option(
        OUTPUT, "also hand the numbers to tensorboard, mlflow or wandb, as one run", default=()
    )
    log_dir: str | None = option(
        OUTPUT, "also write messages and warnings there, a file for each rank", "FOLDER"
    )

    def __post_init__(self) -> None:
        for problem in self._contradictions():
            raise ConfigurationError(problem)
        _ = self.rule(), self.target, self.parts  # refuse invalid values now

    def rule(self) -> Algorithm:
        """Return the algorithm; it refuses invalid options."""
        return algorithm_of(self.mode, self.algorithm)

    def cell(self, hosts: Sequence[str]) -> Cell:
        """Return the roles of ranks on these hosts; refuse a number of ranks that does not fit."""
        return Topology.of_training(hosts, **self.roles).cells[0]

    @property
    def roles(self) -> Roles:
        """What decides which rank does what."""
        return self.ranks.roles(self.rule().tree())

    def reading(self, reader: Literal["all", "training"]) -> dict[str, Any]:
        """Return the options that readers of samples take as they are, of all or only of the training."""
        return {name: getattr(self, name) for name, one in OPTIONS.items() if one.reader == reader}

    @property
    def stage_to(self) -> str | None:
        """The folder of each host that the files are copied to; None: they are not."""
        return None if self.cache in CACHES else self.cache

    @property
    def memory_cache(self) -> CacheKind:
        """Which samples are kept in memory."""
        return next((kind for kind in CACHES if kind == self.cache), CACHES[0])

    @property
    def target(self) -> tuple[str, Target] | None:
        """The name of the target metric, and its bound."""
        if self.target_metric is None:
            return None
        found = re.fullmatch(r"\s*(\w+)\s*([<>])\s*([-+.\w]+)\s*", self.target_metric)
        wanted = Option(name="target_metric", group="", kind=OptionKind.REAL, help="")
        if found is None:
            Given(self.target_metric).refuse(wanted, "must be like 'val_accuracy > 0.9' or 'val_loss < 0.1'")
        side = {">": "above", "<": "below"}[found[2]]
        return found[1], Target(**{side: Given(found[3]).read(wanted)})

    @property
    def rates(self) -> RatePlan:
        """The learning rates of the epochs."""
        return RatePlan.of(self.schedule, self.decay, self.decay_every, self.warm_up, self.epochs)

    @property
    def optimizer_options(self) -> dict[str, Any]:
        """The options of the optimizer, with the defaults of the algorithm and of `nnlo train`."""
        name = self.optimizer.lower()
        defaults: dict[str, Any] = {"learning_rate": RATES.get(name)}
        made_of = MODES[self.mode].algorithm.made_of
        if made_of and name == "sgd":
            defaults["momentum"] = MOMENTUM
        if made_of == "nesterov":
            defaults["nesterov"] = True
        given = {"learning_rate": self.learning_rate, "momentum": self.momentum, **self.optimizer_option}
        every = defaults | {name: value for name, value in given.items() if value is not None}
        return {name: value for name, value in every.items() if value is not None}

    @property
    def parts(self) -> tuple[range, int] | None:
        """The numbers of the parts to validate with, from 0, and the number of all; None: there are none."""
        if self.hold_out is not None:
            for parts in range(2, _MOST_PARTS + 1):  # few parts, so that each can have some of every label
                held = round(self.hold_out * parts)
                if 0 < held < parts and math.isclose(held / parts, self.hold_out, rel_tol=0.05):
                    return range(held), parts
            Given(self.hold_out).refuse(
                OPTIONS["hold_out"], f"must be from 1/{_MOST_PARTS} to 1 - 1/{_MOST_PARTS}"
            )
        if self.fold is None:
            return None
        found = re.fullmatch(r"\s*(\d+)\s*/\s*(\d+)\s*", self.fold)
        part, parts = (0, 0) if found is None else (whole_in(one) or 0 for one in found.groups())
        if parts < 2 or not 1 <= part <= parts:
            Given(self.fold).refuse(OPTIONS["fold"], "must be like 1/5, the first of five parts, to 5/5")
        return range(part - 1, part), parts

    def _contradictions(self) -> Iterator[str]:
        if self.profile is not None:
            ProfiledSteps.parse(self.profile, "--profile ")
        for one in self.log_to:
            if one not in TRACKERS:
                yield f"--log-to {one}: give one of {', '.join(TRACKERS)}{nearest(one, TRACKERS)}"
        if not self.model:
            yield "--model is missing: name a Keras JSON, a .keras file or a Python file"
        if not self.loss:
            yield "--loss is missing: name one, e.g. --loss categorical_crossentropy"
        for flag in ("mask", "bucket"):
            if getattr(self, flag) and self.pad is None:
                yield f"--{flag} needs --pad, the length to bring rows to; add --pad N"
        if self.copy_command is not None and self.stage_to is None:
            yield "--copy-command needs a folder to copy to; add --cache FOLDER"
        by_metric = self.early_stopping is not None or self.schedule == "plateau"
        if self.early_stopping_metric is not None and not by_metric:
            yield "--early-stopping-metric alone stops nothing; add --early-stopping EPOCHS"
        if self.checkpoint is not None and self.run is None:
            yield "--checkpoint needs --run FOLDER, so that the same command can resume from there"
        yield from self._contradictory_parts()
        yield from self._contradictory_rates()

    def _contradictory_parts(self) -> Iterator[str]:
        flags = [flag for flag, value in (("--fold", self.fold), ("--hold-out", self.hold_out)) if value]
        if len(flags) > 1:
            yield "--fold and --hold-out both choose the samples to validate with; give one of the two"
        if flags and self.val:
            chosen = f"{flags[0]} {self.fold if self.fold else self.hold_out}"
            val = " ".join(self.val)
            yield (
                f"{flags[0]} validates with samples of --train, --val with files of its own; give one of the "
                f"two: '{chosen}' alone sets samples of {' '.join(self.train)} apart, '--val {val}' alone "
                "trains on all of them"
            )
        if not flags and (self.fold_labels or self.fold_groups):
            by = "labels" if self.fold_labels else "groups"
            yield f"--fold-{by} needs --fold or --hold-out; add one, e.g. --fold 1/5"

    def _contradictory_rates(self) -> Iterator[str]:
        if self.scale_rate != "none" and MODES[self.mode].algorithm.steps_in_place:
            yield (
                f"--scale-rate {self.scale_rate} with --mode {self.mode}: that keeps the settings of one "
                "process by itself; leave --scale-rate out"
            )
        for name, other in (("learning_rate", "learning_rate"), ("learning_rate", "lr"), ("momentum",) * 2):
            value, also = getattr(self, name), self.optimizer_option.get(other)
            if value is not None and also is not None and value != also:
                pair = f"{OPTIONS[name].flag} {value} and --optimizer-option {other}={also}"
                yield f"{pair} set the same; give one of the two"
        if self.trust is not None and self.layer_rates is None:
            yield "--trust is the factor of layers' rates; add --layer-rates lars or larc"
        yield from self.rates.contradictions(self.decay, self.decay_every, self.epochs)
        sgd, one = self.optimizer.lower() == "sgd", MODES[self.mode].algorithm
        if one.made_of == "momentum" and not sgd:
            yield f"--mode {self.mode} needs SGD with momentum, not {self.optimizer}; use {_MOMENTUM}"
        if one.made_of == "nesterov" and not (sgd and self.optimizer_options["nesterov"] is True):
            yield f"--mode {self.mode} needs SGD with Nesterov momentum; use {_NESTEROV}"
        for name, declared in one.wrapper_options().items():
            other, equation = declared.replaces or ("", "")
            if {name, other} <= self.algorithm.keys():
                flags = f"{OPTIONS[name].flag} replaces {OPTIONS[other].flag}"
                yield f"{flags} ({equation}); give one of the two"


#: All options by name, in the order of the help.
OPTIONS: Mapping[str, Option] = options_of(Settings)
#: The options of an elastic tree, which no trial of a search can have.
OF_TREES = tuple(
    sorted(
        {
            name
            for mode in MODES.values()
            for name, one in mode.algorithm.wrapper_options().items()
            if one.elsewhere
        }
    )
)
_FIXED = frozenset(
    {"metrics", "optimizer_option", "seed", "early_stopping_metric", "target_metric", *OF_TREES}
)
#: The names of the options that a search may choose.
SEARCHABLE: Sequence[str] = [
    name
    for name, one in OPTIONS.items()
    if (one.group in (TRAINING, GROUP) or name in ("batch", "shuffle", "servers")) and name not in _FIXED
]


def value_of(name: str, given: Mapping[str, Given]) -> Any:
    """Return the value of an option: as it was given, else its default."""
    return given[name].read(OPTIONS[name]) if name in given else OPTIONS[name].default


def settings_of(given: Mapping[str, Given]) -> Settings:
    """Return the settings for the given values.

    Raises:
        ConfigurationError: an option is unknown, invalid, or conflicts with another.
    """
    values: dict[str, Any] = {}
    for name, one in given.items():
        if name not in OPTIONS:
            raise ConfigurationError(
                f"{one.place} has no option {name!r}{nearest(name, OPTIONS)} (see nnlo train --help)"
            )
        values[name] = one.read(OPTIONS[name])
    mode = value_of("mode", given)
    algorithm = {name: values.pop(name) for name in MODE_OPTIONS if name in values}
    for name in algorithm:
        if name not in MODES[mode].options:
            having = ", ".join(other for other, facts in MODES.items() if name in facts.options)
            own = ", ".join(MODES[mode].options)
            raise ConfigurationError(
                f"{given[name].place} gives {name!r}, an option of --mode {having}, but the mode is "
                f"{mode!r}, which takes {own}; leave {name!r} out, or choose another --mode"
            )
    flags = zip(RANK_FLAGS, RANK_OPTIONS, strict=True)
    ranks = {name: values.pop(flag) for flag, name in flags if flag in values}
    fields_of = {f"{name}_" if keyword.iskeyword(name) else name: value for name, value in values.items()}
    return Settings(**fields_of, algorithm=algorithm, ranks=RankOptions(**ranks))
