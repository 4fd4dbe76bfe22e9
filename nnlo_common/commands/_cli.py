"""The `nnlo` command. Nothing else depends on it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from nnlo_common import __version__
from nnlo_common.base._errors import ConfigurationError
from nnlo_common.commands.train._job import refuse_alike
from nnlo_common.commands.train._parser import Parser, fill
from nnlo_common.commands.tune._parser import fill_search

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status.

    Args:
        arguments: the words after `nnlo`; None means those of the process.
    """
    parser, words = _parser(), sys.argv[1:] if arguments is None else [*arguments]
    try:
        options, unknown = parser.parse_known_args(words)
        if unknown and options.command not in ("train", "tune"):
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    except ConfigurationError as error:
        return refuse_alike(str(error), "tune" if "tune" in words[:1] else "train")
    if vars(options).pop("version"):  # what is left are the options of the command
        if parser.speaks:
            print(f"nnlo {__version__}")
        parser.exit()
    if options.command is None:
        parser.print_help()
        return 0
    # A terminal that cannot show a character shows a question mark instead of a traceback.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    options.unknown = unknown
    status: int = options.run_command(options)
    return status


def _parser() -> Parser:
    parser = Parser(
        prog="nnlo",
        description="Distributed training over MPI for Keras and PyTorch. Training itself needs no command: "
        "start your own script with `mpiexec -n 3 python train.py`.",
    )
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="command")
    doctor = commands.add_parser(
        "doctor",
        help="look at the machine, the MPI library and the installation, and say what to mend",
        description="Look at the machine, the MPI library and the installation, and say what to mend. Run it "
        "alone, and as you train: `mpiexec -n 3 nnlo doctor`. The exit status is 1 if training would fail.",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON, for programs")
    doctor.add_argument("--quick", action="store_true", help="measure less between the ranks")
    doctor.set_defaults(run_command=_doctor)
    train = commands.add_parser(
        "train", help="train a model on lists of HDF5 files, without a script", allow_abbrev=False
    )
    fill(train)
    train.set_defaults(run_command=_train)
    tune = commands.add_parser(
        "tune", help="search for the best options and parameters of trainings", allow_abbrev=False
    )
    fill_search(tune)
    tune.set_defaults(run_command=_tune)
    return parser


def _doctor(options: argparse.Namespace) -> int:
    from nnlo_common.commands.doctor._run import run_doctor

    return run_doctor(quick=options.quick, as_data=options.json)


def _train(options: argparse.Namespace) -> int:
    from nnlo_common.commands.train._run import run_train

    return run_train(*_given(options))


def _tune(options: argparse.Namespace) -> int:
    from nnlo_common.commands.tune._run import run_tune

    return run_tune(*_given(options))


def _given(options: argparse.Namespace) -> tuple[dict[str, Any], Sequence[str]]:
    """What was given to flags, by their names, and the words that are none."""
    flags = vars(options).copy()
    unknown = flags.pop("unknown")
    for name in ("command", "run_command"):
        del flags[name]
    return flags, unknown
