"""Tests under a real Slurm, which `tests.helpers.slurm` starts on hosts of this machine."""
