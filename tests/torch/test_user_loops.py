"""What PyTorch's users do around an optimizer works unchanged: alone, and with a server and workers."""

from __future__ import annotations

import copy
import functools
import shutil
import sysconfig
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nnlo_common.testing import MemoryCluster

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")
import nnlo_torch as nt  # noqa: E402
from tests.helpers import torch_cases as cases  # noqa: E402
from tests.helpers.torch_cases import same, values  # noqa: E402

pytestmark = [
    pytest.mark.framework("torch"),
    # PyTorch 2.4 itself, where activations are computed again.
    pytest.mark.filterwarnings("ignore:.*torch.cpu.amp.autocast:FutureWarning"),
    pytest.mark.sampled(2),
]

BATCHES, EPOCHS, BATCH = 10, 2, 6
X, Y = cases.data()


def batch(index):
    part = slice(BATCH * index, BATCH * index + BATCH)
    return X[part], Y[part]


def momentum_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def adamw_of(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def fused_of(model):
    return torch.optim.Adam(model.parameters(), lr=0.01, fused=True)


# -- models -------------------------------------------------------------------------------------------


def tied():
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 5), torch.nn.Tanh(), torch.nn.Linear(5, 5), torch.nn.Linear(5, 3)
    )
    cases.initialised(model)
    model[2].weight = model[0].weight
    return model


def frozen():
    model = cases.model_of()
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


class Branches(torch.nn.Module):
    """Each part but the trunk is used for some batches only, and one never."""

    def __init__(self):
        super().__init__()
        self.trunk = torch.nn.Linear(5, 8)
        self.even = torch.nn.Linear(8, 3)
        self.odd = torch.nn.Linear(8, 3, bias=False)
        self.never = torch.nn.Linear(2, 2)
        self.calls = 0
        cases.initialised(self)

    def forward(self, x):
        self.calls += 1
        return (self.odd if self.calls % 3 else self.even)(torch.tanh(self.trunk(x)))


def channels_last():
    model = torch.nn.Sequential(
        torch.nn.Unflatten(1, (5, 1, 1)), torch.nn.Conv2d(5, 4, 3, padding=1), torch.nn.Flatten()
    )
    cases.initialised(model)
    return torch.nn.Sequential(model, cases.initialised(torch.nn.Linear(4, 3))).to(
        memory_format=torch.channels_last
    )


class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = torch.nn.LSTM(1, 6, batch_first=True)
        self.head = torch.nn.Linear(6, 3)
        cases.initialised(self)

    def forward(self, x):
        return self.head(self.cells(x[:, :, None])[0][:, -1])


def weight_normed():
    model = cases.model_of()
    torch.nn.utils.parametrizations.weight_norm(model[0])
    return model


def normalised():
    return cases.initialised(
        torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
    )


# -- loops: each gets a model, an optimizer and the numbers of its batches, and returns what it has seen -----


def ordinary(model, optimizer, sampler):
    seen = []
    for _ in range(EPOCHS):
        for index in sampler:
            optimizer.zero_grad()
            loss = cases.loss_of(model, *batch(index))
            loss.backward()
            optimizer.step()
            seen.append((loss.item(), [None if p.grad is None else p.grad.sum() for p in model.parameters()]))
    return seen


def autocast(model, optimizer, sampler):
    seen = []
    for _ in range(EPOCHS):
        for index in sampler:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                outputs = model(batch(index)[0])
                loss = torch.nn.functional.cross_entropy(outputs, batch(index)[1])
            assert outputs.dtype is torch.bfloat16
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
    return seen


def scaled(model, optimizer, sampler, *, overflow=(), clip=False, cast=True):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
    seen, step = [], 0
    for _ in range(EPOCHS):
        for index in sampler:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
                loss = torch.nn.functional.cross_entropy(model(batch(index)[0]), batch(index)[1])
            scaler.scale(loss * torch.inf if step in overflow else loss).backward()
            if clip:
                scaler.unscale_(optimizer)
                length = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                seen.append(length.nan_to_num(-1.0))
            before = values(model)
            scaler.step(optimizer)
            assert (step not in overflow) or same(before, values(model))
            scaler.update()
            seen.append(scaler.get_scale())
            step += 1
    # A server's scaler has seen nothing. A worker's has shrunk once per overflow; by how often it has
    # grown is compared with the plain loop.
    assert step == 0 or len(set(seen)) > 1
    return seen


