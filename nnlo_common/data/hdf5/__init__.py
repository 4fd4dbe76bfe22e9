"""Samples in lists of HDF5 files: opening files, inspecting metadata, reading slices."""
