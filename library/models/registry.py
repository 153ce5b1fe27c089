"""The model families, a row each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from library.config.schema import ModelConfig
from library.models.flux import FluxFamily
from library.models.protocol import Family

FAMILIES: Mapping[str, Callable[[ModelConfig], Family]] = {
    "flux": FluxFamily,
}


def model_family(config: ModelConfig) -> Family:
    """Return the family that ``config`` names, its paths checked and nothing loaded.

    Raises:
        UserError: a path is missing or leads to another kind of model.
    """
    return FAMILIES[config.model_type](config)