def clipped(model, optimizer, sampler, *, clip):
    seen = []
    for _ in range(EPOCHS):
        for index in sampler:
            optimizer.zero_grad()
            cases.loss_of(model, *batch(index)).backward()
            seen.append(clip(model.parameters()))
            optimizer.step()
    return seen


def accumulated(model, optimizer, sampler):
    for _ in range(EPOCHS):
        for index in sampler:
            optimizer.zero_grad()
            for x, y in zip(*(part.split(2) for part in batch(index)), strict=True):
                (cases.loss_of(model, x, y) / 3).backward()
            optimizer.step()


def stepped_every_other_batch(model, optimizer, sampler):
    """Micro-batches from the loader itself: a step after every other."""
    for _ in range(EPOCHS):
        for turn, index in enumerate(sampler):
            (cases.loss_of(model, *batch(index)) / 2).backward()
            if turn % 2:
                optimizer.step()
                optimizer.zero_grad()


def zeroed(model, optimizer, sampler, *, zero):
    for _ in range(EPOCHS):
        for index in sampler:
            zero(model, optimizer)
            cases.loss_of(model, *batch(index)).backward()
            optimizer.step()


def by_hand(model, optimizer, sampler):
    """Gradients that no backward pass has put there."""
    params = list(model.parameters())
    for _ in range(EPOCHS):
        for index in sampler:
            loss = cases.loss_of(model, *batch(index))
            for param, gradient in zip(params, torch.autograd.grad(loss, params), strict=True):
                param.grad = gradient
            optimizer.step()


def changed_in_place(model, optimizer, sampler):
    for _ in range(EPOCHS):
        for index in sampler:
            optimizer.zero_grad()
            cases.loss_of(model, *batch(index)).backward()
            for param in model.parameters():
                param.grad.add_(0.01 * param.detach()).mul_(0.9)
            optimizer.step()


def stepped_twice(model, optimizer, sampler):
    """Two steps with one gradient."""
    for _ in range(EPOCHS):
        for index in sampler:
            optimizer.zero_grad()
            cases.loss_of(model, *batch(index)).backward()
            optimizer.step()
            optimizer.step()


def penalised(model, optimizer, sampler):
    """A gradient of a gradient."""
    params = list(model.parameters())
    for _ in range(EPOCHS):
        for index in sampler:
            optimizer.zero_grad()
            loss = cases.loss_of(model, *batch(index))
            slopes = torch.autograd.grad(loss, params, create_graph=True)
            (loss + 0.1 * sum(slope.square().sum() for slope in slopes)).backward()
            optimizer.step()


def recomputed(model, optimizer, sampler):
    """Activations that are computed again in the backward pass."""
    for _ in range(EPOCHS):
        for index in sampler:
            optimizer.zero_grad()
            x, y = batch(index)
            hidden = torch.utils.checkpoint.checkpoint(model[:2], x, use_reentrant=False)
            torch.nn.functional.cross_entropy(model[2](hidden), y).backward()
            optimizer.step()


def hooked_gradients(model, optimizer, sampler):
    def clamp(param):
        param.grad.clamp_(-0.05, 0.05)

    handles = [param.register_hook(lambda gradient: gradient * 0.5) for param in model.parameters()]
    handles += [param.register_post_accumulate_grad_hook(clamp) for param in model.parameters()]
    try:
        return ordinary(model, optimizer, sampler)
    finally:
        for handle in handles:
            handle.remove()


def thawed(model, optimizer, sampler):
    """The first epoch with frozen parameters, the second with all."""
    for epoch in range(EPOCHS):
        if epoch:
            model.requires_grad_(True)
        for index in sampler:
            optimizer.zero_grad()
            cases.loss_of(model, *batch(index)).backward()
            optimizer.step()


def frozen_later(model, optimizer, sampler):
    """The first epoch with all parameters, the second with some frozen."""
    for epoch in range(EPOCHS):
        if epoch:
            model[0].requires_grad_(False)
            optimizer.zero_grad()
        for index in sampler:
            optimizer.zero_grad()
            cases.loss_of(model, *batch(index)).backward()
            optimizer.step()


