"""Every CUDA path, walked from the configuration to the end on a device that computes nothing, at full width.

A walk raises where tensors of different devices or dtypes meet. Families, base formats and memory policies go in pairs.
Figures come from the architecture: what must be saved of a block of FLUX.1 for its backward pass, by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from library.training.memory.dummy_checkpoint import write_dataset
from tests.cuda.device import FakeDevice
from tests.tiny import tiny_flux_pipeline

MIB = 2**20
# What is walked through: keywords of ``walks.train``.
RUNS: dict[str, dict[str, Any]] = {
    "flux, recomputed, sampled, validated": {
        "flags": ["--gradient_checkpointing", "--sample_prompts", "PROMPTS", "--sample_at_first",
                  "--validate_every_n_steps", "3", "--validation_sigmas", "0.5"],
        "validation": True, "blocks": 1, "steps": 3,
    },
    "flux_fill, fp8, inputs on the host": {
        "model_type": "flux_fill",
        "flags": ["--gradient_checkpointing", "--fp8_scaled", "--cpu_offload_checkpointing", "--masked_loss"],
    },
    "flux_kontext, nothing recomputed, 8-bit AdamW": {
        "model_type": "flux_kontext", "flags": ["--optimizer_type", "AdamW8bit", "--full_bf16", "--ema_decay", "0.99"],
    },
    "qwen_image, fp8, a batch of two, compiled": {
        "model_type": "qwen_image", "batch": 2,
        "flags": ["--gradient_checkpointing", "--fp8_scaled", "--torch_compile", "--dynamo_backend", "aot_eager"],
    },
    "qwen_image_edit, int8 by rows, activations within a budget": {
        "model_type": "qwen_image_edit", "file": "int8_row",
        "flags": ["--gradient_checkpointing", "--activation_budget_mb", "500"],
    },
    "qwen_image_edit_plus": {"model_type": "qwen_image_edit_plus", "flags": ["--gradient_checkpointing"]},
    "qwen_image_21, products in int8 with ConvRot, a batch of two, compiled, sampled": {
        "model_type": "qwen_image_21", "file": "int8_convrot", "batch": 2,
        "flags": ["--gradient_checkpointing", "--torch_compile", "--dynamo_backend", "aot_eager",
                  "--quantised_compute", "quantised", "--sample_prompts", "PROMPTS"],
    },
    "qwen_image_21_edit, blocks swapped": {
        "model_type": "qwen_image_21_edit", "blocks": 3, "flags": ["--blocks_to_swap", "1", "--gradient_checkpointing"],
    },
    "z_image, a batch of two with padded texts, nothing recomputed": {
        "model_type": "z_image", "flags": [], "batch": 2,
    },
    "flux2_klein, fp8, compiled": {
        "model_type": "flux2_klein",
        "flags": ["--gradient_checkpointing", "--fp8_scaled", "--torch_compile", "--dynamo_backend", "aot_eager"],
    },
    "flux2_klein_edit, int8 with ConvRot, a batch of two, nothing recomputed": {
        "model_type": "flux2_klein_edit", "file": "int8_convrot", "batch": 2, "flags": [],
    },
    "flux2_dev, nvfp4, blocks swapped and inputs on the host": {
        "model_type": "flux2_dev", "file": "nvfp4", "blocks": 4,
        "flags": ["--gradient_checkpointing", "--cpu_offload_checkpointing", "--blocks_to_swap", "1"],
    },
    "flux3_klein, int8 with ConvRot, blocks swapped": {
        "model_type": "flux3_klein", "file": "int8_convrot",
        "flags": ["--gradient_checkpointing", "--blocks_to_swap", "2"],
    },
    "flux3_klein_edit, a batch of two, compiled": {
        "model_type": "flux3_klein_edit", "batch": 2,
        "flags": ["--gradient_checkpointing", "--torch_compile", "--dynamo_backend", "aot_eager"],
    },
    "krea2, fp8, blocks swapped, sampled with another model": {
        "model_type": "krea2", "blocks": 3,
        "flags": ["--blocks_to_swap", "1", "--gradient_checkpointing", "--fp8_scaled", "--sample_prompts", "PROMPTS",
                  "--sample_model", "MODEL"],
    },
    "ernie_image, a batch of two, compiled, sampled": {
        "model_type": "ernie_image", "batch": 2,
        "flags": ["--gradient_checkpointing", "--torch_compile", "--dynamo_backend", "aot_eager",
                  "--sample_prompts", "PROMPTS"],
    },
    "ernie_image, fp8, blocks swapped": {
        "model_type": "ernie_image", "blocks": 3,
        "flags": ["--blocks_to_swap", "1", "--gradient_checkpointing", "--fp8_scaled"],
    },
    "flux, compiled": {"flags": ["--gradient_checkpointing", "--torch_compile", "--dynamo_backend", "aot_eager"]},
    "flux, fp8, compiled, blocks swapped": {
        "blocks": 4,
        "flags": ["--gradient_checkpointing", "--fp8_scaled", "--torch_compile", "--dynamo_backend", "aot_eager",
                  "--blocks_to_swap", "2"],
    },
    "flux, memory chosen": {"flags": ["--memory", "auto"], "counted": True},
    "flux, products in fp8": {
        "flags": ["--fp8_scaled", "--quantised_compute", "quantised", "--fp8_granularity", "row"],
    },
    "flux, DoRA, accumulated": {"flags": ["--network_type", "dora", "--gradient_accumulation_steps", "2"]},
    "flux, LoHa, activations within a budget": {
        "flags": ["--network_type", "loha", "--save_format", "comfy", "--gradient_checkpointing",
                  "--activation_budget_mb", "300"],
    },
    "flux, CLIP trained too": {"flags": ["--text_encoder_lr", "1e-4", "--gradient_checkpointing"]},
    "flux, GGUF Q4_K with Q6_K, compiled": {
        "file": "Q4_K", "flags": ["--gradient_checkpointing", "--torch_compile", "--dynamo_backend", "aot_eager"],
    },
    "qwen_image, GGUF Q4_0, blocks swapped and inputs on the host": {
        "model_type": "qwen_image", "blocks": 3, "file": "Q4_0",
        "flags": ["--blocks_to_swap", "1", "--gradient_checkpointing", "--cpu_offload_checkpointing"],
    },
    "z_image, GGUF Q8_0, DoRA, inputs on the host": {
        "model_type": "z_image", "file": "Q8_0",
        "flags": ["--network_type", "dora", "--gradient_checkpointing", "--cpu_offload_checkpointing"],
    },
    "z_image, nf4, blocks swapped": {
        "model_type": "z_image", "blocks": 3, "file": "nf4", "steps": 3,
        "flags": ["--blocks_to_swap", "1", "--gradient_checkpointing"],
    },
    "flux_kontext, nvfp4, LoKr": {
        "model_type": "flux_kontext", "file": "nvfp4",
        "flags": ["--network_type", "lokr", "--save_format", "comfy", "--gradient_checkpointing"],
    },
    "flux_fill, mxfp8, nothing recomputed": {"model_type": "flux_fill", "file": "mxfp8", "flags": []},
}  # fmt: skip
# One of each memory policy and of each kind of file but nvfp4 and ConvRot, which test_capture has; make test-cuda walks
# through the others.
SAMPLE = {
    "flux, recomputed, sampled, validated",
    "flux_fill, mxfp8, nothing recomputed",
    "qwen_image_edit, int8 by rows, activations within a budget",
    "z_image, GGUF Q8_0, DoRA, inputs on the host",
    "z_image, nf4, blocks swapped",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.slow) for name in RUNS]
)
def test_a_run_goes_through(device: FakeDevice, tmp_path: Path, name: str) -> None:
    """No tensor is on the wrong device, the host waits in no step that is not logged, no weight is left dequantised."""
    keywords = dict(RUNS[name])
    if keywords.pop("validation", False):
        keywords["dataset_text"] = "validation_split = 0.5\n"
        keywords["batch"] = 2  # one of them is held out
    (tmp_path / "prompts.txt").write_text("a house --w 1024 --h 1024 --s 2")
    paths = {"PROMPTS": str(tmp_path / "prompts.txt"), "MODEL": str(tmp_path / "model")}
    flags = [paths.get(flag, flag) for flag in keywords.pop("flags")]
    found = device.walk("train", tmp_path, flags=flags, **{"blocks": 2, "side": 512, "steps": 2} | keywords)
    assert "lora.safetensors" in found["saved"]
    assert ("samples" in found["saved"]) == ("--sample_prompts" in flags)
    assert found["waits"] == []
    assert found["copies"] == []
    assert bool(found["graphs"]) == ("--torch_compile" in flags)


@pytest.mark.parametrize(
    "more",
    [
        ["--gradient_checkpointing"],
        pytest.param(["--torch_compile", "--dynamo_backend", "aot_eager"], marks=pytest.mark.slow),
    ],
)
def test_pretraining_goes_through(device: FakeDevice, tmp_path: Path, more: list[str]) -> None:
    """Llama 3.2 1B with two of its layers."""
    flags = ["--preset", "llama3.2-1b", "--layers", "2", "--context", "512", *more]
    found = device.walk("pretrain", tmp_path, flags=flags)
    assert found["waits"] == []
    assert found["saved"]


@pytest.mark.parametrize(
    "settings",
    [
        {"sample_prompts": ["say 3"], "sample_tokens": 12, "sample_at_first": True},
        pytest.param(
            {"model_type": "gpt2", "packing": True, "max_length": 30, "gradient_checkpointing": True},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["Llama, sampled", "GPT-2, packed"],
)
def test_a_chat_lora_goes_through(device: FakeDevice, tmp_path: Path, settings: dict[str, Any]) -> None:
    found = device.walk("chat", tmp_path, **settings)
    assert "lora" in found["saved"]
    assert ("samples" in found["saved"]) == ("sample_prompts" in settings)
    assert found["waits"] == []


def test_swapped_blocks_leave_the_device(device: FakeDevice, tmp_path: Path) -> None:
    """Of five blocks three are swapped: what stays and a ring of two slots are as large as two blocks."""
    flags = ["--gradient_checkpointing", "--fp8_scaled"]
    folders = [tmp_path / name for name in ("all", "swapped")]
    weights = []
    for folder, more in zip(folders, ([], ["--blocks_to_swap", "3"]), strict=True):
        folder.mkdir()
        weights.append(device.walk("loaded", folder, model_type="z_image", blocks=5, flags=[*flags, *more])["bytes"])
    block = 181_427_200  # numbers of a block of Z-Image in matrices: 4 d² of attention, 3 d 10240 of the MLP, adaLN
    assert weights[0] - weights[1] == pytest.approx(3 * block, rel=0.1)


def test_a_block_saves_what_its_backward_pass_needs(device: FakeDevice, tmp_path: Path) -> None:
    """Of FLUX's tokens by width, in bf16: what a block gets, queries, keys and values as projected, attention's output,
    the four times as wide MLP, and what a trained gate multiplies; a double block has two gates."""
    unit = (4096 + 512) * 3072 * 2
    units = (1 + 3 + 1 + 4 + 1) + (1 + 3 + 1 + 4 + 2)
    held = []
    for blocks in (1, 2):
        folder = tmp_path / str(blocks)
        folder.mkdir()
        held.append(device.walk("train", folder, blocks=blocks, steps=1)["phases"]["step 1"]["activations"])
    assert (held[1] - held[0]) / unit == pytest.approx(units, abs=0.3)  # narrow products


@pytest.mark.slow
def test_a_compiled_step_keeps_what_the_budget_allows(device: FakeDevice, tmp_path: Path) -> None:
    """Attention's output of two double and two single blocks, in bf16, beside each block's input, and no more."""
    attention = (4096 + 512) * 3072 * 2
    flags = ["--gradient_checkpointing", "--torch_compile", "--dynamo_backend", "aot_eager"]
    held = []
    for budget in (0, 4 * attention // MIB + 4):
        folder = tmp_path / str(budget)
        folder.mkdir()
        more = ["--activation_budget_mb", str(budget)] if budget else []
        phases = device.walk("train", folder, blocks=2, flags=[*flags, *more])["phases"]
        held.append(phases["step 3"]["activations"])
    assert held[1] - held[0] <= 4 * attention + 4 * MIB
    assert held[1] - held[0] >= 2 * attention  # the peak is in backward, when some have gone


@pytest.mark.parametrize(("planted", "words"), [("device", "two devices, cuda:0 and cpu"), ("item", "")])
def test_a_planted_fault_is_found(device: FakeDevice, tmp_path: Path, planted: str, words: str) -> None:
    if words:
        with pytest.raises(AssertionError, match=words):
            device.walk("train", tmp_path, blocks=1, planted=planted)
    else:
        waits = device.walk("train", tmp_path, blocks=1, planted=planted, steps=2)["waits"]
        assert [wait[0] for wait in waits] == ["step 1"]


@pytest.mark.slow
def test_an_activation_that_is_kept_twice_is_found(device: FakeDevice, tmp_path: Path) -> None:
    """A single block's two joined inputs, of one and of five widths, beside what they are made of."""
    held = []
    for planted in (None, "activation"):
        folder = tmp_path / str(planted)
        folder.mkdir()
        held.append(device.walk("train", folder, blocks=1, planted=planted)["phases"]["step 2"]["activations"])
    assert held[1] - held[0] >= (4096 + 512) * 3072 * 2 * 5.5


