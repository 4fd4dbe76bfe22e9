"""Block rank: runs trial after trial, calls the objective, and agrees with the block on each result."""

from __future__ import annotations

import datetime
import json
import math
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from optuna import TrialPruned
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    check_distribution_compatibility,
    distribution_to_json,
)
from optuna.trial import BaseTrial

from nnlo_common.base._errors import ConfigurationError, PeerLostError
from nnlo_common.base._signals import EXIT_CODE, Interrupts, LeftTogether
from nnlo_common.cluster.transport._endpoint import DivisibleWorld, PartWorld
from nnlo_common.search._channels import RankChannel
from nnlo_common.search._search_messages import (
    Alarm,
    Done,
    End,
    Halt,
    Note,
    ParameterRequest,
    ParameterValue,
    PruneRequest,
    PruneVerdict,
    RequestAnswer,
    RunOutcome,
    SearchMessage,
    Start,
    TrialReport,
)
from nnlo_common.search.block._block_world import BlockWorld
from nnlo_common.search.block._folds import Indices, split
from nnlo_common.search.coordinator._coordinator import Coordinator, check_interrupts
from nnlo_common.search.coordinator._trial_results import NAME, kind_of
from nnlo_common.training._joining import within

__all__ = ["BlockLink", "BlockTrial", "LocalLink", "Objective", "TrialLink", "attempt", "run_block"]

# -- links from a trial to the coordinator: over the ranks of a block, or within one process -----------


class TrialLink(Protocol):
    """Link from a trial to the coordinator."""

    @property
    def halted(self) -> str:
        """Why the coordinator halted the trial; empty if it did not."""

    def suggest(self, message: ParameterRequest, call: str) -> float:
        """Return the internal number of a parameter."""

    def verdict(self, message: PruneRequest) -> bool:
        """Return whether to prune."""

    def tell(self, message: SearchMessage) -> None:
        """Let the coordinator know."""


class BlockLink:
    """The link of a block's rank: from the leader to the coordinator, from a partner to the leader.

    Args:
        channel: this rank's channel.
        world: the ranks of the block.
    """

    def __init__(self, channel: RankChannel, world: BlockWorld) -> None:
        self._channel, self._world = channel, world
        self._judged = 0

    @property
    def halted(self) -> str:
        """Why the coordinator halted the trial; empty if it did not."""
        return self._channel.halted

    def suggest(self, message: ParameterRequest, call: str) -> float:
        """Return the internal number of a parameter."""
        channel = self._channel
        if channel.rank:
            said = channel.wait(ParameterValue)
            if said.call != call:
                raise ConfigurationError(
                    f"rank {channel.rank} of the block calls {call}, but its first rank called "
                    f"{said.call}; suggest the same parameters in the same order on all ranks"
                )
            return said.value
        value = float(self._request(message))
        channel.tell_partners(ParameterValue(message.run, call, value))
        return value

    def verdict(self, message: PruneRequest) -> bool:
        """Return whether to prune."""
        self._world.meet()
        if self._channel.rank:
            return self._channel.wait(PruneVerdict).prune
        prune = bool(self._request(message))
        self._channel.tell_partners(PruneVerdict(message.run, self._judged, prune))
        self._judged += 1
        return prune

    def tell(self, message: SearchMessage) -> None:
        """Let the coordinator know."""
        if not self._channel.rank:
            self._channel.check()
            self._channel.tell_coordinator(message)

    def _request(self, message: SearchMessage) -> float | bool:
        self._channel.tell_coordinator(message)
        return _answer_of(self._channel.wait(RequestAnswer))


def _answer_of(answer: RequestAnswer) -> float | bool:
    """Return the coordinator's answer, or raise its problem."""
    if answer.problem:
        raise ConfigurationError(answer.problem)
    return answer.value


class LocalLink:
    """The link of a trial in the coordinator's own process.

    Attributes:
        halted: why the coordinator halted the trial; empty if it did not.
        refused: the sampler's error, which is not a failure of the trial.
    """

    def __init__(self, coordinator: Coordinator, interrupts: Interrupts) -> None:
        self._coordinator, self._interrupts = coordinator, interrupts
        self.halted = ""
        self.refused: ConfigurationError | None = None

    def suggest(self, message: ParameterRequest, call: str) -> float:  # noqa: ARG002
        return float(self._request(message))

    def verdict(self, message: PruneRequest) -> bool:
        return bool(self._request(message))

    def tell(self, message: SearchMessage) -> None:
        self._raise_if_halted()
        self._coordinator.handle(0, message)

    def _request(self, message: SearchMessage) -> float | bool:
        self._raise_if_halted()
        try:
            (answer,) = self._coordinator.handle(0, message)
        except ConfigurationError as error:
            self.refused = error
            raise
        assert isinstance(answer.message, RequestAnswer)
        return _answer_of(answer.message)

    def _raise_if_halted(self) -> None:
        for sent in check_interrupts(self._coordinator, self._interrupts):
            if isinstance(sent.message, Halt):
                self.halted = sent.message.reason
        if self.halted:
            raise PeerLostError(0, f"has halted the trial: {self.halted}")


# -- trial as the objective sees it, on every rank of a block ------------------------------------------
#     objective ─► suggest_float("lr", ...) ─► leader: asks the coordinator, sends the value to its partners
#                                           └► partner: waits for the leader's value
#
# Every method returns the same on all ranks of the block; only the leader sends `report` and attributes.

_PLAIN = (type(None), bool, int, float, str)


