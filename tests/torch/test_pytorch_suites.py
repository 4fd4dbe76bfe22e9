"""PyTorch's own tests of optimizers, by their names, asked of every wrapper in a world of one.

`TestOptimRenewed` is not installed with PyTorch, but its database of optimizers and their inputs is. What its
tests do is done here with the plain optimizer and with a wrapped one; both must show the same, or raise the
same. What every input does is in `test_torch_optimizers.py`.
"""

from __future__ import annotations

import copy
import io

import pytest

from tests.helpers.frameworks import FRAMEWORKS, since

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")
if "torch" not in FRAMEWORKS:  # before the next import, which needs expecttest
    pytest.skip("torch is not in NNLO_TEST_FRAMEWORKS", allow_module_level=True)
from torch.optim import lr_scheduler  # noqa: E402
from torch.optim.optimizer import (  # noqa: E402
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import nnlo_torch as nt  # noqa: E402
from nnlo_common import ConfigurationError  # noqa: E402
from nnlo_common.testing import MemoryCluster  # noqa: E402
from tests.torch import test_optimizers as own  # noqa: E402

pytestmark = pytest.mark.framework("torch")

INFOS = own.INFOS
WRAPPERS = {
    name: value
    for name, value in vars(nt).items()
    if isinstance(value, type) and issubclass(value, nt.Wrapper) and value is not nt.Wrapper
}
#: Those whose equations are a momentum SGD's, and which optimizer each needs.
OF_SGD = {
    "GEM": {"lr": 0.1, "momentum": 0.9},
    "EAMSGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
}


# -- what TestOptimRenewed does -----------------------------------------------------------------------


def made(wrap, name, params=None, **kwargs):
    params = own.parameters_of(name) if params is None else params
    return wrap(own.optimizer_of(name, params, kwargs)), params


def stepped(optimizer, params, steps=3):
    for step in range(steps):
        own.accumulate(params, step)
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in params], copy.deepcopy(optimizer.state_dict())


def _first(optimizer):
    return optimizer.param_groups[0]["params"]


def goes_right_direction(wrap, name, scheduled=False, params=None):
    """Down a bowl, with what `step` returns; the loss must have become less."""
    draw = torch.Generator().manual_seed(2)
    params = [torch.nn.Parameter(torch.randn(4, 3, generator=draw))] if params is None else params
    optimizer, _ = made(wrap, name, params, lr=1e-3 if name != "Adadelta" else 1.0)
    schedulers = [
        lr_scheduler.StepLR(optimizer, gamma=0.99, step_size=10),
        lr_scheduler.ReduceLROnPlateau(optimizer),
    ]

    def closure():
        optimizer.zero_grad()
        loss = sum((param * param).sum() for param in params)
        loss.backward()
        return loss

    losses = []
    for _ in range(20):
        losses.append(optimizer.step(closure).item())
        if scheduled:
            schedulers[0].step()
            schedulers[1].step(losses[-1])
    assert losses[-1] < losses[0]
    return losses, params


def goes_right_direction_noncontiguous(wrap, name):
    draw = torch.Generator().manual_seed(2)
    return goes_right_direction(
        wrap, name, params=[torch.randn(4, 3, 2, generator=draw)[..., 0].requires_grad_()]
    )


def tensor_lr(wrap, name):
    optimizer, params = made(wrap, name, lr=torch.tensor(0.01))
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    seen = []
    for _ in range(3):
        seen.append(stepped(optimizer, params, 1))
        scheduler.step()
    return seen


def complex_parameters(wrap, name):
    draw = torch.Generator().manual_seed(4)
    params = [torch.nn.Parameter(torch.randn(2, 3, dtype=torch.complex64, generator=draw)) for _ in range(2)]
    optimizer, _ = made(wrap, name, params)
    for _ in range(3):
        for param in params:
            param.grad = torch.randn(2, 3, dtype=torch.complex64, generator=draw)
        optimizer.step()
    return [param.detach() for param in params]


def sparse_gradients(wrap, name):
    params = [torch.nn.Parameter(torch.ones(5, 2))]
    optimizer, _ = made(wrap, name, params)
    for row in (1, 3, 1):
        params[0].grad = torch.sparse_coo_tensor([[row, row]], torch.ones(2, 2), (5, 2))
        optimizer.step()
    return params[0].detach()


