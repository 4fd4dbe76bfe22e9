"""nnlo_keras under mpiexec, on the back ends that are installed."""

from __future__ import annotations

import importlib.util
import json
import re

import numpy as np
import pytest

from tests.helpers.jobs import alone, mpiexec
from tests.helpers.paths import PROGRAMS
from tests.helpers.shared_folders import written_once

pytestmark = [
    pytest.mark.framework("keras"),
    pytest.mark.mpi,
    pytest.mark.slow,
    pytest.mark.timeout(400),  # TensorFlow takes its time to start
]
pytest.importorskip("keras", reason="the environment for MPICH has no frameworks")

BACKENDS = [
    pytest.param(
        name,
        marks=[
            pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed"),
            *([pytest.mark.extended] if name == "jax" else []),
        ],
    )
    for name in ("torch", "tensorflow", "jax")
]
#: Where TensorFlow takes minutes.
BRIEF = [
    BACKENDS[0],
    *(pytest.param(*one.values, marks=[*one.marks, pytest.mark.extended]) for one in BACKENDS[1:]),
]


def on(backend):
    """The environment in which Keras runs on a back end."""
    return {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}


def arrays(path):
    with np.load(path) as stored:
        return [stored[name] for name in stored.files]


#: Where the last bit may differ, and why.
ROUNDED = {
    "torch": set(),
    "tensorflow": {
        # The centre is stepped by a function of its own. In it TensorFlow adds up squares in another order,
        # and contracts the centred RMSprop otherwise; XLA would have fused the step with the gradients.
        *("global clipnorm", "centered", "compiled"),
        # The gradient of an Embedding, in slices, is summed in another order.
        *("words", "sentences"),
    },
    # XLA adds up squares in another order than within the whole training step. At the centre it compiles the
    # step of the optimizer always.
    "jax": {"clipnorm", "global clipnorm", "eagerly", "not compiled"},
}


@pytest.mark.parametrize(
    ("backend", "table"),
    [
        pytest.param(*backend.values, table, marks=backend.marks)
        for backend in BACKENDS
        for table in ("CASES", "MORE")
    ],
)
@pytest.mark.extended  # threads as ranks have such fits in `make test`
def test_one_worker_has_the_bits_of_the_plain_fit_on_both_ranks(backend, table, tmp_path):
    program, environment = PROGRAMS / "keras_bits.py", on(backend)
    plain = alone(program, str(tmp_path), table, "plain", timeout_s=180, env=environment)
    assert plain.returncode == 0, plain.stderr
    done = mpiexec(2, program, str(tmp_path), table, "Downpour", timeout_s=200, env=environment)
    assert done.returncode == 0, done.stderr
    cases = [path.name.removesuffix(".plain.npz") for path in tmp_path.glob("*.plain.npz")]
    assert len(cases) >= 20
    for case in cases:
        want = arrays(tmp_path / f"{case}.plain.npz")
        for role in ("server", "worker"):
            got = arrays(tmp_path / f"{case}.{role}.npz")
            assert len(got) == len(want)
            for index, (ours, theirs) in enumerate(zip(got, want, strict=True)):
                if case in ROUNDED[backend]:
                    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
                else:
                    np.testing.assert_array_equal(ours, theirs, f"{case}, {role}, {index}")
    if backend != "torch":  # which makes one step at a time
        at_once, every = (arrays(tmp_path / f"{name} three.server.npz") for name in ("at once", "every"))
        for ours, theirs in zip(at_once, every, strict=True):
            np.testing.assert_array_equal(ours, theirs)


WRAPPERS = ["Downpour", "Synchronous", "EASGD", "GEM", "AGN", "DynSGD", "LocalSGD", "DiLoCo"]