def test_tools_go_through(device: FakeDevice, tmp_path: Path) -> None:
    """A model is quantised; an image is painted in fp8 with a LoRA: T5 in bf16 takes most, 4.76 billion numbers."""
    model = device.walk("make_model", tmp_path, model_type="flux", blocks=1)["path"]
    quantised = tmp_path / "quantised.safetensors"
    device.walk("tool", tmp_path, name="quantize_model", words=["--model", model, "--save_to", str(quantised)])
    assert quantised.is_file()
    query = "transformer.single_transformer_blocks.0.attn.to_q.{}.weight".format
    trained = {query("lora_A"): torch.ones(16, 3072), query("lora_B"): torch.ones(3072, 16)}
    save_file(trained, tmp_path / "lora.safetensors")
    words = ["image", "--model", model, "--lora", str(tmp_path / "lora.safetensors"), "--fp8_scaled",
             "--mixed_precision", "bf16", "--prompt", "a house", "--s", "2", "--w", "256", "--h", "256",
             "--save_to", str(tmp_path / "made")]  # fmt: skip
    peak = device.walk("tool", tmp_path, name="generate", words=words)["peak"]
    assert peak == pytest.approx(4.76e9 * 2, rel=0.05)
    assert len(list((tmp_path / "made").glob("*.png"))) == 1


@pytest.mark.slow
def test_the_precision_report_goes_through(device: FakeDevice, tmp_path: Path) -> None:
    model, data = tiny_flux_pipeline(tmp_path / "tiny"), write_dataset(tmp_path / "data", side=64)
    words = ["--model", str(model), "--deploy", "row", "--mixed_precision", "bf16", "--dataset_config", str(data),
             "--images", "1", "--sigmas", "0.5", "--save_to", str(tmp_path / "report")]  # fmt: skip
    device.walk("tool", tmp_path, name="precision_report", words=words)
    assert (tmp_path / "report/report.json").is_file()
