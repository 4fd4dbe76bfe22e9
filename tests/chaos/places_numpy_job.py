"""The same training without a framework, by a Participant; ranks die as it is planned."""

import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

import nnlo_common
from tests.chaos import places_data
from tests.chaos.dying import Notes

folder, algorithm, servers = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
OPTIONS = {"EASGD": {"every": 4}, "LocalSGD": {"every": 4}}
notes = Notes(folder, MPI.COMM_WORLD.Get_rank())
x, y = places_data.samples(places_data.SAMPLES, 0)
x_test, y_test = places_data.samples(2000, 1)


def features(points):
    """The inputs, their products and a one."""
    products = (points[:, :, None] * points[:, None, :]).reshape(len(points), -1)
    return np.concatenate([points, products, np.ones_like(points[:, :1])], axis=1)


kind = getattr(nnlo_common, algorithm)(**OPTIONS.get(algorithm, {}))
inputs, targets = features(x), y.astype(np.float32)
batches = np.arange(places_data.SAMPLES).reshape(-1, places_data.BATCH)
start = np.array_split(np.zeros(inputs.shape[1], np.float32), servers)  # a piece for each server
ranks = {"servers": servers, "spares": 2 * servers}
with nnlo_common.Participant(kind, start, optimizer=nnlo_common.SGD(0.05), **ranks) as me:
    for epoch in range(places_data.EPOCHS):
        notes.at("begin", epoch)
        order = np.random.default_rng([7, epoch]).permutation(len(batches))
        for numbers in me.batches(batches[order]):
            found = 1 / (1 + np.exp(-inputs[numbers] @ np.concatenate(me.point)))
            gradient = inputs[numbers].T @ (found - targets[numbers]) / len(numbers)
            for piece, part in zip(me.gradients, np.array_split(gradient, servers), strict=True):
                piece[:] = part
            me.step()
            notes.trained(epoch, numbers.tolist())
            time.sleep(places_data.PACE_S)
        notes.at("end", epoch)
notes.over()
accuracy = float(((features(x_test) @ np.concatenate(me.parameters) > 0) == y_test).mean())
me.say(f"finished: {accuracy:.4f}, {me.report().lost}")
