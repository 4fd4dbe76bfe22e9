"""Facts of a run, read from the files in its folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._file_access import read_whole
from nnlo_common.base._limited_formats import LARGEST_JSON, LARGEST_TOML, parsed_json
from nnlo_common.commands.report._time_shares import TimeShares, time_shares
from nnlo_common.commands.train._run_folder import CONFIG, HISTORY, RUN
from nnlo_common.training._rank_parts import speaks

__all__ = ["EpochFacts", "RankFacts", "RunFacts", "read_run"]

_LARGEST = 1e300  # whole numbers beyond it are no floats


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochFacts:
    """One epoch of one rank, a line of its monitor.

    Attributes:
        ended_s: when it ended, in seconds since 1970.
        seconds: how long it took.
        samples: how many this rank trained on; on a server those of all workers.
        memory_mb: resident memory at its end.
        cpu_s: processor time within it.
        metrics: by name; None: not a finite number.
    """

    ended_s: float
    seconds: float
    samples: float
    memory_mb: float
    cpu_s: float
    metrics: Mapping[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """One rank of a run.

    Attributes:
        rank: its number.
        role: "alone", "server 0", "worker 0", ...
        host: the machine; empty: unknown.
        cores: how many processor cores of that machine this job may use; None: unknown.
        samples: how many it has trained on, or served.
        exchanges: the contributions that a server has applied.
        dropped: those that it has dropped as too stale.
        staleness: the mean staleness of those that it has applied.
        lost: a line for each rank that died.
        epochs: from the monitor; empty without one.
        shares: from the timeline; None without one.
    """

    rank: int
    role: str
    host: str = ""
    cores: int | None = None
    samples: int = 0
    exchanges: int = 0
    dropped: int = 0
    staleness: float = 0.0
    lost: Sequence[str] = ()
    epochs: Sequence[EpochFacts] = ()
    shares: TimeShares | None = None

    @property
    def trains(self) -> bool:
        """Whether it computes gradients."""
        return not self.role.startswith("server")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """A run.

    Attributes:
        folder: of its files.
        history: the centre's metrics, a number for each epoch; None: not a finite number.
        workers: the same for each worker, by role.
        ranks: all that are known.
        began: when it began, as text; empty: unknown.
        seconds: how long it took; None: it has not ended.
        command: the line that started it.
        versions: of programs, by name.
        config: its options, as TOML.
    """

    folder: Path
    history: Mapping[str, Sequence[float | None]]
    workers: Mapping[str, Mapping[str, Sequence[float | None]]]
    ranks: Sequence[RankFacts]
    began: str = ""
    seconds: float | None = None
    command: str = ""
    versions: Mapping[str, str]
    config: str = ""

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name

    @property
    def center(self) -> RankFacts | None:
        """The rank that has the centre."""
        return next((one for one in self.ranks if speaks(one.role)), None)

    @property
    def workers_count(self) -> int:
        """How many ranks train."""
        return sum(one.trains for one in self.ranks)

    @property
    def samples_per_second(self) -> float | None:
        """The pace of all workers together, over the epochs of the monitor; None without one."""
        epochs = self.center.epochs if self.center is not None else ()
        seconds = sum(one.seconds for one in epochs)
        if not seconds or self.center is None:
            return None
        if self.center.role == "lead":  # it tells of its own samples only
            return sum(one.samples for rank in self.ranks for one in rank.epochs) / seconds
        return sum(one.samples for one in epochs) / seconds


def read_run(folder: Path) -> RunFacts:
    """Read the files of a run, also of one that is under way or was killed.

    Raises:
        ConfigurationError: the folder has no such files, or one of them is damaged.
    """
    if not folder.is_dir():
        raise ConfigurationError(f"{folder}: there is no such folder; name the folder of a run")
    told = _table(folder / RUN)
    ranks = {one.rank: one for one in map(_rank, _tables(told.get("ranks"), folder / RUN))}
    for path, rank in _of_ranks(folder, "monitor", "jsonl"):
        lines = list(_lines(path))
        if lines:
            role = str(lines[-1].get("role", ranks[rank].role if rank in ranks else f"rank {rank}"))
            known = ranks.get(rank, RankFacts(rank=rank, role=role))
            ranks[rank] = replace(known, epochs=[_epoch(one, path) for one in lines])
    for path, rank in _of_ranks(folder, "timeline", "json"):
        events = _json(path)
        try:
            shares = time_shares(events)
        except ValueError as error:
            raise ConfigurationError(f"{path} {error}; remove it, or name another run") from None
        known = ranks.get(rank, RankFacts(rank=rank, role=_role_in(events, rank)))
        ranks[rank] = replace(known, shares=shares)
    history = _table(folder / HISTORY)
    if not ranks and not history:
        raise ConfigurationError(
            f"{folder} has no {HISTORY}, no {RUN}, and no file of a Monitor or a Timeline "
            "(monitor.rank0.jsonl, timeline.rank0.json); name the folder of a run"
        )
    ordered = [ranks[rank] for rank in sorted(ranks)]
    center = _curves(history.get("center"), folder / HISTORY) or _monitored(ordered)
    workers = {
        str(one.get("role")): _curves(one.get("history"), folder / HISTORY)
        for one in _tables(history.get("workers"), folder / HISTORY)
    }
    versions = told.get("versions")
    return RunFacts(
        folder=folder,
        history=center,
        workers=workers,
        ranks=ordered,
        began=str(told.get("began", "")),
        seconds=_number(told.get("seconds")),
        command=str(told.get("command", "")),
        versions={str(name): str(one) for name, one in (versions or {}).items() if one is not None}
        if isinstance(versions, Mapping)
        else {},
        config=_text(folder / CONFIG),
    )


def _of_ranks(folder: Path, name: str, ending: str) -> Iterator[tuple[Path, int]]:
    """Yield the files of the ranks, with the rank of each."""
    for path in sorted(folder.glob(f"{name}.rank*.{ending}")):
        number = path.name.removeprefix(f"{name}.rank").removesuffix(f".{ending}")
        if number.isdecimal() and len(number) < 7:
            yield path, int(number)


def _lines(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the lines of a monitor; the last one may be cut off, where a rank was killed."""
    lines = _bytes(path, LARGEST_JSON).split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            found = parsed_json(line)
        except ValueError as error:
            if number == len(lines):
                return
            raise ConfigurationError(f"{path}, line {number}: {error}; remove that line") from None
        if not isinstance(found, Mapping):
            raise ConfigurationError(f"{path}, line {number}: is none of a Monitor; remove that line")
        yield found


