"""Sources of virtual and external datasets: they must exist, be ordinary files, and not lead in a circle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.data.hdf5._opened_files import open_file

__all__ = ["check_sources", "is_special"]

_DEEPEST = 16  # virtual datasets inside each other; as many as HDF5 follows links
_MOST_BLOCKS = 100_000  # sources of a pattern

#: A dataset under whatever name: device and number of its file, and its address there.
_Identity: TypeAlias = tuple[int, int, int]


def check_sources(path: str, dataset: Any, inside_of: tuple[_Identity, ...] = ()) -> None:
    """Refuse data in missing files or datasets, for which HDF5 silently reads zeros, and data in itself.

    Args:
        path: of the file.
        dataset: one of its datasets.
        inside_of: the virtual datasets that lead to it; reading a circle of them ends the process.
    """
    for name, _, _ in dataset.external or ():
        _check_file(path, dataset.name, name)
    if not dataset.is_virtual:
        return
    here = _identity(dataset)
    if here in inside_of or len(inside_of) >= _DEEPEST:
        found = "its data in itself" if here in inside_of else f"over {_DEEPEST} sources inside each other"
        raise ConfigurationError(
            f"{path}: the virtual dataset {dataset.name} has {found}, which HDF5 cannot read; make it again"
        )
    chain = (*inside_of, here)
    for one in dataset.virtual_sources():
        for name, inside in _blocks(path, one.file_name, one.dset_name):
            if name == ".":
                _check_sources_of(dataset.file.get(inside), f"{inside!r} of this file", dataset, chain)
            else:
                _check_file(path, dataset.name, name)
                with open_file(str(Path(path).parent / name)) as source:
                    _check_sources_of(source.get(inside), f"{inside!r} of {name!r}", dataset, chain)


def is_special(path: str, name: str) -> bool:
    """Return whether the name exists beside `path` and is not an ordinary file."""
    found = Path(path).parent / name
    return found.exists() and not found.is_file()


def _check_sources_of(found: Any, label: str, dataset: Any, inside_of: tuple[_Identity, ...]) -> None:
    import h5py

    if not isinstance(found, h5py.Dataset):
        raise ConfigurationError(
            f"{dataset.file.filename}: {dataset.name} has its data in {label}, which does not exist; HDF5 "
            "would read zeros, so make one of the two files again"
        )
    check_sources(found.file.filename, found, inside_of)


def _check_file(path: str, dataset: str, name: str) -> None:
    if not (Path(path).parent / name).exists():
        raise ConfigurationError(
            f"{path}: {dataset} has its data in {name!r}, which does not exist; HDF5 would read zeros, so "
            "put that file there"
        )
    if is_special(path, name):
        raise ConfigurationError(
            f"{path}: {dataset} has its data in {name!r}, which is not an ordinary file; make it again"
        )


def _blocks(path: str, name: str, inside: str) -> Iterator[tuple[str, str]]:
    """Yield the file and the dataset of a source; of a pattern with `%b` all that there are, from 0."""
    if "%b" not in name + inside:
        yield name, inside
        return
    for number in range(_MOST_BLOCKS):
        file, dataset = name.replace("%b", str(number)), inside.replace("%b", str(number))
        place = path if file == "." else str(Path(path).parent / file)
        if not Path(place).exists():
            return
        with open_file(place) as source:
            if dataset not in source:
                return
        yield file, dataset


def _identity(dataset: Any) -> _Identity:
    import h5py

    status, found = Path(dataset.file.filename).stat(), h5py.h5o.get_info(dataset.id)
    return status.st_dev, status.st_ino, found.addr
