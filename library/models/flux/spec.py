"""FLUX.1 dev and schnell (https://github.com/black-forest-labs/flux): the family, and what its variants share.

The transformer sees a picture as a sequence: 2 x 2 latents of 16 channels are one token of 64 numbers, placed
at (0, row, column); text tokens all sit at (0, 0, 0). It is told the noise level sigma, the pooled text and,
in the guidance-distilled dev, the guidance scale, and returns the velocity noise - image per token. Schnell
is the same network without the guidance input.

A variant (``flux_fill``, ``flux_kontext``) is a subclass that says which other tokens or channels stand beside the
noise (:meth:`FluxFamily.picture_tokens`) and which pipeline of diffusers draws (:meth:`FluxFamily.pipeline`).

FLUX.1 Fill dev (https://huggingface.co/black-forest-labs/FLUX.1-Fill-dev): a region of a picture is painted anew.

FLUX.1 dev with a wider first layer: a token holds the noisy latents, the latents of the picture with its region
blanked to mid-grey, and the 256 mask pixels under it, in this order (BFL's ``prepare_fill``; diffusers'
FluxFillPipeline is what the tests compare with).

A sample is the model's whole picture, the known part too as it came out of the autoencoder. Pasting the original's
pixels back over it keeps them exact, but draws the autoencoder's small errors as a line along the border; that is the
user's choice and not made here.

FLUX.1 Kontext dev (https://huggingface.co/black-forest-labs/FLUX.1-Kontext-dev): a picture from reference pictures.

FLUX.1 dev, shape for shape. Tokens of the reference pictures follow those of the picture and take part in attention;
their positions begin with 1 where the picture's begin with 0, and what comes out for them is cut off.

Kontext was trained on one reference and diffusers' FluxKontextPipeline takes one. Several lie side by side on one
canvas of index 1, as ComfyUI places them by default (comfy/ldm/flux/model.py, method "offset"): the first at the
origin, each further one to the right of all before it or below them, whichever reaches less far.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from diffusers import (
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    FluxFillPipeline,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
)
from PIL.Image import Image
from torch import Tensor, nn

import library.models.flux.files as flux_layout
from library.conditions import NO_CONDITIONS, ConditionKind, Conditions
from library.config.schema import ModelConfig
from library.errors import UserError
from library.files import fingerprint
from library.models.family import (
    ImageEncoder,
    TransformerFiles,
    check_size,
    drawing_autocast,
    dtype_name,
    evaluating,
    unwrapped,
)
from library.models.flux.files import FluxFiles, locate
from library.models.flux.model import (
    image_positions,
    optimise_forward,
    pack_latents,
    pack_mask,
    text_positions,
    unpack_latents,
)
from library.models.text_encoders import (
    FluxTextEncoder,
    clip_positions,
    load_clip,
    load_clip_tokenizer,
    load_t5,
    load_t5_tokenizer,
)
from library.models.vae import VaeImageEncoder, computed_as, load_vae, vae_config
from library.nn.attention import Backend
from library.precision.checkpoint_layouts import WeightFiles
from library.precision.recipe import Fp8Recipe

_DEV_TEXT_TOKENS, _SCHNELL_TEXT_TOKENS = 512, 256  # T5 tokens the published models were made with


class FluxFamily(TransformerFiles):
    """FLUX.1 from a diffusers folder, BFL's files or ComfyUI's; see ``library.models.flux.files``."""

    name = "flux"
    timestep_sampling = "flux_shift"
    conditioning: ConditionKind = "none"
    most_references: int | None = None
    sample_guidance = 3.5  # what pictures are drawn with unless told otherwise; the published pipelines' default
    transformer_class = FluxTransformer2DModel
    patch_size = 2
    repeated_blocks: tuple[str, ...] = ("FluxTransformerBlock", "FluxSingleTransformerBlock")
    behind_blocks: tuple[str, ...] = ("norm_out", "proj_out")

    def __init__(self, config: ModelConfig) -> None:
        """Find and check the files of ``config``; nothing is loaded.

        Raises:
            UserError: a part is missing or is another kind of model.
        """
        self._config = config
        self._files: FluxFiles = locate(config)
        self.guidance_embeds: bool = bool(self._files.transformer_config.get("guidance_embeds", False))
        self.guidance_input: bool = self.guidance_embeds
        self.modelspec_architecture = "flux-1-schnell" if self._schnell else "flux-1-dev"
        self.latent_channels: int = flux_layout.output_channels(self._files.transformer_config) // self.patch_size**2

    @property
    def _schnell(self) -> bool:
        """Whether the model is schnell: dev's variants have no few-step sibling, whatever their inputs."""
        return self.name == "flux" and not self.guidance_embeds

    def _with_hot_paths(self, transformer: Any, backend: Backend) -> Any:
        return optimise_forward(transformer, backend)

    def load_image_encoder(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> VaeImageEncoder:
        """Return the image encoder; its weights are loaded at the first use. On a CPU it computes in fp32."""
        path = self._files.vae
        used, mark = computed_as(path, dtype, device)
        return VaeImageEncoder(lambda: load_vae(path, used, device), vae_config(path), mark, self.patch_size)

    def load_text_encoder(
        self, dtype: torch.dtype, device: torch.device | str = "cpu", *, recipe: Fp8Recipe | None = None
    ) -> FluxTextEncoder:
        """Return the text encoder; tokenizers are loaded now, weights at the first caption.

        Args:
            dtype, device: of weights and products.
            recipe: how T5 becomes fp8; None leaves it as its file has it.

        Raises:
            UserError: a tokenizer cannot be had, or is asked for more tokens than it gives; T5 is fp8 already, or is
                to run in fp8 and fp16 together.
        """
        clip, t5 = self._files.clip, self._files.t5
        t5_layout = WeightFiles(t5).fp8
        if recipe is not None and t5_layout is not None:
            raise UserError(f"fp8_text_encoder: {t5} is in fp8 already and is used as it is; remove fp8_text_encoder")
        if dtype == torch.float16 and (recipe is not None or t5_layout is not None):
            raise UserError(f"{t5}: T5 in fp8 leaves the range of fp16; use bf16, or T5's fp16 file")
        clip_tokenizer = load_clip_tokenizer(self._files.clip_tokenizer)
        t5_tokenizer = load_t5_tokenizer(self._files.t5_tokenizer)
        lengths = (
            min(clip_positions(clip), clip_tokenizer.model_max_length),
            self._t5_length(t5_tokenizer.model_max_length),
        )
        mark = f"{fingerprint(clip)}-{fingerprint(t5)}-{lengths[0]}-{lengths[1]}-{dtype_name(dtype)}"
        mark += f"-{recipe.describe()}" if recipe is not None else ""
        return FluxTextEncoder(
            lambda: load_clip(clip, dtype, device),
            lambda: load_t5(t5, dtype, device, recipe),
            clip_tokenizer,
            t5_tokenizer,
            lengths,
            mark,
        )

    def _t5_length(self, most: int) -> int:
        """Return T5's tokens per caption: the option, else the published number, within the tokenizer's."""
        asked = self._config.t5xxl_max_token_length
        if asked is None:
            return min(_SCHNELL_TEXT_TOKENS if self._schnell else _DEV_TEXT_TOKENS, most)
        if asked > most:
            raise UserError(f"t5xxl_max_token_length {asked}: the tokenizer gives at most {most}; lower it")
        return asked

    def blocks(self, transformer: Any) -> list[nn.Module]:
        """Return double blocks, then single blocks."""
        return [*transformer.transformer_blocks, *transformer.single_transformer_blocks]

    def predict_velocity(
        self,
        transformer: nn.Module,
        latents: Tensor,
        sigmas: Tensor,
        text: dict[str, Tensor],
        guidance_scale: float,
        conditions: Conditions = NO_CONDITIONS,
    ) -> Tensor:
        """Return the velocity noise - image at ``latents``, [B, 16, h, w] fp32.

        Args:
            transformer: from :meth:`load_transformer`, possibly wrapped (DDP, compile); it is only called.
            latents: noisy latents [B, 16, h, w], h and w even.
            sigmas: noise levels [B] in (0, 1]; passed on in fp32.
            text: ``prompt_embeds`` [B, L, D] and ``pooled_prompt_embeds`` [B, P].
            guidance_scale: given to models with a guidance input, of no meaning to others.
            conditions: what :attr:`conditioning` names, with the batch axis of ``latents``.

        Raises:
            UserError: the conditions are not those of this family.
        """
        batch, _, height, width = latents.shape
        embeds, pooled = text["prompt_embeds"], text["pooled_prompt_embeds"]
        tokens, positions = self.picture_tokens(latents, conditions)
        if not torch.is_autocast_enabled(latents.device.type):
            # Without autocast nobody else brings activations to the dtype of the weights.
            dtype = self._dtype or tokens.dtype
            tokens, embeds, pooled = tokens.to(dtype), embeds.to(dtype), pooled.to(dtype)
        guidance = None
        if self.guidance_embeds:
            guidance = torch.full((batch,), guidance_scale, device=latents.device, dtype=torch.float32)
        output = transformer(
            hidden_states=tokens,
            timestep=sigmas.to(device=latents.device, dtype=torch.float32),
            guidance=guidance,
            pooled_projections=pooled,
            encoder_hidden_states=embeds,
            txt_ids=text_positions(embeds.shape[1], latents.device),
            img_ids=positions,
            return_dict=False,
        )[0]
        own = (height // 2) * (width // 2)
        return unpack_latents(output[:, :own].float(), height, width)

    def picture_tokens(self, latents: Tensor, conditions: Conditions) -> tuple[Tensor, Tensor]:
        """Return what the transformer sees of pictures: tokens [B, N, C] and their positions [N, 3].

        The tokens of ``latents`` [B, 16, h, w] come first.
        """
        height, width = latents.shape[-2:]
        return pack_latents(latents), image_positions(height // 2, width // 2, latents.device)

    def pipeline(
        self, transformer: FluxTransformer2DModel, scheduler: FlowMatchEulerDiscreteScheduler, conditions: Conditions
    ) -> DiffusionPipeline:
        """Return diffusers' pipeline around ``transformer``, without encoders; ``conditions`` as in :meth:`sample`."""
        return FluxPipeline(scheduler, None, None, None, None, None, transformer)

    def pipeline_inputs(self, width: int, height: int, seed: int, cfg: float, conditions: Conditions) -> dict[str, Any]:
        """Return the arguments of the pipeline's call that not every variant takes, and its noise's source.

        Raises:
            UserError: the pipeline cannot do what is asked.
        """
        return {"true_cfg_scale": cfg, "generator": torch.Generator().manual_seed(seed)}

    def sample(
        self,
        transformer: nn.Module,
        image_encoder: ImageEncoder,
        text: dict[str, Tensor],
        width: int,
        height: int,
        steps: int,
        guidance: float,
        seed: int,
        negative_text: dict[str, Tensor] | None = None,
        cfg: float = 1.0,
        conditions: Conditions = NO_CONDITIONS,
    ) -> Image:
        """Draw one picture with the variant's pipeline from diffusers and the running transformer.

        The same seed gives the same picture. Noise and solver work in fp32; a 16-bit transformer runs under
        autocast, so that LoRA weights of any dtype fit. The training mode is put back afterwards and nothing
        keeps a reference to the transformer.

        Args:
            transformer: the network, possibly with LoRA; DDP and compile wrappers are taken off.
            text: ``prompt_embeds`` [L, D] and ``pooled_prompt_embeds`` [P], with or without a batch axis of
                one.
            width, height: pixels, multiples of ``image_encoder.pixel_multiple``.
            guidance: for the guidance input, where there is one.
            negative_text: what to steer away from, with ``cfg`` above 1 (two evaluations a step).
            conditions: what :attr:`conditioning` names, with a batch axis of one.

        Raises:
            UserError: the size is not possible, the conditions are not those of this family, or it knows no negative
                text.
        """
        check_size(width, height, image_encoder.pixel_multiple)
        plain = unwrapped(transformer)
        pipeline: Any = self.pipeline(plain, self._scheduler(), conditions.to(plain.device))
        pipeline.vae_scale_factor = image_encoder.latent_factor  # read from the VAE otherwise, which stays outside
        pipeline.set_progress_bar_config(disable=True)
        inputs = self.pipeline_inputs(width, height, seed, cfg, conditions) | _pipeline_text(text, "", plain.device)
        if negative_text is not None:
            inputs |= _pipeline_text(negative_text, "negative_", plain.device)
        with torch.no_grad(), evaluating(plain), drawing_autocast(plain, self._dtype):
            packed = pipeline(
                **inputs,
                width=width,
                height=height,
                num_inference_steps=steps,
                guidance_scale=guidance,
                output_type="latent",
                return_dict=False,
            )[0]
        factor = image_encoder.latent_factor
        pixels = image_encoder.decode(unpack_latents(packed, height // factor, width // factor))
        return pipeline.image_processor.postprocess(pixels, output_type="pil")[0]

    def _scheduler(self) -> FlowMatchEulerDiscreteScheduler:
        """Return the folder's scheduler, or with single files the published one of dev or schnell."""
        if self._files.scheduler is not None:
            return FlowMatchEulerDiscreteScheduler.from_pretrained(self._files.scheduler)
        if self._schnell:
            return FlowMatchEulerDiscreteScheduler(shift=1.0)
        return FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)


def _pipeline_text(text: dict[str, Tensor], prefix: str, device: torch.device) -> dict[str, Tensor]:
    embeds, pooled = text["prompt_embeds"], text["pooled_prompt_embeds"]
    embeds = embeds if embeds.ndim == 3 else embeds.unsqueeze(0)
    pooled = pooled if pooled.ndim == 2 else pooled.unsqueeze(0)
    # fp32, because the pipeline draws its noise in the dtype of the text: one noise for every dtype.
    return {
        f"{prefix}prompt_embeds": embeds.to(device, torch.float32),
        f"{prefix}pooled_prompt_embeds": pooled.to(device, torch.float32),
    }


class FluxFillFamily(FluxFamily):
    """FLUX.1 Fill from the same kinds of files as FLUX.1 dev."""

    name = "flux_fill"
    conditioning: ConditionKind = "fill"
    sample_guidance = 30.0

    def picture_tokens(self, latents: Tensor, conditions: Conditions) -> tuple[Tensor, Tensor]:
        """Return tokens [B, N, 384], noise beside blanked picture beside mask, and their positions [N, 3]."""
        masked, mask = _region(conditions)
        height, width = latents.shape[-2:]
        if masked.shape != latents.shape or mask.shape[-2] % height or mask.shape[-1] % width:
            raise UserError(
                f"the region to fill is for {tuple(masked.shape)} latents, mask {tuple(mask.shape)}, the picture has "
                f"{tuple(latents.shape)}; use one size for the picture and its mask"
            )
        noise, positions = super().picture_tokens(latents, conditions)
        known = (pack_latents(masked), pack_mask(mask, mask.shape[-2] // height))
        return torch.cat([noise, *(part.to(noise.dtype) for part in known)], dim=-1), positions

    def pipeline(
        self, transformer: FluxTransformer2DModel, scheduler: FlowMatchEulerDiscreteScheduler, conditions: Conditions
    ) -> FluxFillPipeline:
        """Return FluxFillPipeline with an autoencoder that gives the blanked picture's latents as we have them.

        The pipeline takes pictures only: latents that it is given make it fail on the picture that is then missing
        (diffusers 0.42).
        """
        pipeline = FluxFillPipeline(scheduler, None, None, None, None, None, transformer)
        pipeline.vae = _KnownLatents(_region(conditions)[0])
        return pipeline

    def pipeline_inputs(self, width: int, height: int, seed: int, cfg: float, conditions: Conditions) -> dict[str, Any]:
        """Return mask, noise, and a picture for its size alone."""
        if cfg != 1.0:
            raise UserError("FLUX.1 Fill knows no negative prompt; remove --n and --l (negative_prompt, scale)")
        masked, mask = _region(conditions)
        if mask.shape[-2:] != (height, width):
            raise UserError(
                f"sample of {width} x {height} pixels with a mask of {mask.shape[-1]} x {mask.shape[-2]}; use one size"
            )
        noise = torch.randn(masked.shape, generator=torch.Generator().manual_seed(seed))
        return {
            "image": torch.zeros(1, 3, height, width),
            "mask_image": mask.float().cpu(),
            "latents": pack_latents(noise),
        }


class _KnownLatents:
    """Stands for the autoencoder inside the pipeline: whatever is encoded, the latents are those given."""

    def __init__(self, latents: Tensor) -> None:
        self._latents = latents
        # normalised already: the pipeline's (latents - shift) * scaling changes nothing
        self.config = SimpleNamespace(latent_channels=latents.shape[1], shift_factor=0.0, scaling_factor=1.0)

    def encode(self, pixels: Tensor) -> SimpleNamespace:
        """Return what ``AutoencoderKL.encode`` would, as far as the pipeline looks at it."""
        return SimpleNamespace(latents=self._latents)


def _region(conditions: Conditions) -> tuple[Tensor, Tensor]:
    """Return masked latents [B, C, h, w] and mask [B, 1, H, W]."""
    if conditions.masked_latents is None or conditions.mask is None:
        raise UserError(
            "FLUX.1 Fill needs a picture and a mask: in the dataset inpaint_mask_directory, inpaint_alpha_mask or "
            "inpaint_masks, in a prompt --ci and --mi"
        )
    return conditions.masked_latents, conditions.mask


class FluxKontextFamily(FluxFamily):
    """FLUX.1 Kontext from the same kinds of files as FLUX.1 dev."""

    name = "flux_kontext"
    conditioning: ConditionKind = "references"
    sample_guidance = 2.5  # BFL's and the model card's; the pipeline's own default is 3.5

    def picture_tokens(self, latents: Tensor, conditions: Conditions) -> tuple[Tensor, Tensor]:
        """Return tokens [B, N + R, 64], picture then references, and their positions [N + R, 3]."""
        tokens, positions = super().picture_tokens(latents, conditions)
        if not conditions.references:
            return tokens, positions
        reference_tokens, reference_positions = _reference_tokens(conditions.references)
        return (
            torch.cat([tokens, reference_tokens.to(tokens.dtype)], dim=1),
            torch.cat([positions, reference_positions]),
        )

    def pipeline(
        self, transformer: FluxTransformer2DModel, scheduler: FlowMatchEulerDiscreteScheduler, conditions: Conditions
    ) -> FluxKontextPipeline:
        """Return FluxKontextPipeline with the references as tokens."""
        pipeline = _GivenReferences(scheduler, None, None, None, None, None, transformer)
        pipeline.references = conditions.references
        return pipeline

    def pipeline_inputs(self, width: int, height: int, seed: int, cfg: float, conditions: Conditions) -> dict[str, Any]:
        """Return the pipeline's arguments; it would otherwise choose a size of one megapixel itself."""
        return super().pipeline_inputs(width, height, seed, cfg, conditions) | {"max_area": width * height}


class _GivenReferences(FluxKontextPipeline):
    """FluxKontextPipeline for any number of references, given as latents."""

    references: tuple[Tensor, ...] = ()

    def prepare_latents(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """Return noise, tokens of the references, and the positions of both."""
        latents, _, positions, _ = super().prepare_latents(*args, **kwargs)
        if not self.references:
            return latents, None, positions, None
        tokens, reference_positions = _reference_tokens(self.references)
        return latents, tokens.to(latents), positions, reference_positions.to(positions)


def _reference_tokens(references: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Return tokens [B, R, 64] of ``references``, each [B, 16, h, w], and their positions [R, 3]."""
    tokens = torch.cat([pack_latents(reference) for reference in references], dim=1)
    sizes = [(reference.shape[-2] // 2, reference.shape[-1] // 2) for reference in references]
    placed = [
        image_positions(*size, tokens.device, index=1) + torch.tensor([0.0, *offset], device=tokens.device)
        for size, offset in zip(sizes, canvas_offsets(sizes), strict=True)
    ]
    return tokens, torch.cat(placed)


def canvas_offsets(sizes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return (row, column) of each reference's first token, for references of ``sizes`` (rows, columns) in tokens."""
    offsets: list[tuple[int, int]] = []
    high, wide = 0, 0  # of the canvas so far
    for rows, columns in sizes:
        row, column = (0, wide) if rows + high > columns + wide else (high, 0)
        offsets.append((row, column))
        high, wide = max(high, row + rows), max(wide, column + columns)
    return offsets
