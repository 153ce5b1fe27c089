"""The language model that ``bench/loading.py --model llm`` loads, and the ways of loading it.

``naive`` is what tutorials do: a model with random weights, the whole file read beside it, copied over. ``sequential``
copies tensor by tensor into such a model; ``meta`` builds without memory and takes the whole file's tensors over;
``mmap`` takes over tensors that are mapped from the file. Tandem reads each tensor straight into its place, also where
it is a part of a joined matrix and where the file is one of Meta's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from library.models.llm.files import load_lm
from library.models.llm.spec import config_to_hf, llama

CASES = (
    "tandem",
    "tandem sharded",
    "tandem Meta's file",
    "tandem fp8",
    "transformers",
    "naive",
    "sequential",
    "meta",
    "mmap",
)
_CONFIG = llama(2048, 6, 32, 8, 8192, vocab_size=32000, context=4096)  # of Llama 3.2 1B's width, 1 GB in bf16


def write_model(folder: Path) -> None:
    """Write the model in bf16: one file, shards, and Meta's layout."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = config_to_hf(_CONFIG)
    values.pop("architectures")
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values)).state_dict()
    tile = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    state = {}
    for i, (name, tensor) in enumerate(shapes.items()):  # no two alike, or the head would count as tied
        tiles = tile.roll(i).repeat(-(-tensor.numel() // tile.numel()))
        state[name] = tiles[: tensor.numel()].reshape(tensor.shape).clone()
    for part in ("whole", "shards", "meta"):
        (folder / part).mkdir(parents=True)
        (folder / part / "config.json").write_text(json.dumps(config_to_hf(_CONFIG)))
    save_file(state, folder / "whole/model.safetensors", metadata={"format": "pt"})
    names, weight_map = list(state), {}
    for i in range(2):
        file = f"model-{i + 1:05d}-of-00002.safetensors"
        save_file({name: state[name] for name in names[i::2]}, folder / "shards" / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names[i::2], file)
    (folder / "shards/model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "meta/config.json").unlink()
    torch.save({_meta_name(name): tensor for name, tensor in state.items()}, folder / "meta/consolidated.00.pth")
    params = {"dim": 2048, "n_layers": 6, "n_heads": 32, "n_kv_heads": 8, "rope_theta": 500000.0}
    (folder / "meta/params.json").write_text(json.dumps(params))


def _meta_name(name: str) -> str:
    for theirs, metas in {
        "model.embed_tokens": "tok_embeddings",
        "lm_head": "output",
        "model.": "",
        "self_attn.q_proj": "attention.wq",
        "self_attn.k_proj": "attention.wk",
        "self_attn.v_proj": "attention.wv",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.down_proj": "feed_forward.w2",
        "mlp.up_proj": "feed_forward.w3",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    }.items():
        name = name.replace(theirs, metas)
    return name


def loader(case: str, folder: Path) -> Callable[[], nn.Module]:
    """Return the function that a case measures; everything it imports is imported already."""
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

    from library.precision.recipe import Fp8Loader, Fp8Recipe

    whole, file, dtype = folder / "whole", folder / "whole/model.safetensors", torch.bfloat16
    config = AutoConfig.from_pretrained(whole)

    def built() -> nn.Module:
        return LlamaForCausalLM(config).to(dtype)

    def naive() -> nn.Module:
        model = built()
        model.load_state_dict(load_file(file))
        return model

    def sequential() -> nn.Module:
        model = built()
        with safe_open(file, "pt") as tensors, torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(tensors.get_tensor(name))
        return model

    def meta() -> nn.Module:
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        state = {name: tensor.clone() for name, tensor in load_file(file).items()}
        model.load_state_dict(state, assign=True)
        return model

    def mapped() -> nn.Module:
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        model.load_state_dict(load_file(file), assign=True)
        return model

    fp8 = Fp8Loader(recipe=Fp8Recipe(granularity="row"), compute="dequant")
    return {
        "tandem": lambda: load_lm(whole, dtype),
        "tandem sharded": lambda: load_lm(folder / "shards", dtype),
        "tandem Meta's file": lambda: load_lm(folder / "meta", dtype),
        "tandem fp8": lambda: load_lm(whole, dtype, fp8=fp8),
        "transformers": lambda: AutoModelForCausalLM.from_pretrained(whole, dtype=dtype),
        "naive": naive,
        "sequential": sequential,
        "meta": meta,
        "mmap": mapped,
    }[case]


def ratios(rows: list[dict]) -> dict[str, float]:
    """Return the worst of ours over the model's size (fp8: over the file's), and over the naive way."""
    peak = {row["case"]: row["peak_over_model"] for row in rows}
    size = next(row["model_bytes"] for row in rows if row["case"] == "tandem")
    high = [peak[case] for case in ("tandem", "tandem sharded", "tandem Meta's file")]
    fp8 = next(row["peak_bytes"] for row in rows if row["case"] == "tandem fp8")
    return {
        "peak_over_file": max(high),
        "fp8_peak_over_bf16_file": round(fp8 / size, 3),
        "peak_over_naive": round(peak["tandem"] / peak["naive"], 3),
        "peak_over_transformers": round(peak["tandem"] / peak["transformers"], 3),
    }
