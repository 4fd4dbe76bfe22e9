"""The `nnlo tile` command: a model applied to a volume, tile by tile."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from nnlo_common.cluster._gpus import share_host
from nnlo_common.commands.predict._predict_command import (
    TILE_OPTIONS,
    TileSettings,
    UseRun,
    check_models,
    function_named,
    gpu_turns,
    load_models,
    numbers,
    settings_of_use,
)
from nnlo_common.commands.train._command_line import given_by
from nnlo_common.commands.train._model_file import Loaded, plug_in
from nnlo_common.commands.train._python_file import adapting
from nnlo_common.inference import TileOptions, infer_over_tiles
from nnlo_common.inference._tile_plan import job_script, planned_tiles
from nnlo_common.inference._tile_run import run_of

__all__ = ["TileCommandRun"]


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
        with context:
            if settings.plan:
                self._plan(compute, settings, options)
                return
            self._working = True
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

    tile = numbers("tile", settings.tile)
    assert tile is not None  # the settings have one
    return TileOptions(
        tile=tile,
        margin=numbers("margin", settings.margin),
        overlap=numbers("overlap", settings.overlap),
        multiple=numbers("multiple", settings.multiple),
        blend=settings.blend,
        axes=settings.axes,
        dataset=settings.dataset,
        batch_size=settings.batch,
        reduce=reduce,
        flips=settings.flips or "",
        objects=settings.objects if settings.objects in (None, "label") else named("objects"),
        connectivity=settings.connectivity,
        table=settings.table,
        points=named("points"),
        boxes=named("boxes"),
        context=settings.context,
        dtype=settings.dtype,
        compression=settings.compression,
        overwrite=settings.overwrite,
        part=settings.part,
        progress=True,
    )
