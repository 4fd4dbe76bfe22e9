"""Reader of a script's search: its journal, or the directory of a keras-tuner search.

Both are files of trials only. They have no list of the job's ranks and no options, so the page has none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nnlo_common.base._arguments import is_number, is_whole
from nnlo_common.base._errors import ConfigurationError, MissingExtraError
from nnlo_common.base._file_access import readable_file
from nnlo_common.commands.report._tuner_reader import ORACLE, TunerSearch, read_tuner
from nnlo_common.commands.train._run_folder import SEARCH
from nnlo_common.commands.tune._search_facts import FinishedTrial, PageFacts, finished_trials
from nnlo_common.commands.tune._search_folder import BLOCK, FOLDER, TRIAL

__all__ = ["SearchFiles", "find_search", "read_search"]

_BEGIN = b'{"study":'
#: Numbers that a study may lack before its next trial, e.g. of trials that it had before the search.
_MOST_MISSING = 10_000


@dataclass(frozen=True, slots=True)
class SearchFiles:
    """A search as its files have it.

    Attributes:
        facts: for the page.
        study: Optuna's, for figures.
        trials: the finished ones.
    """

    facts: PageFacts
    study: Any
    trials: list[FinishedTrial]


def find_search(path: Path) -> Path | None:
    """Return the journal or the directory of the search that a path means; None: it means none.

    Args:
        path: a journal, a directory of keras-tuner, or a folder that has one of them.

    Raises:
        ConfigurationError: it has several.
    """
    if path.is_file():
        return path if path.suffix == ".jsonl" or _is_journal(path) else None
    if not path.is_dir():
        return None
    if (path / ORACLE).is_file():
        return path
    found = [one for one in sorted(path.glob("*.jsonl")) if _is_journal(one)]
    found += [one.parent for one in sorted(path.glob(f"*/{ORACLE}"))]
    if len(found) > 1:
        raise ConfigurationError(f"{path} has {len(found)} searches; name one: {', '.join(map(str, found))}")
    return found[0] if found else None


def _is_journal(path: Path) -> bool:
    try:
        with readable_file(path) as file:
            return file.read(len(_BEGIN)) == _BEGIN
    except OSError:
        return False


def read_search(path: Path) -> SearchFiles:
    """Read the files of a search, also of one that is under way or was killed.

    Args:
        path: as `find_search` returns it.

    Raises:
        ConfigurationError: they cannot be read, or are not a search's.
        MissingExtraError: Optuna is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise MissingExtraError("nnlo report of a search", "optuna", "tune") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return _of_tuner(read_tuner(path)) if path.is_dir() else _of_journal(path)


def _of_journal(path: Path) -> SearchFiles:
    from nnlo_common.search.journal._journal import read_journal, refusing

    directions, kept = read_journal(path)
    if len(directions) > 1:
        raise ConfigurationError(
            f"{path}: a search for {len(directions)} objectives, and the page shows one; give "
            "optimize(..., export='study.db') and see it with optuna-dashboard"
        )
    with refusing(str(path), "a trial"):
        return _with_trials(path, [trial for _, trial in kept.finished], directions[0], len(kept.open_trials))


def _with_trials(path: Path, known: list[Any], direction: str, unfinished: int) -> SearchFiles:
    blocks = {trial.user_attrs[BLOCK] for trial in known if BLOCK in trial.user_attrs}
    command = (path.parent / SEARCH).is_file()  # of `nnlo tune`
    facts = PageFacts(
        metric="value",
        maximize=direction == "MAXIMIZE",
        place=path.parent if command else path,
        parameters=list(dict.fromkeys(name for trial in known for name in trial.params)),
        folds=max((len(trial.user_attrs.get("nnlo:folds", ())) for trial in known), default=1),
        blocks=len(blocks) or None,
        unfinished=unfinished,
        home=f"{TRIAL}/" if any(FOLDER in trial.user_attrs for trial in known) else None,
        named="folder" if command else "trial.name",
        more_folds="add --n-fold" if command else "give folds=5",
    )
    finished = [_checked(one) for one in finished_trials(known)]
    return SearchFiles(facts, _study(known, maximize=facts.maximize), finished)


def _checked(trial: FinishedTrial) -> FinishedTrial:
    """Return a trial whose attributes may be anybody's, if the page can show it."""
    numbers = (trial.began_s, trial.ended_s, *trial.folds, *(since for _, since in trial.helpers))
    if not all(is_number(one) and math.isfinite(one) for one in numbers):
        raise ValueError(f"its times and folds are {numbers!r:.200}")
    if not all(is_whole(block, 0) for block in (trial.block, *(block for block, _ in trial.helpers))):
        raise ValueError(f"its blocks are {trial.block!r:.60}, {trial.helpers!r:.60}")
    if not isinstance(trial.folder, str):
        raise TypeError(f"the trial's name is {trial.folder!r:.60}")
    return trial


def _of_tuner(found: TunerSearch) -> SearchFiles:
    return SearchFiles(found.facts, _study(found.frozen(), maximize=found.facts.maximize), found.trials)


def _study(trials: list[Any], *, maximize: bool) -> Any:
    """Return a study with these trials, under their own numbers."""
    import optuna

    study = optuna.create_study(direction="maximize" if maximize else "minimize")
    count = 0
    for trial in trials:
        missing = trial.number - count
        for _ in range(missing if missing <= _MOST_MISSING else 0):
            study.add_trial(optuna.trial.create_trial(state=optuna.trial.TrialState.WAITING))
            count += 1
        study.add_trial(trial)
        count += 1
    return study
