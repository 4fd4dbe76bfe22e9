"""Momentum with `wire="topk"`: the product against its equations in float64, after every commit.

With m the momentum and g a contribution of a worker (Lin et al. 2018, arXiv:1712.01887, section 3):

    u <- m u + g;  v <- v + u  (Nesterov: v + g + m u);  send the largest of v;  v <- 0 where it is sent
    c <- c - rate (what has come)

The paper's u <- 0 where a number is sent is left out; see docs/wire.md.

The simulation has the product's gradients and the order of its commits; nothing in it calls nnlo.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnlo_common import AGN, SGD, Adam, Downpour, DynSGD, Synchronous
from nnlo_common.algorithms import Algorithm
from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._flat_vector import FlatVector, Frame
from nnlo_common.protocol import Wire, _wire
from nnlo_common.testing import MemoryCluster, RandomOrder, train_virtually
from nnlo_common.training._joining import within

PIECES = (330, 170)
WORKERS = 3


class Sender:
    """A worker's side for one server."""

    def __init__(self, size: int, momentum: float, *, nesterov: bool) -> None:
        self.m, self.nesterov, self.sent = momentum, nesterov, 0
        self.u, self.v = np.zeros(size), np.zeros(size)
        self.total = np.zeros(size)  # of all velocities

    def send(self, g: np.ndarray) -> np.ndarray:
        self.u = self.m * self.u + g
        velocity = g + self.m * self.u if self.nesterov else self.u
        self.total += velocity
        self.v = self.v + velocity
        part = 0.25 * 0.04 ** min(1.0, self.sent / 256)
        self.sent += 1
        largest = np.argsort(-np.abs(self.v), kind="stable")[: max(1, int(part * self.v.size))]
        message = np.zeros_like(self.v)
        message[largest] = self.v[largest]
        self.v[largest] = 0
        return message


class Recorded:
    """A training of the product, with what it computed and committed."""

    def __init__(
        self, rule: Algorithm, optimizer: SGD, *, servers: int = 1, steps: int = 40, **options: Any
    ) -> None:
        self.gradients: dict[int, list[np.ndarray]] = {}
        #: By server: contributions (worker, weight, staleness), rate, and the centre afterwards.
        self.commits: list[list[tuple[list[tuple[int, float, int]], float, np.ndarray]]] = []
        self._rules: list[Any] = []
        kind, recorded = type(rule), self

        class Recording(kind):  # type: ignore[misc,valid-type]
            def center(self, *given: Any) -> Any:
                made = super().center(*given)
                recorded._watch(made)
                return made

        # Ranks compare an algorithm by its class's name.
        Recording.__name__ = kind.__name__
        self.rates = options.pop("rates", None)
        draw, self.optimizer = np.random.default_rng(5), optimizer
        self.target = draw.standard_normal((9, sum(PIECES)))
        self.run = train_virtually(
            Recording(**{one.name: getattr(rule, one.name) for one in fields(rule)}),
            self._gradient,
            [draw.standard_normal(size).astype(np.float32) for size in PIECES],
            workers=WORKERS,
            servers=servers,
            steps=steps,
            optimizer=optimizer,
            schedule=options.pop("schedule", None) or RandomOrder(7),
            **options,
        )

    def _gradient(self, x: np.ndarray, rank: int) -> np.ndarray:
        mine = self.gradients.setdefault(rank, [])
        mine.append((x - self.target[(len(mine) + rank) % 9]).astype(np.float32))
        for rule in self._rules if self.rates else ():
            rule.optimizer.learning_rate = self.rates[len(mine) % len(self.rates)]
        return mine[-1]

    def _watch(self, rule: Any) -> None:
        commits: list[Any] = []
        self.commits.append(commits)
        self._rules.append(rule)
        commit = rule.commit

        def noted(contributions: Any) -> None:
            of = [(one.rank, one.weight, one.staleness) for one in contributions]
            commit(contributions)
            commits.append((of, rule.optimizer.learning_rate, rule.center.astype(np.float64)))

        rule.commit = noted
        rule.start = rule.center.astype(np.float64)

    def differences(self, every: int = 1, momentum: float | None = None) -> list[float]:
        """How far the product's centre is from the equations after each commit."""
        m = self.optimizer.momentum if momentum is None else momentum
        found, first = [], 0
        for rule, commits in zip(self._rules, self.commits, strict=True):
            size = rule.center.size
            senders = {rank: Sender(size, m, nesterov=self.optimizer.nesterov) for rank in self.gradients}
            c = rule.start
            for of, rate, center in commits:
                arrived = []
                for rank, weight, staleness in of:
                    at = senders[rank].sent * every
                    taken = self.gradients[rank][at : at + every]
                    g = np.sum(taken, axis=0, dtype=np.float64)[first : first + size]
                    message = senders[rank].send(self.share(g, len(taken)))
                    arrived.append((message / (staleness + 1 if self.stale else 1), weight))
                moved = sum(one * weight for one, weight in arrived) / sum(weight for _, weight in arrived)
                c = c - rate * (moved + self.decay * c)
                found.append(float(np.abs(center - c).max()))
            first += size
        return found

    decay = 0.0
    stale = False

    def share(self, total: np.ndarray, count: int) -> np.ndarray:
        """What a worker contributes of a sum of gradients."""
        return total / count if isinstance(self.run.workers[0].shard_clients[0].rule, AGNWorker) else total


