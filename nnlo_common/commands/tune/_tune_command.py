"""The command, step by step: read, check, agree, claim a folder, search, write the result."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from nnlo_common.base._errors import ConfigurationError, MissingExtraError
from nnlo_common.base._file_access import usable
from nnlo_common.base._signals import EXIT_CODE
from nnlo_common.cluster._gpus import search_turns, share_host
from nnlo_common.cluster.transport._endpoint import DivisibleWorld
from nnlo_common.commands.train._job import Job, RankCommand, tell
from nnlo_common.commands.train._model_file import check_model, check_weights_file, load_model, plug_in
from nnlo_common.commands.train._option import Given
from nnlo_common.commands.train._python_file import (
    adapting,
    asked,
    check_no_old_space,
    frameworks_in,
    import_file,
    parameters_of,
)
from nnlo_common.commands.train._run_plan import RunPlan, check_exchanges, check_files, data_of
from nnlo_common.commands.train._settings import MODES, MOMENTUM, OPTIONS, settings_of, value_of
from nnlo_common.commands.tune._figure_of_merit import FUNCTION, FigureOfMerit, default_metric, figure_of
from nnlo_common.commands.tune._request import BlockLayout, Request, in_flags, read_request
from nnlo_common.commands.tune._search_facts import SearchFacts
from nnlo_common.commands.tune._search_folder import Found, claim_search, inspect_folder
from nnlo_common.commands.tune._search_result import search_text
from nnlo_common.commands.tune._search_space import Space, space_of
from nnlo_common.training._joining import within
from nnlo_common.training._rank_parts import say

__all__ = ["SearchRun", "defaults"]

# -- default parameters of a training: the first trial, so that the best is never worse ----------------


def defaults(
    space: Space, given: Mapping[str, Given], make: Callable[..., Any] | None, **known: Any
) -> dict[str, Any]:
    """Return the default of every parameter whose default lies in the space.

    Args:
        space: the search space.
        given: the options of all trainings.
        make: the function that makes the model; None: there is none.
        known: defaults that the framework sets.

    Example:
        >>> from nnlo_common.commands.tune._search_space import Parameter
        >>> rate = Parameter(name="learning_rate", table="", key="learning_rate", low=1e-3, high=0.1)
        >>> wide = Parameter(name="batch", table="", key="batch", low=200, high=300)
        >>> defaults(Space((rate, wide)), {}, None, learning_rate=0.01)
        {'learning_rate': 0.01}
    """
    found: dict[str, Any] = {}
    for one in space.parameters:
        if not one.active(found):
            continue
        if one.table:
            asked = parameters_of(make).get(one.key) if one.table == "model_params" else None
            value = None if asked is None or asked.default is asked.empty else asked.default
        else:
            value = known.get(one.key, _of_option(one.key, given, found))
        if value is not None and one.holds(value):
            found[one.name] = value
    return found


def _of_option(key: str, given: Mapping[str, Given], found: Mapping[str, Any]) -> Any:
    mode = found["mode"] if "mode" in found else value_of("mode", given)
    if key in MODES[mode].options:
        return MODES[mode].options[key].default
    if key == "momentum":  # without it the frameworks use 0
        return MOMENTUM if MODES[mode].algorithm.made_of else 0.0
    return OPTIONS[key].default


_RATE = "learning_rate"


class SearchRun(RankCommand):
    """A search on one rank."""

    request: Request
    layout: BlockLayout
    space: Space
    figure: FigureOfMerit
    framework: str
    _default: Mapping[str, Any]

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._path, self._found, self._began_s = Path(), Found(), time.time()

    def run(self, flags: Mapping[str, Any], unknown: Sequence[str]) -> int:
        """Prepare and search; return the exit status."""
        self.prepare(flags, unknown)
        return self.search()

    def prepare(self, flags: Mapping[str, Any], unknown: Sequence[str]) -> None:
        """Check everything before the search, quick checks first, and agree with all ranks."""
        job = self._job
        with job.together():
            request = self.request = read_request(flags, unknown)
            _check_optuna()
            _check_export(request.search.export)
            draft = request.draft()
            self.keep_logs(draft.log_level, draft.log_dir)
        places = job.places()
        with job.together():
            self.layout = BlockLayout.of(
                places,
                request.search.block_size,
                request.search.n_fold,
                request.search.search_ranks,
                spares=request.search.spares,
            )
            self._path = check_model(draft)
            check_files(draft)
            check_weights_file(draft)
        turns = search_turns(request.search.search_ranks, request.search.spares)
        share_host(places, job.rank, draft.max_gpus, os.environ, turns)
        with job.together():
            self.space = self._read_space()
            for probe in self.space.probes():
                self.layout.check(settings_of(self.space.applied(request.given, probe)))
        with job.together(), self._cell(), adapting():
            self._try(self.space.probes()[0])
            self._default = self._defaults()
        self._claim()

    def search(self) -> int:
        """Search, write the result, and return the exit status."""
        from nnlo_common.commands.tune._trial_training import search

        self._started = True
        facts = SearchFacts(
            request=self.request,
            space=self.space,
            figure=self.figure,
            layout=self.layout,
            folder=self.folder,
            default=self._default,
            began=self._began,
            began_s=self._began_s,
        )
        speaker = "alone" if self._job.speaks else "worker"
        draft = self.request.draft()
        told = self.layout.summary(draft.ranks, self.request.search.n_fold)
        say(speaker, f"nnlo tune: {told}; {self.folder}")
        try:
            return search(self._job, facts, self._path, self.framework, self._found)
        except SystemExit as left:
            if left.code == EXIT_CODE and self._job.speaks:
                tell(f"a signal ended the search{self.advice}", "tune")
            raise

    @property
    def advice(self) -> str:
        """Text to print when the search stops early: what to do next."""
        if not self._started:
            return ""
        if self.request.run is None:
            return "\nTo be able to resume a search, give --run FOLDER"
        return f"\nRerun the same command to resume from the trials in {self.folder}"

    @property
    def resume_hint(self) -> str:
        """The same text, after an interrupt."""
        return self.advice

    def _read_space(self) -> Space:
        """Return the search space; this imports the Python file."""
        request, path = self.request, self._path
        module = None
        if path.suffix.lower() == ".py":
            for framework in frameworks_in(path):
                plug_in(framework).seed(0)
            if request.table is None:
                check_no_old_space(path)
            module = import_file(path)
        table = asked(module, path, "get_space") if request.table is None else request.table
        if table is None:
            raise ConfigurationError(
                "there is no search space: write get_space() into the Python file, or give --space FILE"
            )
        place = f"--model {path}: get_space()" if request.table is None else request.place
        self._make = getattr(module, "get_model", None)
        space = space_of(table, place, self._make)
        space.check(request.given)
        if request.search.hyper_opt == "grid":
            space.check_grid()
        return space

    @contextmanager
    def _cell(self) -> Iterator[None]:
        """Make the ranks that train one model this rank's world."""
        if self._job.world is None:
            yield
            return
        world = cast("DivisibleWorld", self._job.world)
        part = world.part(self.layout.cell_of(world.rank))
        try:
            with within(part):
                yield
        finally:
            part.close()

    def _defaults(self) -> dict[str, Any]:
        """Return the first trial; try a training to find the framework's learning rate."""
        given, space = self.request.given, self.space
        found = defaults(space, given, self._make)
        if any(one.name == _RATE for one in space.parameters):
            point = space.active(space.probes()[0] | found)
            rate = self._try({name: value for name, value in point.items() if name != _RATE})
            found = defaults(space, given, self._make, learning_rate=rate)
        return found

    def _try(self, chosen: Mapping[str, Any]) -> float:
        """Prepare a training without running it, and return its learning rate."""
        request = self.request
        settings = settings_of(request.search.folded(self.space.applied(request.given, chosen), 0))
        loaded = load_model(settings, self._path)
        self.framework = loaded.framework
        plan = RunPlan(
            settings=settings, loaded=loaded, data=data_of(settings, loaded), watch=lambda epoch, scores: None
        )
        training = plug_in(loaded.framework).prepare(plan)
        try:
            search = request.search
            self.figure = figure_of(search.objective, search.maximize, loaded.module, training.metrics)
            if search.prune != "none" and not self.figure.metric:
                raise ConfigurationError(
                    f"--prune {search.prune} compares trials after each epoch, but {FUNCTION}() is called "
                    "after the last one only; leave out --prune, or name a metric, e.g. --objective "
                    f"{default_metric(training.metrics)}"
                )
            if self.layout.cell_size > 1:
                check_exchanges(plan, settings.cell([""] * self.layout.cell_size))
        finally:
            training.close()
        self._name = loaded.name
        plug_in(loaded.framework).forget()
        return float(f"{training.learning_rate:.6g}")  # Keras has it in 32 bits

    def _claim(self) -> None:
        """Claim a folder for the search, and read its contents (collective)."""
        job = self._job
        told: list[Any] = []
        with job.together():
            if job.speaks:
                text = search_text(self.request, self.space)
                self.folder, goes_on = claim_search(self.request.run, self._name, text)
                self._fresh = not goes_on
                found = inspect_folder(self.folder, "checkpoint" in self.request.given)
                told = [str(self.folder), found.taken, found.left]
        folder, taken, left = job.share(told)[0]
        self.folder = Path(folder)
        self._found = Found(tuple(taken), tuple(map(tuple, left)))


def _check_export(asked: str | None) -> None:
    from nnlo_common.search._export import exportable

    if asked is not None:
        with in_flags():
            usable(f"--export {asked}", exportable(asked))


def _check_optuna() -> None:
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise MissingExtraError("nnlo tune", "optuna", "tune") from None