def averaged(model, optimizer, sampler):
    """A running mean of the parameters, in a copy of the model."""
    decay = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    mean = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=decay)
    for _ in range(EPOCHS):
        for index in sampler:
            optimizer.zero_grad()
            cases.loss_of(model, *batch(index)).backward()
            optimizer.step()
            mean.update_parameters(model)
    return values(mean)


def model_copied(model, optimizer, sampler):
    """Copies of the model, trained on their own in the middle of the training."""
    seen = []
    for _ in range(EPOCHS):
        for index in sampler:
            optimizer.zero_grad()
            cases.loss_of(model, *batch(index)).backward()
            twin = copy.deepcopy(model)
            aside = torch.optim.SGD(twin.parameters(), lr=1.0)
            cases.loss_of(twin, *batch(index)).backward()
            aside.step()
            optimizer.step()
            seen.append(values(twin))
        copy.deepcopy(model).load_state_dict(model.state_dict())
    return seen


def optimizer_copied(model, optimizer, sampler):
    """Copies of model and optimizer, trained on their own in the middle of the training."""
    seen = []
    for _ in range(EPOCHS):
        for index in sampler:
            optimizer.zero_grad()
            cases.loss_of(model, *batch(index)).backward()
            optimizer.step()
            twin, aside = copy.deepcopy((model, optimizer))
            for _ in range(2):
                aside.zero_grad()
                cases.loss_of(twin, *batch(index)).backward()
                aside.step()
            seen.append([torch.equal(*pair) for pair in zip(values(model), values(twin), strict=True)])
    twin, aside = copy.deepcopy((model, optimizer))  # on a server, too
    cases.loss_of(twin, *batch(0)).backward()
    aside.step()
    assert not any(any(equal) for equal in seen)
    return seen


def scheduled(model, optimizer, sampler, *, make, measure=False):
    scheduler = make(optimizer)
    seen = []
    for _ in range(EPOCHS):
        for index in sampler:
            optimizer.zero_grad()
            loss = cases.loss_of(model, *batch(index))
            loss.backward()
            optimizer.step()
            scheduler.step(*([loss.item()] if measure else []))
            seen.append([group["lr"] for group in optimizer.param_groups])
    return seen


def warmed_up_by_hand(model, optimizer, sampler):
    step = 0
    for _ in range(EPOCHS):
        for index in sampler:
            step += 1
            for group in optimizer.param_groups:
                group["lr"] = 0.05 * min(1.0, step / 12)
            optimizer.zero_grad()
            cases.loss_of(model, *batch(index)).backward()
            optimizer.step()


def one_cycle(optimizer):
    steps = EPOCHS * BATCHES
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=steps + 1)


def cycle(optimizer):
    return torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.2, step_size_up=3)


def warm_up(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 12))


def plateau(optimizer):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.7)


# -- the table ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A training."""

    loop: Callable[..., Any] = ordinary
    model: Callable[[], Any] = cases.model_of
    optimizer: Callable[[Any], Any] = momentum_of


PARAMETERS_IN_GROUPS = {
    "two groups": lambda model: torch.optim.AdamW(
        [
            {"params": model[0].parameters(), "lr": 0.02, "weight_decay": 0.3},
            {"params": model[2].parameters(), "betas": (0.8, 0.9)},
        ],
        lr=0.005,
    ),
    "no decay of biases": lambda model: torch.optim.SGD(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.2},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0, "lr": 0.2},
        ],
        lr=0.05,
        momentum=0.9,
    ),
    "only a part of the model": lambda model: torch.optim.Adam(model[2].parameters(), lr=0.02),
}
norm = functools.partial(torch.nn.utils.clip_grad_norm_, max_norm=0.2)

