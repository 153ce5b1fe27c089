"""FLUX's two text encoders: CLIP-L for one pooled vector, T5-XXL for a vector per token.

Captions go through each encoder's tokenizer, padded to its full length, as FLUX was trained: the transformer
has no text mask, it sees the padding. :class:`FluxTextEncoder` computes what is cached; an encoder that is trained
runs anew in every step, as part of :class:`FluxTextModules`. Encoders are read from transformers folders
(``text_encoder``, ``text_encoder_2`` of a diffusers pipeline) or from the single files that ComfyUI uses
(``clip_l.safetensors``, ``t5xxl_fp16.safetensors``), whose configuration follows from their shapes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerBase, T5Config, T5EncoderModel

from library.errors import UserError
from library.models.layer_names import count_blocks
from library.models.text import TextEncoder
from library.models.weights import load_into, read_config
from library.precision.checkpoint_layouts import WeightFiles
from library.precision.recipe import Fp8Loader, Fp8Recipe
from library.safetensors_io import RowRange

# In clip_l files beside the text model: the projection that FLUX does not use, buffers of old versions.
_CLIP_UNUSED = re.compile(
    r"(^|\.)(text_projection|logit_scale|position_ids)(\.|$)|^vision_model\.|^visual_projection\."
)
_CLIP_HEAD_DIM = 64  # of CLIP-L; no tensor shows it


class FluxTextEncoder(TextEncoder):
    """Captions in, ``prompt_embeds`` [L, D] and ``pooled_prompt_embeds`` [P] out, on the CPU.

    The encoders are loaded at the first caption, so a run whose captions are all cached never loads T5.
    """

    def __init__(
        self,
        load_clip: Callable[[], Any],
        load_t5: Callable[[], Any],
        tokenizers: tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase],
        lengths: tuple[int, int],
        fingerprint: str,
    ) -> None:
        """``lengths``: tokens per caption of CLIP and of T5; ``fingerprint`` names weights and settings."""
        self._load_clip, self._load_t5 = load_clip, load_t5
        self.clip_tokenizer, self.t5_tokenizer = tokenizers
        self.clip_length, self.t5_length = lengths
        self.fingerprint = fingerprint
        self._models: tuple[Any, Any] | None = None

    @torch.no_grad()
    def encode(self, captions: list[str], references: list[list[Image]] | None = None) -> list[dict[str, Tensor]]:
        """Encode ``captions`` in one batch; longer ones are cut at the encoders' lengths. No images are looked at."""
        assert references is None
        if not captions:
            return []
        if self._models is None:
            self._models = (self._load_clip(), self._load_t5())
        clip, t5 = self._models
        clip_ids = _token_ids(self.clip_tokenizer, captions, self.clip_length).to(clip.device)
        t5_ids = _token_ids(self.t5_tokenizer, captions, self.t5_length).to(t5.device)
        pooled = clip(clip_ids).pooler_output.to(clip.dtype).cpu()  # [B, P]
        embeds = t5(t5_ids)[0].to(t5.dtype).cpu()  # [B, L, D]
        # Clones: a cached row must not keep its batch alive.
        return [{"prompt_embeds": e.clone(), "pooled_prompt_embeds": p.clone()} for e, p in zip(embeds, pooled)]

    def release(self) -> None:
        """Free the encoders' weights; the next caption loads them again."""
        self._models = None

    def load_modules(self, names: Collection[str]) -> FluxTextModules:
        """Load the encoders called ``names``, "text_encoder" and "text_encoder_2", for training."""
        loaders = {"text_encoder": self._load_clip, "text_encoder_2": self._load_t5}
        tokenizers = {
            "text_encoder": (self.clip_tokenizer, self.clip_length),
            "text_encoder_2": (self.t5_tokenizer, self.t5_length),
        }
        return FluxTextModules({name: loaders[name]() for name in names}, tokenizers)


class FluxTextModules(nn.Module):
    """The text encoders that are trained: captions in, their part of the conditioning out, with gradient.

    ``text_encoder`` is CLIP, ``text_encoder_2`` T5, named as in diffusers' pipeline; only those that are trained are
    there. The weights are frozen and the modules have no dropout of their own: what is trained comes on top.
    """

    def __init__(
        self, encoders: Mapping[str, nn.Module], tokenizers: Mapping[str, tuple[PreTrainedTokenizerBase, int]]
    ) -> None:
        """``tokenizers``: tokenizer and tokens per caption of each encoder."""
        super().__init__()
        self._tokenizers = dict(tokenizers)
        for name, encoder in encoders.items():
            self.add_module(name, encoder)

    def forward(self, captions: list[str]) -> dict[str, Tensor]:
        """Return ``pooled_prompt_embeds`` [B, P] of CLIP and ``prompt_embeds`` [B, L, D] of T5, of those there are."""
        outputs: dict[str, Tensor] = {}
        for name, encoder in self.named_children():
            tokenizer, length = self._tokenizers[name]
            ids = _token_ids(tokenizer, captions, length).to(next(encoder.parameters()).device)
            if name == "text_encoder":
                outputs["pooled_prompt_embeds"] = encoder(ids).pooler_output
            else:
                outputs["prompt_embeds"] = encoder(ids)[0]
        return outputs

    def enable_gradient_checkpointing(self) -> None:
        """Recompute each layer in backward."""
        for encoder in self.children():
            encoder.activation_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]


