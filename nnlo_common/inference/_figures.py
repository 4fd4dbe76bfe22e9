"""Figures of merit: sums over all samples, added up piece by piece while the outputs are at hand."""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nnlo_common.base._arguments import function_given
from nnlo_common.base._errors import ConfigurationError
from nnlo_common.inference._structure import SINGLE, Named

__all__ = ["ROC", "Confusion", "Figure", "added", "as_json", "results"]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure of merit over all samples, made from sums, so that one pass over them is enough.

    Sums of whole numbers are exact. Others are added batch by batch, in the order of the data, so they are
    the same on any number of ranks.

    Attributes:
        sums: called with the outputs of a batch and the columns of `keep`, both NumPy arrays by name; returns
            numbers or arrays by name, which are added up.
        result: called with the sums over all; returns the figure.

    Example:
        >>> resolution = Figure(
        ...     sums=lambda outputs, kept: {
        ...         "n": len(kept["energy"]),
        ...         "squares": ((outputs["prediction"][:, 0] - kept["energy"]) ** 2).sum(),
        ...     },
        ...     result=lambda sums: float((sums["squares"] / sums["n"]) ** 0.5),
        ... )
        >>> resolution.result(resolution.sums({"prediction": np.ones((4, 1))}, {"energy": np.zeros(4)}))
        1.0
    """

    sums: Callable[[Named, Named], Mapping[str, Any]]
    result: Callable[[Mapping[str, Any]], Any]

    def __post_init__(self) -> None:
        function_given("Figure(): sums", self.sums)
        function_given("Figure(): result", self.result)


def Confusion(labels: str, classes: int, *, output: str = SINGLE) -> Figure:
    """Return the figure that counts each label (row) and the class with the highest output (column).

    Args:
        labels: the kept column of the labels: numbers from 0, less than `classes`.
        classes: how many there are.
        output: the name of the output with a score for each class; one score: class 1 above 0.5.

    Example:
        >>> figure = Confusion("label", 2)
        >>> scores = np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]])
        >>> figure.result(figure.sums({"prediction": scores}, {"label": np.array([0, 1, 1])}))
        [[1, 0], [1, 1]]
    """

    def sums(outputs: Named, kept: Named) -> Mapping[str, Any]:
        scores, found = outputs[output], kept[labels].reshape(-1)
        several = scores.ndim > 1 and scores.shape[1] > 1
        if (count := scores.shape[1] if several else 2) > classes:
            raise ConfigurationError(
                f"{output!r} has scores for {count} classes, but classes={classes}; give at least {count}"
            )
        if not ((found >= 0) & (found < classes)).all():
            raise ConfigurationError(
                f"{labels!r} has labels from {found.min()} to {found.max()}, but classes={classes} asks for "
                f"labels from 0 to {classes - 1}; give as many classes as there are, or leave such rows out"
            )
        best = scores.argmax(1) if several else scores.reshape(-1) > 0.5
        return {"counts": np.bincount(found.astype(np.int64) * classes + best, minlength=classes**2)}

    return Figure(sums=sums, result=lambda sums: np.reshape(sums["counts"], (classes, classes)).tolist())


def ROC(labels: str, *, output: str = SINGLE, column: int = -1, bins: int = 10_000) -> Figure:
    """Return the figure of the ROC curve of a score between 0 and 1, from its histograms.

    The result has "auc", and the lists "false_positive" and "true_positive"; scores in one bin count as
    equal.

    Args:
        labels: the kept column of the labels, 0 or 1.
        output: the name of the output.
        column: which of its scores, if it has several.
        bins: of the histograms.

    Example:
        >>> figure = ROC("label")
        >>> scores = np.array([0.1, 0.4, 0.35, 0.8])
        >>> figure.result(figure.sums({"prediction": scores}, {"label": np.array([0, 0, 1, 1])}))["auc"]
        0.75
    """

    def sums(outputs: Named, kept: Named) -> Mapping[str, Any]:
        scores = outputs[output]
        scores = scores.reshape(len(scores), -1)[:, column]
        scores = scores.astype(np.result_type(scores.dtype, np.float32))  # times bins others may overflow
        place = np.clip((scores * bins).astype(np.int64), 0, bins - 1)
        positive = kept[labels].reshape(-1) > 0.5
        return {
            "positive": np.bincount(place[positive], minlength=bins),
            "negative": np.bincount(place[~positive], minlength=bins),
        }

    def result(sums: Mapping[str, Any]) -> dict[str, Any]:
        rates = []
        for side in ("negative", "positive"):
            falling = np.concatenate([[0], np.cumsum(np.asarray(sums[side])[::-1])])
            rates.append(falling / max(falling[-1], 1))
        false, true = rates
        edges = np.concatenate([[True], (np.diff(false) > 0) | (np.diff(true) > 0)])
        auc = float((np.diff(false) * (true[1:] + true[:-1]) / 2).sum())
        return {"auc": auc, "false_positive": false[edges].tolist(), "true_positive": true[edges].tolist()}

    return Figure(sums=sums, result=result)


def added(total: dict[str, Any], more: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return sums with others added."""
    found = {key: np.asarray(one) for key, one in more.items()}
    for key, one in found.items():
        if one.dtype.kind not in "biuf":
            raise ConfigurationError(
                f"the figure {name!r} returned {key}={more[key]!r:.60}; return numbers to add up"
            )
        if key in total and np.shape(total[key]) != one.shape:
            raise ConfigurationError(
                f"the figure {name!r} returned {key} of shape {one.shape}, and before of "
                f"{np.shape(total[key])}; return the same shapes for each batch"
            )
    return {**total, **{key: total[key] + one if key in total else _wide(one) for key, one in found.items()}}


def as_json(sums: Mapping[str, Any]) -> dict[str, Any]:
    """Return sums as JSON, with all their bits: histograms may have many bins, and there are many pieces."""
    return {
        name: {key: _packed(np.asarray(one)) for key, one in parts.items()} for name, parts in sums.items()
    }


def _packed(array: npt.NDArray[Any]) -> list[Any]:
    data = zlib.compress(np.ascontiguousarray(array).tobytes(), 1)
    return [str(array.dtype), list(array.shape), base64.b64encode(data).decode()]


def _unpacked(packed: Any) -> npt.NDArray[Any]:
    try:
        kind, shape, text = packed
        dtype = np.dtype(str(kind))
        size = math.prod(shape) * dtype.itemsize
        data = zlib.decompressobj().decompress(base64.b64decode(text), size + 1)
        if dtype.kind not in "if" or len(data) != size:
            raise ValueError(f"{len(data)} bytes instead of {size}")
        return np.frombuffer(data, dtype).reshape(shape)
    except (TypeError, ValueError, zlib.error) as error:
        raise ConfigurationError(
            f"the record of the figures is damaged ({error}); begin anew with --overwrite (overwrite=True)"
        ) from None


def results(figures: Mapping[str, Figure], notes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures from the sums of all pieces, in their order."""
    found = {}
    for name, figure in figures.items():
        total: dict[str, Any] = {}
        for note in notes:
            sums = note.get("sums", {}).get(name, {})
            total = added(total, {key: _unpacked(one) for key, one in sums.items()}, name)
        found[name] = figure.result(total)
    return found


def _wide(one: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return one.astype(np.int64 if one.dtype.kind in "biu" else np.float64)
