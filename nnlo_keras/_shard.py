"""Sharding of training data: this rank's share."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Unpack

import keras

from nnlo_common import ConfigurationError
from nnlo_common.plugin import (
    RankWorld,
    Roles,
    Session,
    all_same,
    as_values,
    checked_roles,
    explain,
    launched,
    mark_of,
    planned,
    share,
    speaks,
    warn,
)
from nnlo_keras._compat import arguments_of_fit, parts_of_dataset, steps_of_dataset
from nnlo_keras._hdf5 import Batches

__all__ = ["VALIDATE", "another_share", "can_be_another_share", "described_data", "shard", "warn_of_data"]

# -- data that a script gives to `fit`: warnings if all workers have the same, or every rank splits it.

#: The lines to write instead of `validation_split=`.
VALIDATE = (
    "set samples apart before you share the others out: "
    "fit(*nnlo_keras.shard(x[:n], y[:n]), validation_data=(x[n:], y[n:]), ...)"
)


def warn_of_data(team: Session) -> None:
    """Warn, once and on one rank, of data that all workers have, and of a split on each rank (collective).

    Args:
        team: this rank's session; it has joined and not started.
    """
    given = arguments_of_fit()
    mark = 0 if team.serves else _mark(given.get("x"), given.get("y"))
    seen = team.agree(as_values(mark), weight=0.0 if team.serves else 1.0)
    if not speaks(team.role):
        return
    workers = team.share[1]
    if workers > 1 and all_same(seen):
        warn(
            f"fit() was given the same data on all {workers} workers, so each trains on all samples, and an "
            f"epoch has each {workers} times; give each worker its share: fit(*nnlo_keras.shard(x, y), ...)"
        )
    validates = "a server" if team.member.servers else "the first rank"
    if split := given.get("validation_split"):
        warn(
            f"validation_split={split}: every rank sets its own samples apart, but only {validates} "
            f"validates, with its own; {VALIDATE}"
        )


def _mark(*data: Any) -> int:
    """Return a number that is the same for the same data; 0: its contents cannot be seen."""
    if any(isinstance(one, Batches) for one in data):
        return 0  # it shares itself out
    return mark_of(*data, parts=parts_of_dataset, on_host=_on_host)


def _on_host(rows: Any) -> Any:
    return keras.ops.convert_to_numpy(rows) if keras.ops.is_tensor(rows) else rows


def shard(
    *data: Any,
    world: RankWorld | None = None,
    **roles: Unpack[Roles],
) -> Any:
    """Return this rank's share of the training data; every sample goes to exactly one worker.

    Worker w of p gets every p-th item, beginning with the w-th. Items are

    * the samples of arrays and tensors, without a copy where the framework can, and of lists, tuples and
      dictionaries of them;
    * the elements of a `tf.data.Dataset`: shard it before you shuffle and batch it;
    * the samples of a torch `Dataset`: make the `DataLoader` from the returned subset;
    * the batches of a `PyDataset`.

    Items are dealt out to a group of k ranks as to one worker with batches k times as large. A rank that has
    a batch less than the others repeats one, which has no weight; of a `tf.data.Dataset` whose end is unknown
    up to k - 1 items are left out instead.

    A server gets only the first item, from which its `fit` learns shapes and types. So does a spare, whose
    `fit` goes on with the share of a dead worker once it takes that one's place. In a process alone the data
    is returned unchanged.

    Args:
        data: arrays of equal length, lists or dictionaries of them, or one data set.
        world: the ranks; None: MPI's if a launcher has started this process, else this process alone.
        roles: options of the wrapper that decide which rank does what, as `servers` and `group_size`.

    Example:
        >>> shard([1, 2, 3])
        [1, 2, 3]
    """
    world, shared = world or launched(), data
    part = None
    if world is not None and world.size > 1:
        part = _Part.of(world, checked_roles("shard()", roles))
        if part.serves:  # Keras cannot split its one sample, and says so before it calls any callback
            explain("validation_split", f"a server has one sample of shard(), to show its shape; {VALIDATE}")
        _check_lengths(data)
        shared = tuple(_part(one, part) for one in data)
    for whole, own in zip(data, shared, strict=True):
        _note(whole, own, part)
    return shared[0] if len(shared) == 1 else shared


class _Share(NamedTuple):
    """What is known of a share.

    Attributes:
        reference: the share.
        samples: how many the whole has; None: that is unknown, or it has batches.
        again: on a spare: takes the share, and returns another one of the whole: the same object if that can
            change. It must not hold the share.
    """

    reference: weakref.ref[Any]
    samples: int | None
    again: Callable[[Any, _Part], Any] | None


# By the id of a share, which is used again once its object is gone.
_shares: dict[int, _Share] = {}


def _note(whole: Any, own: Any, part: _Part | None) -> None:
    """Remember what a share is of."""
    if _is_structure(whole):
        for one, share_of_it in zip(keras.tree.flatten(whole), keras.tree.flatten(own), strict=True):
            _note(one, share_of_it, part)
        return
    sampled = _is_array(whole) or (_is_torch(whole, "Dataset") and hasattr(whole, "__len__"))
    again = _taking_again(whole) if part is not None and part.spare else None
    if sampled or again is not None:
        _remember(own, _length(whole) if sampled else None, again)


def _remember(own: Any, samples: int | None, again: Callable[[Any, _Part], Any] | None) -> None:
    key = id(own)
    with suppress(TypeError):  # it takes no weak reference
        _shares[key] = _Share(weakref.ref(own, lambda _: _shares.pop(key, None)), samples, again)


def _known(own: Any) -> _Share | None:
    found = _shares.get(id(own))
    return found if found is not None and found.reference() is own else None


def described_data() -> dict[str, Any]:
    """Return what a checkpoint compares of the data of the running `fit`; empty if it is not of `shard`."""
    given = arguments_of_fit().get("x")
    for one in keras.tree.flatten(getattr(given, "dataset", given)):
        found = _known(one)
        if found is not None and found.samples is not None:
            return {"samples": found.samples}
    return {}


def _check_lengths(data: tuple[Any, ...]) -> None:
    leaves = [
        leaf for one in data if _is_array(one) or _is_structure(one) for leaf in keras.tree.flatten(one)
    ]
    lengths = [_length(leaf) for leaf in leaves if _is_array(leaf)]
    if len(set(lengths)) > 1:
        raise ConfigurationError(f"shard() got arrays of {lengths} samples; give arrays of equal length")


def _is_array(data: Any) -> bool:
    return bool(getattr(data, "shape", ()))


def _is_structure(data: Any) -> bool:
    """Return whether this is a structure of arrays, not a list of samples."""
    return isinstance(data, dict | list | tuple) and any(map(_is_array, keras.tree.flatten(data)))


def _length(data: Any) -> int:
    return int(data.shape[0]) if _is_array(data) else len(data)  # sparse matrices have no len()


@dataclass(frozen=True)
class _Part:
    """Part of the data that a rank takes.

    Attributes:
        index: its number among the ranks that train; 0 on a server.
        ranks: their number.
        group_size: how many of them are one worker.
        serves: whether the rank serves instead.
        spare: whether it may train in the place of a dead worker later.
    """

    index: int
    ranks: int
    group_size: int
    serves: bool
    spare: bool = False

    @classmethod
    def of(cls, world: RankWorld, roles: Roles) -> _Part:
        """Return the part of a rank."""
        topology = planned(world, roles)
        assignment, cell = topology.assignment(world.rank), topology.cells[0]
        ranks, size = sum(map(len, cell.groups)), len(cell.groups[0])
        if assignment.worker is None:
            trains = assignment.spare is not None and cell.spares_may_train
            return cls(0, ranks, size, serves=True, spare=trains)
        # As the core's `Member.share`: the ranks of a group come as far apart as they can.
        return cls(assignment.worker + ranks // size * (assignment.member or 0), ranks, size, serves=False)

    def positions(self, size: int) -> range:
        """Return the positions of this part's items among so many."""
        return (
            range(min(1, size))
            if self.serves
            else share(size, self.index, self.ranks, group_size=self.group_size)
        )

    def slice(self, size: int) -> slice:
        """Return these positions as a slice."""
        positions = self.positions(size)
        return slice(positions.start, positions.stop, positions.step)


