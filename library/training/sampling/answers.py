"""Answers to given prompts at intervals, as text."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator
from rich.console import Console
from torch import nn

from library.config.chat_schema import ChatSamplingConfig
from library.errors import UserError
from library.files import write_text
from library.llm.chat_templates import ChatTemplate, Message
from library.llm.generation import SamplingSettings, generate_tokens
from library.models.llm.model import TransformerLM
from library.models.llm.spec import LMConfig


@dataclass(frozen=True)
class AnswerSampler:
    """Lets the model answer the prompts.

    Attributes:
        prompts: as the user wrote them, and ``tokens`` of each up to where the answer begins.
        folder: gets a text file for each step.
        sampled: these files by step.
    """

    prompts: list[str]
    tokens: list[list[int]]
    template: ChatTemplate
    settings: SamplingSettings
    folder: Path
    accelerator: Accelerator
    console: Console
    sampled: dict[int, list[Path]] = field(default_factory=dict)

    def sample(self, transformer: nn.Module, step: int) -> list[Path]:
        """Answer every prompt; return the file."""
        assert isinstance(transformer, TransformerLM)
        training = transformer.training
        transformer.eval()
        with torch.no_grad(), self.accelerator.autocast():
            written = generate_tokens(transformer, self.tokens, self.settings)
        transformer.train(training)
        answers = [self.template.tokenizer.decode(tokens, skip_special=True).strip() for tokens in written]
        path = self.folder / f"step{step:06d}.txt"
        pairs = [f"> {prompt}\n\n{answer}" for prompt, answer in zip(self.prompts, answers, strict=True)]
        if self.accelerator.is_main_process:
            write_text(path, "\n\n----\n\n".join(pairs) + "\n")
        self.console.print(f"step {step}: {self.prompts[0]!r} -> {answers[0]!r}", soft_wrap=True)
        self.sampled[step] = [path]
        return [path]

    def recall(self, last_step: int) -> None:
        """Note the answers that an interrupted run wrote, up to ``last_step``."""
        for path in sorted(self.folder.glob(f"step{'[0-9]' * 6}*.txt")):
            if (step := int(path.stem.removeprefix("step"))) <= last_step:
                self.sampled[step] = [path]

    def write_sheets(self) -> list[Path]:
        """Return nothing: texts are read one by one."""
        return []


def answer_sampler(
    config: ChatSamplingConfig,
    template: ChatTemplate,
    system: str | None,
    model: LMConfig,
    seed: int,
    folder: Path,
    accelerator: Accelerator,
    console: Console,
) -> AnswerSampler | None:
    """Return the sampler of a run, or None where no prompts were given.

    Raises:
        UserError: a prompt and its answer do not fit the model's context.
    """
    if not config.sample_prompts:
        return None
    first = [Message("system", system)] if system else []
    tokens = [template.tokens([*first, Message("user", p)], answer_next=True)[0] for p in config.sample_prompts]
    if (longest := max(map(len, tokens))) + config.sample_tokens > model.context:
        raise UserError(
            f"sample_tokens: a prompt of {longest} tokens and {config.sample_tokens} more do not fit the model's "
            f"context of {model.context}; lower it"
        )
    settings = SamplingSettings(
        max_new_tokens=config.sample_tokens,
        temperature=config.sample_temperature,
        top_p=None if config.sample_temperature == 0 else config.sample_top_p,
        seed=seed,
        stop_tokens=(*template.tokenizer.stop_tokens, *template.ends, *model.eos),
    )
    return AnswerSampler(config.sample_prompts, tokens, template, settings, folder, accelerator, console)
