"""What ComfyUI makes of a layer's weight and a file's tensors, written from its ``comfy/weight_adapter`` for tests.

Strength 1 and no convolutions. ``tensors`` are those behind one module's stem: ``lokr_w1``, ``alpha``, ...
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def comfy_weight(weight: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the patched weight in float64."""
    w = weight.double()
    t = {name: tensor.double() for name, tensor in tensors.items()}
    alpha = float(t["alpha"])
    if "dora_scale" in t:  # lora.py with base.py's weight_decompose, magnitudes along the outputs
        diff = t["lora_up.weight"] @ t["lora_down.weight"] * (alpha / t["lora_down.weight"].shape[0])
        assert t["dora_scale"].shape == (w.shape[0], 1)
        return (w + diff) * (t["dora_scale"] / w.norm(dim=1, keepdim=True))
    if any(name.startswith("lokr") for name in t):
        dim = None
        if (w1 := t.get("lokr_w1")) is None:
            dim = t["lokr_w1_b"].shape[0]
            w1 = t["lokr_w1_a"] @ t["lokr_w1_b"]
        if (w2 := t.get("lokr_w2")) is None:
            dim = t["lokr_w2_b"].shape[0]
            w2 = t["lokr_w2_a"] @ t["lokr_w2_b"]
        return w + (alpha / dim if dim else 1.0) * torch.kron(w1, w2)
    product = (t["hada_w1_a"] @ t["hada_w1_b"]) * (t["hada_w2_a"] @ t["hada_w2_b"])
    return w + alpha / t["hada_w1_b"].shape[0] * product