FEATURES = {
    "an ordinary loop": Feature(),
    "autocast": Feature(loop=autocast),
    "autocast, AdamW": Feature(loop=autocast, optimizer=adamw_of),
    "a scaler": Feature(loop=scaled),
    "a scaler without autocast": Feature(loop=functools.partial(scaled, cast=False)),
    "a scaler that skips steps": Feature(loop=functools.partial(scaled, overflow=(0, 5, 6, 13))),
    "a scaler that skips steps, Adam": Feature(
        loop=functools.partial(scaled, overflow=(1, 3)), optimizer=adamw_of
    ),
    "a scaler, clipping": Feature(loop=functools.partial(scaled, clip=True, overflow=(4,))),
    "a scaler, fused Adam": Feature(loop=functools.partial(scaled, overflow=(4,)), optimizer=fused_of),
    "clipping by norm": Feature(loop=functools.partial(clipped, clip=norm)),
    "clipping by norm, one by one": Feature(
        loop=functools.partial(clipped, clip=functools.partial(norm, foreach=False)), optimizer=adamw_of
    ),
    "clipping by greatest value": Feature(
        loop=functools.partial(clipped, clip=functools.partial(norm, norm_type=float("inf")))
    ),
    "clipping by value": Feature(
        loop=functools.partial(clipped, clip=lambda p: torch.nn.utils.clip_grad_value_(p, 0.03))
    ),
    "accumulation within a step": Feature(loop=accumulated),
    "accumulation over batches": Feature(loop=stepped_every_other_batch),
    "zero_grad to None": Feature(loop=functools.partial(zeroed, zero=lambda m, o: o.zero_grad())),
    "zero_grad to zeros": Feature(
        loop=functools.partial(zeroed, zero=lambda m, o: o.zero_grad(set_to_none=False))
    ),
    "zero_grad of the model": Feature(loop=functools.partial(zeroed, zero=lambda m, o: m.zero_grad())),
    "zero_grad of the model to zeros": Feature(
        loop=functools.partial(zeroed, zero=lambda m, o: m.zero_grad(set_to_none=False))
    ),
    "gradients that are never zeroed": Feature(
        loop=functools.partial(zeroed, zero=lambda m, o: None),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    ),
    "gradients by hand": Feature(loop=by_hand),
    "gradients changed in place": Feature(loop=changed_in_place),
    "two steps with one gradient": Feature(loop=stepped_twice),
    "a gradient penalty": Feature(loop=penalised),
    "activations computed again": Feature(loop=recomputed),
    "hooks of gradients": Feature(loop=hooked_gradients),
    "frozen parameters": Feature(model=frozen),
    "frozen parameters, AdamW": Feature(model=frozen, optimizer=adamw_of),
    "parameters frozen later": Feature(loop=frozen_later),
    "parameters thawed later": Feature(loop=thawed, model=frozen),
    "tied parameters": Feature(model=tied),
    "tied parameters, AdamW": Feature(model=tied, optimizer=adamw_of),
    "unused parameters": Feature(model=Branches),
    "unused parameters, AdamW": Feature(model=Branches, optimizer=adamw_of),
    "unused parameters, zero_grad of the model": Feature(
        model=Branches,
        loop=functools.partial(zeroed, zero=lambda m, o: m.zero_grad()),
    ),
    "unused parameters, zero_grad to zeros": Feature(
        model=Branches,
        loop=functools.partial(zeroed, zero=lambda m, o: o.zero_grad(set_to_none=False)),
    ),
    "unused parameters, clipping": Feature(model=Branches, loop=functools.partial(clipped, clip=norm)),
    "unused parameters, a scaler": Feature(model=Branches, loop=functools.partial(scaled, overflow=(4,))),
    "channels last": Feature(model=channels_last),
    "an LSTM": Feature(model=Recurrent, optimizer=adamw_of),
    "weight norm": Feature(model=weight_normed),
    "batch norm": Feature(model=normalised),
    "a running mean of the model": Feature(loop=averaged),
    "copies of the model": Feature(loop=model_copied),
    "copies of the optimizer": Feature(loop=optimizer_copied),
    "copies of the optimizer, AdamW": Feature(
        loop=optimizer_copied,
        optimizer=adamw_of,
    ),
    **{name: Feature(optimizer=make) for name, make in PARAMETERS_IN_GROUPS.items()},
    "a rate per batch: OneCycleLR": Feature(loop=functools.partial(scheduled, make=one_cycle)),
    "a rate per batch: OneCycleLR, AdamW": Feature(
        loop=functools.partial(scheduled, make=one_cycle), optimizer=adamw_of
    ),
    "a rate per batch: CyclicLR": Feature(loop=functools.partial(scheduled, make=cycle)),
    "a rate per batch: LambdaLR": Feature(loop=functools.partial(scheduled, make=warm_up)),
    "a rate per batch: LambdaLR, two groups": Feature(
        loop=functools.partial(scheduled, make=warm_up),
        optimizer=PARAMETERS_IN_GROUPS["two groups"],
    ),
    "a rate per batch: ReduceLROnPlateau": Feature(
        loop=functools.partial(scheduled, make=plateau, measure=True)
    ),
    "a rate per batch: by hand": Feature(loop=warmed_up_by_hand),
}


