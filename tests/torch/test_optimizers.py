"""PyTorch's own optimizer test cases, through our wrappers: alone, and with one server and one worker."""

from __future__ import annotations

import copy
import functools
import pickle
import re
import warnings

import pytest

from nnlo_common import ConfigurationError
from nnlo_common.testing import MemoryCluster
from tests.helpers.frameworks import FRAMEWORKS, since

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")
if "torch" not in FRAMEWORKS:  # before the next import, which needs expecttest
    pytest.skip("torch is not in NNLO_TEST_FRAMEWORKS", allow_module_level=True)
from torch.optim import lr_scheduler  # noqa: E402
from torch.optim.optimizer import (  # noqa: E402
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.testing._internal import common_optimizers as theirs  # noqa: E402

import nnlo_torch as nt  # noqa: E402
from nnlo_torch import _center, _chunked_step  # noqa: E402
from tests.helpers import torch_cases as cases  # noqa: E402
from tests.helpers.torch_cases import same, values  # noqa: E402

pytestmark = [
    pytest.mark.framework("torch"),
    # PyTorch 2.4 itself, in SequentialLR and when a parameter is read from a pickle.
    pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning"),
    pytest.mark.filterwarnings("ignore:You are using `torch.load` with:FutureWarning"),
    pytest.mark.sampled(3),
]

# Their module forbids to set torch.backends' flags in the whole process; other tests may want to.
vars(torch.backends)["__allow_nonbracketed_mutation_flag"] = True

STEPS = 6
WRAPPERS = {
    "Synchronous": {},
    "EASGD": {"every": 2},
    "AGN": {"every": 2},
    "DynSGD": {},
    "Steady": {},
    "LocalSGD": {"every": 2},
    "DiLoCo": {"every": 3},
}
#: LBFGS and SparseAdam cannot be wrapped; `test_optimizers_that_cannot_be_wrapped_are_named` has them.
REFUSED = ("LBFGS", "SparseAdam")
INFOS = {info.name: info for info in theirs.optim_db if info.name not in REFUSED}


def variants(info):
    """PyTorch's own inputs, each plainly and in every implementation that runs on a CPU, by name.

    Left out are inputs with capturable=True: they are for CUDA graphs, and PyTorch itself gives none for
    a CPU (`test_capturable_is_refused_on_a_cpu_as_by_the_plain_optimizer`).
    """
    found = {}
    for case in theirs._get_optim_inputs_including_global_cliquey_kwargs("cpu", torch.float32, info):
        name = f"{info.name}: {case.desc}"
        assert name not in found
        found[name] = case.kwargs
        # PyTorch tests foreach where it is fast only; it runs on a CPU all the same. It wants numbers.
        plain = not any(case.kwargs.get(flag) for flag in ("fused", "differentiable"))
        if "foreach" in info.supported_impls and plain and not torch.is_tensor(case.kwargs.get("lr")):
            found[f"{name} & foreach"] = {**case.kwargs, "foreach": True}
    if not any(torch.is_tensor(kwargs.get("lr")) for kwargs in found.values()):
        found[f"{info.name}: tensor as lr"] = {"lr": torch.tensor(0.01)}
    return found


ALL = {name: (info.name, kwargs) for info in INFOS.values() for name, kwargs in variants(info).items()}
#: In a training of several ranks a step cannot be differentiated through: its gradient has come in a message.
EXCHANGED = {name: case for name, case in ALL.items() if not case[1].get("differentiable")}


def optimizer_of(name, params, kwargs):
    # A copy, since a learning rate that is a tensor would be shared otherwise.
    return INFOS[name].optim_cls(params, **copy.deepcopy(kwargs))


def parameters_of(name, *, requires_grad=True):
    """Parameters of several shapes; Muon takes matrices only."""
    draw = torch.Generator().manual_seed(11)
    shapes = [(3, 4), (2, 2), (4, 1)] if name == "Muon" else [(3, 4), (5,), (), (2, 1, 3)]
    return [
        torch.nn.Parameter(torch.randn(shape, generator=draw), requires_grad=requires_grad)
        for shape in shapes
    ]


def accumulate(params, step):
    """As a backward pass would do; the second parameter is used in every other step only."""
    draw = torch.Generator().manual_seed(100 + step)
    for index, param in enumerate(params):
        gradient = torch.randn(param.shape, generator=draw)
        if index == 1 and step % 2:
            continue
        if param.grad is None:
            param.grad = gradient
        else:
            with torch.no_grad():
                param.grad += gradient


# -- a world of one is the plain optimizer ------------------------------------------------------------


def check_alone(wrap, name, kwargs):
    requires_grad = not kwargs.get("differentiable")  # else the steps could not be made in place
    plain, params = (parameters_of(name, requires_grad=requires_grad) for _ in range(2))
    reference, optimizer = optimizer_of(name, plain, kwargs), wrap(optimizer_of(name, params, kwargs))
    start = [param.detach().clone() for param in params]
    for step in range(STEPS):
        if step == STEPS // 2:
            state = copy.deepcopy(optimizer.state_dict())
            params = [param.detach().clone().requires_grad_(requires_grad) for param in params]
            optimizer = wrap(optimizer_of(name, params, kwargs))
            optimizer.load_state_dict(state)
            reference.zero_grad()
        accumulate(plain, step)
        accumulate(params, step)
        assert reference.step() is optimizer.step() is None
        assert same([param.detach() for param in plain], [param.detach() for param in params])
        assert same(reference.state_dict(), optimizer.state_dict())
        if step != 1:  # once gradients are left to accumulate
            reference.zero_grad(set_to_none=bool(step % 3))
            optimizer.zero_grad(set_to_none=bool(step % 3))
        assert same([param.grad for param in plain], [param.grad for param in params])
    assert not any(map(torch.equal, start, (param.detach() for param in params)))


@pytest.mark.sampled(10)
@pytest.mark.parametrize("case", ALL)
def test_alone_every_input_of_every_optimizer_has_the_bits_of_the_plain_one(case):
    check_alone(nt.Downpour, *ALL[case])


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", INFOS)
def test_alone_every_wrapper_has_the_bits_of_the_plain_optimizer(name, wrapper):
    check_alone(functools.partial(getattr(nt, wrapper), **WRAPPERS[wrapper]), name, {})


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_alone_gem_has_the_bits_of_the_plain_optimizer(momentum):
    check_alone(nt.GEM, "SGD", {"lr": 0.1, "momentum": momentum})


@pytest.mark.parametrize("name", [n for n, i in INFOS.items() if "differentiable" in i.supported_impls])
def test_alone_a_step_can_be_differentiated_through(name):
    def slopes(wrap):
        starts = parameters_of(name)
        params = [start.clone() for start in starts]
        optimizer = wrap(optimizer_of(name, params, {"differentiable": True}))
        for param in params:  # one step, as in PyTorch's own test: Adamax cannot go back through two
            param.grad = param.detach().cos()
        optimizer.step()
        return torch.autograd.grad(sum(param.sum() for param in params), starts)

    assert same(slopes(nt.Downpour), slopes(lambda optimizer: optimizer))


@pytest.mark.parametrize("name", INFOS)
def test_alone_a_closure_is_evaluated_with_gradients_and_its_loss_returned(name):
    def run(wrap):
        params = parameters_of(name)
        optimizer = wrap(optimizer_of(name, params, {}))

        def closure():
            optimizer.zero_grad()
            loss = sum(param.sin().sum() for param in params)
            loss.backward()
            return loss

        with torch.no_grad():
            losses = [optimizer.step(closure).item() for _ in range(3)]
        return losses, [param.detach() for param in params]

    assert same(run(nt.Downpour), run(lambda optimizer: optimizer))


@pytest.mark.parametrize("name", INFOS)
def test_states_move_freely_between_a_wrapper_and_the_plain_optimizer(name):
    params = parameters_of(name)
    wrapped = nt.EASGD(optimizer_of(name, params, {}))
    accumulate(params, 0)
    wrapped.step()
    others = parameters_of(name)
    plain = optimizer_of(name, others, {})
    plain.load_state_dict(wrapped.state_dict())
    assert same(plain.state_dict(), wrapped.state_dict())
    again = nt.Downpour(optimizer_of(name, parameters_of(name), {}))
    again.load_state_dict(plain.state_dict())
    assert same(again.state_dict(), plain.state_dict())


# -- one server and one worker are the plain optimizer ------------------------------------------------


class Product(torch.nn.Module):
    """Parameters of several shapes, matrices only where an optimizer wants that."""

    def __init__(self, *, bias):
        super().__init__()
        self.first = torch.nn.Linear(5, 7, bias=bias)
        self.last = torch.nn.Linear(7, 3, bias=bias)
        self.scale = torch.nn.Parameter(torch.ones(())) if bias else 1.0
        cases.initialised(self)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x))) * self.scale


