"""The reference, the deployment and everything between them.

The reference is the high-precision model with the LoRA beside it, as it was trained. A deployment differs in some of
these ways, each of which can be switched on alone:

- *weights*: the fp8 file's, or those a recipe makes;
- *merging*: the LoRA is rounded into the weights instead of running beside them;
- *strength* of the LoRA;
- *activations* rounded to fp8 on their way into a product;
- *text encoder* and *VAE* in fp8;
- *timestep* and *position tables* in low precision;
- *pasting* of the known region, in every step or at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor, nn

from library.config.schema import ModelConfig
from library.errors import UserError
from library.fidelity.calibration import CalibrationOptions, CalibrationPlan
from library.models.family import Family, model_family, with_transformer
from library.models.vae import ImageEncoder
from library.nn.rope import MultiAxisRope
from library.precision.fake_quantize import (
    ActivationRounding,
    fake_quantize_inputs,
    rounded_positions,
)
from library.precision.fp8_linear import Fp8Linear
from library.precision.names import GRANULARITIES
from library.precision.quantize import E4M3FN, Quantized, format_named, quantize, round_to_nearest
from library.precision.recipe import Fp8Loader, Fp8Recipe
from library.randomness import derive_seed
from library.training.tasks.lora_plan import describe_base
from networks.files.weights import LoraWeights
from networks.injection import attach_lora

Merge = Literal["nearest", "stochastic"]
Paste = Literal["steps", "end"]


@dataclass(frozen=True)
class Variant:
    """One way of running the model; the default is the reference.

    Attributes:
        weights: the deployed weights run instead of the reference's.
        merge: how the LoRA is rounded into the weights; None leaves it beside them.
        strength: of the LoRA.
        activations: how inputs of fp8 layers are rounded; None leaves them.
        text, vae: the text encoder, the image decoder in fp8.
        timestep, positions: dtype that timesteps and position tables are carried in.
        paste: the known region is put back after every step, or into the finished image; None leaves it.
    """

    weights: bool = False
    merge: Merge | None = None
    strength: float = 1.0
    activations: ActivationRounding | None = None
    text: bool = False
    vae: bool = False
    timestep: torch.dtype = torch.float32
    positions: torch.dtype = torch.float32
    paste: Paste | None = None

    def changes(self) -> dict[str, Any]:
        """Return the fields that are not the reference's, with their values."""
        return {name: value for name, value in vars(self).items() if value != getattr(REFERENCE, name)}

    def only(self, cause: str) -> Variant:
        """Return the reference with one field of this variant; rounding a LoRA in needs weights to round it into."""
        values = {cause: getattr(self, cause)} | ({"weights": self.weights} if cause == "merge" else {})
        return replace(REFERENCE, **values)

    def without(self, cause: str) -> Variant:
        """Return this variant with one field as in the reference; without its weights nothing is rounded in."""
        fields = (cause, "merge", "activations") if cause == "weights" else (cause,)
        return replace(self, **{name: getattr(REFERENCE, name) for name in fields})


REFERENCE = Variant()


@dataclass(frozen=True)
class DeployedWeights:
    """An fp8 file, or a recipe by which one would be made; ``merged``: the LoRA is in the file already."""

    name: str
    path: Path | None
    recipe: Fp8Recipe | None
    merged: bool = False

    def describe(self) -> str:
        """Return a name for people."""
        inside = ", LoRA merged in" if self.merged else ""
        return f"{self.path.name if self.path else self.recipe.describe() if self.recipe else ''}{inside}"


def parse_deployment(text: str, merged: bool = False) -> DeployedWeights:
    """Return what ``--deploy`` names: a path, or a recipe, which is one of ``GRANULARITIES``.

    ``:e5m2`` after a recipe names the format; ``+all`` at the end rounds embedders and the final layer too, as most
    published plain casts do.

    Raises:
        UserError: there is no such file and no such recipe.
    """
    path = Path(text).expanduser()
    if path.exists():
        return DeployedWeights(path.name, path, None, merged)
    plain = text.removesuffix("+all")
    name, _, fp8 = plain.partition(":")
    granularity = next((each for each in GRANULARITIES if each == name), None)
    if granularity is None:
        known = ", ".join(GRANULARITIES)
        raise UserError(f"--deploy {text}: no such file or folder, and none of {known}; check the path")
    if merged:
        raise UserError(f"--deploy_merged: {text} is a recipe for the base; name the merged file, or use --deploy_lora")
    keep = Fp8Recipe().exclude if plain == text else ()
    return DeployedWeights(text, None, Fp8Recipe(granularity, format_named(fp8) if fp8 else E4M3FN, keep), merged)