AGNWorker = type(AGN(local_learning_rate=0.1).worker(1, 1))


def largest(recorded: Recorded, **options: Any) -> float:
    found = recorded.differences(**options)
    assert len(found) >= 30
    return max(found)


MOMENTUM = {"momentum": 0.9}
NESTEROV = {"momentum": 0.8, "nesterov": True}


@pytest.mark.parametrize("moved", [MOMENTUM, NESTEROV], ids=["plain", "nesterov"])
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(
    ("rule", "every"),
    [
        (Downpour(wire="topk"), 1),
        (Downpour(wire="topk", lag=2), 1),
        (Downpour(wire="topk", n_push=3, n_fetch=3, schedule="aligned"), 3),
        (AGN(wire="topk", every=2, local_learning_rate=0.01), 2),
        (DynSGD(wire="topk"), 1),
        (Synchronous(wire="topk"), 1),
    ],
    ids=lambda one: one.describe() if isinstance(one, Algorithm) else str(one),
)
def test_each_commit_is_that_of_the_equations(rule: Algorithm, every: int, servers: int, moved: Any) -> None:
    recorded = Recorded(rule, SGD(0.01, **moved), servers=servers, steps=42)
    recorded.stale = isinstance(rule, DynSGD)
    assert largest(recorded, every=every) < 2e-5


def test_a_learning_rate_counts_when_a_contribution_arrives() -> None:
    recorded = Recorded(Downpour(wire="topk"), SGD(0.01, momentum=0.9), rates=[0.02, 0.01, 0.005])
    assert len({rate for _, rate, _ in recorded.commits[0]}) == 3
    assert largest(recorded) < 2e-5


def test_samples_weigh_velocities() -> None:
    def weigh(worker: Any, step: int) -> None:
        worker.set_weight(float(1 + worker.rank + step % 2))

    recorded = Recorded(Synchronous(wire="topk"), SGD(0.01, momentum=0.9), observe=weigh)
    assert len({weight for of, _, _ in recorded.commits[0] for _, weight, _ in of}) > 2
    assert largest(recorded) < 2e-5


def test_a_weight_decay_counts_for_the_steps_that_it_would_have_had() -> None:
    recorded = Recorded(Downpour(wire="topk"), SGD(0.01, momentum=0.9, weight_decay=0.02))
    recorded.decay = 0.02 / (1 - 0.9)
    assert largest(recorded) < 2e-5


@pytest.mark.parametrize("moved", [MOMENTUM, NESTEROV], ids=["plain", "nesterov"])
def test_where_nothing_waits_it_is_sgd(moved: Any) -> None:
    slope = np.zeros(200, np.float32)
    slope[:40] = np.linspace(1, 2, 40)  # fewer than these messages have room for, so each is sent at once
    x, plain = np.zeros(200, np.float32), SGD(0.1, **moved)
    run = train_virtually(
        Downpour(wire="topk"),
        lambda x, rank: slope,
        x.copy(),
        workers=1,
        steps=15,
        optimizer=SGD(0.1, **moved),
    )
    for _ in range(15):
        plain.step(x, slope)
    np.testing.assert_allclose(run.center, x, rtol=1e-6)


