"""A probe on one or several ranks, and its advice, written as a page and as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nnlo_common.base._arguments import is_number
from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._whole_files import usable, write_whole
from nnlo_common.cluster._connecting import connect
from nnlo_common.cluster.transport._endpoint import RankWorld
from nnlo_common.commands.advise._advice_page import advice_page
from nnlo_common.simulation._advice import Advice
from nnlo_common.simulation._probe import ProbedModel, ProbeFacts, probe
from nnlo_common.training._joining import apart, launched

__all__ = ["advise_with", "write_advice"]

PAGE, DATA = "advice.html", "advice.json"


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
    # Within a host messages are copies, whose speed is known; ranks without cores would measure their waits.
    link = None if one_host else _measured_link(world, hosts)
    facts = replace(facts, slow=tuple(one / fastest for one in steps), one_host=one_host)
    return facts if link is None else replace(facts, link=link)


def _measured_link(world: RankWorld, hosts: list[str]) -> tuple[float, float] | None:
    """Measure messages between the ranks, between hosts where there are several (collective)."""
    from nnlo_common.commands.doctor._link_speed import QUICK, measure_links

    joined = connect()
    if joined is None:  # threads as ranks
        return None
    found = measure_links(joined.comm, hosts, QUICK, lambda step: None)
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
