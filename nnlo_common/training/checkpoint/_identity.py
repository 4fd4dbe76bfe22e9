"""Identity of a training: its algorithm, optimizer, servers and model, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._layout import Layout
from nnlo_common.training._readable_options import readable

__all__ = ["IDENTITY", "difference"]

#: The facts that must be equal to resume from a checkpoint.
IDENTITY = ("algorithm", "optimizer", "servers", "model")


def difference(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Describe how a checkpoint (`there`) differs from this training (`here`); empty if it does not.

    Example:
        >>> facts = {"algorithm": "AGN()", "optimizer": "SGD", "servers": 1, "model": ""}
        >>> difference({**facts, "optimizer": "Adam"}, facts)
        'the optimizer is Adam there, but SGD here'
        >>> difference(facts, facts)
        ''
    """
    for name in IDENTITY:
        if there.get(name) == here.get(name):
            continue
        if name == "model":
            return f"the model is another one: {_of_models(there.get(name), here.get(name))}"
        told = {"servers": "the number of servers"}.get(name, f"the {name}")
        return f"{told} is {_shown(there.get(name))} there, but {_shown(here.get(name))} here"
    return ""


def _of_models(there: Any, here: Any) -> str:
    try:
        return Layout.from_json(here).difference(Layout.from_json(there)) or "it has other buffers"
    except (ConfigurationError, ValueError, TypeError):
        return "it cannot be compared"


def _shown(fact: object) -> str:
    """Return a fact for a message, without characters that would control a terminal."""
    return readable("".join(one if one.isprintable() else "?" for one in f"{fact!s:.1000}"))
