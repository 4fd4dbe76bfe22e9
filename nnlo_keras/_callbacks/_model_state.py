"""State of one rank's Keras model and optimizers for checkpoints, except the session's vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras

from nnlo_common import Layout
from nnlo_common.plugin import Session, Vector
from nnlo_keras._compat import schedule_of, synchronise
from nnlo_keras._model_optimizers import optimizers_of
from nnlo_keras._snapshot import assign, untrained, values_of
from nnlo_keras._variable_layout import layout_of, memory_of
from nnlo_keras._wrapper import Wrapper, wrapper_of

__all__ = ["ModelState"]


class ModelState:
    """Variables of a model and its optimizers that a checkpoint saves.

    Args:
        model: the model.
        team: this rank's session; None in a process alone.
    """

    def __init__(self, model: Any, team: Session | None) -> None:
        self._model, self._team = model, team

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {
            "variables": values_of(self._variables()),
            "optimizers": [values_of(self._of(one)) for one in self._optimizers()],
            "rates": [_rate(wrapper) for wrapper in self._wrappers()],
        }

    def load(self, state: Mapping[str, Any], *, seeds: bool = True, of_one_process: bool = False) -> None:
        """Load what `state` returned, except learning rates; see `load_rates`.

        Args:
            state: the state of this rank, or of another.
            seeds: also load integers, such as the states of seed generators.
            of_one_process: a process alone has saved it, so that it has the weights and whole optimizers.
        """
        variables = self._model.variables if of_one_process else self._variables()
        values = state["variables"] if seeds else _with_own_integers(variables, state["variables"])
        assign(variables, values, "the model's variables")
        for one, values in zip(self._optimizers(), state["optimizers"], strict=True):
            own = [*_inner(one), *_local(one)] if of_one_process else self._of(one)
            assign(own, _last(values, len(own)) if of_one_process else values, "the optimizer's variables")
        for wrapper, (_, set_rate) in zip(self._wrappers(), state["rates"], strict=True):
            wrapper.rate_set = set_rate

    def alone(self, center: Mapping[str, Any], worker: Mapping[str, Any], vector: Vector) -> dict[str, Any]:
        """Return the state of a process alone that continues a training of several ranks.

        Args:
            center: the state of the rank whose model is the centre.
            worker: that of the first worker.
            vector: the centre.
        """
        wrappers, optimizers = self._wrappers(), self._optimizers()
        trained = [one for wrapper in wrappers for one in wrapper.owned]
        segments = layout_of(trained).segments
        weights = {
            memory_of(one): vector[segment.place].reshape(segment.shape)
            for one, segment in zip(trained, segments, strict=True)
        }
        others = iter(center["variables"])
        variables = [
            weights[memory_of(one)] if memory_of(one) in weights else next(others)
            for one in self._model.variables
        ]
        server = center["team"]["part"].get("server")
        runs = "worker" if server is None else next(one.algorithm.optimizer_runs for one in wrappers)
        on_center = iter(server["rule"]["optimizer"]["keras"] if runs == "center" else [])
        states = []
        for one, saved in zip(optimizers, worker["optimizers"], strict=True):
            inner, local = _inner(one), _local(one)
            own = one.variables[: len(one.variables) - len(inner) - len(local)]
            if wrapper_of(one) is None or runs == "worker":
                values = _last(saved, len(inner))
            elif runs == "center":
                values = [next(on_center) for _ in inner]
            else:  # it steps nowhere, so that a worker has saved only its counts and rates
                counts = iter(_last(saved, sum(not variable.shape for variable in inner)))
                values = [
                    value if variable.shape else next(counts)
                    for variable, value in zip(inner, values_of(inner), strict=True)
                ]
            states.append([*values_of(own), *values, *values_of(local)])
        return {"variables": variables, "optimizers": states, "rates": worker["rates"]}

    def load_rates(self, state: Mapping[str, Any]) -> None:
        """Set the learning rates, on resuming in mid-epoch."""
        for wrapper, (rate, set_rate) in zip(self._wrappers(), state["rates"], strict=True):
            if rate is not None:
                wrapper.inner_optimizer.learning_rate = rate
            wrapper.rate_set = set_rate

    def facts(self) -> dict[str, Any]:
        """Return the facts that identify this training."""
        model, team = self._model, self._team
        wrapper = wrapper_of(model.optimizer) or next(iter(self._wrappers()), None)
        algorithm, optimizer = "none", model.optimizer
        if wrapper is not None:
            algorithm, optimizer = wrapper.describe(), wrapper.inner_optimizer
        return {
            "algorithm": algorithm,
            "optimizer": type(optimizer).__name__,
            "servers": 0 if team is None else team.member.servers,
            "workers": 0 if team is None else team.share[1],
            **({} if team is None or team.member.group_size == 1 else {"group_size": team.member.group_size}),
            "model": _numbered(
                layout_of(model.trainable_variables) if team is None else team.model.parameters.layout
            ),
        }

    def synchronise(self) -> None:
        """On JAX copy the state that `fit` holds during an epoch back into the variables."""
        synchronise(self._model)

    def _optimizers(self) -> list[Any]:
        found = list(optimizers_of(self._model).values())
        if not self._model.optimizer.built:
            self._model.optimizer.build(self._model.trainable_variables)
        return found

    def _wrappers(self) -> list[Wrapper]:
        found = map(wrapper_of, optimizers_of(self._model).values())
        return [wrapper for wrapper in found if wrapper is not None]

    def _variables(self) -> list[Any]:
        """Return all variables that are not in the session's vector."""
        owned = [one for wrapper in self._wrappers() for one in wrapper.owned]
        return untrained(self._model, owned if self._team is not None else [])

    def _of(self, optimizer: Any) -> list[Any]:
        """Return an optimizer's variables; only counts and rates if it does not step on this rank."""
        wrapper = wrapper_of(optimizer)
        steps = self._team is None or wrapper is None or wrapper.steps_workers
        # In a group the wrapper itself has a sum, which every batch begins anew.
        grouped = wrapper is not None and wrapper.ranks.grouped
        variables = wrapper.inner_optimizer.variables if wrapper and grouped else optimizer.variables
        return [one for one in variables if steps or not one.shape]