def mixed_dtypes(wrap, name):
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    params = [torch.nn.Parameter(torch.linspace(-1, 1, 6, dtype=dtype).view(2, 3)) for dtype in dtypes]
    optimizer, _ = made(wrap, name, params, foreach=True)
    for _ in range(3):
        for param in params:
            param.grad = torch.cos(param.detach())
        optimizer.step()
    return [param.detach() for param in params]


def default_dtype(wrap, name):
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        return stepped(*made(wrap, name, foreach=True))
    finally:
        torch.set_default_dtype(before)


def groups(wrap, name, **option):
    params = own.parameters_of(name)
    return stepped(made(wrap, name, [{"params": params[:1]}, {"params": params[1:], **option}])[0], params)


def groups_lr(wrap, name):
    return groups(wrap, name, lr=0.5)


def groups_weight_decay(wrap, name):
    return groups(wrap, name, weight_decay=0.5)


def no_gradients(wrap, name):
    optimizer, params = made(wrap, name)
    before = [param.detach().clone() for param in params]
    optimizer.step()
    assert own.same(before, [param.detach() for param in params])
    return optimizer.state_dict()


def zero_gradients(wrap, name):
    optimizer, params = made(wrap, name)
    for param in params:
        param.grad = torch.zeros_like(param)
    for _ in range(3):
        optimizer.step()
    return [param.detach() for param in params], optimizer.state_dict()


def empty_parameters(wrap, name):
    params = [torch.nn.Parameter(torch.empty(0, 2)), torch.nn.Parameter(torch.ones(2, 2))]
    optimizer, _ = made(wrap, name, params)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    return [param.detach() for param in params]


def no_parameters(wrap, name):
    return made(wrap, name, [])


def inference_parameters(wrap, name):
    optimizer, params = made(wrap, name)
    with torch.inference_mode():
        for param in params:
            param.grad = torch.ones(param.shape)
    optimizer.step()
    return [param.detach() for param in params]


def meta_parameters(wrap, name):
    params = [torch.nn.Parameter(torch.ones(2, 2, device="meta"))]
    optimizer, _ = made(wrap, name, params, fused=True)
    params[0].grad = torch.ones(2, 2, device="meta")
    optimizer.step()
    return params[0].device.type


def found_inf(wrap, name):
    """As a GradScaler tells a fused optimizer."""
    optimizer, params = made(wrap, name, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        loss = sum((param * param).sum() for param in params) * (float("inf") if step == 2 else 1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses, [param.detach() for param in params], scaler.get_scale()


def scaled_and_clipped(wrap, name):
    optimizer, params = made(wrap, name)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(sum((param * param).sum() for param in params)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, 0.5)
        scaler.step(optimizer)
        scaler.update()
    return [param.detach() for param in params], scaler.state_dict()


def hooks_on_all(wrap, name):
    seen = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("all before")),
        register_optimizer_step_post_hook(lambda *_: seen.append("all after")),
    ]
    optimizer, params = made(wrap, name)
    handles += [
        optimizer.register_step_pre_hook(lambda *_: seen.append("before")),
        optimizer.register_step_post_hook(lambda *_: seen.append("after")),
    ]
    try:
        stepped(optimizer, params, 2)
    finally:
        for handle in handles:
            handle.remove()
    stepped(optimizer, params, 1)
    return sorted(seen)


def hooks_of_states(wrap, name):
    optimizer, params = made(wrap, name)
    stepped(optimizer, params, 1)
    seen = []
    for kind in ("load_state_dict_pre", "load_state_dict_post", "state_dict_pre", "state_dict_post"):
        for number in (1, 2):
            optimizer_hook = getattr(optimizer, f"register_{kind}_hook")
            optimizer_hook(lambda *_, note=f"{kind} {number}": seen.append(note), prepend=number == 2)
    optimizer.load_state_dict(optimizer.state_dict())
    return seen


def printed(wrap, name):
    optimizer, _ = made(wrap, name)
    text = repr(optimizer)
    return text[text.index(f"{name} (") :].partition("\n)")[0]


def state_is_deterministic(wrap, name):
    optimizer, params = made(wrap, name)
    stepped(optimizer, params)
    twins = [param.detach().clone().requires_grad_() for param in params]
    twin, _ = made(wrap, name, twins)
    before = copy.deepcopy(optimizer.state_dict())
    twin.load_state_dict(optimizer.state_dict())
    assert own.same(optimizer.state_dict(), before)
    assert own.same(stepped(optimizer, params), stepped(twin, twins))
    twin.param_groups.extend(twin.param_groups)
    return twin.state_dict()["param_groups"]


