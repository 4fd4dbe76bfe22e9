"""Train JEDI-net on jets with PyTorch, on any number of ranks.

python examples/jedi_torch.py                                          # one process
mpiexec -n 3 python examples/jedi_torch.py                             # 1 server, 2 workers: Downpour
mpiexec -n 3 python examples/jedi_torch.py --algorithm easgd
mpiexec -n 3 python examples/jedi_torch.py --data FOLDER --particles 150    # hls4ml files, as they are

By default it uses the 30 hardest particles of each jet, 25 times less work than all 150.
`jedi_torch_serial.py` is the same script without a wrapper, for comparison.
"""

from __future__ import annotations

import jets
import torch
from fashion_network import measure
from jet_networks import JEDINet

import nnlo_torch as nt

WRAPPERS = {
    "downpour": nt.Downpour,
    "synchronous": nt.Synchronous,
    "easgd": lambda optimizer: nt.EASGD(optimizer, every=4),
    "localsgd": lambda optimizer: nt.LocalSGD(optimizer, every=4),
}


def main():
    chosen = jets.options(__doc__, WRAPPERS, epochs=6).parse_args()
    train, held_out = jets.files(chosen)
    reading = jets.reading(train, chosen.particles)

    torch.manual_seed(1)
    model = JEDINet()
    optimizer = WRAPPERS[chosen.algorithm](torch.optim.Adam(model.parameters(), lr=3e-3))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, chosen.epochs)
    train_loader = nt.H5Batches(train, batch_size=50, **reading)
    test_loader = nt.H5Batches(held_out, batch_size=500, evaluation=True, **reading)
    progress = nt.Progress(optimizer)
    optimizer.say(f"{type(optimizer).__name__} on {optimizer.size} ranks; jets: {train[0].parent}")
    for _ in range(chosen.epochs):
        for x, y in train_loader:
            optimizer.zero_grad()
            measure(model, x, y)["loss"].backward()
            optimizer.step()
        schedule.step()
        scores = optimizer.evaluate(lambda batch: measure(model, *batch), test_loader)
        progress.epoch(scores)
    progress.end(scores)


if __name__ == "__main__":
    main()
