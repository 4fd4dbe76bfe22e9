"""The framework-free heart of nnlo: flat vectors, algorithms, protocol, transports, topology."""

from __future__ import annotations

__version__ = "0.1.0.dev0"
