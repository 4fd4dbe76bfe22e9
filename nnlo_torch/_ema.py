"""Exponential moving average of the centre, kept where the centre moves."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from nnlo_common import ConfigurationError
from nnlo_common.plugin import Session, is_number, speaks
from nnlo_torch._joint import AveragedWeights
from nnlo_torch._wrapper import Wrapper, wrapper_given

__all__ = ["EMA"]


class EMA(AveragedModel, AveragedWeights):
    r"""An exponential moving average of the model's weights: one update per commit of the centre.

    :math:`a \leftarrow d\,a + (1 - d)\,c` with the centre c after each commit, on the server; in a process
    alone after each step, as a plain loop with torch's `AveragedModel` does. The first update copies c.
    p workers make p times as many commits in an epoch as each of them makes steps (`Synchronous`: as many as
    steps; `EASGD`, `LocalSGD` and `DiLoCo`: as many as exchanges), so choose d by the commits. Buffers
    are those of the model at the end of the last epoch.

    It is a `torch.optim.swa_utils.AveragedModel`: call it like the model, its copy is `module`, and
    `n_averaged` counts the updates. On workers the averages exist only in `optimizer.evaluation()` and
    `optimizer.evaluate`, until the next epoch begins; call `optimizer.save` and `optimizer.aside` as for the
    model. Make it on all ranks, and pass it to `Checkpoint(also={"ema": ema})` to resume with it.

    Args:
        optimizer: the wrapper of this training, with one server.
        model: the model.
        decay: d, from 0 to 1.

    Example:
        >>> import nnlo_torch
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> optimizer = nnlo_torch.Downpour(torch.optim.SGD(model.parameters(), lr=1.0))
        >>> ema = nnlo_torch.EMA(optimizer, model, decay=0.5)
        >>> for _ in range(3):  # the weight becomes -1, -2, -3
        ...     optimizer.zero_grad()
        ...     model(torch.ones(1, 1)).backward()
        ...     optimizer.step()
        >>> ema.module.weight.item(), ema.n_averaged.item()
        (-2.25, 3)
    """

    def __init__(self, optimizer: Wrapper, model: torch.nn.Module, decay: float = 0.999) -> None:
        wrapper_given(optimizer, "EMA")
        if not isinstance(model, torch.nn.Module):
            raise ConfigurationError(f"EMA: model is of type {type(model).__name__}; pass a torch.nn.Module")
        if not is_number(decay) or not 0 <= decay <= 1:
            raise ConfigurationError(f"EMA: decay={decay!r} is not possible: it must be from 0 to 1")
        average: Any = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        super().__init__(model, multi_avg_fn=average)
        # Weakly: copies of this module must not copy the training.
        self._training = weakref.ref(optimizer)
        self._epoch = 0  # in which a worker was brought the averages
        optimizer.after_commit(lambda: self.update_parameters(model))
        optimizer._averages.append(self)
        optimizer._after_serving.append(lambda: _take_buffers(self.module, model))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the averaged model."""
        training = self._training()
        trains = training is not None and training._has_center and not speaks(training.role)
        if training is not None and trains and self._epoch != training._epochs_begun:
            raise ConfigurationError(
                f"rank {training.rank} trains, but the server keeps the averages; use them on all ranks in "
                "optimizer.evaluate(...) or optimizer.evaluation(), or only on the server in "
                "optimizer.aside(validate, ema)"
            )
        return self.module(*args, **kwargs)

    def bring(self, team: Session) -> None:
        """Give all ranks the server's averages (collective); `optimizer.evaluation()` calls it."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        tensors = [tensor.detach() for tensor in tensors if tensor.is_floating_point()]
        flat = torch.cat([tensor.reshape(-1).to("cpu", torch.float32) for tensor in tensors])
        count = team.copied({"count": int(self.n_averaged)}, flat.numpy())["count"]
        if not team.serves:
            pieces = torch.split(flat, [tensor.numel() for tensor in tensors])
            for tensor, piece in zip(tensors, pieces, strict=True):
                tensor.copy_(piece.view(tensor.shape))
            self.n_averaged.fill_(count)
        training = self._training()
        self._epoch = 0 if training is None else training._epochs_begun

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_training": _nobody}


def _nobody() -> None:
    """Return no training: that of a copy."""


def _take_buffers(module: torch.nn.Module, model: torch.nn.Module) -> None:
    for own, buffer in zip(module.buffers(), model.buffers(), strict=True):
        own.copy_(buffer)
