"""`nnlo report`: what it reads, what it advises, and the page it writes."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nnlo_common import ConfigurationError
from nnlo_common.algorithms import GainReport
from nnlo_common.commands._cli import main
from nnlo_common.commands._html_page import drawn, html_table
from nnlo_common.commands.report._report_command import runs_page
from nnlo_common.commands.report._run_figures import run_figures
from nnlo_common.commands.report._run_reader import (
    EpochFacts,
    RankFacts,
    RunFacts,
    Sample,
    TimeShares,
    read_run,
)
from nnlo_common.commands.report._verdicts import verdicts
from nnlo_common.training.report._facts_writer import FactsFile

# -- what is planted -----------------------------------------------------------------------------------


def shares(batch_s=None, **seconds):
    return TimeShares(seconds=seconds, batch_s=batch_s)


def epochs(*memory_mb, samples=100.0, seconds=2.0, core_wait_s=None):
    return [
        EpochFacts(
            ended_s=1000.0 + seconds * (number + 1),
            seconds=seconds,
            samples=samples,
            memory_mb=used,
            cpu_s=seconds / 2,
            core_wait_s=core_wait_s,
            metrics={"loss": 1.0 / (number + 1)},
        )
        for number, used in enumerate(memory_mb)
    ]


def rank(number, role, **facts):
    return RankFacts(rank=number, role=role, **{"host": "a", "cores": 4, **facts})


SERVER = rank(0, "server 0", exchanges=90, staleness=1.5, shares=shares(apply=2.0, idle=8.0))
WORKERS = [
    rank(number, f"worker {number - 1}", shares=shares(0.01, compute=8.0, pack=1.0, wait=1.0))
    for number in (1, 2, 3)
]


def run_of(*ranks, history=None, folder="runs/net-1", **facts):
    return RunFacts(
        folder=Path(folder),
        history={"loss": [0.9, 0.5, 0.51], "val_loss": [0.9, 0.8, 0.9]} if history is None else history,
        workers={},
        ranks=ranks or [SERVER, *WORKERS],
        versions={"numpy": "2.4"},
        **facts,
    )


def waiting(worker, waited_s):
    return replace(worker, shares=shares(0.01, compute=5.0, wait=waited_s))


GAIN = GainReport(workers=3, batches=300, progress=290, worth_having=40, shortened=0.0)
SLOW = replace(WORKERS[2], shares=shares(0.03, compute=9.0, wait=1.0))
PLANTED = {
    "a worker three times as slow": (
        run_of(SERVER, *WORKERS[:2], SLOW),
        # Two with 1 and one with 1/3 of the pace: an epoch lasts 3 / (7/3) instead of 3, or 57 % less.
        r"^worker 2 \(rank 3 on a\) takes 3\.0 times .*30\.0 ms, the others 10\.0 ms.* would save 57 %",
    ),
    "a worker three times as slow that leases samples": (
        run_of(SERVER, *(replace(one, samples=300) for one in WORKERS[:2]), replace(SLOW, samples=100)),
        r"^worker 2 .* look at its host; it took fewer samples than they, so that they need not wait for it$",
    ),
    "a worker three times as slow with as many samples": (
        run_of(SERVER, *(replace(one, samples=300) for one in WORKERS[:2]), replace(SLOW, samples=290)),
        r"^worker 2 .* look at its host; assignment=\"dynamic\" would save 57 % of an epoch$",
    ),
    "a server that is the bottleneck": (
        run_of(replace(SERVER, shares=shares(apply=9.0, idle=1.0)), *(waiting(one, 5.0) for one in WORKERS)),
        r"^workers wait 50 % of their time, and a server works 90 % of its own: use servers=2, ",
    ),
    "a slow disk": (
        run_of(SERVER, *(replace(one, shares=shares(0.01, compute=3.0, read=7.0)) for one in WORKERS)),
        r"^reading takes 70 % of the time of a batch: stage the files on a local disk \(stage_to=",
    ),
    "a slow disk of one host": (
        run_of(SERVER, *WORKERS[:2], replace(WORKERS[2], shares=shares(0.09, compute=8.0, read=72.0))),
        r"^reading takes 75 % of the time of a batch",
    ),
    "short batches": (
        run_of(SERVER, *(waiting(one, 5.0) for one in WORKERS)),
        r"^workers wait 50 % of their time though the servers are idle: .* lag=1$",
    ),
    "short batches of Steady, which pays for a lag": (
        run_of(replace(SERVER, gain=GAIN), *(waiting(one, 5.0) for one in WORKERS)),
        r"servers are idle: .* or servers=0 where ranks are alike; .* a lag, takes more passes over the",
    ),
    "more workers than the noise supports": (
        # 10 samples in a contribution: with a noise scale of 5 no more than 2.5 workers.
        run_of(replace(SERVER, exchanges=900, samples=9000, noise_scale=5.0), *WORKERS),
        r"^3 workers are more than the gain supports: .* 10 samples .* no more than 2 are worth having",
    ),
    "short batches far below the critical one": (
        run_of(
            replace(SERVER, exchanges=900, samples=9000, noise_scale=5000.0),
            *(waiting(one, 5.0) for one in WORKERS),
        ),
        r"^workers wait 50 % .*below the critical one \(5e\+03 samples, and all workers together have 30\)",
    ),
    "few cores": (
        run_of(*(replace(one, cores=2) for one in (SERVER, *(waiting(one, 5.0) for one in WORKERS)))),
        r"^4 ranks shared 2 cores of a, so they waited for each other",
    ),
    "few cores, as the system has counted": (
        run_of(*(replace(one, cores=2, epochs=epochs(9, 9, core_wait_s=0.5)) for one in (SERVER, *WORKERS))),
        r"^4 ranks shared 2 cores of a, so they waited for a core 25 % of their time: start fewer ranks",
    ),
    "an end by numbers that are not finite": (
        run_of(replace(SERVER, diverged=["rank 2 sent NaN"], lost=["rank 1"]), *WORKERS),
        r"^the training has diverged: rank 2 sent NaN$",
    ),
    "a learning rate that diverges": (
        run_of(history={"loss": [0.9, 0.4, 0.8]}),
        r"^loss rises from 0\.4 after epoch 2 to 0\.8 at the end: lower the learning rate",
    ),
    "a loss that is no number": (
        run_of(history={"loss": [0.9, None, None]}),
        r"^loss is no finite number after epoch 2: lower the learning rate.*check the data for NaN$",
    ),
    "long validation": (
        run_of(SERVER, *(replace(one, shares=shares(0.01, compute=5.0, validate=5.0)) for one in WORKERS)),
        r"^validation takes 50 % of the time",
    ),
    "stale contributions": (
        run_of(replace(SERVER, dropped=30), *WORKERS),
        r"^30 of 120 contributions were too stale and are lost: raise max_staleness",
    ),
    "memory that grows": (
        run_of(SERVER, replace(WORKERS[0], epochs=epochs(100, 200, 250, 300)), *WORKERS[1:]),
        r"^the memory of worker 0 grows in each epoch, from 200 to 300 MB",
    ),
    "a death": (
        run_of(replace(SERVER, lost=["rank 2 on a, last seen at step 7"]), *WORKERS),
        r"^a rank died: rank 2 on a, last seen at step 7$",
    ),
    "a death that several tell of": (
        run_of(
            *[replace(one, lost=[f"rank 9 on a has died, at 10:00:0{at}"]) for at, one in enumerate(WORKERS)]
        ),
        r"^a rank died: rank 9 on a has died, at 10:00:00$",
    ),
}


@pytest.mark.parametrize(("run", "expected"), PLANTED.values(), ids=PLANTED)
def test_a_planted_cause_is_the_only_one_that_is_named(run, expected):
    (told,) = verdicts(run)
    assert re.search(expected, told)


HEALTHY = {
    "all files": run_of(),
    "no epoch yet": run_of(*(replace(one, shares=None) for one in (SERVER, *WORKERS))),
    "memory in its first epoch": run_of(replace(SERVER, epochs=epochs(50, 200, 210, 215)), *WORKERS),
    "memory that comes and goes": run_of(replace(SERVER, epochs=epochs(50, 200, 190, 300)), *WORKERS),
    "a loss below 0": run_of(history={"loss": [-3.0, -9.0, -2.0]}),
    "overfitting": run_of(history={"loss": [0.9, 0.2], "val_loss": [0.5, 0.9]}),
    "a noise scale that supports all": run_of(
        replace(SERVER, exchanges=900, samples=9000, noise_scale=50.0), *WORKERS
    ),
    "a noise scale of few contributions": run_of(replace(SERVER, samples=900, noise_scale=1.0), *WORKERS),
    "one rank": run_of(rank(0, "alone", shares=shares(0.01, compute=10.0))),
    "nothing yet": run_of(history={}),
    "few cores, but nobody waits for one": run_of(
        *(replace(one, cores=2, epochs=epochs(9, 9, core_wait_s=0.1)) for one in (SERVER, *WORKERS))
    ),
    "few cores for servers that are idle": run_of(*(replace(one, cores=3) for one in (SERVER, *WORKERS))),
}


@pytest.mark.parametrize("run", HEALTHY.values(), ids=HEALTHY)
def test_a_healthy_run_has_no_verdict(run):
    assert verdicts(run) == []


# -- reading -------------------------------------------------------------------------------------------


def write_run(folder, *, ended=True, last_loss=float("nan")):
    """Write what a run of a server and a worker leaves in its folder."""
    folder.mkdir()
    usage = {"memory_mb": 100.0, "cpu_s": 1.5}
    for number, role in enumerate(("server 0", "worker 0")):
        file = FactsFile(folder, number)
        place = {"rank": number, "role": role, "host": "a", "cores": 2}
        file.add("diverged", text="before a restart")
        file.add("start", **place, command="nnlo train", versions={"numpy": "2"}, workers=1, config={"lr": 1})
        for epoch, loss in enumerate((0.5, 0.25, last_loss)):
            counts = {"samples": 40, "batches": 4}
            told = {"exchanges": 5, "staleness": {"1": {"0": 3, "2": 2}}} if number == 0 else {}
            spent = {"compute": 0.2 + epoch, "wait": 0.5, "read": 0.2}
            metrics = {"metrics": {"loss": loss}, **({"own": {"loss": 2 * loss}} if number else {})}
            file.add("sample", seconds=2.5 * epoch, **usage, read_mb=1.0, written_mb=None)
            file.add("epoch", epoch=epoch, seconds=2.5, **counts, **usage, **told, spent=spent, **metrics)
        if ended:
            file.add("end", seconds=12.5, over=True)
    (folder / "config.toml").write_text('loss = "<mse>"\n')
    return folder


def test_a_finished_run_is_read(tmp_path):
    run = read_run(write_run(tmp_path / "net-1"))
    assert (run.name, run.seconds, run.history["loss"]) == ("net-1", 12.5, [0.5, 0.25, None])
    assert run.workers == {"worker 0": {"loss": [1.0, 0.5, None]}}
    assert [(one.role, one.cores, len(one.epochs), one.samples) for one in run.ranks] == [
        ("server 0", 2, 3, 120),
        ("worker 0", 2, 3, 120),
    ]
    assert [one.shares.seconds["wait"] for one in run.ranks] == [1.5, 1.5]
    assert run.ranks[1].shares.batch_s == pytest.approx((1.2 + 0.2) / 4)  # of the epoch in the middle
    assert (run.workers_count, run.center.samples, run.center.stalenesses) == (1, 120, {1: {0: 3, 2: 2}})
    assert [one.diverged for one in run.ranks] == [[], []]
    assert (run.layout, run.versions) == ({"workers": "1"}, {"numpy": "2"})


def test_a_killed_and_resumed_run_is_read(tmp_path):
    folder = write_run(tmp_path / "net-1", ended=False)
    with (folder / "ranks/facts.rank1.jsonl").open("a") as file:
        file.write('{"what": "ep')  # killed within a write
    run = read_run(folder)
    assert run.seconds is None
    assert [len(one.epochs) for one in run.ranks] == [3, 3]
    assert "it has not ended" in runs_page([run], [[]], {})
    again = FactsFile(folder, 0)
    again.add("start", rank=0, role="server 0", host="b")
    facts = {"seconds": 1.0, "memory_mb": 1.0, "cpu_s": 1.0, "samples": 40}
    again.add("epoch", epoch=2, metrics={"loss": 0.125}, **facts)  # made again since the last checkpoint
    again.add("lost", text="rank 1")
    again.add("end", seconds=3.0, over=True)
    run = read_run(folder)
    assert run.history["loss"] == [0.5, 0.25, 0.125]
    assert (run.seconds, run.ranks[0].host, run.ranks[0].lost) == (8.0, "b", ["rank 1"])


def test_a_metric_that_not_every_epoch_has_is_not_taken_for_one_that_is_not_finite(tmp_path):
    facts = FactsFile(tmp_path, 0)
    facts.add("start", role="alone")
    usage = {"seconds": 1.0, "memory_mb": 1.0, "cpu_s": 1.0}
    for number, loss in enumerate((0.5, 0.4, 0.3, 0.2)):
        scores = {"val_loss": loss} if number % 2 else {}  # validated in every second epoch
        facts.add("epoch", epoch=number, metrics={"loss": loss, **scores}, **usage)
    run = read_run(tmp_path)
    assert verdicts(run) == []
    assert "val_loss 0.2000" in runs_page([run], [[]], drawn(run_figures([run])))
    facts.add("epoch", epoch=4, metrics={"loss": 0.2}, **usage)
    facts.add("epoch", epoch=5, metrics={"loss": 0.2, "val_loss": float("nan")}, **usage)
    (told,) = verdicts(read_run(tmp_path))
    assert "val_loss is no finite number after epoch 6" in told


def test_ranks_of_a_start_that_had_more_are_no_workers_now(tmp_path):
    usage = {"seconds": 1.0, "memory_mb": 1.0, "cpu_s": 1.0, "samples": 10, "metrics": {}}
    for start, size in enumerate((4, 2)):
        for number in range(size):
            facts = FactsFile(tmp_path, number)
            role = f"worker {number - 1}" if number else "server 0"
            facts.add("start", role=role, host="a", cores=2, size=size)
            facts.add("epoch", epoch=start, **usage)
    run = read_run(tmp_path)
    assert [one.samples for one in run.ranks] == [20, 20, 10, 10]
    assert run.workers_count == 1
    assert verdicts(run) == []  # two ranks have two cores
    assert "<td>worker 2, before</td>" in runs_page([run], [[]], {})


def test_links_lead_to_folders_whatever_their_names():
    (link,) = re.findall('href="(.*?)"', html_table(["trial"], [["0"]], links=["search #1/50% <a>?/"]))
    assert link == "search%20%231/50%25%20%3Ca%3E%3F/"


def test_the_page_has_names_that_are_no_text(tmp_path):
    folder = tmp_path / os.fsdecode(b"net-\xff")
    FactsFile(folder, 0).add("start", role="alone", command="train \ud800")
    assert main(["report", str(folder)]) == 0
    assert "train ?" in (folder / "report.html").read_text()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"what": "epoch"}\n', "facts.rank0.jsonl: .* is none of a report"),
        ('{"what": "epoch", "epoch": 1, "metrics": {}}\n', "facts.rank0.jsonl: .* is none of a report"),
        ('{"what": "sample"}\n', "facts.rank0.jsonl: .* is none of a report"),
        ("{]\n{}\n", "facts.rank0.jsonl, line 1: "),
        ("3\n{}\n", "facts.rank0.jsonl, line 1: is none of a report"),
        ("{" * 300 + "\n", "facts.rank0.jsonl, line 1: "),
    ],
)
def test_damaged_files_are_named(tmp_path, content, expected):
    folder = write_run(tmp_path / "net-1")
    (folder / "ranks/facts.rank0.jsonl").write_text(content)
    with pytest.raises(ConfigurationError, match=expected):
        read_run(folder)


def test_what_is_no_run_is_refused(tmp_path, capsys):
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "there is no such folder; name the folder of a run" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 2
    assert (
        "has no facts of a run (ranks/facts.rank0.jsonl): name the folder of `nnlo train`"
        in capsys.readouterr().err
    )
    assert not list(tmp_path.iterdir())


def test_a_folder_without_facts_is_answered_with_what_it_is(tmp_path, capsys):
    def told(path):
        assert main(["report", str(path)]) == 2
        return capsys.readouterr().err

    (tmp_path / "train.py").touch()
    assert "train.py: it is a file; name the folder of a run" in told(tmp_path / "train.py")
    (tmp_path / "search" / "trials").mkdir(parents=True)
    run = write_run(tmp_path / "search" / "trials" / "0003")
    assert f"but a folder in it has: nnlo report {run}" in told(tmp_path)
    (tmp_path / "search" / "search.toml").touch()
    assert f"search; it writes its page when it ends. For one of its trials: nnlo report {run}" in told(
        tmp_path / "search"
    )
    (tmp_path / "search" / "report.html").touch()
    assert f"search; its page is {tmp_path / 'search' / 'report.html'}. For one" in told(tmp_path / "search")


# -- the page ------------------------------------------------------------------------------------------


def test_the_command_writes_one_page_beside_the_run(tmp_path, capsys):
    folder = write_run(tmp_path / "net-1")
    assert main(["report", str(folder)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == f"nnlo report: {folder / 'report.html'}"
    assert printed[0].startswith("net-1: loss is no finite number after epoch 3")
    page = (folder / "report.html").read_text()
    assert "<title>net-1: loss not finite</title>" in page
    assert "loss = &quot;&lt;mse&gt;&quot;" in page
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", page)  # it needs no network


def test_several_runs_are_compared_with_the_first(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    alone = run_of(rank(0, "alone", epochs=epochs(100, 100)), folder="alone", history={"loss": [1.0, 0.5]})
    together = run_of(
        rank(0, "server 0", epochs=epochs(100, 100, samples=150.0)),
        rank(1, "worker 0"),
        rank(2, "worker 1"),
        folder="together",
        history={"loss": [1.0, 0.4]},
    )
    page = runs_page([alone, together], [[], ["look here"]], {})
    assert "<td>together</td><td>2</td><td></td><td>75</td><td>1.50</td><td>0.75</td>" in page
    assert "<li>together: look here</li>" in page
    for name in ("a", "b"):
        write_run(tmp_path / name)
    assert main(["report", "a", "b", "--output", "both.html"]) == 0
    assert "nnlo report: both.html" in capsys.readouterr().out
    assert "2 runs: a, b" in Path("both.html").read_text()


def lead_of_two():
    return run_of(
        *(
            rank(number, role, epochs=epochs(100, 100))
            for number, role in enumerate(("lead", "worker 0, member 1"))
        ),
        history={"loss": [1.0, 0.5]},
    )


def test_without_a_server_the_samples_of_all_ranks_are_counted():
    run = lead_of_two()
    assert run.workers_count == 2
    assert run.samples_per_second == pytest.approx(100.0)


def test_a_server_of_keras_knows_no_samples_and_those_of_its_workers_are_counted():
    server = rank(0, "server 0", exchanges=400, noise_scale=1e6, epochs=epochs(100, 100, samples=0.0))
    workers = [rank(number, f"worker {number - 1}", epochs=epochs(100, 100)) for number in (1, 2)]
    run = run_of(server, *workers, history={"loss": [1.0, 0.5]})
    assert run.samples_per_second == pytest.approx(100.0)
    assert run.epoch_samples == [200.0, 200.0]
    assert verdicts(run) == []


def test_a_noise_scale_in_batches_is_shown_as_such(tmp_path):
    facts = FactsFile(tmp_path, 0)
    facts.add("start", role="server 0", size=1)
    usage = {"seconds": 1.0, "memory_mb": 1.0, "cpu_s": 1.0, "metrics": {}}
    facts.add("epoch", epoch=0, noise_scale=7.0, noise_unit="batches", **usage)
    assert "7 batches at the end: the critical number of them" in runs_page([read_run(tmp_path)], [[]], {})
    facts.add("epoch", epoch=0, noise_scale=7.0, **usage)
    assert "7 samples at the end: the critical batch" in runs_page([read_run(tmp_path)], [[]], {})


def sample(at, memory_mb=9.0, peak_memory_mb=9.0):
    used = {"memory_mb": memory_mb, "peak_memory_mb": peak_memory_mb, "cpu_s": at}
    return Sample(at_s=1000.0 + at, moved_mb=at, gpu=0.5, **used)


def test_the_page_has_the_peak_of_the_memory_between_two_samples():
    usage = [sample(0, 300.0, 310.0), sample(1, 320.0, 777.0), sample(2, 330.0, 777.0)]
    run = run_of(SERVER, replace(WORKERS[0], epochs=epochs(250), samples_of_usage=usage))
    page = runs_page([run], [[]], {})
    assert "<th>its peak (MB)</th></tr>" in page
    assert "<td>250</td><td>777</td></tr>" in page


def test_every_figure_has_named_axes_and_can_be_seen_on_white_and_black():
    pytest.importorskip("plotly", reason="the environment for MPICH has no plotly")
    usage = [sample(at) for at in (0, 1, 3)]
    monitored = run_of(
        *(
            replace(one, epochs=epochs(100, 110, 120), samples_of_usage=usage)
            for one in (replace(SERVER, stalenesses={1: {0: 3, 2: 4}, 2: {}}), *WORKERS)
        ),
        history={"loss": [0.9, 0.5, 0.4], "val_loss": [0.9, 0.6, 0.5], "accuracy": [0.1, 0.2, None]},
    )
    figures = run_figures([monitored])
    wanted = ["loss", "accuracy", "Time of each rank", "Staleness", "Pace", "Memory", "Processor"]
    assert list(figures) == [*wanted, "Files and sockets", "GPU"]
    assert list(figures["Processor"].data[0].x), list(figures["Processor"].data[0].y) == ([1, 3], [1, 1])
    assert list(run_figures([monitored, lead_of_two()]))[-1] == "Speed"
    pages = drawn(figures)
    for title, figure in figures.items():
        layout = figure.to_dict()["layout"]
        assert layout["xaxis"]["title"]["text"], title
        assert layout["yaxis"].get("title", {}).get("text") or title == "Time of each rank"  # ranks are named
        assert layout["paper_bgcolor"] == layout["plot_bgcolor"] == "rgba(0,0,0,0)"
    buttons = figures["loss"].to_dict()["layout"]["updatemenus"][0]["buttons"]
    assert [one["label"] for one in buttons] == ["epochs", "samples", "seconds"]
    assert buttons[1]["args"][0]["x"][0] == [100.0, 200.0, 300.0]
    assert buttons[2]["args"][0]["x"][0] == [2.0, 4.0, 6.0]
    stacked = [
        sum(bar["x"][place] for bar in figures["Time of each rank"].to_dict()["data"]) for place in range(4)
    ]
    assert stacked == pytest.approx([100.0] * 4)
    assert sum(len(one) > 1_000_000 for one in pages.values()) == 1  # plotly itself


def test_without_plotly_the_page_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    assert run_figures([run_of()]) == {}
    assert "Figures need plotly: pip install &#x27;nnlo[report]&#x27;" in runs_page([run_of()], [[]], {})
