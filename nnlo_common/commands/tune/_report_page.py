"""Report page of a search: one file, no network, no scripts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape

import numpy as np

from nnlo_common.commands.tune._charts import history, importance, parallel, slices, timeline
from nnlo_common.commands.tune._search_facts import FinishedTrial, SearchFacts
from nnlo_common.commands.tune._trial_table import lasting, short

__all__ = ["page"]

STYLE = """
:root{color-scheme:light dark;--ink:#1d2430;--soft:#69748a;--rule:#d8dde6;--dot:#3567b0;--best:#d9480f;
--pruned:#b8860b;--failed:#9aa3b2;--page:#fff}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ef;--soft:#9aa6ba;--rule:#38404e;--dot:#7fa8e8;
--best:#ff8a4c;--pruned:#d9b44a;--failed:#6b7485;--page:#14181f}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);max-width:60rem;
margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin-bottom:0}h2{font-size:1.1rem;margin:2rem 0 .3rem}
p{margin:.3rem 0;color:var(--soft)}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:.15rem .9rem .15rem 0;text-align:left;border-bottom:1px solid var(--rule);white-space:nowrap}
th{font-weight:600}td.long{white-space:normal;overflow-wrap:anywhere}.big{color:var(--ink);font-size:1.1rem}
.key{margin-right:1rem;white-space:nowrap}
.key i{display:inline-block;width:.7rem;height:.7rem;border-radius:2px;margin-right:.35rem}
.scroll{overflow-x:auto}code{font-size:.9em}svg{width:100%;height:auto;display:block}
.few{display:grid;grid-template-columns:repeat(auto-fill,minmax(17rem,1fr));gap:.5rem}
.axis{fill:none;stroke:var(--soft)}.grid{stroke:var(--rule);stroke-width:.7}
text{fill:var(--soft);font-size:12px;stroke:var(--page);stroke-width:3px;paint-order:stroke}.name{fill:var(--ink);font-size:13px}
.dot{fill:var(--dot);fill-opacity:.75}.dot.best{fill:var(--best);fill-opacity:1}
.line{fill:none;stroke:var(--best);stroke-width:2}.thread{fill:none;stroke-width:1.3;stroke-opacity:.8}
.thread.best{stroke:var(--best);stroke-width:3;stroke-opacity:1}
.bar,.complete{fill:var(--dot);fill-opacity:.75}.complete.best{fill:var(--best);fill-opacity:1}
.pruned{fill:var(--pruned)}.failed{fill:var(--failed)}
"""


def page(
    facts: SearchFacts,
    trials: Sequence[FinishedTrial],
    best: FinishedTrial | None,
    weights: Mapping[str, float],
    hint: str,
) -> str:
    """Return the page as HTML.

    Args:
        facts: of the search.
        trials: the finished ones.
        best: the best; None: none is complete.
        weights: the importance of each parameter.
        hint: a remark about the importances.
    """
    good = [one for one in trials if one.value is not None]
    number = None if best is None else best.number
    parts = [f"<h1>{escape(_heading(facts, best))}</h1>", f"<p>{escape(_summary(facts, trials))}</p>"]
    if best is not None:
        parts += [f'<p class="big">{escape(_compared(facts, best, good))}</p>']
        parts += [_rows(["parameter", "value"], [[name, short(v)] for name, v in best.params.items()])]
        parts += _section(
            "History", "the value of each trial, and the best so far", history(facts, trials, number)
        )
        parts.append(_keys(trials))
        parts += _section("Importance", hint, importance(weights))
        parts += ["<h2>Slices</h2>", "<p>the value over each parameter; the paler the earlier</p>"]
        parts += ['<div class="few">', *slices(facts, good, number), "</div>"]
        parts += _section(
            "Parallel coordinates",
            "a thread for each trial; the thickest is the best",
            parallel(facts, good, number),
        )
    parts += _section("Blocks", _busy(facts, trials), timeline(facts, trials, number))
    parts += [_keys(trials), *_failures(trials)]
    parts += ["<h2>Trials</h2>", '<div class="scroll">', _table(facts, trials), "</div>"]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(_heading(facts, best))}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _heading(facts: SearchFacts, best: FinishedTrial | None) -> str:
    if best is None or best.value is None:
        return "A search without a result"
    return f"{facts.figure.name} {best.value:.4g} in trial {best.number}"


def _summary(facts: SearchFacts, trials: Sequence[FinishedTrial]) -> str:
    fates = Counter(one.fate for one in trials)
    known = ("complete", "pruned", "failed", "broken off")
    counts = ", ".join(f"{fates[fate]} {fate}" for fate in known if fates[fate])
    folds = facts.request.search.n_fold
    split = f", {folds} folds each" if folds > 1 else ""
    began = min((one.began_s for one in trials), default=0.0)
    seconds = max((one.ended_s for one in trials), default=0.0) - began
    told = f"{facts.figure.direction} {facts.figure.name}: {counts}{split}, in {lasting(seconds)}"
    return f"{told}; {facts.folder}"


def _section(title: str, told: str, picture: str) -> list[str]:
    return [f"<h2>{escape(title)}</h2>", f"<p>{escape(told)}</p>", f'<div class="scroll">{picture}</div>']


def _compared(facts: SearchFacts, best: FinishedTrial, good: Sequence[FinishedTrial]) -> str:
    """Return the best value with its spread, and the value of the defaults."""
    told = f"{best.value:.4g}"
    if len(best.folds) > 1:
        told += f" ± {np.std(best.folds):.2g} over {len(best.folds)} folds"
    first = next((one for one in good if one.params == facts.default), None)
    if first is None:
        return told
    return f"{told}; the defaults gave {first.value:.4g}, in trial {first.number}"


def _keys(trials: Sequence[FinishedTrial]) -> str:
    """Return the legend, for the states that occur."""
    states = {one.state for one in trials}
    found = {"best": "best"} if "complete" in states else {}
    found |= {"dot": "complete"} if "complete" in states else {}
    found |= {state: state for state in ("pruned", "failed") if state in states}
    keys = [
        f'<span class="key"><i style="background:var(--{colour})"></i>{told}</span>'
        for colour, told in found.items()
    ]
    return f"<p>{''.join(keys)}</p>"


def _failures(trials: Sequence[FinishedTrial]) -> list[str]:
    """Return the reasons of failed trials, each once."""
    reasons: dict[str, list[str]] = {}
    for one in trials:
        if one.fate == "failed":
            reasons.setdefault(one.problem, []).append(str(one.number))
    if not reasons:
        return []
    rows = [(", ".join(numbers), problem[:600]) for problem, numbers in reasons.items()]
    return ["<h2>Failures</h2>", _rows(["trials", "what happened"], rows, long=True)]


def _busy(facts: SearchFacts, trials: Sequence[FinishedTrial]) -> str:
    """Return the share of the time in which the blocks trained."""
    if not trials:
        return "no trial was trained"
    blocks = max(len(facts.layout.blocks), 1)
    span = max(one.ended_s for one in trials) - min(one.began_s for one in trials)
    busy_s = sum(end - start for one in trials for _, start, end in one.shifts)
    share = busy_s / (span * blocks) if span else 1.0
    return (
        f"from the first trial to the last, blocks trained {100 * min(share, 1.0):.0f} % of the time; "
        "a search that was interrupted and resumed has gaps"
    )


def _table(facts: SearchFacts, trials: Sequence[FinishedTrial]) -> str:
    names = [one.name for one in facts.space.parameters]
    rows = [
        [
            str(one.number),
            one.fate if one.value is None else f"{one.value:.5g}",
            " ".join(f"{value:.4g}" for value in one.folds),
            *(short(one.params.get(name, "")) for name in names),
            str(one.block),
            lasting(one.ended_s - one.began_s),
            one.folder,
        ]
        for one in trials
    ]
    return _rows(["trial", facts.figure.name, "folds", *names, "block", "time", "folder"], rows)


def _rows(heads: Sequence[str], rows: Iterable[Sequence[str]], *, long: bool = False) -> str:
    head = "".join(f"<th>{escape(one)}</th>" for one in heads)
    cell = '<td class="long">' if long else "<td>"
    body = "".join("<tr>" + "".join(f"{cell}{escape(one)}</td>" for one in row) + "</tr>\n" for row in rows)
    return f"<table><tr>{head}</tr>\n{body}</table>"
