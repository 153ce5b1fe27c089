"""The report on an honest fp8 file, and its fixes; ``tests/fidelity/report_faults.py`` has a fault for each cause."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from diffusers import FluxTransformer2DModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import tools.precision_report as precision_report
import tools.quantize_model as quantize_model
from tests.networks.conftest import filled
from tests.runs import call, run, write_dataset
from tests.tiny import save_single_files, tiny_flux_pipeline


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny FLUX Fill in bf16, a LoRA for it, its ComfyUI fp8 file, and pictures with masks."""
    folder = tmp_path_factory.mktemp("report")
    base = tiny_flux_pipeline(folder / "base", model_type="flux_fill", dtype=torch.bfloat16)
    files = save_single_files(base, folder / "single")
    dataset = write_dataset(folder / "data", images=4, inpaint_masks='["rectangles"]')
    settings = {"learning_rate": 3e-2, "network_alpha": 4, "max_train_steps": 6}
    run(base, dataset, folder / "lora", model_type="flux_fill", **settings)
    call(quantize_model, "--model", files.comfy_transformer, "--save_to", folder / "fp8.safetensors")
    return folder


def report(
    place: Path,
    deploy: object,
    *flags: object,
    model: Path | None = None,
    lora: Path | None = None,
    strength: float = 1.0,
    figures: bool = False,
) -> dict:
    """Run the tool; return report.json. ``figures``: with those of the page, a third of the time."""
    save_to = place / "report"
    words = ["--model", model or place / "base", "--model_type", "flux_fill", "--deploy", deploy]
    words += ["--dataset_config", place / "data" / "dataset.toml", "--cache_directory", place / f"cache{bool(model)}"]
    words += [] if model else ["--lora", f"{lora or place / 'lora' / 'lora.safetensors'}:{strength}"]
    words += ["--images", "3", "--steps", "2", "--sigmas", "0.5", "--save_to", save_to, *flags]
    with nullcontext() if figures else mock.patch("library.fidelity.page.as_data_uri", return_value=""):
        call(precision_report, *words)
    return json.loads((save_to / "report.json").read_text())


def test_an_honest_file_is_named_as_rounding(place: Path) -> None:
    found = report(place, place / "fp8.safetensors", "--steps", "3", figures=True)
    shares = {each["cause"]: each["share"] for each in found["verdict"]["findings"]}
    assert found["verdict"]["cause"] == max(("weights", "merge"), key=lambda cause: shares[cause])
    assert not found["verdict"]["alarm"]
    assert found["verdict"]["border"]["state"] in ("invisible", "not worse")
    page = (place / "report" / "report.html").read_text()
    assert len(re.findall(r'<img alt="[^"]+" src="data:image/png;base64,\w', page)) == 1  # of each image three pictures
    assert [row["judged"] for row in found["merges"]] == [False, True, False]  # ComfyUI's, of a file that forbids fp8
    first, resident, streamed = (row["differences"] for row in found["merges"])
    assert first == streamed
    assert resident["image"] > streamed["image"]
    assert {each["cause"] for each in found["verdict"]["findings"]} >= {"weights", "merge"}
    first = found["remedies"][0]
    assert "Load LoRA (Bypass)" in first["text"]
    assert "tools/convert_lora.py --save_format comfy" in first["text"]  # the LoRA is in diffusers' names
    assert first["command"][:2] == ["tools/convert_lora.py", "--lora"]
    assert {"refitted", "corrected"} <= {each["name"] for each in found["remedies"] if each["command"]}


@pytest.mark.parametrize("how", ["stochastic", pytest.param("nearest", marks=pytest.mark.slow)])
def test_an_honest_merge_into_an_honest_file_damages_no_layer(how: str, place: Path) -> None:
    found = report(place, place / "fp8.safetensors", "--deploy_lora", how, "--deploy_strength", "1.4")
    assert not {"ruined_layer", "wrong_scale", "wrong_base"} & {each["cause"] for each in found["verdict"]["findings"]}


def test_a_lokr_is_measured_as_a_lora_and_mended_as_one(place: Path) -> None:
    pipeline = json.loads((place / "base" / "transformer" / "config.json").read_text())
    network = filled(FluxTransformer2DModel.from_config(pipeline), network_type="lokr", scale=0.05)
    network.save(place / "lokr.safetensors", "comfy", "fp32", {})
    found = report(place, place / "fp8.safetensors", "--fix", "refit", lora=place / "lokr.safetensors")
    assert not found["fixes"]  # a refit gives A and B
    assert {each["cause"] for each in found["verdict"]["findings"]} >= {"weights", "merge"}
    assert not {"ruined_layer", "lora_moved", "lora_missing"} & {e["cause"] for e in found["verdict"]["findings"]}
    kept = [row["retention"] for row in found["layers"] if row["retention"] is not None]
    assert kept
    assert all(0.8 < share < 1.2 for share in kept)
    commands = [each["command"] for each in found["remedies"] if each["command"]]
    assert all("resize_lora" in command[0] for command in commands if "--lora" in command)
    assert any("--save_format" in command for command in commands)  # for the bypass, which leaves parts of qkv out


