"""What a process may still take of its host's memory."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from nnlo_common.base import _process_memory as process_memory


def test_a_limit_of_addresses_limits_what_is_free(monkeypatch):
    limit = 2**40
    monkeypatch.setattr(process_memory.resource, "getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr(os, "sysconf", lambda name: 4096 if name == "SC_PAGE_SIZE" else 2**40)
    real = Path.read_text
    told = {
        "/proc/self/statm": f"{(limit - 4096 * 7) // 4096} 5 5",
        "/proc/meminfo": "MemAvailable: 99999999 kB",
    }
    monkeypatch.setattr(Path, "read_text", lambda self: told.get(str(self)) or real(self))
    assert process_memory.free_memory() == (4096 * 7, limit)
    assert process_memory.ProcessMemory().left == 4096 * 7


def test_control_groups_limit_what_is_free(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 200\n")
    monkeypatch.setattr(process_memory, "_GROUPS", tmp_path)
    with suppress(OSError):
        if Path("/proc/self/cgroup").read_text().startswith("0:"):
            assert process_memory.free_memory() == (500, 1000)
            assert process_memory.ProcessMemory().left == 500
