"""Step 6: saving, loading, going on with a training; and GPT-2 as OpenAI and Hugging Face publish it.

`python walkthrough/step6_files.py openai-community/gpt2` downloads the real one (500 MB), or reads a folder.
"""

# %%
from __future__ import annotations

import copy
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(globals().get("__file__", "here")).resolve().parent.parent))

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from library.models.llm.sources import TensorFlowFiles
from library.safetensors_io import read_tensor
from walkthrough.course import check, draw
from walkthrough.sizes import Sizes
from walkthrough.step1_tokens import TEXT, TOKENIZER, Tokenizer
from walkthrough.step2_gpt2 import GPT2, Decoder
from walkthrough.step4_training import READ, backward, optimizer_of
from walkthrough.step5_decoding import write

# %% [markdown]
# **A checkpoint.** Matrices and sizes are enough to use a model. To go on with its training, the optimizer is needed
# too: AdamW keeps two numbers a parameter, the mean of its gradients and of their squares. `torch.save` writes a
# *pickle*, a file that can run any program when it is opened. `weights_only=True` refuses that; safetensors files (step
# 4) hold numbers only.


# %%
def some_steps(model: Decoder, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    """Train by the batches of these numbers."""
    for number in numbers:
        backward(model, READ[number * 256 : number * 256 + 256].view(4, 64), 1)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    through = Decoder(Sizes(len(TOKENIZER.tokens)), GPT2)
    stopped, resumed = copy.deepcopy(through), Decoder(through.sizes, GPT2)
    some_steps(through, optimizer_of(through), range(6))
    some_steps(stopped, optimizer := optimizer_of(stopped), range(3))
    with tempfile.TemporaryDirectory() as folder:
        torch.save({"model": stopped.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}, f"{folder}/3.pt")
        saved = torch.load(f"{folder}/3.pt", weights_only=True)
    resumed.load_state_dict(saved["model"])
    (optimizer := optimizer_of(resumed)).load_state_dict(saved["optimizer"])
    some_steps(resumed, optimizer, range(saved["step"], 6))
    assert all(torch.equal(a, b) for a, b in zip(through.parameters(), resumed.parameters()))
    print("check: stopped after 3 of 6 steps and resumed, the model is the same bit for bit")

# %% [markdown]
# **Published GPT-2.** OpenAI's program stores matrices as [in, out], PyTorch's linear layers as [out, in]. Hugging Face
# kept OpenAI's form (`Conv1D`), so matrices are transposed on the way. Queries, keys and values are one matrix there.

# %%
NAMES = {"attention.out": "attn.c_proj", "feed_forward.up": "mlp.c_fc", "feed_forward.down": "mlp.c_proj"}
NAMES |= {"norm1": "ln_1", "norm2": "ln_2"}


def from_hugging_face(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of transformers' GPT-2 under our names and in our form."""
    state = {name.removeprefix("transformer."): tensor for name, tensor in state.items()}
    own = {"embedding.weight": state["wte.weight"], "positions.weight": state["wpe.weight"]}
    own |= {"head.weight": state["wte.weight"]} | {f"norm.{leaf}": state[f"ln_f.{leaf}"] for leaf in ("weight", "bias")}
    for i in range(sum(name.endswith("ln_1.weight") for name in state)):
        for leaf in ("weight", "bias"):
            parts = {ours: state[f"h.{i}.{theirs}.{leaf}"] for ours, theirs in NAMES.items()}
            joined = state[f"h.{i}.attn.c_attn.{leaf}"].chunk(3, dim=-1)
            parts |= {f"attention.{name}": part for name, part in zip("qkv", joined)}
            own |= {f"blocks.{i}.{name}.{leaf}": t.t().contiguous() for name, t in parts.items()}
    return own


def from_openai(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return OpenAI's tensors under Hugging Face's names: model/h0/ln_1/g is h.0.ln_1.weight; w is [1, in, out]."""
    state = {}
    for name, tensor in tensors.items():
        module, _, leaf = re.sub("^h(?=[0-9])", "h.", name.removeprefix("model/")).replace("/", ".").rpartition(".")
        state[f"{module or leaf}.{'bias' if leaf == 'b' else 'weight'}"] = tensor[0] if leaf == "w" else tensor
    return state


def published(folder: Path) -> tuple[Decoder, Tokenizer]:
    """Return the GPT-2 of a folder as it is published, and its tokenizer."""
    if index := next(folder.glob("*.index"), None):  # OpenAI: a TensorFlow checkpoint
        entries = TensorFlowFiles(index).entries
        state = from_openai({name: read_tensor(entries, name) for name in entries})
        files = "hparams.json", "vocab.bpe", "encoder.json"
    else:
        state, files = load_file(folder / "model.safetensors"), ("config.json", "merges.txt", "vocab.json")
    config, merges, numbers = ((folder / file).read_text(encoding="utf-8") for file in files)
    own, sizes = from_hugging_face(state), json.loads(config)
    rows, context = own["embedding.weight"].shape[0], own["positions.weight"].shape[0]
    hidden, width = own["blocks.0.feed_forward.up.weight"].shape
    model = Decoder(Sizes(rows, context, width, sizes["n_layer"], sizes["n_head"], hidden), GPT2)
    model.load_state_dict(own)
    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}  # a blank is written Ġ, so that one sees it
    spelled = lambda letters: bytes(map(byte_of.get, letters))  # noqa: E731
    tokenizer = Tokenizer([tuple(map(spelled, line.split())) for line in merges.splitlines()[1:]])
    tokenizer.numbers = {spelled(token): number for token, number in json.loads(numbers).items()}
    tokenizer.tokens = sorted(tokenizer.numbers, key=tokenizer.numbers.__getitem__)
    return model, tokenizer


if __name__ == "__main__" and len(sys.argv) == 2 and not sys.argv[1].startswith("-"):
    source = sys.argv[1]
    if not Path(source).is_dir():
        source = snapshot_download(source, allow_patterns=["*.json", "*.txt", "model.safetensors"])
    model, tokenizer = published(Path(source))
    text = write(model, torch.tensor([tokenizer.encode("Hello, I'm a language")]), 40, temperature=0.8, top_k=40)
    print(tokenizer.decode(text[0].tolist()))

# %% [markdown]
# **Is it right?** Random weights are written in both forms, read, and compared with transformers' logits.

# %%
if __name__ == "__main__":
    from tests.walkthrough.compare import random_gpt2, write_hugging_face, write_openai

    _, theirs = random_gpt2(Sizes(len(TOKENIZER.tokens)))
    tokens = torch.tensor([TOKENIZER.encode(TEXT)[:60]])
    for name, write_folder in {"OpenAI's files": write_openai, "Hugging Face's": write_hugging_face}.items():
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            write_folder(Path(folder), theirs, TOKENIZER)
            model, tokenizer = published(Path(folder))
            check(f"logits of {name} against transformers", model(tokens), theirs(tokens).logits, 1e-5)
        assert tokenizer.encode(TEXT[:2000]) == TOKENIZER.encode(TEXT[:2000])
    parts: Counter[str] = Counter()
    with torch.device("meta"):  # shapes without memory: step 8
        gpt2 = Decoder(Sizes(50257, 1024, 768, 12, 12, 3072), GPT2)
    for name, parameter in gpt2.named_parameters():
        parts[re.sub(r"blocks\.\d+\.|\d|\..*", "", name)] += parameter.numel()
    assert sum(parts.values()) == 124_439_808  # as transformers counts the published one
    with draw("step6_parameters", "Where the 124,439,808 parameters of GPT-2 are", width=7, height=2) as (chart,):
        chart.bar_label(chart.barh([*parts], [*parts.values()]), fmt="{:,.0f}")
