"""Virtual time to a loss: EASGD with one server, with one on each host, and in an elastic tree.

A noisy quadratic; a step of a worker takes 1 s of virtual time on average. A server takes `serve_s` for each
exchange, and the link of a host `link_s` for each vector of the model that leaves or enters it.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from nnlo_common import SGD
from nnlo_common.algorithms import EASGD
from nnlo_common.base._flat_vector import FlatVector, Vector
from nnlo_common.protocol import Action, Compute, Server, Shard, Worker
from nnlo_common.testing import ByTime, VirtualTree, tree_machines

__all__ = ["Cluster", "run", "seconds_to_loss"]

SIZE, RATE, NOISE, TARGET, SEEDS = 24, 0.05, 1.5, 0.01, 2
CURVATURE = np.linspace(0.1, 1.0, SIZE, dtype=np.float32)
#: The columns: servers for each host (0: one in all), every, and sub_every of a tree (0: none).
LAYOUTS = {
    "one server, `every=10`": (0, 10, 0),
    "one server, `every=40`": (0, 40, 0),
    "`servers=` hosts, `every=10`": (1, 10, 0),
    "`servers=` hosts, `every=40`": (1, 40, 0),
    "tree, `every=10`, `sub_every=8`": (0, 10, 8),
    "the same, `sub_every=32`": (0, 10, 32),
}


@dataclass(frozen=True)
class Cluster:
    """Hosts, and how long they take.

    Attributes:
        hosts: how many there are.
        workers: on each host.
        serve_s: the time of a server for one exchange.
        link_s: the time of a host's link for one vector of the model.

    Example:
        >>> Cluster(2, 8, 0.1, 10.0).hosts
        2
    """

    hosts: int
    workers: int
    serve_s: float
    link_s: float


CLUSTERS = (
    Cluster(2, 8, 0.1, 0.0),
    Cluster(2, 8, 0.1, 10.0),
    Cluster(4, 8, 0.1, 0.0),
    Cluster(4, 8, 0.1, 2.0),
    Cluster(4, 8, 0.1, 10.0),
    Cluster(4, 8, 3.0, 0.0),
)


class _Links:
    """The links of all hosts: each carries one vector at a time in each direction."""

    def __init__(self, cluster: Cluster, host_of: dict[int, int]) -> None:
        self._cluster, self._host_of = cluster, host_of
        self._free_s: dict[tuple[int, str], float] = defaultdict(float)

    def arrives_s(self, source: int, to: int, size: int, sent_s: float) -> float:
        """Return when a message arrives."""
        here, there = self._host_of[source], self._host_of[to]
        if here == there or not size * self._cluster.link_s:
            return sent_s
        takes_s = self._cluster.link_s * size / (4 * SIZE)
        for way in ((here, "out"), (there, "in")):  # a switch between them holds what waits for the second
            sent_s = max(sent_s, self._free_s[way])
            self._free_s[way] = sent_s + takes_s
        return sent_s + takes_s


def run() -> None:
    """Print the table."""
    print(f"| hosts x workers, s, l | {' | '.join(LAYOUTS)} |")
    print("|---|" + "---|" * len(LAYOUTS))
    for cluster in CLUSTERS:
        cells = []
        for layout in LAYOUTS.values():
            seconds = [seconds_to_loss(cluster, *layout, seed=seed) for seed in range(SEEDS)]
            cells.append(sum(seconds) / len(seconds))
        told = [f"**{one:.0f}**" if one == min(cells) else f"{one:.0f}" for one in cells]
        name = f"{cluster.hosts} x {cluster.workers}, {cluster.serve_s:g}, {cluster.link_s:g}"
        print(f"| {name} | {' | '.join(told)} |", flush=True)


def seconds_to_loss(
    cluster: Cluster, servers_per_host: int, every: int, sub_every: int, *, seed: int = 0
) -> float:
    """Return the virtual seconds until the centre's loss is a hundredth of that at the start.

    Args:
        cluster: the hosts.
        servers_per_host: servers that share the centre, on each host; 0: one in all.
        every: steps of a worker between two exchanges.
        sub_every: that of the sub-servers, one on each host; 0: no tree.
        seed: of the noise, and of the times.
    """
    start = FlatVector.of(list(np.ones((4, SIZE // 4), np.float32)))
    first = 1 + cluster.hosts  # the rank of the first worker
    places = [
        range(first + h * cluster.workers, first + (h + 1) * cluster.workers) for h in range(cluster.hosts)
    ]
    host_of = {0: 0} | {1 + host: host for host in range(cluster.hosts)}
    host_of |= {rank: host for host, ranks in enumerate(places) for rank in ranks}
    if sub_every:
        rule = EASGD(every=every, sub_servers=cluster.hosts, sub_every=sub_every)
        machines, workers = tree_machines(rule, start, [(1 + h, *ranks) for h, ranks in enumerate(places)])
        tops = [machines[0]]
    else:
        number = cluster.hosts if servers_per_host else 1
        machines, workers = _flat(EASGD(every=every), start, number, range(first, len(host_of)))
        tops = list(machines.values())
    noise = np.random.default_rng(seed)
    tree = VirtualTree(
        machines,
        workers,
        {rank: _program(worker, noise) for rank, worker in workers.items()},
        schedule=_times(cluster, seed),
        arrives_s=_Links(cluster, host_of).arrives_s,
    )
    tree.run(lambda: _loss(np.concatenate([one.rule.center for one in tops])) < TARGET * _loss(start.vector))
    return tree.now_s


def _flat(
    rule: EASGD, start: FlatVector, servers: int, ranks: range
) -> tuple[dict[int, Server], dict[int, Worker]]:
    """Return servers, on the first ranks, and workers that exchange with all of them."""
    shards = [
        Shard(index, index + (servers > 1), part) for index, part in enumerate(start.layout.cut(servers))
    ]
    machines = {
        shard.server: Server(
            rule.center(start.vector[shard.place].copy(), len(ranks), None),
            ranks,
            rank=shard.server,
            shard=shard.index,
        )
        for shard in shards
    }
    workers = {
        rank: Worker(
            rank, rule, FlatVector.of(start.views()), FlatVector(start.layout), shards, workers=len(ranks)
        )
        for rank in ranks
    }
    return machines, workers


def _program(worker: Worker, noise: np.random.Generator) -> Iterator[Action]:
    worker.local = SGD(RATE)
    yield from worker.join()
    while True:
        yield Compute()
        drawn = noise.standard_normal(SIZE, np.float32)
        worker.gradient.vector[:] = CURVATURE * worker.parameters.vector + NOISE * drawn
        yield from worker.step()


def _times(cluster: Cluster, seed: int) -> ByTime:
    def serve_s(draw: random.Random, size: int) -> float:  # noqa: ARG001
        return cluster.serve_s * size / (4 * SIZE)

    return ByTime(seed, compute_s=lambda draw, rank: draw.uniform(0.8, 1.2), serve_s=serve_s)


def _loss(x: Vector) -> float:
    return float((CURVATURE * x * x).sum())
