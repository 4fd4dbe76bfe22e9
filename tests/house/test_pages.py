"""Code and links of the README and docs/: each block runs as it stands, each link has an end."""

from __future__ import annotations

import functools
import os
import re
import shlex

import pytest

from tests.helpers.jobs import alone, mpiexec
from tests.helpers.pages import code
from tests.helpers.paths import DOCS, ROOT

PAGES = ["README.md", *sorted(f"docs/{path.relative_to(DOCS).as_posix()}" for path in DOCS.rglob("*.md"))]
#: Pages with a section, their first, whose blocks are one program; every other block is a program of its own.
JOINED = {"docs/searches.md": "In a script"}
#: The block that makes the files for the others of its page, run once.
MAKES_FILES = {
    ("docs/data.md", 0),
    ("docs/data.md", 1),
    ("docs/tutorial_files.md", 0),
    ("docs/tutorial_root.md", 0),
    ("docs/tutorial_search.md", 0),
    ("docs/tutorial_volume.md", 0),
}
#: Pages of searches: a coordinator, and a block of three ranks.
RANKS = {"docs/searches.md": 4, "docs/tutorial_search.md": 4}
#: Pages that other tests run on one process, and these tests.
ELSEWHERE = {
    "README.md": "tests/house/test_readme.py",
    "docs/checkpoint.md": "tests/torch/test_checkpoint.py",
    "docs/clients.md": "tests/clients/test_docs.py",
    "docs/data.md": "tests/house/test_readme.py",
    "docs/pytorch.md": "tests/house/test_readme.py",
    "docs/searches.md": "tests/house/test_readme.py tests/search/test_mpi_search.py tests/torch/test_tune.py",
    "docs/train.md": "tests/torch/test_train.py",
}
OTHER_PACKAGES = "docs/clients.md"  # which tests/clients run on three ranks, too


def blocks_of(page):
    """The programs of a page, by their numbers."""
    blocks = code("python", page)
    if page in JOINED:
        first = code("python", page, JOINED[page])
        assert blocks[: len(first)] == first
        blocks[: len(first)] = ["\n".join(first)]
    return dict(enumerate(blocks))


#: Blocks that read what commands before them have written: they run where the whole tutorial is followed.
AFTER_COMMANDS = {("docs/tutorial_root.md", 2)}
PROGRAMS = [
    (page, number)
    for page in PAGES
    if page != OTHER_PACKAGES
    for number in blocks_of(page)
    if (page, number) not in AFTER_COMMANDS
]
#: Tutorials whose commands a test runs one after another, as readers do.
LESSONS = [
    "docs/tutorial_files.md",
    "docs/tutorial_gan.md",
    "docs/tutorial_loop.md",
    "docs/tutorial_root.md",
    "docs/tutorial_search.md",
    "docs/tutorial_volume.md",
]
LONG = {*LESSONS, "docs/tutorial_survive.md"}
ALONE = [
    pytest.param(*program, marks=pytest.mark.extended if program[0] in LONG else ())
    for program in PROGRAMS
    if program[0] not in ELSEWHERE
]
#: What one meets first runs on three ranks in every run of the tests; the others in `make test-all`.
SOON = {"docs/start.md", "docs/coming_from.md"}


def written(page, number, folder):
    program = folder / f"block{number}.py"
    program.write_text(blocks_of(page)[number])
    return program


def environment(text):
    """Keras on torch if nothing else is asked for; skips a block that needs a missing framework."""
    for framework in set(re.findall(r"^import (?:nnlo_)?(torch|keras)\b", text, re.MULTILINE)):
        pytest.importorskip(framework, reason="the environment for MPICH has no frameworks")
    return {"KERAS_BACKEND": os.environ.get("KERAS_BACKEND", "torch"), "TF_CPP_MIN_LOG_LEVEL": "3"}


