"""The `nnlo` command. Nothing else depends on it."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nnlo_common import __version__
from nnlo_common.base._arguments import whole_in
from nnlo_common.base._errors import ConfigurationError, MissingExtraError
from nnlo_common.commands._advise import ADVISE_OPTIONS
from nnlo_common.commands._demo import ALGORITHMS, EXAMPLES, run_demo
from nnlo_common.commands._predict import PREDICT_OPTIONS, TILE_OPTIONS
from nnlo_common.commands._rechunk import add_rechunk
from nnlo_common.commands._rerun import add_rerun, run_rerun
from nnlo_common.commands.train._command_line import Parser, add_flags, layout
from nnlo_common.commands.train._job import REFUSED, first_of_job, refuse_alike, run_in_job
from nnlo_common.commands.train._option import Option, nearest
from nnlo_common.commands.train._settings import OPTIONS
from nnlo_common.commands.tune._request import ALL_OPTIONS

__all__ = ["main"]


class JobCommand(NamedTuple):
    """A command that all ranks of a job run together, whose options may also be in a file.

    Attributes:
        module: where its class is, which is imported only to run it.
        run: the name of that class.
        options: what it takes.
        short: what it does, for the list of commands.
        usage: its words.
        text: its help, before the options.
        after: the same, after them.
        models: how many models its first words name, as argparse says it; None: none.
    """

    module: str
    run: str
    options: Mapping[str, Option]
    short: str
    usage: str
    text: str
    after: str
    models: int | str | None = None


#: The commands that all ranks of a job run together.
JOBS = {
    "advise": JobCommand(
        module="nnlo_common.commands._advise",
        run="AdviseRun",
        options=ADVISE_OPTIONS,
        short="try a training for a minute, and say how many ranks and which batch suit it",
        usage="--model FILE --train FILE [FILE ...] --loss NAME [options]",
        text="""\
Try a training for a minute, and say how many workers, which batch and which layout suit it:

  nnlo advise --model net.py --train train.list --loss cross_entropy
  mpiexec -n 4 nnlo advise --config run.toml --seconds 120

It takes the options of `nnlo train`. With several processes all try at the same time, which
shows what they take from each other, and messages between hosts are measured.
""",
        after="""\
The folder, --run or ./advice, gets advice.html and advice.json. docs/advise.md has more.
""",
    ),
    "predict": JobCommand(
        module="nnlo_common.commands._predict",
        run="PredictRun",
        options=PREDICT_OPTIONS,
        short="compute a trained model's outputs for all samples of files",
        usage="MODEL [MODEL ...] --data FILE [FILE ...] --out FILE [options]",
        text="""\
Compute a model's outputs for all samples of files, with all ranks:

  mpiexec -n 8 nnlo predict runs/net-1 --data 'events/*.h5' --out scores.h5 --keep event_id
  nnlo predict net.keras --data events.list --features-name jets --out scores.npy

MODEL is the folder of a run, .keras, or a Python file with --from weights. Several models are
an ensemble: the result has their mean, and NAME_spread. Killed, the same command continues.
""",
        after="""\
The result has a row for each sample, in the order of the files: the dataset "prediction", or one
for each name of the model's outputs. docs/predict.md has more.
""",
        models="+",
    ),
    "tile": JobCommand(
        module="nnlo_common.commands._predict",
        run="TileCommandRun",
        options=TILE_OPTIONS,
        short="apply a trained model to a volume or an image of any size, in tiles",
        usage="MODEL --data FILE --tile N [N ...] --out FILE [options]",
        text="""\
Apply a model to a volume or an image of any size, in tiles, with all ranks:

  nnlo tile runs/net-1 --data scan.h5 --dataset raw --tile 96 --plan
  mpiexec -n 8 nnlo tile runs/net-1 --data scan.h5 --dataset raw --tile 96 --reduce argmax --out labels.h5

By default tiles are cropped by the measured receptive field, so that the result is that of the
whole volume at once. Killed, the same command continues.
""",
        after="""\
