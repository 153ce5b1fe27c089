"""Merge one or several LoRAs into a base model, or several LoRAs into one.

    python tools/merge_lora.py --model flux1-dev.safetensors --lora a.safetensors:0.8 b.safetensors \\
        --save_to merged.safetensors --save_precision bf16
    python tools/merge_lora.py --lora a.safetensors:0.8 b.safetensors --save_to both.safetensors
    python tools/merge_lora.py --lora a.safetensors:0.8 b.safetensors --save_to both.safetensors \\
        --method svd --new_rank 32

``--model`` is a diffusers folder or a single file (original or ComfyUI keys), or a language model's folder in
transformers' format; the result has the same layout.
A LoRA may be in any layout; ``:0.8`` after its name is its strength, 1.0 without. Its text encoder layers go into the
folder's text encoders; where the base is a single file, ``--transformer_only`` leaves them out.

Into fp8, from a bf16 model or into a model that is in fp8 (docs/precision.md):

    python tools/merge_lora.py --model FLUX.1-dev --lora a.safetensors --save_to merged --save_precision fp8 \\
        --dataset_config my_dataset.toml

What rounding leaves of each layer's update is printed first; with a dataset it is rounded so that all is left.

Without ``--model`` the result is a LoRA, in the first one's layout. ``concat`` puts the factors side by side: exactly
the sum, at the sum of the ranks. ``svd`` is the closest LoRA of rank ``--new_rank`` to it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console

from library.errors import UserError, exit_on_user_error
from library.llm.chat_templates import SOURCES as JINJA_SOURCES
from library.llm.chat_templates import write_jinja_template
from library.models.layer_names import LoraTargets
from library.models.registry import lora_targets
from library.training.tasks.chat_lora import TEMPLATE, template_of
from networks.families import language_targets, targets_of_files
from networks.files.adapters import PRECISIONS, SAVE_FORMATS, load_lora
from networks.merging.low_rank import join_loras
from networks.merging.merge import LoraSource, MergeReport, merge_loras
from tools.fp8_merging import FP8_PRECISIONS, add_fp8_arguments, goes_into_fp8, merge_to_fp8
from tools.lora_output import check_output, widest_precision, write_lora

_OF_A_MODEL = ("transformer_only", "allow_partial")
_OF_A_LORA = ("method", "new_rank", "save_format", "overwrite")


def parse_source(text: str) -> LoraSource:
    """Return the file and strength of ``file[:strength]``.

    Raises:
        UserError: the strength is not a number.
    """
    name, colon, strength = text.rpartition(":")
    if not colon or Path(text).exists() or "/" in strength or "\\" in strength:
        return LoraSource(Path(text), 1.0)
    try:
        return LoraSource(Path(name), float(strength))
    except ValueError:
        raise UserError(f"--lora {text}: {strength!r} is not a number; write file.safetensors:0.8") from None


def show_progress(done: int, total: int) -> None:
    """Show "tensor 120 of 780" on a terminal, on one line."""
    if sys.stderr.isatty():
        print(f"\rtensor {done} of {total}", end="\n" if done == total else "", file=sys.stderr, flush=True)


def merge_into_model(options: argparse.Namespace, targets: LoraTargets) -> MergeReport:
    """Merge the LoRAs into ``--model``.

    Raises:
        UserError: a flag for LoRAs, or see ``networks.merging.merge.merge_loras``.
    """
    if unused := next((name for name in _OF_A_LORA if getattr(options, name)), None):
        raise UserError(f"--{unused}: has no effect on a model; remove it, or remove --model to get a LoRA")
    return merge_loras(
        options.model,
        [parse_source(text) for text in options.lora],
        options.save_to,
        targets,
        options.save_precision,
        show_progress,
        options.transformer_only,
        options.allow_partial,
    )


def merge_into_lora(options: argparse.Namespace) -> str:
    """Merge the LoRAs into one; return what became of them, in a line.

    Raises:
        UserError: the flags contradict each other, a file cannot be read, or nothing is left of them.
    """
    if unused := next((name for name in _OF_A_MODEL if getattr(options, name)), None):
        raise UserError(f"--{unused}: has no effect without --model; remove it")
    by_svd = options.method == "svd"
    if by_svd != (options.new_rank is not None):
        raise UserError("--method svd and --new_rank go together; concat takes the sum of the ranks")
    if by_svd and options.new_rank < 1:
        raise UserError(f"--new_rank {options.new_rank}: must be at least 1")
    check_output(options.save_to, options.overwrite)
    sources = [parse_source(text) for text in options.lora]
    targets = targets_of_files([source.path for source in sources], options.model_type)
    read = [(load_lora(source.path, targets), source.ratio) for source in sources]
    weights, layers = join_loras([(file.weights, ratio) for file, ratio in read], options.new_rank)
    if not weights:
        raise UserError("--lora: every strength is 0; there is nothing to merge")
    lasting = ("modelspec.architecture", "modelspec.implementation", "ss_network_module", "ss_base_model_version")
    metadata = {key: value for key, value in read[0][0].metadata.items() if key in lasting}
    metadata |= {"modelspec.title": options.save_to.stem, "ss_output_name": options.save_to.stem}
    for key in ("tandem.base_fingerprint", TEMPLATE):
        values = {file.metadata.get(key) for file, _ in read}
        if len(values) == 1 and (value := values.pop()):
            metadata[key] = value
    precisions = {widest_precision(file.weights) for file, _ in read}
    precision = options.save_precision or (precisions.pop() if len(precisions) == 1 else "fp32")
    comment = "merged from " + ", ".join(f"{source.path.name}:{source.ratio:g}" for source in sources)
    write_lora(
        options.save_to, weights, targets, options.save_format or read[0][0].layout, precision, metadata, comment
    )
    ranks = sorted({layer.after for layer in layers})
    shown = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
    kept = f"; at least {min(layer.kept for layer in layers):.2%} of each layer's sum kept" if by_svd else ""
    return f"{options.save_to}: {len(layers)} layers of {len(sources)} LoRAs, rank {shown}{kept}"


@exit_on_user_error
def main() -> None:
    """Parse the command line and merge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="diffusers folder or safetensors file; without it the LoRAs are one")
    parser.add_argument("--lora", required=True, nargs="+", metavar="FILE[:STRENGTH]", help="LoRA files")
    parser.add_argument("--save_to", required=True, type=Path, help="new folder, or .safetensors file")
    parser.add_argument(
        "--save_precision", choices=[*PRECISIONS, *FP8_PRECISIONS], help="default: as in --model, or the LoRAs"
    )
    parser.add_argument(
        "--model_type",
        choices=list(lora_targets()),
        help="architecture family (default: flux; of language models, and of LoRAs alone, as they say)",
    )
    parser.add_argument("--transformer_only", action="store_true", help="leave out the LoRAs' text encoder layers")
    parser.add_argument(
        "--allow_partial", action="store_true", help="merge what fits of each LoRA; what does not is named, not refused"
    )
    lora = parser.add_argument_group("without --model")
    lora.add_argument("--method", choices=["concat", "svd"], help="how LoRAs become one (default: concat)")
    lora.add_argument("--new_rank", type=int, metavar="N", help="rank of --method svd")
    lora.add_argument("--save_format", choices=list(SAVE_FORMATS), help="key layout (default: the first LoRA's)")
    lora.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    add_fp8_arguments(parser)
    options = parser.parse_args()
    targets = lora_targets()[options.model_type or "flux"]
    if options.model is not None and options.model_type is None:
        targets = language_targets(parse_source(options.lora[0]).path) or targets
    if goes_into_fp8(options):
        if targets.own_names:
            raise UserError(
                "--save_precision: language models are not merged into fp8; merge in bf16 and load that with fp8_scaled"
            )
        if unused := next((name for name in _OF_A_LORA if getattr(options, name)), None):
            raise UserError(f"--{unused}: has no effect on a merge into fp8; remove it")
        sources = [parse_source(text) for text in options.lora]
        merge_to_fp8(options, sources, targets, Console(highlight=False, markup=False))
        return
    if options.model is None:
        print(merge_into_lora(options))
        return
    report = merge_into_model(options, targets)
    for note in report.notes:
        print(f"note: {note}")
    template = template_of(parse_source(options.lora[0]).path) if targets.own_names else None
    if template in JINJA_SOURCES and options.save_to.is_dir():
        file = write_jinja_template(template, options.save_to)
        print(f"note: it was taught in the template {template}, which {file} tells other programs")
    print(f"{options.save_to}: {report.changed} of {report.written} tensors changed by {len(options.lora)} LoRA(s)")


if __name__ == "__main__":
    main()
