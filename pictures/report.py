"""Pictures of a run, the page of `nnlo report` and the timeline of its ranks, and of the page of a search.

`python pictures/report.py` trains and tunes a small network on 3 ranks; it needs PyTorch, h5py, Optuna and a
Chromium.
"""

from __future__ import annotations

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
    *("--batch", "25"),
)
OF_RUN = ("--epochs", "6", "--optimizer", "adam", "--learning-rate", "0.002", "--timeline")
OF_SEARCH = ("--epochs", "2", "--objective", "val_accuracy", "--num-iterations", "16", "--seed", "1")


def photograph(page: Path, picture: Path) -> None:
    """Take a picture of the top of a page."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    assert browser, "a picture of a page needs chromium: apt-get install chromium"
    settings = ("--headless", "--no-sandbox", "--hide-scrollbars", "--virtual-time-budget=20000")
    command = [browser, *settings, "--window-size=1000,860", f"--screenshot={picture}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True)


#: Kinds of time and their colours, those around others first: later bars are drawn over earlier ones.
KINDS = dict(
    zip(
        ("compute", "validate", "pack", "read", "apply", "receive", "send", "wait", "idle"),
        (*COLOURS[1:], "#dddddd", "#f2f2f2"),
        strict=True,
    )
)
#: The part of the training that is drawn, in seconds from its start: some twenty batches.
BEGIN_S, END_S = 1.0, 1.12


def bars(folder: Path) -> list[go.Bar]:
    """Return the spans of each rank's trace as bars in milliseconds, one trace for each kind of span."""
    spans: dict[str, list[tuple[str, float, float]]] = {kind: [] for kind in KINDS}
    traces = [json.loads(path.read_text()) for path in sorted((folder / "ranks").glob("timeline.rank*.json"))]
    drawn = [
        (f"rank {rank}", event["cat"], event["ts"] / 1e6, event["dur"] / 1e6)
        for rank, trace in enumerate(traces)
        for event in trace
        if event["ph"] == "X" and event["tid"] == 0
    ]
    zero = min(start for _, _, start, _ in drawn)
    for rank, kind, start, seconds in drawn:
        begin, end = max(start - zero, BEGIN_S), min(start - zero + seconds, END_S)
        if begin < end:
            spans[kind].append((rank, 1e3 * (begin - BEGIN_S), 1e3 * (end - begin)))
    return [
        go.Bar(
            name=kind,
            orientation="h",
            y=[rank for rank, _, _ in those],
            base=[begin for _, begin, _ in those],
            x=[length for _, _, length in those],
            marker={"color": KINDS[kind], "line": {"width": 0}},
        )
        for kind, those in spans.items()
        if those
    ]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(1, "examples/fashion_files.py", str(folder / "data"))
        lists = ("--train", str(folder / "data/train.h5"), "--val", str(folder / "data/test.h5"))
        run(3, "-m", "nnlo_common", "train", *OPTIONS, *OF_RUN, *lists, "--run", str(folder / "run"))
        run(1, "-m", "nnlo_common", "report", str(folder / "run"))
        photograph(folder / "run" / "report.html", PICTURES / "report.png")
        figure = go.Figure(bars(folder / "run"))
        figure.update_xaxes(title="milliseconds")
        save(figure, "timeline.svg", height=260, barmode="overlay", legend={"orientation": "h", "y": 1.2})
        run(3, "-m", "nnlo_common", "tune", *OPTIONS, *OF_SEARCH, *lists, "--run", str(folder / "search"))
        photograph(folder / "search" / "report.html", PICTURES / "search.png")


if __name__ == "__main__":
    main()
