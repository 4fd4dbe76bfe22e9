"""Run Keras' own tests of optimizers and callbacks against the wrappers, alone.

    KERAS_BACKEND=torch python -m tests.suites.keras_own [--wrapper EASGD] [--sdist keras-3.15.1.tar.gz]

The tests come from the source distribution of the Keras that is installed, which pip brings into a temporary
folder. They run with every optimizer in a wrapper and `nnlo_keras.Distribute()` in every `fit`; those that
failed run once more as they are. A test that fails as it is says nothing about the wrappers: most of these
want TensorBoard or Orbax. Any other failure must stand in `EXCEPTIONS` with its reason, and what stands there
must fail.

Exit status: 0: as expected; 1: not; 3: there is no source distribution to be had.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from tests.helpers.paths import ROOT

#: How long each of the other project's tests may take; all together take as long as the machine needs.
LIMIT_S = 300
FOLDERS = ("keras/src/optimizers/", "keras/src/callbacks/")
NO_SOURCE = 3

ALL = ("torch", "tensorflow", "jax")
#: Tests that fail with a wrapped optimizer only, by a part of their names: why, and on which back ends.
EXCEPTIONS = {
    "MultiOptimizerTest::test_serialization": (
        "asks for the name of an optimizer's class, which is that of the wrapper",
        ALL,
    ),
    "MuonTest::test_adamw_weight_decay": ("calls a method of Muon's own that begins with _", ALL),
    "MuonTest::test_should_use_adamw": ("calls a method of Muon's own that begins with _", ALL),
    "NadamTest::test_build_with_empty_var_list": ("reads a variable of Nadam's own that begins with _", ALL),
    "OptimizerSparseTest::test_sparse_gradients": (
        "watches assign() of the wrapper, but the optimizer in it calls its own; *_correctness passes",
        ("tensorflow", "jax"),
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the tests; print numbers, and every failure with its reason."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sdist", type=Path, help="source distribution of Keras; default: pip downloads it")
    parser.add_argument("--wrapper", default="Downpour", help="class of nnlo_keras")
    parser.add_argument("-k", dest="chosen", default="", help="choose tests, as pytest's -k does")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        sdist = options.sdist or download(Path(folder))
        if sdist is None:
            return NO_SOURCE
        tests = unpack(sdist, Path(folder) / "tests")
        wrapped = run(tests, options.wrapper, options.chosen)
        failed = [name for name, outcome in wrapped.items() if outcome == "failed"]
        plain = run(tests, "", options.chosen, failed) if failed else {}
    return report(options.wrapper, wrapped, plain, complete=not options.chosen)


def download(folder: Path, project: str = "keras", release: str = "") -> Path | None:
    """Return the source distribution of the installed release, or of another; say why there is none."""
    wanted = f"{project}=={release or version(project)}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", project]
    done = subprocess.run(
        [*command, "--dest", str(folder), wanted], check=False, capture_output=True, text=True, timeout=300
    )
    found = list(folder.glob(f"{project}-*.tar.gz"))
    if done.returncode or not found:
        lines = (done.stderr.strip() or "pip has brought none").splitlines()
        print(f"no source distribution of {wanted} to be had from pip: {lines[-1]}")
        return None
    return found[0]


def unpack(sdist: Path, folder: Path, folders: Sequence[str] = FOLDERS, root: str = "keras/src/") -> Path:
    """Lay the tests side by side into a folder: all else they import is installed."""
    folder.mkdir()
    with tarfile.open(sdist) as archive:
        for member in archive.getmembers():
            _, _, path = member.name.partition("/")
            below = next((path.removeprefix(one) for one in folders if path.startswith(one)), "/")
            if "/" not in below and below.endswith("_test.py"):
                file = archive.extractfile(member)
                assert file is not None
                (folder / path.removeprefix(root).replace("/", "_")).write_bytes(file.read())
    return folder


def run(
    tests: Path,
    wrapper: str,
    chosen: str,
    only: list[str] | None = None,
    plugin: str = "tests.suites.keras_own_plugin",
    limit_s: float = LIMIT_S,
) -> dict[str, str]:
    """Return what became of each test; with no wrapper: of each as Keras has it.

    A test that takes longer than its limit has failed; if no signal reaches it, pytest ends with its name.
    """
    results = tests / "results.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        plugin,
    ]
    command += ["--continue-on-collection-errors"]
    command += ["-c", os.devnull, "--rootdir", str(tests), "-o", "python_files=*_test.py", "--tb=short"]
    command += [f"--junitxml={results}", "-W", "ignore", "-k", chosen]
    command += [f"--timeout={limit_s}", "-o", f"faulthandler_timeout={limit_s + 100}"]
    command += ["-o", "faulthandler_exit_on_timeout=true"]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "NNLO_SUITE_WRAPPER": wrapper}
    selected = [node(name) for name in only] if only else [str(tests)]
    results.unlink(missing_ok=True)
    with (tests / "output.txt").open("w") as output:
        subprocess.run(
            [*command, *selected], check=False, cwd=tests, env=environment, stdout=output, stderr=output
        )
    text = (tests / "output.txt").read_text(errors="replace")
    if not results.exists():
        raise SystemExit(f"pytest has not run:\n{text}")
    if wrapper and "NNLO_SUITE_OUTPUT" in os.environ:
        Path(os.environ["NNLO_SUITE_OUTPUT"]).write_text(text)
    return {
        f"{case.get('classname')}::{case.get('name')}": outcome_of(case)
        for case in ET.parse(results).getroot().iter("testcase")
    }


def node(name: str) -> str:
    """Return pytest's name for a test, or for a file that it cannot read, from that in junit's results."""
    classname, _, test = name.partition("::")
    if not classname:
        return f"{test}.py"
    module, *kinds = classname.split(".")
    return "::".join([f"{module}.py", *kinds, test])


def outcome_of(case: ET.Element) -> str:
    """Whether a test has passed, failed or been skipped."""
    kinds = {element.tag for element in case}
    return "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"


def report(
    wrapper: str,
    wrapped: dict[str, str],
    plain: dict[str, str],
    *,
    complete: bool,
    of: str = "Keras",
    exceptions: Mapping[str, tuple[str, Sequence[str]]] | None = None,
) -> int:
    """Print it; return the exit status."""
    counts, fault = Counter(wrapped.values()), False
    counts["failed as they are"] = sum(plain.get(name) == "failed" for name in plain)
    counts["failed"] -= counts["failed as they are"]
    kinds = ", ".join(
        f"{counts[kind]} {kind}" for kind in ("passed", "failed", "failed as they are", "skipped")
    )
    print(f"{of} {version(of.lower())} on {backend()}, in {wrapper}: {kinds}")
    known = EXCEPTIONS if exceptions is None else exceptions
    explained = {part: why for part, (why, where) in known.items() if backend() in where}
    used = set()
    for name in (name for name, outcome in wrapped.items() if outcome == "failed"):
        reasons = {part: reason for part, reason in explained.items() if part in name}
        used |= set(reasons)
        if plain.get(name) == "failed":
            print(f"  fails as it is: {name}")
        else:
            fault |= not reasons
            print(f"  {next(iter(reasons.values()), 'UNEXPLAINED')}: {name}")
    for part in sorted(explained.keys() - used) if complete else ():
        fault = True
        print(f"  passes, so that its exception must go: {part}")
    return int(fault)


def backend() -> str:
    """The back end that the tests run on."""
    return os.environ.get("KERAS_BACKEND", "tensorflow")


if __name__ == "__main__":
    sys.exit(main())
