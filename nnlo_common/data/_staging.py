"""Copies of files on a local disk: one for all ranks of the host, coordinated by file locks."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import shutil
import signal
import stat
import subprocess
import time
import uuid
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from nnlo_common.base._arguments import seconds_from
from nnlo_common.base._errors import ConfigurationError
from nnlo_common.data._listing import with_tree, without_tree

__all__ = ["Staging", "staged"]

_LOG = logging.getLogger(__name__)
_PREFIX = "nnlo-staged-"
_USERS = "users.lock"
_TRASH = "trash-"
# Names to try where others have taken one.
_NAMES = 10
#: The environment variable with the seconds that a copy may take without growing.
_LIMIT = "NNLO_COPY_LIMIT_S"
_LIMIT_S = 3600.0
_SAY_AFTER_S = 10.0
_LOOK_EVERY_S = 0.05


class Staging:
    """Copies files to a folder of this host; the first of its ranks to need a file copies it.

    Each user of the copies holds a lock on them; the last to release it deletes them. The system releases the
    locks of a dead process; then another user deletes the copies, or the next process to stage files there.
    Two jobs of one user with the same files share the copies. Nobody else can write to them: the folder
    belongs to this user alone, and one that somebody else has made under its name is not used.

    Args:
        folder: on a disk of this host, e.g. "/tmp" or os.environ["TMPDIR"]; a folder is made in it.
        command: the copy command, as a list of arguments in which "{src}" and "{dst}" are replaced, e.g.
            ["xrdcp", "{src}", "{dst}"]; it runs without a shell. None: an ordinary copy.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as here:
        ...     _ = Path(here, "a.h5").write_text("data")
        ...     staging = Staging(here)
        ...     (copy,) = staging.stage([f"{here}/a.h5"])
        ...     text = Path(copy).read_text()
        ...     staging.close()
        ...     text, Path(copy).exists()
        ('data', False)
    """

    def __init__(self, folder: str | Path, command: Sequence[str] | None = None) -> None:
        self._base = Path(folder).expanduser().absolute()
        if command is not None:
            text = isinstance(command, str)
            if text or not all(any(mark in part for part in command) for mark in ("{src}", "{dst}")):
                raise ConfigurationError(
                    f"copy_command={command!r}: give a list of arguments that has '{{src}}' and '{{dst}}' in "
                    'it, e.g. ["xrdcp", "{src}", "{dst}"]'
                )
        self._command = command
        self._release: weakref.finalize[..., Staging] | None = None

    def stage(self, paths: Sequence[str]) -> tuple[str, ...]:
        """Copy the files that are not there yet, and return the paths of the copies, in order.

        Raises:
            ConfigurationError: a file cannot be copied, or the folder has no locks.
        """
        self.close()
        try:
            self._base.mkdir(parents=True, exist_ok=True)
            _refuse_open_folder(self._base)
            _delete_leftovers(self._base)
            folder, users = _join(self._base, _fingerprint(paths))
        except OSError as error:
            raise self._unusable(error) from None
        # Also runs at the end of the script. A forked process shares the lock; there `_leave` only closes it.
        self._release = weakref.finalize(self, _leave, folder, users, os.getpid())
        copies = [folder / f"{index:05}-{path.rpartition('/')[2]}" for index, path in enumerate(paths)]
        try:
            for wait in (False, True):  # first copy the unlocked files, then wait for those that others copy
                for path, copy in zip(paths, copies, strict=True):
                    self._copy_once(path, copy, wait=wait)
        except OSError as error:
            self.close()
            raise self._unusable(error) from None
        except BaseException:
            self.close()
            raise
        return tuple(map(str, copies))

    def _unusable(self, error: OSError) -> ConfigurationError:
        return ConfigurationError(
            f"stage_to={str(self._base)!r} cannot be used ({error.strerror}: {error.filename}); name a "
            "writable folder on a disk of this host"
        )

    def close(self) -> None:
        """Release the copies."""
        if self._release is not None:
            self._release()
            self._release = None

    def _copy_once(self, path: str, copy: Path, *, wait: bool) -> None:
        if _is_copy(path, copy):
            return
        fresh = copy.with_name(f"{copy.name}.part")
        with _locked(copy.with_name(f"{copy.name}.lock"), fresh, wait=wait) as mine:
            if mine and not _is_copy(path, copy):
                fresh.unlink(missing_ok=True)  # left by a process that died
                try:
                    self._copy(path, fresh)
                    fresh.replace(copy)
                finally:
                    fresh.unlink(missing_ok=True)

    def _copy(self, path: str, fresh: Path) -> None:
        try:
            if self._command is None:
                shutil.copyfile(path, fresh)
            else:
                self._run(path, fresh, self._command)
        except OSError as error:
            raise ConfigurationError(
                f"{path} cannot be copied to {fresh.parent} ({error.strerror}; {_free(fresh.parent)}); check "
                "the path and copy_command=, or name another folder by stage_to="
            ) from None
        if Path(path).is_file() and Path(path).stat().st_size != fresh.stat().st_size:
            raise ConfigurationError(
                f"{path} has {Path(path).stat().st_size} bytes, but its copy has {fresh.stat().st_size}; the "
                "copy failed, or the file is still being written: try again when it is complete"
            )

    def _run(self, path: str, fresh: Path, command: Sequence[str]) -> None:
        places = {"{src}": path, "{dst}": str(fresh)}
        line = [re.sub("{src}|{dst}", lambda found: places[found[0]], part) for part in command]
        growth = _Growth(fresh)
        with subprocess.Popen(
            line,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            while True:
                try:
                    _, complaints = process.communicate(timeout=_LOOK_EVERY_S)
                    break
                except subprocess.TimeoutExpired:
                    if growth.ended():
                        os.killpg(process.pid, signal.SIGKILL)
                        raise ConfigurationError(
                            f"{path}: {line} has not written to the copy for {growth.limit_s:g} s and was "
                            f"ended; try the command by hand, or set {_LIMIT} to a longer time"
                        ) from None
        if process.returncode or not fresh.is_file():
            said = "; ".join(complaints.strip().splitlines()[-3:]) or "no error output"
            result = f"ended with {process.returncode}" if process.returncode else "did not make the file"
            raise ConfigurationError(f"{path}: {line} {result} ({said}); try the command by hand")


class _Growth:
    """Watches whether a file grows.

    Args:
        path: the file; it may not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._size, self._grown_s = path, -1, time.monotonic()
        self.limit_s = seconds_from(os.environ, _LIMIT, _LIMIT_S)

    def ended(self) -> bool:
        """Return whether it has not grown for too long."""
        try:
            size = self._path.stat().st_size
        except OSError:
            size = -1
        now_s = time.monotonic()
        if size != self._size:
            self._size, self._grown_s = size, now_s
        return now_s - self._grown_s > self.limit_s


