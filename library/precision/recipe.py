"""Which weights of a model are quantised and how: of a loaded one (:func:`quantize_model`), or while it is loaded.

Which linear layers stay in high precision is chosen by kind or by pattern. Norms and biases always stay: they are no
matrices. Embedding tables stay too. The kinds, in diffusers' and in BFL's names:

    embedders     what enters the transformer: image, text, time, guidance, pooled text
    modulation    shift, scale and gate of each block
    final         the last modulation and the projection to latents

``embedders`` and ``final`` are excluded by default: they are under 1 % of FLUX's weights and, in a toy model with every
linear in fp8, x_embedder alone caused nearly all of the output error (2.13 of 2.16 %). ``modulation`` is a quarter of
FLUX.1's weights (3.2 of 12 billion), so it is left to the user.

A model that would not fit in bf16 is quantised while it is loaded: the loader (``library.models.weights``) reads one
tensor after the other and gives each to :class:`WeightLoader`. A linear weight that the file has quantised becomes a
:class:`QuantizedLinear`, bit for bit; one that it has in bf16 is quantised if a recipe says so. Everything else goes on
in high precision: an fp8 bias or norm is cast up, which is exact.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

import torch
from torch import Tensor, nn

from library.config.schema import PrecisionConfig
from library.errors import UserError, did_you_mean, error_prefix
from library.precision.activations import round_inputs, roundings
from library.precision.checkpoint import QuantizedFile, ServedInput
from library.precision.files.base import QuantizedWeight, ReadOnlyScheme, Scheme
from library.precision.files.file_tensors import MODEL_PREFIXES
from library.precision.files.fp8 import Fp8Scheme, Fp8Weight, loaded_scheme
from library.precision.files.int8 import Int8Scheme
from library.precision.files.nvfp4 import Nvfp4Scheme
from library.precision.fp8_numbers import E4M3FN, FP8_DTYPES, Fp8Format, format_named
from library.precision.linear import Compute, QuantizedLinear, QuantizedLinearOfHiddenDtype
from library.precision.names import GRANULARITIES, READ_ONLY, SCHEME_NAMES, ActivationRounding
from library.randomness import derive_seed


def _at_the_root(names: str) -> str:
    """Return the expression of modules of the whole model of these ``names``, and of all that is in them."""
    return rf"({'|'.join(map(re.escape, MODEL_PREFIXES))})({'|'.join(names.split())})(\..*)?"


KINDS = {
    "embedders": _at_the_root(
        "x_embedders? all_x_embedder context_embedder cap_embedder t_embedder (target_)?timestep_embedder "
        "time_(text_|guidance_)?embed time_mod_proj img_in txt_in emb_in (ref_)?time_in vector_in guidance_in "
        "text_fusion first tmlp tproj txtmlp txtfusion text_proj time_embedding adaLN_modulation"
    ),
    "modulation": r".*(\bnorm(1|1_context)?\.linear|\b(img|txt)_mod\.(1|lin)|\bmodulation\.(lin|1)"
    r"|\badaLN_modulation\.0|_stream_modulations?(_img|_txt|\.\w+)?\.lin(ear)?)",
    "final": _at_the_root(r"proj_out norm_out\.linear (all_)?final_layer last\.linear final_norm\.linear final_linear"),
}
# Matrices that are looked up rather than multiplied with, or tied to such: never fp8. LoRA: 67 % would become zero.
_NEVER = re.compile(
    r"(.*\.)?(shared|embed_tokens|relative_attention_bias|token_embedding|position_embedding|wte|wpe|lm_head|lora_A|lora_B)"
)


_OTHER_SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme for scheme in (Int8Scheme(rows=False), Int8Scheme(), Int8Scheme(group=256), Nvfp4Scheme())
}


def scheme_named(name: str, number_format: Fp8Format = E4M3FN) -> Scheme:
    """Return the scheme called ``name``; ``number_format`` is that of fp8 ones.

    Raises:
        UserError: there is none of that name.
    """
    if name in GRANULARITIES:
        return Fp8Scheme(name, number_format)
    if name in _OTHER_SCHEMES:
        return _OTHER_SCHEMES[name]
    known = ", ".join(SCHEME_NAMES)
    if name.lower().startswith((*READ_ONLY, "q4_", "q5_", "q6_", "q8_")):
        raise UserError(f"scheme {name!r}: files in it are read and trained on, not written; use {known}")
    raise UserError(f"scheme {name!r} is none of {known}{did_you_mean(name, SCHEME_NAMES)}")


@dataclass(frozen=True)
class Recipe:
    """How weights are quantised.

    Attributes:
        scheme: the format, and what shares a scale; a layer that it does not fit gets a coarser one or stays high.
        exclude: kinds that stay in high precision, of ``KINDS``.
        exclude_patterns: regular expressions; a layer stays high if one is found in its name.
        stochastic: round stochastically, by ``seed`` and layer name.
    """

    scheme: Scheme = field(default_factory=Fp8Scheme)
    exclude: tuple[str, ...] = ("embedders", "final")
    exclude_patterns: tuple[str, ...] = ()
    stochastic: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Check names and patterns."""
        for kind in self.exclude:
            if kind not in KINDS:
                raise UserError(f"excluded kind {kind!r} is none of {', '.join(KINDS)}{did_you_mean(kind, KINDS)}")
        for pattern in self.exclude_patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise UserError(
                    f"excluded pattern {pattern!r} is no regular expression ({error}); correct it"
                ) from None

    def excluded_as(self, name: str) -> str | None:
        """Return why the layer ``name`` stays in high precision (its kind, pattern or ``table``), or None."""
        if _NEVER.fullmatch(name):
            return "table"
        for kind in self.exclude:
            if re.fullmatch(KINDS[kind], name):
                return kind
        return next((repr(pattern) for pattern in self.exclude_patterns if re.search(pattern, name)), None)

    def check_patterns(self, names: Iterable[str]) -> None:
        """Raise a UserError for the first pattern that is found in none of ``names``: a typing mistake."""
        names = list(names)
        for pattern in self.exclude_patterns:
            if not any(re.search(pattern, name) for name in names):
                raise UserError(f"excluded pattern {pattern!r} matches no linear layer; correct or remove it")

    def scheme_of(self, name: str, shape: Sequence[int]) -> Scheme | None:
        """Return how the layer ``name`` with a weight of ``shape`` is quantised; None if it stays high."""
        return self.scheme.fitting(shape) if self.excluded_as(name) is None else None

    def quantize(
        self, name: str, weight: Tensor, scheme: Scheme | None = None, before: Tensor | None = None
    ) -> QuantizedWeight:
        """Return the weight of layer ``name`` quantised.

        Args:
            scheme: of the layer, where it is known. before: see :meth:`Scheme.quantize`.
        """
        if not torch.isfinite(weight).all():
            raise UserError(f"{name}.weight holds NaN or infinity; the checkpoint is damaged, download it again")
        generator = None
        if self.stochastic:
            generator = torch.Generator(weight.device).manual_seed(derive_seed(self.seed, "fp8", name))
        scheme = scheme or self.scheme.fitting(weight.shape)
        assert scheme is not None, f"{name} does not fit {self.scheme.describe()}"
        return scheme.quantize(weight, stochastic=self.stochastic, generator=generator, before=before)

    def describe(self) -> str:
        """Return the recipe in words."""
        excluded = ", ".join((*self.exclude, *map(repr, self.exclude_patterns))) or "nothing"
        rounding = "stochastically" if self.stochastic else "to nearest"
        return f"{self.scheme.describe()}, rounded {rounding}; excluded: {excluded}"


