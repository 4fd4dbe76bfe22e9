"""A spare's `fit` goes on as that of a dead worker, with its samples, whatever deals them out."""

from __future__ import annotations

import os
import random
import threading

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras", reason="the environment for MPICH has no frameworks")

import nnlo_keras as nk  # noqa: E402
from nnlo_common import PeerLostError  # noqa: E402
from nnlo_common.protocol import Places  # noqa: E402
from nnlo_common.testing import InjectedFault, MemoryCluster  # noqa: E402
from nnlo_common.training._training_queries import TrainingQueries  # noqa: E402
from tests.helpers.counts import Count  # noqa: E402

pytestmark = [
    pytest.mark.framework("keras"),
    # Keras 3.15 itself, with NumPy 2: Variable.__array__ takes no copy argument.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]
EPOCHS, SAMPLES, WORKERS, BATCH, DIES, COMES = 4, 23, 3, 2, 2, 5
X = np.random.default_rng(5).standard_normal((SAMPLES, 3)).astype("f4")
X[:, -1] = np.arange(SAMPLES)
Y = X[:, :1] - X[:, 1:2]
RANKS = {"servers": 1, "spares": 2}
CALLED = threading.Event()


@pytest.fixture(autouse=True)
def _several_ranks(monkeypatch, _copies_at_once):
    # Let optimizers that `fit` builds early know that there are several ranks, as under a launcher.
    monkeypatch.setattr("nnlo_keras._wrapper.launched", lambda: "several ranks")
    admit = TrainingQueries.admit
    monkeypatch.setattr(TrainingQueries, "admit", lambda self, rank: (admit(self, rank), CALLED.set()))


class WaitForSpare(keras.callbacks.Callback):
    """Waits as the second epoch begins until a spare is called: fast workers may be done before."""

    def on_epoch_begin(self, epoch, logs=None):
        assert epoch != 1 or CALLED.wait(60)


class Seen(keras.callbacks.Callback):
    """Notes how often each sample was trained with, by the end of each epoch; and who validates."""

    def __init__(self, count):
        super().__init__()
        self.count, self.totals, self.logs = count, [], []

    def on_epoch_end(self, epoch, logs=None):
        self.totals.append(np.array(keras.ops.convert_to_numpy(self.count.times)))
        self.logs.append(dict(logs or {}))

    @property
    def epochs(self):
        return np.diff([np.zeros(SAMPLES, int), *self.totals], axis=0)


def arrays(world):
    x, y = nk.shard(X, Y, world=world, **RANKS)
    return {"x": x, "y": y, "batch_size": BATCH}


def structures(world):
    x, y, weights = nk.shard({"x": X}, Y, np.ones(SAMPLES, "f4"), world=world, **RANKS)
    return {"x": x, "y": y, "batch_size": BATCH, "sample_weight": weights}


def loader(world):
    from torch.utils import data

    class Pairs(data.Dataset):
        def __len__(self):
            return SAMPLES

        def __getitem__(self, index):
            return X[index], Y[index]

    mine = nk.shard(Pairs(), world=world, **RANKS)
    return {"x": data.DataLoader(mine, batch_size=BATCH, shuffle=True), "shuffle": False}


class OneByOne(keras.utils.PyDataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return X[index : index + 1], Y[index : index + 1]


def batches_of_a_sequence(world):
    return {"x": nk.shard(OneByOne(), world=world, **RANKS)}


def files(world):
    options = {"features": "x", "labels": "y", "batch_size": BATCH}
    return {"x": nk.Batches({"x": X, "y": Y}, world=world, **options, **RANKS)}


def leases(world):
    options = {"features": "x", "labels": "y", "batch_size": BATCH, "assignment": "dynamic"}
    return {"x": nk.Batches({"x": X, "y": Y}, world=world, **options, **RANKS)}


def pipeline(world):
    import tensorflow as tf

    data = nk.shard(tf.data.Dataset.from_tensor_slices((X, Y)), world=world, **RANKS)
    data = data.map(lambda x, y: (x, y)).shuffle(SAMPLES).batch(BATCH).prefetch(2)
    return {"x": data, "shuffle": False}


def cached(world):
    import tensorflow as tf

    data = nk.shard(tf.data.Dataset.from_tensor_slices((X, Y)).cache(), world=world, **RANKS)
    return {"x": data.cache().batch(BATCH), "shuffle": False}


SOURCES = [arrays, structures, loader, batches_of_a_sequence, files, leases]
if keras.backend.backend() == "tensorflow":
    SOURCES.append(pipeline)


def model_of(count, wrapper, *, named=False, **options):
    keras.utils.set_random_seed(1)
    first = keras.Input((3,), name="x")
    begin = keras.initializers.GlorotUniform(seed=1)
    inputs = {"x": first} if named else first
    model = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer=begin)(count(first)))
    optimizer = wrapper(keras.optimizers.SGD(0.01), **RANKS, **options)
    model.compile(optimizer=optimizer, loss="mse", jit_compile=False)
    return model