@pytest.fixture(scope="module", params=BRIEF)
def trainings(request, tmp_path_factory):
    """What each piece of keras_all.py has left behind, by piece and rank, and the folder it wrote to."""

    def run(folder):
        done = mpiexec(3, PROGRAMS / "keras_all.py", str(folder), timeout_s=350, env=on(request.param))
        assert done.returncode == 0, done.stdout + done.stderr
        (folder / "printed.txt").write_text(done.stdout)

    folder = written_once(tmp_path_factory, f"fit-{request.param}", run)
    ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(3)]
    if request.param == "torch":
        assert not {"steps per execution", "compiled"} & set(ranks[0])
    return (
        {piece: [rank[piece] for rank in ranks] for piece in ranks[0]},
        folder,
        (folder / "printed.txt").read_text(),
    )


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_every_wrapper_trains_and_all_ranks_end_with_the_same_weights(trainings, wrapper):
    ranks = trainings[0][wrapper]
    assert len({rank["weights"] for rank in ranks}) == 1
    for rank in ranks:
        assert rank["after"] < 0.8 * rank["before"]
        assert rank["after"] == pytest.approx(ranks[0]["history"]["val_loss"][-1], rel=0.01)


def test_the_history_of_the_server_has_the_metrics_of_workers_and_validation(trainings):
    server, *workers = trainings[0]["Downpour"]
    assert set(server["history"]) == {"loss", "accuracy", "val_loss", "val_accuracy"}
    assert all(len(values) == 4 for values in server["history"].values())
    for worker in workers:
        assert set(worker["history"]) == {"loss", "accuracy"}
    for epoch in range(4):
        # A worker may be ahead of the server, which knows what each has noted last.
        losses = [loss for worker in workers for loss in worker["history"]["loss"][epoch:]]
        assert min(losses) - 1e-6 <= server["history"]["loss"][epoch] <= max(losses) + 1e-6


def test_callbacks_that_write_do_so_once(trainings):
    pieces, folder, _ = trainings
    rows = (folder / "log.csv").read_text().splitlines()
    assert rows[0].split(",")[0] == "epoch"
    assert len(rows) == 1 + len(pieces["callbacks"][0]["history"]["loss"])
    assert len(list(folder.glob("best*.weights.h5"))) >= 1


BEFORE_AND_BEHIND = pytest.mark.parametrize("piece", ["callbacks", "callbacks behind"])


@BEFORE_AND_BEHIND
def test_callbacks_that_write_are_not_even_begun_on_workers(trainings, piece):
    assert [rank["logged"] for rank in trainings[0][piece]] == [1, 0, 0]


@BEFORE_AND_BEHIND
def test_early_stopping_stops_all_and_gives_all_the_best_weights(trainings, piece):
    ranks = trainings[0][piece]
    assert len({rank["weights"] for rank in ranks}) == 1
    losses = ranks[0]["history"]["val_loss"]
    assert len(losses) < 40
    assert ranks[0]["after"] == pytest.approx(min(losses), abs=1e-6)


def test_a_learning_rate_that_the_server_reduces_is_the_one_that_counts(trainings):
    server = trainings[0]["plateau"][0]
    assert server["history"]["learning_rate"][-1] < 0.05
    assert server["still"]  # with so small a rate the centre hardly moves


def test_a_restored_training_goes_on_on_all_ranks_where_it_was(trainings):
    two, more = trainings[0]["two epochs"], trainings[0]["two more"]
    assert [len(rank["history"]["loss"]) for rank in more] == [2, 2, 2]
    assert len({rank["weights"] for rank in more}) == 1
    assert more[0]["history"]["val_loss"][0] < two[0]["after"] < two[0]["before"]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_learning_rate_that_the_server_reduces_reaches_all_with_the_next_replies(trainings, wrapper):
    seen = [rank["rates"] for rank in trainings[0][f"{wrapper} reduced"]]
    assert seen == [[0.125, 0.125, 0.0625, 0.03125, 0.015625]] * 3