def make_files(page, number, folder):
    """Make the files that a block needs, by the block of its page that makes them."""
    for one in MAKES_FILES - {(page, number)}:
        if one[0] == page:
            assert alone(written(*one, folder), timeout_s=60).returncode == 0


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("page", "number"), ALONE)
def test_a_block_runs_in_one_process(page, number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = written(page, number, tmp_path)
    make_files(page, number, tmp_path)
    done = alone(program, timeout_s=250 if page in LONG else 100, env=environment(program.read_text()))
    assert done.returncode == 0, done.stderr


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "number"),
    [
        pytest.param(*program, marks=() if program[0] in SOON else pytest.mark.extended)
        for program in PROGRAMS
        if program not in MAKES_FILES
    ],
)
def test_a_block_runs_on_several_ranks(page, number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = written(page, number, tmp_path)
    env = environment(program.read_text())
    make_files(page, number, tmp_path)
    done = mpiexec(RANKS.get(page, 3), program, timeout_s=200, env=env)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", [page for page in PAGES if "/reference/" not in page])
def test_a_page_begins_with_whom_it_is_for_or_what_one_will_have(page):
    begin = re.sub(r"^#.*\n+", "", (ROOT / page).read_text())
    assert begin.startswith(("For ", "You will have: ")) or page == "README.md"


@pytest.mark.parametrize("page", ELSEWHERE)
def test_a_page_that_is_run_elsewhere_is_named_there(page):
    for test in ELSEWHERE[page].split():
        assert page.rpartition("/")[2] in (ROOT / test).read_text()


@pytest.mark.mpi
@pytest.mark.extended
@pytest.mark.parametrize("page", ["docs/tutorial_keras.md", "docs/tutorial_torch.md"])
def test_the_commands_of_a_tutorial_run_in_one_folder(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = written(page, 0, tmp_path)
    env = environment(program.read_text())
    assert alone(program, timeout_s=100, env=env).returncode == 0
    done = mpiexec(3, program, timeout_s=200, env=env)
    assert done.returncode == 0, done.stderr
    assert "nnlo: saved has the whole training, so nothing is left to train" in done.stdout


def steps_of(page):
    """The files that a tutorial says to save, the commands that it says to run, and their output, in turn."""
    fenced = re.findall(r"(.*?)```(\w+)\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    for before, language, text in fenced:
        if language == "python":
            (name,) = re.findall(r"[Ss]ave this as\s+`([\w.]+)`", before)
            yield name, text, None
        elif language == "console":
            for command, output in re.findall(r"^\$ (.*)\n((?:(?!\$).*\n)*)", text, re.MULTILINE):
                yield None, command, output.splitlines()


def masked(line):
    """The beginning of a line without its numbers, which differ from run to run."""
    return re.sub(r"[\d.]+", "#", " ".join(line.split()[:3]))


@pytest.mark.mpi
@pytest.mark.extended
@pytest.mark.parametrize("page", LESSONS)
def test_a_tutorial_can_be_followed(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    env, ran = environment("import torch\nimport keras"), 0
    for name, text, output in steps_of(page):
        if name:
            (tmp_path / name).write_text(text)
            continue
        words = [word for word in shlex.split(text) if not word.startswith("KERAS_BACKEND=")]
        ranks = int(words[2]) if words[:2] == ["mpiexec", "-n"] else 0
        program, *arguments = words[3:] if ranks else words
        if program == "nnlo":
            arguments = ["-m", "nnlo_common", *arguments]
        start, *arguments = arguments
        warm = {"framework": "torch"} if start == "-m" else {}
        run = functools.partial(mpiexec, ranks, **warm) if ranks else alone
        done = run(start, *arguments, timeout_s=250, env=env)
        assert done.returncode == 0, done.stderr
        shown = {masked(line) for line in done.stdout.splitlines()}
        assert {masked(line) for line in output} <= shown
        ran += 1
    assert ran >= 2


# Links.


def anchors_of(page):
    """The anchors of the headings, as the site and code hosts make them."""
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def broken(page, text):
    """The links of a text that lead nowhere, if it stands in the place of the page."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        end = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        if not end.exists() or (anchor and anchor not in anchors_of(end.relative_to(ROOT))):
            yield target


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "examples/README.md", "CHANGELOG.md"])
def test_links_have_an_end(page):
    assert not list(broken(page, (ROOT / page).read_text()))


def test_a_broken_link_is_seen():
    text = "[a](start.md) [b](nowhere.md) [c](start.md#train) [d](start.md#nothing) `[e](no.md)`"
    assert list(broken("docs/index.md", text)) == ["nowhere.md", "start.md#nothing"]