def _inner(optimizer: Any) -> list[Any]:
    """Return the variables of the user's optimizer; a wrapper's own come before them."""
    wrapper = wrapper_of(optimizer)
    variables: list[Any] = optimizer.variables if wrapper is None else wrapper.inner_optimizer.variables
    return variables


def _local(optimizer: Any) -> list[Any]:
    """Return the variables of a local optimizer; they come last."""
    wrapper = wrapper_of(optimizer)
    return [] if wrapper is None or wrapper.local_optimizer is None else wrapper.local_optimizer.variables


def _last(values: Sequence[Any], count: int) -> Sequence[Any]:
    return values[len(values) - count :]


def _with_own_integers(variables: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    if len(variables) != len(values):
        return list(values)  # `assign` refuses them
    pairs = zip(variables, values_of(variables), values, strict=True)
    return [value if "float" in variable.dtype else own for variable, own, value in pairs]


def _numbered(layout: Layout) -> str:
    """Return the shapes and types of weights without names: Keras names each copy of a model differently."""
    segments = [
        replace(one, name=f"number {place}", tied_to=None) for place, one in enumerate(layout.segments)
    ]
    return replace(layout, segments=tuple(segments)).to_json()


def _rate(wrapper: Wrapper) -> list[float | None]:
    """Return an optimizer's learning rate, None for a schedule's, and the rate that a callback has set."""
    inner = wrapper.inner_optimizer
    scheduled = schedule_of(inner) is not None
    return [None if scheduled else float(keras.ops.convert_to_numpy(inner.learning_rate)), wrapper.rate_set]