The result has the axes of the volume, with the channels of the output in front. docs/tiles.md has
more.
""",
        models=1,
    ),
    "train": JobCommand(
        module="nnlo_common.commands.train._train_command",
        run="TrainRun",
        options=OPTIONS,
        short="train a model on lists of files, without a script",
        usage="--model FILE --train FILE [FILE ...] --loss NAME [options]",
        text="""\
Train a model on lists of HDF5 files:

  nnlo train --model net.json --train train.list --loss categorical_crossentropy
  mpiexec -n 3 nnlo train --config run.toml --mode easgd --every 5

One process trains plainly. With several, the first serves the centre and the others
train. All options may be in a TOML or YAML file, by the same names
(learning_rate = 0.01); a flag overrides the file.
""",
        after="""\
The folder of a run has the model (model.keras, or weights.pt), history.json, run.json and
config.toml, which --config takes. The exit status is 2 if the command is refused before the
training, 1 if the training fails. docs/train.md has more.
""",
    ),
    "tune": JobCommand(
        module="nnlo_common.commands.tune._tune_command",
        run="SearchRun",
        options=ALL_OPTIONS,
        short="search for the best options and parameters of trainings",
        usage="--model FILE --train FILE [FILE ...] --loss NAME [options]",
        text="""\
Search for the best options of `nnlo train`, and parameters of the model:

  nnlo tune --model net.py --train train.list --loss cross_entropy --n-fold 3
  mpiexec -n 13 nnlo tune --config run.toml --block-size 6 --n-fold 2 --epochs 5

With several processes, the first coordinates and the others form blocks; each block trains
one trial at a time. All options of `nnlo train` are options here. Define the search space in
get_space() of the Python file, or in a file: --space space.toml
""",
        after="""\
The folder of a search has report.html, search.json, and trials/, a folder of a run for each
trial. With --run, rerun the same command to resume a killed search. docs/searches.md has more.
""",
    ),
}
COMMANDS = tuple(sorted([*JOBS, "demo", "doctor", "rechunk", "report", "rerun", "top", "trace"]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status.

    Args:
        arguments: the words after `nnlo`; None: those of the process.
    """
    parser, words = _parser(), sys.argv[1:] if arguments is None else [*arguments]
    named = words[0] if words[:1] and words[0] in COMMANDS else ""
    if words[:1] and not named and not words[0].startswith("-"):
        asked = f"there is no command {words[0]!r}{nearest(words[0], COMMANDS)}"
        return refuse_alike(f"{asked} (nnlo has {', '.join(COMMANDS)}; see nnlo --help)", "")
    try:
        options, unknown = parser.parse_known_args(words)
        if unknown and options.command not in JOBS:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    except ConfigurationError as error:
        return refuse_alike(str(error), named)
    flags = vars(options)
    command = flags.pop("command")
    if flags.pop("version"):
        if first_of_job():
            print(f"nnlo {__version__}")
        parser.exit()
    if command is None:
        parser.print_help()
        return 0
    # A terminal that cannot show a character shows a question mark instead of a traceback.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    return _run(command, flags, unknown)


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
        help="look at the machine, the MPI library and the installation, and say what to fix",
        description="Look at the machine, the MPI library and the installation, and say what to fix. Run it "
        "alone, and as you train: `mpiexec -n 3 nnlo doctor`. The exit status is 1 if training would fail.",
    )
    doctor.add_argument("--json", dest="as_data", action="store_true", help="print JSON, for programs")
    doctor.add_argument("--quick", action="store_true", help="measure less between the ranks")
    report = commands.add_parser(
        "report",
        help="make a page about one or several runs, or about a search",
        description="Make one page about the folder of a run, or about several to compare: metrics, time of "
        "each rank, memory, options, and what to change. It works without a network. The first run is the "
        "one that the others are compared with. Of a search in a script, name the journal (search.jsonl), or "
        "the directory of an MPITuner: the page has the best trial, all others, and what mattered.",
    )
    report.add_argument(
        "runs", nargs="+", metavar="RUN", help="the folder of a run; of a search its journal or its directory"
    )
    report.add_argument(
        "--output",
        metavar="FILE",
        help="the page; else report.html in the folder of a single run or search, or beside its journal",
    )
    top = commands.add_parser(
        "top",
        help="show the ranks of a running training in a table",
        description="Show what each rank of a running training does now: rate, loss, staleness, time left, "
        "its last sign of life, and alarms. It only reads the folder of the run, so it works on any host "
        "that sees it, also for a job that somebody else has started. Ctrl-C ends it.",
    )
    top.add_argument("run", metavar="RUN", help="the folder of the run")
    top.add_argument("--once", action="store_true", help="print one table and end")
    top.add_argument(
        "--every",
        dest="every_s",
        type=_seconds,
        default=2.0,
        metavar="S",
        help="seconds between two looks (2)",
    )
    trace = commands.add_parser(
        "trace",
        help="merge the timelines of a run for ui.perfetto.dev",
        description="Merge the timelines of a run's ranks into one file for https://ui.perfetto.dev: what "
        "each rank did, and an arrow for each message. `nnlo train --timeline` writes them, and "
        "Report(..., timeline=True) in a script.",
    )
    trace.add_argument("run", metavar="RUN", help="the folder of the run")
    trace.add_argument("--output", metavar="FILE", help="the file; else trace.json in that folder")
    add_rechunk(commands)
    add_rerun(commands)
    demo = commands.add_parser(
        "demo",
        help="train a small network on images that come with nnlo",
        description="Train a small network on 2500 images that come with nnlo: alone in one process, or "
        "on all ranks of `mpiexec -n 3 nnlo demo`. Nothing is downloaded or written.",
    )
    demo.add_argument(
        "framework", nargs="?", choices=EXAMPLES, default="numpy", help="numpy (default), torch or keras"
    )
    demo.add_argument("--algorithm", choices=ALGORITHMS, default="steady", help=", ".join(ALGORITHMS))
    demo.add_argument("--epochs", type=_positive, default=8, metavar="N", help="passes over the images (8)")
    for name, one in JOBS.items():
        _add(commands, name, one)
    return parser


