"""`nnlo top`: a table of the ranks of a running training, from the files in its folder.

_top_command  the command: read, draw, wait, again
"""

from __future__ import annotations

__all__: list[str] = []
