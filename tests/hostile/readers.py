"""Readers of files, with valid contents to begin from, and changes to these that a hostile author makes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("optuna", reason="the environment for MPICH has no Optuna")
pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")

import optuna

from nnlo_common import ConfigurationError, MissingExtraError
from nnlo_common.base._limited_formats import npz_arrays
from nnlo_common.commands.report._report_command import runs_page
from nnlo_common.commands.report._run_reader import read_run
from nnlo_common.commands.report._search_reader import read_search
from nnlo_common.commands.report._verdicts import verdicts
from nnlo_common.commands.train._model_file import check_model
from nnlo_common.commands.train._option import read_config
from nnlo_common.commands.train._settings import Settings
from nnlo_common.commands.tune._report_page import page
from nnlo_common.commands.tune._search_facts import best_of
from nnlo_common.commands.tune._search_folder import FOLDER, inspect_folder
from nnlo_common.commands.tune._search_result import importances
from nnlo_common.data import list_files
from nnlo_common.search._journal import Journal
from nnlo_common.training.checkpoint import DamagedError, Entry, Manifest, packed_tree, unpacked_tree
from nnlo_common.training.report._live_ranks import read_live
from nnlo_common.training.report._live_table import alarms, summary

__all__ = ["READERS", "Reader", "changed_bytes", "changed_value"]

#: Values in place of any other.
VALUES: Sequence[Any] = (
    None,
    True,
    -5,
    10**9,
    10**200,
    -(2**63),
    1e308,
    float("nan"),
    float("-inf"),
    "",
    "../../x",
    "/etc/passwd",
    "\x00",
    "\ud800",
    "array:tree",
    "array:0",
    "nnlo:folder",
    [],
    {},
    [[]],
    {"": None},
    [None] * 7,
    {"class_name": "Lambda"},
)
#: Pieces that are put anywhere into bytes.
PIECES = (
    b"[" * 150,
    b'{"a":' * 150,
    b"9" * 5000,
    b"-1",
    b"1e999",
    b"NaN",
    b"null",
    b"\x00",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"\n",
    b"../",
    b"a." * 150,
    b"&a *a",
    b"!!int",
    b"!!python/object:os.system",
    b"<<: {a: 1}",
    b"? [a]",
    b"2001-99-99",
    b"=",
    b"#",
    b"*",
    b"~",
    b"|O",
    b"PK\x01\x02",
    b"\x93NUMPY",
    b"(999999999,)",
    b"\xff\xff\xff\x7f",
)


@dataclass(frozen=True)
class Reader:
    """A reader of files.

    Attributes:
        valid: contents that it accepts.
        read: reads a content; the folder is the reader's own.
        refuses: its named errors.
        vary: returns a hostile content that is consistent, e.g. with a correct checksum.
    """

    valid: Sequence[bytes]
    read: Callable[[bytes, Path], object]
    refuses: tuple[type[Exception], ...] = (ConfigurationError,)
    vary: Callable[[random.Random], bytes] = field(default=lambda draw: draw.randbytes(20))

    def content(self, draw: random.Random) -> bytes:
        """Return a content that may be valid by chance."""
        kind = draw.randrange(4)
        if kind == 0:
            return self.vary(draw)
        return changed_bytes(draw.choice(self.valid), draw, self.valid)


def changed_bytes(data: bytes, draw: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """Return bytes with some changes."""
    found = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at, end = sorted((draw.randint(0, len(found)), draw.randint(0, len(found))))
        match draw.randrange(7):
            case 0 if found:
                found[at % len(found)] ^= 1 << draw.randrange(8)
            case 1:
                found[at : min(end, at + 30)] = b""
            case 2:
                found[at:at] = draw.choice(PIECES)
            case 3:
                found[at : min(end, at + 9)] = draw.choice(PIECES)
            case 4:
                del found[end:]
            case 5 if others:
                other = draw.choice(others)
                found[at:] = other[draw.randint(0, len(other)) :]
            case _:
                found[at:at] = found[at : min(end, at + 300)]
    return bytes(found)


def changed_value(value: Any, draw: random.Random) -> Any:
    """Return a JSON value with a part of it exchanged, removed or repeated."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        name = draw.choice(sorted(value))
        match draw.randrange(8):
            case 0:
                return {key: item for key, item in value.items() if key != name}
            case 1:
                return {**value, draw.choice(["x", "../x", "", name + "x"]): value[name]}
            case _:
                return {**value, name: changed_value(value[name], draw)}
    if isinstance(value, list) and value and draw.random() < 0.85:
        place = draw.randrange(len(value))
        match draw.randrange(8):
            case 0:
                return value[:place] + value[place + 1 :]
            case 1:
                return value + value[place:]
            case _:
                return [*value[:place], changed_value(value[place], draw), *value[place + 1 :]]
    return draw.choice(VALUES)