def test_pasted_pixels_are_named_for_the_border(place: Path) -> None:
    found = report(place, place / "fp8.safetensors", "--paste", "pixels")
    assert found["verdict"]["cause"] == "paste"
    assert found["verdict"]["border"]["state"] == "worse"
    assert found["verdict"]["border_cause"]["cause"] == "paste"


def test_a_weaker_lora_is_not_called_rounded_away(place: Path) -> None:
    weaker = ["--deploy_lora", "stochastic", "--deploy_strength", "0.5", "--deploy_lora_without", "single_transformer"]
    found = report(place, place / "fp8.safetensors", *weaker)
    assert "delta_lost" not in {finding["cause"] for finding in found["verdict"]["findings"]}
    kept = {row["name"]: row["retention"] for row in found["layers"] if row["retention"] is not None}
    assert not any("single_transformer" in name for name in kept)
    assert all(0.9 < share < 1.1 for share in kept.values())  # of half the update


def test_a_layer_that_does_not_bear_its_format_is_named(place: Path, tmp_path: Path) -> None:
    """Half the gate's power of two moved into the layer before it: the same function, weights too small for a cast."""
    shutil.copytree(place / "base", tmp_path / "base")
    path = tmp_path / "base" / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    width = tensors["transformer_blocks.0.attn.to_out.0.weight"].shape[0]
    for leaf in ("weight", "bias"):
        tensors[f"transformer_blocks.0.norm1.linear.{leaf}"][2 * width : 3 * width] *= 256
        tensors[f"transformer_blocks.0.attn.to_out.0.{leaf}"] /= 256
    save_file(tensors, path, {"format": "pt"})
    found = report(place, "cast", model=tmp_path / "base")
    assert found["verdict"]["findings"][0]["cause"] == "sensitive_layer"
    assert found["verdict"]["findings"][0]["layers"] == ["transformer_blocks.0.attn.to_out.0"]


def test_fixes_are_tried_measured_and_the_cheapest_that_does_is_named(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of random weights the LoRA can make up for part of the rounding only; more rank makes up for more."""
    deploy = place / "fp8.safetensors"
    names = ["bypass", "refit", "correction"]
    found = report(place, deploy, "--fix", *names)
    before = found["deployment"]["velocity"]
    assert [fix["name"] for fix in found["fixes"]] == names
    served, beside = (
        {fix["name"]: fix[how]["velocity"] for fix in found["fixes"][1:]} for how in ("differences", "beside")
    )
    assert found["fixes"][0]["differences"]["velocity"] == pytest.approx(
        found["causes"]["weights"]["alone"]["velocity"]
    )
    assert found["fixes"][0]["beside"] is None
    assert all(beside[name] < served[name] for name in names[1:])  # what ComfyUI's stochastic merge adds to each
    assert beside["refit"] < found["fixes"][0]["differences"]["velocity"] < before
    assert beside["correction"] < 0.8 * beside["refit"]
    (corrected,) = found["fixes"][2]["files"]
    with safe_open(corrected, framework="pt") as file:
        assert file.metadata()["tandem.base_name"] == deploy.name
    shares = {
        fix["name"]: min(fix[how]["latents"] for how in ("differences", "beside") if fix[how])
        / found["deployment"]["latents"]
        for fix in found["fixes"]
    }
    wanted = next((name for name, share in shares.items() if share <= 0.3), min(shares, key=lambda name: shares[name]))
    assert f"Recommended of the fixes: “{wanted}” (" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--fix", "--steps", "0"], "--fix: judges by finished images; give --steps 4 or more"),
        (["--deploy_merged", "--deploy_lora", "nearest"], "the LoRA is in the file already (--deploy_merged)"),
        (["--activations", "static"], "has no input scales; use row or unit"),
        (["--steps", "-1"], "--steps: '-1' is no whole number from 0"),
        (["--fix", "--deploy_merged"], "--fix: refits a LoRA beside the weights"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    flags: list[str], message: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        report(place, place / "fp8.safetensors", *flags)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
