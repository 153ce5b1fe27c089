"""The served file made anew from the bf16 model, with the same layers in fp8 but for a few.

Three things that plain casts and most published files leave out are worth a file of one's own: scales, four bytes a
layer, that lift small weights out of the subnormals; rounding that makes up for its own errors on real activations
(``library.precision.parity.compensated``; the size stays); and a tenth of the size more, spent on the layers that
contribute most to the error (``library.precision.parity.layer_errors``). A file without scales gets ComfyUI's, which
programs that read a plain cast and no scales (diffusers' layerwise casting) do not take; any other keeps its layout.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from torch import nn

import tools.quantize_model as quantize_model
from library.precision.checkpoint_layouts import LayoutKind
from library.precision.fp8_linear import Fp8Linear
from library.precision.quantize import E4M3FN, Granularity, format_of
from tools.report.deployments import DeployedWeights, Models

_LAYOUT_OF_SCALES: dict[Granularity, LayoutKind] = {
    "tensor": "comfy_scaled",
    "row": "musubi",
    "block64": "musubi",
    "block128": "musubi",
}


def rebuild(
    models: Models, base: str, save_to: Path, compensated: bool, kept_share: float, flags: Sequence[str]
) -> Models:
    """Write the deployed model anew and return the models with it deployed.

    Args:
        models: what is deployed now, a file or a recipe.
        base: the high-precision model, as the user named it.
        save_to: where the result goes; a suffix is put on where ``base`` is a file.
        compensated: round with compensation.
        kept_share: of the fp8 file's size to spend on layers in bf16; 0 for none.
        flags: of the calibration, as command line words.

    Raises:
        UserError: see ``quantize_model.quantize``.
    """
    deployed = models.base(deployed=True)
    fp8 = {name: layer for name, layer in deployed.named_modules() if isinstance(layer, Fp8Linear)}
    high = [name for name, m in deployed.named_modules() if isinstance(m, nn.Linear) and name not in fp8]
    size = sum(layer.weight.numel() for layer in fp8.values())
    granularity = Counter(map(_granularity, fp8.values())).most_common(1)[0][0]
    number_format = format_of(next(iter(fp8.values())).weight.dtype)
    assert number_format is not None
    layout = models.deployed_family.fp8_layout() if models.deployed.path else None
    kind = layout.kind if layout and layout.kind != "plain" else _LAYOUT_OF_SCALES[granularity]
    # ComfyUI reads its scaled layout as e4m3fn; with scales nothing needs the range of e5m2
    format_name = E4M3FN.name if kind == "comfy_scaled" else number_format.name
    target = save_to if Path(base).expanduser().is_dir() else save_to.with_name(f"{save_to.name}.safetensors")
    words = ["--model", base, "--save_to", str(target), "--model_type", models.family.name, "--keep", "", *flags]
    words += ["--layout", kind, "--granularity", granularity, "--format", format_name]
    words += ["--keep_pattern", f"^({'|'.join(map(re.escape, high))})$"] if high else []
    words += ["--compensated"] if compensated else []
    words += ["--budget_mb", f"{kept_share * size / 2**20:.6f}"] if kept_share else []
    del deployed, fp8
    quantize_model.quantize(quantize_model.parse(words), Console(quiet=True))
    return Models(models.config, DeployedWeights(target, None), models.loras, models.dtype, models.device)


def _granularity(layer: Fp8Linear) -> Granularity:
    """Return the kind of a layer's scales; that of the scales which a layer without any is to get."""
    if layer.scale is None:
        return "tensor"
    rows, blocks = layer.scale.shape
    if blocks == 1:
        return "row" if rows > 1 else "tensor"
    found: Granularity = "block64" if layer.in_features // blocks == 64 else "block128"
    return found
