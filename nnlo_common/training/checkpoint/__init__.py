"""Checkpoints on disk: written atomically, verified by checksums, without pickle or a framework."""

from __future__ import annotations

from nnlo_common.training.checkpoint._manifest import DamagedError, Entry, Manifest
from nnlo_common.training.checkpoint._store import Draft, SavedCheckpoint, Store, packed_tree, unpacked_tree

__all__ = [
    "DamagedError",
    "Draft",
    "Entry",
    "Manifest",
    "SavedCheckpoint",
    "Store",
    "packed_tree",
    "unpacked_tree",
]
