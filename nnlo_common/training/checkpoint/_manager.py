"""Checkpoint manager: one rank's side of saving when a checkpoint is due, and of resuming."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from nnlo_common.base._arguments import is_number, is_whole
from nnlo_common.base._errors import ConfigurationError, NNLOError, plural, warn
from nnlo_common.base._file_access import hold
from nnlo_common.base._flat_vector import Layout, Vector
from nnlo_common.base._signals import Interrupts, LeftTogether
from nnlo_common.base._spans import span
from nnlo_common.cluster._aborting import advise, end_notes_in
from nnlo_common.training._joining import launched
from nnlo_common.training._plan import readable
from nnlo_common.training._rank_parts import say, speaks, stands_by
from nnlo_common.training._session import Session
from nnlo_common.training.checkpoint import SavedCheckpoint, Store
from nnlo_common.training.checkpoint._manifest import DamagedError
from nnlo_common.training.checkpoint._saving import SavedRank, saving_on, wait_for_all

__all__ = [
    "CheckpointManager",
    "IDENTITY",
    "check_entries",
    "check_facts",
    "check_place_in_data",
    "check_team",
    "check_weights",
    "checked_count",
    "difference",
]

# -- identity of a training: its algorithm, optimizer, servers and model, by name ----------------------

#: The facts that must be equal to resume from a checkpoint.
IDENTITY = ("algorithm", "optimizer", "servers", "model")


def difference(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Describe how a checkpoint (`there`) differs from this training (`here`); empty if it does not.

    Example:
        >>> facts = {"algorithm": "AGN()", "optimizer": "SGD", "servers": 1, "model": ""}
        >>> difference({**facts, "optimizer": "Adam"}, facts)
        'the optimizer is Adam there, but SGD here'
        >>> difference(facts, facts)
        ''
        >>> difference({**facts, "data": {"samples": 100}}, {**facts, "data": {"samples": 120}})
        'its data set has 100 samples, but this one has 120'
    """
    for name in IDENTITY:
        if there.get(name) == here.get(name):
            continue
        if name == "model":
            return f"the model is another one: {_of_models(there.get(name), here.get(name))}"
        told = {"servers": "the number of servers"}.get(name, f"the {name}")
        return f"{told} is {_shown(there.get(name))} there, but {_shown(here.get(name))} here"
    return _of_data(there.get("data") or {}, here.get("data") or {})


