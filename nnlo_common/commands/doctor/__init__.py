"""`nnlo doctor`: look at the machine, the MPI library and the installation, and say what to mend.

_rank_report     what one rank sees: facts, no judgement; sent to rank 0 as text
_checks_*        pure functions from the reports of all ranks to findings; _all_checks calls them
_link_speed      ping-pong, bandwidth and clocks between rank 0 and the others
_findings_page   the findings as a page for people, or as JSON
_doctor_command  the order of it all
"""

from __future__ import annotations

__all__: list[str] = []
