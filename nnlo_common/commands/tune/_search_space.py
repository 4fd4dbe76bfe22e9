"""Search space: parameters of the model, and options of `nnlo train`, and how its text is read."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.commands.train._option import Given, Option, OptionKind, nearest
from nnlo_common.commands.train._python_file import parameters_of
from nnlo_common.commands.train._settings import OPTIONS, SEARCHABLE, settings_of

__all__ = ["Parameter", "Space", "space_of"]

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


# -- reading of a search space: parameters of the model, and options of `nnlo train` -------------------
#     {"width": {"low": 16, "high": 256, "log": True},         whole numbers, as both ends are
#      "activation": ["relu", "tanh"],                         one of these
#      "learning_rate": (1e-4, 1e-1, "log"),                   the same as a table of low, high and log
#      "momentum": {"low": 0.0, "high": 0.99, "when": {"optimizer": "sgd"}}}
#
# A name is a parameter of get_model() or an option; "optimizer_option.NAME" is one of the optimizer's
# own.

_KEYS = ("low", "high", "step", "log", "choices", "when")
_TABLES = ("model_params", "optimizer_option")
_PLAIN = (bool, int, float, str)


def space_of(table: Any, place: str, make: Any = None) -> Space:
    """Return the space that a table describes.

    Args:
        table: by name, ranges and choices.
        place: its origin, for messages.
        make: the function get_model() of a Python file; None: there is none.

    Raises:
        ConfigurationError: it is invalid; the message names the parameter.

    Example:
        >>> space_of({"batch": (16, 64, "log")}, "get_space()").probes()
        [{'batch': 16}, {'batch': 64}]
    """
    if not isinstance(table, Mapping) or not table:
        raise ConfigurationError(
            f"{place} has {table!r:.80}; give a table of parameters by name, e.g. "
            '{"learning_rate": {"low": 1e-4, "high": 0.1, "log": True}}'
        )
    found: dict[str, Parameter] = {}
    for name, told in table.items():
        one = _Reader(name, f"{place}: {name!r}", make).read(told)
        _check_when(one, f"{place}: {name!r}", found)
        found[name] = one
    return Space(tuple(found.values()))


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads one parameter.

    Attributes:
        name: of it.
        place: for messages.
        make: the function that makes the model.
    """

    name: str
    place: str
    make: Any

    def read(self, told: Any) -> Parameter:
        table, key = self._home()
        facts = self._facts(told)
        option = OPTIONS[key] if not table else None
        when = self._when(facts.pop("when", {}))
        if "choices" in facts:
            choices = self._choices(facts, option)
            return Parameter(name=self.name, table=table, key=key, choices=choices, when=when)
        self._check_default(table, key)
        return Parameter(name=self.name, table=table, key=key, when=when, **self._range(facts, option))

    def _home(self) -> tuple[str, str]:
        """Return the table of the parameter, and its name there."""
        if not isinstance(self.name, str):
            self.refuse("names must be texts")
        table, dot, key = self.name.partition(".")
        if dot and table in _TABLES and key.isidentifier():
            if table == "model_params" and not self._taken(key):
                self.refuse(f"{self._model()} has no such parameter{nearest(key, parameters_of(self.make))}")
            return table, key
        model, option = self._taken(self.name), self.name in SEARCHABLE
        if model and option and self.name in parameters_of(self.make):
            self.refuse(
                f"it is an option and a parameter of get_model(); write 'model_params.{self.name}' for the "
                "parameter, or give that another name"
            )
        if not model and not option:
            self._refuse_unknown()
        return ("", self.name) if option else ("model_params", self.name)

    def _refuse_unknown(self) -> NoReturn:
        if self.name in OPTIONS:
            self.refuse("it is not a searchable option; these are: " + ", ".join(SEARCHABLE))
        meant = nearest(self.name, [*parameters_of(self.make), *SEARCHABLE])
        self.refuse(f"{self._model()} has no such parameter, nor is it an option of nnlo train{meant}")

    def _facts(self, told: Any) -> dict[str, Any]:
        """Return the description as a table; it may be a list, a tuple or a table."""
        if isinstance(told, list):
            return {"choices": told}
        if isinstance(told, tuple) and len(told) in (2, 3) and told[2:] in ((), ("log",)):
            return {"low": told[0], "high": told[1], "log": len(told) == 3}
        if not isinstance(told, Mapping):
            self.refuse(f"{told!r:.60} is neither a list of choices nor a table of low and high")
        for key in told:
            if key not in _KEYS:
                self.refuse(f"{key!r} is unknown{nearest(key, _KEYS)}; use {', '.join(_KEYS)}")
        if "choices" in told and {"low", "high", "step", "log"} & told.keys():
            self.refuse("it has choices and a range; give one of the two")
        if "choices" not in told and not {"low", "high"} <= told.keys():
            self.refuse("it needs low and high, or choices")
        return dict(told)

    def _choices(self, facts: Mapping[str, Any], option: Option | None) -> tuple[Any, ...]:
        choices = facts["choices"]
        if not isinstance(choices, list | tuple) or not choices:
            self.refuse(f"choices are {choices!r:.60}; give a list that is not empty")
        for one in choices:
            if not isinstance(one, _PLAIN) or (isinstance(one, float) and not math.isfinite(one)):
                self.refuse(f"the choice {one!r:.60} is not a text, a finite number, true or false")
        if len({(type(one) is bool, one) for one in choices}) < len(choices):
            self.refuse(f"choices are {list(choices)}, one of them twice; give each once")
        return tuple(choices if option is None else [Given(one, self.place).read(option) for one in choices])

    def _range(self, facts: Mapping[str, Any], option: Option | None) -> dict[str, Any]:
        if option is not None and option.kind not in (OptionKind.WHOLE, OptionKind.REAL):
            self.refuse(
                f"a range of --{option.name.replace('_', '-')} has no meaning; give a list of choices"
            )
        ends = [self._number(facts[name], name, option) for name in ("low", "high")]
        if not all(isinstance(end, int) for end in ends):
            ends = [float(end) for end in ends]
        low, high = ends
        step, log = facts.get("step"), facts.get("log", False)
        if low >= high:
            self.refuse(f"low is {low} and high {high}; high must be above low")
        if not isinstance(log, bool):
            self.refuse(f"log is {log!r:.60}; it must be true or false")
        if log and low <= 0:
            self.refuse(f"low is {low}, which a logarithmic scale does not have; give one above 0")
        if step is not None:
            step = self._number(step, "step", None)
            if log:
                self.refuse("it has a step on a logarithmic scale; leave out step, or log")
            if not 0 < step <= high - low or (isinstance(low, int) and not isinstance(step, int)):
                self.refuse(f"step is {step}; give one above 0 and up to {high - low}, of the type of low")
        return {"low": low, "high": high, "step": step, "log": log}

    def _number(self, value: Any, name: str, option: Option | None) -> float:
        if isinstance(value, str):  # YAML reads 1e-3 as a text
            try:
                value = float(value)
            except ValueError:
                self.refuse(f"{name} is {value!r:.60}; it must be a number")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self.refuse(f"{name} is {value!r:.60}; it must be a finite number")
        number: float = value if option is None else Given(value, f"{self.place}, {name}").read(option)
        return number

    def _check_default(self, table: str, key: str) -> None:
        """Refuse a range for a parameter whose default is a text or boolean."""
        known = parameters_of(self.make).get(key) if table == "model_params" else None
        if known is not None and isinstance(known.default, str | bool):
            self.refuse(f"get_model({key}={known.default!r}) takes no number; give a list of choices")

    def _when(self, told: Any) -> dict[str, tuple[Any, ...]]:
        if not isinstance(told, Mapping):
            self.refuse(f"when is {told!r:.60}; give a table such as {{optimizer = 'sgd'}}")
        return {
            name: tuple(value) if isinstance(value, list | tuple) else (value,)
            for name, value in told.items()
        }

    def _taken(self, name: str) -> bool:
        """Whether get_model takes it."""
        known = parameters_of(self.make)
        if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values()):
            return name.isidentifier() and name not in OPTIONS
        return name in known

    def _model(self) -> str:
        if self.make is None:
            return "the model, which is not a Python file,"
        return f"get_model({', '.join(parameters_of(self.make))})"

    def refuse(self, problem: str) -> NoReturn:
        raise ConfigurationError(f"{self.place} cannot be searched: {problem}")


def _check_when(one: Parameter, place: str, before: Mapping[str, Parameter]) -> None:
    """Refuse conditions on unknown parameters or impossible values."""
    for name, values in one.when.items():
        known: Sequence[Any] = before[name].choices if name in before else ()
        if not known:
            having = [each.name for each in before.values() if each.choices]
            raise ConfigurationError(
                f"{place} depends on {name!r}, which is not an earlier parameter with choices"
                f"{nearest(name, having)}"
            )
        if odd := [value for value in values if value not in known]:
            raise ConfigurationError(
                f"{place} depends on {name} = {odd[0]!r}, but the choices of {name} are "
                f"{', '.join(map(repr, known))}"
            )
