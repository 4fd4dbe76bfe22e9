"""Checkpoints of an ordinary torch loop; a training resumes in mid-epoch."""

from __future__ import annotations

import io
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch

import nnlo_common
from nnlo_common import ConfigurationError
from nnlo_common.plugin import (
    CheckpointManager,
    DamagedError,
    Vector,
    check_entries,
    check_place_in_data,
    check_stored,
    check_weights,
    checked_count,
    random_numbers,
    whole_number,
)
from nnlo_torch._evaluation import samples_in
from nnlo_torch._flat_model import layout_of, named_parameters
from nnlo_torch._hdf5 import Batches
from nnlo_torch._joint import collective
from nnlo_torch._report import Report
from nnlo_torch._sampler import ShardSampler
from nnlo_torch._team import kinds_of
from nnlo_torch._training_of import group_fact
from nnlo_torch._wrapper import Wrapper, wrapper_given

__all__ = [
    "Checkpoint",
    "check_random",
    "load_modules",
    "load_random",
    "load_vector",
    "model_fact",
    "packed",
    "random_states",
    "saved_modules",
    "unpacked",
]

# -- snapshot of one rank's modules and random states, converted to bytes and back ---------------------

_ARRAY = "an array of numpy"


def packed(tree: Mapping[str, Any]) -> bytes:
    """Serialize a tree of numbers, strings, tensors and arrays with `torch.save`.

    Raises:
        ConfigurationError: something else is in it, which could not be read again without running code.
    """
    return _saved(_without_arrays(tree, ""))


def unpacked(data: bytes) -> dict[str, Any]:
    """Deserialize the tree that `packed` returned; it cannot run code.

    Raises:
        ConfigurationError: the bytes are not such a tree.
    """
    try:
        check_stored(data)
        found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        tree: dict[str, Any] = dict(_with_arrays(found))
    except Exception as error:  # torch raises errors of many types for bytes that it has not written
        raise ConfigurationError(
            f"a saved state cannot be read and is probably damaged; use another checkpoint ({error})"
        ) from error
    return tree


def saved_modules(modules: Sequence[torch.nn.Module], *, parameters: bool) -> list[dict[str, Any]]:
    """Return the state of modules, with or without their parameters."""
    states = []
    for module in modules:
        left_out = (
            set() if parameters else {name for name, _ in module.named_parameters(remove_duplicate=False)}
        )
        states.append({name: value for name, value in module.state_dict().items() if name not in left_out})
    return states


def load_modules(modules: Sequence[torch.nn.Module], states: Sequence[Mapping[str, Any]]) -> None:
    """Load what `saved_modules` returned."""
    if len(modules) != len(states):
        raise ConfigurationError(
            f"{len(states)} modules were saved, but {len(modules)} hold the optimizer's parameters now; pass "
            "model= to the wrapper to choose one"
        )
    for module, state in zip(modules, states, strict=True):
        module.load_state_dict(dict(state), strict=False)


def random_states() -> dict[str, Any]:
    """Return the states of all random generators that a script may use."""
    return {
        **random_numbers.random_states(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def load_random(states: Mapping[str, Any]) -> None:
    """Restore the random generators' states."""
    random_numbers.load_random(states)
    torch.set_rng_state(states["torch"])
    if states["cuda"] and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])


def check_random(states: Mapping[str, Any]) -> None:
    """Refuse states that the generators cannot have; change none.

    Raises:
        ValueError: there is one.
        TypeError: there is one.
        RuntimeError: there is one.
    """
    random_numbers.check_random(states)
    torch.Generator().set_state(states["torch"])
    if not all(isinstance(state, torch.Tensor) for state in states["cuda"]):
        raise TypeError("the states of the CUDA generators are no tensors")


def model_fact(optimizers: Sequence[torch.optim.Optimizer], modules: Sequence[torch.nn.Module]) -> str:
    """Return the names, shapes and types of the parameters of optimizers, for comparison."""
    return layout_of(_parameters(optimizers, modules)).to_json()


def load_vector(
    optimizers: Sequence[torch.optim.Optimizer], modules: Sequence[torch.nn.Module], vector: Vector
) -> None:
    """Copy a flat vector of several ranks into the parameters of optimizers."""
    named = _parameters(optimizers, modules)
    flat = torch.from_numpy(vector)
    with torch.no_grad():
        for (_, tensor), segment in zip(named, layout_of(named).segments, strict=True):
            tensor.copy_(flat[segment.place].view(segment.shape))


