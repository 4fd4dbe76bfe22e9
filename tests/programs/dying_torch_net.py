"""A model of PyTorch for `nnlo train`; one rank is killed when a checkpoint is there, or in a step."""

import os
import signal
import time

import torch
from mpi4py import MPI

from tests.chaos.dying import die_when_saved


class Mortal(torch.nn.Linear):
    """A layer that kills its process in a step of the training."""

    steps_left = None

    def forward(self, inputs):
        if self.training and self.steps_left is not None:
            self.steps_left -= 1
            if not self.steps_left:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(inputs)


def get_model(dies, folder, step=0):
    """The parameters are the rank that dies, the folder of the run, and the step, of a rank that trains."""
    first = Mortal(3, 8)
    if not step:
        die_when_saved(dies, folder)
    elif MPI.COMM_WORLD.Get_rank() == dies:
        first.steps_left = step
    return torch.nn.Sequential(first, torch.nn.ReLU(), torch.nn.Linear(8, 2))


def get_features():
    """A block of samples takes its time, so that training is left to do."""

    def slowly(x):
        time.sleep(0.03)
        return x

    return "features", slowly
