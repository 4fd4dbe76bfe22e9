"""Conflicts between arguments of `optimize`; `nnlo tune` refuses the same ones earlier."""

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
    """Refuse what would not repeat, or what several ranks cannot choose.

    Args:
        sampler: chooses; a name, or one of Optuna's.
        lockstep: whether the search is to be the same each time.
        elastic: whether idle ranks join running trials at its end.
        search_ranks: how many ranks only choose.
        in_sequence: whether the sampler goes on from what was chosen last.
        instead: what else could be done about a grid.

    Raises:
        ConfigurationError: two of them do not go together.
    """
    if lockstep and search_ranks:
        raise ConfigurationError(
            f"lockstep=True with search_ranks={search_ranks}: in lock-step each trial is chosen with "
            "what was chosen before it, so nothing can be chosen at the same time; leave one of them out"
        )
    if lockstep and elastic:
        raise ConfigurationError(
            "lockstep=True with elastic=True: which ranks join which trial is a matter of time, and with it "
            "what comes of the trial; leave one of them out"
        )
    if lockstep and isinstance(sampler, str) and sampler == "grid":
        raise ConfigurationError(
            'lockstep=True with sampler="grid": what is left of a grid depends on what has just been '
            f"begun. Leave lockstep out{instead}"
        )
    if search_ranks and in_sequence:
        name = repr(sampler) if isinstance(sampler, str) else type(sampler).__name__
        raise ConfigurationError(
            f"search_ranks={search_ranks} with {name}, which goes on from what was chosen last, so that "
            "several ranks would choose the same. It takes no time to choose; leave search_ranks out"
        )
