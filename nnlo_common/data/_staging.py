"""Copies of files on a local disk: one for all ranks of the host, coordinated by file locks."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import time
import uuid
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from nnlo_common.base._errors import ConfigurationError

__all__ = ["Staging"]

_PREFIX = "nnlo-staged-"
_USERS = "users.lock"
_TRASH = "trash-"


class Staging:
    """Copies files to a folder of this host; the first of its ranks to need a file copies it.

    Each user of the copies holds a lock on them; the last to release it deletes them. The system releases the
    locks of a dead process; then another user deletes the copies, or the next process to stage files there.
    Two jobs of one user with the same files share the copies.

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
            _delete_leftovers(self._base)
            folder = self._base / f"{_PREFIX}{os.getuid()}-{_fingerprint(paths)}"
            users = _join(folder)
        except OSError as error:
            raise ConfigurationError(
                f"stage_to={str(self._base)!r} cannot be used ({error.strerror}); name a writable folder on "
                "a disk of this host"
            ) from None
        # Also runs at the end of the script. A forked process shares the lock; there `_leave` only closes it.
        self._release = weakref.finalize(self, _leave, folder, users, os.getpid())
        copies = [folder / f"{index:05}-{path.rpartition('/')[2]}" for index, path in enumerate(paths)]
        try:
            for wait in (False, True):  # first copy the unlocked files, then wait for those that others copy
                for path, copy in zip(paths, copies, strict=True):
                    self._copy_once(path, copy, wait=wait)
        except BaseException:
            self.close()
            raise
        return tuple(map(str, copies))

    def close(self) -> None:
        """Release the copies."""
        if self._release is not None:
            self._release()
            self._release = None

    def _copy_once(self, path: str, copy: Path, *, wait: bool) -> None:
        if copy.exists():
            return
        with _locked(copy.with_name(f"{copy.name}.lock"), wait=wait) as mine:
            if mine and not copy.exists():
                fresh = copy.with_name(f"{copy.name}.part")
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
        done = subprocess.run(
            line, check=False, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL
        )
        if done.returncode or not fresh.is_file():
            said = "; ".join(done.stderr.strip().splitlines()[-3:]) or "no error output"
            result = f"ended with {done.returncode}" if done.returncode else "did not make the file"
            raise ConfigurationError(f"{path}: {line} {result} ({said}); try the command by hand")


def _fingerprint(paths: Sequence[str]) -> str:
    """Return a hash of paths, sizes and times, so that changed files are copied again."""
    facts = []
    for path in paths:
        known = Path(path).stat() if Path(path).is_file() else None
        facts.append(f"{path}\0{known and (known.st_size, known.st_mtime_ns)}\n")
    return hashlib.blake2b("".join(facts).encode(), digest_size=8).hexdigest()


def _free(folder: Path) -> str:
    return f"{shutil.disk_usage(folder).free / 1e9:.1f} GB are free there"


def _join(folder: Path) -> int:
    """Make a folder if needed, take a shared lock on it, and return the lock's open file."""
    while True:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        try:
            users = os.open(folder / _USERS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # another process has just deleted the folder
            continue
        fcntl.flock(users, fcntl.LOCK_SH)
        if _is_still(users, folder / _USERS):
            return users
        os.close(users)
        time.sleep(0.001)


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
    """Delete the folders of dead processes; folders of other users cannot be opened, and stay."""
    for folder in base.glob(f"{_PREFIX}{os.getuid()}-*"):
        if _TRASH in folder.name:
            shutil.rmtree(folder, ignore_errors=True)
            continue
        try:
            users = os.open(folder / _USERS, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        _delete_if_unused(folder, users)
        os.close(users)


@contextmanager
def _locked(path: Path, *, wait: bool) -> Iterator[bool]:
    """Take a lock and yield True; without `wait`, yield False if another process has it."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
