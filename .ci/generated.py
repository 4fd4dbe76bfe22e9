"""Files that follow from the algorithms' declarations: stubs for editors, and tables of options in the docs.

`python .ci/generated.py` writes them; `python .ci/generated.py --check` fails if one is stale. Without
PyTorch or Keras the stub of its wrappers is left as it is.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import types
import typing
from collections import Counter
from collections.abc import Iterator
from dataclasses import MISSING
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from nnlo_common.algorithms._found import ALGORITHMS, HOMES  # noqa: E402
from nnlo_common.base._options import Declared, declared  # noqa: E402
from nnlo_common.commands.train._settings import MODE_OPTIONS, OPTIONS  # noqa: E402

MADE = "# Written by `make generated` from the declarations of the algorithms; change those instead.\n"
HEADS = {
    "docs/algorithms.md": "| algorithm | option | default | may be | what it does | wrappers, `nnlo train` |",
    "docs/train.md": "| flag | default | what it does |",
}


# -- stubs ------------------------------------------------------------------------------------------


def stub_of_core() -> str:
    """Return the stub with the names of all algorithms."""
    imports = [f"from {module} import {name} as {name}\n" for name, module in HOMES.items()]
    imports.append("from nnlo_common.algorithms._rule import Algorithm\n")
    public = "".join(f'    "{name}",\n' for name in HOMES)
    head = "from collections.abc import Mapping\nfrom typing import Final\n"
    facts = "ALGORITHMS: Final[Mapping[str, type[Algorithm]]]\nHOMES: Final[Mapping[str, str]]\n"
    return f"{MADE}\n{head}\n{''.join(sorted(imports))}\n__all__ = [\n{public}]\n\n{facts}"


def stub_of_wrappers(package: str) -> str:
    """Return the stub with the constructors of a framework's wrappers."""
    module = importlib.import_module(f"{package}._wrappers")
    imports: dict[str, set[str]] = {f"{package}._wrapper": {"Wrapper"}, "nnlo_common.plugin": {"Algorithm"}}
    imports["collections.abc"] = {"Callable"}
    wrappers = [name for name in sorted(module.__all__) if name != "wrapper"]
    classes = [class_of(getattr(module, name), imports) for name in wrappers]
    lines = (f"from {one} import {', '.join(sorted(names))}\n" for one, names in imports.items())
    ours = sorted(lines, key=lambda line: (order_of(line), line))
    blocks = "\n".join("".join(line for line in ours if order_of(line) == part) for part in range(3))
    names = "".join(f'    "{name}",\n' for name in sorted(module.__all__))
    text = f"{MADE}\n{blocks}\n__all__ = [\n{names}]\n\n{''.join(classes)}"
    return (
        re.sub(r"\n{3,}", "\n\n", text)
        + "def wrapper(algorithm: type[Algorithm]) -> Callable[..., Wrapper]: ...\n"
    )


def order_of(line: str) -> int:
    """Return the block of an import: the standard library, other packages, ours."""
    top = re.split(r"[ .]", line)[1]
    return 2 if top.startswith("nnlo_") else 0 if top in sys.stdlib_module_names else 1


def class_of(wrapper: Any, imports: dict[str, set[str]]) -> str:
    """Return a class with its constructor."""
    make = wrapper.__init__
    lines = ["        self,\n"]
    for one in list(make.__signature__.parameters.values())[1:]:
        star = "        *,\n" if one.kind is one.KEYWORD_ONLY and "        *,\n" not in lines else ""
        default = "" if one.default is one.empty else f" = {one.default!r}".replace("'", '"')
        lines += [star] * bool(star) + [f"        {one.name}: {text_of(one.annotation, imports)}{default},\n"]
    doc = "".join(f"        {line}".rstrip() + "\n" for line in make.__doc__.rstrip().splitlines()).lstrip()
    return (
        f"class {wrapper.__name__}(Wrapper):\n    def __init__(\n{''.join(lines)}    ) -> None:\n"
        f'        """{doc}        """\n\n'
    )


