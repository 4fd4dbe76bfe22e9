"""Hugging Face's Trainer on a tiny BERT, made from its configuration: early stopping, the best checkpoint."""

from __future__ import annotations

import logging
import tempfile
import warnings

import numpy as np
import torch
import transformers
from torch.utils.data import Dataset

from tests.clients.common import WRAPPED, finish

if WRAPPED:
    import nnlo_torch as nt
    from nnlo_torch.huggingface import Trainer, TrainingArguments
else:
    from transformers import Trainer, TrainingArguments

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)


class Sentences(Dataset):
    """Sentences of 16 words out of 40; the label tells which of two words is more frequent."""

    def __init__(self, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.words = torch.randint(2, 40, (size, 16), generator=generator)
        self.words[:, 0] = 1
        few = torch.randint(1, 8, (size,), generator=generator)
        self.labels = torch.arange(size) % 2
        for row, (count, label) in enumerate(zip(few.tolist(), self.labels.tolist(), strict=True)):
            self.words[row, 1 : 1 + count] = 2 + label

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.words[index], "labels": self.labels[index]}


def accuracy(prediction) -> dict[str, float]:
    return {"accuracy": float(np.mean(prediction.predictions.argmax(axis=-1) == prediction.label_ids))}


def main() -> None:
    transformers.set_seed(0)
    model = transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=40, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=64, max_position_embeddings=16, num_labels=2,
        )
    )  # fmt: skip
    arguments = TrainingArguments(
        tempfile.mkdtemp(), use_cpu=True, report_to=[], disable_tqdm=True, seed=0, num_train_epochs=6,
        per_device_train_batch_size=32, learning_rate=2e-3, warmup_steps=10, lr_scheduler_type="cosine",
        eval_strategy="epoch", save_strategy="epoch", logging_strategy="epoch", save_total_limit=2,
        load_best_model_at_end=True, metric_for_best_model="accuracy",
    )  # fmt: skip
    trainer = Trainer(
        model, arguments, train_dataset=Sentences(1024, 0), eval_dataset=Sentences(512, 1),
        compute_metrics=accuracy, callbacks=[transformers.EarlyStoppingCallback(3)],
        **({"wrap": nt.Downpour} if WRAPPED else {}),
    )  # fmt: skip
    trainer.train()
    scores = trainer.evaluate()
    finish(trainer.is_world_process_zero(), accuracy=scores["eval_accuracy"], loss=scores["eval_loss"])


if __name__ == "__main__":
    main()
