"""Train JEDI-net on jets in files of the hls4ml layout; print the accuracy of the centre for each seed.

python benchmarks/accuracy_jedi.py                                     # one process: the baseline
mpiexec -n 3 python benchmarks/accuracy_jedi.py --algorithm easgd      # 1 server, 2 workers

Both see the same number of samples in the same batches. `accuracy_all.py jedi` runs and compares them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from accuracy_options import parser_of
from accuracy_torch import compare

import nnlo_torch as nt

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import jets
from jet_networks import JEDINet


def options():
    parser = parser_of(__doc__, "a folder with train/*.h5 and val/*.h5; else toy jets")
    parser.add_argument("--jets", type=int, default=16000, help="toy jets to train on; as many to test with")
    parser.add_argument(
        "--particles",
        type=int,
        default=20,
        help="use the hardest N particles of each jet; a jet has up to 150",
    )
    parser.set_defaults(epochs=10)
    return parser.parse_args()


def loaded(paths, reading):
    """Return all features and labels of some files."""
    dataset = nt.H5Dataset(paths, **reading)
    x, y = zip(*dataset.__getitems__(range(len(dataset))), strict=True)
    dataset.close()
    return torch.stack(x), torch.stack(y)


def main():
    chosen = options()
    train, test = jets.files(chosen)
    reading = jets.reading(train, chosen.particles)
    compare(chosen, JEDINet, (*loaded(train, reading), *loaded(test, reading)), str(train[0].parent))


if __name__ == "__main__":
    main()
