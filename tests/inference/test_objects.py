"""Objects over the faces of pieces: what one labels in the whole volume; points and boxes once."""

from __future__ import annotations

import contextlib
import csv
from functools import partial

import numpy as np
import pytest

from nnlo_common import ConfigurationError
from nnlo_common.inference import TileOptions, infer_over_tiles
from nnlo_common.testing import InjectedFault
from tests.helpers.threads import no_new_threads, on_ranks, ranks

ndimage = pytest.importorskip("scipy.ndimage", reason="the reference")


class Same:
    """A model that returns what it gets."""

    def __init__(self, before=lambda batch: None):
        self.before = before

    def begin(self, batch):
        self.before(batch)
        return batch

    def result(self, handle):
        return handle


def found(data, path, world=None, model=None, **options):
    options = {"tile": 6, "margin": 0, "multiple": 1, "objects": "label", **options}
    options.setdefault("overwrite", world is None)
    with no_new_threads() if world is None else contextlib.nullcontext():
        return infer_over_tiles(model or Same(), data, path, TileOptions(**options), world=world, model="m")


def expected(values, connectivity):
    """Each value's connected parts, of the whole volume."""
    labels, count = np.zeros(values.shape, int), 0
    structure = ndimage.generate_binary_structure(values.ndim, connectivity)
    for value in np.unique(values[values > 0]):
        part, more = ndimage.label(values == value, structure)
        labels[part > 0] = part[part > 0] + count
        count += more
    return labels, count


def check_same(labels, values, connectivity):
    """Both divide the volume alike, and numbers run from 1 without gaps."""
    whole, count = expected(values, connectivity)
    assert labels.max() == count
    pairs = np.unique(np.stack([labels.ravel(), whole.ravel()]), axis=1)
    assert pairs.shape[1] == count + bool((whole == 0).any())
    assert len(np.unique(pairs[0])) == len(np.unique(pairs[1])) == pairs.shape[1]
    assert ((labels == 0) == (whole == 0)).all()


def random_case(draw):
    axes = int(draw.integers(1, 4))
    shape = tuple(int(one) for one in draw.integers(3, [60, 22, 14][axes - 1], axes))
    classes = int(draw.integers(1, 4))
    values = draw.integers(0, 10, shape) < draw.integers(1, 9)
    values = (values * draw.integers(1, classes + 1, shape)).astype("u1")
    tile = tuple(int(draw.integers(2, 9)) for _ in range(axes))
    return values, tile, int(draw.integers(1, axes + 1))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_random_volumes_are_labelled_as_a_whole(seed, tmp_path):
    draw = np.random.default_rng(seed)
    for _ in range(10):
        values, tile, connectivity = random_case(draw)
        result = found(
            values, tmp_path / "y.npy", tile=tile, connectivity=connectivity, axes="zyx"[: values.ndim]
        )
        labels = np.load(tmp_path / "y.npy")
        check_same(labels, values, connectivity)
        assert result.objects == labels.max()
    assert [one.name for one in tmp_path.iterdir()] == ["y.npy"]


def on_rank(values, path, options, world):
    return found(values, path, world, **options)


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_many_random_volumes_on_several_ranks(size, tmp_path):
    draw = np.random.default_rng(size)
    for case in range(200):
        values, tile, connectivity = random_case(draw)
        path = tmp_path / f"{case}.npy"
        options = {"tile": tile, "connectivity": connectivity, "axes": "zyx"[: values.ndim]}
        on_ranks(size, partial(on_rank, values, path, options))
        check_same(np.load(path), values, connectivity)


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("name", ["y.npy", "y.h5"])
def test_ranks_write_the_bytes_of_one_process(size, name, tmp_path):
    values = (np.random.default_rng(0).random((24, 21)) < 0.55).astype("u1")
    alone, path = tmp_path / f"alone-{name}", tmp_path / name
    found(values, alone, table=True)
    results = on_ranks(size, lambda world: found(values, path, world, table=True))
    np.testing.assert_array_equal(content(path), content(alone))
    check_same(content(path), values, 1)
    assert {one.objects for one in results} == {int(content(path).max())}
    assert (tmp_path / f"{name}.csv").read_text() == (tmp_path / f"alone-{name}.csv").read_text()
    assert not list(tmp_path.glob("*.maps*"))


def content(path):
    if path.suffix == ".npy":
        return np.load(path)
    h5py = pytest.importorskip("h5py")
    with h5py.File(path) as file:
        return file["prediction"][()]


def test_the_table_has_each_object(tmp_path):
    values = np.zeros((20, 20), "u1")
    values[2:9, 3:5], values[15, 15], values[0:3, 10:20] = 1, 2, 1
    found(values, tmp_path / "y.npy", table=True)
    rows = [*csv.DictReader((tmp_path / "y.npy.csv").read_text().splitlines())]
    labels = np.load(tmp_path / "y.npy")
    assert len(rows) == 3
    for row in rows:
        places = np.nonzero(labels == int(row["id"]))
        assert int(row["voxels"]) == len(places[0])
        assert float(row["value"]) == values[places][0]
        for axis, at in zip("yx", places, strict=True):
            assert (int(row[f"{axis}_begin"]), int(row[f"{axis}_end"])) == (at.min(), at.max() + 1)
            assert float(row[f"{axis}_centre"]) == pytest.approx(at.mean(), rel=1e-5)


def test_volumes_apart_have_objects_of_their_own(tmp_path):
    values = np.ones((3, 10, 10), "u1")
    assert found(values, tmp_path / "y.npy", axes="tyx", table=True).objects == 3
    labels = np.load(tmp_path / "y.npy")
    assert [np.unique(one).tolist() for one in labels] == [[1], [2], [3]]


