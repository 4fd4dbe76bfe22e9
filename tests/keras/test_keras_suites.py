"""Keras' own tests of optimizers and callbacks, every optimizer in a wrapper, by `tests.suites.keras_own`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.helpers.paths import ROOT

pytest.importorskip("keras", reason="the environment for MPICH has no frameworks")

from tests.suites import keras_own

pytestmark = pytest.mark.framework("keras")


@pytest.mark.extended
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("wrapper", ["Downpour", "EASGD"])
def test_what_fails_with_a_wrapper_is_explained(wrapper):
    done = subprocess.run(
        [sys.executable, "-m", keras_own.__name__, "--wrapper", wrapper],
        cwd=ROOT,
        env=os.environ | {"KERAS_BACKEND": os.environ.get("KERAS_BACKEND", "torch")},
        check=False,
        capture_output=True,
        text=True,
        timeout=1100,
    )
    if done.returncode == keras_own.NO_SOURCE:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.partition(" passed")[0].split()[-1]) > 200


def test_a_failure_that_is_not_explained_is_one_and_so_is_an_exception_that_passes(monkeypatch, capsys):
    monkeypatch.setattr(keras_own, "EXCEPTIONS", {"known": ("is different", keras_own.ALL)})
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    found = {"a::known": "failed", "a::fine": "passed", "a::tensorboard": "failed", "a::other": "skipped"}
    plain = {"a::known": "passed", "a::tensorboard": "failed"}
    assert keras_own.report("Downpour", found, plain, complete=True) == 0
    assert "1 passed, 1 failed, 1 failed as they are, 1 skipped" in capsys.readouterr().out
    assert keras_own.report("Downpour", {**found, "a::known": "passed"}, plain, complete=True) == 1
    assert "passes, so that its exception must go: known" in capsys.readouterr().out
    assert keras_own.report("Downpour", {**found, "a::fine": "failed"}, {"a::fine": "passed"}, complete=True)
    assert "UNEXPLAINED: a::fine" in capsys.readouterr().out


def test_pip_without_an_index_says_why(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    assert keras_own.download(tmp_path) is None
    assert "no source distribution of keras==" in capsys.readouterr().out
