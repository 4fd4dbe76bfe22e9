"""Options of `nnlo predict` and `nnlo tile`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.commands.train._option import Given, Option, OptionKind, nearest, option, options_of

__all__ = [
    "PREDICT_OPTIONS",
    "PredictSettings",
    "TILE_OPTIONS",
    "TileSettings",
    "UseSettings",
    "numbers",
    "settings_of_use",
]

MODEL, DATA, TILES, OUTPUT, RANKS = "Model", "Data", "Tiles", "Result", "Ranks"


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

    data: tuple[str, ...] = option(DATA, "files of any format: paths, patterns or list files", "FILE", ())
    features_name: tuple[str, ...] = option(
        DATA, "the column or group of the features; else as the run had it, else 'features'", default=()
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
            yield "--data is missing: name files, a pattern, or a list file"
        if self.copy_command is not None and self.cache is None:
            yield "--copy-command needs a folder to copy to; add --cache FOLDER"
        yield from super()._contradictions()


PREDICT_OPTIONS: Mapping[str, Option] = options_of(PredictSettings)


@dataclass(frozen=True, kw_only=True)
class TileSettings(UseSettings):
    """Settings of `nnlo tile`."""

    data: str = option(DATA, "the volume: an .h5, .zarr or .npy file", "FILE", "")
    dataset: str | None = option(DATA, "the name of the volume in the file; else the only one")
    axes: str | None = option(
        DATA, "a letter for each axis: c channels, t volumes apart, others are cut; else yx, zyx, czyx, tczyx"
    )
    tile: tuple[str, ...] = option(TILES, "the shape of a tile: a number, or one for each axis", "N", ())
    margin: tuple[str, ...] = option(
        TILES, "what does not count at the inner faces of a tile; else the receptive field, measured", "N", ()
    )
    blend: Literal["crop", "linear", "gaussian"] = option(
        TILES, "how neighbours are joined; linear and gaussian blend what they share", default="crop"
    )
    overlap: tuple[str, ...] = option(TILES, "what neighbours blend; else a quarter of a tile", "N", ())
    multiple: tuple[str, ...] = option(TILES, "tiles begin at multiples of it; else as measured", "N", ())
    batch: int = option(TILES, "tiles that the model gets at once", default=1, least=1)
    flips: str | None = option(TILES, "flip tiles along these axes, too, and take the mean, e.g. zyx")
    precision: Literal["float16", "bfloat16"] | None = option(MODEL, "in which a PyTorch model computes")
    reduce: str | None = option(
        OUTPUT, "argmax, a number as threshold, or a function of the Python file, before anything is written"
    )
    objects: str | None = option(
        OUTPUT, "number the objects of the map: label, or a function of the Python file", "label|NAME"
    )
    connectivity: int = option(
        OUTPUT, "of objects: 1: over faces; 2: over edges, too; 3: over corners", default=1, least=1
    )
    table: bool = option(OUTPUT, "write a table of the objects, too: FILE.csv", default=False)
    points: str | None = option(OUTPUT, "find points by a function of the Python file; FILE is .npy", "NAME")
    boxes: str | None = option(OUTPUT, "find boxes by a function of the Python file; FILE is .npy", "NAME")
    context: int = option(OUTPUT, "voxels around a piece that this function sees", default=16, least=0)
    dtype: Literal["float16", "float32", "float64"] | None = option(OUTPUT, "of the floats in the result")
    plan: bool = option(OUTPUT, "say what the job will do, with a job script, and do nothing", default=False)
    ranks: int = option(OUTPUT, "with --plan: for so many ranks", default=1, least=1)

    def _contradictions(self) -> Iterator[str]:
        if not self.data:
            yield "--data is missing: name the file of the volume"
        if not self.tile:
            yield "--tile is missing: give the shape of a tile, e.g. --tile 96, or one number for each axis"
        if not self.plan:
            yield from super()._contradictions()


TILE_OPTIONS: Mapping[str, Option] = options_of(TileSettings)


def numbers(flag: str, words: tuple[str, ...]) -> int | list[int] | None:
    """Return the whole numbers of an option: one for all axes, or one for each; None: it was not given."""
    if not words:
        return None
    if not all(word.isdecimal() for word in words):
        raise ConfigurationError(f"--{flag} {' '.join(words)}: give whole numbers, one or as many as axes")
    found = [int(word) for word in words]
    return found[0] if len(found) == 1 else found


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
