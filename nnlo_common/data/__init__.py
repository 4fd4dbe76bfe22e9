"""Samples: reading them, and distributing them among the workers.

Holds: sources and lists of files, `formats/`, leases of parts of an epoch, shuffling,
staging, the cache in memory, prefetch.
May import: `base`, `algorithms`; h5py, pyarrow, uproot and zarr where a file is opened.
Must not know: models, training, MPI.
"""

from __future__ import annotations

from nnlo_common.data._batches import Batches
from nnlo_common.data._blocks import MOST_PASSES, Blocks, epoch_order, lacks_one, portion, share
from nnlo_common.data._file_batches import BatchOptions, FileBatches
from nnlo_common.data._file_source import FileSource, HDF5Source, Reading
from nnlo_common.data._leased_batches import LeasedBatches
from nnlo_common.data._ledger import WAIT, Lease, Leases, Unanswered
from nnlo_common.data._listing import Files, list_files
from nnlo_common.data._prefetch import Prefetch
from nnlo_common.data._preparation import Standard, Vocabulary
from nnlo_common.data._source import Arrays, Field, Source
from nnlo_common.data._staging import Staging

__all__ = [
    "Arrays",
    "BatchOptions",
    "Batches",
    "Blocks",
    "Field",
    "FileBatches",
    "FileSource",
    "Files",
    "HDF5Source",
    "Lease",
    "LeasedBatches",
    "Leases",
    "MOST_PASSES",
    "Prefetch",
    "Reading",
    "Source",
    "Staging",
    "Standard",
    "Unanswered",
    "Vocabulary",
    "WAIT",
    "epoch_order",
    "lacks_one",
    "list_files",
    "portion",
    "share",
]
