"""What the tools share: the parser, the flags that several of them take, the console.

A tool parses, calls the library and prints. This module imports nothing that takes long (torch, diffusers and
transformers are imported where they are first used), and tools import theirs in the function that works, or
behind :func:`answer_early`, so that ``--help`` and a mistyped flag are answered at once.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from library.config.chat_schema import LANGUAGE_MODELS
from library.config.family_defaults import family_defaults
from library.config.load import Parser
from library.config.markers import MOST, MOST_GUIDANCE, MOST_SEED, MOST_STRENGTH, words_of
from library.config.model_types import IMAGE_MODELS, MODEL_FILE_KEYS, MODEL_TYPES
from library.config.run_schema import SavingConfig
from library.config.schema import ModelConfig, PrecisionConfig
from library.console import Console
from library.errors import UserError, exit_on_user_error
from library.models.hub import find_lora, find_model

if TYPE_CHECKING:
    import torch

    from library.fidelity.calibration import CalibrationPlan
    from library.llm.generation import SamplingSettings
    from library.models.llm.model import TransformerLM
    from networks.merging.merge import LoraSource

_DEQUANTISED_SHARE = 0.5  # of the memory that is free
SAMPLING_NAMES = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


def tool_parser(doc: str | None) -> Parser:
    """Return a parser without flags that shows the module's docstring ``doc``."""
    return Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)


def training_tool_parser(doc: str | None) -> Parser:
    """Return a parser for a tool that takes train_lora.py's flags too: ``parse_known_args`` leaves those over."""
    parser = tool_parser(doc)
    parser.usage = "%(prog)s --config_file TOML [--key value ...]"
    parser.epilog = (
        "The training is described as for train_lora.py: --config_file TOML, --dataset_config TOML and every other\n"
        "option of a LoRA on images, as a flag or in the TOML file; see train_lora.py --help, or docs/options.md."
    )
    return parser


def answer_early(name: str, parse: Callable[[], object]) -> None:
    """Answer ``--help`` and a mistyped flag, if the module called ``name`` is the program that was started.

    A tool whose functions need torch and the like, which take seconds to import, calls this between its parser and
    those imports; ``parse`` reads the command line.
    """
    if name == "__main__":

        def main() -> None:
            parse()

        exit_on_user_error(main)()


def whole(least: int = 1, most: int = MOST) -> Callable[[str], int]:
    """Return the ``type`` of a flag that takes a whole number."""

    def read(text: str) -> int:
        value = int(text) if re.fullmatch(r"[+-]?\d{1,30}", text) else None
        if value is None or not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is no whole number from {least} to {most}")
        return value

    return read


def number(least: float = -math.inf, most: float = math.inf, above: float = -math.inf) -> Callable[[str], float]:
    """Return the ``type`` of a flag that takes a finite number."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and least <= value <= most and value > above):
            limits = ((f" of at least {least:g}", least), (f" above {above:g}", above), (f", at most {most:g}", most))
            bounds = "".join(words for words, limit in limits if math.isfinite(limit))
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is no finite number{bounds}")
        return value

    return read


count, finite, seed_number = whole(), number(), whole(least=0, most=MOST_SEED)
guidance, strength = number(least=0, most=MOST_GUIDANCE), number(-MOST_STRENGTH, MOST_STRENGTH)


def tool_console() -> Console:
    """Return a console that prints paths and names as they are, on one line each."""
    return Console(highlight=False, markup=False, soft_wrap=True)


def show_progress(done: int, total: int) -> None:
    """Show "tensor 120 of 780" on a terminal, on one line."""
    if sys.stderr.isatty():
        print(f"\rtensor {done} of {total}", end="\n" if done == total else "", file=sys.stderr, flush=True)


def choices(section: Any, key: str) -> list[str]:
    """Return the values that an option of the schema may have, None left out."""
    return list(words_of(section.model_fields[key].annotation))


# ---- LoRA files


def add_model_type(parser: Any, default: str) -> None:
    """Add --model_type of every family; ``default`` says in words what it is without."""
    families = [*IMAGE_MODELS, *LANGUAGE_MODELS]
    parser.add_argument("--model_type", choices=families, help=f"architecture family (default: {default})")


def add_lora_output(
    parser: argparse.ArgumentParser, precision_default: str = "the source's", format_required: bool = False
) -> None:
    """Add --save_to, --save_format, --save_precision, --model_type and --overwrite."""
    layouts, precisions = choices(SavingConfig, "save_format"), choices(SavingConfig, "save_precision")
    which = "of the result" if format_required else "(default: the source's, or diffusers)"
    parser.add_argument("--save_to", required=True, type=Path, help="the .safetensors file to write")
    parser.add_argument("--save_format", required=format_required, choices=layouts, help=f"key layout {which}")
    parser.add_argument("--save_precision", choices=precisions, help=f"default: {precision_default}")
    add_model_type(parser, "as the files say")
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")


def check_lora_output(save_to: Path, overwrite: bool) -> None:
    """Refuse a place that is no LoRA file's, or where something is already, before any work is done."""
    if save_to.suffix != ".safetensors":
        raise UserError(f"{save_to}: a LoRA is a .safetensors file; give --save_to that ending")
    if save_to.exists() and not overwrite:
        raise UserError(f"{save_to}: exists; choose another --save_to or give --overwrite")


