"""The text encoders' linear layers, in transformers' names and in those of LoRA files.

CLIP's layers lay below ``text_model`` until transformers 5; every published file has that in its keys. T5 has one
naming. Both follow sd-scripts in what is trained: the linear layers of attention and feed-forward.

What files put before a module's name, by layout (the first is written, all are read):

    diffusers   text_encoder.text_model.encoder.layers.0.mlp.fc1, text_encoder_2.encoder.block.0...
    kohya       lora_te1_text_model_encoder_layers_0_mlp_fc1, lora_te3_encoder_block_0_...; lora_te2_ is OneTrainer's T5
    comfy       the same as kohya: ComfyUI (``model_lora_keys_clip``) and diffusers read these in every version, but
                its own text_encoders.clip_l.transformer.... only newer ComfyUI does, and diffusers raises on it

diffusers knows CLIP's keys only and passes over T5's.
"""

from __future__ import annotations

from networks.key_map import KeyMap, KeyRow

_CLIP_LAYERS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.out_proj",
    "mlp.fc1",
    "mlp.fc2",
)
_T5_LAYERS = (
    *(f"layer.0.SelfAttention.{name}" for name in "qkvo"),
    *(f"layer.1.DenseReluDense.{name}" for name in ("wi_0", "wi_1", "wo")),
)

CLIP_KEYS = KeyMap(
    tuple(
        KeyRow(f"text_model.encoder.layers.{{i}}.{layer}", (f"encoder.layers.{{i}}.{layer}",)) for layer in _CLIP_LAYERS
    )
)
T5_KEYS = KeyMap(
    tuple(KeyRow(f"encoder.block.{{i}}.{layer}", (f"encoder.block.{{i}}.{layer}",)) for layer in _T5_LAYERS)
)

CLIP_PREFIXES = {
    "diffusers": ("text_encoder.",),
    "kohya": ("lora_te1_", "lora_te_"),
    "comfy": ("lora_te1_", "text_encoders.clip_l.transformer."),
}
T5_PREFIXES = {
    "diffusers": ("text_encoder_2.",),
    "kohya": ("lora_te3_", "lora_te2_"),
    "comfy": ("lora_te3_", "text_encoders.t5xxl.transformer."),
}
