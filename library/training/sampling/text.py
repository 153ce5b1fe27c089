"""Text that a language model goes on with from given prompts at intervals: answers, continuations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from accelerate import Accelerator
from torch import nn

from library.config.chat_schema import ChatSamplingConfig
from library.console import Console
from library.files import write_text
from library.llm.generation import SamplingSettings, generate_tokens
from library.llm.tokenizers import Tokenizer
from library.models.llm.model import TransformerLM
from library.nn.checkpointing import evaluating


@dataclass(frozen=True)
class TextSampler:
    """Lets the model go on from every prompt, into a text file for each step.

    Attributes:
        config: the prompts as the user wrote them, and how tokens are drawn.
        tokens: of each prompt, up to where the model goes on.
        tokenizer, stop_tokens: write the text and end it.
        folder, file: get the text; ``file`` is a format of the step.
        shown: a prompt and the new text -> what the file says of it.
        sampled: the files by step.
    """

    config: ChatSamplingConfig
    tokens: list[list[int]]
    tokenizer: Tokenizer
    stop_tokens: tuple[int, ...]
    seed: int
    folder: Path
    file: str
    shown: Callable[[str, str], str]
    accelerator: Accelerator
    console: Console
    sampled: dict[int, list[Path]] = field(default_factory=dict)

    def sample(
        self, transformer: nn.Module, step: int, is_stopping: Callable[[], bool] | None = lambda: False
    ) -> list[Path]:
        """Write the file and return it; of split weights every process takes part.

        ``is_stopping`` is asked after each token; the run that goes on writes the file then. It is None where several
        processes go on together, of which none may stop alone.
        """
        is_stopping = is_stopping or (lambda: False)
        assert isinstance(transformer, TransformerLM)
        config, prompts = self.config, self.config.sample_prompts
        settings = SamplingSettings(
            max_new_tokens=config.sample_tokens,
            temperature=config.sample_temperature,
            top_p=None if config.sample_temperature == 0 else config.sample_top_p,
            seed=self.seed,
            stop_tokens=self.stop_tokens,
        )
        with evaluating(transformer), self.accelerator.autocast():
            written = generate_tokens(transformer, self.tokens, settings, is_stopping)
        if is_stopping():
            return []
        texts = [self.tokenizer.decode(tokens, skip_special=True) for tokens in written]
        path = self.folder / self.file.format(step)
        if self.accelerator.is_main_process:
            write_text(path, "\n\n----\n\n".join(map(self.shown, prompts, texts)) + "\n")
        self.console.print(f"step {step}: {prompts[0]!r} -> {texts[0].strip()!r}", soft_wrap=True)
        self.sampled[step] = [path]
        return [path]

    def recall(self, last_step: int) -> None:
        """Note the files that an interrupted run wrote, up to ``last_step``."""
        for path in sorted(self.folder.glob("*.txt")):
            step = int("0" + "".join(filter(str.isdigit, path.stem)))
            if step <= last_step and path.name == self.file.format(step):
                self.sampled[step] = [path]

    def write_sheets(self) -> list[Path]:
        """Return nothing: texts are read one by one."""
        return []