def test_a_function_labels_a_piece(tmp_path):
    values = (np.random.default_rng(1).random((30, 30)) < 0.5).astype("u1")

    def strange_names(mask):
        return ndimage.label(mask)[0] * 7

    found(values, tmp_path / "y.npy", objects=strange_names)
    check_same(np.load(tmp_path / "y.npy"), values, 1)


def test_objects_of_a_threshold_need_no_map_of_scores(tmp_path):
    values = np.random.default_rng(2).random((30, 30)).astype("f4")
    found(values, tmp_path / "y.npy", reduce=0.5)
    check_same(np.load(tmp_path / "y.npy"), (values > 0.5).astype(int), 1)


def test_a_kill_in_any_phase_loses_nothing(tmp_path):
    values = (np.random.default_rng(3).random((30, 30)) < 0.5).astype("u1")
    path, calls = tmp_path / "y.npy", []

    def dies(batch):
        calls.append(1)
        if len(calls) == 15:
            raise InjectedFault("here")

    with pytest.raises(InjectedFault):
        found(values, path, model=Same(dies), overwrite=False)
    found(values, path, model=Same(dies), overwrite=False)
    assert 25 < len(calls) < 25 + 12
    check_same(np.load(path), values, 1)


def test_a_dead_rank_leaves_no_hole(tmp_path):
    values = (np.random.default_rng(4).random((30, 30)) < 0.5).astype("u1")
    path = tmp_path / "y.npy"

    def program(world):
        calls = []

        def before(batch):
            calls.append(1)
            if world.rank == 2 and len(calls) == 5:
                raise InjectedFault("rank 2 dies")

        return found(values, path, world, model=Same(before))

    # After the death of a rank the phases that follow cannot gather all, so the job ends, and goes on again.
    with contextlib.suppress(Exception), ranks(3) as cluster:
        cluster.run(program)
    found(values, path, overwrite=False) if not path.exists() else None
    check_same(np.load(path), values, 1)


def test_the_jobs_of_an_array_find_objects_together(tmp_path):
    values = (np.random.default_rng(5).random((30, 30)) < 0.5).astype("u1")
    path = tmp_path / "y.npy"
    for part in ("2/3", "1/3"):
        assert found(values, path, part=part, overwrite=False).missing
        assert not path.exists()
    found(values, path, part="3/3", overwrite=False)
    check_same(np.load(path), values, 1)


def peaks(scores):
    """Voxels higher than all their neighbours, with their height."""
    highest = ndimage.maximum_filter(scores, 3, mode="constant")
    places = np.nonzero((scores == highest) & (scores > 0.9))
    return np.stack([*places, scores[places]], 1)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("shape", [(45,), (17, 25), (8, 9, 13)])
def test_points_are_counted_once(size, shape, tmp_path):
    scores = np.random.default_rng(6).random(shape).astype("f4")
    path = tmp_path / "points.npy"
    options = {"objects": None, "points": peaks, "context": 2, "axes": "zyx"[: len(shape)]}
    results = on_ranks(size, lambda world: found(scores, path, world, **options))
    rows = np.load(path)
    assert sorted(map(tuple, rows)) == sorted(map(tuple, peaks(scores)))
    assert len(rows) == len({tuple(row) for row in rows}) == results[0].objects
    np.testing.assert_array_equal(results[-1].rows, rows)


def test_boxes_are_counted_once(tmp_path):
    """Boxes of 3 x 3 at each face and corner of pieces of 6 x 6."""
    values = np.zeros((30, 30), "u1")
    corners = [(row, column) for row in range(1, 26, 4) for column in range(1, 26, 5)]
    for row, column in corners:
        values[row : row + 3, column : column + 3] = 1

    def boxes(mask):
        parts = ndimage.find_objects(ndimage.label(mask)[0])
        return [[*(one.start for one in part), *(one.stop for one in part), 0.5] for part in parts]

    found(values, tmp_path / "boxes.npy", objects=None, boxes=boxes, context=4)
    rows = np.load(tmp_path / "boxes.npy")
    assert sorted(map(tuple, rows[:, :2].astype(int))) == corners
    assert (rows[:, 2:4] - rows[:, :2] == 3).all()


def test_nothing_found_is_no_rows(tmp_path):
    found(np.zeros((20, 20)), tmp_path / "p.npy", objects=None, points=peaks)
    assert np.load(tmp_path / "p.npy").shape == (0, 3)
    assert found(np.zeros((20, 20)), tmp_path / "y.npy").objects == 0


WRONG = [
    ({"objects": "labels"}, "objects='labels': give 'label', or a function"),
    ({"objects": "label", "points": peaks}, "objects and points are results of their own"),
    ({"objects": None, "points": 3}, "points=3 is not a function"),
    ({"connectivity": 0}, "connectivity=0: must be a whole number"),
    ({"path": None}, "objects, points and boxes need a file"),
    (
        {"objects": None, "points": peaks, "path": "p.h5"},
        "points and boxes are rows of numbers; name a .npy file",
    ),
    ({"objects": None, "points": lambda mask: np.zeros((2, 1))}, r"returned an array of shape \(2, 1\)"),
    ({"objects": None, "boxes": lambda mask: np.zeros((2, 3))}, "with the begins and ends along 2 axes"),
    (
        {"objects": lambda mask: mask[:2]},
        "objects returned .* of shape .* return whole numbers from 0, of the same",
    ),
    (
        {"data": np.zeros((2, 20, 20)), "axes": "cyx"},
        "objects need one map without channels, but the result is",
    ),
]


@pytest.mark.parametrize(("options", "words"), WRONG)
def test_bad_input_gets_one_sentence(options, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=words):
        found(**{"data": np.ones((20, 20)), "path": "y.npy", **options})