def trained(source, wrapper=nk.Downpour, callbacks=lambda world: [], epochs=EPOCHS, *, meets=True, **options):
    """Return a program that trains on a rank, and returns its role, what it has seen, and its weights.

    All ranks meet at the end of each epoch, and their workers wait until a spare is called if one has died.
    """

    def program(world):
        count = Count(SAMPLES)
        named = source is structures
        model, seen, means = model_of(count, wrapper, named=named, **options), Seen(count), Seen(count)
        distribute = nk.Distribute(world=world)
        model.fit(
            **source(world),
            epochs=epochs,
            verbose=0,
            validation_data=({"x": X[:8]} if named else X[:8], Y[:8]),
            callbacks=[
                seen,
                distribute,
                *([nk.MetricAverage(), means] if meets else []),
                *([WaitForSpare()] if meets and 0 <= world.rank - RANKS["servers"] < WORKERS else []),
                *callbacks(world),
            ],
        )
        weights = [np.array(keras.ops.convert_to_numpy(one)) for one in model.trainable_variables]
        seen.means = [logs.get("loss") for logs in means.logs]
        return distribute.role, seen, weights, distribute.report

    return program


def on_ranks(program, *faults, reached=None):
    CALLED.clear() if faults else CALLED.set()
    with MemoryCluster(WORKERS + sum(RANKS.values())) as cluster:
        for fault in faults:
            cluster.fail(*fault, may_miss=reached is not None)
        ends = cluster.run(program, 120)
        if reached is not None:
            reached.update(cluster.points._reached)
        return ends


def living(ranks):
    return [one for one in ranks if not isinstance(one, InjectedFault)]


@pytest.mark.parametrize("source", SOURCES)
def test_from_the_next_epoch_on_a_spare_has_the_dead_workers_share(source):
    ranks = on_ranks(trained(source), (DIES, "send EPOCH", 1))
    assert isinstance(ranks[DIES], InjectedFault)
    role, seen, *_ = ranks[COMES]
    assert role == "worker 1"
    assert not seen.epochs[0].any()
    for epoch in range(1, EPOCHS):
        assert (sum(one.epochs[epoch] for _, one, *_ in living(ranks)) == 1).all(), epoch
    if source is not leases:
        alone = on_ranks(trained(source))[DIES][1].epochs[1]
        assert all((seen.epochs[epoch] == alone).all() for epoch in range(1, EPOCHS))
    for _, _, weights, _ in living(ranks):
        assert all(map(np.array_equal, weights, ranks[0][2]))
    # Only the rank with the centre validates, and a spare until it trains.
    assert ["val_loss" in logs for logs in seen.logs] == [True, *[False] * (EPOCHS - 1)]
    assert any("takes the place of worker 1" in line for line in ranks[0][3].lost)
    for epoch in range(1, EPOCHS):
        workers = [one for role, one, *_ in living(ranks) if role.startswith("worker")]
        losses, samples = zip(
            *((one.logs[epoch].get("loss", 0.0), one.epochs[epoch].sum()) for one in workers), strict=True
        )
        expected = pytest.approx(np.average(losses, weights=samples), rel=1e-5)
        assert [one.means[epoch] for _, one, *_ in living(ranks)] == [expected] * 5
        if source is arrays:  # the loss of the centre's rank is the mean of those that train
            assert ranks[0][1].logs[epoch]["loss"] == pytest.approx(np.average(losses, weights=[4, 4, 4]))


