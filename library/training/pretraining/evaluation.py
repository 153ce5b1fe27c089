"""What is looked at between steps: cross-entropy on held-out documents, and how the model goes on from a beginning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor

from library.files import write_text
from library.llm.generation import SamplingSettings, generate_tokens
from library.llm.tokenizers import Tokenizer
from library.models.transformer_lm import TransformerLM
from library.training.sharding import in_step


@contextmanager
def looking(model: TransformerLM, accelerator: Accelerator) -> Iterator[None]:
    """Inside the block the model is in eval mode, under the run's autocast, recording nothing."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), accelerator.autocast():
            yield
    finally:
        model.train(training)


def held_out_loss(model: TransformerLM, batches: Iterator[Tensor], accelerator: Accelerator) -> float:
    """Return the mean cross-entropy over all processes' ``batches`` [B, context + 1]."""
    sums = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
    with looking(model, accelerator):
        for batch in in_step(batches, accelerator):
            # one that has no batch left takes part with a text that does not count
            tokens = torch.zeros(1, 2, dtype=torch.int64) if batch is None else batch
            tokens = tokens.to(accelerator.device)
            count = 0 if batch is None else tokens[:, 1:].numel()
            sums[0] += model(tokens[:, :-1], tokens[:, 1:]).double() * count
            sums[1] += count
    loss, count = accelerator.reduce(sums, reduction="sum").tolist()
    return loss / count


def write_samples(
    model: TransformerLM,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    settings: SamplingSettings,
    path: Path | None,
    accelerator: Accelerator,
) -> list[str]:
    """Write each prompt with what the model makes of it to ``path``, if one is given; return these texts."""
    first = [] if tokenizer.bos is None else [tokenizer.bos]
    given = [first + tokenizer.encode(prompt) for prompt in prompts]
    with looking(model, accelerator):
        written = generate_tokens(model, given, settings)
    texts = [prompt + tokenizer.decode(new, skip_special=True) for prompt, new in zip(prompts, written, strict=True)]
    if path is not None:
        write_text(path, "\n\n----\n\n".join(texts) + "\n")
    return texts
