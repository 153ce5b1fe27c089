"""``tools/generate.py text``: prompts go on, several in one batch, one shown while it is written."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from library.config.schema import PrecisionConfig
from library.errors import UserError
from library.files import write_text
from library.llm.chat_templates import CHAT_TEMPLATES, ChatTemplate, Llama3Template, Message, load_chat_template
from library.llm.generation import SamplingSettings, generate_tokens, stream_tokens
from library.llm.tokenizers import IncrementalDecoder, Tokenizer, load_tokenizer
from library.models.llm.files import load_lm, open_lm
from library.models.llm.model import TransformerLM
from library.training.tasks.chat_lora import put_lora_on, template_of
from library.training.tasks.lora_plan import plan_fp8
from networks.merging.merge import LoraSource
from tools.merge_lora import parse_source

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_DEFAULTS = SamplingSettings()
SAMPLING_NAMES = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


def text(options: argparse.Namespace) -> list[str]:
    """Run the subcommand; return what was written for each prompt.

    Raises:
        UserError: no prompt, a model or tokenizer that cannot be read, or settings without meaning.
    """
    prompts = read_prompts(options)
    ends = open_lm(Path(options.model).expanduser())[0].eos
    tokenizer = load_tokenizer(options.tokenizer or options.model)
    lora = parse_source(options.lora) if options.lora else None
    template = read_template(options, tokenizer, lora)
    turn_ends = template.ends if template else ()
    settings = replace(read_settings(options), stop_tokens=(*tokenizer.stop_tokens, *turn_ends, *ends))
    given = [prompt_tokens(tokenizer, prompt, options.chat, options.system, template) for prompt in prompts]
    model = load(options.model, options.dtype, options.fp8_scaled)
    if lora is not None:
        put_lora_on(model, lora.path, lora.ratio)
    if len(prompts) == 1:
        texts = [_streamed(model, tokenizer, given[0], settings, "" if options.chat else prompts[0])]
    else:
        written = generate_tokens(model, given, settings)
        texts = [tokenizer.decode(tokens, skip_special=True) for tokens in written]
        for prompt, made in zip(prompts, texts, strict=True):
            print(f"--- {prompt}\n{made}\n")
    if options.save_to is not None:
        lines = [json.dumps({"prompt": p, "text": t}, ensure_ascii=False) for p, t in zip(prompts, texts, strict=True)]
        write_text(options.save_to, "\n".join(lines) + "\n")
    return texts


def read_settings(options: argparse.Namespace) -> SamplingSettings:
    """Return what the flags of :func:`add_sampling_flags` say."""
    return SamplingSettings(**{name: getattr(options, name) for name in SAMPLING_NAMES})


def load(folder: str, dtype: str | None, fp8_scaled: bool) -> TransformerLM:
    """Return the model on the device there is; fp32 on a CPU and bf16 on a GPU unless ``dtype`` says otherwise."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = dtype or ("bf16" if device.type == "cuda" else "fp32")
    layout = open_lm(Path(folder).expanduser())[1].fp8
    fp8 = plan_fp8(PrecisionConfig(fp8_scaled=True) if fp8_scaled else PrecisionConfig(), layout, 0, device)
    return load_lm(folder, _DTYPES[name], device, fp8=fp8)


def read_template(options: argparse.Namespace, tokenizer: Tokenizer, lora: LoraSource | None) -> ChatTemplate | None:
    """Return the template of --chat: as asked, as the LoRA was trained with, or what fits; None without --chat.

    Raises:
        UserError: the tokenizer lacks the template's marks, or --chat_template is in vain.
    """
    if not options.chat:
        if options.chat_template:
            raise UserError("--chat_template: has no effect without --chat; add it")
        return None
    name = options.chat_template or (template_of(lora.path) if lora else None) or "auto"
    return load_chat_template(name, tokenizer, options.tokenizer or options.model)


