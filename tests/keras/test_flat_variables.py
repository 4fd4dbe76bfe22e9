"""The copies between Keras variables and a flat vector, on the back end that KERAS_BACKEND names."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras", reason="the environment for MPICH has no frameworks")

from nnlo_common import ConfigurationError, FlatVector, Layout  # noqa: E402
from nnlo_keras._flat_variables import flat_variables  # noqa: E402
from nnlo_keras._variable_layout import averaged, layout_of  # noqa: E402

pytestmark = [
    pytest.mark.framework("keras"),
    # Keras 3.15 itself, with NumPy 2: Variable.__array__ takes no copy argument.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

BACKEND = keras.backend.backend()


def on_gpu():
    """Whether Keras puts the variables of torch into the memory of a GPU, where no view can be."""
    if BACKEND != "torch":
        return False
    import torch

    return torch.cuda.is_available()


ALIASES = BACKEND == "torch" and not on_gpu()
views = pytest.mark.skipif(on_gpu(), reason="variables on a GPU are copied")
only = {
    name: pytest.mark.skipif(name != BACKEND, reason=f"about {name}; KERAS_BACKEND is {BACKEND}")
    for name in ("tensorflow", "torch", "jax")
}
# torch.compile takes half a minute and a C++ compiler, and makes torch warn about its own ways.
_COMPILED = [pytest.mark.extended, pytest.mark.filterwarnings("ignore")]
JIT = [False, pytest.param(True, marks=_COMPILED if BACKEND == "torch" else [])]
MARK = np.float32(-77)


@pytest.fixture(autouse=True)
def _fresh():
    keras.utils.set_random_seed(3)
    if BACKEND == "torch":
        import torch

        torch.set_num_threads(1)


def bits(array):
    return np.ascontiguousarray(array).view(np.uint32).tolist()


def gaps(layout):
    """Where no segment lies."""
    free = np.ones(layout.size, bool)
    for segment in layout.segments:
        free[segment.place] = False
    return np.flatnonzero(free)


def marked(variables, model=None):
    """A flat vector with marks in every gap, and the variables in it."""
    flat = FlatVector(layout_of(variables))
    flat.vector[gaps(flat.layout)] = MARK
    return flat, flat_variables(variables, flat, model)


def packed(variables):
    """What the vector should be, by the slow and certain way."""
    flat = FlatVector(layout_of(variables))
    flat.vector[gaps(flat.layout)] = MARK
    for variable, view in zip(variables, flat.views(), strict=True):
        view[...] = keras.ops.convert_to_numpy(variable.value).astype(np.float32)
    return flat.vector


def random_bits(size, seed=0):
    return np.random.default_rng(seed).integers(0, 2**32, size, np.uint32).view(np.float32)


def noise(size, seed=0):
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def fill(flat, numbers):
    """Put numbers into the segments only."""
    for segment in flat.layout.segments:
        flat.vector[segment.place] = numbers[segment.place]


def variable(shape, dtype="float32", **options):
    return keras.Variable(np.ones(shape, np.float32), dtype=dtype, **options)


def data(count=64):
    rng = np.random.default_rng(5)
    return rng.standard_normal((count, 6)).astype("f4"), rng.integers(0, 3, count)


def network(optimizer="sgd", **options):
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(7, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(3),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, **options)
    return model


def fit(model, callbacks=(), epochs=1, **options):
    x, y = data()
    model.fit(x, y, batch_size=16, epochs=epochs, verbose=0, callbacks=list(callbacks), **options)


# Round trips.

SHAPES = [(), (0,), (1,), (15,), (16,), (17,), (3, 0, 2), (4, 4), (2, 3, 5), (1000,), (70_000,), (257, 300)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_shape_goes_there_and_back_bit_for_bit(dtype):
    variables = [variable(shape, dtype) for shape in SHAPES]
    flat, way = marked(variables)
    numbers = random_bits(flat.vector.size) if dtype == "float32" else noise(flat.vector.size)
    fill(flat, numbers)
    way.write()
    expected = packed(variables)
    if dtype == "float32":
        assert bits(flat.vector) == bits(expected)
    for segment in flat.layout.segments:
        flat.vector[segment.place] = 0
    if not (ALIASES and dtype == "float32"):
        way.read()
        assert bits(flat.vector) == bits(expected)
    assert (flat.vector[gaps(flat.layout)] == MARK).all()


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 6), max_size=3).map(tuple),
            st.sampled_from(["float32", "float16", "bfloat16"]),
        ),
        max_size=6,
    ),
    st.integers(0, 2**32),
)
def test_any_variables_go_there_and_back(kinds, seed):
    variables = [variable(shape, dtype) for shape, dtype in kinds]
    flat, way = marked(variables)
    assert bits(flat.vector) == bits(packed(variables))
    numbers = noise(flat.vector.size, seed)
    fill(flat, numbers)
    way.write()
    for one, segment in zip(variables, flat.layout.segments, strict=True):
        wanted = keras.ops.cast(numbers[segment.place].reshape(segment.shape), one.dtype)
        found = keras.ops.convert_to_numpy(keras.ops.cast(one.value, "float32"))
        assert (found == keras.ops.convert_to_numpy(keras.ops.cast(wanted, "float32"))).all()
    way.read()
    assert bits(flat.vector) == bits(packed(variables))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_16_bits_cannot_hold(dtype):
    one = variable((5,), dtype)
    flat, way = marked([one])
    huge = np.finfo(np.float32).max
    flat.vector[:5] = [huge, -huge, 1e-45, 1 + 2**-12, np.nan]
    way.write()
    way.read()
    np.testing.assert_array_equal(flat.vector[:5], [np.inf, -np.inf, 0, 1, np.nan])


def test_it_reads_when_it_is_made():
    model = network()
    flat, _ = marked(model.trainable_variables, model)
    assert bits(flat.vector) == bits(packed(model.trainable_variables))


def test_many_variables_large_and_small():
    sizes = [3, 70_000, 16] * 14
    variables = [
        variable((size,), "float16" if index % 5 == 0 else "float32") for index, size in enumerate(sizes)
    ]
    flat, way = marked(variables)
    fill(flat, noise(flat.vector.size))
    way.write()
    way.read()
    assert bits(flat.vector) == bits(packed(variables))


def test_no_variables_at_all():
    flat, way = marked([])
    way.write()
    way.read()
    assert flat.vector.size == 0


# Variables that are one.


def test_a_variable_given_twice_has_one_place():
    one = variable((3,))
    flat, way = marked([one, variable((2,)), one])
    first, _, last = flat.layout.segments
    assert last.tied_to == first.name
    assert last.place == first.place
    flat.vector[first.place] = [1, 2, 3]
    way.write()
    assert keras.ops.convert_to_numpy(one.value).tolist() == [1, 2, 3]


@pytest.mark.skipif(BACKEND == "jax", reason="a JAX array cannot be written to")
def test_two_wrappers_of_one_native_variable_have_one_place():
    one = variable((3,))
    other = keras.Variable(one.value, name="other")
    flat, way = marked([one, other])
    assert flat.layout.segments[1].tied_to == flat.layout.segments[0].name
    flat.vector[:3] = [1, 2, 3]
    way.write()
    way.read()
    assert flat.vector[:3].tolist() == [1, 2, 3]
    assert keras.ops.convert_to_numpy(other.value).tolist() == [1, 2, 3]


def test_a_shared_layer_has_one_place():
    shared = keras.layers.Dense(4, name="shared")
    left, right = keras.Input((4,)), keras.Input((4,))
    model = keras.Model([left, right], shared(left) + shared(right))
    assert [s.name for s in layout_of(model.weights).segments] == ["shared/kernel", "shared/bias"]


def test_two_variables_of_one_path_are_told_apart():
    names = [s.name for s in layout_of([variable((2,), name="w"), variable((2,), name="w")]).segments]
    assert names == ["w", "w (2)"]


# Aliases: none with TensorFlow and JAX, on purpose with torch.


# Whole cache lines, which a framework would take over without a copy if it were let.
@pytest.mark.parametrize(("size", "count"), [(48, 3), (48, 60), (200_000, 3), (70_000, 60)])
def test_overwriting_the_vector_after_a_write_changes_nothing(size, count):
    kinds = [((size,), "float32"), ((2, 16), "bfloat16"), ((2, size // 2), "float32")]
    variables = [variable(*kinds[index % 3]) for index in range(count)]
    flat, way = marked(variables)
    for seed in range(3):  # an allocator may give the memory of the last time
        fill(flat, noise(flat.vector.size, seed))
        way.write()
        before = packed(variables)
        flat.vector[:] = 12345
        after = packed(variables)
        changed = [bits(before[s.place]) != bits(after[s.place]) for s in flat.layout.segments]
        assert changed == ([True, False, True] * (count // 3) if ALIASES else [False] * count)


@pytest.mark.slow
def test_training_after_a_read_leaves_the_vector():
    model = network("adam")
    flat, way = marked(model.trainable_variables, model)
    fit(model)
    way.read()
    before = flat.vector.copy()
    fit(model, epochs=2)
    same = bits(before) == bits(flat.vector)
    assert same is not ALIASES
    way.read()
    assert bits(flat.vector) == bits(packed(model.trainable_variables)) != bits(before)


@pytest.mark.slow
def test_training_after_a_write_leaves_the_vector():
    model = network("adam")
    flat, way = marked(model.trainable_variables, model)
    fill(flat, noise(flat.vector.size))
    way.write()
    before = flat.vector.copy()
    fit(model, epochs=2)
    assert (bits(before) == bits(flat.vector)) is not ALIASES


def test_it_says_whether_it_is_an_alias():
    assert marked([variable((3,)), variable((3,), "float16")])[1].aliased is ALIASES
    assert not marked([variable((3,), "float16")])[1].aliased


@pytest.mark.parametrize("shift", [0, 4, 16, 32, 60])
@pytest.mark.parametrize("size", [5, 100_000])
def test_memory_that_is_not_aligned(shift, size):
    variables = [variable((size,)), variable((3,), "bfloat16"), variable(()), variable((2, size))]
    flat = FlatVector(layout_of(variables))
    raw = np.zeros(4 * flat.vector.size + 128, np.uint8)
    start = -raw.ctypes.data % 64 + shift
    flat.vector = raw[start : start + 4 * flat.vector.size].view(np.float32)
    way = flat_variables(variables, flat)
    flat.vector[:] = MARK
    fill(flat, noise(flat.vector.size))
    way.write()
    way.read()
    assert bits(flat.vector) == bits(packed(variables))
    if not ALIASES:
        flat.vector[:] = 0
        assert packed(variables).any()


# In training.


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("jit", JIT)
def test_a_model_is_read_and_written_between_fits(optimizer, jit):
    model = network(optimizer, jit_compile=jit)
    flat, way = marked(model.trainable_variables, model)
    for seed in range(3):
        fit(model)
        way.read()
        assert bits(flat.vector) == bits(packed(model.trainable_variables))
        fill(flat, noise(flat.vector.size, seed))
        way.write()
        assert bits(flat.vector) == bits(packed(model.trainable_variables))


class Exchange(keras.callbacks.Callback):
    """Reads at every second batch, halves, and writes."""

    def __init__(self, variables, *, fast):
        super().__init__()
        self.variables, self.fast, self.seen = variables, fast, []

    def on_train_batch_end(self, batch, logs=None):
        model = self.model  # on JAX this brings the state back
        if self.fast and not hasattr(self, "way"):
            self.flat, self.way = marked(self.variables, model)
        if batch % 2:
            return
        if self.fast:
            self.way.read()
            self.seen.append(self.flat.vector.copy())
            fill(self.flat, self.flat.vector * np.float32(0.5))
            self.way.write()
        else:
            self.seen.append(packed(self.variables))
            for one in self.variables:
                one.assign(keras.ops.convert_to_numpy(one.value) * np.float32(0.5))


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("jit", JIT)
def test_in_the_middle_of_fit_it_does_what_assign_does(optimizer, jit):
    def trained(*, fast):
        keras.utils.set_random_seed(3)
        model = network(optimizer, jit_compile=jit)
        exchange = Exchange(model.trainable_variables, fast=fast)
        fit(model, [exchange], epochs=3, validation_data=data(32))
        return exchange.seen, packed(model.weights)

    fast, slow = trained(fast=True), trained(fast=False)
    assert len(fast[0]) == len(slow[0]) == 6
    for one, other in zip(fast[0], slow[0], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(fast[1], slow[1], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_callback_need_not_touch_the_model():
    model = network("adam")
    flat, way = marked(model.trainable_variables, model)

    def reset(batch, logs=None):
        way.read()
        fill(flat, np.full(flat.vector.size, 0.25, np.float32))
        way.write()

    fit(model, [keras.callbacks.LambdaCallback(on_train_batch_end=reset)], epochs=2)
    for segment, values in zip(
        flat.layout.segments, _cut(packed(model.trainable_variables), flat), strict=True
    ):
        assert (values == np.float32(0.25)).all(), segment.name


def _cut(vector, flat):
    return [vector[segment.place] for segment in flat.layout.segments]


def test_mixed_precision():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, dtype="mixed_bfloat16")])
    flat, way = marked(model.weights, model)
    fill(flat, noise(flat.vector.size))
    way.write()
    assert {segment.dtype for segment in flat.layout.segments} == {"float32"}
    assert bits(flat.vector) == bits(packed(model.weights))


@pytest.mark.slow
def test_after_loading_weights(tmp_path):
    model = network("adam")
    flat, way = marked(model.trainable_variables, model)
    fit(model)
    model.save_weights(tmp_path / "a.weights.h5")
    saved = packed(model.trainable_variables)
    fit(model)
    model.evaluate(*data(), verbose=0)
    model.load_weights(tmp_path / "a.weights.h5")
    way.read()
    assert bits(flat.vector) == bits(saved)
    fill(flat, noise(flat.vector.size))
    way.write()
    model.save(tmp_path / "b.keras")
    loaded = keras.saving.load_model(tmp_path / "b.keras")
    assert bits(packed(loaded.trainable_variables)) == bits(flat.vector)


@pytest.mark.slow
def test_statistics_take_the_same_road():
    model = network()
    fit(model)
    flat, way = marked(averaged(model), model)
    assert flat.vector[:7].any()
    fill(flat, np.abs(noise(flat.vector.size)))
    way.write()
    assert bits(packed(averaged(model))) == bits(flat.vector)


# One back end only.


@only["torch"]
@views
def test_a_variable_that_got_new_memory_becomes_a_view_again():
    one, other = variable((3,)), variable((2, 2))
    flat, way = marked([one, other])
    one._value.data = one._value.data.clone() + 1
    way.read()
    assert flat.vector[:3].tolist() == [2, 2, 2]
    flat.vector[:3] = 5
    assert keras.ops.convert_to_numpy(one.value).tolist() == [5, 5, 5]
    other._value.data = other._value.data.clone()
    flat.vector[16:20] = 9
    assert keras.ops.convert_to_numpy(other.value).tolist() == [[1, 1], [1, 1]]
    way.write()
    assert keras.ops.convert_to_numpy(other.value).tolist() == [[9, 9], [9, 9]]


@only["torch"]
def test_a_variable_in_another_order_is_copied():
    one = variable((3, 2))
    one._value.data = one._value.data.T.contiguous().T
    flat, way = marked([one])
    assert not way.aliased
    flat.vector[:6] = range(6)
    way.write()
    assert keras.ops.convert_to_numpy(one.value).tolist() == [[0, 1], [2, 3], [4, 5]]
    way.read()
    assert flat.vector[:6].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.slow
@only["torch"]
@views
def test_training_moves_the_vector_itself():
    model = network("adam")
    flat, way = marked(model.trainable_variables, model)
    fit(model)
    assert way.aliased
    assert bits(flat.vector) == bits(packed(model.trainable_variables))


@only["tensorflow"]
@pytest.mark.parametrize("size", [3, 100_000])
def test_variables_of_a_strategy(size):
    import tensorflow as tf

    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        variables = [variable((size,)), variable((2,), "bfloat16"), variable((), "bfloat16")]
    flat, way = marked(variables)
    fill(flat, noise(flat.vector.size))
    way.write()
    assert isinstance(variables[0].value, tf.distribute.DistributedValues)
    way.read()
    assert bits(flat.vector) == bits(packed(variables))


@only["tensorflow"]
@pytest.mark.parametrize("count", [2, 40])
def test_attached_variables_are_the_vector_until_they_are_detached(count):
    variables = [
        variable((3,)),
        variable((2,), "float16"),
        variable((70_000,)),
        *(variable((2,)) for _ in range(count)),
    ]
    flat, way = marked(variables)
    fill(flat, noise(flat.vector.size))
    way.attach()
    assert way.aliased
    fill(flat, noise(flat.vector.size, seed=1).astype("f2"))
    others = [variables[0], *variables[2:]]
    expected = [view for one, view in zip(variables, flat.views(), strict=True) if one.dtype == "float32"]
    for one, view in zip(others, expected, strict=True):
        assert bits(keras.ops.convert_to_numpy(one.value)) == bits(view)  # nothing was written
    way.write()  # what cannot be the vector
    assert bits(packed(variables)) == bits(flat.vector)
    way.detach()
    assert not way.aliased
    before = packed(variables).copy()
    fill(flat, noise(flat.vector.size, seed=2))
    assert bits(packed(variables)) == bits(before)


@only["tensorflow"]
def test_what_a_step_does_to_attached_variables_is_read():
    import tensorflow as tf

    one, other = variable((3,)), variable((70_000,))
    flat, way = marked([one, other])
    way.attach()

    @tf.function
    def step():
        one.value.assign_add([1.0, 2.0, 3.0])
        other.assign(other * 3)

    for _ in range(3):
        step()
        way.read()
        assert bits(packed([one, other])) == bits(flat.vector)
        flat.vector[:3] = 7  # and they are the vector again
        assert keras.ops.convert_to_numpy(one.value).tolist() == [7, 7, 7]
    assert flat.views()[1][0] == 27


@only["tensorflow"]
def test_what_was_read_before_it_was_attached_does_not_change():
    one = variable((70_000,))
    flat, way = marked([one])
    way.write()
    kept = one.value.read_value()
    way.attach()
    flat.vector[:70_000] = 5
    assert kept.numpy().max() == 1
    way.detach()
    kept = one.value.read_value()
    flat.vector[:70_000] = 6
    way.write()
    assert kept.numpy().max() == 5


@pytest.mark.slow
@only["jax"]
def test_without_the_model_variables_are_away_while_fit_runs():
    model = network()
    flat, way = marked(model.trainable_variables)
    seen = []

    def look(batch, logs=None):
        with pytest.raises(
            ConfigurationError, match=r"has no value while fit\(\) runs; pass flat_variables\(\) the model"
        ):
            way.read()
        with pytest.raises(ConfigurationError, match="has no value while"):
            way.write()
        seen.append(batch)

    fit(model, [keras.callbacks.LambdaCallback(on_train_batch_end=look)])
    assert seen == [0, 1, 2, 3]
    way.read()
    assert bits(flat.vector) == bits(packed(model.trainable_variables))


@only["jax"]
def test_a_large_model_is_written_in_parts(monkeypatch):
    monkeypatch.setattr("nnlo_keras._flat_variables._jax._PART", 100)
    variables = [variable((size,)) for size in (40, 40, 20, 300, 1, 99, 16, 0, 83)]
    flat, way = marked(variables)
    assert len(way._parts) == 7
    fill(flat, noise(flat.vector.size))
    way.write()
    assert bits(flat.vector) == bits(packed(variables))


@only["jax"]
def test_variables_that_share_a_value_are_written_apart():
    variables = [variable((40_000,)) for _ in range(3)]
    variables[2].assign(variables[0].value)
    assert variables[2].value is variables[0].value
    flat, way = marked(variables)
    fill(flat, noise(flat.vector.size))
    way.write()
    assert bits(flat.vector) == bits(packed(variables))


@only["jax"]
def test_a_value_that_another_variable_has_stays_there():
    """Keras assigns the averages of an optimizer to the weights, which then share their arrays."""
    one, average = variable((40_000,)), variable((40_000,))
    one.assign(average.value)
    before = bits(keras.ops.convert_to_numpy(average).copy())
    flat, way = marked([one])
    fill(flat, noise(flat.vector.size))
    way.write()
    assert bits(keras.ops.convert_to_numpy(average)) == before


@only["jax"]
def test_memory_that_somebody_looks_at_stays_as_it_was():
    one = variable((40_000,))
    flat, way = marked([one])
    looked = keras.ops.convert_to_numpy(one)
    before = bits(looked)
    fill(flat, noise(flat.vector.size))
    way.write()
    assert bits(looked) == before


@only["jax"]
def test_variables_of_a_distribution():
    with keras.distribution.DataParallel(devices=keras.distribution.list_devices()[:1]).scope():
        model = network()
        flat, way = marked(model.trainable_variables, model)
        fill(flat, noise(flat.vector.size))
        way.write()
        assert model.trainable_variables[0]._layout is not None
        assert bits(flat.vector) == bits(packed(model.trainable_variables))


# Refusals.


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (
            "float64",
            (
                r"'odd' is float64, but is exchanged as float32, which would round it; "
                r"build its layer with dtype='float32'"
            ),
        ),
        ("int32", r"'odd' is int32, but only float32, float16 and bfloat16 .* leave it out"),
        ("uint8", r"'odd' is uint8"),
        ("bool", r"'odd' is bool"),
    ],
)
def test_what_float32_cannot_hold_is_refused(dtype, message):
    if dtype == "float64" and BACKEND == "jax":
        pytest.skip("JAX has no float64 unless it is asked for: https://docs.jax.dev/en/latest/jax_x64.html")
    odd = keras.Variable(np.zeros(3), dtype=dtype, trainable=False, name="odd")
    with pytest.raises(ConfigurationError, match=message):
        layout_of([variable((2,)), odd])


def test_a_variable_without_a_value_is_refused():
    with keras.StatelessScope():
        late = keras.Variable(keras.initializers.Zeros(), shape=(2,), name="late")
        with pytest.raises(ConfigurationError, match="'late' has no value yet; build the model"):
            layout_of([late])


@pytest.mark.parametrize("other", [[(3,)], [(2,), (3,), (4,)], [(2,), (4,)]])
def test_a_vector_for_other_variables_is_refused(other):
    flat = FlatVector(layout_of([variable(shape) for shape in other]))
    with pytest.raises(ConfigurationError, match="not laid out for these variables: "):
        flat_variables([variable((2,)), variable((3,))], flat)


def test_a_vector_without_room_for_marks_is_refused():
    variables = [variable((2,), name="a"), variable((3,), name="b")]
    arrays = [np.zeros(2, "f4"), np.zeros(3, "f4")]
    with pytest.raises(ConfigurationError, match="not laid out for these variables"):
        flat_variables(variables, FlatVector(Layout.of(arrays, ["a", "b"])))


def test_a_back_end_that_is_none_of_ours_is_refused(monkeypatch):
    flat, _ = marked([])
    monkeypatch.setattr(keras.backend, "backend", lambda: "numpy")
    with pytest.raises(ConfigurationError, match="'numpy'; set KERAS_BACKEND to tensorflow, torch or jax"):
        flat_variables([], flat)


# The layout and what is averaged.


@given(st.lists(st.integers(0, 70), max_size=8))
@settings(max_examples=20, deadline=None)
def test_every_segment_is_on_a_cache_line_with_room_behind_it(sizes):
    layout = layout_of([variable((size,)) for size in sizes])
    ends = [segment.offset for segment in layout.segments[1:]] + [layout.size]
    for segment, size, end in zip(layout.segments, sizes, ends, strict=bool(sizes)):
        assert segment.offset % 16 == 0
        assert end == segment.offset + 16 * (size // 16 + 1)


class Counts(keras.layers.Layer):
    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 2), name="kernel")
        self.steps = self.add_weight(shape=(), dtype="int32", trainable=False, name="steps")
        self.scale = self.add_weight(shape=(2,), trainable=False, name="scale")
        self.noise = keras.random.SeedGenerator(1)

    def call(self, x):
        return keras.ops.matmul(x, self.kernel) * self.scale


def paths(variables):
    return [one.path for one in variables]


@pytest.mark.slow
def test_averaged_are_moving_statistics_and_other_floats():
    inside = keras.Sequential([keras.layers.BatchNormalization(name="inner"), keras.layers.Dense(5)])
    tokens = keras.Input((4,), dtype="int32")
    x = keras.layers.Embedding(11, 6, name="words")(tokens)
    x = keras.layers.GlobalAveragePooling1D()(x)
    x = keras.layers.Dropout(0.5, seed=1)(keras.layers.BatchNormalization(name="outer")(x))
    x = inside(keras.layers.GaussianNoise(0.1)(x))
    model = keras.Model(tokens, [Counts(name="counts")(x), keras.layers.Dense(1, name="one")(x)])
    model.compile("adam", loss=["mse", "mae"], metrics=[["mae"], ["mse"]])
    x, y = np.ones((8, 4), "i4"), [np.ones((8, 2), "f4"), np.ones((8, 1), "f4")]
    model.fit(x, y, verbose=0)
    assert ["/".join(path.split("/")[-2:]) for path in paths(averaged(model))] == [
        "outer/moving_mean",
        "outer/moving_variance",
        "inner/moving_mean",
        "inner/moving_variance",
        "counts/scale",
    ]
    flat, way = marked(averaged(model), model)
    way.write()
    assert bits(flat.vector) == bits(packed(averaged(model)))


def test_frozen_weights_are_not_averaged():
    model = network()
    model.layers[0].trainable = False
    model.layers[1].trainable = False
    assert [path.rsplit("/")[-1] for path in paths(averaged(model))] == ["moving_mean", "moving_variance"]
    model.trainable = False
    assert [path.rsplit("/")[-1] for path in paths(averaged(model))] == ["moving_mean", "moving_variance"]
    assert averaged(keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])) == []


def test_averaged_statistics_of_16_bits():
    norm = keras.layers.BatchNormalization(dtype="bfloat16")
    model = keras.Sequential([keras.Input((3,)), norm])
    assert [one.dtype for one in averaged(model)] == ["bfloat16"] * 2