@pytest.mark.parametrize("wrapper", ["EASGD", "Downpour"])
def test_a_scheduler_on_every_rank_goes_on_from_a_reduced_learning_rate(trainings, wrapper):
    seen = [rank["rates"] for rank in trainings[0][f"{wrapper} reduced and scheduled"]]
    assert seen == [[0.125, 0.125, 0.0625, 0.015625, 0.0078125]] * 3


def test_a_schedule_in_gem_goes_by_the_batches_of_each_worker(trainings):
    server, *workers = trainings[0]["GEM schedule"]
    assert [worker["rates"] for worker in workers] == [[0.0625, 0.03125]] * 2  # 10 batches in each epoch
    assert (server["iterations"], [worker["iterations"] for worker in workers]) == (0, [20, 20])


@pytest.mark.parametrize(
    "piece",
    [
        "steps per execution",
        "compiled",
        "half",
        "two fits 1",
        "two fits 2",
        "uneven shares",
        "lag",
        "averages on workers",
        "normal and forked",
        "a worker that leaves early",
        "two servers",
        "generators",
        "steps per epoch",
        "sparse validation",
    ],
)
def test_it_trains_with(trainings, piece):
    if piece not in trainings[0]:
        assert piece in ("steps per execution", "compiled")
        pytest.skip("torch has it not, or takes minutes")
    ranks = trainings[0][piece]
    assert len({rank["weights"] for rank in ranks}) == 1
    assert ranks[0]["after"] < 0.9 * ranks[0]["before"]


def test_workers_print_nothing(trainings):
    _, _, printed = trainings
    assert printed.count("Epoch 1/2") == 1


def test_sparse_validation_happens_in_its_epochs(trainings):
    server = trainings[0]["sparse validation"][0]
    assert (len(server["history"]["loss"]), len(server["history"]["val_loss"])) == (4, 2)


def test_each_worker_counts_its_samples_or_batches(trainings):
    _, *workers = trainings[0]["uneven shares"]
    assert [worker["steps"] for worker in workers] == [4 * 7, 4 * 2]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no wrapper", r"wrap it in the algorithm, e\.g\. model\.compile\(optimizer=nnlo_keras"),
        ("other callbacks", r"\[\] take part on rank 0 but \['MetricAverage'\], on rank 1"),
        ("bare callback", "in a list of callbacks"),
    ],
)
def test_a_mistake_is_named_and_ends_the_job(case, words):
    done = mpiexec(3, PROGRAMS / "keras_misuse.py", case, timeout_s=60, env=on("torch"))
    assert done.returncode != 0
    assert re.search(words, done.stderr), done.stderr


#: What changes workers from epoch to epoch.
DEALT_ANEW = {"H5Sequence", "H5Sequence of groups"}
LEASED = {"leased H5Sequence", "H5Sequence of one lease"}


@pytest.fixture(scope="module", params=BRIEF)
def inputs(request, tmp_path_factory):
    """What each piece of keras_inputs.py has left behind, by piece and rank."""

    def run(folder):
        done = mpiexec(3, PROGRAMS / "keras_inputs.py", str(folder), timeout_s=250, env=on(request.param))
        assert done.returncode == 0, done.stderr

    folder = written_once(tmp_path_factory, f"inputs-{request.param}", run)
    ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(3)]
    return {piece: [rank[piece] for rank in ranks] for piece in ranks[0]}


def test_each_sample_is_trained_on_by_one_worker_once_an_epoch(inputs):
    odd = {"synchronous", "split", "DistributedSampler", "endless tf.data.Dataset"} | DEALT_ANEW | LEASED
    assert len(inputs.keys() - odd) >= 10
    for piece in inputs.keys() - odd:
        server, first, second = (np.array(rank["trained"]) for rank in inputs[piece])
        assert not server.any(), piece
        np.testing.assert_array_equal(first + second, 2, piece)
        assert not (first.astype(bool) & second.astype(bool)).any(), piece


