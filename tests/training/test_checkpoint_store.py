"""The folder of checkpoints: whole or not there, whatever happens to the disk or to what lies on it."""

from __future__ import annotations

import builtins
import errno
import gc
import io
import json
import math
import os
import random
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnlo_common import ConfigurationError
from nnlo_common.training.checkpoint import DamagedError, Draft, Manifest, Store, packed_tree, unpacked_tree
from nnlo_common.training.checkpoint._manifest import MANIFEST

FILES = {"rank0.npz": b"the centre " * 50, "rank1.npz": bytes(range(256)), "empty.json": b""}


def files_of(number: int) -> dict[str, bytes]:
    return {name: data and data + bytes([number]) for name, data in FILES.items()}


def filled(folder: Path, count: int = 3, **options: Any) -> Store:
    store = Store(folder, **options)
    for number in range(1, count + 1):
        assert store.save(files_of(number), {"epoch": number})
    return store


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def said() -> Iterator[list[str]]:
    told: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield told
    told += [str(one.message) for one in caught]


# --- keeping ---------------------------------------------------------------------------------------------


def test_what_was_saved_is_read_by_another_process(tmp_path: Path) -> None:
    filled(tmp_path / "run" / "1")
    newest = Store(tmp_path / "run" / "1").newest()
    assert newest is not None
    assert newest.manifest.facts == {"epoch": 3}
    assert {name: newest.read(name) for name in newest.manifest.files} == files_of(3)


def test_an_empty_or_missing_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert Store(tmp_path).newest() is None
    assert Store(tmp_path / "none").newest() is None


def test_the_last_ones_and_the_best_are_kept(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=2, better="max")
    for score in (0.1, 0.9, 0.5, math.nan, 0.9, None, 0.3):
        store.save({"a.txt": b""}, {}, score)
    assert names(tmp_path) == ["checkpoint-000005", "checkpoint-000006", "checkpoint-000007"]
    lowest = Store(tmp_path, keep=1)
    lowest.save({"a.txt": b""}, {}, 0.8)
    assert names(tmp_path) == ["checkpoint-000007", "checkpoint-000008"]


def test_numbers_go_on_after_a_restart_also_behind_a_damaged_one(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / "checkpoint-000003" / MANIFEST).unlink()
    assert Store(tmp_path).save({"a.txt": b""}, {})
    assert "checkpoint-000004" in names(tmp_path)


def test_what_a_killed_writer_has_left_is_never_read_and_goes_with_the_next_checkpoint(
    tmp_path: Path,
) -> None:
    filled(tmp_path)
    draft = Store(tmp_path).begin()
    assert draft is not None
    draft.write("rank0.npz", b"half")
    newest = Store(tmp_path).newest()
    assert newest is not None
    assert newest.manifest.number == 3
    filled(tmp_path, 1)
    assert not [name for name in names(tmp_path) if "." in name]


def written(draft: Draft) -> Draft:
    draft.write("rank0.npz", b"of the late one")
    return draft


def test_a_writer_that_was_taken_for_dead_cannot_complete_what_another_has_begun(tmp_path: Path) -> None:
    late, next_one = filled(tmp_path, 1), Store(tmp_path)
    draft = late.begin()
    assert draft is not None
    written(draft)
    begun = next_one.begin()
    assert begun is not None
    begun.write("rank0.npz", b"of the next one")
    with pytest.warns(RuntimeWarning, match="no checkpoint could be written"):
        assert not late.commit(draft, {})
    assert next_one.commit(begun, {})
    newest = Store(tmp_path).newest()
    assert newest is not None
    assert newest.read("rank0.npz") == b"of the next one"


def test_the_number_of_an_abandoned_checkpoint_is_not_used_again(tmp_path: Path) -> None:
    first = filled(tmp_path, count=1)
    abandoned = first.begin()
    assert abandoned is not None
    late = Store(tmp_path).draft(abandoned.number)  # of a server that is taken for dead
    with pytest.warns(RuntimeWarning, match="rank 1 has died"):
        first.abandon(abandoned, "rank 1 has died before it has written its part")
    following = first.begin()
    assert following is not None
    with pytest.raises(FileNotFoundError):
        late.write("rank1.npz", b"too late")
    following.write("rank1.npz", b"in time")
    assert first.commit(following, {"epoch": 3})
    newest = Store(tmp_path).newest()
    assert newest is not None
    assert (newest.manifest.number, newest.read("rank1.npz")) == (3, b"in time")


