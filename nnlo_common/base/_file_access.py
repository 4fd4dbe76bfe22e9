"""Opening of files on a machine that others use too: every file is opened, written and removed from here.

Requirements that shaped this module:

* A link that somebody has planted is never followed by a write: the new file takes its place, or the write
  is refused.
* A pipe or device in place of a file does not block or feed a reader: only regular files are read. The check
  looks at the opened descriptor, so that nobody can exchange the file after it.
* All refusals are OSErrors, whose `strerror` says what was found, so that each reader and writer reports them
  as it reports a missing file.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

__all__ = [
    "append_file",
    "new_file",
    "new_folder",
    "opened_folder",
    "read_whole",
    "readable_file",
    "remove_tree",
    "reopened_file",
    "shared_file",
]

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
_LINK = "it is a symbolic link, which nnlo does not follow here; remove it"
#: Without O_NONBLOCK the opening of a pipe would wait for its other end.
_ALWAYS = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


def readable_file(path: str | Path, *, follow: bool = True, folder: int | None = None) -> BinaryIO:
    """Open a regular file for reading.

    Args:
        path: the file.
        follow: it may be a link; False for files that only nnlo writes.
        folder: the descriptor of the folder that `path` is relative to.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    descriptor = _regular(path, os.O_RDONLY | (0 if follow else os.O_NOFOLLOW), folder)
    return open(descriptor, "rb")  # noqa: PTH123 - a descriptor


def read_whole(path: str | Path, largest: int, *, follow: bool = True, folder: int | None = None) -> bytes:
    """Return the content of a regular file of at most `largest` bytes.

    Args:
        path: the file.
        largest: the size that is still read.
        follow: it may be a link.
        folder: the descriptor of the folder that `path` is relative to.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger.

    Example:
        >>> read_whole("/dev/zero", 10)
        Traceback (most recent call last):
        OSError: [Errno 22] it is a device, not a regular file: '/dev/zero'
    """
    with readable_file(path, follow=follow, folder=folder) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= largest:
            # The size in the file system may be that of a moment ago.
            data = file.read(size + 1)
            data += file.read(largest + 1 - len(data)) if size < len(data) <= largest else b""
            size = len(data)
            if size <= largest:
                return data
    raise OSError(
        errno.EFBIG, f"it has more than {largest} bytes, which nnlo reads at most ({size})", str(path)
    )


def new_file(path: str | Path, *, folder: int | None = None) -> BinaryIO:
    """Create a file for writing; it takes the place of an old file or link of this name.

    Args:
        path: the file.
        folder: the descriptor of the folder that `path` is relative to.

    Raises:
        OSError: it cannot be created.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | _ALWAYS
    for _ in range(3):  # somebody else may create it anew meanwhile
        try:
            descriptor = os.open(path, flags, 0o666, dir_fd=folder)
        except FileExistsError:
            os.unlink(path, dir_fd=folder)
        else:
            return _stream(descriptor, "wb")
    raise OSError(errno.EEXIST, "another process creates it again and again", str(path))


def append_file(path: str | Path) -> BinaryIO:
    """Open a regular file to append to, not a link; create it if it is missing.

    Raises:
        OSError: it cannot be opened, or is a link, pipe, device or folder.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    return _stream(_regular(path, flags), "ab")


def reopened_file(path: str | Path, *, create: bool = False) -> int:
    """Return a descriptor to read and change a regular file in place, not a link.

    Args:
        path: the file.
        create: create it if it is missing.

    Raises:
        OSError: it cannot be opened, or is a link, pipe, device or folder.
    """
    return _regular(path, os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if create else 0))


def shared_file(path: str | Path, *, create: bool) -> int:
    """Return a descriptor of a file for memory that processes of one user share.

    Args:
        path: the file.
        create: create it, for this user alone; it must not be there.

    Raises:
        OSError: it is there already, cannot be opened, or belongs to somebody else.
    """
    descriptor = os.open(
        path, os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL if create else 0) | _ALWAYS, 0o600
    )
    if os.fstat(descriptor).st_uid == os.getuid():
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EPERM, "it belongs to another user", str(path))


def new_folder(path: Path) -> None:
    """Make a folder in which nnlo writes, unless it is there; its parents, too.

    Raises:
        OSError: it cannot be made, or is a link, whose target may be somebody else's folder.
    """
    path.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        raise OSError(errno.ELOOP, _LINK, str(path))


@contextmanager
def opened_folder(path: str | Path) -> Iterator[int]:
    """Yield the descriptor of a folder, not of a link to one.

    Names relative to it stay inside, also if somebody exchanges the folder's own name meanwhile.

    Raises:
        OSError: it is missing, or is no folder.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except NotADirectoryError:
        if Path(path).is_symlink():
            raise OSError(errno.ELOOP, _LINK, str(path)) from None
        raise
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def remove_tree(path: Path) -> None:
    """Remove a folder with its content, or a file; of a link only the link.

    Raises:
        OSError: the system refuses it.
    """
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path)


def _regular(path: str | Path, flags: int, folder: int | None = None) -> int:
    """Return the descriptor of a regular file."""
    try:
        descriptor = os.open(path, flags | _ALWAYS, 0o666, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP and flags & os.O_NOFOLLOW:
            raise OSError(errno.ELOOP, _LINK, str(path)) from None
        if error.errno == errno.ENXIO:  # a pipe that nobody reads, or a socket
            raise OSError(errno.EINVAL, "it is a pipe or a socket, not a regular file", str(path)) from None
        raise
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    kind = _KINDS.get(stat.S_IFMT(mode), "something else")
    raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))


def _stream(descriptor: int, mode: str) -> BinaryIO:
    try:
        return open(descriptor, mode)  # type: ignore[return-value]
    except BaseException:
        os.close(descriptor)
        raise
