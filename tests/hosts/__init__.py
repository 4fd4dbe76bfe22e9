"""Tests that need several hosts, which `tests.helpers.hosts` makes on this machine."""
