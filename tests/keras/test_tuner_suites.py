"""Keras-tuner's own tests of its tuners, with `MPITuner` below each, by `tests.suites.keras_tuner_own`."""

from __future__ import annotations

import pytest

pytest.importorskip("keras_tuner", reason="the environment for MPICH has no keras-tuner")

from tests.helpers.suites import passed_with_keras
from tests.suites import keras_own, keras_tuner_own


@pytest.mark.framework("keras")
@pytest.mark.extended
@pytest.mark.timeout(0)  # each of those tests has its limit
def test_what_fails_with_our_tuner_is_explained():
    assert passed_with_keras(keras_tuner_own) > 50


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
