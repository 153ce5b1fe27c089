"""LoRA layers of text encoders in files, in diffusers and in merged models."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from diffusers import FluxPipeline
from safetensors.torch import load_file, save_file
from torch import Tensor

from library.config.run_schema import SAVE_FORMATS
from library.errors import UserError
from networks.files.adapters import load_lora
from networks.files.weights import LoraWeights
from networks.files.writing import save_adapter
from networks.merging.merge import LoraSource, merge_loras
from tests.networks.conftest import random_pair
from tests.targets import FLUX_TARGETS
from tests.tiny import TEXT_WIDTH, tiny_flux_pipeline

CLIP = "text_encoder.encoder.layers.1"
T5 = "text_encoder_2.encoder.block.0.layer"


def _weights(rank: int = 4, alpha: float = 3.0, seed: int = 0, out: int = TEXT_WIDTH) -> LoraWeights:
    return random_pair((out, TEXT_WIDTH), rank, alpha, torch.Generator().manual_seed(seed), 0.3, 0.3)


@pytest.fixture
def whole() -> dict[str, LoraWeights]:
    """Layers of all three networks; one of CLIP's differs in rank and alpha."""
    return {
        "transformer_blocks.0.attn.to_q": _weights(seed=1),
        f"{CLIP}.self_attn.q_proj": _weights(seed=2),
        f"{CLIP}.self_attn.out_proj": _weights(seed=3),
        f"{CLIP}.mlp.fc1": _weights(rank=2, alpha=5.0, seed=4, out=128),
        f"{T5}.0.SelfAttention.k": _weights(seed=5),
        f"{T5}.1.DenseReluDense.wi_0": _weights(seed=6, out=128),
    }


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pipeline folder."""
    return tiny_flux_pipeline(tmp_path_factory.mktemp("base") / "tiny-flux")


def _add(module: torch.nn.Module, weights: LoraWeights) -> None:
    module.weight.data += weights.alpha / weights.rank * weights.up @ weights.down


def _encoded(pipeline: FluxPipeline) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        embeds, pooled, _ = pipeline.encode_prompt("a disc", "a disc", max_sequence_length=24)
    return embeds, pooled


@pytest.mark.parametrize("save_format", SAVE_FORMATS)
def test_every_layout_gives_the_same_layers_back(
    whole: dict[str, LoraWeights], tmp_path: Path, save_format: str
) -> None:
    save_adapter(tmp_path / "a.safetensors", whole, FLUX_TARGETS, save_format)
    read = load_lora(tmp_path / "a.safetensors", FLUX_TARGETS)
    assert read.layout == save_format
    assert read.weights.keys() == whole.keys()
    for name, weights in whole.items():
        torch.testing.assert_close(read.weights[name].delta(torch.float64), weights.delta(torch.float64))
    of_clip, of_t5 = {
        "diffusers": (
            "text_encoder.text_model.encoder.layers.1.self_attn.q_proj.lora_A.weight",
            "text_encoder_2.encoder.block.0.layer.0.SelfAttention.k.lora_A.weight",
        )
    }.get(
        save_format,
        (
            "lora_te1_text_model_encoder_layers_1_self_attn_q_proj.lora_down.weight",
            "lora_te3_encoder_block_0_layer_0_SelfAttention_k.lora_down.weight",
        ),
    )
    assert {of_clip, of_t5} <= load_file(tmp_path / "a.safetensors").keys()


@pytest.mark.parametrize(
    ("stem", "down", "up", "name"),
    [
        ("lora_te1_text_model_encoder_layers_1_mlp_fc1", ".lora_down.weight", ".lora_up.weight", f"{CLIP}.mlp.fc1"),
        ("lora_te_text_model_encoder_layers_1_mlp_fc1", ".lora_down.weight", ".lora_up.weight", f"{CLIP}.mlp.fc1"),
        (  # ComfyUI's generic naming
            "text_encoders.clip_l.transformer.text_model.encoder.layers.1.mlp.fc1",
            ".lora_down.weight",
            ".lora_up.weight",
            f"{CLIP}.mlp.fc1",
        ),
        ("text_encoder.text_model.encoder.layers.1.mlp.fc1", ".lora_A.weight", ".lora_B.weight", f"{CLIP}.mlp.fc1"),
        ("text_encoder.encoder.layers.1.mlp.fc1", ".lora_A.weight", ".lora_B.weight", f"{CLIP}.mlp.fc1"),
        (  # diffusers before PEFT
            "text_encoder.text_model.encoder.layers.1.mlp.fc1",
            ".lora_linear_layer.down.weight",
            ".lora_linear_layer.up.weight",
            f"{CLIP}.mlp.fc1",
        ),
        ("lora_te3_encoder_block_0_layer_1_DenseReluDense_wi_0", ".lora_down.weight", ".lora_up.weight",
         f"{T5}.1.DenseReluDense.wi_0"),
        ("lora_te2_encoder_block_0_layer_1_DenseReluDense_wi_0", ".lora_down.weight", ".lora_up.weight",
         f"{T5}.1.DenseReluDense.wi_0"),  # OneTrainer
        ("text_encoders.t5xxl.transformer.encoder.block.0.layer.1.DenseReluDense.wi_0", ".lora_down.weight",
         ".lora_up.weight", f"{T5}.1.DenseReluDense.wi_0"),
    ],
)  # fmt: skip
def test_published_namings_are_read(stem: str, down: str, up: str, name: str, tmp_path: Path) -> None:
    a, b = torch.randn(4, TEXT_WIDTH), torch.randn(128, 4)
    save_file({stem + down: a, stem + up: b, f"{stem}.alpha": torch.tensor(2.0)}, tmp_path / "a.safetensors")
    ((read_name, weights),) = load_lora(tmp_path / "a.safetensors", FLUX_TARGETS).weights.items()
    assert read_name == name
    torch.testing.assert_close(weights.delta(), 2 / 4 * b @ a)


@pytest.mark.parametrize("save_format", SAVE_FORMATS)
def test_diffusers_loads_clip_with_its_ranks_and_alphas_and_passes_over_t5(
    whole: dict[str, LoraWeights], base: Path, tmp_path: Path, save_format: str, caplog: pytest.LogCaptureFixture
) -> None:
    save_adapter(tmp_path / "a.safetensors", whole, FLUX_TARGETS, save_format)
    expected = FluxPipeline.from_pretrained(base)
    for name, weights in whole.items():
        if name.startswith("text_encoder."):
            _add(expected.text_encoder.get_submodule(name.removeprefix("text_encoder.")), weights)
    loaded = FluxPipeline.from_pretrained(base)
    plain = _encoded(loaded)
    with caplog.at_level(logging.WARNING):
        loaded.load_lora_weights(tmp_path / "a.safetensors")
    embeds, pooled = _encoded(loaded)
    assert (pooled - plain[1]).abs().max() > 1e-2
    # fp32: x W + x A B against x (W + A B), through two layers
    torch.testing.assert_close(pooled, _encoded(expected)[1], atol=1e-5, rtol=1e-4)
    assert embeds.equal(plain[0])


def test_a_layer_that_is_none_of_the_trained_kinds_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"text_encoder.text_projection is no layer of text_encoder that a LoRA"):
        save_adapter(tmp_path / "a.safetensors", {"text_encoder.text_projection": _weights()}, FLUX_TARGETS)


def test_merging_into_a_pipeline_changes_its_text_encoders(
    whole: dict[str, LoraWeights], base: Path, tmp_path: Path
) -> None:
    save_adapter(tmp_path / "a.safetensors", whole, FLUX_TARGETS, "kohya")
    report = merge_loras(base, [LoraSource(tmp_path / "a.safetensors", 0.5)], tmp_path / "merged", FLUX_TARGETS, "bf16")
    assert report.changed == len(whole)
    expected, merged = FluxPipeline.from_pretrained(base), FluxPipeline.from_pretrained(tmp_path / "merged")
    for name, weights in whole.items():
        if name.startswith("text_encoder"):
            component, _, module = name.partition(".")
            half = LoraWeights(weights.down, weights.up, weights.alpha / 2)
            _add(getattr(expected, component).get_submodule(module), half)
    assert merged.text_encoder.dtype == torch.float32  # save_precision speaks of the transformer
    for ours, theirs in zip(_encoded(merged), _encoded(expected), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_a_base_without_text_encoders_is_refused_or_told(
    whole: dict[str, LoraWeights], base: Path, tmp_path: Path
) -> None:
    save_adapter(tmp_path / "a.safetensors", whole, FLUX_TARGETS)
    source = [LoraSource(tmp_path / "a.safetensors", 1.0)]
    file = base / "transformer" / "diffusion_pytorch_model.safetensors"
    for model, target in ((file, tmp_path / "m.safetensors"), (base / "transformer", tmp_path / "m")):
        with pytest.raises(UserError, match=r"3 modules are text_encoder's, which .* does not have; give a diffusers"):
            merge_loras(model, source, target, FLUX_TARGETS)
        assert not target.exists()
        report = merge_loras(model, source, target, FLUX_TARGETS, transformer_only=True)
        assert report.changed == 1
        assert "5 text encoder modules left out" in report.notes[0]
