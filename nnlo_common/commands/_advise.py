"""`nnlo advise`, and `advise` of the plug-ins: a probe, its advice in words, one page with plots."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from nnlo_common.base._arguments import is_number
from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._file_access import usable, write_whole
from nnlo_common.cluster._connecting import connect
from nnlo_common.cluster.transport._endpoint import RankWorld
from nnlo_common.commands._html_page import drawn, html_page, html_table
from nnlo_common.commands.report._run_figures import gradient_sizes
from nnlo_common.commands.train._command_line import given_by
from nnlo_common.commands.train._job import Job, RankCommand
from nnlo_common.commands.train._model_file import load_model, plug_in
from nnlo_common.commands.train._option import Option, option, options_of
from nnlo_common.commands.train._python_file import adapting
from nnlo_common.commands.train._run_plan import RunPlan, data_of
from nnlo_common.commands.train._settings import OPTIONS, settings_of
from nnlo_common.commands.train._train_command import checked
from nnlo_common.simulation._advice import Advice
from nnlo_common.simulation._probe import ProbedModel, ProbeFacts, probe
from nnlo_common.training._joining import apart, launched

__all__ = ["ADVISE_OPTIONS", "AdviseRun", "advice_page", "advise_with", "write_advice"]

# -- page of an advice: what to do, then the numbers with plots ----------------------------------------

_UNDRAWN = "Figures need plotly: pip install 'nnlo[report]'"
_SHOWN = {
    "Time against core-hours": "Each point is a number of workers, in the time and the core-hours of one "
    "process.",
    "Step against batch": "Samples a second on one rank, for each size of batch that was tried.",
    "Memory against batch": "The most memory of one process.",
    "Gradients by layer": "How large the values of each layer's gradient are; left of the line float16 has "
    "zero.",
}
# Of Okabe and Ito.
_BLUE = "#0072b2"


def advice_page(advice: Advice) -> str:
    """Return the page as HTML."""
    facts = advice.facts
    parts = [f"<p>{escape(f'{facts.framework} on {facts.device}, batches of {facts.batch}')}</p>"]
    figures = drawn(_figures(advice))
    for title, lines in advice.lines().items():
        items = "".join(f"<li>{escape(line)}</li>" for line in lines)
        parts.append(f"<h2>{escape(title)}</h2><ul>{items}</ul>")
    for title, drawing in figures.items():
        parts.append(f"<h2>{escape(title)}</h2><p>{escape(_SHOWN[title])}</p>")
        parts.append(f'<div class="scroll">{drawing}</div>')
    if not figures:
        parts.append(f"<p>{escape(_UNDRAWN)}</p>")
    rows = [
        [
            str(point.workers),
            str(point.layout.ranks.size),
            f"{1 / point.time:.2f}",
            f"{1 / point.high:.2f} to {1 / point.low:.2f}",
            f"{point.core_hours:.2f}",
            point.layout.call,
        ]
        for point in advice.curve
    ]
    heads = ["workers", "ranks", "times as fast", "range", "core-hours", "in a script"]
    parts += ["<h2>The curve</h2>", f'<div class="scroll">{html_table(heads, rows)}</div>']
    return html_page(f"Advice: {facts.parameters:,} parameters", parts)


def _figures(advice: Advice) -> dict[str, Any]:
    try:
        import plotly.graph_objects as go
    except ImportError:
        return {}
    facts = advice.facts
    found = {"Time against core-hours": _curve(go, advice)}
    sizes = [*facts.steps_s]
    paces = [size / float(np.median(facts.steps_s[size])) for size in sizes]
    found["Step against batch"] = _line(go, sizes, paces, "samples", "samples a second")
    peaks = [size / 2**20 for size in facts.peak_bytes.values()]
    if peaks:
        found["Memory against batch"] = _line(go, [*facts.peak_bytes], peaks, "samples", "MiB")
    if any(one.size for one in facts.histograms.values()):
        found["Gradients by layer"] = gradient_sizes(
            go, {name: one.counts for name, one in facts.histograms.items()}
        )
    return found


def _curve(go: Any, advice: Advice) -> Any:
    points = advice.curve
    figure = go.Figure(
        go.Scatter(
            x=[point.core_hours for point in points],
            y=[point.time for point in points],
            error_y={
                "type": "data",
                "symmetric": False,
                "array": [point.high - point.time for point in points],
                "arrayminus": [point.time - point.low for point in points],
            },
            text=[str(point.workers) for point in points],
            mode="lines+markers+text",
            textposition="top center",
            line={"color": _BLUE},
        )
    )
    figure.update_xaxes(title="core-hours, of one process", type="log")
    figure.update_yaxes(title="time, of one process", type="log")
    return figure


def _line(go: Any, x: list[int], y: list[float], of_x: str, of_y: str) -> Any:
    figure = go.Figure(go.Scatter(x=x, y=y, mode="lines+markers", line={"color": _BLUE}))
    figure.update_xaxes(title=of_x, type="log")
    figure.update_yaxes(title=of_y, rangemode="tozero")
    return figure


PAGE, DATA = "advice.html", "advice.json"
# Bytes of a message that is timed between two ranks of a host.
_SHORTEST, _LONGEST = 50_000, 64_000_000


def advise_with(
    model: ProbedModel,
    *,
    seconds: float = 60.0,
    link: tuple[float, float] | None = None,
    folder: str | Path | None = None,
    wrappers: str = "nnlo_common",
) -> Advice:
    """Probe a model, on all ranks at the same time if there are several (collective).

    Args:
        model: in the hands of its framework.
        seconds: about how long.
        link: seconds of a short message, bytes a second of a long one; None: as measured between the ranks.
        folder: for the page; None: none is written.
        wrappers: the package whose wrappers the advice names.

    Returns:
        The advice, the same on all ranks.
    """
    _check(link)
    place = None if folder is None else Path(folder)
    if place is not None and place.exists() and not place.is_dir():
        raise ConfigurationError(f"{place} is a file, and the advice needs a folder; name another one")
    world = launched()
    with apart():
        facts = probe(model, seconds=seconds)
    facts = _of_all_ranks(facts, world)
    if link is not None:
        facts = replace(facts, link=link, one_host=False)
    advice = Advice(facts, wrappers=wrappers)
    if place is not None and (world is None or world.rank == 0):
        write_advice(advice, place)
    return advice


def write_advice(advice: Advice, folder: Path) -> Path:
    """Write the page and the numbers of an advice into a folder; return the page."""
    page = advice_page(advice)
    write_whole(
        usable(str(folder), folder / DATA),
        json.dumps(_finite(advice.as_data()), indent=1, allow_nan=False) + "\n",
    )
    write_whole(folder / PAGE, page)
    return folder / PAGE


def _check(link: tuple[float, float] | None) -> None:
    fits = link is None or (
        isinstance(link, tuple | list) and len(link) == 2 and all(is_number(one) for one in link)
    )
    if not fits or (link is not None and not (0 <= link[0] < 10 and link[1] > 0)):
        raise ConfigurationError(
            f"link={link!r} is not possible: give the seconds of a short message and the bytes a second of a "
            "long one, e.g. (2e-6, 1e10)"
        )


def _of_all_ranks(facts: ProbeFacts, world: RankWorld | None) -> ProbeFacts:
    """Return a rank's facts, with how slow each rank was beside the fastest, and their link (collective)."""
    if world is None:
        return facts
    own = statistics.median(facts.steps_s[facts.batch])
    told = [json.loads(text) for text in world.gather_text(json.dumps([own, world.host]), patient=True)]
    steps, hosts = [one for one, _ in told], [host for _, host in told]
    fastest = min(steps)
    one_host = len(set(hosts)) == 1
    facts = replace(facts, slow=tuple(one / fastest for one in steps), one_host=one_host)
    link = _measured_link(world, hosts, facts.parameters)
    if link is None:
        return facts
    return replace(facts, within_bytes_per_s=link[1]) if one_host else replace(facts, link=link)


