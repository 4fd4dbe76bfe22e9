"""What tests do not see of the shell, the launcher or the batch system that they are started from."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["undisturbed"]

_DISTURBING = (
    # What a launcher writes into its children: a test run that was itself launched must not pass it on.
    *("OMPI_COMM_WORLD_", "OMPI_MCA_num_procs", "PMIX_", "PMI_", "MPI_LOCAL", "SLURM_"),
    # Unbuffered ranks, say, write a line and its end separately, and MPICH's launcher puts another's between.
    *("PYTHON", "NNLO_"),
)
_WANTED = ("PYTHONHOME", "PYTHONPATH", "NNLO_TEST_", "NNLO_SUITE_")


def undisturbed(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those that change what tests see.

    Args:
        environ: the variables of a process.
    """
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(_WANTED) or not name.startswith(_DISTURBING)
    }
