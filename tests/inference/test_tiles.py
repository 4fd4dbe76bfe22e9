"""Tiles: what the whole volume would give, for any shape, blending, format and number of ranks."""

from __future__ import annotations

import contextlib
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnlo_common import ConfigurationError
from nnlo_common.inference import TileOptions, _tile_run, infer_over_tiles
from nnlo_common.inference._receptive_field import measured_field, measured_period
from nnlo_common.inference._tile_plan import planned_tiles
from nnlo_common.inference._tile_run import TileRun, _batches, run_of
from nnlo_common.inference._tiles import Cut, Tile, Tiling, Volume, cuts_of, opened_volume
from nnlo_common.testing import InjectedFault
from tests.helpers.threads import no_new_threads, on_ranks

DRAW = np.random.default_rng(0)


class Blur:
    """A network of NumPy: sums over windows of (2 before + 1 + after) voxels, with zeros outside.

    Each further channel is a multiple of the first. A pooling makes it depend on where it begins.
    """

    def __init__(self, before=1, after=1, channels=1, pool=1, calls=None, fails_at=None):
        self.before, self.after, self.channels, self.pool = before, after, channels, pool
        self.calls = [] if calls is None else calls
        self.fails_at = fails_at

    def begin(self, batch):
        self.calls.append(batch.shape)
        if len(self.calls) == self.fails_at:
            raise InjectedFault("here")
        return np.stack([self.one(tile.sum(0, dtype="f8")) for tile in batch])

    def result(self, handle):
        return handle

    def one(self, tile):
        for axis in range(tile.ndim):
            if self.pool > 1:
                size = tile.shape[axis]
                edges = np.arange(0, size, self.pool)
                tile = np.repeat(np.add.reduceat(tile, edges, axis), self.pool, axis).take(range(size), axis)
            pad = [(0, 0)] * tile.ndim
            pad[axis] = (self.before, self.after)
            full, size = np.pad(tile, pad), tile.shape[axis]
            window = range(self.before + self.after + 1)
            tile = sum((1 + at) * full.take(range(at, at + size), axis) for at in window)
        return np.stack([(tile * (1 + channel)) for channel in range(self.channels)]).astype("f4")


def tiled(data, path=None, world=None, model=None, name="m", **options):
    with no_new_threads() if world is None else contextlib.nullcontext():
        return infer_over_tiles(
            model or Blur(), data, path, TileOptions(**{"tile": 8, **options}), world=world, model=name
        )


def whole(model, data):
    return model.result(model.begin(data.reshape(1, -1, *data.shape[-data.ndim :])))[0]


@given(
    st.integers(1, 60),
    st.integers(1, 30),
    st.integers(0, 6),
    st.integers(0, 6),
    st.sampled_from([1, 2, 3, 4]),
    st.booleans(),
)
def test_tiles_count_everywhere_and_have_their_margins(size, tile, margin, overlap, multiple, even):
    try:
        cuts = cuts_of(size, tile, margin=margin, overlap=overlap, multiple=multiple, even=even)
    except ConfigurationError:
        assert tile < size
        assert tile - 2 * margin - overlap < multiple * (2 if even else 1)
        return
    counts = np.zeros(size, int)
    for cut in cuts:
        assert 0 <= cut.start <= cut.first < cut.last <= cut.stop <= size
        assert cut.start % multiple == 0
        assert cut.stop - cut.start <= tile
        assert cut.first - cut.start >= margin or cut.start == 0
        assert cut.stop - cut.last >= margin or cut.stop == size
        counts[cut.first : cut.last] += 1
    assert (counts >= 1).all()
    assert overlap or (counts == 1).all()
    steps = {other.first - one.first for one, other in pairwise(cuts[: None if even else -1])}
    assert len(steps) <= 1 or not even


