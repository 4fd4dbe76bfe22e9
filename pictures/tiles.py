"""Picture of a volume in tiles: a slice of it, the tiles, and the objects that tiles have in common.

`python pictures/tiles.py` applies a network to a volume by `nnlo_torch.infer_tiles`; it needs PyTorch and
SciPy.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from drawing import COLOURS, save
from plotly.subplots import make_subplots

import nnlo_torch as nt

SHAPE, TILE, PLACE = (48, 96, 120), 40, 24
BALLS, RADII = 60, (4, 8)


def volume_of_balls() -> np.ndarray:
    """Return balls of different sizes in noise."""
    draw = np.random.default_rng(0)
    places = np.stack(np.meshgrid(*map(np.arange, SHAPE), indexing="ij"))
    volume = np.zeros(SHAPE)
    for _ in range(BALLS):
        middle = draw.uniform(0, SHAPE)[:, None, None, None]
        volume = np.maximum(volume, ((places - middle) ** 2).sum(0) < draw.uniform(*RADII) ** 2)
    return (volume + draw.normal(0, 0.5, SHAPE)).astype("f4")


def network() -> torch.nn.Module:
    """Return a mean over cubes of 5: enough to tell a ball from noise."""
    mean = torch.nn.Conv3d(1, 1, 5, padding=2)
    torch.nn.init.constant_(mean.weight, 1 / 125)
    torch.nn.init.constant_(mean.bias, -0.5)
    return mean


def main() -> None:
    volume = volume_of_balls()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cells.npy"
        found = nt.infer_tiles(
            network(), volume, path, tile=TILE, reduce=lambda scores: scores[0] > 0, objects="label"
        )
        numbered = np.load(path)
    labels = numbered[PLACE].astype(float)
    count = int(numbered.max())
    labels[labels == 0] = np.nan
    step = TILE - 2 * found.margin[-1]
    print(f"{count} objects, margin {found.margin}, tiles begin each {step} voxels")
    figure = make_subplots(1, 2, subplot_titles=("a slice of the volume, and the tiles", f"{count} objects"))
    shown = np.round(volume[PLACE], 2)
    figure.add_heatmap(z=shown, colorscale="Greys", showscale=False, row=1, col=1)
    # Neighbours in number differ in colour.
    spread = [[place / 7, colour] for place, colour in enumerate(COLOURS)]
    figure.add_heatmap(z=labels % 8, colorscale=spread, showscale=False, row=1, col=2)
    for column in (1, 2):
        for along, size in (("x", SHAPE[2]), ("y", SHAPE[1])):
            for face in range(step + found.margin[-1], size, step):
                line = {"color": COLOURS[4], "width": 1}
                add = figure.add_vline if along == "x" else figure.add_hline
                add(**{along: face - 0.5}, line=line, row=1, col=column)
        figure.update_xaxes(showgrid=False, row=1, col=column)
        figure.update_yaxes(showgrid=False, scaleanchor=f"x{column if column > 1 else ''}", row=1, col=column)
    save(figure, "tiles.png")


if __name__ == "__main__":
    main()
