"""Show what is in a model or LoRA: architecture, blocks, dtypes, fp8 scales, sizes, metadata.

    python tools/inspect_model.py flux1-dev.safetensors
    python tools/inspect_model.py FLUX.1-dev                    # a diffusers folder
    python tools/inspect_model.py my_lora.safetensors           # and what programs make of it
    python tools/inspect_model.py models/*.safetensors

Any safetensors file, shards with an index, a model's or a pipeline's folder. Only headers are read, so a file of any
size takes a moment; of a LoRA the small matrices are read too, for the size of its updates.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.padding import Padding
from rich.text import Text

from library.config.model_layouts import is_lora
from library.console import Console, plain_table
from library.errors import UserError, counted, exit_on_user_error
from library.training.report.progress import loads_in_table
from tools.command import answer_early, tool_parser, value_range


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    parser = tool_parser(__doc__)
    parser.add_argument("paths", metavar="PATH", nargs="+", type=Path, help="file or folder")
    return parser


answer_early(__name__, lambda: parser().parse_args())

from library.models.inspection import Component, WeightSet, components, weight_sets
from library.precision.checkpoint import WeightFiles
from networks.files.inspection import LoraLayer, LoraReport, inspect_lora


@dataclass(frozen=True)
class Finding:
    """One file or set of shards: a LoRA, or a model with its components."""

    weights: WeightSet
    fp8: str | None
    components: tuple[Component, ...] = ()
    lora: LoraReport | None = None


def inspect(path: Path) -> list[Finding]:
    """Return what lies at ``path``, a finding for each file or set of shards."""
    return [_find(weights) for weights in weight_sets(path)]


def _find(weights: WeightSet) -> Finding:
    if is_lora(weights.tensors):
        return Finding(weights, None, lora=inspect_lora(weights.files[0]))
    try:
        layout = WeightFiles(weights.files[0], weights.files).quantized
        fp8 = layout.describe().removeprefix(f"{weights.files[0]}: ") if layout else None
    except UserError as error:  # a quantisation that Tandem does not read is still shown
        fp8 = str(error).removeprefix(f"{weights.files[0]}: ")
    return Finding(weights, fp8, tuple(components(weights)))


def show(finding: Finding, console: Console) -> None:
    """Print a finding."""
    console.print(weight_set_head(finding.weights, finding.fp8))
    for part in finding.components:
        console.print(component_view(part))
    if finding.lora:
        console.print(lora_view(finding.lora))
    if finding.weights.metadata.keys() - {"format"}:
        console.print(metadata_table(finding.weights.metadata))


_DTYPES = {"F32": "fp32", "F16": "fp16", "BF16": "bf16", "F8_E4M3": "fp8 e4m3", "F8_E5M2": "fp8 e5m2", "F64": "fp64"}
_LONGEST_VALUE = 110  # characters of a metadata value


def number(value: float) -> str:
    """Return 11900000000 as "11.9 B"."""
    for size, unit in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}" if abs(value) < 1000 * size else f"{value / size:,.0f}{unit}"
    return f"{value:g}"


def dtypes(counts: Mapping[str, int]) -> str:
    """Return the names of dtypes, most frequent first."""
    return ", ".join(_DTYPES.get(name, name.lower()) for name, _ in sorted(counts.items(), key=lambda item: -item[1]))


def weight_set_head(weights: WeightSet, fp8: str | None) -> RenderableType:
    """Return the lines about the files: names, size, quantisation, what is wrong."""
    names = str(weights.files[0]) + (f" and {len(weights.files) - 1} more shards" if len(weights.files) > 1 else "")
    lines = [
        Text.assemble((names, "bold cyan"), f"  {decimal(weights.bytes)}, {counted(len(weights.tensors), 'tensor')}")
    ]
    lines += [Text(f"  {fp8}", "magenta")] if fp8 else []
    lines += [Text(f"  {note}", "bold red") for note in weights.notes]
    return Group(*lines)


def component_view(part: Component) -> RenderableType:
    """Return a network's line: what it is, its sizes and its blocks."""
    facts = [f"{name} {value if value is not True else 'yes'}" for name, value in part.facts.items() if value]
    facts += [f"{name} × {count}" for name, count in part.blocks.items()]
    what = ", ".join([f"{number(part.parameters)} parameters", decimal(part.bytes), dtypes(part.dtypes), *facts])
    name = f"{part.name}: " if part.name else ""
    head = Text.assemble((name, "bold"), (part.architecture, "bold green"), f"  {what}")
    return Padding(head, (0, 0, 1, 2))


def lora_view(report: LoraReport) -> RenderableType:
    """Return a LoRA's layers by part, with the root mean square of the update."""
    kind = report.kind + (f" for {' or '.join(report.families)}" if report.families else "")
    kind += f", {report.layout}" if report.layout else ""
    heads = [Text.assemble((kind, "bold green"), f"  {counted(report.count, 'layer')}")] if report.count else []
    table = plain_table("layer", "×", "rank", "alpha", "rms")
    for part, members in _by_part(report.layers).items():
        table.add_row(Text(part or "outside the blocks", "bold"))
        for name in _rows(members):
            layers = [layer for layer in members if layer.layer == name]
            table.add_row(
                f"  {name}",
                str(len(layers)),
                sizes(layers),
                value_range(layer.alpha for layer in layers) if any(layer.rank for layer in layers) else "",
                f"{math.hypot(*(layer.rms for layer in layers)) / len(layers) ** 0.5:.2e}",
            )
    heads += [Text(note, "yellow") for note in report.notes]
    parts = [table] if report.layers else []
    parts += [loads_in_table(each.row for each in report.loads_in)] if report.loads_in else []
    return Group(Padding(Group(*heads), (0, 0, 0, 2)), *parts)


def sizes(layers: Sequence[LoraLayer]) -> str:
    """Return the ranks of layers of one name; of LoKrs "w1 8x8, w2 full", as at the start of a run."""
    if not any(layer.w1 for layer in layers):
        return value_range(layer.rank for layer in layers)
    found = (f"w1 {layer.w1}, {f'rank {layer.rank}' if layer.rank else 'w2 full'}" for layer in layers)
    return "; ".join(dict.fromkeys(found))


def _by_part(layers: Sequence[LoraLayer]) -> dict[str, list[LoraLayer]]:
    """Return the layers of each part in file order, what is outside the blocks last."""
    parts = sorted(dict.fromkeys(layer.part for layer in layers), key=lambda part: part == "")
    return {part: [layer for layer in layers if layer.part == part] for part in parts}


def _rows(members: Sequence[LoraLayer]) -> list[str]:
    return list(dict.fromkeys(layer.layer for layer in members))


def metadata_table(strings: Mapping[str, str]) -> RenderableType:
    """Return a file's metadata, long values shortened."""
    table = plain_table("metadata", "", left=("",))
    for key, value in sorted(strings.items()):
        text = " ".join(value.split())
        cut = f"{text[:_LONGEST_VALUE]}… ({len(value):,} characters)"
        table.add_row(key, Text(text if len(text) <= _LONGEST_VALUE else cut))
    return Padding(table, (0, 0, 1, 2))


@exit_on_user_error
def main() -> None:
    """Parse the command line, inspect, show."""
    options = parser().parse_args()
    findings = [finding for path in options.paths for finding in inspect(path.expanduser())]
    console = Console(highlight=False, markup=False)
    for finding in findings:
        show(finding, console)


if __name__ == "__main__":
    main()
