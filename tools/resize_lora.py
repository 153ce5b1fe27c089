"""Give a LoRA or LoKr smaller ranks, keeping as much of its updates as they can hold; or make a LoRA of a LoKr or LoHa.

    python tools/resize_lora.py --lora my_lora.safetensors --save_to small.safetensors --new_rank 8
    python tools/resize_lora.py --lora my_lora.safetensors --save_to small.safetensors \\
        --dynamic_method sv_fro --dynamic_param 0.95 --new_rank 32
    python tools/resize_lora.py --lora my_lokr.safetensors --save_to lora.safetensors --network_type lora --new_rank 32

With ``--dynamic_method`` every layer has its own rank, ``--new_rank`` being the largest one allowed. The methods are
those of sd-scripts, on the singular values of the layer's update:

    sv_fro         the fewest that hold --dynamic_param of the Frobenius norm (0.95: 90 % of the sum of squares)
    sv_cumulative  the fewest whose sum is --dynamic_param of the sum of all
    sv_ratio       all that are larger than the largest one divided by --dynamic_param

The result is used at the same strength: a LoRA has alpha = rank in every layer, the old scale being in the weights; a
LoKr keeps alpha / rank. A LoKr's rank is that of w2, and layers whose w2 would not become smaller by it stay as they
are. ``--network_type lora`` makes LoRAs, for programs that read nothing else.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from library.errors import UserError, counted, exit_on_user_error
from networks.merging import RANK_RULES
from tools.command import add_lora_output, check_lora_output, count, finite, rank_range, tool_parser

if TYPE_CHECKING:
    from networks.merging.low_rank import ResizedLayer


def resize(options: argparse.Namespace) -> list[ResizedLayer]:
    """Write the LoRA that the command line asks for; return what became of its layers."""
    from networks.files.adapters import load_trainable
    from networks.files.detection import load_loras
    from networks.files.writing import SavedAs, save_derived_lora
    from networks.merging.low_rank import resize_lora

    check_flags(options)
    check_lora_output(options.save_to, options.overwrite)
    targets, (source,) = load_loras([options.lora], options.model_type, load_trainable)
    for note in source.notes:
        print(f"note: {note}")
    weights, layers = resize_lora(
        source.weights, options.new_rank, options.dynamic_method, options.dynamic_param or 1.0, options.network_type
    )
    how = f"rank {options.new_rank}"
    if options.dynamic_method:
        how = f"{options.dynamic_method} {options.dynamic_param:g}"
    saved_as = SavedAs(options.save_format, options.save_precision)
    comment = f"resized by {how}"
    save_derived_lora(options.save_to, weights, targets, source.metadata, comment, [source], saved_as)
    return layers


def check_flags(options: argparse.Namespace) -> None:
    """Refuse flags that say no rank, or a parameter that its method has no meaning for."""
    method, parameter = options.dynamic_method, options.dynamic_param
    if method is None and options.new_rank is None:
        raise UserError("give --new_rank, or --dynamic_method with --dynamic_param")
    if (method is None) != (parameter is None):
        raise UserError("--dynamic_method and --dynamic_param go together; give both or neither")
    if method == "sv_ratio" and parameter <= 1:
        raise UserError(f"--dynamic_param {parameter:g}: sv_ratio needs a number above 1; 10 keeps a tenth and more")
    if method in ("sv_fro", "sv_cumulative") and not 0 < parameter <= 1:
        raise UserError(f"--dynamic_param {parameter:g}: {method} needs a share above 0 and at most 1")


@exit_on_user_error
def main() -> None:
    """Parse the command line, resize, report."""
    parser = tool_parser(__doc__)
    parser.add_argument("--lora", "--model", required=True, type=Path, help="the LoRA (--model: as sd-scripts says)")
    parser.add_argument("--new_rank", type=count, metavar="N", help="rank; with --dynamic_method the largest one")
    parser.add_argument("--dynamic_method", choices=RANK_RULES, help="choose a rank for each layer")
    parser.add_argument("--dynamic_param", type=finite, metavar="X", help="of --dynamic_method")
    parser.add_argument(
        "--network_type", choices=["lora"], default="", help="make LoRAs (default: what each layer has)"
    )
    parser.add_argument("--verbose", action="store_true", help="show every layer")
    add_lora_output(parser)
    options = parser.parse_args()
    layers = resize(options)
    for layer in layers if options.verbose else ():
        before, after = layer.before or "full", layer.after or "full"
        print(f"{layer.name}: rank {before} -> {after}, {layer.kept:.2%} kept, ratio {layer.ratio:.3g}")
    ranks, least = rank_range(layer.after for layer in layers), min(layer.kept for layer in layers)
    became = f"at least {least:.2%} of each update kept"
    if not options.network_type and all(layer.after == layer.before for layer in layers):
        became = "no layer became smaller; lower --new_rank or --dynamic_param"
    print(f"{options.save_to}: {counted(len(layers), 'layer')}, {ranks}; {became}")


if __name__ == "__main__":
    main()
