"""Probe: what a model costs on this machine and what its gradients say, measured in a minute or two."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from nnlo_common.algorithms import Algorithm
from nnlo_common.algorithms._easgd import EASGD
from nnlo_common.algorithms._gain import sampled_places
from nnlo_common.algorithms._noise_scale import NoiseEstimate
from nnlo_common.algorithms._optimizers import SGD, Adam
from nnlo_common.algorithms._steady import Steady
from nnlo_common.base._arguments import is_number, whole_number
from nnlo_common.base._cores import usable_cores
from nnlo_common.base._errors import ConfigurationError, is_out_of_memory
from nnlo_common.base._flat_vector import Vector
from nnlo_common.base._process_memory import ProcessMemory
from nnlo_common.simulation._rehearsal import ExchangeTimes, rehearse

__all__ = ["GradientHistogram", "ProbeFacts", "ProbedModel", "StepParts", "probe"]

# Sizes of batches to try, as multiples of the batch.
_SIZES = (0.25, 0.5, 1, 2, 4)
# Gradients at each point; with fewer the noise has no range worth telling.
_FEWEST, _MOST = 8, 96
# Most numbers of the gradients of a point that are kept together.
_KEPT = 60_000_000
_TIMED, _LEAST_SAMPLES = 5, 8
#: The algorithms whose exchanges a probe tries, with their options.
REHEARSED: Sequence[Algorithm] = (Steady(), Steady(lag=1), Steady(every=4), EASGD(every=10))


class StepParts(NamedTuple):
    """What parts of a step take.

    Attributes:
        collect_s: seconds until its gradient, which is there, is in one vector of the host.
        optimizer_s: seconds of the script's optimizer.
    """

    collect_s: float
    optimizer_s: float


class ProbedModel(Protocol):
    """What a framework tells a probe of a model in training.

    Attributes:
        framework: its name, with its version.
        device: where it computes.
        batch: the samples in a batch.
        samples: to train on; None: unknown.
        layers: the names of the parameters with their sizes, in the order of the gradient's vector.
        slots: numbers that the optimizer keeps for each parameter.
        validated: whether there are samples to validate with.
    """

    framework: str
    device: str
    batch: int
    validated: bool

    @property
    def samples(self) -> int | None:
        """Samples to train on."""

    @property
    def layers(self) -> Sequence[tuple[str, int]]:
        """Names and sizes of the parameters."""

    @property
    def slots(self) -> int:
        """Numbers that the optimizer keeps for each parameter."""

    def read(self, size: int) -> Any:
        """Return the next samples of the data as a batch of this size."""

    def step(self, batch: Any) -> float:
        """Train on a batch as the script does; return its loss."""

    def gradient(self, batch: Any) -> Vector:
        """Return the gradient of a batch at the present parameters, which stay."""

    def step_parts(self, batch: Any) -> StepParts | None:
        """Train on a batch; return what the parts of that step take, None: they cannot be told."""

    def begin_memory(self) -> None:
        """Forget the peak of the memory before."""

    def peak_bytes(self) -> int:
        """Return the peak of the memory since then."""

    def left_bytes(self) -> int | None:
        """Return how much more memory there is; None: unknown."""


class GradientHistogram:
    """How large the values of a layer's gradient are: how many lie in each power of two.

    Attributes:
        zeros: values that are zero.
        counts: by exponent e, the number of values from 2^(e-1) to 2^e.

    Example:
        >>> histogram = GradientHistogram()
        >>> histogram.add(np.array([0.0, 0.75, -1.5, 1e-9], np.float32))
        >>> histogram.counts, histogram.zeros
        ({-29: 1, 0: 1, 1: 1}, 1)
        >>> round(histogram.lost(), 3), round(histogram.lost(scale=2.0**10), 3)
        (0.333, 0.0)
    """

    def __init__(self) -> None:
        self.zeros = 0
        self.counts: dict[int, int] = {}

    def add(self, values: Vector) -> None:
        """Take in a gradient; what is not finite has no size."""
        self.zeros += int(values.size - np.count_nonzero(values))
        there = values[(values != 0) & np.isfinite(values)]
        exponents, counts = np.unique(np.frexp(np.abs(there))[1], return_counts=True)
        for exponent, count in zip(exponents.tolist(), counts.tolist(), strict=True):
            self.counts[exponent] = self.counts.get(exponent, 0) + count
        self.counts = dict(sorted(self.counts.items()))

    @property
    def size(self) -> int:
        """How many values are not zero."""
        return sum(self.counts.values())

    def lost(self, scale: float = 1.0) -> float:
        """Return the share of the values, zeros left out, that float16 would flush to zero.

        Args:
            scale: that the loss is multiplied by, a power of two.
        """
        # float16's smallest number is 2^-24, and what is below half of it becomes zero.
        least = -24 - round(math.log2(scale))
        return sum(count for exponent, count in self.counts.items() if exponent < least) / max(self.size, 1)

    @property
    def largest(self) -> int:
        """The exponent of the largest value."""
        return max(self.counts, default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeFacts:
    """What a probe has measured.

    Attributes:
        framework, device, batch, samples, layers, slots, validated: of the model, see `ProbedModel`.
        steps_s: seconds of steps, by the size of the batch.
        read_s: seconds to read a batch.
        peak_bytes: the most memory, by the size of the batch.
        start_bytes: the memory of the process with the model, before its first step.
        left_bytes: memory left on the device at the start; None: unknown.
        too_large: the smallest batch that there was no memory for; None: all fitted.
        commit_s: seconds of a server for a contribution, with the core's optimizer.
        optimizer_s: seconds of the script's optimizer in a step; 0: unknown.
        collect_s: seconds until the gradient of a step is in one vector; None: unknown.
        exchanges: what an exchange takes, by the algorithm.
        copy_bytes_per_s: how fast memory is copied.
        noise: the noise scale at the start of the probe and at its end.
        histograms: of the gradients, by layer.
        losses: of the steps in order.
        link: seconds of a short message and bytes per second of a long one, between ranks; None: unknown.
        one_host: whether these ranks were on one host, whose memory carries all messages.
        within_bytes_per_s: of a message as long as the gradient between two ranks of it; None: unknown.
        slow: how many times as long as the fastest rank each rank takes for a step.
        cores: of this host that the process may use; None: unknown.
    """

    framework: str
    device: str
    batch: int
    samples: int | None
    layers: Sequence[tuple[str, int]]
    slots: int
    validated: bool
    steps_s: Mapping[int, Sequence[float]]
    read_s: Sequence[float]
    peak_bytes: Mapping[int, int]
    start_bytes: int
    left_bytes: int | None
    too_large: int | None
    commit_s: float
    copy_bytes_per_s: float
    noise: Sequence[NoiseEstimate]
    histograms: Mapping[str, GradientHistogram]
    optimizer_s: float = 0.0
    collect_s: float | None = None
    exchanges: Mapping[Algorithm, ExchangeTimes] = field(default_factory=dict)
    losses: Sequence[float] = ()
    link: tuple[float, float] | None = None
    one_host: bool = False
    within_bytes_per_s: float | None = None
    slow: Sequence[float] = field(default_factory=lambda: (1.0,))
    cores: int | None = None

    @property
    def parameters(self) -> int:
        """How many numbers the model has."""
        return sum(size for _, size in self.layers)


def probe(model: ProbedModel, *, seconds: float = 60.0) -> ProbeFacts:
    """Measure a model. It trains during the probe; the caller restores it.

    Args:
        model: in the hands of its framework.
        seconds: about how long.

    Raises:
        ConfigurationError: the model does not fit into the memory, a loss is not finite, or there are too few
            samples.
    """
    if not (is_number(seconds) and 1 <= seconds < math.inf):
        raise ConfigurationError(f"seconds={seconds!r} is not possible: a probe takes a number of at least 1")
    whole_number("batch", model.batch, 1)
    if model.samples is not None and model.samples < _LEAST_SAMPLES:
        raise ConfigurationError(
            f"there are {model.samples} samples, and a probe needs at least {_LEAST_SAMPLES}; name more data"
        )
    left, start = model.left_bytes(), ProcessMemory().now
    trial = _TimedSteps(model)
    trial.first()
    size = sum(one for _, one in model.layers)
    places = sampled_places(size) if size * _FEWEST * 2 > _KEPT else None
    histograms = {name: GradientHistogram() for name, _ in model.layers}
    trial.sizes(0.35 * seconds)  # first: the gradients below leave memory behind that no training takes
    tables = [_products(model, places, histograms, 0.25 * seconds)]
    trial.train(0.1 * seconds)
    tables.append(_products(model, places, histograms, 0.25 * seconds))
    parts = trial.parts(0.05 * seconds)
    return ProbeFacts(
        framework=model.framework,
        device=model.device,
        batch=model.batch,
        samples=model.samples,
        layers=tuple(model.layers),
        slots=model.slots,
        validated=model.validated,
        steps_s=trial.steps_s,
        read_s=tuple(trial.read_s),
        peak_bytes=trial.peak_bytes,
        start_bytes=start,
        left_bytes=left,
        too_large=trial.too_large,
        commit_s=_quickest_s(_commit(size, model.slots)),
        optimizer_s=parts.optimizer_s if parts else 0.0,
        collect_s=parts.collect_s if parts else None,
        exchanges={rule: rehearse(rule, size, optimizer=like(model.slots)) for rule in REHEARSED},
        copy_bytes_per_s=copy_speed(size),
        noise=[NoiseEstimate.of([table], batch=model.batch) for table in tables],
        histograms=histograms,
        losses=tuple(trial.losses),
        cores=usable_cores(),
    )


class _TimedSteps:
    """Steps of a probe."""

    def __init__(self, model: ProbedModel) -> None:
        self._model = model
        self.steps_s: dict[int, list[float]] = {}
        self.peak_bytes: dict[int, int] = {}
        self.read_s: list[float] = []
        self.losses: list[float] = []
        self.too_large: int | None = None

    def first(self) -> None:
        """Make the first step: it may not fit."""
        model = self._model
        try:
            self._step(model.batch)
        except Exception as error:
            if is_out_of_memory(error):
                raise ConfigurationError(
                    f"the model does not fit into the memory of {model.device} with a batch of "
                    f"{model.batch}; use a smaller batch, or cut the model over several devices, which nnlo "
                    "does not do"
                ) from None
            raise

    def sizes(self, seconds: float) -> None:
        """Time steps with batches of several sizes, and note what memory they take."""
        model = self._model
        known = {max(round(model.batch * factor), 1) for factor in _SIZES}
        most = model.samples or max(known)
        wanted = sorted(size for size in known if size <= most) or [model.batch]
        for size in wanted:
            try:
                self._step(size)  # compiles, and finds its memory
                model.begin_memory()
                self._timed(size, seconds / len(wanted))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self.too_large = size
                break
            self.peak_bytes[size] = model.peak_bytes()

    def train(self, seconds: float) -> None:
        """Train on, so that the gradients are those of another point."""
        self._timed(self._model.batch, seconds)

    def parts(self, seconds: float) -> StepParts | None:
        """Return what the parts of a step take; None: they cannot be told."""
        model, found, began_s = self._model, list[StepParts](), time.perf_counter()
        while len(found) < _TIMED or time.perf_counter() - began_s < seconds:
            one = model.step_parts(model.read(model.batch))
            if one is None:
                return None
            found.append(one)
        return StepParts(*map(median, zip(*found, strict=True)))

    def _timed(self, size: int, seconds: float) -> None:
        times, began_s = self.steps_s.setdefault(size, []), time.perf_counter()
        count = 0
        while count < _TIMED or time.perf_counter() - began_s < seconds:
            before_s = time.perf_counter()
            batch = self._model.read(size)
            read_s = time.perf_counter()
            self._trained(batch)
            times.append(time.perf_counter() - read_s)
            if size == self._model.batch:
                self.read_s.append(read_s - before_s)
            count += 1
            if count >= _TIMED and time.perf_counter() - began_s > 4 * seconds:
                break

    def _step(self, size: int) -> None:
        self._trained(self._model.read(size))

    def _trained(self, batch: Any) -> None:
        loss = self._model.step(batch)
        self.losses.append(loss)
        if not math.isfinite(loss):
            raise ConfigurationError(
                f"the loss is {loss} in step {len(self.losses)} of the probe; lower the learning rate, or "
                "check the data for NaN"
            )


def _products(
    model: ProbedModel,
    places: npt.NDArray[np.int64] | None,
    histograms: Mapping[str, GradientHistogram],
    seconds: float,
) -> npt.NDArray[np.float64]:
    """Take gradients at a point, and return the products of all pairs."""
    rows: list[Vector] = []
    began_s, size = time.perf_counter(), sum(one for _, one in model.layers)
    most = max(_FEWEST, min(_MOST, _KEPT // max(size if places is None else places.size, 1)))
    while len(rows) < most:
        if len(rows) >= _FEWEST and time.perf_counter() - began_s > seconds:
            break
        gradient = np.asarray(model.gradient(model.read(model.batch)), np.float32)
        if not np.isfinite(gradient).all():
            raise ConfigurationError(
                "a gradient is not finite in the probe; lower the learning rate, or check the data for NaN"
            )
        rows.append(gradient.copy() if places is None else gradient[places])
        if len(rows) <= 4:  # a few say how large values are
            _note(model, gradient, histograms)
    table = np.stack(rows)
    scale = float(np.abs(table).max()) or 1.0  # squares of small gradients would vanish in float32
    table /= scale
    found: npt.NDArray[np.float64] = (table @ table.T).astype(np.float64) * scale**2
    return found


def _note(model: ProbedModel, gradient: Vector, histograms: Mapping[str, GradientHistogram]) -> None:
    start = 0
    for name, size in model.layers:
        histograms[name].add(gradient[start : start + size])
        start += size


def like(slots: int) -> SGD | Adam:
    """Return the core's optimizer that keeps as many numbers for each parameter."""
    return Adam(1e-3) if slots > 1 else SGD(1e-3, momentum=0.9 if slots else 0.0)


def _commit(size: int, slots: int) -> Callable[[], object]:
    """Return what steps a vector of the model's size with the core's optimizer."""
    center, gradient, optimizer = np.zeros(size, np.float32), np.full(size, 1e-3, np.float32), like(slots)
    return lambda: optimizer.step(center, gradient)


def copy_speed(size: int) -> float:
    """Return how many bytes of memory are copied in a second."""
    source = np.ones(max(size, 1_000_000), np.float32)
    target = np.empty_like(source)
    return source.nbytes / max(_quickest_s(lambda: np.copyto(target, source)), 1e-9)


def _quickest_s(work: Callable[[], object]) -> float:
    times = []
    for _ in range(_TIMED + 1):
        began_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - began_s)
    return min(times[1:])
