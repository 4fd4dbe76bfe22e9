"""Killed jobs and odd uses of nnlo_keras: each ends within seconds and says why, or simply works."""

from __future__ import annotations

import importlib.util
import re
import signal
import time

import pytest

from tests.helpers.endings import assert_differences_named, assert_over, to_its_end
from tests.helpers.jobs import running, running_mpi
from tests.helpers.paths import PROGRAMS

pytest.importorskip("keras", reason="the environment for MPICH has no frameworks")

pytestmark = [
    pytest.mark.framework("keras"),
    pytest.mark.mpi,
    pytest.mark.slow,
]

PROGRAM = PROGRAMS / "keras_odd.py"

# One job takes three imports of Keras; only what covers most is run each time, and on one back end.
OFTEN = {
    "during_epoch to rank 1", "server_raises", "differ", "no_callback", "nan EASGD",
}  # fmt: skip
BACKENDS = ("torch", "tensorflow")


# Keras itself takes these on TensorFlow: a callback without a list, and a worker without a batch.
ON_TORCH = {"bare_callback", "no_data"}


def chosen(cases):
    """The cases on each back end, all but a few of them for the long run only."""
    found = []
    for backend in BACKENDS:
        for case in cases:
            name, *rest = case if isinstance(case, tuple) else (case,)
            if backend != "torch" and name in ON_TORCH:
                continue
            marks = [] if backend == "torch" and name in OFTEN else [pytest.mark.extended]
            if importlib.util.find_spec(backend) is None:
                marks.append(pytest.mark.skip(reason=f"{backend} is not installed"))
            found.append(pytest.param(backend, name, *rest, marks=marks, id=f"{backend}-{name}"))
    return found


@pytest.fixture
def job(monkeypatch):
    """Runs one case on a back end to its end."""

    def run(backend, case, *args, **options):
        monkeypatch.setenv("KERAS_BACKEND", backend)
        monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
        return to_its_end(PROGRAM, case, *args, timeout_s=110, **options)

    return run


SIGNALS = {
    "during_epoch to all": ("during_epoch", signal.SIGINT, None),
    "during_epoch to mpiexec, to end": ("during_epoch", signal.SIGTERM, None),
    "during_validation to all": ("during_validation", signal.SIGINT, None),
    "during_epoch to rank 1": ("during_epoch", signal.SIGKILL, 1),
    "during_epoch to the server": ("during_epoch", signal.SIGKILL, 0),
    "during_validation to the server": ("during_validation", signal.SIGKILL, 0),
    "during_validation to a worker": ("during_validation", signal.SIGTERM, 2),
}


@pytest.mark.parametrize(("backend", "name"), chosen(SIGNALS))
def test_a_signal_ends_all(job, backend, name):
    case, sends, to = SIGNALS[name]
    ended = job(backend, case, sends=sends, to=to)
    words = [] if to is None else [f"rank {to}"]
    assert_over(ended, *words, blocks=0)
    assert running_mpi() == "Open MPI"  # which names the rank


@pytest.mark.parametrize(("backend", "rank"), [("torch", 0), ("torch", 1), ("tensorflow", 1)])
@pytest.mark.extended
def test_an_interrupted_rank_says_so_and_ends_all(job, backend, rank):
    ended = job(backend, "during_epoch", sends=signal.SIGINT, to=rank)
    assert_over(ended, f"rank {rank} of 3", "was interrupted; ending the job")


EXCEPTIONS = {
    "worker_raises": ([], ["rank 1 of 3", "ValueError: no such sample", "in raises"]),
    "server_raises": ([], ["rank 0 of 3", "ValueError: no such sample", "in raises"]),
    "server_raises_in_validation": ([], ["rank 0 of 3", "ValueError: no such sample"]),
    "dataset_raises": ([], ["rank 1 of 3", "ValueError: no such sample", "in __getitem__"]),
    "dataset_raises in a thread": (["4"], ["rank 1 of 3", "ValueError: no such sample"]),
    "split_of_a_share": ([], ["rank 0 of 3", "validation_split", "validation_data=(x[n:], y[n:])"]),
    "metric_raises": ([], ["rank 1 of 3", "ValueError: no such sample"]),
    "interrupted_and_caught": ([], ["rank 1 of 3", "ended in the middle of a training"]),
    "interrupted_and_again": ([], ["rank 1 of 3", "a training is open on this rank already"]),
    "worker_exits": ([], ["rank 1 of 3", "ended in the middle of a training"]),
}


