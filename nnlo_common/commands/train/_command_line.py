"""The command line of `nnlo train`: flags from the options, merged with a file of options."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.commands.train._job import first_of_job
from nnlo_common.commands.train._option import Given, Option, OptionKind, nearest, read_config
from nnlo_common.commands.train._settings import OPTIONS, Settings, settings_of

__all__ = [
    "NNLO_FLAGS",
    "Parser",
    "add_flags",
    "given_by",
    "in_our_words",
    "layout",
    "read",
    "values_in_our_words",
]

# -- words of the command lines of NNLO (2019), with what to write for them ----------------------------

#: Flags of NNLO's TrainingDriver.py and OptimizationDriver.py that do not exist here by the same name.
NNLO_FLAGS = {
    "--n-masters": "write --servers N",
    "--n-processes": "write --group-size N; the ranks of a group now get different samples",
    "--master-gpu": "leave it out; servers use the CPU, and workers take the GPUs of their host in turn",
    "--sync-every": "write --every N",
    "--easgd": "write --mode easgd",
    "--elastic-force": "write --beta X, divided by the workers, or --alpha X, the moving rate",
    "--elastic-lr": "write --learning-rate X; NNLO never used its --elastic-lr",
    "--elastic-momentum": "write --mode eamsgd --momentum X; NNLO never used its --elastic-momentum",
    "--gem-lr": "write --learning-rate X",
    "--gem-momentum": "write --momentum X",
    "--gem-kappa": "write --kappa X",
    "--worker-optimizer": "write --optimizer NAME; it runs where the algorithm needs it",
    "--worker-optimizer-params": "write --optimizer-option NAME=VALUE",
    "--optimizer-params": "write --optimizer-option NAME=VALUE",
    "--restore": "write --checkpoint, and rerun the same command to resume",
    "--checkpoint-interval": "write --checkpoint N for every N epochs",
    "--early": "write --early-stopping EPOCHS --early-stopping-metric NAME",
    "--validate-every": "leave it out; the centre is validated after each epoch",
    "--thread-validation": "leave it out; workers train on while the server validates",
    "--preload-data": "leave it out; a thread reads ahead, and --cache FOLDER copies the files to each host",
    "--cache-data": "write --cache FOLDER",
    "--train-data": "write --train FILE",
    "--val-data": "write --val FILE",
    "--train-list": "write --train FILE",
    "--val-list": "write --val FILE",
    "--trial-name": "write --run FOLDER",
    "--log-file": "write --log-dir FOLDER",
    "--verbose": "write --log-level info",
    "--monitor": "leave it out: every run writes it down, and nnlo report FOLDER shows it",
    "--tf": "leave it out; export KERAS_BACKEND=tensorflow chooses the back end",
    "--backend": "leave it out; get_model() decides, and KERAS_BACKEND is the back end of Keras",
    "--previous-result": "rerun the same nnlo tune command, which resumes the search in its folder",
    "--example": "write --model FILE; examples/ has models",
}
#: Flags whose value 1 is what we do without them.
_ONE = {
    "--n-masters": "leave it out: one server is the default",
    "--n-processes": "leave it out: each rank that trains is a worker",
}


def in_our_words(flag: str, value: str = "") -> str | None:
    """Return what to write for a flag of NNLO, or None if NNLO had no such flag.

    Args:
        flag: of NNLO.
        value: that was given to it, as far as it is known.

    Example:
        >>> in_our_words("--n_masters")
        'write --servers N'
        >>> in_our_words("--early", "val_loss,~<,4")
        'write --early-stopping 4 --early-stopping-metric val_loss'
    """
    flag = flag.lower().replace("_", "-")
    if flag == "--early" and (spelled := values_in_our_words({"early_stopping": value})):
        return f"write {spelled['early_stopping']}"
    return _ONE.get(flag, NNLO_FLAGS[flag]) if value == "1" and flag in NNLO_FLAGS else NNLO_FLAGS.get(flag)


_CONDITION = re.compile(r"\s*(\w+)\s*,\s*~?\s*([<>])\s*,\s*([-+.\w]+)\s*")


def values_in_our_words(given: Mapping[str, object]) -> dict[str, str]:
    """Return the options whose values are in NNLO's spelling, with what to write.

    Example:
        >>> values_in_our_words({"early_stopping": "val_loss,~<,4", "epochs": "5"})
        {'early_stopping': '--early-stopping 4 --early-stopping-metric val_loss'}
        >>> values_in_our_words({"target_metric": "val_acc,>,0.9"})
        {'target_metric': "--target-metric 'val_acc > 0.9'"}
    """
    answers = {}
    for name, value in given.items():
        found = _CONDITION.fullmatch(value) if isinstance(value, str) else None
        if name == "early_stopping" and found:
            answers[name] = f"--early-stopping {found[3]} --early-stopping-metric {found[1]}"
        if name == "target_metric" and found:
            answers[name] = f"--target-metric '{found[1]} {found[2]} {found[3]}'"
        if name == "hyper_opt" and value == "genetic":
            answers[name] = "--hyper-opt evolutionary"
    return answers


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
    flags: Mapping[str, Any],
    unknown: Sequence[str],
    options: Mapping[str, Option],
    command: str,
    lacking: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Given]:
    """Return the values from a command line and its file of options, by name; flags override the file.

    Args:
        flags: the values of the flags, by name.
        unknown: words that the parser does not know.
        options: all options of the command.
        command: its name.
        lacking: names of options that only another command has, with the reason.
    """
    given = {name: Given(value) for name, value in flags.items()}
    config = given.pop("config", None)
    if wrong := [*_unknown_words(unknown, options, lacking), *_old_values(given, options)]:
        raise ConfigurationError(_told(wrong, command))
    by_file = {} if config is None else read_config(config.read(CONFIG))
    if wrong := [*_old_values(by_file, options), *_old_names(by_file, options)]:
        raise ConfigurationError("\n".join(wrong))
    for name in given.keys() & by_file.keys():
        if name in options and options[name].kind is OptionKind.PAIRS:
            table = by_file[name].read(options[name]) | given[name].read(options[name])
            given[name] = Given(table)
    return _with_folder(by_file | given)


def _told(wrong: Sequence[str], command: str) -> str:
    """Return all that is wrong with a command line in one text."""
    if len(wrong) == 1:
        return f"{wrong[0]} (see nnlo {command} --help)"
    return "\n".join([f"{len(wrong)} words are not possible (see nnlo {command} --help):", *wrong])


def _old_values(given: Mapping[str, Given], options: Mapping[str, Option]) -> Iterator[str]:
    """Answer values in NNLO's spelling with ours."""
    for name, words in values_in_our_words({name: one.value for name, one in given.items()}).items():
        one = given[name]
        asked = options[name].flag if one.by_hand else f"{one.place}: {name}"
        yield f"{asked} {one.value!r} is NNLO's spelling; write {words}"