# -- error feedback -------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=60)
@given(
    seed=st.integers(0, 999),
    size=st.integers(64, 900),
    momentum=st.floats(0.0625, 0.96875, width=32),
    nesterov=st.booleans(),
)
def test_all_velocities_arrive_but_for_the_residual(
    seed: int, size: int, momentum: float, nesterov: bool
) -> None:
    layout = FlatVector.of([np.zeros(size, "f4")]).layout
    rule = Downpour(wire="topk", topk_momentum=momentum, topk_nesterov=nesterov)
    wire = Wire(rule, layout, slice(0, size))
    worker, server, there = wire.end(serves=False), wire.end(serves=True), Frame(size)
    sender, applied = Sender(size, momentum, nesterov=nesterov), np.zeros(size)
    optimizer, x = SGD(1.0, momentum=momentum, nesterov=nesterov), np.zeros(size, np.float32)
    draw = np.random.default_rng(seed)
    for _ in range(12):
        g = draw.standard_normal(size).astype(np.float32)
        before = g.copy()
        came = server.unpack_in_place(worker.pack(g, there.vector), there).copy()
        np.testing.assert_array_equal(g, before)
        sender.send(g.astype(np.float64))
        applied += came
        np.testing.assert_allclose(applied + worker.up.residual, sender.total, rtol=0, atol=1e-4)
        assert not worker.up.residual[came != 0].any()
        optimizer.step(x, g)  # of all the steps of SGD nothing is lost
        np.testing.assert_allclose(-(applied + worker.up.residual), x, rtol=0, atol=2e-3)


def test_the_residual_and_the_velocity_are_part_of_a_checkpoint() -> None:
    common: dict[str, Any] = {"leave": False}
    rule, optimizer = Downpour(wire="topk", lag=1), SGD(0.01, momentum=0.9)

    def run(steps: Any, **options: Any) -> Any:
        def gradient(x: np.ndarray, rank: int) -> np.ndarray:
            return x - np.linspace(-1, 1, x.size) * (1 + rank / 8)

        start = [np.zeros(300, "f4")]
        return train_virtually(
            rule, gradient, start, workers=2, steps=steps, optimizer=optimizer, **common, **options
        )

    saved = run([[8], [8]]).state()
    wire = saved["workers"][0]["shard_clients"][0]["wire"]
    assert wire["up"]["velocity"].any()
    assert wire["up"]["residual"].any()
    whole, resumed = run([[8, 9], [8, 9]]), run([[9], [9]], resume=saved)
    np.testing.assert_array_equal(whole.center, resumed.center)
    wire["up"]["velocity"][:] = 0  # the check above can fail
    assert (run([[9], [9]], resume=saved).center != whole.center).any()


def test_a_state_of_another_momentum_is_refused() -> None:
    def run(optimizer: SGD, **options: Any) -> Any:
        return train_virtually(
            Downpour(wire="topk"),
            lambda x, rank: x,
            np.ones(100, "f4"),
            workers=1,
            steps=2,
            optimizer=optimizer,
            leave=False,
            **options,
        )

    with pytest.raises(ConfigurationError, match="resume with"):
        run(SGD(0.1), resume=run(SGD(0.1, momentum=0.9)).state())
    with pytest.raises(ConfigurationError, match="resume with"):
        run(SGD(0.1, momentum=0.9), resume=run(SGD(0.1)).state())


# -- where the momentum is ------------------------------------------------------------------------------


def test_only_sgd_with_topk_leaves_its_momentum() -> None:
    momentum = SGD(0.1, momentum=0.9)
    assert Downpour(wire="topk").with_momentum_of(momentum).topk_momentum == 0.9
    assert Downpour(wire="topk").with_momentum_of(SGD(0.1, **NESTEROV)).topk_nesterov
    for rule, optimizer in (
        (Downpour(wire="int8"), momentum),
        (Downpour(wire="topk"), Adam(0.1)),
        (Downpour(wire="topk"), SGD(0.1)),
        (Downpour(wire="topk"), None),
    ):
        assert rule.with_momentum_of(optimizer) == rule


