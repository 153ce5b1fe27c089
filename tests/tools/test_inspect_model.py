"""tools/inspect_model.py as a user runs it. What it finds is tested in tests/models/test_inspection.py and
tests/networks/files/test_inspection.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from networks.files.writing import save_adapter
from tests.networks.conftest import inject, make_flux, train_a_little
from tests.networks.files.test_adapter_files import trained
from tests.runs import printed, refusal
from tests.targets import FLUX_TARGETS
from tests.tiny import tiny_flux_pipeline, tiny_flux_transformer
from tools import inspect_model
from tools.inspect_model import number


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


def write_lora(path: Path, *network_args: str) -> Path:
    network = inject(make_flux(), *network_args, alpha=3.0)
    train_a_little(network)
    save_adapter(
        path, network.weights(), FLUX_TARGETS, "kohya", metadata={"ss_network_dim": "4", "long": "word " * 100}
    )
    return path


def words(line: str) -> list[str]:
    return line.split()


def test_a_pipeline_is_shown_part_by_part(tmp_path: Path) -> None:
    folder = tiny_flux_pipeline(tmp_path / "base", double_blocks=2)
    text = printed(inspect_model, folder)
    for title in (
        "transformer: FLUX.1 transformer (diffusers' names)",
        "vae: image autoencoder, AutoencoderKL (diffusers' names)",
        "text_encoder: CLIP text encoder",
        "text_encoder_2: T5 encoder",
    ):
        assert title in text
    transformer = " ".join(words(printed(inspect_model, folder / "transformer")))
    assert "single_transformer_blocks × 2, transformer_blocks × 2" in transformer


def test_fp8_is_told_with_its_scales_and_what_is_not_known_is_said(tmp_path: Path) -> None:
    path = tmp_path / "fp8.safetensors"
    state = {"scaled_fp8": torch.zeros(0, dtype=torch.float8_e4m3fn)}
    for key, tensor in tiny_flux_transformer().state_dict().items():
        quantised = ".attn.to_" in key and key.endswith(".weight")
        state[key] = tensor.to(torch.float8_e4m3fn if quantised else torch.bfloat16)
        if quantised:
            state[key.replace(".weight", ".scale_weight")] = torch.ones(())
    save_file(state, path)
    text = printed(inspect_model, path)
    assert "ComfyUI scaled fp8: 11 e4m3fn, one scale a tensor" in text
    assert "bf16, fp8 e4m3" in text
    save_file(state | {"x.weight": torch.zeros(2, 2, dtype=torch.uint8)}, path)
    assert "'x.weight' has dtype U8, whose meaning no known layout gives" in printed(inspect_model, path)


def test_a_lora_is_shown_with_ranks_norms_and_metadata(tmp_path: Path) -> None:
    path = write_lora(tmp_path / "a.safetensors", "single_dim=8")
    text = printed(inspect_model, path)
    lines = text.splitlines()
    assert "LoRA for flux, kohya" in text
    assert any(words(line)[:4] == ["attn.to_out.0", "2", "4", "3"] for line in lines)
    assert any(words(line)[:4] == ["proj_mlp", "2", "8", "3"] for line in lines)
    assert any(words(line) == ["ss_network_dim", "4"] for line in lines)
    assert "(500 characters)" in text


def test_mistakes_are_one_line() -> None:
    assert refusal(inspect_model, "nowhere") == "error: nowhere: no such file or folder; check the path\n"


def test_a_dora_is_shown_in_two_lines(tmp_path: Path) -> None:
    _, network = trained("dora")
    network.save(tmp_path / "a.safetensors", "comfy", "fp32", {})
    shown = printed(inspect_model, tmp_path / "a.safetensors")
    assert f"DoRA for flux  {len(network.modules)} layers" in shown
    assert "merge_lora.py merges a DoRA into a model" in shown
    assert "cannot be loaded" not in shown


def test_numbers_are_written_for_people() -> None:
    assert [number(n) for n in (7, 1500, 11_901_408_320)] == ["7", "1.5 k", "11.9 B"]
