"""Options of `nnlo predict`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.commands.train._option import Given, Option, OptionKind, nearest, option, options_of

__all__ = ["PREDICT_OPTIONS", "PredictSettings", "UseSettings", "settings_of_use"]

MODEL, DATA, OUTPUT, RANKS = "Model", "Data", "Result", "Ranks"


@dataclass(frozen=True, kw_only=True)
class UseSettings:
    """Settings of a command that uses models."""

    model_params: dict[str, Any] = option(  # noqa: RUF009
        MODEL, "arguments for get_model() of a Python file; of a run: those of its training", default=dict
    )
    from_: str | None = option(MODEL, "the weights of a model that is a Python file", "FILE|RUN")
    allow_pickle: bool = option(
        MODEL, "take model files that run code when loaded: .pkl, .pt, Lambda layers", default=False
    )
    out: str = option(OUTPUT, "the file to write: .h5, .npy or .zarr", "FILE", "")
    overwrite: bool = option(OUTPUT, "remove an earlier result of this name", default=False)
    compression: str | None = option(OUTPUT, "of an .h5 file: gzip or lzf")
    max_gpus: int | None = option(RANKS, "use at most so many GPUs of each host; 0: none", least=0)
    part: str | None = option(
        RANKS, "in a job array without MPI: do this part only, e.g. 2/5; auto: as Slurm says", "K/N"
    )
    seed: int = option(MODEL, "of what the Python file draws", default=0, least=0, below=2**32)

    def __post_init__(self) -> None:
        for problem in self._contradictions():
            raise ConfigurationError(problem)

    def _contradictions(self) -> Iterator[str]:
        if not self.out:
            yield "--out is missing: name the file to write, e.g. --out result.h5"


@dataclass(frozen=True, kw_only=True)
class PredictSettings(UseSettings):
    """Settings of `nnlo predict`."""

    data: tuple[str, ...] = option(DATA, "HDF5 files: paths, patterns or list files", "FILE", ())
    features_name: tuple[str, ...] = option(
        DATA, "the dataset or group of the features; else as the run had it, else 'features'", default=()
    )
    keep: tuple[str, ...] = option(DATA, "datasets to copy into the result, e.g. event_id weight", default=())
    batch: int = option(DATA, "samples that the model gets at once", default=1000, least=1)
    check_finite: bool = option(DATA, "refuse NaN and infinity where they are read", default=False)
    cache: str | None = option(
        DATA, "copy the files to a folder of each host first, once for all its ranks", "FOLDER"
    )
    copy_command: tuple[str, ...] | None = option(
        DATA,
        "the command that copies a file there, e.g. 'xrdcp {src} {dst}'; run without a shell",
        "LINE",
        kind=OptionKind.COMMAND,
    )
    apply: str | None = option(
        OUTPUT, "a function of the Python file: gets the outputs of a batch, returns what is written"
    )
    figures: tuple[str, ...] = option(
        OUTPUT,
        "figures of merit: roc:LABELS, confusion:LABELS:CLASSES, or functions of the Python file that return "
        "a Figure; LABELS must be in --keep",
        default=(),
    )
    dtype: Literal["float16", "float32", "float64"] | None = option(OUTPUT, "of the floats in the result")
    precision: Literal["float16", "bfloat16"] | None = option(MODEL, "in which a PyTorch model computes")

    def _contradictions(self) -> Iterator[str]:
        if not self.data:
            yield "--data is missing: name HDF5 files, a pattern, or a list file"
        if self.copy_command is not None and self.cache is None:
            yield "--copy-command needs a folder to copy to; add --cache FOLDER"
        yield from super()._contradictions()


PREDICT_OPTIONS: Mapping[str, Option] = options_of(PredictSettings)


def settings_of_use(kind: type[Any], options: Mapping[str, Option], given: Mapping[str, Given]) -> Any:
    """Return the settings for the given values.

    Args:
        kind: the class of the settings.
        options: its options, by name.
        given: the values, by name.

    Raises:
        ConfigurationError: an option is unknown, invalid, or conflicts with another.
    """
    values: dict[str, Any] = {}
    for name, one in given.items():
        if name not in options:
            raise ConfigurationError(f"{one.place} has no option {name!r}{nearest(name, options)}")
        values["from_" if name == "from" else name] = one.read(options[name])
    return kind(**values)