def test_a_momentum_on_both_sides_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"the optimizer has momentum=0.9.*topk_momentum=0.0"):
        Downpour(wire="topk").at_center(SGD(0.1, momentum=0.9), 100)
    with pytest.raises(ConfigurationError, match=r"topk_momentum=0.9 with wire='int8' is not possible"):
        Downpour(wire="int8", topk_momentum=0.9)
    with pytest.raises(ConfigurationError, match=r"topk_momentum=1.0 is not possible"):
        Downpour(wire="topk", topk_momentum=1.0)


def test_a_short_part_of_the_centre_keeps_the_momentum_there() -> None:
    """The part of one of the servers is too short to be packed."""
    slope = np.linspace(1, 2, 640)

    def run(wire: str) -> np.ndarray:
        start = [np.zeros(600, "f4"), np.zeros(40, "f4")]
        rule, optimizer = Downpour(wire=wire), SGD(0.1, momentum=0.9)
        found = train_virtually(
            rule,
            lambda x, rank: slope[: x.size],
            start,
            workers=2,
            steps=5,
            servers=2,
            optimizer=optimizer,
        )
        return found.servers[1].rule.center

    assert run("topk").any()
    np.testing.assert_array_equal(run("topk"), run("float32"))


# -- the frameworks: a linear loss, whose gradients are its inputs ----------------------------------------

ROWS = np.random.default_rng(3).standard_normal((30, 120)).astype(np.float32)


def expected(rate: float, momentum: float, *, nesterov: bool = False, decay: float = 0.0) -> np.ndarray:
    """What a worker's steps with each row as gradient make of 0."""
    padded = np.pad(ROWS.astype(np.float64), ((0, 0), (0, 8)))  # a flat vector is whole cache lines
    sender, x = Sender(padded.shape[1], momentum, nesterov=nesterov), np.zeros(padded.shape[1])
    for row in padded:
        x = x - rate * (sender.send(row) + decay / (1 - momentum) * x)
    return x[: ROWS.shape[1]]


