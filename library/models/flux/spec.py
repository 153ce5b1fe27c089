"""FLUX.1 (https://github.com/black-forest-labs/flux): dev, schnell, Fill and Kontext.

The transformer sees an image as a sequence: 2 x 2 latents of 16 channels are one token of 64 numbers, placed
at (0, row, column); text tokens all sit at (0, 0, 0). It takes the noise level sigma, the pooled text and,
in the guidance-distilled dev, the guidance scale, and returns the velocity noise - image per token. Schnell
is the same network without the guidance input.

A variant is a subclass that says which other tokens or channels stand beside the noise
(:meth:`FluxFamily.image_tokens`).

*Fill* dev (https://huggingface.co/black-forest-labs/FLUX.1-Fill-dev) inpaints a region. Its first layer is wider: a
token holds the noisy latents, the latents of the image with its region blanked, and the 256 mask pixels
under it, in this order (BFL's ``prepare_fill``; diffusers' FluxFillPipeline is what the tests compare with). A sample
is the model's whole image, the known part too as it came out of the autoencoder. Pasting the original's pixels back
over it keeps them exact, but shows the autoencoder's small errors as a line along the border; that is the user's choice
and not made here.

*Kontext* dev (https://huggingface.co/black-forest-labs/FLUX.1-Kontext-dev) edits by reference images; shape for shape
it is dev. Tokens of the references follow those of the image and take part in attention; their positions begin with 1
where the image's begin with 0, and what comes out for them is cut off. It was trained on one reference and diffusers'
FluxKontextPipeline takes one. Several lie side by side on one canvas of index 1, as ComfyUI places them by default
(comfy/ldm/flux/model.py, method "offset"): the first at the origin, each further one to the right of all before it or
below them, whichever reaches less far.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor
from transformers import CLIPTokenizer, T5TokenizerFast

import library.models.flux.model as flux_model
from library.conditions import Conditions
from library.errors import UserError
from library.models.family import Family
from library.models.flux.model import pack_mask, text_positions
from library.models.flux.text import FluxTextEncoder, check_t5, clip_positions, load_clip, load_t5, published_text
from library.models.flux.vae import FluxImageEncoder
from library.models.text import load_tokenizer
from library.models.vae import image_positions, pack_latents, token_grid
from library.precision.checkpoint import WeightFiles
from library.precision.recipe import Recipe

_DEV_TEXT_TOKENS, _SCHNELL_TEXT_TOKENS = 512, 256  # T5 tokens the published models were made with
_MASK_CHANNELS = 256  # of a Fill token: 16 x 16 pixels of the mask


class FluxFamily(Family):
    """FLUX.1 dev and schnell."""

    name = "flux"
    transformer_class = FluxTransformer2DModel
    published = {"guidance_embeds": True}  # noqa: RUF012
    depths = ("num_layers", "num_single_layers")
    image_encoder = FluxImageEncoder
    published_scheduler = {"shift": 3.0, "use_dynamic_shifting": True}  # noqa: RUF012
    guidance_input = True
    captions_differ = False
    tail = ("norm_out", "proj_out")
    published_texts = staticmethod(published_text)  # CLIP-L and T5-XXL
    optimise_forward = staticmethod(flux_model.optimise_forward)

    def says_distilled(self) -> bool:
        """Whether it is schnell, which has no guidance input."""
        return not self.argument("guidance_embeds")

    def check_variant(self) -> None:
        """Refuse Depth and Canny, which take a second image.

        dev, schnell and Kontext take what they return; Fill also takes the blanked image and the mask. Kontext has
        dev's shapes: nothing in a file tells the two apart.
        """
        path, config = self.files.transformer, {"in_channels": 64} | self.files.transformer_config
        taken, returned = config["in_channels"], config.get("out_channels") or config["in_channels"]
        fill = taken == 2 * returned + _MASK_CHANNELS
        if not fill and taken != returned:
            raise UserError(
                f"{path}: the transformer takes {taken} channels and returns {returned}, as FLUX.1 Depth and Canny do; "
                "give FLUX.1 dev, schnell, Fill or Kontext"
            )
        self.latent_channels = returned // self.patch_size**2
        self.guidance_input = bool(config.get("guidance_embeds", False))
        # dev's variants have no few-step sibling, whatever their inputs
        self._schnell = self.name == "flux" and not self.guidance_input
        if self._schnell:
            self.modelspec_architecture, self.published_scheduler = "flux-1-schnell", {"shift": 1.0}

    def check_text_encoders(self) -> None:
        """Read the headers of CLIP and T5."""
        clip, t5 = self.files.text_encoders
        clip_positions(clip)
        check_t5(t5)

    def load_text_encoder(
        self, dtype: torch.dtype, device: torch.device | str = "cpu", *, recipe: Recipe | None = None
    ) -> FluxTextEncoder:
        """Return CLIP and T5, of which ``recipe`` makes T5 fp8.

        Raises:
            UserError: a tokenizer cannot be had, or is asked for more tokens than it gives; T5 is fp8 already, or is
                to run in fp8 and fp16 together.
        """
        clip, t5 = self.files.text_encoders
        if dtype == torch.float16 and (recipe is not None or WeightFiles(t5).quantized is not None):
            raise UserError(f"{t5}: T5 in fp8 leaves the range of fp16; use bf16, or T5's fp16 file")
        clip_tokenizer = load_tokenizer(CLIPTokenizer.from_pretrained, self.files.tokenizers[0], "clip_l_tokenizer")
        t5_tokenizer = load_tokenizer(T5TokenizerFast.from_pretrained, self.files.tokenizers[1], "t5xxl_tokenizer")
        clip_length = min(clip_positions(clip), clip_tokenizer.model_max_length)
        t5_length = self._t5_length(t5_tokenizer.model_max_length)
        return FluxTextEncoder(
            {
                "text_encoder": lambda: load_clip(clip, dtype, device),
                "text_encoder_2": lambda: load_t5(t5, dtype, device, recipe),
            },
            {"text_encoder": (clip_tokenizer, clip_length), "text_encoder_2": (t5_tokenizer, t5_length)},
            self.text_fingerprint(dtype, recipe, clip_length, t5_length),
        )

    def _t5_length(self, most: int) -> int:
        """Return T5's tokens per caption: the option, else the published number, within the tokenizer's."""
        length = self.config.t5xxl_max_token_length
        if length is None:
            return min(_SCHNELL_TEXT_TOKENS if self._schnell else _DEV_TEXT_TOKENS, most)
        if length > most:
            raise UserError(f"t5xxl_max_token_length {length}: the tokenizer gives at most {most}; lower it")
        return length

    def transformer_inputs(
        self, latents: Tensor, sigmas: Tensor, text: dict[str, Tensor], guidance: float, conditions: Conditions
    ) -> dict[str, Any]:
        """Return the arguments of FluxTransformer2DModel; ``text`` has ``pooled_prompt_embeds`` [B, P] too."""
        tokens, positions = self.image_tokens(latents, conditions)
        return {
            "hidden_states": tokens,
            "timestep": sigmas,
            "guidance": torch.full_like(sigmas, guidance) if self.guidance_input else None,
            "pooled_projections": text["pooled_prompt_embeds"],
            "encoder_hidden_states": text["prompt_embeds"],
            "txt_ids": text_positions(text["prompt_embeds"].shape[1], latents.device),
            "img_ids": positions,
        }

    def image_tokens(self, latents: Tensor, conditions: Conditions) -> tuple[Tensor, Tensor]:
        """Return what the transformer sees of images: tokens [B, N, C] and their positions [N, 3].

        The tokens of ``latents`` [B, 16, h, w] come first.
        """
        return pack_latents(latents), image_positions(*token_grid(latents), latents.device)


class FluxFillFamily(FluxFamily):
    """FLUX.1 Fill."""

    name = "flux_fill"
    negative_text = False
    published = {"guidance_embeds": True, "in_channels": 384, "out_channels": 64}  # noqa: RUF012

    def image_tokens(self, latents: Tensor, conditions: Conditions) -> tuple[Tensor, Tensor]:
        """Return tokens [B, N, 384], noise beside blanked image beside mask, and their positions [N, 3]."""
        masked, mask = _region(conditions)
        height, width = latents.shape[-2:]
        if masked.shape != latents.shape or mask.shape[-2] % height or mask.shape[-1] % width:
            raise UserError(
                f"the region to fill is for {tuple(masked.shape)} latents, mask {tuple(mask.shape)}, the image has "
                f"{tuple(latents.shape)}; use one size for the image and its mask"
            )
        noise, positions = super().image_tokens(latents, conditions)
        known = (pack_latents(masked), pack_mask(mask, mask.shape[-2] // height))
        return torch.cat([noise, *(part.to(noise.dtype) for part in known)], dim=-1), positions


def _region(conditions: Conditions) -> tuple[Tensor, Tensor]:
    """Return masked latents [B, C, h, w] and mask [B, 1, H, W]."""
    if conditions.masked_latents is None or conditions.mask is None:
        raise UserError(
            "FLUX.1 Fill needs an image and a mask: in the dataset inpaint_mask_directory, inpaint_alpha_mask or "
            "inpaint_masks, in a prompt --ci and --mi"
        )
    return conditions.masked_latents, conditions.mask


class FluxKontextFamily(FluxFamily):
    """FLUX.1 Kontext."""

    name = "flux_kontext"

    def image_tokens(self, latents: Tensor, conditions: Conditions) -> tuple[Tensor, Tensor]:
        """Return tokens [B, N + R, 64], image then references, and their positions [N + R, 3]."""
        tokens, positions = super().image_tokens(latents, conditions)
        if not conditions.references:
            return tokens, positions
        reference_tokens, reference_positions = _reference_tokens(conditions.references)
        return (
            torch.cat([tokens, reference_tokens.to(tokens.dtype)], dim=1),
            torch.cat([positions, reference_positions]),
        )


def _reference_tokens(references: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Return tokens [B, R, 64] of ``references``, each [B, 16, h, w], and their positions [R, 3]."""
    tokens = torch.cat([pack_latents(reference) for reference in references], dim=1)
    sizes = [token_grid(reference) for reference in references]
    placed = [image_positions(*size, tokens.device, index=1) for size in sizes]
    for positions, (row, column) in zip(placed, canvas_offsets(sizes), strict=True):
        positions[:, 1] += row  # numbers as arguments: a tensor of them would be copied to the device
        positions[:, 2] += column
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