def _measured_link(world: RankWorld, hosts: list[str], parameters: int) -> tuple[float, float] | None:
    """Measure messages between the ranks, between hosts where there are several (collective).

    Within a host they are as long as a gradient: the caches decide on their speed.
    """
    from nnlo_common.commands.doctor._link_speed import QUICK, measure_links

    joined = connect()
    if joined is None:  # threads as ranks
        return None
    length = min(max(4 * parameters, _SHORTEST), _LONGEST)
    effort = QUICK if len(set(hosts)) > 1 else replace(QUICK, large=((length, 9),))
    found = measure_links(joined.comm, hosts, effort, lambda step: None)
    far = [one for one in found if one.host != hosts[0]] or found
    links = [(one.latency_s, statistics.median(one.bandwidth.values())) for one in far]
    told = json.loads(world.gather_text(json.dumps(links))[0])
    if not told:
        return None
    return statistics.median(one for one, _ in told), statistics.median(one for _, one in told)


def _finite(found: Any) -> Any:
    """Return data with None in place of numbers that JSON does not have."""
    if isinstance(found, Mapping):
        return {name: _finite(one) for name, one in found.items()}
    if isinstance(found, list | tuple):
        return [_finite(one) for one in found]
    return None if isinstance(found, float) and not abs(found) < float("inf") else found


