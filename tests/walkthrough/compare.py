"""What the walk is checked against: transformers' models on the same random weights, and Tandem's.

Nothing of a language model is explained here.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedModel

from library.llm.generation import SamplingSettings, generate_tokens
from library.models.llm.files import load_lm
from walkthrough.gpt2 import GPT2, Decoder, Parts, Sizes

transformers.utils.logging.disable_progress_bar()
_GPT2 = {"attention.out": "attn.c_proj", "feed_forward.up": "mlp.c_fc", "feed_forward.down": "mlp.c_proj"}
_LLAMA = {
    f"attention.{ours}": f"self_attn.{theirs}_proj" for ours, theirs in (*zip("qkv", "qkv", strict=True), ("out", "o"))
}
_LLAMA |= {f"feed_forward.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}


def random_gpt2(sizes: Sizes, seed: int = 0) -> tuple[Decoder, PreTrainedModel]:
    """Return the walk's GPT-2 and transformers', with the same random weights."""
    config = GPT2Config(
        vocab_size=sizes.vocabulary, n_positions=sizes.context, n_embd=sizes.width, n_layer=sizes.layers,
        n_head=sizes.heads, n_inner=sizes.hidden, layer_norm_epsilon=sizes.eps, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    theirs = _random(config, seed)
    state = {
        f"{k}.weight": theirs.state_dict()[f"transformer.{v}.weight"]
        for k, v in {"embedding": "wte", "positions": "wpe"}.items()
    }
    for i, block in enumerate(theirs.transformer.h):
        own = {
            f"{name}.{leaf}": block.get_submodule(part).state_dict()[leaf]
            for name, part in _GPT2.items()
            for leaf in ("weight", "bias")
        }
        for leaf in ("weight", "bias"):
            joined = block.attn.c_attn.state_dict()[leaf].chunk(3, dim=-1)
            own |= {f"attention.{name}.{leaf}": part for name, part in zip("qkv", joined, strict=True)}
            own |= {f"norm{n}.{leaf}": block.get_submodule(f"ln_{n}").state_dict()[leaf] for n in (1, 2)}
        state |= {f"blocks.{i}.{name}": t.t() if t.ndim == 2 else t for name, t in own.items()}  # theirs is [in, out]
    state |= {f"norm.{leaf}": tensor for leaf, tensor in theirs.transformer.ln_f.state_dict().items()}
    return _filled(Decoder(sizes, GPT2), state), theirs


def random_llama(sizes: Sizes, parts: Parts, seed: int = 0) -> tuple[Decoder, PreTrainedModel]:
    """Return the walk's Llama of ``parts`` and transformers', with the same random weights."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": sizes.theta}
    if sizes.factor != 1:
        rope |= {"rope_type": "llama3", "factor": sizes.factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope["original_max_position_embeddings"] = sizes.original_context
    config = LlamaConfig(
        vocab_size=sizes.vocabulary, max_position_embeddings=sizes.context, hidden_size=sizes.width,
        num_hidden_layers=sizes.layers, num_attention_heads=sizes.heads, num_key_value_heads=sizes.kv_heads,
        intermediate_size=sizes.hidden, rms_norm_eps=sizes.eps, rope_parameters=rope, tie_word_embeddings=parts.tied,
    )  # fmt: skip
    theirs = _random(config, seed)
    return _filled(Decoder(sizes, parts), llama_state(theirs)), theirs


def llama_state(theirs: PreTrainedModel) -> dict[str, Tensor]:
    """Return a transformers Llama's weights under the walk's names."""
    model, state = theirs.model, {}
    for i, layer in enumerate(model.layers):
        names = {**_LLAMA, "norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
        state |= {f"blocks.{i}.{ours}.weight": layer.get_submodule(name).weight for ours, name in names.items()}
    return state | {
        "embedding.weight": model.embed_tokens.weight,
        "norm.weight": model.norm.weight,
        "head.weight": theirs.lm_head.weight,
    }


def _random(config: Any, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():  # nothing stays at 0 or 1, where a mistake would not show
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def _filled(model: Decoder, state: Mapping[str, Tensor]) -> Decoder:
    own = {name: tensor.detach().clone() for name, tensor in state.items()}
    model.load_state_dict({"head.weight": own["embedding.weight"], **own})
    return model


def tandem(theirs: PreTrainedModel) -> nn.Module:
    """Return Tandem's model of what transformers writes to a folder."""
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        return load_lm(folder, torch.float32)


@torch.no_grad()
def largest_difference(ours: Decoder, theirs: PreTrainedModel, length: int = 60) -> str:
    """Return how far logits are from those of transformers and of Tandem, as a share of the largest one, in words."""
    tokens = torch.randint(0, theirs.config.vocab_size, (2, length), generator=torch.Generator().manual_seed(1))
    logits, expected = ours(tokens), theirs(tokens).logits
    shares = [(logits - other).abs().max() / expected.abs().max() for other in (expected, tandem(theirs)(tokens))]
    return "largest difference to transformers {:.0e}, to Tandem {:.0e}".format(*map(float, shares))


def tandem_of(theirs: PreTrainedModel, model: Decoder) -> Callable[[Tensor, int], Tensor]:
    """Return Tandem's greedy writing with the weights of the walk's Llama ``model``; ``theirs`` has the same sizes."""
    theirs.resize_token_embeddings(model.embedding.num_embeddings)
    for name, tensor in llama_state(theirs).items():
        tensor.data.copy_(model.state_dict()[name])
    fast: Any = tandem(theirs)

    def write(tokens: Tensor, count: int) -> Tensor:
        new = generate_tokens(fast, tokens.tolist(), SamplingSettings(max_new_tokens=count, temperature=0))
        return torch.cat((tokens, torch.tensor(new)), dim=1)

    return write


def time_of(function: Callable[..., Tensor], *arguments: Any) -> tuple[Tensor, float]:
    """Return what a function returns when it is called a second time, and the seconds it takes."""
    function(*arguments)
    begun = time.perf_counter()
    return function(*arguments), time.perf_counter() - begun


def parameters(model: nn.Module) -> int:
    """Return how many there are."""
    return sum(parameter.numel() for parameter in model.parameters())
