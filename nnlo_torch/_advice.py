"""Advice on errors of Python and PyTorch that a script meets when it begins to run on several ranks."""

from __future__ import annotations

from nnlo_common.plugin import explain

__all__ = ["explain_missing_variables"]

explain(
    "sampler option is mutually exclusive with shuffle",
    "the sampler shuffles: leave shuffle out of the DataLoader; ShardSampler(data) draws a new order in each "
    "epoch, ShardSampler(data, shuffle=False) does not",
)
explain(
    "Error initializing torch.distributed using env://",
    "nnlo starts by mpiexec or srun and needs no torch.distributed: remove init_process_group, "
    "DistributedDataParallel and DistributedSampler; nnlo_torch.Synchronous(optimizer, servers=0) and "
    "nnlo_torch.ShardSampler(data) take their place",
)
_SKIPPED = (
    "a server skips the body of the loop over batches; if the variable is set there only, set it before the "
    "loop, too, or use optimizer.mean({'loss': ...}, samples), which all ranks get"
)


def explain_missing_variables() -> None:
    """Explain variables that do not exist on this rank, because it is a server."""
    for words in ("' is not defined", "where it is not associated with a value"):
        explain(words, _SKIPPED)