def model_for(name, kind=Product):
    return kind(bias=name != "Muon")


def loop(model, optimizer, sampler):
    x, y = cases.data()
    for index in sampler:
        part = slice(6 * index, 6 * index + 6)
        optimizer.zero_grad()
        cases.loss_of(model, x[part], y[part]).backward()
        optimizer.step()


def on_two_ranks(name, kwargs, loop=loop, wrap=nt.Downpour, kind=Product):
    """The parameters and the optimizer's state on the server, and the parameters on the worker."""

    def program(world):
        model = model_for(name, kind)
        optimizer = wrap(optimizer_of(name, model.parameters(), kwargs), world=world)
        loop(model, optimizer, nt.ShardSampler(range(STEPS), shuffle=False, optimizer=optimizer))
        optimizer.close()
        return values(model), optimizer.state_dict()

    with MemoryCluster(2) as cluster:
        (center, state), (own, _) = cluster.run(program, timeout_s=30)
    return center, state, own


@pytest.mark.sampled(10)
@pytest.mark.parametrize("case", EXCHANGED)
def test_one_worker_has_the_bits_of_the_plain_loop_with_every_input_of_every_optimizer(case):
    name, kwargs = EXCHANGED[case]
    model = model_for(name)
    optimizer = optimizer_of(name, model.parameters(), kwargs)
    start = values(model)
    loop(model, optimizer, range(STEPS))
    center, state, own = on_two_ranks(name, kwargs)
    assert same(center, values(model))
    assert same(own, values(model))
    assert same(state, optimizer.state_dict())
    assert not any(map(torch.equal, start, center))