@dataclass
class WeightLoader:
    """How one model's weights are placed, and a count of what was done.

    Attributes:
        recipe: how bf16 weights are quantised, or None to leave them.
        compute: see ``QuantizedLinear``.
        activations: how the inputs of quantised layers are rounded, see ``activations``; "auto": as the file's server
            does; None: not at all.
        served: layer -> what the file says of its inputs; filled while it is loaded.
        changes: parameter -> what makes of its value, in fp32, the one to load; what the file has quantised is
            so again as it was, with fresh scales.
    """

    recipe: Recipe | None = None
    compute: Compute = "auto"
    activations: ActivationRounding | Literal["auto"] | None = None
    changes: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    served: Mapping[str, ServedInput] = field(default_factory=dict, init=False)
    rounded: Mapping[str, int] = field(default_factory=dict, init=False)
    read: int = field(default=0, init=False)
    quantized: int = field(default=0, init=False)
    excluded: int = field(default=0, init=False)

    def check(self, module: nn.Module) -> None:
        """Raise a UserError if the recipe has a pattern that no linear layer matches, or a change has no parameter."""
        if self.recipe is not None:
            self.recipe.check_patterns(name for name, m in module.named_modules() if type(m) is nn.Linear)
        if absent := sorted(self.changes.keys() - dict(module.named_parameters()).keys()):
            raise UserError(f"base_weights: the model has no {absent[0].removesuffix('.weight')}; wrong model?")

    def load(
        self, module: nn.Module, name: str, value: Tensor | QuantizedWeight, device: torch.device | str
    ) -> Tensor | None:
        """Put the parameter ``name`` into ``module`` quantised; or return it for the caller to cast and assign.

        Args:
            module: on the meta device or filled; the linear layer's bias stays as it is.
            name: of the parameter in ``module``.
            value: what the file holds: a tensor in high precision, or a quantised weight.
            device: where a quantised weight goes.

        Returns:
            None if the parameter is in its place, else the tensor, which is in high precision.
        """
        layer, _, leaf = name.rpartition(".")
        linear = leaf == "weight" and type(module.get_submodule(layer)) is nn.Linear
        if name in self.changes:
            value = _changed(value, self.changes[name])
        if isinstance(value, QuantizedWeight):
            if not linear:
                return value.dequantize(torch.float32)
            quantized = value
            self.read += 1
        elif linear and self.recipe is not None and value.is_floating_point():
            if (scheme := self.recipe.scheme_of(layer, value.shape)) is None:
                self.excluded += 1
                return value
            quantized = self.recipe.quantize(layer, value, scheme)
            self.quantized += 1
        else:
            return value
        self._install(module, layer, quantized.to(device))
        return None

    def _install(self, model: nn.Module, name: str, quantized: QuantizedWeight) -> None:
        """Put an :class:`QuantizedLinear` in the place of the linear layer ``name``; a bias on meta is filled later."""
        parent_name, _, leaf = name.rpartition(".")
        parent, bias = model.get_submodule(parent_name), cast(nn.Linear, model.get_submodule(name)).bias
        # transformers' T5Dense*Dense read the dtype of wo's weight and cast the activations to it
        hidden = leaf == "wo" and "T5Dense" in type(parent).__name__
        kind = QuantizedLinearOfHiddenDtype if hidden else QuantizedLinear
        with error_prefix(name):
            layer = kind(quantized, bias, compute=self.compute)
        setattr(parent, leaf, layer.train(parent.training))

    def round_inputs(self, module: nn.Module) -> None:
        """Let the quantised layers of a loaded ``module`` round their inputs, if asked; before a LoRA is put in.

        Raises:
            UserError: calibrated scales are asked for, and the file has none.
        """
        layers = [name for name, layer in module.named_modules() if isinstance(layer, QuantizedLinear)]
        if self.activations is None or not layers:
            return
        found = roundings(layers, self.served, self.activations)
        if self.activations == "static" and not found:
            raise UserError("quantised_activations = static: the file has no input scales; use auto, row or unit")
        self.rounded = Counter(rounding.how for rounding in found.values())
        round_inputs(module, found)

    def describe(self) -> str:
        """Return what was done, in a line; empty if nothing was."""
        parts = []
        if self.read:
            parts.append(f"{self.read} linear weights read as they are stored")
        if self.quantized and self.recipe is not None:
            parts.append(f"{self.quantized} quantised ({self.recipe.describe()})")
        if self.excluded:
            parts.append(f"{self.excluded} excluded")
        if self.activations is not None:
            words = ", ".join(f"{how} in {count}" for how, count in self.rounded.items())
            parts.append(f"inputs of layers rounded as the server does ({words or 'in none'})")
        return ", ".join(parts)