def _epoch(line: Mapping[str, Any], path: Path) -> EpochFacts:
    metrics = line.get("metrics")
    names = ("time", "seconds", "memory_mb", "cpu_s")
    numbers = [_number(line.get(name)) for name in names]
    if None in numbers or not isinstance(metrics, Mapping):
        raise ConfigurationError(f"{path}: {dict(line)!s:.80} is none of a Monitor; remove that line")
    ended_s, seconds, memory_mb, cpu_s = (one for one in numbers if one is not None)
    return EpochFacts(
        ended_s=ended_s,
        seconds=seconds,
        samples=_number(line.get("samples")) or 0.0,
        memory_mb=memory_mb,
        cpu_s=cpu_s,
        metrics={str(name): _number(value) for name, value in metrics.items()},
    )


def _rank(facts: Mapping[str, Any]) -> RankFacts:
    lost = facts.get("lost")
    cores = _number(facts.get("cores"))
    return RankFacts(
        rank=int(_number(facts.get("rank")) or 0),
        role=str(facts.get("role", "")),
        host=str(facts.get("host", "")),
        cores=None if cores is None else int(cores),
        samples=int(_number(facts.get("samples")) or 0),
        exchanges=int(_number(facts.get("exchanges")) or 0),
        dropped=int(_number(facts.get("dropped")) or 0),
        staleness=_number(facts.get("mean_staleness")) or 0.0,
        lost=[str(one) for one in lost] if isinstance(lost, list) else [],
    )


def _role_in(events: Sequence[Any], rank: int) -> str:
    """Return the role that a timeline has in its name, "worker 0 on HOST"."""
    for one in events:
        facts = one.get("args")
        if one.get("name") == "process_name" and isinstance(facts, Mapping):
            return str(facts.get("name")).partition(" on ")[0]
    return f"rank {rank}"


def _monitored(ranks: Sequence[RankFacts]) -> dict[str, list[float | None]]:
    """Return the metrics of the rank with the centre, as its monitor has them."""
    center = next((one for one in ranks if speaks(one.role)), None)
    found: dict[str, list[float | None]] = {}
    for number, epoch in enumerate(center.epochs if center is not None else ()):
        for name, value in epoch.metrics.items():
            known = found.setdefault(name, [])
            known += [None] * (number - len(known)) + [value]
    return found


def _curves(found: Any, path: Path) -> dict[str, list[float | None]]:
    if found is None:
        return {}
    if not isinstance(found, Mapping) or not all(isinstance(one, list) for one in found.values()):
        raise ConfigurationError(f"{path} is none of `nnlo train`; remove it, or name another run")
    return {str(name): [_number(value) for value in values] for name, values in found.items()}


def _number(value: Any) -> float | None:
    """Return a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < _LARGEST else None  # False for NaN


def _tables(found: Any, path: Path) -> list[Mapping[str, Any]]:
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(one, Mapping) for one in found):
        raise ConfigurationError(f"{path} is none of `nnlo train`; remove it, or name another run")
    return found


def _table(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    found = _json(path)
    if not isinstance(found, Mapping):
        raise ConfigurationError(f"{path} is none of `nnlo train`; remove it, or name another run")
    return found


def _json(path: Path) -> Any:
    try:
        return parsed_json(_bytes(path, LARGEST_JSON))
    except ValueError as error:
        raise ConfigurationError(f"{path}: {error}; remove it, or name another run") from None


def _text(path: Path) -> str:
    return _bytes(path, LARGEST_TOML).decode(errors="replace") if path.exists() else ""


def _bytes(path: Path, largest: int) -> bytes:
    try:
        return read_whole(path, largest)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path}: {error}") from None
