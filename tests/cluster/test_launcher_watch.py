"""Ranks whose launcher is killed: they say so where somebody can read it, and end."""

from __future__ import annotations

import re
import subprocess
import sys
import time

import pytest

from nnlo_common.cluster.transport._launcher_watch import find_launcher
from tests.helpers.jobs import environment, launcher, running_mpi, starting
from tests.helpers.paths import PROGRAMS, ROOT

GONE = r"nnlo: rank {} of 3 on \S+ ends, because the launcher \(mpiexec\) has gone: .*"


def processes(folder, *facts):
    """Describe processes as the system does: number, name and parent of each."""
    for number, name, parent in facts:
        (folder / str(number)).mkdir()
        (folder / str(number) / "stat").write_text(f"{number} ({name}) S {parent} 1 1 0 -1\n")
    return folder


@pytest.mark.parametrize("name", ["prterun", "prted"])
def test_the_launcher_is_found_among_the_ancestors(name, tmp_path):
    tree = (50, "python", 40), (40, "sh) S 7 (", 30), (30, name, 20), (20, "bash", 1), (1, "init", 0)
    assert find_launcher(50, processes(tmp_path, *tree)) == 30


def test_a_process_without_a_launcher_has_none(tmp_path):
    assert (
        find_launcher(50, processes(tmp_path, (50, "python", 20), (20, "bash", 1), (1, "prted", 0))) is None
    )
    assert find_launcher(60, tmp_path) is None  # it has gone


def test_what_nobody_reads_is_written_into_the_folder_of_the_run(tmp_path):
    code = f"""
import os, pathlib
from nnlo_common.cluster.transport._launcher_watch import tell
reader, writer = os.pipe()
os.dup2(writer, 2)
tell("read by its reader\\n", pathlib.Path({str(tmp_path)!r}))
print(os.read(reader, 100).decode(), end="", flush=True)
os.close(reader)
tell("read by nobody\\n", pathlib.Path({str(tmp_path)!r}))
tell("written by no rank\\n", None)
"""
    words = [sys.executable, "-c", code]
    done = subprocess.run(
        words, env=environment(None), capture_output=True, text=True, start_new_session=True, check=False
    )
    assert done.stdout == "read by its reader\n"
    assert (tmp_path / "why-it-ended.txt").read_text() == "read by nobody\n"


def wait_for(condition, limit_s=60):
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.05)


needs_open_mpi = pytest.mark.skipif(
    running_mpi() != "Open MPI", reason="the proxy of MPICH kills the ranks at once, so they can say nothing"
)


@pytest.mark.mpi
@pytest.mark.slow
@needs_open_mpi
@pytest.mark.parametrize("options", [[], ["--with-ft", "ulfm"]], ids=["plain", "ulfm"])
def test_each_rank_with_a_file_of_its_own_says_why_it_ends(options, tmp_path):
    program = f"{sys.executable} {PROGRAMS / 'stopped.py'} {tmp_path / 'end'} 0"
    words = ["sh", "-c", f"exec {program} > {tmp_path}/out.$OMPI_COMM_WORLD_RANK 2>&1"]
    texts = [tmp_path / f"out.{rank}" for rank in range(3)]
    with (
        (tmp_path / "all").open("w") as output,
        starting([launcher(), *options, "-n", "3", *words], output) as process,
    ):
        wait_for(lambda: sum("ready" in text.read_text() for text in texts if text.exists()) == 2)
        process.kill()
        for rank, text in enumerate(texts):
            wait_for(lambda text=text: "has gone" in text.read_text())
            assert len(re.findall(GONE.format(rank), text.read_text())) == 1
    assert not any("has died" in text.read_text() for text in texts)


@pytest.mark.mpi
@pytest.mark.extended
@pytest.mark.timeout(300)
@needs_open_mpi
@pytest.mark.framework("torch")
def test_the_folder_of_the_run_says_why_it_ended_and_the_same_command_resumes(tmp_path):
    job = [sys.executable, ROOT / "tests" / "chaos" / "torch_job.py", tmp_path, "Downpour", "1", "0", "0"]
    note = tmp_path / "run" / "why-it-ended.txt"
    with (tmp_path / "all").open("w") as output:
        with starting([launcher(), "-n", "3", *job], output) as process:
            wait_for(lambda: list((tmp_path / "run").glob("checkpoint-*/manifest.json")))
            process.kill()
            wait_for(note.exists)
        assert re.fullmatch(GONE.format(0) + "\n", note.read_text())
        with starting([launcher(), "-n", "3", *job], output) as process:
            assert process.wait(100) == 0, (tmp_path / "all").read_text()
    assert "finished: ()" in (tmp_path / "all").read_text()