@pytest.mark.parametrize("source", [arrays, leases])
@pytest.mark.parametrize(
    "wrapper", [nk.AGN, nk.DiLoCo, nk.DynSGD, nk.EASGD, nk.LocalSGD, nk.Synchronous, nk.Steady]
)
def test_with_every_algorithm(wrapper, source):
    options = {"every": 2} if wrapper in (nk.DiLoCo, nk.EASGD, nk.LocalSGD) else {}
    ranks = on_ranks(trained(source, wrapper, **options), (DIES, "send EPOCH", 1))
    role, seen, *_ = ranks[COMES]
    assert role == "worker 1"
    if wrapper is not nk.Steady:  # whose epochs take as many samples as their progress asks for
        for epoch in range(1, EPOCHS):
            assert (sum(one.epochs[epoch] for _, one, *_ in living(ranks)) == 1).all(), epoch
    assert source is leases or seen.epochs[1:].any(axis=1).all()  # others may have leased all
    for _, _, weights, _ in living(ranks):
        assert all(map(np.array_equal, weights, ranks[0][2]))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("source", SOURCES)
def test_the_second_spares_of_several_servers_train_too(source, monkeypatch):
    monkeypatch.setitem(RANKS, "servers", 2)
    monkeypatch.setitem(RANKS, "spares", 4)
    ranks = on_ranks(trained(source), (3, "send EPOCH", 1))
    roles = ["server 0", "server 1", "worker 0", "worker 2", "spare 0", "spare 1", "spare 2", "worker 1"]
    assert [one[0] for one in living(ranks)] == roles
    for epoch in range(1, EPOCHS):
        assert (sum(one.epochs[epoch] for _, one, *_ in living(ranks)) == 1).all(), epoch
    for _, _, weights, _ in living(ranks):
        assert all(map(np.array_equal, weights, ranks[0][2]))


def test_the_first_spare_serves_when_the_server_dies_and_the_other_trains_on():
    ranks = on_ranks(trained(files), (DIES, "send EPOCH", 1), (0, "receive EPOCH", 8))
    assert [one[0] for one in living(ranks)] == ["worker 0", "worker 2", "server 0", "worker 1"]
    epochs = [sum(one.epochs[epoch] for _, one, *_ in living(ranks)) for epoch in range(1, EPOCHS)]
    assert all((epoch == 1).all() for epoch in epochs)


def test_a_spare_joins_after_the_save_between_two_epochs_and_all_resume(monkeypatch, tmp_path):
    """Or all workers would wait at that save for a rank that has begun the next epoch."""
    asked, answered, ask = threading.Event(), [], Places.ask

    def ask_and_note(self, rank, query):
        answers = ask(self, rank, query)
        if (rank, query.epochs) == (COMES, 1):
            answered.append(answers)
            asked.set()
        return answers

    monkeypatch.setattr(Places, "ask", ask_and_note)

    class Late(keras.callbacks.Callback):
        def __init__(self, rank):
            super().__init__()
            self.rank = rank

        def on_epoch_end(self, epoch, logs=None):
            if (self.rank, epoch) == (3, 0):
                asked.wait(60)  # so that the others are at the save, and the spare is past it

    def saved(world):
        return [nk.Checkpoint(tmp_path / "run"), Late(world.rank)]

    ranks = on_ranks(trained(files, callbacks=saved), (DIES, "send EPOCH", 1))
    assert answered[0] == []
    assert [one[0] for one in living(ranks)] == [*("server 0", "worker 0", "worker 2", "spare 0", "worker 1")]
    more = on_ranks(trained(files, callbacks=saved, epochs=EPOCHS + 1))
    assert [one[0] for one in more] == ["server 0", "worker 0", "worker 1", "worker 2", "spare 0", "spare 1"]
    assert all(len(one[1].totals) == 1 for one in more)
    whole = np.zeros(SAMPLES, int)
    for one in more[1:4]:  # each has counted on from its own part of the checkpoint
        whole += one[1].totals[-1]
    assert (whole[whole > 0] >= EPOCHS).all()


