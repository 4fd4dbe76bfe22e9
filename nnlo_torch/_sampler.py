"""ShardSampler: gives each worker its share of the data, and lets a server rank serve."""

from __future__ import annotations

import ast
import inspect
import sysconfig
import textwrap
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence, Sized
from types import CodeType, FrameType
from typing import Any, Literal

import numpy as np
import torch

from nnlo_common import ConfigurationError
from nnlo_common.plugin import (
    MOST_PASSES,
    Lease,
    LedgerClient,
    SampledData,
    check_assignment,
    check_position,
    epoch_order,
    lacks_one,
    random_numbers,
    share,
    speaks,
    warn,
    whole_number,
)
from nnlo_torch._participation import Participation
from nnlo_torch._step_weights import Again
from nnlo_torch._training_of import can_lease, group_fact, member_of, training_of
from nnlo_torch._wrapper import Wrapper

__all__ = ["ShardSampler", "warn_of_partial_sums"]

# -- sums over a worker's part divided by the size of the whole data set: a warning, from the loop's
# source.

_OURS = {"nnlo_common", "nnlo_torch", "torch"}
_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("purelib", "platlib", "stdlib"))
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_MISSING = object()


#: The functions that were looked at, for each sampler.
_known: weakref.WeakKeyDictionary[Any, set[CodeType]] = weakref.WeakKeyDictionary()


def warn_of_partial_sums(sampler: object) -> None:
    """Warn if a function that loops over a sampler's loader divides by the length of the loader's data set.

    It reads the sources of the functions on the call stack, each once, and runs no code of theirs.

    Args:
        sampler: the sampler, which begins an epoch.
    """
    known = _known.setdefault(sampler, set())
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code not in known:
            known.add(frame.f_code)
            if _is_of_script(frame):
                _look_at(frame, sampler)
        frame = frame.f_back


def _look_at(frame: FrameType, sampler: object) -> None:
    code = frame.f_code
    for loader, line in _divisions(_tree_of(frame)):
        if _is_fed_by(_value_of(loader, frame), sampler):
            name = ast.unparse(loader)
            warn(
                f"{code.co_filename}:{code.co_firstlineno + line - 1} divides by len({name}.dataset), but "
                f"the loop over {name} gets only this worker's part of the data set, so a sum over it is "
                "divided by the size of the whole; write "
                'optimizer.mean({"loss": total / max(count, 1)}, count)["loss"] after the loop, with the sum '
                "and the number of the samples that the loop has had"
            )


def _is_of_script(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package not in _OURS and not frame.f_code.co_filename.startswith(_INSTALLED)


def _tree_of(frame: FrameType) -> ast.AST:
    """Return the syntax of a function, or of a module; nothing if there is no source."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(frame)))
    except (OSError, TypeError, SyntaxError, ValueError, IndexError, RecursionError):
        return ast.Module(body=[], type_ignores=[])


def _divisions(tree: ast.AST) -> Iterator[tuple[ast.expr, int]]:
    """Yield the divisions by `len(X.dataset)`, or by a name for it: X, and the line."""
    nodes = [*_of_one_scope(tree)]
    named: dict[str, list[ast.expr | None]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    named.setdefault(target.id, []).append(_owner_of(node.value))
    for node in nodes:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            divisor = node.right
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
            divisor = node.value
        else:
            continue
        owners = named.get(divisor.id, []) if isinstance(divisor, ast.Name) else [_owner_of(divisor)]
        if len(owners) == 1 and owners[0] is not None:
            yield owners[0], divisor.lineno


def _of_one_scope(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function, or of a module, without those of the functions inside."""
    body = getattr(tree, "body", [])
    whole_function = len(body) == 1 and isinstance(body[0], _SCOPES)
    waiting = [*ast.iter_child_nodes(body[0] if whole_function else tree)]
    while waiting:
        node = waiting.pop(0)
        yield node
        if not isinstance(node, _SCOPES):
            waiting += ast.iter_child_nodes(node)


def _owner_of(value: ast.expr) -> ast.expr | None:
    """Return X of `len(X.dataset)`."""
    if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "len"):
        return None
    measured = value.args[0] if len(value.args) == 1 else None
    return measured.value if isinstance(measured, ast.Attribute) and measured.attr == "dataset" else None