@pytest.mark.framework("torch")
@pytest.mark.parametrize(
    "options",
    [{"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.5, "weight_decay": 0.1}],
    ids=str,
)
def test_torch_s_sgd_leaves_its_momentum(options: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")
    import nnlo_torch as nt

    def program(world: Any) -> tuple[np.ndarray, Any]:
        model = torch.nn.Linear(ROWS.shape[1], 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, **options)
        optimizer = nt.Downpour(sgd, wire="topk", world=world)
        for row in optimizer.epoch(torch.from_numpy(ROWS) if world.rank else []):
            optimizer.zero_grad()
            model(row).sum().backward()
            optimizer.step()
        optimizer.close()
        assert sgd.param_groups[0]["momentum"] == options["momentum"]  # the user's own stays
        return model.weight.detach().numpy()[0].copy(), sgd.state_dict()["state"]

    with MemoryCluster(2) as cluster:
        (found, state), _ = cluster.run(program)
    decay = options.get("weight_decay", 0.0)
    wanted = expected(0.1, options["momentum"], nesterov="nesterov" in options, decay=decay)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert not any(one.get("momentum_buffer") is not None for one in state.values())  # nobody needs it


@pytest.mark.framework("torch")
def test_torch_s_options_that_workers_cannot_add_up_are_refused() -> None:
    torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")
    import nnlo_torch as nt

    one, other = (torch.nn.Parameter(torch.zeros(100)) for _ in range(2))
    groups = [{"params": [one], "momentum": 0.9}, {"params": [other], "momentum": 0.5}]
    for sgd, problem in (
        (torch.optim.SGD(groups, lr=0.1), r"momenta \[0.5, 0.9\]"),
        (torch.optim.SGD([one], lr=0.1, momentum=0.9, dampening=0.1), "dampening"),
    ):
        with pytest.raises(
            ConfigurationError, match=f"Downpour with wire='topk' cannot have SGD with {problem}"
        ):
            nt.Downpour(sgd, wire="topk")
        nt.Downpour(sgd, wire="int8")


@pytest.mark.framework("torch")
def test_a_momentum_that_a_schedule_changes_is_refused() -> None:
    torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")
    import nnlo_torch as nt

    def program(world: Any) -> None:
        model = torch.nn.Linear(100, 1)
        optimizer = nt.Downpour(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), wire="topk", world=world
        )
        for row in optimizer.epoch(torch.ones(3, 100) if world.rank else []):
            optimizer.param_groups[0]["momentum"] = 0.8
            model(row).sum().backward()
            optimizer.step()
        optimizer.close()

    with MemoryCluster(2) as cluster, pytest.raises(ConfigurationError, match=r"momentum=0.8 was set during"):
        cluster.run(program)


@pytest.mark.framework("keras")
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("nesterov", [False, True])
def test_keras_s_sgd_leaves_its_momentum(nesterov: bool) -> None:
    keras = pytest.importorskip("keras", reason="the environment for MPICH has no frameworks")
    import nnlo_keras as nk

    def program(world: Any) -> np.ndarray:
        with within(world):
            dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
            model = keras.Sequential([keras.Input((ROWS.shape[1],)), dense])
            sgd = keras.optimizers.SGD(0.1, momentum=0.9, nesterov=nesterov)
            jit = keras.backend.backend() == "jax"
            model.compile(nk.Downpour(sgd, wire="topk"), lambda y, found: found[:, 0], jit_compile=jit)
            callbacks = [nk.Distribute(world=world)]
            model.fit(ROWS, np.zeros(len(ROWS)), batch_size=1, shuffle=False, verbose=0, callbacks=callbacks)
            assert sgd.momentum == 0.9  # the user's own stays
            return np.array(model.get_weights()[0])[:, 0]

    with MemoryCluster(2) as cluster:
        found, _ = cluster.run(program)
    np.testing.assert_allclose(found, expected(0.1, 0.9, nesterov=nesterov), atol=1e-5)


@pytest.mark.framework("keras")
@pytest.mark.parametrize("name", ["clipnorm", "clipvalue", "global_clipnorm"])
def test_keras_s_clipping_of_what_workers_add_up_is_refused(name: str) -> None:
    keras = pytest.importorskip("keras", reason="the environment for MPICH has no frameworks")
    import nnlo_keras as nk

    clipping = {name: 1.0}
    with pytest.raises(ConfigurationError, match=f"cannot wrap SGD with a momentum and {name}=1.0"):
        nk.Downpour(keras.optimizers.SGD(0.1, momentum=0.9, **clipping), wire="topk")
    nk.Downpour(keras.optimizers.SGD(0.1, **clipping), wire="topk")


# -- mutations ------------------------------------------------------------------------------------------


def test_a_velocity_that_is_cleared_where_it_is_sent_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = _wire._MomentumStream._pack

    def masked(stream: Any, value: Any, body: Any) -> int:
        used = pack(stream, value, body)
        stream.velocity[stream.residual == 0] = 0
        return used

    monkeypatch.setattr(_wire._MomentumStream, "_pack", masked)
    assert largest(Recorded(Downpour(wire="topk"), SGD(0.01, momentum=0.9))) > 1e-2


def test_a_velocity_that_does_not_forget_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = _wire._MomentumStream.__init__

    def forever(stream: Any, momentum: float, *given: Any, **options: Any) -> None:
        begin(stream, 0.95, *given, **options)

    monkeypatch.setattr(_wire._MomentumStream, "__init__", forever)
    assert largest(Recorded(Downpour(wire="topk"), SGD(0.01, momentum=0.9))) > 1e-2


def test_velocities_on_both_sides_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SGD, "leave_momentum", lambda optimizer: None)
    assert largest(Recorded(Downpour(wire="topk"), SGD(0.01, momentum=0.9))) > 1e-2


def test_a_plain_velocity_is_not_nesterov_s() -> None:
    recorded = Recorded(Downpour(wire="topk"), SGD(0.01, **NESTEROV))
    recorded.optimizer = replace(recorded.optimizer, nesterov=False)
    assert largest(recorded) > 1e-3
