"""Models that a script saves on several ranks: once by `distribute.save`; `model.save` is warned of."""

from __future__ import annotations

import json
import os
import types
import warnings

import pytest

from nnlo_common import ConfigurationError
from nnlo_common.base import _errors
from tests.helpers.jobs import mpiexec
from tests.helpers.paths import PROGRAMS

keras = pytest.importorskip("keras", reason="the environment for MPICH has no frameworks")
import nnlo_keras as nk  # noqa: E402
from nnlo_keras import _callback_lists  # noqa: E402

pytestmark = [
    pytest.mark.framework("keras"),
    # Keras 3.15 itself, with NumPy 2: Variable.__array__ takes no copy argument.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(_errors, "_SHOWN", {})
    # Models of earlier tests are watched until they are collected, which may be within this test.
    for earlier in [*_callback_lists._saves._watched]:
        _callback_lists._saves._forget(earlier)
    monkeypatch.setattr(_callback_lists, "_saves", _callback_lists._SavedModels())
    before = {name: getattr(keras.Model, name) for name in _callback_lists._METHODS}
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    yield model
    _callback_lists._saves._forget(id(model))
    assert {name: getattr(keras.Model, name) for name in _callback_lists._METHODS} == before


def said(model, save, rank=1):
    _callback_lists.warn_of_saves(model, types.SimpleNamespace(rank=rank))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        save(model)
        save(model)
    return [str(one.message) for one in caught if "all other ranks" in str(one.message)]


@pytest.mark.parametrize(("method", "name"), [("save", "m.keras"), ("save_weights", "m.weights.h5")])
def test_a_file_that_all_ranks_write_is_named_once(model, method, name, tmp_path):
    path = tmp_path / "out" / name
    path.parent.mkdir()
    (text,) = said(model, lambda model: getattr(model, method)(path))
    assert text.startswith(f"rank 1 writes {path} by model.{method}")
    assert f'write distribute.save("{path}")' in text
    assert path.stat().st_size > 0  # it has been saved


def test_a_file_by_keyword_is_seen(model, tmp_path):
    (tmp_path / "out").mkdir()
    assert len(said(model, lambda model: model.save(filepath=tmp_path / "out" / "m.keras"))) == 1


def test_what_no_other_rank_writes_is_not(model, tmp_path):
    (tmp_path / "out").mkdir()
    assert said(model, lambda model: model.save(tmp_path / "out" / "m.keras"), rank=0) == []
    assert said(model, lambda model: model.save(tmp_path / "out" / "m-1.keras")) == []
    (tmp_path / "tmpab_45678").mkdir()
    assert said(model, lambda model: model.save(tmp_path / "tmpab_45678" / "m.keras")) == []
    other = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    _callback_lists.warn_of_saves(model, types.SimpleNamespace(rank=1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        other.save(tmp_path / "out" / "m.keras")
    assert [one for one in caught if "all other ranks" in str(one.message)] == []


def test_before_fit_it_says_what_to_do():
    with pytest.raises(ConfigurationError, match=r"distribute.save\('m.keras'\) before fit\(\)"):
        nk.Distribute().save("m.keras")


def test_alone_it_saves_model_and_weights(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    distribute = nk.Distribute()
    distribute.set_model(model)
    for name in ("m.keras", "m.weights.h5"):
        distribute.save(tmp_path / name)
    assert distribute.speaks
    assert sorted(one.name for one in tmp_path.iterdir()) == ["m.keras", "m.weights.h5"]


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("servers", [1, 0])
def test_on_ranks_one_writes_and_the_second_warns(tmp_path, servers):
    backend = {"KERAS_BACKEND": os.environ.get("KERAS_BACKEND", "torch"), "TF_CPP_MIN_LOG_LEVEL": "3"}
    (tmp_path / "out").mkdir()
    done = mpiexec(
        3, PROGRAMS / "keras_saved.py", str(tmp_path / "out"), str(servers), timeout_s=180, env=backend
    )
    assert done.returncode == 0, done.stderr
    told = [json.loads((tmp_path / "out" / f"{rank}.json").read_text()) for rank in range(3)]
    assert [one["speaks"] for one in told] == [True, False, False]
    assert [one["written"] for one in told] == [True, False, False]
    assert [len(one["warnings"]) for one in told] == [0, 1, 0]
    assert "rank 1 writes " in told[1]["warnings"][0]
