"""Merge one or several LoRAs into a base model, or several LoRAs into one.

    python tools/merge_lora.py --model flux1-dev.safetensors --lora a.safetensors:0.8 b.safetensors \\
        --save_to merged.safetensors --save_precision bf16
    python tools/merge_lora.py --lora a.safetensors:0.8 b.safetensors --save_to both.safetensors
    python tools/merge_lora.py --lora a.safetensors:0.8 b.safetensors --save_to both.safetensors \\
        --method svd --new_rank 32

``--model`` is a diffusers folder or a single file (original or ComfyUI keys), or a language model's folder in
transformers' format; the result has the same layout. A language model in other files (GGUF, Meta's) becomes a
transformers folder.
A LoRA may be in any layout; ``:0.8`` after its name is its strength, 1.0 without. Its text encoder layers go into the
folder's text encoders; where the base is a single file, ``--transformer_only`` leaves them out.

Into a quantised model, from a bf16 one or into one that is quantised already and stays as it is, layer by layer
(docs/serving.md):

    python tools/merge_lora.py --model FLUX.1-dev --lora a.safetensors --save_to merged --save_precision fp8 \\
        --dataset_config my_dataset.toml

What rounding leaves of each layer's update is printed first; with a dataset it is rounded so that all is left.

Without ``--model`` the result is a LoRA, in the first one's layout. ``concat`` puts the factors side by side: exactly
the sum, at the sum of the ranks. ``svd`` is the closest LoRA of rank ``--new_rank`` to it.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from library.config.run_schema import SavingConfig
from library.errors import UserError, counted, exit_on_user_error
from library.models.hub import find_model
from library.precision.names import QUANTIZED_PRECISIONS
from tools.command import (
    add_calibration,
    add_model_type,
    calibration_plan,
    check_lora_output,
    choices,
    count,
    finite,
    lora_source,
    rank_range,
    show_progress,
    tool_console,
    tool_parser,
)

_OF_A_MODEL = ("transformer_only",)
_OF_A_LORA = ("method", "new_rank", "save_format", "overwrite")
_OF_QUANTIZED = ("rounding", "retention", "accept_loss", "dataset_config")

if TYPE_CHECKING:
    from library.models.layer_names import LoraTargets
    from networks.merging.merge import LoraSource


def merge_into_lora(options: argparse.Namespace) -> str:
    """Merge the LoRAs into one; return what became of them, in a line."""
    from library.training.tasks.chat_lora import TEMPLATE, TEMPLATE_ARGUMENTS
    from networks.files.adapters import load_trainable
    from networks.files.detection import load_loras
    from networks.files.writing import SavedAs, save_derived_lora
    from networks.merging.low_rank import join_loras

    _refuse(options, _OF_A_MODEL, "has no effect without --model; remove it")
    by_svd = options.method == "svd"
    if by_svd != (options.new_rank is not None):
        raise UserError("--method svd and --new_rank go together; concat takes the sum of the ranks")
    check_lora_output(options.save_to, options.overwrite)
    targets, files = load_loras([source.path for source in options.lora], options.model_type, load_trainable)
    for note in (note for file in files for note in file.notes):
        print(f"note: {note}")
    parts = [(file.weights, source.ratio) for file, source in zip(files, options.lora, strict=True)]
    weights, layers = join_loras(parts, options.new_rank)
    if not weights:
        raise UserError("--lora: every strength is 0; there is nothing to merge")
    lasting = ("modelspec.architecture", "modelspec.implementation", "ss_network_module", "ss_base_model_version")
    metadata = {key: value for key, value in files[0].metadata.items() if key in lasting}
    metadata |= {"modelspec.title": options.save_to.stem, "ss_output_name": options.save_to.stem}
    for key in ("tandem.base_fingerprint", TEMPLATE, TEMPLATE_ARGUMENTS):
        values = {file.metadata.get(key) for file in files}
        if len(values) == 1 and (value := values.pop()):
            metadata[key] = value
    comment = "merged from " + ", ".join(f"{source.path.name}:{source.ratio:g}" for source in options.lora)
    saved_as = SavedAs(options.save_format, options.save_precision)
    save_derived_lora(options.save_to, weights, targets, metadata, comment, files, saved_as)
    ranks = rank_range(layer.after for layer in layers)
    kept = f"; at least {min(layer.kept for layer in layers):.2%} of each layer's sum kept" if by_svd else ""
    sizes = f"{counted(len(layers), 'layer')} of {counted(len(options.lora), 'LoRA')}, {ranks}"
    return f"{options.save_to}: {sizes}{kept}"


def merge_into_model(options: argparse.Namespace, targets: LoraTargets) -> str:
    """Merge the LoRAs into ``--model``; return what became of it, in a line."""
    from library.llm.chat_templates import write_jinja_template
    from library.training.tasks.chat_lora import template_of
    from networks.merging.merge import merge_language_model, merge_loras

    _refuse(options, _OF_A_LORA, "has no effect on a model; remove it, or remove --model to get a LoRA")
    given = options.model, options.lora, options.save_to, targets, options.save_precision, show_progress
    if _is_converted(options, targets):
        report = merge_language_model(*given)
    else:
        report = merge_loras(*given, options.transformer_only)
    for note in report.notes:
        print(f"note: {note}")
    template, arguments = template_of(options.lora[0].path) if targets.own_names else (None, {})
    if template is not None and (arguments or template != "tokenizer") and options.save_to.is_dir():
        file = write_jinja_template(template, options.save_to, arguments)
        print(f"note: it was taught in the template that {file} tells other programs")
    changed = f"{report.changed} of {counted(report.written, 'tensor')} changed"
    return f"{options.save_to}: {changed} by {counted(len(options.lora), 'LoRA')}"


def _is_converted(options: argparse.Namespace, targets: LoraTargets) -> bool:
    """Return whether the result is a transformers folder, which ``--model`` is not."""
    return targets.own_names and options.model is not None and not (options.model / "config.json").is_file()


def is_quantized(options: argparse.Namespace) -> bool:
    """Return whether the result is quantised; refuse flags for that where it is not."""
    from networks.files.base import open_base

    precision = options.save_precision
    if options.model is None and precision in QUANTIZED_PRECISIONS:
        raise UserError(f"--save_precision {precision}: a LoRA is never quantised, in fp8 it is mostly zeros; use bf16")
    base = open_base(options.model, quantized=True) if options.model else None
    if precision in QUANTIZED_PRECISIONS or (base is not None and base.weights.quantized):
        return True
    _refuse(options, _OF_QUANTIZED, "has no effect here; give a quantised --save_precision, or remove it")
    return False


def merge_into_quantized(options: argparse.Namespace, targets: LoraTargets) -> None:
    """Merge the LoRAs into ``--model``, which is quantised or becomes so."""
    from library.fidelity.merge import RoundingOptions, merge_quantized

    if targets.own_names:
        raise UserError(
            "--save_precision: language models are not merged into quantised ones; merge in bf16, load with fp8_scaled"
        )
    _refuse(options, _OF_A_LORA, "has no effect on a merge into a quantised model; remove it")
    rounding = options.rounding or ("compensated" if options.dataset_config else "nearest")
    if (rounding == "compensated") != bool(options.dataset_config):
        raise UserError("--rounding compensated looks at activations, the others do not: it goes with --dataset_config")
    merge_quantized(
        options.model,
        options.lora,
        options.save_to,
        targets,
        tool_console(),
        RoundingOptions(
            precision=options.save_precision,
            rounding=rounding,
            seed=options.seed,
            plan=calibration_plan(options, options.model) if options.dataset_config else None,
            accept_loss=options.accept_loss,
            shown=None if options.retention else 10,
        ),
        options.transformer_only,
    )


def _refuse(options: argparse.Namespace, names: tuple[str, ...], why: str) -> None:
    if unused := next((name for name in names if getattr(options, name)), None):
        raise UserError(f"--{unused}: {why}")


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""

    parser = tool_parser(__doc__)
    parser.add_argument(
        "--model",
        type=Path,
        help="diffusers folder, file, name on the hub; without it the LoRAs become one",
    )
    files = "LoRA files (--models, with --ratios: as sd-scripts says)"
    parser.add_argument("--lora", "--models", required=True, nargs="+", metavar="FILE[:STRENGTH]", help=files)
    parser.add_argument("--ratios", type=finite, nargs="+", metavar="X", help="a strength for each LoRA")
    parser.add_argument("--save_to", required=True, type=Path, help="new folder, or .safetensors file")
    precisions = [*choices(SavingConfig, "save_precision"), *QUANTIZED_PRECISIONS]
    parser.add_argument("--save_precision", choices=precisions, help="default: as in --model, or the LoRAs")
    add_model_type(parser, "flux; of language models, and of LoRAs alone, as they say")
    parser.add_argument("--transformer_only", action="store_true", help="leave out the LoRAs' text encoder layers")
    lora = parser.add_argument_group("without --model")
    lora.add_argument("--method", choices=["concat", "svd"], help="how LoRAs become one (default: concat)")
    lora.add_argument("--new_rank", type=count, metavar="N", help="rank of --method svd")
    layouts = choices(SavingConfig, "save_format")
    lora.add_argument("--save_format", choices=layouts, help="key layout (default: the first LoRA's)")
    lora.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    group = parser.add_argument_group("into a quantised model", "one that is quantised keeps the format of each layer")
    group.add_argument(
        "--rounding",
        choices=["nearest", "stochastic", "compensated"],
        help="default: compensated with --dataset_config",
    )
    group.add_argument(
        "--retention", action="store_true", help="show what is left of every layer's update, not the worst"
    )
    group.add_argument("--accept_loss", action="store_true", help="write although layers keep less than 0.95 of theirs")
    add_calibration(parser, required=False, model_type=False)
    return parser


def merge(options: argparse.Namespace) -> None:
    """Do what the command line asks for, and say what became of it."""
    from library.models.registry import lora_targets
    from networks.files.detection import language_targets

    options.lora = [lora_source(text) for text in options.lora]
    if options.ratios is not None:
        options.lora = _with_ratios(options.lora, options.ratios)
    if options.model is not None:
        options.model = find_model(options.model, "--model")
    targets = lora_targets()[options.model_type or "flux"]
    if options.model is not None and options.model_type is None:
        targets = language_targets(options.lora[0].path) or targets
    if _is_converted(options, targets) and options.save_precision not in QUANTIZED_PRECISIONS:
        _refuse(options, _OF_QUANTIZED, "has no effect here; remove it")
        print(merge_into_model(options, targets))
    elif is_quantized(options):
        merge_into_quantized(options, targets)
    else:
        print(merge_into_lora(options) if options.model is None else merge_into_model(options, targets))


def _with_ratios(sources: list[LoraSource], ratios: list[float]) -> list[LoraSource]:
    """Return the LoRAs with the strengths of --ratios."""
    if len(ratios) != len(sources) or any(source.ratio != 1 for source in sources):
        raise UserError(
            f"--ratios: {len(ratios)} for {counted(len(sources), 'LoRA')}; give one for each, or write FILE:STRENGTH"
        )
    return [replace(source, ratio=ratio) for source, ratio in zip(sources, ratios, strict=True)]


@exit_on_user_error
def main() -> None:
    """Merge from the command line."""
    merge(parser().parse_args())


if __name__ == "__main__":
    main()