@pytest.mark.sampled(10)
@pytest.mark.parametrize("case", EXCHANGED)
def test_it_has_them_where_the_server_steps_in_chunks(case, monkeypatch):
    monkeypatch.setattr(_center, "WORTH", 1)
    monkeypatch.setattr(_chunked_step, "_CHUNK", 16)
    monkeypatch.setattr(_chunked_step, "_VECTOR", 16)
    monkeypatch.setattr(_chunked_step, "_AT_ONCE", 24)
    test_one_worker_has_the_bits_of_the_plain_loop_with_every_input_of_every_optimizer(case)


@pytest.mark.parametrize("name", INFOS)
def test_on_a_worker_an_optimizer_has_the_bits_of_the_plain_one(name):
    model = model_for(name)
    loop(model, optimizer_of(name, model.parameters(), {}), range(STEPS))
    *_, own = on_two_ranks(name, {}, wrap=functools.partial(nt.EASGD, every=1000))
    assert same(own, values(model))


class Branches(Product):
    """A model of which a part is used in every other step only."""

    def __init__(self, *, bias):
        super().__init__(bias=bias)
        self.now_and_then = torch.nn.Linear(5, 7, bias=bias)
        self.step = 0
        cases.initialised(self)

    def forward(self, x):
        self.step += 1
        hidden = self.first(x) + (self.now_and_then(x) if self.step % 2 else 0)
        return self.last(torch.tanh(hidden)) * self.scale


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("wrapper", "case"),
    [
        *(("Downpour", case) for case in EXCHANGED),
        # On a worker an optimizer is what it is in a plain loop: always with its defaults, with all inputs in
        # the long tests.
        *(
            pytest.param("EASGD", case, marks=() if case.endswith("default") else pytest.mark.extended)
            for case in EXCHANGED
        ),
    ],
)
def test_parameters_unused_in_some_steps_are_left_alone_in_them(case, wrapper):
    name, kwargs = EXCHANGED[case]
    model = model_for(name, Branches)
    loop(model, optimizer_of(name, model.parameters(), kwargs), range(STEPS))
    wrap = nt.Downpour if wrapper == "Downpour" else functools.partial(nt.EASGD, every=1000)
    center, _, own = on_two_ranks(name, kwargs, wrap=wrap, kind=Branches)
    assert same(center if wrapper == "Downpour" else own, values(model))


def in_bfloat16(name):
    return model_for(name).to(torch.bfloat16)


