"""What all wrappers share: a torch optimizer around the user's own that takes part in a training."""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import chain
from typing import Any, ClassVar, TypeVar

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from nnlo_common import ConfigurationError, Report
from nnlo_common._drive import Watch
from nnlo_common._joining import launched
from nnlo_common._roles import say
from nnlo_common._team import Team
from nnlo_common.algorithms import Algorithm
from nnlo_common.transport._endpoint import RankWorld
from nnlo_torch._bridge import Bridge
from nnlo_torch._evaluation import Sums, evaluating, samples_in
from nnlo_torch._modules import modules_of
from nnlo_torch._team import join_team

__all__ = ["Wrapper", "current"]

_REFUSED = {
    "LBFGS": "it evaluates the model several times a step",
    "SparseAdam": "it needs sparse gradients, which are not exchanged",
}
_current: weakref.ref[Wrapper] | None = None
_Batch = TypeVar("_Batch")
_Result = TypeVar("_Result")


def current() -> Wrapper | None:
    """Return the wrapper made last, if it still exists: the training that samplers belong to."""
    return None if _current is None else _current()


class Wrapper(torch.optim.Optimizer):
    """An optimizer around yours; its parameter groups *are* yours, so schedulers set your learning rates.

    Started alone it does exactly what yours does. In a training of several ranks it exchanges with the
    servers in `step`; on a server rank yours steps the centre, if the algorithm says so.

    Copies (`copy.deepcopy`, pickles) are ordinary optimizers that take part in no training.

    Attributes:
        optimizer: yours.
        algorithm: how it is exchanged.
        rank: this rank's number.
        size: how many ranks there are.
        role: "alone", "worker 0", "server 0", ...
        weight: this rank's share in a mean over workers, for the steps from now on.

    Args:
        optimizer: any dense optimizer of `torch.optim`, made but not stepped yet.
        algorithm: the options of the algorithm.
        model: whose parameters these are; None: whatever modules hold them are found. Their buffers, such as
            running statistics, are averaged over the workers.
        servers: how many ranks share the serving of the centre.
        world: the ranks; None: MPI's if a launcher has started this process, else this process alone.
    """

    _step_supports_amp_scaling: ClassVar[bool] = False
    _team: Team | None
    _bridge: Bridge | None
    _model: torch.nn.Module | None
    _found: list[torch.nn.Module] | None

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        algorithm: Algorithm,
        *,
        model: torch.nn.Module | None = None,
        servers: int = 1,
        world: RankWorld | None = None,
    ) -> None:
        _refuse(optimizer, type(self).__name__)
        self._begin(optimizer, algorithm)
        self._model = model
        world = world or launched()
        if world is not None and world.size > 1:
            modules = self._modules()
            self._team, self._bridge = join_team(
                optimizer, algorithm, world, servers=servers, modules=modules
            )
            self.rank, self.size, self.role = world.rank, world.size, self._team.member.role
            if world.own_process:  # the end of the script is the end of the training
                atexit.register(self._leave)
        global _current  # noqa: PLW0603 - samplers find their training by it
        _current = weakref.ref(self)

    def _begin(self, optimizer: torch.optim.Optimizer, algorithm: Algorithm) -> None:
        self._team = self._bridge = None
        super().__init__([{"params": []}], optimizer.defaults)  # yours has checked its groups already
        self.optimizer, self.algorithm = optimizer, algorithm
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        self.rank, self.size, self.role, self.weight = 0, 1, "alone", 1.0
        self._model = self._found = None
        self._stopped = self._agreed = self._looping = self._evaluating = False
        self._steps = self._samples = self._samplers = 0
        self._watch: Watch | None = None
        self._aside: list[Future[Any]] = []

    # -- an ordinary optimizer ------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step with the gradients that lie in the parameters."""
        # The global hooks are called by your optimizer, if it steps here.
        steps_here = self._team is None or self.algorithm.optimizer_runs == "worker"
        before, after = self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks
        args: tuple[Any, ...] = (self,) if closure is None else (self, closure)
        kwargs: dict[str, Any] = {}
        for hook in chain(() if steps_here else _global_optimizer_pre_hooks.values(), before.values()):
            changed = hook(self, args, kwargs)
            if changed is not None:
                if not isinstance(changed, tuple) or len(changed) != 2:
                    raise RuntimeError(
                        f"{type(self).step} must return None or a tuple of (new_args, new_kwargs), "
                        f"but got {changed}."
                    )
                args, kwargs = changed
        result = self._step(*args[1:], **kwargs)
        for hook in chain(after.values(), () if steps_here else _global_optimizer_post_hooks.values()):
            hook(self, args, kwargs)
        return result

    # Keeps torch from wrapping it in hooks of its own, of which the global ones would be called twice.
    step.hooked = True  # type: ignore[attr-defined]

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        self._agreed = False
        if self._team is None:
            self._steps += 1
            if self._watch is not None:
                self._watch.look()
            return self.optimizer.step() if closure is None else self.optimizer.step(closure)
        if self.serves:
            raise ConfigurationError(
                f"rank {self.rank} serves the centre, but its loop has got a batch; give the DataLoader "
                "sampler=nnlo_torch.ShardSampler(dataset), which serves there instead, or loop over "
                "optimizer.epoch(loader)"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._team.step(self.weight, self._change_gradient)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; refused once several ranks have agreed on the model."""
        if self._team is not None:
            raise ConfigurationError(
                f"{type(self).__name__}: parameters were added after wrapping; the ranks have agreed on the "
                "model by then. Give all parameters to the optimizer before you wrap it"
            )
        if hasattr(self, "optimizer"):
            self.optimizer.add_param_group(param_group)
        else:
            super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state = self.optimizer.state_dict()
        for after in self._optimizer_state_dict_post_hooks.values():
            state = after(self, state) or state
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state."""
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        self.optimizer.load_state_dict(state_dict)
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "algorithm": self.algorithm, "weight": self.weight}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._begin(state["optimizer"], state["algorithm"])
        self.weight = state["weight"]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r}, {self.algorithm.describe()}, {self.role})"

    # -- a part in a training -------------------------------------------------------------------------

    @property
    def serves(self) -> bool:
        """Whether this rank serves the centre instead of training."""
        return self._team is not None and self._team.serves

    @property
    def share(self) -> tuple[int, int]:
        """Which of how many workers this rank is; a server is none of them."""
        return (0, 1) if self._team is None else self._team.share

    def epoch(self, batches: Iterable[_Batch]) -> Iterator[_Batch]:
        """Loop over this worker's batches of an epoch; a server serves the epoch and gets none.

        For loaders that have no `ShardSampler`: of an `IterableDataset` with processes of its own, or of
        anything that can be looped over.

        Args:
            batches: what this worker takes; see `ShardIterable`.
        """
        self.begin_epoch()
        if self.serves:
            return
        self._looping = True
        try:
            for batch in batches:
                if self.stopped:
                    break
                self._count(samples_in(batch))
                yield batch
        finally:
            self._looping = False

    def begin_epoch(self) -> None:
        """Begin an epoch: on a server rank serve it to its end; samplers call this."""
        if self._looping:
            return  # `epoch` has begun it
        if self._evaluating and self._team is not None:
            error = ConfigurationError(
                "an epoch was begun inside evaluate(), by the loader that it loops over; give that one "
                "sampler=nnlo_torch.ShardSampler(dataset, evaluation=True)"
            )
            error.collective = True
            raise error
        self._agreed = False
        self._collect_aside(wait=False)
        if self._team is not None:
            self._team.begin_epoch()
            if self.serves:
                self._opt_called = True  # so a scheduler sees that steps were made, though not by `step`

    def take(self, samples: int) -> None:
        """Count samples that this rank has taken; samplers call this."""
        if not self._looping:
            self._count(samples)

    def _count(self, samples: int) -> None:
        self._samples += samples
        if self._team is not None:
            self._team.take(samples)

    @contextmanager
    def center_weights(self) -> Iterator[None]:
        """Let the model have the centre's parameters and buffers for the length of a `with` block.

        On a server rank, and alone, it has them anyway.
        """
        if self._team is None:
            yield
            return
        with self._team.center(when_all_are_there=False):
            yield

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Let the model be the centre at the end of this epoch, in `eval()` mode and without gradients.

        All ranks call it after the same epoch (it waits until all workers have finished that) and see the
        same parameters, while nobody trains. See `evaluate`.
        """
        with evaluating(self._modules()):
            if self._team is None:
                yield
                return
            with self._team.center(when_all_are_there=True):
                self._evaluating = True
                try:
                    yield
                finally:
                    self._evaluating = False

    def evaluate(
        self, measure: Callable[[_Batch], Mapping[str, Any]], batches: Iterable[_Batch]
    ) -> dict[str, float]:
        """Evaluate the centre at the end of an epoch on all ranks together; each returns the same numbers.

        Every rank looks at its share of the samples, and the means over all samples are exact: a batch counts
        by its samples, whatever their number.

        Args:
            measure: returns the means over one batch, by name.
            batches: this rank's; a loader with a `ShardSampler(..., evaluation=True)` has each sample once.

        Returns:
            The means over all samples, by name.

        Example:
            >>> model = torch.nn.Linear(1, 1)
            >>> import nnlo_torch
            >>> optimizer = nnlo_torch.Downpour(torch.optim.SGD(model.parameters(), lr=0.1))
            >>> batches = [torch.tensor([[1.0], [2.0]]), torch.tensor([[6.0]])]
            >>> optimizer.evaluate(lambda x: {"x": x.mean()}, batches)
            {'x': 3.0}
        """
        sums = Sums()
        with self.evaluation():
            for batch in batches:
                sums.add(batch, measure(batch))
        return self.mean(sums.means(), sums.samples)

    def mean(self, values: Mapping[str, Any], weight: float = 1.0) -> dict[str, float]:
        """Return the weighted means of numbers over all ranks, on all ranks; every rank has to call it.

        Args:
            values: this rank's, by name; the same names everywhere.
            weight: how much they count, e.g. the number of samples they are means of.
        """
        numbers = {name: float(value) for name, value in values.items()}
        self._agreed = True
        return numbers if self._team is None else self._team.mean(numbers, float(weight))

    def aside(
        self,
        validate: Callable[[torch.nn.Module], _Result],
        model: torch.nn.Module,
        then: Callable[[_Result], object] | None = None,
    ) -> Future[_Result] | None:
        """Validate a copy of the centre while the training goes on.

        On the rank whose model is the centre this copies the model as it is now and starts `validate(copy)`
        in a thread, which runs while the next epoch is served; alone it validates at once. Other ranks do
        nothing. An error is raised when the next epoch begins.

        Args:
            validate: called with the copy, in `eval()` mode.
            model: the model.
            then: called with the result, in that thread; it may call `stop()`.

        Returns:
            The result that is to come; None where nothing is done.
        """
        from nnlo_torch._aside import start

        if self.role not in ("alone", "server 0"):
            return None
        future = start(validate, model, then, wait=self._team is None)
        self._aside.append(future)
        self._collect_aside(wait=False)
        return future

    def number_sampler(self) -> int:
        """Return the number of one more sampler; the same on all ranks where all use theirs in one order."""
        self._samplers += 1
        return self._samplers

    def ask(self, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """Ask the first server something; samplers do."""
        assert self._team is not None  # nobody asks where there is nobody else
        return self._team.ask(content)

    def before_epoch_ends(self, call: Callable[[], object]) -> None:
        """Have `call` called each time this rank ends an epoch; samplers do."""
        if self._team is not None:
            self._team.before_epoch_ends = call

    def watch(self, call: Callable[[], object], every_s: float = 1.0) -> None:
        """Call something from time to time: where this rank serves, while it does; alone, between steps."""
        if self._team is None:
            self._watch = Watch(call, every_s)
        else:
            self._team.watch(call, every_s)

    def report(self) -> Report:
        """Return what this rank has seen so far."""
        if self._team is None:
            return Report(steps=self._steps, samples=self._samples)
        return self._team.report()

    @property
    def stopped(self) -> bool:
        """Whether training is to end now; samplers yield nothing any more then."""
        return self._stopped or (self._team is not None and self._team.stopped)

    def stop(self) -> None:
        """End the training on all ranks, each at its next exchange.

        Call it on every rank, as in `if accuracy > 0.9: optimizer.stop()`. After `evaluate` all ranks know
        the same numbers, so each stops at once. Else the rank whose model is the centre decides, and calls on
        the others do nothing.
        """
        if self._team is None or self._agreed:
            self._stopped = True
        if self._team is not None:
            self._team.stop()

    def say(self, text: str) -> None:
        """Print `text` once: on the rank whose model is the centre."""
        say(self.role, text)

    def close(self) -> None:
        """Leave in good order; a server serves until all workers have. The end of the script does it too."""
        self._collect_aside(wait=True)
        if self._team is None or self._team.over or self._team.broken:
            return
        self._team.close()
        atexit.unregister(self._leave)

    # -- inside ---------------------------------------------------------------------------------------

    def _leave(self) -> None:
        """At the end of the script; what fails then is reported like any other failure."""
        try:
            self.close()
        except Exception as error:  # atexit would only print it, and the other ranks would wait
            sys.excepthook(type(error), error, error.__traceback__)

    def _change_gradient(self) -> None:
        """What a wrapper does to the collected gradient."""

    def _modules(self) -> list[torch.nn.Module]:
        """The modules that hold the parameters; looked for once, which takes a tenth of a second."""
        if self._model is not None:
            return [self._model]
        if self._found is None:
            self._found = modules_of(tensor for group in self.param_groups for tensor in group["params"])
        return self._found

    def _collect_aside(self, *, wait: bool) -> None:
        for future in list(self._aside):
            if wait or future.done():
                self._aside.remove(future)
                future.result()


def _refuse(optimizer: torch.optim.Optimizer, wrapper: str) -> None:
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(
            f"{wrapper} wraps a torch optimizer, not a {name}; pass e.g. torch.optim.SGD(...)"
        )
    if isinstance(optimizer, Wrapper):
        raise ConfigurationError(f"{wrapper} cannot wrap another wrapper, {name}; wrap the inner one alone")
    if name in _REFUSED:
        raise ConfigurationError(f"{wrapper} cannot wrap {name}: {_REFUSED[name]}; use another optimizer")
