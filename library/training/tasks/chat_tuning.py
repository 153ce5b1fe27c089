"""Instruction tuning: all weights of a language model, trained on chats.

Conversations, targets, packing, validation and samples are those of a LoRA (``library.training.tasks.chat_lora``);
optimizer, layouts and states are those of pretraining. A quantised model is dequantised first. What comes out is a
transformers folder with the files published with the model: its tokenizer, its generation settings, in which answers
also end as they did in training, and its chat template, or that in which the conversations were written.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from library.config.markers import resume_keys
from library.llm.chat_templates import JINJA_FILE, with_arguments
from library.llm.conversion import read_generation_config, read_text_files, with_ends
from library.models.hub import find_model
from library.models.llm.files import open_lm
from library.models.llm.model import TransformerLM
from library.training.checkpoint.state import Position
from library.training.tasks.chat_lora import ChatTask
from library.training.tasks.pretraining import Pretraining, build_model


class ChatTuning(ChatTask, Pretraining):
    """See the module's text."""

    epoch_unit: ClassVar[str] = "batches"
    unit: ClassVar[str] = "batch"

    def open(self, state: str | None = None) -> None:
        self.state, config = state, self.plan.config
        folder = find_model(config.model.init_from or "", "init_from", is_pipeline=False)
        self.sizes, _, _ = open_lm(folder)
        tokenizer = Path(config.model.tokenizer or folder).expanduser()
        self._open_chats(config.chat, tokenizer)
        self.text_files, self.generation_config = read_text_files(tokenizer), read_generation_config(folder)
        if self.template.name != "tokenizer" or self.template.arguments:
            source = with_arguments(self.template.sources["default"], self.template.arguments)
            self.text_files[JINJA_FILE] = source.encode()
        self.resume_keys = {**resume_keys(config), "train_batch_size": config.data.train_batch_size}

    def _load_model(self) -> TransformerLM:
        config = self.plan.config
        self.accelerator.gradient_accumulation_steps = config.data.gradient_accumulation_steps
        most = config.validation.max_validation_conversations
        self._read_chats(config.chat, config.data.train_batch_size, most)
        model = build_model(config, self.template.tokenizer.vocab_size, self._loaded_to())
        model.config = with_ends(model.config, self.template.tokenizer, self.template.ends)
        return model

    def _plan_batches(self) -> int:
        self.lengths = "some" if self.plan.config.chat.packing else "many"
        return self.batches.dp_rank.step_batches

    def training_metrics(self, values: dict[str, float], position: Position) -> dict[str, float]:
        return values
