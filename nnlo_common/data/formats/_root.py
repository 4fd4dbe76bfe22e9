"""ROOT files with a TTree or an RNTuple, by uproot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.data._listing import without_tree
from nnlo_common.data._source import Array
from nnlo_common.data.formats._format import TEXT, Ragged, shown
from nnlo_common.data.formats._table import Column, Piece, TableFormat

__all__ = ["ROOT"]

# Rows of a piece, if the file's own are shorter: each decoding has a cost of its own.
_ROWS = 1000
_TREES = ("TTree", "ROOT::RNTuple", "TNtuple", "TNtupleD", "TChain")
_HOW = "write FILE:TREE"


class ROOT(TableFormat):
    """Reads branches of a tree, a cluster of baskets at a time."""

    title, suffixes, one = "ROOT", (".root",), "a ROOT file"
    begins, remote = b"root", True
    needs = ("uproot", "root")

    def table(self, path: str) -> _Tree:
        """Open a file."""
        import awkward  # noqa: F401 - uproot needs it for rows of unequal length
        import uproot

        place = without_tree(path)
        file = uproot.open(place if "://" in place else Path(place))
        try:
            return _Tree(file, _tree(file, place, path.removeprefix(place).lstrip(":")))
        except BaseException:
            file.close()
            raise


class _Tree:
    """An open tree.

    Args:
        file: of uproot.
        tree: in it.
    """

    groups: Mapping[str, Sequence[str]] = {}
    encoded = "ROOT"

    def __init__(self, file: Any, tree: Any) -> None:
        self._file, self._tree = file, tree
        size = int(tree.num_entries)
        if size < 0:
            raise ConfigurationError(f"the tree {tree.name!r} has {size} entries; make the file again")
        self.columns = _Branches(tree)
        self.starts = _starts(tree, size)

    def decode(self, name: str, piece: int) -> Piece:
        """Return one branch of one piece."""
        first, last = self.starts[piece : piece + 2]
        branch = self._tree[name]
        _check_baskets(branch, first, last)
        return _numbers(branch.array(entry_start=first, entry_stop=last, library="ak"))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class _Branches(Mapping[str, Column]):
    """The branches of a tree; each is looked at when it is asked for, as there may be thousands.

    Args:
        tree: of uproot.
    """

    def __init__(self, tree: Any) -> None:
        self._tree = tree
        self._names = list(dict.fromkeys(tree.keys()))
        self._known: dict[str, Column] = {}

    def __iter__(self) -> Any:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> Column:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._known:
            try:
                branch = self._tree[name]
                _check_baskets(branch, 0, 1)
                self._known[name] = _column(branch.array(entry_stop=0, library="ak"))
            except Exception as error:  # uproot raises any type for what it cannot interpret
                text = " ".join(str(error).split())[:100]
                self._known[name] = Column(refused=f"cannot be read by uproot ({text})")
        return self._known[name]


def _tree(file: Any, path: str, name: str) -> Any:
    """Return the tree of a name, or the only one."""
    kinds = {key.rpartition(";")[0]: kind for key, kind in file.classnames(cycle=True).items()}
    trees = [key for key, kind in kinds.items() if kind.startswith(_TREES)]
    if not name:
        if len(trees) != 1:
            raise ConfigurationError(
                f"{path} has {shown(trees, 'no trees')}; {_HOW} to name one"
                if trees
                else f"{path} has no TTree and no RNTuple, but {shown(list(kinds), 'nothing')}"
            )
        name = trees[0]
    if name.rpartition(";")[0] not in trees and name not in trees:
        raise ConfigurationError(f"{path} has no tree {name!r}; it has {shown(trees, 'no trees')}; {_HOW}")
    return file[name]


def _starts(tree: Any, size: int) -> list[int]:
    """Return where the pieces begin: where the baskets of all branches do, else at equal distances."""
    try:
        ends = [int(one) for one in tree.common_entry_offsets()]
    except Exception:  # RNTuples have none; uproot raises any type for damaged ones
        ends = []
    if not ends:
        clusters = getattr(tree, "cluster_summaries", ())
        ends = [int(one.num_first_entry) for one in clusters]
    found = [0]
    for end in sorted({*ends, size}):
        if (end - found[-1] >= _ROWS or end == size) and found[-1] < end <= size:
            found.append(end)
    return found


def _check_baskets(branch: Any, first: int, last: int) -> None:
    """Refuse baskets that declare more than their branch has: uproot would take that memory first."""
    offsets = getattr(branch, "entry_offsets", None)
    if offsets is None:  # of an RNTuple, whose pages are checked by uproot
        return
    for number, (begin, end) in enumerate(pairwise(offsets)):
        if begin < last and first < end:
            try:
                size = int(branch.basket_key(number).data_uncompressed_bytes)
            except (AttributeError, ValueError, IndexError, TypeError):  # it is in the tree itself
                continue
            if not 0 <= size <= branch.uncompressed_bytes:
                raise ValueError(
                    f"basket {number} declares {size} bytes of the {branch.uncompressed_bytes} of all baskets"
                )


def _column(array: Any) -> Column:
    """Return what the type of an array of Awkward means here."""
    import awkward as ak

    kind = ak.type(array).content
    shape: list[int] = []
    ragged = False
    while not isinstance(kind, ak.types.NumpyType):
        if _is_text(kind):
            return Column(TEXT, tuple(shape), ragged)
        if isinstance(kind, ak.types.ListType) and not ragged and not shape:
            ragged = True
        elif isinstance(kind, ak.types.RegularType):
            shape.append(int(kind.size))
        else:
            return Column(refused=f"has the type {str(kind)[:60]}")
        kind = kind.content
    return Column(np.dtype(kind.primitive), tuple(shape), ragged)


def _is_text(kind: Any) -> bool:
    """Return whether a type of Awkward is a text, which is a list of characters there."""
    return bool(getattr(kind, "parameters", {}).get("__array__") == "string")


def _numbers(array: Any) -> Piece:
    import awkward as ak

    kind = ak.type(array).content
    if isinstance(kind, ak.types.ListType) and not _is_text(kind):
        counts = np.asarray(ak.num(array, axis=1)).astype(np.int64)
        return Ragged(_plain(ak.flatten(array, axis=1)), counts)
    return _plain(array)


def _plain(array: Any) -> Array:
    import awkward as ak

    if _is_text(ak.type(array).content):
        texts = ak.to_list(array)
        try:
            "".join(texts).encode()  # Awkward lets through what is not UTF-8, in an escaped form
        except UnicodeEncodeError:
            raise ConfigurationError("a text is not UTF-8; make the file again with texts in UTF-8") from None
        return np.array(texts, object)
    plain: Array = np.asarray(ak.to_numpy(array, allow_missing=False))
    return plain
