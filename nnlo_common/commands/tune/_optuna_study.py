"""The search itself; imported last, because it imports Optuna."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import optuna

from nnlo_common.base._errors import PeerLostError
from nnlo_common.commands.train._job import Job, tell
from nnlo_common.commands.tune._search_facts import SearchFacts
from nnlo_common.commands.tune._search_folder import JOURNAL, Found
from nnlo_common.commands.tune._search_result import conclude
from nnlo_common.commands.tune._trial_training import TrialTraining, watching
from nnlo_common.search import optimize

__all__ = ["search"]


@contextmanager
def _advised() -> Iterator[None]:
    """Drop the search's own advice: only the command knows whether --run was given."""
    try:
        yield
    except PeerLostError as lost:
        lost.problem = lost.problem.partition(". Rerun the same command")[0]
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
    if job.speaks and facts.default:
        study.enqueue_trial(dict(facts.default))  # after a resume the journal skips it
    train = TrialTraining(
        facts=facts, path=path, framework=framework, found=found, block=facts.layout.block_of(job.rank)
    )
    with watching(study, facts) if job.speaks else nullcontext(), _advised():
        optimize(
            study,
            train,
            n_trials=asked.num_iterations,
            block_size=len(facts.layout.blocks[0]) if facts.layout.blocks else 1,
            search_ranks=facts.layout.search_ranks,
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
    problem = ""
    with job.together(patient=True):
        if job.speaks:
            problem = conclude(study, facts)
    problem = job.share(problem)[0]
    if problem and job.speaks:
        tell(problem, "tune")
    return 1 if problem else 0
