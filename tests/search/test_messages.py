"""Messages of a search on the wire: each survives, and a malformed one is refused by name."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnlo_common import ProtocolError
from nnlo_common.protocol import Lost
from nnlo_common.search import _search_messages as messages
from nnlo_common.search._channels import CoordinatorChannel, RankChannel
from nnlo_common.search._search_messages import Done, RequestAnswer, from_text, to_text

KINDS = [
    kind
    for name in messages.__all__
    if isinstance(kind := getattr(messages, name), type) and kind is not messages.SearchMessage
]
NUMBERS = st.floats(allow_nan=False) | st.integers(0, 2**53)
DETAILS = st.dictionaries(st.text(max_size=5), NUMBERS | st.text(max_size=5), max_size=3)
FIELDS = {
    "int": st.integers(-(2**53), 2**53),
    "float": NUMBERS,
    "str": st.text(max_size=9),
    "bool": st.booleans(),
    "Any": NUMBERS | st.none() | st.lists(NUMBERS, max_size=3) | DETAILS,
    "float | bool": NUMBERS | st.booleans(),
    "tuple[str, ...]": st.lists(st.text(max_size=5), max_size=3).map(tuple),
    "tuple[int, ...]": st.lists(st.integers(0, 99), max_size=3).map(tuple),
    "tuple[float, ...]": st.lists(NUMBERS, max_size=3).map(tuple),
    "tuple[tuple[int, ...], ...]": st.lists(st.tuples(st.integers(0, 99)), max_size=3).map(tuple),
    "tuple[Mapping[str, Any], ...]": st.lists(DETAILS, max_size=3).map(tuple),
    "Mapping[str, Any]": DETAILS,
    "Mapping[str, tuple[float, str]]": st.dictionaries(
        st.text(max_size=5), st.tuples(NUMBERS, st.text(max_size=5)), max_size=3
    ),
}
DONE: dict[str, Any] = {
    "kind": "Done",
    "run": 3,
    "state": "complete",
    "values": [0.5],
    "error": "",
    "failure": "",
}


class Letters:
    """A mailbox that holds some texts from rank 2."""

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)

    def send(self, peer: int, text: str) -> None:
        raise AssertionError(f"sent {text} to rank {peer}")

    def receive(self, timeout_s: float | None = None) -> tuple[int, str] | Lost | None:
        return (2, self.texts.pop(0)) if self.texts else None

    def close(self) -> None:
        """Nothing is under way."""


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_kind_of_message_survives_the_wire(kind: Any) -> None:
    @settings(max_examples=40)
    @given(st.builds(kind, **{one.name: FIELDS[one.type] for one in fields(kind)}))
    def survives(sent: Any) -> None:
        came = from_text(to_text(sent))
        assert came == sent
        assert type(came) is kind

    survives()


def test_numbers_that_are_not_finite_survive_the_wire() -> None:
    came = from_text(to_text(Done(0, "complete", (math.inf, -math.inf, math.nan))))
    assert repr(came) == repr(Done(0, "complete", (math.inf, -math.inf, math.nan)))


@pytest.mark.parametrize("value", [True, False, 0.0, 1.0])
def test_an_answer_stays_a_verdict_or_a_number(value: bool | float) -> None:
    came = from_text(to_text(RequestAnswer(1, value)))
    assert isinstance(came, RequestAnswer)
    assert type(came.value) is type(value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "the message from rank 2 is malformed: Expecting value.*; do all ranks run the same nnlo?"),
        ('{"kind": "Do', "the message from rank 2 is malformed"),
        ("[1]", r"the message from rank 2 is of kind None; expected one of \['Alarm', 'Choose'"),
        ("{}", "the message from rank 2 is of kind None; expected one of"),
        ('{"kind": "Greeting", "run": 1}', "the message from rank 2 is of kind 'Greeting'; expected one of"),
        ('{"kind": ["Done"], "run": 1}', r"is of kind \['Done'\]; expected one of"),
        (
            '{"kind": "Halt", "run": 1}',
            r"rank 2, 'Halt', has the fields \['run'\]; expected \['reason', 'run",
        ),
        (json.dumps({**DONE, "more": 1}), r"'Done', has the fields .*'more'.*; expected \['error'"),
        (json.dumps({**DONE, "run": "3"}), "'Done', has run='3'; expected int"),
        (json.dumps({**DONE, "run": True}), "'Done', has run=True; expected int"),
        (json.dumps({**DONE, "error": None}), "'Done', has error=None; expected str"),
        (json.dumps({**DONE, "values": 0.5}), r"'Done', has values=0.5; expected tuple\[float, ...\]"),
        (json.dumps({**DONE, "values": ["0.5"]}), r"'Done', has values=\['0.5'\]; expected tuple"),
        (
            '{"kind": "Chosen", "run": 1, "params": {"x": [0.5]}, "system": {}, "problem": ""}',
            "'Chosen', has params={'x': .*}; expected",
        ),
    ],
)
def test_a_malformed_message_is_refused_with_its_sender_and_what_was_wrong(text: str, problem: str) -> None:
    """Rank 0 reads the same letters as the ranks of a block."""
    with pytest.raises(ProtocolError, match=problem):
        CoordinatorChannel(Letters(text), [(1,), (2,)], ["a", "b", "c"]).receive(0)
    with pytest.raises(ProtocolError, match=problem):
        RankChannel(Letters(text), 0, (1, 2), 0).take_in(0)
