"""Request for a search: the command line, checked before anything is loaded."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from datetime import datetime
from typing import Any, Literal

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.commands.train._config import read_config
from nnlo_common.commands.train._options import Given, Kind, Option, nearest
from nnlo_common.commands.train._parser import given_by
from nnlo_common.commands.train._settings import OPTIONS, Settings, option, settings_of
from nnlo_common.commands.tune._wording import in_flags
from nnlo_common.search._argument_checks import refuse_conflicts
from nnlo_common.search.coordinator._time_left import end_of
from nnlo_common.search.samplers._names import IN_SEQUENCE, SAMPLERS

__all__ = ["ALL_OPTIONS", "SEARCH_OPTIONS", "Request", "Search", "read_request"]

_SEARCH = "Search"
_WORD, _WHOLE, _FLAG = Kind.WORD, Kind.WHOLE, Kind.FLAG
#: The options of `nnlo train` that a search does itself.
_TAKEN = ("fold",)
#: Those that need folds, which a search has.
_FOLDING = ("fold_labels", "fold_groups")
#: Those that say which model and which samples: enough to look at both.
_EARLY = (
    *("model", "model_params", "allow_pickle", "train", "val", "features_name", "labels_name"),
    *("cache", "copy_command", "servers", "max_gpus", "log_level"),
)


@dataclass(frozen=True, kw_only=True)
class Search:
    """What a search is to be; each field is an option, whose help says what it does."""

    num_iterations: int = option(
        _SEARCH, _WHOLE, "how many trials, over all starts of a search", metavar="N", default=20, least=1
    )
    block_size: int | None = option(
        *(_SEARCH, _WHOLE, "how many ranks train one trial; else all but the first"),
        metavar="N",
        least=1,
    )
    search_ranks: int = option(
        *(_SEARCH, _WHOLE, "how many ranks only choose parameters, for a --hyper-opt that takes its time"),
        metavar="N",
        default=0,
        least=0,
    )
    n_fold: int = option(
        *(_SEARCH, _WHOLE, "train each trial N times, validating with another part of the samples each time"),
        metavar="N",
        default=1,
        least=1,
    )
    fold_labels: str | None = option(
        *(_SEARCH, _WORD, "stratify: each fold has its share of every value of this dataset, e.g. labels"),
        metavar="NAME",
    )
    fold_groups: str | None = option(
        *(_SEARCH, _WORD, "samples with the same value of this dataset, e.g. a run, are in the same fold"),
        metavar="NAME",
    )
    space: str | None = option(
        *(_SEARCH, _WORD, "a file, .toml or .yaml, that says what is searched; else get_space() does"),
        metavar="FILE",
    )
    hyper_opt: str = option(
        *(_SEARCH, _WORD, "how the next trial is chosen"),
        metavar="NAME",
        default="bayesian",
        choices=SAMPLERS,
    )
    lockstep: bool = option(
        _SEARCH, _FLAG, "the same search each time, whatever the pace of the blocks", default=False
    )
    elastic: bool = option(
        _SEARCH,
        _FLAG,
        "blocks that are idle at the end join those that train; needs --checkpoint",
        default=False,
    )
    objective: str | None = option(
        *(_SEARCH, _WORD, "a metric of the last epoch, or with :best, :min or :max of all (val_loss)"),
        metavar="METRIC[:WHICH]",
    )
    maximize: bool | None = option(
        _SEARCH, _FLAG, "the higher the better; else its name decides, as for --early-stopping-metric"
    )
    target_objective: float | None = option(
        _SEARCH, Kind.REAL, "end the search once a trial is as good", metavar="X"
    )
    prune: str = option(
        *(_SEARCH, _WORD, "give up trials that lag behind the others"),
        metavar="NAME",
        default="none",
        choices=("none", "median", "asha", "hyperband"),
    )
    retries: int = option(
        _SEARCH, _WHOLE, "how often a trial that has failed is tried again", metavar="N", default=0, least=0
    )
    failures: Literal["ignore", "worst", "constraint"] = option(
        *(_SEARCH, _WORD, "what a failed trial tells --hyper-opt of its parameters"),
        metavar="NAME",
        default="ignore",
        choices=("ignore", "worst", "constraint"),
    )
    until: str | None = option(
        *(_SEARCH, _WORD, "begin no trial that would end later: seconds, a time, or slurm for the job's end"),
        metavar="WHEN",
    )
    export: str | None = option(
        *(_SEARCH, _WORD, "a file, .db or .log, that follows the search, for Optuna's dashboard"),
        metavar="FILE",
    )
    table: bool | None = option(
        _SEARCH, _FLAG, "show running trials in a table; else where somebody looks at a terminal"
    )
    keep_models: bool = option(
        _SEARCH, _FLAG, "keep the models of all trials, not only of the best", default=False
    )

    def __post_init__(self) -> None:
        end_of(self.end, time.time())  # refuse what is no time
        if self.n_fold == 1 and (self.fold_labels or self.fold_groups):
            raise ConfigurationError(
                f"--fold-{'labels' if self.fold_labels else 'groups'} says by what samples are split into "
                "folds, but there are none; add --n-fold, e.g. --n-fold 5"
            )
        with in_flags():
            refuse_conflicts(
                self.hyper_opt,
                lockstep=self.lockstep,
                elastic=self.elastic,
                search_ranks=self.search_ranks,
                in_sequence=self.hyper_opt in IN_SEQUENCE,
            )

    def folded(self, given: Mapping[str, Given], fold: int) -> dict[str, Given]:
        """Return the options of a training with those of a fold, counted from 0, where there are folds."""
        if self.n_fold == 1:
            return dict(given)
        own = {"fold": f"{fold + 1}/{self.n_fold}"}
        own |= {name: value for name in _FOLDING if (value := getattr(self, name)) is not None}
        return {**given, **{name: Given(value, "the search") for name, value in own.items()}}

    @property
    def end(self) -> float | str | datetime | None:
        """When the search is to be over, as `optimize` takes it."""
        if self.until is None or self.until == "slurm":
            return self.until
        try:
            return float(self.until)
        except ValueError:
            pass
        try:
            return datetime.fromisoformat(self.until)
        except ValueError:
            raise ConfigurationError(
                f"--until {self.until} is not possible: it must be seconds from now, a time such as "
                "2030-12-31T08:00, or slurm"
            ) from None


#: The options of a search by name, in the order of the help.
SEARCH_OPTIONS: Mapping[str, Option] = {
    one.name: Option(name=one.name, default=None if one.default is MISSING else one.default, **one.metadata)
    for one in fields(Search)
}
#: The same, and those of trainings.
ALL_OPTIONS: Mapping[str, Option] = {
    **SEARCH_OPTIONS,
    **{name: one for name, one in OPTIONS.items() if name not in (*_TAKEN, *_FOLDING)},
}


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked for.

    Attributes:
        search: the options of the search.
        given: those of its trainings, as they were given.
        table: what is to be searched; None: the Python file says.
        place: by what that was given.
    """

    search: Search
    given: Mapping[str, Given]
    table: Any = None
    place: str = "get_space()"

    @property
    def run(self) -> str | None:
        """The folder that was asked for."""
        return None if "run" not in self.given else str(self.given["run"].read(OPTIONS["run"]))

    @property
    def seed(self) -> int:
        """What all that is random depends on."""
        seed: int = self.given["seed"].read(OPTIONS["seed"]) if "seed" in self.given else 0
        return seed

    def draft(self) -> Settings:
        """Return settings that say which model and which samples, and nothing else of the trainings."""
        early = {name: one for name, one in self.given.items() if name in _EARLY}
        return settings_of({**early, "loss": self.given.get("loss", Given("to be chosen"))})


