"""Language models in GGUF against transformers on the same numbers, as the ``gguf`` package reads them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from library.config.model_types import LANGUAGE_MODEL_KINDS
from library.errors import UserError
from library.gguf_header import has_language_model
from library.llm.tokenizer_files import read_gguf_templates, read_gguf_tokenizer
from library.models.llm.files import TransformersFiles, load_lm, open_lm
from library.models.llm.model import JoinedLinear, separate_projections
from library.models.llm.spec import KINDS
from library.nn.rope import LinearScaling, Llama31Scaling, YarnScaling
from library.precision.linear import QuantizedLinear
from library.safetensors_io import RowRange
from tests.fuzz import harmless
from tests.models.llm.lms import VOCABULARY, reference, relative, tokens, with_weights, write_model

BLOCKS = {"hidden_size": 64, "intermediate_size": 96}  # whole blocks of 32
LARGE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}  # and of 256
NAMES = ["llama2", "llama3", "qwen2", "qwen3", "smollm3", "mistral without a window", "biases"]
# heads of 24 are whole blocks together; llama.cpp has SmolLM 3's interval in its code
MAY_DIFFER = {
    "mistral without a window": {"head_dim": 24},
    "smollm3": {"no_rope_layer_interval": 4, "num_hidden_layers": 5},
}


def tiny(name: str, **changes: Any) -> Any:
    return reference(name, **BLOCKS | MAY_DIFFER.get(name, {}) | changes)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_those_of_transformers_with_the_files_numbers(name: str, kind: str, tmp_path: Path) -> None:
    theirs = tiny(name)
    theirs = with_weights(theirs, write_model(tmp_path / "m.gguf", theirs, kind))
    expected = theirs(tokens()).logits
    kept, high = (load_lm(tmp_path / "m.gguf", torch.float32, dequantised=how) for how in (False, True))
    assert any(isinstance(layer, QuantizedLinear) for layer in kept.modules()) == kind.startswith("Q")
    assert not any(isinstance(layer, QuantizedLinear) for layer in high.modules())
    # fp32 sums of 96 products in another order
    assert relative(kept(tokens()), expected) < 1e-4
    assert relative(high(tokens()), expected) < 1e-4
    separate_projections(kept)
    assert relative(kept(tokens()), expected) < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_a_file_of_mixed_types_has_a_layer_for_each(kind: str, tmp_path: Path) -> None:
    theirs = reference("llama3", **LARGE)

    def type_of(name: str) -> str:  # as Q4_K_M has it: v and down finer, in some blocks
        finer = "layers.0" in name and ("v_proj" in name or "down" in name)
        return "Q8_0" if finer or "embed" in name or "lm_head" in name else kind

    theirs = with_weights(theirs, write_model(tmp_path / "m.gguf", theirs, type_of))
    expected = theirs(tokens()).logits
    kept = load_lm(tmp_path, torch.float32)  # the folder, in which it is alone
    assert isinstance(kept.blocks[0].attention.qkv, JoinedLinear)
    assert isinstance(kept.blocks[1].attention.qkv, QuantizedLinear)
    assert isinstance(kept.lm_head, QuantizedLinear)
    assert relative(kept(tokens()), expected) < 1e-4
    assert relative(load_lm(tmp_path, torch.float32, dequantised=True)(tokens()), expected) < 1e-4
    separate_projections(kept)
    assert relative(kept(tokens()), expected) < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama3", "qwen2", "qwen3"])
def test_transformers_reads_the_same_out_of_the_file(name: str, tmp_path: Path) -> None:
    vocabulary = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": [f"t{i}" for i in range(VOCABULARY)]}
    theirs = tiny(name, **{"head_dim": 128} if name == "qwen3" else {})  # the only one that transformers reads so
    more = vocabulary | {f"{theirs.config.model_type}.vocab_size": VOCABULARY}
    write_model(tmp_path / "m.gguf", theirs, "Q8_0", more)
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32).eval()
    assert relative(load_lm(tmp_path / "m.gguf", torch.float32)(tokens()), read(tokens()).logits) < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama3.1", "qwen2", "smollm3", "mistral"])
def test_a_transformers_folder_of_it_is_read_by_transformers(name: str, tmp_path: Path) -> None:
    from library.llm.conversion import write_transformers

    theirs, more, divisors = tiny(name), {}, None
    if name == "llama3.1":
        divisors = published_divisors(16, 500000.0, 8.0)
        theirs.config.rope_parameters["original_max_position_embeddings"] = 8192
        theirs = type(theirs)(theirs.config).eval()
    if name == "mistral":
        more = {"llama.attention.sliding_window": 5}
    theirs = with_weights(theirs, write_model(tmp_path / "m.gguf", theirs, "Q8_0", more, divisors))
    remark = write_transformers(TransformersFiles(tmp_path / "m.gguf"), tmp_path / "out", torch.float32)
    assert "no tokenizer.ggml.tokens" in remark
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(read) is type(theirs)
    assert relative(read(tokens()).logits, theirs(tokens()).logits) < 1e-6
    default = TransformersFiles(tmp_path / "m.gguf").dtype
    assert default is torch.bfloat16


def test_every_layout_is_offered_under_transformers_names(tmp_path: Path) -> None:
    for name in ("gpt2", "llama3.2", "qwen3"):
        model = reference(name)
        model.save_pretrained(tmp_path / name)
        files = TransformersFiles(tmp_path / name)
        expected = {key: tensor for key, tensor in model.state_dict().items() if key in files.entries}
        assert files.entries.keys() >= model.state_dict().keys() - {"lm_head.weight"}
        assert all(torch.equal(files.read([RowRange(key)]), tensor) for key, tensor in expected.items())


def published_divisors(head_dim: int, theta: float, factor: float) -> np.ndarray:
    """Return what llama.cpp's converter writes for Llama 3.1 (``generate_extra_tensors``), in its words."""
    low, high, old = 1.0, 4.0, 8192
    found = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < old / high:
            found.append(1.0)
        elif wavelength > old / low:
            found.append(factor)
        else:
            smooth = (old / wavelength - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


@pytest.mark.parametrize(("factor", "scaling"), [(8.0, Llama31Scaling()), (32.0, Llama31Scaling(32.0)), (1.0, None)])
def test_stretched_frequencies_are_known_by_their_divisors(
    factor: float, scaling: Llama31Scaling | None, tmp_path: Path
) -> None:
    write_model(tmp_path / "m.gguf", tiny("llama3"), "Q8_0", divisors=published_divisors(16, 500000.0, factor))
    assert open_lm(tmp_path / "m.gguf")[0].rope_scaling == scaling


def test_divisors_of_another_formula_are_refused(tmp_path: Path) -> None:
    divisors = published_divisors(16, 500000.0, 8.0)
    divisors[3] *= 1.01
    write_model(tmp_path / "m.gguf", tiny("llama3"), "Q8_0", divisors=divisors)
    with pytest.raises(UserError, match="m.gguf: rope_freqs.weight is not made by Llama 3.1's scaling"):
        open_lm(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("more", "scaling"),
    [
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, LinearScaling(4.0)),
        ({"llama.rope.scaling.type": "none"}, None),
        ({"llama.rope.scale_linear": 2.0}, LinearScaling(2.0)),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
            },
            YarnScaling(4.0, 32, 0.1 * math.log(4.0) + 1.0),
        ),
    ],
)
def test_scalings_in_the_metadata(more: dict[str, Any], scaling: object, tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", tiny("llama3"), "Q8_0", more)
    assert open_lm(tmp_path / "m.gguf")[0].rope_scaling == scaling


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"llama.expert_count": 8}, "llama.expert_count = 8 is not supported, only 0"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count = 8 is not supported, only 16"),
        ({"llama.attention.head_count_kv": [2, 2, 1]}, r"llama.attention.head_count_kv = \[2, 2, 1\] is not supported"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.embedding_length": 0}, "is 0; download it again"),
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type = 'longrope' is not supported"),
        ({"llama.attention.head_count": 3}, "3 heads are no multiple of 2 kv_heads"),
    ],
)
def test_what_is_not_carried_is_refused_by_its_key(more: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", tiny("llama3"), "Q8_0", more)
    with pytest.raises(UserError, match=message):
        load_lm(tmp_path / "m.gguf", torch.float32)


OF_A_MODEL = [
    *(f"attention.{name}" for name in ("head_count", "head_count_kv", "key_length", "layer_norm_rms_epsilon")),
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "expert_count", "rope.freq_base"),
    *(
        f"rope.scaling.{name}"
        for name in ("type", "factor", "original_context_length", "attn_factor", "yarn_beta_fast")
    ),
    *("rope.scale_linear", "rope.dimension_count", "attention.sliding_window"),
]
OF_A_TOKENIZER = ["model", "pre", "tokens", "merges", "scores", "token_type", "add_bos_token", "eos_token_id"]
VALUES = [7, -1, 0, 1.5, math.nan, math.inf, "x", "", True, [7, 8], [1.5], ["a", "b c"], [True]]


