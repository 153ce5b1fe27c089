"""What a benchmark must know of a model family, and the LoRA step that is the same for every trainer measured.

A family is a row of ``FAMILIES``: a transformer of any size with random weights, and its inputs. Sizes that a case does
not name are those of the published model, so that a reduced-depth transformer has the blocks of the real one. A step
(:class:`LoraStep`) is forward, mean squared error, backward, AdamW.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from library.config.schema import NetworkConfig
from library.models.registry import lora_targets
from networks.injection import inject_adapter, select_modules
from networks.network import AdapterNetwork
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


@dataclass(frozen=True)
class BenchFamily:
    """How to build a family's transformer and inputs, and how to optimise its forward."""

    build: Callable[[Sizes], nn.Module]
    inputs: Callable[[Sizes, torch.device], dict[str, Any]]
    optimise_forward: Callable[[Any], Any]
    blocks: Callable[[Any], list[nn.Module]]  # in running order
    full: Sizes
    few_blocks: tuple[int, ...]  # depth of the CPU benchmarks
    forward_flops: Callable[[Sizes], tuple[float, float]]  # of one forward pass: linear layers, attention

    def step_flops(self, sizes: Sizes) -> float:
        """Return what a LoRA step needs: no weight gradients, attention's backward twice its forward."""
        linear, attention = self.forward_flops(sizes)
        return 2 * linear + 3 * attention


def build_transformer(family: BenchFamily, sizes: Sizes, dtype: torch.dtype, device: str = "cpu") -> nn.Module:
    """Return diffusers' transformer, frozen, with random weights, made on ``device`` in ``dtype``."""
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return family.build(sizes).requires_grad_(False)
    finally:
        torch.set_default_dtype(torch.float32)


def tandem_network(family_name: str, transformer: nn.Module, rank: int) -> AdapterNetwork:
    """Put Tandem's LoRA on the layers it trains by default, its weights in fp32."""
    targets = lora_targets()[family_name]
    return inject_adapter(transformer, _options(family_name, rank), targets, seed=0)


def tandem_lora(family_name: str, transformer: nn.Module, rank: int) -> list[nn.Parameter]:
    """Put Tandem's LoRA on the layers it trains by default; return its fp32 parameters."""
    return tandem_network(family_name, transformer, rank).parameters()


def quantise_for_cpu(transformer: nn.Module, granularity: str) -> None:
    """Make the base fp8 as Tandem's training on a CPU does, computing in bf16, before it is given a LoRA."""
    from library.precision.fp8_linear import make_cpu_kernels
    from library.precision.recipe import Fp8Recipe, quantize_model

    quantize_model(transformer, Fp8Recipe(granularity))  # type: ignore[arg-type]
    make_cpu_kernels(transformer, torch.bfloat16)