def _token_ids(tokenizer: PreTrainedTokenizerBase, captions: list[str], length: int) -> Tensor:
    """Return token ids [B, length], cut or padded."""
    return tokenizer(captions, padding="max_length", max_length=length, truncation=True, return_tensors="pt").input_ids


def load_clip(path: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> CLIPTextModel:
    """Load CLIP's text model from a transformers folder or a ``clip_l`` file."""
    weights = WeightFiles(path)
    config = CLIPTextConfig(**_text_config(read_config(path))) if path.is_dir() else _clip_config(weights)
    config.attention_dropout = 0.0  # 0 as published
    with torch.device("meta"):
        wanted = set(CLIPTextModel(config).state_dict())
    used = [name for name in weights.names if not _CLIP_UNUSED.search(name)]
    key_map = {_clip_name(name, wanted): [RowRange(name)] for name in used}
    model = load_into(lambda: CLIPTextModel(config), weights, key_map, dtype, device)
    assert isinstance(model, CLIPTextModel)
    return model


def load_t5(
    path: Path, dtype: torch.dtype, device: torch.device | str = "cpu", recipe: Fp8Recipe | None = None
) -> T5EncoderModel:
    """Load T5's encoder from a transformers folder or a ``t5xxl`` file; ``recipe`` makes it fp8.

    With fp16 the feed-forward output matrices stay fp32, as in transformers: their products overflow
    otherwise.
    """
    weights = WeightFiles(path)
    config = T5Config(**read_config(path)) if path.is_dir() else _t5_config(weights)
    config.dropout_rate = 0.0  # 0.1 as published, which no one wants under a LoRA with dropouts of its own
    # The embedding is one tensor with two names; files hold one or both.
    key_map: dict[str, list[RowRange]] = {name: [RowRange(name)] for name in weights.names}
    tied = key_map.pop("encoder.embed_tokens.weight", None)
    if tied and "shared.weight" not in key_map:
        key_map["shared.weight"] = tied

    def keep_fp32(name: str) -> bool:
        return dtype == torch.float16 and name.endswith(".wo.weight")

    def build() -> T5EncoderModel:
        model = T5EncoderModel(config)
        model.encoder.set_input_embeddings(model.shared)  # also where the config says not to tie: one is published
        return model

    fp8 = Fp8Loader(recipe, compute="dequant")
    model = load_into(build, weights, key_map, dtype, device, keep_fp32, fp8)
    assert isinstance(model, T5EncoderModel)
    return model


def clip_positions(path: Path) -> int:
    """Return the number of tokens CLIP has positions for (77), from the header."""
    weights = WeightFiles(path)
    for name in weights.names:
        if name.endswith("embeddings.position_embedding.weight") and not name.startswith("vision_model."):
            return weights.shape(name)[0]
    raise UserError(f"{path}: not a CLIP text encoder (no position embedding); give clip_l.safetensors as clip_l")


def check_t5(path: Path) -> None:
    """Raise a UserError if ``path`` holds no T5 encoder; reads headers only."""
    weights = WeightFiles(path)
    if "encoder.block.0.layer.0.SelfAttention.q.weight" not in weights:
        raise UserError(f"{path}: not a T5 encoder (no encoder.block.0); give t5xxl_fp16.safetensors as t5xxl")


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the text part of a CLIP config (a whole CLIP keeps it under ``text_config``)."""
    return config.get("text_config") or config


def _clip_name(name: str, wanted: set[str]) -> str:
    """Translate a file's name: transformers before version 5 put ``text_model.`` in front."""
    bare = name.removeprefix("text_model.")
    return bare if bare in wanted else f"text_model.{bare}" if f"text_model.{bare}" in wanted else name


def _clip_config(weights: WeightFiles) -> CLIPTextConfig:
    prefix = "text_model." if "text_model.embeddings.token_embedding.weight" in weights else ""
    vocabulary, width = weights.shape(f"{prefix}embeddings.token_embedding.weight")
    return CLIPTextConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=weights.shape(f"{prefix}encoder.layers.0.mlp.fc1.weight")[0],
        projection_dim=width,
        num_hidden_layers=count_blocks(weights.names, f"{prefix}encoder.layers."),
        num_attention_heads=max(1, width // _CLIP_HEAD_DIM),
        max_position_embeddings=weights.shape(f"{prefix}embeddings.position_embedding.weight")[0],
        hidden_act="quick_gelu",
        # CLIP's vocabulary ends with start and end of text; padding repeats the end.
        bos_token_id=vocabulary - 2,
        eos_token_id=vocabulary - 1,
        pad_token_id=vocabulary - 1,
    )


def _t5_config(weights: WeightFiles) -> T5Config:
    shared = "shared.weight" if "shared.weight" in weights else "encoder.embed_tokens.weight"
    first = "encoder.block.0.layer.0.SelfAttention"
    vocabulary, width = weights.shape(shared)
    buckets, heads = weights.shape(f"{first}.relative_attention_bias.weight")
    return T5Config(
        vocab_size=vocabulary,
        d_model=width,
        d_kv=weights.shape(f"{first}.q.weight")[0] // heads,
        d_ff=weights.shape("encoder.block.0.layer.1.DenseReluDense.wi_0.weight")[0],
        num_layers=count_blocks(weights.names, "encoder.block."),
        num_heads=heads,
        relative_attention_num_buckets=buckets,
        feed_forward_proj="gated-gelu",
        is_encoder_decoder=False,
        use_cache=False,
        tie_word_embeddings=False,
    )
