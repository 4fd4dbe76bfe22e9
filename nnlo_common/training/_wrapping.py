"""Constructors of the wrappers: made of an algorithm's declarations, for the optimizers of every framework.

A framework package has one `Wrapper`, which takes an optimizer and an algorithm; a class for an algorithm is
`class EASGD(Wrapper, algorithm=nnlo_common.EASGD)`, and gets its constructor here.
"""

from __future__ import annotations

import difflib
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, Literal, TypeVar

import numpy as np

from nnlo_common.algorithms._found import ALGORITHMS
from nnlo_common.algorithms._rule import Algorithm
from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._options import Declared
from nnlo_common.training._rank_options import RANK_OPTIONS, RankOptions, rank_options_for

__all__ = ["AS_YOURS", "WrapperBase", "wrapper_class"]

#: Take the learning rate of local steps from the wrapped optimizer.
AS_YOURS: Final = "as yours"

_YOURS: Final[Mapping[str, str]] = {
    "center": "yours; it runs on the server.",
    "worker": "yours; it runs on every worker.",
    "nowhere": "the framework's SGD with momentum{}, and nothing else. It makes no steps: the algorithm "
    "takes its learning rate and momentum.",
}
_OF_WRAPPER = (
    "self",
    "optimizer",
    "algorithm",
    "own",
    "local",
    "ranks",
)  # the others are options of all wrappers

WrapperT = TypeVar("WrapperT", bound="WrapperBase")


class WrapperBase:
    """Base of a framework's `Wrapper`, which fills both methods."""

    #: The algorithm of this class.
    _kind: ClassVar[type[Algorithm]]

    def __init_subclass__(cls, *, algorithm: type[Algorithm] | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        if algorithm is not None:
            cls._kind = algorithm
            if "__init__" not in vars(cls):
                setattr(cls, "__init__", _constructor(cls, algorithm))  # noqa: B010 - mypy refuses the plain one

    def _wrap(
        self,
        optimizer: Any,
        algorithm: Algorithm,
        own: dict[str, Any],
        ranks: RankOptions,
        local: Any = None,
        **common: Any,
    ) -> None:
        """Wrap an optimizer.

        Args:
            optimizer: the user's.
            algorithm: how it is exchanged; it makes no local steps by itself.
            own: the options of the constructor, as the algorithm declares them.
            ranks: what the user says of the ranks.
            local: moves a worker's weights between exchanges: a learning rate, `AS_YOURS` or an optimizer.
            common: options that all wrappers of the framework take.
        """
        raise NotImplementedError

    def _momentum(self, optimizer: Any, *, nesterov: bool) -> float:
        """Return the momentum of a plain momentum SGD; refuse any other optimizer."""
        raise NotImplementedError

    def _begin_wrapper(self, kind: type[Algorithm], optimizer: Any, options: dict[str, Any]) -> None:
        """Wrap an optimizer with the options of a constructor."""
        known, common = kind.wrapper_options(), _common(type(self)).keys() | RANK_OPTIONS.keys()
        given = {name: _plain(options.pop(name)) for name in known if name in options}
        for name in options:
            if name not in common:
                own_taken = inspect.signature(type(self).__init__).parameters.values()  # of a subclass, too
                keywords = {one.name for one in own_taken if one.kind is one.KEYWORD_ONLY}
                _refuse_unknown(type(self).__name__, name, sorted({*keywords, *known, *common}))
        ranks = RankOptions.taken_from(options, type(self).__name__, _package(type(self)))
        own = {name: given.get(name, one.wrapper_default) for name, one in known.items()}
        moves, local = kind.local_option(), None
        checked = {**own}
        if moves is not None:
            local = own[moves.name]
            if moves.local == "optimizer":  # it may be one of the framework, which has to look at it
                del checked[moves.name]
            elif local is None:
                local = AS_YOURS
        taken = {}
        if kind.made_of:
            taken["momentum"] = self._momentum(optimizer, nesterov=kind.made_of == "nesterov")
        rule = kind.of_options(checked, **taken).with_local_rate(0.0)
        own = {name: one for name, one in own.items() if not _left_out(known[name], one)}
        self._wrap(optimizer, rule, own, ranks, local, **options)


def wrapper_class(
    base: type[WrapperT], algorithm: type[Algorithm], module: str, example: str = ""
) -> type[WrapperT]:
    """Return a framework's wrapper class for an algorithm, whose docstring begins like the algorithm's.

    Args:
        base: the framework's `Wrapper`.
        algorithm: the algorithm.
        module: where the class will be found.
        example: for the docstring; `NAME` is the algorithm's name, `MOMENTUM` what its SGD needs.
    """
    name, first = algorithm.__name__, (inspect.getdoc(algorithm) or algorithm.__name__).partition("\n\n")[0]
    momentum = {"": "", "momentum": ", momentum=0.9", "nesterov": ", momentum=0.9, nesterov=True"}
    shown = example.replace("NAME", name).replace("MOMENTUM", momentum[algorithm.made_of])
    text = f"{first}\n\nSee `nnlo_common.{name}`.\n{shown}"
    space = {"__doc__": text, "__module__": module, "__qualname__": name}
    bases, options = (base,), {"algorithm": algorithm}
    made: type[WrapperT] = types.new_class(name, bases, options, lambda own: own.update(space))
    return made


def _constructor(wrapper: type[WrapperBase], kind: type[Algorithm]) -> Callable[..., None]:
    """Return the `__init__` of a class, with the signature and docstring that its options make."""

    def __init__(self: WrapperBase, optimizer: Any, **options: Any) -> None:
        self._begin_wrapper(kind, optimizer, options)

    base = next(one for one in wrapper.__mro__ if one is not wrapper and "__init__" in vars(one))
    yours = _hints(base)["optimizer"]
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD),
        inspect.Parameter("optimizer", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=yours),
    ]
    nesterov = " and nesterov=True" if kind.made_of == "nesterov" else ""
    told = {"optimizer": _YOURS[kind.optimizer_runs].format(nesterov)}
    for name, one in {**kind.wrapper_options(), **rank_options_for(_package(wrapper))}.items():
        annotation = _annotation(one, yours)
        parameters.append(
            inspect.Parameter(name, keyword, default=one.wrapper_default, annotation=annotation)
        )
        told[name] = _meaning(one)
    common = _common(wrapper)
    parameters += common.values()
    told |= {name: text for name, text in _explained(wrapper).items() if name in common}
    lines = "".join(_paragraph(name, text) for name, text in told.items())
    __init__.__doc__ = f"Wrap an optimizer.\n\nArgs:\n{lines}"
    __init__.__annotations__ = {one.name: one.annotation for one in parameters[1:]} | {"return": None}
    __init__.__qualname__, __init__.__module__ = f"{wrapper.__qualname__}.__init__", wrapper.__module__
    signature = inspect.Signature(parameters, return_annotation=None)
    __init__.__signature__ = signature  # type: ignore[attr-defined]
    return __init__


