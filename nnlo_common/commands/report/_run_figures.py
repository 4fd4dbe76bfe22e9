"""Figures of runs for their report; plotly draws them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from nnlo_common.base._spans import KINDS
from nnlo_common.commands.report._run_reader import EpochFacts, RankFacts, RunFacts, Sample

__all__ = ["gradient_sizes", "run_figures"]

# Of Okabe and Ito: told apart by everybody, on white and on black.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#999999")
# "wait" stands out; more kinds than that set has colours.
_OF_KINDS = dict(
    zip(KINDS, (*_COLOURS[:1], "#d55e00", "#e69f00", "#cc79a7", "#56b4e9", "#009e73"), strict=False)
)
_OF_KINDS |= {"read": "#f0e442", "checkpoint": "#7f3c8d", "validate": "#666666", "idle": "#bbbbbb"}


def run_figures(runs: Sequence[RunFacts]) -> dict[str, Any]:
    """Return the figures of runs by title; none if plotly is not installed.

    Args:
        runs: one, or several to compare; the first is the one that others are compared with.
    """
    try:
        import plotly.graph_objects as go
    except ImportError:
        return {}
    found: dict[str, Any] = {}
    names = sorted(
        {name for run in runs for name in run.history}, key=lambda name: ("loss" not in name, name)
    )
    for title, of_title in _pairs(names).items():
        found[title] = _curves(go, runs, of_title)
    if len(runs) > 1:
        return found | _speeds(go, runs)
    (run,) = runs
    if any(one.shares is not None for one in run.ranks):
        found["Time of each rank"] = _shares(go, run)
    if run.center is not None and run.center.stalenesses:
        found["Staleness"] = _staleness(go, run)
    if run.center is not None and run.center.gain is not None:
        found["Gain"] = _gain(go, run.center)
    looked = next((one.gradients for one in run.ranks if one.gradients is not None), None)
    if looked is not None and any(looked[1].values()):
        found["Gradients by layer"] = gradient_sizes(go, looked[1])
    if any(one.epochs for one in run.ranks):
        found["Pace"] = _of_epochs(
            go, run, "samples per second", lambda epoch: epoch.samples / max(epoch.seconds, 1e-9)
        )
    found["Memory"] = _of_samples(go, run, "resident memory (MB)", lambda _, one: one.memory_mb)
    found["Processor"] = _of_samples(go, run, "cores in use", lambda last, one: _rate(last, one, "cpu_s"))
    found["Files and sockets"] = _of_samples(
        go, run, "read and written (MB/s)", lambda last, one: _rate(last, one, "moved_mb")
    )
    if any(sample.gpu is not None for one in run.ranks for sample in one.samples_of_usage):
        found["GPU"] = _of_samples(
            go, run, "mean load (%)", lambda _, one: None if one.gpu is None else 100 * one.gpu
        )
    return {title: figure for title, figure in found.items() if figure.data}


def _pairs(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the metrics of each figure: each with that of the validation.

    Example:
        >>> _pairs(["loss", "val_loss", "accuracy"])
        {'loss': ['loss', 'val_loss'], 'accuracy': ['accuracy']}
    """
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.removeprefix("val_"), []).append(name)
    return found


