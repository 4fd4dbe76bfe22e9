"""Checks for conflicting arguments of `optimize`; `nnlo tune` applies them earlier."""

from __future__ import annotations

from nnlo_common.base._errors import ConfigurationError

__all__ = ["refuse_conflicts"]


def refuse_conflicts(
    sampler: object,
    *,
    lockstep: bool,
    elastic: bool,
    search_ranks: int,
    in_sequence: bool,
    instead: str = "",
) -> None:
    """Refuse arguments that keep a search from repeating, or samplers that several ranks cannot share.

    Args:
        sampler: a name, or an Optuna sampler.
        lockstep: whether the search must repeat.
        elastic: whether idle ranks join running trials at its end.
        search_ranks: how many ranks only choose parameters.
        in_sequence: whether the sampler's next choice continues from its last one.
        instead: another remedy for a grid, appended to the message.

    Raises:
        ConfigurationError: two arguments conflict.
    """
    if lockstep and search_ranks:
        raise ConfigurationError(
            f"lockstep=True with search_ranks={search_ranks}: in lock-step each choice depends on the one "
            "before, so ranks cannot choose at the same time; leave one of them out"
        )
    if lockstep and elastic:
        raise ConfigurationError(
            "lockstep=True with elastic=True: timing decides which ranks join which trial, and so changes "
            "its result; leave one of them out"
        )
    if lockstep and isinstance(sampler, str) and sampler == "grid":
        raise ConfigurationError(
            'lockstep=True with sampler="grid": what is left of a grid depends on which trials have just '
            f"begun. Leave lockstep out{instead}"
        )
    if search_ranks and in_sequence:
        name = repr(sampler) if isinstance(sampler, str) else type(sampler).__name__
        raise ConfigurationError(
            f"search_ranks={search_ranks} with {name}, which continues from its last choice, so several "
            "ranks would choose the same values. It chooses fast; leave search_ranks out"
        )
