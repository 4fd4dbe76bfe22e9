"""`nnlo trace`: one trace of a run, from those of its ranks.

_trace_command  the command, and the events of all ranks, with the arrows that have both ends
"""

from __future__ import annotations

__all__: list[str] = []
