"""Pipes, devices and sparse files in place of files: each reader refuses them by name, and none waits."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("optuna", reason="the environment for MPICH has no Optuna")
import optuna

from nnlo_common import ConfigurationError
from nnlo_common.commands._cli import main
from nnlo_common.commands.train._run_folder import check_same
from nnlo_common.data import list_files
from nnlo_common.search._journal import Journal
from tests.hostile.test_checkpoint_files import SPECIAL


def open_journal(path: Path) -> None:
    Journal(path, optuna.create_study(study_name="a")).close()


READERS: dict[str, Callable[[Path], object]] = {
    "a.txt": list_files,
    "a.jsonl": open_journal,
    "config.toml": lambda path: check_same(path, "epochs = 1", "training"),
}


@pytest.mark.parametrize("put", SPECIAL.values(), ids=SPECIAL)
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_file_of_a_possible_size_is_refused(
    tmp_path: Path, name: str, put: Callable[[Path], None]
) -> None:
    put(tmp_path / name)
    with pytest.raises(
        ConfigurationError, match=r"pipe|device|not a regular file|link|has more than \d+ bytes"
    ):
        READERS[name](tmp_path / name)


@pytest.mark.parametrize("put", SPECIAL.values(), ids=SPECIAL)
@pytest.mark.parametrize("command", ["train", "tune"])
@pytest.mark.parametrize("flag", ["--config a.toml", "--config a.yaml", "--model a.json", "--model a.py"])
def test_commands_refuse_them_as_options_and_models(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flag: str,
    command: str,
    put: Callable[[Path], None],
) -> None:
    monkeypatch.chdir(tmp_path)
    _, _, name = flag.partition(" ")
    put(Path(name))
    Path("a.h5").touch()
    words = [*flag.split(), "--train", "a.h5", "--loss", "mse"]
    assert main([command, *words]) == 2
    told = capsys.readouterr().err
    assert f"nnlo {command}: " in told
    assert name in told or "/dev/zero" in told  # of a link the target is named
    assert "cannot be read (" in told


def test_a_compressed_file_of_keras_that_claims_far_more_than_its_size_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import zipfile

    monkeypatch.chdir(tmp_path)
    Path("a.h5").touch()
    with zipfile.ZipFile("net.keras", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("config.json", "{}")
        with archive.open("model.weights.h5", "w") as weights:
            for _ in range(120):
                weights.write(bytes(1_000_000))
    assert main(["train", "--model", "net.keras", "--train", "a.h5", "--loss", "mse"]) == 2
    assert "but claims 120000002 in its parts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.toml", "a." * 60_000 + "b = 1", "a name has more than 100 parts"),
        ("a.toml", "[" + '"x" . ' * 200 + "b]", "a name has more than 100 parts"),
        ("a.toml", "a = " + "[" * 300 + "]" * 300, "nested too deeply"),
        ("a.toml", "a = " + "9" * 5000, "4300 digits"),
        ("a.toml", "a = 0x" + "f" * 5000, "digits"),
        ("a.yaml", "a: " + "[" * 200 + "]" * 200, "nested too deeply"),
        ("a.yaml", "a: 0x" + "f" * 5000, "digits"),
        ("a.yaml", "a: !!int ''", "not valid YAML"),
        ("a.yaml", "a: !!bool x", "not valid YAML"),
        ("a.yaml", "a: !!timestamp x", "not valid YAML"),
        ("a.yaml", "a: " + ":".join(["59"] * 1000) + ".5", "not valid YAML"),
        ("a.yaml", "#" * 300_001, "more than 300000 are not read"),
    ],
    ids=lambda value: value[:12],
)
def test_options_beyond_the_limits_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    text: str,
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text)
    assert main(["train", "--config", name]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"nnlo train: --config {name}")
    assert told in error


def test_a_python_file_nested_too_deeply_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.h5").touch()
    Path("net.py").write_text("x = " + "-" * 100_000 + "1")
    assert main(["train", "--model", "net.py", "--train", "a.h5", "--loss", "mse"]) == 2
    assert "net.py" in capsys.readouterr().err


def test_the_keras_home_may_hold_anything(tmp_path: Path) -> None:
    from nnlo_common.commands.train._model_file import chosen_back_end

    for content in ("[" * 100_000, "[]", "9" * 5000):
        (tmp_path / "keras.json").write_text(content)
        assert chosen_back_end({"KERAS_HOME": str(tmp_path)}) == ""
    (tmp_path / "keras.json").unlink()
    os.mkfifo(tmp_path / "keras.json")
    assert chosen_back_end({"KERAS_HOME": str(tmp_path)}) == ""
