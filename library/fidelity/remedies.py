"""What costs nothing: settings of the server that take a part of the error away, measured where they were run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from library.errors import counted
from library.fidelity.comparison import Comparison
from library.fidelity.differences import Differences
from library.fidelity.servers import dropped_by_bypass
from library.fidelity.serving import Models, Variant

_WORTH_IT = 0.8  # times the base's error, below which another format is worth a line


def free_remedies(
    models: Models,
    variant: Variant,
    full: Differences,
    without: Mapping[str, Differences],
    comparison: Comparison,
    loras: Sequence[Path],
) -> list[str]:
    """Return what a user may do before fitting or training anything, the cheapest first, a sentence or two each.

    Args:
        models, variant, full: the deployment, and how far it is from the reference.
        without: cause -> the same without it.
        comparison: of all tensors.
        loras: files, whose names decide what ComfyUI's bypass takes.
    """
    assert models.server is not None
    layout = models.deployed.layout(models.deployed_family)
    in_comfyui = models.server.name.startswith("comfyui") and not models.deployed.merged
    found = []
    if in_comfyui and variant.merge is not None:
        found.append(_bypass(models, full, without.get("merge"), loras))
        found.append(
            "Or serve a GGUF of the model (Q8_0, Q6_K): its loader rounds nothing of a LoRA and multiplies in bf16, "
            "for slower steps."
        )
    if comparison.int8 is not None and comparison.int8 < _WORTH_IT:
        found.append(
            f"Or serve int8_convrot instead (tools/quantize_model.py --scheme int8_convrot): the layers of the base "
            f"would err {comparison.int8:.2f} times as much as now. ComfyUI rounds the LoRA there too: use the bypass."
        )
    words = {each.how for each in models.roundings(variant).values()}
    if layout in ("comfy_scaled", "comfy_quant") and words - {"int8"} and (alone := without.get("activations")):
        found.append(
            "Or have the file ask for products in high precision (tools/quantize_model.py --products high): "
            f"{_change(full, alone)}."
        )
    return found


def _bypass(models: Models, full: Differences, without: Differences | None, loras: Sequence[Path]) -> str:
    """Say what ComfyUI's bypass does, and what it needs."""
    text = (
        "Load the LoRA with \u201cLoad LoRA (Bypass)\u201d: it stays beside the weights, and nothing of it is rounded"
    )
    text += f"; {_change(full, without)}." if without else "."
    if dropped := dropped_by_bypass(loras, models.targets):
        text += (
            f" Convert it first (tools/convert_lora.py --save_format comfy): {counted(len(dropped), 'layer')} of it "
            f"({dropped[0]}, ...) are parts of one layer in ComfyUI, and the bypass leaves such parts out."
        )
    if models.family.int8_passes_bypass and any(each.how == "int8" for each in models.served_inputs.values()):
        text += " On int8 files of this model newer versions multiply some layers past it: compare one picture."
    return text


def _change(full: Differences, other: Differences) -> str:
    return f"{other.error:.2%} off instead of {full.error:.2%}"
