"""Request for a search: the command line, checked before anything is loaded."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Literal

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.cluster._hosts import Place
from nnlo_common.cluster._topology import Arrangement
from nnlo_common.commands.train._command_line import given_by
from nnlo_common.commands.train._option import Given, Option, nearest, option, options_of, read_config
from nnlo_common.commands.train._settings import OF_TREES, OPTIONS, Settings, settings_of, value_of
from nnlo_common.search._partition import cut_blocks, refuse_conflicts
from nnlo_common.search.coordinator._time_left import end_of
from nnlo_common.search.samplers._names import IN_SEQUENCE, SAMPLERS
from nnlo_common.training._rank_options import RankOptions

__all__ = [
    "ALL_OPTIONS",
    "BlockLayout",
    "Request",
    "SEARCH_OPTIONS",
    "SearchSettings",
    "in_flags",
    "read_request",
]

# -- request for a search: the command line, checked before anything is loaded --------------------------

_option = partial(option, "Search")
#: The options of `nnlo train` that a search does not have, with the reason.
_LACKING = {
    "fold": "a search sets it itself; use --n-fold",
    "log_to": "trials hand on no numbers of their own; --export follows the search",
    **dict.fromkeys(OF_TREES, "a trial has no tree of servers; train the best one with it afterwards"),
}
#: Options that need folds; a search has its own.
_FOLDING = ("fold_labels", "fold_groups")
#: Options of `nnlo train` that mean something else for a search.
_OWN = ("spares",)
#: Options that name the model and the samples: enough to check both.
_EARLY = (
    *("model", "model_params", "from", "allow_pickle", "train", "val", "features_name", "labels_name"),
    *("cache", "copy_command", "servers", "group_size", "max_gpus", "log_level", "log_dir"),
)


# Arguments in the messages of `optimize`, and the flags whose names differ.
_ARGUMENT = re.compile(
    r"\b(block_size|elastic|export|lockstep|sampler|search_ranks|spares)(?:=True|(=)|(?= out\b))"
)
_NAMES = {"block_size": "block-size", "sampler": "hyper-opt", "search_ranks": "search-ranks"}


@contextmanager
def in_flags() -> Iterator[None]:
    """Replace arguments of `optimize` by flags in errors of the body.

    Example:
        >>> with in_flags():
        ...     raise ConfigurationError("search_ranks=2: leave search_ranks out")
        Traceback (most recent call last):
        nnlo_common.ConfigurationError: --search-ranks 2: leave --search-ranks out
    """
    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError(_ARGUMENT.sub(_flag, str(error))) from None


def _flag(found: re.Match[str]) -> str:
    return f"--{_NAMES.get(found[1], found[1])}{' ' if found[2] else ''}"


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """Settings of a search; each field is an option, whose help describes it."""

    num_iterations: int = _option("number of trials, over all starts of the search", default=20, least=1)
    block_size: int | None = _option("number of ranks that train one trial; else all but the first", least=1)
    search_ranks: int = _option(
        "number of ranks that only choose parameters, for a slow --hyper-opt", default=0, least=0
    )
    spares: int = _option(
        "number of ranks, the last ones, that take over from the first if it dies; mpiexec --with-ft ulfm",
        default=0,
        least=0,
    )
    n_fold: int = _option(
        "train each trial N times, validating with another part of the samples each time", default=1, least=1
    )
    fold_labels: str | None = _option(
        "stratify: each fold has its share of every value of this dataset, e.g. labels; "
        "get_labels: of what that function makes of it"
    )
    fold_groups: str | None = _option(
        "samples with the same value of this dataset, e.g. a run, are in the same fold"
    )
    space: str | None = _option(
        "a .toml or .yaml file with the search space; else get_space() gives it", "FILE"
    )
    hyper_opt: str = _option("how the next trial is chosen", default="bayesian", choices=tuple(SAMPLERS))
    lockstep: bool = _option("repeat the same search exactly, at any pace of the blocks", default=False)
    elastic: bool = _option(
        "let blocks that are idle at the end join the others; needs --checkpoint", default=False
    )
    objective: str | None = _option(
        "a metric of the last epoch, or with :best, :min or :max of all (val_loss)", "METRIC[:WHICH]"
    )
    maximize: bool | None = _option(
        "maximize the objective; else its name decides, as for --early-stopping-metric"
    )
    target_objective: float | None = _option("end the search once a trial reaches this value")
    prune: Literal["none", "median", "asha", "hyperband"] = _option(
        "stop trials that lag behind the others", default="none"
    )
    retries: int = _option("how often to retry a failed trial", default=0, least=0)
    failures: Literal["ignore", "worst", "constraint"] = _option(
        "how --hyper-opt counts a failed trial", default="ignore"
    )
    until: str | None = _option(
        "start no trial that would end later: seconds, a time, or slurm for the job's end", "WHEN"
    )
    export: str | None = _option("a .db or .log file that follows the search, for Optuna's dashboard", "FILE")
    table: bool | None = _option("show running trials in a table; else only on a terminal")
    keep_models: bool = _option("keep the models of all trials, not only of the best", default=False)

    def __post_init__(self) -> None:
        end_of(self.end, time.time())  # refuse invalid times
        with in_flags():
            refuse_conflicts(
                self.hyper_opt,
                lockstep=self.lockstep,
                elastic=self.elastic,
                search_ranks=self.search_ranks,
                spares=self.spares,
                in_sequence=self.hyper_opt in IN_SEQUENCE,
            )

    def folded(self, given: Mapping[str, Given], fold: int) -> dict[str, Given]:
        """Return the options of a training, with those of its fold, counted from 0, if there are folds."""
        own = {"fold": f"{fold + 1}/{self.n_fold}"} if self.n_fold > 1 else {}
        own |= {name: value for name in _FOLDING if (value := getattr(self, name)) is not None}
        return {**given, **{name: Given(value, "the search") for name, value in own.items()}}

    @property
    def end(self) -> float | str | datetime | None:
        """The end of the search, as `optimize` takes it."""
        if self.until is None or self.until == "slurm":
            return self.until
        with suppress(ValueError):
            return float(self.until)
        with suppress(ValueError):
            return datetime.fromisoformat(self.until)
        raise ConfigurationError(
            f"--until {self.until} is not possible: it must be seconds from now, a time such as "
            "2030-12-31T08:00, or slurm"
        )


#: The options of a search by name, in the order of the help.
SEARCH_OPTIONS: Mapping[str, Option] = options_of(SearchSettings)
#: The same, and the options of trainings.
ALL_OPTIONS: Mapping[str, Option] = {
    **SEARCH_OPTIONS,
    **{name: one for name, one in OPTIONS.items() if name not in (*_LACKING, *_FOLDING, *_OWN)},
}


@dataclass(frozen=True, kw_only=True)
class Request:
    """Request for a search.

    Attributes:
        search: the options of the search.
        given: the options of its trainings, as they were given.
        table: the search space; None: from the Python file.
        place: the origin of the table, for messages.
    """

    search: SearchSettings
    given: Mapping[str, Given]
    table: Any = None
    place: str = "get_space()"

    @property
    def run(self) -> str | None:
        """The folder that was asked for."""
        run: str | None = value_of("run", self.given)
        return run

    @property
    def seed(self) -> int:
        """The seed of the search."""
        seed: int = value_of("seed", self.given)
        return seed

    def draft(self) -> Settings:
        """Return settings with only the model and the samples of the trainings."""
        early = {name: one for name, one in self.given.items() if name in _EARLY}
        return settings_of({**early, "loss": self.given.get("loss", Given("to be chosen"))})


def read_request(flags: Mapping[str, Any], unknown: Sequence[str]) -> Request:
    """Return the request of a command line.

    Args:
        flags: the values of the flags, by name.
        unknown: words that the parser does not know.

    Raises:
        ConfigurationError: an option is unknown or invalid.
    """
    given = given_by(flags, unknown, ALL_OPTIONS, "tune", _LACKING)
    table, place = _table(given.pop("space", None))
    for name, one in given.items():
        if name in _LACKING:
            raise ConfigurationError(
                f"{one.place} gives {name!r}, an option of nnlo train alone: {_LACKING[name]}"
            )
        if name not in ALL_OPTIONS:
            raise ConfigurationError(
                f"{one.place} has no option {name!r}{nearest(name, ALL_OPTIONS)} (see nnlo tune --help)"
            )
    own = {name: one.read(SEARCH_OPTIONS[name]) for name, one in given.items() if name in SEARCH_OPTIONS}
    rest = {name: one for name, one in given.items() if name not in SEARCH_OPTIONS}
    for name, one in rest.items():
        one.read(OPTIONS[name])
    search = SearchSettings(**own)
    _check_folds(search, rest)
    if search.n_fold > 1 and "val" in rest:
        raise ConfigurationError("--n-fold validates with samples of --train; leave --val out, or --n-fold")
    if search.elastic and search.n_fold == 1 and "checkpoint" not in rest:
        raise ConfigurationError(
            "--elastic lets idle ranks join trainings from their checkpoints, but there are none; "
            "add --checkpoint, or leave --elastic out"
        )
    return Request(search=search, given=rest, table=table, place=place)


def _check_folds(search: SearchSettings, rest: Mapping[str, Given]) -> None:
    """Refuse options for folds without any, and two ways to choose the samples to validate with."""
    if search.n_fold > 1 and "hold_out" in rest:
        raise ConfigurationError(
            "--n-fold and --hold-out both choose the samples to validate with; give one of the two"
        )
    if search.n_fold == 1 and "hold_out" not in rest and (search.fold_labels or search.fold_groups):
        raise ConfigurationError(
            f"--fold-{'labels' if search.fold_labels else 'groups'} splits samples into folds, but there "
            "are none; add --n-fold, e.g. --n-fold 5, or --hold-out 0.2"
        )


def _table(space: Given | None) -> tuple[Any, str]:
    """Return the search space, from the file of options or another file, and its origin."""
    if space is None:
        return None, "get_space()"
    if isinstance(space.value, dict):
        return space.value, f"{space.place}: space"
    path = space.read(SEARCH_OPTIONS["space"])
    found = read_config(path, "--space")
    return {name: one.value for name, one in found.items()}, f"--space {path}"


# -- the ranks of a search: the block and fold of each rank ---------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """Division of the ranks of a search.

    Attributes:
        blocks: the ranks of each; empty for a single process.
        parallel: how many folds of a trial are trained side by side.
        search_ranks: how many ranks, after the first, only choose parameters.
        spares: how many ranks, the last ones, wait to take over from the first.
    """

    blocks: Sequence[Sequence[int]] = ()
    parallel: int = 1
    search_ranks: int = 0
    spares: int = 0

    @classmethod
    def of(
        cls,
        places: Sequence[Place],
        block_size: int | None,
        folds: int,
        search_ranks: int = 0,
        *,
        spares: int = 0,
    ) -> BlockLayout:
        """Cut the ranks into blocks, except the coordinator, the search ranks and the spares.

        Raises:
            ConfigurationError: ranks would be left over or missing.
        """
        if len(places) == 1:
            return cls()
        size = max(1, len(places) - 1 - search_ranks - spares) if block_size is None else block_size
        with in_flags():
            blocks = cut_blocks([place.host for place in places], size, search_ranks, spares)
        parallel = folds if size % folds == 0 else 1
        return cls(blocks=blocks, parallel=parallel, search_ranks=search_ranks, spares=spares)

    @property
    def cell_size(self) -> int:
        """How many ranks train one model."""
        return len(self.blocks[0]) // self.parallel if self.blocks else 1

    def check(self, settings: Settings) -> None:
        """Refuse a training that does not fit the ranks of a block."""
        if self.cell_size == 1:
            return
        ranks = settings.ranks
        servers, group_size = ranks.servers, ranks.group_size or 1
        if servers == 0:
            Arrangement.of_training(self.cell_size, servers=0, group_size=ranks.group_size)
            return
        arrangement = Arrangement(
            blocks=len(self.blocks), folds=self.parallel, servers=servers, group_size=group_size
        )
        arrangement.check(1 + sum(map(len, self.blocks)))
        settings.rule().check((self.cell_size - servers) // group_size, servers)

    def block_of(self, rank: int) -> int:
        """Return the number of a rank's block; 0 for ranks outside all blocks."""
        return next((index for index, block in enumerate(self.blocks) if rank in block), 0)

    def cell_of(self, rank: int) -> Sequence[int]:
        """Return the ranks that train one model with this one.

        Example:
            >>> layout = BlockLayout(blocks=[(1, 2, 3, 4)], parallel=2)
            >>> layout.cell_of(0), layout.cell_of(4)
            ((0,), (3, 4))
        """
        for block in self.blocks:
            if rank in block:
                start = block.index(rank) // self.cell_size * self.cell_size
                return block[start : start + self.cell_size]
        return (rank,)

    def summary(self, ranks: RankOptions, folds: int) -> str:
        """Return a description in one line."""
        servers, group_size = ranks.servers, ranks.group_size
        if not self.blocks:
            return "one process trains trial after trial"
        size = self.cell_size
        groups = f" in groups of {group_size}" if servers and (group_size or 1) > 1 else ""
        cell = f"{servers} serving and {size - servers} training{groups}" if servers else f"{size} together"
        cell = "1 rank alone" if size == 1 else cell
        several = f" {self.parallel} folds, each" if self.parallel > 1 else ""
        serial = ", fold after fold" if folds > self.parallel else ""
        count = len(self.blocks)
        blocks = "1 block" if count == 1 else f"{count} blocks"
        searching = "" if not self.search_ranks else f"{self.search_ranks} choosing, "
        searching += "" if not self.spares else f"{self.spares} spare, "
        return f"1 coordinator, {searching}{blocks} of{several} {cell}{serial}"
