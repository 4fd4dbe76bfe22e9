"""K-fold splits: every sample validates once, in even parts, with its label's share and its whole group."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("optuna", reason="the environment for MPICH has no Optuna")
from nnlo_common import ConfigurationError
from nnlo_common.search.block._folds import split


def parts(samples, folds, **options):
    """The validation part of each fold, after a look at what holds for all."""
    found = []
    for fold in range(folds):
        training, validation = split(samples, folds, fold, **options)
        assert np.all(np.diff(training) > 0)
        assert np.all(np.diff(validation) > 0)
        assert sorted([*training, *validation]) == list(range(samples))
        assert len(validation)
        found.append(validation)
    assert sorted(np.concatenate(found)) == list(range(samples))
    return found


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 9), st.integers(0, 60), st.integers(0, 2**32 - 1))
def test_each_sample_validates_once_in_parts_that_differ_by_one(folds, more, seed):
    sizes = [len(part) for part in parts(folds + more, folds, seed=seed)]
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 5), st.lists(st.integers(0, 12), min_size=1, max_size=5), st.integers(0, 99))
def test_each_fold_has_its_part_of_every_label(folds, more, seed):
    labels = np.repeat(np.arange(len(more)), [folds + count for count in more])
    labels = np.random.default_rng(seed).permutation(labels)
    found = parts(len(labels), folds, labels=labels, seed=seed)
    sizes = [len(part) for part in found]
    assert max(sizes) - min(sizes) <= 1
    for label in range(len(more)):
        counts = [int(np.sum(labels[part] == label)) for part in found]
        assert max(counts) - min(counts) <= 1


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 5), st.lists(st.integers(1, 9), min_size=5, max_size=15), st.booleans())
def test_no_group_is_in_both(folds, sizes, stratified):
    groups = np.repeat(np.arange(len(sizes)), sizes)
    labels = np.arange(len(groups)) % 2 if stratified and len(groups) >= 2 * folds else None
    found = parts(len(groups), folds, labels=labels, groups=groups)
    homes = [set(groups[part]) for part in found]
    assert sum(map(len, homes)) == len(sizes)
    if labels is None:  # the largest first leaves no more than one group between any two
        counts = [len(part) for part in found]
        assert max(counts) - min(counts) <= max(sizes)


def test_groups_keep_the_share_of_labels_where_they_can():
    groups = np.repeat([f"run {number}" for number in range(12)], 10)
    labels = np.repeat(["signal", "background", "background"] * 4, 10)
    for part in parts(120, 4, labels=labels, groups=groups):
        assert np.sum(labels[part] == "signal") == 10
        assert len(part) == 30


def test_a_seed_repeats_and_another_splits_differently():
    first, again, other = (split(50, 5, 0, seed=seed)[1].tolist() for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"samples": 3, "folds": 4, "fold": 0}, "folds=4 of 3 samples would leave some empty"),
        ({"samples": 3, "folds": 1, "fold": 0}, "folds=1"),
        ({"samples": 9, "folds": 3, "fold": 3}, "fold=3 of folds=3: give 0 to 2"),
        (
            {"samples": 5, "folds": 2, "fold": 0, "labels": list("aaaab")},
            "'b' has 1 of 5 samples, too few for one in each fold",
        ),
        ({"samples": 4, "folds": 3, "fold": 0, "groups": [0, 0, 1, 1]}, "folds=3 of 2 groups"),
        ({"samples": 4, "folds": 2, "fold": 0, "groups": [0, 1]}, r"groups of shape \(2,\) for 4 samples"),
        ({"samples": 4, "folds": 2, "fold": 0, "labels": np.eye(4)}, r"one-hot rows labels.argmax\(1\)"),
    ],
)
def test_what_cannot_be_split_is_refused(options, said):
    with pytest.raises(ConfigurationError, match=said):
        split(**options)
