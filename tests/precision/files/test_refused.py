"""Formats that are known and not read, planted as their programs write them: one line each, with the remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from library.errors import UserError
from library.precision.checkpoint import WeightFiles


def marker(**config: object) -> Tensor:
    return torch.tensor(list(json.dumps(config).encode()), dtype=torch.uint8)


def svdquant() -> dict[str, Tensor]:
    """A layer of ``svdq-int4_r32-flux.1-dev.safetensors``, 64 x 128."""
    return {
        "qweight": torch.zeros(64, 64, dtype=torch.int8),
        "wscales": torch.ones(2, 64).bfloat16(),
        "smooth_factor": torch.ones(128).bfloat16(),
        "smooth_factor_orig": torch.ones(128).bfloat16(),
        "proj_down": torch.ones(128, 32).bfloat16(),
        "proj_up": torch.ones(64, 32).bfloat16(),
        "bias": torch.ones(64).bfloat16(),
    }


def packed(**more: Tensor) -> dict[str, Tensor]:
    """GPTQ's and AWQ's layer, 64 x 128."""
    half = {"qzeros": torch.zeros(1, 8, dtype=torch.int32), "scales": torch.ones(1, 64).half()}
    return {"qweight": torch.zeros(16, 64, dtype=torch.int32), **half, **more}


CODES = torch.zeros(64, 64, dtype=torch.uint8)
LAYERS: dict[str, tuple[dict[str, Tensor], str]] = {
    "nunchaku": (svdquant(), "belongs to Nunchaku's SVDQuant.*train on the bf16 file"),
    "nunchaku modulation": (
        {
            "qweight": torch.zeros(16, 64, dtype=torch.int32),
            "wscales": torch.ones(2, 64).half(),
            "wzeros": torch.zeros(2, 64).half(),
        },
        "Nunchaku's SVDQuant",
    ),
    "gptq": (packed(g_idx=torch.zeros(128, dtype=torch.int32)), "a GPTQ model"),
    "awq": (packed(), "an AWQ or GPTQ model.*use the bf16 model"),
    "compressed-tensors": (
        {
            "weight_packed": torch.zeros(64, 16, dtype=torch.int32),
            "weight_scale": torch.ones(64, 4),
            "weight_shape": torch.tensor([64, 128]),
        },
        "a compressed-tensors model",
    ),
    "quanto": (
        {
            "weight._data": torch.zeros(64, 128, dtype=torch.int8),
            "weight._scale": torch.ones(64, 1),
            "input_scale": torch.ones(()),
            "output_scale": torch.ones(()),
        },
        "a Quanto model",
    ),
    "torchao": (
        {"_weight_qdata": torch.zeros(64, 128, dtype=torch.int8), "_weight_scale": torch.ones(64, 1)},
        "a torchao model",
    ),
    "bitsandbytes int8": (
        {
            "weight": torch.zeros(64, 128, dtype=torch.int8),
            "SCB": torch.ones(64),
            "weight_format": torch.zeros((), dtype=torch.uint8),
        },
        r"bitsandbytes' LLM.int8, which is not read; use the bf16 model",
    ),
    "sdnq": (
        {
            "weight": CODES,
            "scale": torch.ones(64, 2),
            "zero_point": torch.ones(64, 2),
            "svd_up": torch.ones(64, 32),
            "svd_down": torch.ones(32, 128),
        },
        "an SDNQ model",
    ),
    "hqq": ({"W_q": CODES, "meta": torch.zeros(1)}, "an HQQ model"),
    "convrot_w4a4": (
        {
            "weight": CODES.view(torch.int8),
            "weight_scale": torch.ones(64, 2),
            "comfy_quant": marker(format="convrot_w4a4", convrot_groupsize=256),
        },
        "'block.to_q.comfy_quant' is ComfyUI's convrot_w4a4, which is not read; use the int8_convrot, nvfp4",
    ),
    "asym_w4a8_int8": (
        {
            "weight": CODES.view(torch.int8),
            "weight_s_rel": torch.ones(64, 8).to(torch.float8_e4m3fn),
            "weight_s_channel": torch.ones(64),
            "weight_codebook": torch.ones(16),
            "comfy_quant": marker(format="asym_w4a8_int8"),
        },
        "ComfyUI's asym_w4a8_int8",
    ),
    "awq_w4a16": ({"weight": CODES, "comfy_quant": marker(format="awq_w4a16")}, "ComfyUI's awq_w4a16"),
}


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_known_format_is_refused_by_name(kind: str, prefix: str, tmp_path: Path) -> None:
    layer, said = LAYERS[kind]
    path = tmp_path / "m.safetensors"
    save_file({f"{prefix}block.to_q.{leaf}": tensor for leaf, tensor in layer.items()}, path)
    with pytest.raises(UserError, match=said.replace("block", f"{prefix}block")) as refusal:
        WeightFiles(path)
    assert str(refusal.value).startswith(f"{path}: ")
    assert "\n" not in str(refusal.value)


def test_torchaos_header_and_a_folders_config_are_believed_too(tmp_path: Path) -> None:
    save_file({"a.bias": torch.ones(2)}, tmp_path / "model.safetensors", {"tensor_names": '["a.weight"]'})
    with pytest.raises(UserError, match="'tensor_names' in the header is that of a torchao model"):
        WeightFiles(tmp_path / "model.safetensors")
    save_file({"a.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    for method, title in {
        "gptq": "a GPTQ",
        "sdnq": "an SDNQ",
        "TORCHAO": "a torchao",
        "quanto": "a Quanto",
    }.items():
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": method}}))
        with pytest.raises(UserError, match=f"'config.json' says {title}.*, which is not read; use the bf16 model"):
            WeightFiles(tmp_path)
    for config in ({}, {"quantization_config": None}, {"quantization_config": {"quant_method": "bitsandbytes"}}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert WeightFiles(tmp_path).names == ["a.weight"]