def older_state(wrap, name):
    optimizer, params = made(wrap, name)
    stepped(optimizer, params)
    state = optimizer.state_dict()
    for flag in INFOS[name].not_og_supported_flags:
        for group in state["param_groups"]:
            group.pop(flag, None)
    optimizer.load_state_dict(state)
    return stepped(optimizer, params)


def step_that_is_no_tensor(wrap, name):
    optimizer, params = made(wrap, name)
    stepped(optimizer, params)
    state = copy.deepcopy(optimizer.state_dict())
    for entry in state["state"].values():
        if torch.is_tensor(entry.get("step")):
            entry["step"] = entry["step"].item()
    optimizer.load_state_dict(state)
    return stepped(optimizer, params)


def named_state(wrap, name):
    def names(params):
        return [(f"parameter {index}", param) for index, param in enumerate(params)]

    params = own.parameters_of(name)
    named, _ = made(wrap, name, names(params))
    seen = [stepped(named, params)]
    plain, others = made(wrap, name)
    plain.load_state_dict(named.state_dict())
    seen.append(stepped(plain, others))
    named.load_state_dict(plain.state_dict())
    return [*seen, stepped(named, params)]


def saved_with_weights_only(wrap, name):
    optimizer, params = made(wrap, name)
    stepped(optimizer, params)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    optimizer.load_state_dict(torch.load(file, weights_only=True))
    return stepped(optimizer, params)


def added_group(wrap, name):
    optimizer, params = made(wrap, name)
    stepped(optimizer, params, 1)
    more = torch.nn.Parameter(torch.ones(2, 2))
    optimizer.add_param_group({"params": [more], "lr": 0.5})
    return stepped(optimizer, [*params, more])


def public_attributes_of_a_copy(wrap, name):
    optimizer, params = made(wrap, name)
    stepped(optimizer, params)
    copied = copy.deepcopy(optimizer)

    def public(one):
        return {key for key in vars(one) if key[0] != "_"}

    assert public(copied) == public(optimizer)
    return own.same(copied.state_dict(), optimizer.state_dict())


def share_memory(wrap, name):
    optimizer, _ = made(wrap, name)
    optimizer.share_memory()
    return all(value.is_shared() for state in optimizer.state.values() for value in state.values())


def a_closure_of_several_evaluations(wrap, name):
    optimizer, _ = made(wrap, name)
    return [optimizer.step(lambda: 3.0), optimizer.step(closure=lambda: 4.0), optimizer.step()]


def has(flag):
    return lambda info: flag in info.supported_impls


#: What is done, by the name of the test of TestOptimRenewed if it has one; and with which optimizers.
RENEWED = {
    "forloop_goes_right_direction": (goes_right_direction, None),
    "forloop_goes_right_direction_with_lrsched": (
        lambda wrap, name: goes_right_direction(wrap, name, scheduled=True),
        None,
    ),
    "forloop_goes_right_direction_noncontiguous": (goes_right_direction_noncontiguous, None),
    "tensor_lr": (tensor_lr, None),
    "complex": (complex_parameters, None),
    "rosenbrock_sparse": (sparse_gradients, None),
    "mixed_device_dtype": (mixed_dtypes, has("foreach")),
    "set_default_dtype_works_with_foreach": (default_dtype, has("foreach")),
    "param_groups_lr": (groups_lr, None),
    "param_groups_weight_decay": (groups_weight_decay, None),
    "step_is_noop_when_params_have_no_grad": (no_gradients, None),
    "step_is_noop_for_zero_grads": (zero_gradients, None),
    "empty_parameters": (empty_parameters, None),
    "no_parameters": (no_parameters, None),
    "gradients_of_inference_mode": (inference_parameters, None),
    "fused_error_on_params_on_meta": (meta_parameters, has("fused")),
    "fused_does_not_step_if_foundinf": (found_inf, has("fused")),
    "grad_scaling_with_clipping": (scaled_and_clipped, None),
    "step_all_hooks": (hooks_on_all, None),
    "state_dict_hooks_and_prepend": (hooks_of_states, None),
    "optimizer_can_be_printed": (printed, None),
    "state_dict_deterministic": (state_is_deterministic, None),
    "can_load_older_state_dict": (older_state, None),
    "load_nontensor_step": (step_that_is_no_tensor, None),
    "can_load_from_to_named_state_dict": (named_state, None),
    "save_load_equality_with_weights_only": (saved_with_weights_only, None),
    "add_param_group": (added_group, None),
    "deepcopy_copies_all_public_attrs": (public_attributes_of_a_copy, None),
    "share_memory": (share_memory, lambda info: hasattr(info.optim_cls, "share_memory")),
    "closures": (a_closure_of_several_evaluations, None),
}
CASES = [
    (test, name)
    for test, (_, suits) in RENEWED.items()
    for name, info in INFOS.items()
    if not suits or suits(info)
]