@pytest.mark.parametrize(("backend", "case"), chosen(EXCEPTIONS))
def test_what_ends_one_rank_ends_all_in_one_block(job, backend, case):
    args, words = EXCEPTIONS[case]
    assert_over(job(backend, case.split()[0], *args), *words)


@pytest.mark.parametrize(("backend", "case"), chosen(["worker_dies"]))
def test_a_rank_that_vanishes_ends_all(job, backend, case):
    assert_over(job(backend, case), blocks=0)


DIFFERENCES = {
    "shape": r"the model differs .*kernel' float32\[5, [89]\] here and '.*kernel' float32\[5, [89]\] there",
    "number": r"the model differs ",
    "order": r"the model differs .*/[ab]/kernel' .* here and '.*/[ab]/kernel' .* there",
    "dtype": r"the model differs .*bfloat16\[5, 3\]",
    "statistics": r"the model's buffers \(running statistics and the like\) differ",
    "wrapper": r"the algorithm is .*Downpour\(",
    "options": r"the algorithm is EASGD\(.*every=[23].* but EASGD\(",
    "every": r"the algorithm is Downpour\(every=[23]\) on rank 0 but Downpour\(every=[23]\), ",
    "servers": r"servers=[12] on rank 0 but [12]",
    "optimizer": r"the optimizer is \w+ on rank 0 but \w+",
    "epochs": r"epochs=[23] on rank 0 but [23]",
}


@pytest.mark.extended
@pytest.mark.parametrize(("backend", "case"), chosen(["differ"]))
def test_what_differs_between_ranks_is_named_on_all_before_training(job, backend, case):
    assert_differences_named(job(backend, case), DIFFERENCES)


MISUSES = {
    "one_differs": (["shape"], ["rank 0 of 3", "the model differs"]),
    "no_callback": (["1"], ["rank 1 of 3", "add nnlo_keras.Distribute() to the callbacks"]),
    "no_callback on the server": (["0"], ["rank 0 of 3", "add nnlo_keras.Distribute() to the callbacks"]),
    "no_wrapper": (["1"], ["rank 1 of 3", "wrap it in the algorithm"]),
    "no_wrapper on the server": (["0"], ["rank 0 of 3", "wrap it in the algorithm"]),
    "bare_callback": ([], ["in a list of callbacks"]),
    "too_few_samples": ([], ["rank 0 of 3", "1 samples among 2 workers: worker 1 would get none"]),
    "clips_weights": ([], ["of 3", "kernel' was changed within the training step", "kernel_constraint"]),
    "no_data": ([], ["rank 1 of 3", "ValueError"]),
    "no_batches": ([], ["rank 1 of 3"]),  # said by Keras, to each back end's taste
}


@pytest.mark.parametrize(("backend", "name"), chosen(MISUSES))
def test_a_misuse_ends_all_in_one_block(job, backend, name):
    args, words = MISUSES[name]
    assert_over(job(backend, name.split()[0], *args), *words)


@pytest.mark.parametrize(
    ("backend", "name"), chosen(["nan Downpour", "nan EASGD", "nan GEM", "nan LocalSGD", "nan Synchronous"])
)
def test_divergence_is_named_and_does_not_reach_the_centre(job, backend, name):
    ended = job(backend, *name.split())
    assert_over(ended, "rank 0 of 3", "sent NaN or infinity", "smaller learning rate")
    assert "the centre is finite: True" in ended.out


@pytest.mark.extended
def test_a_rank_that_trains_by_itself_is_missed_aloud():
    """It could still come, so the job is not ended."""
    with running(3, PROGRAM, "neither", "1") as process:
        for _ in range(3):
            assert process.stdout.readline().strip() == "ready"
        for _ in range(60):
            time.sleep(0.5)
            if "has waited" in process.complaints():
                break
        assert "rank 0 of 3" in process.complaints()
        assert "has waited 10 s for the other ranks" in process.complaints()


@pytest.mark.parametrize(("backend", "case"), chosen(["again"]))
def test_several_trainings_one_after_another_simply_work(job, backend, case):
    ended = job(backend, case)
    assert (ended.status, ended.left) == (0, []), ended
    assert ended.out.count("goes on: True, moved: True") == 9
    assert ended.out.count("done") == 3
    for turn in range(3):
        for what in ("loss", "other"):
            assert len(set(re.findall(rf"^{what} {turn}: (.*)$", ended.out, re.MULTILINE))) == 1
