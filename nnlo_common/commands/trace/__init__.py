"""`nnlo trace`: one trace of a run, from those of its ranks.

_merged_trace   the events of all ranks, with the arrows that have both ends
_trace_command  the command
"""

from __future__ import annotations

__all__: list[str] = []
