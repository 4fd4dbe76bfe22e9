"""Option: a name, a kind and a range; values from a command line and from a file are read alike."""

from __future__ import annotations

import difflib
import enum
import math
import reprlib
import shlex
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn

from nnlo_common.base._errors import ConfigurationError, MissingExtraError
from nnlo_common.base._file_access import read_whole
from nnlo_common.base._limited_formats import LARGEST_OPTIONS, parsed_yaml
from nnlo_common.base._limited_formats import parsed_toml as limited_toml

__all__ = [
    "Given",
    "Option",
    "OptionKind",
    "as_toml",
    "kind_of",
    "nearest",
    "option",
    "option_text",
    "options_of",
    "parsed_toml",
    "read_config",
]

# -- option: a name, a kind and a range; values from a command line and from a file are read alike ------

_SHOWN = reprlib.Repr()  # show any value in one line
_SHOWN.maxstring = _SHOWN.maxother = 60
_SHOWN.maxdict = _SHOWN.maxlist = 3
_LARGEST = 2**63 - 1  # the largest integer of TOML


class OptionKind(enum.Enum):
    """Kinds of option values; the texts appear in messages."""

    WORD = "a text"
    WORDS = "a text or a list of texts"
    COMMAND = "a list of texts, or a line as a shell would split it"
    WHOLE = "a whole number"
    REAL = "a finite number"
    FLAG = "true or false"
    PAIRS = "a table of names and values, name=value on the command line"


