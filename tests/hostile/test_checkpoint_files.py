"""Checkpoints that somebody else has written: nothing outside is touched, and an earlier one is used."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnlo_common import ConfigurationError
from nnlo_common.training.checkpoint import DamagedError, Entry, Manifest, Store, packed_tree, unpacked_tree
from nnlo_common.training.checkpoint._manifest import MANIFEST
from nnlo_common.training.checkpoint._store import SavedCheckpoint

FACTS = {"epoch": 1}


def filled(folder: Path, count: int = 2, **options: Any) -> Store:
    store = Store(folder, **options)
    for _ in range(count):
        assert store.save({"rank0.pt": b"state"}, FACTS)
    return store


def planted(folder: Path, **fields: Any) -> None:
    """Write a manifest with a correct checksum, as somebody who knows the format would write it."""
    number = int(folder.name.rpartition("-")[2])
    plain: dict[str, Any] = {"number": number, "files": {"rank0.pt": Entry.of(b"state")}, "facts": FACTS}
    (folder / MANIFEST).write_bytes(Manifest(**(plain | fields)).written())


@pytest.mark.parametrize("absolute", [False, True], ids=["above", "absolute"])
def test_the_names_in_a_manifest_never_lead_out_of_the_checkpoint(tmp_path: Path, absolute: bool) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_bytes(b"mine")
    store = filled(tmp_path / "run", keep=1)
    first = store.folder / "checkpoint-000002"
    name = str(mine) if absolute else "../../mine.txt"
    planted(first, files={name: Entry.of(b"mine")})
    (first / "notes.txt").write_text("so that its files are removed one by one")
    with pytest.raises(DamagedError, match=r"names the file .*, which cannot be in a checkpoint"):
        SavedCheckpoint.open(first, 2)
    for _ in range(3):
        store.save({"rank0.pt": b"state"}, FACTS)
    assert mine.read_bytes() == b"mine"


@pytest.mark.parametrize(
    "fields",
    [
        {"facts": None},
        {"facts": [1]},
        {"score": "0.5"},
        {"score": True},
        {"files": {"rank0.pt": Entry(-1, "0" * 32)}},
        {"files": {"rank0.pt": Entry(5, "x")}},
        {"files": {"rank0.pt": Entry(None, None)}},  # type: ignore[arg-type]
        {"files": {"a." * 200 + "pt": Entry.of(b"")}},
    ],
    ids=repr,
)
def test_a_consistent_manifest_that_no_writer_has_written_is_damaged(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    store = filled(tmp_path)
    planted(tmp_path / "checkpoint-000002", **fields)
    with pytest.warns(RuntimeWarning, match="checkpoint-000002 is damaged"):
        newest = store.newest()
    assert newest is not None
    assert newest.manifest.number == 1


def put_pipe(path: Path) -> None:
    os.mkfifo(path)


def put_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def put_holes(path: Path) -> None:
    path.touch()
    os.truncate(path, 64 << 30)


SPECIAL = {"a pipe": put_pipe, "a device": put_device, "64 GiB of holes": put_holes}


@pytest.mark.parametrize("put", SPECIAL.values(), ids=SPECIAL)
@pytest.mark.parametrize("name", ["rank0.pt", MANIFEST])
def test_what_is_no_file_of_the_right_size_is_not_read(
    tmp_path: Path, name: str, put: Callable[[Path], None]
) -> None:
    store = filled(tmp_path)
    path = tmp_path / "checkpoint-000002" / name
    path.unlink()
    put(path)
    with pytest.warns(RuntimeWarning, match=f"checkpoint-000002 is damaged: {name} .*; resuming from"):
        newest = store.newest()
    assert newest is not None
    assert newest.manifest.number == 1


def test_links_in_place_of_a_checkpoint_are_neither_read_nor_followed(tmp_path: Path) -> None:
    elsewhere = filled(tmp_path / "theirs", 1).path(1)
    (elsewhere / "notes.txt").write_text("theirs")
    store = filled(tmp_path / "run", 1, keep=1)
    (store.folder / "checkpoint-000001").rename(tmp_path / "aside")
    (store.folder / "checkpoint-000001").symlink_to(elsewhere)
    (store.folder / "checkpoint-000002.part").symlink_to(elsewhere)
    for _ in range(3):
        assert store.save({"rank0.pt": b"state"}, FACTS)
    assert sorted(one.name for one in elsewhere.iterdir()) == [MANIFEST, "notes.txt", "rank0.pt"]


def test_a_link_in_a_draft_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    draft = Store(tmp_path / "run").begin()
    assert draft is not None
    (draft.folder / "rank0.pt").symlink_to(tmp_path / "mine.txt")
    draft.write("rank0.pt", b"state")
    assert (tmp_path / "mine.txt").read_text() == "mine"
    assert not (draft.folder / "rank0.pt").is_symlink()


def test_a_link_in_place_of_a_draft_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    draft = Store(tmp_path / "run").begin()
    assert draft is not None
    draft.folder.rmdir()
    draft.folder.symlink_to(tmp_path / "theirs")
    with pytest.raises(OSError, match="symbolic link"):
        draft.write("rank0.pt", b"state")
    assert list((tmp_path / "theirs").iterdir()) == []


# --- states ------------------------------------------------------------------------------------------------


def archive(method: int = zipfile.ZIP_STORED, **members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as into:
        for name, content in members.items():
            into.writestr(f"{name}.npy", content)
    return file.getvalue()


def array(header: str, content: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode("latin1") + content


def tree(text: str) -> bytes:
    file = io.BytesIO()
    np.save(file, np.frombuffer(text.encode(), np.uint8))
    return file.getvalue()


STATES = {
    "no mapping": (archive(tree=tree("[]")), "not a mapping"),
    "deep": (archive(tree=tree('{"a": ' * 900 + "1" + "}" * 900)), "too deeply: more than 100 levels"),
    "very deep": (archive(tree=tree("[" * 100_000)), "too deeply: more than 100 levels"),
    "digits": (archive(tree=tree(f'{{"a": {"9" * 400}}}')), "digits"),
    "many digits": (archive(tree=tree(f'{{"a": {"9" * 5000}}}')), "digits"),
    "no such array": (archive(tree=tree('{"a": "array:7"}')), "'7'"),
    "compressed": (archive(zipfile.ZIP_DEFLATED, tree=tree("{}"), x=bytes(9_000_000)), "compressed"),
    "huge": (
        archive(
            tree=tree('{"a": "array:0"}'),
            **{"0": array("{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,)}\n")},
        ),
        "claims",
    ),
    "negative": (
        archive(
            tree=tree("{}"), x=array("{'descr': '<f8', 'fortran_order': False, 'shape': (-1,)}\n", bytes(8))
        ),
        "shape",
    ),
    "objects": (
        archive(
            tree=tree("{}"), x=array("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}\n", bytes(8))
        ),
        "objects",
    ),
    "odd header": (archive(tree=tree("{}"), x=array("[" * 5000)), "is it damaged"),
}


@pytest.mark.parametrize(("data", "told"), STATES.values(), ids=STATES)
def test_a_consistent_state_that_no_writer_has_written_is_refused(data: bytes, told: str) -> None:
    with pytest.raises(ConfigurationError, match=f"a saved state cannot be read .*{told}"):
        unpacked_tree(data)


def test_a_member_that_claims_more_than_the_file_has_is_not_read() -> None:
    data = bytearray(archive(tree=tree("{}")))
    for at, (signature, offset) in enumerate(((b"PK\x03\x04", 22), (b"PK\x01\x02", 24))):
        place = data.index(signature) + offset
        data[place : place + 4] = (3_000_000_000 + at).to_bytes(4, "little")
    with pytest.raises(ConfigurationError, match="claims 3000000001 bytes of"):
        unpacked_tree(bytes(data))


def test_a_state_that_could_not_be_read_is_not_saved() -> None:
    deep: Any = 1
    for _ in range(120):
        deep = [deep]
    for state in ({"a": deep}, {"a": 10**400}, {"a": np.array([None], [("x", object)])}):
        with pytest.raises(ConfigurationError, match="cannot be saved"):
            packed_tree(state)


def test_limits_hold_exactly_what_is_saved() -> None:
    deep: Any = 10**307
    for _ in range(97):
        deep = [deep]
    state = {"deep": deep, "last": json.loads("[1e308, -Infinity]")}
    assert unpacked_tree(packed_tree(state)) == state
