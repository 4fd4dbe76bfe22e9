"""Copies of files on a host: shared by its processes, deleted after the last use."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nnlo_common import ConfigurationError
from nnlo_common.data import Staging
from tests.helpers.threads import collect

#: Copies, and writes down that it did.
COPY = 'import shutil, sys; shutil.copy(*sys.argv[1:3]); open(sys.argv[3], "a").write("copied\\n")'


@pytest.fixture
def files(tmp_path):
    """Write two files with one name."""
    paths = [tmp_path / "a" / "data.h5", tmp_path / "b" / "data.h5"]
    for path in paths:
        path.parent.mkdir()
        path.write_text(f"of {path.parent.name}")
    return [str(path) for path in paths]


def counting(folder):
    """Return a copy command, and the file in which it logs its copies."""
    note = folder / "copied.txt"
    return [sys.executable, "-c", COPY, "{src}", "{dst}", str(note)], note


def read(paths):
    return [Path(path).read_text() for path in paths]


def test_copies_are_used_by_all_and_gone_after_the_last(files, tmp_path):
    command, note = counting(tmp_path)
    here = tmp_path / "local"
    first, second = Staging(here, command), Staging(here, command)
    copies = first.stage(files)
    assert read(copies) == ["of a", "of b"]
    assert second.stage(files) == copies
    assert note.read_text().count("copied") == 2
    first.close()
    assert read(copies) == ["of a", "of b"]
    second.close()
    second.close()
    assert list(here.iterdir()) == []


def test_a_command_is_no_line_for_a_shell(tmp_path):
    odd = tmp_path / "a b; touch owned $(touch owned) {dst}.h5"
    odd.write_text("odd")
    staging = Staging(tmp_path / "local", ["cp", "--", "{src}", "{dst}"])
    try:
        assert read(staging.stage([str(odd)])) == ["odd"]
        assert not (tmp_path / "owned").exists()
    finally:
        staging.close()


def test_files_that_have_changed_are_copied_anew(files, tmp_path):
    old = Staging(tmp_path / "local")
    before = old.stage(files)
    Path(files[0]).write_text("of another")
    new = Staging(tmp_path / "local")
    assert read(new.stage(files)) == ["of another", "of b"]
    assert read(before) == ["of a", "of b"]
    old.close()
    new.close()


def stage_and_report(here, command, files, queue, done):
    staging = Staging(here, command)
    queue.put(read(staging.stage(files)))
    done.wait(60)
    staging.close()


@pytest.mark.slow
def test_processes_that_come_at_once_make_one_copy(files, tmp_path):
    command, note = counting(tmp_path)
    here = tmp_path / "local"
    context = multiprocessing.get_context("fork")
    queue, done = context.Queue(), context.Event()
    processes = [
        context.Process(target=stage_and_report, args=[here, command, files, queue, done]) for _ in range(6)
    ]
    for process in processes:
        process.start()
    for _ in processes:
        assert queue.get(timeout=60) == ["of a", "of b"]
    done.set()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert note.read_text().count("copied") == 2
    assert list(here.iterdir()) == []


DIES = """
import os, sys, time
from nnlo_common.data import Staging
staging = Staging(sys.argv[1])
print(*staging.stage(sys.argv[2:]), flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_what_a_killed_process_has_left_is_cleaned_up_by_the_next(files, tmp_path):
    here = tmp_path / "local"
    with subprocess.Popen(
        [sys.executable, "-c", DIES, here, *files], stdout=subprocess.PIPE, text=True
    ) as process:
        copies = process.stdout.readline().split()
        assert read(copies) == ["of a", "of b"]
        living = Staging(here)
        living.stage(files[:1])  # of other files; those of the living stay
        assert read(copies) == ["of a", "of b"]
        process.send_signal(signal.SIGKILL)
        process.wait(20)
    assert Path(copies[0]).exists()
    living.stage(files[1:])
    assert not Path(copies[0]).exists()
    assert len(list(here.iterdir())) == 1
    living.close()


def test_half_a_copy_is_never_taken_for_one(files, tmp_path):
    staging = Staging(tmp_path / "local")
    copy = staging.stage(files[:1])[0]
    half = Path(copy).rename(copy + ".part")  # as if it had died just before the end
    half.write_text("of")
    other = Staging(tmp_path / "local")
    assert read(other.stage(files[:1])) == ["of a"]
    assert not half.exists()
    staging.close()
    other.close()


def test_copies_go_with_the_object_but_not_in_a_forked_process(files, tmp_path):
    staging = Staging(tmp_path / "local")
    (copy,) = staging.stage(files[:1])
    child = os.fork()
    if child == 0:
        staging.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert read([copy]) == ["of a"]
    del staging
    collect()
    assert not Path(copy).exists()


def test_nobody_comes_between_the_last_one_and_the_deletion(files, tmp_path):
    """Many processes come and go; each finds its copies, and nothing is left at the end."""
    here = tmp_path / "local"

    def come_and_go():
        for _ in range(100):
            staging = Staging(here)
            assert read(staging.stage(files)) == ["of a", "of b"]
            staging.close()

    with ThreadPoolExecutor(4) as pool:
        for comer in [pool.submit(come_and_go) for _ in range(4)]:
            comer.result(timeout=60)
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("cp {src} {dst}", "give a list of arguments"),
        (["cp", "{src}"], r"give a list of arguments that has '\{src\}' and '\{dst\}' in it"),
        (["cp", "src", "dst"], "give a list of arguments"),
        ([], "give a list of arguments"),
    ],
)
def test_a_command_that_cannot_copy_is_refused(tmp_path, command, problem):
    with pytest.raises(ConfigurationError, match=problem):
        Staging(tmp_path, command)


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (
            ["no-such-program", "{src}", "{dst}"],
            "cannot be copied .*No such file.*GB are free.*copy_command=",
        ),
        (["false", "{src}", "{dst}"], r"ended with 1 \(no error output\); try the command by hand"),
        (["true", "{src}", "{dst}"], "did not make the file"),
        (["ls", "--no-such", "{src}", "{dst}"], r"ended with 2 \(.*no-such"),
        ([sys.executable, "-c", "import sys; open(sys.argv[2], 'w')", "{src}", "{dst}"], "its copy has 0;"),
    ],
)
def test_a_copy_that_fails_is_named_and_leaves_nothing(files, tmp_path, command, problem):
    with pytest.raises(ConfigurationError, match=problem) as caught:
        Staging(tmp_path / "local", command).stage(files)
    assert files[0] in str(caught.value)
    assert list((tmp_path / "local").iterdir()) == []


def test_a_file_that_there_is_not_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match=r"gone\.h5 cannot be copied .*No such file"):
        Staging(tmp_path / "local").stage([str(tmp_path / "gone.h5")])


def test_a_folder_that_cannot_be_is_named(files, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"stage_to=.*file/local.* cannot be used"):
        Staging(tmp_path / "file" / "local").stage(files)