def every():
    """The features, by name."""
    return [pytest.param(feature, id=name) for name, feature in FEATURES.items()]


def plain(feature):
    model = feature.model()
    optimizer = feature.optimizer(model)
    seen = feature.loop(model, optimizer, range(BATCHES))
    return values(model), seen, optimizer.state_dict()


def on_ranks(size, feature, wrap=nt.Downpour):
    """The parameters, what the loop has seen, and the optimizer's state, on each rank."""

    def program(world):
        model = feature.model()
        optimizer = wrap(feature.optimizer(model), world=world)
        seen = feature.loop(
            model, optimizer, nt.ShardSampler(range(BATCHES), shuffle=False, optimizer=optimizer)
        )
        optimizer.close()
        return values(model), seen, optimizer.state_dict()

    with MemoryCluster(size) as cluster:
        return cluster.run(program, timeout_s=20)


@pytest.mark.parametrize("feature", every())
def test_alone_it_is_the_plain_loop(feature):
    model = feature.model()
    optimizer = nt.Downpour(feature.optimizer(model))
    sampler = nt.ShardSampler(range(BATCHES), shuffle=False, optimizer=optimizer)
    seen = feature.loop(model, optimizer, sampler)
    assert same((values(model), seen, optimizer.state_dict()), plain(feature))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("feature", every())
def test_with_one_worker_centre_and_worker_have_the_bits_of_the_plain_loop(feature):
    (center, _, state), (own, seen, _) = on_ranks(2, feature)
    want, want_seen, want_state = plain(feature)
    assert same(center, want)
    assert same(own, want)
    assert same(seen, want_seen)
    assert same(state["state"], want_state["state"])  # a rate set after the last step need not be known


@pytest.mark.sampled(6)
@pytest.mark.parametrize("feature", every())
def test_an_optimizer_on_a_worker_has_the_bits_of_the_plain_loop(feature):
    *_, got = on_ranks(2, feature, functools.partial(nt.EASGD, every=1000))
    assert same(got, plain(feature))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("feature", every())
def test_two_workers_train(feature):
    model = feature.model()
    before = cases.loss_of(model, X, Y)
    center, *workers = on_ranks(3, feature)
    torch.nn.utils.vector_to_parameters(torch.cat([v.flatten() for v in center[0]]), model.parameters())
    assert cases.loss_of(model, X, Y) < before - 0.005
    assert len(workers) == 2


# -- compiled models ----------------------------------------------------------------------------------

# Ranks are threads of one process here. That torch.compile can trace, and autograd build compiled graphs, in
# several threads at once is promised nowhere, so only one rank at a time goes through a model.
ONE_AT_A_TIME = threading.RLock()
HEADERS = Path(sysconfig.get_path("include"), "Python.h")
INDUCTOR = pytest.mark.skipif(
    shutil.which("c++") is None or not HEADERS.exists(), reason="inductor needs a C++ compiler and Python.h"
)
KINDS = {
    "compiled after wrapping": lambda model, backend: torch.compile(model, backend=backend),
    "compiled in place": lambda model, backend: model.compile(backend=backend) or model,
    "compiled with dynamic shapes": lambda model, backend: torch.compile(
        model, backend=backend, dynamic=True
    ),
}


def compiled(model, optimizer, sampler, *, kind, backend):
    fast, seen = KINDS[kind](model, backend), []
    for epoch in range(EPOCHS):
        for index in sampler:
            optimizer.zero_grad()
            x, y = (part[: BATCH - epoch] for part in batch(index))  # another shape in each epoch
            with ONE_AT_A_TIME:
                loss = cases.loss_of(fast, x, y)
                loss.backward()
            optimizer.step()
            seen.append(loss.item())
    return seen


