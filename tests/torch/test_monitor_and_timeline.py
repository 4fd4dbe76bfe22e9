"""What `Monitor` and `Timeline` write: alone, and on a server and its workers, as threads."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise

import pytest

from nnlo_common import ConfigurationError

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")

import nnlo_torch as nt  # noqa: E402
from nnlo_common.testing import MemoryCluster  # noqa: E402

pytestmark = pytest.mark.framework("torch")

BATCHES, EPOCHS = 6, 2


def training(folder, world=None, first=0):
    """Two epochs of some batches on each worker, written down; what `Monitor` was told for the second."""
    torch.set_num_threads(1)
    model = torch.nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = nt.EASGD(sgd, every=3, beta=0.5, model=model, world=world)
    written = [
        nt.Monitor(optimizer, folder / "new" / "m.jsonl", initial_epoch=first),
        nt.Timeline(optimizer, folder / "t.json", initial_epoch=first),
    ]
    for _ in range(EPOCHS):
        for x in optimizer.epoch([torch.ones(4, 2)] * BATCHES):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        for one in written:
            one.epoch({"loss": 0.5, "worse": float("nan")})
    optimizer.close()


def lines(folder, rank):
    return [json.loads(line) for line in (folder / "new" / f"m.rank{rank}.jsonl").read_text().splitlines()]


def events(folder, rank):
    head, *rest = json.loads((folder / f"t.rank{rank}.json").read_text())
    return head["args"]["name"], rest


def test_the_monitor_writes_a_line_for_each_epoch(tmp_path):
    training(tmp_path)
    training(tmp_path, first=2)  # goes on in the same file
    assert [line["epoch"] for line in lines(tmp_path, 0)] == [0, 1, 2, 3]
    for line in lines(tmp_path, 0):
        assert (line["role"], line["batches"], line["samples"]) == ("alone", BATCHES, 4 * BATCHES)
        assert line["samples_per_second"] == pytest.approx(4 * BATCHES / line["seconds"], rel=0.01)
        assert line["learning_rate"] == 0.01
        assert line["metrics"] == {"loss": 0.5, "worse": None}
        assert "exchanges" not in line


def test_the_timeline_shows_batches_steps_and_epochs_without_overlap(tmp_path):
    training(tmp_path, first=4)
    name, found = events(tmp_path, 0)
    assert name.startswith("alone on ")
    assert [event["name"] for event in found] == [
        one for epoch in (4, 5) for one in (*BATCHES * ["batch", "step"], f"epoch {epoch}")
    ]
    plain = [event for event in found if event["name"] in ("batch", "step")]
    for first, second in pairwise(plain):
        assert first["ts"] + first["dur"] <= second["ts"] + 1  # microseconds


def test_a_server_and_two_workers_write_what_each_has_seen(tmp_path):
    with MemoryCluster(3) as cluster:
        cluster.run(lambda world: training(tmp_path, world))
    server, worker = lines(tmp_path, 0), lines(tmp_path, 1)
    assert server[-1]["exchanges"] == 2 * EPOCHS * BATCHES // 3
    assert sum(line["samples"] for line in server) == 2 * EPOCHS * BATCHES * 4
    assert "batches" not in server[0]
    assert [(line["role"], line["batches"], line["samples"]) for line in worker] == EPOCHS * [
        ("worker 0", BATCHES, 4 * BATCHES)
    ]
    name, found = events(tmp_path, 2)
    assert name.startswith("worker 1 on ")
    counted = Counter(event["name"] for event in found)
    assert (counted["batch"], counted["step"], counted["exchange"]) == (12, 8, 4)
    assert all(event["args"]["waited_ms"] >= 0 for event in found if event["name"] == "exchange")
    assert found[-1]["name"] == "leave"
    counted = Counter(event["name"] for event in events(tmp_path, 0)[1])
    assert (counted["serve"], counted["exchange"], counted["batch"]) == (EPOCHS, 0, 0)


@pytest.mark.parametrize("kind", [nt.Monitor, nt.Timeline])
def test_a_place_that_cannot_be_written_to_is_named_before_the_training(kind, tmp_path):
    (tmp_path / "file").write_text("")
    optimizer = nt.Downpour(torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1))
    with pytest.raises(ConfigurationError, match=f"{kind.__name__}.* cannot write .*name a"):
        kind(optimizer, tmp_path / "file" / "here")