@pytest.mark.parametrize("name", INFOS)
def test_every_optimizer_steps_the_float32_centre_of_a_16_bit_model(name):
    x, y = cases.data()
    model = in_bfloat16(name)
    masters = [torch.nn.Parameter(param.detach().float()) for param in model.parameters()]
    optimizer = optimizer_of(name, masters, {})
    for index in range(STEPS):
        part = slice(6 * index, 6 * index + 6)
        model.zero_grad()
        cases.loss_of(model, x[part].bfloat16(), y[part]).backward()
        for param, master in zip(model.parameters(), masters, strict=True):
            master.grad = param.grad.float()
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(model.parameters(), masters, strict=True):
                param.copy_(master)

    def program(world):
        model = in_bfloat16(name)
        optimizer = nt.Downpour(optimizer_of(name, model.parameters(), {}), world=world)
        for index in nt.ShardSampler(range(STEPS), shuffle=False, optimizer=optimizer):
            part = slice(6 * index, 6 * index + 6)
            optimizer.zero_grad()
            cases.loss_of(model, x[part].bfloat16(), y[part]).backward()
            optimizer.step()
        optimizer.close()
        return values(model), optimizer.state_dict()

    with MemoryCluster(2) as cluster:
        (center, state), (own, _) = cluster.run(program, timeout_s=30)
    assert same(center, values(model))
    assert same(own, values(model))
    assert same(state, optimizer.state_dict())


@pytest.mark.parametrize("name", [n for n, i in INFOS.items() if "differentiable" in i.supported_impls])
def test_a_differentiable_optimizer_fails_at_the_centre_as_in_a_plain_loop(name):
    """On parameters that want gradients; others it could step, but nobody would differentiate there."""
    kwargs = {"differentiable": True}
    model = model_for(name)
    with pytest.raises(RuntimeError) as plain:
        loop(model, optimizer_of(name, model.parameters(), kwargs), range(1))
    with pytest.raises(RuntimeError, match=re.escape(str(plain.value))):
        on_two_ranks(name, kwargs)


# -- errors are the optimizer's own -------------------------------------------------------------------

ERRORS = {
    f"{name}: {case.optimizer_error_input.desc}": (name, number)
    for name, info in INFOS.items()
    for number, case in enumerate(info.optim_error_inputs_func(device="cpu", dtype=torch.float32))
}


