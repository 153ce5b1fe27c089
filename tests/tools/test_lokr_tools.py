"""convert_lora.py, resize_lora.py and extract_lora.py on LoKr and LoHa files of several programs' layouts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from library.models.registry import lora_targets
from networks.files.adapters import load_adapter
from networks.files.verify import loads_in
from networks.merging.merge import LoraSource, merge_loras
from tests.networks.conftest import make_flux
from tests.networks.files.test_readers import trained
from tests.runs import call, printed, refusal
from tools import convert_lora, extract_lora, merge_lora, resize_lora

JOINED = "double_blocks.0.img_attn.qkv"


def lokr(columns: int, rows: int, rank: int = 0) -> dict[str, Tensor]:
    """Return a file's tensors behind a module's stem; ``rank`` of w2, 0: whole."""
    random = torch.Generator().manual_seed(rank)
    shape = rows // 4, columns // 4
    w2 = {"lokr_w2": torch.randn(shape, generator=random)}
    if rank:
        w2 = {"lokr_w2_a": torch.randn(shape[0], rank, generator=random)}
        w2["lokr_w2_b"] = torch.randn(rank, shape[1], generator=random)
    return {"lokr_w1": torch.randn(4, 4, generator=random), **w2, "alpha": torch.tensor(3.0)}


def write(path: Path, *layers: tuple[str, dict[str, Tensor]]) -> Path:
    save_file({f"{stem}.{name}": tensor for stem, tensors in layers for name, tensor in tensors.items()}, path)
    return path


def deltas(path: Path, family: str = "flux") -> dict[str, Tensor]:
    read = load_adapter(path, lora_targets()[family]).weights
    return {name: module.delta(torch.float64) for name, module in read.items()}  # type: ignore[attr-defined]


def programs(path: Path, family: str) -> set[str]:
    targets = lora_targets()[family]
    found = loads_in(path, load_adapter(path, targets).weights, targets)
    return {each.program for each in found if each.is_right}


@pytest.mark.parametrize(
    ("family", "args", "formats"),
    [
        ("qwen_image", ("decompose_both=True", "factor=2"), ("comfy", "kohya", "comfy")),
        ("qwen_image", (), ("kohya", "comfy", "kohya")),
        ("z_image", (), ("comfy", "kohya", "comfy")),
        ("krea2", ("factor=4",), ("kohya", "comfy", "kohya")),
        ("flux3_klein", (), ("comfy", "kohya", "comfy")),
    ],
)
@pytest.mark.parametrize("kind", ["lokr", "loha"])
def test_a_file_goes_through_the_layouts_with_the_same_updates(
    family: str, args: tuple[str, ...], formats: tuple[str, ...], kind: str, tmp_path: Path
) -> None:
    _, network = trained(family, kind, *(args if kind == "lokr" else ()), network_dim=4, network_alpha=3.0)
    path = tmp_path / "0.safetensors"
    network.save(path, formats[0], "fp32", {})
    before, first = deltas(path, family), programs(path, family)
    for number, save_format in enumerate(formats[1:], 1):
        target = tmp_path / f"{number}.safetensors"
        words = ("--lora", path, "--save_to", target, "--save_format", save_format, "--model_type", family)
        call(convert_lora, *words)
        after, path = deltas(target, family), target
        for name, delta in before.items():
            torch.testing.assert_close(after[name], delta, rtol=1e-5, atol=1e-7)
    assert programs(path, family) == first


@pytest.mark.parametrize(
    ("source", "save_format", "written", "readers"),
    [
        ("lora_unet_double_blocks_0_img_attn_qkv", "comfy", f"diffusion_model.{JOINED}", {"ComfyUI"}),
        (f"diffusion_model.{JOINED}", "kohya", "lora_unet_double_blocks_0_img_attn_qkv", {"ComfyUI", "musubi-tuner"}),
    ],
)
def test_a_lokr_of_the_joined_layer_stays_one(
    source: str, save_format: str, written: str, readers: set[str], tmp_path: Path
) -> None:
    path, made = write(tmp_path / "a.safetensors", (source, lokr(32, 96))), tmp_path / "b.safetensors"
    family = ("--model_type", "flux_kontext")
    call(convert_lora, "--lora", path, "--save_to", made, "--save_format", save_format, *family)
    assert {key.partition(".lokr")[0] for key in load_file(made) if "lokr" in key} == {written}
    torch.testing.assert_close(deltas(made), deltas(path))
    assert programs(made, "flux_kontext") == readers
    small = tmp_path / "small.safetensors"
    call(resize_lora, "--lora", made, "--save_to", small, "--new_rank", 2, *family)
    assert load_file(small)[f"{written}.lokr_w2_b"].shape == (2, 8)
    assert programs(small, "flux_kontext") == readers


def test_resizing_keeps_the_best_of_w2_and_says_how_much(tmp_path: Path) -> None:
    stem = "lycoris_transformer_blocks_0_ff_net_2"  # 32 x 128
    path, small = tmp_path / "a.safetensors", tmp_path / "small.safetensors"
    trained_with = {"ss_network_args": json.dumps({"factor": "4", "full_matrix": "True"})}
    save_file({f"{stem}.{name}": tensor for name, tensor in lokr(128, 32).items()}, path, trained_with)
    said = printed(resize_lora, "--lora", path, "--save_to", small, "--new_rank", 3, "--model_type", "flux")
    (before,), (after,) = deltas(path).values(), deltas(small).values()
    values = np.linalg.svd(load_file(path)[f"{stem}.lokr_w2"].double().numpy())[1]
    kept = (values[:3] ** 2).sum() / (values**2).sum()
    assert float((before - after).square().sum() / before.square().sum()) == pytest.approx(1 - kept, abs=1e-5)
    assert f"at least {kept:.2%} of each update kept" in said
    assert load_file(small)[f"{stem}.alpha"] == 3  # alpha / rank was 1: nothing was of low rank
    with safe_open(small, "pt") as file:
        assert json.loads(file.metadata()["ss_network_args"]) == {"factor": "4"}
    words = ("--save_to", tmp_path / "b.safetensors", "--dynamic_method", "sv_fro", "--dynamic_param", 0.8)
    call(resize_lora, "--lora", path, *words, "--model_type", "flux")
    rank = int(np.argmax((values**2).cumsum() >= 0.64 * (values**2).sum())) + 1
    assert load_file(tmp_path / "b.safetensors")[f"{stem}.lokr_w2_b"].shape[0] == rank


def test_full_matrices_stay_full_with_an_alpha_by_which_nobody_scales(tmp_path: Path) -> None:
    stem, flux = "lycoris_transformer_blocks_0_ff_net_2", ("--model_type", "flux")
    path, made = write(tmp_path / "a.safetensors", (stem, lokr(128, 32))), tmp_path / "b.safetensors"
    words = ("--lora", path, "--save_to", made, "--overwrite", *flux)
    assert "1 layer, full matrices; no layer became smaller" in printed(resize_lora, *words, "--new_rank", 999)
    (before,), (after,) = deltas(path).values(), deltas(made).values()
    torch.testing.assert_close(after, before)
    side = 32.0  # w2 is 8 x 32; a reader divides by no rank, or by the larger side
    assert load_file(made)[f"{stem}.alpha"] == side
    said = printed(merge_lora, "--lora", f"{path}:0.5", *words[2:])
    assert "1 layer of 1 LoRA, full matrices" in said
    assert load_file(made)[f"{stem}.alpha"] == side
    (after,) = deltas(made).values()
    torch.testing.assert_close(after, before / 2)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_lora_of_a_lokr_is_the_best_of_its_rank_for_programs_that_read_no_lokr(rank: int, tmp_path: Path) -> None:
    stem = "lycoris_transformer_blocks_0_attn_to_k"
    path, made = write(tmp_path / "a.safetensors", (stem, lokr(32, 32, rank))), tmp_path / "lora.safetensors"
    words = ("--network_type", "lora", "--new_rank", 6, "--save_format", "kohya", "--model_type", "flux")
    said = printed(resize_lora, "--lora", path, "--save_to", made, *words)
    (before,), (after,) = deltas(path).values(), deltas(made).values()
    u, s, vh = np.linalg.svd(before.numpy())
    np.testing.assert_allclose(after, u[:, :6] * s[:6] @ vh[:6], atol=1e-5)
    assert f"at least {(s[:6] ** 2).sum() / (s**2).sum():.2%} of each update kept" in said
    assert programs(made, "flux") == {"diffusers", "ComfyUI", "sd-scripts"}


def test_what_a_tool_cannot_do_with_a_kind_is_said(tmp_path: Path) -> None:
    stem, to = "lycoris_transformer_blocks_0_attn_to_k", ("--save_to", tmp_path / "b.safetensors")
    path = write(tmp_path / "a.safetensors", (stem, lokr(32, 32)))
    flux = ("--model_type", "flux")
    message = refusal(convert_lora, "--lora", path, *to, "--save_format", "diffusers", *flux)
    assert "no program loads network_type lokr from the layout diffusers; set save_format = comfy" in message
    norms = {"dora_scale": torch.ones(32, 1)}
    dora = write(tmp_path / "dora.safetensors", (stem, lokr(32, 32) | norms))
    for tool, words in ((convert_lora, ("--save_format", "comfy")), (resize_lora, ("--new_rank", 2))):
        assert re.search("is a LoKr with dora_scale, .*merge it", refusal(tool, "--lora", dora, *to, *words, *flux))
    loha = {f"hada_w{i}_{side}": torch.ones((32, 2) if side == "a" else (2, 32)) for i in (1, 2) for side in "ab"}
    path = write(tmp_path / "loha.safetensors", (stem, loha))
    message = refusal(resize_lora, "--lora", path, *to, "--new_rank", 2, *flux)
    assert "to_k: is a LoHa, which has no smaller ranks; give --network_type lora" in message
    assert not (tmp_path / "b.safetensors").exists()
    both = ("--model_org", tmp_path, "--model_tuned", tmp_path, *to)
    assert "--factor: cuts the layers of a LoKr" in refusal(extract_lora, *both, "--dim", 2, "--factor", 4)
    assert "--dim: a LoRA has a rank; give it" in refusal(extract_lora, *both)


def test_a_lokr_at_another_strength_and_its_sum_with_a_lora(tmp_path: Path) -> None:
    stem = "lycoris_transformer_blocks_0_attn_to_k"
    path, made = write(tmp_path / "a.safetensors", (stem, lokr(32, 32))), tmp_path / "b.safetensors"
    pair = {"lora_down.weight": torch.randn(2, 32), "lora_up.weight": torch.randn(32, 2), "alpha": torch.tensor(2.0)}
    lora = write(tmp_path / "lora.safetensors", (stem, pair))
    flux = ("--model_type", "flux")
    call(merge_lora, "--lora", f"{path}:-0.4", "--save_to", made, *flux)
    (before,), (after,) = deltas(path).values(), deltas(made).values()
    torch.testing.assert_close(after, -0.4 * before, rtol=1e-5, atol=1e-6)
    assert f"{stem}.lokr_w2" in load_file(made)
    both = ("--lora", f"{path}:0.5", f"{lora}:2", "--overwrite", "--save_to", made, *flux)
    assert "--method concat: puts LoRAs side by side" in refusal(merge_lora, *both)
    call(merge_lora, *both, "--method", "svd", "--new_rank", 8)
    u, s, vh = np.linalg.svd((0.5 * before + 2 * deltas(lora)["transformer_blocks.0.attn.to_k"]).numpy())
    np.testing.assert_allclose(deltas(made)["transformer_blocks.0.attn.to_k"], u[:, :8] * s[:8] @ vh[:8], atol=1e-4)


@pytest.mark.parametrize("rank", [0, 3])
def test_extraction_gives_back_a_lokr_that_was_merged(rank: int, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    make_flux().save_pretrained(tmp_path / "base")
    layers = [(f"lycoris_transformer_blocks_{i}_ff_net_2", lokr(128, 32, rank)) for i in range(2)]
    path = write(tmp_path / "lokr.safetensors", *layers)
    merge_loras(tmp_path / "base", [LoraSource(path, 1.0)], tmp_path / "tuned", lora_targets()["flux"])
    made = tmp_path / "out.safetensors"
    words = ("--network_type", "lokr", "--factor", 4, "--save_precision", "fp32", *(("--dim", rank) if rank else ()))
    models = ("--model_org", tmp_path / "base", "--model_tuned", tmp_path / "tuned")
    said = printed(extract_lora, *models, "--save_to", made, *words)
    before, after = deltas(path), deltas(made)
    assert after.keys() == before.keys()
    for name, delta in before.items():
        torch.testing.assert_close(after[name], delta, rtol=1e-4, atol=1e-4)  # a merged weight in fp32
    assert "at least 100.00% of each difference kept" in said
    (shape,) = {tensor.shape for key, tensor in load_file(made).items() if key.endswith(("lokr_w2_b", "lokr_w2"))}
    assert shape == ((rank, 32) if rank else (8, 32))
    over = [*words[:2], "--factor", 24, "--overwrite"]
    said_of_other = printed(extract_lora, *models, "--save_to", made, *over)
    assert (
        "note: factor 24 is not the smaller factor of every side; w1 has 4, 8 there" in said_of_other  # 4x8, 8x16
    )  # other is 2, 8
    over[3] = 5000
    assert "--factor=5000: no layer has more than" in refusal(extract_lora, *models, "--save_to", made, *over)
    size = 16 + (rank * 40 if rank else 256)  # numbers in w1 and w2
    (one, *_) = before.values()
    values = np.linalg.svd(one.numpy())[1]
    keeps = (values[: max(1, size // 160)] ** 2).sum() / (values**2).sum()
    assert f"in the mean of all layers 100.00%; LoRAs of as many parameters keep {keeps:.2%}" in said
    assert "ComfyUI" in programs(made, "flux")
