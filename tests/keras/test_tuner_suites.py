"""Keras-tuner's own tests of its tuners, with `MPITuner` below each, by `tests.suites.keras_tuner_own`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.helpers.paths import ROOT

pytest.importorskip("keras_tuner", reason="the environment for MPICH has no keras-tuner")

from tests.suites import keras_own, keras_tuner_own


@pytest.mark.framework("keras")
@pytest.mark.extended
@pytest.mark.timeout(1200)
def test_what_fails_with_our_tuner_is_explained():
    done = subprocess.run(
        [sys.executable, "-m", keras_tuner_own.__name__],
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
    assert int(done.stdout.partition(" passed")[0].split()[-1]) > 50


def test_only_tests_of_tuners_are_kept_and_renewed(tmp_path):
    kept, other = (tmp_path / name for name in ("engine_tuner_test.py", "engine_oracle_test.py"))
    for file in (kept, other):
        file.write_text("callback.model = self\nself.model = 1\n")
    keras_tuner_own.renew(tmp_path)
    assert kept.read_text() == "callback.set_model(self)\nself.model = 1\n"
    assert not other.exists()


def test_pip_without_an_index_names_the_release_that_has_the_tests(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    assert keras_own.download(tmp_path, "keras-tuner", keras_tuner_own.RELEASE) is None
    assert "no source distribution of keras-tuner==1.3.5 " in capsys.readouterr().out
