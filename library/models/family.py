"""The base class of the model families: what training, sampling and caching ask of a model, written once.

The *class* is the architecture. What needs no files is asked of it: its blocks, the layers that LoRAs get, published
sizes, example inputs. An *instance* is one model: built from the ``[model]`` section alone, it reads headers and
configs, so that a wrong path is an error at once, but no weights. Its methods load each part when asked, turn (noisy
latents, sigmas, text) into a velocity, and go from noise to an image by the same velocity.

A family is a folder (``docs/model_families.md``): its ``spec.py`` derives from :class:`Family`, sets the attributes and
writes what no other family has: above all how latents and text become the transformer's arguments.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.image_processor import VaeImageProcessor
from PIL.Image import Image
from torch import Tensor, nn

from library.checksums import fingerprint, weights_fingerprint
from library.conditions import NO_CONDITIONS, Conditions
from library.config.kinds import refuse_other_kind
from library.config.model_types import MODEL_TYPES, ConditionKind
from library.config.published_models import named_distilled
from library.config.schema import ModelConfig
from library.errors import NotFiniteError, UserError, names_in_short, reason_of
from library.models.family_files import FamilyFiles, files_of
from library.models.files import locate
from library.models.layer_names import LoraTargets
from library.models.registry import lora_targets
from library.models.text import TextEncoder, round_caption
from library.models.vae import ImageEncoder, unpack_latents
from library.models.weights import load_into, read_config
from library.nn.attention import Backend
from library.nn.checkpointing import evaluating
from library.nn.tensor_split import Parts
from library.precision.checkpoint import QuantizedFile, ServedInput, WeightFiles
from library.precision.recipe import Recipe, WeightLoader


@dataclass(frozen=True)
class SampleSettings:
    """What an image is sampled with, besides its text.

    Attributes:
        width, height: pixels, multiples of the encoder's ``pixel_multiple``.
        steps: of the solver; at least 2 where the schedule is stretched between the first and the last.
        guidance: for the guidance input, where there is one.
        seed: of the noise.
        cfg: strength of true classifier-free guidance; above 1 it takes two evaluations a step.
    """

    width: int
    height: int
    steps: int
    guidance: float
    seed: int
    cfg: float = 1.0


class Family:
    """One architecture, and as an instance the files of one model.

    Attributes:
        name: the ``model_type``.
        layout: how its models are kept. targets: the layers that LoRAs get.
        transformer_class: diffusers' class. published: arguments of it that differ from its defaults, of the smallest
            of several sizes.
        depths: arguments of it that count blocks.
        image_encoder: the class that reads its autoencoder.
        published_scheduler: arguments of the scheduler, for models in single files.
        negative_text: whether samples may be steered away from a negative text (classifier-free guidance).
        noise_patch: latents a side whose noise is drawn as the channels of one, as diffusers' pipeline draws it.
        modelspec_architecture: what ModelSpec calls this model, "flux-1-schnell"; default: what it calls the family.
        optimise_forward: of ``model.py``: (transformer, backend) -> transformer, whose forward saves less for backward.
        patch_size: latents a side that make one token.
        captions_differ: whether captions' vectors are as many as their tokens, a batch's shorter ones under a mask.
        conditioning: what every sample must bring besides its caption.
        most_references: images that an edit model takes at most; None: any number.
        timestep_sampling: how training draws sigmas where the scheduler's shift follows the size.
        guidance_input: whether the transformer takes a guidance scale.
        distilled_steps: that its distilled model is published to be sampled with.
        distilled: of an instance, whether it is taken for the distilled model, of few steps and no negative text.
        chained_args: arguments of a block that the outputs of the one before are, in the order of these.
        unused_parts: modules of the transformer that this variant never calls, which are not loaded.
        tail: names of what follows the blocks, for pipelines; none if it cannot be cut.
        int8_passes_bypass: whether newer versions of ComfyUI multiply some layers of its int8 files past a LoRA that
            stays beside the weights.
    """

    name: str
    layout: FamilyFiles
    targets: LoraTargets
    transformer_class: Any
    published: Mapping[str, Any] = {}
    depths: tuple[str, ...]
    image_encoder: type[ImageEncoder]
    published_scheduler: Mapping[str, Any] = {}
    negative_text = True
    noise_patch = 1
    modelspec_architecture: str
    patch_size = 2
    latent_channels: int
    captions_differ = True
    conditioning: ConditionKind = "none"
    most_references: int | None = None
    timestep_sampling = "flux_shift"
    guidance_input = False
    distilled_steps = 4  # FLUX.1-schnell, FLUX.2 klein
    distilled = False
    chained_args: tuple[str, ...] = ("encoder_hidden_states", "hidden_states")
    unused_parts: tuple[str, ...] = ()
    tail: tuple[str, ...] = ()
    int8_passes_bypass = False

    optimise_forward: Any

    def __init_subclass__(cls) -> None:
        """Find the tables of a class that is a ``model_type``."""
        if "name" in vars(cls):
            cls.layout, cls.targets = files_of(cls.name), lora_targets()[cls.name]
            cls.conditioning = MODEL_TYPES[cls.name].conditioning

    # What each family writes.

    @classmethod
    def published_like(cls, name: str) -> tuple[Mapping[str, Any], dict[str, Callable[[], Any]]]:
        """Return ``published``, and what builds the other parts, of the size of a model whose file is called ``name``.

        The parts are those of :meth:`published_texts` and the autoencoder, by folder.
        """
        encoder = cls.image_encoder
        return cls.published, {"vae": lambda: encoder.autoencoder(**encoder.published), **cls.published_texts()}

    @staticmethod
    def published_texts() -> dict[str, Callable[[], Any]]:
        """Return what builds text encoders at their published sizes, by folder; and tokenizers.

        These have no vocabulary worth the name: to count memory, a text is as many tokens as there are.
        """
        raise NotImplementedError

    @staticmethod
    def blocks(transformer: Any) -> list[nn.Module]:
        """Return the transformer's blocks in running order, double ones first, for checkpointing and offloading."""
        return [*transformer.transformer_blocks, *getattr(transformer, "single_transformer_blocks", ())]

    def load_text_encoder(
        self, dtype: torch.dtype, device: torch.device | str = "cpu", *, recipe: Recipe | None = None
    ) -> TextEncoder:
        """Return the text encoder; tokenizers are loaded now, weights at the first caption.

        Args:
            dtype, device: of weights and products.
            recipe: how the large encoder becomes fp8; None leaves it as its file has it.
        """
        raise NotImplementedError

    def transformer_inputs(
        self, latents: Tensor, sigmas: Tensor, text: dict[str, Tensor], guidance: float, conditions: Conditions
    ) -> dict[str, Any]:
        """Return what the transformer is called with; arguments as for :meth:`predict_velocity`.

        Latents and text come in the dtype of the products, ``sigmas`` in fp32 on their device.
        """
        raise NotImplementedError

    def velocity(self, output: Any, latents: Tensor) -> Tensor:
        """Return noise - image, like ``latents`` [B, C, h, w] and fp32, of the transformer's ``output``.

        Here that is tokens [B, N, p²C] of ``patch_size`` p, of which those of ``latents`` come first.
        """
        height, width = latents.shape[-2:]
        tokens = output[:, : height * width // self.patch_size**2]
        return unpack_latents(tokens.float(), height, width, self.patch_size)

    def guided(self, velocity: Tensor, negative: Tensor, cfg: float) -> Tensor:
        """Return the velocity away from that of the negative text, both [B, C, h, w] (arXiv 2207.12598)."""
        return negative + cfg * (velocity - negative)

    def step_inputs(self, following: Tensor) -> dict[str, Any]:
        """Return further arguments of the transformer for a step of sampling to the noise levels ``following`` [B]."""
        return {}

    def first_sigmas(self, steps: int) -> list[float] | None:
        """Return the noise levels that the scheduler shifts, where the model itself says them; None: even ones."""
        return None

    @classmethod
    def build(cls, arguments: Mapping[str, Any], most_blocks: int | None = None) -> Any:
        """Return the transformer with the optimised forward on the default device, of ``most_blocks`` of each kind."""
        known = {key: value for key, value in arguments.items() if not key.startswith("_")}
        transformer = cls.outline(known)
        if most_blocks is not None:
            known |= {key: min(most_blocks, transformer.config[key]) for key in cls.depths}
            transformer = cls.outline(known)
        return cls.optimise_forward(transformer)

    @classmethod
    def outline(cls, arguments: Mapping[str, Any]) -> Any:
        """Return diffusers' transformer without its unused parts, on the default device."""
        transformer = cls.transformer_class.from_config(arguments)
        for part in cls.unused_parts:
            parent, _, name = part.rpartition(".")
            del transformer.get_submodule(parent)._modules[name]
        return transformer

    # The files of one model.

    def __init__(self, config: ModelConfig) -> None:
        """Find and check the files of ``config``; nothing is loaded."""
        self.config, self.files = config, locate(config, self.layout)
        self.modelspec_architecture = self.targets.architecture
        refuse_other_kind(str(self.files.transformer), self.name)
        self.check_variant()
        self.distilled = self.says_distilled()
        self.image_encoder.describe(WeightFiles(self.files.vae))
        self.check_text_encoders()

    def unused_tensors(self) -> Iterator[str]:
        """Yield a line for each file with tensors beside the transformer's or the autoencoder's, which are not used."""
        vae, transformer = WeightFiles(self.files.vae), WeightFiles(self.files.transformer)
        read = {piece.source for pieces in self.image_encoder.describe(vae)[1].values() for piece in pieces}
        inside = {name for name in transformer.names if name.startswith(self.files.prefix)}
        for what, weights, used in (("transformer", transformer, inside), ("VAE", vae, read)):
            if others := [name for name in weights.names if name not in used]:
                names = names_in_short(others)
                yield f"{weights.path}: {len(others)} tensors are not the {what}'s and not used ({names})"

    def argument(self, name: str) -> Any:
        """Return an argument of the transformer: of the files, or the default of diffusers' class."""
        default = inspect.signature(self.transformer_class.__init__).parameters[name].default
        return self.files.transformer_config.get(name, default)

    def check_variant(self) -> None:
        """Refuse a transformer that no family here is; set what depends on the transformer's config.

        Here that is how many channels the latents have whose patches are its tokens.
        """
        self.latent_channels = self.argument("in_channels") // self.patch_size**2

    def says_distilled(self) -> bool:
        """Whether this is a distilled model: as the folder's pipeline says, else as its name does."""
        named = named_distilled(self.config.pretrained_model_name_or_path)
        return bool(self.folder_settings().get("is_distilled", named))

    def folder_settings(self) -> dict[str, Any]:
        """Return what the folder's ``model_index.json`` says; of a single file nothing."""
        index = self.files.index
        return {} if index is None else read_config(index.parent, index.name)

    def check_text_encoders(self) -> None:
        """Refuse files that are no text encoders of this family; headers only."""
        raise NotImplementedError

    def check_text_width(self, width: int, name: str, remedy: str, layers: int = 1) -> None:
        """Raise a UserError unless so many layers' vectors of ``width`` are the argument ``name`` of the transformer.

        ``remedy``: the text encoder to give.
        """
        if layers * width != (wanted := self.argument(name)):
            raise UserError(
                f"{self.files.text_encoders[0]}: text {width} wide, the transformer takes {wanted // layers}; "
                f"give {remedy} as text_encoder"
            )

    def fingerprint(self) -> str:
        """Return a fingerprint of the transformer's weights."""
        return weights_fingerprint(self.files.transformer)

    def identity(self) -> tuple[str, str, Mapping[str, Any]]:
        """Return what the transformer's answers follow from, besides precision and inputs."""
        return self.name, self.fingerprint(), self.files.transformer_config

    def other_parts(self) -> dict[str, str]:
        """Return a fingerprint of all of the model but the transformer's weights, each by its option or its name.

        Settings count as they hold, with their defaults: a single file, which has none, may be the same as a folder.
        """
        files, layout = self.files, self.layout
        places: dict[str, str | Path] = {layout.vae.option: files.vae}
        named = zip((*layout.text_encoders, *layout.tokenizers), (*files.text_encoders, *files.tokenizers), strict=True)
        places |= {part.option: place for part, place in named}
        places |= {"processor": files.processor} if files.processor.is_dir() else {}
        found = {k: fingerprint(place) if Path(place).exists() else str(place) for k, place in places.items()}
        arguments = {name: self.argument(name) for name in inspect.signature(self.transformer_class).parameters}
        index = {key: value for key, value in self.folder_settings().items() if not _is_component(value)}
        texts = {"transformer config": arguments, "scheduler": self.scheduler().config, "model_index.json": index}
        for name, values in texts.items():
            own = {key: value for key, value in values.items() if not key.startswith("_")}
            found[name] = hashlib.sha256(json.dumps(own, sort_keys=True, default=str).encode()).hexdigest()[:16]
        return found

    def quantized_file(self) -> QuantizedFile | None:
        """Return what the transformer's files hold quantised, from their headers; None if nothing."""
        return WeightFiles(self.files.transformer).quantized

    def served_inputs(self) -> dict[str, ServedInput]:
        """Return layer -> what the transformer's files say of its inputs, of quantised layers."""
        weights = WeightFiles(self.files.transformer)
        return weights.served_inputs(self.layout.key_map(weights, self.files.prefix))

    @property
    def attention_sizes(self) -> tuple[int, int, int]:
        """Heads of the transformer's queries, of its keys, and the width of one."""
        config = self.files.transformer_config
        heads = config.get("num_attention_heads") or config["n_heads"]
        keys = config.get("num_key_value_heads") or config.get("n_kv_heads") or heads
        return heads, keys, config.get("attention_head_dim") or (config.get("hidden_size") or config["dim"]) // heads

    def split_plan(self, processes: int) -> dict[str, Parts]:
        """Return how each linear layer of the blocks is split among ``processes``; see :func:`split_plan`."""
        return split_plan(self.transformer_class, self.files.transformer_config, processes)

    def load_transformer(
        self,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        backend: Backend = "auto",
        *,
        fp8: WeightLoader | None = None,
    ) -> Any:
        """Load the transformer, frozen, in eval mode, with the optimised forward.

        ``backend`` is attention's; ``fp8`` says what is quantised, and how that computes; what the file has so stays as
        it is. Modules of which diffusers says so (norms) stay fp32.
        """
        weights, files = WeightFiles(self.files.transformer), self.files
        key_map, unused = self.layout.key_map(weights, files.prefix), tuple(f"{part}." for part in self.unused_parts)
        used = {name: pieces for name, pieces in key_map.items() if not name.startswith(unused)}
        wide = frozenset(self.transformer_class._keep_in_fp32_modules or ())

        def keep_fp32(name: str) -> bool:
            return not wide.isdisjoint(name.split("."))

        outline = partial(self.outline, files.transformer_config)
        transformer = load_into(outline, weights, used, dtype, device, keep_fp32, fp8)
        transformer.loaded_dtype = dtype  # whatever single weights have
        return self.optimise_forward(transformer, backend)

    def load_image_encoder(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> ImageEncoder:
        """Return the image encoder; its weights are loaded at the first use."""
        return self.image_encoder(self.files.vae, dtype, device, self.patch_size)

    def text_fingerprint(self, dtype: torch.dtype, recipe: Recipe | None, *settings: object) -> str:
        """Return what names the embeddings that the text encoders make with ``settings``.

        Raises:
            UserError: with a recipe, the large encoder, which is the last, is in fp8 already.
        """
        *_, large = files = self.files.text_encoders
        if recipe is not None and WeightFiles(large).quantized is not None:
            raise UserError(
                f"fp8_text_encoder: {large} is in fp8 already and is used as it is; remove fp8_text_encoder"
            )
        made = [*(fingerprint(path) for path in files), *settings, str(dtype).removeprefix("torch.")]
        return "-".join(map(str, made if recipe is None else [*made, recipe.describe()]))

    def predict_velocity(
        self,
        transformer: nn.Module,
        latents: Tensor,
        sigmas: Tensor,
        text: dict[str, Tensor],
        guidance_scale: float = 1.0,
        conditions: Conditions = NO_CONDITIONS,
        **more: Any,
    ) -> Tensor:
        """Return the velocity noise - image at ``latents``, [B, C, h, w] fp32.

        Args:
            transformer: from :meth:`load_transformer`, possibly wrapped (DDP, compile); it is only called.
            latents: noisy latents [B, C, h, w], h and w multiples of ``patch_size``.
            sigmas: noise levels [B] in (0, 1]; passed on in fp32.
            text: of the text encoder, with a batch axis. ``prompt_embeds`` [B, L, D]; where lengths differ,
                ``prompt_embeds_mask`` [B, L], true for real tokens: without it all are, and attention is masked by
                nothing, which the fastest kernels need.
            guidance_scale: for models with a guidance input.
            conditions: what ``conditioning`` names, with the batch axis of ``latents``.
            more: of :meth:`step_inputs`.

        Raises:
            UserError: the conditions are not those of this family.
        """
        sigmas = sigmas.to(device=latents.device, dtype=torch.float32)
        if not torch.is_autocast_enabled(latents.device.type):  # which brings them there itself
            dtype = getattr(unwrapped(transformer), "loaded_dtype", latents.dtype)
            latents = latents.to(dtype)
            text = {name: each.to(dtype) if each.is_floating_point() else each for name, each in text.items()}
        inputs = self.transformer_inputs(latents, sigmas, text, guidance_scale, conditions)
        return self.velocity(transformer(**inputs, **more, return_dict=False)[0], latents)

    def rounded_text(self, text: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a batch's ``text`` in one of a few shapes, for steps that are captured; the velocity stays the same.

        Captions that differ in length are filled up under a mask (:func:`round_caption`), which other steps leave out:
        the fastest kernels take none.
        """
        return round_caption(text) if self.captions_differ else text

    # Sampling.

    def sample(
        self,
        transformer: nn.Module,
        image_encoder: ImageEncoder,
        text: dict[str, Tensor],
        settings: SampleSettings,
        negative_text: dict[str, Tensor] | None = None,
        conditions: Conditions = NO_CONDITIONS,
    ) -> Image:
        """Sample one image with the running transformer by Euler's method, as diffusers' pipeline of the family does.

        The same seed gives the same image. Noise and solver work in fp32; a 16-bit transformer runs under autocast, so
        that LoRA weights of any dtype fit. The training mode is restored afterwards and nothing keeps a reference to
        the transformer.

        Args:
            transformer: the network, possibly with LoRA; DDP and compile wrappers are taken off.
            image_encoder: decodes the result.
            text: of the text encoder, with or without a batch axis of one.
            settings: size, steps, guidance, seed.
            negative_text: what to steer away from, with ``cfg`` above 1.
            conditions: what ``conditioning`` names, with a batch axis of one.

        Raises:
            UserError: the size or number of steps is not possible, the conditions are not those of this family, or it
                takes no negative text.
        """
        multiple, factor = image_encoder.pixel_multiple, image_encoder.latent_factor
        width, height = settings.width, settings.height
        if width % multiple or height % multiple:
            raise UserError(f"sample of {width} x {height} pixels: both must be multiples of {multiple}")
        is_steered = negative_text is not None and settings.cfg > 1
        if is_steered and not self.negative_text:
            raise UserError(
                f"model_type {self.name} knows no negative prompt; remove --n and --l (negative_prompt, scale)"
            )
        sigmas = self.sampling_sigmas(settings.steps, width * height // (factor * self.patch_size) ** 2)
        plain = unwrapped(transformer)
        device, dtype = plain.device, getattr(plain, "loaded_dtype", plain.dtype)
        conditions = conditions.to(device)
        texts = [_of_one(each, device) for each in (text, negative_text if is_steered else None) if each is not None]
        latents = self.noise(height // factor, width // factor, settings.seed).to(device)
        with evaluating(plain), _autocast(device, dtype):
            for now, following in pairwise(sigmas):
                level, step = (latents.new_full((1,), sigma) for sigma in (now, following))
                given, more = (settings.guidance, conditions), self.step_inputs(step)
                found = [self.predict_velocity(plain, latents, level, each, *given, **more) for each in texts]
                velocity = self.guided(found[0], found[1], settings.cfg) if is_steered else found[0]
                latents = latents + (following - now) * velocity
        pixels = image_encoder.decode(latents)
        if not bool(torch.isfinite(pixels).all()):
            raise NotFiniteError(
                f"image of seed {settings.seed}: NaN or infinity instead of pixels; lower the LoRA's strength or the "
                "guidance, or compute in bf16"
            )
        return VaeImageProcessor().postprocess(pixels, output_type="pil")[0]

    def noise(self, height: int, width: int, seed: int) -> Tensor:
        """Return the noise [1, C, height, width] that an image of ``seed`` begins with, fp32 on the CPU."""
        patch = self.noise_patch
        shape = (1, self.latent_channels * patch**2, height // patch, width // patch)
        return F.pixel_shuffle(torch.randn(shape, generator=torch.Generator().manual_seed(seed)), patch)

    def scheduler(self) -> Any:
        """Return the folder's scheduler, or without one the published one."""
        folder = self.files.scheduler
        config = self.published_scheduler if folder is None else read_config(folder, "scheduler_config.json")
        try:
            return FlowMatchEulerDiscreteScheduler.from_config(config)
        except (ValueError, TypeError) as error:
            raise UserError(f"{folder}: no scheduler can be made of its config ({reason_of(error)})") from None

    def own_sampling(self) -> dict[str, Any]:
        """Return the options of ``[flow]`` by which training sees noise levels as sampling goes through them.

        The scheduler is the folder's ``scheduler_config.json``, or of single files the published one: a static
        ``shift``, or with ``use_dynamic_shifting`` one by size. Z-Image-Turbo's is a static 3.0; musubi-tuner
        samples with that too (``zimage_generate_image.py``); FLUX.1 schnell's is 1.0.
        """
        config = self.scheduler().config
        if config.use_dynamic_shifting:
            return {"timestep_sampling": self.timestep_sampling}
        return {"timestep_sampling": "shift", "discrete_flow_shift": config.shift}

    def sampling_sigmas(self, steps: int, tokens: int, shift: float | None = None) -> list[float]:
        """Return the sigmas that diffusers' pipeline goes through for an image of ``tokens``: ``steps + 1``, to 0.

        Even ones, moved by the scheduler and its shift, which may follow the image's size (``calculate_shift`` in
        diffusers' pipelines); or by a static ``shift`` in its place.

        Raises:
            UserError: the schedule has more steps.
        """
        scheduler = self._scheduler_of(steps)
        if shift is not None:
            scheduler = type(scheduler).from_config(scheduler.config, use_dynamic_shifting=False, shift=shift)
        names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
        from diffusers.pipelines.flux.pipeline_flux import calculate_shift  # seconds, with its encoders

        mu = calculate_shift(tokens, *(scheduler.config[name] for name in names))
        scheduler.set_timesteps(sigmas=self.first_sigmas(steps) or torch.linspace(1, 1 / steps, steps).tolist(), mu=mu)
        return scheduler.sigmas.tolist()

    def _scheduler_of(self, steps: int) -> Any:
        scheduler = self.scheduler()
        if steps < 2 and scheduler.config.get("shift_terminal"):
            raise UserError(
                f"sample of {steps} step: {self.layout.title}'s schedule has at least two; set --s 2 or more"
            )
        return scheduler


def split_plan(kind: Any, config: Mapping[str, Any], processes: int) -> dict[str, Parts]:
    """Return how each linear layer of the blocks of diffusers' class ``kind`` is split among ``processes``.

    As its ``_tp_plan`` says; the modulation, which that leaves out, by outputs, which are gathered. No weights are
    read.

    Raises:
        UserError: the class has no such plan, or its heads or widths do not divide.
    """
    if not kind._tp_plan:
        raise UserError(f"tp: diffusers says of no layer of {kind.__name__} how it is split; set tp = 1 and shard")
    with torch.device("meta"):
        empty = kind.from_config(config)
    heads = empty.config.num_attention_heads
    if heads % processes:
        raise UserError(f"tp: {heads} heads cannot be split among {processes} processes; set a divisor")
    from diffusers.hooks.tensor_parallel import resolve_tp_shard_specs  # seconds, with all hooks

    try:
        found = resolve_tp_shard_specs(empty, kind._tp_plan, processes)
    except ValueError as error:
        raise UserError(f"tp: {error}; set a divisor") from None
    weights = {name: spec for name, spec in found.items() if name.endswith(".weight")}
    plan = {n.removesuffix(".weight"): Parts(spec.dim, tuple(spec.block_sizes)) for n, spec in weights.items()}
    blocks = {name.split(".")[0] for name in plan}
    for name, layer in empty.named_modules():
        # What is left is the modulation: large weights, one row of numbers each for the whole image.
        is_left = isinstance(layer, nn.Linear) and name.split(".")[0] in blocks and name not in plan
        if is_left and layer.out_features % processes == 0:
            plan[name] = Parts(0, (layer.out_features,), gathered=True)
    return plan


def unwrapped(module: nn.Module) -> Any:
    """Return the module inside DDP and compile wrappers."""
    while True:
        inner = module._modules.get("_orig_mod") or module._modules.get("module")
        if inner is None:
            return module
        module = inner


def _of_one(text: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return the ``text`` of one sample, with a batch axis or without, as a batch in fp32; all of it is real."""
    has_batch = text["prompt_embeds"].ndim == 3
    rows = {name: each if has_batch else each[None] for name, each in text.items() if each.is_floating_point()}
    return {name: each.to(device, torch.float32) for name, each in rows.items()}


def _autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager:
    """Autocast to ``dtype`` if that is a 16-bit one; else change nothing."""
    return torch.autocast(device.type, dtype) if dtype in (torch.bfloat16, torch.float16) else nullcontext()


def _is_component(value: Any) -> bool:
    """Return whether a value of model_index.json names a class of a part, or none: ["diffusers", "AutoencoderKL"]."""
    return isinstance(value, list) and len(value) == 2 and all(each is None or isinstance(each, str) for each in value)
