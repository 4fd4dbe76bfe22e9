"""Default parameters of a training: the first trial, so that the best is never worse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nnlo_common.commands.train._algorithm_options import MODES
from nnlo_common.commands.train._option import Given
from nnlo_common.commands.train._python_file import parameters_of
from nnlo_common.commands.train._rates import MOMENTUM
from nnlo_common.commands.train._settings import OPTIONS, value_of
from nnlo_common.commands.tune._search_space import Space

__all__ = ["defaults"]


def defaults(
    space: Space, given: Mapping[str, Given], make: Callable[..., Any] | None, **known: Any
) -> dict[str, Any]:
    """Return the default of every parameter whose default lies in the space.

    Args:
        space: the search space.
        given: the options of all trainings.
        make: the function that makes the model; None: there is none.
        known: defaults that the framework sets.

    Example:
        >>> from nnlo_common.commands.tune._search_space import Parameter
        >>> rate = Parameter(name="learning_rate", table="", key="learning_rate", low=1e-3, high=0.1)
        >>> wide = Parameter(name="batch", table="", key="batch", low=200, high=300)
        >>> defaults(Space((rate, wide)), {}, None, learning_rate=0.01)
        {'learning_rate': 0.01}
    """
    found: dict[str, Any] = {}
    for one in space.parameters:
        if not one.active(found):
            continue
        if one.table:
            asked = parameters_of(make).get(one.key) if one.table == "model_params" else None
            value = None if asked is None or asked.default is asked.empty else asked.default
        else:
            value = known.get(one.key, _of_option(one.key, given, found))
        if value is not None and one.holds(value):
            found[one.name] = value
    return found


def _of_option(key: str, given: Mapping[str, Given], found: Mapping[str, Any]) -> Any:
    mode = found["mode"] if "mode" in found else value_of("mode", given)
    if key in MODES[mode].options:
        return MODES[mode].options[key].default
    if key == "momentum":  # without it the frameworks use 0
        return MOMENTUM if MODES[mode].algorithm.made_of else 0.0
    return OPTIONS[key].default
