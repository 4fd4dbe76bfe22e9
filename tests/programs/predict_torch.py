"""A prediction over all ranks; the last one kills itself in the middle, if it is told to."""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np
import torch

import nnlo_torch as nt


class Net(torch.nn.Module):
    """A slow network that may end its process."""

    def __init__(self, dies_after):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.dies_after, self.computed = torch.nn.Linear(3, 2), dies_after, 0

    def forward(self, x):
        self.computed += 1
        if self.computed == self.dies_after:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.002)
        return self.linear(x)


last = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")) == "2"
net = Net(int(sys.argv[2]) if last else 0)
data = np.random.default_rng(0).standard_normal((2030, 3)).astype("f4")
nt.predict(net, data, sys.argv[1], batch_size=10)
print("computed", net.computed - 1, flush=True)
