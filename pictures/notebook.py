"""Run a notebook without Jupyter, as one script of its cells, and keep what they print and draw in it.

`python pictures/notebook.py docs/notebooks/laboratory.ipynb`; pictures need kaleido and a Chrome or Chromium.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Cell = dict[str, Any]


def run(notebook: dict[str, Any]) -> Iterator[tuple[Cell, str, object]]:
    """Run the cells in turn; yield each with its printed text and the value of its last line."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] != "code":
            continue
        tree, value = ast.parse("".join(cell["source"])), None
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(tree, f"cell {number}", "exec"), names)
            if last is not None:
                value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
        yield cell, printed.getvalue(), value


def outputs(printed: str, value: object) -> list[dict[str, Any]]:
    """What Jupyter writes below a cell: its text, and a figure as a picture."""
    found: list[dict[str, Any]] = []
    if printed:
        found.append({"output_type": "stream", "name": "stdout", "text": printed.splitlines(keepends=True)})
    if hasattr(value, "to_image"):
        picture = value.to_image(format="svg").decode()
        found.append({"output_type": "display_data", "data": {"image/svg+xml": picture}, "metadata": {}})
    return found


def main(path: Path) -> None:
    """Run a notebook and write it back."""
    notebook = json.loads(path.read_text())
    for number, (cell, printed, value) in enumerate(run(notebook), 1):
        cell["execution_count"], cell["outputs"] = number, outputs(printed, value)
    path.write_text(json.dumps(notebook, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
