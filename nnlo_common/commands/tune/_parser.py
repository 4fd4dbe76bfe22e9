"""The command line of `nnlo tune`: the flags of a search before those of `nnlo train`."""

from __future__ import annotations

import argparse

from nnlo_common.commands.train._command_line import add_flags
from nnlo_common.commands.tune._request import ALL_OPTIONS

__all__ = ["fill_search"]

USAGE = "nnlo tune --model FILE --train FILE [FILE ...] --loss NAME [options]"
DESCRIPTION = """\
SearchSettings for the best options of `nnlo train`, and parameters of the model:

  nnlo tune --model net.py --train train.list --loss cross_entropy --n-fold 3
  mpiexec -n 13 nnlo tune --config run.toml --block-size 6 --n-fold 2 --epochs 5

Of several processes the first coordinates, and the others are cut into blocks, each of
which trains one trial at a time. All options of `nnlo train` are options here. What is
searched the Python file says in get_space(), or a file: --space space.toml
"""
EPILOG = """\
The folder of a search has report.html, search.json, and trials/, a folder of a run for each
trial. With --run the same command goes on where it was killed. docs/tune.md has more.
"""


def fill_search(parser: argparse.ArgumentParser) -> None:
    """Give a parser all flags, in groups."""
    parser.usage, parser.description, parser.epilog = USAGE, DESCRIPTION, EPILOG
    add_flags(parser, ALL_OPTIONS.values())