def test_what_a_late_writer_completes_while_it_is_removed_is_whole_or_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, next_one = filled(tmp_path, 1), Store(tmp_path)
    draft = late.begin()
    assert draft is not None
    written(draft)
    remove, ends = shutil.rmtree, []

    def completed_meanwhile(path: Path) -> None:
        monkeypatch.undo()
        (path / "rank0.npz").unlink()
        ends.append(late.commit(draft, {}))
        remove(path)

    monkeypatch.setattr(shutil, "rmtree", completed_meanwhile)
    with pytest.warns(RuntimeWarning, match="no checkpoint could be written"):
        assert next_one.begin() is not None
    assert ends == [False]
    newest = Store(tmp_path).newest()
    assert newest is not None
    assert newest.manifest.number == 1


def test_several_processes_write_one_checkpoint(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first = store.begin()
    assert first is not None
    second = type(first)(first.folder, first.number)
    first.write("rank0.npz", b"server")
    second.write("rank1.npz", b"worker")
    first.files.update(second.files)
    assert store.commit(first, {})
    newest = store.newest()
    assert newest is not None
    assert newest.read("rank1.npz") == b"worker"


@pytest.mark.parametrize("name", ["../out.txt", MANIFEST, "noending", "a/b.txt", "", "twice.txt"])
def test_a_name_that_could_do_harm_is_refused(tmp_path: Path, name: str) -> None:
    draft = Store(tmp_path).begin()
    assert draft is not None
    draft.write("twice.txt", b"")
    with pytest.raises(ConfigurationError, match="cannot have"):
        draft.write(name, b"")


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    filled(tmp_path, 2, keep=2)
    (tmp_path / "checkpoint-000001" / "mine.txt").write_text("mine")
    filled(tmp_path, 2, keep=2)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert names(tmp_path / "checkpoint-000001.left") == ["mine.txt"]
    (tmp_path / "checkpoint-000004" / "mine.txt").write_text("mine")
    with said() as told:
        newest = Store(tmp_path).newest()
    assert newest is not None
    assert newest.manifest.number == 4
    (one,) = told
    assert "ignored files that do not belong there: mine.txt" in one


# --- damage ----------------------------------------------------------------------------------------------

#: Damages a checkpoint folder and returns the names of which the warning has to tell one.
Damage = Callable[[random.Random, Path], set[str]]


def flip(draw: random.Random, folder: Path) -> set[str]:
    path = draw.choice([path for path in folder.iterdir() if path.stat().st_size])
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)
    return {path.name}


def truncate(draw: random.Random, folder: Path) -> set[str]:
    path = draw.choice([path for path in folder.iterdir() if path.stat().st_size])
    os.truncate(path, draw.randrange(path.stat().st_size))
    return {path.name}


def lengthen(draw: random.Random, folder: Path) -> set[str]:
    path = draw.choice(list(folder.iterdir()))
    path.write_bytes(path.read_bytes() + draw.randbytes(draw.randint(1, 9)))
    return {path.name}


def remove(draw: random.Random, folder: Path) -> set[str]:
    path = draw.choice(list(folder.iterdir()))
    path.unlink()
    return {path.name}


def folder_for_file(draw: random.Random, folder: Path) -> set[str]:
    path = draw.choice(list(folder.iterdir()))
    path.unlink()
    path.mkdir()
    return {path.name}


def empty(_: random.Random, folder: Path) -> set[str]:
    for path in folder.iterdir():
        path.write_bytes(b"")
    return {MANIFEST}


def foreign(draw: random.Random, folder: Path) -> set[str]:
    path = draw.choice([path for path in folder.iterdir() if path.stat().st_size])
    path.write_bytes(draw.randbytes(path.stat().st_size))
    return {path.name}


def lead_astray(draw: random.Random, folder: Path) -> set[str]:
    path = draw.choice([path for path in folder.iterdir() if path.stat().st_size])
    path.unlink()
    path.symlink_to(draw.choice(["nowhere", path.name, "..", "/dev/null"]))
    return {path.name}


def file_for_folder(draw: random.Random, folder: Path) -> set[str]:
    shutil.rmtree(folder)
    folder.write_bytes(draw.randbytes(9))
    return {MANIFEST}


def swap_inside(draw: random.Random, folder: Path) -> set[str]:
    one, other = draw.sample(sorted(folder.iterdir()), 2)
    first = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(first)
    return {one.name, other.name}


