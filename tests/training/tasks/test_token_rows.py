"""Rows of tokens trained beside a LoRA (trainable_token_indices), against peft."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from library.config.schema import NetworkConfig
from library.errors import UserError
from library.models.llm.files import load_lm
from library.models.llm.model import TransformerLM, separate_projections
from library.models.registry import lora_targets
from library.training.tasks.chat_lora import put_lora_on
from networks.network import AdapterNetwork, inject_adapter
from networks.options import parse_network_args
from tests.chat_runs import adapter, run, write_place
from tests.runs import printed
from tools import merge_lora

ROWS = "trainable_token_indices=7,281-283"
TOKENS = [7, 281, 282, 283]
TEXT = torch.tensor([[3, 7, 282, 40, 281, 9, 7, 283, 11]])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama with a head of its own, GPT-2 and a Llama with a tied head."""
    place = write_place(tmp_path_factory.mktemp("place"))
    model = LlamaForCausalLM.from_pretrained(place / "llama")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(place / "tied")
    (place / "tied/tokenizer.json").write_bytes((place / "llama/tokenizer.json").read_bytes())
    return place


def in_transformers(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def network_of(model: TransformerLM, *words: str) -> AdapterNetwork:
    """Put a fresh LoRA into ``model``."""
    separate_projections(model)
    targets = lora_targets()[model.config.family]
    options = parse_network_args(NetworkConfig(network_dim=8, network_args=list(words)), targets)
    return inject_adapter(model, options, targets, seed=0)


@pytest.mark.parametrize("name", ["llama", "tied", "gpt2"])
def test_loss_and_gradients_are_pefts(name: str, place: Path) -> None:
    embedding = "wte" if name == "gpt2" else "embed_tokens"
    indices = {embedding: TOKENS, "lm_head": TOKENS} if name == "llama" else TOKENS
    layers = ["c_attn"] if name == "gpt2" else ["q_proj"]
    theirs = get_peft_model(in_transformers(place / name), LoraConfig(target_modules=layers, r=4,
                            trainable_token_indices=indices, fan_in_fan_out=name == "gpt2"))  # fmt: skip
    theirs(TEXT, labels=TEXT).loss.backward()
    rows = {key: p.grad for key, p in theirs.named_parameters() if "trainable_tokens_delta" in key and p.requires_grad}

    model = load_lm(place / name, torch.float32)
    network = network_of(model, ROWS)
    loss = model(TEXT[:, :-1], TEXT[:, 1:])
    loss.backward()
    assert loss.item() == pytest.approx(theirs(TEXT, labels=TEXT).loss.item(), rel=1e-5)
    found = {key: layer.token_rows.grad for key, layer in network.modules.items() if layer.kind == "tokens"}
    assert len(found) == len(rows) == (2 if name == "llama" else 1)
    for key, gradient in found.items():
        (wanted,) = (value for other, value in rows.items() if f".{key}." in other)
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-6)
    assert not any(p.requires_grad for key, p in model.named_parameters() if key.endswith("base.weight"))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {"loraplus": True}),
        ("tied", {"scale_weight_norms": 1.0}),
        ("gpt2", {}),
        ("tied", {"network_type": "dora"}),
        ("llama", {"fp8_scaled": True, "network_alpha": 3}),
    ],
)
def test_a_run_trains_them_and_peft_and_a_merge_do_what_it_learnt(
    name: str, settings: dict[str, object], place: Path, tmp_path: Path
) -> None:
    words = [ROWS, *(["loraplus_lr_ratio=4"] if settings.pop("loraplus", False) else [])]
    path = {"pretrained_model_name_or_path": place / name}
    kind = "gpt2" if name == "gpt2" else "llama"
    run(place, tmp_path, kind, network_args=words, sample_prompts=["say 3"], sample_tokens=4, **settings, **path)
    base = in_transformers(place / name)
    before = base.get_input_embeddings().weight.detach().clone()
    with torch.no_grad():
        theirs = PeftModel.from_pretrained(base, tmp_path / "lora")(TEXT).logits
        ours = load_lm(place / name, torch.float32)
        untrained = ours(TEXT)
        network = put_lora_on(ours, tmp_path / "lora")
        assert (ours(TEXT) - theirs).abs().max() <= 1e-4 * theirs.abs().max()
        assert (untrained - theirs).abs().max() > 0.05 * theirs.abs().max()
        with network.bypassed():
            torch.testing.assert_close(ours(TEXT), untrained, rtol=1e-5, atol=1e-5)
        if network.options.kind == "lora":
            network.set_multiplier(0.0)
            torch.testing.assert_close(ours(TEXT), untrained, rtol=1e-5, atol=1e-5)
    with pytest.raises(SystemExit):  # rows of tokens are no LoRA that could be added to another
        printed(merge_lora, "--lora", tmp_path / "lora", tmp_path / "lora", "--save_to", tmp_path / "sum.safetensors")
    printed(merge_lora, "--model", place / name, "--lora", tmp_path / "lora", "--save_to", tmp_path / "merged")
    merged = in_transformers(tmp_path / "merged")
    assert (merged(TEXT).logits - theirs).abs().max() <= 1e-4 * theirs.abs().max()
    others = [token for token in range(290) if token not in TOKENS]
    assert torch.equal(merged.get_input_embeddings().weight[others], before[others])
    assert not torch.equal(merged.get_input_embeddings().weight[TOKENS], before[TOKENS])


