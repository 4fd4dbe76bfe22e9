"""The parts of PyTorch that are not public are still what `nnlo_torch._compat` takes them for."""

from __future__ import annotations

import inspect

import pytest

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")
from torch.utils.data import dataloader  # noqa: E402

from nnlo_common import ConfigurationError  # noqa: E402
from nnlo_torch import _compat  # noqa: E402

pytestmark = pytest.mark.framework("torch")

CHANGED = "PyTorch has changed: mend nnlo_torch/_compat.py, or steps weigh what is drawn ahead of the loop"


def source(*path):
    """The text of a function of a loader's iterator."""
    found = dataloader
    for name in path:
        assert hasattr(found, name), f"{CHANGED}: there is no {'.'.join(path)} in torch.utils.data.dataloader"
        found = getattr(found, name)
    return inspect.getsource(found)


def says(text, part, what):
    assert part in text, f"{CHANGED}: {what}, which {part!r} did"


def test_both_functions_that_samplers_run_below_are_there():
    source("_BaseDataLoaderIter", "_next_index")
    source("_SingleProcessDataLoaderIter", "_next_data")
    assert None not in _compat.DRIVERS, CHANGED
    assert len(_compat.DRIVERS) == 2, CHANGED


@pytest.mark.parametrize("attribute", ["_num_workers", "_index_sampler", "_num_yielded"])
def test_an_iterator_knows_its_loader_and_its_batches(attribute):
    says(
        source("_BaseDataLoaderIter", "__init__"),
        f"self.{attribute} =",
        f"_BaseDataLoaderIter has no {attribute}",
    )


def test_a_batch_counts_once_the_loop_gets_it():
    text = source("_BaseDataLoaderIter", "__next__")
    says(text, "data = self._next_data()\n            self._num_yielded += 1", "__next__ counts otherwise")


def test_a_new_round_has_a_table_of_its_own_before_anything_is_drawn():
    text = source("_MultiProcessingDataLoaderIter", "_reset")
    for part in ("self._send_idx = 0", "self._task_info = {}"):
        says(text, part, "_reset no longer begins anew")
        assert text.index(part) < text.index("self._try_put_index()"), CHANGED


def test_a_batch_is_in_the_table_from_its_drawing_to_the_loop():
    text = source("_MultiProcessingDataLoaderIter", "_try_put_index")
    drawn, noted = text.find("self._next_index()"), text.find("self._task_info[self._send_idx] =")
    counted = text.find("self._send_idx += 1")
    assert 0 < drawn < noted < counted, f"{CHANGED}: _try_put_index draws, notes and counts a batch in turn"
    taken = source("_MultiProcessingDataLoaderIter", "_next_data")
    gone = taken.count("self._task_info.pop(") + taken.count("del self._task_info[idx]")
    assert gone == taken.count("return self._process_data("), CHANGED


def test_the_loader_is_found_from_its_sampler():
    found = []

    class Sampler(torch.utils.data.Sampler):
        def __iter__(self):
            found.append(_compat.driving_loader())
            for number in range(6):
                found.append(found[0] and found[0].drawing)
                yield number

    iterator = iter(torch.utils.data.DataLoader(range(6), 2, sampler=Sampler(), drop_last=True))
    next(iterator)
    batches = found[0]
    assert batches is not None, f"{CHANGED}: no loader was found"
    assert found[1:] == [0, 0], CHANGED
    assert batches.drops_last, CHANGED
    assert not batches.over
    del iterator
    assert batches.over
    assert batches.drawing == -1


def test_a_sampler_without_a_loader_finds_none():
    assert _compat.driving_loader() is None


def test_what_is_missing_is_found_at_once(monkeypatch):
    """Samples count when they are drawn then; nothing fails."""
    found = []

    class Sampler(torch.utils.data.Sampler):
        def __iter__(self):
            found.append(_compat.driving_loader())
            yield 0

    iterator = iter(torch.utils.data.DataLoader(range(6), sampler=Sampler()))
    del iterator._num_yielded
    with pytest.raises(AttributeError, match="_num_yielded"):
        next(iterator)
    assert found == [None]


OTHER = f"PyTorch {torch.__version__} has changed: mend nnlo_torch/_compat.py"


def test_hooks_of_all_optimizers_are_known():
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    def hook(optimizer, args, kwargs):
        return None

    before, after = _compat.global_hooks()
    ends = [register_optimizer_step_pre_hook(hook), register_optimizer_step_post_hook(hook)]
    try:
        assert _compat.global_hooks() == ([*before, hook], [*after, hook]), (
            f"{OTHER}: hooks are kept elsewhere"
        )
    finally:
        for end in ends:
            end.remove()


