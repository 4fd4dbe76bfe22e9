"""A small training of PyTorch whose spares train in dead workers' places; ranks die as planned."""

import sys
import time
from pathlib import Path

import torch
from mpi4py import MPI

import nnlo_torch
from tests.chaos import places_data
from tests.chaos.dying import Notes

folder, algorithm, assignment, servers = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
OPTIONS = {"EASGD": {"every": 4}, "LocalSGD": {"every": 4}}
notes = Notes(folder, MPI.COMM_WORLD.Get_rank())

torch.manual_seed(1)
hidden = 32
model = torch.nn.Sequential(
    torch.nn.Linear(places_data.FEATURES, hidden),
    torch.nn.BatchNorm1d(hidden),
    torch.nn.ReLU(),
    torch.nn.Linear(hidden, 2),
)
x, y = map(torch.from_numpy, places_data.samples(places_data.SAMPLES, 0))
x_test, y_test = map(torch.from_numpy, places_data.samples(2000, 1))
data = torch.utils.data.TensorDataset(x, y, torch.arange(places_data.SAMPLES))
plain = torch.optim.SGD(model.parameters(), lr=0.1)
options = {"servers": servers, "spares": 2 * servers, **OPTIONS.get(algorithm, {})}
optimizer = getattr(nnlo_torch, algorithm)(plain, model=model, **options)
sampler = nnlo_torch.ShardSampler(data, shuffle=True, assignment=assignment, unit=places_data.BATCH)
loader = torch.utils.data.DataLoader(data, batch_size=places_data.BATCH, sampler=sampler)
checkpoint = nnlo_torch.Checkpoint(folder / "run", optimizer, minutes=0.3 / 60)
accuracy = 0.0
for epoch in checkpoint.epochs(places_data.EPOCHS):
    notes.at("begin", epoch)
    for inputs, labels, numbers in checkpoint.batches(loader):
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        notes.trained(epoch, numbers.tolist())
        time.sleep(places_data.PACE_S)
    notes.at("end", epoch)
    optimizer.mean({"ranks": 1.0})
    with optimizer.evaluation():
        notes.at("evaluation", epoch)
        accuracy = float((model(x_test).argmax(1) == y_test).float().mean())
optimizer.close()
notes.over()
optimizer.say(f"finished: {accuracy:.4f}, {optimizer.report().lost}")
