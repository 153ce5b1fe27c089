"""A step of a LoRA on a language model beside transformers and peft; packing and accumulation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from library.config.schema import NetworkConfig
from library.errors import UserError
from library.llm.chat_batches import Example, collate_windows
from library.models.llm.files import load_lm
from library.models.llm.model import TransformerLM, separate_projections
from library.models.registry import lora_targets
from library.nn.cross_entropy import IGNORED
from library.training.tasks.chat_lora import put_lora_on, token_mean_loss
from networks.network import AdapterNetwork, inject_adapter
from networks.options import parse_network_args
from tests.chat_runs import adapter, flags, run, train_flags
from tests.models.llm.lms import VOCABULARY, write_reference
from tests.runs import losses_of, metadata, metrics, same


def examples(lengths: tuple[int, ...] = (9, 5, 12, 3)) -> list[Example]:
    """Return random conversations, each with its last tokens learnt."""
    random, made = torch.Generator().manual_seed(0), []
    for length in lengths:
        tokens = torch.randint(0, VOCABULARY, (length + 1,), generator=random)
        targets = tokens[1:].clone()
        targets[: length // 2] = IGNORED
        made.append(Example(tokens[:-1], targets))
    return made


def model_with_lora(folder: Path) -> tuple[TransformerLM, AdapterNetwork]:
    """Return the model in fp32 with a LoRA whose B is filled, so that A gets a gradient too."""
    model = load_lm(folder, torch.float32)
    separate_projections(model)
    targets = lora_targets()[model.config.family]
    options = parse_network_args(NetworkConfig(network_dim=4, network_alpha=3.0), targets)
    network = inject_adapter(model, options, targets, seed=0)
    random = torch.Generator().manual_seed(1)
    for layer in network.modules.values():
        layer.lora_B.weight.data.normal_(std=0.1, generator=random)
    return model.train(), network


def gradients(network: AdapterNetwork) -> dict[str, Tensor]:
    found = {}
    for name, layer in network.modules.items():
        for part, parameter in layer.trained().items():
            assert parameter.grad is not None
            found[f"{name}.{part}"], parameter.grad = parameter.grad, None
    return found


@pytest.mark.parametrize("name", ["gpt2", "llama3", "llama3.2"])
def test_a_step_has_the_loss_and_the_gradients_of_transformers_and_peft(tmp_path: Path, name: str) -> None:
    theirs = write_reference(tmp_path, name)
    model, network = model_with_lora(tmp_path)
    batch = collate_windows([(example,) for example in examples()])
    learnt = int((batch.targets != IGNORED).sum())
    loss, counted = token_mean_loss(model, batch)
    loss.backward()

    config = LoraConfig(
        r=4, lora_alpha=3, target_modules=list(network.modules), fan_in_fan_out=name == "gpt2", task_type="CAUSAL_LM"
    )
    peft = get_peft_model(theirs, config)
    named = dict(peft.named_parameters())
    for key, tensor in network.state_dict().items():
        named[f"base_model.model.{key.replace('.weight', '.default.weight')}"].data.copy_(tensor)
    padding = torch.arange(batch.tokens.shape[1]) < torch.tensor([[len(e.tokens)] for e in examples()])
    logits = peft(batch.tokens, attention_mask=padding.long()).logits
    their_loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED)
    their_loss.backward()

    assert int(counted) == learnt
    # fp32; sums in another order, of projections that are stacked there or here
    torch.testing.assert_close(loss, their_loss, rtol=1e-5, atol=0)
    for key, gradient in gradients(network).items():
        other = named[f"base_model.model.{key.replace('.weight', '.default.weight')}"].grad
        assert other is not None
        assert (gradient - other).abs().max() <= 2e-5 * other.abs().max(), key


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama3"])
def test_packed_conversations_learn_as_those_in_rows_of_their_own(
    tmp_path: Path, name: str, checkpointing: bool
) -> None:
    write_reference(tmp_path, name)
    model, network = model_with_lora(tmp_path)
    if checkpointing:
        model.enable_gradient_checkpointing()
    four = examples()
    alone = collate_windows([(example,) for example in four])
    packed = collate_windows([(four[2], four[0]), (four[1], four[3])])
    assert alone.documents is None
    assert packed.documents is not None
    found = []
    for batch in (alone, packed):
        loss, _ = token_mean_loss(model, batch)
        loss.backward()
        found.append((loss.detach(), gradients(network)))
    # the same numbers summed in other places; a token of another conversation would change the second digit
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=0)
    for key, gradient in found[0][1].items():
        assert (gradient - found[1][1][key]).abs().max() <= 2e-5 * gradient.abs().max(), key
    leaking, _ = token_mean_loss(model, collate_windows([(e,) for e in _joined(packed.tokens, packed.targets)]))
    assert (leaking.detach() - found[0][0]).abs() > 1e-3  # that is what a mask prevents


def _joined(tokens: Tensor, targets: Tensor) -> list[Example]:
    return [Example(row, target) for row, target in zip(tokens, targets, strict=True)]


def test_microbatches_give_the_mean_over_tokens(tmp_path: Path) -> None:
    write_reference(tmp_path, "llama3")
    model, network = model_with_lora(tmp_path)
    batch = collate_windows([(example,) for example in examples()])
    loss, _ = token_mean_loss(model, batch)
    loss.backward()
    together = gradients(network)
    for part in batch.chunk(4):
        loss, _ = token_mean_loss(model, part)
        (loss / 4).backward()  # as a pipeline divides
    for key, gradient in gradients(network).items():
        assert (gradient - together[key]).abs().max() <= 2e-5 * gradient.abs().max(), key


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_a_run_learns_the_answers_and_peft_loads_what_it_leaves(place: Path, tmp_path: Path, model_type: str) -> None:
    run(
        place,
        tmp_path,
        model_type,
        max_train_steps=40,
        network_args=["down_proj_dim=4" if model_type == "llama" else "mlp_c_proj_dim=4", "loraplus_lr_ratio=4"],
        packing=True,
        max_length=40,
        validation_data=[place / "data.jsonl"],
        validate_every_n_steps=20,
        save_best=True,
        sample_prompts=["say 3"],
        sample_tokens=12,
        sample_at_first=True,
        output_name="assistant",
    )
    lines, validated = metrics(tmp_path), losses_of(tmp_path, "val_loss")
    assert validated[-1] < 0.3 * validated[0]  # what it learnt by heart; a uniform guess has ln 290 = 5.7
    assert {"lr/lora_A", "lr/lora_B", "loss_tokens", "grad_norm"} <= lines[-1].keys() | lines[-2].keys()
    assert (tmp_path / "samples/step000000.txt").is_file()
    assert "four" in (tmp_path / "samples/step000040.txt").read_text()
    assert (tmp_path / "assistant-best/adapter_config.json").is_file()

    tokens = torch.randint(0, 290, (2, 20), generator=torch.Generator().manual_seed(0))
    base = AutoModelForCausalLM.from_pretrained(place / model_type, dtype=torch.float32).eval()
    theirs = PeftModel.from_pretrained(base, tmp_path / "assistant")(tokens).logits
    ours = load_lm(place / model_type, torch.float32)
    before = ours(tokens)
    network = put_lora_on(ours, tmp_path / "assistant")
    assert (ours(tokens) - theirs).abs().max() <= 1e-4 * theirs.abs().max()
    assert (before - theirs).abs().max() > 0.1 * theirs.abs().max()
    network.set_multiplier(0.0)
    torch.testing.assert_close(ours(tokens), before, rtol=1e-5, atol=1e-5)  # projections apart: other sums
    with pytest.raises(UserError, match="has a LoRA already"):
        put_lora_on(ours, tmp_path / "assistant")
    found = metadata(tmp_path / "assistant/adapter_model.safetensors")
    assert found["tandem.chat_template"] == "plain"
    assert str(place) not in json.dumps(found)  # nobody's folders


@pytest.mark.parametrize(
    "settings", [{}, {"packing": True, "max_length": 40, "ema_decay": 0.9}], ids=["rows", "packed"]
)
def test_a_resumed_run_gives_the_same_adapter(place: Path, tmp_path: Path, settings: dict[str, object]) -> None:
    run(place, tmp_path / "whole", save_every_n_steps=3, save_state=True, save_last_n_steps=2, **settings)
    assert not (tmp_path / "whole/lora-step00000003").exists()  # older than the last two steps
    run(place, tmp_path / "first", save_every_n_steps=3, save_state=True, **settings)
    run(place, tmp_path / "second", resume=tmp_path / "first/lora-step00000003-state", **settings)
    assert same(adapter(tmp_path / "whole/lora"), adapter(tmp_path / "second/lora"))
    with pytest.raises(UserError, match="was trained with train_on"):
        run(place, tmp_path / "third", resume=tmp_path / "first/lora-step00000003-state", train_on="all", **settings)


def test_the_best_is_not_looked_for_where_nothing_is_held_out(place: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="save_best: nothing is held out .*; set validation_data or validation_split, or"
    ):
        run(place, tmp_path, save_every_n_steps=1, save_best=True)


@pytest.mark.parametrize(
    "settings",
    [
        {"fp8_scaled": True},
        {"fp8_base": True, "quantised_activations": "row"},
        {"network_type": "dora", "mixed_precision": "bf16"},
        {"use_rslora": True, "init_lora_weights": "pissa", "network_dropout": 0.0, "gradient_checkpointing": True},
    ],
    ids=["fp8", "fp8 activations", "dora", "pissa"],
)
def test_other_bases_and_kinds_learn_too(place: Path, tmp_path: Path, settings: dict[str, object]) -> None:
    events = run(
        place,
        tmp_path,
        max_train_steps=10,
        validation_data=[place / "data.jsonl"],
        validate_every_n_steps=10,
        sample_prompts=["say 3"],
        sample_tokens=4,
        **settings,
    )
    before, *_ = losses_of(tmp_path, "val_loss")
    assert events.val_loss is not None
    assert events.val_loss < before - 0.3
    base = AutoModelForCausalLM.from_pretrained(place / "llama", dtype=torch.float32).eval()
    tokens = torch.arange(20)[None]
    theirs = PeftModel.from_pretrained(base, tmp_path / "lora")(tokens).logits
    ours = load_lm(place / "llama", torch.float32)
    put_lora_on(ours, tmp_path / "lora")
    # DoRA's lengths and PiSSA's start are computed from the base again, in peft by another order of sums
    assert (ours(tokens) - theirs).abs().max() <= 1e-4 * theirs.abs().max()


def test_a_run_goes_on_from_an_adapter(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(place, tmp_path / "first", network_args=["q_proj_dim=4", "gate_proj_dim=0"])
    for name, more in (
        ("again", {"network_args": ["q_proj_dim=4", "gate_proj_dim=0"]}),
        ("dims", {"dim_from_weights": True, "network_dim": None, "network_alpha": None, "network_dropout": None}),
    ):
        chosen = flags(place, tmp_path / name, network_weights=tmp_path / "first/lora", learning_rate=0.0, **more)
        with pytest.raises(UserError, match="is as it was before the first step; .* the learning rate is 0"):
            train_flags(chosen)
        assert same(adapter(tmp_path / "first/lora"), adapter(tmp_path / name / "lora"))
    assert "trained on base" not in capsys.readouterr().out  # it is the same base
    with pytest.raises(UserError, match="not in the file"):
        run(place, tmp_path / "other", network_weights=tmp_path / "first/lora")


REFUSED = {
    "timestep_sampling": ({"timestep_sampling": "shift"}, "--timestep_sampling: is about image models"),
    "vae": ({"vae": "x"}, "--vae: is about image models"),
    "masked_loss": ({"masked_loss": True}, "--masked_loss: is about image models"),
    "dataset_config": ({"dataset_config": "x.toml"}, "--dataset_config: is about image models"),
    "text_encoder_lr": ({"text_encoder_lr": 1e-4}, "--text_encoder_lr: is about image models"),
    "network_type": ({"network_type": "lokr"}, "network_type: peft's lokr has another form"),
    "dora": ({"network_args": ["img_attn_dim=3"]}, "network_args: unknown key 'img_attn_dim'"),
    "max_length": ({"max_length": 65}, "max_length: 65 is more than the model's context of 64"),
    "sample_tokens": ({"sample_prompts": ["x"], "sample_tokens": 64}, "sample_tokens: a prompt of"),
    "data": ({"train_data": ["nowhere.jsonl"]}, "nowhere.jsonl: no such file"),
    "split": ({"validation_split": 0.99}, "validation_split: 0.99 of 8 conversations leaves none"),
    "validate": ({"validate_every_n_steps": 2}, "validate_every_n_steps: has no effect without validation_data"),
    "samples": ({"sample_every_n_steps": 2}, "sample_every_n_steps: has no effect without sample_prompts"),
    "template": ({"chat_template": "llama3"}, "the tokenizer has no <|begin_of_text|>"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_in_one_line(place: Path, tmp_path: Path, case: str) -> None:
    settings, said = REFUSED[case]
    with pytest.raises(UserError) as caught:
        run(place, tmp_path, **settings)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_lora_of_another_kind_of_model_is_refused(place: Path, tmp_path: Path) -> None:
    run(place, tmp_path, max_train_steps=1)
    model = load_lm(place / "gpt2", torch.float32)
    with pytest.raises(UserError, match="is a LoRA of llama, not of gpt2; give a model of its kind"):
        put_lora_on(model, tmp_path / "lora")
    with pytest.raises(UserError, match="no such file"):
        put_lora_on(model, tmp_path)
