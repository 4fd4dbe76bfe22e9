"""The `nnlo predict` command: the outputs of models for all samples of files."""

from __future__ import annotations

import importlib
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from nnlo_common.base._arguments import whole_in
from nnlo_common.base._errors import ConfigurationError, NNLOError
from nnlo_common.base._limited_formats import LARGEST_TOML
from nnlo_common.cluster._gpus import share_host
from nnlo_common.cluster._hosts import Place
from nnlo_common.commands.train._command_line import given_by
from nnlo_common.commands.train._job import Job, RankCommand, brief, tell
from nnlo_common.commands.train._model_file import (
    Loaded,
    check_model,
    check_weights_file,
    load_model,
    plug_in,
)
from nnlo_common.commands.train._option import (
    Given,
    Option,
    OptionKind,
    nearest,
    option,
    option_text,
    options_of,
    parsed_toml,
)
from nnlo_common.commands.train._python_file import adapting, asked, users_line
from nnlo_common.commands.train._run_folder import write_json
from nnlo_common.commands.train._run_plan import side_of
from nnlo_common.commands.train._settings import OPTIONS
from nnlo_common.data import list_files
from nnlo_common.data._preparation import PREPARATIONS
from nnlo_common.data.formats._found import check_remote
from nnlo_common.inference import ROC, Confusion, Figure, PredictOptions, TileOptions, infer_over_tiles
from nnlo_common.inference._running import array_share
from nnlo_common.inference._tile_plan import job_script, planned_tiles
from nnlo_common.inference._tile_run import run_of
from nnlo_common.training.report._facts_writer import facts_files
from nnlo_common.training.report._watched_use import watched_use

__all__ = [
    "PREDICT_OPTIONS",
    "PredictRun",
    "PredictSettings",
    "TILE_OPTIONS",
    "TileCommandRun",
    "TileSettings",
    "UseRun",
    "UseSettings",
    "UsedModel",
    "check_models",
    "function_named",
    "gpu_turns",
    "load_models",
    "numbers",
    "settings_of_use",
]

# -- options of `nnlo predict` and `nnlo tile` ---------------------------------------------------------

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
    run: str | None = option(
        OUTPUT, "a folder for what `nnlo top` and `nnlo report` show of the job; else FILE.run", "FOLDER"
    )
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
    found = [number for word in words if (number := whole_in(word)) is not None]
    if len(found) < len(words):
        told = " ".join(words)
        raise ConfigurationError(f"--{flag} {told:.60}: give whole numbers, one or as many as axes")
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


# -- models that a command uses: of the folder of a run, with its own options, or of a file ------------

_CONFIG = "config.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedModel:
    """Where a model comes from; what `load_model` needs.

    Attributes:
        model: the path of its file.
        model_params: arguments of get_model().
        from_: its weights; None: the file has them.
        settings: of the command.
        features_name: the features of its training, if it is of a run.
        reading: how these were read there: padded, with masks, and with the preparations of that run.
    """

    model: str
    model_params: dict[str, Any]
    from_: str | None
    settings: UseSettings
    features_name: tuple[str, ...] = ()
    reading: dict[str, Any] = field(default_factory=dict)

    @property
    def allow_pickle(self) -> bool:
        """Whether files may run code: as the command says, never as the folder of a run does."""
        return self.settings.allow_pickle

    @property
    def seed(self) -> int:
        """The seed of what the file draws."""
        return self.settings.seed


def check_models(names: Sequence[str], settings: UseSettings) -> list[UsedModel]:
    """Check models without a framework; return where they come from."""
    found = [_used(name, settings) for name in names]
    for one in found:
        check_model(one)
        check_weights_file(one)
        untrained = one.from_ is None and one.model.endswith((".py", ".json"))
        if untrained:
            raise ConfigurationError(
                f"{one.model} is a model without its weights; add --from FILE, or name the folder of a run"
            )
    return found


def load_models(used: Sequence[UsedModel]) -> list[Loaded]:
    """Load models, on this rank's device; refuse several frameworks."""
    loaded = [load_model(one, Path(one.model).expanduser().resolve()) for one in used]
    kinds = sorted({one.framework for one in loaded})
    if len(kinds) > 1:
        raise ConfigurationError(f"the models are of {' and '.join(kinds)}; give models of one framework")
    for one in loaded:
        plug_in(one.framework).placed(one.model)
    return loaded