def compiled_before(model, optimizer, sampler, *, backend):
    """Compiled and run before it was wrapped."""
    seen = []
    for _ in range(EPOCHS):
        for index in sampler:
            optimizer.zero_grad()
            with ONE_AT_A_TIME:
                loss = cases.loss_of(model, *batch(index))
                loss.backward()
            optimizer.step()
            seen.append(loss.item())
    return seen


def ready_compiled(backend):
    model = cases.model_of()
    with ONE_AT_A_TIME:
        model.compile(backend=backend)
        cases.loss_of(model, *batch(0)).backward()
        model.zero_grad()
    return model


def compiled_feature(kind, backend):
    if kind == "compiled before wrapping":
        return Feature(
            model=functools.partial(ready_compiled, backend),
            loop=functools.partial(compiled_before, backend=backend),
        )
    return Feature(loop=functools.partial(compiled, kind=kind, backend=backend))


@pytest.fixture
def _forget_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    from torch._inductor import config

    torch._dynamo.reset()
    with config.patch(compile_threads=1):  # no pool of processes that outlives the test
        yield
    torch._dynamo.reset()


@pytest.mark.slow
# What torch itself does when inductor is imported.
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.usefixtures("_forget_compiled")
@pytest.mark.parametrize(
    ("kind", "backend"),
    [(kind, "aot_eager") for kind in (*KINDS, "compiled before wrapping")]
    + [pytest.param("compiled after wrapping", "inductor", marks=[INDUCTOR, pytest.mark.extended])],
)
def test_compiled_models_train_as_in_the_plain_loop(kind, backend):
    feature = compiled_feature(kind, backend)
    test_alone_it_is_the_plain_loop(feature)
    test_with_one_worker_centre_and_worker_have_the_bits_of_the_plain_loop(feature)
    test_an_optimizer_on_a_worker_has_the_bits_of_the_plain_loop(feature)
    test_two_workers_train(feature)


# -- 16-bit models ------------------------------------------------------------------------------------

HALVES = [torch.bfloat16, torch.float16]


def half_adamw_of(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)  # the usual eps is zero in float16


def half_loss(model, index):
    x, y = batch(index)
    return torch.nn.functional.cross_entropy(model(x.to(next(model.parameters()).dtype)).float(), y)


def half_loop(model, optimizer, sampler):
    for _ in range(EPOCHS):
        for index in sampler:
            optimizer.zero_grad()
            half_loss(model, index).backward()
            optimizer.step()


def with_float32_masters(model, make):
    """What a 16-bit model is trained as in a training of several ranks."""
    masters = copy.deepcopy(model).float()
    optimizer = make(masters)
    for _ in range(EPOCHS):
        for index in range(BATCHES):
            model.zero_grad()
            half_loss(model, index).backward()
            for master, param in zip(masters.parameters(), model.parameters(), strict=True):
                master.grad = None if param.grad is None else param.grad.float()
            optimizer.step()
            with torch.no_grad():
                for master, param in zip(masters.parameters(), model.parameters(), strict=True):
                    param.copy_(master)
    return optimizer


@pytest.mark.parametrize("make", [momentum_of, half_adamw_of])
@pytest.mark.parametrize("dtype", HALVES)
def test_alone_a_16_bit_model_trains_as_in_the_plain_loop(dtype, make):
    models = [cases.model_of().to(dtype) for _ in range(2)]
    half_loop(models[0], make(models[0]), range(BATCHES))
    optimizer = nt.Downpour(make(models[1]))
    half_loop(models[1], optimizer, nt.ShardSampler(range(BATCHES), shuffle=False, optimizer=optimizer))
    assert same(values(models[0]), values(models[1]))


@pytest.mark.parametrize("make", [momentum_of, half_adamw_of])
@pytest.mark.parametrize("dtype", HALVES)
def test_with_one_worker_a_16_bit_model_has_the_bits_of_a_loop_with_float32_masters(dtype, make):
    model = cases.model_of().to(dtype)
    optimizer = with_float32_masters(model, make)
    half = Feature(model=lambda: cases.model_of().to(dtype), loop=half_loop, optimizer=make)
    (center, _, state), (own, *_) = on_ranks(2, half)
    assert same(center, values(model))
    assert same(own, values(model))
    assert same(state, optimizer.state_dict())


