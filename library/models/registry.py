"""The model families, a row each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from library.config.schema import ModelConfig
from library.models.flux import FluxFamily
from library.models.flux_fill import FluxFillFamily
from library.models.flux_kontext import FluxKontextFamily
from library.models.protocol import Family
from library.models.qwen_edit import QwenImageEditFamily, QwenImageEditPlusFamily
from library.models.qwen_image import QwenImageFamily

FAMILIES: Mapping[str, Callable[[ModelConfig], Family]] = {
    "flux": FluxFamily,
    "flux_fill": FluxFillFamily,
    "flux_kontext": FluxKontextFamily,
    "qwen_image": QwenImageFamily,
    "qwen_image_edit": QwenImageEditFamily,
    "qwen_image_edit_plus": QwenImageEditPlusFamily,
}


def model_family(config: ModelConfig) -> Family:
    """Return the family that ``config`` names, its paths checked and nothing loaded.

    Raises:
        UserError: a path is missing or leads to another kind of model.
    """
    return FAMILIES[config.model_type](config)
