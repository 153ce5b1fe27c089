"""tools/convert_lora.py: the same update in every layout, everything else kept, nothing lost. Reading and writing
each layout is tested in tests/networks/files/test_formats.py; here is what the tool adds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from library.errors import UserError
from networks.files.adapters import load_lora
from networks.files.detection import load_loras
from networks.files.weights import LoraWeights
from networks.files.writing import save_adapter
from networks.merging.merge import LoraSource
from tests.forked import run_script
from tests.networks.conftest import inject, make_flux, train_a_little
from tests.networks.files.test_formats import output_in_diffusers
from tests.runs import call, metadata, printed, refusal
from tests.targets import FLUX_TARGETS, QWEN_TARGETS
from tools import convert_lora
from tools.command import lora_source
from tools.convert_lora import convert

METADATA = {
    "ss_network_dim": "4",
    "ss_output_name": "mine",
    "modelspec.title": "mine",
    "modelspec.hash_sha256": "0xstale",
    "sshs_model_hash": "stale",
    "tandem.base_fingerprint": "0123456789abcdef",
}


def mixed_lora() -> dict[str, LoraWeights]:
    """A LoRA on the double blocks (diffusers splits linear1 at one width only), of mixed ranks, alpha 3."""
    model = make_flux()
    network = inject(model, "train_single_block_indices=none", "img_mlp_dim=6", alpha=3.0)
    train_a_little(network)
    return network.weights()


def deltas(weights: dict[str, LoraWeights]) -> dict[str, Tensor]:
    return {name: module.delta(torch.float64) for name, module in weights.items()}


@pytest.mark.parametrize(("first", "second"), [("diffusers", "kohya"), ("kohya", "comfy"), ("comfy", "diffusers")])
def test_another_layout_keeps_update_output_and_metadata(first: str, second: str, tmp_path: Path) -> None:
    weights = mixed_lora()
    assert any(module.alpha != module.rank for module in weights.values())
    source, target = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_adapter(source, weights, FLUX_TARGETS, first, metadata=METADATA)
    _, read, written, difference = convert(source, target, second, model_type="flux")
    assert (read.layout, written.layout) == (first, second)
    # one fp32 rounding (6e-8) where parts of unequal scale are folded into one B, relative to the largest element
    torch.testing.assert_close(deltas(written.weights), deltas(weights), rtol=1e-6, atol=1e-6)
    assert difference < 1e-6
    # the same products in fp32, summed in another order
    torch.testing.assert_close(output_in_diffusers(target), output_in_diffusers(source), rtol=1e-5, atol=1e-5)
    kept = metadata(target)
    for key in ("ss_network_dim", "ss_output_name", "modelspec.title", "tandem.base_fingerprint"):
        assert kept[key] == METADATA[key]
    # diffusers' alphas are in the file's metadata only where they are not in tensors too
    assert ("lora_adapter_metadata" in kept) == (second == "diffusers")


@pytest.mark.parametrize(("asked", "dtype"), [(None, torch.bfloat16), ("fp32", torch.float32)])
def test_precision_is_the_sources_unless_asked_otherwise(asked: str | None, dtype: torch.dtype, tmp_path: Path) -> None:
    source, target = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_adapter(source, mixed_lora(), FLUX_TARGETS, "diffusers", "bf16")
    *_, difference = convert(source, target, "comfy", asked, "flux")
    assert {t.dtype for key, t in load_file(target).items() if not key.endswith(".alpha")} == {dtype}
    assert difference < (1e-6 if asked else 8e-3)  # bf16 rounds by up to 2^-8, in each of two factors


def test_unequal_scales_of_a_bf16_file_are_folded_without_loss_into_fp32(tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(0)

    def part(alpha: float) -> LoraWeights:
        down, up = torch.randn(4, 32, generator=rng), torch.randn(32, 4, generator=rng)
        return LoraWeights(down.bfloat16(), up.bfloat16(), alpha)

    weights = {f"transformer_blocks.0.attn.to_{x}": part(alpha) for x, alpha in (("q", 1.0), ("k", 3.0), ("v", 0.7))}
    source, target = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_adapter(source, weights, FLUX_TARGETS, "diffusers", "bf16")
    assert convert(source, target, "kohya", "fp32", "flux")[-1] < 1e-6


def test_nothing_on_disk_is_replaced_unasked(tmp_path: Path) -> None:
    source, target = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_adapter(source, mixed_lora(), FLUX_TARGETS, "diffusers")
    target.write_bytes(b"precious")
    with pytest.raises(UserError, match=r"b.safetensors: exists; choose another --save_to or give --overwrite"):
        convert(source, target, "kohya", model_type="flux")
    assert target.read_bytes() == b"precious"
    convert(source, target, "kohya", model_type="flux", overwrite=True)
    assert load_lora(target, FLUX_TARGETS).layout == "kohya"
    with pytest.raises(UserError, match="a.safetensors: is the source itself; choose another --save_to"):
        convert(source, source, "kohya", model_type="flux", overwrite=True)
    with pytest.raises(UserError, match="out.pt: a LoRA is a .safetensors file"):
        convert(source, tmp_path / "out.pt", "kohya", model_type="flux")


def test_the_report_tells_layouts_and_the_check(tmp_path: Path) -> None:
    source, target = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    weights = mixed_lora()
    save_adapter(source, weights, FLUX_TARGETS, "diffusers")
    text = printed(convert_lora, "--lora", source, "--save_to", target, "--save_format", "comfy")
    lines = [line.split() for line in text.splitlines()]
    assert f"from  {source}: diffusers, fp32, {len(weights)} layers in {2 * len(weights)} tensors" in text
    # of 14 layers a block, q, k and v of both streams become two: 10 modules with three tensors each
    assert f"to    {target}: comfy, fp32, {len(weights)} layers in {2 * 10 * 3} tensors" in text
    assert "checked: every layer's update is the same" in text
    assert ["ComfyUI", str(len(weights)), "of", str(len(weights))] in [line[:4] for line in lines]
    words = ("--lora", "nowhere.safetensors", "--save_to", tmp_path / "x.safetensors", "--save_format=comfy")
    assert refusal(convert_lora, *words) == "error: nowhere.safetensors: no such file; check the path\n"


ATTENTION = {"transformer_blocks.0.attn.to_q": LoraWeights(torch.ones(2, 8), torch.ones(8, 2), 1.0)}
QWEN_CONFIG = json.dumps({"model": {"model_type": "qwen_image_edit"}})


@pytest.mark.parametrize(
    "metadata",
    [
        {"tandem.config": QWEN_CONFIG, "ss_base_model_version": "flux1"},  # the run's own config comes first
        {"ss_base_model_version": "qwen_image"},
        {"modelspec.architecture": "Qwen-Image/lora"},
    ],
)
def test_attention_of_qwen_image_keeps_its_names_by_its_metadata(metadata: dict[str, str], tmp_path: Path) -> None:
    """FLUX's attention has the same names in diffusers, and others in ComfyUI's layout."""
    source, target = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_adapter(source, ATTENTION, QWEN_TARGETS, "diffusers", "fp32", metadata)
    call(convert_lora, "--lora", source, "--save_to", target, "--save_format", "comfy")
    assert set(load_file(target)) == {
        f"diffusion_model.{name}.{part}"
        for name in ATTENTION
        for part in ("lora_down.weight", "lora_up.weight", "alpha")
    }


@pytest.mark.parametrize(
    ("named", "flags", "message"),
    [
        (
            {},
            [],
            "its keys fit flux, flux2_klein, qwen_image, qwen_image_21 or krea2, and its metadata name none of them; "
            "set --model_type",
        ),
        (
            {"ss_base_model_version": "qwen_image"},
            ["--model_type", "flux"],
            "--model_type flux, but its metadata name qwen_image; set --model_type qwen_image, or leave it out",
        ),
    ],
)
def test_a_family_that_is_not_certain_is_refused(
    named: dict[str, str], flags: list[str], message: str, tmp_path: Path
) -> None:
    source, target = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_adapter(source, ATTENTION, QWEN_TARGETS, "diffusers", "fp32", named)
    line = refusal(convert_lora, "--lora", source, "--save_to", target, "--save_format", "comfy", *flags)
    assert line == f"error: {source}: {message}\n"
    assert not target.exists()


def test_loras_of_two_families_are_not_taken_together(tmp_path: Path) -> None:
    save_adapter(tmp_path / "q", ATTENTION, QWEN_TARGETS, metadata={"ss_base_model_version": "qwen_image"})
    save_adapter(tmp_path / "f", ATTENTION, FLUX_TARGETS, metadata={"ss_base_model_version": "flux1"})
    with pytest.raises(UserError, match=r"f: is a LoRA of flux, .*q one of qwen_image; keep one family's"):
        load_loras([tmp_path / "q", tmp_path / "f"])
    assert load_loras([tmp_path / "f"], "flux_kontext")[0].family == "flux_kontext"  # dev's own names


SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "merge_lora.py"


def test_two_loras_are_merged_at_their_strengths(tmp_path: Path) -> None:
    base = torch.zeros(6, 2)
    save_file({"double_blocks.0.img_attn.qkv.weight": base.half()}, tmp_path / "base.safetensors")
    for name, column in (("a", [1.0, 0.0]), ("b", [0.0, 1.0])):
        lora = {"transformer_blocks.0.attn.to_k": LoraWeights(torch.tensor([column]), torch.ones(2, 1), 2.0)}
        save_adapter(tmp_path / f"{name}.safetensors", lora, FLUX_TARGETS)
    words = ["--model", "base.safetensors", "--lora", "a.safetensors:0.5", "b.safetensors"]
    words += ["--save_to", "m.safetensors", "--save_precision", "bf16"]
    done = run_script(SCRIPT, words, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "m.safetensors: 1 of 1 tensor changed by 2 LoRAs\n"
    merged = load_file(tmp_path / "m.safetensors")["double_blocks.0.img_attn.qkv.weight"]
    assert merged.dtype == torch.bfloat16
    # k is rows 2 and 3; alpha 2 at rank 1 doubles, and a counts half
    assert merged.tolist() == [[0, 0], [0, 0], [1, 2], [1, 2], [0, 0], [0, 0]]


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    words = ["--model", "none", "--lora", "a.safetensors", "--save_to", "m.safetensors"]
    done = run_script(SCRIPT, words, tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --model 'none' does not exist; give a local file or folder, or a name on the")
    assert done.stderr.count("\n") == 1


def test_strength_follows_the_last_colon_unless_a_file_is_called_so(tmp_path: Path) -> None:
    (tmp_path / "a:0.5").touch()
    for text, path, strength in (
        ("a.safetensors", "a.safetensors", 1.0),
        ("dir/a:b.safetensors:-1", "dir/a:b.safetensors", -1.0),
        ("C:/loras/a.safetensors", "C:/loras/a.safetensors", 1.0),
        (f"{tmp_path}/a:0.5", f"{tmp_path}/a:0.5", 1.0),
    ):
        assert lora_source(text) == LoraSource(Path(path), strength)
    with pytest.raises(UserError, match=r"--lora a.safetensors:high: 'high' is not a number; write"):
        lora_source("a.safetensors:high")