#: What a wrapper does otherwise, and why: a test, and an optimizer or "" for all.
EXCEPTIONS: dict[tuple[str, str], str] = {}


def seen_with(wrap, test, name):
    """What is seen, or the kind and the first line of what is raised."""
    seen = []
    torch.manual_seed(1)
    kind, text, _ = own.outcome(lambda: seen.append(RENEWED[test][0](wrap, name)))
    return kind, text.partition("\n")[0], seen if test != "no_parameters" else []


def differs(wrap, test, name):
    return not own.same(seen_with(wrap, test, name), seen_with(lambda optimizer: optimizer, test, name))


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "wrapper",
    [
        # Always one whose optimizer runs at the centre and one where it runs on workers.
        pytest.param(name, marks=() if name in ("Downpour", "EASGD") else pytest.mark.extended)
        for name in WRAPPERS
        if name not in OF_SGD
    ],
)
@pytest.mark.parametrize(("test", "name"), CASES)
def test_what_pytorch_asks_of_optimizers_is_the_same_for_wrapped_ones(test, name, wrapper):
    explained = (test, name) in EXCEPTIONS or (test, "") in EXCEPTIONS
    assert differs(WRAPPERS[wrapper], test, name) == explained


def test_a_wrapper_that_does_something_else_is_seen():
    def slower(optimizer):
        optimizer.param_groups[0]["lr"] /= 2
        return nt.Downpour(optimizer)

    same = {(test, name) for test, name in CASES if not differs(slower, test, name)}
    assert len(same) < len(CASES) / 2


@pytest.mark.parametrize(
    "test",
    [
        pytest.param(
            test, marks=since("torch", "2.6", "optimizers take names") if "_state_dict" in test else ()
        )
        for test in RENEWED
    ],
)
def test_something_is_asked_that_does_not_only_raise(test):
    kinds = [seen_with(lambda optimizer: optimizer, test, name)[0] for case, name in CASES if case == test]
    assert None in kinds or test in ("no_parameters", "fused_error_on_params_on_meta")


# -- all inputs, all wrappers -------------------------------------------------------------------------


@pytest.mark.extended
@pytest.mark.parametrize("wrapper", [name for name in WRAPPERS if name not in OF_SGD])
@pytest.mark.parametrize("case", own.ALL)
def test_alone_every_input_has_the_bits_of_the_plain_optimizer_in_every_wrapper(case, wrapper):
    name, kwargs = own.ALL[case]
    if wrapper == "Steady" and (refused := {"amsgrad", "dampening"} & kwargs.keys()):
        with pytest.raises(ConfigurationError, match=f"Steady cannot wrap {name} with {refused.pop()}="):
            WRAPPERS[wrapper](own.optimizer_of(name, own.parameters_of(name), kwargs))
    else:
        own.check_alone(WRAPPERS[wrapper], name, kwargs)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("wrapper", [name for name in OF_SGD if name in WRAPPERS])
@pytest.mark.parametrize("case", own.ALL)
def test_rules_of_a_momentum_sgd_take_it_or_refuse_by_name(case, wrapper):
    name, kwargs = own.ALL[case]
    needed = {"momentum": 0, "nesterov": False, "dampening": 0, "weight_decay": 0, "maximize": False}
    given = {key: kwargs.get(key, value) for key, value in needed.items()}
    suits = {**given, "momentum": 0} == {**needed, "nesterov": OF_SGD[wrapper].get("nesterov", False)}
    if name == "SGD" and suits:
        own.check_alone(WRAPPERS[wrapper], name, kwargs)
    else:
        with pytest.raises(ConfigurationError, match=f"{wrapper} needs a torch.optim.SGD"):
            WRAPPERS[wrapper](own.optimizer_of(name, own.parameters_of(name), kwargs))


