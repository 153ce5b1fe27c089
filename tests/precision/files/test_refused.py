"""Formats that are known and not read, planted as their programs write them: one line each, with the remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from library.errors import UserError
from library.precision.checkpoint import WeightFiles
from library.precision.files.base import cached_tensor


def marker(**config: object) -> Tensor:
    return torch.tensor(list(json.dumps(config).encode()), dtype=torch.uint8)


I8, I32, BYTES, HALF, FULL = torch.int8, torch.int32, torch.uint8, torch.float16, torch.float32
# program -> the tensors of one of its layers, what is said
LAYERS: dict[str, tuple[dict[str, torch.dtype | Tensor], str]] = {
    "nunchaku": (  # svdq-int4_r32-flux.1-dev.safetensors
        dict.fromkeys(("wscales", "smooth_factor", "proj_down", "proj_up", "bias"), HALF) | {"qweight": I8},
        "belongs to Nunchaku's SVDQuant.*train on the bf16 file",
    ),
    "nunchaku modulation": ({"qweight": I32, "wscales": HALF, "wzeros": HALF}, "Nunchaku's SVDQuant"),
    "gptq": ({"qweight": I32, "qzeros": I32, "scales": HALF, "g_idx": I32}, "a GPTQ model"),
    "awq": ({"qweight": I32, "qzeros": I32, "scales": HALF}, "an AWQ or GPTQ model.*use the bf16 model"),
    "compressed-tensors": (
        {"weight_packed": I32, "weight_scale": FULL, "weight_shape": torch.int64},
        "a compressed-tensors model",
    ),
    "quanto": ({"weight._data": I8, "weight._scale": FULL, "input_scale": FULL}, "a Quanto model"),
    "torchao": ({"_weight_qdata": I8, "_weight_scale": FULL}, "a torchao model"),
    "bitsandbytes int8": (
        {"weight": I8, "SCB": FULL, "weight_format": BYTES},
        r"bitsandbytes' LLM.int8, which is not read; use the bf16 model",
    ),
    "sdnq": (dict.fromkeys(("scale", "zero_point", "svd_up", "svd_down"), FULL) | {"weight": BYTES}, "an SDNQ model"),
    "hqq": ({"W_q": BYTES, "meta": FULL}, "an HQQ model"),
    "convrot_w4a4": (
        {"weight": I8, "weight_scale": FULL, "comfy_quant": marker(format="convrot_w4a4", convrot_groupsize=256)},
        "'block.to_q.comfy_quant' is ComfyUI's convrot_w4a4, which is not read; use the int8_convrot, nvfp4",
    ),
    "asym_w4a8_int8": (
        {"weight": I8, "weight_codebook": FULL, "comfy_quant": marker(format="asym_w4a8_int8")},
        "ComfyUI's asym_w4a8_int8",
    ),
    "awq_w4a16": ({"weight": BYTES, "comfy_quant": marker(format="awq_w4a16")}, "ComfyUI's awq_w4a16"),
}


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_known_format_is_refused_by_name(kind: str, prefix: str, tmp_path: Path) -> None:
    layer, said = LAYERS[kind]
    path = tmp_path / "m.safetensors"
    tensors = {leaf: t if isinstance(t, Tensor) else torch.zeros(64, 64, dtype=t) for leaf, t in layer.items()}
    save_file({f"{prefix}block.to_q.{leaf}": tensor for leaf, tensor in tensors.items()}, path)
    with pytest.raises(UserError, match=said.replace("block", f"{prefix}block")) as refusal:
        WeightFiles(path)
    assert str(refusal.value).startswith(f"{path}: ")
    assert "\n" not in str(refusal.value)


def test_torchaos_header_and_a_folders_config_are_believed_too(tmp_path: Path) -> None:
    save_file({"a.bias": torch.ones(2)}, tmp_path / "model.safetensors", {"tensor_names": '["a.weight"]'})
    with pytest.raises(UserError, match="'tensor_names' in the header is that of a torchao model"):
        WeightFiles(tmp_path / "model.safetensors")
    save_file({"a.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    for method, title in {"gptq": "a GPTQ", "sdnq": "an SDNQ", "TORCHAO": "a torchao", "quanto": "a Quanto"}.items():
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": method}}))
        with pytest.raises(UserError, match=f"'config.json' says {title}.*, which is not read; use the bf16 model"):
            WeightFiles(tmp_path)
    for config in ({}, {"quantization_config": None}, {"quantization_config": {"quant_method": "bitsandbytes"}}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert WeightFiles(tmp_path).names == ["a.weight"]


def test_a_cached_tensor_serves_training_wherever_it_was_made_first() -> None:
    """On tensors that have no numbers, and in sampling's inference mode, whose tensors autograd refuses."""

    @cached_tensor
    def numbers(count: int) -> Tensor:
        return torch.arange(count, dtype=torch.float64)

    with FakeTensorMode():
        assert type(numbers(3)) is not Tensor
    with torch.inference_mode():
        made = numbers(3)
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    (x * numbers(3)).sum().backward()
    assert numbers(3) is made
    assert x.grad is not None
    assert x.grad.tolist() == [0, 1, 2]
