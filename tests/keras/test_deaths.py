"""A server of a Keras training dies at any message: its heir, a worker, serves within its `fit`."""

from __future__ import annotations

import csv
import itertools
import os
import random
import re
import threading
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras", reason="the environment for MPICH has no frameworks")

import nnlo_keras as nk  # noqa: E402
from nnlo_common import EASGD, PeerLostError  # noqa: E402
from nnlo_common.algorithms._rule import Contribution  # noqa: E402
from nnlo_common.protocol import Kind, Server  # noqa: E402
from nnlo_common.testing import InjectedFault, MemoryCluster  # noqa: E402
from nnlo_common.training import _state_copies  # noqa: E402
from nnlo_common.training.checkpoint import SavedCheckpoint  # noqa: E402
from nnlo_keras._sequence_feed import SequenceFeed  # noqa: E402
from nnlo_keras._variable_layout import layout_of  # noqa: E402
from tests.helpers.counts import Count  # noqa: E402

pytestmark = [
    pytest.mark.framework("keras"),
    pytest.mark.filterwarnings("ignore:no checkpoint could be written:RuntimeWarning"),
    # Keras 3.15 itself, with NumPy 2: Variable.__array__ takes no copy argument.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.sampled(2),
]

WRAPPERS = [nk.AGN, nk.DiLoCo, nk.Downpour, nk.DynSGD, nk.EASGD, nk.GEM, nk.LocalSGD, nk.Synchronous]
WRAPPERS += [nk.Steady]
EPOCHS, SAMPLES, WORKERS, BATCH = 3, 24, 3, 2
TIMEOUT_S = 180.0
DRAW = np.random.default_rng(3)
X = DRAW.standard_normal((SAMPLES, 4)).astype("f4")
X[:, -1] = np.arange(SAMPLES)
Y = X[:, :1] - X[:, 1:2]


@pytest.fixture(autouse=True)
def _several_ranks(monkeypatch, _copies_at_once):
    # Let optimizers that `fit` builds early know that there are several ranks, as under a launcher.
    monkeypatch.setattr("nnlo_keras._wrapper.launched", lambda: "several ranks")


class End(NamedTuple):
    """What a rank has at the end."""

    role: str
    epochs: list[int]
    history: dict[str, list[float]]
    weights: list[Any]
    times: Any
    rate: float
    lost: tuple[str, ...]


def train(world, wrapper, *, callbacks=(), assignment="static", epochs=EPOCHS, plain=False, **ranks):
    """Train a small model on a rank."""
    count, layers = Count(SAMPLES), keras.layers
    keras.utils.set_random_seed(1)
    begin = partial(keras.initializers.GlorotUniform, seed=1)  # the seed before is that of all threads
    hidden = layers.Dense(3, activation="tanh", kernel_initializer=begin())
    middle = [] if plain else [hidden, layers.BatchNormalization()]
    model = keras.Sequential([keras.Input((4,)), count, *middle, layers.Dense(1, kernel_initializer=begin())])
    inner = keras.optimizers.SGD(0.01, momentum=0.9 if wrapper is nk.GEM else 0.0)
    model.compile(optimizer=wrapper(inner, **ranks), loss="mse", jit_compile=False)
    roles = {name: value for name, value in ranks.items() if name in ("servers", "spares")}
    options = {"features": "x", "labels": "y", "batch_size": BATCH, "assignment": assignment}
    data = nk.Batches({"x": X, "y": Y}, world=world, **options, **roles)
    distribute = nk.Distribute(world=world)
    fitted = model.fit(
        data,
        epochs=epochs,
        verbose=0,
        validation_data=(X[:8], Y[:8]),
        callbacks=[distribute, *callbacks],
    )
    return End(
        distribute.role,
        fitted.epoch,
        {name: [float(one) for one in values] for name, values in fitted.history.items()},
        [np.array(keras.ops.convert_to_numpy(one)) for one in model.trainable_variables],
        np.array(keras.ops.convert_to_numpy(count.times)),
        float(keras.ops.convert_to_numpy(model.optimizer.learning_rate)),
        distribute.report.lost,
    )


