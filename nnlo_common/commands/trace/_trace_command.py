"""The command: merge the traces of a run's ranks."""

from __future__ import annotations

import json
from pathlib import Path

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._whole_files import usable, whole_file
from nnlo_common.commands.trace._merged_trace import backwards_ms, merged
from nnlo_common.commands.train._job import REFUSED, tell

__all__ = ["run_trace"]

_TRACE = "trace.json"
#: Clocks of hosts are compared at the start to within about this.
_CLOSE_MS = 1.0


def run_trace(run: str, output: str | None = None) -> int:
    """Write one trace of a run; return the exit status.

    Args:
        run: its folder.
        output: the file to write; None: trace.json in that folder.
    """
    try:
        path = Path(run) / _TRACE if output is None else Path(output)
        events, dropped = merged(Path(run))
        with whole_file(usable(str(path), path)) as file:
            file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
            for number, event in enumerate(events):
                text = json.dumps(event, separators=(",", ":"))
                file.write(f"{',' if number else ''}{text}\n".encode())
            file.write(b"]}\n")
    except ConfigurationError as error:
        tell(str(error), "trace")
        return REFUSED
    ranks = {event.get("pid") for event in events}
    lost = f", without {dropped} messages whose other end is missing" if dropped else ""
    print(f"nnlo trace: {path}, {len(events)} events of {len(ranks)} ranks{lost}")
    if (back_ms := backwards_ms(events)) > _CLOSE_MS:
        print(
            f"arrows go back in time by up to {back_ms:.1f} ms: the clocks of the hosts have drifted apart "
            "since the start"
        )
    print("open it with https://ui.perfetto.dev, which keeps it on this computer, or chrome://tracing")
    return 0
