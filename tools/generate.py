"""Generate images with a base model and any number of LoRAs; or let a language model write (``text --help``).

    python tools/generate.py image --model FLUX.1-dev --lora style.safetensors:0.8 face.safetensors \\
        --prompt "a cat in the rain" "a dog --w 768 --d 7" --w 1024 --h 1024 --save_to images
    python tools/generate.py image --model flux1-dev.safetensors --ae ae.safetensors --clip_l clip_l.safetensors \\
        --t5xxl t5xxl_fp16.safetensors --from_file prompts.toml

    python tools/generate.py image --model FLUX.1-dev --lora style.safetensors --strengths 0 0.5 1 --prompt "a cat"

    python tools/generate.py text --model Llama-3.2-1B --prompt "Once upon a time" --top_p 0.9

    python tools/generate.py image --model FLUX.1-Fill-dev --prompt "a red door" --ci house.png --mi door_mask.png

Prompts are those of training samples: lines with --n --w --h --d --s --g --l --ci --mi, or a .txt, .toml or .json file
of them. The same flags on the command line hold for every prompt that says nothing itself. No image is written over
another one; each carries its prompt, model and LoRAs as PNG text. With --strengths each prompt is
painted at each of them, and ``images.jsonl`` beside the images says which is which, a line as soon as one is there.
Several texts are one batch; a single one is shown while it is written.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from library.config.markers import MOST_SIDE, MOST_STEPS
from library.config.model_types import BLANKS, IMAGE_MODELS
from library.config.rules import model_conflicts
from library.config.schema import ModelConfig, PrecisionConfig
from library.errors import UserError, error_prefix, exit_on_user_error
from library.files import read_text, write_text
from library.llm.chat_templates import CHAT_TEMPLATES, PromptTemplate, TextTemplate, load_chat_template
from library.llm.tokenizer_files import load_tokenizer
from library.llm.tokenizers import IncrementalDecoder, Tokenizer
from library.models.hub import find_model
from library.training.sampling.prompts import SamplePrompt, check_steering, parse_prompt, read_prompts, usual_prompt
from tools.command import (
    add_language_model,
    add_model_parts,
    add_sampling,
    answer_early,
    count,
    device_and_dtype,
    finite,
    load_language_model,
    lora_source,
    model_config,
    sampling_settings,
    seed_number,
    strength,
    tool_console,
    tool_parser,
    whole,
)

if TYPE_CHECKING:
    from networks.merging.merge import LoraSource

_FP8_FLAGS = ("fp8_base", "fp8_scaled", "fp8_granularity")


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser; each kind of thing to generate is a subcommand."""
    top = tool_parser(__doc__)
    commands = top.add_subparsers(title="what to generate", required=True, metavar="KIND")
    sub = commands.add_parser("image", help="images, with a diffusion transformer", allow_abbrev=False)
    sub.set_defaults(kind="image")
    model = sub.add_argument_group("model")
    model.add_argument("--model", required=True, help="diffusers folder, transformer file, or name on the hub")
    model.add_argument("--model_type", choices=list(IMAGE_MODELS), help="architecture family")
    add_model_parts(model, ["no", "fp16", "bf16"])
    model.add_argument("--t5xxl_max_token_length", type=count, metavar="N", help="T5 tokens per prompt")
    zero_cond_t = ModelConfig.model_fields["zero_cond_t"].description
    model.add_argument("--zero_cond_t", action="store_true", default=None, help=zero_cond_t)
    model.add_argument("--lora", nargs="+", default=[], metavar="FILE[:STRENGTH]", help="LoRA files, of any layout")
    model.add_argument(
        "--strengths",
        nargs="+",
        type=strength,
        default=[],
        metavar="X",
        help="paint each prompt at each of these, times the LoRAs' own; one loading",
    )
    quantised = model.add_mutually_exclusive_group()
    for name in _FP8_FLAGS[:2]:
        quantised.add_argument(f"--{name}", action="store_true", help=PrecisionConfig.model_fields[name].description)
    model.add_argument("--fp8_granularity", choices=["tensor", "row", "block64", "block128"], help="of --fp8_scaled")
    what = sub.add_argument_group("prompts", "each flag holds where a prompt says nothing itself")
    what.add_argument("--prompt", nargs="+", metavar="LINE", help="prompts, each with its own options if need be")
    what.add_argument("--from_file", metavar="FILE", help=".txt (a prompt a line), .toml or .json")
    what.add_argument("--n", default="", metavar="TEXT", help="negative prompt, used when --l is not 1")
    what.add_argument("--w", type=whole(most=MOST_SIDE), metavar="PIXELS", help="width (default: the family's, 1024)")
    what.add_argument("--h", type=whole(most=MOST_SIDE), metavar="PIXELS", help="height (default: the family's, 1024)")
    what.add_argument(
        "--d", type=seed_number, default=0, metavar="SEED", help="seed of the first prompt; the next has d + 1"
    )
    what.add_argument("--s", type=whole(most=MOST_STEPS), metavar="STEPS", help="steps (default: the family's)")
    what.add_argument("--g", type=finite, metavar="X", help="guidance input (default: the family's)")
    what.add_argument("--l", type=finite, metavar="X", help="classifier-free guidance, 1: none (default: the family's)")
    what.add_argument("--ci", nargs="+", default=[], metavar="FILE", help="image to fill, or reference images")
    what.add_argument("--mi", metavar="FILE", help="mask of the image to fill, white where to fill")
    blank = "what is under the mask before it is filled (default: as the LoRA was trained, else grey)"
    what.add_argument("--inpaint_blank", choices=BLANKS, help=blank)
    what.add_argument(
        "--control_resolution", type=whole(most=MOST_SIDE), nargs="+", metavar="PIXELS", help="area of reference images"
    )
    what.add_argument("--no_resize_control", action="store_true", help="reference images are only trimmed")
    sub.add_argument(
        "--save_to",
        type=Path,
        default=Path("output/generated"),
        help="folder (default: %(default)s)",
    )
    _add_text_command(commands)
    return top


