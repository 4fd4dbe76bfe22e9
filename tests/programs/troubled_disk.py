"""Trains on a small disk of its own, on which something goes wrong; prints what is there at the end.

`unshare --mount python troubled_disk.py mount FOLDER COMMAND...` mounts the disk, and becomes the command.
"""

import os
import resource
import subprocess
import sys
from pathlib import Path


def mounted(folder, command):
    """Mount 2 MB of memory as a disk, and run a command on it."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], check=True)
    os.execv(command[0], command)


def full(folder):
    with Path(folder, "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def read_only(folder):
    run = str(Path(folder, "run"))
    subprocess.run(["mount", "--bind", run, run], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", run], check=True)


def no_descriptors(_folder):
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def no_large_files(_folder):
    """As a quota does: a file may not grow any more."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def train(folder, trouble):
    import signal

    import torch

    import nnlo_torch as nt

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails instead
    torch.manual_seed(0)
    model = torch.nn.Linear(100, 100)
    optimizer = nt.Downpour(torch.optim.Adam(model.parameters(), lr=0.01), model=model)
    checkpoint = nt.Checkpoint(Path(folder, "run"), optimizer, epochs=1)
    data = torch.randn(40, 100)
    sampler = nt.ShardSampler(data, optimizer=optimizer)
    loader = torch.utils.data.DataLoader(data, batch_size=10, sampler=sampler)
    for epoch in checkpoint.epochs(6):
        if epoch == 3 and optimizer.serves:
            before = sorted(path.name for path in Path(folder, "run").glob("checkpoint-*"))
            print("before", *before, flush=True)
            trouble(folder)
        for x in checkpoint.batches(loader):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    print("trained", epoch + 1, flush=True)
    optimizer.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, [resource.getrlimit(resource.RLIMIT_NOFILE)[1]] * 2)
    if optimizer.serves:
        print("after", *sorted(path.name for path in Path(folder, "run").iterdir()), flush=True)


TROUBLES = {"full": full, "read-only": read_only, "descriptors": no_descriptors, "quota": no_large_files}

if __name__ == "__main__":
    what, where, *rest = sys.argv[1:]
    if what == "mount":
        mounted(where, rest)
    else:
        train(where, TROUBLES.get(what, lambda folder: None))
