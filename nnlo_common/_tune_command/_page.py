"""The page that shows a search: one file, no network, no scripts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from nnlo_common._tune_command._drawing import Frame, Scale, bar, drawing, label, line, point, shade
from nnlo_common._tune_command._facts import Facts, Finished
from nnlo_common._tune_command._space import Parameter
from nnlo_common._tune_command._table import lasting

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
td,th{padding:.15rem .9rem .15rem 0;text-align:left;border-bottom:1px solid var(--rule)}th{font-weight:600}
.scroll{overflow-x:auto}code{font-size:.9em}svg{width:100%;height:auto;display:block}
.few{display:grid;grid-template-columns:repeat(auto-fill,minmax(17rem,1fr));gap:.5rem}
.axis{fill:none;stroke:var(--soft)}.grid{stroke:var(--rule);stroke-width:.7}
text{fill:var(--soft);font-size:12px;stroke:var(--page);stroke-width:3px;paint-order:stroke}.name{fill:var(--ink);font-size:13px}
.dot{fill:var(--dot);fill-opacity:.75}.dot.best{fill:var(--best);fill-opacity:1}
.line{fill:none;stroke:var(--best);stroke-width:2}.thread{fill:none;stroke-width:1.3;stroke-opacity:.8}
.thread.best{stroke:var(--best);stroke-width:3;stroke-opacity:1}
.bar,.complete{fill:var(--dot);fill-opacity:.75}.complete.best{fill:var(--best)}
.pruned{fill:var(--pruned)}.failed{fill:var(--failed)}
"""


def page(
    facts: Facts,
    trials: Sequence[Finished],
    best: Finished | None,
    weights: Mapping[str, float],
    hint: str,
) -> str:
    """Return the page as HTML.

    Args:
        facts: what the search is.
        trials: those that have finished.
        best: the best; None: none has come to its end.
        weights: how important each parameter is.
        hint: what to think of that.
    """
    good = [one for one in trials if one.value is not None]
    number = None if best is None else best.number
    parts = [f"<h1>{escape(_heading(facts, best))}</h1>", f"<p>{escape(_told(facts, trials))}</p>"]
    if best is not None:
        parts += [_rows(["parameter", "value"], [[name, _short(v)] for name, v in best.params.items()])]
        parts += _section(
            "History", "the value of each trial, and the best so far", _history(facts, good, number)
        )
        parts += _section("Importance", hint, _importance(weights))
        parts += ["<h2>Slices</h2>", "<p>the value over each parameter; the lighter the earlier</p>"]
        parts += ['<div class="few">', *_slices(facts, good, number), "</div>"]
        parts += _section("Parallel coordinates", "a thread for each trial", _parallel(facts, good, number))
    parts += _section("Blocks", _busy(facts, trials), _timeline(facts, trials, number))
    parts += ["<h2>Trials</h2>", '<div class="scroll">', _table(facts, trials), "</div>"]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(_heading(facts, best))}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _heading(facts: Facts, best: Finished | None) -> str:
    if best is None or best.value is None:
        return "A search without a result"
    return f"{facts.figure.name} {best.value:.4g} in trial {best.number}"


def _told(facts: Facts, trials: Sequence[Finished]) -> str:
    states = {state: sum(one.state == state for one in trials) for state in ("complete", "pruned", "failed")}
    counts = ", ".join(f"{count} {state}" for state, count in states.items() if count)
    folds = facts.request.search.n_fold
    split = f", {folds} folds each" if folds > 1 else ""
    began = min((one.began_s for one in trials), default=0.0)
    seconds = max((one.ended_s for one in trials), default=0.0) - began
    told = f"{facts.figure.direction} {facts.figure.name}: {counts}{split}, in {lasting(seconds)}"
    return f"{told}; {facts.folder}"


def _section(title: str, told: str, picture: str) -> list[str]:
    return [f"<h2>{escape(title)}</h2>", f"<p>{escape(told)}</p>", picture]


def _kind(kind: str, one: Finished, best: int | None) -> str:
    return f"{kind} best" if one.number == best else kind


def _history(facts: Facts, good: Sequence[Finished], best: int | None) -> str:
    values = [one.value for one in good]
    frame = Frame(Scale.of([one.number for one in good], 70, 780), Scale.of(values, 260, 30))
    reached: list[tuple[float, float]] = []
    top: float | None = None
    for one in good:
        assert one.value is not None  # only those are drawn
        better = max if facts.figure.maximize else min
        fresh = one.value if top is None else better(top, one.value)
        if top is not None and fresh != top:
            reached.append((frame.x.at(one.number), frame.y.at(top)))
        top = fresh
        reached.append((frame.x.at(one.number), frame.y.at(top)))
    dots = [_dot(frame.x.at(one.number), frame.y.at(one.value), one, best) for one in good]
    parts = [*frame.axes("trial", facts.figure.name), line(reached, "line"), *dots]
    return drawing(800, 305, parts, "the value of each trial")


def _dot(x: float, y: float, one: Finished, best: int | None, style: str = "") -> str:
    return point(x, y, _said(one), _kind("dot", one, best), style)


def _said(one: Finished) -> str:
    value = one.state if one.value is None else f"{one.value:.5g}"
    params = ", ".join(f"{name} {_short(value)}" for name, value in one.params.items())
    return f"trial {one.number}: {value}; {params}"


def _importance(weights: Mapping[str, float]) -> str:
    if not weights:
        return ""
    most = max(weights.values()) or 1.0
    parts = []
    for row, (name, weight) in enumerate(sorted(weights.items(), key=lambda one: -one[1])):
        y = 10 + 26 * row
        share = f"{100 * weight:.0f} %"
        width = 480 * weight / most
        parts += [
            label(190, y + 14, name, "end", "name"),
            bar((200, y), width, 18, "bar", f"{name}: {share}"),
        ]
        parts.append(label(206 + width, y + 14, share, "start"))
    return drawing(800, 20 + 26 * len(weights), parts, "how important each parameter is")


