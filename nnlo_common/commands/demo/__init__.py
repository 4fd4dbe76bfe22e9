"""`nnlo demo`: a training that comes with the package, images included.

_demo_command  finds the example, runs it as a script, and says what to try next
examples/      in an installed package only: copies of scripts and data of the repository's `examples/`,
               put there by the build (`pyproject.toml`), so that the repository has them once
"""

from __future__ import annotations

__all__: list[str] = []
