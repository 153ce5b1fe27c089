"""FLUX.2 (https://github.com/black-forest-labs/flux2): klein 4B and 9B, base and distilled, and dev.

The transformer sees an image as a sequence: 2 x 2 latents of 32 channels are one token of 128 numbers. It takes the
noise level sigma and the text and returns the velocity noise - image per token. klein has no guidance input: base is
steered by a negative text and true classifier-free guidance, the distilled model takes none and four steps. dev, which
is distilled for guidance, takes a guidance scale and no negative text.

Every FLUX.2 also edits. Tokens of reference images, any number of any sizes, follow those of the image, clean at every
noise level; what comes out for them is cut off. diffusers' pipelines scale a reference of more than one megapixel down
to one and leave smaller ones as they are: a dataset's ``no_resize_control`` with ``control_resolution = 1024``. The
text encoder does not look at them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from diffusers import DiffusionPipeline, Flux2KleinPipeline, Flux2Pipeline, Flux2Transformer2DModel
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu
from torch import Tensor, nn

import library.models.flux2.files as flux2_files
import library.models.flux2.model as flux2_model
from library.conditions import ConditionKind, Conditions
from library.errors import UserError
from library.models.family import Family
from library.models.flux2.model import image_positions, text_positions
from library.models.flux2.text import (
    MOST_TOKENS,
    QWEN_LAYERS,
    DevTextEncoder,
    KleinTextEncoder,
    load_mistral,
    load_mistral_tokenizer,
    mistral_width,
    published_mistral,
)
from library.models.flux2.vae import PUBLISHED_FLUX2, Flux2ImageEncoder
from library.models.latents import pack_latents
from library.models.qwen3 import load_qwen3, published_qwen3, qwen3_width
from library.models.text import TextEncoder, load_qwen_tokenizer
from library.precision.recipe import Recipe


class Flux2Family(Family):
    """What klein and dev share.

    Attributes:
        text_width: path of a text encoder -> the width of its layers.
    """

    text_width: Callable[[Path], int]

    layout = flux2_files.FILES
    transformer_class = Flux2Transformer2DModel
    depths = ("num_layers", "num_single_layers")
    image_encoder = Flux2ImageEncoder
    published_scheduler = {"shift": 3.0, "use_dynamic_shifting": True}  # noqa: RUF012
    latent_channels = 32
    timestep_sampling = "flux2_shift"
    repeated_blocks = ("Flux2TransformerBlock", "Flux2SingleTransformerBlock")
    behind_blocks = ("norm_out", "proj_out")
    optimise_forward = staticmethod(flux2_model.optimise_forward)

    @staticmethod
    def blocks(transformer: Any) -> list[nn.Module]:
        """Return double blocks, then single blocks."""
        return [*transformer.transformer_blocks, *transformer.single_transformer_blocks]

    @classmethod
    def example_inputs(cls, config: Any, tokens: int, text: int) -> dict[str, Any]:
        """Return the arguments of a transformer of ``config``; one reference is as large as the image."""
        seen = tokens * (2 if cls.conditioning == "references" else 1)
        inputs = {
            "hidden_states": torch.randn(1, seen, config.in_channels),
            "encoder_hidden_states": torch.randn(1, text, config.joint_attention_dim),
            "timestep": torch.rand(1),
            "img_ids": torch.zeros(seen, 4),
            "txt_ids": torch.zeros(text, 4),
            "return_dict": False,
        }
        return inputs | ({"guidance": torch.ones(1)} if config.guidance_embeds else {})

    def check_variant(self) -> None:
        """Refuse dev where klein is asked for, and the other way round: dev has a guidance input."""
        guided = bool(self.files.transformer_config.get("guidance_embeds", True))
        if guided is not self.guidance_input:
            other = self.name.replace("dev", "klein") if self.guidance_input else self.name.replace("klein", "dev")
            has = "a" if guided else "no"
            raise UserError(
                f"{self.files.transformer}: a transformer with {has} guidance input, which is FLUX.2 "
                f'{"dev" if guided else "klein"}; set model_type = "{other}"'
            )
        self.latent_channels = self.files.transformer_config.get("in_channels", 128) // self.patch_size**2

    def check_text_encoders(self) -> None:
        """Compare three layers of the language model with what the transformer takes; headers only."""
        (path,), (part,) = self.files.text_encoders, self.layout.text_encoders
        width, wanted = self.text_width(path), self.files.transformer_config.get("joint_attention_dim", 15360)
        if 3 * width != wanted:
            raise UserError(
                f"{path}: three layers of {width} numbers, the transformer takes {wanted}; give {part.published} as "
                "text_encoder"
            )

    def transformer_inputs(
        self, latents: Tensor, sigmas: Tensor, text: dict[str, Tensor], guidance: float, conditions: Conditions
    ) -> dict[str, Any]:
        """Return the arguments of Flux2Transformer2DModel; references are latents [B, 32, h_i, w_i] each."""
        images = [latents, *conditions.references]
        return {
            "hidden_states": torch.cat([pack_latents(image.to(latents.dtype)) for image in images], dim=1),
            "timestep": sigmas,
            "guidance": torch.full_like(sigmas, guidance) if self.guidance_input else None,
            "encoder_hidden_states": text["prompt_embeds"],
            "txt_ids": text_positions(text["prompt_embeds"].shape[1], latents.device),
            "img_ids": image_positions(_sizes(images), latents.device),
        }

    def pipeline_text(self, text: dict[str, Tensor], transformer: Any) -> dict[str, Any]:
        """Return the embeddings in fp32."""
        return {"prompt_embeds": text["prompt_embeds"].to(transformer.device, torch.float32)}

    @contextmanager
    def conditioned(self, transformer: nn.Module, conditions: Conditions, text: dict[str, Tensor]) -> Iterator[None]:
        """Put the references behind the tokens that the pipeline gives, which takes their output off again."""
        references = conditions.references

        def add(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            tokens, ids = kwargs["hidden_states"], kwargs["img_ids"]
            shown = [pack_latents(image.to(tokens.dtype)) for image in references]
            places = image_positions(_sizes(references), ids.device, first=1).to(ids.dtype).expand(len(ids), -1, -1)
            return args, kwargs | {
                "hidden_states": torch.cat([tokens, *shown], dim=1),
                "img_ids": torch.cat([ids, places], dim=1),
            }

        if not references:
            yield
            return
        with transformer.register_forward_pre_hook(add, with_kwargs=True, prepend=True):
            yield

    def sampling_sigmas(self, steps: int, tokens: int, shift: float | None = None) -> list[float]:
        """As of every family; the pipelines' shift follows the number of steps too (``compute_empirical_mu``)."""
        if shift is None and self.scheduler().config.use_dynamic_shifting:
            shift = math.exp(compute_empirical_mu(tokens, steps))
        return super().sampling_sigmas(steps, tokens, shift)


