"""Search space: parameters of the model, and options of `nnlo train`; `_space_reader` parses it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.commands.train._option import Given
from nnlo_common.commands.train._settings import OPTIONS, settings_of

__all__ = ["Parameter", "Space"]

# The rounding error allowed in a multiple of a step.
_NO_STEP = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of the search.

    Attributes:
        name: in the space, and for Optuna.
        table: the option whose table it is in; empty if it is an option itself.
        key: its name there.
        choices: the possible values; empty: a range.
        low: the lowest value.
        high: the highest.
        step: between values; None: any number.
        log: whether all orders of magnitude are equally likely.
        when: the values of other parameters with which it is searched.
    """

    name: str
    table: str
    key: str
    choices: tuple[Any, ...] = ()
    low: float = 0
    high: float = 0
    step: float | None = None
    log: bool = False
    when: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def active(self, chosen: Mapping[str, Any]) -> bool:
        """Whether it is searched, given the earlier choices."""
        return all(name in chosen and chosen[name] in values for name, values in self.when.items())

    def holds(self, value: Any) -> bool:
        """Whether a trial may choose this.

        Example:
            >>> tens = Parameter(name="width", table="", key="width", low=10, high=50, step=10)
            >>> tens.holds(30), tens.holds(35), tens.holds(60), tens.holds(30.0)
            (True, False, False, False)
        """
        if self.choices:
            return any(type(one) is type(value) and one == value for one in self.choices)
        whole = isinstance(self.low, int) and isinstance(self.high, int)
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            return False
        steps = (value - self.low) / self.step if self.step else 0.0
        return self.low <= value <= self.high and abs(steps - round(steps)) < _NO_STEP

    @property
    def finite(self) -> bool:
        """Whether the number of its values is finite."""
        whole = isinstance(self.low, int) and isinstance(self.high, int)
        return bool(self.choices) or whole or self.step is not None

    def suggest(self, trial: Any) -> Any:
        """Let a trial choose."""
        if self.choices:
            return trial.suggest_categorical(self.name, self.choices)
        if isinstance(self.low, int) and isinstance(self.high, int):
            return trial.suggest_int(self.name, self.low, self.high, step=int(self.step or 1), log=self.log)
        return trial.suggest_float(self.name, self.low, self.high, step=self.step, log=self.log)


@dataclass(frozen=True, slots=True)
class Space:
    """All parameters of a search; a parameter comes after those that it depends on."""

    parameters: tuple[Parameter, ...]

    def suggest(self, trial: Any) -> dict[str, Any]:
        """Let a trial choose all active parameters."""
        chosen: dict[str, Any] = {}
        for one in self.parameters:
            if one.active(chosen):
                chosen[one.name] = one.suggest(trial)
        return chosen

    def probes(self) -> list[dict[str, Any]]:
        """Return points to check the options with: both ends of all ranges, and each choice once."""
        ends = [
            {one.name: one.choices[0] if one.choices else getattr(one, end) for one in self.parameters}
            for end in ("low", "high")
        ]
        found = ends + [ends[0] | {one.name: choice} for one in self.parameters for choice in one.choices[1:]]
        return [self.active(point) for point in found]

    def active(self, point: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters of a point that are active, given its other values."""
        chosen: dict[str, Any] = {}
        for one in self.parameters:
            if one.name in point and one.active(chosen):
                chosen[one.name] = point[one.name]
        return chosen

    def applied(self, given: Mapping[str, Given], chosen: Mapping[str, Any]) -> dict[str, Given]:
        """Return the options of a training, merged with the chosen parameters."""
        result, place = dict(given), "the search"
        for one in self.parameters:
            if one.name not in chosen:
                continue
            if one.table:
                table = result[one.table].read(OPTIONS[one.table]) if one.table in result else {}
                result[one.table] = Given({**table, one.key: chosen[one.name]}, place)
            else:
                result[one.key] = Given(chosen[one.name], place)
        return result

    def check_grid(self) -> None:
        """Refuse parameters with infinitely many values."""
        if endless := [one.name for one in self.parameters if not one.finite]:
            raise ConfigurationError(
                f"--hyper-opt grid tries each combination, but {', '.join(map(repr, endless))} can have any "
                "value in a range; give a step, or choices"
            )

    def check(self, given: Mapping[str, Given]) -> None:
        """Refuse parameters that are both given and searched, and values that no training takes."""
        for one in self.parameters:
            table = given[one.table].read(OPTIONS[one.table]) if one.table in given else {}
            if one.key in table or (not one.table and one.key in given):
                raise ConfigurationError(
                    f"{one.name!r} is both searched and given; leave it out of the space or of the options"
                )
        plain = _problem(given)
        for probe in self.probes():
            try:
                settings_of(self.applied(given, probe))
            except ConfigurationError as error:
                if str(error) == plain:  # whatever the search tries
                    raise
                told = ", ".join(f"{name} = {value}" for name, value in probe.items())
                raise ConfigurationError(f"the search would try {told}: {error}") from None


def _problem(given: Mapping[str, Given]) -> str:
    """Return what is wrong with options without a search; empty: nothing."""
    try:
        settings_of(given)
    except ConfigurationError as error:
        return str(error)
    return ""