def _parameters(
    optimizers: Sequence[torch.optim.Optimizer], modules: Sequence[torch.nn.Module]
) -> list[tuple[str, torch.Tensor]]:
    return [pair for one in optimizers for pair in named_parameters(one, modules)]


# What any `torch.load` takes without being told, besides lists, tuples and dictionaries of it.
_PLAIN = (type(None), bool, int, float, str, torch.Tensor, torch.nn.Parameter, torch.Size)
# Dictionaries that keep their type; another kind becomes a plain one.
_DICTIONARIES = (OrderedDict, Counter)


def _without_arrays(value: Any, place: str) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return {_ARRAY: torch.from_numpy(value.copy())}
    if isinstance(value, np.generic):
        return value.item()
    if kind in (list, tuple):
        return kind(_without_arrays(item, f"{place}[{number}]") for number, item in enumerate(value))
    if isinstance(value, Mapping):
        make = kind if kind in _DICTIONARIES else dict
        found = {
            _without_arrays(key, f"a key of {place}"): _without_arrays(
                item, f"{place}[{key!r}]" if place else str(key)
            )
            for key, item in value.items()
        }
        return found if make is dict else make(found)
    try:  # the script may have told torch which of its types are safe
        torch.load(io.BytesIO(_saved(value)), weights_only=True)
    except Exception as error:  # pickle and torch raise errors of many types
        raise ConfigurationError(
            f"{place} is a {kind.__name__}, which a checkpoint cannot save and read again without "
            "running code; use numbers, strings, lists, dictionaries, tensors or arrays of numbers"
        ) from error
    return value


def _saved(tree: Any) -> bytes:
    file = io.BytesIO()
    torch.save(tree, file)
    return file.getvalue()


