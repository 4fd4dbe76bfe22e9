"""Write Fashion-MNIST as HDF5 files, for `nnlo train` and `nnlo tune`.

python examples/fashion_files.py fashion               # writes fashion/train.h5 and fashion/test.h5
mpiexec -n 7 nnlo tune --config examples/tune.toml --model examples/tune_torch.py --block-size 3
"""

from __future__ import annotations

import argparse
from pathlib import Path

import fashion_data
import h5py


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("folder", type=Path, help="the folder to write to")
    options.add_argument("--data", help="a folder with the full Fashion-MNIST")
    chosen = options.parse_args()
    data = fashion_data.load(chosen.data)
    chosen.folder.mkdir(parents=True, exist_ok=True)
    for name, x, y in [("train", data.x_train, data.y_train), ("test", data.x_test, data.y_test)]:
        with h5py.File(chosen.folder / f"{name}.h5", "w") as file:
            file["features"], file["labels"] = x, y
    print(f"{len(data.x_train)} training pictures, {len(data.x_test)} test pictures, from {data.source}")


if __name__ == "__main__":
    main()
