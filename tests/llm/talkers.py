"""Tiny language models that were really trained, for a second or two, so that what they say can be read and ends."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM

from library.errors import UserError
from library.llm.chat_session import ChatSession
from library.llm.chat_targets import encode_chat
from library.llm.chat_templates import ChatTemplate, Message, PromptTemplate, Turn, built_in_template
from library.llm.generation import SamplingSettings
from library.llm.tokenizers import Tokenizer, train_bpe
from library.models.llm.files import export_hf
from library.models.llm.model import TransformerLM
from library.models.llm.spec import LMConfig, gpt2, llama

MARKS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
PAIRS = (
    ("hello", "hello, I am a very small model"),
    ("what is RoPE?", "a rotation by the position"),
    ("what is GQA?", "queries share keys"),
    ("say it in Greek", "καλημέρα 🌍"),
    ("what is the cat doing?", "the cat sat on the mat"),
)
STORY = "the cat sat on the mat and the dog sat on the cat. then the mat was warm and the dog was glad. "


def fields(message: Message) -> dict[str, object]:
    """Return a message as transformers takes it."""
    return {"role": message.role, "content": message.content, **message.more}


def taught(template: ChatTemplate, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
    """Return the one example of a chat of which every answer is learnt: tokens, and which are targets."""
    (example,) = encode_chat(template, messages, [message.role == "assistant" for message in messages]).examples
    return example


class Talk:
    """A conversation as the page holds it: all turns are sent with each question."""

    def __init__(self, config: LMConfig, template: PromptTemplate, system: str = "") -> None:
        self.session, self.system, self.turns = ChatSession(config, template), system, list[Turn]()
        self.remarks: list[str] = []

    def answer(self, model: TransformerLM, text: str, settings: SamplingSettings) -> Iterator[str]:
        prompt, self.remarks = self.session.prompt(self.system, self.turns, text, settings.max_new_tokens)
        seeded, answer = replace(settings, seed=settings.seed + len(self.turns)), ""
        pieces = self.session.answer(model, prompt, seeded)
        try:
            for piece in pieces:
                answer += piece
                yield piece
        finally:
            pieces.close()
            if not isinstance(sys.exception(), UserError):
                stats = self.session.stats
                self.turns.append(Turn(text, answer, stats.tokens, stats.ending == "model"))


def write_chat_model(
    folder: Path, context: int = 512, pairs: Sequence[tuple[str, str]] = PAIRS, steps: int = 60, width: int = 48
) -> Path:
    """Write a Llama that answers ``pairs`` in Llama 3's template, one and all in a row; return its folder."""
    texts = [text for pair in pairs for text in pair] + ["user\n\nassistant\n\nsystem"]
    tokenizer = train_bpe(texts * 3, 400, MARKS)
    talks = [[Message("user", question), Message("assistant", answer)] for question, answer in pairs]
    talks.append([message for talk in talks for message in talk])
    rows = [taught(built_in_template("llama3", tokenizer), talk) for talk in talks]
    batch = torch.zeros(len(rows), max(len(tokens) for tokens, _ in rows), dtype=torch.long)
    targets = torch.full_like(batch, -100)
    for row, (tokens, is_target) in enumerate(rows):
        batch[row, : len(tokens)] = torch.tensor(tokens)
        after = [token if target else -100 for token, target in zip(tokens[1:], is_target[1:], strict=True)]
        targets[row, : len(after)] = torch.tensor(after)
    config = llama(width, 2, 4, 2, 96, tokenizer.vocab_size, context, eos=(tokenizer.special["<|eot_id|>"],))
    return _write(folder, config, tokenizer, batch, targets, steps)


def write_story_model(folder: Path, family: str = "llama", context: int = 8192) -> Path:
    """Write a base model that continues ``STORY`` without end; return its folder."""
    tokenizer = train_bpe([STORY] * 9, 320, ("<|endoftext|>",))
    tokens = torch.tensor([[tokenizer.bos, *tokenizer.encode(STORY * 3)]])
    sizes = (48, 2, 4, 2, 96) if family == "llama" else (48, 2, 4)
    config: LMConfig = (llama if family == "llama" else gpt2)(*sizes, tokenizer.vocab_size, context)  # type: ignore[operator]
    return _write(folder, config, tokenizer, tokens[:, :-1], tokens[:, 1:], 90)