def on_ranks(program, faults=(), size=1 + WORKERS):
    """What a program returns on each rank, and how often each rank has come to each point."""
    with MemoryCluster(size) as cluster:
        for fault in faults:
            cluster.fail(*fault, may_miss=True)
        return cluster.run(program, TIMEOUT_S), dict(cluster.points._reached)


def check_history(end, *, leases=False):
    """All epochs are there, and every number is one; one that `leases` may have got nothing in an epoch."""
    assert end.epochs == list(range(len(end.epochs)))
    without = len(end.epochs) - len(end.history["loss"])
    assert without == 0 or (without > 0 and leases)
    assert all(np.isfinite(values).all() for values in end.history.values())


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "seed", [*range(18), *(pytest.param(seed, marks=pytest.mark.extended) for seed in range(18, 300))]
)
def test_whenever_a_server_dies_its_heir_serves_within_its_fit(seed, tmp_path_factory):
    """At each message: within a batch, a lease, the end of an epoch, a pause, a save, or at the end."""
    draw = random.Random(seed)
    wrapper = WRAPPERS[seed % len(WRAPPERS)]
    assignment, minutes = draw.choice(["static", "dynamic"]), draw.choice([0, 0.02 / 60])
    means = draw.random() < 0.5
    servers = 1 if wrapper is nk.GEM else 1 + seed // len(WRAPPERS) % 2
    victim = draw.randrange(servers)

    def run(folder, *faults):
        def program(world):
            callbacks = [nk.Checkpoint(folder, minutes=minutes), *([nk.MetricAverage()] if means else [])]
            roles = {"servers": servers, "heir": True}
            return train(world, wrapper, callbacks=callbacks, assignment=assignment, **roles)

        return on_ranks(program, faults, servers + WORKERS)

    _, reached = run(tmp_path_factory.mktemp("unharmed"))
    points = {name: count for (rank, name), count in reached.items() if rank == victim and name != "gather"}
    point = draw.choice(sorted(points))
    faults, folder = [(victim, point, draw.randint(1, points[point]))], tmp_path_factory.mktemp("run")
    if servers == 1 and draw.random() < 0.5:
        point, times = draw.choice(
            sorted((at, count) for (_, at), count in reached.items() if at != "gather")
        )
        faults.append((1, point, draw.randint(1, times)))  # the heir dies, too
    try:
        ends, _ = run(folder, *faults)
    except PeerLostError as error:
        assert re.search(r"before rank \d had a copy", str(error)), faults  # noqa: PT017 - else it goes on
    else:
        dead = [rank for rank, end in enumerate(ends) if isinstance(end, InjectedFault)]
        assert set(dead) <= {rank for rank, *_ in faults}, faults
        living = {rank: end for rank, end in enumerate(ends) if rank not in {victim, *dead}}
        *_, last = living.values()
        for rank, end in living.items():
            check_history(end, leases=assignment == "dynamic" and rank >= servers)
            for one, other in zip(end.weights, last.weights, strict=True):
                np.testing.assert_array_equal(one, other, err_msg=f"{faults}")
        leased = assignment == "dynamic" and wrapper in (nk.Downpour, nk.DynSGD, nk.EASGD)
        # Else the heir's share is missing from then on, or the rest of its last lease.
        if leased and dead in ([], [victim]):
            assert (sum(end.times for end in living.values()) >= EPOCHS).all(), faults
    for path in folder.glob("checkpoint-??????"):
        SavedCheckpoint.open(path, int(path.name[-6:])).verify()
    again, _ = run(folder)
    for rank, end in enumerate(again):
        check_history(end, leases=assignment == "dynamic" and rank >= servers)


