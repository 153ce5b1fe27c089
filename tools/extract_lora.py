"""Extract a LoRA from a fine-tuned model: the difference to its base, of low rank.

    python tools/extract_lora.py --model_org flux1-dev.safetensors --model_tuned my_finetune.safetensors \\
        --save_to my_lora.safetensors --dim 32
    python tools/extract_lora.py --model_org FLUX.1-dev --model_tuned my_finetune_fp8.safetensors \\
        --save_to my_lora.safetensors --dim 128 --device cuda

``--dim`` is the rank of every layer; ``resize_lora.py`` then gives each layer a rank of its own. The models may lie in
different layouts (diffusers folder, original or ComfyUI's single file) and in fp8; two tensors are in memory at a time.
At the end the layers are shown with the share they keep. Biases and norms have no place in a LoRA.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.table import Table

from library import __version__
from library.checksums import weights_fingerprint
from library.errors import UserError, counted, exit_on_user_error
from library.models.hub import find_model
from library.training.report.progress import plain_table
from tools.command import (
    add_lora_output,
    check_lora_output,
    count,
    device_and_dtype,
    show_progress,
    tool_console,
    tool_parser,
    value_range,
)

if TYPE_CHECKING:
    from library.models.layer_names import LoraTargets
    from networks.files.base import Base
    from networks.merging.extraction import ExtractedLayer, Extraction


def layer_table(layers: list[ExtractedLayer], targets: LoraTargets) -> Table:
    """Return a table of kinds: layers, ranks, norm of the difference, share of its sum of squares that is kept."""
    kinds: dict[str, list[ExtractedLayer]] = {}
    for layer in layers:
        kind = targets.group_of(layer.name)
        kinds.setdefault(kind.name if kind else layer.name, []).append(layer)
    table = plain_table("layers", "count", "rank", "norm", "kept", "least kept")
    for name, group in kinds.items():
        ranks = value_range(layer.rank for layer in group)
        energy = sum(layer.norm**2 for layer in group)
        kept = sum(layer.norm**2 * layer.kept for layer in group) / energy
        least = min(layer.kept for layer in group)
        table.add_row(name, str(len(group)), ranks, f"{energy**0.5:.3g}", f"{kept:.2%}", f"{least:.2%}")
    return table


def model_targets(model: Base) -> LoraTargets:
    """Return the row of the family most of whose layers a model holds."""
    from networks.files.base import fullest_targets

    rows = fullest_targets(model.weights)
    if len(rows) != 1:
        which = " and ".join(row.family for row in rows) or "no known family"
        raise UserError(f"{model.path}: its layers are those of {which}; set --model_type")
    return rows[0]


def extract(options: argparse.Namespace) -> tuple[Extraction, LoraTargets]:
    """Extract and write the LoRA that the command line asks for; return it with its family's row."""
    from library.models.registry import lora_targets
    from networks.files.base import open_base
    from networks.files.metadata import build_metadata
    from networks.files.writing import SavedAs, save_derived_lora
    from networks.merging.extraction import extract_lora

    check_lora_output(options.save_to, options.overwrite)
    original = open_base(find_model(options.model_org, "--model_org"), "--model_org", quantized=True)
    targets = lora_targets()[options.model_type] if options.model_type else model_targets(original)
    tuned = open_base(find_model(options.model_tuned, "--model_tuned"), "--model_tuned", quantized=True)
    found = extract_lora(
        original,
        tuned,
        targets,
        dim=options.dim,
        device=options.device or str(device_and_dtype(None)[0]),
        progress=show_progress,
    )
    metadata = build_metadata(
        {"sd_model_name": options.model_org.name},
        targets,
        title=options.save_to.stem,
        timestamp=time.time(),
        resolution=(1024, 1024),
        base_fingerprint=weights_fingerprint(original.weights_path),
        version=__version__,
    )
    comment = f"extracted from {options.model_tuned.name}"
    saved_as = SavedAs(options.save_format, options.save_precision or "bf16")
    save_derived_lora(options.save_to, found.weights, targets, metadata, comment, (), saved_as)
    return found, targets


@exit_on_user_error
def main() -> None:
    """Parse the command line, extract, report."""
    parser = tool_parser(__doc__)
    parser.add_argument("--model_org", required=True, type=Path, help="base: diffusers folder, file, name on the hub")
    parser.add_argument("--model_tuned", required=True, type=Path, help="the fine-tuned model")
    parser.add_argument("--dim", required=True, type=count, metavar="N", help="rank of every layer")
    parser.add_argument("--device", help="where to decompose (default: a GPU if there is one)")
    add_lora_output(parser, "bf16")
    options = parser.parse_args()
    found, targets = extract(options)
    console = tool_console()
    console.print(layer_table(found.layers, targets))
    for note in found.notes:
        console.print(f"note: {note}")
    console.print(f"{options.save_to}: {counted(len(found.layers), 'layer')}, equal ones left out: {found.equal}")


if __name__ == "__main__":
    main()
