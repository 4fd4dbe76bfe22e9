"""`nnlo report`: one page about one or several runs, with what to change.

_run_facts       what the files of a run's folder tell: metrics, ranks, epochs, time
_time_shares     where the time of a rank went, from its timeline
_verdicts        pure functions from a run's facts to sentences about what to change
_run_figures     figures of runs; plotly draws them
_runs_page       the page
_report_command  the command, step by step
"""

from __future__ import annotations

__all__: list[str] = []
