"""What the wrappers of both frameworks answer to options that they do not have."""

from __future__ import annotations

from typing import Any

import pytest

__all__ = ["MISSPELT", "assert_answered", "assert_subclass_has_options_of_its_own"]

#: Options of an `EASGD` wrapper that it does not have, and what the error advises.
MISSPELT = pytest.mark.parametrize(
    ("wrong", "advice"),
    [
        ("evry", "did you mean 'every'?"),
        ("bta", "did you mean 'beta'?"),
        ("server", "did you mean 'servers'?"),
        ("groupsize", "did you mean 'group_size'?"),
        ("zzz", "its options are all_reduce, alpha, beta, "),
    ],
)


def assert_answered(wrapper: Any, optimizer: Any, wrong: str, advice: str) -> None:
    """Make an `EASGD` wrapper with a wrong option; the error must advise."""
    with pytest.raises(TypeError) as caught:
        wrapper(optimizer, **{wrong: 2})
    assert str(caught.value).startswith(f"EASGD() got an unexpected keyword argument {wrong!r}; {advice}")


def assert_subclass_has_options_of_its_own(wrapper: Any, optimizer: Any) -> None:
    """Make a subclass with an option of its own, which the error must know, too."""

    class Louder(wrapper):
        def __init__(self, optimizer, *, volume, **options):
            super().__init__(optimizer, **options)
            self.volume = volume

    assert Louder(optimizer, volume=3, every=2).volume == 3
    with pytest.raises(TypeError, match=r"Louder\(\) got .* 'volum'; did you mean 'volume'?"):
        Louder(optimizer, volume=3, volum=2)