STEPS = WORKERS * (SAMPLES // WORKERS // BATCH)  # exchanges in an epoch


@pytest.mark.parametrize(
    ("point", "occurrence"),
    [
        ("receive EXCHANGE", 2 * STEPS + 5),  # within the third epoch
        ("receive EXCHANGE", 2 * STEPS + 1),  # in its first batch
        ("receive EPOCH", 2 * WORKERS + 2),  # in its end
        ("receive EPOCH", 3 * WORKERS),
    ],
)
def test_callbacks_of_the_centre_go_on_where_those_of_the_dead_server_were(
    point, occurrence, tmp_path, monkeypatch
):
    monkeypatch.setattr(_state_copies, "_SECOND", 1 << 60)  # the first heir has the newest copy

    def program(world):
        logger = keras.callbacks.CSVLogger(tmp_path / "log.csv")
        callbacks = [
            keras.callbacks.ReduceLROnPlateau("val_loss", patience=2, min_delta=1e9, factor=0.5),
            keras.callbacks.EarlyStopping("val_loss", patience=4, min_delta=1e9),
            logger,
            keras.callbacks.ModelCheckpoint(
                tmp_path / f"{world.rank}-{{epoch}}.weights.h5", save_weights_only=True
            ),
        ]
        try:
            return train(world, nk.Synchronous, callbacks=callbacks, epochs=9, heir=True)
        finally:  # that of the dead server is still open
            if (file := getattr(logger, "csv_file", None)) is not None:
                file.close()

    (dead, *ends), _ = on_ranks(program, [(0, point, occurrence)])
    assert isinstance(dead, InjectedFault)
    assert [end.role for end in ends] == ["server 0", "worker 1", "worker 2"]
    for end in ends:
        check_history(end)
        assert len(end.epochs) in (5, 6)  # a worker hears of the end in its next epoch
        assert end.rate <= 0.00501, end  # halved after the third epoch
    first = ends[0]
    assert len(first.epochs) == 5  # the best epoch is the first, as for the dead server
    assert first.rate == pytest.approx(0.0025)  # halved after epochs 3 and 5
    assert {len(values) for values in first.history.values()} == {5}
    with (tmp_path / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["epoch"]) for row in rows] == list(range(5))
    np.testing.assert_allclose([float(row["val_loss"]) for row in rows], first.history["val_loss"])
    saved = sorted(path.name.partition(".")[0] for path in tmp_path.glob("*.weights.h5"))
    assert saved == ["0-1", "0-2", "1-3", "1-4", "1-5"]


def test_the_metrics_and_the_validation_of_an_heir_are_those_of_a_server():
    """Each epoch has the mean of the workers that are left, and one validation."""
    validated = []

    class Note(keras.callbacks.Callback):
        def on_test_end(self, logs=None):
            validated.append(threading.get_ident())

    def program(world):
        return train(world, nk.Synchronous, callbacks=[Note()], heir=True)

    (_, first, *others), _ = on_ranks(program, [(0, "receive EPOCH", 2)])
    assert first.role == "server 0"
    assert len(first.history["val_loss"]) == len(validated) == EPOCHS
    for epoch in (1, 2):
        mean = np.mean([end.history["loss"][epoch] for end in others])
        assert first.history["loss"][epoch] == pytest.approx(mean, rel=1e-5)
    assert all("val_loss" not in end.history for end in others)


@pytest.mark.parametrize("roles", [{"heir": True}, {"spares": 1}], ids=["heir", "spare"])
@pytest.mark.parametrize("victim", [0, 1])
def test_of_two_servers_only_the_first_or_who_takes_its_place_writes(victim, roles, tmp_path):
    """The other one has the callbacks of any server: that for its rate."""

    def program(world):
        logger = keras.callbacks.CSVLogger(tmp_path / f"{world.rank}.csv")
        callbacks = [logger, keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, min_delta=1e9)]
        try:
            return train(world, nk.Synchronous, callbacks=callbacks, servers=2, **roles)
        finally:  # that of the dead server is still open
            if (file := getattr(logger, "csv_file", None)) is not None:
                file.close()

    heir, size = 2 + victim, 2 + WORKERS
    follows, size = (heir, size) if "heir" in roles else (size, size + 1)
    ends, _ = on_ranks(program, [(victim, "receive EPOCH", 2)], size)
    assert isinstance(ends[victim], InjectedFault)
    assert ends[follows].role == f"server {victim}"
    assert {path.stem for path in tmp_path.glob("*.csv")} == {"0", *([str(follows)] if victim == 0 else [])}
    assert ends[follows].rate < 0.01


