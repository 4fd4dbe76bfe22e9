"""The coordinator as a state machine: messages of the teams in, messages to them out; no MPI.

    team t: Suggest, Verdict ─► Answer to t's leader       a parameter, or whether to prune
    team t: Report, Note                                   kept with the trial
    team t: Done ─► Start to t, or to others Halt          the next fold or trial; the target is reached
                    End to all                             once nothing is left and nobody trains
    a rank of t has died ─► Halt to t's block              whose trial fails; it gets no other
    team t is idle ─► Recall to the leader of t'           once nothing is left to begin, in an elastic search
    team t': Done ("recalled") ─► Start to t' and t        as one team from now on

All that is random or remembered is Optuna's study, which lives on this rank only.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Sequence

import optuna
from optuna.trial import Trial

from nnlo_common.base._errors import PeerLostError, ProtocolError
from nnlo_common.search._compat import loop_begins, loop_ends, was_stopped
from nnlo_common.search._coordinator_mail import Death
from nnlo_common.search._messages import Chosen, Done, End, Halt, Message, Recall, Start
from nnlo_common.search.coordinator._choosers import Here, InOrder, Post
from nnlo_common.search.coordinator._endings import HELPERS, NAME, Failures, log_best
from nnlo_common.search.coordinator._results import Results
from nnlo_common.search.coordinator._roster import Roster
from nnlo_common.search.coordinator._running_trial import UnderWay
from nnlo_common.search.coordinator._search_ranks import Afar
from nnlo_common.search.coordinator._tail import Tail
from nnlo_common.search.coordinator._time_left import TimeLeft
from nnlo_common.search.coordinator._trial_progress import Progress, checked
from nnlo_common.search.journal._record import Record, packed
from nnlo_common.search.samplers._seeding import seed_of

__all__ = ["SIGNAL", "Coordinator", "known_to_all"]

_LOG = optuna.logging.get_logger("optuna.study")
#: Why trials were broken off that were to be trained again: the process is expected to end.
SIGNAL = "a signal (SIGTERM or SIGUSR1) has come"


def known_to_all(study: optuna.Study) -> int:
    """Return how many trials a study begins with that have ended: the script has given them to all ranks."""
    trials = study.get_trials(deepcopy=False)
    waiting = (number for number, trial in enumerate(trials) if not trial.state.is_finished())
    return next(waiting, len(trials))


class Coordinator:
    """Hands out the trials of a study and takes in what becomes of them.

    Args:
        study: the study.
        blocks: how many blocks there are.
        n_trials: how many trials are to be finished; one that is tried again counts once.
        teams: how many teams each block has: 1, or as many as folds.
        folds: in how many folds each trial is trained.
        seed: of the study.
        retries: how often a failed trial is tried again.
        target: the value at which the search ends.
        failures: what a failed trial tells the sampler; None: nothing.
        time_left: how long there is; None: for ever.
        clock: the time, in seconds.
        record: where to write down what happens.
        known: how many trials of the study all ranks have already; None: `known_to_all` of it now.
        search_ranks: how many ranks choose parameters; their teams come after those of the blocks.
        lockstep: whether the search is to repeat, whatever the pace of the blocks.
        elastic: whether idle teams help those that train when nothing is left to begin.

    Attributes:
        over: whether all teams have been told that the search is.
        interrupted: why trials were broken off that are to be trained again; empty where none was.
    """

    def __init__(
        self,
        study: optuna.Study,
        *,
        blocks: int,
        n_trials: int,
        teams: int = 1,
        folds: int = 1,
        seed: int = 0,
        retries: int = 0,
        target: float | None = None,
        failures: Failures | None = None,
        time_left: TimeLeft | None = None,
        clock: Callable[[], float] = time.time,
        record: Record | None = None,
        known: int | None = None,
        search_ranks: int = 0,
        lockstep: bool = False,
        elastic: bool = False,
    ) -> None:
        self._study, self._folds = study, folds
        self._seed, self._time = seed, time_left or TimeLeft()
        self._clock, self._record = clock, record or Record()
        self._roster, self._runs = Roster(blocks, teams), itertools.count()
        self._tail = Tail(self._roster, self._time) if elastic else None
        self._trials: list[UnderWay] = []  # those that train
        self._lost: list[Death] = []
        self._broken: set[int] = set()  # runs of which a rank has died
        self._known = known_to_all(study) if known is None else known
        self._names = {trial.user_attrs.get(NAME) for trial in study.get_trials(deepcopy=False)}
        self._progress = Progress(study, folds, self._record)
        self._stopped = False
        self.over, self.interrupted = False, ""
        loop_begins(study)
        self._results = Results(
            study,
            folds=folds,
            retries=retries,
            target=target,
            failures=failures or Failures(study),
            time_left=self._time,
            record=self._record,
        )
        self._searchers = range(blocks * teams, blocks * teams + search_ranks)
        self._chooser: Here = Here(study, blocks, n_trials)
        if lockstep:
            self._chooser = InOrder(study, blocks, n_trials, seed)
        elif search_ranks:
            self._chooser = Afar(study, blocks, n_trials, self._searchers)

    def begin(self) -> list[Post]:
        """Give every block its first trial."""
        return self._fed()

    def think(self) -> bool:
        """Choose the next trial while all blocks train; say whether there was one to choose."""
        return bool(self._trials) and self._chooser.think(len(self._roster.living))

    def look(self) -> list[Post]:
        """Break off what is running when the time is up; let idle teams help what takes long."""
        if self._trials and not self.interrupted and self._time.over(self._clock()):
            return self.interrupt("the time is up")
        return self._helped()

    def interrupt(self, reason: str) -> list[Post]:
        """Break off what is running, so that the same command trains it again."""
        if self.over or self.interrupted:
            return []
        self.interrupted = reason
        return self._stop(reason)

    def lost(self, death: Death) -> list[Post]:
        """Go on without a block of which a rank has died, or without a search rank.

        The trial of the block fails, or is tried again by another.

        Raises:
            PeerLostError: that was the last block, and there is something left to train.
        """
        team = death.team
        self._lost.append(death)
        if team in self._searchers:
            assert isinstance(self._chooser, Afar)
            left = self._chooser.lost(team)
            _LOG.warning("search %s has died. Search ranks that go on: %d", death, left)
            return [] if self.over else self._fed()
        team = self._roster.lose(team)
        if self._tail is not None:
            self._tail.report_death()
        _LOG.warning(death.of_block(len(self._roster.living)))
        under = self._roster.training.get(team)
        if under is None:
            return []
        self._broken.add(under.runs[team])
        state = "halted" if under.halted else "failed"
        return self._done(team, under, Done(under.runs[team], state, error=death.error, failure="died"))

    def handle(self, team: int, message: Message) -> list[Post]:
        """Take in what the leader of a team says, and return what to answer.

        Raises:
            ProtocolError: the team does not train that.
            NNLOError: the sampler has failed on a search rank.
        """
        if isinstance(message, Chosen):
            if any(death.team == team for death in self._lost):
                return []
            assert isinstance(self._chooser, Afar)
            self._chooser.chosen(team, message)
            return self._fed()
        if message.run in self._broken:  # written before the ranks knew of the death
            return []
        under = self._roster.training.get(team)
        if under is None or under.runs[team] != message.run:
            raise ProtocolError(f"team {team} speaks of run {message.run}, which it does not train")
        if isinstance(message, Done):
            return self._done(team, under, message)
        return self._progress.handle(team, under, message)

    # -- inside ---------------------------------------------------------------------------------------

    def _fed(self) -> list[Post]:
        """Start the next trials on idle blocks, and end the search when there is nothing to wait for."""
        posts = []
        living, idle, beginning = self._roster.living, self._roster.idle, not self._trials
        for block in [*idle]:
            if not self._chooser.open:
                break
            now_s = self._clock()
            if not self._time.suffices(now_s, [under.began_s for under in self._trials]):
                self._out_of_time()
                break
            trial = self._chooser.take(block, first=beginning)
            if trial is not None:
                idle.remove(block)
                posts += self._begun(block, trial, now_s)
        posts += self._chooser.orders(len(idle), len(living)) + self._helped()
        if self._trials or self.over or (living and self._chooser.pending):
            return posts
        if not living and (left := self._chooser.open):
            raise PeerLostError(
                self._lost[-1].rank, f"has died, and with it the last block; trials left: {left}"
            )
        return posts + self._ended()

    def _begun(self, block: int, trial: Trial, now_s: float) -> list[Post]:
        teams = self._roster.teams(block)
        under = UnderWay(trial, folds=self._folds, teams=len(teams), began_s=now_s, block=block)
        self._trials.append(under)
        self._call(trial)
        self._record.begun(self._study.get_trials(deepcopy=False)[trial.number])
        return [self._start(team, under) for team in teams]

    def _call(self, trial: Trial) -> None:
        """Give a trial a name, unless it has one from before the job was killed."""
        if NAME not in trial.user_attrs:
            names = (f"{trial.number:04}" + (f"-{turn}" if turn > 1 else "") for turn in itertools.count(1))
            trial.set_user_attr(NAME, next(name for name in names if name not in self._names))
        self._names.add(trial.user_attrs[NAME])

    def _start(self, team: int, under: UnderWay) -> Post:
        """Start the next fold."""
        fold = under.waiting.popleft()
        under.running[team], under.runs[team] = fold, next(self._runs)
        self._roster.training[team] = under
        start = Start(
            under.runs[team],
            seed_of(self._seed, under.trial.number * self._folds + fold),
            len(self._study.directions),
            json.loads(json.dumps(under.trial.user_attrs)),
            under.trial.number,
            fold,
            self._folds,
            self._seed,
        )
        return Post(team, start, made_of=self._roster.news(team))

    def _ended(self) -> list[Post]:
        self.over = True
        log_best(self._study)
        if self._lost:
            died = "; ".join(map(str, self._lost))
            _LOG.warning("the search has ended without %s, which died", died)
        loop_ends(self._study)
        trials = self._study.get_trials(deepcopy=False)[self._known :]
        kept = tuple(packed(trial) for trial in trials if trial.state.is_finished())
        end = End(-1, kept, self.interrupted)
        return [Post(team, end) for team in range(self._roster.count + len(self._searchers))]

    def _done(self, team: int, under: UnderWay, message: Done) -> list[Post]:
        fold = under.running.pop(team)
        del under.runs[team], self._roster.training[team]
        under.asking.discard(team)
        message = checked(message)
        posts = []
        if message.state == "recalled":
            if not under.halted:
                under.waiting.appendleft(fold)
                return [self._again(team, under)]
            message = Done(message.run, "halted", error=f"broken off: {under.halted}")
        if self._tail is not None and self._tail.ended(team, under, message):
            under.waiting.appendleft(fold)
            told = "trial %d has failed when more ranks went on with it, so it goes on with those it had:\n%s"
            _LOG.warning(told, under.trial.number, message.error)
            return [self._start(team, under), *self._fed()]
        if message.state == "halted" and not under.halted:
            posts += self.interrupt(SIGNAL)
        if message.state == "complete":
            under.values[fold] = message.values
            self._progress.fold_done(under, fold, message)
        elif under.ending is None:
            under.ending = message
        if under.ending is not None:
            under.waiting.clear()
            posts += self._halted(under, f"another fold of the trial has ended it ({under.ending.state})")
        if under.over:
            self._trials.remove(under)
            under.seconds = self._clock() - under.began_s
            for ended in self._chooser.ended(under):
                posts += self._finished(ended)
            return posts + self._fed()
        if under.waiting:
            return [*posts, self._start(team, under)]
        return posts + self._progress.judged(under) + self._fed()

    def _helped(self) -> list[Post]:
        """Let idle teams help those that train, when nothing is left to begin."""
        if self._tail is None or self._stopped or self._chooser.pending:
            return []
        # Idle teams of a block that trains wait for its next trial, if there is to be one.
        if self._chooser.open and not self._roster.idle:
            return []
        posts = []
        for team, under in self._tail.folds(self._trials):
            self._note_help(under, [team])
            posts.append(self._start(team, under))
        recalls = self._tail.recalls(self._clock())
        runs = [(team, self._roster.training[team].runs[team]) for team in recalls]
        return posts + [Post(team, Recall(run), leader_only=True) for team, run in runs]

    def _again(self, team: int, under: UnderWay) -> Post:
        """Start again, with all who are idle, the fold that a team has left for that."""
        assert self._tail is not None  # who else would have recalled it
        others = self._tail.joining(team)
        self._note_help(under, others)
        self._roster.unite(team, others)
        return self._start(team, under)

    def _note_help(self, under: UnderWay, teams: Sequence[int]) -> None:
        helpers, now_s = under.trial.user_attrs.get(HELPERS, []), self._clock()
        known = {under.block, *(block for block, _ in helpers)}
        fresh = sorted(set().union(*map(self._roster.blocks_of, teams)) - known)
        if fresh:
            under.trial.set_user_attr(HELPERS, [*helpers, *([block, now_s] for block in fresh)])
        for block in fresh:
            _LOG.info("block %d helps to train trial %d", block, under.trial.number)

    def _finished(self, under: UnderWay) -> list[Post]:
        """Take in the end of a trial."""
        posts: list[Post] = []
        again = self._results.take_in(under, interrupted=bool(self.interrupted), stopped=self._stopped)
        self._chooser.left += again and not self.interrupted
        if self._results.reached(under.result):
            self._chooser.cut = True
            posts = self._stop(f"trial {under.trial.number} has reached {under.result.values[0]}")
        elif was_stopped(self._study):  # a grid is used up
            self._chooser.left = 0
        self._chooser.told()
        return posts

    def _out_of_time(self) -> None:
        _LOG.warning("%d trials are not begun: %s", self._chooser.open, self._time.told)
        self._begin_nothing("the time does not suffice")

    def _begin_nothing(self, reason: str) -> None:
        """Let nothing of ours stand open in the study; what the user has queued stays as it is."""
        self._results.withdrawn(self._chooser.withdraw(), reason)

    def _stop(self, reason: str) -> list[Post]:
        """Break off what is running, and begin nothing any more."""
        self._stopped = True
        self._begin_nothing(reason)
        return [post for under in self._trials for post in self._halted(under, reason)]

    def _halted(self, under: UnderWay, reason: str) -> list[Post]:
        """Break off what is running of a trial."""
        if under.halted:
            return []
        under.halted = reason
        under.waiting.clear()
        return [Post(team, Halt(run, reason)) for team, run in under.runs.items()]
