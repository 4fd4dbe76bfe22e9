"""Trains with a state that grows in the fourth epoch until there is no memory for a copy; later there is.

Arguments: the folder, and the rank whose memory is limited.
"""

import resource
import sys
from pathlib import Path

import torch
from mpi4py import MPI

import nnlo_torch as nt
from nnlo_common.training.checkpoint._saving import wait_for_all

KEPT, PAGE = 8 * 2**20, resource.getpagesize()


class Table:
    """A state beside the training."""

    def __init__(self):
        self.values = torch.ones(1000)

    def state_dict(self):
        return {"values": self.values}

    def load_state_dict(self, state):
        self.values = state["values"]


def use_up_memory():
    """Allow no more memory than there is now, and hold what is free of it but for 8 MB."""
    wait_for_all()  # who writes will free what it has
    kept, held, size = bytearray(KEPT), [], 2**26
    allowed = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE
    resource.setrlimit(resource.RLIMIT_AS, (allowed, resource.getrlimit(resource.RLIMIT_AS)[1]))
    while size >= 2**20:
        try:
            held.append(bytearray(size))
        except MemoryError:
            size //= 2
    del kept
    return held


folder, limited = Path(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
model = torch.nn.Linear(100, 100)
table = Table()
optimizer = nt.Downpour(torch.optim.Adam(model.parameters(), lr=0.01), model=model)
checkpoint = nt.Checkpoint(folder, optimizer, epochs=1, keep=10, also={"table": table})
data = torch.randn(40, 100)
sampler = nt.ShardSampler(data, optimizer=optimizer)
loader = torch.utils.data.DataLoader(data, batch_size=10, sampler=sampler)
held = []
for epoch in checkpoint.epochs(7):
    if epoch == 3 and MPI.COMM_WORLD.Get_rank() == limited:
        table.values = torch.ones(16_000_000)
        held = use_up_memory()
    if epoch == 6 and held:
        held.clear()
        resource.setrlimit(resource.RLIMIT_AS, [resource.getrlimit(resource.RLIMIT_AS)[1]] * 2)
    for x in checkpoint.batches(loader):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    names = sorted(path.name for path in folder.glob("checkpoint-??????"))
    optimizer.say(f"epoch {epoch}: {' '.join(names)}")
print("trained", epoch + 1, flush=True)
optimizer.close()
