"""Plugin seam: the names of the core that a framework package may use; the rest is not its business.

Names that need an optional library, such as Optuna, and the drivers of the commands are imported when
asked for. Nothing here is for users: theirs are in `nnlo_common`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from nnlo_common.algorithms import Algorithm
from nnlo_common.algorithms._found import ALGORITHMS
from nnlo_common.algorithms._rule import GradientSum
from nnlo_common.algorithms._vector_optimizer import Stretch
from nnlo_common.base import _state_tree as random_numbers
from nnlo_common.base._arguments import function_given, is_number, whole_number
from nnlo_common.base._block_threads import InOrder
from nnlo_common.base._errors import ConfigurationError, is_out_of_memory, warn
from nnlo_common.base._file_access import (
    hold,
    names_rank,
    path_of,
    read_whole,
    readable_file,
    usable,
    whole,
    whole_file,
    write_whole,
)
from nnlo_common.base._flat_vector import HEADER_BYTES, PRESENT, Vector, blocks, laid_out
from nnlo_common.base._limited_formats import LARGEST_JSON, check_stored, npz_arrays, parsed_json
from nnlo_common.base._other_projects import OtherProject
from nnlo_common.base._process_memory import ProcessMemory
from nnlo_common.base._public_names import say_public_module
from nnlo_common.base._signals import EXIT_CODE, Interrupts
from nnlo_common.base._spans import span
from nnlo_common.base._state_tree import seed_random
from nnlo_common.cluster._aborting import explain
from nnlo_common.cluster._gpus import own_gpu, when_chosen
from nnlo_common.cluster._topology import Roles, Topology
from nnlo_common.cluster.transport._endpoint import DivisibleWorld, Group, RankWorld
from nnlo_common.data import (
    MOST_PASSES,
    BatchOptions,
    FileBatches,
    Files,
    FileSource,
    HDF5Source,
    Lease,
    LeasedBatches,
    Reading,
    epoch_order,
    lacks_one,
    portion,
    share,
)
from nnlo_common.data._data_marks import all_same, as_values, mark_of
from nnlo_common.data._file_batches import check_assignment, check_position
from nnlo_common.inference import (
    Ensemble,
    PredictKeywords,
    PredictOptions,
    TileKeywords,
    TileOptions,
    infer_over_tiles,
    models_in,
    one_model,
    predict_options,
    predict_rows,
)
from nnlo_common.inference._receptive_field import measured_field
from nnlo_common.inference._structure import changed
from nnlo_common.protocol import LedgerClient, Moves, Moving
from nnlo_common.protocol._query_messages import AnswerT, EpochMeanQuery, NoteQuery, Query, SampledData
from nnlo_common.simulation import Advice
from nnlo_common.simulation._probe import StepParts
from nnlo_common.training._all_reduce import Reducer
from nnlo_common.training._collectives import Trained, unwired, vectors_in_turn
from nnlo_common.training._gradients_ahead import GradientsAhead, MadeGradients, when_made
from nnlo_common.training._group_rank import GroupRank
from nnlo_common.training._joining import launched, planned
from nnlo_common.training._plan import readable
from nnlo_common.training._rank_options import RankOptions, checked_roles, roles_taken_from
from nnlo_common.training._rank_parts import Periodic, has_center, say, serves, speaks, stands_by
from nnlo_common.training._scaling import epochs_per_rank, scale_lr
from nnlo_common.training._session import Session
from nnlo_common.training._wrapping import AS_YOURS, WrapperBase, wrapper_class
from nnlo_common.training.checkpoint import DamagedError, packed_tree, unpacked_tree
from nnlo_common.training.checkpoint._manager import (
    CheckpointManager,
    check_entries,
    check_place_in_data,
    check_weights,
    checked_count,
)
from nnlo_common.training.report._course import Course, Moment, spaced
from nnlo_common.training.report._facts_writer import FactsWriter
from nnlo_common.training.report._live_table import is_live, table
from nnlo_common.training.report._profiled_steps import StepProfiler, begin_torch_profile
from nnlo_common.training.report._progress_display import ProgressDisplay
from nnlo_common.training.report._watched_use import watched_use

if TYPE_CHECKING:
    from nnlo_common.commands._advise import advise_with
    from nnlo_common.commands.train._job import brief
    from nnlo_common.commands.train._python_file import running
    from nnlo_common.commands.train._run_plan import RunPlan
    from nnlo_common.commands.train._settings import RatePlan
    from nnlo_common.commands.train._stopping import Stopping
    from nnlo_common.commands.train._trainer import Trainer
    from nnlo_common.search import optimize
    from nnlo_common.search._channels import Death, Inheritance, TeamMessage, connect_search
    from nnlo_common.search._partition import agree, cut_teams, refuse_spares
    from nnlo_common.search._search_messages import End, Note, Start
    from nnlo_common.search.block._block import run_block
    from nnlo_common.search.block._folds import split
    from nnlo_common.search.coordinator._coordinator import SIGNAL, Coordinator, run_coordinator
    from nnlo_common.search.coordinator._parameter_choice import RunningTrial, TrialChooser, TrialSource
    from nnlo_common.search.coordinator._time_left import TimeLeft, end_of
    from nnlo_common.search.samplers._engines import engine
    from nnlo_common.search.samplers._names import quoted_samplers
    from nnlo_common.search.samplers._seeding import seed_of

__all__ = [
    "ALGORITHMS",
    "AS_YOURS",
    "Advice",
    "Algorithm",
    "AnswerT",
    "BatchOptions",
    "CheckpointManager",
    "ConfigurationError",
    "Coordinator",
    "Course",
    "DamagedError",
    "Death",
    "DivisibleWorld",
    "EXIT_CODE",
    "End",
    "Ensemble",
    "EpochMeanQuery",
    "FactsWriter",
    "FileBatches",
    "FileSource",
    "Files",
    "GradientSum",
    "GradientsAhead",
    "Group",
    "GroupRank",
    "HDF5Source",
    "HEADER_BYTES",
    "InOrder",
    "Inheritance",
    "Interrupts",
    "LARGEST_JSON",
    "Lease",
    "LeasedBatches",
    "LedgerClient",
    "MOST_PASSES",
    "MadeGradients",
    "Moment",
    "Moves",
    "Moving",
    "Note",
    "NoteQuery",
    "OtherProject",
    "PRESENT",
    "Periodic",
    "PredictKeywords",
    "PredictOptions",
    "ProcessMemory",
    "ProgressDisplay",
    "Query",
    "RankOptions",
    "RankWorld",
    "RatePlan",
    "Reading",
    "Reducer",
    "Roles",
    "RunPlan",
    "RunningTrial",
    "SIGNAL",
    "SampledData",
    "Session",
    "Start",
    "StepParts",
    "StepProfiler",
    "Stopping",
    "Stretch",
    "TeamMessage",
    "TileKeywords",
    "TileOptions",
    "TimeLeft",
    "Topology",
    "Trained",
    "Trainer",
    "TrialChooser",
    "TrialSource",
    "Vector",
    "WrapperBase",
    "advise_with",
    "agree",
    "all_same",
    "as_values",
    "begin_torch_profile",
    "blocks",
    "brief",
    "changed",
    "check_assignment",
    "check_entries",
    "check_place_in_data",
    "check_position",
    "check_stored",
    "check_weights",
    "checked_count",
    "checked_roles",
    "connect_search",
    "cut_teams",
    "end_of",
    "engine",
    "epoch_order",
    "epochs_per_rank",
    "explain",
    "function_given",
    "has_center",
    "hold",
    "infer_over_tiles",
    "is_live",
    "is_number",
    "is_out_of_memory",
    "lacks_one",
    "laid_out",
    "launched",
    "mark_of",
    "measured_field",
    "models_in",
    "names_rank",
    "npz_arrays",
    "one_model",
    "optimize",
    "own_gpu",
    "packed_tree",
    "parsed_json",
    "path_of",
    "planned",
    "portion",
    "predict_options",
    "predict_rows",
    "quoted_samplers",
    "random_numbers",
    "read_whole",
    "readable",
    "readable_file",
    "refuse_spares",
    "roles_taken_from",
    "run_block",
    "run_coordinator",
    "running",
    "say",
    "say_public_module",
    "scale_lr",
    "seed_of",
    "seed_random",
    "serves",
    "share",
    "spaced",
    "span",
    "speaks",
    "split",
    "stands_by",
    "table",
    "unpacked_tree",
    "unwired",
    "usable",
    "vectors_in_turn",
    "warn",
    "watched_use",
    "when_chosen",
    "when_made",
    "whole",
    "whole_file",
    "whole_number",
    "wrapper_class",
    "write_whole",
]

_LATER = {
    "advise_with": "nnlo_common.commands._advise",
    "agree": "nnlo_common.search._partition",
    "brief": "nnlo_common.commands.train._job",
    "connect_search": "nnlo_common.search._channels",
    "Coordinator": "nnlo_common.search.coordinator._coordinator",
    "cut_teams": "nnlo_common.search._partition",
    "Death": "nnlo_common.search._channels",
    "Inheritance": "nnlo_common.search._channels",
    "End": "nnlo_common.search._search_messages",
    "end_of": "nnlo_common.search.coordinator._time_left",
    "engine": "nnlo_common.search.samplers._engines",
    "Note": "nnlo_common.search._search_messages",
    "optimize": "nnlo_common.search",
    "quoted_samplers": "nnlo_common.search.samplers._names",
    "RatePlan": "nnlo_common.commands.train._settings",
    "run_block": "nnlo_common.search.block._block",
    "run_coordinator": "nnlo_common.search.coordinator._coordinator",
    "running": "nnlo_common.commands.train._python_file",
    "refuse_spares": "nnlo_common.search._partition",
    "RunningTrial": "nnlo_common.search.coordinator._parameter_choice",
    "RunPlan": "nnlo_common.commands.train._run_plan",
    "seed_of": "nnlo_common.search.samplers._seeding",
    "SIGNAL": "nnlo_common.search.coordinator._coordinator",
    "split": "nnlo_common.search.block._folds",
    "Start": "nnlo_common.search._search_messages",
    "Stopping": "nnlo_common.commands.train._stopping",
    "TeamMessage": "nnlo_common.search._channels",
    "TimeLeft": "nnlo_common.search.coordinator._time_left",
    "Trainer": "nnlo_common.commands.train._trainer",
    "TrialChooser": "nnlo_common.search.coordinator._parameter_choice",
    "TrialSource": "nnlo_common.search.coordinator._parameter_choice",
}


def __getattr__(name: str) -> Any:
    """Import what is only then needed."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)
