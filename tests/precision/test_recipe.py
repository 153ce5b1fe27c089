"""Model in, fp8 model out: diffusers' FLUX and transformers' text encoders."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    T5Config,
    T5EncoderModel,
)

from library.errors import UserError
from library.precision.files.fp8 import Fp8Scheme, Fp8Weight
from library.precision.linear import QuantizedLinear
from library.precision.recipe import Recipe, quantize_model
from tests.tiny import tiny_flux_inputs, tiny_flux_transformer


def run_flux(model: nn.Module, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    inputs = tiny_flux_inputs()
    batch, tokens = inputs["prompt_embeds"].shape[:2]
    with torch.no_grad():
        return model(
            hidden_states=inputs["latents"].view(batch, 16, 64).to(dtype),
            encoder_hidden_states=inputs["prompt_embeds"].to(dtype),
            pooled_projections=inputs["pooled_prompt_embeds"].to(dtype),
            timestep=inputs["sigmas"],
            guidance=torch.full((batch,), 3.5),
            img_ids=torch.zeros(16, 3),
            txt_ids=torch.zeros(tokens, 3),
            return_dict=False,
        )[0]


def fp8_names(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


@pytest.mark.parametrize("granularity", ["cast", "tensor", "row", "block64"])
def test_a_quantised_flux_computes_with_its_rounded_weights(granularity) -> None:  # type: ignore[no-untyped-def]
    model, reference = tiny_flux_transformer(), tiny_flux_transformer()
    report = quantize_model(model, Recipe(Fp8Scheme(granularity)))
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedLinear):
            reference.get_submodule(name).weight.data = layer.dequantized(torch.float32)
    assert report.quantized == len(fp8_names(model)) > 0
    # the same fp32 numbers in products of another order
    torch.testing.assert_close(run_flux(model), run_flux(reference), rtol=1e-4, atol=1e-4)


def test_embedders_and_final_layer_stay_high_unless_told_otherwise() -> None:
    model = tiny_flux_transformer()
    report = quantize_model(model, Recipe())
    high = {name for name, module in model.named_modules() if type(module) is nn.Linear}
    embedders = {name for name in high if name.startswith(("x_embedder", "context_embedder", "time_text_embed."))}
    assert high - embedders == {"proj_out", "norm_out.linear"}
    assert len(embedders) == 8
    assert report.excluded == 10
    assert "single_transformer_blocks.0.proj_out" in fp8_names(model)
    everything = tiny_flux_transformer()
    quantize_model(everything, Recipe(exclude=()))
    assert not [name for name, module in everything.named_modules() if type(module) is nn.Linear]


def test_modulation_and_patterns_can_be_kept() -> None:
    model = tiny_flux_transformer()
    report = quantize_model(model, Recipe(exclude=("modulation",), exclude_patterns=(r"\.to_v$",)))
    left = fp8_names(model)
    assert not [
        name for name in left if name.endswith(("norm1.linear", "norm1_context.linear", ".norm.linear", "to_v"))
    ]
    assert {"x_embedder", "norm_out.linear", "transformer_blocks.0.attn.to_q"} <= left
    assert report.excluded == 4 + 3


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (
            "modulation",
            ["double_blocks.3.img_mod.lin", "single_blocks.0.modulation.lin", "transformer_blocks.0.txt_mod.1"],
        ),
        (
            "embedders",
            ["img_in", "model.diffusion_model.time_in.in_layer", "time_text_embed.timestep_embedder.linear_1"],
        ),
        ("final", ["final_layer.linear", "model.diffusion_model.final_layer.adaLN_modulation.1", "proj_out"]),
    ],
)
def test_kinds_go_by_diffusers_and_by_bfl_names(kind: str, names: list[str]) -> None:
    assert [Recipe(exclude=(kind,)).excluded_as(name) for name in names] == [kind] * len(names)
    others = [
        "double_blocks.0.img_attn.qkv",
        "single_transformer_blocks.0.proj_out",
        "transformer_blocks.0.attn.norm_q",
    ]
    assert [Recipe(exclude=(kind,)).excluded_as(name) for name in others] == [None] * len(others)


def test_lora_layers_and_tied_weights_are_never_touched() -> None:
    model = nn.ModuleDict(
        {"lora_A": nn.Linear(64, 4), "a": nn.Linear(64, 64), "b": nn.Linear(64, 64), "c": nn.Linear(64, 64)}
    )
    model["b"].weight = model["a"].weight
    assert quantize_model(model, Recipe()).excluded == 3
    assert fp8_names(model) == {"c"}
    assert model["b"].weight is model["a"].weight


def test_each_high_weight_is_let_go_before_the_next_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    alive = [weakref.ref(layer.weight) for layer in model]
    seen = []
    quantize = Recipe.quantize

    def count(*arguments: Any) -> Fp8Weight:
        gc.collect()
        seen.append(sum(reference() is not None for reference in alive))
        return quantize(*arguments)

    monkeypatch.setattr(Recipe, "quantize", count)
    quantize_model(model, Recipe(Fp8Scheme("row")))
    gc.collect()
    assert [*seen, sum(reference() is not None for reference in alive)] == [4, 3, 2, 1, 0]


def test_fp8_weights_read_as_they_are_are_taken_over_bit_for_bit() -> None:
    linear = nn.Linear(64, 32)
    codes = (torch.randn(32, 64, generator=torch.Generator().manual_seed(0))).to(torch.float8_e4m3fn)
    linear.weight = nn.Parameter(codes, requires_grad=False)
    model = nn.Sequential(linear)
    quantize_model(model, Recipe(Fp8Scheme("row")))
    assert torch.equal(model[0].weight.view(torch.uint8), codes.view(torch.uint8))
    assert model[0].quantized().granularity == "cast"


def text_encoders() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    clip = CLIPTextConfig(
        vocab_size=99, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2
    )
    t5 = {"vocab_size": 99, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    qwen = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 99, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        },
        vision_config={"hidden_size": 32, "depth": 1, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 64},
    )  # fmt: skip
    return {
        "clip": CLIPTextModel(clip),
        "t5": T5EncoderModel(T5Config(**t5, feed_forward_proj="gated-gelu")),
        "t5 relu": T5EncoderModel(T5Config(**t5, feed_forward_proj="relu")),
        "qwen": Qwen2_5_VLForConditionalGeneration(qwen),
    }


@pytest.mark.parametrize("name", ["clip", "t5", "t5 relu", "qwen"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_text_encoders_run_in_fp8_and_stay_near(name: str, dtype: torch.dtype) -> None:
    model = text_encoders()[name].to(dtype).eval()
    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(1))

    def run() -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=ids, output_hidden_states=True).hidden_states[-1]

    before = run()
    assert quantize_model(model, Recipe(Fp8Scheme("row"))).quantized > 0
    after = run()
    assert after.dtype == dtype
    # e4m3 weights err by 2.6 % rms each; two layers with residuals. Activations cast to fp8 by T5's wo would be
    # refused by the matrix product, and a forgotten scale errs by far more than 100 %.
    assert float((after - before).float().norm() / before.float().norm()) < 0.1
    assert "T5" not in type(model).__name__ or any("wo" in name for name in fp8_names(model))


def test_a_user_can_put_every_mistake_right() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    with pytest.raises(UserError, match="excluded kind 'embeders' is none of .*; did you mean 'embedders'"):
        Recipe(exclude=("embeders",))
    with pytest.raises(UserError, match=r"excluded pattern '\(' is no regular expression"):
        Recipe(exclude_patterns=("(",))
    with pytest.raises(UserError, match="excluded pattern 'atn' matches no linear layer; correct or remove it"):
        quantize_model(model, Recipe(exclude_patterns=("atn",)))
    with torch.no_grad():
        model[0].weight[0, 0] = torch.inf
    with pytest.raises(UserError, match="0.weight holds NaN or infinity; the checkpoint is damaged"):
        quantize_model(model, Recipe())
    with pytest.raises(UserError, match="^0: quantised_compute = quantised: a 8 x 64 weight"):
        quantize_model(nn.Sequential(nn.Linear(64, 8)), Recipe(), compute="quantised")


def test_the_report_says_what_happened() -> None:
    model = tiny_flux_transformer().to(torch.bfloat16)

    def size() -> int:
        return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))

    before = size()
    report = quantize_model(model, Recipe(Fp8Scheme("block64")))
    # every block weight halved; scales and the embedders of this tiny model are the rest
    assert size() < 0.65 * before
    assert report.describe().startswith(f"{report.quantized} quantised (e4m3fn, a scale per 64 inputs")
    assert report.describe().endswith(", 10 excluded")
    assert Recipe(Fp8Scheme("block64"), stochastic=True).describe() == (
        "e4m3fn, a scale per 64 inputs, rounded stochastically; excluded: embedders, final"
    )


def test_stochastic_rounding_depends_on_seed_and_layer_only() -> None:
    def codes(seed: int) -> torch.Tensor:
        model = tiny_flux_transformer()
        torch.rand(seed + 1)  # other history of the global generator
        quantize_model(model, Recipe(Fp8Scheme("row"), stochastic=True, seed=seed))
        return model.transformer_blocks[0].attn.to_q.weight.view(torch.uint8)

    assert torch.equal(codes(1), codes(1))
    assert not torch.equal(codes(1), codes(2))
