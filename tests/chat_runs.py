"""Short runs of LoRAs on tiny language models."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from library.config.load import load_for
from library.config.scripts import LANGUAGE_LORA
from library.llm.tokenizers import train_bpe
from library.training.run import Run
from tests.curves import without_curves
from tests.forked import flags_of
from train_lora import train

SPREAD = {"initializer_range": 0.2}  # the usual 0.02 leaves a frozen head of width 32 next to nothing to say
ANSWERS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]


def write_place(place: Path) -> Path:
    """Write two tiny models with a tokenizer, and conversations to learn by heart, to a folder; return it."""
    records = [
        {"messages": [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": answer}]}
        for i, answer in enumerate(ANSWERS)
    ]
    (place / "data.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    pairs = [{"prompt": f"say {i}", "chosen": said, "rejected": ANSWERS[i - 1]} for i, said in enumerate(ANSWERS)]
    (place / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)) + "\n")
    tokenizer = train_bpe([f"User: say {i}\nAssistant: {answer}" for i, answer in enumerate(ANSWERS)] * 3, 290)
    size = tokenizer.vocab_size
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama = LlamaConfig(vocab_size=size, num_key_value_heads=2, max_position_embeddings=64, **sizes, **SPREAD)
    gpt2 = GPT2Config(vocab_size=size, n_positions=64, n_embd=32, n_layer=2, n_head=4, **SPREAD)
    for name, model in (("llama", LlamaForCausalLM(llama)), ("gpt2", GPT2LMHeadModel(gpt2))):
        model.save_pretrained(place / name)
        tokenizer.save(place / name)
    return place


def flags(place: Path, output: Path, model_type: str = "llama", **settings: object) -> list[str]:
    """Return the flags of a short run; ``settings`` override them."""
    values: dict[str, object] = {
        "model_type": model_type,
        "pretrained_model_name_or_path": place / model_type,
        "train_data": [place / "data.jsonl"],
        "output_dir": output,
        "network_dim": 8,
        "network_alpha": 16,
        "network_dropout": 0.1,
        "learning_rate": 1e-2,
        "max_train_steps": 6,
        "train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "seed": 3,
        "overwrite": True,
    }
    return flags_of(values | settings)


def preferring(place: Path) -> dict[str, object]:
    """Return the settings of a run on pairs."""
    return {"train_data": [place / "pairs.jsonl"], "train_on": "preferences"}


def run(place: Path, output: Path, model_type: str = "llama", **settings: object) -> Run:
    return train_flags(flags(place, output, model_type, **settings))


def train_flags(flags: list[str]) -> Run:
    """Train, in this process or as a job of a worker group."""
    AcceleratorState._reset_state(reset_partial_state=True)  # it refuses a second run of other precision otherwise
    with without_curves():
        return train(load_for(LANGUAGE_LORA, flags))


def adapter(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "adapter_model.safetensors")
