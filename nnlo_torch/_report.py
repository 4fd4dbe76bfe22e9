"""Report: the facts of a training, one file for each rank, for `nnlo report`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from nnlo_common.plugin import (
    FactsWriter,
    StepProfiler,
    begin_torch_profile,
    whole_number,
)
from nnlo_torch._evaluation import numbers_of
from nnlo_torch._wrapper import Wrapper, wrapper_given

__all__ = ["Report"]


class Report:
    """Writes down what happens on each rank while it happens; `nnlo report FOLDER` makes a page of it.

    `Report(optimizer, "run")` appends lines of JSON to run/ranks/facts.rank0.jsonl and so on: the layout,
    versions and your configuration at the start; each epoch with its time, samples, metrics, staleness and
    where the time went; memory, processor and GPU about once a second; ranks that stall or die. Lines are
    whole at any time, even after the training is killed. Make it before the first epoch.

    With `timeline=True` each rank also writes a trace, run/ranks/timeline.rank0.json and so on, of its
    computing, waits, messages, reads, checkpoints and validations. `nnlo trace FOLDER` merges them for
    https://ui.perfetto.dev.

    `Checkpoint` makes one in its own folder, if there is none.

    Args:
        optimizer: the wrapper.
        folder: the folder of the run; created if missing.
        config: what to write down about this run, such as your options.
        timeline: write a trace, too.
        profile: run `torch.profiler` for steps of some ranks: "10-20" or "10-20@1,3"; the trace is
            run/ranks/profile.rank1/trace.json and so on. Servers make no steps.
        limit_mb: the most that each rank's trace takes; it keeps the latest events.
        every_s: seconds between two looks at memory and processor; in a long run they become rarer.
        gradients: write down how large the values of each layer's gradient are, in the first and then every
            so many steps of this rank, as they are before the ranks mix them; 0: never.
        initial_epoch: number of epochs done before, in a resumed training.

    Example:
        >>> import json, tempfile, torch
        >>> import nnlo_torch
        >>> model = torch.nn.Linear(1, 1)
        >>> optimizer = nnlo_torch.Downpour(torch.optim.SGD(model.parameters(), lr=0.1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = Report(optimizer, folder, config={"lr": 0.1})
        ...     for x in optimizer.epoch([torch.ones(20, 1), torch.ones(20, 1)]):
        ...         optimizer.zero_grad()
        ...         model(x).mean().backward()
        ...         optimizer.step()
        ...     report.epoch({"loss": 0.5})
        ...     report.close()
        ...     lines = map(json.loads, Path(folder, "ranks", "facts.rank0.jsonl").read_text().splitlines())
        ...     (epoch,) = [line for line in lines if line["what"] == "epoch"]
        >>> [epoch[name] for name in ("batches", "samples", "metrics")]
        [2, 40, {'loss': 0.5}]
    """

    def __init__(
        self,
        optimizer: Wrapper,
        folder: str | Path,
        *,
        config: Mapping[str, Any] | None = None,
        timeline: bool = False,
        profile: str | None = None,
        limit_mb: float = 100.0,
        every_s: float = 1.0,
        gradients: int = 0,
        initial_epoch: int = 0,
    ) -> None:
        wrapper_given(optimizer, "Report")
        whole_number("gradients", gradients, 0)
        self._optimizer, self._epochs, self._before = optimizer, initial_epoch, optimizer.report()
        if optimizer._team is not None:
            optimizer._settle("Report")
        profiler = None
        if profile is not None:
            size = 1 if optimizer._team is None else optimizer._team.size
            begin = functools.partial(begin_torch_profile, torch)
            profiler = StepProfiler(profile, Path(folder), optimizer.rank, size, begin)
        facts = self._facts = FactsWriter(
            folder,
            optimizer._team,
            optimizer.report,
            config=config,
            every_s=every_s,
            timeline=timeline,
            limit_mb=limit_mb,
        )
        optimizer._joint.reported = True
        optimizer._joint.at_taking_over.append(lambda _: self._count_from_here())
        optimizer._joint.at_loading.append(self._count_from_here)
        optimizer._joint.at_end.append(facts.close)
        facts.end_with(self)
        if gradients:
            look, layers = facts.gradient_watch(gradients), _named_gradients(optimizer)
            hook = optimizer.register_step_pre_hook(lambda *_: look(layers))
            optimizer._joint.at_end.append(hook.remove)
        if profiler is not None:
            ended = optimizer.register_step_post_hook(lambda *_: profiler.end_step())
            optimizer._joint.at_end += [profiler.close, ended.remove]

    def epoch(
        self, scores: Mapping[str, float] | None = None, *, own: Mapping[str, float] | None = None
    ) -> None:
        """Write the line of a finished epoch.

        Args:
            scores: the metrics of the epoch, such as the means over all ranks; None: what `mean` and
                `evaluate` have returned in it.
            own: this rank's metrics, if those are not its own.
        """
        optimizer, before = self._optimizer, self._before
        report = self._before = optimizer.report()
        counts = {"samples": report.samples - before.samples}
        if not optimizer.serves:
            counts["batches"] = report.steps - before.steps
        rate = float(optimizer.param_groups[0]["lr"])
        found = optimizer._joint.scores if scores is None else scores
        self._facts.epoch(
            self._epochs, counts, rate, numbers_of(found), None if own is None else numbers_of(own)
        )
        optimizer._joint.scores = {}
        self._epochs += 1

    def _count_from_here(self, epoch: int | None = None) -> None:
        """Begin the counts of this epoch anew: they are those of the server, or of a checkpoint, from now on.

        Args:
            epoch: the number of the epoch that the checkpoint was saved in.
        """
        self._before = self._optimizer.report()
        self._facts.count_from(self._before)
        self._epochs = self._epochs if epoch is None else epoch

    def close(self) -> None:
        """Write the last line; `optimizer.close()` and the script's end do it, too."""
        self._facts.close()


def _named_gradients(optimizer: Wrapper) -> Callable[[], Iterator[tuple[str, Any]]]:
    """Return what yields the name of each parameter and its gradient."""
    names = {id(one): name for module in optimizer._modules() for name, one in module.named_parameters()}
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    named = [(names.get(id(one), f"parameter {at}"), one) for at, one in enumerate(parameters)]

    def gradients() -> Iterator[tuple[str, Any]]:
        for name, one in named:
            if one.grad is not None:
                yield name, one.grad.detach().reshape(-1).float().cpu().numpy()

    return gradients
