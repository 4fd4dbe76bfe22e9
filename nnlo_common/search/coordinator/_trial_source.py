"""Source of trials: gives the coordinator the next trial, and learns how each has ended."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from nnlo_common.base._errors import ProtocolError
from nnlo_common.search.coordinator._running_trial import RunningTrial
from nnlo_common.search.messages._search_messages import Chosen, Done, SearchMessage, Start
from nnlo_common.search.messages._team_events import Death, TeamMessage

__all__ = ["TrialSource"]


class TrialSource(ABC):
    """An Optuna study, or an oracle of keras-tuner. Methods that not all sources need do nothing here.

    Attributes:
        stop_reason: why the search has to end now; empty while it goes on.
    """

    stop_reason = ""

    @property
    @abstractmethod
    def open(self) -> bool:
        """Whether there may be another trial to begin."""

    @property
    def pending(self) -> bool:
        """Whether a trial is chosen, or being chosen, that a block is to begin."""
        return False

    @abstractmethod
    def left(self) -> float:
        """Return how many trials are left to begin; infinite: some, but nobody knows how many."""

    @abstractmethod
    def take(self, block: int, *, first: bool, living: int) -> Any:
        """Return the next trial for a block, which has a `number`; None if there is none now.

        `first`: no block has a trial yet; `living`: how many blocks there are.
        """

    def think(self, living: int) -> bool:  # noqa: ARG002
        """Choose a trial ahead while all blocks train; say whether there was one to choose."""
        return False

    def orders(self, idle: int, living: int) -> list[TeamMessage]:  # noqa: ARG002
        """Return what search ranks have to do, with so many idle blocks of so many."""
        return []

    def chosen(self, team: int, message: Chosen) -> None:
        """A search rank has chosen."""
        raise ProtocolError(f"team {team} sent {message!r}, but there are no search ranks")

    def lose_search_rank(self, team: int) -> int:
        """A search rank has died; return how many are left."""
        raise ProtocolError(f"team {team} has died, but there are no search ranks")

    @abstractmethod
    def start(self, running: RunningTrial, run: int, fold: int) -> Start:
        """Return what makes a team train a fold of a trial, as this run."""

    @abstractmethod
    def handle(self, team: int, running: RunningTrial, message: SearchMessage) -> list[TeamMessage]:
        """Take in what the leader of a team says of its trial, and return what to answer."""

    def judged(self, running: RunningTrial) -> list[TeamMessage]:  # noqa: ARG002
        """Answer the teams of a trial once all have asked whether to prune it."""
        return []

    def fold_done(self, running: RunningTrial, fold: int, message: Done) -> None:  # noqa: B027
        """A fold of a trial is complete."""

    def add_helpers(self, running: RunningTrial, blocks: Iterable[int], now_s: float) -> None:  # noqa: B027
        """Blocks help to train a trial from now on."""

    @abstractmethod
    def tell(self, running: RunningTrial, *, interrupted: bool, stopped: bool) -> None:
        """Take in the end of a trial.

        `stopped`: trials are broken off; `interrupted`: they are, and the same command trains them again.
        """

    @abstractmethod
    def withdraw(self, reason: str) -> None:
        """Begin no more trials."""

    @abstractmethod
    def finish(self, lost: Sequence[Death]) -> tuple[dict[str, Any], ...]:
        """End the search, without the ranks that died; return what all ranks are to know of it."""

    @abstractmethod
    def warn(self, text: str) -> None:
        """Warn the user."""
