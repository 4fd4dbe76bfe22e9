"""Block rank: runs trial after trial, calls the objective, and agrees with the block on each result."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from optuna import TrialPruned

from nnlo_common.base._errors import ConfigurationError, PeerLostError
from nnlo_common.base._signals import EXIT_CODE, LeftTogether
from nnlo_common.cluster.transport._endpoint import DivisibleWorld, PartWorld
from nnlo_common.search.block._block_world import BlockWorld
from nnlo_common.search.block._trial import BlockTrial
from nnlo_common.search.block._trial_links import BlockLink, TrialLink
from nnlo_common.search.coordinator._failure_kinds import kind_of
from nnlo_common.search.messages._rank_channel import RankChannel
from nnlo_common.search.messages._search_messages import Alarm, Done, End, RunOutcome, Start
from nnlo_common.training._joining import within

__all__ = ["Objective", "attempt", "run_block"]

Objective: TypeAlias = Callable[[Any], Any]

_DRAIN_PAUSE_S = 1e-3
# Ranks save and leave together; each needs this long at most to write its part of the checkpoint.
_LEAVING_S = 60.0
_LEFT, _AT_A_SIGNAL = "left", "broken off: its training saved at a signal and left"


def run_block(channel: RankChannel, ranks: DivisibleWorld, objective: Objective) -> End:
    """Train the trials that the coordinator sends, until it ends the search.

    Args:
        channel: this rank's channel to the coordinator and its partners.
        ranks: all ranks of the search.
        objective: the user's objective.
    """
    parts = _Parts(channel, ranks)
    while isinstance(order := channel.next_order(), Start):
        try:
            part = parts.of(order)
        except PeerLostError as lost:  # the coordinator sees the death itself
            channel.tell_partners(RunOutcome(order.run, "freed", (), str(lost), "", (), ()))
            continue
        world = BlockWorld(part, channel)
        where = f"on rank {world.rank} of the block, host {world.host}:\n"
        with within(world):
            ending = attempt(order, BlockLink(channel, world), objective, end=world.end, where=where)
        patience_s = _LEAVING_S if ending.failure == _LEFT else 0.0
        found = ending.state, ending.values, ending.error, ending.failure
        outcome = RunOutcome(order.run, *found, world.sent, world.grouped)
        problem = (ending.error.strip() or outcome.state).splitlines()[-1]
        alarm = Alarm(order.run, f"has ended the trial: {problem}", world.gathered)
        outcomes = _settle(channel, world, outcome, alarm, patience_s)
        world.close()
        if world.rank == 0 and not channel.lost:  # the coordinator sees a death itself
            channel.tell_coordinator(_combined(order.run, outcomes))
    parts.close()
    assert isinstance(order, End)
    return order


class _Parts:
    """The worlds that this rank trains in: that of its first team, which is kept, and one of united teams."""

    def __init__(self, channel: RankChannel, ranks: DivisibleWorld) -> None:
        self._channel, self._ranks = channel, ranks
        self._first_members, self._first = channel.members, ranks.part(channel.members)
        self._joint: PartWorld | None = None

    def of(self, order: Start) -> PartWorld:
        """Return the world that trains a run (collective over it).

        Raises:
            PeerLostError: one of its ranks died.
        """
        if order.members:
            self._close_joint()
            self._channel.regroup(order.members)
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
    line: TrialLink,
    objective: Objective,
    *,
    end: Callable[[], object] = lambda: None,
    where: str = "",
) -> Done:
    """Run the objective once and return its result on this rank.

    Args:
        start: the trial.
        line: the trial's link to the coordinator.
        objective: the user's objective.
        end: called when the objective has returned; its errors count as the objective's.
        where: names this rank in messages; empty on a single process.
    """
    try:
        result = objective(BlockTrial(start, line))
        end()
        return Done(start.run, "complete", _numbers(result, start.directions))
    except TrialPruned as pruned:
        return Done(start.run, "pruned", error=str(pruned) or "pruned")
    except PeerLostError as lost:
        return (
            Done.halted(start.run, line.halted) if line.halted else Done(start.run, "freed", error=str(lost))
        )
    except LeftTogether as left:
        state, error = ("recalled", "") if left.recalled else ("halted", _AT_A_SIGNAL)
        return Done(start.run, state, error=error, failure=_LEFT)
    except SystemExit as left:
        if left.code != EXIT_CODE:
            raise
        return Done(start.run, "halted", error=_AT_A_SIGNAL)
    except Exception as error:  # any error fails only the trial; the search continues
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
    channel: RankChannel, world: BlockWorld, mine: RunOutcome, alarm: Alarm, patience_s: float
) -> list[RunOutcome]:
    """Wait until all living ranks have ended the run and no message is under way between them.

    Args:
        channel: this rank's channel to the coordinator and its partners.
        world: the ranks.
        mine: this rank's outcome.
        alarm: sent to free ranks that wait for this one, unless it completed the run.
        patience_s: how long to wait before the alarm, as the ranks may leave by themselves.
    """
    channel.tell_partners(mine)
    outcomes = {world.rank: mine}
    alarmed, until_s = mine.state == "complete", time.monotonic() + patience_s
    while outcomes.keys() | channel.lost < set(range(world.size)):
        if not alarmed and time.monotonic() >= until_s:
            alarmed = True
            channel.tell_partners(alarm)
        if channel.lost:
            world.revoke()
        world.drain()  # a partner may be blocked until this rank receives its messages
        while (found := channel.taken(RunOutcome)) is not None:
            outcomes[found[0]] = found[1]
        if len(outcomes) < world.size:
            channel.take_in(_DRAIN_PAUSE_S)
    while not all(
        world.drained(rank, outcomes[rank].sent, outcomes[rank].grouped)
        for rank in outcomes.keys() - channel.lost
    ):
        world.drain()
        channel.take_in(0)
    return [outcomes[rank] for rank in sorted(outcomes)]


def _combined(run: int, outcomes: Sequence[RunOutcome]) -> Done:
    """Combine the ranks' outcomes: the run fails if any rank failed."""
    for state in ("failed", "halted", "pruned", "recalled"):
        for outcome in outcomes:
            if outcome.state == state:
                return Done(run, state, error=outcome.error, failure=outcome.failure)
    first = outcomes[0]
    if first.state == "complete":
        return Done(run, "complete", first.values)
    return Done(run, "failed", error=first.error, failure="error")