def _positive(text: str) -> int:
    """Return a whole number above 0."""
    number = whole_in(text)
    if not number:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not a whole number above 0")
    return number


def _seconds(text: str) -> float:
    """Return a number of seconds, at least a tenth."""
    try:
        if 0.1 <= (seconds := float(text)) < 1e6:
            return seconds
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds, at least 0.1")


def _add(commands: Any, name: str, one: JobCommand) -> None:
    """Add a command of a job."""
    command = commands.add_parser(
        name,
        help=one.short,
        usage=f"nnlo {name} {one.usage}",
        description=one.text,
        epilog=one.after,
        formatter_class=layout,
        allow_abbrev=False,
    )
    add_flags(command, one.options.values())
    if one.models is not None:
        command.add_argument(
            "models", nargs=one.models, metavar="MODEL", help="the folder of a run, or a file"
        )


def _run(command: str, flags: dict[str, Any], unknown: Sequence[str]) -> int:
    """Run a command with the values of its flags, by name, and the words that the parser does not know."""
    if command == "doctor":
        from nnlo_common.commands.doctor._doctor_command import run_doctor

        return run_doctor(**flags)
    if command == "rerun":
        return run_rerun(**flags) if first_of_job() else REFUSED
    if command in ("rechunk", "report", "top", "trace"):
        return _look(command, flags) if first_of_job() else 0
    if command == "demo":
        try:
            return run_demo(**flags)
        except MissingExtraError as error:
            return refuse_alike(str(error), command)
    job = JOBS[command]
    return run_in_job(command, getattr(importlib.import_module(job.module), job.run), flags, unknown)


def _look(command: str, flags: dict[str, Any]) -> int:
    """Run a command of one process: on runs, or on files."""
    if command == "rechunk":
        from nnlo_common.commands._rechunk import run_rechunk

        return run_rechunk(**flags)
    if command == "report":
        from nnlo_common.commands.report._report_command import run_report

        return run_report(**flags)
    if command == "top":
        from nnlo_common.commands._top import run_top

        return run_top(**flags)
    from nnlo_common.commands._trace import run_trace

    return run_trace(**flags)
