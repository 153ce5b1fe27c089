"""What training, sampling and caching need from a model family, and nothing more.

A family knows where a model's parts lie, loads each when asked, turns (noisy latents, sigmas, text) into a
velocity and draws samples. It is built from the ``[model]`` section alone; building it reads headers and
configs, so that a wrong path is told at once, but no weights. LoRA targets are not here: ``networks.targets``
finds its row by ``name``.

What every family does with its transformer's files: fingerprint, fp8 layout, loading. A family says the rest.

What drawing a picture during training needs, whatever the family: the bare network, its modes, its precision.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from diffusers.hooks.tensor_parallel import resolve_tp_shard_specs
from PIL.Image import Image
from torch import Tensor, nn

from library.conditions import NO_CONDITIONS, ConditionKind, Conditions
from library.errors import UserError
from library.files import weights_fingerprint
from library.models.weights import KeyMap, load_into
from library.nn.attention import Backend
from library.nn.tensor_split import Parts
from library.precision.checkpoint_layouts import Fp8Layout, WeightFiles
from library.precision.recipe import Fp8Loader, Fp8Recipe


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
    timestep_sampling: str  # how training draws sigmas where ``timestep_sampling = "auto"``
    discrete_flow_shift: float  # the shift of that, where it has one
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
        fp8: Fp8Loader | None = None,
    ) -> nn.Module:
        """Load the transformer, frozen, with Tandem's hot paths.

        ``backend`` is attention's; ``fp8`` says what becomes fp8, and how that computes.
        """
        ...

    @property
    def transformer_config(self) -> dict[str, Any]:
        """The arguments of the transformer's class."""
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


class LocatedFiles(Protocol):
    """Checked locations: weights of the transformer, a file or a folder, and its constructor's arguments."""

    @property
    def transformer(self) -> Any: ...

    @property
    def transformer_config(self) -> dict[str, Any]: ...

    def key_map(self, weights: WeightFiles) -> KeyMap:
        """Return where each transformer parameter lies in ``weights``."""
        ...


class TransformerFiles:
    """Base of the families.

    Attributes:
        transformer_class: diffusers' class.
        masks_padding: whether texts of different lengths in a batch are padded, and their padding masked.
    """

    transformer_class: Any
    masks_padding = False
    timestep_sampling: str
    discrete_flow_shift = 3.0
    _files: LocatedFiles
    _dtype: torch.dtype | None = None  # of the transformer that was loaded last

    def fingerprint(self) -> str:
        """Return a fingerprint of the transformer's weights."""
        return weights_fingerprint(self._files.transformer)

    @property
    def transformer_config(self) -> dict[str, Any]:
        """The arguments of the transformer's class, from its files' headers."""
        return self._files.transformer_config

    def fp8_layout(self) -> Fp8Layout | None:
        """Return what the transformer's files hold in fp8, from their headers; None if nothing."""
        return WeightFiles(self._files.transformer).fp8

    def attention_heads(self) -> tuple[int, int]:
        """Return how many heads the transformer's attention has, and their width."""
        parameters = inspect.signature(self.transformer_class.__init__).parameters
        config = {name: each.default for name, each in parameters.items()} | self._files.transformer_config
        if "n_heads" in config:
            return config["n_heads"], config["dim"] // config["n_heads"]
        return config["num_attention_heads"], config["attention_head_dim"]

    def split_plan(self, processes: int) -> dict[str, Parts]:
        """Return how each linear layer of the blocks is split among ``processes``; no weights are read.

        As diffusers' ``_tp_plan`` says; the modulation, which it leaves whole, by outputs, which are gathered.

        Raises:
            UserError: the class has no such plan, or its heads or widths do not divide.
        """
        return split_plan(self.transformer_class, self._files.transformer_config, processes)

    def load_transformer(
        self,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        backend: Backend = "auto",
        *,
        fp8: Fp8Loader | None = None,
    ) -> Any:
        """Load the transformer, frozen, in eval mode, with Tandem's hot paths.

        ``fp8`` says what becomes fp8; what the file has in fp8 stays so.

        Raises:
            UserError: tensors are missing, unknown or of the wrong shape.
        """
        weights, config = WeightFiles(self._files.transformer), self._files.transformer_config
        build = self.transformer_class.from_config
        key_map = self._files.key_map(weights)
        transformer = load_into(lambda: build(config), weights, key_map, dtype, device, fp8=fp8)
        assert isinstance(transformer, self.transformer_class)
        self._dtype = dtype
        return self._with_hot_paths(transformer, backend)

    def _with_hot_paths(self, transformer: Any, backend: Backend) -> Any:
        """Return ``transformer`` with the family's fast layers."""
        raise NotImplementedError


def split_plan(kind: Any, config: Mapping[str, Any], processes: int) -> dict[str, Parts]:
    """Return :meth:`TransformerFiles.split_plan` of diffusers' class ``kind`` with ``config``; raises as that."""
    if not kind._tp_plan:
        raise UserError(f"tp: diffusers says of no layer of {kind.__name__} how it is split; set tp = 1 and shard")
    with torch.device("meta"):
        empty = kind.from_config(config)
    heads = empty.config.num_attention_heads
    if heads % processes:
        raise UserError(f"tp: {heads} heads cannot be dealt out to {processes} processes; set a divisor")
    try:
        found = resolve_tp_shard_specs(empty, kind._tp_plan, processes)
    except ValueError as error:
        raise UserError(f"tp: {error}; set a divisor") from None
    weights = {name: spec for name, spec in found.items() if name.endswith(".weight")}
    plan = {n.removesuffix(".weight"): Parts(spec.dim, tuple(spec.block_sizes)) for n, spec in weights.items()}
    blocks = {name.split(".")[0] for name in plan}
    for name, layer in empty.named_modules():
        # What is left is the modulation: large weights, one row of numbers each for the whole picture.
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


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Switch every submodule to eval mode and back to the mode it was in."""
    training = [child for child in module.modules() if child.training]
    module.eval()
    try:
        yield
    finally:
        for child in training:
            child.training = True


def drawing_autocast(transformer: Any, dtype: torch.dtype | None) -> AbstractContextManager:
    """Autocast to ``dtype``, the base's (None: the transformer's own), if that is a 16-bit one; else change nothing."""
    dtype = dtype or transformer.dtype
    if dtype not in (torch.bfloat16, torch.float16):
        return nullcontext()
    return torch.autocast(transformer.device.type, dtype)


def check_size(width: int, height: int, multiple: int) -> None:
    """Raise a UserError unless both sides are multiples of ``multiple``."""
    if width % multiple or height % multiple:
        raise UserError(f"sample of {width} x {height} pixels: both must be multiples of {multiple}")


def dtype_name(dtype: torch.dtype) -> str:
    """Return "bfloat16" for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")