def _check_enough(count: int, workers: int, what: str) -> None:
    if count < workers:
        idle = f"worker {count}" if count == workers - 1 else f"workers {count} to {workers - 1}"
        error = ConfigurationError(
            f"shard() cannot divide {count} {what} among {workers} workers: {idle} would get none, and "
            "Keras cannot fit without data; start fewer workers"
        )
        error.collective = True  # all ranks are given the same data
        raise error


def _part(data: Any, part: _Part) -> Any:
    if data is None:  # no targets, or no weights
        return None
    if _is_structure(data):
        return keras.tree.map_structure(lambda leaf: _part(leaf, part), data)
    if isinstance(data, Batches):
        raise ConfigurationError(
            "shard() cannot divide Batches, which already holds only this rank's share; pass it to "
            "fit() directly"
        )
    if isinstance(data, keras.utils.PyDataset):
        if data.num_batches is not None:
            _check_enough(data.num_batches, part.ranks, "batches")
        return _EveryNth(data, part)
    if _is_tensorflow(data):
        return _SpareElements().of(data) if part.spare else _elements(data, part)
    if _is_torch(data, "DataLoader"):
        raise ConfigurationError(
            "shard() cannot divide a DataLoader, whose sampler is fixed; divide the data set that it loads: "
            "DataLoader(nnlo_keras.shard(dataset), ...)"
        )
    if _is_torch(data, "Dataset") and hasattr(data, "__len__"):
        from torch.utils.data import Subset

        _check_enough(len(data), part.ranks, "samples")
        return Subset(data, part.positions(len(data)))
    if hasattr(data, "__getitem__") and (_is_array(data) or hasattr(data, "__len__")):
        _check_enough(_length(data), part.ranks, "samples")
        return data[part.slice(_length(data))]
    raise ConfigurationError(
        f"shard() cannot divide a {type(data).__name__}; pass arrays, a tf.data.Dataset, a PyDataset or a "
        "torch Dataset with a length, or give each rank its own share yourself"
    )