def _is_copy(path: str, copy: Path) -> bool:
    """Return whether a whole copy of a file is there."""
    try:
        found = copy.lstat()
        return stat.S_ISREG(found.st_mode) and (
            not Path(path).is_file() or found.st_size == Path(path).stat().st_size
        )
    except OSError:
        return False


def _fingerprint(paths: Sequence[str]) -> str:
    """Return a hash of paths, sizes and times, so that changed files are copied again."""
    facts = []
    for path in paths:
        known = Path(path).stat() if Path(path).is_file() else None
        facts.append(f"{path}\0{known and (known.st_size, known.st_mtime_ns)}\n")
    return hashlib.blake2b("".join(facts).encode(), digest_size=8).hexdigest()


def _free(folder: Path) -> str:
    return f"{shutil.disk_usage(folder).free / 1e9:.1f} GB are free there"


def _refuse_open_folder(base: Path) -> None:
    """Refuse a folder in which anybody may exchange what others have made."""
    found = base.stat()
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise ConfigurationError(
            f"stage_to={str(base)!r} is writable by everybody without the sticky bit, so that anybody could "
            f"exchange the copies; name a folder of your own, or have its owner run chmod +t {base}"
        )


def _join(base: Path, fingerprint: str) -> tuple[Path, int]:
    """Return this user's folder for these files, made if needed, and its open file with a shared lock."""
    for index in range(_NAMES):
        folder = base / "-".join([f"{_PREFIX}{os.getuid()}", fingerprint, *([str(index)] if index else [])])
        while True:
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            if not _is_own(folder):
                break
            try:
                users = _open_lock(folder / _USERS, create=True)
            except FileNotFoundError:  # another process has just deleted the folder
                continue
            _lock(users, fcntl.LOCK_SH, folder / _USERS)
            if _is_still(users, folder / _USERS):
                return folder, users
            os.close(users)
            time.sleep(0.001)
    raise ConfigurationError(
        f"stage_to={str(base)!r}: {folder} and {_NAMES - 1} more of such names belong to other users, or are "
        "open to them, so that the copies would not be yours; remove them, or name a folder of your own"
    )