def _annotation(one: Declared, yours: Any) -> Any:
    """Return the type of an option in wrappers."""
    if one.local == "optimizer":
        return typing.Union[one.type, yours, None]  # noqa: UP007 - the framework's class may be Any
    return one.type | None if one.wrapper_default is None else one.type


def _meaning(one: Declared) -> str:
    """Return the explanation of an option."""
    choices = f": {one.expected}" if typing.get_origin(one.type) is Literal else ""
    also = " Or an optimizer of the framework over the same parameters." if one.local == "optimizer" else ""
    return f"{one.help}{choices}.{also}"


def _common(wrapper: type[WrapperBase]) -> dict[str, inspect.Parameter]:
    """Return the options that all wrappers of a framework take, as its `Wrapper` declares them."""
    base = _framework_wrapper(wrapper)
    hints = _hints(base)
    return {
        name: one.replace(annotation=hints[name])
        for name, one in inspect.signature(base.__init__).parameters.items()
        if name not in _OF_WRAPPER
    }


def _framework_wrapper(wrapper: type[WrapperBase]) -> type[WrapperBase]:
    """Return the class whose constructor takes an algorithm."""
    return next(one for one in reversed(wrapper.__mro__) if WrapperBase in one.__bases__)


def _package(wrapper: type[WrapperBase]) -> str:
    """Return the name of the framework's package."""
    return _framework_wrapper(wrapper).__module__.partition(".")[0]


def _hints(base: type[WrapperBase]) -> dict[str, Any]:
    return typing.get_type_hints(_framework_wrapper(base).__init__)


def _explained(wrapper: type[WrapperBase]) -> dict[str, str]:
    """Return what the docstring of a framework's `Wrapper` says of its arguments."""
    _, _, text = (inspect.getdoc(_framework_wrapper(wrapper)) or "").partition("\nArgs:\n")
    block = text.partition("\n\n")[0]
    found = re.findall(r"^    (\w+): (.*(?:\n     .*)*)", block, re.MULTILINE)
    return {name: " ".join(words.split()) for name, words in found}


def _paragraph(name: str, text: str) -> str:
    indented = {"initial_indent": "    ", "subsequent_indent": "        "}
    return textwrap.fill(f"{name}: {text}", 98, **indented, break_on_hyphens=False) + "\n"  # type: ignore[arg-type]


def _refuse_unknown(wrapper: str, name: str, possible: list[str]) -> None:
    """Refuse a misspelt option as Python does, but name the nearest."""
    for other in ALGORITHMS.values():
        if name in (options := other.wrapper_options()) and options[name].elsewhere:
            raise ConfigurationError(f"{wrapper}: {name} {options[name].elsewhere}")
    near = difflib.get_close_matches(name, possible, 1)
    advice = f"did you mean {near[0]!r}?" if near else f"its options are {', '.join(possible)}"
    raise TypeError(f"{wrapper}() got an unexpected keyword argument {name!r}; {advice}")


def _left_out(one: Declared, value: object) -> bool:
    """Whether a configuration leaves an option out, such as one of a tree where there is none."""
    return (one.quiet or bool(one.elsewhere)) and value == one.wrapper_default


def _plain(value: Any) -> Any:
    """Return a number of NumPy as one of Python, so that it can be saved."""
    return value.item() if isinstance(value, np.generic) else value