def swap_between(draw: random.Random, folder: Path) -> set[str]:
    earlier = folder.with_name("checkpoint-000001")
    name = draw.choice([name for name in [*FILES, MANIFEST] if FILES.get(name) != b""])
    shutil.copy(earlier / name, folder / name)
    return {name, "rank0.npz"} if name == MANIFEST else {name}


def other_folder(draw: random.Random, folder: Path) -> set[str]:
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name(f"checkpoint-{draw.randint(1, 2):06d}"), folder)
    return {MANIFEST}


def edit(draw: random.Random, folder: Path) -> set[str]:
    manifest = json.loads((folder / MANIFEST).read_bytes())
    name = draw.choice(sorted(manifest))
    changes: dict[str, Any] = {
        "number": draw.choice([0, 2, 4, "3", None]),
        "files": draw.choice([{}, [], {"rank0.npz": manifest["files"]["rank0.npz"]}, {"../x.txt": {}}]),
        "facts": draw.choice([{}, {"epoch": 99}, None, []]),
        "score": 1.0,
        "format": draw.choice([0, 2, "1"]),
        "checksum": "0" * 32,
    }
    manifest[name] = changes[name]
    if draw.random() < 0.3:
        del manifest[name]
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
    return {MANIFEST}


def nonsense(draw: random.Random, folder: Path) -> set[str]:
    texts = ["", "[]", "null", "3", "{}", "[" * 5000, '{"format": 1}', "\udc80", "NaN", '"manifest"']
    (folder / MANIFEST).write_text(draw.choice(texts), errors="surrogateescape")
    return {MANIFEST}


