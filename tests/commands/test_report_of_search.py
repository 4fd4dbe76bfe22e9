"""`nnlo report` of a search in a script: from its journal, or from the directory of a keras-tuner search."""

from __future__ import annotations

import json
import re
import sys

import pytest

from nnlo_common.commands._cli import main

pytest.importorskip("optuna", reason="the environment for MPICH has no Optuna")
import optuna

from nnlo_common.search import optimize

optuna.logging.set_verbosity(optuna.logging.WARNING)


def objective(trial):
    rate = trial.suggest_float("rate", 1e-3, 0.5, log=True)
    trial.suggest_categorical("kind", ["<flat>", "deep"])
    for epoch in range(3):
        trial.report(rate + 1 / (epoch + 1), epoch)
    if trial.number == 3:
        raise ValueError("the <third> is bad")
    if trial.number == 4:
        raise optuna.TrialPruned
    return rate


def search(journal, function=objective, direction="minimize", **options):
    study = optuna.create_study(direction=direction)
    return optimize(study, function, sampler="random", journal=journal, **{"n_trials": 12} | options)


def headings(page):
    return re.findall(r"<h2>(.*?)</h2>", page)


def rows(page):
    """The rows of the table of trials."""
    table = page.rpartition("<table>")[2]
    return [re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row) for row in table.split("<tr>")[1:]]


def plain(cell):
    return re.sub(r"<.*?>", "", cell)


# -- the journal of a script -----------------------------------------------------------------------------


def test_a_search_in_a_script_has_a_page_from_its_journal_alone(tmp_path, monkeypatch, capsys):
    study = search(tmp_path / "search.jsonl")
    monkeypatch.chdir(tmp_path)
    assert main(["report", "search.jsonl"]) == 0
    best = study.best_trial
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith(f"best of 12 trials is {best.number}, value {best.value:.4g}: rate ")
    assert printed[1:] == ["nnlo report: search.html"]
    page = (tmp_path / "search.html").read_text()
    assert f"<title>value {best.value:.4g} in trial {best.number}</title>" in page
    assert "minimize value: 10 complete, 1 pruned, 1 failed, in " in page
    assert page.count("ValueError: the &lt;third&gt; is bad") == 1
    assert "give folds=5, or train it again" in page
    drawn = ["History", "Slices", "Parallel coordinates", "Epochs"]
    assert headings(page) == [*drawn, "Importance", "Failures", "Trials"]
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", page)  # it needs no network
    table = rows(page)
    assert table[0] == ["trial", "value", "rate", "kind", "time", "trial.name"]
    assert [row[0] for row in table[1:]] == [str(number) for number in range(12)]
    assert [table[4][1], table[5][1], table[1][-1]] == ["failed", "pruned", "0000"]
    assert main(["report", str(tmp_path)]) == 0  # the folder that has it
    assert (tmp_path / "report.html").is_file()


def test_a_search_that_maximizes_folds_has_its_best_trial_and_their_values(tmp_path):
    def by_fold(trial):
        return trial.suggest_int("x", 0, 9) + trial.fold / 4

    study = search(tmp_path / "s.jsonl", by_fold, "maximize", folds=2)
    assert main(["report", str(tmp_path / "s.jsonl"), "--output", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert f"<title>value {study.best_value:.4g} in trial {study.best_trial.number}</title>" in page
    assert "maximize value: 12 complete, 2 folds each" in page
    assert "0 of it may be chance" in page
    assert "Epochs" not in headings(page)  # no trial has reported
    assert rows(page)[0] == ["trial", "value", "folds", "x", "time", "trial.name"]


def test_a_search_under_way_has_a_page_too(tmp_path):
    journal = tmp_path / "search.jsonl"
    search(journal, n_trials=2)
    lines = journal.read_text().splitlines(keepends=True)
    begun = [line for line in lines if '"state"' not in line and '"trial": 1' in line]
    ended = [line for line in lines if '"trial": 0, "state"' in line]
    journal.write_text("".join([lines[0], *begun, *ended, '{"trial": 1, "sta']))
    assert main(["report", str(journal)]) == 0
    page = (tmp_path / "search.html").read_text()
    assert "1 complete, 1 not finished" in page
    assert [row[0] for row in rows(page)[1:]] == ["0"]


def test_without_a_finished_trial_the_page_says_so(tmp_path, capsys):
    (tmp_path / "search.jsonl").write_text('{"study": ["MINIMIZE"], "name": ""}\n')
    assert main(["report", str(tmp_path / "search.jsonl")]) == 0
    assert "none of 0 trials is complete" in capsys.readouterr().out
    page = (tmp_path / "search.html").read_text()
    assert "<title>A search without a result</title>" in page
    assert "minimize value: no trials; " in page


def test_trials_that_the_study_had_before_keep_the_numbers_right(tmp_path):
    study = optuna.create_study()
    for _ in range(3):
        study.add_trial(optuna.trial.create_trial(value=9.0))
    optimize(study, lambda trial: trial.suggest_float("x", 0, 1), n_trials=2, journal=tmp_path / "s.jsonl")
    assert main(["report", str(tmp_path / "s.jsonl")]) == 0
    assert [row[0] for row in rows((tmp_path / "s.html").read_text())[1:]] == ["3", "4"]


def test_the_folder_of_nnlo_tune_has_a_page_while_it_searches(tmp_path):
    def trained(trial):
        for name, value in {"nnlo:block": trial.number % 2, "nnlo:folder": f"{trial.number:04}"}.items():
            trial.set_user_attr(name, value)
        return trial.suggest_float("x", 0, 1)

    (tmp_path / "search.toml").touch()
    search(tmp_path / "journal.jsonl", trained, n_trials=3)
    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "blocks trained" in page
    assert rows(page)[0] == ["trial", "value", "x", "block", "time", "folder"]
    assert '<a href="trials/0002/">0002</a>' in page


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "does not begin like the journal of a search; name another file, or the folder of a run"),
        ('{"study": ["UP"]}\n', "does not begin like the journal"),
        ('{"study": ["MINIMIZE"]}\n[1]\n', "holds a line that is no JSON object"),
        ('{"study": ["MINIMIZE"]}\n{"trial": -1}\n', "line 2 is not what a search writes"),
        ('{"study": ["MINIMIZE", "MAXIMIZE"]}\n', "2 objectives, and the page shows one; give optimize"),
    ],
)
def test_what_is_no_journal_is_refused(text, problem, tmp_path, capsys):
    (tmp_path / "search.jsonl").write_text(text)
    assert main(["report", str(tmp_path / "search.jsonl")]) == 2
    assert problem in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["search.jsonl"]