def _is_own(folder: Path) -> bool:
    """Return whether a folder belongs to this user alone; true, too, of one that is gone."""
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return True
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _open_lock(path: Path, *, create: bool = False) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    return os.open(path, flags | (os.O_CREAT if create else 0), 0o600)


def _lock(file: int, kind: int, path: Path, growing: Path | None = None) -> None:
    """Take a lock; say for whom this process waits, and give up where nothing happens any more."""
    growth, begun_s, said = _Growth(growing or path), time.monotonic(), False
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if not said and time.monotonic() - begun_s > _SAY_AFTER_S:
                said = True
                _LOG.warning("nnlo: waits for another process of this host that holds %s", path)
            if growth.ended():
                raise ConfigurationError(
                    f"another process of this host has held {path} for {growth.limit_s:g} s, in which "
                    f"{growing or 'nothing'} has not grown; end that process (fuser {path} names it), or set "
                    f"{_LIMIT} to a longer time"
                ) from None
            time.sleep(_LOOK_EVERY_S)
        else:
            return


def _is_still(file: int, path: Path) -> bool:
    """Return whether an open file is still at a path: it may be deleted while we wait for its lock."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _leave(folder: Path, users: int, owner: int) -> None:
    """Release a folder; delete it if nobody else uses it."""
    if os.getpid() == owner:
        _delete_if_unused(folder, users)
    os.close(users)


def _delete_if_unused(folder: Path, users: int) -> None:
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return
    # Another process may have just deleted it, and a third made a new one under its name.
    if not _is_still(users, folder / _USERS):
        return
    # Rename first, which is atomic: a process that comes now makes its own folder, and we do not delete that.
    trash = folder.with_name(f"{_PREFIX}{os.getuid()}-{_TRASH}{uuid.uuid4().hex}")
    folder.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def _delete_leftovers(base: Path) -> None:
    """Delete the folders of dead processes; those of other users, whatever their names, stay."""
    for folder in base.glob(f"{_PREFIX}{os.getuid()}-*"):
        if not _is_own(folder):
            continue
        if _TRASH in folder.name:
            shutil.rmtree(folder, ignore_errors=True)
            continue
        try:
            users = _open_lock(folder / _USERS)
        except OSError:
            continue
        _delete_if_unused(folder, users)
        os.close(users)


@contextmanager
def _locked(path: Path, growing: Path, *, wait: bool) -> Iterator[bool]:
    """Take a lock and yield True; without `wait`, yield False if another process has it.

    Args:
        path: the file to lock.
        growing: what its holder writes to.
        wait: wait for the lock.
    """
    file = _open_lock(path, create=True)
    try:
        if wait:
            _lock(file, fcntl.LOCK_EX, path, growing)
        else:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
        yield True
    finally:
        os.close(file)


def staged(staging: Staging, files: Sequence[str]) -> tuple[str, ...]:
    """Copy the files, and return the paths of the copies, each with the tree that is read of it."""
    whole = list(dict.fromkeys(map(without_tree, files)))
    copies = dict(zip(whole, staging.stage(whole), strict=True))
    return tuple(with_tree(copies[without_tree(file)], file) for file in files)