@given(st.data())
@settings(max_examples=50)
def test_pieces_divide_the_volume_and_know_their_tiles(data):
    axes = data.draw(st.integers(1, 3))
    shape = tuple(data.draw(st.integers(5, 30)) for _ in range(axes))
    blend = data.draw(st.sampled_from(["crop", "linear", "gaussian"]))
    overlap = 0 if blend == "crop" else data.draw(st.integers(1, 3))
    tiling = Tiling(shape=shape, tile=(9,) * axes, margin=(2,) * axes, overlap=(overlap,) * axes, blend=blend)
    tiling = tiling.grouped(4, most=data.draw(st.integers(1, 40)), least_bytes=10, largest_bytes=10**9)
    seen, weights = np.zeros(shape, int), np.zeros(shape)
    for piece in range(tiling.pieces):
        region = tiling.piece(piece)
        seen[region] += 1
        for _, tile in tiling.tiles_of(region):
            assert tiling.last_piece_of(tile) >= piece
            mask = np.zeros(shape)
            mask[tile.region] = tiling.weights(tile)
            weights[region] += mask[region]
    assert (seen == 1).all()
    assert (weights > 0).all()
    assert blend != "crop" or (weights == 1).all()
    assert blend != "linear" or np.allclose(weights, 1) or min(shape) < 15, "ramps of two add up to 1"