@dataclass(eq=False)
class Models:
    """Loads the transformer and the encoders of any variant.

    Attributes:
        config: of the reference.
        deployed: the weights that are compared with it.
        loras: component -> module -> weights, of all LoRAs together.
        base_precision: what was loaded as deployed weights, in words; empty before.
        family, deployed_family: of the reference, of the deployed file; one where a recipe makes the weights.

    Raises:
        UserError: a path is missing, leads to another kind of model, or is deployed and not in fp8.
    """

    config: ModelConfig
    deployed: DeployedWeights
    loras: Mapping[str, Mapping[str, LoraWeights]]
    dtype: torch.dtype
    device: torch.device
    base_precision: str = field(default="", init=False)
    _fp8_layers: list[str] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        """Find and check all files; nothing is loaded."""
        self.family: Family = model_family(self.config)
        self.deployed_config, self.deployed_family = self.config, self.family
        self.targets = self.family.targets
        if path := self.deployed.path:
            self.deployed_config = with_transformer(self.config, path)
            self.deployed_family = model_family(self.deployed_config)
            if self.deployed_family.fp8_layout() is None:
                raise UserError(f"--deploy {path}: holds no fp8 weights; give the fp8 file that is served")

    def plan(self, options: CalibrationOptions) -> CalibrationPlan:
        """Return how the reference is run on ``options``."""
        return CalibrationPlan(self.config, options, self.dtype, self.device)

    @property
    def transformer_lora(self) -> Mapping[str, LoraWeights]:
        """The transformer's part of the LoRAs."""
        return self.loras.get(self.targets.file_prefix, {})

    @contextmanager
    def transformer(self, variant: Variant) -> Iterator[nn.Module]:
        """Yield the transformer of ``variant`` with its LoRA, in eval mode; it is let go of afterwards."""
        if variant.activations is not None and not self._fp8_layers:
            self.base(deployed=True)  # which layers a server multiplies in fp8
        model = self.base(variant.weights)
        own = self.transformer_lora if not (variant.weights and self.deployed.merged) else {}
        if own and variant.merge is not None:
            self._merge(model, own, variant)
        if variant.activations is not None:
            scales = self.input_scales() if variant.activations == "static" else {}
            fake_quantize_inputs(model, {name: scales.get(name) for name in self._fp8_layers}, variant.activations)
        if own and variant.merge is None:
            attach_lora(model, own, self.targets, "the LoRAs").set_multiplier(variant.strength)
        with rounded_positions(model, MultiAxisRope, variant.positions):
            yield model.eval()

    def base(self, deployed: bool) -> nn.Module:
        """Load the reference's or the deployed transformer without a LoRA."""
        if not deployed:
            return self.family.load_transformer(self.dtype, self.device)
        fp8 = Fp8Loader(self.deployed.recipe, "dequant")
        model = self.deployed_family.load_transformer(self.dtype, self.device, fp8=fp8)
        self.base_precision = describe_base(self.deployed_family.fp8_layout(), fp8, self.dtype)
        self._fp8_layers = [name for name, m in model.named_modules() if isinstance(m, Fp8Linear)]
        return model

    def image_encoder(self, variant: Variant) -> ImageEncoder:
        """Return the VAE, its matrices and filters rounded to e4m3fn if the variant's is in fp8."""
        encoder = self.family.load_image_encoder(self.dtype, self.device)
        if variant.vae:
            with torch.no_grad():
                for parameter in encoder.vae.parameters():
                    if parameter.ndim > 1:
                        parameter.copy_(round_to_nearest(parameter, E4M3FN).to(parameter.dtype))
        return encoder

    def _merge(self, model: nn.Module, loras: Mapping[str, LoraWeights], variant: Variant) -> None:
        """Round the LoRA into ``model``'s weights.

        A deployed file takes it as ComfyUI does: added to the numbers that its values stand for, and rounded into the
        same kind of fp8, with a fresh scale where there is one. Where a recipe makes the weights, it is added to the
        reference's, and the sum is rounded once.
        """
        high = self.family.load_transformer(self.dtype, self.device) if self.deployed.path is None else model
        for name, update in loras.items():
            layer: Any = model.get_submodule(name)
            source: Any = high.get_submodule(name)
            weight = numbers(source) + variant.strength * update.delta().to(numbers(source).device)
            if not isinstance(layer, Fp8Linear):
                layer.weight.data.copy_(weight)
                continue
            made = round_like(layer.quantized(), weight, variant.merge or "nearest", derive_seed("merge", name))
            layer.weight.data.copy_(made.values)
            if made.scale is not None and layer.scale is not None:
                layer.scale.copy_(made.scale)

    def merged_weights(self, variant: Variant) -> nn.Module:
        """Return the deployed transformer with the LoRA rounded into it as ``variant`` says, and none beside it."""
        model = self.base(deployed=True)
        self._merge(model, self.transformer_lora, variant)
        return model.eval()

    def input_scales(self) -> dict[str, Tensor]:
        """Return module -> calibrated scale of its input, of the deployed file."""
        scales: dict[str, Tensor] = {}
        path = self.deployed.path
        if path and path.is_file():
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (not a dict)
                    layer, _, leaf = key.removeprefix("model.diffusion_model.").rpartition(".")
                    place = self.targets.keys.find(layer) if leaf in ("input_scale", "scale_input") else None
                    if place is not None:
                        scales |= dict.fromkeys(place.modules, file.get_tensor(key).float())
        if not scales:
            raise UserError(f"--activations static: {self.deployed.describe()} has no input scales; use row or unit")
        return scales


def round_like(kind: Quantized, weight: Tensor, how: Merge, seed: int) -> Quantized:
    """Return ``weight`` [out, in] in the fp8 format and granularity of ``kind``, with fresh scales."""
    random = torch.Generator(weight.device).manual_seed(seed) if how == "stochastic" else None
    return quantize(weight, kind.granularity, kind.fp8, stochastic=how == "stochastic", generator=random)


def base_layer(model: nn.Module, name: str) -> nn.Module:
    """Return the linear layer ``name`` of ``model`` under its LoRA, if it has one."""
    layer: Any = model.get_submodule(name)
    return getattr(layer, "base", layer)


def numbers(layer: Any) -> Tensor:
    """Return a linear layer's weight as the numbers it stands for, fp32 [out, in]."""
    return layer.dequantized(torch.float32) if isinstance(layer, Fp8Linear) else layer.weight.detach().float()