def _add_text_command(commands: Any) -> None:
    """Add the subcommand to ``tools/generate.py``'s."""
    sub = commands.add_parser("text", help="text, with a language model", allow_abbrev=False)
    sub.set_defaults(kind="text")
    model = sub.add_argument_group("model")
    model.add_argument("--model", required=True, help="language model: folder in any published layout, or GGUF file")
    add_language_model(model)
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
    add_sampling(sub)
    sub.add_argument("--save_to", type=Path, metavar="FILE", help="write prompts and texts as jsonl")


answer_early(__name__, lambda: parser().parse_args())

from library.llm.generation import SamplingSettings, generate_tokens, stream_tokens
from library.models.llm.model import TransformerLM


def image(options: argparse.Namespace) -> list[Path]:
    """Run the subcommand ``image``; return the files written."""
    from library.data.buckets import ControlSizing
    from library.data.new_dataset import IMAGE_SUFFIXES
    from library.models.family_by_name import model_family
    from library.precision.recipe import plan_base
    from library.training.sampling.generate import generate_images
    from library.training.sampling.images import save_image

    to: Path = options.save_to
    if to.is_file() or (to.suffix.lower() in IMAGE_SUFFIXES and not to.is_dir()):
        raise UserError(f"--save_to {to}: images get names of their own; give a folder")
    config = model_config(options, options.model, "t5xxl_max_token_length", "zero_cond_t")
    for problem in model_conflicts(config):
        raise UserError(problem.message)
    family = model_family(config)
    device, dtype = device_and_dtype(options.mixed_precision)
    if options.mixed_precision == "fp16" and device.type == "cpu":
        raise UserError("--mixed_precision: fp16 needs a GPU; on a CPU use bf16 or no")
    console = tool_console()
    multiple = family.load_image_encoder(dtype, device).pixel_multiple
    usual = usual_prompt(family)
    prompts = read_image_prompts(options, multiple, usual)
    strengths = options.strengths or [1.0]
    if options.strengths and not options.lora:
        raise UserError("--strengths: are of LoRAs; give --lora")
    for remark in check_steering(prompts, family.guidance_input, usual.guidance):
        console.print(f"note: {remark}")
    sources = [lora_source(text) for text in options.lora]
    if options.fp8_granularity and not options.fp8_scaled:
        raise UserError("--fp8_granularity: has no effect without --fp8_scaled; remove it")
    chosen = {key: value for key in _FP8_FLAGS if (value := getattr(options, key))}
    fp8 = plan_base(PrecisionConfig(**chosen), family.quantized_file(), 0, device)
    sizing = ControlSizing(_both(options.control_resolution), options.no_resize_control)
    record = {"model": options.model, "loras": " ".join(options.lora)}
    written: list[Path] = []
    for number, (prompt, made) in enumerate(
        generate_images(
            *(family, prompts, sources, dtype, device, console, fp8, sizing, options.inpaint_blank), strengths=strengths
        )
    ):
        path, now = free_path(options.save_to, prompt), strengths[number % len(strengths)]
        if options.strengths:
            path, record["strength"] = path.with_stem(f"{path.stem}_strength{now:g}"), f"{now:g}"
        save_image(made, path, {"prompt": prompt.line(), **record})
        if options.strengths:
            entry = {"file": path.name, "prompt": prompt.line(), "row": number // len(strengths), "strength": now}
            with open(options.save_to / "images.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        console.print(f"{path}: {prompt.line()}")
        written.append(path)
    return written


def _both(sides: Sequence[int] | None) -> tuple[int, int] | None:
    if sides is None:
        return None
    if len(sides) > 2 or min(sides) < 1:
        raise UserError("--control_resolution: takes one number of pixels, or width and height")
    return sides[0], sides[-1]


def free_path(folder: Path, prompt: SamplePrompt) -> Path:
    """Return a path in ``folder`` for the image; its number is one more than the largest there."""
    words = re.sub(r"[^a-z0-9]+", "-", prompt.prompt.lower())[:40].strip("-") or "image"
    numbers = [int(match[1]) for path in folder.glob("*") if (match := re.match(r"(\d{4,})_", path.name))]
    return folder / f"{max(numbers, default=-1) + 1:04d}_{words}_seed{prompt.seed}.png"


def read_image_prompts(options: argparse.Namespace, pixel_multiple: int, usual: SamplePrompt) -> list[SamplePrompt]:
    """Return the prompts that the command line asks for; ``usual`` is what neither it nor they say."""
    if bool(options.prompt) == bool(options.from_file):
        raise UserError('give either --prompt "..." or --from_file FILE')
    numbers = {"width": options.w, "height": options.h, "steps": options.s, "guidance": options.g, "cfg": options.l}
    given = {key: value for key, value in numbers.items() if value is not None}
    more = {"negative": options.n, "seed": options.d, "control_images": tuple(options.ci), "mask_image": options.mi}
    default = replace(usual, **given, **more)
    if options.from_file:
        return read_prompts(options.from_file, options.d, pixel_multiple, default, "--from_file")
    prompts = []
    for i, line in enumerate(options.prompt):
        seeded = replace(default, seed=default.seed + i)
        prompts.append(parse_prompt(line, seeded, pixel_multiple, f"--prompt {i + 1}"))
    return prompts


def text(options: argparse.Namespace) -> list[str]:
    """Run the subcommand; return what was written for each prompt."""
    from library.models.llm.files import open_lm
    from library.training.tasks.chat_lora import put_lora_on

    prompts = read_text_prompts(options)
    folder = find_model(options.model, "--model", is_pipeline=False)
    ends = open_lm(folder)[0].eos
    tokenizer = load_tokenizer(options.tokenizer or folder)
    lora = lora_source(options.lora) if options.lora else None
    template = read_template(options, tokenizer, folder, lora)
    settings = replace(sampling_settings(options), stop_tokens=(*tokenizer.stop_tokens, *template.ends, *ends))
    given = [template.prompt(options.system or "", [], prompt) for prompt in prompts]
    model = load_language_model(folder, options.dtype, options.fp8_scaled)
    if lora is not None:
        put_lora_on(model, lora.path, lora.ratio)
    if len(prompts) == 1:
        print("" if options.chat else prompts[0], end="", flush=True)
        written = [_streamed(model, tokenizer, given[0], settings)]
    else:
        written = generate_tokens(model, given, settings)
    texts = [tokenizer.decode(tokens, skip_special=True) for tokens in written]
    for prompt, made in zip(prompts, texts, strict=True) if len(prompts) > 1 else ():
        print(f"--- {prompt}\n{made}\n")
    if options.save_to is not None:
        lines = [json.dumps({"prompt": p, "text": t}, ensure_ascii=False) for p, t in zip(prompts, texts, strict=True)]
        write_text(options.save_to, "\n".join(lines) + "\n")
    return texts


def read_template(
    options: argparse.Namespace, tokenizer: Tokenizer, folder: Path, lora: LoraSource | None
) -> PromptTemplate:
    """Return the template of --chat: as asked, as the LoRA was trained with, or what fits; of text without --chat."""
    if not options.chat:
        if options.chat_template:
            raise UserError("--chat_template: has no effect without --chat; add it")
        return TextTemplate(tokenizer)
    from library.training.tasks.chat_lora import template_of

    name = options.chat_template or (template_of(lora.path) if lora else None) or "auto"
    return load_chat_template(name, tokenizer, options.tokenizer or folder)


def read_text_prompts(options: argparse.Namespace) -> list[str]:
    """Return the prompts that the command line names; raises a UserError if there are none, or --system is in vain."""
    if bool(options.prompt) == bool(options.from_file):
        raise UserError('give either --prompt "..." or --from_file FILE')
    if options.system and not options.chat:
        raise UserError("--system: has no effect without --chat; add it")
    if options.prompt:
        return list(options.prompt)
    with error_prefix("--from_file"):
        prompts = [line for line in read_text(options.from_file).split("\n") if line.strip()]
    if not prompts:
        raise UserError(f"--from_file: {options.from_file} holds no prompt; write one a line")
    return prompts


def _streamed(model: TransformerLM, tokenizer: Tokenizer, prompt: list[int], how: SamplingSettings) -> list[int]:
    """Print the text while it is made; return its tokens."""
    decoder, tokens = IncrementalDecoder(tokenizer), list[int]()
    for (token,) in stream_tokens(model, [prompt], how):
        assert token is not None
        tokens.append(token)
        print(decoder.add(token), end="", flush=True)
    print(decoder.rest())
    return tokens


def generate(options: argparse.Namespace) -> list[Path] | list[str]:
    """Run the subcommand; return the files it wrote, or the texts."""
    return image(options) if options.kind == "image" else text(options)


@exit_on_user_error
def main() -> None:
    """Parse the command line and generate."""
    options = parser().parse_args()
    generate(options)


if __name__ == "__main__":
    main()
