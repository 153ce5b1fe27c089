"""Convert a LoRA file from one key layout to another, with the same update in every layer.

    python tools/convert_lora.py my_lora.safetensors for_comfyui.safetensors --save_format comfy
    python tools/convert_lora.py peft_folder my_lora.safetensors --save_format kohya --save_precision bf16

The source may be in any published layout: kohya's, diffusers', ComfyUI's, PEFT's (a file or a folder), split or fused
q, k and v. Its metadata goes along, with hashes made anew. A key that has no place in the result is named and nothing
is written. At the end the result is read back and compared with the source, layer by layer.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.table import Table

from library.errors import UserError, exit_on_user_error
from library.training.report.progress import plain_table
from tools.command import add_lora_format, add_model_type, check_lora_output, tool_console, tool_parser

if TYPE_CHECKING:
    from library.models.layer_names import LoraTargets
    from networks.files.adapters import LoraFile
    from networks.files.weights import LoraWeights


def convert(
    source: Path,
    target: Path,
    targets: LoraTargets,
    save_format: str,
    precision: str | None = None,
    overwrite: bool = False,
) -> tuple[LoraFile, LoraFile, float]:
    """Write ``source`` to ``target`` in ``save_format``; return both as read, and how far their updates differ.

    Args:
        source: LoRA file, or a folder written by PEFT.
        target: ``.safetensors`` file to write.
        targets: the family's row.
        save_format: its key layout.
        precision: "fp32", "fp16" or "bf16"; None: the source's, the widest if it has several.
        overwrite: replace ``target`` if it exists.

    Returns:
        Source, result, and the largest relative difference of a layer's update (Frobenius norm).
    """
    from networks.files.adapters import load_lora, save_adapter, widest_precision
    from networks.files.metadata import ADAPTER_METADATA_KEY
    from networks.files.weights import LoraWeights

    if target.exists() and source.exists() and target.resolve() == source.resolve():
        raise UserError(f"{target}: is the source itself; choose another DST")
    check_lora_output(target, overwrite, "DST")
    read = load_lora(source, targets)
    metadata = {key: value for key, value in read.metadata.items() if key != ADAPTER_METADATA_KEY}
    # In fp32: folding unequal scales into B must not round in the source's dtype.
    exact = {name: LoraWeights(w.down.float(), w.up.float(), w.alpha) for name, w in read.weights.items()}
    save_adapter(target, exact, targets, save_format, precision or widest_precision(read.weights), metadata)
    written = load_lora(target, targets)
    return read, written, max(_difference(w, written.weights.get(name)) for name, w in read.weights.items())


def _difference(before: LoraWeights, after: LoraWeights | None) -> float:
    import torch

    from networks.files.weights import LoraWeights
    from networks.merging.low_rank import relative_difference

    if after is None:  # a layer whose down-projection is zero is not kept apart inside a fused one
        after = LoraWeights(torch.zeros_like(before.down), torch.zeros_like(before.up), before.alpha)
    return relative_difference(before, after)


def describe(weights: Mapping[str, LoraWeights], targets: LoraTargets) -> Table:
    """Return a table of the layers that have an update: kinds, counts, ranks, alphas."""
    rows: dict[tuple[str, int, float], int] = {}
    for name, module in weights.items():
        kind = targets.group_of(name)
        row = (kind.name if kind else name, module.rank, module.alpha)
        rows[row] = rows.get(row, 0) + 1
    table = plain_table("layers", "count", "rank", "alpha")
    for (kind_name, rank, alpha), count in rows.items():
        table.add_row(kind_name, str(count), str(rank), f"{alpha:g}")
    return table


def summary(path: Path, read: LoraFile) -> str:
    """Return a line: file, layout, precision, layers and tensors."""
    from library.safetensors_io import read_safetensors_header
    from networks.files.adapters import widest_precision

    file = path / "adapter_model.safetensors" if path.is_dir() else path
    tensors = len(read_safetensors_header(file).keys() - {"__metadata__"})
    precision = widest_precision(read.weights)
    return f"{path}: {read.layout}, {precision}, {len(read.weights)} layers in {tensors} tensors"


@exit_on_user_error
def main() -> None:
    """Parse the command line, convert, report."""
    parser = tool_parser(__doc__)
    parser.add_argument("source", metavar="SRC", type=Path, help="LoRA file, or a folder written by PEFT")
    parser.add_argument("target", metavar="DST", type=Path, help="the .safetensors file to write")
    add_lora_format(parser, required=True)
    add_model_type(parser, "as SRC says")
    parser.add_argument("--overwrite", action="store_true", help="replace DST if it exists")
    options = parser.parse_args()
    from networks.files.detection import targets_of_files

    targets = targets_of_files([options.source], options.model_type)
    read, written, difference = convert(
        options.source, options.target, targets, options.save_format, options.save_precision, options.overwrite
    )
    console = tool_console()
    console.print(describe(read.weights, targets))
    console.print(f"from  {summary(options.source, read)}")
    console.print(f"to    {summary(options.target, written)}")
    same = f"to {difference:.0e} of its size" if difference else "to the last bit that can be told"
    console.print(f"checked: every layer's update is the same {same}")


if __name__ == "__main__":
    main()
