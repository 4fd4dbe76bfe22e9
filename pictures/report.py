"""Pictures of a run: the page that `nnlo report` makes, and the timeline of its ranks.

`python pictures/report.py` trains a small network on 3 ranks; it needs PyTorch, h5py and a Chromium.
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

import plotly.graph_objects as go
from drawing import COLOURS, PICTURES, ROOT, run, save

OPTIONS = (
    *(
        "--model",
        str(ROOT / "examples" / "tune_torch.py"),
        "--loss",
        "cross_entropy",
        "--metrics",
        "accuracy",
    ),
    *("--epochs", "6", "--batch", "25", "--optimizer", "adam", "--learning-rate", "0.002"),
    "--timeline",
)


def photograph(page: Path, picture: Path) -> None:
    """Take a picture of the top of a page."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    assert browser, "a picture of a page needs chromium: apt-get install chromium"
    settings = ("--headless", "--no-sandbox", "--hide-scrollbars", "--virtual-time-budget=20000")
    command = [browser, *settings, "--window-size=1000,860", f"--screenshot={picture}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True)


#: Kinds of time, those around others first: later bars are drawn over earlier ones.
KINDS = ("compute", "validate", "pack", "read", "apply", "receive", "send", "wait", "idle")


def bars(folder: Path) -> list[go.Bar]:
    """Return the spans of each rank's trace as bars, one trace for each kind of span."""
    spans: dict[str, list[tuple[int, float, float]]] = {kind: [] for kind in KINDS}
    for path in sorted(folder.glob("timeline.rank*.json")):
        rank = int(path.stem.removeprefix("timeline.rank"))
        for event in json.loads(path.read_text()):
            if event["ph"] == "X" and event["tid"] == 0:
                spans[event["cat"]].append((rank, event["ts"] / 1e6, event["dur"] / 1e6))
    first = min(start for those in spans.values() for _, start, _ in those)
    return [
        go.Bar(
            name=name,
            orientation="h",
            y=[f"rank {rank}" for rank, _, _ in those],
            base=[start - first for _, start, _ in those],
            x=[seconds for _, _, seconds in those],
            marker={"color": colour, "line": {"width": 0}},
        )
        for (name, those), colour in zip(spans.items(), itertools.cycle(COLOURS[1:]), strict=False)
        if those
    ]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(1, "examples/fashion_files.py", str(folder / "data"))
        lists = ("--train", str(folder / "data/train.h5"), "--val", str(folder / "data/test.h5"))
        run(3, "-m", "nnlo_common", "train", *OPTIONS, *lists, "--run", str(folder / "run"))
        run(1, "-m", "nnlo_common", "report", str(folder / "run"))
        photograph(folder / "run" / "report.html", PICTURES / "report.png")
        figure = go.Figure(bars(folder / "run"))
        figure.update_xaxes(title="seconds")
        save(figure, "timeline.svg", height=260, barmode="overlay", legend={"orientation": "h", "y": 1.2})


if __name__ == "__main__":
    main()