def _slices(facts: Facts, good: Sequence[Finished], best: int | None) -> Iterable[str]:
    last = max((one.number for one in good), default=0) or 1
    for parameter in facts.space.parameters:
        having = [one for one in good if parameter.name in one.params]
        if not having:
            continue
        values = [one.params[parameter.name] for one in having]
        frame = Frame(
            Scale.of(_scaled(values, parameter.choices), 60, 290, log=parameter.log),
            Scale.of([one.value for one in good], 170, 30),
        )
        dots = [
            _dot(
                frame.x.at(_drawn(value, parameter)),
                frame.y.at(one.value),
                one,
                best,
                f"fill-opacity:{0.25 + 0.65 * one.number / last:.2f}",
            )
            for one, value in zip(having, values, strict=True)
        ]
        parts = [*frame.axes(parameter.name, facts.figure.name, few=True), *dots]
        yield drawing(310, 212, parts, f"the value over {parameter.name}")


def _drawn(value: Any, parameter: Parameter) -> Any:
    return str(value) if parameter.choices else value


def _scaled(values: Sequence[Any], choices: Sequence[Any]) -> list[Any]:
    """Choices as texts, in their order; numbers as they are."""
    return [str(one) for one in choices] if choices else list(values)


def _parallel(facts: Facts, good: Sequence[Finished], best: int | None) -> str:
    names = facts.space.parameters
    values = [one.value for one in good if one.value is not None]
    step = 700 / max(len(names), 1)
    scales = [
        Scale.of(
            _scaled([one.params[each.name] for one in good if each.name in one.params], each.choices),
            250,
            40,
            log=each.log,
        )
        for each in names
    ]
    last = Scale.of(values, 250, 40)
    axes: list[str] = []  # over the threads, for their labels to be read
    titles = [each.name for each in names]
    for index, (title, scale) in enumerate(zip([*titles, facts.figure.name], [*scales, last], strict=True)):
        x = 60 + index * step
        axes += [f'<path class="axis" d="M{x:g} 40V250"/>', label(x, 24, title, kind="name")]
        axes += [label(x - 5, place + 4, text, "end") for place, text in scale.ticks()]
    low, high = min(values, default=0.0), max(values, default=1.0)
    threads = []
    for one in sorted(good, key=lambda each: (each.number == best, each.number)):
        assert one.value is not None  # only those are drawn
        share = (one.value - low) / (high - low) if high > low else 1.0
        points = [
            (60 + index * step, scale.at(_drawn(one.params[each.name], each)))
            for index, (each, scale) in enumerate(zip(names, scales, strict=True))
            if each.name in one.params
        ]
        points.append((60 + len(names) * step, last.at(one.value)))
        colour = (
            "" if one.number == best else f"stroke:{shade(share if facts.figure.maximize else 1 - share)}"
        )
        threads.append(line(points, _kind("thread", one, best), _said(one), colour))
    return drawing(800, 270, [*threads, *axes], "parameters and value of each trial")


def _timeline(facts: Facts, trials: Sequence[Finished], best: int | None) -> str:
    blocks = max(len(facts.layout.blocks), 1)
    began = min((one.began_s for one in trials), default=0.0)
    ends = [0.0, *(one.ended_s - began for one in trials)]
    x = Scale.of(ends if max(ends) else [0.0, 1.0], 70, 780)
    parts = []
    for block in range(blocks):
        parts.append(label(62, 32 + 30 * block, f"block {block}", "end", "name"))
    for one in trials:
        start, end = x.at(one.began_s - began), x.at(one.ended_s - began)
        told = f"{_said(one)}; {lasting(one.ended_s - one.began_s)}"
        parts.append(
            bar((start, 16 + 30 * one.block), end - start - 1, 24, _kind(one.state, one, best), told)
        )
    bottom = 22 + 30 * blocks
    parts.append(f'<path class="axis" d="M70 {bottom}H780"/>')
    parts += [label(place, bottom + 16, text) for place, text in x.ticks()]
    parts.append(label(780, bottom + 32, "seconds", "end", "name"))
    return drawing(800, bottom + 40, parts, "which block trained which trial when")


def _busy(facts: Facts, trials: Sequence[Finished]) -> str:
    """How much of the time the blocks were training."""
    if not trials:
        return "no trial was trained"
    blocks = max(len(facts.layout.blocks), 1)
    span = max(one.ended_s for one in trials) - min(one.began_s for one in trials)
    share = sum(one.ended_s - one.began_s for one in trials) / (span * blocks) if span else 1.0
    return (
        f"from the first trial to the last, blocks trained {100 * min(share, 1.0):.0f} % of the time; "
        "a search that was broken off in between has gaps"
    )


def _table(facts: Facts, trials: Sequence[Finished]) -> str:
    names = [one.name for one in facts.space.parameters]
    rows = [
        [
            str(one.number),
            one.state if one.value is None else f"{one.value:.5g}",
            " ".join(f"{value:.4g}" for value in one.folds),
            *(_short(one.params.get(name, "")) for name in names),
            str(one.block),
            lasting(one.ended_s - one.began_s),
            one.folder,
            one.problem[:120],
        ]
        for one in trials
    ]
    return _rows(["trial", facts.figure.name, "folds", *names, "block", "time", "folder", ""], rows)


def _rows(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(one)}</th>" for one in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(one)}</td>" for one in row) + "</tr>\n" for row in rows)
    return f"<table><tr>{head}</tr>\n{body}</table>"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