def peft_lora(family_name: str, transformer: Any, rank: int, fp8_cast: bool = False) -> list[nn.Parameter]:
    """Put peft's LoRA on the same layers as :func:`tandem_lora`; return its fp32 parameters.

    ``fp8_cast`` runs fp8 as the kohya trainers do: those layers' weights are cast to fp8 without scales, and autocast
    casts them up for each product.
    """
    from peft import LoraConfig

    names = default_layers(family_name, transformer)
    transformer.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=names))
    trained = [p for p in transformer.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.data = parameter.data.float()  # diffusers' scripts: cast_training_params
    for layer in (transformer.get_submodule(name).base_layer for name in names if fp8_cast):
        layer.weight.data = layer.weight.data.to(torch.float8_e4m3fn)
    return trained


def default_layers(family_name: str, transformer: nn.Module) -> list[str]:
    """Return the names of the linear layers that :func:`tandem_lora` trains."""
    return [*select_modules(transformer, _options(family_name, 1), lora_targets()[family_name])[0]]


def _options(family_name: str, rank: int) -> NetworkOptions:
    return parse_network_args(NetworkConfig(network_dim=rank, network_alpha=rank), lora_targets()[family_name])


def base_bytes(model: nn.Module) -> int:
    """Return the bytes of the frozen tensors of ``model``."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum(t.numel() * t.element_size() for t in tensors if not t.requires_grad)


def _flux(sizes: Sizes) -> nn.Module:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        num_layers=sizes.blocks[0],
        num_single_layers=sizes.blocks[1],
        attention_head_dim=sizes.head_dim,
        num_attention_heads=sizes.width // sizes.head_dim,
        joint_attention_dim=4096,
        pooled_projection_dim=768,
        guidance_embeds=True,
        axes_dims_rope=_rope_axes(sizes),
    )


def _flux_inputs(sizes: Sizes, device: torch.device) -> dict[str, Tensor]:
    rows, columns = sizes.image_sides
    random = torch.Generator().manual_seed(1)
    positions = torch.zeros(rows * columns, 3)
    positions[:, 1] = torch.arange(rows * columns) // columns
    positions[:, 2] = torch.arange(rows * columns) % columns
    inputs = {
        "hidden_states": torch.randn(sizes.batch, rows * columns, 64, generator=random),
        "encoder_hidden_states": torch.randn(sizes.batch, sizes.text_tokens, 4096, generator=random),
        "pooled_projections": torch.randn(sizes.batch, 768, generator=random),
        "timestep": torch.full((sizes.batch,), 0.5),
        "guidance": torch.ones(sizes.batch),
        "img_ids": positions,
        "txt_ids": torch.zeros(sizes.text_tokens, 3),
    }
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def _swap_flux(transformer: Any) -> Any:
    from library.models.flux.model import optimise_forward

    return optimise_forward(transformer)


def _rope_axes(sizes: Sizes) -> tuple[int, int, int]:
    """Return the shares of a head for an index, rows and columns: 16, 56, 56 of 128 in both families."""
    first = sizes.head_dim // 8
    return first, (sizes.head_dim - first) // 2, (sizes.head_dim - first) // 2


def _qwen(sizes: Sizes) -> nn.Module:
    from diffusers import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(
        num_layers=sizes.blocks[0],
        attention_head_dim=sizes.head_dim,
        num_attention_heads=sizes.width // sizes.head_dim,
        joint_attention_dim=3584,
        axes_dims_rope=_rope_axes(sizes),
    )


def _qwen_inputs(sizes: Sizes, device: torch.device) -> dict[str, Any]:
    rows, columns = sizes.image_sides
    random = torch.Generator().manual_seed(1)
    return {
        "hidden_states": torch.randn(sizes.batch, rows * columns, 64, generator=random).to(device),
        "encoder_hidden_states": torch.randn(sizes.batch, sizes.text_tokens, 3584, generator=random).to(device),
        "timestep": torch.full((sizes.batch,), 0.5, device=device),
        "img_shapes": [[(1, rows, columns)]] * sizes.batch,
    }


def _swap_qwen(transformer: Any) -> Any:
    from library.models.qwen_image.model import optimise_forward

    return optimise_forward(transformer)


def _forward_flops(sizes: Sizes) -> tuple[float, float]:
    """2 x weights x tokens of the blocks' layers, and 4 x tokens^2 x width of attention.

    Weights that a token meets in a block: 4 W^2 in attention and 8 W^2 in the MLP, in every kind of block.
    """
    tokens = sizes.image_sides[0] * sizes.image_sides[1] + sizes.text_tokens
    blocks = sizes.batch * sum(sizes.blocks)
    return 2.0 * 12 * sizes.width**2 * tokens * blocks, 4.0 * tokens**2 * sizes.width * blocks


FAMILIES: dict[str, BenchFamily] = {
    "flux": BenchFamily(
        build=_flux,
        inputs=_flux_inputs,
        optimise_forward=_swap_flux,
        blocks=lambda transformer: [*transformer.transformer_blocks, *transformer.single_transformer_blocks],
        full=Sizes(),
        few_blocks=(1, 2),
        forward_flops=_forward_flops,
    ),
    "qwen_image": BenchFamily(
        build=_qwen,
        inputs=_qwen_inputs,
        optimise_forward=_swap_qwen,
        blocks=lambda transformer: [*transformer.transformer_blocks],
        full=Sizes(blocks=(60,)),
        few_blocks=(2,),
        forward_flops=_forward_flops,
    ),
}


class LoraStep:
    """A model with trained LoRA parameters that can take training steps."""

    def __init__(
        self,
        model: nn.Module,
        trained: list[nn.Parameter],
        forward: Callable[[nn.Module, dict[str, Any]], Tensor],
        inputs: dict[str, Any],
        autocast: bool,
    ) -> None:
        self.model, self.trained, self.forward, self.inputs = model.train(), trained, forward, inputs
        self.base_bytes = base_bytes(model)
        self.autocast = autocast
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
        self.target = target_of(inputs)

    def loss(self) -> Tensor:
        """Run one step and return its loss, still on the device."""
        with torch.autocast(self.target.device.type, torch.bfloat16, enabled=self.autocast):
            output = self.forward(self.model, self.inputs)
        loss = (output.float() - self.target).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def step(self) -> float:
        """Take one step; return its loss."""
        return self.loss().item()


def call_transformer(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """Return the output of a diffusers transformer."""
    return model(**inputs, return_dict=False)[0]


def target_of(inputs: dict[str, Tensor]) -> Tensor:
    """Return a velocity [B, tokens, channels] to learn."""
    tokens = inputs["hidden_states"]
    return torch.randn(tokens.shape, generator=torch.Generator().manual_seed(2)).to(tokens.device)
