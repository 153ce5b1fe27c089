"""FLUX's two text encoders: CLIP-L for one pooled vector, T5-XXL for a vector per token.

Captions go through each encoder's tokenizer, padded to its full length, as FLUX was trained: the transformer
has no text mask, it sees the padding. :class:`FluxTextEncoder` computes what is cached; an encoder that is trained
runs anew in every step, as part of :class:`FluxTextModules`. Encoders are read from transformers folders
(``text_encoder``, ``text_encoder_2`` of a diffusers pipeline) or from the single files that ComfyUI uses
(``clip_l.safetensors``, ``t5xxl_fp16.safetensors``), whose configuration follows from their shapes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor, nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    PreTrainedTokenizerBase,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

from library.errors import UserError
from library.models.layer_names import count_blocks
from library.models.text import TextEncoder, TokenCount, tokenizer_fingerprint
from library.models.weights import load_into, read_config
from library.precision.checkpoint import WeightFiles
from library.precision.recipe import Recipe, WeightLoader
from library.safetensors_io import RowRange

# In clip_l files beside the text model: the projection that FLUX does not use, buffers of old versions.
_CLIP_UNUSED = re.compile(
    r"(^|\.)(text_projection|logit_scale|position_ids)(\.|$)|^vision_model\.|^visual_projection\."
)
_CLIP_HEAD_DIM = 64  # of CLIP-L; no tensor shows it


def published_text() -> dict[str, Callable[[], Any]]:
    """Return what builds CLIP-L and T5-XXL, and tokenizers of single characters for them, by folder."""
    letters = [chr(code) for code in range(33, 127)]
    pieces = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    scores = [(piece, -1.0) for piece in ("<pad>", "</s>", "<unk>", "\u2581", *letters)]
    clip = CLIPTextConfig(
        hidden_size=768, intermediate_size=3072, projection_dim=768, num_hidden_layers=12, num_attention_heads=12
    )
    t5 = T5Config(
        d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64, feed_forward_proj="gated-gelu", use_cache=False
    )
    return {
        "text_encoder": lambda: CLIPTextModel(clip),
        "text_encoder_2": lambda: T5EncoderModel(t5),
        "tokenizer": lambda: CLIPTokenizer(
            vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], model_max_length=77
        ),
        "tokenizer_2": lambda: T5TokenizerFast(vocab=scores, extra_ids=0, model_max_length=512),
    }


class FluxTextEncoder(TextEncoder):
    """Captions in, ``prompt_embeds`` [L, D] and ``pooled_prompt_embeds`` [P] out, on the CPU.

    The encoders are loaded at the first caption, so a run whose captions are all cached never loads T5.
    """

    def __init__(
        self,
        load: Mapping[str, Callable[[], Any]],
        tokenizers: Mapping[str, tuple[PreTrainedTokenizerBase, int]],
        fingerprint: str,
    ) -> None:
        """Arguments are by the encoder's name, "text_encoder" and "text_encoder_2".

        Args:
            load: gives the encoder.
            tokenizers: its tokenizer, and tokens per caption.
            fingerprint: names weights and settings.
        """
        self._load, self._tokenizers, self.weights_fingerprint = load, tokenizers, fingerprint
        self.tokenizers = {name: each for name, (each, _) in tokenizers.items()}
        self.fingerprint = "-".join([fingerprint, *(tokenizer_fingerprint(each) for each, _ in tokenizers.values())])
        self.most_tokens = tokenizers["text_encoder_2"][1]

    @torch.no_grad()
    def encode(self, captions: list[str], references: list[list[Image]] | None = None) -> list[dict[str, Tensor]]:
        """Encode ``captions`` in one batch; longer ones are cut at the encoders' lengths. No images are looked at."""
        assert references is None
        if not captions:
            return []
        if self._model is None:
            self._model = self.load_modules(self._load)
        dtype = next(self._model.parameters()).dtype
        batch = {name: rows.to(dtype).cpu() for name, rows in self._model(captions).items()}
        # Clones: a cached row must not keep its batch alive.
        return [{name: rows[i].clone() for name, rows in batch.items()} for i in range(len(captions))]

    def count(self, captions: Sequence[str]) -> list[TokenCount]:
        """Count T5's tokens; CLIP's one vector is made of the first 77, as FLUX was trained."""
        tokenizer, most = self._tokenizers["text_encoder_2"]
        lengths = [len(tokenizer(caption).input_ids) for caption in captions]
        own = tokenizer.num_special_tokens_to_add()  # cutting keeps these
        return [TokenCount(min(length, most) - own, max(0, length - most)) for length in lengths]

    def ids(self, caption: str) -> dict[str, list[int]]:
        """Return CLIP's tokens and T5's."""
        return {name: _ids([caption], *each)[0].tolist() for name, each in self._tokenizers.items()}

    def models(self) -> dict[str, nn.Module]:
        """Load CLIP and T5."""
        return {name: load() for name, load in self._load.items()}

    def load_modules(self, names: Collection[str]) -> FluxTextModules:
        """Load the encoders called ``names`` for training."""
        return FluxTextModules({name: self._load[name]() for name in names}, self._tokenizers)


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
            ids = _ids(captions, *self._tokenizers[name]).to(next(encoder.parameters()).device)
            if name == "text_encoder":
                outputs["pooled_prompt_embeds"] = encoder(ids).pooler_output
            else:
                outputs["prompt_embeds"] = encoder(ids)[0]
        return outputs

    def enable_gradient_checkpointing(self) -> None:
        """Recompute each layer in backward."""
        for encoder in self.children():
            encoder.activation_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]


