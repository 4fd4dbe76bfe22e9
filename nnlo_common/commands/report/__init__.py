"""`nnlo report`: one page about one or several runs, with what to change.

_run_reader      reads that from the files in a run's folder
_search_reader   the same of a search
_verdicts        pure functions from a run's facts to sentences about what to change
_run_figures     figures of runs; plotly draws them
_report_command  the command, step by step, and its page
"""

from __future__ import annotations

__all__: list[str] = []
