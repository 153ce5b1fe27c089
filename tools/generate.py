"""Generate images with a base model and any number of LoRAs; or let a language model write (``text --help``).

    python tools/generate.py image --model FLUX.1-dev --lora style.safetensors:0.8 face.safetensors \\
        --prompt "a cat in the rain" "a dog --w 768 --d 7" --w 1024 --h 1024 --save_to images
    python tools/generate.py image --model flux1-dev.safetensors --ae ae.safetensors --clip_l clip_l.safetensors \\
        --t5xxl t5xxl_fp16.safetensors --from_file prompts.toml

    python tools/generate.py grid --run output/my_run --strengths 0.6 0.8 1 --steps 500 1000
    python tools/generate.py grid --run folder --steps style.safetensors --model FLUX.1-dev --strengths 0 1 --prompt cat

    python tools/generate.py text --model Llama-3.2-1B --prompt "Once upon a time" --top_p 0.9

    python tools/generate.py image --model FLUX.1-Fill-dev --prompt "a red door" --ci house.png --mi door_mask.png

Prompts are those of training samples: lines with --n --w --h --d --s --g --l --ci --mi, or a .txt, .toml or .json file
of them. The same flags on the command line hold for every prompt that says nothing itself. No image is written over
another one; each carries its prompt, model and LoRAs as PNG text.

``grid`` shows which of a run's saved steps is best: prompts with each of them at each strength, and what was measured
of it. The model is loaded once. Images that are there, made with the same settings, are not made again. ``grid.png``
shows all, ``grid.json`` says which file is which. Without prompts it takes the run's sample prompts, else the captions
of three of its images, held-out ones first.
Several texts are one batch; a single one is shown while it is written.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from library.checksums import fingerprint
from library.config.markers import MOST_SIDE, MOST_STEPS
from library.config.model_types import BLANKS, IMAGE_MODELS, MODEL_TYPES
from library.config.rules import model_conflicts
from library.config.schema import DatasetArguments, ModelConfig, PrecisionConfig
from library.errors import UserError, counted, error_prefix, exit_on_user_error
from library.files import read_text, write_text
from library.llm.chat_templates import (
    CHAT_TEMPLATES,
    ChatTemplate,
    Message,
    PromptTemplate,
    TextTemplate,
    load_chat_template,
    template_arguments,
)
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

_OF_TEXTS = ("t5xxl_max_token_length", "zero_cond_t")
_FP8_FLAGS = ("fp8_base", "fp8_scaled", "fp8_granularity")


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser; each kind of thing to generate is a subcommand."""
    top = tool_parser(__doc__)
    commands = top.add_subparsers(title="what to generate", required=True, metavar="KIND", dest="kind")
    sub = commands.add_parser("image", help="images, with a diffusion transformer", allow_abbrev=False)
    _add_image_command(sub)
    sub = commands.add_parser("grid", help="images with each saved step of a run", allow_abbrev=False)
    sub.add_argument("--run", type=Path, required=True, metavar="FOLDER", help="output folder of the run")
    sub.add_argument("--steps", nargs="+", default=[], metavar="STEP", help="or files in its folder (default: all)")
    sub.add_argument("--strengths", nargs="+", type=strength, default=[1.0], metavar="X", help="of LoRAs (default: 1)")
    sub.add_argument("--record", type=Path, metavar="FILE", help="default: grid.json in the images' folder")
    _add_image_command(sub, of_run=True)
    _add_text_command(commands)
    return top


