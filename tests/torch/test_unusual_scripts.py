"""Killed jobs and odd uses of nnlo_torch: each ends within seconds and says why, or simply works."""

from __future__ import annotations

import json
import re
import signal

import pytest

from tests.helpers.endings import assert_differences_named, assert_over, to_its_end
from tests.helpers.jobs import running_mpi
from tests.helpers.paths import PROGRAMS

pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.framework("torch")]

# One job takes three imports of torch; only what covers most is run each time.
OFTEN = {
    "during_epoch", "all_workers_raise", "training_sampler_in_evaluate", "workers_only_evaluate",
}  # fmt: skip


def chosen(cases):
    """The cases, all but a few of them for the long run only."""
    return [
        case if not OFTEN.isdisjoint(case[:1] if isinstance(case, tuple) else [case])
        else pytest.param(*(case if isinstance(case, tuple) else [case]), marks=pytest.mark.extended)
        for case in cases
    ]  # fmt: skip


PROGRAM = PROGRAMS / "torch_odd.py"


def job(case, *args, **options):
    """Run one case to its end."""
    return to_its_end(PROGRAM, case, *args, **options)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("case", "sends"),
    chosen(
        [
            ("during_epoch", signal.SIGINT),
            ("between_epochs", signal.SIGINT),
            ("during_first_step", signal.SIGINT),
            ("during_evaluate", signal.SIGINT),
            ("during_epoch", signal.SIGTERM),
        ]
    ),
)
def test_a_signal_to_the_launcher_ends_all(case, sends):
    assert_over(job(case, sends=sends), blocks=0)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.extended), 1])
def test_a_killed_rank_ends_all(rank):
    assert running_mpi() == "Open MPI"
    assert_over(job("during_epoch", sends=signal.SIGKILL, to=rank), f"rank {rank}", "Killed", blocks=0)


EXCEPTIONS = {
    "worker_raises": ["rank 1 of 3", "ValueError: no such sample", "in raises"],
    "all_workers_raise": ["rank 1 of 3", "NameError: name 'los' is not defined"],
    "server_raises": ["rank 0 of 3", "ValueError: no such sample"],
    "getitem_raises": ["ValueError: no such sample", "in __getitem__"],
    "getitem_raises_in_a_process": ["in DataLoader worker process", "ValueError: no such sample"],
    "aside_raises": ["rank 0 of 3", "ValueError: no such sample", "in validate"],
    "thread_raises": ["rank 1 of 3", "failed in thread 'mine'", "ValueError: no such sample"],
}


@pytest.mark.parametrize("case", chosen(EXCEPTIONS))
def test_an_exception_ends_all_in_one_block(case):
    assert_over(job(case), *EXCEPTIONS[case])


@pytest.mark.extended
def test_what_all_ranks_raise_before_a_training_each_may_say():
    """MPI, by which the first could end the others in time, has not begun."""
    ended = job("all_raise_before")
    said = len(re.findall(r"^nnlo: rank \d+ of \d+ on .*$", ended.err, re.MULTILINE))
    assert 1 <= said <= 3
    assert ended.err.count("FileNotFoundError: no data under") == said
    assert_over(ended, "rank 0 of 3", blocks=said)


@pytest.mark.extended
def test_a_validation_that_fails_after_the_last_epoch_is_reported():
    ended = job("aside_raises_in_the_last_epoch")
    ended.out = ended.out.replace("done", "")  # the loops themselves have come to their end
    assert_over(ended, "rank 0 of 3", "ValueError: no such sample")


@pytest.mark.extended
@pytest.mark.parametrize("case", ["worker_dies", "worker_dies_quietly", "server_dies"])
def test_a_rank_that_vanishes_ends_all(case):
    assert_over(job(case), blocks=0)


@pytest.mark.extended
@pytest.mark.parametrize(("case", "status"), [("worker_exits", 3), ("server_exits", 3)])
def test_a_rank_that_exits_leaves_in_good_order_and_its_status_is_the_jobs(case, status):
    ended = job(case)
    assert (ended.status, ended.left) == (status, [])


