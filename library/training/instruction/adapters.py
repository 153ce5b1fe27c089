"""A trained LoRA on a loaded language model."""

from __future__ import annotations

from pathlib import Path

import torch

from library.errors import UserError
from library.files import read_safetensors_header
from library.models.lm_projections import separate_projections
from library.models.transformer_lm import TransformerLM
from networks.injection import AdapterNetwork, LoraNetwork, attach_file
from networks.peft_folder import weight_file
from networks.targets import TARGETS

TEMPLATE = "tandem.chat_template"  # metadata: how the conversations were written that it was trained on


def template_of(path: str | Path) -> str | None:
    """Return the name of the chat template that a LoRA was trained with, None if it does not say.

    Raises:
        UserError: no such file.
    """
    return (read_safetensors_header(weight_file(Path(path))).get("__metadata__") or {}).get(TEMPLATE)


def put_lora_on(
    model: TransformerLM, path: str | Path, strength: float = 1.0, dtype: torch.dtype | None = None
) -> AdapterNetwork:
    """Put a LoRA or DoRA onto ``model`` in place, beside its weights, which may be fp8; return its layers.

    A LoRA's ``set_multiplier(x)`` changes its strength at any time; ``with network.disabled():`` leaves it out.

    Args:
        model: of ``library.models.lm_files.load_lm``; it is frozen, and stays in the mode it is in.
        path: an adapter folder of PEFT's, ``train_lora.py``'s among them, or the safetensors file in it.
        strength: factor on the update.
        dtype: of the LoRA's weights; default: the embedding's.

    Raises:
        UserError: no such file, it is no LoRA of this model, or the model has one already.
    """
    if any(hasattr(module, "lora_A") for module in model.modules()):
        raise UserError(f"{path}: the model has a LoRA already; load the model again, or merge the first one into it")
    separate_projections(model)
    network = attach_file(model, path, TARGETS[model.config.family], dtype or model.embedding.weight.dtype)
    if isinstance(network, LoraNetwork):
        network.set_multiplier(strength)
    elif strength != 1.0:
        raise UserError(f"{path}: a DoRA rescales whole rows and has no strength; leave it at 1")
    return network
