"""Keras' own tests of optimizers and callbacks, every optimizer in a wrapper, by `tests.suites.keras_own`."""

from __future__ import annotations

import pytest

pytest.importorskip("keras", reason="the environment for MPICH has no frameworks")

from tests.helpers.suites import passed_with_keras
from tests.suites import keras_own

pytestmark = pytest.mark.framework("keras")


@pytest.mark.extended
@pytest.mark.timeout(0)  # each of those tests has its limit
@pytest.mark.parametrize("wrapper", ["Downpour", "EASGD"])
def test_what_fails_with_a_wrapper_is_explained(wrapper):
    assert passed_with_keras(keras_own, "--wrapper", wrapper) > 200


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


HANGS = """
import threading

def test_that_waits():
    threading.Event().wait()

def test_after_it():
    assert True
"""


@pytest.mark.slow
def test_one_that_hangs_fails_by_its_own_limit_and_the_next_runs(tmp_path):
    (tmp_path / "hangs_test.py").write_text(HANGS)
    found = keras_own.run(tmp_path, "", "", plugin="tests.helpers.paths", limit_s=0.5)
    assert found == {"hangs_test::test_that_waits": "failed", "hangs_test::test_after_it": "passed"}


def test_pip_without_an_index_says_why(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    assert keras_own.download(tmp_path) is None
    assert "no source distribution of keras==" in capsys.readouterr().out


MADE = """
import pytest

def test_plain(): assert False

@pytest.mark.parametrize("one", ["a.b", "c::d"])
def test_cases(one): assert False

class TestOuter:
    def test_of_class(self): assert False

    class TestInner:
        def test_within(self): assert False
"""


def test_the_second_run_selects_every_test_that_has_failed(tmp_path):
    (tmp_path / "made_test.py").write_text(MADE)
    (tmp_path / "broken_test.py").write_text("import a_module_that_is_nowhere")
    plain = "tests.suites"  # for made-up tests no plug-in need replace anything
    first = keras_own.run(tmp_path, "", "", plugin=plain)
    assert first == dict.fromkeys(
        [
            "::broken_test",
            "made_test::test_plain",
            "made_test::test_cases[a.b]",
            "made_test::test_cases[c::d]",
            "made_test.TestOuter::test_of_class",
            "made_test.TestOuter.TestInner::test_within",
        ],
        "failed",
    )
    assert keras_own.run(tmp_path, "", "", list(first), plugin=plain) == first


def test_a_failure_that_the_second_run_has_not_repeated_is_not_one_of_keras(monkeypatch, capsys):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    for plain in ({}, {"a::other": "skipped"}):
        assert keras_own.report("Downpour", {"a::other": "failed"}, plain, complete=False) == 1
        assert "UNEXPLAINED: a::other" in capsys.readouterr().out