def compiled(optimizer, variables):
    """A step of an optimizer as a server on JAX makes it: compiled, it rounds a product and a sum once."""
    import jax

    apply = jax.jit(optimizer.stateless_apply)

    def step(gradients):
        state, values = ([one.value for one in some] for some in (optimizer.variables, variables))
        found = itertools.chain(*apply(state, gradients, values))
        for one, value in zip([*variables, *optimizer.variables], found, strict=True):
            one.assign(value)

    return step


def replayed(center, taken):
    """The weights after these gradients, by Keras' own optimizer."""
    variables = [keras.Variable(np.zeros(shape, "f4")) for shape in ((3, 1), (1,))]
    segments = layout_of(variables).segments
    optimizer = keras.optimizers.SGD(0.01)
    optimizer.build(variables)
    for variable, one in zip(variables, segments, strict=True):
        variable.assign(center[one.place].reshape(one.shape))
    step = partial(optimizer.apply, trainable_variables=variables)
    if keras.backend.backend() == "jax":
        step = compiled(optimizer, variables)
    for gradient in taken:
        parts = [gradient.vector[one.place].reshape(one.shape) for one in segments]
        step([keras.ops.convert_to_tensor(part) for part in parts])
    return [np.array(keras.ops.convert_to_numpy(one)) for one in variables]


@pytest.mark.parametrize("ranks", [{"heir": True}, {"spares": 1}], ids=["heir", "spare"])
@pytest.mark.parametrize("wrapper", [nk.Downpour, nk.EASGD])
def test_the_centre_is_that_of_the_copy_and_of_the_commits_since(wrapper, ranks, monkeypatch, tmp_path):
    """Bit for bit; also where a backup of earlier weights could be loaded."""
    taken, copies = [], []
    take_over = Server.take_over

    def watched(self, state, left=()):
        take_over(self, state, left)
        copies.append((state["server"]["rule"], self))

        def note(message):
            if message.kind in (Kind.EXCHANGE, Kind.PUSH):
                late = self.rule.clock - message.pulled_at
                taken.append(Contribution(message.sender, message.vector.copy(), late, message.share))

        self.before_taking = note

    monkeypatch.setattr(Server, "take_over", watched)

    def program(world):
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
        return train(world, wrapper, callbacks=[backup], plain=True, epochs=40, **ranks)

    size = 1 + WORKERS + ranks.get("spares", 0)
    (dead, *ends), _ = on_ranks(program, [(0, "receive EXCHANGE", 2 * STEPS + 5)], size)
    assert isinstance(dead, InjectedFault)
    ((copied, server),) = copies
    assert taken
    assert server.rule.clock == copied["clock"] + len(taken)
    center = np.array(copied["center"])
    if wrapper is nk.EASGD:
        rule = EASGD().center(center, WORKERS, None)
        rule.load(copied)
        for one in taken:
            rule.commit([one])
        center, taken = rule.center, []
    for want, found in zip(replayed(center, taken), ends[0].weights, strict=True):
        assert want.tobytes() == found.tobytes()


def test_weights_that_a_new_server_brings_before_a_batch_are_no_change_by_the_script(monkeypatch):
    """A worker asks for a lease then, and the server dies before it answers."""
    begin_batch, moved = SequenceFeed.begin_batch, []

    here = threading.local()

    def begin_and_move(self):
        begin_batch(self)
        team = here.distribute.team
        if team is not None and not team.serves and team.rank not in moved:
            moved.append(team.rank)
            team.model.parameters.vector += 1e-3
            team.shown.publish()

    monkeypatch.setattr(SequenceFeed, "begin_batch", begin_and_move)

    def program(world):
        here.distribute, count = nk.Distribute(world=world), Count(SAMPLES)
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), count, keras.layers.Dense(1)])
        model.compile(optimizer=nk.Downpour(keras.optimizers.SGD(0.01)), loss="mse", jit_compile=False)
        options = {"features": "x", "labels": "y", "batch_size": BATCH, "assignment": "dynamic"}
        data = nk.Batches({"x": X, "y": Y}, world=world, **options)
        model.fit(data, epochs=2, verbose=0, callbacks=[here.distribute])
        return np.array(keras.ops.convert_to_numpy(count.times))

    ends, _ = on_ranks(program)
    assert sorted(moved) == [1, 2, 3]
    assert (sum(ends[1:]) == 2).all()
