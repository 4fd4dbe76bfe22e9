"""`nnlo doctor`: look at the machine, the MPI library and the installation, and say what to fix.

_checks          pure functions from the reports of all ranks to findings
_link_speed      ping-pong, bandwidth and clocks between rank 0 and the others
_doctor_command  the command, step by step, and its findings as a page or as JSON
"""

from __future__ import annotations

__all__: list[str] = []
