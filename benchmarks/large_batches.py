"""A batch 20 times as large: what linear scaling loses, and what LARS with a warm-up keeps of it.

A small convolutional network on 2000 images of Fashion-MNIST, the same 15 epochs for all: momentum SGD with
batches of 20 at 0.05; batches of 400 at 20 times that rate; and batches of 400 with LARS. The last two warm
up, and all fall by the square of what is left. Of six warm-ups of linear scaling and twenty-two settings of
LARS the best ones were chosen by seeds 10 to 12. All runs are printed; the claim is that LARS is within 1
point of the small batch, and that linear scaling is not within 1.5.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import nnlo_torch as nt

DATA = Path(__file__).parent.parent / "examples" / "data" / "fashion_mnist_2500.npz"
EPOCHS, SMALL, LARGE, RATE, SEEDS = 15, 20, 400, 0.05, (0, 1, 2)
LARS_RATE, TRUST, WARM_UP, LINEAR_WARM_UP = 0.35, 0.1, 4, 12


def network() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.AvgPool2d(2),
        torch.nn.Conv2d(1, 16, 3),
        torch.nn.BatchNorm2d(16),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(16, 32, 3),
        torch.nn.BatchNorm2d(32),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(512, 10),
    )


def images(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images and the labels of a part."""
    with np.load(DATA) as found:
        x = torch.tensor(found[f"x_{name}"], dtype=torch.float32).reshape(-1, 1, 28, 28) / 255 - 0.3
        return x, torch.tensor(found[f"y_{name}"]).long()


def accuracy(seed: int, batch: int, rate: float, *, trust: float | None = None, warm_up: int = 0) -> float:
    """Train; return the accuracy on the other images."""
    torch.manual_seed(seed)
    (x, y), model = images("train"), network()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(
        model.parameters(), lr=rate, momentum=0.9, weight_decay=5e-4
    )
    if trust is not None:
        optimizer = nt.LARS(optimizer, trust=trust)
    steps = len(y) // batch
    whole, warm = EPOCHS * steps, warm_up * steps
    order = torch.Generator().manual_seed(seed)
    for step in range(whole):
        if step % steps == 0:
            rows = torch.randperm(len(y), generator=order)
        left = 1 - max(step - warm, 0) / (whole - warm)
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / max(warm, 1)) * left**2
        some = rows[step % steps * batch : (step % steps + 1) * batch]
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x[some]), y[some])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    model.eval()
    x, y = images("test")
    with torch.no_grad():
        return 100 * float((model(x).argmax(1) == y).float().mean())


def main() -> None:
    torch.set_num_threads(1)
    many = LARGE / SMALL
    means = {}
    runs: dict[str, Callable[[int], float]] = {
        "batches of 20": lambda seed: accuracy(seed, SMALL, RATE),
        f"of {LARGE}, linear scaling": lambda seed: accuracy(
            seed, LARGE, RATE * many, warm_up=LINEAR_WARM_UP
        ),
        f"of {LARGE}, LARS": lambda seed: accuracy(seed, LARGE, LARS_RATE, trust=TRUST, warm_up=WARM_UP),
    }
    for name, run in runs.items():
        found = [run(seed) for seed in SEEDS]
        means[name] = float(np.mean(found))
        print(f"{name}: {', '.join(f'{one:.1f}' for one in found)} %, mean {means[name]:.1f} %", flush=True)
    small, linear, lars = means.values()
    assert lars > small - 1, "LARS loses more than a point"
    assert linear < small - 1.5, "linear scaling does as well, so this shows nothing"


if __name__ == "__main__":
    main()
