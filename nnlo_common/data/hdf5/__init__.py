"""Samples in lists of HDF5 files: opening, inspecting by metadata, reading slices."""