def text_of(annotation: Any, imports: dict[str, set[str]]) -> str:
    """Return a type as a person would write it, and note what it needs to be imported."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return " | ".join(text_of(one, imports) for one in typing.get_args(annotation))
    if typing.get_origin(annotation) is typing.Literal:
        imports.setdefault("typing", set()).add("Literal")
        return f"Literal[{', '.join(map(repr, typing.get_args(annotation)))}]".replace("'", '"')
    if annotation is types.NoneType:
        return "None"
    if annotation.__module__ != "builtins":
        imports.setdefault(public_module(annotation), set()).add(annotation.__name__)
    return str(annotation.__name__)


def public_module(thing: Any) -> str:
    """Return the outermost package that has a class: that which people import it from."""
    parts = thing.__module__.split(".")
    outer = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return next(one for one in outer if getattr(importlib.import_module(one), thing.__name__, None) is thing)


# -- tables -----------------------------------------------------------------------------------------


def rows_of_algorithms() -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table in docs/algorithms.md: those of most algorithms come first, once."""
    rows = {algorithm: list(own_rows(algorithm)) for algorithm in ALGORITHMS.values()}
    everywhere = set.intersection(*({row[0] for row in found} for found in rows.values()))
    counts = Counter(row for found in rows.values() for row in found if row[0] in everywhere)
    shared = [row for row, count in counts.items() if 2 * count > len(rows)]
    yield from with_name("all, unless said below", shared)
    for algorithm, found in rows.items():
        parents = [one for one in algorithm.__mro__[1:] if one in rows]
        told = [*shared, *(row for parent in parents for row in rows[parent])]
        name = f"`{algorithm.__name__}`" + "".join(f": as `{parent.__name__}`, but" for parent in parents[:1])
        yield from with_name(name, [row for row in found if row not in told] or [("",) * 5])


def own_rows(algorithm: Any) -> Iterator[tuple[str, ...]]:
    """Yield what is told of each option of an algorithm."""
    for one in (*algorithm.shorthands, *declared(algorithm).values()):
        default = "" if one.default is MISSING else f"`{one.default!r}`".replace("'", '"')
        yield f"`{one.field or one.name}`", default, values_of(one), one.help, taken(one)


def with_name(name: str, rows: list[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Yield the rows, the first behind the name."""
    for row in rows:
        yield name, *row
        name = ""


def values_of(one: Declared) -> str:
    """Return the values that an option may have."""
    texts = [text for text in typing.get_args(one.type) if typing.get_origin(text) is typing.Literal]
    others = [f"`{text!r}`" for literal in texts for text in typing.get_args(literal)]
    others += ["`None`"] if types.NoneType in typing.get_args(one.type) else []
    return ", or ".join([re.sub(r"('\w+'|True|False)", r"`\1`", one.expected), *others])


def taken(one: Declared) -> str:
    """Return whether wrappers take an option, and as what."""
    if one.absent:
        return one.absent
    if not one.field:
        return "yes; no option of the core"
    return "yes" if one.name == one.field else f"`{one.name}`"


def rows_of_train() -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table in docs/train.md."""
    for option in OPTIONS.values():
        default = "" if option.default in (None, ()) else option.default
        default = {"True": "yes", "False": "no"}.get(str(default), default)
        text = option.help
        if option.choices and option.name not in MODE_OPTIONS:
            text += f": {', '.join(option.choices)}"
        yield f"`{option.flag}`", str(default), text.replace("|", "\\|")


def with_table(page: str, rows: Iterator[tuple[str, ...]]) -> str:
    """Return a page with the rows of its table anew."""
    head, text = HEADS[page], (ROOT / page).read_text()
    before, found, after = text.partition(f"{head}\n")
    if not found:
        raise LookupError(f"{page} has no table {head}")
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    rule = "|" + "---|" * (head.count("|") - 1) + "\n"
    return before + found + rule + table + re.sub(r"\A(\|.*\n)+", "", after)


# -- all of them ------------------------------------------------------------------------------------


def generated() -> dict[str, str]:
    """Return the text of each file that can be made here."""
    found = {
        "nnlo_common/algorithms/_found.pyi": stub_of_core(),
        "docs/algorithms.md": with_table("docs/algorithms.md", rows_of_algorithms()),
        "docs/train.md": with_table("docs/train.md", rows_of_train()),
    }
    for framework in ("torch", "keras"):
        if importlib.util.find_spec(framework) is not None:
            package = f"nnlo_{framework}"
            found[f"{package}/_wrappers.pyi"] = stub_of_wrappers(package)
    return found


def stale() -> list[str]:
    """Return the files that are not as the declarations make them."""
    paths = {name: (ROOT / name, text) for name, text in generated().items()}
    return [name for name, (path, text) in paths.items() if not path.is_file() or path.read_text() != text]


if __name__ == "__main__":
    if "--check" not in sys.argv[1:]:
        for path, content in generated().items():
            (ROOT / path).write_text(content)
    elif found := stale():
        sys.exit(f"stale: {', '.join(found)}; run make generated")
