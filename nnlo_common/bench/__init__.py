"""Measurements anyone can repeat: `python -m nnlo_common.bench exchange`."""
