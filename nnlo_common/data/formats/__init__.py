"""Formats of files with samples: each is a module with one class; see `Format`."""
