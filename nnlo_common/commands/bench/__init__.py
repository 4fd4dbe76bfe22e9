"""Measurements anyone can repeat: `python -m nnlo_common.commands.bench exchange`."""
