"""Damaged files of samples in every format: each is read, or refused in one sentence, and no process dies.

The libraries that read them are compiled, so each run is a process of its own: whoever kills it is named by
the seed, with the file's content beside it.
"""

from __future__ import annotations

import faulthandler
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.format_files import FORMATS, make

pytestmark = pytest.mark.slow

#: Files of each format: in the ordinary run, and in the long one.
FEW, MANY = 60, 2_500
#: Of the processor's time for a file, and of that of a busy machine.
_LONGEST_S, _HANGS_S = 5.0, 60.0
_MOST_BYTES = 8 * 2**30  # of addresses, of which the libraries reserve many
_LONGEST = 1500  # characters of a message
SHOWN = "--show" in sys.argv


def fuzz(kind: str, count: int, seed: int) -> tuple[int, int]:
    """Read so many damaged files; return how many were refused, and how many were read."""
    from nnlo_common import NNLOError
    from nnlo_common.data import FileSource

    draw = random.Random(f"{kind} {seed}")
    refused = read = 0
    with tempfile.TemporaryDirectory() as folder:
        named = make(kind, Path(folder, "a"), _columns(), piece=20)
        path, tree = Path(named.removesuffix(":events")), named[len(named.removesuffix(":events")) :]
        parts = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
        valid = {one: one.read_bytes() for one in parts}
        for _ in range(count):
            for one, content in valid.items():
                one.write_bytes(content)
            one = draw.choice(sorted(valid))
            content = _changed(valid[one], draw)
            one.write_bytes(content)
            Path(folder, "last").write_bytes(content)
            faulthandler.dump_traceback_later(_HANGS_S, exit=True)
            begun_s = time.process_time()
            try:
                options = {"features": "x", "labels": "n", "select": draw.choice([None, "n > 2"])}
                with closing(FileSource(f"{path}{tree}", **options, pad=3)) as source:
                    source.take(0, min(len(source), 100_000))
            except NNLOError as error:
                if not 0 < len(str(error)) < _LONGEST or str(path.name) not in str(error).replace("last", ""):
                    raise AssertionError(f"no sentence about the file: {error}") from error
                if SHOWN:
                    print(str(error).replace(folder, "")[:200])
                refused += 1
            except MemoryError as error:
                raise AssertionError("it took all memory") from error
            else:
                read += 1
            finally:
                faulthandler.cancel_dump_traceback_later()
            if time.process_time() - begun_s > _LONGEST_S:
                raise AssertionError(f"it took {time.process_time() - begun_s:.1f} s")
    return refused, read


def _columns() -> dict[str, np.ndarray]:
    n = np.arange(50)
    return {"x": np.stack([n, n * 2], 1).astype("f4"), "n": n.astype("i8"), "w": n / 7}


def _changed(content: bytes, draw: random.Random) -> bytes:
    """Change some bytes, mostly where formats have their metadata: at both ends."""
    found = bytearray(content)
    for _ in range(draw.randint(1, 6)):
        if not found:
            break
        near = min(len(found), 600)
        at = draw.choice(
            [draw.randrange(near), len(found) - 1 - draw.randrange(near), draw.randrange(len(found))]
        )
        found[at] = draw.choice(
            [0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256), found[at] ^ 1 << draw.randrange(8)]
        )
    if draw.random() < 0.2:
        at, end = sorted(draw.randrange(len(found) + 1) for _ in range(2))
        match draw.randrange(3):
            case 0:
                del found[end:]
            case 1:
                del found[at : min(end, at + 30)]
            case _:
                found[at:at] = found[at : min(end, at + 300)]
    return bytes(found)


def run(kind: str, count: int, seed: int) -> str:
    """Fuzz in a process of its own; return what it says."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, kind, str(count), str(seed)],
        capture_output=True,
        text=True,
        timeout=600 + count,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        check=False,
    )
    assert done.returncode == 0, f"{kind}, seed {seed}: {done.returncode}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.parametrize("kind", FORMATS)
def test_damaged_files_are_read_or_refused_in_a_sentence(kind):
    run(kind, FEW, seed=0)


@pytest.mark.extended
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("kind", FORMATS)
def test_many_damaged_files_are_read_or_refused_in_a_sentence(kind):
    run(kind, MANY, seed=1)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(*fuzz(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
