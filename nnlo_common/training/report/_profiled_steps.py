"""Steps that the framework's own profiler looks at, on the ranks that were named."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._file_access import RANKS

__all__ = ["ProfiledSteps", "StepProfiler", "begin_torch_profile"]

_TEXT = re.compile(r"\s*([1-9]\d{0,8})(?:-([1-9]\d{0,8}))?\s*(?:@\s*(\d{1,6}(?:\s*,\s*\d{1,6})*))?\s*")


@dataclass(frozen=True, slots=True)
class ProfiledSteps:
    """Steps of some ranks.

    Attributes:
        first: the first step, from 1, of those that this process makes.
        last: the last one.
        ranks: the ranks; None: all.
    """

    first: int
    last: int
    ranks: frozenset[int] | None = None

    @classmethod
    def parse(cls, text: str, asked: str = "profile=") -> ProfiledSteps:
        """Return the steps that a text names.

        Args:
            text: STEPS or STEPS@RANKS.
            asked: the option, for the error message.

        Raises:
            ConfigurationError: it names none.

        Example:
            >>> ProfiledSteps.parse("10-20@1,3")
            ProfiledSteps(first=10, last=20, ranks=frozenset({1, 3}))
        """
        found = _TEXT.fullmatch(text) if isinstance(text, str) else None
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise ConfigurationError(
                f"{asked}{text!r} must name steps, and may name ranks: '10', '10-20' or '10-20@1,3'"
            )
        ranks = None if found[3] is None else frozenset(map(int, found[3].split(",")))
        return cls(int(found[1]), int(found[2] or found[1]), ranks)


class StepProfiler:
    """Begins and ends the profiler of a framework between two steps of this rank.

    Args:
        text: which steps of which ranks, see `ProfiledSteps`.
        folder: of the run; the profiler writes into ranks/profile.rankN there.
        rank: this rank's number.
        size: the number of ranks.
        begin: begins to profile, and returns what ends that and writes into the folder given.

    Raises:
        ConfigurationError: the text names no steps, or ranks that do not exist; all ranks raise it.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     begin = lambda path: lambda: print("ended", path.name)
        ...     profiler = StepProfiler("2-3", Path(folder), 0, 1, begin)
        ...     for step in range(3):
        ...         profiler.end_step()
        ended profile.rank0
    """

    def __init__(
        self,
        text: str,
        folder: Path,
        rank: int,
        size: int,
        begin: Callable[[Path], Callable[[], object]],
    ) -> None:
        self._steps, self._begin = ProfiledSteps.parse(text), begin
        self._folder, self._done = folder / RANKS / f"profile.rank{rank}", 0
        ranks = self._steps.ranks or frozenset()
        if ranks and max(ranks) >= size:
            raise ConfigurationError(
                f"profile={text!r} names rank {max(ranks)}, but the last one is {size - 1}; name ranks from 0"
            )
        self._chosen = rank in ranks or self._steps.ranks is None
        self._end: Callable[[], object] | None = None
        self._look()

    def end_step(self) -> None:
        """Note that this rank has made a step."""
        self._done += 1
        if self._end is not None and self._done >= self._steps.last:
            self.close()
        self._look()

    def close(self) -> None:
        """End the profiling, if it is under way."""
        end, self._end = self._end, None
        if end is not None:
            end()

    def _look(self) -> None:
        if self._chosen and self._done + 1 == self._steps.first:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._end = self._begin(self._folder)


def begin_torch_profile(torch: Any, folder: Path) -> Callable[[], object]:
    """Begin to profile with PyTorch, and return what ends that; `StepProfiler` takes it for `begin`.

    Args:
        torch: the module, which the core does not import.
        folder: gets a trace.json.
    """
    profiler = torch.profiler.profile()
    profiler.start()

    def end() -> None:
        profiler.stop()
        profiler.export_chrome_trace(str(folder / "trace.json"))

    return end
