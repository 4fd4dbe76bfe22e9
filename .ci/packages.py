"""Build the wheel and the source archive, check them, and run each in an environment of its own.

    python .ci/packages.py dist

It needs `build` and `twine`: pip install 'nnlo[packages]'. Each archive is installed without extras, far from
the checkout, and must then train by `nnlo demo`. Ends with an error at the first step that fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: A wheel larger than this has taken in something that does not belong there.
LARGEST_WHEEL_BYTES = 2_500_000
PACKAGES = {"nnlo_common", "nnlo_keras", "nnlo_torch"}


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