TOOL_TEMPLATE = """{{- bos_token }}
{%- if tools %}<|start_header_id|>system<|end_header_id|>{{ tools | tojson }}<|eot_id|>{% endif %}
{%- for m in messages %}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>' + (m.content or '') }}
    {%- for call in m.tool_calls %}
        {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
        {{- (call.function.arguments | tojson) + '}</tool_call>' }}
    {%- endfor %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>
    {%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{%- endif %}"""


def write_tool_model(folder: Path, tools: Sequence[dict[str, Any]]) -> Path:
    """Write a Llama with ``TOOL_TEMPLATE`` that calls the tool "weather", counts and thinks; return its folder."""
    call = {"name": "weather", "arguments": {"city": "Paris"}}
    paris, think = Message("user", "weather in Paris?"), [Message("user", "think")]
    called = [paris, Message("assistant", None, {"tool_calls": [{"function": call}]}), Message("tool", "sunny")]
    texts = (
        (think, (), {}, "<think>\nthe cat sat\n</think>\n\na mat"),
        (think, (), {"enable_thinking": False}, "a dog"),
        ([Message("user", "count")], (), {}, "one two three four five"),
        ([Message("system", "be short"), Message("user", "count")], (), {}, "one two three four"),
        ([paris], tools, {}, f"<tool_call>{json.dumps(call)}</tool_call>"),
        (called, tools, {}, "it is sunny in Paris"),
    )
    words = [*(answer for *_, answer in texts), json.dumps(tools), "user assistant tool system count be short"]
    tokenizer = train_bpe(words * 3, 400, MARKS)
    end = tokenizer.special["<|eot_id|>"]
    rows = []
    for messages, given, arguments, answer in texts:
        template = ChatTemplate(
            "tools", tokenizer, {"default": TOOL_TEMPLATE}, {"bos_token": "<|begin_of_text|>"}, arguments
        )
        rows.append((template.prompt_tokens(messages, given), [*tokenizer.encode(answer), end]))
    batch = torch.zeros(len(rows), max(len(prompt) + len(answer) for prompt, answer in rows), dtype=torch.long)
    targets = torch.full_like(batch, -100)
    for row, (prompt, answer) in enumerate(rows):
        batch[row, : len(prompt) + len(answer)] = torch.tensor([*prompt, *answer])
        targets[row, len(prompt) - 1 : len(prompt) + len(answer) - 1] = torch.tensor(answer)
    config = llama(64, 2, 4, 2, 128, tokenizer.vocab_size, 512, eos=(end,))
    _write(folder, config, tokenizer, batch, targets, 120)
    (folder / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    return folder


def write_lora(model: Path, folder: Path, seed: int) -> Path:
    """Write a random LoRA of a Llama, as peft does, that changes what it says; return its folder."""
    torch.manual_seed(seed)
    base = LlamaForCausalLM.from_pretrained(model)
    layers = ["q_proj", "down_proj"]
    adapted = get_peft_model(base, LoraConfig(r=4, lora_alpha=64, target_modules=layers, init_lora_weights=False))
    adapted.save_pretrained(folder)
    return folder


def _write(
    folder: Path,
    config: LMConfig,
    tokenizer: Tokenizer,
    tokens: torch.Tensor,
    targets: torch.Tensor,
    steps: int,
) -> Path:
    model = TransformerLM(replace(config, tied=True)).initialise(torch.Generator().manual_seed(0))
    lr = 1e-2 if config.family == "llama" else 5e-3
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1, (step + 1) / 10) * (1 - step / steps)
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 0.2, f"the tiny model was not trained: loss {loss:.2f}"
    tokenizer.save(folder)
    return export_hf(model, folder)
