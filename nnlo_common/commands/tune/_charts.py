"""Charts of a search, each with all trials."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nnlo_common.commands.tune._search_facts import FinishedTrial, SearchFacts
from nnlo_common.commands.tune._search_space import Parameter
from nnlo_common.commands.tune._svg import Axes, AxisScale, bar, drawing, label, line, point, shade
from nnlo_common.commands.tune._trial_table import lasting, short

__all__ = ["history", "importance", "parallel", "slices", "timeline"]

_LETTER = 7.5  # width of a letter, in pixels
_UNUSED = 268  # height of a thread at parameters without a value


def _kind(kind: str, one: FinishedTrial, best: int | None) -> str:
    return f"{kind} best" if one.number == best else kind


def history(facts: SearchFacts, trials: Sequence[FinishedTrial], best: int | None) -> str:
    """Draw the value of each trial, and the best so far."""
    good = [one for one in trials if one.value is not None]
    values = [one.value for one in good]
    frame = Axes(AxisScale.of([one.number for one in trials], 70, 780), AxisScale.of(values, 255, 35))
    reached: list[tuple[float, float]] = []
    top: float | None = None
    for one in good:
        assert one.value is not None  # filtered above
        better = max if facts.figure.maximize else min
        fresh = one.value if top is None else better(top, one.value)
        if top is not None and fresh != top:
            reached.append((frame.x.at(one.number), frame.y.at(top)))
        top = fresh
        reached.append((frame.x.at(one.number), frame.y.at(top)))
    dots = [_dot(frame.x.at(one.number), frame.y.at(one.value), one, best) for one in _best_last(good, best)]
    without = [
        bar((frame.x.at(one.number) - 2, 258), 4, 10, one.state, _tooltip(one))
        for one in trials
        if one.value is None
    ]
    parts = [*frame.axes("trial", facts.figure.name), line(reached, "line"), *without, *dots]
    return drawing(800, 310, parts, "the value of each trial")


def _best_last(trials: Iterable[FinishedTrial], best: int | None) -> list[FinishedTrial]:
    """Sort the trials for drawing, so that nothing hides the best."""
    return sorted(trials, key=lambda one: (one.number == best, one.number))


def _dot(x: float, y: float, one: FinishedTrial, best: int | None, style: str = "") -> str:
    if one.number == best:
        return point(x, y, _tooltip(one), "dot best", radius=6)
    return point(x, y, _tooltip(one), "dot", style)


def _tooltip(one: FinishedTrial) -> str:
    value = one.fate if one.value is None else f"{one.value:.5g}"
    params = ", ".join(f"{name} {short(value)}" for name, value in one.params.items())
    return f"trial {one.number}: {value}; {params}"


def importance(weights: Mapping[str, float]) -> str:
    """Draw the importance of each parameter."""
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


def slices(facts: SearchFacts, good: Sequence[FinishedTrial], best: int | None) -> Iterable[str]:
    """Draw the value over each parameter."""
    last = max((one.number for one in good), default=0) or 1
    for parameter in facts.space.parameters:
        having = [one for one in _best_last(good, best) if parameter.name in one.params]
        if not having:
            continue
        values = [one.params[parameter.name] for one in having]
        frame = Axes(
            AxisScale.of(_scaled(values, parameter.choices), 60, 285, log=parameter.log),
            AxisScale.of([one.value for one in good], 165, 35),
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
        yield drawing(310, 215, parts, f"the value over {parameter.name}")


def _drawn(value: Any, parameter: Parameter) -> Any:
    return str(value) if parameter.choices else value


def _scaled(values: Sequence[Any], choices: Sequence[Any]) -> list[Any]:
    """Return choices as texts, in their order; numbers unchanged."""
    return [str(one) for one in choices] if choices else list(values)


def parallel(facts: SearchFacts, good: Sequence[FinishedTrial], best: int | None) -> str:
    """Draw a thread for each trial, through its parameters to its value."""
    names = facts.space.parameters
    values = [one.value for one in good if one.value is not None]
    step = max(700 / max(len(names), 1), 75)
    scales = [
        AxisScale.of(
            _scaled([one.params[each.name] for one in good if each.name in one.params], each.choices),
            250,
            40,
            log=each.log,
        )
        for each in names
    ]
    last = AxisScale.of(values, 250, 40)
    axes: list[str] = []  # drawn over the threads, so that labels stay legible
    titles = [each.name for each in names]
    for index, (title, scale) in enumerate(zip([*titles, facts.figure.name], [*scales, last], strict=True)):
        x, row = 60 + index * step, index % 2  # stagger the titles, so that long names fit
        name = title if len(title) * _LETTER < 2 * step else f"{title[: int(2 * step / _LETTER) - 1]}…"
        anchor = "start" if not index else "end" if index == len(titles) else "middle"
        place = x - 40 if not index else x + 40 if index == len(titles) else x
        axes += [f'<path class="axis" d="M{x:g} 40V250"/>', label(place, 30 - 16 * row, name, anchor, "name")]
        axes += [label(x - 5, place + 4, text, "end") for place, text in scale.ticks()]
    low, high = min(values, default=0.0), max(values, default=1.0)
    threads = []
    for one in _best_last(good, best):
        assert one.value is not None  # the caller has filtered
        share = (one.value - low) / (high - low) if high > low else 1.0
        points = [
            (
                60 + index * step,
                scale.at(_drawn(one.params[each.name], each)) if each.name in one.params else _UNUSED,
            )
            for index, (each, scale) in enumerate(zip(names, scales, strict=True))
        ]
        points.append((60 + len(names) * step, last.at(one.value)))
        colour = (
            "" if one.number == best else f"stroke:{shade(share if facts.figure.maximize else 1 - share)}"
        )
        threads.append(line(points, _kind("thread", one, best), _tooltip(one), colour))
    width = 60 + step * len(names) + 40
    axes += [label(60 + index * step, _UNUSED + 15, "unused") for index, one in enumerate(names) if one.when]
    return drawing(
        width,
        290 if any(one.when for one in names) else 265,
        [*threads, *axes],
        "parameters and value of each trial",
    )


def timeline(facts: SearchFacts, trials: Sequence[FinishedTrial], best: int | None) -> str:
    """Draw which block trained which trial when."""
    blocks = max(len(facts.layout.blocks), 1)
    began = min((one.began_s for one in trials), default=0.0)
    ends = [0.0, *(one.ended_s - began for one in trials)]
    x = AxisScale.of(ends if max(ends) else [0.0, 1.0], 70, 780)
    parts = []
    for block in range(blocks):
        parts.append(label(62, 32 + 30 * block, f"block {block}", "end", "name"))
    for one in trials:
        for block, since_s, until_s in one.shifts:
            start, end = x.at(since_s - began), x.at(until_s - began)
            told = f"{_tooltip(one)}; {lasting(until_s - since_s)}"
            parts.append(
                bar((start, 16 + 30 * block), end - start - 1, 24, _kind(one.state, one, best), told)
            )
    bottom = 22 + 30 * blocks
    parts.append(f'<path class="axis" d="M70 {bottom}H780"/>')
    parts += [label(place, bottom + 16, text) for place, text in x.ticks()]
    parts.append(label(780, bottom + 32, "seconds", "end", "name"))
    return drawing(800, bottom + 40, parts, "which block trained which trial when")
