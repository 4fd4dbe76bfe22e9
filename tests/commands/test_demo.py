"""The demo: runs the examples of the repository, which the package brings, on one process and on several."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

from nnlo_common.commands import _demo
from nnlo_common.commands._cli import main
from nnlo_common.commands._demo import ALGORITHMS, EXAMPLES, run_demo
from tests.helpers.jobs import mpiexec
from tests.helpers.paths import EXAMPLES as FOLDER
from tests.helpers.paths import ROOT


def accuracies(told):
    return [float(value) for value in re.findall(r"^epoch .*accuracy ([0-9.]+)", told, re.MULTILINE)]


def test_alone_it_trains_and_says_what_to_try_next(capsys):
    before = list(sys.argv), list(sys.path)
    assert main(["demo", "--epochs", "2"]) == 0
    told = capsys.readouterr().out
    assert told.splitlines()[0].endswith(f"runs {FOLDER / 'fashion_numpy.py'}")
    assert len(accuracies(told)) == 2
    assert accuracies(told)[-1] > 0.6
    assert "\n  mpiexec -n 3 nnlo demo  " in told.partition("\nNext:")[2]
    assert (sys.argv, sys.path) == before


@pytest.mark.mpi
@pytest.mark.slow
def test_on_three_ranks_it_trains_once_and_speaks_once():
    done = mpiexec(3, "-m", "nnlo_common", "demo", "--algorithm", "easgd", "--epochs", "2")
    assert done.returncode == 0, done.stderr
    assert len(accuracies(done.stdout)) == 2
    assert "EASGD on 3 ranks" in done.stdout
    assert done.stdout.count("fashion_numpy.py") == done.stdout.count("Next:") == 1
    assert "mpiexec -n 3 nnlo demo  " not in done.stdout  # it is what has just run


@pytest.mark.slow
@pytest.mark.parametrize(
    "framework", [pytest.param(name, marks=pytest.mark.framework(name)) for name in ("torch", "keras")]
)
# Keras 3.15 itself, with NumPy 2: Variable.__array__ takes no copy argument.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_it_trains_with_each_framework(framework, capsys):
    assert main(["demo", framework, "--epochs", "1"]) == 0
    assert float(re.search(r"accuracy:? ([0-9.]+)", capsys.readouterr().out).group(1)) > 0.3


def test_the_first_line_comes_before_anything_is_imported(capsys, monkeypatch):
    seen = []
    monkeypatch.setattr(_demo, "_run_script", lambda *_: seen.append(capsys.readouterr().out))
    run_demo("torch" if _demo.find_spec("torch") else "numpy", "downpour", 1)
    assert len(seen[0].splitlines()) == 1
    assert " runs " in seen[0]


def test_an_installed_package_runs_what_it_has_brought(tmp_path, monkeypatch, capsys):
    (tmp_path / "examples").mkdir()
    script = tmp_path / "examples" / "fashion_numpy.py"
    script.write_text("import sys, beside\nprint(beside.WORD, *sys.argv[1:], __name__)")
    (tmp_path / "examples" / "beside.py").write_text("WORD = 'found'")
    monkeypatch.setattr(_demo, "__file__", str(tmp_path / "_demo.py"))
    assert run_demo("numpy", "gem", 3) == 0
    assert "found --algorithm gem --epochs 3 __main__\n" in capsys.readouterr().out
    sys.modules.pop("beside")


def test_a_missing_framework_is_named_with_its_remedy(monkeypatch, capsys):
    monkeypatch.setattr(_demo, "find_spec", lambda name: None)
    assert main(["demo", "torch"]) == 2
    expected = "nnlo demo torch needs the package 'torch', which is not installed. Install it with: pip "
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("installed", "given", "expected"),
    [
        ({"tensorflow", "torch"}, None, None),
        ({"torch", "jax"}, None, "torch"),
        ({"jax"}, None, "jax"),
        ({"torch"}, "jax", "jax"),
    ],
)
def test_keras_runs_on_what_is_installed(installed, given, expected, monkeypatch):
    chosen = {} if given is None else {"KERAS_BACKEND": given}
    monkeypatch.setattr(_demo.os, "environ", chosen)
    monkeypatch.setattr(_demo, "find_spec", lambda name: name if name in installed else None)
    _demo._choose_back_end()
    assert chosen.get("KERAS_BACKEND") == expected


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--epochs", "0"], "nnlo demo: argument --epochs: '0' is not a whole number above 0"),
        (["--epochs", "2.5"], "'2.5' is not a whole number above 0"),
        (["jax"], "invalid choice: 'jax'"),
        (["--algorithm", "adam"], "invalid choice: 'adam'"),
        (["--data"], "nnlo demo: unrecognized arguments: --data"),
    ],
)
def test_a_wrong_word_is_refused(words, answer, capsys):
    assert main(["demo", *words]) == 2
    assert answer in capsys.readouterr().err


def algorithms_of(script):
    """The keys of the table of algorithms of an example, which need not be importable here."""
    for node in ast.parse((FOLDER / script).read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in {"ALGORITHMS", "WRAPPERS"}:
            return tuple(key.value for key in node.value.keys)
    raise AssertionError(f"{script} has no table of algorithms")


@pytest.mark.parametrize("script", EXAMPLES.values())
def test_every_example_knows_the_algorithms(script):
    assert algorithms_of(script) == ALGORITHMS


def needed_by(script):
    """The files of examples/ that a script needs: itself, and modules beside it that it imports."""
    yield f"examples/{script}"
    for node in ast.walk(ast.parse((FOLDER / script).read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        yield from (f"examples/{name}.py" for name in names if (FOLDER / f"{name}.py").exists())


def test_the_wheel_brings_what_the_examples_need():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    brought = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    expected = {file for script in EXAMPLES.values() for file in needed_by(script)} | {"examples/data"}
    assert set(brought) == expected
    home = Path(_demo.__file__).relative_to(ROOT).with_name("examples")
    assert all(
        target == str(home / Path(source).relative_to("examples")) for source, target in brought.items()
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["reports", "run"],
            "nnlo: there is no command 'reports'; did you mean 'report'? (nnlo has advise, demo, ",
        ),
        (["run.toml"], "nnlo: there is no command 'run.toml' (nnlo has advise, demo, "),
        (["--sped"], "nnlo: unrecognized arguments: --sped"),
    ],
)
def test_a_wrong_command_is_answered_with_the_nearest(words, told, capsys):
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(told)
