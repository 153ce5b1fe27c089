"""ERNIE-Image (https://github.com/baidu/ERNIE-Image): base, which is trained, and Turbo, one architecture.

The transformer sees one sequence: an image's tokens, 2 x 2 latents of FLUX.2's autoencoder each, then the caption's.
It takes the noise level sigma and returns the velocity noise - image as an image of patches. There is no guidance
input: images of base are steered by a negative prompt and true classifier-free guidance, Turbo, which is distilled to
eight steps, takes none. Both have one scheduler; a model is taken for Turbo where its name says so.

A caption is given as it is, without a template. The pipeline's prompt enhancer, a language model beside the text
encoder that rewrites prompts, is not used.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from diffusers import ErnieImageTransformer2DModel
from torch import Tensor, nn
from transformers import Ministral3Config, Ministral3Model, PreTrainedTokenizerBase

import library.models.ernie_image.model as ernie_image_model
from library.conditions import Conditions
from library.models.flux.vae import Flux2ImageEncoder
from library.models.mistral import HEAD_DIM, MistralFamily, MistralKind
from library.models.text import LanguageModelEncoder

_MINISTRAL = MistralKind(  # text_encoder/config.json of baidu/ERNIE-Image
    "Ministral 3",
    "ERNIE-Image",
    "ministral-3-3b.safetensors",
    Ministral3Model,
    Ministral3Config,
    {
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    (131072, 3072, 9216, 25, 32, 8, HEAD_DIM),
    ("[INST]", "[/INST]"),
)


class ErnieTextEncoder(LanguageModelEncoder):
    """Captions to one vector a token, by Ministral 3 without its last layer.

    A caption is cut where the tokenizer says that the model's texts end, as in the pipeline.
    """

    title = "Ministral 3, 3 billion weights"

    def __init__(self, load: Any, tokenizer: PreTrainedTokenizerBase, fingerprint: str) -> None:
        super().__init__(load, tokenizer, f"{fingerprint}-{tokenizer.model_max_length}")
        self.most_tokens = tokenizer.model_max_length

    def cut(self, prompt: str) -> tuple[list[int], int]:
        """Return the tokens that are read, one at least, and how many are left out."""
        read, left_out = super().cut(prompt)
        return read or [self.tokenizer.bos_token_id or 0], left_out


class ErnieImageEncoder(Flux2ImageEncoder):
    """FLUX.2's autoencoder; the epsilon is the one that the pipeline takes, whatever the config says."""

    eps = 1e-5
    kind = "mean-1e-5"


class ErnieImageFamily(MistralFamily):
    """ERNIE-Image and ERNIE-Image-Turbo."""

    name = "ernie_image"
    transformer_class = ErnieImageTransformer2DModel
    published = {  # transformer/config.json of baidu/ERNIE-Image  # noqa: RUF012
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_layers": 36,
        "ffn_hidden_size": 12288,
        "text_in_dim": 3072,
    }
    depths = ("num_layers",)
    image_encoder = ErnieImageEncoder
    mistral = _MINISTRAL
    text_encoder = ErnieTextEncoder
    text_layers = -1
    text_settings = ("ernie_image",)
    text_argument = "text_in_dim"
    published_scheduler = {"shift": 4.0}  # of both  # noqa: RUF012
    noise_patch = 2
    distilled_steps = 8
    chained_args = ("x",)
    tail = ("final_norm", "final_linear")
    optimise_forward = staticmethod(ernie_image_model.optimise_forward)

    @staticmethod
    def blocks(transformer: Any) -> list[nn.Module]:
        """Return the layers in running order."""
        return [*transformer.layers]

    def transformer_inputs(
        self, latents: Tensor, sigmas: Tensor, text: dict[str, Tensor], guidance: float, conditions: Conditions
    ) -> dict[str, Any]:
        """Return the arguments of ErnieImageTransformer2DModel."""
        mask = text.get("prompt_embeds_mask")
        return {
            "hidden_states": F.pixel_unshuffle(latents, self.patch_size),
            "timestep": 1000 * sigmas,
            "text_bth": text["prompt_embeds"],
            "text_lens": None if mask is None else mask.sum(dim=1),
        }

    def velocity(self, output: Any, latents: Tensor) -> Tensor:
        """Return the velocity [B, 32, h, w] of patches [B, 128, h/2, w/2]."""
        return F.pixel_shuffle(output.float(), self.patch_size)