def _value_of(name: ast.expr, frame: FrameType) -> Any:
    """Return the value of a name, or of an attribute of one, without running any code."""
    if isinstance(name, ast.Name):
        return frame.f_locals.get(name.id, frame.f_globals.get(name.id, _MISSING))
    if isinstance(name, ast.Attribute):
        return inspect.getattr_static(_value_of(name.value, frame), name.attr, _MISSING)
    return _MISSING


def _is_fed_by(loader: Any, sampler: object) -> bool:
    if not isinstance(loader, torch.utils.data.DataLoader):
        return False
    of_batches = vars(loader).get("batch_sampler")
    within = inspect.getattr_static(of_batches, "sampler", None)
    return any(one is sampler for one in (vars(loader).get("sampler"), of_batches, within))


_drawing = threading.Lock()  # all threads share torch's random state


class ShardSampler(torch.utils.data.Sampler[Any]):
    """Divides each epoch among the workers: every sample exactly once, for any number of samples.

    It neither repeats samples to fill a share nor drops any. The order is a permutation of the whole data set
    that depends only on the seed and the epoch, so it is the same for any number of workers.

    The ranks of a group make equally many steps. Where some have a batch more than the others, these get a
    sample again in a batch of its own, which has no weight. If the sampler does not know what makes a batch,
    because no `DataLoader` runs it, or if the loader has `drop_last=True`, up to k - 1 samples of a group of
    k are left out instead, others in each epoch; so they are of each pass of leases, where progress ends an
    epoch.

    On a server rank iterating serves the epoch and yields nothing.

    Args:
        data_source: the data set; or another sampler whose elements to divide, e.g. a weighted sampler, or a
            batch sampler for `DataLoader(batch_sampler=...)`. It must draw from the random state of torch,
            NumPy or Python, which nnlo seeds equally on all ranks; a `set_epoch` that it has is called.
        shuffle: permute the samples anew in each epoch.
        seed: seed of the permutations; equal on all ranks.
        assignment: "static": worker w of p takes every p-th sample, beginning with the w-th; shares differ by
            at most one. "auto": "dynamic" where an epoch takes as many passes as its progress asks for (see
            `Steady`), so that no worker's samples are used more often than another's; else "static".
            "dynamic": workers lease ranges from the server as they need them: a slow worker gets fewer, all
            finish at about the same time, and a dead worker's leases go to the others. The same as "static"
            with servers=0, where all ranks are one worker.
        unit: lease sizes are multiples of it, in a group for each rank.
        evaluation: divide the samples among all ranks, servers included, for `optimizer.evaluate`; begins no
            epoch.
        optimizer: the wrapper of this training; None: the one made last.

    Example:
        >>> sampler = ShardSampler(range(5), shuffle=False)
        >>> list(sampler), len(sampler)
        ([0, 1, 2, 3, 4], 5)
    """

    def __init__(
        self,
        data_source: Sized,
        *,
        shuffle: bool | None = None,
        seed: int = 0,
        assignment: Literal["auto", "static", "dynamic"] = "auto",
        unit: int = 32,
        evaluation: bool = False,
        optimizer: Wrapper | None = None,
    ) -> None:
        self._inner = data_source if isinstance(data_source, torch.utils.data.Sampler) else None
        if self._inner is not None and shuffle:
            raise ConfigurationError(
                f"shuffle=True was given with a {type(data_source).__name__}, which defines its own order; "
                "leave shuffle out"
            )
        if not isinstance(data_source, Sized):
            raise ConfigurationError(
                f"ShardSampler got an object of type {type(data_source).__name__}, which has no length; "
                "give it the data set of the loader, and for a stream use nnlo_torch.ShardIterable(stream)"
            )
        _refuse_dealing(self._inner)
        check_assignment("static" if assignment == "auto" else assignment, trained_on=not evaluation)
        self._shuffle = not evaluation if shuffle is None else shuffle
        self._source, self._seed, self._unit = data_source, seed, whole_number("unit", unit, 1)
        self._assignment, self._evaluation, self._optimizer = assignment, evaluation, optimizer
        self._size = len(data_source)
        self._in_pass = self._size if self._inner is None else None  # samples: elements may be batches
        self._rest: list[int] | None = None  # remainder of a resumed lease, with its epoch
        self._lease: list[int] = []
        self._taken = 0  # samples taken of this epoch's share
        self._again = 0  # passes of this epoch that are over
        self._running = False  # whether `epoch` has begun
        self._even = True  # whether the ranks of a group get equally many samples, as the last loop did
        self._number: int | None = None  # names this sampler's ledger
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch; each loop increments it."""
        self.epoch, self._taken, self._running, self._rest, self._again = epoch, 0, False, None, 0

    def __iter__(self) -> Iterator[Any]:
        training = self._training()
        if self._evaluation:
            elements = self._elements(self.epoch)
            positions = share(len(elements), training.rank, training.size)
            yield from (elements[position] for position in positions)
            return
        if self._running:
            self.set_epoch(self.epoch + 1)
        self._running = True
        self._name(training)
        if training.size > 1 and speaks(training.role):
            warn_of_partial_sums(self)
        training.begin_epoch()
        if training.serves:
            return
        leases = self._leases(training)
        if leases:
            training.before_epoch_ends(self._give_back)
        with training.draws() as draws:
            size = draws.batch_size(self) if training.group_size > 1 and not training.looping else None
            self._even, take = size is None, training.taking(draws)
            for element in self._leased(training, size) if leases else self._dealt(training, size):
                if isinstance(element, Again):
                    take(0)
                    yield element.element
                    continue
                take(_samples_in(element))
                self._taken += 1
                yield element

    def __len__(self) -> int:
        """Return the number of samples that this rank takes in an epoch; an estimate with leases.

        A server takes none and returns the first worker's number, for schedulers that are made from it. Where
        progress ends an epoch it is that of one process: schedules by batch follow progress then.
        """
        training = self._training()
        if training.counts_progress and not self._evaluation:
            return self._size
        if self._evaluation:
            return len(share(self._size, training.rank, training.size))
        worker, workers = training.share
        first = max(worker, 0) % (workers // training.group_size)  # a group makes as many steps as its first
        return len(share(self._size, first, workers)) - (0 if self._running else self._taken)

    def state_dict(self, taken: int | None = None) -> dict[str, Any]:
        """Return this rank's position in its epoch, for `load_state_dict` on the same rank.

        Args:
            taken: how many samples of this epoch the loop has used; None: as many as were handed out. Pass it
                for a loader with worker processes (`num_workers`): these are ahead of the loop.
        """
        training = self._training()
        state: dict[str, Any] = {**self._settings(), "epoch": self.epoch, "taken": 0, "lease": None}
        if self._leases(training):
            self._name(training)
            if taken is not None:
                raise ConfigurationError(
                    f"taken={taken!r} with assignment='dynamic': the server's ledger counts all samples "
                    "handed out, used or not; use num_workers=0 or assignment='static' to resume in mid-epoch"
                )
            state["again"] = self._again
            if training.role == "server 0":
                state["ledger"] = self._ledger(training).state()
            elif self._rest is not None or self._lease:
                state["lease"] = list(self._lease if self._rest is None else self._rest)
        elif self._running or self._taken:
            state["taken"] = self._taken if taken is None else whole_number("taken", taken, 0)
            if state["taken"] >= self._share_size() and not training.counts_progress:
                state["taken"], state["epoch"] = 0, self.epoch + 1
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where `state_dict` was called, in mid-epoch; call it on all ranks, before the next epoch."""
        check_position(state, self._settings(), "ShardSampler")
        training = self._training()
        self.set_epoch(state["epoch"])
        self._taken, self._again = state["taken"], state.get("again", 0)
        self._rest = None if state["lease"] is None else list(state["lease"])
        self._name(training)
        if can_lease(training) and "ledger" in state:
            self._ledger(training).load(state["ledger"])

    # -- inside ---------------------------------------------------------------------------------------

    def _described(self) -> dict[str, Any]:
        """Return what a checkpoint compares of the data set, on any number of workers.

        Another sampler may yield batches, of which there are more or fewer where each is smaller or larger.
        """
        return {"samples": self._size} if self._inner is None else {}

    def _leases(self, training: Participation) -> bool:
        """Return whether workers lease the samples; a process alone leases nothing."""
        return self._dealing(training) == "dynamic" and can_lease(training)

    def _dealing(self, training: Participation) -> str:
        """Return the assignment: "static" or "dynamic"."""
        if self._assignment != "auto":
            return self._assignment
        return "dynamic" if training.counts_progress else "static"

    def _dealt(self, training: Participation, batch: int | None) -> Iterator[Any]:
        """Yield this rank's share; `batch` elements are one for the loop, if that is known."""
        before, done, count, lacks = 0, self._taken, 0, False
        even: dict[str, Any] = {"group_size": training.group_size, "even": batch is None}
        if training.counts_progress:
            before, done = divmod(self._taken, max(self._share_size(), 1))
        for number in training.passes(self.epoch, self._samples, before):
            elements = self._elements(number)
            over = training.ending(self._samples())
            for position in share(len(elements), *training.share, done=done, **even):
                if over():
                    return
                yield elements[position]
                count += 1
            if training.ended:
                return
            lacks = lacks_one(len(elements), *training.share, training.group_size)
            done = 0
        fills = batch is not None and count % batch == 0 and not training.counts_progress
        if fills and lacks and not training.ended:
            yield Again(elements[-1])

    def _leased(self, training: Participation, batch: int | None) -> Iterator[Any]:
        lease = self._resumed(training)
        for number in training.passes(self.epoch, self._samples, self._again, shared=True):
            yield from self._leased_in(training, number, lease, batch)
            lease, self._again = None, self._again + 1

    def _leased_in(
        self, training: Participation, number: int, lease: Lease | None, batch: int | None
    ) -> Iterator[Any]:
        """Yield what this rank leases of a pass, beginning with a lease that it has."""
        orders: dict[int, list[Any]] = {}
        member, group_size = member_of(training)
        count, leasable = 0, self._size // group_size
        last = False  # whether this group has had the last of what can be leased, and gets what is left over
        while True:
            if lease is None:
                self._lease = []
                lease = self._ledger(training).take(number)
            if lease is None:
                break
            epoch, start, stop = lease.epoch, lease.start, lease.stop
            if epoch not in orders:
                orders[epoch] = self._elements(epoch)
                self._check_length(orders[epoch])
            elements, over = orders[epoch], training.ending(self._samples())
            for position in range(start, stop):
                self._lease = [epoch, position, stop]
                if over():
                    self._give_back()
                    return
                self._lease[1] += 1
                yield elements[position * group_size + member]
                count += 1
            last = last or (epoch == number and stop == leasable)
            lease = None
        if batch is None or not last or training.counts_progress or training.ended:
            return
        left = orders[number][leasable * group_size :]
        if member < len(left):
            yield left[member]
        elif left and count % batch == 0:
            yield Again(left[-1])

    def _resumed(self, training: Participation) -> Lease | None:
        """Return the rest of the lease held when this rank was saved, unless it was given back since."""
        rest, self._rest = self._rest, None
        if rest is None:
            return None
        held, lease = self._ledger(training).held(), Lease(*rest)
        return lease if held and (held[-1].epoch, held[-1].stop) == (lease.epoch, lease.stop) else None

    def _give_back(self) -> None:
        """Return the unused rest of a lease to the server, after the loop was left early."""
        lease, self._lease = self._lease, []
        if lease:
            self._ledger(self._training()).give_back(lease[2] - lease[1])

    def _ledger(self, training: Participation) -> LedgerClient:
        order, group_size = f"seed {self._seed}, shuffled {self._shuffle}", training.group_size
        # A leased position is one sample of each rank of a group.
        size, several = self._size // group_size, training.counts_progress
        data = SampledData(self._name(training), size, self._unit, order, several)
        return LedgerClient(training.ask, data)

    def _name(self, training: Participation) -> str:
        """Return the name of this sampler's ledger; each ledger has its own count of epochs."""
        if self._number is None and self._leases(training):
            self._number = training.number_sampler()
        return f"sampler {self._number}"

    def _settings(self) -> dict[str, Any]:
        return {
            "size": self._size,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "assignment": self._dealing(self._training()),
            "workers": self._training().share[1],
            **group_fact(self._training()),
        }

    def _share_size(self) -> int:
        worker, workers = self._training().share
        group_size, even = self._training().group_size, self._even
        return 0 if worker < 0 else len(share(self._size, worker, workers, group_size=group_size, even=even))

    def _training(self) -> Participation:
        return training_of(self._optimizer, "a ShardSampler")

    def _elements(self, epoch: int) -> list[Any]:
        """Return all elements of an epoch in order; the same on all ranks."""
        if self._inner is None:
            return epoch_order(self._size, seed=self._seed, epoch=epoch, shuffle=self._shuffle)
        training = self._training()
        if training.size > 1:
            _refuse_own_generator(self._inner)
        for one in _within(self._inner):
            if callable(set_epoch := getattr(one, "set_epoch", None)):
                set_epoch(epoch // MOST_PASSES if training.counts_progress else epoch)
        number = 1_000_003 * self._seed + epoch
        with _drawing, torch.random.fork_rng(devices=[]):
            # torch.manual_seed would seed the GPUs, too.
            torch.default_generator.manual_seed(number % 2**63)
            states = random_numbers.random_states()
            random_numbers.seed_random(number % 2**32)
            try:
                elements = list(self._inner)
            finally:
                random_numbers.load_random(states)
        self._in_pass = sum(map(_samples_in, elements))
        return elements

    def _samples(self) -> int:
        """Return the number of samples in a pass."""
        if self._in_pass is None:  # other workers have leased all of the first pass
            self._elements(self.epoch)
        return self._in_pass or 0

    def _check_length(self, elements: list[Any]) -> None:
        """Refuse to lease elements of which there are more or fewer than the server deals out."""
        if len(elements) != self._size:
            name = type(self._source).__name__
            raise ConfigurationError(
                f"{name} has yielded {len(elements)} elements, but its length was {self._size} when "
                "ShardSampler was made of it, and workers lease so many; let both agree in every epoch, or "
                "use assignment='static'"
            )


def _samples_in(element: Any) -> int:
    """Return the number of samples behind an element: those of a batch, else one."""
    if isinstance(element, torch.Tensor | np.ndarray):
        return len(element) if element.ndim else 1
    return len(element) if isinstance(element, Sequence) and not isinstance(element, str | bytes) else 1


def _within(sampler: Any) -> Iterator[Any]:
    """Yield a sampler and those that it draws from."""
    while sampler is not None:
        yield sampler
        sampler = getattr(sampler, "sampler", None)


def _refuse_own_generator(sampler: Any) -> None:
    """Refuse a sampler whose elements could differ between ranks."""
    for one in _within(sampler):
        if getattr(one, "generator", None) is not None:
            raise ConfigurationError(
                f"{type(one).__name__} has a generator of its own, so each rank would get a different "
                "order; leave generator= out: nnlo seeds torch's random state equally on all ranks"
            )


def _refuse_dealing(sampler: Any) -> None:
    """Refuse a sampler that yields a share: workers would get shares of that."""
    for one in _within(sampler):
        if isinstance(one, torch.utils.data.DistributedSampler) and one.num_replicas > 1:
            raise ConfigurationError(
                f"{type(one).__name__} deals samples to {one.num_replicas} replicas by itself; give "
                "ShardSampler the data set, which it deals to the workers"
            )
