"""What the course is checked against: transformers' models on the same random weights, and Tandem's.

Nothing of a language model is explained here.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from safetensors.torch import save_file
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

from library.models.llm.files import load_lm
from tests.models.llm.openai import write_openai_checkpoint
from walkthrough.course import check
from walkthrough.sizes import Parts, Sizes
from walkthrough.step1_tokens import Tokenizer
from walkthrough.step2_gpt2 import GPT2, Decoder
from walkthrough.step6_files import from_hugging_face

transformers.utils.logging.disable_progress_bar()


def library_tokenizer(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """Return the ``tokenizers`` package's byte pair encoding with the merges of ``tokenizer``."""
    letters = bytes_to_unicode()
    written = {token: "".join(letters[byte] for byte in token) for token in tokenizer.tokens}
    merges = [(written[left], written[right]) for left, right in tokenizer.ranks]
    theirs = tokenizers.Tokenizer(BPE({written[token]: i for i, token in enumerate(tokenizer.tokens)}, merges))
    theirs.pre_tokenizer, theirs.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    return theirs


def random_gpt2(sizes: Sizes, seed: int = 0) -> tuple[Decoder, PreTrainedModel]:
    """Return the course's GPT-2 and transformers', with the same random weights."""
    config = GPT2Config(
        vocab_size=sizes.vocabulary,
        n_positions=sizes.context,
        n_embd=sizes.width,
        n_layer=sizes.layers,
        n_head=sizes.heads,
        n_inner=sizes.hidden,
        layer_norm_epsilon=sizes.eps,
        bos_token_id=0,
        eos_token_id=0,
    )
    theirs = _random(config, seed)
    ours = Decoder(sizes, GPT2)
    ours.load_state_dict(from_hugging_face(theirs.state_dict()))
    return ours, theirs


def write_hugging_face(folder: Path, theirs: PreTrainedModel, tokenizer: Tokenizer) -> None:
    """Write a GPT-2 as Hugging Face publishes it: no "transformer." before the names."""
    theirs.config.save_pretrained(folder)
    state = {name.removeprefix("transformer."): t.contiguous() for name, t in theirs.transformer.state_dict().items()}
    save_file(state, folder / "model.safetensors")
    library_tokenizer(tokenizer).model.save(str(folder))


def write_openai(folder: Path, theirs: PreTrainedModel, tokenizer: Tokenizer) -> None:
    """Write a GPT-2 as OpenAI publishes it: a TensorFlow checkpoint, hparams.json, vocab.bpe and encoder.json."""
    write_openai_checkpoint(folder, theirs)
    library_tokenizer(tokenizer).model.save(str(folder))
    (folder / "merges.txt").rename(folder / "vocab.bpe")
    (folder / "vocab.json").rename(folder / "encoder.json")


def random_llama(sizes: Sizes, parts: Parts, seed: int = 0) -> tuple[Decoder, PreTrainedModel]:
    """Return the course's Llama of ``parts`` and transformers', with the same random weights."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": sizes.theta}
    if sizes.factor != 1:
        rope |= {"rope_type": "llama3", "factor": sizes.factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope["original_max_position_embeddings"] = sizes.original_context
    config = LlamaConfig(
        vocab_size=sizes.vocabulary,
        max_position_embeddings=sizes.context,
        hidden_size=sizes.width,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        intermediate_size=sizes.hidden,
        rms_norm_eps=sizes.eps,
        rope_parameters=rope,
        tie_word_embeddings=parts.tied,
    )
    theirs = _random(config, seed)
    ours = Decoder(sizes, parts)
    ours.load_state_dict({name: theirs.state_dict()[llama_name(name)] for name in ours.state_dict()})
    return ours, theirs


def llama_name(name: str) -> str:
    """Return transformers' name of a weight of the course's Llama."""
    changes = {"blocks.": "model.layers.", "attention": "self_attn", "feed_forward": "mlp", "head.": "lm_head."}
    changes |= {"norm1": "input_layernorm", "norm2": "post_attention_layernorm", "out.": "o_proj."}
    changes |= {f".{part}.": f".{part}_proj." for part in ("q", "k", "v", "gate", "up", "down")}
    for ours, theirs in changes.items():
        name = name.replace(ours, theirs)
    return {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}.get(name, name)


def _random(config: Any, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():  # nothing stays at 0 or 1, where a mistake would not show
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def tandem(theirs: PreTrainedModel) -> nn.Module:
    """Return Tandem's model of what transformers writes to a folder."""
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        return load_lm(folder, torch.float32).requires_grad_(True)


def compare(name: str, ours: Decoder, theirs: PreTrainedModel, length: int = 60) -> None:
    """Check logits and the embedding's gradient against transformers and Tandem, on random tokens [3, length]."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, theirs.config.vocab_size, (3, length), generator=generator)
    own_logits, own_gradient = _answers(ours, ours.embedding, tokens)
    their_tandem: Any = tandem(theirs)
    for other, model, embedding in (
        ("transformers", theirs, theirs.get_input_embeddings()),
        ("Tandem", their_tandem, their_tandem.embedding),
    ):
        logits, gradient = _answers(model, embedding, tokens)
        check(f"{name}: logits against {other}", own_logits, logits, 1e-5)  # fp32 sums of up to 200 products
        check(f"{name}: gradient against {other}", own_gradient, gradient, 1e-4)


def _answers(model: Any, embedding: nn.Embedding, tokens: Tensor) -> tuple[Tensor, Tensor]:
    answer = model(tokens)
    logits = getattr(answer, "logits", answer)
    logits.logsumexp(-1).mean().backward()
    assert embedding.weight.grad is not None
    return logits.detach(), embedding.weight.grad