SHAPES = [(23,), (41, 8), (30, 37), (9, 21, 26), (16, 19, 3)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("blend", ["crop", "linear", "gaussian"])
def test_tiles_give_what_the_whole_gives(shape, blend):
    data = DRAW.standard_normal(shape).astype("f4")
    model = Blur(before=2, after=1, channels=3)
    axes = "zyx"[-len(shape) :]
    found = tiled(data, model=model, tile=12, blend=blend, axes=axes)
    assert found.margin == tuple(0 if size <= 12 and max(shape) <= 12 else 2 for size in shape)
    expected = model.one(data.astype("f8"))
    assert found.outputs.shape == (3, *shape)
    if blend == "crop":
        np.testing.assert_array_equal(found.outputs, expected)
    np.testing.assert_allclose(found.outputs, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("blend", ["crop", "gaussian"])
def test_ranks_give_the_bits_of_one_process(size, blend):
    data = DRAW.standard_normal((30, 37)).astype("f4")
    alone = tiled(data, blend=blend, tile=10).outputs
    for one in on_ranks(size, lambda world: tiled(data, world=world, blend=blend, tile=10)):
        np.testing.assert_array_equal(one.outputs, alone)


@pytest.mark.parametrize("kept", [0, 400, 1200])  # a tile has 400 bytes
def test_tiles_that_are_not_kept_for_long_are_there_for_their_piece(kept, monkeypatch):
    data = DRAW.standard_normal((40, 23)).astype("f4")
    alone = tiled(data, blend="gaussian", tile=10).outputs
    monkeypatch.setattr(_tile_run, "_LARGEST_BLENDED", 1)  # pieces of one tile
    monkeypatch.setattr(_tile_run, "_KEPT_BYTES", kept)
    np.testing.assert_array_equal(tiled(data, blend="gaussian", tile=10).outputs, alone)


def test_strides_are_respected():
    data = DRAW.standard_normal((44, 52)).astype("f4")
    for pool in (2, 4):
        model = Blur(pool=pool)
        found = tiled(data, model=model, tile=24)
        np.testing.assert_array_equal(found.outputs[None], model.one(data.astype("f8")))


@pytest.mark.parametrize("shape", [(64,), (44, 52), (20, 24, 28)])
def test_strides_are_respected_where_the_margin_is_given(shape):
    data = DRAW.standard_normal(shape).astype("f4")
    model, options = Blur(pool=4), {"tile": 16, "axes": "zyx"[-len(shape) :]}
    expected = model.one(data.astype("f8"))
    for margin in (4, [5] * len(shape)):
        np.testing.assert_array_equal(
            tiled(data, model=model, margin=margin, **options).outputs[None], expected
        )
    every = on_ranks(3, lambda world: tiled(data, world=world, model=Blur(pool=4), margin=4, **options))
    for one in every:
        np.testing.assert_array_equal(one.outputs[None], expected)
    calls = []
    tiled(data, model=Blur(pool=4, calls=calls), margin=4, multiple=4, **options)
    assert {call[2:] for call in calls} == {tuple(min(16, size) for size in shape)}, "nothing is measured"


class Fixed(Blur):
    """Takes one size of tiles only."""

    def begin(self, batch):
        if batch.shape[2:] != (16, 16):
            raise ValueError("a size that it was not made for")
        return super().begin(batch)


def test_strides_of_a_model_that_takes_few_sizes_are_found():
    data = DRAW.standard_normal((40, 48)).astype("f4")
    model = Fixed(pool=4)
    found = tiled(data, model=model, tile=16, margin=4)
    np.testing.assert_array_equal(found.outputs[None], model.one(data.astype("f8")))


@pytest.mark.parametrize(("before", "after", "pool"), [(0, 0, 1), (1, 1, 1), (3, 0, 1), (0, 5, 1), (1, 2, 4)])
def test_the_receptive_field_is_measured(before, after, pool):
    found = measured_field(Blur(before, after, pool=pool), 2, "f4", 2)
    reach = (before + pool - 1, after + pool - 1) if pool == 1 else None
    assert found.period == (pool, pool)
    if reach is not None:
        assert (found.before, found.after) == ((before, before), (after, after))
    else:
        # The window sees groups of voxels: of the group of the first and of the last that it covers, all.
        firsts = [at - (at - before) // pool * pool for at in range(pool)]
        lasts = [(at + after) // pool * pool + pool - 1 - at for at in range(pool)]
        assert (found.before[0], found.after[0]) == (max(firsts), max(lasts))


class Counting(Volume):
    """Notes how many voxels are read."""

    def __init__(self, *args):
        self.reads = []
        super().__init__(*args)

    def read(self, item, region):
        self.reads.append(np.prod([one.stop - one.start for one in region]))
        return super().read(item, region)


class Fourier(Blur):
    """As by a convolution by Fourier transform: each input changes all outputs, by rounding."""

    def one(self, tile):
        exact = super().one(tile)
        return exact + (1e-7 * np.abs(exact).max() * np.tanh(tile.sum())).astype("f4")


def test_rounding_is_no_dependence():
    found = measured_field(Fourier(2, 1), 1, "f4", 2)
    assert (found.before, found.after, found.period) == ((2, 2), (1, 1), (1, 1))


class Global(Blur):
    """Each output depends on all inputs."""

    def one(self, tile):
        return (tile + tile.mean())[None].astype("f4")


def test_a_model_that_sees_everything_is_named():
    data = DRAW.standard_normal((30, 40)).astype("f4")
    with pytest.raises(
        ConfigurationError, match=r"the receptive field is unbounded along y: .* give a margin by"
    ):
        tiled(data, model=Global())
    assert tiled(data, model=Global(), margin=2).outputs.shape == (30, 40)


@pytest.mark.parametrize("dtype", ["f4", "u1"])
@pytest.mark.parametrize("shape", [(9,), (40,), (16, 30), (24, 24, 24)])
def test_a_model_that_sees_everything_has_no_period(shape, dtype):
    assert measured_period(Global(), 1, dtype, len(shape), shape).period == (None,) * len(shape)


def test_only_pieces_have_all_classes():
    data = DRAW.standard_normal((40, 40)).astype("f4")
    model = Blur(channels=5)
    sizes = []

    def reduce(scores):
        sizes.append(scores.shape)
        return scores.argmax(0)

    found = tiled(data, model=model, reduce=reduce, tile=10).outputs
    np.testing.assert_array_equal(found, model.one(data.astype("f8")).argmax(0))
    assert max(np.prod(size[1:]) for size in sizes) < 40 * 40 / 4
    found = tiled(data, model=model, reduce="argmax", tile=10).outputs
    assert found.dtype == np.uint8
    found = tiled(data, reduce=0.5, tile=10).outputs
    np.testing.assert_array_equal(found, (Blur().one(data.astype("f8"))[0] > 0.5))


class Typed(Blur):
    """Outputs of another type."""

    def __init__(self, dtype, **options):
        self.dtype = dtype
        super().__init__(**options)

    def one(self, tile):
        return super().one(tile).astype(self.dtype)


@pytest.mark.parametrize(
    ("dtype", "mean"), [("f2", "f4"), ("f4", "f4"), ("f8", "f8"), ("u1", "f4"), ("i4", "f8"), ("?", "f4")]
)
@pytest.mark.parametrize("reduce", [None, lambda y: y + y])
def test_outputs_of_any_type_are_blended(dtype, mean, reduce):
    data = DRAW.integers(0, 2, (30, 37)).astype("f4")
    for blend in ("linear", "gaussian"):
        found = tiled(data, model=Typed(dtype), tile=12, margin=1, blend=blend, reduce=reduce).outputs
        expected = Typed(dtype).one(data.astype("f8"))[0].astype(mean)
        assert found.dtype == mean
        np.testing.assert_allclose(found, expected * (1 if reduce is None else 2), rtol=1e-5)
    assert tiled(data, model=Typed(dtype), tile=12, margin=1).outputs.dtype == np.dtype(
        dtype.replace("?", "u1")
    )


def test_flips_are_averaged():
    data = DRAW.standard_normal((20, 20)).astype("f4")
    model = Blur(before=2, after=0)
    found = tiled(data, model=model, flips="yx", margin=2).outputs
    every = [
        np.flip(model.one(np.flip(data, axes).astype("f8"))[0], axes) for axes in ((), (0,), (1,), (0, 1))
    ]
    np.testing.assert_allclose(found, np.mean(every, axis=0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["f2", "u1", "?"])
def test_flips_of_any_type_are_averaged(dtype):
    data = np.ones((20, 20), "f4")
    model = Typed(dtype, channels=5)
    found = tiled(data, model=model, flips="x", margin=2).outputs
    every = [model.one(data.astype("f8")), np.flip(model.one(np.flip(data, 1).astype("f8")), 2)]
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.mean(every, axis=0, dtype="f4"))


def test_channels_and_volumes_apart():
    data = DRAW.standard_normal((3, 20, 17, 2)).astype("f4")
    found = tiled(data, axes="tyxc", model=Blur(channels=2)).outputs
    assert found.shape == (3, 2, 20, 17)
    for item in range(3):
        expected = Blur(channels=2).one(data[item].sum(-1, dtype="f8"))
        np.testing.assert_allclose(found[item], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("source", ["h5", "npy", "zarr", "array"])
@pytest.mark.parametrize("sink", ["h5", "npy", "zarr"])
def test_files_of_all_formats(source, sink, tmp_path):
    data = DRAW.standard_normal((30, 37)).astype("f4")
    given = write(tmp_path, source, data)
    path = tmp_path / f"out.{sink}"
    on_ranks(2, lambda world: tiled(given, path, world, tile=10, model=Blur(channels=2)))
    np.testing.assert_array_equal(read(path), Blur(channels=2).one(data.astype("f8")))


def write(folder, kind, data):
    if kind == "array":
        return data
    path = folder / f"in.{kind}"
    if kind == "npy":
        np.save(path, data)
    elif kind == "h5":
        h5py = pytest.importorskip("h5py")
        with h5py.File(path, "w") as file:
            file.create_dataset("deep/raw", data=data, chunks=(8, 8))
    else:
        zarr = pytest.importorskip("zarr")
        zarr.save_array(str(path), data)
    return path


def read(path):
    if path.suffix == ".npy":
        return np.load(path)
    if path.suffix == ".h5":
        h5py = pytest.importorskip("h5py")
        with h5py.File(path) as file:
            return file["prediction"][()]
    return pytest.importorskip("zarr").open(str(path), mode="r")["prediction"][:]


@pytest.mark.parametrize("blend", ["crop", "gaussian"])
def test_what_is_written_is_not_computed_again(blend, tmp_path):
    data = DRAW.standard_normal((60, 60)).astype("f4")
    path, calls = tmp_path / "y.npy", []
    options = {"tile": 10, "margin": 1, "multiple": 1, "blend": blend}
    alone = tiled(data, **options, model=Blur(calls=calls)).outputs
    every = len(calls)
    calls.clear()
    with pytest.raises(InjectedFault):
        tiled(data, path, **options, model=Blur(calls=calls, fails_at=every // 2))
    calls.clear()
    tiled(data, path, **options, model=Blur(calls=calls))
    np.testing.assert_array_equal(np.load(path), alone)
    assert len(calls) < every


def test_batches_of_tiles_are_those_of_one_shape():
    data = DRAW.standard_normal((61, 34)).astype("f4")
    calls = []
    found = tiled(data, tile=12, batch_size=4, model=Blur(calls=calls), multiple=4, margin=1)
    np.testing.assert_array_equal(found.outputs, Blur().one(data.astype("f8"))[0])
    assert max(shape[0] for shape in calls) == 4
    assert sum(shape[0] for shape in calls) == found.tiles, "those tried first are not computed again"


def test_the_plan_is_what_happens(tmp_path):
    h5py = pytest.importorskip("h5py")
    data = DRAW.standard_normal((60, 70, 50)).astype("f4")
    with h5py.File(tmp_path / "v.h5", "w") as file:
        file.create_dataset("raw", data=data, chunks=(16, 16, 16))
    for blend in ("crop", "linear"):
        calls = []

        volume = opened_volume(tmp_path / "v.h5", None, None)
        run = run_of(Blur(calls=calls), volume, TileOptions(tile=20, blend=blend, margin=2, multiple=1), None)
        plan = planned_tiles(run)
        volume.close()
        assert plan.chunk_bytes >= plan.read_bytes
        assert len([*plan.lines(4)]) == 6
        calls.clear()
        with h5py.File(tmp_path / "v.h5") as file:
            counting = Counting(file["raw"], None, "v")
            tiled(counting, model=Blur(calls=calls), tile=20, blend=blend, margin=2, multiple=1)
        # The tile that is tried first is not computed again; two corners tell the volume from others.
        assert len(calls) == plan.looks
        assert sum(sorted(counting.reads)[2:]) * 4 == pytest.approx(plan.read_bytes, rel=0.2)


def test_the_example_of_the_source():
    """A volume of 2K x 1K x 1K in cubes of 120, of which 20 at each side do not count: 26 x 13 x 13 of 80."""
    volume = Volume(
        np.lib.stride_tricks.as_strided(np.zeros(1, "f4"), (2048, 1024, 1024), (0, 0, 0)), None, "v"
    )
    run = TileRun(Blur(calls=[]), volume, TileOptions(tile=(20, 20, 20), margin=2))
    run.tiling = Tiling(shape=volume.shape, tile=(120,) * 3, margin=(20,) * 3)
    plan = planned_tiles(run)
    assert plan.tiles == 26 * 13 * 13
    assert plan.volume_bytes == 2**33
    assert plan.read_bytes == plan.tiles * 120**3 * 4


WRONG = [
    ({"tile": 0}, "tile=0: give a whole number of at least 1, or one for each of the axes yx"),
    ({"tile": (8, 8, 8)}, r"tile=\(8, 8, 8\): give a whole number"),
    (
        {"margin": 4},
        "a margin of 4 at both faces leave nothing of a tile of 8 along y; give tiles larger than 8",
    ),
    ({"margin": 2, "blend": "linear", "overlap": 4}, "and an overlap of 4 leave nothing of a tile of 8"),
    ({"margin": -1}, "margin=-1: give a whole number of at least 0"),
    ({"blend": "mean"}, "blend='mean': give one of crop, linear, gaussian"),
    ({"overlap": 3}, "overlap=3: tiles that are cropped share nothing"),
    ({"axes": "zyx"}, "the volume has 2 axes, of .* axes='zyx' must name each once"),
    ({"axes": "yy"}, "axes='yy' must name each once"),
    ({"axes": "ct"}, "axes='ct' must name each once"),
    ({"flips": "z"}, "flips='z': there is no axis 'z', only yx"),
    ({"reduce": "max"}, "reduce='max': give 'argmax', a number as threshold, or a function"),
    (
        {"reduce": lambda y: y[:, :2]},
        "reduce returned 'prediction' of shape .* it must keep the axes of the volume",
    ),
    ({"reduce": lambda y: 1 / "x"}, "the model, or reduce, fails on a tile of float32"),
    ({"dataset": "raw"}, "dataset='raw' is about files, but the data are an array"),
    ({"multiple": 3, "margin": 1}, "a tile of 8 along y is not a multiple of 3, by which .* give 9"),
    ({"data": np.zeros((0, 3))}, r"the volume is empty: its shape is \(0, 3\)"),
    ({"data": np.zeros((5, 3), "c8")}, "the volume has the type complex64, which is not a real number"),
    ({"data": "none.h5"}, "none.h5 does not exist on this host"),
    ({"data": "none.npy"}, "none.npy cannot be read as .npy"),
    ({"part": "1/2"}, "a part of a volume without a file is lost"),
    ({"path": "y.txt"}, r"y\.txt ends in \.txt"),
]


@pytest.mark.parametrize(("options", "words"), WRONG)
def test_bad_input_gets_one_sentence_and_writes_nothing(options, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=words):
        tiled(**{"data": np.zeros((30, 40), "f4"), **options})
    assert not list(tmp_path.iterdir())


class Odd(Blur):
    """Outputs that do not fit the tile."""

    def one(self, tile):
        return super().one(tile)[:, 2:-2, 2:-2]


def test_an_output_that_does_not_fit_its_tile_is_named():
    with pytest.raises(
        ConfigurationError, match=r"the model's output 'prediction' has the shape .* for a tile of"
    ):
        tiled(np.zeros((30, 40), "f4"), model=Odd())


def test_a_volume_in_a_file_of_several_is_named(tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "v.h5", "w") as file:
        file["a"], file["b"] = np.zeros((20, 20)), np.ones((20, 20))
    with pytest.raises(ConfigurationError, match=r"v\.h5 has a, b; name one of them"):
        tiled(tmp_path / "v.h5")
    with pytest.raises(ConfigurationError, match=r"v\.h5 has no dataset 'c'; it has a, b"):
        tiled(tmp_path / "v.h5", dataset="c")
    assert tiled(tmp_path / "v.h5", dataset="b").outputs.max() > 1


@pytest.mark.parametrize(
    "name", ["alias", "/alias/", "twice", "links/raw", "deep/near", "same", "./deep/raw"]
)
def test_a_volume_may_be_a_link(name, tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(write(tmp_path, "h5", np.eye(20)), "a") as file:
        file["alias"], file["twice"] = h5py.SoftLink("/deep/raw"), h5py.SoftLink("links/raw")
        file["links"], file["deep/near"] = h5py.SoftLink("deep"), h5py.SoftLink("raw")
        file["same"], file["deep/type"] = file["deep/raw"], np.dtype("f4")
    volume = opened_volume(tmp_path / "in.h5", name, None)
    np.testing.assert_array_equal(volume.read(0, (slice(0, 20), slice(0, 20)))[0], np.eye(20))
    volume.close()
    opened_volume(tmp_path / "in.h5", None, None).close()


@pytest.mark.parametrize(
    "name", ["loop", "nowhere", "elsewhere", "deep", "", "deep/raw/x", "deep/none", "type"]
)
def test_a_link_to_no_dataset_of_the_file_is_named(name, tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(write(tmp_path, "h5", np.eye(20)), "a") as file:
        file["loop"], file["nowhere"] = h5py.SoftLink("/loop"), h5py.SoftLink("/none")
        file["elsewhere"], file["type"] = h5py.ExternalLink("none.h5", "raw"), np.dtype("f4")
    with pytest.raises(ConfigurationError, match=f"has no dataset '{name}'; it has deep/raw"):
        opened_volume(tmp_path / "in.h5", name, None)


@pytest.mark.parametrize(("tiles", "size"), [(9, 4), (27, 4), (5, 2), (1, 4), (4, 4), (7, 3)])
def test_batches_of_tiles_are_as_equal_as_can_be(tiles, size):
    # PyTorch computes some convolutions of one tile alone six times slower than in a batch of two.
    cut = Cut(0, 8, 0, 8)
    batches = [*_batches([(at, Tile((cut,))) for at in range(tiles)], size)]
    lengths = [len(batch) for batch in batches]
    assert [at for batch in batches for at, _ in batch] == [*range(tiles)]
    assert max(lengths) <= size
    assert max(lengths) - min(lengths) <= 1
    assert len(batches) == -(-tiles // size)
