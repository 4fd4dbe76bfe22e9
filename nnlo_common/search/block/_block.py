"""Block rank: run trial after trial, call the objective, and agree with the block on each end."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from optuna import TrialPruned

from nnlo_common.base._errors import ConfigurationError, PeerLostError
from nnlo_common.base._signals import EXIT_CODE, LeftTogether
from nnlo_common.cluster.transport._mail import DivisibleWorld, PartWorld
from nnlo_common.search._mailbox import Mailbox
from nnlo_common.search._messages import Alarm, Done, End, Outcome, Start
from nnlo_common.search.block._block_world import BlockWorld
from nnlo_common.search.block._trial import BlockTrial, Line, OfficeLine
from nnlo_common.search.coordinator._failures import kind_of
from nnlo_common.training._joining import within

__all__ = ["Objective", "attempt", "run_block"]

Objective: TypeAlias = Callable[[Any], Any]

_DRAIN_PAUSE_S = 1e-3
# Ranks that save and leave do it together, each when its part of the checkpoint is on the disk.
_LEAVING_S = 60.0
_LEFT, _AT_A_SIGNAL = "left", "broken off: the training in it has saved and left at a signal"


def run_block(mailbox: Mailbox, ranks: DivisibleWorld, objective: Objective) -> End:
    """Train what the coordinator hands out, until it ends the search.

    Args:
        mailbox: this rank's letters.
        ranks: all ranks of the search.
        objective: the user's.
    """
    parts = _Parts(mailbox, ranks)
    while isinstance(order := mailbox.next_order(), Start):
        try:
            part = parts.of(order)
        except PeerLostError as lost:  # of which the coordinator knows by itself
            mailbox.tell_partners(Outcome(order.run, "freed", (), str(lost), "", ()))
            continue
        world = BlockWorld(part, mailbox)
        where = f"on rank {world.rank} of the block, host {world.host}:\n"
        with within(world):
            ending = attempt(order, OfficeLine(mailbox, world), objective, end=world.end, where=where)
        patience_s = _LEAVING_S if ending.failure == _LEFT else 0.0
        if ending.state == "freed" and mailbox.halted:
            ending = Done(order.run, "halted", error=f"broken off: {mailbox.halted}")
        outcome = Outcome(order.run, ending.state, ending.values, ending.error, ending.failure, world.sent)
        problem = (ending.error.strip() or outcome.state).splitlines()[-1]
        alarm = Alarm(order.run, f"has ended the trial: {problem}", world.gathered)
        outcomes = _settle(mailbox, world, outcome, alarm, patience_s)
        world.close()
        if world.rank == 0 and not mailbox.lost:  # of a death the coordinator knows by itself
            mailbox.tell_coordinator(_together(order.run, outcomes))
    parts.close()
    return order


class _Parts:
    """Those that train together, to begin with and later: their own world is kept, to fall back upon."""

    def __init__(self, mailbox: Mailbox, ranks: DivisibleWorld) -> None:
        self._mailbox, self._ranks = mailbox, ranks
        self._first_members, self._first = mailbox.members, ranks.part(mailbox.members)
        self._joint: PartWorld | None = None

    def of(self, order: Start) -> PartWorld:
        """Return the world of who is to train a run (collective over them).

        Raises:
            PeerLostError: one of them has died.
        """
        if order.members:
            self._close_joint()
            self._mailbox.regroup(order.members)
            if order.members != self._first_members:
                self._joint = self._ranks.part(order.members)
        return self._joint or self._first

    def close(self) -> None:
        self._close_joint()
        self._first.close()

    def _close_joint(self) -> None:
        joint, self._joint = self._joint, None
        if joint is not None:
            joint.close()


def attempt(
    start: Start,
    line: Line,
    objective: Objective,
    *,
    end: Callable[[], object] = lambda: None,
    where: str = "",
) -> Done:
    """Run the objective once, and say how it has ended on this rank.

    Args:
        start: the trial.
        line: how it reaches the coordinator.
        objective: the user's.
        end: done when the objective has returned, as a part of it.
        where: which rank this is, for messages; empty alone.
    """
    try:
        result = objective(BlockTrial(start, line))
        end()
        return Done(start.run, "complete", _numbers(result, start.directions))
    except TrialPruned as pruned:
        return Done(start.run, "pruned", error=str(pruned) or "pruned")
    except PeerLostError as lost:
        return Done(start.run, "freed", error=str(lost))
    except LeftTogether as left:
        state, error = ("recalled", "") if left.recalled else ("halted", _AT_A_SIGNAL)
        return Done(start.run, state, error=error, failure=_LEFT)
    except SystemExit as left:
        if left.code != EXIT_CODE:
            raise
        return Done(start.run, "halted", error=_AT_A_SIGNAL)
    except Exception as error:  # it is the trial that has failed, whatever the reason; the search goes on
        text = "".join(traceback.format_exception(error))
        return Done(start.run, "failed", error=f"{where}{text}", failure=kind_of(error))


def _numbers(result: object, directions: int) -> tuple[float, ...]:
    values: Sequence[Any]
    values = result if isinstance(result, Sequence) and not isinstance(result, str) else [result]
    found = []
    for value in values:
        try:
            found.append(float(value))
        except (TypeError, ValueError):
            break
    if len(found) != len(values) or len(found) != directions:
        wanted = "a number" if directions == 1 else f"{directions} numbers"
        raise ConfigurationError(f"the objective returned {result!r}; the study needs {wanted}")
    return tuple(found)


def _settle(
    mailbox: Mailbox, world: BlockWorld, mine: Outcome, alarm: Alarm, patience_s: float
) -> list[Outcome]:
    """Wait until all living ranks have ended the run and nothing is under way between them.

    Args:
        mailbox: this rank's letters.
        world: the ranks.
        mine: how this rank has ended the run.
        alarm: what frees those that wait for this rank, unless it has completed the run.
        patience_s: how long they are left alone, as they are to leave by themselves.
    """
    mailbox.tell_partners(mine)
    outcomes = {world.rank: mine}
    told, until_s = mine.state == "complete", time.monotonic() + patience_s
    while outcomes.keys() | mailbox.lost < set(range(world.size)):
        if not told and time.monotonic() >= until_s:
            told = True
            mailbox.tell_partners(alarm)
        if mailbox.lost:
            world.revoke()
        world.drain()  # a partner may be unable to go on before this rank has taken in what it sent
        while (letter := mailbox.taken(Outcome)) is not None:
            outcomes[letter[0]] = letter[1]
        if len(outcomes) < world.size:
            mailbox.take_in(_DRAIN_PAUSE_S)
    while not world.drained({rank: outcomes[rank].sent for rank in outcomes.keys() - mailbox.lost}):
        world.drain()
        mailbox.take_in(0)
    return [outcomes[rank] for rank in sorted(outcomes)]


def _together(run: int, outcomes: Sequence[Outcome]) -> Done:
    """Say how the ranks have ended the run: it fails with any of them."""
    for state in ("failed", "halted", "pruned", "recalled"):
        for outcome in outcomes:
            if outcome.state == state:
                return Done(run, state, error=outcome.error, failure=outcome.failure)
    first = outcomes[0]
    if first.state == "complete":
        return Done(run, "complete", first.values)
    return Done(run, "failed", error=first.error, failure="error")
