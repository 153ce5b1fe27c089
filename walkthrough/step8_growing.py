"""Step 8: a tokenizer gets new tokens; and a large file becomes a model without being in memory twice."""

# %%
from __future__ import annotations

import copy
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(globals().get("__file__", "here")).resolve().parent.parent))

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from walkthrough.course import check, draw, private_mib
from walkthrough.sizes import Sizes
from walkthrough.step1_tokens import TOKENIZER, Tokenizer
from walkthrough.step2_gpt2 import Decoder
from walkthrough.step3_loss import HELD_OUT, VOCABULARY
from walkthrough.step4_training import trained
from walkthrough.step7_llama import LLAMA32, frequencies

# %% [markdown]
# **New tokens.** A chat needs marks that no text contains, such as `<|user|>`. Such a *special* token is cut out before
# bytes are joined, so it is always one token.


# %%
class Extended(Tokenizer):
    """A tokenizer with special tokens."""

    def __init__(self, before: Tokenizer, special: list[str]) -> None:
        super().__init__([*before.ranks])
        self.special = {token: len(self.tokens) + i for i, token in enumerate(special)}
        self.tokens += [token.encode() for token in special]

    def encode(self, text: str) -> list[int]:
        found: list[int] = []
        for part in re.split(f"({'|'.join(map(re.escape, self.special))})", text):
            found += [self.special[part]] if part in self.special else super().encode(part)
        return found


# %% [markdown]
# The model's table needs a row for each new token. A row of zeros has logit 0. In the published GPT-2 all logits are
# often below -30, so the new token would get nearly all probability. The mean of the old rows has the mean of their
# logits, and e^(mean of logits) is at most the mean of e^logits (Jensen). So a new token never gets more than 1/n of
# what n old tokens have together, and old probabilities hardly change (Hewitt 2021).


# %%
def grown(model: Decoder, rows: Tensor) -> Decoder:
    """Return a copy of ``model``, whose head is its embedding, with more ``rows``."""
    model = copy.deepcopy(model)
    model.embedding.weight = model.head.weight = nn.Parameter(torch.cat((model.embedding.weight, rows)))
    return model


if __name__ == "__main__":
    tokenizer, text = Extended(TOKENIZER, ["<|user|>", "<|end|>"]), "<|user|>Once upon a time<|end|>"
    print(text, "is", tokenizer.encode(text))
    old, tokens = trained(), HELD_OUT[None, :64]
    with draw("step8_new_tokens", "Probability of a new token", width=6) as (chart,), torch.no_grad():
        table = old.embedding.weight
        mean = table.mean(0, keepdim=True)
        for name, row in {"mean": mean, "zeros": mean * 0, "random": torch.randn_like(mean) * table.std()}.items():
            chart.semilogy(grown(old, row)(tokens).softmax(-1)[0, :, VOCABULARY], label=name)
        chart.axhline(1 / VOCABULARY, color="grey", linestyle="--", label="1/n")
        chart.set(xlabel="position in a story", ylim=(1e-9, 1))
        chart.legend(ncols=4)
        logits = grown(old, mean.expand(2, -1))(tokens)
        check("old logits after growing", logits[..., :VOCABULARY], old(tokens), 1e-6)  # same products, other blocks
        assert (logits.softmax(-1)[..., VOCABULARY:] <= 1 / VOCABULARY).all()

# %% [markdown]
# **Loading.** *Plain*: make the model with random weights, read the file, copy. All weights are there twice. *Lean*:
# make the model on the `meta` device, where tensors have shapes but no memory. Map the file (`mmap`): the system reads
# a part when it is used, and may forget it again. Then the model's tensors become those of the file, one by one. Where
# they stay as they are, that takes nothing; as 16-bit numbers, the memory of the new ones. What is not in the file
# (step 7's rotations) has to be made again.

# %%
LARGE = Sizes(vocabulary=8192, width=512, layers=4, heads=8, hidden=1408, kv_heads=2)


def plain(folder: str, sizes: Sizes) -> Iterator[Decoder]:
    """Load ``folder``/model.pt; what comes last is the loaded model."""
    yield (model := Decoder(sizes, LLAMA32))
    weights = torch.load(f"{folder}/model.pt", weights_only=True)
    model.load_state_dict(weights)
    yield model


def lean(folder: str, sizes: Sizes, dtype: torch.dtype) -> Iterator[Decoder]:
    """Load ``folder``/model.safetensors as ``dtype``."""
    with torch.device("meta"):
        model = Decoder(sizes, LLAMA32)
    with safe_open(f"{folder}/model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118  # it is no dictionary
            module, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(module), leaf, nn.Parameter(file.get_tensor(name).to(dtype)))
            yield model
    model.head.weight = model.embedding.weight
    for block in model.blocks:
        block.attention.turns = frequencies(sizes)
    yield model


def save(folder: str, model: Decoder) -> None:
    """Write ``model`` to both files."""
    torch.save(model.state_dict(), f"{folder}/model.pt")
    save_file(dict(model.named_parameters()), f"{folder}/model.safetensors")


if __name__ == "__main__":
    with torch.device("meta"):
        Decoder(LARGE, LLAMA32)  # the first use of meta takes 60 MiB, which is not to be counted
    peaks, alive = {}, [Decoder(LARGE, LLAMA32)]  # memory that one way frees would be used by the next
    with tempfile.TemporaryDirectory() as folder:
        save(folder, alive[0])
        ways = {f"lean, {dtype}": lean(folder, LARGE, dtype) for dtype in (torch.float32, torch.bfloat16)}
        for name, way in (ways | {"plain": plain(folder, LARGE)}).items():
            before = private_mib()
            moments = [(private_mib() - before, model) for model in way]
            peaks[name] = max(used for used, _ in moments)
            alive.append(moments[-1][1])
    with draw("step8_memory", "MiB of memory to load a file of 59 MiB", width=6, height=2) as (chart,):
        chart.bar_label(chart.barh([*peaks], [*peaks.values()]), fmt="%.0f")

# %% [markdown]
# **Is it right?** A Llama 3.2 with the weights of transformers', saved, and loaded tensor by tensor.

# %%
if __name__ == "__main__":
    from tests.walkthrough.compare import random_llama

    ours, theirs = random_llama(Sizes(kv_heads=2, theta=500000.0, factor=32.0, original_context=32), LLAMA32)
    tokens = torch.randint(0, 100, (2, 60))
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        save(folder, ours)
        *_, model = lean(folder, ours.sizes, torch.float32)
        check("logits against transformers", model(tokens), theirs(tokens).logits, 1e-5)  # sums of up to 192 products
