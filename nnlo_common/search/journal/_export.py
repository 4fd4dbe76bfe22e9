"""The study in a file that Optuna's dashboard and plots read, kept up to date while the search goes on.

Requirements that shaped this module:

* Blocks never wait for a disk, so a thread of the coordinator writes, at most twice a second.
* Nothing depends on the file: the journal is what the same command goes on from. So whatever is wrong with it
  is warned of, and a file that cannot be read is set aside.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from pathlib import Path

import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.trial import FrozenTrial

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._whole_files import usable
from nnlo_common.search._compat import study_number
from nnlo_common.search.coordinator._endings import end_in
from nnlo_common.search.journal._record import Record

__all__ = ["Export", "exportable"]

_LOG = logging.getLogger(__name__)
_JOURNAL = "nnlo:journal"
_SUFFIXES = (".db", ".sqlite3", ".log")
_EVERY_S = 0.5
# What SQLite says where a dashboard, opened at the same moment, makes the same tables.
_RACED = ("already exists", "UNIQUE constraint failed: alembic_version")
# How long SQLite waits for somebody else's lock, and the end of a search for the last to be written.
_LOCKED_S, _LAST_S = 10, 30.0
# A lock that is held for longer is that of a job that was killed: each is held for one line.
_STALE_S = 3


def exportable(export: str | Path) -> Path:
    """Return the path of an export, or refuse what nothing can be exported to.

    Raises:
        ConfigurationError: its end says neither SQLite nor Optuna's journal.
    """
    path = Path(export)
    if path.suffix not in _SUFFIXES:
        raise ConfigurationError(
            f"export={str(path)!r}: its end says how to write it; use .db or .sqlite3 for SQLite, .log for a "
            "journal of Optuna"
        )
    return path


class Export(Record):
    """A file that follows a study.

    Args:
        path: the file; made if it is not there. Other studies in it are kept.
        study: what it follows.
        journal: from what the search goes on. What an earlier job with the same has exported is in the study,
            which takes its place. Otherwise a name that is taken gets a number.
    """

    def __init__(self, path: str | Path, study: optuna.Study, *, journal: str | Path | None = None) -> None:
        self._path = usable(f"export={str(path)!r}", exportable(path))
        self._study, self._journal = study, journal and str(Path(journal).absolute())
        nameless = study.study_name.startswith("no-name")  # Optuna's, another each time
        self._name = self._path.stem if nameless else study.study_name
        self._storage: BaseStorage | None = None
        self._study_id = -1
        self._ids: list[int] = []  # by number of the trial
        self._open: set[int] = set()  # numbers of those that have not ended there
        self._warned = ""
        self._news, self._closing = threading.Event(), threading.Event()
        self._news.set()
        self._thread = threading.Thread(target=self._follow, name="nnlo export", daemon=True)
        self._thread.start()

    def begun(self, trial: FrozenTrial) -> None:  # noqa: ARG002
        """A trial has begun."""
        self._news.set()

    def finished(self, trial: FrozenTrial) -> None:  # noqa: ARG002
        """A trial has finished."""
        self._news.set()

    def close(self) -> None:
        """Nothing more will come."""
        self._closing.set()
        self._news.set()
        self._thread.join(_LAST_S)
        if self._thread.is_alive():
            self._warn("it is not all written", f"after {_LAST_S:.0f} s")

    # -- in the thread --------------------------------------------------------------------------------

    def _follow(self) -> None:
        closing = False
        while not closing:
            self._news.wait()
            self._news.clear()
            closing = self._closing.is_set()
            try:
                self._write()
            except Exception as error:  # whatever it is, the search goes on; the next news tries again
                self._warn(f"{type(error).__name__}: {error}", "it is tried again with the next trial")
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
                f"{type(error).__name__}: {error}", f"the file is {aside.name} now, and another is begun"
            )
            return self._begun_in(self._storage_of())

    def _storage_of(self) -> BaseStorage:
        if self._path.suffix == ".log":
            lock = JournalFileSymlinkLock(str(self._path), grace_period=_STALE_S)
            return JournalStorage(JournalFileBackend(str(self._path), lock))
        options = {"connect_args": {"timeout": _LOCKED_S}}
        return RDBStorage(f"sqlite:///{self._path.absolute()}", engine_kwargs=options)

    def _begun_in(self, storage: BaseStorage) -> BaseStorage:
        """Make this study's place in a storage."""
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