# --- checkpoints -------------------------------------------------------------------------------------------

MANIFEST = Manifest(
    number=3,
    files={"rank0.pt": Entry.of(b"abc"), "rank1.pt": Entry.of(b"")},
    facts={"algorithm": "EASGD()", "optimizer": "SGD", "servers": 1, "workers": 2, "model": "", "epoch": 3},
    score=0.5,
)


def sealed(content: Any) -> bytes:
    """Return a manifest with a correct checksum, as somebody who knows the format would write it."""
    if not isinstance(content, dict):
        return json.dumps(content).encode()
    plain = {"format": 1, "number": 3, "files": {}, "facts": {}, "score": None} | content
    plain.pop("checksum", None)
    fields = {name: plain[name] for name in ("number", "files", "facts", "score")}
    files = fields.pop("files")
    try:
        entries = {name: Entry(**entry) for name, entry in files.items()}
        return Manifest(files=entries, **fields).written()
    except (TypeError, AttributeError, ValueError):
        return json.dumps(plain, indent=1).encode()


TREES: Sequence[dict[str, Any]] = (
    {"position": [2, 1, 8, True], "weights": np.arange(6.0).reshape(2, 3), "random": [3, [1, 2], None]},
    {
        "team": {"part": {"steps": 3, "center": np.ones(3, np.float32)}},
        "name": "text:array:0",
        "at": np.int8(1),
    },
)


def changed_state(draw: random.Random) -> bytes:
    """Return a state in which the JSON, or the header of an array, is another; the checksums are right."""
    file = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(packed_tree(draw.choice(TREES)))) as old,
        zipfile.ZipFile(file, "w", draw.choice([0, 0, 0, zipfile.ZIP_DEFLATED])) as new,
    ):
        for name in old.namelist():
            content = old.read(name)
            if name == "tree.npy" and draw.random() < 0.6:
                tree = json.loads(np.load(io.BytesIO(content)).tobytes())
                saved = io.BytesIO()
                text = json.dumps(changed_value(tree, draw)).encode()
                np.save(saved, np.frombuffer(text, np.uint8))
                content = saved.getvalue()
            elif draw.random() < 0.5:
                content = changed_bytes(content, draw)
            new.writestr(name, content)
    return file.getvalue()


def torch_states() -> list[bytes]:
    """Return states as torch saves them."""
    from nnlo_torch._checkpoint import packed

    return [packed(tree) for tree in TREES]


TORCH = torch_states()


def changed_torch(draw: random.Random) -> bytes:
    """Return a state of torch in which the pickle or the numbers are others; the checksums are right."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(draw.choice(TORCH))) as old, zipfile.ZipFile(file, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if draw.random() < (0.9 if name.endswith("data.pkl") else 0.1):
                content = changed_bytes(content, draw)
            new.writestr(name, content)
    return file.getvalue()


def read_torch(data: bytes, _: Path) -> object:
    """Read a state of torch."""
    from nnlo_torch._checkpoint import unpacked

    return unpacked(data)


# --- models and options ------------------------------------------------------------------------------------

LAYERS = [{"class_name": "Dense", "module": "keras.layers", "config": {"name": "d", "units": 3}}]
MODEL = {"class_name": "Sequential", "module": "keras", "config": {"name": "net", "layers": LAYERS}}
OPTIONS_TOML = b"""# Model
model = "net.json"
[algorithm]
a.b = 1
times = [1979-05-27T07:32:00Z, 0x1f, 1e3, inf]
text = '''
many lines'''
"""
OPTIONS_YAML = b"""model: net.json
train: [a.h5, 'b.h5']
epochs: 5
learning-rate: 1e-3
params: {depth: 3, on: yes, day: 2001-12-14, octal: 0o7, t: 190:20:30}
text: |
  many
  lines
"""


def in_file(name: str, use: Callable[[Path], object]) -> Callable[[bytes, Path], object]:
    """Return a reader of a file with this name."""

    def read(data: bytes, folder: Path) -> object:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        return use(path)

    return read


def model_at(path: Path) -> object:
    return check_model(Settings(model=str(path), train=("a.h5",), loss="mse"))


def keras_file(config: bytes, method: int = zipfile.ZIP_STORED) -> bytes:
    """Return a file of Keras."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.writestr("config.json", config)
        archive.writestr("model.weights.h5", b"weights")
    return file.getvalue()


