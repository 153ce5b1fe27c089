"""What training, sampling and caching need from a model family, and nothing more.

A family knows where a model's parts lie, loads each when asked, turns (noisy latents, sigmas, text) into a
velocity and draws samples. It is built from the ``[model]`` section alone; building it reads headers and
configs, so that a wrong path is told at once, but no weights. LoRA targets are not here: ``networks.targets``
finds its row by ``name``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import torch
from PIL.Image import Image
from torch import Tensor, nn

from library.conditions import NO_CONDITIONS, ConditionKind, Conditions
from library.nn.attention import Backend
from library.nn.tensor_split import Parts
from library.precision.checkpoint_layouts import Fp8Layout
from library.precision.loading import Fp8Loading
from library.precision.recipe import Fp8Recipe


class ImageEncoder(Protocol):
    """Pixels to normalised latents and back; weights are loaded at the first use."""

    fingerprint: str
    pixel_multiple: int
    latent_factor: int

    @property
    def vae(self) -> nn.Module:
        """The autoencoder itself."""
        ...

    def encode(self, pixels: Tensor) -> Tensor:
        """Return latents [B, C, h, w] fp32 of ``pixels`` [B, 3, H, W] fp32 in [-1, 1]."""
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Return pixels [B, 3, H, W] fp32 of normalised ``latents`` [B, C, h, w]."""
        ...

    def release(self) -> None:
        """Let go of the weights."""
        ...


class TextEncoder(Protocol):
    """Captions to conditioning tensors; weights are loaded at the first use."""

    fingerprint: str
    sees_references: bool  # whether the embeddings depend on the reference pictures too

    def encode(self, captions: list[str], references: list[list[Image]] | None = None) -> list[dict[str, Tensor]]:
        """Return one dict of tensors a caption, without a batch axis, on the CPU.

        Args:
            captions: to encode, in one batch.
            references: of an encoder that sees them: each caption's RGB reference pictures, at the size at which their
                latents are made; what the encoder wants smaller it resizes itself.
        """
        ...

    def release(self) -> None:
        """Let go of the weights."""
        ...

    def load_modules(self, names: Collection[str]) -> nn.Module:
        """Load single encoders, by their names in diffusers' pipeline, for training; each is a child of that name.

        Called with a list of captions the module returns their entries of the conditioning, batched, on its device
        and with gradient. ``enable_gradient_checkpointing()`` makes it recompute its layers in backward.
        """
        ...


class Family(Protocol):
    """One architecture with the paths of one model."""

    name: str
    modelspec_architecture: str  # what ModelSpec calls it, "flux-1-dev"
    patch_size: int  # latents a side that make one token
    latent_channels: int
    conditioning: ConditionKind  # what every sample must bring besides its caption
    most_references: int | None  # pictures that an edit model takes at most; None: any number
    guidance_input: bool  # whether the transformer is told a guidance scale
    sample_guidance: float  # of pictures drawn with the guidance input, unless told otherwise
    masks_padding: bool  # whether texts of different lengths in a batch are padded, and their padding masked
    repeated_blocks: tuple[str, ...]  # class names of the blocks, for regional compilation and sharding
    behind_blocks: tuple[str, ...]  # names of what follows the blocks, for pipelines; none if it cannot be cut

    def fingerprint(self) -> str:
        """Return a fingerprint of the transformer's weights."""
        ...

    def fp8_layout(self) -> Fp8Layout | None:
        """Return what the transformer's files hold in fp8, from their headers; None if nothing."""
        ...

    def load_transformer(
        self,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        backend: Backend = "auto",
        *,
        fp8: Fp8Loading | None = None,
    ) -> nn.Module:
        """Load the transformer, frozen, with Tandem's hot paths.

        ``backend`` is attention's; ``fp8`` says what becomes fp8, and how that computes.
        """
        ...

    def attention_heads(self) -> tuple[int, int]:
        """Return how many heads the transformer's attention has, and their width."""
        ...

    def split_plan(self, processes: int) -> dict[str, Parts]:
        """Return how each linear layer of the transformer that can be split is, for ``processes`` to have it together.

        Raises:
            UserError: the model has no such plan, or its heads or widths do not divide.
        """
        ...

    def load_image_encoder(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> ImageEncoder:
        """Return the image encoder."""
        ...

    def load_text_encoder(
        self, dtype: torch.dtype, device: torch.device | str = "cpu", *, recipe: Fp8Recipe | None = None
    ) -> TextEncoder:
        """Return the text encoder; with ``recipe`` the large one (T5) becomes fp8 as it is loaded."""
        ...

    def blocks(self, transformer: nn.Module) -> list[nn.Module]:
        """Return the transformer's blocks in running order, for checkpointing and offloading."""
        ...

    def predict_velocity(
        self,
        transformer: nn.Module,
        latents: Tensor,
        sigmas: Tensor,
        text: dict[str, Tensor],
        guidance_scale: float,
        conditions: Conditions,
    ) -> Tensor:
        """Return the velocity [B, C, h, w] fp32 at ``latents`` of noise level ``sigmas`` [B] fp32.

        ``conditions`` hold what ``conditioning`` names, with a batch axis.
        """
        ...

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
        """Draw one picture; ``conditions`` hold what ``conditioning`` names, with a batch axis of one."""
        ...
