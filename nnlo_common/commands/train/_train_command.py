"""The command, step by step: read, check, load, agree, claim a folder, train, write the result."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from nnlo_common.base._errors import NNLOError
from nnlo_common.cluster._connecting import connect
from nnlo_common.cluster._gpus import share_host, train_turns
from nnlo_common.cluster._hosts import describe_here
from nnlo_common.cluster._topology import Cell
from nnlo_common.commands.train._command_line import read
from nnlo_common.commands.train._job import Job, RankCommand, brief, tell
from nnlo_common.commands.train._model_file import check_model, check_weights_file, load_model, plug_in
from nnlo_common.commands.train._python_file import adapting, users_line
from nnlo_common.commands.train._run_folder import (
    HISTORY,
    RUN,
    CompleteRun,
    claim,
    config_text,
    facts_of_command,
    write_json,
)
from nnlo_common.commands.train._run_plan import (
    Data,
    RunPlan,
    check_exchanges,
    check_files,
    data_of,
    part_of_preparation,
    prepared,
    unknown_part,
)
from nnlo_common.commands.train._settings import Settings
from nnlo_common.commands.train._trainer import Trainer
from nnlo_common.data._preparation import PREPARATIONS, Preparation, Vocabulary
from nnlo_common.training._rank_parts import say, speaks
from nnlo_common.training._tree_joining import check_layout

__all__ = ["EpochWatch", "TrainRun", "cell_of", "checked"]

#: Receives the number and metrics of an epoch, on each rank.
EpochWatch: TypeAlias = Callable[[int, Mapping[str, float]], object]


class TrainRun(RankCommand):
    """A training on one rank.

    Args:
        job: the ranks that train.
        watch: receives the metrics of each epoch; with it nothing is printed.

    Attributes:
        kept: on all ranks, the epoch whose weights early stopping has kept, from 0; None: the last.
    """

    trainer: Trainer
    settings: Settings
    kept: int | None = None

    def __init__(self, job: Job, watch: EpochWatch | None = None) -> None:
        super().__init__(job)
        self._prepared: list[Preparation] = []
        self._before: CompleteRun | None = None  # on the rank that continues it
        self._watch, self._began_s = watch, time.perf_counter()

    def run(self, flags: Mapping[str, Any], unknown: Sequence[str]) -> int:
        """Prepare, train and close; return the exit status."""
        try:
            self.prepare(flags, unknown)
            self.train()
            self.close()
        except Exception as error:
            if self._before is not None:
                self._before.give_back()
            if not isinstance(error, NNLOError):  # print the remedy before the traceback
                lines = [f"{self._job.name}{type(error).__name__}: {brief(str(error))}", users_line(error)]
                tell("\n".join(filter(None, lines)) + self.advice)
            raise
        return 0

    def prepare(self, flags: Mapping[str, Any], unknown: Sequence[str]) -> None:
        """Check everything before the training, quick checks first, and agree with all ranks."""
        job = self._job
        with job.together():
            settings = read(flags, unknown)
            self.keep_logs(settings.log_level, settings.log_dir)
        path, cell = checked(job, settings, arranged=True)
        self.load(settings, path, cell)
        self.claim()

    def load(self, settings: Settings, path: Path, cell: Cell | None) -> None:
        """Load the model, and join the others (collective).

        Args:
            settings: of the training.
            path: of the model.
            cell: the roles of the ranks, of `cell_of`.
        """
        job, self.settings, self._cell = self._job, settings, cell
        with job.together(), adapting():
            loaded = load_model(settings, path)
            self._name, self.module = loaded.name, loaded.module
            data = data_of(settings, loaded)
        for name in PREPARATIONS:
            if asked := getattr(settings, name):
                data = self._measure(data, name, asked)
        with job.together(), adapting():
            plan = RunPlan(settings=settings, loaded=loaded, data=data, watch=self._watch)
            self.trainer = plug_in(loaded.framework).prepare(plan)
            if cell is not None:
                check_exchanges(plan, cell)
        with job.together():  # a wrapper refuses alike on all ranks
            self.trainer.join()

    def _measure(self, data: Data, name: str, asked: Any) -> Data:
        """Return the data with a preparation; each rank looks at its part of the samples, once."""
        job, mine = self._job, list[Any]()
        with job.together(patient=True), adapting():
            mine = part_of_preparation(data, name, asked, job.rank, job.size)
        parts = job.share(mine)
        with job.together():
            data, found = prepared(data, name, asked, parts)
            self._prepared.append(found)
        if isinstance(found, Vocabulary):
            self._tell_vocabulary(data, found)
        return data

    def _tell_vocabulary(self, data: Data, vocabulary: Vocabulary) -> None:
        """Say how many values each column has, and how many others come in the validation (collective)."""
        job, mine = self._job, dict[str, list[int]]()
        if data.val:
            with job.together(patient=True), adapting():
                mine = unknown_part(data, job.rank, job.size)
        parts = job.share(mine)
        for name in vocabulary.columns:
            line = f"{name}: its values become indices from 1 to {len(vocabulary.values_of(name)) - 1}"
            if data.val:
                met, unknown = (sum(part[name][place] for part in parts) for place in (0, 1))
                line += f"; in the validation {unknown} of {met} values are unknown and become 0"
            self._say(line)

    def claim(self) -> None:
        """Claim a folder for the run (collective)."""
        job, settings = self._job, self.settings
        with job.together():
            if job.speaks:
                config = config_text(settings, self.trainer.learning_rate)
                if settings.run is not None and settings.checkpoint is not None:
                    self._before = CompleteRun(Path(settings.run).expanduser().absolute())
                self.folder, resumes = claim(settings, self._name, config)
                self._fresh = not resumes
            for one in self._prepared if job.speaks else ():
                write_json(self.folder / one.file, one.kept())
        self.folder = Path(job.share(str(self.folder))[0])

    def train(self) -> Mapping[str, list[float]]:
        """Train and write the result; return the centre's metrics on all ranks."""
        self._say(self._summary())
        self._started = True
        history = self.trainer.train(self.folder)
        ranks = self._job.share_with_living(
            {
                "role": self.trainer.role,
                "host": os.uname().nodename,
                "cores": describe_here()["cores"],
                "history": history,
                "report": dict(self.trainer.report()),
                "kept": self.trainer.kept,
            }
        )
        of_center = next(one for one in ranks if one is not None and speaks(one["role"]))
        self.kept = of_center["kept"]
        with self._job.together(late=True):
            if speaks(self.trainer.role):
                self._keep(history, {rank: one for rank, one in enumerate(ranks) if one is not None})
        center: Mapping[str, list[float]] = of_center["history"]
        return center

    def close(self) -> None:
        """Close the files, also after a failure."""
        if (trainer := getattr(self, "trainer", None)) is not None:
            trainer.close()

    @property
    def advice(self) -> str:
        """Text to print after a failure: what to do next."""
        if not self._started:
            return ""
        if self.settings.checkpoint is None:
            return "\nTo be able to resume after a failure, give --checkpoint and --run"
        return f"\nFix this, then rerun the same command to resume from the last checkpoint in {self.folder}"

    def _say(self, text: str) -> None:
        if self._job.speaks:
            self._tell(text)

    def _tell(self, text: str) -> None:
        if self._watch is None:
            say("alone", f"nnlo train: {text}")

    def _summary(self) -> str:
        settings, cell = self.settings, self._cell
        ranks = "alone" if cell is None else _ranks_of(cell)
        options = "".join(
            f" --{name.replace('_', '-')} {value}" for name, value in settings.algorithm.items()
        )
        scale = self.trainer.rate_scale
        rate = f"{self.trainer.learning_rate * scale:g}"
        if scale != 1:
            rate += f" ({self.trainer.learning_rate:g} x {scale:g} by --scale-rate {settings.scale_rate})"
        together = settings.batch * _sharing(settings, cell)
        batches = f"batches of {settings.batch}" + (
            f", {together} in a step" if together > settings.batch else ""
        )
        return f"{settings.mode}{options}, {ranks}, {settings.optimizer} at {rate}, {batches}; {self.folder}"

    def _keep(self, history: Mapping[str, list[float]], ranks: Mapping[int, Mapping[str, Any]]) -> None:
        """Write the result; the history last, because it marks the run as complete."""
        seconds = time.perf_counter() - self._began_s
        model = self.trainer.save(self.folder)
        own = [
            {"rank": rank, **{name: one[name] for name in ("role", "host", "cores")}} | one["report"]
            for rank, one in ranks.items()
        ]
        facts = facts_of_command(self._began, seconds)
        facts["versions"]["MPI library"] = None if (world := connect()) is None else world.library
        here = {"folder": str(Path.cwd()), "host": os.uname().nodename}
        ending = {"ending": self.trainer.ending} if self.trainer.ending else {}
        write_json(self.folder / RUN, facts | here | ending | {"ranks": own})
        workers = [
            {"rank": rank, "role": one["role"], "history": one["history"]}
            for rank, one in ranks.items()
            if one["role"].startswith("worker")
        ]
        write_json(self.folder / HISTORY, {"center": history, "workers": workers})
        kept = -1 if self.kept is None else self.kept
        last = "  ".join(f"{name} {values[kept]:.4f}" for name, values in history.items() if values)
        for line in self.trainer.ending:
            self._tell(line)
        self._tell(f"{model} after {seconds:.1f} s  {last}")


