"""Search of an Optuna study: on one process, as the coordinator, or as a rank of a block."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal

import optuna
from optuna.pruners import WilcoxonPruner
from optuna.trial import TrialState

from nnlo_common.base._arguments import is_number
from nnlo_common.base._errors import ConfigurationError, plural
from nnlo_common.base._signals import Interrupts
from nnlo_common.cluster.transport._endpoint import DivisibleWorld
from nnlo_common.search._channels import Inheritance, connect_search
from nnlo_common.search._export import Export, exportable
from nnlo_common.search._journal import Journal, SearchRecord, inherit, make_plain, take_over
from nnlo_common.search._partition import cut_teams, refuse_conflicts
from nnlo_common.search._search_messages import End, Start
from nnlo_common.search.block._block import LocalLink, Objective, attempt, run_block
from nnlo_common.search.coordinator._coordinator import SIGNAL, Coordinator, run_coordinator
from nnlo_common.search.coordinator._study_trials import StudyCallback, StudyTrials, known_to_all
from nnlo_common.search.coordinator._time_left import TimeLeft, end_of
from nnlo_common.search.coordinator._trial_results import COORDINATOR, LOG, SECONDS, FailurePolicy
from nnlo_common.search.samplers._bayesian import BayesianSampler
from nnlo_common.search.samplers._engines import engine
from nnlo_common.search.samplers._replica import Replica, choose_for_others, in_sequence

__all__ = ["StudySearch"]

# Arguments that must be the same on all ranks.
_ALIKE = ("folds", "seed", "failures", "retries", "lockstep", "elastic", "search_ranks", "spares")


@dataclass
class StudySearch:
    """One rank's part in a search; the attributes are the arguments of `optimize`."""

    study: optuna.Study
    objective: Objective
    _: KW_ONLY
    n_trials: int
    folds: int = 1
    sampler: str | optuna.samplers.BaseSampler | None = None
    seed: int = 0
    retries: int = 0
    failures: Literal["ignore", "worst", "constraint"] = "ignore"
    target: float | None = None
    until: float | str | datetime.datetime | None = None
    journal: str | Path | None = None
    export: str | Path | None = None
    lockstep: bool = False
    elastic: bool = False
    search_ranks: int = 0
    spares: int = 0
    callbacks: Sequence[StudyCallback] = ()
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        """Refuse conflicting arguments.

        Raises:
            ConfigurationError: two arguments conflict.
        """
        study, target = self.study, self.target
        if not isinstance(study, optuna.Study):
            raise ConfigurationError(
                f"optimize({study!r}, ...): the first argument must be a study: "
                "optimize(optuna.create_study(), objective)"
            )
        if target is not None and (not is_number(target) or math.isnan(target)):
            raise ConfigurationError(
                f"target_objective={target!r}: give a number, at which the search ends, or None"
            )
        if target is not None and len(study.directions) > 1:
            raise ConfigurationError(
                f"target_objective={target!r} with {len(study.directions)} objectives: it needs a single "
                "one; leave it out"
            )
        listed = self.callbacks if isinstance(self.callbacks, Sequence) else [None]
        if not all(map(callable, listed)):
            raise ConfigurationError(
                f"callbacks={self.callbacks!r}: give a list of functions that take a study and a trial, as "
                "for Study.optimize"
            )
        chosen = self._chosen
        refuse_conflicts(
            chosen,
            lockstep=self.lockstep,
            elastic=self.elastic,
            search_ranks=self.search_ranks,
            spares=self.spares,
            in_sequence=in_sequence(chosen),
            instead=", or pass optuna.samplers.GridSampler(space)",
        )
        self._failures, self._end_s = FailurePolicy(study, self.failures), end_of(self.until, self.clock())
        self._export = self.export and exportable(self.export)

    @property
    def _chosen(self) -> str | optuna.samplers.BaseSampler:
        return self.study.sampler if self.sampler is None else self.sampler

    @property
    def facts(self) -> dict[str, Any]:
        """Arguments that must be equal on all ranks."""
        chosen = self._chosen
        return {
            "sampler": chosen if isinstance(chosen, str) else type(chosen).__name__,
            "pruner": type(self.study.pruner).__name__,
            "directions": [direction.name for direction in self.study.directions],
            "until": str(self.until),
            "target_objective": self.target,
            **{name: getattr(self, name) for name in _ALIKE},
        }

    def check(self, blocks: Sequence[tuple[int, ...]]) -> None:
        """Refuse arguments that conflict with these blocks.

        Raises:
            ConfigurationError: the search would not repeat.
        """
        side_by_side = len(cut_teams(blocks, self.folds)) > len(blocks)
        if self.lockstep and side_by_side and isinstance(self.study.pruner, WilcoxonPruner):
            raise ConfigurationError(
                f"lockstep=True with WilcoxonPruner and {self.folds} folds side by side: it judges folds as "
                "they end, and which ends first is chance. Use another pruner, or a block_size that is not a "
                f"multiple of {self.folds}, so that folds train one after another"
            )

    def alone(self) -> bool:
        """Train all trials in this process, one after another; return whether a signal ended the search."""
        self.spares = 0
        with self._files() as record, Interrupts() as interrupts:
            coordinator = self._begin(1, 1, record)
            waiting = coordinator.begin()
            while waiting:
                order = waiting.pop(0).message
                if isinstance(order, Start):
                    line = LocalLink(coordinator, interrupts)
                    ending = attempt(order, line, self.objective)
                    if line.refused is not None:
                        raise line.refused from None
                    waiting += coordinator.handle(0, ending)
        return self._has_ended(coordinator)

    def over(self, world: DivisibleWorld, blocks: Sequence[tuple[int, ...]]) -> bool:
        """Do this rank's part; return whether a signal ended the search (collective).

        Args:
            world: the ranks.
            blocks: the ranks of every block; rank 0, the search ranks after it, and the spares, the last
                ranks, are in none.
        """
        teams = cut_teams(blocks, self.folds)
        searchers = range(len(teams), len(teams) + self.search_ranks)
        each = len(teams) // len(blocks)
        teams += [(rank,) for rank in range(1, 1 + self.search_ranks)]
        spares = range(world.size - self.spares, world.size)
        with connect_search(world, teams, hint=self._resume_hint, spares=spares) as here:
            inherited: Inheritance | None = None
            end: End | Inheritance
            if world.rank in spares:
                end = here.coordinator_channel.stand_by()
                inherited = end if isinstance(end, Inheritance) else None
            if world.rank == 0 or inherited is not None:
                with self._files(inherited) as record:
                    if inherited is not None:
                        self.study.set_user_attr(COORDINATOR, world.rank)
                    coordinator = self._begin(len(blocks), each, record, searchers)
                    run_coordinator(
                        coordinator,
                        here.coordinator_channel,
                        here.interrupts,
                        inherited=inherited,
                        here=f"rank {world.rank} on {world.host}",
                    )
                return self._has_ended(coordinator)
            if world.rank in spares:
                pass
            elif world.rank <= self.search_ranks:
                where = f"search rank {world.rank} (host {world.host})"
                end = choose_for_others(
                    here.channel, Replica(self.study, self._engine(len(blocks)), self.seed), where
                )
            else:
                end = run_block(here.channel, world, self.objective)
            assert isinstance(end, End)
            take_over(self.study, end.trials)  # no-op with a storage that all ranks share
            return end.interrupted == SIGNAL

    def _has_ended(self, coordinator: Coordinator) -> bool:
        """Return whether a signal ended the search, and report that, once for all trainings."""
        if coordinator.interrupted != SIGNAL:
            return False
        LOG.warning("A signal ended the search. %s.", self._resume_hint)
        return True

    @property
    def _resume_hint(self) -> str:
        """Advice on a rerun, for errors that end the job."""
        if self.journal is None:
            return "A rerun starts anew; add journal=FILE to resume"
        return f"Rerun the same command to resume from the journal {str(self.journal)!r}"

    def _engine(self, blocks: int) -> optuna.samplers.BaseSampler:
        """Return this rank's sampler, for so many blocks."""
        study, sampler = self.study, self.study.sampler
        if self.sampler is not None:
            begun = len(study.get_trials(deepcopy=False))
            sampler = engine(self.sampler, self.seed + begun, self.n_trials, study)
        if isinstance(sampler, BayesianSampler):
            sampler.blocks = blocks
            sampler.choosers = math.inf if self.lockstep else max(1, self.search_ranks)
        return sampler

    @contextmanager
    def _files(self, inherited: Inheritance | None = None) -> Iterator[SearchRecord]:
        """Open the journal and the export, and load their trials, or inherited ones, into the study."""
        self._known, self._counted, record = known_to_all(self.study), 0, SearchRecord()
        make_plain(self.study)
        lines = None
        if inherited is not None and inherited.state is not None:
            lines = inherited.lines
            inherit(self.study, inherited.changed.values())
        with ExitStack() as files:
            if self.journal is not None:
                journal = Journal(self.journal, self.study, lines=lines, copied=self.spares > 0)
                record = files.enter_context(closing(journal))
                self._counted = journal.counted
                if journal.counted:
                    told = f"{plural(journal.counted, 'finished trial')} of {self.n_trials}"
                    LOG.info("The search resumes from %s, with %s.", self.journal, told)
            if self._export is not None:
                files.enter_context(closing(Export(self._export, self.study, journal=self.journal)))
            yield record

    def _begin(
        self, blocks: int, teams: int, record: SearchRecord, searchers: Sequence[int] = ()
    ) -> Coordinator:
        """Return the coordinator; `teams`: per block, `searchers`: the teams of the search ranks."""
        found = self.study.get_trials(deepcopy=False)
        self.study.sampler = self._engine(blocks)
        source = StudyTrials(
            self.study,
            blocks,
            max(0, self.n_trials - self._counted),
            folds=self.folds,
            searchers=searchers,
            lockstep=self.lockstep,
            seed=self.seed,
            retries=self.retries,
            target=self.target,
            failures=self._failures,
            record=record,
            known=self._known,
            callbacks=self.callbacks,
        )
        return Coordinator(
            source,
            blocks=blocks,
            teams=teams,
            folds=self.folds,
            time_left=TimeLeft(self._end_s, max(map(_seconds, found), default=0.0)),
            clock=self.clock,
            searchers=searchers,
            lockstep=self.lockstep,
            elastic=self.elastic,
        )


def _seconds(trial: optuna.trial.FrozenTrial) -> float:
    return float(trial.user_attrs.get(SECONDS, 0.0)) if trial.state is not TrialState.FAIL else 0.0
