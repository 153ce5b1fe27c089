"""A step of a LoRA on a language model beside transformers and peft; packing and accumulation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor

from library.config.schema import NetworkConfig
from library.llm.chat_batches import Example, collate_windows
from library.models.llm.files import load_lm
from library.models.llm.model import TransformerLM, separate_projections
from library.models.registry import lora_targets
from library.nn.cross_entropy import IGNORED
from library.training.tasks.chat_lora import token_mean_loss
from networks.network import AdapterNetwork, inject_adapter
from networks.options import parse_network_args
from tests.models.llm.lms import VOCABULARY, write_reference


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