def checked(job: Job, settings: Settings, *, arranged: bool) -> tuple[Path, Cell | None]:
    """Check what the settings name, and share out the GPUs of each host (collective).

    Args:
        job: the ranks.
        settings: of the training.
        arranged: check that the ranks can be arranged as the settings say, too.

    Returns:
        The model's path, and the roles of the ranks; None if one rank trains alone, or they were not checked.
    """
    places = job.places()
    with job.together():
        cell = cell_of(settings, [place.host for place in places]) if arranged else None
        path = check_model(settings)
        check_files(settings)
        check_weights_file(settings)
    turns = train_turns(**settings.roles)
    share_host(places, job.rank, settings.max_gpus, os.environ, turns)
    return path, cell


def cell_of(settings: Settings, hosts: Sequence[str]) -> Cell | None:
    """Return the roles of the ranks on these hosts, None for a single one, which always trains plainly."""
    if len(hosts) == 1:
        return None
    cell = settings.cell(hosts)
    check_layout(settings.rule(), cell)
    return cell


def _sharing(settings: Settings, cell: Cell | None) -> int:
    """Return how many ranks' batches a step of the optimizer has."""
    if cell is None:
        return 1
    size = len(cell.groups[0])
    return size * len(cell.groups) if settings.rule().steps_together or not cell.servers else size


def _ranks_of(cell: Cell) -> str:
    """Return how many ranks serve and train."""
    size = len(cell.groups[0])
    training = str(len(cell.groups)) if size == 1 else f"{len(cell.groups)} x {size}"
    serving = str(len(cell.servers)) + (f" + {len(cell.branches)}" if cell.branches else "")
    return f"{serving} serving, {training} training"