def value_range(values: Iterable[float]) -> str:
    """Return "4" where all values are equal, else "4 to 16"."""
    least, most = min(found := list(values)), max(found)
    return f"{least:g}" if least == most else f"{least:g} to {most:g}"


def rank_range(ranks: Iterable[int]) -> str:
    """Return "rank 4 to 16", and how many have "full matrices": of a LoKr without a rank, which is 0 here."""
    found = list(ranks)
    low = [rank for rank in found if rank]
    full = f", of {len(found) - len(low)} full matrices" if len(low) < len(found) else ""
    return f"rank {value_range(low)}{full}" if low else "full matrices"


def lora_source(text: str) -> LoraSource:
    """Return the file and strength of ``file[:strength]``; one on the hub is downloaded."""
    from networks.merging.merge import LoraSource

    name, colon, strength = text.rpartition(":")
    if not colon or Path(text).exists() or "/" in strength or "\\" in strength:
        return LoraSource(find_lora(text, "--lora"), 1.0)
    try:
        ratio = float(strength)
    except ValueError:
        raise UserError(f"--lora {text}: {strength!r} is not a number; write file.safetensors:0.8") from None
    return LoraSource(find_lora(name, "--lora"), ratio)


# ---- an image model, and images to run it on


def add_model_parts(group: Any, precisions: Sequence[str] = ("no", "bf16")) -> None:
    """Add the flags of a single-file model's parts, and of how it computes."""
    for name in MODEL_FILE_KEYS:
        group.add_argument(f"--{name}", metavar="PATH", help=ModelConfig.model_fields[name].description)
    group.add_argument("--mixed_precision", choices=precisions, help="default: bf16 on a GPU, no on a CPU")


def model_config(options: argparse.Namespace, model: Path | str, *more: str) -> ModelConfig:
    """Return the ``[model]`` section for ``model`` with the parts that the flags, and ``more`` of them, name."""
    names = ("model_type", *MODEL_FILE_KEYS, *more)
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    path = find_model(model, "--model", is_pipeline=True)
    return ModelConfig(pretrained_model_name_or_path=str(path), **given)


def device_and_dtype(precision: str | None) -> tuple[torch.device, torch.dtype]:
    """Return where and in what to compute; ``precision``: --mixed_precision."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtypes = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    return device, dtypes[precision or ("bf16" if device.type == "cuda" else "no")]


def add_calibration_images(data: Any, required: bool, *, prefix: str = "calibration_", seed: bool = True) -> None:
    """Add the flags of images that a model is run on; without --seed where the parser has it."""
    data.add_argument("--dataset_config", required=required, metavar="TOML", help="dataset TOML, as in training")
    data.add_argument(
        f"--{prefix}images", dest="calibration_images", type=count, default=8, metavar="N", help="default: %(default)s"
    )
    data.add_argument(
        f"--{prefix}sigmas",
        dest="calibration_sigmas",
        type=finite,
        nargs="+",
        metavar="X",
        default=[0.95, 0.75, 0.5, 0.25],
        help="noise levels of each image",
    )
    if seed:
        data.add_argument("--seed", type=seed_number, default=0, help="chooses images, noise and stochastic rounding")
    data.add_argument(
        "--guidance_scale",
        type=guidance,
        help="guidance input (default: the family's; the built-in tiny models want 1)",
    )
    data.add_argument("--masked_loss", action="store_true", help="the dataset has loss masks, as in training")
    data.add_argument("--cache_directory", metavar="DIR", help="of latents and text (default: beside the images)")


def add_calibration(parser: argparse.ArgumentParser, required: bool, *, model_type: bool, seed: bool = True) -> None:
    """Add the flags of data, model parts and computing; without --model_type or --seed where the parser has it."""
    data = parser.add_argument_group("calibration")
    add_calibration_images(data, required, seed=seed)
    data.add_argument(
        "--statistics_gb",
        type=number(above=0),
        default=4.0,
        metavar="X",
        help="memory for layer statistics; less: more passes",
    )
    model = parser.add_argument_group("parts of the model, where it is a single file")
    if model_type:
        model.add_argument("--model_type", choices=list(IMAGE_MODELS), help="architecture family")
    add_model_parts(model)


def calibration_plan(options: argparse.Namespace, model: Path) -> CalibrationPlan:
    """Return what the flags of :func:`add_calibration` say for ``model``, and the LoRAs' files of their training."""
    from library.fidelity.calibration import CalibrationOptions, CalibrationPlan
    from networks.files.metadata import TrainedOn

    device, dtype = device_and_dtype(options.mixed_precision)
    config, scale = model_config(options, model), options.guidance_scale
    loras = getattr(options, "lora", None) or []
    loras = [loras] if isinstance(loras, Path) else [lora_source(x) if isinstance(x, str) else x for x in loras]
    trained, row = TrainedOn.read([getattr(x, "path", x) for x in loras]), MODEL_TYPES[config.model_type]
    if trained.t5_tokens and "t5xxl" in row.files:
        config = config.model_copy(update={"t5xxl_max_token_length": trained.t5_tokens})
    if scale is None:
        usual, told = family_defaults(config.model_type), trained.guidance
        chosen = row.takes_guidance and told not in (None, usual["guidance_scale"])
        scale = told if chosen else usual.get("sample_guidance", 1.0)
    calibration = CalibrationOptions(
        dataset_config=options.dataset_config,
        images=options.calibration_images,
        sigmas=tuple(options.calibration_sigmas),
        seed=options.seed,
        guidance_scale=scale,
        masked_loss=options.masked_loss,
        cache_directory=options.cache_directory,
        statistics_gb=options.statistics_gb,
        trained=trained,
    )
    return CalibrationPlan(config, calibration, dtype, device)


