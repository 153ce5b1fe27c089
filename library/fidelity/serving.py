"""The reference, the deployment and everything between them.

The reference is the high-precision model with the LoRA beside it, as it was trained, its captions encoded with the
LoRA's part in the text encoders. A deployment differs in some of the ways that :class:`Variant` lists, each of which
can be switched on alone.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal
from zlib import crc32

import torch
from torch import Tensor, nn

from library.config.model_layouts import pipeline_index
from library.config.model_types import Blank
from library.config.schema import ModelConfig
from library.data.cache import TextJob
from library.errors import UserError, counted
from library.fidelity.calibration import CalibrationOptions, CalibrationPlan
from library.fidelity.deployed import DeployedWeights, LoadedWeights
from library.fidelity.servers import SUMMED_IN, Merge, Server, usual_server
from library.models.blocks import AttentionProcessor
from library.models.family import Family
from library.models.family_by_name import model_family
from library.models.vae import ImageEncoder
from library.precision.activations import InputRounding, round_heads, round_inputs, roundings
from library.precision.checkpoint import ServedInput, WeightFiles
from library.precision.files.base import QuantizedWeight, ReadOnlyScheme
from library.precision.files.fp8 import loaded_scheme
from library.precision.fp8_numbers import E4M3FN, round_to_nearest
from library.precision.linear import QuantizedLinear
from library.precision.names import ActivationRounding
from library.precision.recipe import Recipe
from library.training.sampling.generate import encode_with_loras
from networks.files.layouts import PRECISIONS
from networks.files.weights import AddedWeights
from networks.network import attach_lora

Paste = Literal["pixels", "latents"]
PartDtype = Literal["fp8", "fp8_block64", "fp16", "bf16"]
LowDtype = Literal["bf16", "fp16", "fp8"]
CONDITIONING = ("mask_invert", "mask_grow", "mask_snap", "mask_blur", "blank", "latents_dtype")


@dataclass(frozen=True)
class Served:
    """Text encoders, or a VAE, as a server has them.

    Attributes:
        options: keys of ``[model]`` and their values, where they are not the reference's: other files.
        dtype: of weights and products; "fp8" is a plain cast of the weights (of text encoders, of the large one),
            "fp8_block64" has a scale for 64 inputs; None: as the reference.
    """

    options: tuple[tuple[str, Any], ...] = ()
    dtype: PartDtype | None = None

    def __str__(self) -> str:
        """Return it in words."""
        parts = [f"{option} {value}" for option, value in self.options]
        return ", ".join([*parts, *([f"in {self.dtype}"] if self.dtype else [])])


@dataclass(frozen=True)
class Variant:
    """One way of running the model; the default is the reference.

    Attributes:
        weights: the deployed weights run instead of the reference's.
        configs: the deployed folder's config of the transformer is used.
        merge: how the LoRA is added to the weights, see ``servers``; None leaves it beside them.
        strength: of the LoRA.
        lora_without: regular expressions; a layer of the LoRA ("transformer.single_transformer_blocks.0.proj_mlp",
            "text_encoder....") in which one is found is left out.
        activations: how inputs of quantised layers are rounded; "auto": as the server of the file does; None leaves
            them.
        attention: "fp8": q, k and v are rounded to e4m3fn before their products, a scale a head.
        tokenizer: their folders. text: text encoders. vae: the VAE, which encodes the conditions and decodes.
        t5_tokens: that FLUX's T5 is given of a caption.
        guidance: given to the guidance input; "ignored" leaves the guidance vector out of the modulation.
        shift: static shift of the sampler's schedule; "deployed": the scheduler of the deployed folder.
        timestep: dtype that timesteps are carried in.
        mask_invert: known and filled are swapped. mask_grow: pixels that the mask is grown by (negative: shrunk).
            mask_snap: pixels a side of the cells that it is grown to; 0: not. mask_blur: standard deviation of a
            Gaussian in pixels. blank: what is under the mask, a name or a level in [-1, 1]. See ``conditioning``.
        normalised: how many times the given picture's latents are.
        latents_dtype: dtype that the latents of the masked image, or of the reference images, are rounded to.
        paste: the known region is put back as pixels into the finished image, or as latents at every step.
    """

    weights: bool = False
    configs: bool = False
    merge: Merge | None = None
    strength: float = 1.0
    lora_without: tuple[str, ...] = ()
    activations: ActivationRounding | Literal["auto"] | None = None
    attention: Literal["fp8"] | None = None
    tokenizer: Served | None = None
    text: Served | None = None
    t5_tokens: int | None = None
    vae: Served | None = None
    guidance: float | Literal["ignored"] | None = None
    shift: float | Literal["deployed"] | None = None
    timestep: torch.dtype = torch.float32
    mask_invert: bool = False
    mask_grow: int = 0
    mask_snap: int = 0
    mask_blur: float = 0.0
    blank: Blank | float | None = None
    normalised: int = 1
    latents_dtype: LowDtype | None = None
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

    @property
    def given(self) -> dict[str, Any]:
        """The changes to what the model is given of images."""
        return {name: value for name, value in self.changes().items() if name in (*CONDITIONING, "normalised")}


REFERENCE = Variant()


@dataclass(eq=False)
class Models:
    """Loads the transformer and the encoders of any variant.

    Attributes:
        config: of the reference.
        deployed: the weights that are compared with it.
        loras: component -> module -> weights, of all LoRAs together.
        server: that runs it; by default what files like the deployed one are usually run by.
        base_precision: what was loaded as deployed weights, in words; empty before.
        trained: field of a variant -> what training had, in words, where that is known.
        family, deployed_family: of the reference, of the deployed file; one where a recipe makes the weights.

    Raises:
        UserError: a path is missing, or leads to another kind of model.
    """

    config: ModelConfig
    deployed: DeployedWeights
    loras: Mapping[str, Mapping[str, AddedWeights]]
    dtype: torch.dtype
    device: torch.device
    server: Server = None  # type: ignore[assignment]  # __post_init__ finds the usual one
    trained: Mapping[str, str] = field(default_factory=dict, init=False)
    base_precision: str = field(default="", init=False)
    _quantised: Mapping[str, QuantizedWeight | None] = field(default_factory=dict, init=False)
    _image_encoders: dict[Served, ImageEncoder] = field(default_factory=dict, init=False)
    _texts: dict[Any, list[dict[str, Tensor]]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """Find and check all files; nothing is loaded."""
        self.family: Family = model_family(self.config)
        self.targets = self.family.targets
        self.deployed_config = self.deployed.config(self.config)
        is_reference = self.deployed_config is self.config
        self.deployed_family: Family = self.family if is_reference else model_family(self.deployed_config)
        if self.server is None:
            self.server = usual_server(self.deployed.layout(self.deployed_family))

    def plan(self, options: CalibrationOptions) -> CalibrationPlan:
        """Return how the reference is run on ``options``."""
        return CalibrationPlan(self.config, options, self.dtype, self.device)

    # The LoRA.

    @property
    def transformer_lora(self) -> Mapping[str, AddedWeights]:
        """The transformer's part of the LoRAs."""
        return self.loras.get(self.targets.file_prefix, {})

    def served_lora(self, variant: Variant) -> dict[str, dict[str, AddedWeights]]:
        """Return component -> what ``variant`` leaves of the LoRAs.

        Raises:
            UserError: a pattern is no regular expression, or drops nothing.
        """
        kept = {component: dict(layers) for component, layers in self.loras.items()}
        names = {(part, name): f"{part}.{name.removeprefix(f'{part}.')}" for part in kept for name in kept[part]}
        for pattern in variant.lora_without:
            try:
                dropped = [place for place, name in names.items() if re.search(pattern, name)]
            except re.error as error:
                raise UserError(f"--deploy_lora_without {pattern}: no regular expression ({error})") from None
            if not dropped:
                raise UserError(f"--deploy_lora_without {pattern}: found in no layer of the LoRA; correct it")
            for component, name in dropped:
                kept[component].pop(name, None)
        return {component: layers for component, layers in kept.items() if layers}

    def served_transformer_lora(self, variant: Variant) -> dict[str, AddedWeights]:
        """Return the transformer's part of :meth:`served_lora`."""
        return self.served_lora(variant).get(self.targets.file_prefix, {})

    # The transformer.

    @contextmanager
    def transformer(self, variant: Variant) -> Iterator[nn.Module]:
        """Yield the transformer of ``variant`` with its LoRA, in eval mode; it is let go of afterwards."""
        model = self.base(variant.weights, variant.configs)
        lora = self.served_transformer_lora(variant)
        lora = {} if variant.weights and self.deployed.merged else lora
        if lora and variant.merge is not None:
            self._merge(model, lora, variant)
        if how := self.roundings(variant):
            round_inputs(model, {name: replace(each, weight=self.layers.get(name)) for name, each in how.items()})
        if lora and variant.merge is None:
            attach_lora(model, lora, self.targets, "the LoRAs").set_multiplier(variant.strength)
        if variant.attention is not None:
            for module in model.modules():
                if isinstance(processor := getattr(module, "processor", None), AttentionProcessor):
                    module.processor = replace(processor, rounding=round_heads)  # type: ignore[assignment]
        yield model.eval()

    def runs_as(self, variant: Variant) -> tuple[Any, ...]:
        """Return what the transformer of ``variant`` follows from: variants with the same run the same network."""
        names = ("weights", "configs", "strength", "lora_without", "activations", "attention")
        merged = variant.merge and (SUMMED_IN[variant.merge], *sorted(self.rounded_in(variant).items()))
        return (merged, *(getattr(variant, name) for name in names))

    def base(self, deployed: bool, configs: bool = False) -> nn.Module:
        """Load the reference's or the deployed transformer without a LoRA; ``configs``: by the deployed config.

        A config that fits only its own weights goes with them.
        """
        usual, other = (self.deployed_family, self.family) if deployed else (self.family, self.deployed_family)
        if self.folder is None:
            return self._load(usual, deployed)
        wanted = (self.deployed_family if configs else self.family).files.transformer_config
        if "guidance_embeds" in other.files.transformer_config:  # its layers may be there all the same
            wanted = wanted | {"guidance_embeds": self.family.guidance_input}
        family = copy.copy(usual)
        family.files = replace(usual.files, transformer_config=wanted)
        try:
            return self._load(family, deployed)
        except UserError:
            return self._load(usual, deployed)

    def _load(self, family: Family, deployed: bool) -> nn.Module:
        if not deployed:
            return family.load_transformer(self.dtype, self.device)
        loaded: LoadedWeights = self.deployed.load(family, self.dtype, self.device)
        self.base_precision, self._quantised = loaded.precision, loaded.quantised
        return loaded.module

    def runner(self, variant: Variant, transformer: Any) -> Family:
        """Return the family that calls ``transformer``, which is that of ``variant``.

        An ignored guidance is left out of the modulation, as by ComfyUI's FluxDisableGuidance.
        """
        family = copy.copy(self.deployed_family if variant.configs else self.family)
        takes_it = family.guidance_input or self.family.guidance_input
        family.guidance_input = takes_it and transformer.config.get("guidance_embeds", True)
        family.guidance_input = family.guidance_input and variant.guidance != "ignored"
        return family

    def sigmas(self, variant: Variant, steps: int, tokens: int) -> list[float]:
        """Return the noise levels of a sampling run of ``variant`` for an image of ``tokens``."""
        if variant.shift == "deployed":
            return self.deployed_family.sampling_sigmas(steps, tokens)
        return self.family.sampling_sigmas(steps, tokens, variant.shift)

    def timestep_scale(self, variant: Variant) -> float:
        """Return what a sampling run's noise levels are multiplied with to be timesteps, for the transformer.

        diffusers' schedulers multiply with ``num_train_timesteps``, and its pipelines divide by 1000.
        """
        families = (self.deployed_family if variant.shift == "deployed" else self.family, self.family)
        served, own = (family.scheduler().config.num_train_timesteps for family in families)
        return served / own

    def _merge(self, model: nn.Module, loras: Mapping[str, AddedWeights], variant: Variant) -> None:
        """Merge the LoRA into ``model``'s weights, as :meth:`rounded_in` says.

        A deployed file takes it as servers do: added to the numbers that its values stand for, and rounded into the
        same format, with a fresh scale where there is one, or into the 16 bits that they were. Where a recipe
        makes the weights, ``nearest`` adds it to the reference's, and rounds the sum once.
        """
        assert variant.merge is not None
        once = variant.merge == "nearest" and self.deployed.path is None
        high = self.family.load_transformer(self.dtype, self.device) if once else model
        dtype, rounded_in = SUMMED_IN[variant.merge], self.rounded_in(variant)
        for name in loras:
            layer: Any = model.get_submodule(name)
            base = numbers(high.get_submodule(name))
            delta = variant.strength * loras[name].delta().to(base.device)
            weight = (base.to(dtype) + delta.to(dtype)).float()
            how = rounded_in.get(name, "unrounded")
            if not isinstance(layer, QuantizedLinear):
                weight = weight.to(self.deployed.stored or weight.dtype)
            if not isinstance(layer, QuantizedLinear) or how == "unrounded":
                plain = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
                plain.weight, plain.bias = nn.Parameter(weight.to(self.dtype), requires_grad=False), layer.bias
                model.set_submodule(name, plain)
                continue
            random = torch.Generator(weight.device).manual_seed(crc32(name.encode()))
            layer.set_quantized(round_like(layer.quantized(), weight, how, random))

    def rounded_in(self, variant: Variant) -> dict[str, Merge]:
        """Return layer -> how the LoRA is rounded into it; layers whose sum is not rounded to a format are left out.

        Where products are made in the weight's own format, the sum has to be in it, whatever the server does with
        others.
        """
        if variant.merge is None:
            return {}
        products = self.roundings(variant)
        lora = self.served_transformer_lora(variant)
        how: dict[str, Merge] = dict.fromkeys(lora, variant.merge)
        if variant.merge == "unrounded":
            how = {name: "stochastic" for name in lora if name in products}
        quantised = self.served_inputs if self.deployed.recipe is None else self.layers
        return {name: each for name, each in how.items() if name in quantised}

    def merged_weights(self, variant: Variant) -> nn.Module:
        """Return the deployed transformer with the LoRA merged into it as ``variant`` says, and none beside it."""
        model = self.base(deployed=True)
        self._merge(model, self.served_transformer_lora(variant), variant)
        return model.eval()

    def merged_updates(self, variant: Variant) -> dict[str, AddedWeights]:
        """Return layer -> what :meth:`merged_weights` adds to it: what is served of the LoRA, at its strength."""
        lora = self.served_transformer_lora(variant)
        return {name: each.scaled(variant.strength) for name, each in lora.items()}

    # Activations.

    def roundings(self, variant: Variant) -> dict[str, InputRounding]:
        """Return layer -> how its inputs are rounded."""
        if variant.activations is None:
            return {}
        layers = self.served_inputs if variant.activations == "auto" else self.layers
        return roundings(layers, self.served_inputs, variant.activations, self.server.heeds)

    @cached_property
    def served_inputs(self) -> dict[str, ServedInput]:
        """Layer -> what the deployed file says of its inputs."""
        layers = self.layers if self.deployed.recipe is not None else {}
        return self.deployed.served_inputs(self.deployed_family, layers)

    @property
    def layers(self) -> Mapping[str, QuantizedWeight | None]:
        """The layers that a server may multiply in low precision, and what they are, see :class:`LoadedWeights`."""
        if not self._quantised:
            self.base(deployed=True)
        return self._quantised

    # Encoders.

    def image_encoder(self, variant: Variant) -> ImageEncoder:
        """Return the VAE, which is loaded once and not to be changed.

        In fp8 its matrices and filters are rounded to e4m3fn, in 16 bits all its products too.
        """
        served = variant.vae or Served()
        if served in self._image_encoders:
            return self._image_encoders[served]
        family = self.part_family(served)
        half = PRECISIONS.get(served.dtype or "")
        encoder = family.load_image_encoder(half or self.dtype, self.device)
        if half is not None:
            encoder.compute_in(half)
        if served.dtype == "fp8":
            with torch.no_grad():
                for parameter in encoder.vae.parameters():
                    if parameter.ndim > 1:
                        parameter.copy_(round_to_nearest(parameter, E4M3FN).to(parameter.dtype))
        self._image_encoders[served] = encoder
        return encoder

    def texts(self, variant: Variant, jobs: Sequence[TextJob], changed: bool = False) -> list[dict[str, Tensor]] | None:
        """Return each job's embeddings without a batch axis, on the CPU; None: those of the cache are right.

        They are encoded once for each state of the encoders. ``changed``: the jobs' images are not the cache's.
        """
        parts = {name: layers for name, layers in self.served_lora(variant).items() if name != self.targets.file_prefix}
        if self.deployed.merged and variant.text is not None and variant.text.options:
            parts = {}  # the deployed encoders have their part of the LoRA inside
        encoders = (variant.text, variant.tokenizer, variant.t5_tokens)
        if not any(encoders) and not parts and not changed:
            return None
        names = tuple(sorted(name for layers in parts.values() for name in layers))
        shown = tuple((job.caption, job.flipped, *(image.key() for image in job.images)) for job in jobs)
        state = (*encoders, variant.strength if parts else 1.0, names, shown)
        if state not in self._texts:
            encoder = self.text_encoder(variant)
            by_number = {str(number): job for number, job in enumerate(jobs)}
            made = encode_with_loras(encoder, by_number, parts, self.targets, "the LoRAs", variant.strength)
            self._texts[state] = list(made.values())
        return self._texts[state]

    def text_encoder(self, variant: Variant) -> Any:
        """Return the text encoders of ``variant``."""
        served = variant.text or Served()
        tokens = Served((("t5xxl_max_token_length", variant.t5_tokens),)) if variant.t5_tokens else None
        family, recipe = self.part_family(served, variant.tokenizer, tokens), None
        if served.dtype in ("fp8", "fp8_block64") and WeightFiles(family.files.text_encoders[-1]).quantized is None:
            recipe = Recipe(loaded_scheme("cast" if served.dtype == "fp8" else "block64"), exclude=())
        encoder = family.load_text_encoder(PRECISIONS.get(served.dtype or "", self.dtype), self.device, recipe=recipe)
        if variant.tokenizer is not None:
            own = self.text_encoder(REFERENCE).tokenizers
            if any(own[name].padding_side != each.padding_side for name, each in encoder.tokenizers.items()):
                encoder.fill_other_end()
        return encoder

    def part_family(self, *served: Served | None) -> Family:
        """Return the reference's family with other parts; with encoders of the deployed folder, its settings too."""
        options = dict(pair for each in served if each is not None for pair in each.options)
        if not options:
            return self.family
        made, folder, layout = model_family(self.config.model_copy(update=options)), self.folder, self.family.layout
        texts = {options[part.option] for part in layout.text_encoders if part.option in options}
        own = folder is not None and bool(texts & {str(place) for place in folder.files.text_encoders})
        family = copy.copy(folder if folder is not None and own else made)
        tokenizers = zip(layout.tokenizers, made.files.tokenizers, strict=True)  # a pipeline's own come before options
        given = tuple(options.get(part.option, place) for part, place in tokenizers)
        family.config, family.files = made.config, replace(made.files, tokenizers=given)
        return family

    # What a folder brings.

    @property
    def folder(self) -> Family | None:
        """The deployed family if a whole pipeline is deployed, else None."""
        path = self.deployed.path
        return self.deployed_family if path is not None and pipeline_index(path) is not None else None

    def check(self, variant: Variant, steps: int, has_masks: bool) -> None:
        """Refuse what cannot be; nothing is loaded.

        Args:
            variant: to be looked at.
            steps: of the reference's sampling run.
            has_masks: the dataset has loss masks.

        Raises:
            UserError: names the flag.
        """
        changes, name = variant.changes(), self.family.name
        if "guidance" in changes and not self.family.guidance_input:
            raise UserError(f"--deploy_guidance: {name} takes no guidance scale; remove it")
        unknown = [each for each in CONDITIONING if each in changes] if self.family.conditioning == "none" else []
        if unknown:
            raise UserError(f"--{unknown[0]}: {name} is given no picture and no mask; remove it")
        if "paste" in changes and self.family.conditioning == "none" and not has_masks:
            raise UserError("--paste: the dataset has no masks, so there is no known region; remove --paste")
        for each, flag in (("paste", "--paste"), ("shift", "--deploy_shift")):
            if changes.get(each, "deployed") != "deployed" and not steps:
                raise UserError(f"{flag}: nothing is sampled; give --steps 4 or more")
        if variant.merge is not None and not self.transformer_lora:
            raise UserError("--deploy_lora: the LoRA has no layers of the transformer; use beside")
        file = self.deployed_family.quantized_file()
        schemes = [stored.scheme for stored in file.weights.values()] if file else []
        unwritten = next((scheme for scheme in schemes if isinstance(scheme, ReadOnlyScheme)), None)
        if unwritten and variant.merge not in (None, "unrounded") and not self.deployed.merged:
            raise UserError(f"--deploy_lora {variant.merge}: {unwritten.name} {unwritten.reason}; use unrounded")
        self.served_lora(variant)
        for part in (variant.text, variant.vae):
            if part is not None:
                self.part_family(part)
        if variant.activations == "static" and not any(each.scale is not None for each in self.served_inputs.values()):
            raise UserError(f"--activations static: {self.deployed.describe()} has no input scales; use row or unit")

    def words(self, cause: str, value: Any) -> str:
        """Return one of a variant's changes in words; ``deployed_parts.words`` says what it does."""
        if cause == "configs" or value == "deployed":
            return f"{cause} of the deployed folder"
        if cause == "activations" and value == "auto":
            counts = Counter(each.how for each in self.roundings(Variant(activations="auto")).values())
            kinds = ", ".join(f"{how} in {counted(count, 'layer')}" for how, count in counts.items())
            return f"activations as the file's server rounds them ({kinds or 'nowhere'})"
        words = ", ".join(value) if isinstance(value, tuple) else str(value)
        words = f"{value:g}" if isinstance(value, float) else words
        instead = f" instead of {self.trained[cause]}" if self.trained.get(cause) else ""
        if cause == "t5_tokens":
            return f"T5 with {words} tokens of a caption{instead}"
        return f"{cause} {words.removeprefix('torch.')}{instead}"

    def describe_server(self, variant: Variant) -> str:
        """Return the server and how products are made, in words; what of it depends on the card."""
        hows: set[Any] = (
            {each.how for each in self.roundings(variant).values()} if variant.activations == "auto" else set()
        )
        hows |= {variant.activations} if variant.activations not in ("auto", None) else set()
        made = f"inputs rounded for products ({', '.join(sorted(hows))})" if hows else "products in high precision"
        needs = {"Blackwell": {"nvfp4", "mxfp8"}, "Ada": {"unit", "static", "row", "tensor"}}
        card = next((card for card, needed in needs.items() if hows & needed), None)
        on = f", as on Nvidia cards of the {card} generation or newer (others: --activations none)" if card else ""
        return f"{self.server.words}; {made}{on}"


