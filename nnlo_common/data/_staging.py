"""Copies of files on the host that reads them: one for all its ranks, without a message between them."""

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
    """Copies files to a folder of this host, each once, whichever of its ranks comes first.

    Who uses the copies holds a lock on them; the last one that lets go deletes them. Of a process that dies
    the system takes the locks away: then the others delete them, or whoever stages anything there next.
    Two jobs of one user with the same files share the copies.

    Args:
        folder: on a disk of this host, e.g. "/tmp" or os.environ["TMPDIR"]; a folder is made in it.
        command: what copies, as arguments in which "{src}" and "{dst}" are replaced, e.g.
            ["xrdcp", "{src}", "{dst}"]; no shell reads them. None: an ordinary copy.

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
        """Copy what is not there yet, and return the paths of the copies, in order.

        Raises:
            ConfigurationError: a file cannot be copied, or not locked there.
        """
        self.close()
        try:
            self._base.mkdir(parents=True, exist_ok=True)
            _sweep(self._base)
            folder = self._base / f"{_PREFIX}{os.getuid()}-{_fingerprint(paths)}"
            users = _join(folder)
        except OSError as error:
            raise ConfigurationError(
                f"stage_to={str(self._base)!r} cannot be used ({error.strerror}); name a writable folder on "
                "a disk of this host"
            ) from None
        # Also at the end of the script; but not where a process is forked, which has the lock, too.
        self._release = weakref.finalize(self, _leave, folder, users, os.getpid())
        copies = [folder / f"{index:05}-{path.rpartition('/')[2]}" for index, path in enumerate(paths)]
        try:
            for wait in (False, True):  # at first what nobody copies, then what others were about to
                for path, copy in zip(paths, copies, strict=True):
                    self._copy_once(path, copy, wait=wait)
        except BaseException:
            self.close()
            raise
        return tuple(map(str, copies))

    def close(self) -> None:
        """Let go of the copies."""
        if self._release is not None:
            self._release()
            self._release = None

    def _copy_once(self, path: str, copy: Path, *, wait: bool) -> None:
        if copy.exists():
            return
        with _locked(copy.with_name(f"{copy.name}.lock"), wait=wait) as mine:
            if mine and not copy.exists():
                fresh = copy.with_name(f"{copy.name}.part")
                fresh.unlink(missing_ok=True)  # of one who died
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
                f"{path} has {Path(path).stat().st_size} bytes, but its copy {fresh.stat().st_size}; it is "
                "being written, or the copying has failed: try again when it is complete"
            )

    def _run(self, path: str, fresh: Path, command: Sequence[str]) -> None:
        places = {"{src}": path, "{dst}": str(fresh)}
        line = [re.sub("{src}|{dst}", lambda found: places[found[0]], part) for part in command]
        done = subprocess.run(
            line, check=False, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL
        )
        if done.returncode or not fresh.is_file():
            said = "; ".join(done.stderr.strip().splitlines()[-3:]) or "it said nothing"
            result = f"ended with {done.returncode}" if done.returncode else "has made no such file"
            raise ConfigurationError(f"{path}: {line} {result} ({said}); try the command by hand")


def _fingerprint(paths: Sequence[str]) -> str:
    """Files that are changed are copied anew."""
    facts = []
    for path in paths:
        known = Path(path).stat() if Path(path).is_file() else None
        facts.append(f"{path}\0{known and (known.st_size, known.st_mtime_ns)}\n")
    return hashlib.blake2b("".join(facts).encode(), digest_size=8).hexdigest()


def _free(folder: Path) -> str:
    return f"{shutil.disk_usage(folder).free / 1e9:.1f} GB are free there"


def _join(folder: Path) -> int:
    """Become one of those who use a folder; return the open lock."""
    while True:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        try:
            users = os.open(folder / _USERS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # deleted in between
            continue
        fcntl.flock(users, fcntl.LOCK_SH)
        if _is_still(users, folder / _USERS):
            return users
        os.close(users)
        time.sleep(0.001)


def _is_still(file: int, path: Path) -> bool:
    """Whether an open file is the one at a path: it may have been deleted while one waited for its lock."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _leave(folder: Path, users: int, owner: int) -> None:
    """Use a folder no more; delete it if nobody does."""
    if os.getpid() == owner:
        _delete_if_unused(folder, users)
    os.close(users)


def _delete_if_unused(folder: Path, users: int) -> None:
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return
    # Another may have deleted it just before, and a third have made one anew under its name.
    if not _is_still(users, folder / _USERS):
        return
    # At first the name, at once: who comes now makes a folder of its own, and does not lose what is in it.
    trash = folder.with_name(f"{_PREFIX}{os.getuid()}-{_TRASH}{uuid.uuid4().hex}")
    folder.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def _sweep(base: Path) -> None:
    """Delete what the dead have left; others' folders cannot be opened, and stay."""
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
    """Hold a lock; or, if somebody else does and one is not to wait, do not."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
