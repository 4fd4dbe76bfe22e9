"""Run keras-tuner's own tests of its tuners against `MPITuner`, alone.

    KERAS_BACKEND=torch python -m tests.suites.keras_tuner_own [--sdist keras-tuner-1.3.5.tar.gz]

No distribution of the keras-tuner that is installed has its tests. The last that has them is 1.3.5, which pip
brings into a temporary folder. They run against the installed version, with `MPITuner` in place of
`keras_tuner.Tuner` below RandomSearch, BayesianOptimization, GridSearch and Hyperband. As in `keras_own.py`,
those that failed run once more as they are, and any other failure must stand in `EXCEPTIONS`.

Exit status: 0: as expected; 1: not; 3: there is no source distribution to be had.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.suites import keras_own

RELEASE = "1.3.5"
ROOT = "keras_tuner/"
FILES = ("engine_tuner_test.py", "tuners_randomsearch_test.py", "tuners_gridsearch_test.py")
FILES += ("tuners_hyperband_test.py", "tuners_bayesian_test.py")

#: Lines that Keras 3 refuses, which 1.3.5 did not know: what stands in their places.
RENEWED = {"callback.model = self": "callback.set_model(self)"}
#: Tests that are not run, by a part of their names: why.
LEFT_OUT = {
    "subclass_model_loading": "loads no weights of a layer made in build(), so it passes by chance",
    "tunable_false_hypermodel": "trains four networks of the size of Xception",
}
#: Tests that fail with MPITuner only, by a part of their names: why, and on which back ends.
EXCEPTIONS = {
    "test_tuner_errors": (
        "expects another message for an oracle that is a text, as MPITuner also takes the names of samplers",
        keras_own.ALL,
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the tests; print numbers, and every failure with its reason."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sdist", type=Path, help="source distribution; default: pip downloads it")
    parser.add_argument("-k", dest="chosen", default="", help="choose tests, as pytest's -k does")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        sdist = options.sdist or keras_own.download(Path(folder), "keras-tuner", RELEASE)
        if sdist is None:
            return keras_own.NO_SOURCE
        folders = [f"{ROOT}engine/", f"{ROOT}tuners/"]
        tests = keras_own.unpack(sdist, Path(folder) / "tests", folders, ROOT)
        renew(tests)
        chosen = " and ".join(
            [f"({options.chosen})"] * bool(options.chosen) + [f"not {one}" for one in LEFT_OUT]
        )
        plugin = "tests.suites.keras_tuner_own_plugin"
        ours = keras_own.run(tests, "MPITuner", chosen, plugin=plugin)
        failed = [name for name, outcome in ours.items() if outcome == "failed"]
        plain = keras_own.run(tests, "", "", failed, plugin=plugin) if failed else {}
    return keras_own.report(
        "MPITuner", ours, plain, complete=not options.chosen, of="keras-tuner", exceptions=EXCEPTIONS
    )


def renew(tests: Path) -> None:
    """Remove the files that do not test tuners, and let the others run with Keras 3."""
    for file in list(tests.iterdir()):
        if file.name not in FILES:
            file.unlink()
            continue
        text = file.read_text()
        for old, new in RENEWED.items():
            text = text.replace(old, new)
        file.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
