"""Predicted critical batch beside the measured knee of steps to a loss, for two networks and eight batches.

For each size of batch the best of several learning rates says how many steps of plain SGD reach a training
loss. These follow S = S_min (1 + B / b) (McCandlish et al. 2018, arXiv:1812.06162): B, the knee, is fitted.
The prediction is the noise scale, by `NoiseEstimate`, from gradients at eight points along the run with
batches of 64. The claim is that both agree within a factor of two. No time is measured, so a busy machine
does no harm.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from nnlo_common import NoiseEstimate

DATA = Path(__file__).parent.parent / "examples" / "data" / "fashion_mnist_2500.npz"
BATCHES = (4, 8, 16, 32, 64, 128, 256, 512)
MOST_STEPS = 3000
POINTS, GRADIENTS, SMALL = 8, 64, 16
cross_entropy = torch.nn.functional.cross_entropy


def dense() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(784, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))


def convolutions() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, 28, 28)),
        torch.nn.AvgPool2d(2),
        torch.nn.Conv2d(1, 6, 5),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(150, 10),
    )


#: Each network with the loss to reach, and the learning rates to try.
NETWORKS: dict[str, tuple[Callable[[], torch.nn.Module], float, tuple[float, ...]]] = {
    "dense": (dense, 0.6, (0.05, 0.1, 0.2, 0.4, 0.8)),
    "convolutions": (convolutions, 0.8, (0.1, 0.2, 0.4, 0.8, 1.6)),
}


class Course:
    """Plain SGD on random batches.

    Args:
        make: makes the network.
        batch: its samples.
        rate: the learning rate.
    """

    def __init__(self, make: Callable[[], torch.nn.Module], batch: int, rate: float) -> None:
        with np.load(DATA) as found:
            self.x = torch.tensor(found["x_train"], dtype=torch.float32).reshape(2000, -1) / 255 - 0.3
            self.y = torch.tensor(found["y_train"]).long()
        torch.manual_seed(0)
        self.model, self.batch, self.rate = make(), batch, rate
        self.parameters = [*self.model.parameters()]
        self.draws = torch.Generator().manual_seed(0)

    def gradient(self, batch: int) -> list[torch.Tensor]:
        """Return the gradient of a random batch."""
        rows = torch.randint(len(self.y), (batch,), generator=self.draws)
        loss = cross_entropy(self.model(self.x[rows]), self.y[rows])
        return [*torch.autograd.grad(loss, self.parameters)]

    @torch.no_grad()
    def loss(self) -> float:
        """Return the loss of half of the samples."""
        return float(cross_entropy(self.model(self.x[:1000]), self.y[:1000]))

    def step(self) -> None:
        """Make a step."""
        gradients = self.gradient(self.batch)
        with torch.no_grad():
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.sub_(self.rate * gradient)

    def products(self) -> npt.NDArray[np.float32]:
        """Return the products of the gradients of many small batches here."""
        rows = [
            torch.cat([one.reshape(-1) for one in self.gradient(SMALL)]).numpy() for _ in range(GRADIENTS)
        ]
        table: npt.NDArray[np.float32] = np.stack(rows)
        products: npt.NDArray[np.float32] = table @ table.T
        return products


def steps_to(make: Callable[[], torch.nn.Module], batch: int, rate: float, target: float, most: int) -> float:
    """How many steps reach the loss; infinite beyond `most`."""
    course = Course(make, batch, rate)
    for step in range(1, most + 1):
        course.step()
        if step % (5 if step > 100 else 2) == 0 and course.loss() < target:
            return step
    return math.inf


def knee(steps: dict[int, float]) -> float:
    """B of S = S_min (1 + B / b), by least relative squares."""
    sizes, found = np.array(list(steps), float), np.array(list(steps.values()))
    system = np.stack([1 / found, 1 / (sizes * found)], 1)
    (least, product), *_ = np.linalg.lstsq(system, np.ones(len(sizes)), rcond=None)
    return float(product / least)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=[*NETWORKS])
    torch.set_num_threads(1)
    for name in parser.parse_args().networks:
        make, target, rates = NETWORKS[name]
        steps, best_rate = {}, {}
        for batch in BATCHES:
            best = (math.inf, 0.0)
            for rate in rates:
                best = min(best, (steps_to(make, batch, rate, target, int(min(best[0], MOST_STEPS))), rate))
            steps[batch], best_rate[batch] = best
            print(f"{name}: batches of {batch}: {best[0]:.0f} steps at {best[1]}", flush=True)
        course, tables = Course(make, 64, best_rate[64]), []
        for step in range(int(steps[64])):
            if step % max(int(steps[64]) // POINTS, 1) == 0:
                tables.append(course.products())
            course.step()
        predicted, measured = NoiseEstimate.of(tables, batch=SMALL), knee(steps)
        print(f"{name}: predicted {predicted}, the knee is at {measured:.0f} samples")
        assert 0.5 < predicted.scale / measured < 2, "the prediction is off by more than a factor of two"


if __name__ == "__main__":
    main()