def _add_image_command(sub: argparse.ArgumentParser, of_run: bool = False) -> None:
    """Add the flags of ``image``; ``of_run``: those of ``grid``, where the run names the model."""
    model = sub.add_argument_group("model")
    model.add_argument("--model", required=not of_run, help="diffusers folder, transformer file, or name on the hub")
    model.add_argument("--model_type", choices=list(IMAGE_MODELS), help="architecture family")
    add_model_parts(model, ["no", "fp16", "bf16"])
    model.add_argument("--t5xxl_max_token_length", type=count, metavar="N", help="T5 tokens per prompt")
    zero_cond_t = ModelConfig.model_fields["zero_cond_t"].description
    model.add_argument("--zero_cond_t", action="store_true", default=None, help=zero_cond_t)
    model.add_argument("--lora", nargs="+", default=[], metavar="FILE[:STRENGTH]", help="LoRA files, of any layout")
    quantised = model.add_mutually_exclusive_group()
    for name in _FP8_FLAGS[:2]:
        quantised.add_argument(f"--{name}", action="store_true", help=PrecisionConfig.model_fields[name].description)
    model.add_argument("--fp8_granularity", choices=["tensor", "row", "block64", "block128"], help="of --fp8_scaled")
    what, side = sub.add_argument_group("prompts", "each holds where a prompt says nothing"), whole(most=MOST_SIDE)
    what.add_argument("--prompt", nargs="+", metavar="LINE", help="prompts, each with its own options if need be")
    what.add_argument("--from_file", metavar="FILE", help=".txt (a prompt a line), .toml or .json")
    what.add_argument("--n", default="", metavar="TEXT", help="negative prompt, used when --l is not 1")
    what.add_argument("--w", type=side, metavar="PIXELS", help="width (default: the family's, 1024)")
    what.add_argument("--h", type=side, metavar="PIXELS", help="height (default: the family's, 1024)")
    what.add_argument(
        "--d", type=seed_number, default=0, metavar="SEED", help="of the first prompt; the next has d + 1"
    )
    what.add_argument("--s", type=whole(most=MOST_STEPS), metavar="STEPS", help="steps (default: the family's)")
    what.add_argument("--g", type=finite, metavar="X", help="guidance input (default: the family's)")
    what.add_argument("--l", type=finite, metavar="X", help="classifier-free guidance, 1: none (default: the family's)")
    what.add_argument("--ci", nargs="+", default=[], metavar="FILE", help="image to fill, or reference images")
    what.add_argument("--mi", metavar="FILE", help="mask of the image to fill, white where to fill")
    blank = "what is under the mask before it is filled (default: as the LoRA was trained, else grey)"
    what.add_argument("--inpaint_blank", choices=BLANKS, help=blank)
    what.add_argument("--control_resolution", type=side, nargs="+", metavar="PIXELS", help="area of reference images")
    what.add_argument("--no_resize_control", action="store_true", help="reference images are only trimmed")
    folder = None if of_run else Path("output/generated")
    sub.add_argument("--save_to", type=Path, default=folder, help=f"folder (default: {folder or 'grid in the run'})")


def _add_text_command(commands: Any) -> None:
    """Add the subcommand to ``tools/generate.py``'s."""
    sub = commands.add_parser("text", help="text, with a language model", allow_abbrev=False)
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
        "--chat_template",
        metavar="NAME",
        help=f"of --chat: {', '.join(CHAT_TEMPLATES)}, or a Jinja file; default: as --lora was trained with, else auto",
    )
    what.add_argument("--chat_template_args", nargs="+", default=[], metavar="NAME=VALUE", help="enable_thinking=false")
    what.add_argument("--tools", metavar="FILE", help="of --chat: functions to call, a JSON list as OpenAI has it")
    what.add_argument("--system", metavar="TEXT", help="system message of --chat")
    add_sampling(sub)
    sub.add_argument("--save_to", type=Path, metavar="FILE", help="write prompts and texts as jsonl")


answer_early(__name__, lambda: parser().parse_args())

from library.llm.generation import SamplingSettings, generate_tokens, stream_tokens
from library.models.llm.model import TransformerLM
from library.training.report.run_folder import Checkpoint, checkpoints_of, settings_of


def image(options: argparse.Namespace) -> list[Path]:
    """Run the subcommand ``image``; return the files written."""
    from library.data.new_dataset import IMAGE_SUFFIXES
    from library.training.sampling.generate import Cell
    from library.training.sampling.images import save_image

    to: Path = options.save_to
    if to.is_file() or (to.suffix.lower() in IMAGE_SUFFIXES and not to.is_dir()):
        raise UserError(f"--save_to {to}: images get names of their own; give a folder")
    _, prompts, make = _opened(options)
    loras, written = tuple(map(lora_source, options.lora)), list[Path]()
    for prompt, made in make(cells=[Cell(prompt, loras) for prompt in prompts]):
        path = free_path(options.save_to, prompt)
        save_image(made, path, {"prompt": prompt.line(), "model": options.model, "loras": " ".join(options.lora)})
        tool_console().print(f"{path}: {prompt.line()}")
        written.append(path)
    return written


