"""Options: read a value in the same way from a command line and from a file."""

from __future__ import annotations

import difflib
import enum
import math
import reprlib
import shlex
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from nnlo_common.base._errors import ConfigurationError

__all__ = ["Given", "OptionKind", "Option", "nearest"]

_SHOWN = reprlib.Repr()  # whatever is given, it is told in one line
_SHOWN.maxstring = _SHOWN.maxother = 60
_SHOWN.maxdict = _SHOWN.maxlist = 3


class OptionKind(enum.Enum):
    """What the value of an option may be; the values are for people."""

    WORD = "a text"
    WORDS = "a text or a list of texts"
    COMMAND = "a list of texts, or a line as a shell would split it"
    WHOLE = "a whole number"
    REAL = "a finite number"
    FLAG = "true or false"
    PAIRS = "a table of names and values, name=value on the command line"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option of `nnlo train`.

    Attributes:
        name: in a file; on the command line it is `flag`.
        group: the heading under which it is explained.
        kind: what its value may be.
        help: what it does.
        metavar: what stands for the value in the help.
        default: its value if it is not given; None where there is none.
        bare: what its flag means without a value; None if it needs one.
        least: the smallest number that will do.
        above: the number that it has to be above.
        below: the number that it has to be below.
        choices: the texts that will do; none: any.
    """

    name: str
    group: str
    kind: OptionKind
    help: str
    metavar: str = ""
    default: Any = None
    bare: str | None = None
    least: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """How it is called on the command line.

        Example:
            >>> Option(name="learning_rate", group="", kind=OptionKind.REAL, help="").flag
            '--learning-rate'
        """
        return "--" + self.name.replace("_", "-")


@dataclass(frozen=True, slots=True)
class Given:
    """A value that somebody has given to an option.

    Attributes:
        value: as it was given.
        place: by what: the command line, or a file.
    """

    value: Any
    place: str = "the command line"

    def read(self, option: Option) -> Any:
        """Return the value as what the option is.

        Raises:
            ConfigurationError: it is none.

        Example:
            >>> Given("1e-3").read(Option(name="rate", group="", kind=OptionKind.REAL, help=""))
            0.001
        """
        value = _READERS[option.kind](self, option)
        if option.choices and value not in option.choices:
            meant = nearest(value, option.choices)
            self.refuse(option, f"must be one of {', '.join(option.choices)}{meant}")
        return value

    def refuse(self, option: Option, expected: str) -> NoReturn:
        """Say what is expected in its place."""
        shown = _SHOWN.repr(self.value)
        asked = f"{option.flag} {shown}" if self.by_hand else f"{self.place}: {option.name} = {shown}"
        raise ConfigurationError(f"{asked} is not possible: it {expected}")

    @property
    def by_hand(self) -> bool:
        """Whether it was given on the command line."""
        return self.place == Given.__dataclass_fields__["place"].default

    def _word(self, option: Option) -> str:
        if not isinstance(self.value, str) or not self.value.strip():
            self.refuse(option, f"must be {OptionKind.WORD.value} that is not empty")
        return self.value

    def _words(self, option: Option) -> tuple[str, ...]:
        words = [self.value] if isinstance(self.value, str) else self.value
        if not isinstance(words, list | tuple) or not words or not all(map(_is_text, words)):
            self.refuse(option, f"must be {OptionKind.WORDS.value} that are not empty")
        return tuple(words)

    def _command(self, option: Option) -> tuple[str, ...]:
        if not isinstance(self.value, str):
            return self._words(option)
        try:
            return Given(shlex.split(self.value), self.place)._words(option)
        except ValueError as error:
            self.refuse(option, f"cannot be split into arguments ({error}); mend its quotes")

    def _whole(self, option: Option) -> int:
        # YAML has texts where people mean numbers, e.g. 1e-3; a command line has nothing else.
        text = str(self.value).strip()
        if isinstance(self.value, bool | float) or not text.removeprefix("-").isdecimal():
            self.refuse(option, f"must be {_ranged(option)}")
        return int(self._within(option, int(text)))

    def _real(self, option: Option) -> float:
        try:
            number = float(self.value) if isinstance(self.value, str | int | float) else math.nan
        except (ValueError, OverflowError):
            number = math.nan
        if isinstance(self.value, bool) or not math.isfinite(number):
            self.refuse(option, f"must be {_ranged(option)}")
        return self._within(option, number)

    def _within(self, option: Option, number: float) -> float:
        low = option.least is None or number >= option.least
        if not low or not (option.above is None or number > option.above) or number > 2**63 - 1:
            self.refuse(option, f"must be {_ranged(option)}")
        if option.below is not None and not number < option.below:
            self.refuse(option, f"must be {_ranged(option)}")
        return number

    def _flag(self, option: Option) -> bool:
        if not isinstance(self.value, bool):
            self.refuse(option, f"must be {OptionKind.FLAG.value}")
        return self.value

    def _pairs(self, option: Option) -> dict[str, Any]:
        pairs = dict(self._split(option)) if isinstance(self.value, list) else self.value
        if not isinstance(pairs, Mapping) or not all(_is_name(name) for name in pairs):
            self.refuse(option, f"must be {OptionKind.PAIRS.value}")
        for name, value in pairs.items():
            if not _is_plain(value):
                self.refuse(option, f"has {name!r}, whose value must be a number, a text, or a list of these")
        return dict(pairs)

    def _split(self, option: Option) -> Iterable[tuple[str, Any]]:
        """The pairs of a command line, where each is `name=value`."""
        names = set()
        for pair in self.value:
            name, equals, text = pair.partition("=") if isinstance(pair, str) else ("", "", "")
            if not equals or not name.isidentifier():
                self.refuse(option, "must be pairs like depth=3")
            if name in names:
                self.refuse(option, f"has {name!r} twice; give it once")
            names.add(name)
            yield name, _literal(text)


_READERS: Mapping[OptionKind, Callable[[Given, Option], Any]] = {
    OptionKind.WORD: Given._word,
    OptionKind.WORDS: Given._words,
    OptionKind.COMMAND: Given._command,
    OptionKind.WHOLE: Given._whole,
    OptionKind.REAL: Given._real,
    OptionKind.FLAG: Given._flag,
    OptionKind.PAIRS: Given._pairs,
}


def nearest(asked: object, known: Iterable[str]) -> str:
    """Return a question that names the nearest right word, if there is one.

    Example:
        >>> nearest("easdg", ["easgd", "gem"])
        "; did you mean 'easgd'?"
    """
    lowered: dict[str, str] = {}
    for word in known:
        lowered.setdefault(word.lower(), word)
    word = str(asked).lower()
    # Two letters that have changed places are what people mistype most.
    near = [one for one in lowered if one != word and sorted(one) == sorted(word)]
    near = near or difflib.get_close_matches(word, lowered, 1)
    return f"; did you mean {lowered[near[0]]!r}?" if near else ""


def _ranged(option: Option) -> str:
    """The kind of a number with its range."""
    bounds = [
        f"{word} {bound:g}"
        for word, bound in (("at least", option.least), ("above", option.above), ("below", option.below))
        if bound is not None
    ]
    return " ".join([option.kind.value, *([" and ".join(bounds)] if bounds else [])])


def _literal(text: str) -> Any:
    """What a text means in TOML, if it means a number, a truth or a list; else the text."""
    try:
        value = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return value["value"] if set(value) == {"value"} and _is_plain(value["value"]) else text


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value.isidentifier()


def _is_plain(value: object) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))