@pytest.mark.parametrize(
    "key",
    [
        *("general.architecture", "general.alignment", "split.count", "general.name", "tokenizer.chat_template"),
        *(f"llama.{key}" for key in OF_A_MODEL),
        *(f"tokenizer.ggml.{key}" for key in OF_A_TOKENIZER),
    ],
)
def test_a_value_of_any_type_is_taken_or_refused_in_a_line(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, size = tiny("llama3"), VOCABULARY
    usual: dict[str, Any] = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe"}
    usual |= {"tokenizer.ggml.tokens": [f"t{i}" for i in range(size)], "tokenizer.ggml.token_type": [1] * size}
    usual |= {"tokenizer.ggml.merges": ["t 1"], "llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0}
    usual |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.5] * size} if "scores" in key else {}
    monkeypatch.setattr(gguf.GGUFWriter, "add_architecture", lambda self: None)  # it is in ``more``
    for value in [*VALUES, list(range(size)), [99] * size]:
        if isinstance(value, int) and value < 0:
            monkeypatch.setattr(gguf.GGUFWriter, "add_uint32", gguf.GGUFWriter.add_int32)
        path = tmp_path / "m.gguf"
        write_model(path, theirs, "F32", {"general.architecture": "llama"} | usual | {key: value})
        for read in (open_lm, read_gguf_tokenizer, read_gguf_templates, has_language_model):
            harmless(read, path)


def test_another_architecture_and_several_files_are_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "gemma3")
    writer.add_tensor("x", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match=r"a.gguf: general.architecture 'gemma3' is not supported; llama, .* are"):
        open_lm(tmp_path / "a.gguf")
    (tmp_path / "b.gguf").write_bytes((tmp_path / "a.gguf").read_bytes())
    with pytest.raises(UserError, match="2 GGUF files, a.gguf the first; give the path of one"):
        open_lm(tmp_path)


def test_a_file_without_a_tensor_names_it(tmp_path: Path) -> None:
    theirs = tiny("llama3")
    del theirs.model.layers[1].mlp.down_proj
    write_model(tmp_path / "m.gguf", theirs, "Q8_0")
    with pytest.raises(UserError, match=r"'model.layers.1.mlp.down_proj.weight' is missing"):
        load_lm(tmp_path / "m.gguf", torch.float32)


def test_the_page_knows_the_kinds_without_the_model() -> None:
    assert tuple(KINDS) == LANGUAGE_MODEL_KINDS