def _with_arrays(value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(_with_arrays(item) for item in value)
    if type(value) not in (dict, *_DICTIONARIES):
        return value
    if value.keys() == {_ARRAY}:
        return value[_ARRAY].numpy()
    return type(value)({key: _with_arrays(item) for key, item in value.items()})


_Batch = TypeVar("_Batch")
_END = object()
_STOPS = "optimizer.stop(), which all ranks must call"
_MOST = 2**53  # samples and steps
_OF_WRAPPER = ("optimizer", "local", "counts")
_ENTRIES = ("team", "modules", "also", "sampler", "random", "position", *_OF_WRAPPER)


class Checkpoint:
    """Saves a training inside its loop; rerun the same command to resume from the newest checkpoint.

    A checkpoint holds everything that each rank needs to resume exactly: the centre and its optimizer, each
    worker's weights, optimizer and counts, buffers, the sampler's position, all random states, and the
    objects in `also`. It is written whole or not at all; a damaged one is reported, and the previous one is
    used. With one process, one worker, or `Synchronous`, an interrupted training ends with the same bits as
    an uninterrupted one.

    All ranks must see the folder. On SIGTERM or SIGUSR1 all ranks save together at a batch boundary and exit
    with status 75; rerun the same command to resume.

    The folder also gets the facts of the training, for `nnlo report FOLDER`, if you make no `Report`.

    Args:
        folder: the run's folder; created if missing.
        optimizer: the wrapper; if the training has several, as that of a GAN, a list of them all.
        also: other objects to save, by name: a scheduler, a `GradScaler`, an `EarlyStopping`.
        epochs: epochs between two checkpoints; 0: none at the end of epochs.
        batches: batches of the first worker between two checkpoints; 0: none inside epochs.
        minutes: minutes between two checkpoints; 0: not by time.
        keep: number of newest checkpoints to keep, besides the best (see `score`).
        better: whether lower or higher scores are better.
        report: write down the facts of the training, unless there is a `Report`.

    Attributes:
        still_ends: returns whether a training that was stopped would be stopped again; `nnlo train` sets it.

    Example:
        >>> import tempfile
        >>> import nnlo_torch
        >>> def train(folder):
        ...     model = torch.nn.Linear(1, 1)
        ...     optimizer = nnlo_torch.Downpour(torch.optim.SGD(model.parameters(), lr=0.1))
        ...     checkpoint = Checkpoint(folder, optimizer)
        ...     data = torch.ones(4, 1)
        ...     loader = torch.utils.data.DataLoader(data, sampler=nnlo_torch.ShardSampler(data))
        ...     seen = []
        ...     for epoch in checkpoint.epochs(3):
        ...         for x in checkpoint.batches(loader):
        ...             optimizer.zero_grad()
        ...             model(x).sum().backward()
        ...             optimizer.step()
        ...         seen.append(epoch)
        ...     return seen
        >>> with tempfile.TemporaryDirectory() as folder:  # doctest: +ELLIPSIS
        ...     train(folder), train(folder)
        nnlo: ... has the whole training, so nothing is left to train; ask for more epochs to continue it, ...
        ([0, 1, 2], [])
    """

    def __init__(
        self,
        folder: str | Path,
        optimizer: Wrapper | Sequence[Wrapper],
        *,
        also: Mapping[str, Any] | None = None,
        epochs: int = 1,
        batches: int = 0,
        minutes: float = 0,
        keep: int = 3,
        better: Literal["min", "max"] = "min",
        report: bool = True,
    ) -> None:
        self._wrappers = _all_of_training(optimizer)
        self._optimizer = self._wrappers[0]
        self._optimizer._settle("Checkpoint")
        self._team, self._also = self._optimizer._team, dict(also or {})
        for name, one in self._also.items():
            if not (hasattr(one, "load_state_dict") or hasattr(one, "load")):
                raise ConfigurationError(
                    f"also[{name!r}] is a {type(one).__name__}, which has neither load_state_dict nor load; "
                    "pass an object that has one of them"
                )
        self._reports = report
        self._report: Report | None = None  # once batches begin
        self._every_epochs = whole_number("epochs", epochs, 0)
        self._manager = CheckpointManager(
            folder,
            self._team,
            self,
            suffix="pt",
            keep=keep,
            better=better,
            minutes=minutes,
            batches=whole_number("batches", batches, 0),
        )
        self._epoch = self._batch = self._samples = 0  # finished epochs; batches, samples done of the next
        self._count = self._stopped_of = 0  # epochs that are asked for; those of the loaded, stopped training
        self.still_ends: Callable[[], bool] = lambda: True
        self._inside = self._begun = False  # within an epoch; its sampler has started
        self._was_inside = False  # the loaded checkpoint was saved within an epoch
        self._sampler: ShardSampler | Batches | None = None
        self._ahead = False  # the loader prefetches
        self._per_batch = 1  # elements of the sampler in a batch, except the last; 0: the batch tells
        self._first_epoch: int | None = None  # set on resuming with another number of workers
        self._saved: Mapping[str, Any] | None = None  # loaded state, applied when batches begin
        self._random_began: dict[str, Any] | None = None  # random states at the begin of the epoch

    def epochs(self, count: int) -> Iterator[int]:
        """Loop over epochs, beginning with that of the newest checkpoint; call it on all ranks.

        A training that was stopped by `optimizer.stop()` is over, unless `count` is larger than it was then.

        Args:
            count: total number of epochs.

        Raises:
            ConfigurationError: the folder belongs to another training, or no checkpoint in it is whole.
        """
        whole_number("epochs", count, 0)
        with self._manager.interrupts:
            self._manager.resume()
            self._count, over = count, self._stopped_of >= count and self.still_ends()
            self._manager.say_resumed(count if over else self._epoch, count)
            packed({"also": self._also_states()})  # refuses what cannot be saved before it would be
            if self._epoch or self._batch:
                for call in self._optimizer._joint.at_loading:
                    call(self._epoch)
            if self._team is not None and (over or self._epoch >= count):
                self._team.start()  # each of several servers has loaded its own part of the centre only
            try:
                while self._epoch < count and not (over or self._optimizer.stopped):
                    yield self._epoch
                    self._end_epoch(last=self._all_stop or self._epoch + 1 == count)
                self._meet_after_stop()
            except GeneratorExit:  # the loop was left, perhaps by an error
                if self._all_stop or (self._optimizer.serves and self._optimizer.stopped):
                    self._end_epoch(last=self._all_stop)
                    self._meet_after_stop()
                self._manager.finish_alone()
                raise
            self._manager.finish()

    def batches(self, loader: Iterable[_Batch]) -> Iterator[_Batch]:
        """Loop over this rank's batches of an epoch, from the newest checkpoint's position.

        Args:
            loader: `Batches`, or a `DataLoader` with a `ShardSampler`. With any other loader, resuming in
                mid-epoch reads and drops the first batches.
        """
        self._find_sampler(loader)
        if self._sampler is not None:
            self._manager.compare_data(self._sampler._described())
        self._begin_report()
        if self._team is not None and not self._team.serves:
            self._team.end_epoch()  # the previous epoch: its end is known only now
        self._inside, self._begun = True, False
        saved, self._saved = self._saved, None
        if self._sampler is not None:
            if saved is not None:
                self._sampler.load_state_dict(saved["sampler"])
            elif self._first_epoch is not None:
                self._sampler.set_epoch(self._first_epoch)
        self._first_epoch = None
        if self._sampler is None:  # the loader may draw its order
            if saved is not None and self._was_inside and saved.get("began") is not None:
                load_random(saved["began"])
            self._random_began = random_states()
        iterator = iter(loader)
        if saved is not None:
            if self._sampler is None:
                self._begun = True
                with self._optimizer._joint.skipping():
                    list(islice(iterator, self._batch))
            if self._was_inside:
                load_random(saved["random"])  # after the loader has drawn its seed
        while True:
            self._manager.look_around(self._batch)
            self._begun = True
            self._manager.score(None)  # it was that of the model before what follows
            batch: Any = next(iterator, _END)
            if batch is _END:
                self._manager.leave_if_told()
                return
            yield batch
            self._batch += 1
            self._samples += self._per_batch or samples_in(batch)

    @property
    def batch(self) -> int:
        """The number of batches that this rank has done in the epoch so far, also before it was resumed."""
        return self._batch

    def score(self, value: float) -> None:
        """Score the model as it is now, so that the best checkpoint is kept; call it on all ranks."""
        self._manager.score(float(value))
        self._optimizer._joint.told({"score": float(value)})

    @property
    def _all_stop(self) -> bool:
        """Whether all ranks end the training after this epoch."""
        return self._optimizer._stopping and not self._optimizer._joint.over

    # -- saving ---------------------------------------------------------------------------------------

    _pack, _unpack = staticmethod(packed), staticmethod(unpacked)

    def _begin_report(self) -> None:
        """Begin to write facts, unless the script does; it may do so until the first batch."""
        if self._reports and not self._optimizer._joint.reported:
            self._report = Report(self._optimizer, self._manager.store.folder, initial_epoch=self._epoch)

    def _end_epoch(self, *, last: bool) -> None:
        if self._report is not None:
            self._report.epoch()
        self._epoch, self._batch, self._samples = self._epoch + 1, 0, 0
        self._inside = self._begun = False
        self._manager.count_batches_from(0)
        due = bool(self._every_epochs) and self._epoch % self._every_epochs == 0
        if self._every_epochs and (last or due):
            if self._all_stop and not due and self._epoch < self._count and self._team is not None:
                self._team.mean({_STOPS: 1.0}, 1.0)  # fails where a rank trains on, which would save nothing
            if self._team is not None:
                self._team.end_epoch()
            self._manager.save(last=last or self._optimizer.stopped)

    def _meet_after_stop(self) -> None:
        """Save with all ranks where some heard in an earlier epoch than others that the server has stopped.

        Without a step they go to the end of the next epoch in which all save.
        """
        if not self._optimizer.stopped or self._optimizer._stopping or not self._every_epochs:
            return
        skipped = min(-self._epoch % self._every_epochs, self._count - self._epoch)
        if not skipped:
            return  # all have saved
        if self._sampler is not None:
            begun = isinstance(self._sampler, ShardSampler) and self._sampler._running
            self._sampler.set_epoch(self._sampler.epoch + begun + skipped)
        for _ in range(skipped):
            self._optimizer.begin_epoch()
        self._epoch += skipped
        if self._team is not None:
            self._team.end_epoch()
        self._manager.save(last=True)

    def _collect(self) -> dict[str, Any]:
        team = self._team
        first, *others = map(self._of_wrapper, self._wrappers)
        return {
            "team": None if team is None else team.state(),
            "modules": saved_modules(self._modules(), parameters=team is None),
            **first,
            **({"others": others} if others else {}),
            "also": self._also_states(),
            "sampler": None if self._sampler is None else self._sampler_state(self._sampler),
            "random": random_states(),
            "began": self._random_began if self._inside else None,
            "position": [self._epoch, self._batch, self._samples, self._inside],
        }

    def _also_states(self) -> dict[str, Any]:
        return {name: _state(one) for name, one in self._also.items()}

    def _of_wrapper(self, one: Wrapper) -> dict[str, Any]:
        with_center = one.serves and one.algorithm.optimizer_runs == "center"
        return {
            "optimizer": None if with_center else one.optimizer.state_dict(),
            "local": None if one.local is None else one.local.state_dict(),
            "counts": [one._steps, one._step_weights.received, one._epochs_begun],
        }

    def _modules(self) -> list[torch.nn.Module]:
        """Return the modules of all wrappers; a process alone finds those of each by itself."""
        return list({id(part): part for one in self._wrappers for part in one._modules()}.values())

    def _sampler_state(self, sampler: ShardSampler | Batches) -> dict[str, Any]:
        if isinstance(sampler, Batches):
            return self._batches_state(sampler)
        ahead = self._ahead and self._inside and self._begun and not self._optimizer.serves
        state = sampler.state_dict(taken=self._samples if ahead else None)
        if self._inside and self._begun and state["epoch"] != sampler.epoch:
            # The share is used up but the epoch has not ended; a server has no share.
            state["epoch"] = sampler.epoch
            state["taken"] = 0 if self._optimizer.serves else sampler._share_size()
        elif sampler._running and not (self._inside and self._begun):
            state["epoch"], state["taken"], state["again"] = (
                sampler.epoch + 1,
                0,
                0,
            )  # the sampler counts up when it restarts
        return state

    def _batches_state(self, batches: Batches) -> dict[str, Any]:
        state = batches.state_dict()
        if not (self._inside and self._begun):
            state["epoch"], state["taken"], state["again"] = batches.epoch, 0, 0
        elif state["epoch"] == batches.epoch:
            # All batches are used up but the epoch has not ended; a server has no batches.
            state["epoch"] = batches.epoch - 1
            state["taken"] = 0 if self._optimizer.serves else len(batches)
        return state

    def _facts(self) -> dict[str, Any]:
        member = None if self._team is None else self._team.member
        return {
            "algorithm": self._optimizer.algorithm.describe(),
            "optimizer": " and ".join(kinds_of(one.optimizer, one.local) for one in self._wrappers),
            "servers": 0 if member is None else member.servers,
            "workers": 0 if member is None else member.share[1],
            **group_fact(self._optimizer),
            "model": model_fact(self._wrappers, self._modules())
            if self._team is None
            else self._team.model.parameters.layout.to_json(),
            "data": {} if self._sampler is None else self._sampler._described(),
            "epoch": self._epoch,
            "batch": self._batch,
            "stopped": self._count if self._optimizer.stopped else 0,
            "versions": {"nnlo": nnlo_common.__version__, "torch": torch.__version__},
        }

    # -- resuming -------------------------------------------------------------------------------------

    def _alone(
        self, center: Mapping[str, Any], worker: Mapping[str, Any], *, vector: Vector
    ) -> dict[str, Any]:
        """Return the state that a process alone loads from a training of several ranks."""
        for tree in (center, worker):
            check_entries(tree, _ENTRIES)
        stepped = [center, *center.get("others", [])]
        kept = [worker, *worker.get("others", [])]
        if any(one["optimizer"] is None for one in stepped):  # they step the centre
            on_center = center["team"]["part"]["server"]["rule"]["optimizer"]
            states = [on_center["torch"], *on_center.get("others", [])]
        else:
            states = [one["optimizer"] for one in kept]
        parts = [
            {**{name: one[name] for name in _OF_WRAPPER}, "optimizer": state}
            for one, state in zip(kept, states, strict=True)
        ]
        return {**center, **parts[0], "others": parts[1:], "vector": vector}

    def _load(self, tree: Mapping[str, Any], facts: Mapping[str, Any], *, anew: bool) -> None:
        """Load the state; `anew`: restart the epoch, with another worker's except its weights."""
        self._check(tree, facts, anew=anew)
        load_modules(self._modules(), tree["modules"])
        if "vector" in tree:
            load_vector(self._wrappers, self._modules(), tree["vector"])
        saved = [tree, *tree.get("others", [])]
        for one, state in zip(self._wrappers, saved, strict=True):
            if state["optimizer"] is not None:
                one.load_state_dict(state["optimizer"])
            if one.local is not None:
                one.local.load_state_dict(state["local"])
        self._manager.load_team(tree, facts, anew=anew)
        for one in self._wrappers:  # loading has replaced the inner optimizer's groups and state
            one.param_groups, one.state = one.optimizer.param_groups, one.optimizer.state
        self._load_also(tree["also"])
        self._stopped_of = facts.get("stopped", 0)
        if anew:
            self._epoch = self._first_epoch = facts["epoch"]
            return
        self._epoch, self._batch, self._samples, self._was_inside = tree["position"]
        if not self._was_inside:
            load_random(tree["random"])
        self._manager.count_batches_from(self._batch)
        for one, state in zip(self._wrappers, saved, strict=True):
            one._steps, received, one._epochs_begun = state["counts"]
            one._step_weights.go_on_from(received)
        self._saved = tree

    def _check(self, tree: Mapping[str, Any], facts: Mapping[str, Any], *, anew: bool) -> None:
        """Refuse a state that no training can have, before any of it is loaded."""
        check_entries(tree, _ENTRIES)
        checked_count("the last epoch in its facts", facts.get("stopped", 0))  # older ones have none
        others = tree.get("others", [])
        if not isinstance(others, list) or len(others) != len(self._wrappers) - 1:
            raise DamagedError(f"its facts name {len(self._wrappers)} optimizers, but it has others")
        saved = [tree, *others]
        for other in saved[1:]:
            check_entries(other, _OF_WRAPPER)
        for module, state in zip(self._modules(), tree["modules"], strict=False):
            weights = (state[name] for name, _ in module.named_parameters() if name in state)
            check_weights("its weights", (one.float().numpy() for one in weights if one.is_floating_point()))
        epoch, batch, samples, inside = tree["position"]
        position = {"epoch": checked_count("its epoch", epoch), "batch": checked_count("its batch", batch)}
        checked_count("its samples", samples, _MOST)
        if not isinstance(inside, bool) or (position["batch"] and not inside):
            raise DamagedError(f"its position is {list(tree['position'])!r:.100}")
        if self._team is None and not anew and position != {name: facts.get(name) for name in position}:
            raise DamagedError(f"its position is {position}, but the manifest's is another")
        for count in (count for one in saved for count in one["counts"]):
            checked_count("a count of its optimizer", count, _MOST)
        if tree["sampler"] is not None:
            check_place_in_data(tree["sampler"])
        if not anew:
            check_random(tree["random"])
            if tree.get("began") is not None:
                check_random(tree["began"])

    def _load_also(self, states: Mapping[str, Any]) -> None:
        if states.keys() != self._also.keys():
            raise ConfigurationError(
                f"also={sorted(self._also)} was given, but the checkpoint has {sorted(states)}; "
                "pass the same names"
            )
        for name, one in self._also.items():
            load = getattr(one, "load_state_dict", None) or one.load
            load(states[name])

    def _leave(self) -> None:
        for one in self._wrappers:
            one.close()

    def _find_sampler(self, loader: object) -> None:
        """Find the sampler or `Batches` behind a loader: it knows its position."""
        for one in (loader, getattr(loader, "dataset", None)):
            if isinstance(one, Batches):
                self._sampler, self._ahead = one, False
                return
        for name in ("batch_sampler", "sampler"):
            sampler = getattr(loader, name, None)
            if isinstance(sampler, ShardSampler):
                self._sampler = sampler
        self._ahead = bool(getattr(loader, "num_workers", 0))
        self._per_batch = int(not self._ahead)
        if isinstance(loader, torch.utils.data.DataLoader):
            self._per_batch = loader.batch_size or 1  # None: the sampler yields batches, or there are none


def _all_of_training(given: object) -> list[Wrapper]:
    """Return the wrappers of a training in the order in which they were made; refuse some of them."""
    several = given if isinstance(given, Iterable) else [given]
    wrappers = [wrapper_given(one, "Checkpoint") for one in several]
    members: list[Wrapper] = wrappers[0]._joint.members if wrappers else []
    if not wrappers or (members and {*map(id, wrappers)} != {*map(id, members)}):
        raise collective(
            f"Checkpoint was given {len(wrappers)} wrappers, but this training has {len(members) or 1}; give "
            "it a list of all wrappers of the training: nnlo_torch.Checkpoint(folder, [first, second])"
        )
    return list(members or wrappers)


def _state(one: Any) -> Any:
    return one.state_dict() if hasattr(one, "state_dict") else one.state()
