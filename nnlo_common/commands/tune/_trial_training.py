"""One trial of a search: a training of `nnlo train`, or of one fold, on the ranks of a block."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna import TrialPruned

from nnlo_common.base._errors import PeerLostError
from nnlo_common.base._file_access import new_folder
from nnlo_common.commands.train._job import Job, tell
from nnlo_common.commands.train._model_file import plug_in
from nnlo_common.commands.train._option import Given
from nnlo_common.commands.train._python_file import running
from nnlo_common.commands.train._run_folder import CONFIG, claiming, config_text, write_json, write_text
from nnlo_common.commands.train._settings import Settings, settings_of
from nnlo_common.commands.train._train_command import TrainRun, cell_of
from nnlo_common.commands.tune._figure_of_merit import FUNCTION, merit
from nnlo_common.commands.tune._report_page import Board, TrialRow
from nnlo_common.commands.tune._search_facts import FinishedTrial, SearchFacts, best_of, finished
from nnlo_common.commands.tune._search_folder import (
    BEGAN,
    BLOCK,
    FOLDER,
    JOURNAL,
    TRIAL,
    VALUE,
    Found,
    drop_models,
    known_value,
)
from nnlo_common.commands.tune._search_result import conclude
from nnlo_common.search import optimize
from nnlo_common.search.coordinator._trial_results import COORDINATOR, NAME
from nnlo_common.search.samplers._seeding import seed_of
from nnlo_common.training._joining import launched
from nnlo_common.training.report._live_table import is_live

__all__ = ["TrialTraining", "search", "watching"]

# -- watch over the trials of a running search: report each, and remove the models of worse ones -------

_EVERY_S = 0.5
# A spare repeats the lines of trials that ended so long before it watches: the dead rank may have owed them.
_LATE_S = 10.0


@contextmanager
def watching(study: Any, facts: SearchFacts, *, first: bool = True) -> Iterator[None]:
    """Watch the search of the body in a thread, on the rank that coordinates it.

    Args:
        study: of the search.
        facts: of the search.
        first: whether this is the first rank; a spare watches once it has taken over.
    """
    watch, over = _TrialWatch(study, facts), threading.Event()

    def look() -> None:
        while not over.wait(_EVERY_S):
            if first or COORDINATOR in study.user_attrs:
                watch.look()

    thread = threading.Thread(target=look, name="nnlo tune", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        if first or COORDINATOR in study.user_attrs:
            watch.look(over=True)


class _TrialWatch:
    """Lines on the terminal about the trials of a study; it only reads the study."""

    def __init__(self, study: Any, facts: SearchFacts) -> None:
        self._study, self._facts = study, facts
        self._looked = False
        asked = facts.request.search.table
        self._live = is_live() if asked is None else asked
        self._reported: set[int] = set()
        self._best: FinishedTrial | None = None
        self._shown = 0  # table lines on the screen

    def look(self, *, over: bool = False) -> None:
        """Print new finished trials, and show the running ones."""
        trials = finished(self._study)
        board = Board(self._facts, trials, time.time())
        lines, rows = [], []
        told_before_s = 0.0
        if not self._looked and COORDINATOR in self._study.user_attrs:
            self._looked, here = True, self._study.user_attrs[COORDINATOR]
            lines.append(f"nnlo tune: the first rank has died; rank {here} takes over")
            # That rank has told of the trials that ended before, but perhaps not of the last ones.
            told_before_s = time.time() - _LATE_S
        for one in trials:
            if one.number not in self._reported:
                self._reported.add(one.number)
                self._clear(one)
                lines += [board.line(one, self._best)] if one.ended_s >= told_before_s else []
        if self._live and not over:
            known = self._study.get_trials(deepcopy=False)
            rows = board.rows([TrialRow.of(trial) for trial in known if trial.state.name == "RUNNING"])
        self._write(lines, rows)

    def _clear(self, one: FinishedTrial) -> None:
        """Keep the model of the best trial only."""
        before = self._best
        self._best = best_of(self._facts.figure, [one] if before is None else [before, one])
        worse = before if self._best is one else one
        if worse is not None and not self._facts.request.search.keep_models:
            drop_models(self._facts.folder, worse.folder, best=self._best.folder if self._best else None)

    def _write(self, lines: list[str], rows: list[str]) -> None:
        """Print lines that stay, and below them rows that the next call replaces."""
        if not lines and not rows and not self._shown:
            return
        up = f"\x1b[{self._shown}F\x1b[J" if self._shown else ""
        sys.stdout.write(up + "".join(f"{line}\n" for line in [*lines, *rows]))
        sys.stdout.flush()
        self._shown = len(rows)


@dataclass(frozen=True, kw_only=True)
class TrialTraining:
    """The objective of a search.

    Attributes:
        facts: of the search.
        path: of the model.
        framework: of the model.
        found: the contents of the folder when the search began.
        block: the number of this rank's block.
    """

    facts: SearchFacts
    path: Path
    framework: str
    found: Found
    block: int

    def __call__(self, trial: Any) -> float:
        """Train on all ranks of the block with the parameters of `trial`, and return the objective."""
        chosen = self.facts.space.suggest(trial)
        fold, folds = trial.fold, trial.folds
        # The folds of a trial share a seed, so that they differ only by their samples.
        seed = seed_of(self.facts.request.seed, trial.number)
        name, seed = self.found.home(trial.user_attrs[NAME], chosen, seed)
        if fold == 0:
            for key, value in ((BLOCK, self.block), (BEGAN, time.time()), (FOLDER, name)):
                if key not in trial.user_attrs:  # it is set if the trial continues with more ranks
                    trial.set_user_attr(key, value)
        home = self.facts.folder / TRIAL / name
        settings = self._settings(chosen, seed, home, fold, folds)
        job = Job(launched(), "tune")
        known = job.share(known_value(Path(str(settings.run))) if job.speaks else None)[0]
        if known is not None:  # this fold ended before the search was killed
            return float(known)
        run = TrainRun(job, lambda epoch, scores: self._watch(trial, epoch, scores))
        try:
            with job.together():
                cell = cell_of(settings, [""] * job.size)
            run.load(settings, self.path, cell)
            if job.speaks:
                with claiming(str(settings.run)):
                    for folder in (home, Path(str(settings.run))):
                        new_folder(folder)
            if fold == 0 and job.speaks:
                whole_set = config_text(self._settings(chosen, seed, home, 0, 1), run.trainer.learning_rate)
                _describe(home, {"parameters": chosen, "seed": seed}, whole_set if folds > 1 else "")
            run.claim()
            value = self._value(job, run, run.train())
            if job.speaks:
                write_json(run.folder / VALUE, {"value": value})
            return value
        finally:
            run.close()
            plug_in(self.framework).forget()

    def _settings(self, chosen: Mapping[str, Any], seed: int, home: Path, fold: int, folds: int) -> Settings:
        """Return the settings of a training."""
        given = self.facts.space.applied(self.facts.request.given, chosen)
        if folds > 1 or self.facts.request.search.n_fold == 1:
            given = self.facts.request.search.folded(given, fold)
        given["seed"] = Given(seed, "the search")
        given["run"] = Given(str(home if folds == 1 else home / f"fold{fold + 1}"), "the search")
        return settings_of(given)

    def _watch(self, trial: Any, epoch: int, scores: Mapping[str, float]) -> None:
        """Report an epoch; all ranks prune the trial together."""
        if self.facts.figure.metric in scores:
            trial.report(scores[self.facts.figure.metric], epoch)
        if self.facts.request.search.prune != "none" and trial.should_prune():
            raise TrialPruned

    def _value(self, job: Job, run: TrainRun, history: Mapping[str, list[float]]) -> float:
        if self.facts.figure.metric:
            return self.facts.figure.of(history, run.kept)
        value = 0.0
        with job.together():
            if job.speaks:
                function = getattr(run.module, FUNCTION)
                with running(self.path, f"by {FUNCTION}()"):
                    value = merit(function, run.trainer.model)
        return float(job.share(value)[0])


def _describe(home: Path, tried: Mapping[str, Any], config: str) -> None:
    """Write the parameters of the trial, and with folds a configuration that trains on all samples."""
    if config:
        write_text(home / CONFIG, config)
    write_text(home.with_name(f"{home.name}.json"), json.dumps(tried, indent=1) + "\n")


# -- the search itself; imported last, because it imports Optuna ---------------------------------------


@contextmanager
def _advised() -> Iterator[None]:
    """Drop the search's own advice: only the command knows whether --run was given."""
    try:
        yield
    except PeerLostError as lost:
        problem, _, advice = lost.problem.partition(". Rerun the same command")
        _, _, spares = advice.partition("; with spares=")
        lost.problem = f"{problem}. With --spares {spares}" if spares else problem
        raise