class BlockTrial(BaseTrial):
    """A trial of a search over blocks of ranks.

    Attributes:
        seed: the trial's seed, or the fold's; the same on all ranks, and when the search is repeated.
        name: the trial's name, or the fold's, for folders; it stays when a killed search resumes.
        fold: the fold, from 0.
        folds: the number of folds; 1 if the search has none.

    Args:
        start: the coordinator's message.
        line: the link to the coordinator.
    """

    def __init__(self, start: Start, line: TrialLink) -> None:
        self._number, self._run, self.seed, self._line = start.trial, start.run, start.seed, line
        self.fold, self.folds, self._split_seed = start.fold, start.folds, start.split_seed
        self._directions = start.directions
        self._params: dict[str, Any] = {}
        self._distributions: dict[str, BaseDistribution] = {}
        self._user_attrs, self._constraints = dict(start.attributes), dict[str, float]()
        name = self._user_attrs.get(NAME, f"{start.trial:04}")
        self.name = f"{name}-fold{start.fold + 1}" if start.folds > 1 else str(name)
        self._start = datetime.datetime.now()

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """Choose a float."""
        return float(self._suggest(name, FloatDistribution(low, high, log=log, step=step)))

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """Choose a whole number."""
        return int(self._suggest(name, IntDistribution(low, high, log=log, step=step)))

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """Choose one of several."""
        if odd := [choice for choice in choices if not isinstance(choice, _PLAIN)]:
            raise ConfigurationError(
                f"suggest_categorical({name!r}): {odd[0]!r} is a {type(odd[0]).__name__}; choices must be "
                "None, bool, int, float or str: choose among names, and look the objects up in a dict"
            )
        return self._suggest(name, CategoricalDistribution(choices))

    def suggest_uniform(self, name: str, low: float, high: float) -> float:
        """Choose a float; Optuna's old name for `suggest_float`."""
        return self.suggest_float(name, low, high)

    def suggest_loguniform(self, name: str, low: float, high: float) -> float:
        """Choose a float on a logarithmic scale; Optuna's old name for `suggest_float(..., log=True)`."""
        return self.suggest_float(name, low, high, log=True)

    def suggest_discrete_uniform(self, name: str, low: float, high: float, q: float) -> float:
        """Choose a float in steps; Optuna's old name for `suggest_float(..., step=q)`."""
        return self.suggest_float(name, low, high, step=q)

    def report(self, value: float, step: int) -> None:
        """Report an intermediate value; the value from the block's first rank counts."""
        self._refuse_several("report")
        try:
            message = TrialReport(self._run, float(value), int(step))
        except (TypeError, ValueError):
            message = None
        if message is None or message.step < 0:
            raise ConfigurationError(
                f"report(value={value!r}, step={step!r}): give a number and its step, from 0"
            )
        self._line.tell(message)

    def should_prune(self) -> bool:
        """Ask whether to prune this trial; all ranks of the block get the same answer to the same call.

        Call it on all ranks after an epoch. Folds that train side by side wait for each other here.
        """
        self._refuse_several("should_prune")
        return self._line.verdict(PruneRequest(self._run))

    def split(self, samples: int, *, labels: Any = None, groups: Any = None) -> tuple[Indices, Indices]:
        """Return the training and the validation samples of this fold, as sorted indices.

        Every sample validates in one fold, the same in all trials of a search and on all ranks.

        Args:
            samples: the number of samples.
            labels: the class of each sample, to give each fold its share of every class.
            groups: the group of each sample, to keep each group on one side.

        Raises:
            ConfigurationError: the search has no folds, or there are too few samples for them.
        """
        if self.folds == 1:
            raise ConfigurationError("trial.split: this search has no folds; use optimize(..., folds=5)")
        return split(samples, self.folds, self.fold, labels=labels, groups=groups, seed=self._split_seed)

    def set_user_attr(self, key: str, value: Any) -> None:
        """Store a value with the trial; the value from the block's first rank counts."""
        try:
            kept = json.loads(json.dumps(value))
        except (TypeError, ValueError):
            raise ConfigurationError(
                f"set_user_attr({key!r}, ...): a {type(value).__name__} cannot be written as JSON; give "
                "numbers, texts, lists and dicts of them"
            ) from None
        self._user_attrs[key] = kept
        self._line.tell(Note(self._run, key, kept))

    def set_constraint(self, key: str, value: float) -> None:
        """Set a constraint, satisfied at zero or less; the value from the block's first rank counts."""
        if math.isnan(value):
            raise ConfigurationError(
                f"set_constraint({key!r}, {value!r}): give a number, at most 0 if satisfied"
            )
        self._constraints[key] = float(value)
        self._line.tell(Note(self._run, key, float(value), constraint=True))

    @property
    def number(self) -> int:
        """The number of the trial in its study."""
        return self._number

    @property
    def params(self) -> dict[str, Any]:
        """The parameters chosen so far."""
        return dict(self._params)

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        """The distributions of the parameters chosen so far."""
        return dict(self._distributions)

    @property
    def user_attrs(self) -> dict[str, Any]:
        """The attributes of this trial as this rank knows them."""
        return dict(self._user_attrs)

    @property
    def constraints(self) -> dict[str, float]:
        """The constraints as this rank knows them."""
        return dict(self._constraints)

    @property
    def datetime_start(self) -> datetime.datetime:
        """When this rank began the trial."""
        return self._start

    def _refuse_several(self, call: str) -> None:
        if self._directions > 1:
            raise ConfigurationError(
                f"trial.{call}: pruning needs a single objective, not {self._directions}; leave it out"
            )

    def _suggest(self, name: str, distribution: BaseDistribution) -> Any:
        known = self._distributions.get(name)
        if known is not None:
            check_distribution_compatibility(known, distribution)
            return self._params[name]
        message = ParameterRequest(self._run, name, distribution_to_json(distribution))
        value = distribution.to_external_repr(
            self._line.suggest(message, f"suggest {name!r}: {distribution}")
        )
        self._params[name], self._distributions[name] = value, distribution
        return value


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
