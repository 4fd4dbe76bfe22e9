"""Verdict about reading: what it is that takes the time, and what mends that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from nnlo_common.base._spans import STAGES
from nnlo_common.commands.report._run_facts import EpochFacts, RunFacts

__all__ = ["reading"]

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
