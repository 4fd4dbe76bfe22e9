"""Source of trials: gives the coordinator the next trial and receives each result.

Its chooser decides when there is one, and handles the search ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from nnlo_common.base._errors import ProtocolError
from nnlo_common.search.coordinator._running_trial import RunningTrial
from nnlo_common.search.messages._channels import Death, TeamMessage
from nnlo_common.search.messages._search_messages import Chosen, Done, SearchMessage, Start

__all__ = ["TrialChooser", "TrialSource"]


class TrialChooser(ABC):
    """Chooses the trials of a source; by default nothing ahead, and without search ranks."""

    @property
    @abstractmethod
    def open(self) -> bool:
        """Whether there may be another trial to begin."""

    @property
    def pending(self) -> bool:
        """Whether a trial is chosen, or being chosen, and waits for a block."""
        return False

    @abstractmethod
    def left(self) -> float:
        """Return how many trials are left to begin; infinite: an unknown number."""

    def think(self, living: int) -> bool:  # noqa: ARG002
        """Choose a trial ahead while all blocks train; return whether there was one to choose."""
        return False

    def orders(self, idle: int, living: int) -> list[TeamMessage]:  # noqa: ARG002
        """Return orders for search ranks, given the idle and the living blocks."""
        return []

    def chosen(self, team: int, message: Chosen) -> None:
        """Handle a search rank's choice."""
        raise ProtocolError(f"team {team} sent {message!r}, but there are no search ranks")

    def lose_search_rank(self, team: int) -> int:
        """Handle the death of a search rank; return how many are left."""
        raise ProtocolError(f"team {team} has died, but there are no search ranks")


class TrialSource(ABC):
    """Source of trials: an Optuna study, or an oracle of keras-tuner. Optional methods do nothing here.

    Attributes:
        chooser: chooses the trials.
        stop_reason: why the search must end now; empty while it continues.
    """

    chooser: TrialChooser
    stop_reason = ""

    @abstractmethod
    def take(self, block: int, *, first: bool, living: int) -> Any:
        """Return the next trial for a block, an object with a `number`; None if there is none now.

        `first`: no block has a trial yet; `living`: blocks still alive.
        """

    @abstractmethod
    def start(self, running: RunningTrial, run: int, fold: int) -> Start:
        """Return the message that makes a team train a fold of a trial as this run."""

    @abstractmethod
    def handle(self, team: int, running: RunningTrial, message: SearchMessage) -> list[TeamMessage]:
        """Handle a message from a team's leader about its trial; return the replies."""

    def judged(self, running: RunningTrial) -> list[TeamMessage]:  # noqa: ARG002
        """Send a trial's teams the pruner's verdict once all have asked."""
        return []

    def fold_done(self, running: RunningTrial, fold: int, message: Done) -> None:  # noqa: B027
        """Handle a complete fold of a trial."""

    def add_helpers(self, running: RunningTrial, blocks: Iterable[int], now_s: float) -> None:  # noqa: B027
        """Record that blocks help to train a trial from now on."""

    @abstractmethod
    def tell(self, running: RunningTrial, *, interrupted: bool, stopped: bool) -> None:
        """Handle the end of a trial.

        `stopped`: running trials are halted; `interrupted`: they are, and the next start trains them again.
        """

    @abstractmethod
    def withdraw(self, reason: str) -> None:
        """Begin no more trials."""

    @abstractmethod
    def finish(self, lost: Sequence[Death]) -> tuple[dict[str, Any], ...]:
        """End the search, without the ranks that died; return the results for all ranks."""

    @abstractmethod
    def warn(self, text: str) -> None:
        """Warn the user."""
