"""Warnings of loops that look right on each rank and are not."""

from __future__ import annotations

import contextlib
import threading
import warnings

import pytest

from nnlo_common.base import _errors
from nnlo_common.cluster import _aborting
from nnlo_common.cluster._aborting import describe_failure

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")
import nnlo_torch as nt  # noqa: E402
from nnlo_torch import _wrapper  # noqa: E402
from tests.helpers import torch_cases as cases  # noqa: E402
from tests.helpers.threads import on_ranks  # noqa: E402

pytestmark = pytest.mark.framework("torch")

X, Y = cases.data()
STEPS = 8


@pytest.fixture(autouse=True)
def _nothing_said_before(monkeypatch):
    monkeypatch.setattr(_errors, "_SHOWN", {})


def said(validate, *, size=3, trains_in_eval_mode=False):
    """The warnings of a training whose epochs are followed by a validation of the script's own."""

    def program(world):
        model = cases.model_of()
        optimizer = nt.Downpour(torch.optim.SGD(model.parameters(), lr=0.05), world=world, model=model)
        training = nt.ShardSampler(range(STEPS), optimizer=optimizer)
        held_out = nt.ShardSampler(range(STEPS), optimizer=optimizer, evaluation=validate is evaluated)
        for _ in range(2):
            model.train(not trains_in_eval_mode)
            for index in training:
                optimizer.zero_grad()
                cases.loss_of(model, X[6 * index :][:6], Y[6 * index :][:6]).backward()
                optimizer.step()
            validate(model, optimizer, held_out)
        optimizer.close()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        on_ranks(size, program) if size > 1 else program(None)
    return [str(one.message) for one in caught]


def losses(model, sampler):
    return [float(cases.loss_of(model, X[6 * index :][:6], Y[6 * index :][:6]).detach()) for index in sampler]


def without_gradients(model, optimizer, sampler):
    with torch.no_grad():
        losses(model, sampler)


def in_eval_mode(model, optimizer, sampler):
    model.eval()
    losses(model, sampler)


def in_both(model, optimizer, sampler):
    model.eval()
    with torch.inference_mode():
        losses(model, sampler)


def evaluated(model, optimizer, sampler):
    def measure(index):
        return {"loss": cases.loss_of(model, X[6 * index :][:6], Y[6 * index :][:6])}

    optimizer.evaluate(measure, list(sampler), samples=lambda index: 1)


def by_the_server(model, optimizer, sampler):
    if optimizer.serves:
        in_both(model, optimizer, range(STEPS))


def skipped(model, optimizer, sampler):
    """Nothing is validated."""


@pytest.mark.parametrize("validate", [without_gradients, in_eval_mode, in_both])
def test_a_validation_loop_over_a_training_sampler_is_named_once(validate):
    (text,) = said(validate)
    assert "each worker sees only its part" in text
    assert "evaluation=True" in text
    assert "optimizer.evaluate(" in text


@pytest.mark.parametrize("validate", [evaluated, by_the_server, skipped])
def test_a_right_validation_is_not(validate):
    assert said(validate) == []


def test_a_training_in_eval_mode_is_none():
    """Frozen statistics: users fine-tune so."""
    assert said(skipped, trains_in_eval_mode=True) == []


@pytest.mark.parametrize("validate", [without_gradients, in_eval_mode])
def test_alone_such_a_loop_sees_all_data(validate):
    assert said(validate, size=1) == []


def epochs_without_batches(world):
    model = cases.model_of().eval()
    optimizer = nt.Downpour(torch.optim.SGD(model.parameters(), lr=0.05), world=world, model=model)
    for _ in range(3):
        with contextlib.suppress(StopIteration):
            next(iter(nt.ShardSampler([], optimizer=optimizer)))
    optimizer.close()


def test_a_worker_without_data_is_not_taken_for_a_validation():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert on_ranks(3, epochs_without_batches) == [None] * 3


def explained(error):
    return describe_failure(0, 3, "node7", error).splitlines()[-1]


def test_errors_of_scripts_for_one_process_come_with_what_to_write(monkeypatch):
    with pytest.raises(ValueError, match="mutually exclusive") as caught:
        torch.utils.data.DataLoader(range(5), shuffle=True, sampler=nt.ShardSampler(range(5)))
    assert explained(caught.value).startswith(
        "nnlo: the sampler shuffles: leave shuffle out of the DataLoader"
    )
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="RANK expected") as caught:
        torch.distributed.init_process_group("gloo")
    assert explained(caught.value).startswith("nnlo: nnlo starts by mpiexec or srun and needs no torch.distr")


def test_a_variable_that_the_loop_of_a_server_has_not_set_is_explained(monkeypatch):
    """The job registers the words on the ranks that serve: a worker sets the variable."""
    monkeypatch.setattr(_aborting._Guard, "explanations", {})

    def loss_after(batches):
        for batch in batches:
            loss = batch
        return loss

    for missing in (lambda: never_set, lambda: loss_after([])):  # noqa: F821 - that is the case
        with pytest.raises(NameError) as caught:
            missing()
        assert not explained(caught.value).startswith("nnlo: a server skips")
        _wrapper.explain_missing_variables()
        assert explained(caught.value).startswith(
            "nnlo: a server skips the body of the loop over batches; if"
        )
        _aborting._Guard.explanations.clear()


def test_the_words_for_a_server_are_registered_on_servers_alone(monkeypatch):
    roles = []
    monkeypatch.setattr(_wrapper, "explain_missing_variables", lambda: roles.append(rank_now.role))
    rank_now = threading.local()

    def program(world):
        rank_now.role = world.rank
        model = cases.model_of()
        nt.Downpour(torch.optim.SGD(model.parameters(), lr=0.05), world=world, model=model).close()

    on_ranks(3, program)
    assert roles == [0]