def _curves(go: Any, runs: Sequence[RunFacts], names: Sequence[str]) -> Any:
    """Return metrics over epochs, and over samples and time where all runs have a monitor."""
    figure, axes = go.Figure(), {"epochs": "epoch"}
    monitored = all(run.center is not None and run.center.epochs for run in runs)
    if monitored:
        axes |= {"samples": "samples, of all workers", "seconds": "seconds since the first epoch began"}
    places: dict[str, list[list[float]]] = {axis: [] for axis in axes}

    def add(run: RunFacts, curve: Sequence[float | None], name: str, style: Mapping[str, Any]) -> None:
        ticks = _ticks(run, len(curve), monitored)
        for axis in axes:
            places[axis].append(ticks[axis])
        figure.add_scatter(x=ticks["epochs"], y=list(curve), name=name, mode="lines+markers", **style)

    for number, run in enumerate(runs):
        colour = _COLOURS[number % len(_COLOURS)]
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        for name in names:
            dash = "dash" if name.startswith("val_") else "solid"
            add(run, run.history.get(name, ()), prefix + name, {"line": {"color": colour, "dash": dash}})
            for role, curves in run.workers.items() if len(runs) == 1 else ():
                thin = {"line": {"color": "#999999", "width": 1, "dash": dash}, "visible": "legendonly"}
                add(run, curves.get(name, ()), f"{role}: {name}", thin)
    buttons = [
        {"label": axis, "method": "update", "args": [{"x": places[axis]}, {"xaxis.title.text": text}]}
        for axis, text in axes.items()
    ]
    figure.update_layout(xaxis_title="epoch", yaxis_title=names[0].removeprefix("val_"))
    if len(buttons) > 1:
        menu = {"type": "buttons", "direction": "right", "buttons": buttons, "x": 0, "y": 1.15}
        figure.update_layout(updatemenus=[{**menu, "xanchor": "left", "yanchor": "bottom"}])
    return figure


def _ticks(run: RunFacts, count: int, monitored: bool) -> dict[str, list[float]]:
    """Return the places of the epochs on each axis."""
    ticks: dict[str, list[float]] = {"epochs": [float(number + 1) for number in range(count)]}
    if monitored:
        assert run.center is not None  # monitored says so
        epochs = run.center.epochs[:count]
        ticks["samples"] = list(accumulate(run.epoch_samples[:count]))
        ticks["seconds"] = [one.ended_s - (epochs[0].ended_s - epochs[0].seconds) for one in epochs]
    return ticks


def _shares(go: Any, run: RunFacts) -> Any:
    ranks = [one for one in run.ranks if one.shares is not None]
    bars = [
        go.Bar(
            y=[_label(one) for one in ranks],
            x=[100 * one.shares.share(kind) for one in ranks if one.shares is not None],
            name=kind,
            orientation="h",
            marker={"color": colour},
        )
        for kind, colour in _OF_KINDS.items()
    ]
    figure = go.Figure(bars, {"barmode": "stack", "xaxis_title": "share of the time (%)"})
    figure.update_yaxes(autorange="reversed")
    return figure


def _staleness(go: Any, run: RunFacts) -> Any:
    assert run.center is not None  # the caller checks it
    roles = {one.rank: _label(one) for one in run.ranks}
    bars = [
        go.Bar(
            x=sorted(counts),
            y=[counts[stale] for stale in sorted(counts)],
            name=roles.get(rank, f"rank {rank}"),
            marker={"color": _COLOURS[number % len(_COLOURS)]},
        )
        for number, (rank, counts) in enumerate(sorted(run.center.stalenesses.items()))
        if counts
    ]
    axes = {
        "xaxis_title": "staleness (commits since the fetch)",
        "yaxis_title": "contributions",
    }
    return go.Figure(bars, {"barmode": "stack", **axes})


def _gain(go: Any, center: RankFacts) -> Any:
    """Return how many workers' work was done over time, beside their number and what is worth having."""
    began_s = center.samples_of_usage[0].at_s if center.samples_of_usage else 0.0
    ticks, gains, workers, worth = list[float](), list[float](), list[int](), list[float | None]()
    for last, one in pairwise(center.samples_of_usage):
        if one.gain is not None and (since := one.gain.since(last.gain)).batches > 0:
            ticks.append(one.at_s - began_s)
            gains.append(since.gain)
            workers.append(since.workers)
            worth.append(since.worth_having)
    figure = go.Figure(layout={"xaxis_title": "seconds since the start", "yaxis_title": "workers"})
    lines = {
        "did the work of": (gains, "solid"),
        "workers": (workers, "dot"),
        "worth having": (worth, "dash"),
    }
    for number, (name, (values, dash)) in enumerate(lines.items()):
        style = {"color": _COLOURS[number], "dash": dash}
        figure.add_scatter(x=ticks, y=values, name=name, mode="lines", line=style)
    figure.update_yaxes(rangemode="tozero")
    return figure


