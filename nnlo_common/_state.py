"""Exact saving and loading: what an object is, as a plain tree of numbers and arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias

import numpy as np

from nnlo_common._errors import ConfigurationError

__all__ = ["State", "Stateful"]

State: TypeAlias = dict[str, Any]


class Stateful:
    """Gives a class an exact `state()` and `load()` from the names of the attributes that matter.

    An attribute may be a number, an array (copied; loaded in place, so that views of it stay valid), a
    list of arrays, or an object that has `state()` and `load()` itself.

    Attributes:
        saved: the names of the attributes that make up the state.
    """

    saved: ClassVar[tuple[str, ...]] = ()

    def state(self) -> State:
        """Return a copy of everything that the next step depends on."""
        return {name: _copied(getattr(self, name)) for name in self.saved}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where the object that gave `state` stood.

        Raises:
            ConfigurationError: a name or an array does not fit this object; nothing was changed then.
        """
        if set(state) != set(self.saved):
            raise ConfigurationError(
                f"the saved state of a {type(self).__name__} holds {sorted(self.saved)}, "
                f"but {sorted(state)} was given; was it saved with another algorithm or version?"
            )
        for name in self.saved:
            self._check_fits(name, state[name])
        for name in self.saved:
            self._restore(name, state[name])

    def _check_fits(self, name: str, value: Any) -> None:
        mine = getattr(self, name)
        if isinstance(mine, np.ndarray) and (
            not isinstance(value, np.ndarray) or (mine.shape, mine.dtype) != (value.shape, value.dtype)
        ):
            found = f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else repr(value)
            raise ConfigurationError(
                f"{name} of a {type(self).__name__} is {mine.dtype}{list(mine.shape)} but the saved one is "
                f"{found}; was it saved with another model?"
            )

    def _restore(self, name: str, value: Any) -> None:
        mine = getattr(self, name)
        if isinstance(mine, np.ndarray):
            np.copyto(mine, value)
        elif hasattr(mine, "load"):
            mine.load(value)
        else:
            setattr(self, name, _copied(value))


def _copied(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return value.state() if hasattr(value, "state") else value
