"""Tensor parallelism: every process of a group has a part of each large layer, and all compute one batch together.

torch's ``parallelize_module`` walks the plan, which for FLUX and Qwen-Image is diffusers' ``_tp_plan`` and a rule for
the modulation that it leaves full (a quarter of FLUX's weights, a third of Qwen-Image's). What is put at each layer is
ours (:class:`Part`): a LoRA's fused product (``networks.adapters.lora``) asks its frozen base for plain tensors, and is
summed over the group once for all layers with a common input.

A LoRA stays full on every process of the group: of A and B a layer takes the columns or rows that belong to its part.
The gradients of all parts are added up in the same all-reduce that averages over replicas (``average_gradients``). So
any optimizer can train it, clipping sees the norm of all of it, and files and states are those of one process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from library.errors import UserError
from library.nn.tensor_split import Parts, Split, entering, leaving, summed
from library.precision.files.base import QuantizedWeight
from library.precision.linear import QuantizedLinear
from networks.adapters.lora import LoRALinear


@dataclass
class Part(ParallelStyle):
    """Keep this process's part of a linear layer, which may have a LoRA, or of an embedding.

    Attributes:
        name, parts: of the layer, and how it is split.
    """

    name: str
    parts: Parts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        split = Split(*self.parts, device_mesh.get_group())
        base = module.base if isinstance(module, LoRALinear) else module
        assert isinstance(base, (nn.Linear, nn.Embedding)), f"{self.name} is a {type(base).__name__}"
        _cut(base, split, self.name)
        module.split = split  # type: ignore[assignment]
        if isinstance(module, nn.Embedding):
            module.__class__ = SplitEmbedding
        elif isinstance(module, LoRALinear):
            pass  # it asks for the split itself
        elif split.dim == 1 and base.weight.requires_grad:
            module.__class__ = SummedLinear
        else:
            module.register_forward_pre_hook(lambda _, inputs: (entering(inputs[0], split), *inputs[1:]))
            module.register_forward_hook(lambda _, inputs, output: leaving(output, split))
        return module


class SplitEmbedding(nn.Embedding):
    """An embedding of which each process has some tokens' rows."""

    split: Split

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the rows of ``tokens`` [...], [..., width]: this process's, and the others' from them."""
        local = tokens - self.split.group.rank() * self.weight.shape[0]
        is_local = (local >= 0) & (local < self.weight.shape[0])
        rows = F.embedding(local.where(is_local, 0), self.weight)
        return summed(rows * is_local[..., None].to(rows.dtype), self.split.group)


class SummedLinear(nn.Linear):
    """A trained layer that is split by inputs; its bias, full on every process, is added after the sum."""

    split: Split

    def forward(self, x: Tensor) -> Tensor:
        """Map this process's part of the inputs [..., in / size] to the full output [..., out]."""
        y = leaving(F.linear(x, self.weight), self.split)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def split_layers(model: nn.Module, plan: Mapping[str, Parts], mesh: DeviceMesh) -> None:
    """Keep of each layer in ``plan`` the part that is this process's along the one-dimensional ``mesh``, in place.

    Raises:
        UserError: a layer of the plan is not there, or its part cannot be had.
    """
    if missing := sorted(plan.keys() - dict(model.named_modules()).keys()):  # parallelize_module would pass over it
        raise UserError(f"tp: the model has no layer {missing[0]}, which its plan splits; install constraints.txt")
    parallelize_module(model, mesh, {name: Part(name, parts) for name, parts in plan.items()})
    _count_once(model, mesh.size())


def _count_once(model: nn.Module, processes: int) -> None:
    """Divide the gradients of LoRAs on layers that are full on every process: ``average_gradients`` adds all up."""
    for layer in model.modules():
        if isinstance(layer, LoRALinear) and layer.split is None:
            for parameter in layer.trained().values():
                parameter.register_hook(lambda gradient: gradient / processes)


@torch.no_grad()
def _cut(layer: nn.Linear | nn.Embedding, split: Split, name: str) -> None:
    """Keep of a layer's weight, scale and bias what is this process's part."""
    weight = layer._parameters["weight"]
    assert weight is not None
    if isinstance(layer, QuantizedLinear):
        layer.set_quantized(_quantized_part(layer.quantized(), split, name))
        layer.set_compute(layer.compute)  # a part may be too narrow for fp8 products
    elif weight.shape[split.dim] * split.size != sum(split.blocks):  # else a head tied to the embedding, which was cut
        assert weight.shape[split.dim] == sum(split.blocks), f"{name} is {tuple(weight.shape)}, the plan {split.blocks}"
        weight.data = _part(weight, split, split.dim)
    if isinstance(layer, nn.Embedding):
        return
    if not isinstance(layer, QuantizedLinear):
        layer.out_features, layer.in_features = weight.shape
    if layer.bias is not None and split.dim == 0:
        layer.bias.data = _part(layer.bias, split, 0)
    elif layer.bias is not None and split.group.rank() > 0 and not weight.requires_grad:
        layer.register_parameter("bias", None)  # it is added once


def _quantized_part(weight: QuantizedWeight, split: Split, name: str) -> QuantizedWeight:
    """Return a copy of the rows or columns that are this process's.

    Raises:
        UserError: the format cannot be cut there.
    """
    assert weight.shape[split.dim] == sum(split.blocks), f"{name} is {tuple(weight.shape)}, the plan {split.blocks}"
    pieces = [slice(start, start + count) for start, count in split.pieces(split.group.rank())]
    kind = type(weight)
    try:
        if split.dim == 0:
            part = kind.stack([weight.part(rows) for rows in pieces])
        else:
            part = kind.join([weight.part(columns=columns) for columns in pieces])
    except ValueError as error:
        raise UserError(
            f"tensor_parallel: {name} ({weight.scheme.describe()}): {error}; use zero or fewer processes"
        ) from None
    return part.with_tensors({field: tensor.clone() for field, tensor in part.tensors().items()})


def _part(tensor: Tensor, split: Split, dim: int) -> Tensor:
    """Return a copy, so that the full tensor is freed."""
    return split.local(tensor.detach(), dim).clone(memory_format=torch.contiguous_format)
