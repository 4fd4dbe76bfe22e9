"""Verdicts about a run: sentences that name what is wrong and what to change."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from nnlo_common.algorithms._gain import worth_having
from nnlo_common.base._errors import plural
from nnlo_common.base._spans import STAGES
from nnlo_common.commands.report._run_reader import EpochFacts, RankFacts, RunFacts
from nnlo_common.training._server_load import BUSY, WAITED, told

__all__ = ["reading", "verdicts"]

# -- verdict about reading: what it is that takes the time, and what mends that ------------------------

#: The share of the time of batches that reading may take.
_READ = 0.5
#: Bytes of a sample's chunk, basket or row group; for smaller ones, finding them is the cost.
_TINY = 2**14
_KEEP = 'keep the decoded samples in memory (cache="memory" in a script, --cache memory for nnlo train)'
_STAGED = (
    "stage the files on a local disk (stage_to=... in a script, --cache FOLDER for nnlo train), or read "
    "more samples at once (a larger block)"
)
_ADVICE = {
    "disk": ("waiting for the files", _STAGED),
    "decode": ("decoding them", f"{_KEEP}, or rewrite them once by nnlo rechunk"),
    "adapt": (
        "your functions adapt_features and adapt_labels",
        "make them faster, or write once what they make, and train on that",
    ),
    "mix": (
        "gathering the samples of a batch",
        "use fewer columns or smaller samples, or shuffle=False if the files are in a good order",
    ),
}


def reading(run: RunFacts) -> Iterator[str]:
    """Yield what to do about the time that reading takes, if it is much."""
    workers = [_counted(one.epochs) for one in run.ranks if one.trains]
    epochs = [epoch for some in workers for epoch in some]
    if not epochs:  # before the first has ended
        shares = [one.shares.seconds for one in run.ranks if one.trains and one.shares is not None]
    else:
        shares = [epoch.spent for epoch in epochs]
    read, computed = (sum(one.get(kind, 0.0) for one in shares) for kind in ("read", "compute"))
    if read <= _READ * (read + computed):
        return
    told = f"reading takes {100 * read / (read + computed):.0f} % of the time of a batch"
    stages = {name: sum(epoch.stages.get(name, 0.0) for epoch in epochs) for name in STAGES}
    total = sum(stages.values())
    if not total:
        yield f"{told}: {_STAGED}"
        return
    most = max(stages, key=lambda name: stages[name])
    what, advice = _ADVICE[most]
    facts = next((epoch.reading for epoch in epochs if epoch.reading), {})
    how, piece = facts.get("how"), facts.get("piece_bytes")
    if most == "decode":
        what += f" ({how})" if how else ""
        if isinstance(piece, int | float) and 0 < piece < _TINY:
            what += f", which are stored in pieces of {piece / 1000:.1f} kB"
            advice = f"rewrite them once with larger ones by nnlo rechunk, or {_KEEP}"
        elif _cached(facts):
            advice = "train for more than one epoch: from the second one on the decoded samples are in memory"
    yield f"{told}, {100 * stages[most] / total:.0f} % of that {what}: {advice}"


def _counted(epochs: Sequence[EpochFacts]) -> Sequence[EpochFacts]:
    """Return the epochs that count: where samples are kept in memory, the first is not like the others."""
    if len(epochs) > 1 and any(_cached(one.reading) for one in epochs):
        return epochs[1:]
    return epochs


def _cached(facts: Any) -> bool:
    mb = facts.get("cached_mb")
    return isinstance(mb, int | float) and mb > 0


#: How much slower than the others' median a worker is when it is named.
_SLOW = 1.5
# Fixed shares are equal but for a batch; with leases a worker takes about as much less as it is slower.
_UNEVEN = 1.2
_VALIDATED = 0.3
#: How far a loss may rise above its lowest value, and memory from the second epoch to the last.
_ROSE, _GREW = 1.5, 1.2
_FEWEST_EPOCHS = 4
#: Contributions that a noise scale needs to be believed.
_FEWEST_EXCHANGES = 200
#: The share of their time that ranks may wait for a core.
_STARVED = 0.15


def verdicts(run: RunFacts) -> list[str]:
    """Return what to change, the most important first; nothing for a run in good order."""
    if diverged := [line for one in run.ranks for line in one.diverged]:
        # Deaths and waits come from it.
        return [f"the training has diverged: {diverged[0]}"]
    found = [*_deaths(run), *_divergence(run), *_cores(run), *reading(run)]
    found += [*_slow_workers(run), *_waits(run), *_gain(run)]
    return [*found, *_validation(run), *_drops(run), *_memory(run)]


def _deaths(run: RunFacts) -> Iterator[str]:
    """Yield each death once, though several ranks may tell of it."""
    told: dict[str, str] = {}
    for line in (line for one in run.ranks for line in one.lost):
        told.setdefault(line.split(" on ")[0], line)  # by the rank that has died
    for line in told.values():
        yield f"a rank died: {line}"


def _divergence(run: RunFacts) -> Iterator[str]:
    advice = "lower the learning rate, or let workers exchange more often (a smaller every)"
    for name in ("loss", "val_loss"):
        values = run.history.get(name, ())
        if None in values:
            epoch = list(values).index(None) + 1
            yield f"{name} is no finite number after epoch {epoch}: {advice}; check the data for NaN"
            return
        known = [one for one in values if one is not None and not math.isnan(one)]
        # A loss may be below 0; then no ratio tells anything.
        if name == "loss" and len(known) > 1 and min(known) > 0 and known[-1] > _ROSE * min(known):
            best = list(values).index(min(known)) + 1
            yield (
                f"loss rises from {min(known):.4g} after epoch {best} to {known[-1]:.4g} at the end: {advice}"
            )
            return


def _cores(run: RunFacts) -> Iterator[str]:
    for host, (ranks, cores, waited) in _crowded(run).items():
        for_what = "each other"
        if waited is not None:
            for_what = f"a core {100 * waited:.0f} % of their time"
        yield (
            f"{ranks} ranks shared {plural(cores, 'core')} of {host}, so they waited for {for_what}: "
            "start fewer ranks, or use more hosts"
        )


def _crowded(run: RunFacts) -> dict[str, tuple[int, int, float | None]]:
    """Return the hosts with too few cores: their ranks, their cores, and how much of the time was lost."""
    found = {}
    for host in sorted({one.host for one in run.ranks if one.host}):
        there = [one for one in run.ranks if one.host == host and not one.former]
        cores = min((one.cores for one in there if one.cores), default=len(there))
        epochs = [epoch for one in there for epoch in one.epochs if epoch.core_wait_s is not None]
        waited_s = sum(epoch.core_wait_s or 0.0 for epoch in epochs)
        waited = min(1.0, waited_s / max(sum(epoch.seconds for epoch in epochs), 1e-9)) if epochs else None
        # Without the system's count, ranks that compute are taken to need a core each.
        lacks = sum(one.trains for one in there) > cores if waited is None else waited > _STARVED
        if len(there) > cores and lacks:
            found[host] = len(there), cores, waited
    return found


def _slow_workers(run: RunFacts) -> Iterator[str]:
    crowded = _crowded(run)
    paces = {
        one.role: one.shares.batch_s
        for one in run.ranks
        if one.trains and one.host not in crowded and one.shares is not None and one.shares.batch_s
    }
    if len(paces) < 2 or any(reading(run)):
        return
    places = {one.role: f"{one.role} (rank {one.rank} on {one.host})" for one in run.ranks}
    taken = {one.role: one.samples for one in run.ranks if one.role in paces}
    for role, slowest in sorted(paces.items(), key=lambda pair: -(pair[1] or 0)):
        others = median(pace for other, pace in paces.items() if other != role and pace is not None)
        if slowest is not None and slowest > _SLOW * others:
            least = median(samples for other, samples in taken.items() if other != role) / _UNEVEN
            leases = (
                "it took fewer samples than they, so that they need not wait for it"
                if taken[role] < least
                else f'assignment="dynamic" would save {100 * _saved_by_leases(paces):.0f} % of an epoch'
            )
            yield (
                f"{places[role]} takes {slowest / others:.1f} times as long as the others for a batch "
                f"({1e3 * slowest:.1f} ms, the others {1e3 * others:.1f} ms): look at its host; {leases}"
            )


def _saved_by_leases(paces: Mapping[str, float | None]) -> float:
    """Return how much of an epoch ends sooner where each worker takes as many samples as it can."""
    known = [pace for pace in paces.values() if pace]
    # With equal shares all wait for the slowest; with leases all end together.
    return 1 - len(known) / (max(known) * sum(1 / pace for pace in known))


def _waits(run: RunFacts) -> Iterator[str]:
    """Tell of waits, unless a cause that has a verdict of its own explains them."""
    workers = [one.shares for one in run.ranks if one.trains and one.shares is not None]
    serving = [one for one in run.ranks if not one.trains and not one.former]
    servers = [one.shares for one in serving if one.shares is not None]
    if not workers or not servers or any((*_slow_workers(run), *_cores(run), *reading(run))):
        return
    waited = sum(one.share("wait") for one in workers) / len(workers)
    busy = max(map(_busy, serving))
    if waited > WAITED and busy > BUSY:
        yield told(waited, busy, len(servers))
    elif waited > WAITED:
        # With a gain a gradient that comes later is worth less.
        paid = run.center is not None and run.center.gain is not None
        instead = (
            "or servers=0 where ranks are alike; a larger every, or a lag, takes more passes over the data"
            if paid
            else "a larger every, or lag=1"
        )
        yield (
            f"workers wait {100 * waited:.0f} % of their time though the servers are idle: the batches are "
            f"short for the way to the server; use a larger batch, {instead}{_below_critical(run)}"
        )


def _busy(server: RankFacts) -> float:
    return 0.0 if server.shares is None else server.shares.share("apply", "receive", "send")


def _validation(run: RunFacts) -> Iterator[str]:
    shares = [one.shares.share("validate") for one in run.ranks if one.shares is not None and one.trains]
    if shares and (mean := sum(shares) / len(shares)) > _VALIDATED:
        yield f"validation takes {100 * mean:.0f} % of the time: validate with fewer samples, or less often"


def _gain(run: RunFacts) -> Iterator[str]:
    gain = None if run.center is None else run.center.gain
    if gain is None:
        yield from _noise(run)
    if gain is not None and gain.retreats:
        yield (
            f"the training was lost {plural(gain.retreats, 'time')} and went back to where it was calm: the "
            "learning rate is too high for gradients that arrive late; half of it would take fewer steps"
        )
    if gain is not None and gain.worth_having is not None and gain.workers > gain.worth_having:
        yield (
            f"{gain}: start fewer ranks, or train with larger batches or a larger learning rate on as many"
        )


def _noise(run: RunFacts) -> Iterator[str]:
    """Tell of more workers than the noise of their gradients supports."""
    center, batch = run.center, _samples_together(run)
    if center is None or center.noise_scale is None or batch is None or center.exchanges < _FEWEST_EXCHANGES:
        return
    worth = worth_having(center.noise_scale / batch, 1.0)
    if run.workers_count > worth:
        yield (
            f"{run.workers_count} workers are more than the gain supports: with contributions of {batch:.0f} "
            f"samples and a noise scale of {center.noise_scale:.3g} no more than {worth:.0f} are worth "
            "having; start fewer ranks"
        )


def _samples_together(run: RunFacts) -> float | None:
    """Return the samples of a contribution; None: unknown, as on a server of Keras."""
    center = run.center
    if center is None or not center.exchanges or not center.samples:
        return None
    return center.samples / center.exchanges


def _below_critical(run: RunFacts) -> str:
    """Return what to add where larger batches would cost nothing."""
    noise, batch = None if run.center is None else run.center.noise_scale, _samples_together(run)
    if noise is None or not batch or noise < 4 * run.workers_count * batch:
        return ""
    return (
        f"; the batches are below the critical one ({noise:.3g} samples, and all workers together have "
        f"{run.workers_count * batch:.0f}), so that twice as large ones cost nothing"
    )


def _drops(run: RunFacts) -> Iterator[str]:
    applied = sum(one.exchanges for one in run.ranks)
    dropped = sum(one.dropped for one in run.ranks)
    if dropped > 0.1 * (applied + dropped):
        yield (
            f"{dropped} of {applied + dropped} contributions were too stale and are lost: "
            "raise max_staleness, or use workers of one pace"
        )


def _memory(run: RunFacts) -> Iterator[str]:
    for one in run.ranks:
        # The first one still loads libraries; the samples kept in memory are shared, and grow to their size.
        used = [epoch.memory_mb - epoch.shared_mb for epoch in one.epochs[1:]]
        rises = all(later > earlier for earlier, later in pairwise(used))
        if len(used) >= _FEWEST_EPOCHS - 1 and rises and used[-1] > _GREW * used[0] > 0:
            yield (
                f"the memory of {one.role} grows in each epoch, from {used[0]:.0f} to {used[-1]:.0f} MB: "
                "something keeps what each epoch makes, such as a list of losses with their graphs"
            )
