"""The command line of `nnlo train`: flags from the options, merged with a file of options."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.commands._nnlo_words import in_our_words, value_in_our_words
from nnlo_common.commands.train._job import first_of_job
from nnlo_common.commands.train._option import Given, Option, OptionKind, nearest
from nnlo_common.commands.train._option_files import read_config
from nnlo_common.commands.train._settings import OPTIONS, Settings, settings_of

__all__ = ["Parser", "add_flags", "given_by", "layout", "read"]

CONFIG = Option(
    name="config", group="", kind=OptionKind.WORD, help="a file of options, .toml or .yaml", metavar="FILE"
)
_METAVARS = {OptionKind.WHOLE: "N", OptionKind.REAL: "X", OptionKind.PAIRS: "NAME=VALUE"}


class Parser(argparse.ArgumentParser):
    """Raises instead of exiting, so that one rank reports for all; one rank prints the help, too."""

    def error(self, message: str) -> NoReturn:
        """Raise the parser's message with a hint at the help."""
        raise ConfigurationError(f"{message}; see {self.prog} --help")

    def print_help(self, file: Any = None) -> None:
        """Print the help, on one rank."""
        if first_of_job():
            super().print_help(file)


def layout(prog: str) -> argparse.HelpFormatter:
    """Return the layout of a help: 96 columns on any terminal, with room for the flags."""
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=32, width=96)


def add_flags(parser: argparse.ArgumentParser, options: Iterable[Option]) -> None:
    """Add the flags of options, in their groups, and `--config`."""
    _add(parser, CONFIG)
    groups: dict[str, Any] = {}
    for option in options:
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        _add(groups[option.group], option)


def _add(to: Any, option: Option) -> None:
    """Add a flag that keeps its value as text: `Given.read` parses all options."""
    text = option.help.strip().replace("%", "%%")
    facts: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text + _shown_default(option)}
    if option.kind is OptionKind.FLAG:
        to.add_argument(option.flag, action=argparse.BooleanOptionalAction, **facts)
        return
    facts["metavar"] = option.metavar or _METAVARS.get(option.kind, "NAME")
    if option.kind is OptionKind.PAIRS:
        facts |= {"nargs": "+", "action": "extend"}
    elif option.kind is OptionKind.WORDS:
        facts["nargs"] = "+"
    elif option.bare is not None:
        facts |= {"nargs": "?", "const": option.bare}
    to.add_argument(option.flag, **facts)


def _shown_default(option: Option) -> str:
    told = f": {', '.join(option.choices)}" if len(option.choices) > 2 else ""
    if option.default is None or option.default is False:
        return told
    return f"{told} ({'yes' if option.default is True else option.default})"


def read(flags: Mapping[str, Any], unknown: Sequence[str]) -> Settings:
    """Return the settings of a command line.

    Args:
        flags: the values of the flags, by name.
        unknown: words that the parser does not know.

    Raises:
        ConfigurationError: an option is unknown, invalid, or contradicts another.
    """
    return settings_of(given_by(flags, unknown, OPTIONS, "train"))


def given_by(
    flags: Mapping[str, Any], unknown: Sequence[str], options: Mapping[str, Option], command: str
) -> dict[str, Given]:
    """Return the values from a command line and its file of options, by name; flags override the file.

    Args:
        flags: the values of the flags, by name.
        unknown: words that the parser does not know.
        options: all options of the command.
        command: its name.
    """
    if unknown:
        _refuse(unknown, options, command)
    given = {name: Given(value) for name, value in flags.items()}
    config = given.pop("config", None)
    by_file = {} if config is None else read_config(config.read(CONFIG))
    for one in (given, by_file):
        _refuse_old_words(one, options)
    for name in given.keys() & by_file.keys():
        if name in options and options[name].kind is OptionKind.PAIRS:
            table = by_file[name].read(options[name]) | given[name].read(options[name])
            given[name] = Given(table)
    return _with_folder(by_file | given)


def _refuse_old_words(given: Mapping[str, Given], options: Mapping[str, Option]) -> None:
    """Answer options and values of NNLO with ours."""
    if spelled := value_in_our_words({name: one.value for name, one in given.items()}):
        name, words = spelled
        one = given[name]
        asked = options[name].flag if one.by_hand else f"{one.place}: {name}"
        raise ConfigurationError(f"{asked} {one.value!r} is NNLO's spelling; write {words}")
    for name, one in given.items():
        if name not in options and (answer := in_our_words(f"--{name}")):
            raise ConfigurationError(
                f"{one.place} has {name!r}, an option of NNLO; here {answer} (in a file without dashes)"
            )


def _with_folder(given: dict[str, Given]) -> dict[str, Given]:
    """Expand `--checkpoint FOLDER` to `--run FOLDER --checkpoint 1`."""
    folder = given.get("checkpoint")
    if folder is None or "run" in given or not isinstance(folder.value, str) or _is_number(folder.value):
        return given
    return given | {"run": folder, "checkpoint": Given("1", folder.place)}


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _refuse(unknown: Sequence[str], options: Mapping[str, Option], command: str) -> NoReturn:
    """Refuse words that are not options, and name the nearest option."""
    word, _, value = unknown[0].partition("=")
    if not word.startswith("-"):
        raise ConfigurationError(
            f"{word!r} belongs to no option; see nnlo {command} --help (quote a pattern of files, so that "
            "the shell passes it as one word, or put the files after --train)"
        )
    if words := in_our_words(word, value or "".join(unknown[1:2])):
        raise ConfigurationError(f"{word} is an option of NNLO; here {words} (see nnlo {command} --help)")
    flags = ["--config", *(option.flag for option in options.values())]
    raise ConfigurationError(f"there is no option {word}{nearest(word, flags)} (see nnlo {command} --help)")
