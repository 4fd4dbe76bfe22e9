"""`nnlo doctor`: look at the machine, the MPI library and the installation, and say what to mend.

report.py    what one rank sees: facts, no judgement; sent to rank 0 as text
checks_*.py  pure functions from the reports of all ranks to findings
links.py     ping-pong, bandwidth and clocks between rank 0 and the others
show.py      the findings as a page for people, or as JSON
run.py       the order of it all
"""

from __future__ import annotations

__all__: list[str] = []
