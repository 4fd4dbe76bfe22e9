"""Export of the study to a file for Optuna's dashboard and plots, updated during the search.

Requirements that shaped this module:

* Blocks never wait for a disk, so a thread of the coordinator writes, at most twice a second.
* Nothing depends on the file, as a rerun resumes from the journal. So problems with it only cause warnings,
  and an unreadable file is moved aside.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from pathlib import Path

import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._file_access import usable
from nnlo_common.search._compat import has_no_name, study_number
from nnlo_common.search._journal import end_in

__all__ = ["Export", "exportable"]

_LOG = logging.getLogger(__name__)
_JOURNAL = "nnlo:journal"
_SUFFIXES = (".db", ".sqlite3", ".log")
_EVERY_S = 0.5
# Errors of SQLite when a dashboard opened at the same moment creates the same tables.
_RACED = ("already exists", "UNIQUE constraint failed: alembic_version")
# How long SQLite waits for another process's lock, and the end of a search for the last write.
_LOCKED_S, _LAST_S = 10, 30.0
# A lock held longer than this belongs to a killed job: a live one holds it for one line only.
_STALE_S = 3


def exportable(export: str | Path) -> Path:
    """Return the path of an export, after checking its suffix.

    Raises:
        ConfigurationError: the suffix is neither SQLite's nor that of Optuna's journal.
    """
    path = Path(export)
    if path.suffix not in _SUFFIXES:
        raise ConfigurationError(
            f"export={str(path)!r}: its suffix gives the format; use .db or .sqlite3 for SQLite, .log for "
            "Optuna's journal"
        )
    return path


class Export:
    """A file that mirrors a study.

    Args:
        path: the file; created if missing. Other studies in it are kept.
        study: the study to mirror.
        journal: the journal that the search resumes from. The study replaces an earlier export with the same
            journal. Otherwise a name already taken gets a number appended.
    """

    def __init__(self, path: str | Path, study: optuna.Study, *, journal: str | Path | None = None) -> None:
        self._path = usable(f"export={str(path)!r}", exportable(path))
        self._study, self._journal = study, journal and str(Path(journal).absolute())
        nameless = has_no_name(study)
        self._name = self._path.stem if nameless else study.study_name
        self._storage: BaseStorage | None = None
        self._study_id = -1
        self._ids: list[int] = []  # by number of the trial
        self._open: set[int] = set()  # numbers of trials unfinished in the file
        self._warned = ""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="nnlo export", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write the rest and stop."""
        self._closing.set()
        self._thread.join(_LAST_S)
        if self._thread.is_alive():
            self._warn("its last part is not written", f"timed out after {_LAST_S:.0f} s")

    # -- in the thread --------------------------------------------------------------------------------

    def _follow(self) -> None:
        closing = False
        while not closing:
            closing = self._closing.is_set()
            try:
                self._write()
            except Exception as error:  # no problem here may stop the search
                self._warn(f"{type(error).__name__}: {error}", "retrying")
            self._closing.wait(_EVERY_S)
        if isinstance(self._storage, RDBStorage):
            self._storage.remove_session()
            self._storage.engine.dispose()

    def _warn(self, problem: str, then: str) -> None:
        first = problem.strip().splitlines()[0]
        if first != self._warned:
            _LOG.warning("export=%r: %s; %s. The search does not depend on it", str(self._path), first, then)
            self._warned = first

    def _write(self) -> None:
        if self._storage is None:
            self._storage = self._opened()
        for trial in self._study.get_trials(deepcopy=False):
            if trial.number == len(self._ids):
                self._ids.append(self._storage.create_new_trial(self._study_id, trial))
                self._open |= set() if trial.state.is_finished() else {trial.number}
            elif trial.number in self._open and trial.state.is_finished():
                end_in(self._storage, self._ids[trial.number], trial)
                self._open.remove(trial.number)

    def _opened(self) -> BaseStorage:
        try:
            return self._begun_in(self._storage_of())
        except Exception as error:
            if "locked" in str(error):
                raise
            if any(sign in str(error) for sign in _RACED):
                self._closing.wait(_EVERY_S)
                return self._begun_in(self._storage_of())
            aside = self._path.with_name(f"{self._path.name}.damaged")
            self._path.replace(aside)
            with contextlib.suppress(OSError):
                self._path.with_name(f"{self._path.name}.lock").unlink()
            self._warn(
                f"{type(error).__name__}: {error}", f"moved the file to {aside.name} and started another"
            )
            return self._begun_in(self._storage_of())

    def _storage_of(self) -> BaseStorage:
        if self._path.suffix == ".log":
            lock = JournalFileSymlinkLock(str(self._path), grace_period=_STALE_S)
            return JournalStorage(JournalFileBackend(str(self._path), lock))
        options = {"connect_args": {"timeout": _LOCKED_S}}
        return RDBStorage(f"sqlite:///{self._path.absolute()}", engine_kwargs=options)

    def _begun_in(self, storage: BaseStorage) -> BaseStorage:
        """Create this study in a storage."""
        taken = {one.study_name: one for one in storage.get_all_studies()}
        name, count, ours = self._name, 1, self._journal
        while name in taken and (not ours or taken[name].user_attrs.get(_JOURNAL) != ours):
            count += 1
            name = f"{self._name} ({count})"
        if name in taken:
            storage.delete_study(study_number(taken[name]))
        self._study_id = storage.create_new_study(self._study.directions, name)
        own = {_JOURNAL: ours} if ours else {}
        for key, value in (self._study.user_attrs | own).items():
            storage.set_study_user_attr(self._study_id, key, value)
        return storage
