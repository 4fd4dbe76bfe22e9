"""A loop written with accelerate: accumulation, clipping, and scores by `gather_for_metrics`."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from tests.clients.common import WRAPPED, blobs, finish

if WRAPPED:
    import nnlo_torch as nt
    from nnlo_torch.huggingface import begin


def main() -> None:
    if WRAPPED:
        begin(cpu=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    data = TensorDataset(*blobs(1024))
    if WRAPPED:
        optimizer = wrapper = nt.Downpour(optimizer)
        loader = DataLoader(data, batch_size=16, sampler=nt.ShardSampler(data))
    else:
        loader = DataLoader(data, batch_size=16, shuffle=True)
    held_out = DataLoader(TensorDataset(*blobs(512, seed=1)), batch_size=128)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
    model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, loader, held_out)

    for _epoch in range(6):
        model.train()
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        schedule.step()

    def evaluate() -> tuple[float, float]:
        right, losses = [], []
        for inputs, labels in held_out:
            outputs, told = accelerator.gather_for_metrics((model(inputs), labels))
            right.append(outputs.argmax(dim=1) == told)
            losses.append(torch.nn.functional.cross_entropy(outputs, told, reduction="none"))
        return torch.cat(right).float().mean().item(), torch.cat(losses).mean().item()

    if WRAPPED:
        with wrapper.evaluation():
            accuracy, loss = evaluate()
    else:
        model.eval()
        with torch.no_grad():
            accuracy, loss = evaluate()
    finish(accelerator.is_main_process, accuracy=accuracy, loss=loss)


if __name__ == "__main__":
    main()