def round_like(
    kind: QuantizedWeight, weight: Tensor, how: Merge, random: torch.Generator | None = None
) -> QuantizedWeight:
    """Return ``weight`` [out, in] in the format of ``kind``, with fresh scales."""
    return kind.scheme.quantize(weight, stochastic=how.startswith("stochastic"), generator=random)


def rounds(kind: QuantizedWeight | None) -> bool:
    """Return whether something here rounds to the format of ``kind``; None is in high precision."""
    return kind is not None and not isinstance(kind.scheme, ReadOnlyScheme)


def rounded(kind: QuantizedWeight | None, weight: Tensor) -> Tensor:
    """Return ``weight`` rounded to nearest in the format of ``kind``, fp32; as it is in high precision."""
    return weight if kind is None else kind.rounded(weight)


def base_layer(model: nn.Module, name: str) -> nn.Module:
    """Return the linear layer ``name`` of ``model`` under its LoRA, if it has one."""
    layer: Any = model.get_submodule(name)
    return getattr(layer, "base", layer)


def numbers(layer: Any) -> Tensor:
    """Return a linear layer's weight as the numbers it stands for, fp32 [out, in]."""
    return layer.dequantized(torch.float32) if isinstance(layer, QuantizedLinear) else layer.weight.detach().float()
