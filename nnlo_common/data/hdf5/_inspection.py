"""Inspection of HDF5 files by metadata alone: datasets, shapes, and what is wrong with them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nnlo_common.base._errors import ConfigurationError, NNLOError
from nnlo_common.data._source import Field
from nnlo_common.data.hdf5._files import open_file

__all__ = ["Look", "look", "look_at_all"]

_SHOWN = 8  # of many names
_REPORTED = 3  # of many files
_ENOUGH = 1000  # bad ones, after which nobody wants to know of more
_NUMBERS = "biuf"


@dataclass(frozen=True, slots=True)
class Look:
    """What a file has.

    Attributes:
        path: of the file.
        length: how many samples.
        fields: what they are of, by the full names of the datasets; those of a group by the alphabet.
        grain: the rows of the longest chunk; 1 where nothing is in chunks.
        groups: for each name that was asked for how many datasets it stands for; None if it is one itself.
    """

    path: str
    length: int
    fields: tuple[Field, ...]
    grain: int
    groups: tuple[int | None, ...]


def look(path: str, names: Sequence[str], locking: bool | None = None) -> Look:
    """Look at the datasets and groups of these names.

    Raises:
        ConfigurationError: the file cannot be opened, or has not what was asked for.
    """
    try:
        return _looked(path, names, locking)
    except NNLOError:
        raise
    except Exception as error:  # h5py has one of any type for what is damaged
        raise ConfigurationError(
            f"{path} is damaged ({error}); check it with h5ls, and copy it, or make it, again"
        ) from None


def _looked(path: str, names: Sequence[str], locking: bool | None) -> Look:
    with open_file(path, locking) as file:
        datasets: list[Any] = []
        groups: list[int | None] = []
        for name in names:
            inside = list(_datasets(file, path, name))
            groups.append(None if [one.name for one in inside] == [file[name].name] else len(inside))
            datasets += inside
        fields = tuple(_field(path, one) for one in datasets)
        lengths = {one.name: int(one.shape[0]) for one in datasets}
        if len(set(lengths.values())) > 1:
            told = ", ".join(f"{name} has {length}" for name, length in lengths.items())
            raise ConfigurationError(
                f"{path} has datasets of unequal lengths: {told}; each needs a row for each sample, so make "
                "the file again, or name other datasets"
            )
        grain = max((one.chunks[0] for one in datasets if one.chunks), default=1)
        return Look(path, datasets[0].shape[0], fields, grain, tuple(groups))


def _datasets(file: Any, path: str, name: str) -> Iterator[Any]:
    """The datasets that a name stands for."""
    import h5py

    _check_links(file, path, name)
    try:
        found = file[name]
    except (KeyError, OSError, RuntimeError):
        raise ConfigurationError(f"{path} {_missing(file, name)}") from None
    if isinstance(found, h5py.Dataset):
        yield found
        return
    if not isinstance(found, h5py.Group):
        raise ConfigurationError(
            f"{path}: {name!r} is a named type, and has no samples; name one of {_names(file)}"
        )
    if not len(found):
        raise ConfigurationError(f"{path}: the group {name!r} is empty; name one of {_names(file)}")
    for child in sorted(found):
        _check_links(found, path, child)
        inside = found.get(child)
        if not isinstance(inside, h5py.Dataset):
            what = "a link that leads nowhere" if inside is None else "a group of its own"
            raise ConfigurationError(
                f"{path}: in the group {name!r}, {child!r} is {what}; a group is taken as several inputs or "
                f"outputs, so it may only have datasets. Name those you want, e.g. {[f'{name}/{child}/...']}"
            )
        yield inside


def _check_links(group: Any, path: str, name: str) -> None:
    """Refuse links to what is no ordinary file: HDF5 would wait for a pipe for ever."""
    import h5py

    parts = [part for part in name.split("/") if part]
    for count in range(1, len(parts) + 1):
        link = group.get("/".join(parts[:count]), getlink=True)
        if isinstance(link, h5py.ExternalLink) and _odd(path, link.filename):
            raise ConfigurationError(
                f"{path}: {name!r} is a link into {link.filename!r}, which is no ordinary file; mend the link"
            )
        if link is None:
            return


def _odd(path: str, name: str) -> bool:
    """Whether there is something of this name that is no file."""
    found = Path(path).parent / name
    return found.exists() and not found.is_file()


def _missing(file: Any, name: str) -> str:
    """Say what is the matter with a name that there is not."""
    import h5py

    link = None
    if name.strip("/") and name.strip("/").rpartition("/")[0] in ("", *file):
        link = file.get(name, getlink=True)
    if isinstance(link, h5py.HardLink):
        return f"has {name!r}, but damaged; check it with h5ls, and copy it, or make it, again"
    if isinstance(link, h5py.SoftLink):
        return (
            f"has {name!r} as a link to {link.path!r}, which it does not have, or in a circle; mend the link"
        )
    if isinstance(link, h5py.ExternalLink):
        return (
            f"has {name!r} as a link to {link.path!r} in the file {link.filename!r}, which cannot be opened; "
            "put that file where the link says"
        )
    near = difflib.get_close_matches(name, list(file), 1)
    meant = f" Did you mean {near[0]!r}?" if near else ""
    return f"has no {name!r}; it has {_names(file)}.{meant} Pass the names of its datasets"


def _names(file: Any) -> str:
    """What a file has, as text that is not too long."""
    names = list(file)
    if not names:
        return "nothing at all"
    shown = ", ".join(map(repr, names[:_SHOWN]))
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _field(path: str, dataset: Any) -> Field:
    """What a dataset's samples are like; refuse it if they are nothing to train on."""
    name = dataset.name
    if dataset.shape is None or not dataset.shape:
        what = "has no data" if dataset.shape is None else "is one number"
        raise ConfigurationError(
            f"{path}: {name} {what}, and not a row for each sample; name another dataset"
        )
    if 0 in dataset.shape[1:]:
        raise ConfigurationError(
            f"{path}: {name} has samples of shape {dataset.shape[1:]}, which hold nothing; name another"
        )
    dtype = dataset.dtype
    if dtype.kind not in _NUMBERS or dtype.itemsize > 8 or dtype.metadata:
        raise ConfigurationError(
            f"{path}: {name} has the type {_type(dtype)}, and not one of numbers to train on; convert "
            "it to float32 or an integer type when you make the file, or name another dataset"
        )
    _check_sources(path, dataset)
    _check_filters(path, dataset)
    return Field(name, tuple(map(int, dataset.shape[1:])), dtype.newbyteorder("="))