def _is_tensorflow(data: Any) -> bool:
    """Return whether an object is a `tf.data.Dataset`; TensorFlow need not be installed."""
    return type(data).__module__.startswith("tensorflow.") and hasattr(data, "shard")


def _is_torch(data: Any, name: str) -> bool:
    """Return whether an object is of this class of torch.utils.data; torch need not be installed."""
    module = sys.modules.get("torch.utils.data")
    return module is not None and isinstance(data, getattr(module, name))


def _elements(data: Any, part: _Part) -> Any:
    """Return this rank's elements of a `tf.data.Dataset`."""
    if part.serves:
        return data.take(1)
    if part.group_size == 1:
        return data.shard(part.ranks, part.index)
    size = int(data.cardinality())
    if size >= 0:
        return data.shard(part.ranks, part.index).take(len(part.positions(size)))
    # Its end is unknown. It ends, on all ranks of the group, with the first that has no element left.
    groups = part.ranks // part.group_size
    ours = [data.shard(part.ranks, part.index % groups + groups * one) for one in range(part.group_size)]
    member = part.index // groups
    return type(data).zip(tuple(ours)).map(lambda *elements: elements[member])


class _EveryNth(keras.utils.PyDataset):
    """Every p-th batch of another PyDataset."""

    def __init__(self, data: Any, part: _Part) -> None:
        super().__init__(
            workers=data.workers,
            use_multiprocessing=data.use_multiprocessing,
            max_queue_size=data.max_queue_size,
        )
        self._data, self._part = data, part

    def take(self, part: _Part) -> _EveryNth:
        """Be another share from now on."""
        self._part = part
        return self

    def __len__(self) -> int:
        total = self._data.num_batches
        if total is None:
            raise ConfigurationError(
                "shard() got a PyDataset without a length; define its num_batches or __len__"
            )
        return len(self._part.positions(total))

    def __getitem__(self, index: int) -> Any:
        return self._data[self._part.index + index * self._part.ranks]

    def on_epoch_begin(self) -> None:
        self._data.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._data.on_epoch_end()


# -- spares: `fit` begins with one sample, and may go on with the share of a dead worker ----------------

# Steps of a `tf.data` pipeline that go on with what they have had before.
_KEEPING = ("Cache", "Snapshot")


def can_be_another_share(data: Any) -> bool:
    """Return whether `another_share` knows what an argument of `fit` is a share of."""
    if data is None:
        return True
    if _is_tensorflow(data):
        steps = steps_of_dataset(data, _known)
        kept = any(type(one).__name__.lstrip("_").startswith(_KEEPING) for one in steps)
        return not kept and any(map(_known, steps))
    if _is_torch(data, "DataLoader"):  # workers that live on have their own copies of it
        return not data.persistent_workers and can_be_another_share(data.dataset)
    found = [_known(one) for one in keras.tree.flatten(data) if one is not None]
    return bool(found) and all(one is not None and one.again is not None for one in found)


def another_share(data: Any, worker: int, workers: int) -> Any:
    """Return the share of a worker in place of a spare's, for an argument of `fit`."""
    part = _Part(worker, workers, 1, serves=False)

    def again(own: Any) -> Any:
        found = _known(own)
        return own if found is None or found.again is None else found.again(own, part)

    if data is None:
        return None
    if _is_tensorflow(data):
        for one in steps_of_dataset(data, _known):
            again(one)
        return data
    if _is_torch(data, "DataLoader"):
        again(data.dataset)
        return data
    return keras.tree.map_structure(again, data)


def _taking_again(whole: Any) -> Callable[[Any, _Part], Any] | None:
    """Return what takes another part of data in place of a spare's; None: that cannot be, or is known."""
    if _is_array(whole):
        return lambda _, part: _part(whole, part)
    if isinstance(whole, keras.utils.PyDataset):
        return _EveryNth.take
    return _take_indices if _is_torch(whole, "Dataset") else None


def _take_indices(own: Any, part: _Part) -> Any:
    own.indices = part.positions(len(own.dataset))
    return own


class _SpareElements:
    """The elements of a `tf.data.Dataset` on a spare: the first, and perhaps those of a worker later.

    A user's pipeline of shuffles and batches goes on from them, so they change by themselves.
    """

    def __init__(self) -> None:
        import tensorflow as tf

        with tf.device("CPU"):
            self._index, self._step, self._end = (
                tf.Variable(number, trainable=False, dtype=tf.int64) for number in (0, 1, 1)
            )

    def of(self, data: Any) -> Any:
        """Return the elements."""
        own = (
            data.enumerate()
            .take_while(lambda index, _: index < self._end)
            .filter(lambda index, _: index % self._step == self._index)
            .map(lambda _, element: element)
        )
        _remember(own, None, self._take)
        return own

    def _take(self, own: Any, part: _Part) -> Any:
        self._index.assign(part.index)
        self._step.assign(part.ranks)
        self._end.assign(self._end.dtype.max)
        return own