def test_a_resumed_run_and_one_that_goes_on_have_the_same_rows(place: Path, tmp_path: Path) -> None:
    run(place, tmp_path / "whole", network_args=[ROWS])
    run(place, tmp_path / "first", network_args=[ROWS], save_every_n_steps=3, save_state=True)
    run(place, tmp_path / "second", network_args=[ROWS], resume=tmp_path / "first/lora-step00000003-state")
    whole, second = (adapter(tmp_path / name / "lora") for name in ("whole", "second"))
    assert whole.keys() == second.keys()
    assert all(torch.equal(whole[key], second[key]) for key in whole)
    again = network_of(load_lm(place / "llama", torch.float32), ROWS)
    assert "16 modules loaded" in again.load_file(tmp_path / "whole/lora")
    rows = whole["base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"]
    assert torch.equal(again.state_dict()["model.embed_tokens.token_rows"], rows)
    with pytest.raises(UserError, match="rows of other tokens"):
        network_of(load_lm(place / "llama", torch.float32), "trainable_token_indices=8-11").load_file(
            tmp_path / "whole/lora"
        )
    with pytest.raises(UserError, match="trainable_token_indices"):
        run(place, tmp_path / "third", network_args=["trainable_token_indices=8"],
            resume=tmp_path / "first/lora-step00000003-state")  # fmt: skip


def test_what_peft_trained_is_read(place: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    indices = {"lm_head": [9, 3], "embed_tokens": [200, 7, 11]}  # in no order, and others each
    theirs = get_peft_model(in_transformers(place / "llama"), LoraConfig(target_modules=["v_proj"], r=2,
                            init_lora_weights=False, trainable_token_indices=indices))  # fmt: skip
    for key, parameter in theirs.named_parameters():
        if "trainable_tokens_delta" in key:
            parameter.data.normal_()
    theirs.save_pretrained(tmp_path)
    ours = load_lm(place / "llama", torch.float32)
    put_lora_on(ours, tmp_path)
    torch.testing.assert_close(ours(TEXT), theirs(TEXT).logits, rtol=1e-4, atol=1e-4)
    assert load_file(tmp_path / "adapter_model.safetensors").keys()
    said = json.loads((tmp_path / "adapter_config.json").read_text())
    for wrong in (None, [1], "all", {"lm_head": [9, 3]}):
        (tmp_path / "adapter_config.json").write_text(json.dumps(said | {"trainable_token_indices": wrong}))
        with pytest.raises(UserError, match="trainable_token_indices"):
            put_lora_on(load_lm(place / "llama", torch.float32), tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"network_args": ["trainable_token_indices=280-290"]}, "no token 290.*extend_tokenizer"),
        ({"network_args": ["trainable_token_indices=all"]}, "must be numbers of tokens"),
        ({"network_args": ["trainable_token_indices=<x>"]}, "trainable_token_indices=<x>"),
    ],
)
def test_tokens_that_cannot_be_trained_are_refused(
    settings: dict[str, object], message: str, place: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        run(place, tmp_path, **settings)


def test_models_of_images_have_no_tokens() -> None:
    with pytest.raises(UserError, match="unknown key 'trainable_token_indices'"):
        parse_network_args(NetworkConfig(network_args=[ROWS]), lora_targets()["flux"])