def _used(name: str, settings: UseSettings) -> UsedModel:
    path = Path(name).expanduser().resolve()
    if not path.is_dir():
        return UsedModel(
            model=str(path),
            model_params=settings.model_params,
            from_=settings.from_,
            settings=settings,
        )
    if settings.from_ is not None:
        raise ConfigurationError(f"{path} is the folder of a run, which has its weights; leave out --from")
    if not (path / _CONFIG).is_file():
        raise ConfigurationError(
            f"{path} is not the folder of a run: it has no {_CONFIG}; name a run, or the file of a model"
        )
    config = parsed_toml(option_text(path / _CONFIG, str(path), LARGEST_TOML), str(path))
    asked_for = {
        name: Given(config[name], str(path / _CONFIG)).read(OPTIONS[name])
        for name in ("features_name", "pad", "mask")
        if config.get(name) not in (None, [])
    }
    params = config.get("model_params", {})
    if not isinstance(config.get("model"), str) or not isinstance(params, dict):
        raise ConfigurationError(
            f"{path / _CONFIG} names no model; name the file of a model instead of the run"
        )
    reading = {name: asked_for[name] for name in ("pad", "mask") if asked_for.get(name)}
    for option_name, kind in PREPARATIONS.items():
        if (path / kind.file).is_file():
            reading[option_name] = kind.load(path / kind.file)
    return UsedModel(
        model=config["model"],
        model_params={**params, **settings.model_params},
        from_=str(path),
        settings=settings,
        features_name=asked_for.get("features_name", ()),
        reading=reading,
    )


def gpu_turns(places: Sequence[Place]) -> list[int | None]:
    """Return the GPU of each rank: the ranks of a host take them in turn."""
    return [place.local_rank % place.gpus if place.gpus else None for place in places]


