"""A search under way: on one process, as the coordinator, or as a rank of a block."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import optuna

from nnlo_common._errors import ConfigurationError
from nnlo_common.transport._mail import DivisibleWorld, Mail
from nnlo_common.tune._block import Objective, attempt, run_block
from nnlo_common.tune._coordinator import Coordinator, Post
from nnlo_common.tune._engines import engine
from nnlo_common.tune._messages import Answer, Message, Start, Suggest, Verdict, from_text, to_text
from nnlo_common.tune._office import Office
from nnlo_common.tune._record import Journal, Record, unpacked

__all__ = ["Search"]


class Search:
    """What all ranks bring to a search; the arguments are those of `optimize`."""

    def __init__(
        self,
        study: optuna.Study,
        objective: Objective,
        *,
        n_trials: int,
        sampler: str | optuna.samplers.BaseSampler | None,
        seed: int,
        retries: int,
        target: float | None,
        journal: str | Path | None,
    ) -> None:
        if not isinstance(study, optuna.Study):
            raise ConfigurationError(
                f"optimize({study!r}, ...): give it a study first: optimize(optuna.create_study(), objective)"
            )
        if target is not None and len(study.directions) > 1:
            raise ConfigurationError(
                f"target_objective={target!r} with {len(study.directions)} objectives; it is for one"
            )
        self._study, self._objective, self._n_trials, self._sampler = study, objective, n_trials, sampler
        self._seed, self._retries, self._target, self._journal = seed, retries, target, journal

    @property
    def facts(self) -> dict[str, Any]:
        """What must be the same on all ranks."""
        chosen = self._study.sampler if self._sampler is None else self._sampler
        return {
            "sampler": chosen if isinstance(chosen, str) else type(chosen).__name__,
            "pruner": type(self._study.pruner).__name__,
            "directions": [direction.name for direction in self._study.directions],
            "seed": self._seed,
            "retries": self._retries,
            "target_objective": self._target,
        }

    def alone(self) -> None:
        """Train all trials here, one after another."""
        with closing(self._record()) as record:
            coordinator = self._begin(1, record)
            waiting = coordinator.begin()
            while waiting:
                order = waiting.pop(0).message
                if isinstance(order, Start):
                    ending = attempt(order, _DirectLine(coordinator), self._objective)
                    waiting += coordinator.handle(0, ending)

    def over(self, world: DivisibleWorld, blocks: Sequence[tuple[int, ...]]) -> None:
        """Do this rank's part (collective).

        Args:
            world: the ranks.
            blocks: the ranks of every block; rank 0 is in none.
        """
        mine = next((block for block in blocks if world.rank in block), (world.rank,))
        mail, part = world.mail(), world.part(mine)
        if world.rank == 0:
            self._coordinate(mail, blocks)
        else:
            end = run_block(Office(mail, 0, mine, part.rank), part, self._objective)
            known = self._study.get_trials(deepcopy=False)
            # A study in a storage that all ranks share has them by now.
            self._study.add_trials([unpacked(trial) for trial in end.trials if trial["trial"] >= len(known)])
        world.gather_text("")  # nobody may have a letter under way when the post closes
        mail.close()
        part.close()

    def _record(self) -> Record:
        """Open the journal, if there is to be one, and give the study what it holds."""
        self._known = len(self._study.get_trials(deepcopy=False))
        return Record() if self._journal is None else Journal(self._journal, self._study)

    def _begin(self, blocks: int, record: Record) -> Coordinator:
        study = self._study
        counted = record.counted if isinstance(record, Journal) else 0
        found = len(study.get_trials(deepcopy=False))
        if self._sampler is not None:
            study.sampler = engine(self._sampler, self._seed + found, self._n_trials, study)
        return Coordinator(
            study,
            blocks=blocks,
            n_trials=max(0, self._n_trials - counted),
            seed=self._seed,
            retries=self._retries,
            target=self._target,
            record=record,
            known=self._known,
        )

    def _coordinate(self, mail: Mail, blocks: Sequence[tuple[int, ...]]) -> None:
        block_of = {rank: index for index, block in enumerate(blocks) for rank in block}
        with closing(self._record()) as record:
            coordinator = self._begin(len(blocks), record)
            _deliver(mail, blocks, coordinator.begin())
            while not coordinator.over:
                letter = mail.receive(0)
                if letter is None and coordinator.think():
                    continue
                rank, text = letter or _next(mail)
                _deliver(mail, blocks, coordinator.handle(block_of[rank], from_text(text)))


def _next(mail: Mail) -> tuple[int, str]:
    letter = mail.receive()
    assert letter is not None  # without a time limit there always is one
    return letter


def _deliver(mail: Mail, blocks: Sequence[tuple[int, ...]], posts: Sequence[Post]) -> None:
    for post in posts:
        ranks = blocks[post.block]
        text = to_text(post.message)
        for rank in ranks[:1] if post.leader_only else ranks:
            mail.send(rank, text)


class _DirectLine:
    """The line of a trial in the coordinator's own process."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def suggest(self, message: Suggest, call: str) -> float:  # noqa: ARG002
        return float(self._asked(message))

    def verdict(self, message: Verdict) -> bool:
        return bool(self._asked(message))

    def tell(self, message: Message) -> None:
        self._coordinator.handle(0, message)

    def _asked(self, message: Message) -> float | bool:
        (post,) = self._coordinator.handle(0, message)
        assert isinstance(post.message, Answer)
        return post.message.value
