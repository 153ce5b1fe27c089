"""A tiny captioner in the format of the published Qwen3-VL: real classes, real files, a few hundred kilobytes.

    python -m tests.tiny_captioner FOLDER

writes one, to try ``tools/caption_images.py`` and the page's "Write captions" without a download. Its weights are
random; what it says are words of a small vocabulary that depend on picture and prompt, not on what is seen.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import Qwen2Tokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.tiny import tiny_text_model

_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
_SPECIAL += ["<|video_pad|>"]
WORDS = (
    "a",
    "red",
    "green",
    "blue",
    "small",
    "large",
    "old",
    "new",
    "cat",
    "dog",
    "house",
    "tree",
    "car",
    "boat",
    "on",
    "in",
    "under",
    "beside",
    "the",
    "grass",
    "table",
    "sea",
)
# chat_template.json of Qwen/Qwen3-VL-4B-Instruct, as far as pictures and texts of a user need it
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% for content in message.content %}"
    "{% if content.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ content.text }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_captioner_tokenizer() -> Qwen2Tokenizer:
    """Return a tokenizer of bytes, and of a few whole words with a blank before them."""
    from tokenizers import pre_tokenizers

    vocabulary = {byte: n for n, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        made = "Ġ"
        for letter in word:
            if made + letter not in vocabulary:
                merges.append((made, letter))
                vocabulary[made + letter] = len(vocabulary)
            made += letter
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=merges, extra_special_tokens=_SPECIAL[1:])
    tokenizer.eos_token, tokenizer.model_max_length = "<|im_end|>", 32768
    return tokenizer


def write_tiny_captioner(folder: str | Path, seed: int = 0, ends: float = 3.0) -> Path:
    """Write a whole model folder; ``ends``: how readily it ends a caption, 0 for never."""
    folder, tokenizer = Path(folder), tiny_captioner_tokenizer()
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("image_pad", "video_pad", "im_end")}
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "mrope_section": [8, 4, 4],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 64,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=ids["image_pad"],
        video_token_id=ids["video_pad"],
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
    )
    model = tiny_text_model(lambda: Qwen3VLForConditionalGeneration(config), seed, 4)
    words = [tokenizer.convert_tokens_to_ids(f"Ġ{word}") for word in WORDS]
    spoken = torch.zeros(len(tokenizer), 1)
    spoken[words] = 1
    spoken[ids["im_end"]] = ends
    with torch.no_grad():
        model.lm_head.weight.mul_(spoken)  # whatever else there is has the logit 0
        for layer in model.model.language_model.layers:
            layer.self_attn.o_proj.weight.mul_(20)  # the picture counts
    model.generation_config.update(eos_token_id=ids["im_end"], repetition_penalty=2.5, min_new_tokens=4)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    images = Qwen2VLImageProcessorPil(
        patch_size=16,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        size={"shortest_edge": 32 * 32, "longest_edge": 256 * 256},
    )
    # As published: by the name of a class that needs torchvision, and the chat's template in a file of its own.
    settings = images.to_dict() | {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    (folder / "video_preprocessor_config.json").write_text(
        json.dumps(settings | {"video_processor_type": "Qwen3VLVideoProcessor"})
    )
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


if __name__ == "__main__":
    print(write_tiny_captioner(sys.argv[1]))
