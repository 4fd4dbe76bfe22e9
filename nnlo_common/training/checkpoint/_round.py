"""Round of a checkpoint: write this rank's part to the disk while the training runs.

    all pause ─► each copies what it has ─► all go on
                      └─ a thread writes it ─► the first server is told ─► once it knows of all: the manifest

Only the threads that belong to the ranks' programs send messages, so what a thread has written is told at the
next batch boundary of a worker, and within half a second by a server.
"""

from __future__ import annotations

import copy
import logging
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from nnlo_common.base._warnings import warn
from nnlo_common.training._roles import speaks
from nnlo_common.training._session import Session
from nnlo_common.training.checkpoint import Draft, Entry, Store
from nnlo_common.training.checkpoint._store import refused
from nnlo_common.training.checkpoint._writer import Writer

__all__ = ["Saving"]

_LOG = logging.getLogger(__name__)

# A rank asks so often whether it may write yet, where the first server is not ready for it.
_ASK_AGAIN_S = 0.02
# To wait for the disk for longer than this is worth a word.
_LONG_WAIT_S = 1.0


class Saving:
    """Writes this rank's part of each checkpoint; on the first server also completes it.

    Args:
        store: where to.
        team: this rank's place among several; None: alone.
        file: the name of this rank's file.
        collect: returns what this rank has to save.
        pack: makes bytes of it.
        facts: returns which training this is, by name, and how far it is.

    Attributes:
        score: how good the model is, for the next checkpoint.
        ending: all ranks leave after the checkpoint that has been made.
        recalled: they do so for a search, which has more ranks go on; not for a signal.
    """

    def __init__(
        self,
        store: Store,
        team: Session | None,
        *,
        file: str,
        collect: Callable[[], Mapping[str, Any]],
        pack: Callable[[Mapping[str, Any]], bytes],
        facts: Callable[[], Mapping[str, Any]],
    ) -> None:
        self.score: float | None = None
        self.ending = self._end = self.recalled = self._last = False
        self._store, self._team, self._file = store, team, file
        self._collect, self._pack, self._facts = collect, pack, facts
        self._rank = 0 if team is None else team.rank
        self._speaks = speaks("alone" if team is None else team.member.role)
        self._writer = Writer()
        self._waited_long = self._left_out = False  # which was said
        self._untold: list[str] = []  # warnings
        self._written: Mapping[str, Any] | None = None  # what the thread has to tell
        self._wanted = self._opening = False  # on the first server: a checkpoint at the next pause
        self._number: int | None = None  # of what is written after the pause that was made last
        self._draft: Draft | None = None
        self._expected: set[int] = set()
        self._reported: set[int] = set()
        self._settled: set[int] = set()  # who will not confirm any more
        self._trouble = ""
        self._complete: Callable[[Draft], object] = lambda draft: None
        store.tell = self._untold.append  # a thread does not warn
        if team is not None:
            team.before_close = self.finish
        if team is not None and team.serving is not None:
            team.serving.on_pause, team.serving.on_look = self._on_pause, self.settle
            team.serving.answer(self._answer)

    # -- what every rank does -------------------------------------------------------------------------

    def want(self, *, end: bool) -> None:
        """Have all ranks save at their next batch boundary: alone at once, on a server when a worker asks."""
        if self._team is None:
            self.save()
            self.ending = end
        elif not self._team.serves:
            self._team.ask({"ask": "checkpoint", "do": "want", "end": end})

    def save(self, *, last: bool = False) -> bool:
        """Save together with all other ranks, who all call it between two batches.

        Args:
            last: the training ends here, so nobody leaves it for others to go on.

        Returns:
            False, if it was called off on this worker: others wait for it to go on.
        """
        self._wait()
        if self._team is None:
            tree, facts, score = self._copy(), self._facts(), self.score
            self._writer.start(lambda: self._store.save({self._file: self._pack(tree)}, facts, score))
            return True
        self._wanted, self._last = self._speaks, last
        if not self._team.pause():
            return False
        if self._team.serving is None:
            self._save_part()
        return True

    def settle(self) -> None:
        """Tell what the thread has done since; to be called between any two batches."""
        if self._writer.busy:
            return
        self._writer.wait()
        untold, self._untold[:] = list(self._untold), []
        for text in untold:
            warn(text)
        written, self._written = self._written, None
        if self._speaks:
            self._take(self._rank, written)
        elif written is not None and self._team is not None:
            self._team.ask({"ask": "checkpoint", "do": "report", **written})

    def finish(self) -> None:
        """Wait until what was begun is on the disk, on all ranks; all of them call it."""
        self._wait()
        if self._team is not None and not self._speaks:
            self._team.ask({"ask": "checkpoint", "do": "settled"})
        self._complete_draft()

    def _wait(self) -> None:
        """Wait for this rank's thread."""
        waited_s = self._writer.wait()
        if waited_s > _LONG_WAIT_S and not self._waited_long:
            self._waited_long = True
            _LOG.warning(
                "nnlo: rank %d has waited %.1f s for a checkpoint to be written to %s, as the next was due; "
                "save less often, or to a faster disk",
                *(self._rank, waited_s, self._store.folder),
            )
        self.settle()

    def _save_part(self) -> None:
        """Copy what there is, and have it written, unless the first server has begun no checkpoint."""
        assert self._team is not None
        tree = self._copy()
        self._wait()
        # A server may see that all pause before the first server does.
        pauses = 0 if self._team.serving is None else self._team.serving.pauses
        question = {"ask": "checkpoint", "do": "number", "pauses": pauses}
        while (answer := self._team.ask(question)).get("wait"):
            time.sleep(_ASK_AGAIN_S)
        number, self.ending = answer.get("number"), answer.get("end", False)
        self.recalled = answer.get("recalled", False)
        if number is not None:
            self._start(self._store.draft(number), tree)

    def _copy(self) -> Mapping[str, Any]:
        return copy.deepcopy(self._collect())

    def _start(self, draft: Draft, tree: Mapping[str, Any]) -> None:
        def write() -> None:
            try:
                draft.write(self._file, self._pack(tree))
            except OSError as error:
                told = f"rank {self._rank} on host {socket.gethostname()}: {refused(error)} ({draft.folder})"
                self._written = {"number": draft.number, "trouble": told}
                return
            entry = draft.files[self._file]
            told_entry = {"file": self._file, "size": entry.size, "blake2b": entry.blake2b}
            self._written = {"number": draft.number, **told_entry}

        self._writer.start(write)

    # -- what servers do ------------------------------------------------------------------------------

    def _on_pause(self) -> None:
        """On a server: all workers pause."""
        assert self._team is not None
        assert self._team.serving is not None
        if not self._speaks:
            self._save_part()
            return
        wanted, self._wanted, self._number = self._wanted, False, None
        if not wanted:
            return
        tree, facts, score = self._copy(), self._facts(), self.score
        expected = self._team.serving.saving() | {self._rank}
        # Workers have confirmed what they have written, other servers perhaps not yet.
        self._opening, self._settled = True, self._team.serving.workers()
        self._complete_draft()
        self._opening, self.recalled = False, not self._end and not self._last and self._is_recalled()
        self.ending = self._end = self._end or self.recalled
        self._draft = self._store.begin()
        if self._draft is None:
            self.settle()
            return
        self._number = self._draft.number
        self._expected, self._reported, self._settled, self._trouble = expected, set(), set(), ""
        self._complete = lambda draft: self._store.commit(draft, facts, score)
        self._start(self._draft, tree)

    def _is_recalled(self) -> bool:
        """Say whether a search has more ranks to go on with this training, and it can go on with them."""
        assert self._team is not None
        return self._team.world.recalled and not self._team.algorithm.tied_to_workers

    def _answer(self, rank: int, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """On the first server: answer a rank."""
        if content["do"] == "want":
            self._take_wish(end=content["end"])
        elif content["do"] == "number":
            assert self._team is not None
            assert self._team.serving is not None  # who answers for several serves
            wait = self._opening or content["pauses"] > self._team.serving.pauses
            return {"number": self._number, "end": self._end, "recalled": self.recalled, "wait": wait}
        elif content["do"] == "settled":
            self._settled.add(rank)
            self._take(rank, None)
        else:
            self._take(rank, content)
        return {}

    def _take_wish(self, *, end: bool) -> None:
        assert self._team is not None
        assert self._team.serving is not None  # who answers for several serves
        self._end |= end
        self.settle()
        if (self._draft is not None or self._writer.busy) and not end:
            level = logging.DEBUG if self._left_out else logging.WARNING
            self._left_out = True
            _LOG.log(
                level,
                "nnlo: a checkpoint is still being written to %s, so the one that is due is left out; save "
                "less often, or to a faster disk",
                self._store.folder,
            )
        elif not self._wanted:
            self._wanted = True
            self._team.serving.want_pause()

    def _take(self, rank: int, written: Mapping[str, Any] | None) -> None:
        """On the first server: take note of what a rank has written, and complete what all have."""
        if self._draft is None:
            return
        if written is not None and written["number"] == self._draft.number:
            self._reported.add(rank)
            self._trouble = written.get("trouble", self._trouble)
            if "file" in written:
                self._draft.files[written["file"]] = Entry(written["size"], written["blake2b"])
        if self._awaited() or self._writer.busy:
            return
        missing = self._expected - self._reported
        if missing and not self._trouble:
            assert self._team is not None
            assert self._team.serving is not None  # alone nobody is missed
            rank = min(missing)
            died = rank in self._team.serving.lost()
            self._trouble = f"rank {rank} has {'died before it had' if died else 'not'} written its part"
        draft, self._draft = self._draft, None
        if self._trouble:
            self._writer.start(lambda: self._store.abandon(draft, self._trouble))
        else:
            self._writer.start(lambda: self._complete(draft))

    def _awaited(self) -> set[int]:
        """Who is still to tell that its part is written."""
        if self._team is None or self._team.serving is None:
            return set()
        return self._expected - self._reported - self._settled - self._team.serving.lost()

    def _complete_draft(self) -> None:
        """Wait until what was begun has its name, or is given up."""
        self._wait()
        if self._draft is not None:
            assert self._team is not None
            assert self._team.serving is not None
            self._team.serving.wait_until(lambda: not self._awaited())
            self._wait()
        self._wait()  # for what was completed meanwhile
