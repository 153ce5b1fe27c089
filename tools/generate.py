"""Draw pictures with a base model and any number of LoRAs; or let a language model write (``text --help``).

    python tools/generate.py image --model FLUX.1-dev --lora style.safetensors:0.8 face.safetensors \\
        --prompt "a cat in the rain" "a dog --w 768 --d 7" --w 1024 --h 1024 --save_to pictures
    python tools/generate.py image --model flux1-dev.safetensors --ae ae.safetensors --clip_l clip_l.safetensors \\
        --t5xxl t5xxl_fp16.safetensors --from_file prompts.toml

    python tools/generate.py text --model Llama-3.2-1B --prompt "Once upon a time" --top_p 0.9

    python tools/generate.py image --model FLUX.1-Fill-dev --prompt "a red door" --ci house.png --mi door_mask.png

Prompts are those of training samples: lines with --n --w --h --d --s --g --l --ci --mi, or a .txt, .toml or .json file
of them.
The same flags on the command line hold for every prompt that says nothing itself. A picture is never written over
another one; each carries its prompt, model and LoRAs as PNG text.

The order is that of memory: text encoders, out again, transformer with its LoRAs, pictures. Several LoRAs become one
of the summed rank, which is exact (``networks.merging.low_rank``) and costs one pair of small products a layer.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from PIL.Image import Image
from rich.console import Console

from library.config.model_types import IMAGE_MODELS, MODEL_FILE_KEYS
from library.config.rules import model_conflicts
from library.config.schema import ModelConfig, PrecisionConfig
from library.data.cache import TextJob, encode_text_batch
from library.data.sidecars import ControlSizing
from library.errors import UserError, exit_on_user_error
from library.models.family import Family, model_family
from library.models.layer_names import LoraTargets
from library.models.text import TextEncoder
from library.precision.recipe import Fp8Loader
from library.training.sampling.conditions import PromptImageRules, check_prompt_images, encode_prompt_images, text_jobs
from library.training.sampling.images import save_image
from library.training.sampling.prompts import SamplePrompt, check_steering, parse_prompt, read_prompts
from library.training.tasks.lora_plan import describe_base, plan_fp8
from networks.files.adapters import load_lora
from networks.files.metadata import base_mismatch
from networks.files.weights import LoraWeights
from networks.injection import attach_lora
from networks.merging.low_rank import combine_loras
from networks.merging.merge import LoraSource
from tools.generation.text import add_text_command
from tools.merge_lora import parse_source

_MODEL_FLAGS = ("model_type", *MODEL_FILE_KEYS, "t5xxl_max_token_length", "zero_cond_t")
_FP8_FLAGS = ("fp8_base", "fp8_scaled", "fp8_granularity")
_DTYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def draw(
    family: Family,
    prompts: Sequence[SamplePrompt],
    loras: Sequence[LoraSource],
    dtype: torch.dtype,
    device: torch.device,
    console: Console,
    fp8: Fp8Loader | None = None,
    sizing: ControlSizing | None = None,
) -> Iterator[tuple[SamplePrompt, Image]]:
    """Yield each prompt with its picture.

    Args:
        family: the base model.
        prompts: what to draw.
        loras: files with their strengths; updates of the same layer add up.
        dtype: of the weights, and of the products when it is a 16-bit one.
        device: where to compute.
        console: for what is to be known about model and LoRAs.
        fp8: which weights of the transformer become fp8; what its file has in fp8 stays so.
        sizing: of reference pictures; by default they get the prompt's width and height.

    Raises:
        UserError: a LoRA cannot be read or does not fit the model; prompts lack the pictures that the model needs.
    """
    check_prompt_images(prompts, family.conditioning, family.most_references)
    weights = read_loras(loras, family, console)  # before anything that takes time
    source = " + ".join(str(lora.path) for lora in loras)
    targets = family.targets
    image_encoder = family.load_image_encoder(dtype, device)
    text_encoder = family.load_text_encoder(dtype, device)
    rules = PromptImageRules(family.conditioning, sizing or ControlSizing(), image_encoder.pixel_multiple)
    texts: dict[str, TextJob] = {}
    for prompt in prompts:
        texts |= text_jobs(prompt, text_encoder.sees_references, rules)
    embeddings = encode(text_encoder, texts, weights, targets, source)
    conditions = [encode_prompt_images(prompt, image_encoder, rules) for prompt in prompts]
    fp8 = fp8 or Fp8Loader()
    transformer = family.load_transformer(dtype, device, fp8=fp8)
    if (layout := family.fp8_layout()) or fp8.recipe:
        console.print(f"base: {describe_base(layout, fp8, dtype)}")
    if own := weights.get(targets.file_prefix):
        attach_lora(transformer, own, targets, source)
    for prompt, its_conditions in zip(prompts, conditions, strict=True):
        yield (
            prompt,
            family.sample(
                transformer,
                image_encoder,
                embeddings[prompt.text_key(prompt.prompt)],
                width=prompt.width,
                height=prompt.height,
                steps=prompt.steps,
                guidance=prompt.guidance,
                seed=prompt.seed,
                negative_text=embeddings[prompt.text_key(prompt.negative)] if prompt.cfg != 1.0 else None,
                cfg=prompt.cfg,
                conditions=its_conditions,
            ),
        )


def read_loras(loras: Sequence[LoraSource], family: Family, console: Console) -> dict[str, dict[str, LoraWeights]]:
    """Return component (transformer, text encoders) -> the sum of all LoRAs there; say what they are.

    Raises:
        UserError: a file cannot be read.
    """
    targets = family.targets
    read = [(source, load_lora(source.path, targets)) for source in loras]
    here = family.fingerprint() if any("tandem.base_fingerprint" in lora.metadata for _, lora in read) else None
    for source, lora in read:
        console.print(f"{source.path}: {lora.layout}, {len(lora.weights)} layers, strength {source.ratio:g}")
        if here and (remark := base_mismatch(lora.metadata, here)):
            console.print(f"note: {source.path}: {remark}")
    return targets.by_component(combine_loras([(lora.weights, source.ratio) for source, lora in read]))


@torch.no_grad()
def encode(
    text_encoder: TextEncoder,
    texts: Mapping[str, TextJob],
    loras: Mapping[str, Mapping[str, LoraWeights]],
    targets: LoraTargets,
    source: str,
) -> dict[str, dict[str, torch.Tensor]]:
    """Return every text's embeddings by key, without a batch axis, on the CPU, from the encoders with their LoRAs.

    Args:
        text_encoder: is let go of afterwards.
        texts: to encode, by ``SamplePrompt.text_key``.
        loras: component -> weights; the transformer's are not used.
        targets: the family's row.
        source: the files' names, for messages.
    """
    embeddings = {key: encode_text_batch([job], text_encoder)[0] for key, job in texts.items()}
    text_encoder.release()
    for encoder in targets.text_encoders:
        if weights := loras.get(encoder.name):
            module = text_encoder.load_modules([encoder.name])
            attach_lora(module, weights, targets, source)
            for key, cached in embeddings.items():
                cached |= {name: rows[0].cpu() for name, rows in module([texts[key].caption]).items()}
    return embeddings


def free_path(folder: Path, prompt: SamplePrompt) -> Path:
    """Return a path in ``folder`` for the picture; its number is one more than the largest there."""
    words = re.sub(r"[^a-z0-9]+", "-", prompt.prompt.lower())[:40].strip("-") or "picture"
    numbers = [int(match[1]) for path in folder.glob("*.png") if (match := re.match(r"(\d{4,})_", path.name))]
    return folder / f"{max(numbers, default=-1) + 1:04d}_{words}_seed{prompt.seed}.png"


def read_asked(options: argparse.Namespace, pixel_multiple: int, guidance: float) -> list[SamplePrompt]:
    """Return the prompts that the command line asks for; ``guidance`` is for those that say nothing about it.

    Raises:
        UserError: neither or both of --prompt and --from_file, or a prompt that is not right.
    """
    if bool(options.prompt) == bool(options.from_file):
        raise UserError('give either --prompt "..." or --from_file FILE')
    given_guidance = guidance if options.g is None else options.g
    numbers = (options.w, options.h, options.d, options.s, given_guidance, options.l)
    default = SamplePrompt("", options.n, *numbers, tuple(options.ci), options.mi)
    if options.from_file:
        return read_prompts(options.from_file, options.d, pixel_multiple, default, "--from_file")
    prompts = []
    for i, line in enumerate(options.prompt):
        seeded = replace(default, seed=default.seed + i)
        prompts.append(parse_prompt(line, seeded, pixel_multiple, f"--prompt {i + 1}"))
    return prompts


def image(options: argparse.Namespace) -> list[Path]:
    """Run the subcommand ``image``; return the pictures written."""
    given = {name: value for name in _MODEL_FLAGS if (value := getattr(options, name)) is not None}
    config = ModelConfig(pretrained_model_name_or_path=options.model, **given)
    for problem in model_conflicts(config):
        raise UserError(problem.message)
    family = model_family(config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision = options.mixed_precision or ("bf16" if device.type == "cuda" else "no")
    if precision == "fp16" and device.type == "cpu":
        raise UserError("--mixed_precision: fp16 needs a GPU; on a CPU use bf16 or no")
    console = Console(highlight=False, soft_wrap=True, markup=False)
    dtype = _DTYPES[precision]
    multiple = family.load_image_encoder(dtype, device).pixel_multiple
    prompts = read_asked(options, multiple, family.sample_guidance)
    for remark in check_steering(prompts, family.guidance_input, family.sample_guidance):
        console.print(f"note: {remark}")
    sources = [parse_source(text) for text in options.lora]
    if options.fp8_granularity and not options.fp8_scaled:
        raise UserError("--fp8_granularity: has no effect without --fp8_scaled; remove it")
    asked = {key: value for key in _FP8_FLAGS if (value := getattr(options, key))}
    fp8 = plan_fp8(PrecisionConfig(**asked), family.fp8_layout(), 0, device)
    sizing = ControlSizing(_both(options.control_resolution), options.no_resize_control)
    record = {"model": options.model, "loras": " ".join(options.lora)}
    written: list[Path] = []
    for prompt, picture in draw(family, prompts, sources, dtype, device, console, fp8, sizing):
        path = free_path(options.save_to, prompt)
        save_image(picture, path, {"prompt": prompt.line(), **record})
        console.print(f"{path}: {prompt.line()}")
        written.append(path)
    return written


def _both(sides: Sequence[int] | None) -> tuple[int, int] | None:
    if sides is None:
        return None
    if len(sides) > 2 or min(sides) < 1:
        raise UserError("--control_resolution: takes one number of pixels, or width and height")
    return sides[0], sides[-1]


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser; each kind of thing to generate is a subcommand."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(title="what to generate", required=True, metavar="KIND")
    sub = commands.add_parser("image", help="pictures, with a diffusion transformer", allow_abbrev=False)
    sub.set_defaults(run=image)
    model = sub.add_argument_group("model")
    model.add_argument("--model", required=True, help="diffusers folder, or transformer file")
    model.add_argument("--model_type", choices=list(IMAGE_MODELS), help="architecture family")
    for name in MODEL_FILE_KEYS:
        model.add_argument(f"--{name}", metavar="PATH", help=ModelConfig.model_fields[name].description)
    model.add_argument("--t5xxl_max_token_length", type=int, metavar="N", help="T5 tokens per prompt")
    zero_cond_t = ModelConfig.model_fields["zero_cond_t"].description
    model.add_argument("--zero_cond_t", action="store_true", default=None, help=zero_cond_t)
    model.add_argument("--lora", nargs="+", default=[], metavar="FILE[:STRENGTH]", help="LoRA files, of any layout")
    model.add_argument("--mixed_precision", choices=list(_DTYPES), help="default: bf16 on a GPU, no on a CPU")
    quantised = model.add_mutually_exclusive_group()
    for name in _FP8_FLAGS[:2]:
        quantised.add_argument(f"--{name}", action="store_true", help=PrecisionConfig.model_fields[name].description)
    model.add_argument("--fp8_granularity", choices=["tensor", "row", "block64", "block128"], help="of --fp8_scaled")
    what = sub.add_argument_group("prompts", "each flag holds where a prompt says nothing itself")
    what.add_argument("--prompt", nargs="+", metavar="LINE", help="prompts, each with its own options if need be")
    what.add_argument("--from_file", metavar="FILE", help=".txt (a prompt a line), .toml or .json")
    what.add_argument("--n", default="", metavar="TEXT", help="negative prompt, used when --l is not 1")
    what.add_argument("--w", type=int, default=1024, metavar="PIXELS", help="width (default: %(default)s)")
    what.add_argument("--h", type=int, default=1024, metavar="PIXELS", help="height (default: %(default)s)")
    what.add_argument("--d", type=int, default=0, metavar="SEED", help="seed of the first prompt; the next has d + 1")
    what.add_argument("--s", type=int, default=20, metavar="STEPS", help="steps (default: %(default)s)")
    what.add_argument("--g", type=float, metavar="X", help="guidance input (default: 3.5; Fill 30, Kontext 2.5)")
    what.add_argument("--l", type=float, default=1.0, metavar="X", help="classifier-free guidance (default: off, 1)")
    what.add_argument("--ci", nargs="+", default=[], metavar="FILE", help="picture to fill, or reference pictures")
    what.add_argument("--mi", metavar="FILE", help="mask of the picture to fill, white where to fill")
    what.add_argument("--control_resolution", type=int, nargs="+", metavar="PIXELS", help="area of reference pictures")
    what.add_argument("--no_resize_control", action="store_true", help="reference pictures are only trimmed")
    sub.add_argument("--save_to", type=Path, default=Path("output/generated"), help="folder (default: %(default)s)")
    add_text_command(commands)
    return top


@exit_on_user_error
def main() -> None:
    """Parse the command line and generate."""
    options = parser().parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
