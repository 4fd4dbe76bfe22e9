"""Files are opened, written and removed by few modules, which refuse what others have planted."""

from __future__ import annotations

import ast

import pytest

from tests.helpers.paths import ROOT

PACKAGES = ("nnlo_common", "nnlo_keras", "nnlo_torch")
#: Modules that open files by themselves, and why.
OWN_WAYS = {
    "nnlo_common/base/_file_access.py": "every other module opens files by it",
    "nnlo_common/base/_limited_formats.py": "the parsers behind the limits",
    "nnlo_common/base/_process_memory.py": "/proc and /sys/fs/cgroup",
    "nnlo_common/base/_spans.py": "/proc/thread-self/schedstat",
    "nnlo_common/data/_staging.py": "copies samples with flags and checks of its own",
    "nnlo_common/data/_memory_cache.py": "/proc and /sys, and memory that a process of this user has open",
    "nnlo_common/data/_remote.py": "remote files, by fsspec",
    "nnlo_common/data/formats/_opened_files.py": "HDF5 opens its files by itself",
    "nnlo_common/cluster/_aborting.py": "/dev/null",
    "nnlo_common/commands/train/_python_file.py": "/dev/null",
    "nnlo_common/cluster/_start_watch.py": "/proc, in a process without the package",
    "nnlo_common/cluster/transport/_launcher_watch.py": "/proc, and /dev/tty",
    "nnlo_common/training/report/_trace_file.py": "a descriptor from base, as a stream",
    "nnlo_common/training/report/_usage.py": "/proc/self/statm and /proc/self/io",
    "nnlo_common/training/checkpoint/_store.py": "a folder, to sync it",
    "nnlo_keras/_snapshot.py": "the file that Keras's CSVLogger holds open",
}
METHODS = {"write_text", "write_bytes", "read_text", "read_bytes", "copyfile", "copy", "touch"}
MODULES = {"shutil", "np", "numpy", "os"}
#: Loaders that read a file to its end, or without limits: `base/_limited_formats.py` has those with limits.
PARSERS = {
    "json.load",
    "np.load",
    "numpy.load",
    "tomllib.load",
    "tomllib.loads",
    "yaml.load",
    "yaml.safe_load",
}


def own_ways(tree: ast.Module) -> list[tuple[int, str]]:
    """Return the places that open, read or write a file without the functions of `base`."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        attribute = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        of_module = name.partition(".")[0] in MODULES
        opens = name in {"open", "io.open", "os.open", "os.fdopen"} or (
            attribute == "open" and not node.args and not node.keywords
        )
        opens |= attribute == "open" and bool(node.args) and is_mode(node.args[0])
        by_name = attribute in METHODS and (of_module or attribute.startswith(("write_", "read_", "touch")))
        if opens or by_name or name in PARSERS:
            found.append((node.lineno, name))
    return found


def is_mode(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and {*node.value} <= set("rwaxbt+")


def test_files_are_opened_by_the_functions_of_base() -> None:
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    found = {str(path.relative_to(ROOT)): own_ways(ast.parse(path.read_text())) for path in paths}
    assert {name for name, places in found.items() if places} == OWN_WAYS.keys()


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        ("open(path)", True),
        ("path.open('wb')", True),
        ("path.open()", True),
        ("path.write_text(text)", True),
        ("path.read_bytes()", True),
        ("os.open(path, os.O_RDONLY)", True),
        ("np.load(path)", True),
        ("json.load(file)", True),
        ("shutil.copyfile(a, b)", True),
        ("world.open(links)", False),
        ("SavedCheckpoint.open(folder, 3)", False),
        ("json.loads(text)", False),
        ("copy.copy(x)", False),
    ],
)
def test_an_own_way_is_seen(line: str, seen: bool) -> None:
    assert bool(own_ways(ast.parse(line))) is seen
