"""Convert a LoRA, LoKr or LoHa file from one key layout to another, with the same update in every layer.

    python tools/convert_lora.py --lora mine.safetensors --save_to for_comfyui.safetensors --save_format comfy
    python tools/convert_lora.py --lora peft_folder --save_to mine.safetensors --save_format kohya --save_precision bf16

The source may be in any published layout: kohya's, diffusers', ComfyUI's, PEFT's (a file or a folder), split or fused
q, k and v. Its metadata goes along, with hashes made anew. A key that has no place in the result is named and nothing
is written. At the end the result is read back and compared with the source, layer by layer; a table says which programs
read it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


from library.errors import UserError, counted, exit_on_user_error
from library.training.report.progress import loads_in_table
from tools.command import add_lora_output, check_lora_output, tool_console, tool_parser

if TYPE_CHECKING:
    from library.models.layer_names import LoraTargets
    from networks.files.adapters import AdapterFile


def convert(
    source: Path,
    target: Path,
    save_format: str,
    precision: str | None = None,
    model_type: str | None = None,
    overwrite: bool = False,
) -> tuple[LoraTargets, AdapterFile, AdapterFile, float]:
    """Write ``source`` to ``target`` in ``save_format``; return both as read, and how far their updates differ.

    Args:
        source: LoRA file, or a folder written by PEFT.
        target: ``.safetensors`` file to write.
        save_format: its key layout.
        precision: "fp32", "fp16" or "bf16"; None: the source's, the widest if it has several.
        model_type: the family's name; None: as the source says.
        overwrite: replace ``target`` if it exists.

    Returns:
        The family's row, source, result, and the largest relative difference of a layer's update (Frobenius norm).
    """
    import torch

    from networks.files.adapters import load_trainable
    from networks.files.detection import load_loras
    from networks.files.metadata import ADAPTER_METADATA_KEY
    from networks.files.verify import distance
    from networks.files.weights import DoraWeights, LoraWeights
    from networks.files.writing import save_adapter, widest_precision

    if target.exists() and source.exists() and target.resolve() == source.resolve():
        raise UserError(f"{target}: is the source itself; choose another --save_to")
    check_lora_output(target, overwrite)
    targets, (read,) = load_loras([source], model_type, load_trainable)
    if doras := [name for name, weights in read.weights.items() if isinstance(weights, DoraWeights)]:
        title, why = read.weights[doras[0]].title, "whose norms are others in each layout, by the base's weights"
        raise UserError(f"{source}: {doras[0]} is a {title}, {why}; save it so from the training, or merge it")
    metadata = {key: value for key, value in read.metadata.items() if key != ADAPTER_METADATA_KEY}
    # In fp32: folding unequal scales into B must not round in the source's dtype.
    exact = {name: weights.to(torch.float32) for name, weights in read.weights.items()}
    save_adapter(target, exact, targets, save_format, precision or widest_precision(read.weights), metadata)
    written = load_trainable(target, targets)
    # a layer whose down-projection is zero is not kept apart inside a fused one
    loras = {name: w for name, w in read.weights.items() if isinstance(w, LoraWeights)}
    absent = {name: LoraWeights(w.down, torch.zeros_like(w.up), w.alpha) for name, w in loras.items()}
    after = absent | written.weights
    return targets, read, written, max(distance(after[name], w) for name, w in read.weights.items())


def summary(path: Path, read: AdapterFile) -> str:
    """Return a line: file, layout, precision, layers and tensors."""
    from library.safetensors_io import read_safetensors_header
    from networks.files.metadata import weight_file
    from networks.files.writing import widest_precision

    tensors = len(read_safetensors_header(weight_file(path)).keys() - {"__metadata__"})
    precision = widest_precision(read.weights)
    return f"{path}: {read.layout}, {precision}, {counted(len(read.weights), 'layer')} in {counted(tensors, 'tensor')}"


@exit_on_user_error
def main() -> None:
    """Parse the command line, convert, report."""
    parser = tool_parser(__doc__)
    parser.add_argument("--lora", required=True, type=Path, help="LoRA file, or a folder written by PEFT")
    add_lora_output(parser, format_required=True)
    options = parser.parse_args()
    from networks.files.readers import read_by_none
    from networks.files.verify import loads_in

    targets, read, written, difference = convert(
        options.lora,
        options.save_to,
        options.save_format,
        options.save_precision,
        options.model_type,
        options.overwrite,
    )
    console = tool_console()
    for note in read.notes:
        console.print(f"note: {note}")
    console.print(f"from  {summary(options.lora, read)}")
    console.print(f"to    {summary(options.save_to, written)}")
    same = f"to {difference:.0e} of its size" if difference else "to the last bit that can be measured"
    console.print(f"checked: every layer's update is the same {same}")
    programs = loads_in(options.save_to, written.weights, targets)
    console.print(loads_in_table(each.row for each in programs))
    kind = next(weights.kind for weights in written.weights.values())
    problem = read_by_none(written.weights, targets, options.save_format, kind)
    if problem and not any(each.is_right for each in programs):
        console.print(f"note: {problem}")


if __name__ == "__main__":
    main()
