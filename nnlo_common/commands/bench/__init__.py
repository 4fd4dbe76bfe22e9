"""Benchmarks of the core: `python -m nnlo_common.commands.bench exchange`."""