def read_prompts(options: argparse.Namespace) -> list[str]:
    """Return the prompts that the command line names; raises a UserError if there are none, or --system is in vain."""
    if bool(options.prompt) == bool(options.from_file):
        raise UserError('give either --prompt "..." or --from_file FILE')
    if options.system and not options.chat:
        raise UserError("--system: has no effect without --chat; add it")
    if options.prompt:
        return list(options.prompt)
    try:
        lines = Path(options.from_file).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"--from_file: {options.from_file}: {error.strerror}; check the path") from None
    except UnicodeDecodeError as error:
        raise UserError(f"--from_file: {options.from_file}: not UTF-8 at byte {error.start}; convert it") from None
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise UserError(f"--from_file: {options.from_file} holds no prompt; write one a line")
    return prompts


def prompt_tokens(
    tokenizer: Tokenizer, prompt: str, chat: bool, system: str | None, template: ChatTemplate | None = None
) -> list[int]:
    """Return the tokens of a prompt: a text's beginning, or a message in ``template``, Llama 3's by default."""
    if chat:
        messages = [Message("system", system)] if system else []
        template = template or Llama3Template(tokenizer)
        return template.tokens([*messages, Message("user", prompt)], answer_next=True)[0]
    first = [] if tokenizer.bos is None else [tokenizer.bos]
    return first + tokenizer.encode(prompt)


def _streamed(
    model: TransformerLM, tokenizer: Tokenizer, tokens: Sequence[int], settings: SamplingSettings, beginning: str
) -> str:
    """Print the text while it is made; return it."""
    decoder, made = IncrementalDecoder(tokenizer), ""
    print(beginning, end="", flush=True)
    for (token,) in stream_tokens(model, [tokens], settings):
        if token is not None:
            part = decoder.add(token)
            made += part
            print(part, end="", flush=True)
    rest = decoder.rest()
    print(rest)
    return made + rest


def add_text_command(commands: Any) -> None:
    """Add the subcommand to ``tools/generate.py``'s."""
    sub = commands.add_parser("text", help="text, with a language model", allow_abbrev=False)
    sub.set_defaults(run=text)
    model = sub.add_argument_group("model")
    model.add_argument("--model", required=True, help="folder of a GPT-2 or Llama model, in any published layout")
    add_model_flags(model)
    model.add_argument("--lora", metavar="FOLDER[:STRENGTH]", help="LoRA that train_lora.py or peft wrote")
    what = sub.add_argument_group("prompts")
    what.add_argument(
        "--prompt", nargs="+", metavar="TEXT", help="one is shown while it is written; several are a batch"
    )
    what.add_argument("--from_file", metavar="FILE", help="a prompt a line")
    what.add_argument("--chat", action="store_true", help="prompts are messages, in a chat template")
    what.add_argument(
        "--chat_template", choices=CHAT_TEMPLATES, help="of --chat; default: as --lora was trained with, else auto"
    )
    what.add_argument("--system", metavar="TEXT", help="system message of --chat")
    add_sampling_flags(sub)
    sub.add_argument("--save_to", type=Path, metavar="FILE", help="write prompts and texts as jsonl")


def add_model_flags(model: Any) -> None:
    """Add the flags that say how a model is loaded to an argument group."""
    model.add_argument("--tokenizer", metavar="PATH", help="default: the one in the model's folder")
    model.add_argument("--dtype", choices=list(_DTYPES), help="of the weights; default: bf16 on a GPU, fp32 on a CPU")
    model.add_argument("--fp8_scaled", action="store_true", help="quantise linear weights to fp8 as they are loaded")


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each field of ``SamplingSettings`` that a user chooses."""
    how = parser.add_argument_group("sampling")
    how.add_argument("--max_new_tokens", type=int, default=_DEFAULTS.max_new_tokens, metavar="N")
    how.add_argument(
        "--temperature", type=float, default=_DEFAULTS.temperature, metavar="X", help="0: most likely token"
    )
    how.add_argument("--top_k", type=int, metavar="N", help="draw among the N most likely tokens")
    how.add_argument("--top_p", type=float, metavar="X", help="draw among the most likely tokens of probability X")
    how.add_argument("--min_p", type=float, metavar="X", help="draw among tokens X times as likely as the likeliest")
    how.add_argument("--repetition_penalty", type=float, default=1.0, metavar="X", help="above 1: repeat less")
    how.add_argument("--seed", type=int, default=0)