_PRUNERS: dict[str, Any] = {
    "none": optuna.pruners.NopPruner,
    "median": optuna.pruners.MedianPruner,
    "asha": optuna.pruners.SuccessiveHalvingPruner,
    "hyperband": optuna.pruners.HyperbandPruner,
}


def search(job: Job, facts: SearchFacts, path: Path, framework: str, found: Found) -> int:
    """Search (collective), and return the exit status.

    Args:
        job: the ranks.
        facts: of the search.
        path: of the model.
        framework: of the model.
        found: the contents of the folder.
    """
    asked = facts.request.search
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(
        direction=facts.figure.direction,
        pruner=_PRUNERS[asked.prune](),
        study_name="nnlo tune",
    )
    may_speak = job.speaks or job.rank >= job.size - facts.layout.spares
    if may_speak and facts.default:
        study.enqueue_trial(dict(facts.default))  # after a resume the journal skips it
    train = TrialTraining(
        facts=facts, path=path, framework=framework, found=found, block=facts.layout.block_of(job.rank)
    )
    with watching(study, facts, first=job.speaks) if may_speak else nullcontext(), _advised():
        optimize(
            study,
            train,
            n_trials=asked.num_iterations,
            block_size=len(facts.layout.blocks[0]) if facts.layout.blocks else 1,
            search_ranks=facts.layout.search_ranks,
            spares=facts.layout.spares,
            folds=asked.n_fold,
            lockstep=asked.lockstep,
            elastic=asked.elastic,
            sampler=asked.hyper_opt,
            seed=facts.request.seed,
            failures=asked.failures,
            until=asked.end,
            retries=asked.retries,
            target_objective=asked.target_objective,
            journal=facts.folder / JOURNAL,
            export=asked.export,
        )
    problem, speaks = "", job.speaks or COORDINATOR in study.user_attrs
    with job.together(late=True):
        if speaks:
            problem = conclude(study, facts)
    problem = next((text for text in job.share_with_living(problem) if text), "")
    if problem and speaks:
        tell(problem, "tune")
    return 1 if problem else 0
