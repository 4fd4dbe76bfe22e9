"""Live table: what the ranks of a run do now, drawn by rich."""

from __future__ import annotations

from typing import Any

from nnlo_common.base._errors import MissingExtraError
from nnlo_common.training.report._alarms import alarms, silence_s
from nnlo_common.training.report._course import duration, in_order, spaced
from nnlo_common.training.report._live_ranks import LiveRank, LiveRun

__all__ = ["live_table", "rich_module", "summary"]

_HEADS = ("rank", "role", "host", "epoch", "samples/s", "loss", "staleness", "left", "last step", "last sign")
_TEXTS = 3  # so many columns are texts, the others numbers


def rich_module(feature: str) -> Any:
    """Return rich.

    Args:
        feature: what needs it.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import rich
        import rich.console
        import rich.live
        import rich.table
        import rich.text
    except ImportError:
        raise MissingExtraError(feature, "rich", "report") from None
    return rich


def live_table(run: LiveRun, most: int | None = None) -> Any:
    """Return the table of a run with its alarms, for rich to print.

    Args:
        run: what its ranks do now.
        most: how many ranks to show at most, the most silent ones; None: all.
    """
    rich = rich_module("a table of a run")
    table = rich.table.Table(box=None, pad_edge=False, expand=False)
    for number, head in enumerate(_HEADS):
        table.add_column(head, justify="left" if 0 < number < _TEXTS else "right", no_wrap=True)
    shown = [*run.ranks]
    if most is not None and len(shown) > most:
        worst = sorted(shown, key=lambda one: (one.ended, -silence_s(run, one)))[:most]
        shown = [one for one in shown if one in worst]
    for one in shown:
        table.add_row(*(rich.text.Text(cell) for cell in _cells(run, one)))
    parts: list[Any] = [rich.text.Text(summary(run), style="bold", overflow="fold"), table]
    if len(shown) < len(run.ranks):
        parts.append(rich.text.Text(f"and {len(run.ranks) - len(shown)} more ranks"))
    parts += [rich.text.Text(line, style="red") for line in alarms(run)]
    return rich.console.Group(*parts)


def summary(run: LiveRun) -> str:
    """Return a run in one line: how far, how fast, how good, how long still.

    Example:
        >>> from pathlib import Path
        >>> facts = {"epoch": 2, "epochs": 3, "share": 0.5, "rate": 40, "left_s": 65}
        >>> rank = LiveRank(rank=0, role="alone", time_s=9, moved_s=9, **facts)
        >>> summary(LiveRun(folder=Path("runs/net-1"), now_s=10, ranks=[rank]))
        'net-1  epoch 2/3  50 %  40 samples/s  1:05 left'
    """
    center, parts = run.center, [run.folder.resolve().name]
    if center is not None:
        of = "" if center.epochs is None else f"/{center.epochs}"
        parts.append(f"epoch {center.epoch}{of}")
        if center.share is not None:
            parts.append(f"{100 * center.share:.0f} %")
    if run.ended:
        parts.append("complete" if run.complete else "ended")
    else:
        parts.append(f"{spaced(run.rate)} samples/s")
    scores = run.scores
    parts += [f"{name} {_score(scores[name])}" for name in in_order(scores)]
    if center is not None and not run.ended:
        if center.staleness is not None:
            parts.append(f"staleness {center.staleness:.2f}")
        if center.left_s is not None:
            parts.append(f"{duration(center.left_s)} left")
    return "  ".join(parts)


def _cells(run: LiveRun, one: LiveRank) -> tuple[str, ...]:
    of = "" if one.epochs is None else f"/{one.epochs}"
    done = "" if one.share is None else f" {100 * one.share:.0f} %"
    return (
        str(one.rank),
        one.role,
        one.host,
        f"{one.epoch}{of}{done}",
        spaced(one.rate) if not one.ended else "",
        _score(one.scores["loss"]) if "loss" in one.scores else "",
        "" if one.staleness is None else f"{one.staleness:.2f}",
        "" if one.left_s is None or one.ended else duration(one.left_s),
        "" if one.ended else duration(run.now_s - one.moved_s),
        "ended" if one.ended else duration(silence_s(run, one)),
    )


def _score(value: float | None) -> str:
    return "nan" if value is None else f"{value:.4g}"