def test_a_training_with_spares_resumes_where_workers_lease(tmp_path):
    """The ledger is the first server's alone: a spare that asked it to load one would wait for ever."""

    def saved(world):
        return [nk.Checkpoint(tmp_path / "run")]

    on_ranks(trained(leases, callbacks=saved))
    more = on_ranks(trained(leases, callbacks=saved, epochs=EPOCHS + 1))
    assert [one[0] for one in more] == ["server 0", "worker 0", "worker 1", "worker 2", "spare 0", "spare 1"]
    assert all(len(one[1].totals) == 1 for one in more)
    assert sum(one[1].totals[-1].sum() for one in more) >= (EPOCHS + 1) * SAMPLES


def own(world):
    mine = slice(max(world.rank - 1, 0) % WORKERS, None, WORKERS)
    return {"x": X[mine], "y": Y[mine], "batch_size": BATCH}


@pytest.mark.parametrize("own", [own, *([cached] if keras.backend.backend() == "tensorflow" else [])])
def test_where_the_shares_are_only_the_users_spares_stay_spares_and_it_is_said(own):
    with pytest.warns(RuntimeWarning, match=r"spares=2, but fit\(\) was given data") as told:
        ranks = on_ranks(trained(own, meets=False), (DIES, "send EPOCH", 1))
    assert len([one for one in told if "spares=2" in str(one.message)]) == 1
    assert ranks[COMES][0] == "spare 1"


@pytest.mark.parametrize("wrapper", [nk.Downpour, nk.LocalSGD])
def test_a_training_that_stops_early_leaves_no_spare_waiting(wrapper):
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = epoch == 1

    ranks = on_ranks(
        trained(
            arrays,
            wrapper,
            callbacks=lambda world: [Stop()] if world.rank == 0 else [],
            epochs=6,
            meets=False,
        ),
        (DIES, "send EPOCH", 2),
    )
    assert len(living(ranks)) == 5
    for _, _, weights, _ in living(ranks):
        assert all(map(np.array_equal, weights, ranks[0][2]))


DRAWN = [nk.Downpour, nk.EASGD, nk.LocalSGD, nk.Steady, nk.Synchronous]


@pytest.mark.filterwarnings("ignore:no checkpoint could be written:RuntimeWarning")
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.extended) for seed in range(8, 200))]
)
def test_whoever_dies_at_whatever_message_the_others_end_with_one_model(seed, tmp_path):
    """A worker dies, and perhaps a second rank: the server, a spare, or who is in the dead worker's place."""
    draw = random.Random(seed)
    wrapper, source = DRAWN[seed % len(DRAWN)], draw.choice([arrays, files, leases])
    folder, averages = draw.choice([None, tmp_path / "run"]), draw.random() < 0.5

    def callbacks(world):
        means = [nk.MetricAverage()] if averages else []
        return means if folder is None else [*means, nk.Checkpoint(folder)]

    program = trained(source, wrapper, callbacks=callbacks, meets=False)
    reached: dict[tuple[int, str], int] = {}
    victims = [draw.randrange(1, 1 + WORKERS)]
    if draw.random() < 0.6:
        victims.append(draw.choice([rank for rank in (0, 1, 2, 3, 4, 5) if rank not in victims]))
    on_ranks(trained(source, wrapper, meets=False), reached=reached)
    faults = []
    for victim in victims:
        points = {at: n for (rank, at), n in reached.items() if rank == victim and at != "gather"}
        at = draw.choice(sorted(points))
        faults.append((victim, at, draw.randint(1, points[at])))
    try:
        ends = on_ranks(program, *faults, reached={})
    except PeerLostError as error:
        assert 0 in victims, faults
        assert "before a spare had a copy" in str(error), faults  # noqa: PT017 - else it goes on
        return
    dead = [rank for rank, end in enumerate(ends) if isinstance(end, InjectedFault)]
    assert set(dead) <= set(victims), faults
    roles = [role for role, *_ in living(ends)]
    assert roles.count("server 0") == 1, faults
    assert len(set(roles)) == len(roles), faults
    (center,) = (weights for role, _, weights, _ in living(ends) if role == "server 0")
    for _, _, weights, _ in living(ends):
        assert all(map(np.array_equal, weights, center)), faults
    if dead == victims[:1] and wrapper is not nk.Steady and source is not leases:
        _, seen, *_ = ends[COMES]
        for epoch in np.flatnonzero(seen.epochs.any(axis=1)):
            assert (sum(one.epochs[epoch] for _, one, *_ in living(ends)) == 1).all(), faults
