"""Texts that ranks send each other when they begin: what is malformed is refused by name."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from nnlo_common import SGD, Downpour, Participant, ProtocolError
from nnlo_common.cluster.transport._deaths import ProcessAddress
from nnlo_common.search._partition import agree
from nnlo_common.testing import MemoryCluster
from nnlo_common.testing._memory import MemoryWorld

ADDRESS = ProcessAddress("node7", "pid:[4026531836]", 1234, "nnlo-1", "nnlo-2")
#: No JSON, JSON of other kinds, and JSON that Python's parser cannot take.
TEXTS = [
    "",
    "}",
    "[]",
    "3",
    "null",
    '"node7"',
    "{}",
    '{"host": 1}',
    "[" * 100_000,
    "1" * 5000,
    '{"facts": 1}',
]


def test_an_address_survives_its_text():
    assert ProcessAddress.of_text(ADDRESS.to_text(), "it") == ADDRESS


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_that_is_no_address_is_refused(text):
    with pytest.raises(ProtocolError, match="the address of rank 3"):
        ProcessAddress.of_text(text, "the address of rank 3")


@pytest.mark.parametrize(
    "damage",
    [{"pid": "1234"}, {"pid": 1.5}, {"pid": True}, {"pid": 0}, {"pid": -1}, {"host": None}, {"more": 1}],
    ids=str,
)
def test_an_address_with_an_impossible_field_is_refused(damage):
    text = json.dumps(json.loads(ADDRESS.to_text()) | damage)
    with pytest.raises(ProtocolError, match="the address of rank 3"):
        ProcessAddress.of_text(text, "the address of rank 3")


@pytest.mark.parametrize("text", [*TEXTS, '{"facts": {}, "here": {}}', '{"facts": [], "here": {"host": 1}}'])
def test_what_a_rank_of_a_search_says_about_itself_is_refused(text):
    world = SimpleNamespace(gather_text=lambda mine: [mine, text], own_process=False, size=2, rank=0)
    with pytest.raises(ProtocolError, match="what rank 1 says about itself"):
        agree(world, 1, {"folds": 3})


@pytest.mark.parametrize("turn", [1, 2])
@pytest.mark.parametrize("text", TEXTS[:6])
def test_what_a_rank_of_a_training_says_is_refused(text, turn, monkeypatch):
    gather, turns = MemoryWorld.gather_text, []

    def gather_text(world, mine):
        everyone = gather(world, mine)
        if world.rank == 0:
            turns.append(mine)
        return [*everyone[:-1], text] if world.rank == 0 and len(turns) == turn else everyone

    monkeypatch.setattr(MemoryWorld, "gather_text", gather_text)

    def program(world):
        with Participant(Downpour(), [np.ones(2, "f4")], optimizer=SGD(0.1), world=world) as me:
            return [me.step() for _ in me.batches(range(2))]

    with MemoryCluster(2) as cluster, pytest.raises(ProtocolError, match="rank 1 is malformed"):
        cluster.run(program, 180)