def quantize_model(model: nn.Module, recipe: Recipe, *, compute: Compute = "auto") -> WeightLoader:
    """Replace the linear layers of ``model`` by :class:`QuantizedLinear` in place; return what counted them.

    Works on diffusers' transformers and on transformers' text encoders (T5, CLIP, Qwen2.5-VL) alike. Each weight
    is quantised and let go before the next, so the peak is the model and one layer. Weights that are fp8 already (a
    plain-cast file read as it is) are taken over bit for bit; tied ones stay as they are. Call it before LoRA is put
    in.

    Args:
        model: with weights, on any device.
        recipe: format, scales, what is excluded.
        compute: see :class:`QuantizedLinear`.
    """
    loader = WeightLoader(recipe, compute)
    loader.check(model)
    owners = Counter(id(p) for module in model.modules() for p in module._parameters.values())
    for name in [name for name, module in model.named_modules() if type(module) is nn.Linear]:
        weight = cast(nn.Linear, model.get_submodule(name)).weight.detach()
        if owners[id(model.get_submodule(name).weight)] > 1:
            loader.excluded += 1
        else:
            stored = Fp8Weight(weight) if weight.dtype in FP8_DTYPES else weight
            loader.load(model, f"{name}.weight", stored, weight.device)
    return loader


def _changed(value: Tensor | QuantizedWeight, change: Callable[[Tensor], Tensor]) -> Tensor | QuantizedWeight:
    if isinstance(value, QuantizedWeight):
        if isinstance(value.scheme, ReadOnlyScheme):  # served with a LoRA added at run time, which rounds nothing
            return change(value.dequantize(torch.float32))
        return value.scheme.quantize(change(value.dequantize(torch.float32)), before=value.steps())
    return change(value.float()).to(value.dtype)


