"""Language models against transformers on the same weights: logits, every published layout, the way back."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from library.errors import UserError
from library.models.llm.files import export_hf, load_lm
from library.models.llm.model import TransformerLM, resize_vocabulary, separate_projections
from library.models.llm.spec import PRESETS, preset
from library.precision.files.fp8 import Fp8Scheme
from library.precision.linear import QuantizedLinear
from library.precision.recipe import Recipe, WeightLoader
from tests.models.llm.lms import NAMES, VOCABULARY, reference, relative, tokens, write_reference
from tests.models.llm.openai import write_openai_checkpoint

# Counted from the published checkpoints (transformers' model cards and num_parameters()).
PARAMETERS = {
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1558m": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama3-8b": 8_030_261_248,
    "llama3.1-8b": 8_030_261_248,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "smollm3-3b": 3_075_098_624,
    "mistral-7b": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_presets_have_the_published_number_of_parameters(name: str) -> None:
    with torch.device("meta"):
        model = TransformerLM(PRESETS[name])
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = write_reference(tmp_path, name)
    ours = load_lm(tmp_path, torch.float32)
    # 60 tokens: Llama 3.1's and 3.2's original context is 32 here, so most positions lie beyond it
    assert relative(ours(tokens()), theirs(tokens()).logits) < 1e-4


@pytest.mark.parametrize("name", ["gpt2", "llama3.2", "yarn", "biases", "mistral", "qwen2", "qwen3", "smollm3"])
def test_loss_and_gradients_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = write_reference(tmp_path, name)
    ours = load_lm(tmp_path, torch.float32).requires_grad_(True)
    given = tokens()
    targets = given[:, 1:].clone()
    targets[0, :7] = -100
    ours(given[:, :-1], targets).backward()
    labels = torch.cat([given[:, :1], targets], dim=1)
    expected = theirs(given, labels=labels)
    expected.loss.backward()
    assert relative(ours(given[:, :-1], targets), expected.loss) < 1e-5
    their_embedding = theirs.get_input_embeddings().weight.grad
    assert relative(ours.embedding.weight.grad, their_embedding) < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_the_way_to_us_and_back_is_bit_exact(name: str, tmp_path: Path) -> None:
    write_reference(tmp_path / "theirs", name)
    export_hf(load_lm(tmp_path / "theirs", torch.float32, pad_vocabulary_to=64), tmp_path / "ours")
    before, after = load_file(tmp_path / "theirs/model.safetensors"), load_file(tmp_path / "ours/model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    for key in ("bos_token_id", "eos_token_id"):
        assert getattr(again.config, key) == getattr(reference(name).config, key)
    with torch.no_grad():
        assert torch.equal(again(tokens()).logits, reference(name)(tokens()).logits)


def test_the_names_of_gpt2s_activation_are_one_function(tmp_path: Path) -> None:
    for name in ("gelu_pytorch_tanh", "gelu_fast"):
        theirs = reference("gpt2", activation_function=name)
        theirs.save_pretrained(tmp_path)
        with torch.no_grad():
            assert relative(load_lm(tmp_path, torch.float32)(tokens()), theirs(tokens()).logits) < 1e-4


def test_a_file_from_before_pytorch_1_6_or_cut_off_is_refused(tmp_path: Path) -> None:
    model = write_reference(tmp_path, "gpt2")
    (tmp_path / "model.safetensors").unlink()
    path = tmp_path / "pytorch_model.bin"
    torch.save(model.state_dict(), path, _use_new_zipfile_serialization=False)
    for content in (path.read_bytes(), b"<html>"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"pytorch_model.bin: cut off, or no file of PyTorch 1.6 or newer"):
            load_lm(tmp_path, torch.float32)


@pytest.mark.parametrize("fp8", [False, True])
def test_separated_projections_keep_their_biases(fp8: bool, tmp_path: Path) -> None:
    write_reference(tmp_path, "biases")
    loader = WeightLoader(Recipe()) if fp8 else None
    model = load_lm(tmp_path, torch.float32, fp8=loader)
    before = model(tokens())
    separate_projections(model)
    torch.testing.assert_close(model(tokens()), before, rtol=1e-4, atol=1e-5)


def test_gpt2s_first_files_have_no_prefix_and_store_masks(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = write_reference(tmp_path, "gpt2")
    state = {name: tensor.contiguous() for name, tensor in model.transformer.state_dict().items()}
    state |= {f"h.{i}.attn.bias": torch.ones(1, 1, 64, 64).tril() for i in range(3)}
    save_file(state, tmp_path / "model.safetensors")
    with torch.no_grad():
        assert relative(load_lm(tmp_path, torch.float32)(tokens()), model(tokens()).logits) < 1e-4


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "bin"])
def test_shards_load_like_one_file(safe: bool, tmp_path: Path) -> None:
    model = reference("llama3")
    _write_shards(model.state_dict(), tmp_path, safe)
    model.config.save_pretrained(tmp_path)
    with torch.no_grad():
        assert relative(load_lm(tmp_path, torch.float32)(tokens()), model(tokens()).logits) < 1e-4


def _write_shards(state: dict[str, Tensor], folder: Path, safe: bool) -> None:
    from safetensors.torch import save_file

    stem, suffix = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    names = list(state)
    weight_map = {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"{stem}-{i + 1:05d}-of-00002.{suffix}"
        tensors = {name: state[name].contiguous() for name in part}
        save_file(tensors, folder / file) if safe else torch.save(tensors, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": weight_map}))


def meta_state(state: dict[str, Tensor], head_dim: int) -> dict[str, Tensor]:
    """Return Meta's names and row order (neighbours are turned together) of transformers' Llama, written by hand."""

    def neighbours(weight: Tensor) -> Tensor:
        halves = weight.view(-1, 2, head_dim // 2, weight.shape[1])
        return halves.transpose(1, 2).reshape(weight.shape)

    found = {"tok_embeddings.weight": state["model.embed_tokens.weight"], "norm.weight": state["model.norm.weight"]}
    found["output.weight"] = state["lm_head.weight"]
    for i in range(3):
        theirs, own = f"model.layers.{i}.", f"layers.{i}."
        found[own + "attention.wq.weight"] = neighbours(state[theirs + "self_attn.q_proj.weight"])
        found[own + "attention.wk.weight"] = neighbours(state[theirs + "self_attn.k_proj.weight"])
        found[own + "attention.wv.weight"] = state[theirs + "self_attn.v_proj.weight"]
        found[own + "attention.wo.weight"] = state[theirs + "self_attn.o_proj.weight"]
        found[own + "feed_forward.w1.weight"] = state[theirs + "mlp.gate_proj.weight"]
        found[own + "feed_forward.w2.weight"] = state[theirs + "mlp.down_proj.weight"]
        found[own + "feed_forward.w3.weight"] = state[theirs + "mlp.up_proj.weight"]
        found[own + "attention_norm.weight"] = state[theirs + "input_layernorm.weight"]
        found[own + "ffn_norm.weight"] = state[theirs + "post_attention_layernorm.weight"]
    return {name: tensor.clone() for name, tensor in found.items()}


@pytest.mark.parametrize("name", ["llama2", "llama3.2"])
def test_metas_layout_loads(name: str, tmp_path: Path) -> None:
    model = reference(name)
    config = model.config
    torch.save(meta_state(model.state_dict(), 12), tmp_path / "consolidated.00.pth")
    params = {"dim": 48, "n_layers": 3, "n_heads": 4, "norm_eps": 1e-5, "vocab_size": -1}
    params |= {"n_kv_heads": config.num_key_value_heads, "rope_theta": config.rope_parameters["rope_theta"]}
    if name == "llama3.2":
        params["use_scaled_rope"] = True
    (tmp_path / "params.json").write_text(json.dumps(params))
    ours = load_lm(tmp_path, torch.float32)
    assert ours.config.tied == (name == "llama3.2")
    given = tokens(30)
    if name == "llama3.2":  # Meta's original context is 8192; below it only low frequencies are stretched
        theirs = reference(name, rope_parameters=config.rope_parameters | {"original_max_position_embeddings": 8192})
    else:
        theirs = model
    with torch.no_grad():
        assert relative(ours(given)[..., :VOCABULARY], theirs(given).logits) < 1e-4


@pytest.mark.parametrize(
    ("names", "message"),
    [(["01"], "params.json without consolidated.00.pth"), (["00", "01"], "several files are not read; use the trans")],
)
def test_metas_files_that_are_not_one_are_refused(names: list[str], message: str, tmp_path: Path) -> None:
    for name in names:
        torch.save({}, tmp_path / f"consolidated.{name}.pth")
    (tmp_path / "params.json").write_text("{}")
    with pytest.raises(UserError, match=message):
        load_lm(tmp_path, torch.float32)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> tuple:
            return (print, ("pwned",))

    torch.save({"tok_embeddings.weight": Runs()}, tmp_path / "consolidated.00.pth")
    (tmp_path / "params.json").write_text("{}")
    with pytest.raises(UserError, match="not a PyTorch checkpoint of tensors alone"):
        load_lm(tmp_path, torch.float32)


def test_openais_tensorflow_checkpoint_loads(tmp_path: Path) -> None:
    model = reference("gpt2")
    write_openai_checkpoint(tmp_path, model)
    ours = load_lm(tmp_path, torch.float32)
    with torch.no_grad():
        assert relative(ours(tokens()), model(tokens()).logits) < 1e-4
    index = tmp_path / "model.ckpt.index"
    index.write_bytes(index.read_bytes()[:-1])
    with pytest.raises(UserError, match="not an index of a TensorFlow checkpoint"):
        load_lm(tmp_path, torch.float32)


def test_an_fp8_base_computes_with_the_rounded_weights(tmp_path: Path) -> None:
    theirs = write_reference(tmp_path, "llama3")
    loading = WeightLoader(recipe=Recipe(Fp8Scheme("row")), compute="dequant")
    ours = load_lm(tmp_path, torch.float32, fp8=loading)
    kinds = {name: type(module) for name, module in ours.named_modules() if isinstance(module, torch.nn.Linear)}
    assert kinds.pop("lm_head") is torch.nn.Linear
    assert set(kinds.values()) == {QuantizedLinear}
    assert len(kinds) == 12
    with torch.no_grad():
        for module in theirs.model.layers.modules():
            if isinstance(module, torch.nn.Linear):
                scale = module.weight.abs().amax(dim=1, keepdim=True) / 448
                module.weight.copy_((module.weight / scale).to(torch.float8_e4m3fn).float() * scale)
        assert relative(ours(tokens()), theirs(tokens()).logits) < 1e-4
    with pytest.raises(UserError, match="fp8 weights is not exported"):
        export_hf(ours, tmp_path / "out")


@pytest.mark.parametrize("name", ["llama3", "llama3.2"], ids=["untied", "tied"])
def test_a_grown_vocabulary_leaves_old_rows_as_they_were(name: str, tmp_path: Path) -> None:
    from dataclasses import replace

    write_reference(tmp_path, name)
    model = load_lm(tmp_path, torch.float32, pad_vocabulary_to=64)
    before, head = model.embedding.weight[:VOCABULARY].clone(), model.lm_head.weight[:VOCABULARY].clone()
    assert model.embedding.weight.shape[0] == 192
    resize_vocabulary(model, replace(model.config, vocab_size=VOCABULARY + 3, padded_vocab_size=VOCABULARY + 3))
    assert model.embedding.weight.shape[0] == model.lm_head.weight.shape[0] == VOCABULARY + 3
    assert torch.equal(model.embedding.weight[:VOCABULARY], before)
    assert torch.equal(model.lm_head.weight[:VOCABULARY], head)
    assert torch.allclose(model.embedding.weight[VOCABULARY], before.mean(0), atol=1e-6)
    assert (model.lm_head.weight is model.embedding.weight) == (name == "llama3.2")


def test_padding_rows_change_neither_logits_nor_loss(tmp_path: Path) -> None:
    write_reference(tmp_path, "llama3.2")
    plain, padded = load_lm(tmp_path, torch.float32), load_lm(tmp_path, torch.float32, pad_vocabulary_to=64)
    given = tokens()
    with torch.no_grad():
        assert relative(padded(given)[..., :VOCABULARY], plain(given)) < 1e-6
    plain_loss = plain(given[:, :-1], given[:, 1:])
    padded.requires_grad_(True)
    loss = padded(given[:, :-1], given[:, 1:])
    loss.backward()
    assert relative(loss, plain_loss) < 1e-6
    assert padded.embedding.weight.grad[VOCABULARY:].abs().max() == 0


def test_fresh_weights_that_add_to_the_stream_are_smaller_with_depth() -> None:
    model = TransformerLM(preset("llama-tiny")).initialise(torch.Generator().manual_seed(0))
    for block in model.blocks:
        # std of n draws has a relative error of 1/sqrt(2n): 0.2 % for 147,456
        assert block.attention.out.weight.std().item() == pytest.approx(0.02 / math.sqrt(12), rel=0.01)
        assert block.feed_forward.down.weight.std().item() == pytest.approx(0.02 / math.sqrt(12), rel=0.01)
        assert block.attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma3"}, "model_type 'gemma3' is not supported; gpt2, llama, mistral"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has 'sliding_attention'"),
        ({"use_sliding_window": True}, "use_sliding_window = True is not supported, only False"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope_type 'longrope' is not supported"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "4"}}, "factor = '4' is no number above 0"),
        ({"rope_parameters": {"rope_type": "linear"}}, "'factor' is missing"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5 is not"),
        ({"num_key_value_heads": 3}, "4 heads are no multiple of 3 kv_heads"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(changes: dict, message: str, tmp_path: Path) -> None:
    write_reference(tmp_path, "llama2")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UserError, match=message):
        load_lm(tmp_path, torch.float32)
