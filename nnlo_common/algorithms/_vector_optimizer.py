"""Base of all vector optimizers: the protocol, checks, buffers and state."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np

from nnlo_common.base._block_threads import Scratch, cached_blocks, longest_block, work_through
from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._flat_vector import Layout, PartWork, Vector, blocks

__all__ = [
    "LeavesMomentum",
    "Optimizer",
    "Stretch",
    "VectorOptimizer",
    "Work",
    "descend",
    "described",
    "fitted",
    "is_vector",
    "moves",
]

# Values of all operands of a block together, as far as a second-level cache holds them.
_OPERANDS = 1 << 19


class Work(NamedTuple):
    """Memory for intermediate values of a step.

    Attributes:
        first, second: two rows.
        last: the second, or the gradient's own: memory that is in the cache. For what no longer needs either.
    """

    first: Vector
    second: Vector
    last: Vector


@runtime_checkable
class VectorOptimizer(Protocol):
    """The optimizer interface that servers use; `learning_rate` may change between steps.

    Example:
        >>> from nnlo_common import SGD
        >>> isinstance(SGD(0.1), VectorOptimizer)
        True
    """

    learning_rate: float

    def step(self, x: Vector, gradient: Vector) -> None:
        """Step `x` in place; do not change `gradient`."""

    def state(self) -> dict[str, Any]:
        """Return copies of everything that changes from step to step."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Load copies of what `state` returned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A stretch of the vector that SGD, Adam or AdamW steps with one set of options.

    Attributes:
        place: in the vector that the optimizer steps.
        learning_rate: as it is now.
        momentum: of SGD, or Adam's beta1.
        adaptive: whether it is Adam.
        beta2: Adam's.
        epsilon: Adam's.
        epsilon_outside: epsilon is added before the correction for the start at 0, as Keras does.
        weight_decay: times the weight, added to the gradient.
        decoupled: the decay, times the learning rate, is taken from the weight instead.
        maximize: go uphill.
    """

    place: slice
    learning_rate: float
    momentum: float = 0.0
    adaptive: bool = False
    beta2: float = 0.0
    epsilon: float = 0.0
    epsilon_outside: bool = False
    weight_decay: float = 0.0
    decoupled: bool = False
    maximize: bool = False


@runtime_checkable
class Steerable(VectorOptimizer, Protocol):
    """An optimizer whose step an algorithm may scale, or make in its place."""

    def stretches(self, size: int, gradient: Vector | None) -> Sequence[Stretch] | None:
        """Return what it would step, in order; None: it is not SGD, Adam or AdamW.

        Args:
            size: the number of coordinates.
            gradient: leave out parameters that have no gradient in it; None: all of them.
        """

    def step_scaled(self, x: Vector, gradient: Vector, scale: float) -> None:
        """Step with `scale` times the learning rates."""

    def keep_in(self, velocity: Vector, square: Vector) -> int:
        """Keep the momentum and Adam's mean square in these vectors; return the steps made so far.

        Cheap where they lie there already; copies what it has elsewhere, e.g. after it has loaded a state.
        """

    def count(self, steps: int) -> None:
        """Note that so many steps have been made with what is kept."""

    def follow(self, progress: float) -> None:
        """Turn schedules to what the steps so far were worth in steps of one process."""

    def prepare(self, gradient: Vector) -> None:
        """Change a gradient in place as it does before its steps, e.g. clip it."""


@runtime_checkable
class Configurable(Protocol):
    """An optimizer that takes new options, encoded as numbers, between steps."""

    def configure(self, options: Vector) -> None:
        """Take new options."""


@runtime_checkable
class LeavesMomentum(VectorOptimizer, Protocol):
    """SGD that can leave its momentum to the workers, where `wire="topk"` needs it."""

    def own_momentum(self) -> tuple[float, bool]:
        """Return its momentum, and whether it is Nesterov's; 0: it has none, or is not SGD."""

    def leave_momentum(self) -> None:
        """Step without momentum from now on: what it is given has it.

        A weight decay that is added to gradients counts for the later steps at once: it is divided by
        1 - momentum.
        """