def outcome(act):
    """What an action raises, its warnings, and what it gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            act()
        except Exception as error:
            return type(error), str(error), [str(warning.message) for warning in caught]
    return None, "", [str(warning.message) for warning in caught]


@pytest.mark.parametrize("case", ERRORS)
def test_errors_are_those_of_the_plain_optimizer(case):
    name, number = ERRORS[case]

    def use(wrap):
        error = INFOS[name].optim_error_inputs_func(device="cpu", dtype=torch.float32)[number]
        given = error.optimizer_error_input
        params = parameters_of(name) if given.params is None else given.params
        wrap(INFOS[name].optim_cls(params, **given.kwargs)).step()

    expected = INFOS[name].optim_error_inputs_func(device="cpu", dtype=torch.float32)[number]
    kind, text, warned = plain = outcome(lambda: use(lambda optimizer: optimizer))
    if expected.error_type is UserWarning:
        assert any(re.search(expected.error_regex, message) for message in warned)
    else:
        assert issubclass(kind, expected.error_type)
        assert re.search(expected.error_regex, text)
    assert outcome(lambda: use(nt.Downpour)) == plain


@pytest.mark.parametrize(
    "name", [n for n, info in INFOS.items() if getattr(info, "has_capturable_arg", False)]
)
def test_capturable_is_refused_on_a_cpu_as_by_the_plain_optimizer(name):
    def use(wrap):
        params = parameters_of(name)
        optimizer = wrap(optimizer_of(name, params, {"capturable": True}))
        accumulate(params, 0)
        optimizer.step()

    plain = outcome(lambda: use(lambda optimizer: optimizer))
    assert plain[0] is not None
    assert outcome(lambda: use(nt.Downpour)) == plain


def _another_group(optimizer):
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2, 2))], "lr": 0.5})
    optimizer.load_state_dict(torch.optim.SGD([torch.ones(1)], lr=0.1).state_dict())


MISUSES = {
    "a parameter twice": lambda o: o.add_param_group({"params": [o.param_groups[0]["params"][0]]}),
    "a group of numbers": lambda o: o.add_param_group({"params": [1.0]}),
    "a group that is a list": lambda o: o.add_param_group([torch.ones(2)]),
    "a set": lambda o: o.add_param_group({"params": {torch.ones(2)}}),
    "not a leaf": lambda o: o.add_param_group({"params": [2 * torch.ones(2, requires_grad=True)]}),
    "a state of another number of groups": _another_group,
    "a state of another number of parameters": lambda o: o.load_state_dict(
        torch.optim.SGD([torch.ones(1)], lr=0.1).state_dict()
    ),
    "a state that is none": lambda o: o.load_state_dict({}),
    "an argument too many": lambda o: o.step(None, 1),
    "an unknown argument": lambda o: o.zero_grad(set_to_nan=True),
    "a closure that fails": lambda o: o.step(lambda: 1 / 0),
    "a hook that returns rubbish": lambda o: (o.register_step_pre_hook(lambda *_: 1), o.step()),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_raises_what_the_plain_optimizer_raises(misuse):
    def use(wrap):
        MISUSES[misuse](wrap(torch.optim.SGD(parameters_of("SGD"), lr=0.1)))

    kind, text, warned = outcome(lambda: use(nt.Downpour))
    plain_kind, plain_text, plain_warned = outcome(lambda: use(lambda optimizer: optimizer))
    assert plain_kind is not None
    assert (kind, warned) == (plain_kind, plain_warned)
    # The names of class and method are the wrapper's own.
    assert re.sub(r"\S*(Wrapper|Downpour|SGD|Optimizer)\.|<.*>", "", text) == re.sub(
        r"\S*(SGD|Optimizer)\.|<.*>", "", plain_text
    )


@pytest.mark.parametrize("wrapper", ["Downpour", *WRAPPERS])
@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_cannot_be_wrapped_are_named(name, wrapper):
    (info,) = (info for info in theirs.optim_db if info.name == name)
    for case in info.optim_inputs_func(device="cpu"):
        optimizer = info.optim_cls(parameters_of(name), **case.kwargs)
        with pytest.raises(ConfigurationError, match=f"cannot wrap {name}"):
            getattr(nt, wrapper)(optimizer)


# -- an optimizer like any other ----------------------------------------------------------------------


def pair(wrap=nt.Downpour, **kwargs):
    """A wrapped optimizer in a world of one, with its parameters."""
    params = parameters_of("SGD")
    return wrap(torch.optim.SGD(params, **{"lr": 0.1, "momentum": 0.9, **kwargs})), params


def test_a_wrapper_is_a_torch_optimizer_with_the_groups_and_the_state_of_the_wrapped():
    optimizer, params = pair()
    assert isinstance(optimizer, torch.optim.Optimizer)
    inner = optimizer.optimizer
    for _ in range(2):
        assert optimizer.param_groups is inner.param_groups
        assert optimizer.state is inner.state
        assert optimizer.defaults == inner.defaults
        accumulate(params, 0)
        optimizer.step()
        assert same(optimizer.state[params[0]]["momentum_buffer"], inner.state[params[0]]["momentum_buffer"])
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def test_the_repr_shows_wrapper_and_wrapped():
    optimizer, _ = pair()
    assert repr(optimizer).startswith("Downpour(SGD (\nParameter Group 0\n")
    assert "momentum: 0.9" in repr(optimizer)
    assert repr(optimizer).endswith(", alone)")


def test_an_added_group_is_stepped_as_by_the_plain_optimizer():
    def run(wrap):
        optimizer, params = pair(wrap)
        accumulate(params, 0)
        optimizer.step()
        optimizer.zero_grad()
        more = torch.nn.Parameter(torch.ones(3))
        optimizer.add_param_group({"params": [more], "lr": 0.7, "weight_decay": 0.2})
        for step in range(3):
            accumulate([*params, more], step)
            optimizer.step()
        return [param.detach() for param in (*params, more)], optimizer.state_dict()

    assert same(run(nt.Downpour), run(lambda optimizer: optimizer))


@since("torch", "2.6", "optimizers take names")
def test_names_of_parameters_are_kept():
    model = cases.model_of()
    optimizer = nt.Downpour(torch.optim.SGD(model.named_parameters(), lr=0.1))
    names = [name for name, _ in model.named_parameters()]
    assert optimizer.param_groups[0]["param_names"] == names
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == names


HOOKS = ["step_pre", "step_post", "state_dict_pre", "state_dict_post", "load_pre", "load_post"]


def hooked(wrap, place):
    """The hooks that run, in their order, with what they are given."""
    optimizer, params = pair(wrap)
    subject = optimizer if place == "wrapper" else getattr(optimizer, "optimizer", optimizer)
    seen = []

    def note(name):
        def hook(*given):
            seen.append((name, len(given), isinstance(given[0], torch.optim.Optimizer)))

        return hook

    handles = [
        subject.register_step_pre_hook(note("step_pre")),
        subject.register_step_post_hook(note("step_post")),
        subject.register_state_dict_pre_hook(note("state_dict_pre")),
        subject.register_state_dict_post_hook(note("state_dict_post")),
        subject.register_load_state_dict_pre_hook(note("load_pre")),
        subject.register_load_state_dict_post_hook(note("load_post")),
    ]
    accumulate(params, 0)
    for _ in range(2):
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    for handle in handles:
        handle.remove()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    return seen


@pytest.mark.parametrize(
    ("place", "hook"),
    [(place, hook) for place in ("wrapped", "wrapper") for hook in HOOKS],
)
def test_hooks_run_as_often_as_on_the_plain_optimizer(hook, place):
    def only(seen):
        return [entry for entry in seen if entry[0] == hook]

    got, want = (only(hooked(wrap, place)) for wrap in (nt.Downpour, lambda optimizer: optimizer))
    assert len(want) == 2
    assert got == want


def test_what_a_hook_changes_takes_effect():
    def run(wrap):
        optimizer, params = pair(wrap)

        def double(optimizer, args, kwargs):
            for param in optimizer.param_groups[0]["params"]:
                if param.grad is not None:
                    param.grad *= 2

        def halve(optimizer, args, kwargs):
            optimizer.param_groups[0]["lr"] /= 2

        def tag(optimizer, state):
            return {**state, "tag": 7}

        def untag(optimizer, state):
            return {key: value for key, value in state.items() if key != "tag"}

        optimizer.register_step_pre_hook(double)
        optimizer.register_step_post_hook(halve)
        optimizer.register_state_dict_post_hook(tag)
        optimizer.register_load_state_dict_pre_hook(untag)
        for step in range(3):
            accumulate(params, step)
            optimizer.step()
        state = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(state)
        return [param.detach() for param in params], state

    assert same(run(nt.Downpour), run(lambda optimizer: optimizer))


def test_a_hook_on_all_optimizers_runs_once_a_step():
    seen = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("pre")),
        register_optimizer_step_post_hook(lambda *_: seen.append("post")),
    ]
    try:
        optimizer, params = pair()
        accumulate(params, 0)
        optimizer.step()
    finally:
        for handle in handles:
            handle.remove()
    assert seen == ["pre", "post"]


COPIES = {
    "pickle": lambda *things: pickle.loads(pickle.dumps(things)),
    "deepcopy": lambda *things: copy.deepcopy(things),
}


@pytest.mark.parametrize("wrapper", ["Downpour", *WRAPPERS])
@pytest.mark.parametrize("copied", COPIES)
def test_copies_are_wrappers_that_go_on_as_the_plain_optimizer_does(copied, wrapper):
    def run(wrap):
        optimizer, params = pair(wrap)
        accumulate(params, 0)
        optimizer.step()
        twin, twins = COPIES[copied](optimizer, params)
        for step in range(1, 4):
            accumulate(twins, step)
            twin.step()
            twin.zero_grad()
        return twin, [[param.detach() for param in both] for both in (params, twins)], twin.state_dict()

    twin, *got = run(functools.partial(getattr(nt, wrapper), **WRAPPERS.get(wrapper, {})))
    _, *want = run(lambda optimizer: optimizer)
    assert same(got, want)
    assert type(twin) is getattr(nt, wrapper)
    assert twin.param_groups is twin.optimizer.param_groups
    assert twin.role in repr(twin)


def test_a_copy_does_not_become_the_training_that_samplers_belong_to():
    optimizer, _ = pair()
    twin = copy.deepcopy(optimizer)
    assert nt._wrapper.current() is optimizer
    assert twin is not optimizer


def test_a_step_is_seen_by_the_profiler():
    optimizer, params = pair()
    accumulate(params, 0)
    with torch.profiler.profile() as profile:
        optimizer.step()
    assert any(event.key.startswith("Optimizer.step#") for event in profile.key_averages())


# -- schedulers ---------------------------------------------------------------------------------------

SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.95),
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=3, gamma=0.1),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, milestones=[2, 5, 9], gamma=0.3),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, factor=0.25, total_iters=4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, start_factor=0.5, end_factor=0.3, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, gamma=0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, power=0.9, total_iters=10),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=5, eta_min=1e-4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=2, T_mult=2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(
        o, base_lr=0.01, max_lr=0.2, step_size_up=2, step_size_down=3, mode="triangular2"
    ),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=13),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, cooldown=1, factor=0.5),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        schedulers=[
            lr_scheduler.ConstantLR(o, factor=0.1, total_iters=3),
            lr_scheduler.LinearLR(o, start_factor=0.2, total_iters=3),
            lr_scheduler.ExponentialLR(o, gamma=0.9),
        ],
        milestones=[3, 6],
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, factor=0.1, total_iters=3), lr_scheduler.ExponentialLR(o, gamma=0.9)],
        optimizer=o,
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=4),
}
#: Also a scheduler that cycles the first beta of Adam, not a momentum.
SCHEDULED = {name: ("SGD", {"lr": 0.1, "momentum": 0.9}) for name in SCHEDULERS} | {
    "CyclicLR": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "CyclicLR on Adam": ("Adam", {"lr": 0.01}),
    "OneCycleLR on AdamW": ("AdamW", {"lr": 0.01}),
    "ExponentialLR on a tensor": ("Adam", {"lr": torch.tensor(0.01)}),
    "OneCycleLR on fused Adam": ("Adam", {"lr": 0.01, "fused": True}),
}


def scheduler_of(case, optimizer):
    return SCHEDULERS[case.split()[0]](optimizer)


def advance(scheduler, step):
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step([5.0, 4.0, 4.0, 4.0, 4.0, 4.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0][step])
    else:
        scheduler.step()


def plain_data(state):
    """A scheduler's state without the functions and schedulers that may lie in it."""
    return repr({key: value for key, value in state.items() if not key.startswith(("_sched", "anneal"))})


