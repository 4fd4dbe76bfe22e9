"""The algorithms from their papers, in NumPy float64: each is a class with its equations; `replay` runs them.

Nothing here calls nnlo.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.equations.network import Array
from tests.equations.optimizers import SGD, Optimizer
from tests.equations.parts import Algorithm, Committed, Life, Request, Worker, passed

__all__ = [
    "AGN",
    "EAMSGD",
    "EASGD",
    "GEM",
    "DiLoCo",
    "Downpour",
    "DynSGD",
    "LocalSGD",
    "Steady",
    "Synchronous",
]


class Downpour(Algorithm):
    """Downpour SGD (Dean et al., NIPS 2012, appendix, algorithm 0.1), with the aligned schedule.

    a <- a + g; x <- x - alpha g (or a step of another local optimizer, or none); after every n_push steps of
    an epoch and at its end: c <- Optimizer(c, a), a <- 0; after every n_fetch and at its end: x <- c.
    """

    def __init__(
        self,
        optimizer: Callable[[], Optimizer],
        workers: int,
        *,
        every: int = 1,
        n_push: int | None = None,
        n_fetch: int | None = None,
        local: Callable[[], Optimizer] | None = None,
        warm_start: int = 0,
        lag: int = 0,
    ) -> None:
        super().__init__(optimizer, workers, lag=lag)
        self.n_push, self.n_fetch = n_push or every, n_fetch or every
        self.local, self.warm_start = local, warm_start

    def start(self, w: Worker) -> None:
        w.own = {"sum": np.zeros_like(w.x), "count": 0, "unfetched": 0}
        w.own["local"] = self.local() if self.local else None

    def move(self, w: Worker, g: Array) -> None:
        w.own["sum"] = w.own["sum"] + g
        w.own["count"] += 1
        w.own["unfetched"] += 1
        if w.own["local"]:
            w.x = w.own["local"](w.x, g)

    def exchange(self, w: Worker, done: int) -> Life:
        before = w.in_epoch - done
        push, fetch = (passed(before, w.in_epoch, every) for every in (self.n_push, self.n_fetch))
        yield from self._send(w, push=push, fetch=fetch)

    def end_epoch(self, w: Worker) -> Life:
        left = w.own["count"] > 0
        yield from self._send(w, push=left, fetch=left or w.own["unfetched"] > 0)

    def _send(self, w: Worker, *, push: bool, fetch: bool) -> Life:
        if fetch:
            w.own["unfetched"] = 0
        if push:
            contribution = self.contribution(w.own["sum"], w.own["count"])
            w.own["sum"], w.own["count"] = np.zeros_like(w.x), 0
            yield from self.ask(w, "EXCHANGE" if fetch else "PUSH", contribution)
        elif fetch:
            yield from self.ask(w, "PULL")

    def contribution(self, total: Array, count: int) -> Array:
        return total

    def capacity(self, clock: int) -> int:
        return 1 if clock < self.warm_start else self.workers

    def commit(self, c: Array, requests: Sequence[Request], absent: int, clock: int) -> Committed:
        c = self.stepped(c, requests[0].payload)
        return c, [c]


class AGN(Downpour):
    """Accumulated gradient normalization (Hermans 2017, arXiv:1710.02368, algorithm 1).

    x <- x - eta g after each gradient; after lambda of them (or the r that an epoch has left):
    c <- Optimizer(c, a / lambda); x <- c.
    """

    def __init__(
        self,
        optimizer: Callable[[], Optimizer],
        workers: int,
        *,
        every: int = 10,
        local_learning_rate: float | None = None,
        lag: int = 0,
    ) -> None:
        rate = optimizer().rate if local_learning_rate is None else local_learning_rate
        super().__init__(optimizer, workers, every=every, local=lambda: SGD(rate), lag=lag)

    def contribution(self, total: Array, count: int) -> Array:
        return total / count


class DynSGD(Downpour):
    """Staleness-aware SGD (Jiang et al., SIGMOD 2017): c <- Optimizer(c, a / (T - T_pull + 1))."""

    def commit(self, c: Array, requests: Sequence[Request], absent: int, clock: int) -> Committed:
        (request,) = requests
        c = self.stepped(c, request.payload / (clock - request.pulled_at + 1))
        return c, [c]


class Steady(AGN):
    """DANA's look-ahead on a slow clock, AdaScale's gain from neighbours, and a brake; see
    `docs/algorithms.md`.

    With W workers and a lag of L the delay is that of V = W (L + 1) workers; n the batches of a contribution.
    p <- min(1, brake sqrt(S / |g|^2)) g once 10 pairs are known; D, S: means of p p' and |p|^2, p' the last
    one's; s = (n (S - D) + D) / ((S - D) / V + D) / V, between 1 / V and n; 1 / V for the first.
    1 / (1 - mu') = short + calm (long - short), long = 1 / (1 - mu), short = min(long, long / G + k (1 - 1 /
    G)), G = max(1, s V), calm from the share of shortened ones; nu = 1 - (1 - mu') / V.
    SGD: m <- nu m + s (1 - mu') / (1 - mu) p / V; c <- c - eta m; reply c - eta mu' V m.
    Retreat: L <- L + (log2(|g| / |p|) - L) / 10. Where L > 2, or S is 64^2 times that kept with u > 0 and t >
    1/100, c, D, S and the last p go back to those kept: of the start and of the 10th pair, or later where L
    was below 0.3 and u 0, at the earliest 20 V contributions after the time before; m <- 0; t <- t / 2, of
    all later s; gradients from before then move nothing. With u = 0 t <- min(1, t e^(1 / 100 V)).
    Adam: m <- nu m + (1 - nu) p; q = s m / (1 - prod nu) / (sqrt(v / (1 - 0.999^t)) + eps); products in
        Adam's metric.
    """

    def __init__(
        self,
        optimizer: Callable[[], Optimizer],
        workers: int,
        *,
        every: int = 1,
        passes: str = "fixed",
        synchronous: bool = False,
        memory: float | None = None,
        brake: float = 1.5,
        lag: int = 0,
    ) -> None:
        assert passes == "fixed"
        super().__init__(optimizer, workers, every=every, local_learning_rate=0.0, lag=lag)
        self.local, self.every, self.brake, self.sync = None, every, brake, synchronous
        self.waits = self.refreshes = synchronous
        self.memory = memory if memory is not None else 2.0 if synchronous else 4.0
        self.mu = 0.9 if self.stepped.epsilon else self.stepped.momentum
        self.m: Array | float = 0.0
        self.v: Array | float = 0.0
        self.last: Array | None = None
        self.product = self.square = self.noise = self.signal = self.shortened = self.largest = 0.0
        self.pairs = self.t = self.since = 0
        self.decay = self.throttle = 1.0
        self.strain, self.retreated, self.ahead = 0.0, -1, 0.0
        self.kept: Any = None

    def quorum(self, behind: int) -> int:
        return behind if self.sync else 1

    def commit(self, c: Array, requests: Sequence[Request], absent: int, clock: int) -> Committed:
        delay = self.workers * (self.lag + 1)
        if delay == 1:
            return super().commit(c, requests, absent, clock)
        if self.sync:
            g, gain = self.together(requests)
            c, _ = self.paced(c, g, 1, gain)
            return c, [c] * len(requests)
        (request,) = requests
        self.largest = max(self.largest, request.weight)
        batches = max(1.0, self.every * request.weight / self.largest)
        if request.pulled_at <= self.retreated:
            return c, [c - self.ahead]
        known = "product", "square", "last", "pairs", "shortened"
        now = {name: getattr(self, name) for name in known}
        if self.kept is None:
            self.kept = c.copy(), now
        if not self.kept[1]["pairs"] and self.pairs >= 10:
            self.kept = self.kept[0], now
        if self.since >= 20 * delay and self.strain < 0.3 and self.shortened <= 0.08:
            self.kept, self.since = (c.copy(), now), 0
        g, scale = self.scaled(request.payload, delay, batches)
        if self.brake:
            long = np.sqrt((request.payload**2).sum() / (g**2).sum())
            self.strain += (np.log2(long) - self.strain) / 10
            self.since += 1
        easy = self.shortened <= 0.08
        if easy:
            self.throttle = min(1.0, self.throttle * np.exp(0.01 / delay))
        grown = self.kept[1]["pairs"] > 0 and self.square > 64**2 * self.kept[1]["square"]
        if self.strain > 2 or (grown and not easy and self.throttle > 0.01):
            c, before = self.kept[0].copy(), self.kept[1]
            for name in known:
                setattr(self, name, before[name])
            self.throttle, self.strain, self.since, self.retreated = self.throttle / 2, 0.0, 0, clock
            self.m, self.decay, self.ahead = 0.0 * c, 1.0, 0.0
            return c, [c]
        moved, ahead = self.paced(c, g, delay, self.throttle * scale)
        self.ahead = moved - ahead
        return moved, [ahead]

    def metric(self, g: Array | None) -> Array | float:
        """Adam's metric with the gradient g in it; None: of the gradients before, where there were any."""
        if not self.stepped.epsilon:
            return 1.0
        if g is None:
            if not self.t:
                return 1.0
            root = np.sqrt(self.v / (1 - 0.999**self.t))
            return np.where(self.v == 0, 0.0, 1 / (root + self.stepped.epsilon))
        root = np.sqrt((0.999 * self.v + 0.001 * g * g) / (1 - 0.999 ** (self.t + 1)))
        return 1 / (root + self.stepped.epsilon)

    def scaled(self, g: Array, delay: int, batches: float) -> tuple[Array, float]:
        metric, shorter = self.metric(g), 1.0
        square = float((metric * g * g).sum())
        if self.pairs >= 10 and self.brake:
            shorter = min(1.0, self.brake * np.sqrt(self.square / square))
        self.shortened += 0.01 * ((shorter < 1) - self.shortened)
        g, before, self.last = shorter * g, self.last, shorter * g
        if before is None:
            return g, 1 / delay
        self.pairs += 1
        share = 1 / min(self.pairs, max(100, 4 * delay))
        self.product += share * (float((metric * g * before).sum()) - self.product)
        self.square += share * (shorter**2 * square - self.square)
        signal = max(self.product, 1e-12 * self.square)
        noise = max(self.square - signal, 0.0)
        scale = (batches * noise + signal) / (noise / delay + signal) / delay
        return g, min(batches, max(1 / delay, scale))

    def together(self, requests: Sequence[Request], *, measured_first: bool = False) -> tuple[Array, float]:
        """The mean, and its gain; `measured_first`: norms are taken before the mean is known."""
        g, many = mean_of(requests), len(requests)
        metric = self.metric(None if measured_first else g)
        if many == 1:
            return g, 1.0
        if measured_first and self.t == 1 and self.stepped.epsilon:  # the first had no metric
            self.pairs, self.noise, self.signal = 0, 0.0, 0.0
        single = sum(float((metric * one.payload**2).sum()) for one in requests) / many
        mean = float((metric * g * g).sum())
        noise = max(single - mean, 0.0) * many / (many - 1)
        self.pairs += 1
        share = 1 / min(self.pairs, 100)
        self.noise += share * (noise - self.noise)
        self.signal += share * (max(mean - noise / many, 0.0) - self.signal)
        return g, min(many, max(1.0, (self.noise + self.signal) / (self.noise / many + self.signal)))

    def paced(self, c: Array, g: Array, delay: int, scale: float) -> tuple[Array, Array]:
        rate, gain, long = self.stepped.rate, max(1.0, scale * delay), 1 / (1 - self.mu)
        short = min(long, max(1.0, long / gain + self.memory * (1 - 1 / gain)))
        calm = 0.0 if self.sync else min(1.0, max(0.0, self.shortened / 0.08 - 1))
        mu = 1 - 1 / (short + calm * (long - short))
        nu, self.t = 1 - (1 - mu) / delay, self.t + 1
        if not self.stepped.epsilon:
            if not self.mu:
                c = c - rate * scale * g
                return c, c
            self.m = nu * self.m + scale * (1 - mu) / (1 - self.mu) / delay * g
            c = c - rate * self.m
            return c, c - (rate * mu * delay * self.m if delay > 1 else 0)
        self.m = nu * self.m + (1 - nu) * g
        self.v, self.decay = 0.999 * self.v + 0.001 * g * g, self.decay * nu
        root = np.sqrt(1 - 0.999**self.t)
        divisor = (np.sqrt(self.v) + self.stepped.epsilon) / root
        if not self.stepped.hat:
            divisor = np.sqrt(self.v) / root + self.stepped.epsilon
        q = rate * scale * self.m / (1 - self.decay) / divisor
        c = c - q
        return c, c - (mu * delay * q if delay > 1 else 0)


class Synchronous(Algorithm):
    """Synchronous SGD with b backup workers (Chen et al. 2016, arXiv:1604.00981, algorithms 3 and 4).

    c <- Optimizer(c, mean of the first p - b gradients of a step), weighted by samples; later ones are
    dropped.
    """

    waits = refreshes = True

    def __init__(
        self, optimizer: Callable[[], Optimizer], workers: int, *, backup: int = 0, lag: int = 0
    ) -> None:
        super().__init__(optimizer, workers, lag=lag)
        self.backup, self.oldest = backup, lag

    def move(self, w: Worker, g: Array) -> None:
        w.own["sum"] = w.own.get("sum", 0) + g
        w.own["count"] = w.own.get("count", 0) + 1

    def exchange(self, w: Worker, done: int) -> Life:
        g = w.own["sum"]
        w.own.clear()
        yield from self.ask(w, "EXCHANGE", g)

    def quorum(self, behind: int) -> int:
        return min(self.workers - self.backup, behind)

    def commit(self, c: Array, requests: Sequence[Request], absent: int, clock: int) -> Committed:
        c = self.stepped(c, mean_of(requests))
        return c, [c] * len(requests)


class GEM(Algorithm):
    """Gradient energy matching (Hermans and Louppe 2018, arXiv:1805.08469, algorithm 1 and equation 27).

    d <- -eta g; m <- mu m + d; c, s: the centre now and the one pulled last;
    pi <- clip((kappa |m| - |c - s|) / (|d| + eps), 0, clip); c <- c + pi d; s <- c before; x <- c + pi d.
    g is the mean over `every` steps (or the r that an epoch has left), and `lag` such steps old.
    """

    def __init__(
        self,
        optimizer: Callable[[], Optimizer],
        workers: int,
        *,
        every: int = 1,
        kappa: float = 1.0,
        clip: float | None = 5.0,
        primed: bool = True,
        lag: int = 0,
    ) -> None:
        super().__init__(optimizer, workers)
        self.every, self.kappa, self.clip, self.primed, self.delay = every, kappa, clip, primed, lag
        self.eta, self.mu = self.stepped.rate, self.stepped.momentum

    def start(self, w: Worker) -> None:
        zero = np.zeros_like(w.x)
        w.own = {"sum": zero, "count": 0, "m": zero, "s": w.x if self.primed else zero, "delayed": []}

    def move(self, w: Worker, g: Array) -> None:
        w.own["sum"] = w.own["sum"] + g
        w.own["count"] += 1

    def exchange(self, w: Worker, done: int) -> Life:
        if passed(w.in_epoch - done, w.in_epoch, self.every):
            yield from self._step(w)

    def end_epoch(self, w: Worker) -> Life:
        if w.own["count"]:
            yield from self._step(w)

    def _step(self, w: Worker) -> Life:
        own = w.own
        own["delayed"].append(own["sum"] / own["count"])
        own["sum"], own["count"] = np.zeros_like(w.x), 0
        if len(own["delayed"]) <= self.delay:
            return
        d = -self.eta * own["delayed"].pop(0)
        own["m"] = self.mu * own["m"] + d

        def update(c: Array) -> Array:
            rate = (self.kappa * np.abs(own["m"]) - np.abs(c - own["s"])) / (np.abs(d) + 1e-16)
            if self.clip is not None:
                rate = np.clip(rate, 0, self.clip)
            own["s"] = c.copy()
            return rate * d

        yield from self.ask(w, "LOCK", update)

    def commit(self, c: Array, requests: Sequence[Request], absent: int, clock: int) -> Committed:
        c = c + requests[0].payload(c)
        return c, [c]


class EASGD(Algorithm):
    """Elastic averaging SGD (Zhang, Choromanska, LeCun, NIPS 2015, arXiv:1412.6651).

    Algorithm 1: E = alpha (x - c); x <- x - E; c <- c + E every tau steps, with the user's steps of x in
    between: at steps 0, tau, ... before the step whose gradient was taken at the x before it ("paper"), or
    after the steps tau - 1, 2 tau - 1, ... ("step_first"). Equations 3 and 4: all workers at once, with the
    old c.
    """

    def __init__(
        self,
        optimizer: Callable[[], Optimizer],
        workers: int,
        *,
        every: int = 10,
        beta: float = 0.9,
        alpha: float | None = None,
        beta_per: str = "exchange",
        order: str = "step_first",
        synchronous: bool = False,
        lag: int = 0,
    ) -> None:
        super().__init__(optimizer, workers, lag=lag)
        self.every, self.paper, self.waits = every, order == "paper", synchronous
        self.alpha = beta / workers / (every if beta_per == "step" else 1) if alpha is None else alpha

    def start(self, w: Worker) -> None:
        w.own["optimizer"] = self.optimizer()

    def move(self, w: Worker, g: Array) -> None:
        w.x = w.own["optimizer"](w.x, g)

    def exchange(self, w: Worker, done: int) -> Life:
        shift = self.every - 1 if self.paper else 0
        if passed(w.steps - done + shift, w.steps + shift, self.every):
            yield from self.ask(w, "EXCHANGE", w.before if self.paper else w.x.copy())

    def absorb(self, w: Worker, request: Request, reply: Array) -> None:
        w.x = w.x - reply

    def quorum(self, behind: int) -> int:
        return behind if self.waits else 1

    def commit(self, c: Array, requests: Sequence[Request], absent: int, clock: int) -> Committed:
        pulls = [self.alpha * (request.payload - c) for request in requests]
        return c + sum(pulls), pulls


class EAMSGD(EASGD):
    """EASGD with momentum (the same paper, algorithm 2): v <- delta v - eta g(x + delta v); x <- x + v.

    The exchange is that of x, in the paper's order; v does not take part in it.
    """

    def __init__(self, optimizer: Callable[[], Optimizer], workers: int, **options: Any) -> None:
        super().__init__(optimizer, workers, order="paper", **options)
        self.eta, self.delta = self.stepped.rate, self.stepped.momentum

    def start(self, w: Worker) -> None:
        w.own["v"] = np.zeros_like(w.x)

    def point(self, w: Worker) -> Array:
        return w.x + self.delta * w.own["v"]

    def move(self, w: Worker, g: Array) -> None:
        w.own["v"] = self.delta * w.own["v"] - self.eta * g
        w.x = w.x + w.own["v"]


class LocalSGD(Algorithm):
    """Local SGD (Stich 2018, arXiv:1805.09767), post-local SGD (Lin et al. 2018, arXiv:1808.07217).

    After each of the first `warmup` steps, then after every H: x <- c = mean of all x, weighted by samples. A
    worker that has ended the epoch before counts with c. A late mean moves x by (mean - x when it was sent).
    If any steps are left at the end of the training there is one more round.
    """

    waits = True

    def __init__(
        self,
        optimizer: Callable[[], Optimizer],
        workers: int,
        *,
        every: int = 10,
        warmup: int = 0,
        lag: int = 0,
    ) -> None:
        super().__init__(optimizer, workers, lag=lag)
        self.every, self.warmup = every, warmup

    def start(self, w: Worker) -> None:
        w.own["optimizer"] = self.optimizer()

    def move(self, w: Worker, g: Array) -> None:
        w.x = w.own["optimizer"](w.x, g)

    def due(self, w: Worker, done: int) -> bool:
        late = range(w.steps - done + 1 - self.warmup, w.steps + 1 - self.warmup)
        return any(step <= 0 or step % self.every == 0 for step in late)

    def exchange(self, w: Worker, done: int) -> Life:
        if self.due(w, done):
            yield from self.leave_off(w)

    def end_training(self, w: Worker) -> Life:
        yield from self.leave_off(w)
        while w.open:
            yield from self.settle(w)

    def leave_off(self, w: Worker) -> Life:
        """Make the last exchange."""
        yield from self.ask(w, "EXCHANGE", w.x.copy())

    def absorb(self, w: Worker, request: Request, reply: Array) -> None:
        moved = reply - request.sent
        w.x = w.x + moved
        for later in w.open:
            later.sent = later.sent + moved

    def quorum(self, behind: int) -> int:
        return behind

    def commit(self, c: Array, requests: Sequence[Request], absent: int, clock: int) -> Committed:
        c = c + (mean_of(requests) - c) * len(requests) / (len(requests) + absent)
        return c, [c] * len(requests)


class DiLoCo(LocalSGD):
    """DiLoCo (Douillard et al. 2023, arXiv:2311.08105, algorithm 1).

    After H inner steps: delta = mean of (c_old - x), weighted by samples; b <- mu b + delta;
    c <- c - lr (delta + mu b); x <- c. Absent workers count with no displacement.
    """

    def __init__(
        self,
        optimizer: Callable[[], Optimizer],
        workers: int,
        *,
        every: int = 500,
        outer_learning_rate: float = 0.7,
        outer_momentum: float = 0.9,
        lag: int = 0,
    ) -> None:
        super().__init__(optimizer, workers, every=every, lag=lag)
        self.stepped = SGD(outer_learning_rate, outer_momentum, nesterov=outer_momentum > 0)

    def start(self, w: Worker) -> None:
        super().start(w)
        w.own["round"] = w.x

    def exchange(self, w: Worker, done: int) -> Life:
        if self.due(w, done):
            yield from self.leave_off(w)

    def leave_off(self, w: Worker) -> Life:
        moved, w.own["round"] = w.own["round"] - w.x, w.x
        yield from self.ask(w, "EXCHANGE", moved)

    def absorb(self, w: Worker, request: Request, reply: Array) -> None:
        super().absorb(w, request, reply)
        w.own["round"] = w.x

    def commit(self, c: Array, requests: Sequence[Request], absent: int, clock: int) -> Committed:
        c = self.stepped(c, mean_of(requests) * len(requests) / (len(requests) + absent))
        return c, [c] * len(requests)


def mean_of(requests: Sequence[Request]) -> Array:
    """The mean of what was sent, weighted."""
    weights = [request.weight for request in requests]
    return sum(request.payload * request.weight for request in requests) / sum(weights)
