"""Holding a LoRA: optimizer groups, state, and loading a file into it."""

from __future__ import annotations

import pytest
import torch

from library.errors import UserError
from networks.files.weights import LoraWeights
from networks.network import AdapterNetwork
from tests.networks.conftest import inject, make_flux, put_back, run_flux, train_a_little

ATTENTION = r"include_patterns=.*attn\.to_[qkv]"


def test_one_group_without_lora_plus_and_two_with_it() -> None:
    network = inject(make_flux(), ATTENTION)
    (group,) = network.parameter_groups(1e-4)
    assert (group["name"], group["lr"], len(group["params"])) == ("lora", 1e-4, 2 * len(network.modules))
    down, up = network.parameter_groups(1e-4, 16)
    assert (down["name"], down["lr"], up["name"], up["lr"]) == ("lora_A", 1e-4, "lora_B", 16e-4)
    layers = network.modules.values()
    assert [id(p) for p in up["params"]] == [id(layer.lora_B.weight) for layer in layers]
    assert [id(p) for p in down["params"]] == [id(layer.lora_A.weight) for layer in layers]


def test_state_goes_out_and_in_bit_for_bit() -> None:
    model, other = make_flux(), make_flux()
    network = inject(model)
    train_a_little(network)
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    assert "transformer_blocks.0.attn.to_q.lora_A.weight" in state
    put_back(inject(other), state)
    assert torch.equal(run_flux(other), run_flux(model))


def test_loading_with_another_alpha_keeps_the_update_and_the_configs_alpha() -> None:
    trained_model, model = make_flux(), make_flux()
    trained = inject(trained_model, alpha=3.0)
    train_a_little(trained)
    network = inject(model, alpha=4.0)
    line = network.load(trained.weights(), "a.safetensors")
    assert line == "a.safetensors: 40 modules loaded, 40 of them rescaled to this run's alpha / rank"
    assert {layer.alpha for layer in network.modules.values()} == {4.0}
    # B is multiplied by 0.75 in fp32: one rounding
    torch.testing.assert_close(run_flux(model), run_flux(trained_model), rtol=1e-5, atol=1e-5)


def weights(network: AdapterNetwork) -> dict[str, LoraWeights]:
    train_a_little(network)
    return network.weights()


def test_a_file_that_matches_only_in_part_is_refused_by_name() -> None:
    few, all_layers = inject(make_flux(), ATTENTION), inject(make_flux())
    with pytest.raises(UserError) as caught:
        all_layers.load(weights(inject(make_flux(), ATTENTION)), "a.safetensors")
    assert "a.safetensors: not in the file: single_transformer_blocks.0.norm.linear" in str(caught.value)
    assert "and 23 more; choose the same layers with network_args" in str(caught.value)
    with pytest.raises(UserError, match=r"a.safetensors: not trained here: single_transformer_blocks.0.norm.linear"):
        few.load(weights(inject(make_flux())), "a.safetensors")


def test_a_module_with_a_zero_update_may_be_missing_here() -> None:
    read = inject(make_flux()).weights()  # fresh: every lora_B is zero
    assert inject(make_flux(), ATTENTION).load(read, "a.safetensors") == "a.safetensors: 12 modules loaded"


def test_a_file_of_which_nothing_matches_is_refused() -> None:
    with pytest.raises(UserError, match=r"none of its 1 modules \(blocks.0.q\) is trained here; wrong model"):
        inject(make_flux()).load({"blocks.0.q": LoraWeights(torch.ones(1, 2), torch.ones(2, 1), 1)}, "a")


def test_other_ranks_and_shapes_are_refused_by_name() -> None:
    network = inject(make_flux(), ATTENTION)
    with pytest.raises(UserError, match=r"attn.to_q has rank 8, this network 4"):
        network.load(weights(inject(make_flux(), ATTENTION, dim=8)), "a")
    read = weights(inject(make_flux(), ATTENTION))
    name = "transformer_blocks.1.attn.to_v"
    read[name] = LoraWeights(torch.ones(4, 48), torch.ones(48, 4), 4.0)
    with pytest.raises(UserError, match=rf"{name} is for a layer of 48x48, the model's has 32x32"):
        network.load(read, "a")