def _type(dtype: np.dtype[Any]) -> str:
    if dtype.kind == "O" or dtype.metadata:
        return f"{dtype} (texts, references, enumerations or rows of unequal length)"
    return str(dtype)


def _check_sources(path: str, dataset: Any) -> None:
    """Refuse data that lies where there is none: HDF5 would give zeros for them without a word."""
    folder = Path(path).parent
    sources = [(name, "") for name, *_ in dataset.external or ()]
    if dataset.is_virtual:
        sources += [(one.file_name, one.dset_name) for one in dataset.virtual_sources()]
    for name, inside in sources:
        if "%b" in name or name == ".":
            continue
        if not (folder / name).exists():
            raise ConfigurationError(
                f"{path}: {dataset.name} has its data in {name!r}, which does not exist; HDF5 would read "
                "zeros, so put that file there"
            )
        if _odd(path, name):
            raise ConfigurationError(
                f"{path}: {dataset.name} has its data in {name!r}, which is no ordinary file; make it again"
            )
        if inside:
            with open_file(str(folder / name)) as source:
                if inside not in source:
                    raise ConfigurationError(
                        f"{path}: {dataset.name} has its data in {inside!r} of {name!r}, which has none; "
                        "HDF5 would read zeros, so make one of the two again"
                    )


def _check_filters(path: str, dataset: Any) -> None:
    """Refuse what is compressed in a way that is not installed here."""
    import h5py

    properties = dataset.id.get_create_plist()
    for index in range(properties.get_nfilters()):
        code, _, _, name = properties.get_filter(index)
        if not h5py.h5z.filter_avail(code):
            told = f" ({name.decode(errors='replace')})" if name else ""
            raise ConfigurationError(
                f"{path}: {dataset.name} is compressed with filter {code}{told}, which is not installed; try "
                "`pip install hdf5plugin` and import it, or write the file with gzip"
            )


def look_at_all(paths: Sequence[str], names: Sequence[str], locking: bool | None = None) -> list[Look]:
    """Look at all files; they have to be alike.

    Raises:
        ConfigurationError: with what is wrong with the first few of those with which something is wrong.
    """
    looks: list[Look] = []
    problems: list[str] = []
    for path in paths:
        try:
            found = look(path, names, locking)
            if looks:
                _compare(looks[0], found)
            looks.append(found)
        except ConfigurationError as error:
            problems.append(str(error))
            if len(problems) == _ENOUGH:
                break
    if problems:
        more = len(problems) - _REPORTED
        least = "at least " if len(problems) == _ENOUGH else ""
        told = [
            *problems[:_REPORTED],
            *([f"and {least}{more} more of {len(paths)} files"] if more > 0 else []),
        ]
        raise ConfigurationError("\n".join(told))
    if not sum(one.length for one in looks):
        raise ConfigurationError(
            f"{paths[0]}{f' and all other {len(paths) - 1} files' if len(paths) > 1 else ''} have no samples "
            f"in {', '.join(names)}; give files that have some"
        )
    return looks


def _compare(first: Look, other: Look) -> None:
    """Refuse a file that is unlike the first."""
    for mine, theirs in zip(first.fields, other.fields, strict=False):
        if mine != theirs:
            raise ConfigurationError(
                f"{other.path}: {theirs.name} has samples of {theirs.shape} {theirs.dtype}, but "
                f"{mine.name} in {first.path} of {mine.shape} {mine.dtype}; make all files alike"
            )
    if first.groups != other.groups:
        names = [[field.name for field in one.fields] for one in (other, first)]
        raise ConfigurationError(
            f"{other.path} has {names[0]}, but {first.path} has {names[1]}; make all files alike"
        )
