"""Qwen-Image (https://github.com/QwenLM/Qwen-Image): the family.

The transformer sees a picture as a sequence: 2 x 2 latents of 16 channels are one token of 64 numbers, placed at its
row and column counted from the picture's middle; text goes on where the picture ends. It is told the noise level sigma
and the text with its mask, and returns the velocity noise - image per token. There is no guidance input: pictures are
steered by a negative prompt and true classifier-free guidance.

Qwen-Image-Edit and Edit-2509 / Edit-2511 ("Edit Plus"): Qwen-Image that sees reference pictures.

The pictures come in twice: their latents stand behind the tokens of the picture that is painted, clean at every noise
level, each picture with its own rows and columns; and the text encoder looks at them while it reads the caption. Edit
takes one, Edit Plus any number (it was trained with up to three), of any sizes. The loss counts the painted picture
alone. Edit-2511 is Edit Plus with ``zero_cond_t`` set: reference tokens are modulated as at timestep 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImagePipeline, QwenImageTransformer2DModel
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
from library.models.flux.model import pack_latents, unpack_latents
from library.models.qwen_image.files import QwenFiles, locate
from library.models.qwen_image.model import optimise_forward
from library.models.qwen_image.text import (
    MOST_TOKENS,
    TEMPLATES,
    QwenTextEncoder,
    load_qwen_text,
    load_qwen_tokenizer,
    picture_processor,
)
from library.models.qwen_image.vae import QwenVaeImageEncoder, load_qwen_vae, qwen_vae_config
from library.models.vae import computed_as
from library.nn.attention import Backend
from library.precision.checkpoint_layouts import WeightFiles
from library.precision.recipe import Fp8Recipe


class QwenImageFamily(TransformerFiles):
    """Qwen-Image from a diffusers folder or ComfyUI's split files; see ``library.models.qwen_image.files``."""

    name = "qwen_image"
    timestep_sampling = "qwen_shift"
    modelspec_architecture = "Qwen-Image"
    conditioning: ConditionKind = "none"
    most_references: int | None = None
    guidance_input = False
    sample_guidance = 1.0  # of no meaning
    transformer_class = QwenImageTransformer2DModel
    masks_padding = True
    patch_size = 2
    repeated_blocks: tuple[str, ...] = ("QwenImageTransformerBlock",)
    behind_blocks: tuple[str, ...] = ("norm_out", "proj_out")

    def __init__(self, config: ModelConfig) -> None:
        """Find and check the files of ``config``; nothing is loaded.

        Raises:
            UserError: a part is missing or is another kind of model.
        """
        self._files: QwenFiles = locate(config)
        self.latent_channels: int = self._files.transformer_config.get("in_channels", 64) // self.patch_size**2

    def _with_hot_paths(self, transformer: Any, backend: Backend) -> Any:
        return optimise_forward(transformer, backend)

    def load_image_encoder(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> QwenVaeImageEncoder:
        """Return the image encoder; its weights are loaded at the first use. On a CPU it computes in fp32."""
        path = self._files.vae
        used, mark = computed_as(path, dtype, device)
        return QwenVaeImageEncoder(
            lambda: load_qwen_vae(path, used, device), qwen_vae_config(path), mark, self.patch_size
        )

    def load_text_encoder(
        self, dtype: torch.dtype, device: torch.device | str = "cpu", *, recipe: Fp8Recipe | None = None
    ) -> QwenTextEncoder:
        """Return the text encoder; the tokenizer is loaded now, weights at the first caption.

        Args:
            dtype, device: of weights and products.
            recipe: how Qwen2.5-VL becomes fp8; None leaves it as its file has it.

        Raises:
            UserError: the tokenizer cannot be had; the file is in fp8 already.
        """
        path = self._files.text_encoder
        if recipe is not None and WeightFiles(path).fp8 is not None:
            raise UserError(f"fp8_text_encoder: {path} is in fp8 already and is used as it is; remove fp8_text_encoder")
        tokenizer = load_qwen_tokenizer(self._files.tokenizer)
        template = TEMPLATES[self.name]
        pictures = picture_processor(self._files.processor) if template.picture is not None else None
        token = tokenizer.convert_tokens_to_ids("<|image_pad|>") if pictures is not None else None
        mark = f"{fingerprint(path)}-{self.name}-{MOST_TOKENS}-{dtype_name(dtype)}"
        mark += f"-{recipe.describe()}" if recipe is not None else ""
        return QwenTextEncoder(
            lambda: load_qwen_text(path, dtype, device, recipe, picture_token=token),
            tokenizer,
            template,
            mark,
            pictures,
        )

    def blocks(self, transformer: Any) -> list[nn.Module]:
        """Return the blocks in running order."""
        return [*transformer.transformer_blocks]

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
            sigmas: noise levels [B] in (0, 1]; passed on in fp32.
            text: ``prompt_embeds`` [B, L, D] and ``prompt_embeds_mask`` [B, L], true for real tokens; without it all
                are, and attention is masked by nothing, which the fastest kernels need.
            guidance_scale: of no meaning here.
            conditions: reference pictures, of edit models: latents [B, 16, h_i, w_i] each.
        """
        batch, _, height, width = latents.shape
        embeds, mask = text["prompt_embeds"], text.get("prompt_embeds_mask")
        pictures = [latents, *conditions.references]
        tokens = torch.cat([pack_latents(picture.to(latents.dtype)) for picture in pictures], dim=1)
        if not torch.is_autocast_enabled(latents.device.type):
            # Without autocast nobody else brings activations to the dtype of the weights.
            dtype = self._dtype or tokens.dtype
            tokens, embeds = tokens.to(dtype), embeds.to(dtype)
        output = transformer(
            hidden_states=tokens,
            timestep=sigmas.to(device=latents.device, dtype=torch.float32),
            encoder_hidden_states=embeds,
            encoder_hidden_states_mask=None if mask is None else mask.bool(),
            img_shapes=[[grid(picture) for picture in pictures]] * batch,
            return_dict=False,
        )[0]
        return unpack_latents(output[:, : height * width // 4].float(), height, width)

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
        """Draw one picture with diffusers' QwenImagePipeline and the running transformer.

        The same seed gives the same picture. Noise and solver work in fp32; a 16-bit transformer runs under
        autocast, so that LoRA weights of any dtype fit. The training mode is put back afterwards and nothing
        keeps a reference to the transformer.

        Args:
            transformer: the network, possibly with LoRA; DDP and compile wrappers are taken off.
            image_encoder: decodes the result.
            text: ``prompt_embeds`` [L, D] and ``prompt_embeds_mask`` [L], with or without a batch axis of one.
            width, height: pixels, multiples of ``image_encoder.pixel_multiple``.
            steps: at least 2: the schedule is stretched between the first and the last.
            guidance: of no meaning here.
            seed: of the noise.
            negative_text, cfg: what to steer away from, with ``cfg`` above 1 (two evaluations a step).
            conditions: reference pictures, of edit models.

        Raises:
            UserError: the size or number of steps is not possible.
        """
        check_size(width, height, image_encoder.pixel_multiple)
        scheduler = self._scheduler()
        if steps < 2 and scheduler.config.shift_terminal:
            raise UserError(f"sample of {steps} step: Qwen-Image's schedule has at least two; set --s 2 or more")
        plain = unwrapped(transformer)
        pipeline = QwenImagePipeline(scheduler, None, None, None, plain)
        pipeline.vae_scale_factor = image_encoder.latent_factor  # read from the VAE otherwise, which stays outside
        pipeline.set_progress_bar_config(disable=True)
        inputs = _pipeline_text(text, "", plain.device)
        if negative_text is not None:
            inputs |= _pipeline_text(negative_text, "negative_", plain.device)
        with torch.no_grad(), evaluating(plain), drawing_autocast(plain, self._dtype), self._seeing(plain, conditions):
            packed = pipeline(
                **inputs,
                width=width,
                height=height,
                num_inference_steps=steps,
                true_cfg_scale=cfg,
                max_sequence_length=MOST_TOKENS,
                generator=torch.Generator().manual_seed(seed),
                output_type="latent",
                return_dict=False,
            )[0]
        factor = image_encoder.latent_factor
        pixels = image_encoder.decode(unpack_latents(packed, height // factor, width // factor))
        return pipeline.image_processor.postprocess(pixels, output_type="pil")[0]

    def _seeing(self, transformer: Any, conditions: Conditions) -> AbstractContextManager:
        """Let the transformer see what ``conditions`` hold while a picture is drawn; here there is nothing."""
        return nullcontext()

    def _scheduler(self) -> FlowMatchEulerDiscreteScheduler:
        """Return the folder's scheduler, or with single files the published one."""
        if self._files.scheduler is not None:
            return FlowMatchEulerDiscreteScheduler.from_pretrained(self._files.scheduler)
        return FlowMatchEulerDiscreteScheduler(
            shift=1.0,
            use_dynamic_shifting=True,
            base_image_seq_len=256,
            max_image_seq_len=8192,
            base_shift=0.5,
            max_shift=0.9,
            shift_terminal=0.02,
            time_shift_type="exponential",
        )


def grid(latents: Tensor) -> tuple[int, int, int]:
    """Return frames, rows and columns of the tokens of ``latents`` [B, C, h, w]."""
    return 1, latents.shape[-2] // 2, latents.shape[-1] // 2


def _pipeline_text(text: dict[str, Tensor], prefix: str, device: torch.device) -> dict[str, Tensor]:
    embeds, mask = text["prompt_embeds"], text["prompt_embeds_mask"]
    embeds = embeds if embeds.ndim == 3 else embeds.unsqueeze(0)
    mask = mask if mask.ndim == 2 else mask.unsqueeze(0)
    # fp32, because the pipeline draws its noise in the dtype of the text: one noise for every dtype.
    return {
        f"{prefix}prompt_embeds": embeds.to(device, torch.float32),
        f"{prefix}prompt_embeds_mask": mask.to(device),
    }


class QwenImageEditFamily(QwenImageFamily):
    """Qwen-Image-Edit: one reference picture a caption."""

    name = "qwen_image_edit"
    modelspec_architecture = "Qwen-Image-Edit"
    conditioning: ConditionKind = "references"
    most_references: int | None = 1

    def predict_velocity(
        self,
        transformer: nn.Module,
        latents: Tensor,
        sigmas: Tensor,
        text: dict[str, Tensor],
        guidance_scale: float = 1.0,
        conditions: Conditions = NO_CONDITIONS,
    ) -> Tensor:
        """Return the velocity at ``latents``; ``conditions`` hold the reference pictures' latents.

        Raises:
            UserError: there are more pictures than the model takes, or none where it takes one.
        """
        self._check(conditions)
        return super().predict_velocity(transformer, latents, sigmas, text, guidance_scale, conditions)

    def _check(self, conditions: Conditions) -> None:
        count = len(conditions.references)
        if self.most_references is not None and count != self.most_references:
            remedy = 'use model_type = "qwen_image_edit_plus"' if count else "give control_directory"
            raise UserError(f"{self.name}: takes one reference picture a sample, found {count}; {remedy}")

    @contextmanager
    def _seeing(self, transformer: Any, conditions: Conditions) -> Iterator[None]:
        """Put the references behind the tokens that the pipeline gives, and take their output off again."""
        self._check(conditions)
        references = [picture.to(transformer.device) for picture in conditions.references]
        painted: list[int] = []

        def add(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            tokens = kwargs["hidden_states"]
            painted[:] = [tokens.shape[1]]
            shown = [pack_latents(picture.to(tokens.dtype)) for picture in references]
            shapes = [[*sample, *(grid(picture) for picture in references)] for sample in kwargs["img_shapes"]]
            return args, kwargs | {"hidden_states": torch.cat([tokens, *shown], dim=1), "img_shapes": shapes}

        def remove(_: nn.Module, args: tuple[Any, ...], output: tuple[Tensor]) -> tuple[Tensor]:
            return (output[0][:, : painted[0]],)

        hooks = [
            transformer.register_forward_pre_hook(add, with_kwargs=True, prepend=True),
            transformer.register_forward_hook(remove),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class QwenImageEditPlusFamily(QwenImageEditFamily):
    """Qwen-Image-Edit-2509 and 2511: any number of reference pictures."""

    name = "qwen_image_edit_plus"
    most_references: int | None = None

    def __init__(self, config: ModelConfig) -> None:
        """Find and check the files of ``config``; see :class:`QwenImageFamily`."""
        super().__init__(config)
        newest = self._files.transformer_config.get("zero_cond_t", False)
        self.modelspec_architecture = "Qwen-Image-Edit-2511" if newest else "Qwen-Image-Edit-Plus"