@dataclass(eq=False)
class Optimizer:
    """Checks, buffers and state; a subclass adds its slots and its equation."""

    learning_rate: float

    _names: ClassVar[tuple[str, ...]] = ()  # of the slots
    _coordinatewise: ClassVar[bool] = True  # else a step needs whole parameters
    # Far below 1e-30 float32 rounds epsilon to 0, and a coordinate without gradient becomes 0/0 = nan.
    _ranges: ClassVar[dict[str, tuple[float, float]]] = {
        **dict.fromkeys(("learning_rate", "weight_decay", "initial_accumulator"), (0.0, math.inf)),
        **dict.fromkeys(("momentum", "decay", "beta1", "beta2"), (0.0, 1.0)),
        "epsilon": (1e-30, math.inf),
    }

    def __post_init__(self) -> None:
        for name in self._ranges.keys() & vars(self).keys():
            self._check_number(name)
        if getattr(self, "epsilon_form", "torch") not in ("torch", "keras"):
            self._refuse("epsilon_form", "'torch' or 'keras'")
        self._steps = 0
        self._size: int | None = None
        self._slots: dict[str, Vector] = {}
        self._work = Scratch(0)

    def step(self, x: Vector, gradient: Vector) -> None:
        """Step `x` in place.

        Args:
            x: contiguous float32 vector, of the same size in every step.
            gradient: another one of that size, without memory in common with `x`; it is only read.

        Raises:
            ConfigurationError: an array or the learning rate is invalid; nothing changes then.
        """
        move = self._begin(x, gradient)
        if self._coordinatewise:
            work_through(self._blockwise(move), x.size)
        else:
            for part in self._parts(x.size):
                move(part)

    def step_by_parts(self, x: Vector, gradient: Vector) -> PartWork | None:
        """Begin a step; return what moves a part, or None if a step needs the whole vector.

        Unlike in `step` the gradient must be writable: its memory is used, and its values are lost.

        Example:
            >>> from nnlo_common import SGD
            >>> x = np.ones(3, np.float32)
            >>> move = SGD(0.5).step_by_parts(x, 2 * x)
            >>> move(slice(0, 2))
            >>> print(x)
            [0. 0. 1.]
        """
        if not self._coordinatewise:
            return None
        return self._blockwise(self._begin(x, gradient, use_up=True))

    def _blockwise(self, move_block: PartWork) -> PartWork:
        def move(part: slice) -> None:
            for block in cached_blocks(part, self._block_length()):
                move_block(block)

        return move

    def _begin(self, x: Vector, gradient: Vector, *, use_up: bool = False) -> PartWork:
        """Check and count a step; return what moves one of `_parts`, and may use the gradient's memory."""
        self._check_number("learning_rate")
        both = is_vector(x) and is_vector(gradient) and x.size == gradient.size
        writable = both and x.flags.writeable and (gradient.flags.writeable or not use_up)
        if not writable or np.may_share_memory(x, gradient):
            name, which = ("step_by_parts", "both") if use_up else ("step", "x")
            raise ConfigurationError(
                f"{type(self).__name__}.{name} needs two contiguous float32 vectors of one size, in memory "
                f"of their own, {which} writable; got x: {described(x)}, gradient: {described(gradient)}"
            )
        self._prepare(x.size)
        self._steps += 1

        def move(part: slice) -> None:
            slots, own = [slot[part] for slot in self._slots.values()], gradient[part]
            first, second = self._work.rows[:, : own.size]
            self._update(x[part], own, slots, Work(first, second, own if use_up else second))

        return move

    @property
    def heavy(self) -> bool:
        """Whether a step reads and writes more than the vector, the gradient and a momentum."""
        return len(self._initial()) > 1

    def stretches(self, size: int, gradient: Vector | None) -> Sequence[Stretch] | None:
        """Return the options of a step as stretches of the vector, if it is SGD or Adam."""
        return None

    def step_scaled(self, x: Vector, gradient: Vector, scale: float) -> None:
        """Step with `scale` times the learning rate."""
        rate = self.learning_rate
        self.learning_rate = rate * scale
        try:
            self.step(x, gradient)
        finally:
            self.learning_rate = rate

    #: The slots that hold the momentum and Adam's mean square.
    _kept: ClassVar[tuple[str, ...]] = ()

    def keep_in(self, velocity: Vector, square: Vector) -> int:
        """Keep the momentum and Adam's mean square in these vectors; return the steps made so far."""
        for name, vector in zip(self._kept, (velocity, square), strict=False):
            if self._slots.get(name) is not vector and vector.size:
                before = self._slots.get(name)
                self._prepare(vector.size)
                np.copyto(vector, 0.0 if before is None else before)
                self._slots[name] = vector
        return self._steps

    def count(self, steps: int) -> None:
        """Note that so many steps have been made with what is kept."""
        self._steps = steps

    def follow(self, progress: float) -> None:
        """Do nothing: its learning rate has no schedule."""

    def prepare(self, gradient: Vector) -> None:
        """Leave a gradient as it is."""

    def state(self) -> dict[str, Any]:
        """Return `learning_rate`, `steps` and, after the first step, a copy of each slot."""
        slots = {name: slot.copy() for name, slot in self._slots.items() if self._steps}
        return {"learning_rate": self.learning_rate, "steps": self._steps, **slots}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load copies of the `state` of an optimizer of this class with these options.

        Raises:
            ConfigurationError: the state is another optimizer's; nothing changes then.
        """
        rate, steps = float(state.get("learning_rate", math.nan)), int(state.get("steps", -1))
        names = list(self._initial()) if steps else []
        slots = {name: state[name] for name in names if name in state and is_vector(state[name])}
        sizes = {slot.size for slot in slots.values()}
        known = state.keys() == {"learning_rate", "steps", *slots} and 0 <= rate < math.inf and steps >= 0
        if not known or len(slots) < len(names) or len(sizes) > 1:
            got = {name: described(value) for name, value in state.items()}
            raise ConfigurationError(
                f"{type(self).__name__}.load needs learning_rate >= 0, steps >= 0 and, unless steps is 0, "
                f"contiguous float32 vectors {list(self._initial())} of one size; got {got}"
            )
        self.learning_rate, self._steps, self._size = rate, steps, None
        for name, slot in slots.items():
            self._prepare(slot.size)
            np.copyto(self._slots[name], slot)

    def _parts(self, size: int) -> list[slice]:
        """The parts of a step; there is memory for the intermediate values of the longest."""
        return list(blocks(slice(0, size), max(longest_block(size, self._block_length()), 1)))

    def _block_length(self) -> int:
        return _OPERANDS // (2 + len(self._initial()))

    def _initial(self) -> dict[str, float]:
        return dict.fromkeys(self._names, 0.0)

    def _update(self, x: Vector, gradient: Vector, slots: list[Vector], work: Work) -> None:
        raise NotImplementedError

    def _prepare(self, size: int) -> None:
        """Allocate on the first use; refuse other sizes afterwards."""
        if self._size is None:
            self._size = size
            self._slots = {name: np.full(size, value, np.float32) for name, value in self._initial().items()}
            longest = max((len(range(*part.indices(size))) for part in self._parts(size)), default=0)
            self._work = Scratch(longest)
        if size != self._size:
            raise ConfigurationError(
                f"{type(self).__name__} steps a vector of {self._size} values and got one of {size}; "
                "make one optimizer per vector"
            )

    def _check_number(self, name: str) -> None:
        value, (low, below) = getattr(self, name), self._ranges[name]
        if not (isinstance(value, int | float | np.floating) and low <= value < below):
            self._refuse(name, f"a number with {low:g} <= {name} < {below:g}")
        setattr(self, name, float(value))  # a NumPy float64 would promote the float32 arithmetic

    def _refuse(self, name: str, allowed: str) -> None:
        raise ConfigurationError(f"{type(self).__name__} got {name}={getattr(self, name)!r}; give {allowed}")


_AnyOptimizer = TypeVar("_AnyOptimizer", bound=VectorOptimizer)


def fitted(optimizer: _AnyOptimizer, layout: Layout, place: slice) -> _AnyOptimizer:
    """Return a copy of `optimizer` for one piece of a laid-out vector.

    Calls `fit` with the sizes of the parameters on an optimizer that needs whole ones, such as LARS.
    """
    one = copy.deepcopy(optimizer)
    fit = getattr(one, "fit", None)
    if fit is not None:
        owned = [segment for segment in layout.segments if segment.tied_to is None]
        fit([segment.size for segment in owned if place.start <= segment.offset < place.stop])
    return one


def moves(optimizer: VectorOptimizer, x: Vector, gradient: Vector) -> PartWork | None:
    """Begin a step; return what moves a part of it, or None if the optimizer cannot."""
    begin: Callable[[Vector, Vector], PartWork | None] | None = getattr(optimizer, "step_by_parts", None)
    return None if begin is None else begin(x, gradient)


def descend(x: Vector, direction: Vector, rate: float, scratch: Vector) -> None:
    """Do x <- x - rate * direction."""
    np.subtract(x, np.multiply(direction, rate, out=scratch), out=x)


def is_vector(array: object) -> bool:
    """Whether `array` is a contiguous float32 vector."""
    if not isinstance(array, np.ndarray):
        return False
    return array.dtype == np.float32 and array.ndim == 1 and array.flags.c_contiguous


def described(value: object) -> str:
    """Describe an array, for an error message."""
    if not isinstance(value, np.ndarray):
        return f"{value!r}" if isinstance(value, int | float) else f"a {type(value).__name__}"
    details = ("" if value.flags.c_contiguous else " strided", "" if value.flags.writeable else " read-only")
    return f"{value.dtype}{value.shape}{''.join(details)}"