@pytest.mark.parametrize("event", ["step", "state_dict", "load_state_dict"])
def test_hooks_of_an_optimizer_are_known(event):
    optimizer = torch.optim.SGD([torch.zeros(1)], 0.1)
    assert _compat.hooks_of(optimizer, event) == ([], [])
    getattr(optimizer, f"register_{event}_pre_hook")(print)
    getattr(optimizer, f"register_{event}_post_hook")(repr)
    found = _compat.hooks_of(optimizer, event)
    assert found == ([print], [repr]), f"{OTHER}: hooks of {event} are kept elsewhere"


def test_a_step_is_not_wrapped_if_it_calls_hooks_itself():
    class Optimizer(torch.optim.SGD):
        @_compat.without_hooks
        def step(self, closure=None):
            return "called"

    calls = []
    optimizer = Optimizer([torch.zeros(1)], 0.1)
    optimizer.register_step_pre_hook(lambda *args: calls.append(1))
    assert optimizer.step() == "called"
    assert not calls, f"{OTHER}: torch wraps a step that says `hooked`"


def test_schedulers_do_not_warn_of_an_optimizer_that_makes_no_steps():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    _compat.stepped(optimizer)
    scheduler.step()  # a warning is an error


def test_many_tensors_are_copied_at_once():
    places = [torch.zeros(2), torch.zeros(1)]
    _compat.copy_all(places, [torch.ones(2), torch.ones(1)])
    assert [one.tolist() for one in places] == [[1, 1], [1]], f"{OTHER}: _foreach_copy_ copies otherwise"


def test_all_layers_that_normalise_by_batches_are_of_one_class():
    kinds = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)
    assert all(issubclass(kind, _compat.BatchNorm) for kind in kinds), f"{OTHER}: _BatchNorm is not above all"
    assert not issubclass(torch.nn.InstanceNorm1d, _compat.BatchNorm), OTHER


def test_buffers_that_are_saved_are_told_from_others():
    module = torch.nn.Module()
    kept = torch.zeros(1)
    module.register_buffer("kept", kept)
    module.register_buffer("made again", torch.zeros(1), persistent=False)
    assert _compat.saved_buffers(module) == [("kept", kept)], (
        f"{OTHER}: buffers that are not saved are elsewhere"
    )


def test_what_is_within_a_module_is_known_also_while_it_is_made():
    inner = torch.nn.Linear(1, 1)
    outer = torch.nn.Sequential(inner)
    assert _compat.children_of(outer) == [inner], f"{OTHER}: modules are kept elsewhere"
    assert [id(one) for one in _compat.parameters_of(inner)] == [id(inner.weight), id(inner.bias)], OTHER
    unfinished = torch.nn.Module.__new__(torch.nn.Module)
    assert not [*_compat.children_of(unfinished), *_compat.parameters_of(unfinished)]


class Bare:
    """Has none of the private parts."""


@pytest.mark.parametrize(
    ("use", "part"),
    [
        (lambda bare: _compat.hooks_of(bare, "step"), "_optimizer_step_pre_hooks"),
        (_compat.saved_buffers, "_non_persistent_buffers_set"),
    ],
)
def test_a_part_that_is_gone_is_named(use, part):
    with pytest.raises(ConfigurationError, match=rf"torch .* has changed: Bare has no {part} any more"):
        use(Bare())


def test_a_part_of_a_module_that_is_gone_is_named(monkeypatch):
    monkeypatch.delattr("torch._foreach_copy_")
    with pytest.raises(
        ConfigurationError, match=r"torch .* has changed: torch has no _foreach_copy_ any more"
    ):
        _compat.copy_all([], [])
    monkeypatch.delattr(_compat.optim, "_global_optimizer_pre_hooks")
    with pytest.raises(ConfigurationError, match=r"has no _global_optimizer_pre_hooks any more"):
        _compat.global_hooks()


def test_a_call_after_backward_comes_once_all_gradients_are_made():
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    seen = []

    def call():
        seen.append([parameter.grad is not None for parameter in parameters])

    def noticed(tensor):
        if not queued:
            queued.append(tensor)
            _compat.after_backward(call)

    queued = []
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(noticed)
    sum(parameter.sum() for parameter in parameters).backward()
    assert seen == [[True] * 3], CHANGED


def test_changes_in_place_are_counted():
    gradient = torch.ones(2)
    before = _compat.changes_of(gradient)
    torch.nn.utils.clip_grad_norm_([parameter := torch.nn.Parameter(torch.ones(2))], 1.0)
    parameter.grad = gradient
    torch.nn.utils.clip_grad_norm_([parameter], 0.1)
    assert _compat.changes_of(gradient) > before, CHANGED


def test_a_failing_call_after_backward_fails_the_backward():
    parameter = torch.nn.Parameter(torch.ones(2))

    def call():
        raise ConfigurationError("no mean")

    parameter.register_post_accumulate_grad_hook(lambda tensor: _compat.after_backward(call))
    with pytest.raises(ConfigurationError, match="no mean"):
        parameter.sum().backward()
