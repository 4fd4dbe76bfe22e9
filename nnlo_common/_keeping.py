"""One rank's part in the checkpoints of a training: each writes its own file, the first server the rest."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from nnlo_common._errors import ConfigurationError
from nnlo_common._identity import difference
from nnlo_common._roles import speaks
from nnlo_common._team import Team
from nnlo_common.checkpoint import Checkpoint, DamagedError, Draft, Entry, Store
from nnlo_common.checkpoint._hold import hold

__all__ = ["Keeper"]

_ANEW = "name another folder, or delete this one to begin anew"


class Keeper:
    """Writes and reads the checkpoints of a run, together with those of the other ranks.

    All ranks have to see the folder: each writes what it alone knows, and the rank whose model is the centre
    begins and completes the checkpoint. A checkpoint that fails on one rank is none; the training goes on.

    Args:
        folder: of the run, on a file system that all hosts share.
        team: this rank's place among several; None: alone.
        keep: how many checkpoints to keep, besides the best.
        better: whether lower or higher scores are better.
        suffix: of the files.
        collect: returns what this rank has to save.
        facts: returns which training this is, by name, and how far it is.

    Attributes:
        score: how good the model is, for the next checkpoint.
        ending: all ranks leave after the checkpoint that has been made.
    """

    def __init__(
        self,
        folder: str | Path,
        team: Team | None,
        *,
        keep: int,
        better: Literal["min", "max"],
        suffix: str,
        collect: Callable[[], bytes],
        facts: Callable[[], Mapping[str, Any]],
    ) -> None:
        self.store = Store(folder, keep=keep, better=better)
        self.score: float | None = None
        self.ending = self._end = False
        self._team, self._collect, self._facts = team, collect, facts
        self._rank = 0 if team is None else team.rank
        self._file = f"rank{self._rank}.{suffix}"
        self._speaks = speaks("alone" if team is None else team.member.role)
        self._draft: Draft | None = None
        self._expected: set[int] | None = None  # once all pause
        self._reported: set[int] = set()
        self._trouble = ""
        if team is not None and team.serving is not None:
            team.serving.on_pause = self._on_pause
            team.serving.answer(self._answer)

    # -- writing --------------------------------------------------------------------------------------

    def request(self, *, end: bool) -> None:
        """Have all ranks save at their next batch boundary: alone at once, on a server when a worker asks.

        Args:
            end: whether all are to leave then.
        """
        if self._team is None:
            self.save()
            self.ending = end
        elif not self._team.serves:
            self._team.ask({"ask": "checkpoint", "do": "want", "end": end})

    def save(self) -> bool:
        """Save together with all other ranks, who all call it between two batches.

        Returns:
            False, if it was called off on this worker: others wait for it to go on.
        """
        if self._team is None:
            self.store.save({self._file: self._collect()}, self._facts(), self.score)
            return True
        if self._speaks and self._draft is None:
            self._begin()
        if not self._team.pause():
            return False
        if self._team.serving is None:
            self._write()
        return True

    def _begin(self) -> bool:
        self._draft, self._expected, self._reported, self._trouble = self.store.begin(), None, set(), ""
        return self._draft is not None

    def _on_pause(self) -> None:
        """On a server: all workers pause."""
        if not self._speaks:
            self._write()
            return
        assert self._team is not None
        assert self._team.serving is not None
        if self._draft is None:
            return
        self._expected = self._team.serving.saving() | {self._rank}
        self.ending = self._end
        self._report(self._rank, self._written(self._draft))

    def _write(self) -> None:
        assert self._team is not None
        answer = self._team.ask({"ask": "checkpoint", "do": "number"})
        number, self.ending = answer.get("number"), answer.get("end", False)
        if number is not None:
            draft = self.store.draft(number)
            self._team.ask({"ask": "checkpoint", "do": "report", **self._written(draft)})

    def _written(self, draft: Draft) -> dict[str, Any]:
        try:
            draft.write(self._file, self._collect())
        except OSError as error:
            host = socket.gethostname()
            return {"trouble": f"rank {self._rank} on host {host}: {error.strerror} ({draft.folder})"}
        entry = draft.files[self._file]
        return {"file": self._file, "size": entry.size, "blake2b": entry.blake2b}

    def _answer(self, rank: int, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """On the first server: answer a rank."""
        if content["do"] == "want":
            self._end |= content["end"]
            assert self._team is not None
            assert self._team.serving is not None  # who answers for several serves
            if self._draft is None and self._begin():
                self._team.serving.want_pause()
        elif content["do"] == "number":
            return {"number": None if self._draft is None else self._draft.number, "end": self._end}
        else:
            self._report(rank, content)
        return {}

    def _report(self, rank: int, content: Mapping[str, Any]) -> None:
        if self._draft is None:
            return
        self._reported.add(rank)
        if "trouble" in content:
            self._trouble = content["trouble"]
        else:
            self._draft.files[content["file"]] = Entry(content["size"], content["blake2b"])
        if self._expected is None or not self._expected <= self._reported:
            return
        draft, self._draft = self._draft, None
        if self._trouble:
            self.store.abandon(draft, self._trouble)
        else:
            self.store.commit(draft, self._facts(), self.score)

    # -- reading --------------------------------------------------------------------------------------

    def resume(
        self,
        load: Callable[[bytes], None],
        load_for_others: Callable[[bytes | None, Mapping[str, Any]], None],
    ) -> Mapping[str, Any] | None:
        """Go on from the newest checkpoint that is whole (collective).

        Args:
            load: takes what this rank has saved.
            load_for_others: takes it where there are other workers now; None on a worker.

        Returns:
            Its facts; None where there is none.

        Raises:
            ConfigurationError: it is of another training, or no checkpoint is whole; on all ranks alike.
        """
        found = self._agreed(self._find)
        number = max(int(one) for one in found)
        if not number:
            return None
        facts: dict[str, Any] = {}

        def take() -> str:
            checkpoint = Checkpoint.open(self.store.path(number), number)
            facts.update(checkpoint.manifest.facts)
            others = self._check(facts)
            name = self._file
            if not others:
                load(checkpoint.read(name))
            else:
                serves = self._team is not None and self._team.serves
                load_for_others(checkpoint.read(name) if serves else None, facts)
            return ""

        self._agreed(take)
        return facts

    def _find(self) -> str:
        if not self._speaks:
            return "0"
        hold(self.store.folder)
        newest = self.store.newest()
        return "0" if newest is None else str(newest.manifest.number)

    def _check(self, saved: Mapping[str, Any]) -> bool:
        """Refuse the checkpoint of another training; return whether there are other workers now."""
        here = self._facts()
        problem = difference(saved, here)
        if problem:
            raise self._refusal(f"is of another training: {problem}")
        if saved["workers"] == here["workers"]:
            return False
        reason = "it was not saved by several ranks"
        if self._team is not None and saved["workers"]:
            reason = self._team.algorithm.tied_to_workers
        if reason:
            raise self._refusal(
                f"was saved with {saved['workers']} workers, and now there are {here['workers']}: {reason}",
            )
        return True

    def _agreed(self, what: Callable[[], str]) -> list[str]:
        """Do something on all ranks and return what each has found; what one refuses, all do (collective)."""
        try:
            mine = {"found": what(), "problem": ""}
        except (ConfigurationError, DamagedError) as error:
            mine = {"found": "0", "problem": str(error)}
        if self._team is None:
            everyone = [mine]
        else:
            everyone = [json.loads(text) for text in self._team.world.gather_text(json.dumps(mine))]
        for rank, one in enumerate(everyone):
            if one["problem"]:
                where = "" if self._team is None else f"rank {rank}: "
                refusal = ConfigurationError(where + one["problem"])
                refusal.collective = True
                raise refusal
        return [one["found"] for one in everyone]

    def _refusal(self, found: str) -> ConfigurationError:
        return ConfigurationError(f"the newest checkpoint in {self.store.folder} {found}; {_ANEW}")