_KINDS = {
    str: OptionKind.WORD,
    tuple: OptionKind.WORDS,
    int: OptionKind.WHOLE,
    float: OptionKind.REAL,
    bool: OptionKind.FLAG,
    dict: OptionKind.PAIRS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option of `nnlo train`.

    Attributes:
        name: in a file; on the command line it is `flag`.
        group: its heading in the help.
        kind: of its value.
        help: what it does.
        metavar: placeholder for the value in the help.
        default: its value if it is not given; None: no default.
        bare: the value of its flag alone; None if the flag needs a value.
        least: the smallest valid number.
        above: the number must be above this.
        below: the number must be below this.
        choices: the valid texts; empty: any.
        words: texts that are valid in place of a number.
        reader: which readers of samples take it under its name: "all", or that of "training"; empty: none.
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
    words: tuple[str, ...] = ()
    reader: Literal["", "training", "all"] = ""

    @property
    def flag(self) -> str:
        """Its name on the command line.

        Example:
            >>> Option(name="learning_rate", group="", kind=OptionKind.REAL, help="").flag
            '--learning-rate'
        """
        return "--" + self.name.replace("_", "-")

    @property
    def expected(self) -> str:
        """Its kind, with the range of a number."""
        bounds = {"at least": self.least, "above": self.above, "below": self.below}
        told = " and ".join(f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None)
        also = "".join(f" or {word!r}" for word in self.words)
        return f"{self.kind.value} {told}".strip() + also

    def holds(self, number: float) -> bool:
        """Whether a number is in the range."""
        low = (self.least is None or number >= self.least) and (self.above is None or number > self.above)
        return low and number <= _LARGEST and (self.below is None or number < self.below)


def option(group: str, help: str, metavar: str = "", default: Any = None, **facts: Any) -> Any:  # noqa: A002
    """Return a dataclass field for an option; the kind follows from the field's type."""
    metadata = {"group": group, "help": help, "metavar": metavar, **facts}
    made: dict[str, Any] = {"default_factory": dict} if default is dict else {"default": default}
    return field(**made, metadata=metadata)


def options_of(settings: type) -> dict[str, Option]:
    """Return the options of a dataclass, by name: its fields, or those in a field's metadata.

    Example:
        >>> @dataclass
        ... class Few:
        ...     epochs: int = option("Training", "how often", default=1, least=1)
        >>> options_of(Few)["epochs"].expected
        'a whole number at least 1'
    """
    hints, found = typing.get_type_hints(settings), dict[str, Option]()
    for one in fields(settings):
        if held := one.metadata.get("options"):
            found |= held
            continue
        default = None if one.default in (MISSING, ()) else one.default
        name = one.name.removesuffix("_")  # a word of Python itself
        facts = {"name": name, "default": default, **kind_of(hints[one.name]), **one.metadata}
        found[name] = Option(**facts)
    return found


def kind_of(annotation: Any) -> dict[str, Any]:
    """Return the kind of option for a type; `| None` is ignored.

    A `Literal` is a choice of texts; beside a number its texts are valid in place of it.

    Example:
        >>> kind_of(float | None)
        {'kind': <OptionKind.REAL: 'a finite number'>}
    """
    if typing.get_origin(annotation) in (UnionType, typing.Union):
        annotation, *literals = (one for one in typing.get_args(annotation) if one is not NoneType)
        if literals:
            return kind_of(annotation) | {"words": typing.get_args(*literals)}
    origin = typing.get_origin(annotation) or annotation
    if origin is Literal:
        return {"kind": OptionKind.WORD, "choices": typing.get_args(annotation)}
    return {"kind": _KINDS[origin]}


@dataclass(frozen=True, slots=True)
class Given:
    """A value that was given to an option.

    Attributes:
        value: as it was given.
        place: its origin: the command line, or a file.
    """

    value: Any
    place: str = "the command line"

    def read(self, option: Option) -> Any:
        """Parse the value for an option.

        Raises:
            ConfigurationError: it is not valid.

        Example:
            >>> Given("1e-3").read(Option(name="rate", group="", kind=OptionKind.REAL, help=""))
            0.001
        """
        if self.value in option.words:
            return self.value
        value = _READERS[option.kind](self, option)
        if option.choices and value not in option.choices:
            meant = nearest(value, option.choices)
            self.refuse(option, f"must be one of {', '.join(option.choices)}{meant}")
        return value

    def refuse(self, option: Option, expected: str) -> NoReturn:
        """Raise an error that says what is expected."""
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
            self.refuse(option, f"cannot be split into arguments ({error}); fix its quotes")

    def _number(self, option: Option) -> float:
        # YAML reads 1e-3 as a text, and all values of a command line are texts.
        whole = option.kind is OptionKind.WHOLE
        fits = isinstance(self.value, str | int if whole else str | int | float)
        try:
            number: float = (int if whole else float)(self.value) if fits else math.nan
            fits = not isinstance(self.value, bool) and math.isfinite(number) and option.holds(number)
        except (ValueError, OverflowError):
            fits = False
        if not fits:
            self.refuse(option, f"must be {option.expected}")
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
        """Yield the `name=value` pairs of a command line."""
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
    OptionKind.WHOLE: Given._number,
    OptionKind.REAL: Given._number,
    OptionKind.FLAG: Given._flag,
    OptionKind.PAIRS: Given._pairs,
}


def nearest(asked: object, known: Iterable[str]) -> str:
    """Return a question that names the nearest known word, if there is one.

    Example:
        >>> nearest("easdg", ["easgd", "gem"])
        "; did you mean 'easgd'?"
    """
    lowered: dict[str, str] = {}
    for word in known:
        lowered.setdefault(word.lower(), word)
    word = str(asked).lower()
    # Swapped letters are the most frequent typing error.
    near = [one for one in lowered if one != word and sorted(one) == sorted(word)]
    near = near or difflib.get_close_matches(word, lowered, 1)
    return f"; did you mean {lowered[near[0]]!r}?" if near else ""


def _literal(text: str) -> Any:
    """Parse a text as TOML number, boolean or list; return other texts unchanged."""
    try:
        value = limited_toml(f"value = {text}")
    except ValueError:
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


# -- files of options: TOML and YAML read strictly, and TOML written so that it reads the same ----------