def _sizes(images: Any) -> tuple[tuple[int, int], ...]:
    """Return rows and columns of each image's tokens."""
    return tuple((image.shape[-2] // 2, image.shape[-1] // 2) for image in images)


def _with_known_latents(pipeline: Any) -> DiffusionPipeline:
    """Return the pipeline with a stand-in for its autoencoder, by whose statistics it would denormalise latents.

    Ours does that itself; these change nothing.
    """
    norm = SimpleNamespace(running_mean=torch.zeros(1), running_var=torch.ones(1))
    pipeline.vae = SimpleNamespace(bn=norm, config=SimpleNamespace(batch_norm_eps=0.0))
    return pipeline


class KleinFamily(Flux2Family):
    """FLUX.2 klein."""

    name = "flux2_klein"
    targets = flux2_files.FLUX2_TARGETS
    published = {  # of 4B  # noqa: RUF012
        "num_layers": 5,
        "num_single_layers": 20,
        "num_attention_heads": 24,
        "joint_attention_dim": 7680,
        "guidance_embeds": False,
    }
    published_pipeline = "Flux2KleinPipeline"
    text_width = staticmethod(qwen3_width)

    @classmethod
    def published_like(cls, name: str) -> tuple[Mapping[str, Any], dict[str, Callable[[], Any]]]:
        """Return klein 9B with Qwen3-8B for a file that is called so, else 4B with Qwen3-4B."""
        if "9b" not in name.lower():
            return super().published_like(name)
        sizes = {"num_layers": 8, "num_single_layers": 24, "num_attention_heads": 32, "joint_attention_dim": 12288}
        return {**cls.published, **sizes}, cls.published_parts() | published_qwen3("8B", QWEN_LAYERS[-1])

    @staticmethod
    def published_parts() -> dict[str, Callable[[], Any]]:
        """Return FLUX.2's autoencoder and Qwen3-4B."""
        parts = published_qwen3("4B", QWEN_LAYERS[-1])
        return {"vae": lambda: Flux2ImageEncoder.autoencoder(**PUBLISHED_FLUX2), **parts}

    def check_variant(self) -> None:
        """As of every FLUX.2; 4B and 9B have names of their own."""
        super().check_variant()
        size = {7680: "-4b", 12288: "-9b"}.get(self.files.transformer_config.get("joint_attention_dim", 0), "")
        self.modelspec_architecture = self.targets.architecture + size

    def load_text_encoder(
        self, dtype: torch.dtype, device: torch.device | str = "cpu", *, recipe: Recipe | None = None
    ) -> TextEncoder:
        """Return Qwen3."""
        (path,) = self.files.text_encoders
        fingerprint = self.text_fingerprint(dtype, recipe, "flux2_klein", MOST_TOKENS)
        tokenizer = load_qwen_tokenizer(self.files.tokenizers[0], "<|im_start|>", "Qwen3")
        load = lambda: load_qwen3(path, QWEN_LAYERS[-1], dtype, device, recipe)  # noqa: E731
        return KleinTextEncoder(load, tokenizer, fingerprint)

    def pipeline(self, transformer: Any, scheduler: Any, conditions: Conditions) -> DiffusionPipeline:
        """Return Flux2KleinPipeline, for edit models too: :meth:`conditioned` adds what they see."""
        return _with_known_latents(Flux2KleinPipeline(scheduler, None, None, None, transformer))

    def guidance_inputs(self, guidance: float, cfg: float) -> dict[str, Any]:
        """Return the guidance by the negative text."""
        return {"guidance_scale": cfg}


class KleinEditFamily(KleinFamily):
    """FLUX.2 klein with reference images."""

    name = "flux2_klein_edit"
    targets = flux2_files.FLUX2_EDIT_TARGETS
    conditioning: ConditionKind = "references"


class DevFamily(Flux2Family):
    """FLUX.2 dev."""

    name = "flux2_dev"
    layout = flux2_files.DEV_FILES
    targets = flux2_files.DEV_TARGETS
    published_pipeline = "Flux2Pipeline"
    text_width = staticmethod(mistral_width)
    guidance_input = True
    sample_guidance = 4.0  # the pipeline's default

    @staticmethod
    def published_parts() -> dict[str, Callable[[], Any]]:
        """Return FLUX.2's autoencoder and Mistral Small 3."""
        return {"vae": lambda: Flux2ImageEncoder.autoencoder(**PUBLISHED_FLUX2), **published_mistral()}

    def load_text_encoder(
        self, dtype: torch.dtype, device: torch.device | str = "cpu", *, recipe: Recipe | None = None
    ) -> TextEncoder:
        """Return Mistral."""
        (path,) = self.files.text_encoders
        fingerprint = self.text_fingerprint(dtype, recipe, "flux2_dev", MOST_TOKENS)
        tokenizer = load_mistral_tokenizer(self.files.tokenizers[0])
        return DevTextEncoder(lambda: load_mistral(path, dtype, device, recipe), tokenizer, fingerprint)

    def pipeline(self, transformer: Any, scheduler: Any, conditions: Conditions) -> DiffusionPipeline:
        """Return Flux2Pipeline, for editing too: :meth:`conditioned` adds what it sees."""
        return _with_known_latents(Flux2Pipeline(scheduler, None, None, None, transformer))

    def guidance_inputs(self, guidance: float, cfg: float) -> dict[str, Any]:
        """Return the guidance input's; refuse a negative text."""
        if cfg != 1.0:
            raise UserError("FLUX.2 dev knows no negative prompt; remove --n and --l (negative_prompt, scale)")
        return {"guidance_scale": guidance}


class DevEditFamily(DevFamily):
    """FLUX.2 dev with reference images."""

    name = "flux2_dev_edit"
    targets = flux2_files.DEV_EDIT_TARGETS
    conditioning: ConditionKind = "references"
