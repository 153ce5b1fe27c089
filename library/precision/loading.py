"""Between a checkpoint and the model it fills: which weights stay fp8, which become fp8, which are cast.

The loader reads one tensor after the other; :class:`Fp8Loader` is asked about each. A linear weight that
the file has in fp8 is put into its place as an :class:`Fp8Linear`, codes unchanged. One that the file has in
bf16 becomes fp8 if a recipe says so. Everything else goes on in high precision: an fp8 bias or norm is cast
up, which is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from library.errors import UserError
from library.precision.checkpoint_layouts import Fp8Layout, RowRange
from library.precision.formats import format_of, holds_nan_or_inf
from library.precision.fp8_linear import Fp8Compute, Fp8Linear
from library.precision.quantize import Quantized, dequantize
from library.precision.recipe import Fp8Recipe, install
from library.precision.serving import ActivationRounding, serve_in_fp8


@dataclass
class Fp8Loader:
    """How one model's weights are placed, and a count of what was done.

    Attributes:
        recipe: how bf16 weights become fp8, or None to leave them.
        compute, fp8_input_gradient: see ``Fp8Linear``.
        activations: how the inputs of fp8 layers are rounded, see ``library.precision.serving``; None: not at all.
    """

    recipe: Fp8Recipe | None = None
    compute: Fp8Compute = "auto"
    fp8_input_gradient: bool = False
    activations: ActivationRounding | None = None
    read: int = field(default=0, init=False)
    quantized: int = field(default=0, init=False)
    kept: int = field(default=0, init=False)

    def check(self, module: nn.Module) -> None:
        """Raise a UserError if the recipe has a pattern that no linear layer of ``module`` matches."""
        if self.recipe is not None:
            self.recipe.check_patterns(name for name, m in module.named_modules() if type(m) is nn.Linear)

    def place(
        self,
        module: nn.Module,
        name: str,
        tensor: Tensor,
        pieces: Sequence[RowRange],
        layout: Fp8Layout | None,
        device: torch.device | str,
    ) -> Tensor | None:
        """Put the parameter ``name`` into ``module`` as fp8; or return it for the loader to cast and place.

        Args:
            module: on the meta device or filled; the linear layer's bias stays as it is.
            name: of the parameter in ``module``.
            tensor: what the file holds in ``pieces``, one below the other.
            pieces: where it comes from.
            layout: what the file holds in fp8, from ``detect_layout``.
            device: where an fp8 weight goes.

        Returns:
            None if the parameter is in its place, else the tensor, which is no longer fp8.

        Raises:
            UserError: codes are NaN, a scale does not fit, or the weight does not suit ``compute``.
        """
        layer, _, leaf = name.rpartition(".")
        linear = leaf == "weight" and type(module.get_submodule(layer)) is nn.Linear
        quantized = _from_file(name, tensor, pieces, layout)
        if quantized is not None:
            if not linear:
                return _upcast(quantized)
            self.read += 1
        elif linear and self.recipe is not None and tensor.is_floating_point():
            if self.recipe.kept_as(layer) is not None:
                self.kept += 1
                return tensor
            quantized = self.recipe.quantize(layer, tensor)
            self.quantized += 1
        else:
            return tensor
        scale = None if quantized.scale is None else quantized.scale.to(device)
        on_device = Quantized(quantized.codes.to(device), scale)
        bias = module.get_submodule(layer).bias
        install(module, layer, on_device, None, compute=self.compute, fp8_input_gradient=self.fp8_input_gradient)
        module.get_submodule(layer).bias = bias  # the loader fills it next
        return None

    def serve(self, module: nn.Module) -> None:
        """Let the fp8 layers of a loaded ``module`` round their inputs, if they are to; before a LoRA is put in."""
        if self.activations is not None:
            layers = [name for name, layer in module.named_modules() if isinstance(layer, Fp8Linear)]
            serve_in_fp8(module, dict.fromkeys(layers), self.activations)

    def describe(self) -> str:
        """Return what was done, in a line; empty if nothing was."""
        parts = []
        if self.read:
            parts.append(f"{self.read} linear weights read as fp8")
        if self.quantized and self.recipe is not None:
            parts.append(f"{self.quantized} quantised ({self.recipe.describe()})")
        if self.kept:
            parts.append(f"{self.kept} kept high")
        if self.activations is not None:
            parts.append(f"activations rounded to fp8 ({self.activations})")
        return ", ".join(parts)


def _upcast(quantized: Quantized) -> Tensor:
    """Return fp32 numbers of codes of any shape; exact without a scale."""
    codes, scale = quantized.codes, quantized.scale
    assert format_of(codes.dtype) is not None
    flat = codes.reshape(codes.shape[0] if codes.ndim else 1, -1)
    return dequantize(flat, scale, torch.float32).reshape(codes.shape)


def _from_file(name: str, tensor: Tensor, pieces: Sequence[RowRange], layout: Fp8Layout | None) -> Quantized | None:
    """Return codes and scale of ``pieces`` if the file has them in fp8."""
    if layout is None or not layout.holds_codes(pieces):
        return None
    codes = tensor.view(layout.dtypes[pieces[0].source])  # a uint8 container becomes what it holds
    if holds_nan_or_inf(codes):
        raise UserError(f"{layout.path}: {pieces[0].source!r} holds NaN or infinity ({name}); download it again")
    return Quantized(codes, layout.scale_of(pieces))