def _opened(options: argparse.Namespace) -> tuple[Any, list[SamplePrompt], Callable[..., Iterator[Any]]]:
    """Return the model, the prompts, and the function that makes the images of cells."""
    from library.data.buckets import ControlSizing
    from library.models.family_by_name import model_family
    from library.precision.recipe import plan_base
    from library.training.sampling.generate import generate_images

    config = model_config(options, options.model, *_OF_TEXTS)
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
    for remark in check_steering(prompts, family.guidance_input, usual.guidance):
        console.print(f"note: {remark}")
    if options.fp8_granularity and not options.fp8_scaled:
        raise UserError("--fp8_granularity: has no effect without --fp8_scaled; remove it")
    chosen = {key: value for key in _FP8_FLAGS if (value := getattr(options, key))}
    fp8 = plan_base(PrecisionConfig(**chosen), family.quantized_file(), 0, device)
    sizing = ControlSizing(_both(options.control_resolution), options.no_resize_control)
    how = {"dtype": dtype, "device": device, "console": console, "fp8": fp8, "blank": options.inpaint_blank}
    return family, prompts, partial(generate_images, family, sizing=sizing, **how)


def grid(options: argparse.Namespace) -> list[Path]:
    """Run the subcommand ``grid``; return its images, a row a step, and the picture that shows them."""
    from library.training.report.progress import counting
    from library.training.sampling.generate import Cell
    from library.training.sampling.images import prompt_of, save_image, write_sheet
    from networks.merging.merge import LoraSource

    steps, to = _complete(options), options.save_to or options.run / "grid"
    family, prompts, make = _opened(options)
    strengths = [float(f"{now:g}") for now in options.strengths]  # as a picture's name has it
    columns = [*{(prompt.line(), now): (prompt, now) for prompt in prompts for now in strengths}.values()]
    keys = (*_FP8_FLAGS, *_OF_TEXTS, "control_resolution", "no_resize_control", "inpaint_blank")
    how = [family.fingerprint(), *device_and_dtype(options.mixed_precision), *(getattr(options, key) for key in keys)]
    rows = []
    for step in steps:
        loras, row = (LoraSource(step.path, 1.0), *map(lora_source, options.lora)), {}
        for prompt, now in columns:
            made_by = [*how, prompt.line(), *map(fingerprint, prompt.images())]
            made_by += [(fingerprint(lora.path), lora.ratio) for lora in loras]
            key = hashlib.blake2b(repr(made_by).encode(errors="surrogateescape"), digest_size=6).hexdigest()
            row[to / f"{step.path.stem}_{key}_strength{now:g}.png"] = Cell(prompt, loras, now)
        rows.append(row)
    record = {
        "steps": [(step.path.name, step.about) for step in steps],
        "columns": [(prompt.prompt, now) for prompt, now in columns],
        "images": [[str(path.resolve()) for path in row] for row in rows],
    }
    write_text(options.record or to / "grid.json", json.dumps(record, indent=1))
    todo = {path: cell for row in rows for path, cell in row.items() if prompt_of(path) is None}
    with counting(tool_console()) as start:
        advance = start("images", len(rows) * len(columns))
        advance(len(rows) * len(columns) - len(todo))
        for (path, cell), (_, made) in zip(todo.items(), make(cells=[*todo.values()]) if todo else (), strict=True):
            loras = " ".join(f"{lora.path}:{cell.strength * lora.ratio:g}" for lora in cell.loras)
            save_image(made, path, {"prompt": cell.prompt.line(), "model": options.model, "loras": loras})
            advance(1)
    titles = [f"{now:g}: {prompt.prompt[:24]}" for prompt, now in columns]
    write_sheet(to / "grid.png", titles, [(step.about, [*row]) for step, row in zip(steps, rows, strict=True)])
    made_of = f"{to / 'grid.png'}: {counted(len(columns), 'image')} of each of"
    print(made_of, *(step.about for step in steps), sep="\n  ")
    return [*(path for row in rows for path in row), to / "grid.png"]