def _ids(captions: list[str], tokenizer: PreTrainedTokenizerBase, length: int) -> Tensor:
    """Return tokens [B, length], cut or padded."""
    return tokenizer(captions, padding="max_length", max_length=length, truncation=True, return_tensors="pt").input_ids


def load_clip(path: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> CLIPTextModel:
    """Load CLIP's text model from a transformers folder or a ``clip_l`` file."""
    weights = WeightFiles(path)
    # transformers before version 5 put text_model. in front
    used = {name.removeprefix("text_model."): name for name in weights.names if not _CLIP_UNUSED.search(name)}
    if path.is_dir():
        known = read_config(path)
        config = CLIPTextConfig(**(known.get("text_config") or known))  # a whole CLIP has the text part under its name
    else:
        config = _clip_config(lambda name: weights.shape(used.get(name, name)), count_blocks(used, "encoder.layers."))
    config.attention_dropout = 0.0  # 0 as published
    key_map = {name: [RowRange(source)] for name, source in used.items()}
    return load_into(lambda: CLIPTextModel(config), weights, key_map, dtype, device)


def load_t5(
    path: Path, dtype: torch.dtype, device: torch.device | str = "cpu", recipe: Recipe | None = None
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

    return load_into(build, weights, key_map, dtype, device, keep_fp32, WeightLoader(recipe, compute="dequant"))


def clip_positions(path: Path) -> int:
    """Return the number of tokens CLIP has positions for (77), from the header."""
    weights = WeightFiles(path)
    _check_kind(path, "clip", "give CLIP-L's folder, or clip_l.safetensors, as clip_l")
    for name in weights.names:
        if name.endswith("embeddings.position_embedding.weight") and not name.startswith("vision_model."):
            return weights.shape(name)[0]
    raise UserError(f"{path}: not a CLIP text encoder (no position embedding); give clip_l.safetensors as clip_l")


def check_t5(path: Path) -> None:
    """Raise a UserError if ``path`` holds no T5 encoder; reads headers only."""
    weights = WeightFiles(path)
    _check_kind(path, "t5", "give T5's folder, or t5xxl_fp16.safetensors, as t5xxl")
    if "encoder.block.0.layer.0.SelfAttention.q.weight" not in weights:
        raise UserError(f"{path}: not a T5 encoder (no encoder.block.0); give t5xxl_fp16.safetensors as t5xxl")


def _check_kind(path: Path, kind: str, remedy: str) -> None:
    """Raise a UserError if the config of a folder is another architecture's."""
    found = read_config(path).get("model_type", kind) if (path / "config.json").is_file() else kind
    if not str(found).startswith(kind):
        raise UserError(f"{path / 'config.json'}: {found!r}, not {kind}; {remedy}")


def _clip_config(shape: Callable[[str], tuple[int, ...]], layers: int) -> CLIPTextConfig:
    vocabulary, width = shape("embeddings.token_embedding.weight")
    return CLIPTextConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=shape("encoder.layers.0.mlp.fc1.weight")[0],
        projection_dim=width,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // _CLIP_HEAD_DIM),
        max_position_embeddings=shape("embeddings.position_embedding.weight")[0],
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