@pytest.mark.parametrize("wrapper", ["Downpour", "EASGD", "Synchronous"])
@pytest.mark.parametrize("dtype", HALVES)
def test_two_workers_train_a_16_bit_model(dtype, wrapper):
    half = Feature(model=lambda: cases.model_of().to(dtype), loop=half_loop)
    (center, *_), *_ = on_ranks(3, half, getattr(nt, wrapper))
    model = cases.model_of()
    before = cases.loss_of(model, X, Y)
    torch.nn.utils.vector_to_parameters(torch.cat([v.float().flatten() for v in center]), model.parameters())
    assert {value.dtype for value in center} == {dtype}
    assert cases.loss_of(model, X, Y) < before - 0.005


# -- saved and loaded ---------------------------------------------------------------------------------


def saved(dtype):
    """Model and optimizer after a plain training, as they are saved."""
    model = cases.model_of()
    optimizer = adamw_of(model)
    ordinary(model, optimizer, range(BATCHES))
    return copy.deepcopy((model.to(dtype).state_dict(), optimizer.state_dict()))


@pytest.mark.parametrize(
    ("when", "dtype", "size"),
    [
        ("before wrapping", torch.float32, 1),
        ("before wrapping", torch.float32, 2),
        ("before wrapping", torch.bfloat16, 1),
        pytest.param("before wrapping", torch.bfloat16, 2),
        ("after wrapping", torch.float32, 1),
        ("after wrapping", torch.float32, 2),
        ("after wrapping", torch.bfloat16, 1),
        pytest.param("after wrapping", torch.bfloat16, 2),
    ],
)
def test_a_training_goes_on_from_what_all_ranks_load(when, dtype, size):
    states = saved(dtype)

    def load(model, optimizer):
        model.load_state_dict(states[0])
        optimizer.load_state_dict(copy.deepcopy(states[1]))

    def program(world):
        model = cases.model_of().to(dtype)
        inner = adamw_of(model)
        if when == "before wrapping":
            load(model, inner)
        optimizer = nt.Downpour(inner, world=world)
        if when == "after wrapping":
            load(model, optimizer)
        half_loop(model, optimizer, nt.ShardSampler(range(BATCHES), shuffle=False, optimizer=optimizer))
        optimizer.close()
        return values(model), optimizer.state_dict()

    model = cases.model_of().to(dtype)
    if dtype is torch.float32 or size == 1:
        optimizer = adamw_of(model)
        load(model, optimizer)
        half_loop(model, optimizer, range(BATCHES))
    else:

        def make(masters):
            optimizer = adamw_of(masters)
            optimizer.load_state_dict(copy.deepcopy(rounded if when == "before wrapping" else states[1]))
            return optimizer

        first = adamw_of(model)
        load(model, first)
        rounded = first.state_dict()  # to the type of the parameters, as plain optimizers do when they load
        optimizer = with_float32_masters(model, make)
    if size == 1:
        results = [program(None)]
    else:
        with MemoryCluster(size) as cluster:
            results = cluster.run(program, timeout_s=20)
    assert all(same(result[0], values(model)) for result in results)
    assert same(results[0][1], optimizer.state_dict())


@pytest.mark.parametrize("make", [momentum_of, adamw_of])
@pytest.mark.parametrize("wrapper", ["Downpour", "EASGD"])
def test_what_is_saved_after_a_training_goes_on_in_a_plain_loop(wrapper, make):
    """Of the server where the optimizer runs there, of a worker else."""
    feature = Feature(optimizer=make)
    wrap = nt.Downpour if wrapper == "Downpour" else functools.partial(nt.EASGD, every=1000)
    params, _, state = on_ranks(2, feature, wrap)[0 if wrapper == "Downpour" else 1]
    model = cases.model_of()
    torch.nn.utils.vector_to_parameters(torch.cat([value.flatten() for value in params]), model.parameters())
    optimizer = make(model)
    optimizer.load_state_dict(copy.deepcopy(state))
    ordinary(model, optimizer, range(BATCHES))
    reference = cases.model_of()
    uninterrupted = make(reference)
    for _ in range(2):
        ordinary(reference, uninterrupted, range(BATCHES))
    assert same(values(model), values(reference))