# --- lists and searches ------------------------------------------------------------------------------------


def study() -> Any:
    return optuna.create_study(study_name="fuzz")


def journal_at(path: Path) -> None:
    journal = Journal(path, study())
    journal.close()


def journal_lines() -> list[dict[str, Any]]:
    """Return the lines of a search with a finished, a failed, a queued and an open trial."""
    at, path = study(), Path(os.devnull)
    lines: list[dict[str, Any]] = []
    journal = Journal.__new__(Journal)
    journal._path, journal._write = path, lambda content: lines.append(json.loads(json.dumps(content)))  # type: ignore[method-assign]
    journal._file = path.open("ab")
    space = optuna.distributions.FloatDistribution(0.0, 1.0)
    for value in (0.5, None):
        trial = at.ask({"x": space})
        journal.begun(at.trials[-1])
        trial.report(1.0, 3)
        at.tell(trial, value, state=None if value else optuna.trial.TrialState.FAIL)
        with contextlib.suppress(OSError):  # /dev/null cannot be synced
            journal.finished(at.trials[-1])
    journal._file.close()
    packed = lines[1]["params"]["x"]
    head = {"study": ["MINIMIZE"], "name": "fuzz"}
    queued = {"trial": 2, "queued": {"x": packed}, "user": {}, "instead": 1}
    chosen = {"trial": 3, "name": "x", "value": packed[0], "distribution": packed[1]}
    return [head, *lines, queued, {"trial": 3, "user": {FOLDER: "0003"}}, chosen]


JOURNAL = journal_lines()


def written(lines: Sequence[Any]) -> bytes:
    return b"".join(f"{json.dumps(line)}\n".encode() for line in lines)


def changed_journal(draw: random.Random) -> bytes:
    lines = changed_value(JOURNAL[1:], draw)
    return written([JOURNAL[0], *lines] if isinstance(lines, list) else [lines])


def folder_of_search(path: Path) -> object:
    """Inspect the folder of a search: the content is its journal and the file of an interrupted trial."""
    trials = path.parent / "trials"
    (trials / "0003").mkdir(parents=True, exist_ok=True)
    (trials / "0003.json").write_bytes(path.read_bytes())
    return inspect_folder(path.parent, goes_on=True)


def report_of(path: Path) -> object:
    run = read_run(path.parents[1])
    return runs_page([run], [verdicts(run)], {})


def search_page(path: Path) -> object:
    """Make the page of a search in a script, without figures."""
    found = read_search(path)
    best = best_of(found.facts, found.trials)
    importances(found.study, [one for one in found.trials if one.value is not None])
    return page(found.facts, found.trials, best, {}, "")


def tuner_page(path: Path) -> object:
    return search_page(path.parent.parent)


def ranks_of(name: str) -> Callable[[bytes, Path], object]:
    """Return a reader of what a rank of a running training has written."""

    def read(path: Path) -> object:
        run = read_live(path.parents[1], 1000.0)
        if run.unreadable:
            raise ValueError(run.unreadable[0])
        return summary(run), alarms(run)

    return in_file(name, read)


def as_json(value: Any) -> Callable[[random.Random], bytes]:
    """Return a maker of JSON near a value."""
    return lambda draw: json.dumps(changed_value(value, draw)).encode()


LIVE = {
    "rank": 1,
    "role": "worker 0",
    "host": "a",
    "time": 990.0,
    "moved": 980.0,
    "longest_s": 2.0,
    "epoch": 1,
}
LIVE |= {
    "epochs": 3,
    "share": 0.5,
    "samples": 70,
    "samples_per_second": 35.0,
    "left_s": 60.0,
    "state": "training",
}
LIVE |= {"scores": {"loss": 0.5}, "first_loss": 0.7, "lost": ["rank 2"], "staleness": 1.0, "cpu_share": 0.5}
FOLLOWED = [
    {"what": "start", "time": 900.0, "role": "server 0", "host": "a"},
    {"what": "epoch", "time": 950.0, "epoch": 0, "metrics": {"loss": 0.5}},
    {"what": "sample", "time": 951.0, "seconds": 51.0, "samples": 70},
    {"what": "sample", "time": 961.0, "seconds": 61.0, "samples": 90, "mean_staleness": 1.5},
    {"what": "lost", "time": 970.0, "text": "rank 2"},
]
INTERRUPTED = {"parameters": {"x": 0.5}, "seed": 3}