def plan_base(config: PrecisionConfig, layout: QuantizedFile | None, seed: int, device: torch.device) -> WeightLoader:
    """Return how the transformer's weights are placed.

    Args:
        config: what is asked for.
        layout: what the transformer's files hold in fp8, or None.
        seed: of stochastic rounding.
        device: that will compute.

    Raises:
        UserError: the device has no such products, or an option has no effect on this file.
    """
    recipe = None if layout else transformer_recipe(config, seed)
    if config.quantised_compute == "quantised":
        schemes = [stored.scheme for stored in layout.weights.values()] if layout else [recipe.scheme] if recipe else []
        for lacking in filter(None, (scheme.lacking(device) for scheme in schemes)):
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
            raise UserError(f'quantised_compute: {lacking}; use "auto" or "dequant" on {name}')
    activations = None if config.quantised_activations == "none" else config.quantised_activations
    # rounded once, where the server rounds
    compute = "dequant" if activations and config.quantised_compute == "auto" else config.quantised_compute
    if layout is None:
        if not (config.fp8_base or config.fp8_scaled):
            for key in ("quantised_compute", "quantised_activations"):
                if key in config.model_fields_set:
                    raise UserError(f"{key}: has no effect, the model has no fp8 weights; set fp8_base or fp8_scaled")
        if activations in ("auto", "static"):
            raise UserError(
                f"quantised_activations = {activations}: is read from a quantised file, and this base is quantised "
                "as it is loaded; train on the file, or name the server's rounding (row, unit, ...)"
            )
        return WeightLoader(recipe, compute, activations)
    unused = ("fp8_scaled", "fp8_format", "fp8_exclude", "fp8_exclude_patterns", "fp8_rounding")
    for key in unused:
        if key in config.model_fields_set and (key != "fp8_scaled" or config.fp8_scaled):
            raise UserError(f"{key}: {layout.path} is in fp8 already and is trained on as it is; remove {key}")
    return WeightLoader(None, compute, activations)


def transformer_recipe(config: PrecisionConfig, seed: int) -> Recipe | None:
    """Return how a transformer in high precision becomes fp8; None if it does not.

    Raises:
        UserError: a pattern of ``fp8_exclude_patterns`` is no regular expression.
    """
    if not (config.fp8_base or config.fp8_scaled):
        return None
    granularity = config.fp8_granularity if config.fp8_scaled else "cast"
    return Recipe(
        loaded_scheme(granularity, format_named(config.fp8_format)),
        exclude=tuple(config.fp8_exclude),
        exclude_patterns=tuple(config.fp8_exclude_patterns),
        stochastic=config.fp8_rounding == "stochastic",
        seed=seed,
    )


def text_encoder_recipe(config: PrecisionConfig) -> Recipe | None:
    """Return how T5 becomes fp8; None if it does not."""
    return Recipe(loaded_scheme("block64"), exclude=()) if config.fp8_text_encoder else None


def describe_base(layout: QuantizedFile | None, fp8: WeightLoader, dtype: torch.dtype) -> str:
    """Return the precision of a base that ``fp8`` has loaded, in words, for people and for the LoRA's metadata."""
    high = str(dtype).removeprefix("torch.")
    if layout is None and fp8.recipe is None:
        return high
    file = "" if layout is None else f"{layout.layout} file ({layout.formats}), "
    return f"{file}{fp8.describe()}, others {high}"
