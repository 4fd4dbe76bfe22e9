"""The toy jets and toy showers of the examples are what they are said to be."""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

h5py = pytest.importorskip("h5py", reason="the environment for MPICH has no h5py")

import jets as reader  # noqa: E402
import toy_calo  # noqa: E402
import toy_jets  # noqa: E402

COLUMN = {name.removeprefix("j1_"): index for index, name in enumerate(toy_jets.PARTICLE_FEATURES)}
JET = {name.removeprefix("j_"): index for index, name in enumerate(toy_jets.JET_FEATURES)}


@pytest.fixture(scope="module")
def made():
    particles, jets = toy_jets.make_jets(1000, seed=3)
    return {name: particles[..., at].astype("f8") for name, at in COLUMN.items()}, jets


def test_equal_seeds_give_equal_jets():
    one, same, other = (toy_jets.make_jets(20, seed) for seed in (5, 5, 6))
    assert all(np.array_equal(*pair) for pair in zip(one, same, strict=True))
    assert not np.array_equal(one[0], other[0])


def test_classes_are_balanced_and_in_no_order(made):
    _, jets = made
    one_hot = jets[:, -6:-1]
    assert one_hot.sum(axis=0).tolist() == [200] * 5
    assert (one_hot.sum(axis=1) == 1).all()
    assert not jets[:, JET["undef"]].any()
    assert len({tuple(row) for row in one_hot[:20]}) == 5


def test_particles_are_sorted_and_padded_with_zeros(made):
    particles, jets = made
    pt, energy = particles["pt"], particles["e"]
    assert (np.diff(pt, axis=1) <= 0).all()
    assert ((pt > 0).sum(axis=1) == np.minimum(jets[:, JET["multiplicity"]], toy_jets.PARTICLES)).all()
    assert (energy[pt > 0] > 0).all()
    for values in particles.values():
        assert np.isfinite(values).all()
        assert not values[pt == 0].any()


def test_fewer_particles_are_the_hardest():
    whole, few = (toy_jets.make_jets(10, 5, particles=many)[0] for many in (150, 20))
    few_pt = few[..., COLUMN["pt"]]
    assert np.array_equal(few_pt, whole[:, :20, COLUMN["pt"]])


def test_the_columns_are_those_of_the_four_vectors(made):
    column, jets = made
    real = column["pt"] > 0
    close = {"rtol": 1e-3, "atol": 2e-4}
    np.testing.assert_allclose(np.hypot(column["px"], column["py"]), column["pt"], **close)
    np.testing.assert_allclose(np.arctan2(column["py"], column["px"])[real], column["phi"][real], **close)
    size = np.sqrt(sum(column[name] ** 2 for name in ("px", "py", "pz")))
    np.testing.assert_allclose((size * column["costheta"])[real], column["pz"][real], **close)
    np.testing.assert_allclose(np.hypot(column["etarel"], column["phirel"]), column["deltaR"], **close)
    whole = {name: column[name].sum(axis=1) for name in ("px", "py", "pz", "e")}
    pt = np.hypot(whole["px"], whole["py"])
    np.testing.assert_allclose(jets[:, JET["pt"]], pt, rtol=1e-4)
    np.testing.assert_allclose(jets[:, JET["eta"]], np.arcsinh(whole["pz"] / pt), **close)
    mass = np.sqrt(whole["e"] ** 2 - pt**2 - whole["pz"] ** 2)
    np.testing.assert_allclose(jets[:, JET["mass"]], mass, rtol=0.02)
    np.testing.assert_allclose(column["erel"].sum(axis=1), 1, rtol=1e-4)
    np.testing.assert_allclose(column["ptrel"] * pt[:, None], column["pt"], **close)


def test_turned_upright_a_jet_is_no_wider_than_high(made):
    column, _ = made
    weight = column["pt"] / column["pt"].sum(axis=1, keepdims=True)
    (width, height), mixed = (
        [(weight * column[name] ** 2).sum(axis=1) for name in ("etarot", "phirot")],
        (weight * column["etarot"] * column["phirot"]).sum(axis=1),
    )
    assert (width <= height * 1.0001).all()
    assert (abs(mixed) < 1e-3 * height + 1e-6).all()
    assert not column["etarot"][:, 0].any()  # the hardest particle is the origin


def test_jets_look_like_what_they_come_from(made):
    _, jets = made
    of = {name: jets[jets[:, JET[name]] == 1] for name in toy_jets.CLASSES}
    mass = {name: np.median(some[:, JET["mass"]]) for name, some in of.items()}
    assert mass["w"] == pytest.approx(80.4, rel=0.1)
    assert mass["z"] == pytest.approx(91.2, rel=0.1)
    assert mass["t"] == pytest.approx(172.5, rel=0.1)
    many = {name: some[:, JET["multiplicity"]].mean() for name, some in of.items()}
    assert many["g"] > many["t"] > max(many["w"], many["z"], many["q"])
    assert 950 < np.median(jets[:, JET["pt"]]) < 1080
    assert 40 < jets[:, JET["multiplicity"]].mean() < 60


