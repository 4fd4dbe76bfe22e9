"""Base of all wrappers: a torch optimizer around the user's own that takes part in a training."""

from __future__ import annotations

import math
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch

from nnlo_common import ConfigurationError
from nnlo_common.plugin import (
    AS_YOURS,
    Algorithm,
    GradientsAhead,
    RankOptions,
    RankWorld,
    WrapperBase,
    explain,
    is_number,
    launched,
    names_rank,
    path_of,
    readable,
    warn,
)
from nnlo_torch._compat import global_hooks, hooks_of, stepped, watch_saves, without_hooks
from nnlo_torch._hand_changes import HandChanges, renormed
from nnlo_torch._joint import JointTraining, joint_training
from nnlo_torch._participation import Participation
from nnlo_torch._schedules import follow_progress
from nnlo_torch._step_weights import checked_weight
from nnlo_torch._stretches import own_momentum, refuse_options
from nnlo_torch._team import join_team

__all__ = [
    "Wrapper",
    "current",
    "explain_missing_variables",
    "local_of",
    "momentum_of",
    "refuse",
    "warn_of_saves",
    "wrapper_given",
]

# -- advice on errors of Python and PyTorch that a script meets when it begins to run on several ranks.

explain(
    "sampler option is mutually exclusive with shuffle",
    "the sampler shuffles: leave shuffle out of the DataLoader; ShardSampler(data) draws a new order in each "
    "epoch, ShardSampler(data, shuffle=False) does not",
)
explain(
    "Error initializing torch.distributed using env://",
    "nnlo starts by mpiexec or srun and needs no torch.distributed: remove init_process_group, "
    "DistributedDataParallel and DistributedSampler; nnlo_torch.Synchronous(optimizer, servers=0) and "
    "nnlo_torch.ShardSampler(data) take their place",
)
_SKIPPED = (
    "a server skips the body of the loop over batches; if the variable is set there only, set it before the "
    "loop, too, or use optimizer.mean({'loss': ...}, samples), which all ranks get"
)


def explain_missing_variables() -> None:
    """Explain variables that do not exist on this rank, because it is a server."""
    for words in ("' is not defined", "where it is not associated with a value"):
        explain(words, _SKIPPED)


# -- files that a script writes by `torch.save` on a worker: a warning, as other ranks write the same
# file.

#: Packages that choose the rank that saves.
_CHOOSING = {
    "accelerate",
    "lightning",
    "lightning_fabric",
    "nnlo_common",
    "nnlo_torch",
    "pytorch_lightning",
    "torch",
    "transformers",
}


def warn_of_saves(joint: JointTraining, *, own_process: bool) -> Callable[[], None]:
    """Warn once if the script saves a file by `torch.save` on the first worker while the training is open.

    Args:
        joint: the training; it has joined.
        own_process: whether this rank is a process, and not a thread beside other ranks.

    Returns:
        A function that ends this.
    """
    team = joint.team
    if team is None or team.share[0] != 0:
        return lambda: None
    # A thread's number may be used again, and neither reference must keep its object.
    training, thread = weakref.ref(joint), None if own_process else weakref.ref(threading.current_thread())
    rank, said = team.rank, threading.Event()

    def look(file: Any, module: str) -> None:
        of_others = thread is not None and thread() is not threading.current_thread()
        if said.is_set() or of_others or module.partition(".")[0] in _CHOOSING:
            return
        open_still, path = training(), path_of(file)
        if open_still is None or open_still.over or path is None or names_rank(path, rank):
            return
        said.set()
        warn(
            f"rank {rank} writes {path} by torch.save, but it is a worker: it saves its own weights, not the "
            "centre, and all other ranks that run this line write the same file; write "
            'optimizer.save(model.state_dict(), "model.pt"), which saves the centre once'
        )

    forget = watch_saves(look)
    weakref.finalize(joint, forget)  # a training that has failed is never closed
    return forget


# -- requirements of the wrappers on the optimizers they wrap; refuses those that do not meet them -----

_REFUSED = {
    "LBFGS": "it evaluates the model several times per step",
    "SparseAdam": "it needs sparse gradients, which cannot be exchanged",
}