def _complete(options: argparse.Namespace) -> list[Checkpoint]:
    """Return the saved steps that are meant; fill in what the command line leaves open, as the run had it.

    Without prompts of the run, three captions of its images are the prompts, held-out images first.
    """
    from library.data.captions import plain_caption
    from library.data.config import load_dataset_config
    from library.data.samples import scan

    run, saved = settings_of(options.run), checkpoints_of(options.run)
    named = {str(one.step): one for one in saved} | {one.path.name: one for one in saved}
    steps = [named.get(name) or Checkpoint(options.run / name, about=name) for name in options.steps]
    steps = steps or [*{one.step: one for one in saved}.values()]
    has = ", ".join(str(one.step) for one in saved) or "none of its own"
    if not steps:
        why = "has no LoRA that a run has saved" if options.run.is_dir() else "is no folder"
        raise UserError(f"{options.run}: {why}; give the output folder of a run that has saved one")
    if missing := [one.path.name for one in steps if not one.path.is_file()]:
        raise UserError(f"--steps {missing[0]}: is not in {options.run}; it has {has}")
    for key in run.keys() & vars(options).keys() - {"mixed_precision"}:
        setattr(options, key, getattr(options, key) or run[key])
    if not (options.model or run.get("pretrained_model_name_or_path")):
        raise UserError(f"{options.run}: has no config.toml of a run, which names the model; add --model")
    options.model = options.model or run["pretrained_model_name_or_path"]
    if not (options.prompt or options.from_file):
        options.from_file = run.get("sample_prompts")
        if not options.from_file and run.get("dataset_config"):
            given = {key: run[key] for key in DatasetArguments.model_fields if key in run}
            arguments, kind = DatasetArguments.model_validate(given), MODEL_TYPES[run.get("model_type", "flux")]
            config = load_dataset_config(run["dataset_config"], arguments, kind.conditioning)
            found = scan(config, run.get("seed", 0), kind.pixel_multiple)
            captions = (plain_caption(one.caption, one.settings) for one in (*found.held_out, *found.train))
            options.from_file = [*filter(None, dict.fromkeys(" ".join(text.split()) for text in captions))][:3]
    return steps


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
    from library.llm.chat_batches import read_tools
    from library.models.llm.files import open_lm
    from library.training.tasks.chat_lora import put_lora_on

    prompts = read_text_prompts(options)
    folder = find_model(options.model, "--model", is_pipeline=False)
    ends = open_lm(folder)[0].eos
    tokenizer = load_tokenizer(options.tokenizer or folder)
    lora = lora_source(options.lora) if options.lora else None
    template = read_template(options, tokenizer, folder, lora)
    settings = replace(sampling_settings(options), stop_tokens=(*tokenizer.stop_tokens, *template.ends, *ends))
    if isinstance(template, ChatTemplate):
        first = [Message("system", options.system)] if options.system else []
        tools = read_tools({"tools": read_text(options.tools)}, options.tools) if options.tools else ()
        given = [template.prompt_tokens([*first, Message("user", prompt)], tools) for prompt in prompts]
    else:
        given = [template.prompt("", [], prompt) for prompt in prompts]
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
        for name in ("chat_template", "chat_template_args", "tools"):
            if getattr(options, name):
                raise UserError(f"--{name}: has no effect without --chat; add it")
        return TextTemplate(tokenizer)
    from library.training.tasks.chat_lora import template_of

    stored, arguments = template_of(lora.path) if lora else (None, {})
    arguments |= template_arguments(options.chat_template_args)
    name = options.chat_template or stored or "auto"
    return load_chat_template(name, tokenizer, options.tokenizer or folder, arguments)


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
    return {"image": image, "grid": grid, "text": text}[options.kind](options)


@exit_on_user_error
def main() -> None:
    """Parse the command line and generate."""
    options = parser().parse_args()
    generate(options)


if __name__ == "__main__":
    main()
