"""Training on one rank: plan, join, serve or work, collectives, leave.

Holds: the session that framework packages drive, server rank and worker rank, the stall detector,
collectives, `checkpoint/` (saving and resuming) and `report/` (progress, monitor, timeline).
May import: all rooms but `search` and `commands`.
Must not know: frameworks, searches.
"""