TUNED = {
    "hyperparameters": {
        "space": [{"class_name": "Float", "config": {"name": "rate", "sampling": "log"}}],
        "values": {"rate": 0.25, "act": "relu", "wide": True},
    },
    "metrics": {"metrics": {"loss": {"direction": "min", "observations": [{"value": [0.5], "step": 1}]}}},
    "score": 0.5,
    "status": "COMPLETED",
    "message": "Traceback",
}

START = {
    "what": "start",
    "time": 1.7e9,
    "rank": 0,
    "role": "server 0",
    "host": "a",
    "cores": 2,
    "versions": {"numpy": "2.4"},
    "config": {"lr": 0.1},
}
EPOCH = {
    "what": "epoch",
    "epoch": 0,
    "time": 1.7e9,
    "seconds": 1.5,
    "samples": 40,
    "batches": 4,
    "memory_mb": 99.5,
    "cpu_s": 1.25,
    "spent": {"compute": 1.0, "wait": 0.5},
    "exchanges": 4,
    "mean_staleness": 0.5,
    "staleness": {"1": {"0": 2, "1": 2}},
    "metrics": {"loss": 0.5},
    "own": {"loss": 0.25},
}
SAMPLE = {"what": "sample", "time": 1.7e9, "seconds": 2.5, "memory_mb": 99.5, "cpu_s": 1.25, "read_mb": None}
SAMPLE |= {
    "peak_memory_mb": 120.25,
    "gpus": [{"index": 0, "busy": 0.5, "memory_mb": 10.0}],
    "spent": {"compute": 1.0},
}
END = {"what": "end", "time": 1.7e9, "seconds": 3.5, "over": True, "exchanges": 4}

READERS: dict[str, Reader] = {
    "manifest": Reader(
        [MANIFEST.written()],
        lambda data, _: Manifest.read(data),
        (DamagedError,),
        lambda draw: sealed(changed_value(json.loads(MANIFEST.written()), draw)),
    ),
    "state tree": Reader(
        [packed_tree(tree) for tree in TREES], lambda data, _: unpacked_tree(data), vary=changed_state
    ),
    "npz": Reader(
        [packed_tree(tree) for tree in TREES], lambda data, _: npz_arrays(data), (ValueError,), changed_state
    ),
    "state of torch": Reader(TORCH, read_torch, vary=changed_torch),
    "JSON model": Reader([json.dumps(MODEL).encode()], in_file("net.json", model_at), vary=as_json(MODEL)),
    "file of Keras": Reader(
        [
            keras_file(json.dumps(MODEL).encode(), method)
            for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
        ],
        in_file("net.keras", model_at),
        vary=lambda draw: keras_file(as_json(MODEL)(draw), zipfile.ZIP_DEFLATED),
    ),
    "TOML": Reader([OPTIONS_TOML], in_file("a.toml", read_config)),
    "YAML": Reader([OPTIONS_YAML], in_file("a.yaml", read_config), vary=as_json({"model": MODEL})),
    "list of files": Reader(
        [b"# a comment\na.h5\nsub/b.h5\n~/c.h5 # mine\ns3://bucket/d.h5\n", b"/data/a.h5\r\n\r\nb.h5\n"],
        in_file("a.txt", list_files),
        (ConfigurationError, MissingExtraError),  # a pattern of remote names may come of it
    ),
    "journal": Reader([written(JOURNAL)], in_file("a.jsonl", journal_at), vary=changed_journal),
    "journal of a page": Reader([written(JOURNAL)], in_file("a.jsonl", search_page), vary=changed_journal),
    "trial of keras-tuner": Reader(
        [json.dumps(TUNED).encode()], in_file("trial_0/trial.json", tuner_page), vary=as_json(TUNED)
    ),
    "live file": Reader(
        [json.dumps(LIVE).encode()], ranks_of("ranks/live.rank1.json"), (ValueError,), as_json(LIVE)
    ),
    "end of facts": Reader(
        ["".join(json.dumps(one) + "\n" for one in FOLLOWED).encode()],
        ranks_of("ranks/facts.rank0.jsonl"),
        (ValueError,),
        lambda draw: b"".join(as_json(one)(draw) + b"\n" for one in FOLLOWED),
    ),
    **{
        f"facts: {line['what']}": Reader(
            [written([START, line]), written([START, EPOCH, SAMPLE, line])],
            in_file("ranks/facts.rank0.jsonl", report_of),
            vary=as_json(line),
        )
        for line in (START, EPOCH, SAMPLE, END)
    },
    "folder of a search": Reader(
        [written(JOURNAL), json.dumps(INTERRUPTED).encode()],
        in_file("journal.jsonl", folder_of_search),
        vary=as_json(INTERRUPTED),
    ),
}