def _rate(last: Sample, one: Sample, name: str) -> float | None:
    """Return how fast a number rises; None after a restart."""
    rise, passed_s = getattr(one, name) - getattr(last, name), one.at_s - last.at_s
    return rise / passed_s if passed_s > 0 and rise >= 0 else None


def _of_samples(go: Any, run: RunFacts, what: str, value: Callable[[Sample, Sample], float | None]) -> Any:
    figure = go.Figure(layout={"xaxis_title": "seconds since the start", "yaxis_title": what})
    began_s = min((one.samples_of_usage[0].at_s for one in run.ranks if one.samples_of_usage), default=0.0)
    for number, one in enumerate(run.ranks):
        if pairs := list(pairwise(one.samples_of_usage)):
            figure.add_scatter(
                x=[sample.at_s - began_s for _, sample in pairs],
                y=[value(last, sample) for last, sample in pairs],
                name=_label(one),
                mode="lines",
                line={"color": _COLOURS[number % len(_COLOURS)]},
            )
    figure.update_yaxes(rangemode="tozero")
    return figure


def _of_epochs(go: Any, run: RunFacts, what: str, value: Callable[[EpochFacts], float]) -> Any:
    figure = go.Figure(layout={"xaxis_title": "epoch", "yaxis_title": what})
    for number, one in enumerate(run.ranks):
        if one.epochs:
            figure.add_scatter(
                x=list(range(1, len(one.epochs) + 1)),
                y=[value(epoch) for epoch in one.epochs],
                name=_label(one),
                mode="lines+markers",
                line={"color": _COLOURS[number % len(_COLOURS)]},
            )
    figure.update_yaxes(rangemode="tozero")
    return figure


def _speeds(go: Any, runs: Sequence[RunFacts]) -> dict[str, Any]:
    """Return the speed of runs beside that of the first; nothing without their monitors."""
    paces = [run.samples_per_second for run in runs]
    if not paces[0] or None in paces:
        return {}
    speeds = [(pace or 0.0) / paces[0] for pace in paces]
    figure = go.Figure(
        go.Bar(
            x=[run.name for run in runs],
            y=speeds,
            marker={"color": _COLOURS[0]},
            text=[f"{speed:.2f}" for speed in speeds],
        ),
        {"xaxis_title": "run", "yaxis_title": f"samples per second, over those of {runs[0].name}"},
    )
    return {"Speed": figure}


def _label(rank: RankFacts) -> str:
    return f"rank {rank.rank}: {rank.role}"


def gradient_sizes(go: Any, layers: Mapping[str, Mapping[int, int]]) -> Any:
    """Return a figure of how large the values of each layer's gradient are.

    Args:
        go: plotly's module.
        layers: how many values each has up to each power of two.
    """
    known = {name: counts for name, counts in layers.items() if counts}
    powers = [power for counts in known.values() for power in counts]
    exponents = range(min(powers), max(powers) + 1)
    shares = [
        [counts.get(exponent, 0) / sum(counts.values()) for exponent in exponents]
        for counts in known.values()
    ]
    figure = go.Figure(
        go.Heatmap(
            x=[*exponents],
            y=[*known],
            z=shares,
            colorscale="Blues",
            colorbar={"title": "share of the layer"},
        )
    )
    figure.add_vline(x=-24.5, line={"color": "#d55e00", "dash": "dash"})
    figure.update_xaxes(title="values up to 2^x; float16 has zero left of the line")
    figure.update_yaxes(autorange="reversed")
    return figure
