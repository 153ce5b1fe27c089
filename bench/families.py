"""What a benchmark must know of a model family, and the LoRA step that is the same for every trainer measured.

Transformers have random weights and any size; what a case does not name is as in the published model, so that a
transformer of few blocks has the blocks of the real one. A step (:class:`LoraStep`) is forward, mean squared error,
backward, AdamW.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from library.config.schema import NetworkConfig
from library.models.family_by_name import family_class
from library.models.layer_names import LoraTargets
from library.models.registry import lora_targets
from library.models.vae import image_positions
from networks.network import AdapterNetwork, inject_adapter, select_modules
from networks.options import NetworkOptions, parse_network_args


@dataclass(frozen=True)
class Sizes:
    """Width and depth of a transformer and the tokens it sees."""

    width: int = 3072
    blocks: tuple[int, ...] = (19, 38)  # a number per kind of block: FLUX's double and single ones
    image_sides: tuple[int, int] = (64, 64)  # tokens down and across; 64 x 64 is 1024 x 1024 pixels
    text_tokens: int = 512
    batch: int = 1
    head_dim: int = 128


FAMILIES = {"flux": Sizes(), "qwen_image": Sizes(blocks=(60,))}  # as published
FEW_BLOCKS = {"flux": (1, 2), "qwen_image": (2,)}  # depth of the CPU benchmarks
RANK = 16
_TEXT_WIDTHS = {"flux": 4096, "qwen_image": 3584}


def build_transformer(family_name: str, sizes: Sizes, dtype: torch.dtype, device: str = "cpu") -> Any:
    """Return diffusers' transformer, frozen, with random weights, made on ``device`` in ``dtype``."""
    family, first = family_class(family_name), sizes.head_dim // 8
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            transformer = family.transformer_class(
                **family.published,
                **dict(zip(family.depths, sizes.blocks, strict=False)),
                attention_head_dim=sizes.head_dim,
                num_attention_heads=sizes.width // sizes.head_dim,
                joint_attention_dim=_TEXT_WIDTHS[family_name],
                axes_dims_rope=(first, (sizes.head_dim - first) // 2, (sizes.head_dim - first) // 2),  # 16, 56, 56
            )
    finally:
        torch.set_default_dtype(torch.float32)
    return transformer.requires_grad_(False)


def example_inputs(family_name: str, sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """Return what the transformer is called with."""
    (rows, columns), batch, random = sizes.image_sides, sizes.batch, torch.Generator().manual_seed(1)
    inputs = {
        "hidden_states": torch.randn(batch, rows * columns, 64, generator=random),
        "encoder_hidden_states": torch.randn(batch, sizes.text_tokens, _TEXT_WIDTHS[family_name], generator=random),
        "timestep": torch.full((batch,), 0.5),
    }
    if family_name == "flux":
        inputs |= {
            "pooled_projections": torch.randn(batch, 768, generator=random),
            "guidance": torch.ones(batch),
            "img_ids": image_positions(rows, columns),
            "txt_ids": torch.zeros(sizes.text_tokens, 3),
        }
    shapes = {"img_shapes": [[(1, rows, columns)]] * batch} if family_name == "qwen_image" else {}
    return {name: tensor.to(device) for name, tensor in inputs.items()} | shapes


def tandem_network(family_name: str, transformer: nn.Module) -> AdapterNetwork:
    """Put Tandem's LoRA on the layers it trains by default, its weights in fp32."""
    return inject_adapter(transformer, *_options(family_name), seed=0)


def peft_lora(family_name: str, transformer: Any, fp8_cast: bool = False) -> list[nn.Parameter]:
    """Put peft's LoRA on the same layers as :func:`tandem_network`; return its fp32 parameters.

    ``fp8_cast`` runs fp8 as the kohya trainers do: those layers' weights are cast to fp8 without scales, and autocast
    casts them up for each product.
    """
    from peft import LoraConfig

    names = [*select_modules(transformer, *_options(family_name))[0]]
    transformer.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=names))
    trained = [p for p in transformer.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.data = parameter.data.float()  # diffusers' scripts: cast_training_params
    for layer in (transformer.get_submodule(name).base_layer for name in names if fp8_cast):
        layer.weight.data = layer.weight.data.to(torch.float8_e4m3fn)
    return trained


def _options(family_name: str) -> tuple[NetworkOptions, LoraTargets]:
    targets = lora_targets()[family_name]
    return parse_network_args(NetworkConfig(network_dim=RANK, network_alpha=RANK), targets), targets


class LoraStep:
    """A model with trained LoRA parameters that can take training steps."""

    def __init__(
        self, model: nn.Module, trained: list[nn.Parameter], inputs: dict[str, Any], autocast: bool = True
    ) -> None:
        self.model, self.trained, self.inputs = model.train(), trained, inputs
        tensors = [*model.parameters(), *model.buffers()]
        self.base_bytes = sum(t.numel() * t.element_size() for t in tensors if not t.requires_grad)
        self.autocast = autocast
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
        shape = inputs["hidden_states"].shape
        self.target = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(inputs["hidden_states"].device)

    def loss(self) -> Tensor:
        """Run one step and return its loss, still on the device."""
        with torch.autocast(self.target.device.type, torch.bfloat16, enabled=self.autocast):
            output = self.model(**self.inputs, return_dict=False)[0]
        loss = (output.float() - self.target).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def step(self) -> float:
        """Take one step; return its loss."""
        return self.loss().item()
