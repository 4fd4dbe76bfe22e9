"""The map of rooms in `docs/internals.md` names folders and files that exist, and every room."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORE = ROOT / "nnlo_common"


def rooms() -> dict[str, list[str]]:
    """Return the folders and files that the table names for each room."""
    lines = (ROOT / "docs" / "internals.md").read_text().splitlines()
    table = [line.split("|")[1:3] for line in lines if re.match(r"\| `\w+/` \|", line)]
    return {room.strip(" `/"): re.findall(r"`(\w+/|\w+\.py)`", told) for room, told in table}


def test_it_has_every_room() -> None:
    there = {path.name for path in CORE.iterdir() if (path / "__init__.py").exists()}
    assert rooms().keys() == there - {"testing"}


def test_what_it_names_is_there() -> None:
    named = [(room, name) for room, names in rooms().items() for name in names]
    assert len(named) > 15
    assert not [CORE / room / name for room, name in named if not (CORE / room / name).exists()]