def test_what_is_dealt_out_anew_in_each_epoch_is_trained_on_once_in_each(inputs):
    for piece in DEALT_ANEW:
        server, first, second = (np.array(rank["trained"]) for rank in inputs[piece])
        assert not server.any(), piece
        np.testing.assert_array_equal(first + second, 2, piece)
        assert (first == 1).any()  # by this worker in one epoch, by the other in the other
        assert abs(first.sum() - second.sum()) <= 2


def test_what_is_leased_is_trained_on_once_in_each_epoch_by_whoever_had_the_time(inputs):
    for piece in LEASED:
        server, first, second = (np.array(rank["trained"]) for rank in inputs[piece])
        assert not server.any(), piece
        np.testing.assert_array_equal(first + second, 2, piece)
    _, *workers = (np.array(rank["trained"]) for rank in inputs["H5Sequence of one lease"])
    assert all(trained.sum() % len(trained) == 0 for trained in workers)  # all of an epoch, or nothing


def test_samplers_and_endless_data_deal_as_they_are_asked_to(inputs):
    for piece in inputs.keys() & {"DistributedSampler", "endless tf.data.Dataset"}:
        _, first, second = (np.array(rank["trained"]) for rank in inputs[piece])
        assert not (first.astype(bool) & second.astype(bool)).any(), piece
        assert first.sum() == second.sum() == {"DistributedSampler": 46}.get(piece, 32)
    assert [sum(rank["trained"]) for rank in inputs["split"]] == [0, 74, 74]


def test_each_sample_is_validated_on_once_and_by_the_server(inputs):
    pieces = [piece for piece in inputs if piece.startswith("validated")]
    assert len(pieces) >= 2
    for piece in pieces:
        server, *workers = (rank["validated"] for rank in inputs[piece])
        assert server == [2] * 13 + [0] * 34
        assert not any(map(sum, workers))
    server, *workers = (rank["validated"] for rank in inputs["split"])
    assert server == [0] * 37 + [2] * 10
    assert not any(map(sum, workers))


def test_two_synchronous_workers_are_one_process_with_batches_of_twice_the_size(inputs):
    for rank in inputs["synchronous"]:
        assert rank["moved"] > 0.05
        assert rank["far"] < 1e-6


@pytest.fixture(scope="module")
def two_servers(tmp_path_factory):
    """What keras_servers.py has left behind, by rank, and the folder it wrote to."""

    def run(folder):
        done = mpiexec(3, PROGRAMS / "keras_servers.py", str(folder), timeout_s=90, env=on("torch"))
        assert done.returncode == 0, done.stdout + done.stderr

    folder = written_once(tmp_path_factory, "two-servers", run)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(3)], folder


@pytest.mark.parametrize("server", [0, 1])
def test_where_one_of_two_servers_stops_the_other_follows(two_servers, server):
    ranks = [rank[f"stopped by server {server}"] for rank in two_servers[0]]
    assert ranks[0]["weights"] == ranks[1]["weights"] == ranks[2]["weights"]
    assert ranks[server]["epochs"] == 2
    assert ranks[1 - server]["epochs"] <= 4


def test_of_two_servers_the_first_writes_files(two_servers):
    ranks, folder = two_servers
    assert all(rank["written"]["epochs"] == 3 for rank in ranks)
    assert [line.split(",")[0] for line in (folder / "log.csv").read_text().split()] == [
        "epoch",
        "0",
        "1",
        "2",
    ]
    assert sorted(path.name for path in folder.glob("*.h5")) == [f"{epoch}.weights.h5" for epoch in (1, 2, 3)]


@pytest.mark.parametrize(
    ("piece", "asked"),
    [("best again", "EarlyStopping(restore_best_weights=True)"), ("backup", "BackupAndRestore")],
)
def test_what_loads_earlier_weights_is_refused_with_two_servers(two_servers, piece, asked):
    for rank in two_servers[0]:
        assert rank[piece]["refused"].startswith(f"{asked} was given with servers=2")