def refuse(optimizer: object, wrapper: str) -> None:
    """Refuse an object that a training of several ranks cannot step."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(
            f"{wrapper} wraps a torch optimizer, not a {name}; pass e.g. torch.optim.SGD(...)"
        )
    if isinstance(optimizer, Participation):
        raise ConfigurationError(f"{wrapper} cannot wrap another wrapper, {name}; wrap the inner one alone")
    if name in _REFUSED:
        raise ConfigurationError(f"{wrapper} cannot wrap {name}: {_REFUSED[name]}; use another optimizer")


def local_of(
    local: object, optimizer: torch.optim.Optimizer, wrapper: str
) -> tuple[float, torch.optim.Optimizer | None]:
    """Return the learning rate of local steps, or 0, and the optimizer that makes them, or None.

    Raises:
        ConfigurationError: `local` is neither, or an optimizer over other parameters.
    """
    if local is None:
        return 0.0, None
    if local == AS_YOURS:
        return float(optimizer.param_groups[0]["lr"]), None
    if is_number(local) and 0 <= local < math.inf:
        return float(local), None
    if not isinstance(local, torch.optim.Optimizer):
        raise ConfigurationError(
            f"{wrapper}: local={local!r} is not possible: it must be a learning rate, a torch optimizer over "
            "the same parameters, or None"
        )
    refuse(local, f"{wrapper}: local=")
    own, given = ({id(tensor) for tensor in _parameters(one)} for one in (local, optimizer))
    if own != given:
        raise ConfigurationError(
            f"{wrapper}: the optimizer in local= has {len(own - given)} parameters that yours does not have, "
            f"and lacks {len(given - own)} of yours; make both from the same parameters"
        )
    # It is never stepped on a server or in a process alone; keep schedulers from warning of that.
    stepped(local)
    return 0.0, local


def momentum_of(optimizer: torch.optim.Optimizer, wrapper: str, *, nesterov: bool) -> float:
    """Return the momentum of an SGD whose groups all share one; refuse everything else."""
    groups = getattr(optimizer, "param_groups", [])
    momenta = {group.get("momentum") for group in groups}
    extras = [
        name
        for name in ("nesterov", "dampening", "weight_decay", "maximize")
        if any(group.get(name) for group in groups) and not (nesterov and name == "nesterov")
    ]
    lacking = nesterov and not all(group.get("nesterov") for group in groups)
    if not isinstance(optimizer, torch.optim.SGD) or len(momenta) != 1 or extras or lacking:
        kind = "nesterov=True and " if nesterov else ""
        found = f"{type(optimizer).__name__} with momenta {sorted(map(str, momenta))}"
        raise ConfigurationError(
            f"{wrapper} needs a torch.optim.SGD with {kind}one momentum for all groups and nothing else; "
            f"it got {found}{' without nesterov' if lacking else ''}"
            + (f" and {', '.join(extras)}" if extras else "")
        )
    return float(momenta.pop() or 0.0)


def wrapper_given(given: object, name: str) -> Wrapper:
    """Return the wrapper that something was given; refuse everything else.

    Args:
        given: what the user has passed.
        name: what needs a wrapper.
    """
    if isinstance(given, Wrapper):
        return given
    raise ConfigurationError(
        f"{name} needs a wrapper of this training, but was given an object of type {type(given).__name__}; "
        "wrap your optimizer, e.g. optimizer = nnlo_torch.Downpour(torch.optim.Adam(...)), and pass that"
    )


def _call(method: weakref.WeakMethod[Callable[[], object]], role: str) -> None:  # noqa: ARG001
    """Call a method of a wrapper that is still there: the training outlives its wrappers."""
    if (there := method()) is not None:
        there()


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]


_current: weakref.ref[Wrapper] | None = None


def current() -> Wrapper | None:
    """Return the wrapper made last, if it still exists; samplers find their training by it."""
    return None if _current is None else _current()


class Wrapper(WrapperBase, Participation, torch.optim.Optimizer):
    """An optimizer around yours; its parameter groups *are* yours, so schedulers set your learning rates.

    In a process alone it does exactly what yours does. In a training of several ranks, `step` exchanges with
    the servers; on a server rank your optimizer steps the centre if the algorithm says so.

    Copies (`copy.deepcopy`, pickles) are ordinary optimizers that take part in no training.

    Attributes:
        optimizer: yours.
        algorithm: the algorithm that exchanges it.
        local: the optimizer that moves a worker's weights between exchanges, if yours does not; or None.
        rank: this rank's number.
        size: the number of ranks.
        role: "alone", "worker 0", "server 0", ...; in groups also "worker 0, member 1", ..., and with
            servers=0 "lead" on rank 0.
        weight: the weight of this rank's later steps in a mean over workers. None, the default: each step
            counts by the samples in the batches that the loop received since the previous step.

    Args:
        optimizer: any dense optimizer of `torch.optim`, not stepped yet.
        algorithm: the options of the algorithm.
        local: moves a worker's weights in each step if yours runs on the centre; None: the weights stay, or
            the algorithm moves them.
        ranks: what the ranks do.
        model: the model that owns the parameters; None: search for it. Its buffers, such as running
            statistics, are averaged over the workers.
        world: the ranks; None: MPI's if a launcher has started this process, else this process alone.

    Example:
        >>> import nnlo_torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = nnlo_torch.EASGD(torch.optim.SGD(model.parameters(), lr=0.1))
        >>> isinstance(optimizer, Wrapper), isinstance(optimizer, torch.optim.Optimizer)
        (True, True)
    """

    _step_supports_amp_scaling: ClassVar[bool] = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        algorithm: Algorithm,
        *,
        ranks: RankOptions,
        local: torch.optim.Optimizer | None = None,
        model: torch.nn.Module | None = None,
        world: RankWorld | None = None,
    ) -> None:
        refuse(optimizer, type(self).__name__)
        if algorithm.wire == "topk":
            momentum, nesterov = own_momentum(optimizer, f"{type(self).__name__} with wire='topk'")
            algorithm = replace(algorithm, topk_momentum=momentum, topk_nesterov=nesterov)
        self._begin(optimizer, algorithm, local)
        if model is not None:
            self._check_model(model)
        self._model = model
        world = world or launched()
        several = world is not None and world.size > 1
        self._joint = joint_training(self, world if several else None, ranks)
        if world is not None and several:
            self._joint.members.append(self)
            self._joint.found = None
            self._join(world)
        global _current  # noqa: PLW0603 - samplers find their training by it
        _current = weakref.ref(self)

    def _check_model(self, model: object) -> None:
        """Refuse a model that holds none of the parameters: buffers and names would be another's."""
        name, kind = type(self).__name__, type(model).__name__
        if not isinstance(model, torch.nn.Module):
            raise ConfigurationError(
                f"{name}: model is of type {kind}; pass the torch.nn.Module that owns the parameters"
            )
        own = {id(tensor) for tensor in model.parameters()}
        if not any(id(tensor) in own for tensor in _parameters(self)):
            raise ConfigurationError(
                f"{name}: model is a {kind} without any parameter of the optimizer; pass the one that owns "
                "them, or leave model out: it is searched for"
            )

    def _join(self, world: RankWorld) -> None:
        """Join the training, with the wrappers made before (collective)."""
        joint = self._joint
        if joint.team is not None:  # the others have joined without this one
            joint.team.member.abandon()
            joint.forget_end()
            members = joint.members
            joint.release()
            joint.team, joint.members = None, members
        modules = self._modules()
        joint.team, joint.flat_model = join_team(joint, world, modules)
        for one in joint.members:
            one.rank, one.size, one.role = world.rank, world.size, joint.team.role
        joint.team.when_taking_over(joint.take_over)
        for call in (self._follow_commits, self._look_for_hand_changes, self._send_ahead):
            joint.at_taking_over.append(partial(_call, weakref.WeakMethod(call)))
        self._look_for_hand_changes()
        self._send_ahead()
        if self.serves:
            explain_missing_variables()
        if not self._steps_here:
            stepped(self.optimizer)  # a scheduler made for yours would warn that it never was
        if self.counts_progress:
            follow_progress(weakref.ref(self), self, self.optimizer)
        joint.end = self._end_for_another
        joint.forget_end = world.at_end(self.close, self.in_epoch)  # the training ends with the script
        joint.forget_saves = warn_of_saves(joint, own_process=world.own_process)
        self._follow_commits()

    def _look_for_hand_changes(self) -> None:
        """Refuse weights that a script changes by hand on a worker whose optimizer runs on the server."""
        joint = self._joint
        if not self._steps_here and not self.serves and joint.flat_model is not None:
            modules = renormed(self._modules())
            joint.hand_changes = HandChanges(joint.flat_model, modules, type(self).__name__)

    def _send_ahead(self) -> None:
        """Let gradients leave while they are made, on a worker that is to."""
        joint = self._joint
        if joint.gradients_ahead is not None:
            joint.gradients_ahead.release()
            joint.gradients_ahead = None
        if joint.ranks.overlap and not self.serves:
            assert joint.team is not None  # it has joined
            assert joint.flat_model is not None
            joint.gradients_ahead = GradientsAhead(joint.team, joint.flat_model)

    def _begin(
        self,
        optimizer: torch.optim.Optimizer,
        algorithm: Algorithm,
        local: torch.optim.Optimizer | None = None,
    ) -> None:
        self._begin_participation()
        super().__init__([{"params": []}], optimizer.defaults)  # your optimizer has checked its groups
        self.optimizer, self.algorithm, self.local = optimizer, algorithm, local
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        self.rank, self.size, self.role, self.weight = 0, 1, "alone", None
        self._follows = False  # whether local steps have your optimizer's learning rate

    def _wrap(
        self,
        optimizer: Any,
        algorithm: Algorithm,
        own: dict[str, Any],  # noqa: ARG002 - Keras recreates wrappers from it
        ranks: RankOptions,
        local: Any = None,
        **common: Any,
    ) -> None:
        refuse(optimizer, type(self).__name__)
        if algorithm.steps_in_place:
            refuse_options(optimizer, type(self).__name__)
        rate, moves = local_of(local, optimizer, type(self).__name__)
        algorithm = algorithm.with_local_rate(rate) if rate else algorithm
        Wrapper.__init__(self, optimizer, algorithm, ranks=ranks, local=moves, **common)
        self._follows = local == AS_YOURS

    def _momentum(self, optimizer: Any, *, nesterov: bool) -> float:
        return momentum_of(optimizer, type(self).__name__, nesterov=nesterov)

    @property
    def weight(self) -> float | None:
        """Weight of this rank's steps in a mean over workers; None: by their samples."""
        return self._weight

    @weight.setter
    def weight(self, weight: float | None) -> None:
        self._weight = checked_weight(weight)

    def __getattr__(self, name: str) -> Any:
        """Read a public attribute that only your optimizer has, e.g. `train` of a schedule-free one."""
        inner = vars(self).get("optimizer")
        if inner is None or name.startswith("_") or not hasattr(inner, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(inner, name)

    # -- an ordinary optimizer ------------------------------------------------------------------------

    @without_hooks  # torch would call the global hooks twice
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step with the parameters' gradients."""
        # Your optimizer calls the global hooks if it steps here.
        first, last = ([], []) if self._steps_here else global_hooks()
        before, after = hooks_of(self, "step")
        args: tuple[Any, ...] = (self,) if closure is None else (self, closure)
        kwargs: dict[str, Any] = {}
        for hook in (*first, *before):
            changed = hook(self, args, kwargs)
            if changed is not None:
                if not isinstance(changed, tuple) or len(changed) != 2:
                    raise RuntimeError(
                        f"{type(self).step} must return None or a tuple of (new_args, new_kwargs), "
                        f"but got {changed}."
                    )
                args, kwargs = changed
        result = self._step(*args[1:], **kwargs)
        for hook in (*after, *last):
            hook(self, args, kwargs)
        return result

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        joint = self._joint  # read once: a step of a small network takes a few hundred microseconds
        joint.agreed, joint.trained = False, True
        team = joint.team
        if team is None:
            joint.steps += 1
            joint.step_weights.step()
            for one in joint.watches:
                one.look()
            result = self.optimizer.step() if closure is None else self.optimizer.step(closure)
            self._run(self._after_commit)
            return result
        if self.serves:
            return self._step_of_server(closure)
        changes = joint.hand_changes
        if changes is not None:
            changes.check()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if joint.group_gradients is not None:
            joint.group_gradients.settle()
        if joint.gradients_ahead is not None:
            joint.gradients_ahead.settle()
        if len(joint.members) > 1:
            self._take_turn()
        team.shown.take_changes()
        samples = joint.step_weights.step()
        joint.largest_step = max(joint.largest_step, samples)
        team.step(samples if self._weight is None else self._weight, self._change_gradient)
        if team.has_turned:
            self._run(self._after_serving)
            return loss
        if changes is not None:
            changes.keep(joint.epochs_begun)
        if not self._has_center:
            self._run(self._after_commit)
        return loss

    def _step_of_server(self, closure: Callable[[], Any] | None) -> Any:
        """Refuse a step, unless this rank was a worker when the epoch began: then it changes nothing."""
        if self._team is None or not self._team.has_turned:
            raise self._no_step_of_server()
        with torch.enable_grad():
            return None if closure is None else closure()

    def _no_step_of_server(self) -> ConfigurationError:
        if self._epochs_begun:
            return ConfigurationError(
                f"rank {self.rank} is a server and makes no steps, but step() was called outside the "
                "loop over batches; call it inside the loop, also after the last batch of an epoch"
            )
        return ConfigurationError(
            f"rank {self.rank} is a server, but its loop received a batch; give the DataLoader "
            "sampler=nnlo_torch.ShardSampler(dataset), which serves on this rank instead, or loop over "
            "optimizer.epoch(loader)"
        )

    @property
    def _has_center(self) -> bool:
        """Whether there is a centre on servers."""
        team = self._joint.team
        return team is not None and team.member.servers > 0

    @property
    def _steps_here(self) -> bool:
        """Whether your optimizer steps on this rank unless it serves."""
        return not self._has_center or self.algorithm.optimizer_runs == "worker"

    @property
    def all_reduce(self) -> str:
        """The way in which the ranks of a group add up their gradients, as chosen; empty without groups."""
        group = None if self._team is None else self._team.member.group
        return "" if group is None else group.reducer.name

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes leave the gradients of a group's ranks apart.

        Without groups it does nothing. Use it for all but the last of the batches whose gradients a loop adds
        up before a step: that saves a sum over the group for each. Every rank of a group must use it alike.

        Example:
            >>> import nnlo_torch
            >>> model = torch.nn.Linear(1, 1)
            >>> optimizer = nnlo_torch.Synchronous(torch.optim.SGD(model.parameters(), lr=0.1))
            >>> with optimizer.no_sync():
            ...     model(torch.ones(2, 1)).mean().backward()
            >>> model(torch.ones(2, 1)).mean().backward()
            >>> optimizer.step()
        """
        gradients = self._joint.group_gradients
        return nullcontext() if gradients is None else gradients.off()

    def _take_turn(self) -> None:
        """Let the next step use this wrapper's gradients and move its parameters, of all in the training."""
        joint = self._joint
        if joint.flat_model is not None:
            sizes = [sum(len(group["params"]) for group in one.param_groups) for one in joint.members]
            joint.active = joint.members.index(self)
            first = sum(sizes[: joint.active])
            joint.flat_model.chosen = range(first, first + sizes[joint.active])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; refused among several ranks, which have agreed on the model."""
        if self._team is not None:
            raise ConfigurationError(
                f"{type(self).__name__}: parameters were added after wrapping, but the ranks have already "
                "agreed on the model; give all parameters to the optimizer before you wrap it"
            )
        if hasattr(self, "optimizer"):
            self.optimizer.add_param_group(param_group)
        else:
            super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state.

        If the optimizer runs on the centre, the server has the state of its part. If it runs on workers, each
        worker has its own.
        """
        several = self._team is not None and self.serves and self._team.member.servers > 1
        if several and self.algorithm.optimizer_runs == "center":
            warnings.warn(
                "this is the optimizer's state of one of several parts of the centre; use servers=1 to have "
                "the whole state on one rank",
                RuntimeWarning,
                stacklevel=2,
            )
        before, after = hooks_of(self, "state_dict")
        for hook in before:
            hook(self)
        state = self.optimizer.state_dict()
        for hook in after:
            state = hook(self, state) or state
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state."""
        before, after = hooks_of(self, "load_state_dict")
        for hook in before:
            state_dict = hook(self, state_dict) or state_dict
        self.optimizer.load_state_dict(state_dict)
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state
        for hook in after:
            hook(self)

    def __getstate__(self) -> dict[str, Any]:
        self.optimizer.state_dict()  # which brings what is counted elsewhere into its state
        kept = ("optimizer", "algorithm", "local", "weight")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._begin(state["optimizer"], state["algorithm"], state["local"])
        self.weight = state["weight"]

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.optimizer!r}, {readable(self.algorithm.describe())}, {self.role})"
        )

    def _change_gradient(self) -> None:
        """Change the collected gradient as the algorithm needs it."""
        if self.algorithm.optimizer_runs == "nowhere":  # nothing else applies your learning rates
            assert self._flat_model is not None  # never called in a process alone
            rates = [group["lr"] for group in self.param_groups for _ in group["params"]]
            for view, rate in zip(self._flat_model.gradient_views, rates, strict=True):
                view.mul_(rate)
        elif self._follows and self._team is not None:
            self._team.set_local_rate(float(self.param_groups[0]["lr"]))
