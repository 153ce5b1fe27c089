"""How fast training is against what the hardware could do: tokens a second and model FLOPs utilisation.

MFU (PaLM, arXiv 2204.02311, appendix B) counts the operations that the model needs, not those that are done: for a
token 6 for each weight that it is multiplied with (2 forward, 4 backward), and 12 * layers * width of heads * context
for attention. Recomputation under checkpointing does not count, so it lowers the figure as it lowers the speed.
"""

from __future__ import annotations

import torch

from library.models.lm_config import LMConfig
from library.models.transformer_lm import TransformerLM

# Dense bf16 tensor-core peaks in FLOP/s, from NVIDIA's data sheets; names as torch.cuda.get_device_name contains them.
_PEAKS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A6000": 155e12,
    "RTX 5090": 210e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "T4": 65e12,
}


def flops_per_token(model: TransformerLM, context: int) -> float:
    """Return the operations that forward and backward of one token need."""
    config: LMConfig = model.config
    blocks = sum(parameter.numel() for parameter in model.blocks.parameters() if parameter.ndim == 2)
    head = config.padded_vocab_size * config.width
    return 6 * (blocks + head) + 12 * config.layers * config.heads * config.head_dim * context


def peak_flops(device: torch.device) -> float | None:
    """Return the device's bf16 peak in FLOP/s; None where it is not known, as for CPUs."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in _PEAKS.items() if known in name), None)