# ---- language models


def add_language_model(group: Any) -> None:
    """Add the flags that say how a language model is loaded."""
    group.add_argument("--tokenizer", metavar="PATH", help="default: the one in the model's folder")
    group.add_argument(
        "--dtype",
        choices=["fp32", "fp16", "bf16", "int8"],
        help="of the weights; int8: linear ones, rounded by rows (a GGUF file's Q4_0, Q4_1 and Q4_K stay of 4 bits), "
        "the rest bf16; default: bf16 on a GPU, fp32 on a CPU",
    )
    group.add_argument("--fp8_scaled", action="store_true", help="quantise linear weights to fp8 as they are loaded")


def load_language_model(folder: str | Path, dtype: str | None, fp8_scaled: bool) -> TransformerLM:
    """Return the model on the device there is; fp32 on a CPU and bf16 on a GPU unless ``dtype`` says otherwise.

    On a CPU, where dequantising takes several times as long as a token's products, what the file has quantised is
    dequantised once, if there is memory for it.
    """
    import psutil

    from library.models.llm.files import load_lm, open_lm
    from library.precision.files.int8 import Int8Scheme
    from library.precision.packed_linear import pack_linears, round_to_int8
    from library.precision.recipe import Recipe, WeightLoader, plan_base

    if dtype == "int8" and fp8_scaled:
        raise UserError("--fp8_scaled: has no effect with --dtype int8; remove one of them")
    device, computing = device_and_dtype({"fp32": "no", "int8": "bf16"}.get(dtype or "", dtype))
    weights = open_lm(Path(folder).expanduser())[1]
    layout = weights.quantized
    needed = computing.itemsize * sum(math.prod(weights.shape(name)) for name in weights.names)
    once = device.type == "cpu" and needed < _DEQUANTISED_SHARE * psutil.virtual_memory().available
    if dtype == "int8":
        loader = WeightLoader(Recipe(Int8Scheme(), exclude=()), "dequant")
    else:
        loader = plan_base(PrecisionConfig(fp8_scaled=True) if fp8_scaled else PrecisionConfig(), layout, 0, device)
    once = once and not (fp8_scaled or dtype == "int8")
    model = load_lm(folder, computing, device, fp8=loader, dequantised=once)
    if dtype == "int8" and device.type == "cpu":
        round_to_int8(model)
    pack_linears(model)
    return model


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each field of ``SamplingSettings`` that a user chooses."""
    how = parser.add_argument_group("sampling")
    how.add_argument("--max_new_tokens", type=count, default=256, metavar="N")
    how.add_argument("--temperature", type=number(least=0), default=1.0, metavar="X", help="0: most likely token")
    how.add_argument("--top_k", type=count, metavar="N", help="draw among the N most likely tokens")
    how.add_argument("--top_p", type=finite, metavar="X", help="draw among the most likely tokens of probability X")
    how.add_argument("--min_p", type=finite, metavar="X", help="draw among tokens X times as likely as the likeliest")
    how.add_argument(
        "--repetition_penalty", type=number(above=0), default=1.0, metavar="X", help="above 1: repeat less"
    )
    how.add_argument("--seed", type=seed_number, default=0)


def sampling_settings(options: argparse.Namespace) -> SamplingSettings:
    """Return what the flags of :func:`add_sampling` say."""
    from library.llm.generation import SamplingSettings

    return SamplingSettings(**{name: getattr(options, name) for name in SAMPLING_NAMES})
