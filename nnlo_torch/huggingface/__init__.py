"""Adapter for Hugging Face: its `Trainer`, and loops written with accelerate.

Import `Trainer` and `TrainingArguments` from here; before an `accelerate.Accelerator` call `begin`. It needs
`pip install nnlo[huggingface]`.
"""

from __future__ import annotations

from nnlo_common.plugin import say_public_module
from nnlo_torch.huggingface._trainer import ArgumentsMixin, Trainer, TrainerMixin, TrainingArguments, begin

__all__ = ["ArgumentsMixin", "Trainer", "TrainerMixin", "TrainingArguments", "begin"]

say_public_module(__name__, __all__)
