"""Extract a LoRA or LoKr from a fine-tuned model: the difference to its base, of low rank.

    python tools/extract_lora.py --model_org flux1-dev.safetensors --model_tuned my_finetune.safetensors \\
        --save_to my_lora.safetensors --dim 32
    python tools/extract_lora.py --model_org FLUX.1-dev --model_tuned my_finetune_fp8.safetensors \\
        --save_to my_lora.safetensors --dim 128 --device cuda
    python tools/extract_lora.py --model_org FLUX.1-dev --model_tuned my_finetune.safetensors \\
        --save_to my_lokr.safetensors --network_type lokr --factor 8

``--dim`` is the rank of every layer, of a LoKr that of w2, which is whole without it; ``resize_lora.py`` then gives
each layer a rank of its own. The models may lie in different layouts (diffusers folder, original or ComfyUI's single
file) and in fp8; two tensors are in memory at a time. At the end you see how much of the difference the LoRA keeps; a
LoKr's share stands beside that of LoRAs of as many parameters. Biases and norms have no place in either.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from library import __version__
from library.checksums import weights_fingerprint
from library.errors import UserError, counted, exit_on_user_error
from library.models.hub import find_model
from tools.command import add_lora_output, check_lora_output, count, device_and_dtype, show_progress, tool_parser

if TYPE_CHECKING:
    from library.models.layer_names import LoraTargets
    from networks.files.base import Base
    from networks.merging.extraction import Extraction


def model_targets(model: Base) -> LoraTargets:
    """Return the row of the family most of whose layers a model holds."""
    from networks.files.base import fullest_targets

    rows = fullest_targets(model.weights)
    if len(rows) != 1:
        which = " and ".join(row.family for row in rows)
        remedy = f"of {which}; set --model_type" if rows else "of no known family; give a transformer of one"
        raise UserError(f"{model.path}: its layers are those {remedy}")
    return rows[0]


def extract(options: argparse.Namespace) -> Extraction:
    """Extract and write the LoRA that the command line asks for; return it."""
    from library.models.registry import lora_targets
    from networks.files.base import open_base
    from networks.files.metadata import build_metadata
    from networks.files.writing import SavedAs, save_derived_lora
    from networks.merging.extraction import extract_lora

    is_lokr = options.network_type == "lokr"
    if options.factor and not is_lokr:
        raise UserError("--factor: cuts the layers of a LoKr; give --network_type lokr, or remove it")
    if options.dim is None and not is_lokr:
        raise UserError("--dim: a LoRA has a rank; give it")
    check_lora_output(options.save_to, options.overwrite)
    original = open_base(find_model(options.model_org, "--model_org"), "--model_org", quantized=True)
    targets = lora_targets()[options.model_type] if options.model_type else model_targets(original)
    tuned = open_base(find_model(options.model_tuned, "--model_tuned"), "--model_tuned", quantized=True)
    found = extract_lora(
        original,
        tuned,
        targets,
        dim=options.dim or sys.maxsize,
        factor=(options.factor or 8) if is_lokr else 0,
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
    return found


@exit_on_user_error
def main() -> None:
    """Parse the command line, extract, report."""
    parser = tool_parser(__doc__)
    parser.add_argument("--model_org", required=True, type=Path, help="base: diffusers folder, file, name on the hub")
    parser.add_argument("--model_tuned", required=True, type=Path, help="the fine-tuned model")
    parser.add_argument("--network_type", choices=["lora", "lokr"], default="lora", help="default: lora")
    parser.add_argument("--dim", type=count, metavar="N", help="rank of every layer; of a LoKr by default whole")
    parser.add_argument("--factor", type=count, metavar="N", help="of a LoKr: w1's rows and columns (default: 8)")
    parser.add_argument("--device", help="where to decompose (default: a GPU if there is one)")
    add_lora_output(parser, "bf16")
    options = parser.parse_args()
    found = extract(options)
    for note in found.notes:
        print(f"note: {note}")
    print(
        f"{options.save_to}: {counted(len(found.weights), 'layer')}, equal ones left out: {found.equal}; "
        f"at least {min(found.kept.values()):.2%} of each difference kept"
    )
    if found.beside:
        lokr, lora = (sum(kept.values()) / len(kept) for kept in (found.kept, found.beside))
        print(f"in the mean of all layers {lokr:.2%}; LoRAs of as many parameters keep {lora:.2%}")


if __name__ == "__main__":
    main()
