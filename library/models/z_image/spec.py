"""Z-Image (https://github.com/Tongyi-MAI/Z-Image): the family.

The transformer sees one sequence: a picture's tokens, 2 x 2 latents of FLUX's autoencoder each, then the caption's.
It takes lists, one entry a sample, so that captions keep their lengths; it is told 1 - sigma, 0 for noise and 1 for the
picture, and returns image - noise, the velocity's negative. There is no guidance input: pictures are steered by a
negative prompt and true classifier-free guidance (Turbo, which is distilled, takes none).
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from PIL.Image import Image
from torch import Tensor, nn

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
from library.models.vae import VaeImageEncoder, computed_as, load_vae, vae_config
from library.models.z_image.files import ZImageFiles, locate
from library.models.z_image.model import optimise_forward
from library.models.z_image.text import MOST_TOKENS, ZImageTextEncoder, load_z_image_text, load_z_image_tokenizer
from library.nn.attention import Backend
from library.precision.checkpoint_layouts import WeightFiles
from library.precision.recipe import Fp8Recipe


class ZImageFamily(TransformerFiles):
    """Z-Image from a diffusers folder or ComfyUI's split files; see ``library.models.z_image.files``."""

    name = "z_image"
    timestep_sampling = "shift"  # static, by discrete_flow_shift, as Z-Image-Turbo's scheduler_config.json
    modelspec_architecture = "Z-Image"
    conditioning: ConditionKind = "none"
    most_references: int | None = None
    guidance_input = False
    sample_guidance = 1.0  # of no meaning
    transformer_class = ZImageTransformer2DModel
    masks_padding = True
    patch_size = 2
    repeated_blocks: tuple[str, ...] = ("ZImageTransformerBlock",)
    behind_blocks: tuple[str, ...] = ()  # captions keep their lengths, so pieces of a batch are of different shapes

    def __init__(self, config: ModelConfig) -> None:
        """Find and check the files of ``config``; nothing is loaded.

        Raises:
            UserError: a part is missing or is another kind of model.
        """
        self._files: ZImageFiles = locate(config)
        self.latent_channels: int = self._files.transformer_config.get("in_channels", 16)

    def _with_hot_paths(self, transformer: Any, backend: Backend) -> Any:
        return optimise_forward(transformer, backend)

    def load_image_encoder(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> VaeImageEncoder:
        """Return the image encoder; its weights are loaded at the first use. On a CPU it computes in fp32."""
        path = self._files.vae
        used, mark = computed_as(path, dtype, device)
        return VaeImageEncoder(lambda: load_vae(path, used, device), vae_config(path), mark, self.patch_size)

    def load_text_encoder(
        self, dtype: torch.dtype, device: torch.device | str = "cpu", *, recipe: Fp8Recipe | None = None
    ) -> ZImageTextEncoder:
        """Return the text encoder; the tokenizer is loaded now, weights at the first caption.

        Args:
            dtype, device: of weights and products.
            recipe: how Qwen3 becomes fp8; None leaves it as its file has it.

        Raises:
            UserError: the tokenizer cannot be had; the file is in fp8 already.
        """
        path = self._files.text_encoder
        if recipe is not None and WeightFiles(path).fp8 is not None:
            raise UserError(f"fp8_text_encoder: {path} is in fp8 already and is used as it is; remove fp8_text_encoder")
        mark = f"{fingerprint(path)}-{self.name}-{MOST_TOKENS}-{dtype_name(dtype)}"
        mark += f"-{recipe.describe()}" if recipe is not None else ""
        tokenizer = load_z_image_tokenizer(self._files.tokenizer)
        return ZImageTextEncoder(lambda: load_z_image_text(path, dtype, device, recipe), tokenizer, mark)

    def blocks(self, transformer: Any) -> list[nn.Module]:
        """Return the main layers in running order; the four refiners in front of them are left where they are."""
        return [*transformer.layers]

    def predict_velocity(
        self,
        transformer: nn.Module,
        latents: Tensor,
        sigmas: Tensor,
        text: dict[str, Tensor],
        guidance_scale: float = 1.0,
        conditions: Conditions = NO_CONDITIONS,
    ) -> Tensor:
        """Return the velocity noise - image at ``latents``, [B, 16, h, w] fp32.

        Args:
            transformer: from :meth:`load_transformer`, possibly wrapped (DDP, compile); it is only called.
            latents: noisy latents [B, 16, h, w], h and w even.
            sigmas: noise levels [B] in (0, 1]; the timestep stays fp32.
            text: ``prompt_embeds`` [B, L, D] and ``prompt_embeds_mask`` [B, L], true for real tokens; without it all
                are. With it the host reads the captions' lengths back.
            guidance_scale, conditions: of no meaning here.
        """
        embeds, mask = text["prompt_embeds"], text.get("prompt_embeds_mask")
        lengths = [embeds.shape[1]] * len(embeds) if mask is None else mask.sum(dim=1).tolist()
        if not torch.is_autocast_enabled(latents.device.type):
            # Without autocast nobody else brings activations to the dtype of the weights.
            dtype = self._dtype or latents.dtype
            latents, embeds = latents.to(dtype), embeds.to(dtype)
        output = transformer(
            list(latents.unsqueeze(2)),
            1 - sigmas.to(device=latents.device, dtype=torch.float32),
            [caption[:length] for caption, length in zip(embeds, lengths, strict=True)],
            return_dict=False,
        )[0]
        return -torch.stack([velocity.float() for velocity in output]).squeeze(2)

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
        """Draw one picture with diffusers' ZImagePipeline and the running transformer.

        The same seed gives the same picture. Noise and solver work in fp32; a 16-bit transformer runs under
        autocast, so that LoRA weights of any dtype fit. The training mode is put back afterwards and nothing
        keeps a reference to the transformer.

        Args:
            transformer: the network, possibly with LoRA; DDP and compile wrappers are taken off.
            image_encoder: decodes the result.
            text: ``prompt_embeds`` [L, D], with or without a batch axis of one and its mask.
            width, height: pixels, multiples of ``image_encoder.pixel_multiple``.
            steps: at least 1.
            guidance, conditions: of no meaning here.
            seed: of the noise.
            negative_text, cfg: what to steer away from, with ``cfg`` above 1 (two evaluations a step). Counted as
                everywhere; the pipeline's own ``guidance_scale`` is less by 1.

        Raises:
            UserError: the size is not possible.
        """
        check_size(width, height, image_encoder.pixel_multiple)
        plain = unwrapped(transformer)
        pipeline = ZImagePipeline(self._scheduler(), None, None, None, plain)
        pipeline.vae_scale_factor = image_encoder.latent_factor  # read from the VAE otherwise, which stays outside
        pipeline.set_progress_bar_config(disable=True)
        steered = negative_text is not None and cfg > 1
        with torch.no_grad(), evaluating(plain), drawing_autocast(plain, self._dtype):
            latents = pipeline(
                prompt_embeds=_pipeline_text(text, plain),
                negative_prompt_embeds=_pipeline_text(negative_text, plain) if steered and negative_text else None,
                guidance_scale=cfg - 1 if steered else 0.0,
                width=width,
                height=height,
                num_inference_steps=steps,
                generator=torch.Generator().manual_seed(seed),
                output_type="latent",
                return_dict=False,
            )[0]
        return pipeline.image_processor.postprocess(image_encoder.decode(latents), output_type="pil")[0]

    def _scheduler(self) -> FlowMatchEulerDiscreteScheduler:
        """Return the folder's scheduler, or with single files Z-Image-Turbo's."""
        if self._files.scheduler is not None:
            return FlowMatchEulerDiscreteScheduler.from_pretrained(self._files.scheduler)
        return FlowMatchEulerDiscreteScheduler(shift=3.0)


def _pipeline_text(text: dict[str, Tensor], transformer: Any) -> list[Tensor]:
    embeds = text["prompt_embeds"]
    return [(embeds[0] if embeds.ndim == 3 else embeds).to(transformer.device, transformer.dtype)]