def test_a_saved_model_is_a_copy_without_the_flat_vector():
    """Else each tensor would be saved with the memory of all."""

    def program(world):
        model = cases.model_of()
        optimizer = nt.Downpour(momentum_of(model), world=world)
        for index in nt.ShardSampler(range(BATCHES), optimizer=optimizer):
            cases.loss_of(model, *batch(index)).backward()
            optimizer.step()
        optimizer.close()
        twin = copy.deepcopy(model)
        assert {param.untyped_storage().nbytes() for param in twin.parameters()} == {
            4 * param.numel() for param in twin.parameters()
        }
        assert not {p.data_ptr() for p in twin.parameters()} & {p.data_ptr() for p in model.parameters()}

    with MemoryCluster(2) as cluster:
        cluster.run(program, timeout_s=20)


# -- gradients and skipped steps ----------------------------------------------------------------------


@pytest.mark.parametrize("wrapper", ["Downpour", "EASGD"])
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("size", [1, 2])
def test_zero_grad_leaves_the_gradients_that_the_plain_optimizer_leaves(size, to_none, wrapper):
    def gradients(model, optimizer, sampler):
        seen = [[param.grad for param in model.parameters()]]
        for index in sampler:
            cases.loss_of(model, *batch(index)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
            seen.append([None if param.grad is None else param.grad.clone() for param in model.parameters()])
        return seen

    feature = Feature(model=Branches, loop=gradients)
    wrap = getattr(nt, wrapper)
    if size == 1:
        model = Branches()
        optimizer = wrap(momentum_of(model))
        seen = gradients(model, optimizer, nt.ShardSampler(range(BATCHES), optimizer=optimizer))
    else:
        seen = on_ranks(2, feature, wrap)[1][1]
    assert same(seen, plain(feature)[1])


@pytest.mark.parametrize("wrapper", ["Downpour", "Synchronous", "EASGD", "LocalSGD"])
def test_steps_that_one_of_two_workers_skips_hold_up_nobody(wrapper):
    def skipping(model, optimizer, sampler):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for _ in range(EPOCHS):
            for index in sampler:
                optimizer.zero_grad()
                loss = cases.loss_of(model, *batch(index))
                scaler.scale(loss * torch.inf if index in (2, 4) else loss).backward()  # worker 0's
                scaler.step(optimizer)
                scaler.update()
        return scaler.get_scale()

    feature = Feature(loop=skipping)
    wrap = getattr(nt, wrapper)
    options = {"every": 2} if wrapper in ("EASGD", "LocalSGD") else {}
    center, first, second = on_ranks(3, feature, functools.partial(wrap, **options))
    assert (first[1], second[1]) == (2.0**6, 2.0**10)
    assert all(value.isfinite().all() for value in center[0])


# -- batch norm's running statistics ------------------------------------------------------------------


def statistics(model):
    return [model[1].running_mean.clone(), model[1].running_var.clone()]


def normalising(model, optimizer, sampler):
    """The running statistics after each epoch, as this rank has them; a server's are the centre's."""
    seen = []
    for _ in range(EPOCHS):
        mine = []
        for index in sampler:
            optimizer.zero_grad()
            cases.loss_of(model, *batch(index)).backward()
            optimizer.step()
            mine.append(index)
        if isinstance(optimizer, nt.Wrapper):
            optimizer.mean({})  # else a worker may be an epoch ahead, and what it has learned there counts
        seen.append((statistics(model), len(mine), model[1].num_batches_tracked.item()))
    return seen


@pytest.mark.parametrize("wrapper", ["Downpour", "Synchronous"])
def test_with_one_worker_the_server_has_the_running_statistics_of_the_plain_loop(wrapper):
    feature = Feature(model=normalised, loop=normalising)
    server, worker = on_ranks(2, feature, getattr(nt, wrapper))
    _, want, _ = plain(feature)
    assert same(worker[1], want)
    assert same(server[1], [(found, 0, count) for found, _, count in want])