# -- the command: the options of `nnlo train`, a probe in place of the training, the page ---------------

_FOLDER = Path("advice")


@dataclass(frozen=True, kw_only=True)
class _OwnSettings:
    """Options of the probe."""

    seconds: float = option("Probe", "about how long to try", default=60.0, least=1)
    link: str | None = option(
        "Probe", "microseconds of a short message and GB/s of a long one between hosts", "US,GB/S"
    )


_OWN = options_of(_OwnSettings)
#: All options of the command, in the order of its help.
ADVISE_OPTIONS: Mapping[str, Option] = {**_OWN, **OPTIONS}


class AdviseRun(RankCommand):
    """A probe on one rank.

    Args:
        job: the ranks that try at the same time.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._trainer: Any = None

    def run(self, flags: Mapping[str, Any], unknown: Sequence[str]) -> int:
        """Check everything, try, print and write; return the exit status."""
        job = self._job
        with job.together():
            given = given_by(flags, unknown, ADVISE_OPTIONS, "advise")
            own = {name: given.pop(name).read(_OWN[name]) for name in _OWN if name in given}
            link = link_of(own.get("link"))
            settings = settings_of(given)
            self.keep_logs(settings.log_level, settings.log_dir)
        path, _ = checked(job, settings, arranged=False)
        try:
            with job.together(), apart(), adapting():
                loaded = load_model(settings, path)
                plan = RunPlan(settings=settings, loaded=loaded, data=data_of(settings, loaded))
                self._trainer = plug_in(loaded.framework).prepare(plan)
                model = self._trainer.probed()
            folder = _FOLDER if settings.run is None else Path(settings.run)
            with job.together(patient=True):
                advice = advise_with(model, seconds=own.get("seconds", 60.0), link=link, folder=folder)
        finally:
            if self._trainer is not None:
                self._trainer.close()
        if job.speaks:
            print(advice)
            print(f"\nnnlo advise: {folder / 'advice.html'}")
        job.share("told")
        return 0

    @property
    def advice(self) -> str:
        """Nothing: the command can be run again."""
        return ""


def link_of(text: str | None) -> tuple[float, float] | None:
    """Return the link that was given, in seconds and bytes a second.

    Example:
        >>> link_of("2,12.5")
        (2e-06, 12500000000.0)
    """
    if text is None:
        return None
    try:
        microseconds, gigabytes = (float(one) for one in text.split(","))
        if 0 <= microseconds < 1e7 and 0 < gigabytes < 1e6:
            return microseconds / 1e6, gigabytes * 1e9
    except ValueError:
        pass
    raise ConfigurationError(
        f"--link {text} is not possible: give microseconds and GB/s, e.g. --link 2,12.5, as nnlo doctor tells"
    )