def test_the_files_have_the_layout_of_the_real_ones(tmp_path):
    paths = toy_jets.provide(tmp_path, jets=25, files=2, seed=4)
    rows = []
    for path in paths:
        with h5py.File(path) as file:
            assert set(file) == {"jetConstituentList", "jets", "jetFeatureNames", "particleFeatureNames"}
            rows.append(len(file["jets"]))
            assert file["jetConstituentList"].shape == (rows[-1], 150, 16)
            assert [name.decode() for name in file["jetFeatureNames"]] == list(toy_jets.JET_FEATURES)
            assert [name.decode() for name in file["particleFeatureNames"]][14:] == [
                *("j1_costheta", "j1_costhetarel", "j1_pdgid")
            ]
    assert rows == [12, 13]


def test_files_are_made_once_and_are_equal_for_equal_seeds(tmp_path):
    with ThreadPoolExecutor(4) as pool:
        (paths, *others) = pool.map(lambda _: toy_jets.provide(tmp_path / "a", 20, 2), range(4))
    assert others == [paths] * 3
    times = [path.stat().st_mtime_ns for path in paths]
    assert toy_jets.provide(tmp_path / "a", 20, 2) == paths
    assert [path.stat().st_mtime_ns for path in paths] == times
    again = toy_jets.provide(tmp_path / "b", 20, 2)
    assert [path.read_bytes() for path in paths] == [path.read_bytes() for path in again]
    assert paths[0].read_bytes() != paths[1].read_bytes()
    assert not list(tmp_path.rglob("*.part"))


def test_jets_of_another_kind_are_not_mixed_in(tmp_path):
    toy_jets.provide(tmp_path, 10)
    with pytest.raises(SystemExit, match=r"toy_jets_seed0_0_10\.h5; delete them or name another folder"):
        toy_jets.provide(tmp_path, 20)


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["toy_jets.py", str(tmp_path), "--jets", "9", "--files", "2"])
    toy_jets.main()
    assert "9 jets in" in capsys.readouterr().out
    assert len(list(tmp_path.glob("*.h5"))) == 2
    monkeypatch.setattr(sys, "argv", ["toy_jets.py", str(tmp_path), "--jets", "1", "--files", "2"])
    with pytest.raises(SystemExit):
        toy_jets.main()
    assert "--files 2: choose from 1 to --jets 1" in capsys.readouterr().err


def test_features_are_standardised_and_padding_stays_zero(tmp_path):
    (path,) = toy_jets.provide(tmp_path, 100)
    adapt = reader.Standardised(path, 20)
    with h5py.File(path) as file:
        given = file["jetConstituentList"][:]
        labels = reader.classes(file["jets"][:])
    rows = adapt(given)
    assert rows.shape == (100, 20, 16)
    assert rows.dtype == np.float32
    real = given[:, :20, COLUMN["pt"]] > 0
    np.testing.assert_allclose(rows[real].mean(axis=0), 0, atol=1e-3)
    np.testing.assert_allclose(rows[real].std(axis=0), 1, atol=1e-3)
    assert not rows[~real].any()
    assert np.bincount(labels).tolist() == [20] * 5


def test_a_folder_without_jets_is_named(tmp_path):
    with pytest.raises(SystemExit, match=r"there is no train/\*\.h5 or no val/\*\.h5 in it"):
        reader.files(argparse.Namespace(data=str(tmp_path)))


def test_showers_deposit_their_energy():
    cells, energy = toy_calo.make_showers(300, seed=1)
    seen = cells.sum(axis=(1, 2, 3))
    assert seen.mean() == pytest.approx(1, abs=0.01)
    assert 0.005 < seen.std() < 0.05
    depth = (cells.sum(axis=(2, 3)) * np.arange(toy_calo.LAYERS)).sum(axis=1) / seen
    low, high = energy[:, 0] < 30, energy[:, 0] > 80
    assert depth[high].mean() > depth[low].mean() + 0.3  # it grows with the logarithm of the energy
    assert np.array_equal(cells, toy_calo.make_showers(300, seed=1)[0])


def test_differences_see_what_is_different():
    true, _ = toy_calo.make_showers(300, seed=1)
    other, _ = toy_calo.make_showers(300, seed=2)
    near = toy_calo.differences(other, true)
    assert all(value < 0.02 for value in near.values())
    assert toy_calo.differences(true, true) == {"along": 0, "across": 0, "response": 0}
    assert toy_calo.differences(true * 1.2, true)["response"] == pytest.approx(0.2, rel=0.02)
    late = toy_calo.differences(np.roll(true, 2, axis=1), true)
    assert late["along"] > 0.2
    assert late["across"] == pytest.approx(0, abs=1e-6)
    shifted = toy_calo.differences(np.roll(true, 2, axis=2), true)
    assert shifted["across"] > 0.2
    assert shifted["along"] == pytest.approx(0, abs=1e-6)
