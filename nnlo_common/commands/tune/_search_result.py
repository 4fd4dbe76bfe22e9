"""Result of a search: a few lines on the terminal, and files for programs and people."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nnlo_common.commands.train._option import as_toml
from nnlo_common.commands.train._run_folder import (
    facts_of_command,
    with_absolute_paths,
    write_json,
    write_text,
)
from nnlo_common.commands.train._settings import OPTIONS
from nnlo_common.commands.tune._figure_of_merit import remark
from nnlo_common.commands.tune._report_page import figures, page, short
from nnlo_common.commands.tune._request import ALL_OPTIONS, Request
from nnlo_common.commands.tune._search_facts import FinishedTrial, SearchFacts, best_of, finished
from nnlo_common.commands.tune._search_folder import TRIAL, drop_models
from nnlo_common.commands.tune._search_space import Parameter, Space
from nnlo_common.training.report._live_table import table

__all__ = ["conclude", "importances", "search_text"]

RESULT, REPORT = "search.json", "report.html"
# Importances of fewer trials are mostly noise.
_ENOUGH = 10


def search_text(request: Request, space: Space) -> str:
    """Return a configuration that repeats the search from any folder.

    Args:
        request: the options.
        space: the search space.
    """
    values: dict[str, Any] = {
        name: one.read(OPTIONS[name]) for name, one in request.given.items() if name != "run"
    }
    own = {name: getattr(request.search, name) for name in ALL_OPTIONS if hasattr(request.search, name)}
    searched = {one.name: _described(one) for one in space.parameters}
    return as_toml(own | with_absolute_paths(values) | {"space": searched}, ALL_OPTIONS)


def _described(one: Parameter) -> dict[str, Any]:
    facts: dict[str, Any] = {"choices": list(one.choices)}
    if not one.choices:
        facts = {"low": one.low, "high": one.high, "step": one.step, "log": one.log or None}
    facts["when"] = {name: list(values) for name, values in one.when.items()} or None
    return {name: value for name, value in facts.items() if value is not None}


def conclude(study: Any, facts: SearchFacts) -> str:
    """Write and print the result of the search.

    Args:
        study: with all trials.
        facts: of the search.

    Returns:
        The problem; empty if a trial is complete.
    """
    trials = finished(study)
    good = [one for one in trials if one.value is not None]
    best = best_of(facts.figure, good)
    for one in trials:
        if not facts.request.search.keep_models:
            drop_models(facts.folder, one.folder, best=best.folder if best else None)
    weights, hint = importances(study, good)
    write_json(facts.folder / RESULT, _record(facts, trials, best, weights))
    drawings = figures(study, trials, facts.figure.name, weights)
    write_text(facts.folder / REPORT, page(facts.for_page, trials, best, drawings, hint))
    if best is None:
        last = trials[-1].problem if trials else ""
        return (
            f"none of {len(trials)} trials is complete; see the reasons in {facts.folder / RESULT}. "
            f"The last: {last or 'it was pruned'}"
        )
    print(_result_lines(facts, trials, best, weights, hint), flush=True)
    return ""


def noise_of(trials: Sequence[FinishedTrial]) -> str:
    """Return a remark on how much of the best value may be chance."""
    good = [one for one in trials if one.value is not None]
    return remark([one.folds for one in good], len(good))


def importances(study: Any, good: Sequence[FinishedTrial]) -> tuple[dict[str, float], str]:
    """Return the importance of each parameter, and a remark about it.

    Args:
        study: with all trials.
        good: the complete ones.
    """
    import optuna

    if len(good) < _ENOUGH:
        return {}, f"importances need at least {_ENOUGH} complete trials, and there are {len(good)}"
    if len({one.value for one in good}) < 2:
        return {}, "all trials have the same value, so no parameter is more important than another"
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    try:
        found = optuna.importance.get_param_importances(study, evaluator=evaluator)
    except (RuntimeError, ValueError) as error:  # e.g. trials share no parameter
        return {}, f"there are no importances: {error}"
    return {name: float(value) for name, value in found.items() if math.isfinite(value)}, (
        "the share of each parameter in what sets the best tenth of trials apart"
    )


def _record(
    facts: SearchFacts,
    trials: Sequence[FinishedTrial],
    best: FinishedTrial | None,
    weights: Mapping[str, float],
) -> dict[str, Any]:
    """Return the contents of `search.json`."""
    return {
        **facts_of_command(facts.began, time.time() - facts.began_s),
        "objective": facts.figure.name,
        "direction": facts.figure.direction,
        "best": None if best is None else best.described(),
        "importances": weights,
        "blocks": [list(block) for block in facts.layout.blocks],
        "folds": facts.request.search.n_fold,
        "trials": [one.described() for one in trials],
        "configuration": {name: one.value for name, one in facts.request.given.items()}
        | {"space": {one.name: _described(one) for one in facts.space.parameters}},
    }


def _result_lines(
    facts: SearchFacts,
    trials: Sequence[FinishedTrial],
    best: FinishedTrial,
    weights: Mapping[str, float],
    hint: str,
) -> str:
    spread = f" ± {np.std(best.folds):.4f} over {len(best.folds)} folds" if len(best.folds) > 1 else ""
    shares = {name: f"{100 * weight:.0f} %" for name, weight in weights.items()}
    rows = {name: short(value) for name, value in best.params.items()}
    others = "" if facts.request.search.keep_models else ", the only one whose model is kept"
    home = facts.folder / TRIAL / best.folder
    run = " --run best" if "checkpoint" in facts.request.given else ""  # checkpoints need a folder
    failed = sum(one.fate == "failed" for one in trials)
    return "\n".join(
        [
            f"nnlo tune: best of {len(trials)} trials is {best.number}, {facts.figure.name} "
            f"{best.value:.4f}{spread}" + (f"; {failed} failed" if failed else ""),
            *([f"noise: {told}"] if (told := noise_of(trials)) else []),
            table(rows),
            f"importances: {', '.join(f'{name} {share}' for name, share in shares.items()) or hint}",
            f"train it again: nnlo train --config {home / 'config.toml'}{run}{others}",
            f"report: {facts.folder / REPORT}",
        ]
    )