def read_request(flags: Mapping[str, Any], unknown: Sequence[str]) -> Request:
    """Return what a command line asks for.

    Args:
        flags: what was given to flags, by their names.
        unknown: what the parser does not know.

    Raises:
        ConfigurationError: something is unknown, or not what it should be.
    """
    given = given_by(flags, unknown, ALL_OPTIONS, "tune")
    table, place = _table(given.pop("space", None))
    for name, one in given.items():
        if name in _TAKEN:
            raise ConfigurationError(f"{one.place} gives {name!r}, which a search does itself: use --n-fold")
        if name not in ALL_OPTIONS:
            raise ConfigurationError(
                f"{one.place} has no option {name!r}{nearest(name, ALL_OPTIONS)} (nnlo tune --help has them)"
            )
    own = {name: one.read(SEARCH_OPTIONS[name]) for name, one in given.items() if name in SEARCH_OPTIONS}
    rest = {name: one for name, one in given.items() if name not in SEARCH_OPTIONS}
    for name, one in rest.items():
        one.read(OPTIONS[name])
    search = Search(**own)
    if search.n_fold > 1 and "val" in rest:
        raise ConfigurationError(
            "--n-fold takes what validates from the samples of --train; leave --val out, or --n-fold"
        )
    if search.elastic and search.n_fold == 1 and "checkpoint" not in rest:
        raise ConfigurationError(
            "--elastic lets idle ranks go on with trainings from their checkpoints, of which there are none; "
            "add --checkpoint, or leave --elastic out"
        )
    return Request(search=search, given=rest, table=table, place=place)


def _table(space: Given | None) -> tuple[Any, str]:
    """What is to be searched: a table of the file of options, or another file."""
    if space is None:
        return None, "get_space()"
    if isinstance(space.value, dict):
        return space.value, f"{space.place}: space"
    path = space.read(SEARCH_OPTIONS["space"])
    found = read_config(path, "--space")
    return {name: one.value for name, one in found.items()}, f"--space {path}"