DAMAGES: list[Damage] = [
    flip,
    truncate,
    lengthen,
    remove,
    folder_for_file,
    empty,
    foreign,
    lead_astray,
    file_for_folder,
    swap_inside,
    swap_between,
    other_folder,
    edit,
    nonsense,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_of_700_damaged_checkpoints_none_is_loaded_and_each_is_told_of(
    tmp_path: Path, damage: Damage
) -> None:
    filled(tmp_path / "whole")
    for seed in range(50):
        folder = tmp_path / str(seed)
        shutil.copytree(tmp_path / "whole", folder)
        wrong = damage(random.Random(seed), folder / "checkpoint-000003")
        with said() as told:
            newest = Store(folder).newest()
        assert newest is not None
        assert newest.manifest.number == 2, seed
        assert {name: newest.read(name) for name in FILES} == files_of(2)
        (one,) = told
        assert "checkpoint-000003 is damaged" in one
        assert any(name in one for name in wrong), (seed, one)
        assert "resuming from checkpoint-000002 instead, which is undamaged" in one


def test_where_all_are_damaged_it_is_refused_with_all_reasons(tmp_path: Path) -> None:
    store = filled(tmp_path)
    for number in (1, 2, 3):
        (tmp_path / f"checkpoint-{number:06d}" / "rank1.npz").write_bytes(b"")
    with pytest.raises(ConfigurationError, match="delete this one to start anew") as caught:
        store.newest()
    assert str(caught.value).count("rank1.npz has 0 bytes, not 257") == 3


def test_a_file_that_is_damaged_after_it_was_verified_is_not_read(tmp_path: Path) -> None:
    newest = filled(tmp_path).newest()
    assert newest is not None
    (newest.folder / "rank0.npz").write_bytes(b"x" * 551)
    with pytest.raises(DamagedError, match=r"rank0\.npz has other content"):
        newest.read("rank0.npz")
    with pytest.raises(DamagedError, match=r"strange\.txt is not in it"):
        newest.read("strange.txt")


# --- a disk that refuses -----------------------------------------------------------------------------------


class Disk:
    """Refuses the n-th thing that is asked of it, and everything after it if it is `full`.

    Other threads, and what other tests have left to be collected, do not take the refusal.
    """

    def __init__(self, patch: pytest.MonkeyPatch, refuse: int, error: int, *, full: bool) -> None:
        gc.collect()
        self.asked, self.refuse, self.error, self.full = 0, refuse, error, full
        self.thread = threading.get_ident()
        for name in ("mkdir", "rename", "fsync", "open", "rmdir", "unlink"):
            patch.setattr(os, name, self._limited(getattr(os, name)))
        opened = io.open

        def limited_open(file: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
            if "w" not in mode:
                return opened(file, mode, *rest, **options)
            self.ask()
            stream = opened(file, mode, *rest, **options)
            return Stream(stream, self) if "b" in mode else stream

        patch.setattr(io, "open", limited_open)
        patch.setattr(builtins, "open", limited_open)

    def ask(self) -> None:
        if threading.get_ident() != self.thread:
            return
        self.asked += 1
        if self.asked == self.refuse or (self.full and self.asked > self.refuse):
            raise OSError(self.error, os.strerror(self.error))

    def _limited(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def limited(*args: Any, **options: Any) -> Any:
            self.ask()
            return call(*args, **options)

        return limited


class Stream:
    """A file of which a part is written before the disk refuses the rest."""

    def __init__(self, stream: Any, disk: Disk) -> None:
        self._stream, self._disk = stream, disk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.close()

    def write(self, data: bytes) -> int:
        self._stream.write(data[: len(data) // 2])
        self._disk.ask()
        return int(self._stream.write(data[len(data) // 2 :]))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("full", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize(
    "error", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO], ids=errno.errorcode.get
)
def test_whatever_the_disk_refuses_a_whole_checkpoint_is_there(
    tmp_path: Path, error: int, full: bool
) -> None:
    """Every call that could fail fails once, one after the other, until one saves without any failure."""
    for refuse in range(1, 200):
        folder = tmp_path / str(refuse)
        store = filled(folder, 2, keep=2)
        before = content(folder)
        with pytest.MonkeyPatch.context() as patch, said() as told:
            disk = Disk(patch, refuse, error, full=full)
            saved = store.save(files_of(3), {"epoch": 3})
        if disk.asked < refuse:
            assert saved
            assert not told
            break
        assert saved or told
        assert len(told) <= 1
        assert all(os.strerror(error) in one for one in told)
        with said():
            newest = Store(folder).newest()
        assert newest is not None
        assert newest.manifest.number == (3 if saved else 2)
        if not saved:
            kept = {name: data for name, data in content(folder).items() if ".part" not in name}
            assert kept == before
        assert store.save(files_of(4), {"epoch": 4})
        assert not [name for name in names(folder) if name.endswith(".part")]
    assert refuse > 15, "the disk was asked for much less than expected"


def test_trouble_is_warned_of_once_until_it_is_over(tmp_path: Path) -> None:
    store = filled(tmp_path)
    for _ in range(2):
        with said() as told, pytest.MonkeyPatch.context() as patch:
            Disk(patch, 3, errno.ENOSPC, full=True)
            assert [store.save(FILES, {}) for _ in range(3)] == [False] * 3
        assert len(told) == 1
        assert store.save(FILES, {})


def test_what_was_begun_is_removed_when_the_disk_gets_full(tmp_path: Path) -> None:
    store = filled(tmp_path)
    for refuse in range(2, 9):
        with said(), pytest.MonkeyPatch.context() as patch:
            Disk(patch, refuse, errno.ENOSPC, full=False)
            assert not store.save(FILES, {})
        assert len(names(tmp_path)) == 3


# --- trees -----------------------------------------------------------------------------------------------

leaves = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=9)
trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


@given(st.dictionaries(st.text(max_size=9), trees, max_size=4))
def test_a_tree_comes_back_as_it_was(tree: dict[str, Any]) -> None:
    assert repr(unpacked_tree(packed_tree(tree))) == repr(tree)


def test_arrays_come_back_to_the_bit() -> None:
    odd = np.array([0.0, -0.0, np.nan, np.inf, 1e-45], np.float32)
    tree = {
        "a": odd,
        "deep": [{"b": np.arange(6).reshape(2, 3)}, np.zeros((0, 2))],
        "scalar": np.float32(0.1),
    }
    again = unpacked_tree(packed_tree(tree))
    assert again["a"].tobytes() == odd.tobytes()
    assert again["a"].dtype == np.float32
    assert np.array_equal(again["deep"][0]["b"], tree["deep"][0]["b"])
    assert again["deep"][1].shape == (0, 2)
    assert again["scalar"] == float(np.float32(0.1))


@pytest.mark.parametrize(
    "value", [{1, 2}, object(), np.array([None]), {1: 2}, b"bytes"], ids=lambda one: type(one).__name__
)
def test_what_cannot_be_saved_is_named(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"the state\['worker'\]\[1\] is a"):
        packed_tree({"worker": [0, value]})


@pytest.mark.parametrize("data", [b"", b"PK", b"x" * 100, packed_tree({})[:-30]], ids=len)
def test_what_is_no_tree_is_refused(data: bytes) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        unpacked_tree(data)


def test_a_manifest_with_odd_scores_is_whole() -> None:
    for score in (None, 0.1, math.inf):
        manifest = Manifest(number=1, files={}, score=score)
        assert Manifest.read(manifest.written()) == manifest