@pytest.mark.parametrize("wrapper", [name for name in OF_SGD if name in WRAPPERS])
def test_alone_the_optimizer_that_such_a_rule_needs_has_its_bits(wrapper):
    own.check_alone(WRAPPERS[wrapper], "SGD", OF_SGD[wrapper])


def test_every_wrapper_is_asked():
    assert set(own.WRAPPERS) | {"Downpour"} | set(OF_SGD) >= set(WRAPPERS)


#: What is a plain optimizer with one worker; where it runs; and what makes it so.
WITH_ONE_WORKER = {
    "Synchronous": ("center", {}),
    "DynSGD": ("center", {}),
    "AGN": ("center", {"every": 1}),
    "LocalSGD": ("worker", {"every": 1}),
    "EASGD": ("worker", {"every": 1000}),
}


@pytest.mark.extended
@pytest.mark.parametrize("wrapper", WITH_ONE_WORKER)
@pytest.mark.parametrize("case", own.EXCHANGED)
def test_one_worker_has_the_bits_of_the_plain_loop_in_every_wrapper(case, wrapper):
    (name, kwargs), (runs, options) = own.EXCHANGED[case], WITH_ONE_WORKER[wrapper]
    model = own.model_for(name)
    optimizer = own.optimizer_of(name, model.parameters(), kwargs)
    own.loop(model, optimizer, range(own.STEPS))

    def program(world):
        model = own.model_for(name)
        wrapped = WRAPPERS[wrapper](
            own.optimizer_of(name, model.parameters(), kwargs), world=world, **options
        )
        own.loop(model, wrapped, nt.ShardSampler(range(own.STEPS), shuffle=False, optimizer=wrapped))
        wrapped.close()
        return own.values(model), wrapped.state_dict()

    with MemoryCluster(2) as cluster:
        found = cluster.run(program, timeout_s=30)
    values, state = found[int(runs == "worker")]
    assert own.same(values, own.values(model))
    assert own.same(state, optimizer.state_dict())


# -- the public surface -------------------------------------------------------------------------------

PASSED_ON = {
    "add_param_group",
    "defaults",
    "load_state_dict",
    "param_groups",
    "state",
    "state_dict",
    "step",
    "zero_grad",
}
EXPLAINED = {
    "OptimizerPostHook": "a type",
    "OptimizerPreHook": "a type",
    "profile_hook_step": "puts hooks around a step; `Wrapper.step` calls them itself",
    "register_load_state_dict_post_hook": "kept in the wrapper, which calls it",
    "register_load_state_dict_pre_hook": "kept in the wrapper, which calls it",
    "register_state_dict_post_hook": "kept in the wrapper, which calls it",
    "register_state_dict_pre_hook": "kept in the wrapper, which calls it",
    "register_step_post_hook": "kept in the wrapper, which calls it",
    "register_step_pre_hook": "kept in the wrapper, which calls it",
}


def test_all_that_is_public_of_an_optimizer_is_passed_on_or_explained():
    plain = torch.optim.SGD([torch.ones(1)], lr=0.1)
    assert {name for name in dir(plain) if name[0] != "_"} == PASSED_ON | set(EXPLAINED)


@pytest.mark.parametrize("name", sorted(PASSED_ON))
@pytest.mark.parametrize("wrapper", [name for name in WRAPPERS if name not in OF_SGD])
def test_what_is_passed_on_reaches_the_wrapped_optimizer(name, wrapper, monkeypatch):
    inner = torch.optim.SGD([torch.ones(1)], lr=0.1)
    wrapped, calls = WRAPPERS[wrapper](inner), []
    if not callable(getattr(inner, name)):
        assert getattr(wrapped, name) is getattr(inner, name)
        return
    monkeypatch.setattr(inner, name, lambda *args: calls.append(args))
    given = {"add_param_group": ({},), "load_state_dict": ({},), "zero_grad": (True,)}.get(name, ())
    getattr(wrapped, name)(*given)
    assert calls == [given]


def test_what_only_some_optimizers_have_is_passed_on_too():
    class Switched(torch.optim.SGD):
        """Such as those without a schedule."""

        evaluates = False

        def eval(self):
            self.evaluates = True

    wrapped = nt.Downpour(Switched([torch.ones(1)], lr=0.1))
    wrapped.eval()
    assert wrapped.evaluates
    with pytest.raises(AttributeError, match=r"'Downpour' object has no attribute 'trains'"):
        wrapped.trains  # noqa: B018
