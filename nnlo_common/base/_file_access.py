"""Files on a machine that others use too: every file is opened, written whole and removed from here.

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
import fcntl
import os
import re
import shutil
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from nnlo_common.base._errors import ConfigurationError

__all__ = [
    "RANKS",
    "append_file",
    "hold",
    "hold_lock",
    "names_rank",
    "new_file",
    "new_folder",
    "of_rank",
    "opened_folder",
    "path_of",
    "read_whole",
    "readable_file",
    "release_lock",
    "remove_tree",
    "reopened_file",
    "shared_file",
    "usable",
    "whole",
    "whole_file",
    "write_whole",
]

# -- paths that scripts write models to: whether every rank writes the same one -------------------------


def path_of(file: Any) -> str | None:
    """Return the path that is written to; None: there is none, or each rank has another.

    Example:
        >>> path_of(Path("model.pt")), path_of(3)
        ('model.pt', None)
    """
    if type(file).__module__ == "tempfile":
        return None
    named = file if isinstance(file, str | os.PathLike) else getattr(file, "name", None)
    return os.fsdecode(named) if isinstance(named, str | bytes | os.PathLike) else None


def names_rank(path: str, rank: int) -> bool:
    """Return whether the file or its folder is named after the rank or the first worker.

    Example:
        >>> names_rank("run/model-1.pt", 1), names_rank("run/model.pt", 1), names_rank("worker0/model.pt", 1)
        (True, False, True)
    """
    last = "/".join(Path(path).parts[-2:])
    return re.search(rf"(?<!\d)0*{rank}(?!\d)|worker\D?0(?!\d)", last, re.IGNORECASE) is not None


# -- opening of files, so that nothing waits and nobody else's files are followed -----------------------

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


# -- locks that admit one job at a time to the folder of a run or the journal of a search --------------

LOCK = "in-use"
#: Open descriptors by lock file. The system releases a lock when the process ends, even by a crash.
_held: dict[Path, int] = {}


def hold(folder: Path, doing: str = "training") -> None:
    """Lock a folder against other jobs until this process ends.

    Does nothing if the file system has no locks or the folder is not writable.

    Args:
        folder: to lock.
        doing: what this job does there, for the other job's error message.

    Raises:
        ConfigurationError: another job has locked it.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     hold(Path(folder))
        ...     hold(Path(folder))  # the same job may lock it again
    """
    hold_lock(folder / LOCK, f"{doing} in {folder}", "folder")


def hold_lock(lock: Path, doing: str, kind: str) -> None:
    """Take a lock file, and keep it until `release_lock` or the end of this process.

    Args:
        lock: the file.
        doing: what a job does with the lock, and where, for the error message.
        kind: what the user should choose another of, e.g. "folder", for the error message.

    Raises:
        ConfigurationError: another job has locked it.
    """
    path = _place(lock)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path in _held and path.exists() and os.fstat(_held[path]).st_ino == path.stat().st_ino:
            return
        descriptor = reopened_file(path, create=True)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EINVAL, errno.EISDIR):  # it is no file that nnlo has made
            raise ConfigurationError(
                f"the lock {path} cannot be opened ({error.strerror}); remove it, or name another {kind}"
            ) from None
        return  # the first write there raises a better error
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = _owner(descriptor)
        os.close(descriptor)
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            return
        raise ConfigurationError(
            f"another job ({owner or 'unknown process'}) is {doing} right now; wait until it ends, or "
            f"name another {kind}"
        ) from None
    _held[path] = descriptor  # closing it releases the lock
    if os.fstat(descriptor).st_nlink == 1:  # else the file has another name, and may be anything there
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def release_lock(lock: Path) -> None:
    """Release a lock; do nothing if this process does not hold it.

    The file stays: another job may have just opened it, and would then lock a deleted file.
    """
    descriptor = _held.pop(_place(lock), None)
    if descriptor is not None:
        os.close(descriptor)


def _place(lock: Path) -> Path:
    """Return one name for a lock file; it may itself not be a link."""
    return lock.parent.resolve() / lock.name


def _owner(descriptor: int) -> str:
    """Return what the other job has written, without characters that would control a terminal."""
    text = os.pread(descriptor, 200, 0).decode(errors="replace")
    return "".join(one for one in text if one.isprintable()).strip()


#: The folder within that of a run for what each rank writes, so that the result is seen first.
RANKS = "ranks"


def of_rank(folder: str | Path, name: str, rank: int) -> Path:
    """Return the path of a rank's own file in the folder of a run.

    Example:
        >>> of_rank("run", "facts.jsonl", 2).as_posix()
        'run/ranks/facts.rank2.jsonl'
    """
    plain = Path(name)
    return Path(folder) / RANKS / f"{plain.stem}.rank{rank}{plain.suffix}"


def usable(asked: str, path: Path) -> Path:
    """Make the folder of `path` and return `path`; refuse it before the training if it is not writable.

    Args:
        asked: the option that named the file, for the error message.
        path: of the file.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        problem = _obstacle(path)
    except OSError as error:
        problem = str(error.strerror)
    if not problem:
        return path
    raise ConfigurationError(f"{asked} cannot write {path} ({problem}); name a file in a writable folder")


def _obstacle(path: Path) -> str:
    """Describe what prevents writing of a file; empty if nothing does."""
    if path.parent.name == RANKS and path.parent.is_symlink():
        return f"{path.parent} is a symbolic link, which is not followed"
    if path.is_symlink():  # whoever has put it there chooses what is overwritten
        return "it is a symbolic link, which is not followed"
    if path.is_dir():
        return "it is a folder"
    if path.exists() and not path.is_file():
        return "it is not a regular file"
    return "" if os.access(path.parent, os.W_OK) else "no permission"


@contextmanager
def whole_file(path: Path, *, synced: bool = True) -> Iterator[BinaryIO]:
    """Yield a new file to write to, and name it `path` at the end: no reader sees half a file.

    An error removes it. A link in its place is replaced, not followed.

    Args:
        path: of the file.
        synced: wait for the disk; False for files that are made again after a power cut.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with whole_file(Path(folder, "result.json")) as file:
        ...         _ = file.write(b"{}")
        ...     [one.name for one in Path(folder).iterdir()]
        ['result.json']
    """
    fresh = _fresh(path)
    with _renamed(fresh, path), new_file(fresh) as file:
        yield file
        file.flush()
        if synced:
            os.fsync(file.fileno())  # otherwise a power cut may leave the new name on an empty file


def write_whole(path: Path, data: bytes | str) -> None:
    """Write a file, whole or not at all; text as UTF-8."""
    with whole_file(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Do what `whole_file` does for a writer that takes only a path: yield that of an empty new file.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with whole(Path(folder, "result.json")) as fresh:
        ...         _ = fresh.write_text("{}")
        ...     [one.name for one in Path(folder).iterdir()]
        ['result.json']
    """
    fresh = _fresh(path)
    with _renamed(fresh, path):
        new_file(fresh).close()
        yield fresh
        with readable_file(fresh, follow=False) as file:
            os.fsync(file.fileno())


def _fresh(path: Path) -> Path:
    return path.with_name(f"{path.stem}.part{path.suffix}")


@contextmanager
def _renamed(fresh: Path, path: Path) -> Iterator[None]:
    """Rename a file that the body writes; remove it after an error."""
    try:
        yield
        fresh.replace(path)
    except BaseException:
        with suppress(OSError):  # the body's error says more
            fresh.unlink(missing_ok=True)
        raise