def _of_data(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Describe how the data sets differ, in what is known of both."""
    if {"samples"} <= there.keys() & here.keys() and there["samples"] != here["samples"]:
        return f"its data set has {plural(there['samples'], 'sample')}, but this one has {here['samples']}"
    if {"columns"} <= there.keys() & here.keys() and list(there["columns"]) != list(here["columns"]):
        columns = [_shown(", ".join(one["columns"])) for one in (there, here)]
        return f"the columns of its data set are {columns[0]}, but those of this one are {columns[1]}"
    return ""


def _of_models(there: Any, here: Any) -> str:
    try:
        return Layout.from_json(here).difference(Layout.from_json(there)) or "it has other buffers"
    except (ConfigurationError, ValueError, TypeError):
        return "it cannot be compared"


def _shown(fact: object) -> str:
    """Return a fact for a message, without characters that would control a terminal."""
    return readable("".join(one if one.isprintable() else "?" for one in f"{fact!s:.1000}"))


# -- checks of what a checkpoint holds, made before any of it is used ----------------------------------
# Checksums show only that a file is as it was written. Somebody else may have written it, or a training
# whose weights had already become NaN.

#: Epochs, and batches of an epoch; a billionth one is never reached.
_MOST = 10**9
_MOST_SAMPLES = 2**53
_BLOCK = 1 << 22  # numbers that are checked at once
#: Entries of a session's state, by name: counts, with the numbers that they never reach; and weights.
_COUNTS = {"epochs": _MOST, "steps": 2**53, "samples": _MOST_SAMPLES, "clock": 2**53}
_WEIGHTS = ("parameters", "center")
_LEASE = 3  # numbers in a lease: epoch, start, stop


def checked_count(what: str, value: object, most: int = _MOST) -> int:
    """Return a count from a checkpoint.

    Raises:
        DamagedError: it is no whole number from 0, or is as large as `most`.

    Example:
        >>> checked_count("the epoch", -5)
        Traceback (most recent call last):
        nnlo_common.training.checkpoint._manifest.DamagedError: the epoch is -5, not a count
    """
    if not is_whole(value, 0) or value >= most:
        raise DamagedError(f"{what} is {value!r:.60}, not a count")
    return int(value)


def check_facts(facts: Mapping[str, Any]) -> None:
    """Refuse the facts of a checkpoint that no training has written.

    Raises:
        DamagedError: one is missing or of the wrong type.
    """
    for name in ("servers", "workers", "epoch"):
        checked_count(f"{name} in its facts", facts.get(name))
    checked_count("group_size in its facts", facts.get("group_size", 1))
    for name in IDENTITY[:2]:
        if not isinstance(facts.get(name), str):
            raise DamagedError(f"{name} in its facts is {facts.get(name)!r:.60}, not a text")
    data = facts.get("data", {})  # older checkpoints have none
    if not isinstance(data, Mapping):
        raise DamagedError(f"data in its facts is {data!r:.60}, not what describes a data set")
    checked_count("samples in its facts", data.get("samples", 0), _MOST_SAMPLES)
    columns = data.get("columns", [])
    if not (isinstance(columns, list) and all(isinstance(one, str) for one in columns)):
        raise DamagedError(f"columns in its facts are {columns!r:.60}, not a list of texts")


def check_entries(tree: object, names: Iterable[str]) -> None:
    """Refuse a state without these entries.

    Raises:
        DamagedError: one is missing.
    """
    missing = sorted(set(names) - set(tree)) if isinstance(tree, Mapping) else ["everything"]
    if missing:
        raise DamagedError(f"it has no {', '.join(missing)}")


def check_place_in_data(state: Mapping[str, Any]) -> None:
    """Refuse a position in the samples, of a sampler or a sequence, that none of them returns.

    Raises:
        DamagedError: it is none.
    """
    check_entries(state, ("epoch", "taken"))
    for name in ("epoch", "taken"):
        checked_count(f"{name} of its samples", state[name])
    lease = state.get("lease")
    leases = [*([] if lease is None else [lease]), *(state.get("leases") or [])]
    for one in leases:
        if not isinstance(one, list | tuple) or len(one) != _LEASE:
            raise DamagedError(f"it leases {one!r:.60}")
        for number in one:
            checked_count("a number of a lease", number, 2**53)


def check_team(state: Any) -> None:
    """Refuse the state of a session with impossible counts, or with weights that are NaN.

    Raises:
        DamagedError: there is one.
    """
    waiting = [state]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Mapping):
            for name, value in one.items():
                if name in _COUNTS and isinstance(value, int):
                    checked_count(f"{name} of the training", value, _COUNTS[name])
                elif name in _WEIGHTS and isinstance(value, np.ndarray):
                    check_weights("its weights", [value])
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one


def check_weights(what: str, arrays: Iterable[Any]) -> None:
    """Refuse weights that are NaN: a training would never recover from them.

    Raises:
        DamagedError: one is.
    """
    for array in arrays:
        flat = np.asarray(array).reshape(-1)
        if flat.dtype.kind not in "fc":
            continue
        for start in range(0, flat.size, _BLOCK):
            if np.isnan(flat[start : start + _BLOCK]).any():
                raise DamagedError(f"{what} are NaN")


class _UnusableError(DamagedError):
    """A checkpoint is as it was written, but this training cannot load it.

    Attributes:
        refusal: the message if no other checkpoint can be loaded; empty: name all their problems.
    """

    def __init__(self, problem: str, *, refusal: str) -> None:
        super().__init__(problem)
        self.refusal = refusal


_ANEW = "choose another folder, or delete this one to start anew"


class CheckpointManager:
    """Writes and reads the checkpoints of a run, together with those of the other ranks.

    All ranks must see the folder: each writes its own state, and the rank whose model is the centre begins
    and completes the checkpoint. If one rank fails, the checkpoint is dropped and the training continues.

    Args:
        folder: the run's folder, on a file system that all hosts share.
        team: this rank's session; None: alone.
        state: this rank's state.
        keep: the number of checkpoints to keep, besides the best.
        better: whether lower or higher scores are better.
        suffix: of the files.
        minutes: between two checkpoints; 0: not by time.
        batches: of a worker between two checkpoints; 0: not by batches.

    Attributes:
        interrupts: the signals that ask to save and end.
    """

    def __init__(
        self,
        folder: str | Path,
        team: Session | None,
        state: SavedRank,
        *,
        suffix: str,
        keep: int,
        better: Literal["min", "max"] = "min",
        minutes: float = 0,
        batches: int = 0,
    ) -> None:
        if not is_number(minutes) or not minutes >= 0:
            raise ConfigurationError(
                f"minutes={minutes!r} is not possible: it must be a number of at least 0; 0: not by time"
            )
        self.store = Store(folder, keep=keep, better=better)
        self.interrupts = Interrupts()
        self._team, self._state = team, state
        self._every_s, self._every_batches = 60.0 * minutes, batches
        self._last_s, self._last_batch, self._asked_to_end = time.monotonic(), 0, False
        self._suffix = suffix
        self._file = self._file_of(_saved_as(team))
        group = None if team is None else team.member.group
        # The ranks of a group are one worker: if one has no part, all begin anew.
        self._files = {self._file} if group is None else {*map(self._file_of, group.group.ranks)}
        self._loaded: Path | None = None  # the checkpoint that the training resumes from
        self._loaded_facts: Mapping[str, Any] = {}
        self._anew = ""  # who does not resume there
        self._saving = saving_on(self.store, team, state, self._file)
        if team is not None:
            team.when_taking_over(self._take_over)
        advise(self._advice)
        end_notes_in(self.store.folder)

    @property
    def _role(self) -> str:
        return "alone" if self._team is None else self._team.role

    @property
    def _speaks(self) -> bool:
        return speaks(self._role)

    def _take_over(self) -> None:
        """Save as the dead rank did from now on."""
        former, self._file = self._saving, self._file_of(_saved_as(self._team))
        self._saving = saving_on(self.store, self._team, self._state, self._file)
        self._saving.score = former.score
        self._saving.go_on_from(former)

    # -- writing --------------------------------------------------------------------------------------

    def look_around(self, batch: int = 0, *, possible: bool = True) -> None:
        """Save if a checkpoint is due, and leave if it was the last; call it between two batches.

        Args:
            batch: the number of finished batches of the epoch.
            possible: the state can be saved here.
        """
        self._saving.settle()
        if (possible or self._team is not None) and self._is_time(batch):
            self._last_s, self._last_batch = time.monotonic(), batch
            self._asked_to_end = self.interrupts.came
            self._saving.want(end=self._asked_to_end)
        # Whichever worker asks first, all restart their counts when they have saved together.
        if self._team is not None and possible and self._team.pause_requested and self._save_now():
            self._last_s, self._last_batch = time.monotonic(), batch
        self.leave_if_told()

    def save(self, *, last: bool = False) -> None:
        """Save together with all other ranks; all call it between two batches.

        Args:
            last: the training ends here.
        """
        if self._team is None and self.interrupts.came:
            self._saving.ending = self._asked_to_end = True
        self._save_now(last=last, between=True)
        self._last_s = time.monotonic()

    def score(self, value: float | None) -> None:
        """Set the model's score for the next checkpoint; None: it has none."""
        self._saving.score = value

    def count_batches_from(self, batch: int) -> None:
        """Count this epoch's batches from here."""
        self._last_batch = batch

    def leave_if_told(self) -> None:
        """End the program if the last checkpoint was saved in order to end."""
        self._saving.hear_of_end()
        if self._saving.ending:
            self._state._leave()
            self.finish_alone()
            self.interrupts.__exit__(None, None, None)
            if self._speaks and not self._saving.recalled and not _in_trial():  # the search reports it once
                say(self._role, f"nnlo: a signal ended the training; {self._advice()}")
            raise LeftTogether(recalled=self._saving.recalled)

    def finish(self) -> None:
        """Wait until all ranks have finished their writes; every rank calls it, or leaves."""
        self._saving.finish()

    def finish_alone(self) -> None:
        """Finish local writes without waiting for other ranks."""
        if self._team is None:
            self._saving.finish()
        wait_for_all()

    def _save_now(self, *, last: bool = False, between: bool = False) -> bool:
        with span("checkpoint", "copies"):
            saving = self._saving
            done = saving.save(last=last, between=between)
            if between and not done and self._saving is not saving:  # this rank has begun to serve
                done = self._saving.save(last=last, between=between)
            return done

    def _advice(self) -> str:
        number = self.store.last()
        if not number:
            return f"{self.store.folder} has no checkpoint yet: rerun the same command to start anew"
        return f"rerun the same command to resume from {self.store.path(number)}"

    def _is_time(self, batch: int) -> bool:
        if self.interrupts.came and not self._asked_to_end:
            return True
        by_batches = self._every_batches and batch - self._last_batch >= self._every_batches
        by_time = self._every_s and time.monotonic() - self._last_s >= self._every_s
        return bool(by_batches or by_time)

    # -- reading --------------------------------------------------------------------------------------

    def resume(self) -> Mapping[str, Any] | None:
        """Resume from the newest complete checkpoint (collective).

        Returns:
            The checkpoint's facts; None if there is no checkpoint.

        Raises:
            ConfigurationError: it belongs to another training, or all are damaged; raised on all ranks.
        """
        unusable: dict[int, _UnusableError] = {}
        warnings: list[str] = []
        while True:
            warnings.clear()
            try:
                found = self._agreed(lambda: self._find(unusable, warnings.append if unusable else warn))
                number = max(map(int, found))
            except ConfigurationError:
                first = next(iter(unusable.values()), None)
                if first is None or not first.refusal:
                    raise
                raise _collective(first.refusal) from None  # all are alike, so the script has changed
            if not number:
                return None
            facts: dict[str, Any] = {}
            self._loaded = self.store.path(number)
            try:
                self._agreed(lambda: self._take(number, facts))  # noqa: B023 - called at once
            except _UnusableError as error:
                unusable[number] = error
                continue
            for text in warnings:
                warn(text)
            self._loaded_facts = facts
            return facts

    def compare_data(self, here: Mapping[str, Any]) -> None:
        """Refuse another data set than the loaded checkpoint's, where it is known only after `resume`.

        Args:
            here: the "data" of the facts of this training, empty if unknown.

        Raises:
            ConfigurationError: the number of samples or the columns differ; on all ranks, as all have the
                same data.
        """
        problem = _of_data(self._loaded_facts.get("data") or {}, here)
        if problem:
            raise _collective(str(self._refusal(f"belongs to another training: {problem}")))

    def say_resumed(self, done: int, epochs: int) -> None:
        """Print from where the training resumes, if it does; call it after `resume`.

        Args:
            done: the finished epochs.
            epochs: all of them.
        """
        if self._loaded is None:
            return
        if done >= epochs:
            if _in_trial():  # the search trains on, whatever this training has left
                return
            told = "has the whole training, so nothing is left to train; ask for more epochs to continue it"
            say(self._role, f"nnlo: {self.store.folder} {told}, or choose another folder to start anew")
            return
        say(self._role, f"nnlo: resumes from {self._loaded}, after {done} of {plural(epochs, 'epoch')}")
        if self._anew:
            say(self._role, f"nnlo: {self._loaded} {self._anew}")

    def _take(self, number: int, facts: dict[str, Any]) -> str:
        """Load this rank's part of a checkpoint, and add the checkpoint's facts to `facts`."""
        checkpoint = SavedCheckpoint.open(self.store.path(number), number)
        facts.update(checkpoint.manifest.facts)
        check_facts(facts)
        trains = self._team is not None and not self._team.serves
        anew = self._check(facts) or (trains and not self._files <= checkpoint.manifest.files.keys())
        files = self._files_to_load(checkpoint, anew=anew)
        file, parts = " and ".join(files), [checkpoint.read(one) for one in files]
        try:
            trees = [self._state._unpack(part) for part in parts]
            tree = self._alone(trees[0], trees[-1]) if anew and self._team is None else trees[0]
            self._state._load(tree, facts, anew=anew)
        except ConfigurationError as error:
            raise _UnusableError(f"{file}: {error}", refusal=str(error)) from error
        except DamagedError as error:
            raise DamagedError(f"{file}: {error}") from error
        except NNLOError:
            raise
        except Exception as error:  # a state that is not what was saved can fail anywhere
            told = " ".join(str(error).split())
            raise DamagedError(f"{file} cannot be loaded ({type(error).__name__}: {told:.300})") from error
        self._anew = self._who_starts_anew(checkpoint)
        return ""

    def _files_to_load(self, checkpoint: SavedCheckpoint, *, anew: bool) -> list[str]:
        """Return the names of the files that this rank loads: its own, or those that it takes over."""
        if not checkpoint.manifest.facts["workers"]:
            return [self._file_of(0)]  # the only one
        if not anew or (self._team is not None and self._team.serves):
            return [self._file]
        worker = self._first_worker(checkpoint)
        # Without servers the first rank has the centre and is the first worker.
        return [worker] if self._team is not None else [*dict.fromkeys((self._file_of(0), worker))]

    def _alone(self, center: Mapping[str, Any], worker: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state that a process alone takes over from several ranks."""
        check_team(center["team"])
        return self._state._alone(center, worker, vector=_center_in(center["team"]))

    def load_team(self, tree: Mapping[str, Any], facts: Mapping[str, Any], *, anew: bool) -> None:
        """Load the session's state; call it once the model has its weights.

        Args:
            tree: what holds the session's state as "team".
            facts: those of the checkpoint.
            anew: this rank starts at the centre.
        """
        if self._team is None:
            return
        if tree["team"] is None:
            self._team.load_for_others(None, facts["epoch"])
            return
        check_team(tree["team"])
        if anew:
            self._team.load_for_others(tree["team"], facts["epoch"])
        else:
            self._team.load(tree["team"])

    def _find(self, unusable: Mapping[int, DamagedError], tell: Callable[[str], object]) -> str:
        if not self._speaks:
            return "0"
        wait_for_all()
        hold(self.store.folder)
        newest = self.store.newest({number: str(error) for number, error in unusable.items()}, tell)
        return "0" if newest is None else str(newest.manifest.number)

    def _check(self, saved: Mapping[str, Any]) -> bool:
        """Raise if the checkpoint belongs to another training; return whether the workers have changed."""
        here = self._state._facts()
        one_process = not (saved["workers"] and here["workers"])
        problem = difference({**saved, "servers": here["servers"]} if one_process else saved, here)
        if problem:
            raise self._refusal(f"belongs to another training: {problem}")
        if _sizes(saved) == _sizes(here):
            return False
        reason = ""
        if one_process and any("sub_servers=" in str(one["algorithm"]) for one in (saved, here)):
            reason = "one process has no centres of sub-servers; continue with as many ranks"
        elif one_process:
            servers = max(saved["servers"], here["servers"])
            if servers > 1:
                reason = (
                    f"one process has the whole optimizer, and each of {servers} servers a part of it; "
                    "continue with servers=1"
                )
        elif self._team is not None and here["servers"]:
            reason = self._team.algorithm.tied_to_workers
        if reason:
            raise self._refusal(
                f"{_saved_with(saved, here)}: {reason}",
            )
        return True

    def _file_of(self, rank: int) -> str:
        return f"rank{rank}.{self._suffix}"

    def _first_worker(self, checkpoint: SavedCheckpoint) -> str:
        """Return the file of the first worker with a part in a checkpoint; servers have the lowest ranks."""
        servers, size = checkpoint.manifest.facts["servers"], checkpoint.manifest.facts["workers"]
        parts = (
            re.fullmatch(rf"rank([0-9]{{1,9}})\.{self._suffix}", name) for name in checkpoint.manifest.files
        )
        ranks = [int(part[1]) for part in parts if part is not None]
        trains: Collection[int] = range(servers, servers + size)
        if self._team is not None and self._team.member.sub_servers:  # they have as many ranks as this run
            trains = self._team.member.trains
        first = min((rank for rank in ranks if rank in trains), default=None)
        return self._file if first is None else self._file_of(first)

    def _who_starts_anew(self, checkpoint: SavedCheckpoint) -> str:
        """Return which ranks do not resume where they were; empty: all do."""
        saved = checkpoint.manifest.facts
        if self._team is None:
            here = {"workers": 0, "group_size": 1}
            told = f"{_saved_with(saved, here)}: it starts at the centre, and the epoch restarts"
            return told if saved["workers"] else ""
        member = self._team.member
        here = {"workers": member.share[1], "group_size": member.group_size}
        if _sizes(saved) != _sizes(here):
            return f"{_saved_with(saved, here)}: all workers start at the centre, and the epoch restarts"
        files = checkpoint.manifest.files
        missing = [str(rank) for rank in member.trains if self._file_of(rank) not in files]
        if not missing:
            return ""
        return (
            f"has no part of rank {', '.join(missing)}, which had died or not started: it starts anew at "
            "the centre; the others resume where they were"
        )

    def _agreed(self, what: Callable[[], str]) -> list[str]:
        """Call `what` on all ranks and return all results; if it raises on one, all raise (collective).

        Raises:
            ConfigurationError: on one rank; before any damage on another.
            _UnusableError: the checkpoint is damaged.
        """
        mine = {"found": "0", "problem": "", "damage": "", "refusal": ""}
        try:
            mine["found"] = what()
        except DamagedError as error:
            mine |= {"damage": str(error), "refusal": getattr(error, "refusal", "")}
        except ConfigurationError as error:
            mine["problem"] = str(error)
        if self._team is None:
            everyone = [mine]
        else:
            everyone = [json.loads(text) for text in self._team.world.gather_text(json.dumps(mine))]
        where = [f"rank {rank}: " if self._team is not None else "" for rank in range(len(everyone))]
        for rank, one in enumerate(everyone):
            if one["problem"]:
                raise _collective(where[rank] + one["problem"])
        for rank, one in enumerate(everyone):
            if one["damage"]:
                refusal = one["refusal"] and where[rank] + one["refusal"]
                raise _UnusableError(where[rank] + one["damage"], refusal=refusal)
        return [one["found"] for one in everyone]

    def _refusal(self, found: str) -> ConfigurationError:
        return ConfigurationError(f"the newest checkpoint in {self.store.folder} {found}; {_ANEW}")


def _saved_as(team: Session | None) -> int:
    """Return the rank whose part this rank saves: that of the dead one in whose place it is, if it is."""
    if team is None:
        return 0
    server, worker = team.member.server, team.member.worker
    if worker is not None and stands_by(team.member.role):
        return team.member.trains[worker]
    replaces = team.member.role.startswith(("spare", "worker"))
    return server.shard if server is not None and replaces else team.rank


def _sizes(facts: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the number of ranks that train, and how many make a worker."""
    return facts["workers"], facts.get("group_size", 1)


def _center_in(state: Mapping[str, Any]) -> Vector:
    """Return the centre in the state of the session of a training's only server, or of a rank without one."""
    part = state["part"]
    vector: Vector = part["server"]["rule"]["center"] if "server" in part else part["parameters"]
    return vector


def _saved_with(saved: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Say how many workers a checkpoint and this run have."""
    (there, group_there), (now, group_now) = _sizes(saved), _sizes(here)
    of_run = "is one process" if not now else f"has {_ranks(now, group_now)}"
    if there and now and group_there == group_now == 1:
        of_run = f"has {now}"
    by = f"with {_ranks(there, group_there)}" if there else "by one process"
    return f"was saved {by}, but this run {of_run}"


def _ranks(number: int, group_size: int) -> str:
    return plural(number, "worker") if group_size == 1 else f"{number} ranks in groups of {group_size}"


def _in_trial() -> bool:
    """Return whether this training is part of a search over several ranks."""
    world = launched()
    return world is not None and world.of_trial


def _collective(problem: str) -> ConfigurationError:
    """Return an error that all ranks raise."""
    refusal = ConfigurationError(problem)
    refusal.collective = True
    return refusal