@pytest.mark.parametrize(("case", "status"), [("worker_exits_from_a_long_training", 3)])
def test_a_worker_that_exits_with_a_status_ends_a_long_training(case, status):
    ended = job(case)
    assert (ended.status, ended.left) == (status, [])
    assert "rank 1 of 3" in ended.err
    assert "called sys.exit(3) in the middle of an epoch that the other ranks continue" in ended.err


@pytest.mark.extended
@pytest.mark.parametrize("case", ["worker_exits_quietly", "caught"])
def test_a_worker_whose_script_ends_early_leaves_in_good_order(case, tmp_path):
    ended = job(case, str(tmp_path / "left"))
    assert (ended.status, ended.left) == (0, [])
    assert ended.err.count("rank 1 has left the training after epoch 2") == 1


DIFFERENCES = {
    "shape": r"the model differs .*'weight' float32\[2, 3\].* and 'weight' float32\[2, 4\]|"
    r"the model differs .*'weight' float32\[2, 4\].* and 'weight' float32\[2, 3\]",
    "dtype": r"the model differs .*bfloat16\[2, 3\]",
    "order": r"the model differs .*'a.weight'.*'b.weight'|the model differs .*'b.weight'.*'a.weight'",
    "number": r"the model differs .*\b(1 parameters here and 2|2 parameters here and 1) there",
    "buffers": r"the model's buffers \(running statistics and the like\) differ",
    "normed": r"the model differs ",
    "options": r"the algorithm is EASGD\(.*every=2[01].* but EASGD\(",
    "servers": r"servers=[12] on rank 0 but [12]",
    "wrapper": r"the algorithm is .*Downpour\(",
    "optimizer": r"the optimizer is \w+ on rank 0 but \w+",
}


def test_what_differs_between_ranks_is_named_on_all_before_training():
    assert_differences_named(job("differ"), DIFFERENCES)


REFUSED = {
    "all_servers": "3 - 3 servers = 0 worker ranks",
    "more_servers_than_parameters": "use at most 1 server",
    "other_starts": "use one seed on all ranks",
    "backup": "backup=3 of 2 workers leaves none",
    "double": "weight is torch.float64",
    "lbfgs": "cannot wrap LBFGS",
    "every": "every=0: must be a whole number of at least 1",
}


def test_what_cannot_work_is_refused_on_all_ranks():
    ended = job("common")
    assert ended.status == 0, ended
    for name, words in REFUSED.items():
        said = [line for line in ended.out.splitlines() if line.startswith(f"{name} on rank")]
        assert len(said) == 3, ended.out
        assert all(words in line for line in said), said


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("case", "args", "words"),
    chosen(
        [
            ("one_differs", ["shape"], ["rank 0 of 3", "'weight' float32[2, 4] there, on rank 2 (host"]),
            ("one_common", ["double"], ["rank 0 of 3", "weight is torch.float64"]),
            ("second_wrapper", [], ["rank 0 of 3", "one kind with the same options"]),
            ("no_sampler", [], ["rank 0 of 3", "sampler=nnlo_torch.ShardSampler(dataset)"]),
            ("other_names", [], ["rank 0 of 3", "means of ['loss']", "['mse']", "same names on all ranks"]),
            ("training_sampler_in_evaluate", [], ["rank 0 of 3", "evaluation=True"]),
            (
                "server_only_evaluates",
                [],
                ["rank 0 waits for all ranks in evaluate()", "on all ranks, not under"],
            ),
            (
                "workers_only_evaluate",
                [],
                ["waits for all ranks in evaluate()", "but rank 0 continued with the next epoch"],
            ),
            ("one_worker_evaluates", [], ["but rank 2 continued training", "on all ranks, not under"]),
        ]
    ),
)
def test_a_misuse_ends_all_in_one_block(case, args, words):
    ended = job(case, *args)
    assert_over(ended, *words)
    assert "nnlo_common/" not in ended.err