def _old_names(by_file: Mapping[str, Given], options: Mapping[str, Option]) -> Iterator[str]:
    """Answer options of NNLO in a file with ours."""
    for name, one in by_file.items():
        if name not in options and (answer := in_our_words(f"--{name}", str(one.value))):
            yield f"{one.place} has {name!r}, an option of NNLO; here {answer} (in a file without dashes)"


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


def _unknown_words(
    unknown: Sequence[str], options: Mapping[str, Option], lacking: Mapping[str, str]
) -> Iterator[str]:
    """Answer each word that is not an option with the nearest option, or the reason."""
    flags = ["--config", *(option.flag for option in options.values())]
    whose = ""  # the flag that a value belongs to
    for place, each in enumerate(unknown):
        word, _, value = each.partition("=")
        if not word.startswith("-") or _is_number(word):
            if not whose:
                yield (
                    f"{word!r} belongs to no option (quote a pattern of files, so that the shell passes it "
                    "as one word, or put the files after --train)"
                )
            continue
        whose = word
        if words := in_our_words(word, value or "".join(unknown[place + 1 : place + 2])):
            yield f"{word} is an option of NNLO; here {words}"
        elif reason := lacking.get(word.removeprefix("--").replace("-", "_")):
            yield f"{word} is an option of nnlo train alone: {reason}"
        else:
            yield f"there is no option {word}{nearest(word, flags)}"
