"""Flags of `nnlo rechunk`."""

from __future__ import annotations

import argparse
from typing import Any

from nnlo_common.commands.rechunk._rechunk_command import FILTERS

__all__ = ["add_rechunk"]


def add_rechunk(commands: Any) -> None:
    """Add the command to the parser's commands."""
    one = commands.add_parser(
        "rechunk",
        help="rewrite files of samples, of any format, as HDF5 files that read fast",
        description="Rewrite files of samples as HDF5 files that read fast: HDF5 with other chunks or "
        "another filter, with all that is in them; other formats with their columns of numbers. It says "
        "how fast each file reads before and after.",
    )
    one.add_argument("files", nargs="+", metavar="FILE", help="paths, patterns or list files")
    one.add_argument("--to", required=True, metavar="FOLDER", help="the folder of the new files")
    one.add_argument("--names", nargs="+", metavar="NAME", help="write these columns only")
    one.add_argument(
        "--rows", type=_positive, metavar="N", help="samples in a compressed chunk; else half a megabyte"
    )
    filters = "; ".join(f"{name}: {what}" for name, what in FILTERS.items())
    one.add_argument("--filter", dest="filter_", choices=FILTERS, default="none", help=f"{filters} (none)")
    one.add_argument("--pad", type=_positive, metavar="N", help="bring rows of unequal length to this length")


def _positive(text: str) -> int:
    """Return a whole number above 0."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)