@pytest.mark.extended
@pytest.mark.parametrize("name", ["Downpour", "EASGD", "GEM", "Synchronous"])
@pytest.mark.parametrize("case", ["nan_data", "large_rate"])
def test_divergence_is_named_and_does_not_reach_the_centre(case, name):
    ended = job(case, name)
    assert_over(ended, "rank 0 of 3", "sent NaN or infinity", "smaller learning rate")
    assert "the centre is finite: True" in ended.out


@pytest.mark.extended
def test_divergence_in_a_small_head_is_noticed():
    ended = job("nan_in_a_head")
    assert_over(ended, "sent NaN or infinity")
    assert "the centre is finite: True" in ended.out


def seen(ended, name):
    """What each rank has said about a training: the samples that it saw, and the rest of the line."""
    found = re.findall(rf"^{re.escape(name)}: rank (\d+) saw (\d+) ?(.*)$", ended.out, re.MULTILINE)
    return {int(rank): (int(samples), rest) for rank, samples, rest in found}


def works(case, n=3):
    ended = job(case, n=n)
    assert (ended.status, ended.err, ended.left) == (0, "", []), ended
    assert ended.out.count("done") == n
    return ended


@pytest.mark.sampled(3)
@pytest.mark.parametrize("n", [3, pytest.param(4, marks=pytest.mark.extended)])
def test_data_smaller_than_the_number_of_workers_simply_work(n):
    ended = works("small", n)
    for wrap in ("Downpour", "Synchronous", "LocalSGD"):
        for assignment in ("static", "dynamic"):
            for size in (0, 1, 3):
                ranks = seen(ended, f"{wrap} {assignment} {size}")
                assert sum(samples for samples, _ in ranks.values()) == 3 * size
                losses = {losses for _, losses in ranks.values()}
                assert len(losses) == 1  # the same numbers on all ranks
                assert all(("loss" in loss) == (size > 0) for loss in json.loads(losses.pop()))


@pytest.mark.extended
def test_tiny_shares_and_large_batches_simply_work():
    ended = works("tiny_batches")
    assert [seen(ended, "drop_last=False")[rank][0] for rank in range(3)] == [0, 15, 12]
    assert [seen(ended, "drop_last=True")[rank][0] for rank in range(3)] == [0, 15, 0]


def test_odd_loops_simply_work():
    ended = works("loops")
    for assignment in ("static", "dynamic"):
        assert [seen(ended, f"break {assignment}")[rank][0] for rank in range(3)] == [0, 80, 100]
    assert [seen(ended, "stop on workers")[rank][0] for rank in range(3)] == [0, 90, 90]
    assert 60 <= seen(ended, "stop on the server")[1][0] < 9 * 30
    assert {json.dumps([{"x": 1.0}] * 3)} == {rest for _, rest in seen(ended, "mean").values()}
    assert [seen(ended, "not closed")[rank][0] for rank in range(3)] == [0, 90, 90]


@pytest.mark.extended
def test_loaders_with_processes_simply_work():
    ended = works("loaders")
    for name in ("fork False", "fork True", "forkserver True"):
        assert [seen(ended, name)[rank][0] for rank in range(3)] == [0, 60, 60]


def test_two_optimizers_and_a_second_training_simply_work():
    ended = works("adversaries")
    for name in ("Downpour", "LocalSGD"):
        ranks = seen(ended, name)
        assert [ranks[rank][0] for rank in range(3)] == [0, 60, 60]
        told = [json.loads(ranks[rank][1]) for rank in range(3)]
        assert told[0][0] == told[1][0] == told[2][0]  # the losses of both networks
        assert [steps for _, steps in told] == [0, 24, 24]


@pytest.mark.extended
def test_one_rank_of_mpiexec_trains_plainly():
    ended = works("loaders", n=1)
    assert seen(ended, "fork False")[0][0] == 2 * 60