def read_config(path: str | Path, flag: str = "--config") -> dict[str, Given]:
    """Return the values of options in a file, by name.

    Args:
        path: of the file.
        flag: the flag that named it.

    Raises:
        ConfigurationError: it cannot be read, or is not valid.
        MissingExtraError: it is YAML, and PyYAML is not installed.
    """
    path = Path(path).expanduser()
    asked = f"{flag} {path}"
    if path.suffix not in (".toml", ".yaml", ".yml"):
        raise ConfigurationError(f"{asked} is neither .toml nor .yaml; rename it, or name another file")
    text = option_text(path, asked)
    found = parsed_toml(text, asked) if path.suffix == ".toml" else _yaml(text, asked)
    if found in (None, {}):
        raise ConfigurationError(f"{asked} is empty; write options into it, such as epochs")
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ConfigurationError(
            f"{asked} has no names of options in it, but {type(found).__name__} data; write one option per "
            f"line, e.g. {'epochs = 5' if path.suffix == '.toml' else 'epochs: 5'}"
        )
    given: dict[str, Given] = {}
    for name, value in found.items():
        plain = name.replace("-", "_")
        if plain in given:
            raise ConfigurationError(f"{asked} has {plain!r} twice; give it once")
        given[plain] = Given(value, asked)
    return given


def option_text(path: Path, asked: str, largest: int = LARGEST_OPTIONS) -> str:
    """Return the text of a file of options.

    Args:
        path: the file.
        asked: the flag and file, for messages.
        largest: bytes that are still read.

    Raises:
        ConfigurationError: it cannot be read, is too large, or is no text.
    """
    try:
        return read_whole(path, largest).decode("utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"{asked} cannot be read ({error.strerror}); name a file of options"
        ) from None
    except (UnicodeDecodeError, ValueError):  # ValueError: of a zero byte in the path
        raise ConfigurationError(f"{asked} is not UTF-8 text; name a file of options") from None


def parsed_toml(text: str, asked: str) -> dict[str, Any]:
    """Parse TOML.

    Args:
        text: the TOML.
        asked: the flag and file, for messages.

    Raises:
        ConfigurationError: it is not valid.
    """
    try:
        return limited_toml(text)
    except ValueError as error:
        raise ConfigurationError(f"{asked} is not valid TOML: {error}; fix the file there") from None


def _yaml(text: str, asked: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise MissingExtraError(f"{asked}, a YAML file,", "PyYAML", "yaml") from None

    try:
        return parsed_yaml(text, _strict(yaml), yaml.YAMLError)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        where = "" if mark is None else f", line {mark.line + 1}"
        said = problem or str(error).splitlines()[0]
        said += " (YAML takes no tabs)" if "'\\t'" in said else ""
    except ValueError as error:  # e.g. an invalid date
        where, said = "", str(error)
    raise ConfigurationError(f"{asked}{where} is not valid YAML for options: {said}; fix the file there")


def _strict(yaml: Any) -> Any:
    """Return PyYAML's safe loader without aliases and duplicate names."""

    class Strict(yaml.SafeLoader):  # type: ignore[misc, unused-ignore]
        """Refuses aliases and duplicate names."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                mark = self.peek_event().start_mark
                raise yaml.MarkedYAMLError(
                    problem="aliases are not allowed; write the value", problem_mark=mark
                )
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            names: set[str] = set()
            for key, _ in node.value:
                name = key.value if isinstance(key.value, str) else f"line {key.start_mark}"
                if name in names:
                    problem = f"{key.value!r} is there twice; give it once"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
                names.add(name)
            return super().construct_mapping(node, deep)

    return Strict


def as_toml(values: Mapping[str, Any], options: Mapping[str, Option]) -> str:
    """Return TOML that reads as these values, options under the headings of their groups.

    Args:
        values: by name; None and empty values are left out.
        options: by name.
    """
    import tomli_w

    plain = {name: value for name, value in values.items() if value not in (None, (), {})}
    tables = {name: plain.pop(name) for name, value in values.items() if isinstance(value, Mapping) and value}
    parts = []
    for group in dict.fromkeys(option.group for option in options.values()):
        own = {name: plain[name] for name, one in options.items() if one.group == group and name in plain}
        if own:
            parts.append(f"# {group}\n{tomli_w.dumps(own)}")
    return "\n".join([*parts, tomli_w.dumps(tables)])