class UseRun(RankCommand):
    """A command that uses models, on one rank.

    Args:
        job: the ranks.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._working = False

    def run(self, flags: Mapping[str, Any], unknown: Sequence[str]) -> int:
        """Run the command; return the exit status."""
        try:
            self._use(dict(flags), unknown)
        except Exception as error:
            if not isinstance(error, NNLOError):
                lines = [f"{self._job.name}{type(error).__name__}: {brief(str(error))}", users_line(error)]
                tell("\n".join(filter(None, lines)) + self.advice, self._job.command)
            raise
        return 0

    def undo(self) -> None:
        """Do nothing: what is written stays."""

    @property
    def advice(self) -> str:
        """Text to print after a failure: what to do next."""
        return "\nFix this, then rerun the same command: what is written stays" if self._working else ""

    @property
    def resume_hint(self) -> str:
        """Text to print after an interrupt."""
        return "; rerun the same command to continue" if self._working else ""

    def _use(self, flags: dict[str, Any], unknown: Sequence[str]) -> None:
        raise NotImplementedError

    def _run_folder(self, settings: UseSettings) -> Path:
        """Return the folder for what is watched; with --overwrite without what an earlier job wrote there."""
        with self._job.together():
            part = array_share(settings.part, os.environ)
            folder = Path(settings.run or f"{settings.out}.run").expanduser()
            folder = folder if part is None else folder / "part-{}-of-{}".format(*part)
            if self._job.speaks and settings.overwrite:
                for path, _ in facts_files(folder):
                    path.unlink()
        return folder

    def _say(self, text: str) -> None:
        if self._job.speaks:
            print(f"nnlo {self._job.command}: {text}", flush=True)


class PredictRun(UseRun):
    """A prediction on one rank."""

    def _use(self, flags: dict[str, Any], unknown: Sequence[str]) -> None:
        job, names = self._job, flags.pop("models")
        with job.together():
            given = given_by(flags, unknown, PREDICT_OPTIONS, "predict")
            settings: PredictSettings = settings_of_use(PredictSettings, PREDICT_OPTIONS, given)
            used = check_models(names, settings)
            files = list_files(settings.data)
            check_remote(files if settings.cache is None else ())
        places = job.places()
        share_host(places, job.rank, settings.max_gpus, os.environ, gpu_turns)
        with job.together(), adapting():
            loaded = load_models(used)
            one = loaded[0]
            features, adaptor = side_of(one, "features", settings.features_name or used[0].features_name)
            reading: dict[str, Any] = {"features": features, "adapt_features": adaptor}
            reading |= {"check_finite": settings.check_finite, **used[0].reading}
            if settings.cache is not None:
                reading |= {"stage_to": settings.cache, "copy_command": settings.copy_command}
            figures = {name: _figure(one, name) for name in settings.figures}
            apply = None if settings.apply is None else function_named(one, "--apply", settings.apply)
        options = _same_named(settings, PredictOptions) | {
            "batch_size": settings.batch,
            "apply": apply,
            "figures": figures,
            "progress": True,
            "run": self._run_folder(settings),
            "world": job.world,
        }
        if one.framework == "torch":
            options["precision"] = settings.precision
        elif settings.precision is not None:
            self._refuse("--precision is for PyTorch; a Keras model has its own dtype policy")
        self._working = True
        front = importlib.import_module(f"nnlo_{one.framework}")
        found = front.predict(
            [each.model for each in loaded], list(files), settings.out, **options, **reading
        )
        self._tell(found, settings)

    def _refuse(self, problem: str) -> None:
        error = ConfigurationError(problem)
        error.collective = True
        raise error

    def _tell(self, found: Any, settings: PredictSettings) -> None:
        if found.missing:
            self._say(f"part {settings.part} is done; {found.missing} pieces of other parts are missing")
            return
        rate = found.rows / max(found.seconds, 1e-9)
        self._say(f"{found.path}: {found.rows} samples in {found.seconds:.1f} s, {rate:.0f} per second")
        for name, (values, unknown) in found.unknown.items():
            if unknown:
                self._say(f"{name}: {unknown} of {values} values are unknown, and became 0")
        if not found.figures:
            return
        for name, value in found.figures.items():
            shown = value.get("auc", value) if isinstance(value, dict) else value
            self._say(f"{name} = {shown!s:.200}")
        with self._job.together():
            if self._job.speaks:
                path = Path(f"{found.path}.figures.json")
                try:
                    write_json(path, dict(found.figures))
                except (OSError, TypeError, ValueError) as error:
                    raise ConfigurationError(f"{path} cannot be written ({error})") from None


def function_named(loaded: Loaded, flag: str, name: str) -> Any:
    found = getattr(loaded.module, name, None)
    if not callable(found):
        names = (
            [] if loaded.module is None else [one for one in vars(loaded.module) if not one.startswith("_")]
        )
        raise ConfigurationError(
            f"{flag} {name}: the model's Python file has no function of this name{nearest(name, names)}"
        )
    return found


def _figure(loaded: Loaded, text: str) -> Figure:
    """Return a figure by its name and arguments."""
    name, *rest = text.split(":")
    if name == "roc" and len(rest) == 1:
        return ROC(rest[0])
    if name == "confusion" and len(rest) == 2 and (classes := whole_in(rest[1])) is not None:
        return Confusion(rest[0], classes)
    if rest or name in ("roc", "confusion"):
        raise ConfigurationError(
            f"--figures {text:.60}: give roc:LABELS, confusion:LABELS:CLASSES, or the name of a function"
        )
    function_named(loaded, "--figures", name)
    found = asked(loaded.module, loaded.path, name)
    if not isinstance(found, Figure):
        raise ConfigurationError(f"--figures {name}: {name}() returned {found!r:.60}; return an nnlo Figure")
    return replace(found)


# -- the `nnlo tile` command: a model applied to a volume, tile by tile --------------------------------


class TileCommandRun(UseRun):
    """A job of tiles on one rank."""

    def _use(self, flags: dict[str, Any], unknown: Sequence[str]) -> None:
        job, names = self._job, flags.pop("models")
        with job.together():
            given = given_by(flags, unknown, TILE_OPTIONS, "tile")
            settings: TileSettings = settings_of_use(TileSettings, TILE_OPTIONS, given)
            used = check_models(names, settings)
        places = job.places()
        share_host(places, job.rank, settings.max_gpus, os.environ, gpu_turns)
        with job.together(), adapting():
            (loaded,) = load_models(used)
            options = _options(settings, loaded)
            compute, checksum, context = plug_in(loaded.framework).tile_parts(
                loaded.model, settings.precision
            )
        if settings.plan:
            with context:
                self._plan(compute, settings, options)
            return
        folder = self._run_folder(settings)
        self._working = True
        with context, watched_use(folder, job.world) as watch:
            options = replace(options, watch=watch)
            found = infer_over_tiles(
                compute, settings.data, settings.out, options, world=job.world, model=checksum
            )
        if found.missing:
            self._say(f"part {settings.part} is done; {found.missing} pieces of other parts are missing")
            return
        margin = " x ".join(map(str, found.margin))
        if options.found is not None:
            self._say(f"{found.objects} {options.found.what} found")
        self._say(f"{found.path}: {found.tiles} tiles, margin {margin}, in {found.seconds:.1f} s")

    def _plan(self, compute: Any, settings: TileSettings, options: TileOptions) -> None:
        run = run_of(compute, settings.data, options, self._job.world)
        ranks = max(settings.ranks, self._job.size)
        with self._job.together():
            plan = planned_tiles(run)
        run.volume.close()
        for line in plan.lines(ranks):
            self._say(line)
        if self._job.speaks:
            words = [word for word in sys.argv[1:] if word != "--plan"]
            print(job_script(shlex.join(["nnlo", *words]), ranks, plan.seconds / 3600 / ranks), flush=True)


def _options(settings: TileSettings, loaded: Loaded) -> TileOptions:
    reduce: Any = settings.reduce
    if reduce is not None and reduce != "argmax":
        try:
            reduce = float(reduce)
        except ValueError:
            reduce = function_named(loaded, "--reduce", settings.reduce or "")

    def named(option: str) -> Any:
        name = getattr(settings, option)
        return None if name is None else function_named(loaded, f"--{option}", name)

    shapes = {
        name: numbers(name, getattr(settings, name)) for name in ("tile", "margin", "overlap", "multiple")
    }
    return TileOptions(
        **_same_named(settings, TileOptions)
        | shapes
        | {
            "batch_size": settings.batch,
            "reduce": reduce,
            "flips": settings.flips or "",
            "objects": settings.objects if settings.objects in (None, "label") else named("objects"),
            "points": named("points"),
            "boxes": named("boxes"),
            "progress": True,
        }
    )


def _same_named(settings: UseSettings, kind: type[Any]) -> dict[str, Any]:
    """Return the options of a job that a flag of the same name sets as it is."""
    return {one.name: getattr(settings, one.name) for one in fields(kind) if hasattr(settings, one.name)}
