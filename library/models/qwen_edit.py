"""Qwen-Image-Edit and Edit-2509 / Edit-2511 ("Edit Plus"): Qwen-Image that sees reference pictures.

The pictures come in twice: their latents stand behind the tokens of the picture that is painted, clean at every noise
level, each picture with its own rows and columns; and the text encoder looks at them while it reads the caption. Edit
takes one, Edit Plus any number (it was trained with up to three), of any sizes. The loss counts the painted picture
alone. Edit-2511 is Edit Plus with ``zero_cond_t`` set: reference tokens are modulated as at timestep 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from library.conditions import NO_CONDITIONS, ConditionKind, Conditions
from library.config.schema import ModelConfig
from library.errors import UserError
from library.models.flux_tokens import pack_latents
from library.models.qwen_image import QwenImageFamily, grid


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
