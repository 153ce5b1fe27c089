"""Show what is in a model or LoRA: architecture, modules, norms, dtypes, fp8 scales, sizes, metadata.

    python tools/inspect_model.py flux1-dev.safetensors
    python tools/inspect_model.py FLUX.1-dev --modules          # a diffusers folder, every module
    python tools/inspect_model.py my_lora.safetensors --save_to my_lora.png
    python tools/inspect_model.py models/*.safetensors --json

Any safetensors file, shards with an index, a model's or a pipeline's folder. Only headers are read, so a file of any
size takes a moment; of a LoRA the small matrices are read too, for the size of its updates.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console

import tools.inspection.tables as tables
from library.errors import UserError, exit_on_user_error
from library.models.inspection import Component, WeightSet, components, is_lora, weight_sets
from library.precision.checkpoint_layouts import WeightFiles
from networks.files.inspection import LoraReport, inspect_lora
from tools.inspection.lora_picture import draw_lora


@dataclass(frozen=True)
class Finding:
    """One file or set of shards: a LoRA, or a model with its components."""

    weights: WeightSet
    fp8: str | None
    components: tuple[Component, ...] = ()
    lora: LoraReport | None = None

    def as_json(self) -> dict[str, Any]:
        """Return everything but the list of tensors, for ``--json``."""
        return {
            "part": self.weights.name,
            "files": [str(file) for file in self.weights.files],
            "bytes": self.weights.bytes,
            "tensors": len(self.weights.tensors),
            "notes": list(self.weights.notes),
            "fp8": self.fp8,
            "components": [asdict(part) for part in self.components],
            "lora": asdict(self.lora) if self.lora else None,
            "metadata": dict(self.weights.metadata),
        }


def inspect(path: Path) -> list[Finding]:
    """Return what lies at ``path``, a finding for each file or set of shards.

    Raises:
        UserError: nothing there, or no safetensors.
    """
    return [_find(weights) for weights in weight_sets(path)]


def _find(weights: WeightSet) -> Finding:
    if is_lora(weights.tensors):
        return Finding(weights, None, lora=inspect_lora(weights.files[0]))
    try:
        layout = WeightFiles(weights.files[0], weights.files).fp8
        fp8 = layout.describe().removeprefix(f"{weights.files[0]}: ") if layout else None
    except UserError as error:  # a quantisation that Tandem does not read is still shown
        fp8 = str(error).removeprefix(f"{weights.files[0]}: ")
    return Finding(weights, fp8, tuple(components(weights)))


def show(finding: Finding, console: Console, all_modules: bool) -> None:
    """Print a finding."""
    console.print(tables.weight_set_head(finding.weights, finding.fp8))
    for part in finding.components:
        console.print(tables.component(part, all_modules))
    if finding.lora:
        console.print(tables.lora(finding.lora))
    if finding.weights.metadata.keys() - {"format"}:
        console.print(tables.metadata(finding.weights.metadata))


def draw(findings: list[Finding], save_to: Path) -> list[Path]:
    """Draw every LoRA: one to the file ``save_to``, several into a folder of that name; return the pictures.

    Raises:
        UserError: there is no LoRA, or a picture of several is to be one file.
    """
    loras = [(finding.weights.files[0], finding.lora) for finding in findings if finding.lora and finding.lora.layers]
    if not loras:
        raise UserError(f"--save_to {save_to}: only a LoRA has a picture, and none is among the files; remove it")
    if len(loras) == 1 and save_to.suffix == ".png":
        return [draw_lora(loras[0][1].layers, loras[0][0].name, save_to)]
    if save_to.suffix:
        what = "give a folder for several LoRAs" if len(loras) > 1 else "give a name that ends in .png"
        raise UserError(f"--save_to {save_to}: {what}")
    return [draw_lora(lora.layers, path.name, save_to / f"{path.stem}.png") for path, lora in loras]


@exit_on_user_error
def main() -> None:
    """Parse the command line, inspect, show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", metavar="PATH", nargs="+", type=Path, help="file or folder")
    parser.add_argument("--modules", action="store_true", help="every module instead of a count by kind")
    parser.add_argument("--save_to", type=Path, metavar="PNG", help="picture of a LoRA; a folder for several")
    parser.add_argument("--json", action="store_true", help="everything as JSON, for other programs")
    options = parser.parse_args()
    findings = [finding for path in options.paths for finding in inspect(path.expanduser())]
    if options.json:
        print(json.dumps([finding.as_json() for finding in findings], indent=2))
    else:
        console = Console(highlight=False, markup=False)
        for finding in findings:
            show(finding, console, options.modules)
    for picture in draw(findings, options.save_to) if options.save_to else []:
        print(picture, file=sys.stderr if options.json else sys.stdout)


if __name__ == "__main__":
    main()
