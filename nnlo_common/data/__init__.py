"""Which samples a worker takes, and reading them.

The order of an epoch, fixed shares of it, and leases of parts of it; lists of HDF5 files, and batches of
what they hold. h5py is imported when a file is opened.
"""

from __future__ import annotations

from nnlo_common.data._batches import Batches
from nnlo_common.data._blocks import Blocks, portion
from nnlo_common.data._hdf5 import HDF5Source, Reading
from nnlo_common.data._lease import WAIT, Answer, Lease, Waiting
from nnlo_common.data._leased import LeasedBatches
from nnlo_common.data._leases import Leases
from nnlo_common.data._listing import Files, list_files
from nnlo_common.data._order import epoch_order, share
from nnlo_common.data._prefetch import Prefetch
from nnlo_common.data._source import Arrays, Field, Source
from nnlo_common.data._staging import Staging

__all__ = [
    "Answer",
    "Arrays",
    "Batches",
    "Blocks",
    "epoch_order",
    "Field",
    "Files",
    "HDF5Source",
    "Lease",
    "LeasedBatches",
    "Leases",
    "list_files",
    "portion",
    "Prefetch",
    "Reading",
    "share",
    "Source",
    "Staging",
    "WAIT",
    "Waiting",
]