def test_a_search_is_shown_alone(tmp_path, capsys):
    for name in ("a.jsonl", "b.jsonl"):
        search(tmp_path / name, n_trials=1)
    assert main(["report", str(tmp_path / "run"), str(tmp_path / "a.jsonl")]) == 2
    assert "a.jsonl is a search, and a page shows one search or several runs" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 2
    assert f"has 2 searches; name one: {tmp_path / 'a.jsonl'}, " in capsys.readouterr().err


def test_without_optuna_the_command_says_what_to_install(tmp_path, monkeypatch, capsys):
    (tmp_path / "search.jsonl").write_text('{"study": ["MINIMIZE"], "name": ""}\n')
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert main(["report", str(tmp_path / "search.jsonl")]) == 2
    assert "pip install 'nnlo[tune]'" in capsys.readouterr().err


# -- the directory of a tuner ----------------------------------------------------------------------------


def tuned(folder, number, score, *, status="COMPLETED", message=None, folds=()):
    """Write the file of a trial, as keras-tuner does."""
    metrics = {"loss": 2.0, "val_loss": score} | {f"val_loss of fold {k}": one for k, one in enumerate(folds)}
    space = [
        {"class_name": "Float", "config": {"name": "rate", "sampling": "log"}},
        {"class_name": "Choice", "config": {"name": "act"}},
    ]
    told = {
        "trial_id": str(number),
        "hyperparameters": {"space": space, "values": {"rate": 0.01 * (number + 1), "act": "relu"}},
        "metrics": {
            "metrics": {
                name: {"direction": "min", "observations": [{"value": [value], "step": 1}]}
                for name, value in metrics.items()
                if value is not None
            }
        },
        "score": score,
        "best_step": 1,
        "status": status,
        "message": message,
    }
    (folder / f"trial_{number}").mkdir(parents=True)
    (folder / "oracle.json").write_text("{}")
    (folder / f"trial_{number}" / "trial.json").write_text(json.dumps(told))


def test_the_directory_of_a_tuner_has_a_page(tmp_path, capsys):
    project = tmp_path / "search" / "untitled_project"
    for number in range(11):
        tuned(project, number, 1.0 / (number + 1), folds=(0.5, 1.5 - number / 10))
    tuned(project, 11, None, status="FAILED", message="Traceback\nValueError: too wide")
    tuned(project, 12, None, status="RUNNING")
    assert main(["report", str(project)]) == 0
    page = (project / "report.html").read_text()
    assert capsys.readouterr().out.startswith(
        "best of 12 trials is 10, val_loss 0.09091: rate 0.11  act relu"
    )
    assert "<title>val_loss 0.09091 in trial 10</title>" in page
    assert "minimize val_loss: 11 complete, 1 failed, 1 not finished, 2 folds each; " in page
    assert "ValueError: too wide" in page
    assert headings(page) == ["History", "Slices", "Parallel coordinates", "Importance", "Failures", "Trials"]
    table = rows(page)
    assert table[0] == ["trial", "val_loss", "folds", "rate", "act", "folder"]
    assert [row[0] for row in table[1:]] == [str(number) for number in range(12)]  # 2 before 10
    assert '<a href="trial_0/">trial_0</a>' in page
    assert main(["report", str(project.parent)]) == 0  # directory= has project_name= in it
    assert '<a href="untitled_project/trial_0/">' in (project.parent / "report.html").read_text()


def test_a_damaged_file_of_a_tuner_is_named(tmp_path, capsys):
    tuned(tmp_path, 0, 1.0)
    (tmp_path / "trial_0" / "trial.json").write_text('{"status": "COMPLETED"}')
    assert main(["report", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "trial_0/trial.json is not what keras-tuner writes (KeyError: 'score')" in told