def test_every_scheduler_has_a_case():
    classes = {
        name
        for name, value in vars(lr_scheduler).items()
        if isinstance(value, type) and issubclass(value, lr_scheduler.LRScheduler) and name[0] != "_"
    }
    assert classes - {"LRScheduler"} <= set(SCHEDULERS)


@pytest.mark.parametrize("wrapper", ["Downpour", "EASGD", "LocalSGD"])
@pytest.mark.parametrize("case", SCHEDULED)
def test_alone_schedulers_act_as_on_the_plain_optimizer(case, wrapper):
    name, kwargs = SCHEDULED[case]

    def run(wrap):
        params = parameters_of(name)
        optimizer = wrap(optimizer_of(name, params, kwargs))
        scheduler = scheduler_of(case, optimizer)
        seen = []
        for step in range(12):
            accumulate(params, step)
            optimizer.step()
            optimizer.zero_grad()
            advance(scheduler, step)
            groups = copy.deepcopy(optimizer.state_dict()["param_groups"])
            seen.append((groups, [float(rate) for rate in scheduler.get_last_lr()]))
            if step == 5:  # what is saved is loaded into new ones, as when a training goes on
                saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
                optimizer = wrap(optimizer_of(name, params, kwargs))
                scheduler = scheduler_of(case, optimizer)
                optimizer.load_state_dict(saved[0])
                scheduler.load_state_dict(saved[1])
        return seen, [param.detach() for param in params], plain_data(scheduler.state_dict())

    assert same(run(getattr(nt, wrapper)), run(lambda optimizer: optimizer))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", SCHEDULED)
def test_schedulers_stepped_after_each_epoch_act_at_the_centre(case):
    name, kwargs = SCHEDULED[case]

    def several_epochs(model, optimizer, sampler):
        scheduler = scheduler_of(case, optimizer)
        for epoch in range(5):
            loop(model, optimizer, sampler)
            advance(scheduler, epoch)

    model = model_for(name)
    optimizer = optimizer_of(name, model.parameters(), kwargs)
    several_epochs(model, optimizer, range(STEPS))
    center, state, own = on_two_ranks(name, kwargs, several_epochs)
    assert same(center, values(model))
    assert same(own, values(model))
    assert same(state, optimizer.state_dict())
