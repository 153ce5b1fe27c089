"""What a LoRA does on a distilled model, against truths that are planted in the distilled model's own weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import library.fidelity.distilled as distilled
import tools.merge_lora as merge_lora
import tools.precision_report as precision_report
import tools.quantize_model as quantize_model
import tools.refit_lora as refit_lora
from library.config.schema import ModelConfig
from library.console import Console
from library.fidelity.calibration import CalibrationOptions
from library.fidelity.deployed import DeployedWeights
from library.fidelity.distilled import EQUAL, MOST, Distilled, compare_distilled, equal_strength
from library.fidelity.runs import prepare_eval_set
from library.fidelity.serving import REFERENCE, Models
from networks.files.adapters import load_lora
from networks.files.weights import LoraWeights
from networks.files.writing import save_adapter
from tests.runs import call, write_dataset
from tests.targets import FLUX_TARGETS, Z_IMAGE_TARGETS
from tests.tiny import tiny_flux_pipeline
from tests.tiny_z_image import save_z_split_files, tiny_z_pipeline

QUIET = Console(quiet=True)
FLUX_LAST, Z_LAST = "single_transformer_blocks.0.proj_out", "layers.1.feed_forward.w2"
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


@pytest.fixture(autouse=True)
def whole_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is planted is planted in single answers, so the base takes each step of the distilled model as a whole."""
    monkeypatch.setattr(distilled, "STEP_PARTS", 1)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_flux_pipeline(tmp_path_factory.mktemp("distilled") / "base")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data"), images=2)


def update(base: Path, layer: str, size: float) -> dict[str, LoraWeights]:
    """A LoRA of rank 2 on a layer, ``size`` times as large as its weight."""
    weight = load_file(base / WEIGHTS)[f"{layer}.weight"].float()
    draws = torch.Generator().manual_seed(1)
    down, up = torch.randn(2, weight.shape[1], generator=draws), torch.randn(weight.shape[0], 2, generator=draws)
    return {layer: LoraWeights(down, up * (size * weight.norm() / (up @ down).norm()), 2.0)}


def changed(base: Path, folder: Path, name: str, change: Callable[[Tensor], Tensor]) -> Path:
    """A copy of ``base`` one of whose tensors is another."""
    shutil.copytree(base, folder)
    tensors = load_file(folder / WEIGHTS)
    tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    return folder


def compared(
    base: Path,
    turbo: Path,
    dataset: Path,
    lora: dict[str, LoraWeights],
    steps: int = 2,
    served: dict[str, LoraWeights] | None = None,
) -> Distilled:
    config = ModelConfig(pretrained_model_name_or_path=str(base))
    deployed = DeployedWeights(turbo.name, turbo, None)
    models = Models(config, deployed, {"transformer": lora}, torch.float32, torch.device("cpu"))
    calibration = models.plan(CalibrationOptions(str(dataset), images=2)).prepare(QUIET)
    return compare_distilled(
        models, prepare_eval_set(models, calibration, REFERENCE, steps), 3, QUIET, served and {"transformer": served}
    )


def test_on_the_base_itself_the_lora_is_as_strong(base: Path, dataset: Path) -> None:
    found = compared(base, base, dataset, update(base, FLUX_LAST, 0.5))
    assert found.equal == 1.0
    (row,) = found.rows
    assert row.size == pytest.approx(1)
    assert row.direction == pytest.approx(1)
    assert (row.picture, row.picture_direction) == (pytest.approx(1), pytest.approx(1))
    assert "is as strong on" in found.sentence()
    assert [*found.images] == ["base", "base + LoRA", "distilled", "distilled + LoRA"]


def test_the_base_takes_small_steps_for_each_of_the_distilled_models(
    base: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over whole steps the base is its own distilled model, over small ones it is not, in pictures neither."""
    found = {}
    for parts in (1, 2):
        monkeypatch.setattr(distilled, "STEP_PARTS", parts)
        found[parts] = compared(base, base, dataset, update(base, FLUX_LAST, 0.5)).at(1.0)
    assert found[1].error < 1e-3 < found[2].error
    assert found[2].picture != pytest.approx(1, abs=1e-3)


def test_an_effect_that_is_halved_is_found_halved_and_the_equal_strength_is_two(
    base: Path, dataset: Path, tmp_path: Path
) -> None:
    """The last layer halved halves every velocity, and with it what a LoRA in front of it does to it."""
    turbo = changed(base, tmp_path / "turbo", "proj_out.weight", lambda weight: weight / 2)
    found = compared(base, turbo, dataset, update(base, FLUX_LAST, 0.02), steps=0)  # small: in proportion
    assert found.at(1.0).size == pytest.approx(0.5, rel=1e-4)
    assert found.at(1.0).direction == pytest.approx(1, abs=1e-4)
    assert found.equal == pytest.approx(2, rel=2 * EQUAL)
    assert abs(found.at(found.equal).size - 1) <= EQUAL
    assert "0.50 of its effect on the base" in found.sentence()
    assert not found.images


def test_another_lora_on_the_distilled_model_is_measured_against_the_bases(
    base: Path, dataset: Path, tmp_path: Path
) -> None:
    """Twice as large in the file where the layer behind it is halved: nothing is left to correct."""
    turbo = changed(base, tmp_path / "turbo", "proj_out.weight", lambda weight: weight / 2)
    own, other = (update(base, FLUX_LAST, size) for size in (0.02, 0.04))
    found = compared(base, turbo, dataset, own, steps=0, served=other)
    assert found.equal == 1.0
    assert found.at(1.0).error < 0.05


def test_the_reports_command_makes_up_for_what_the_distilled_model_lost(
    base: Path, dataset: Path, tmp_path: Path
) -> None:
    turbo = changed(base, tmp_path / "turbo", "proj_out.weight", lambda weight: weight / 2)
    own, lora, fitted = update(base, FLUX_LAST, 0.02), tmp_path / "lora.safetensors", tmp_path / "fitted.safetensors"
    save_adapter(lora, own, FLUX_TARGETS)
    words = ["--model", base, "--distilled", turbo, "--lora", lora, "--dataset_config", dataset, "--images", 2]
    call(precision_report, *words, "--steps", 0, "--save_to", tmp_path / "report")
    remedies = json.loads((tmp_path / "report/report.json").read_text())["remedies"]
    tool, *command = remedies[0]["command"]
    assert tool == "tools/merge_lora.py"
    call(merge_lora, *(fitted if word == "{save_to}" else word for word in command))
    weights = load_lora(fitted, FLUX_TARGETS).weights
    assert float(weights[FLUX_LAST].delta().norm() / own[FLUX_LAST].delta().norm()) == pytest.approx(2, rel=0.05)
    found = compared(base, turbo, dataset, own, steps=0, served=weights).at(1.0)
    assert found.size == pytest.approx(1, abs=2 * EQUAL)


def test_an_effect_of_another_direction_is_not_scaled(base: Path, dataset: Path, tmp_path: Path) -> None:
    """The last layer's rows in another order give the same effect to other channels."""
    order = torch.randperm(64, generator=torch.Generator().manual_seed(3))
    turbo = changed(base, tmp_path / "turbo", "proj_out.weight", lambda weight: weight[order])
    found = compared(base, turbo, dataset, update(base, FLUX_LAST, 0.02), steps=0)
    assert found.at(1.0).size == pytest.approx(1, rel=1e-3)
    assert abs(found.at(1.0).direction) < 0.3
    assert found.equal is None
    assert [row.strength for row in found.rows] == [1.0]
    assert "no strength mends that" in found.sentence()


@pytest.mark.parametrize(
    ("size", "equal"),
    [
        (lambda s: 0.8 * s, 1.25),
        (lambda s: 0.3 * s**0.5, None),  # 0.6 at the strongest
        (lambda s: 0.5 * s**0.75, 0.5 ** (-1 / 0.75)),
        (lambda s: 3 * s**2, 3**-0.5),
        (lambda s: 0.0, None),
        (lambda s: 0.91 * s**0.7 if s < 1.2 else float("nan"), 0.91 ** (-1 / 0.7)),  # another effect is not far above
        (lambda s: 0.8 * s if s < 1.2 else float("nan"), None),  # another effect, before it is large enough
        (lambda s: 1.01 * s, 1.0),
    ],
)
def test_the_equal_strength_is_one_that_was_run(size: Callable[[float], float], equal: float | None) -> None:
    tried = [1.0]

    def run(strength: float) -> float:
        tried.append(strength)
        return size(strength)

    found = equal_strength(run, size(1.0))
    assert max(tried) <= MOST
    assert len(tried) <= 9
    if equal is None:
        assert found is None
    else:
        assert found in tried
        assert abs(size(found) - 1) <= EQUAL
        assert found == pytest.approx(equal, rel=3 * EQUAL)


@pytest.mark.parametrize("single_file", [False, True])
def test_z_image_turbo_is_compared_by_the_tool_in_its_real_formats(
    single_file: bool, dataset: Path, tmp_path: Path
) -> None:
    """A folder with a scheduler of its own, and the one file that ComfyUI loads: the same result."""
    base, turbo = tiny_z_pipeline(tmp_path / "z"), tmp_path / "turbo"
    changed(base, turbo, f"{Z_LAST}.weight", lambda weight: weight * 1.01)
    if single_file:
        turbo = save_z_split_files(turbo, tmp_path / "split").transformer
    lora = tmp_path / "lora.safetensors"
    save_adapter(lora, update(base, "layers.0.feed_forward.w2", 0.5), Z_IMAGE_TARGETS)
    words = ["--model", base, "--model_type", "z_image", "--distilled", turbo, "--lora", lora]
    words += ["--dataset_config", dataset, "--images", 2, "--steps", 2, "--save_to", tmp_path / "report"]
    report = reported(words)
    levels = [1 - step / 8 for step in range(8)]
    assert report["sigmas"] == pytest.approx([3 * s / (1 + 2 * s) for s in levels], abs=1e-3)
    assert report["equal"] == 1.0
    page = (tmp_path / "report/report.html").read_text()
    assert report["verdict"].split("(")[0] in page
    assert page.count("data:image/png") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--deploy: say what is served"),
        (["--distilled", "BASE"], "--distilled: compares the effect of a LoRA; give --lora"),
        (["--deploy", "cast", "--distilled_steps", "4"], "no effect without --distilled"),
        (["--distilled", "cast", "--lora", "x.safetensors"], "--distilled cast: no such file or folder"),
        (["--distilled", "BASE", "--lora", "x.safetensors", "--activations", "row"], "only with --deploy"),
        (["--distilled", "BASE", "--lora", "x.safetensors", "--fix"], "only with --deploy"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(
    flags: list[str], message: str, base: Path, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", base, "--dataset_config", dataset, *flags, "--save_to", tmp_path / "report"]
    with pytest.raises(SystemExit) as ended:
        reported([base if word == "BASE" else word for word in words])
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_lora_is_refitted_to_a_distilled_file_beside_its_own_bf16_weights_and_not_the_bases(
    base: Path, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fitted beside the base's, it would learn to take the distillation back."""
    draws = torch.Generator().manual_seed(2)
    noise = torch.randn(load_file(base / WEIGHTS)[f"{FLUX_LAST}.weight"].shape, generator=draws)
    turbo = changed(base, tmp_path / "turbo", f"{FLUX_LAST}.weight", lambda w: w + 0.3 * w.std() * noise)
    call(quantize_model, "--model", turbo, "--layout", "plain", "--save_to", tmp_path / "fp8")
    lora = tmp_path / "lora.safetensors"
    save_adapter(lora, update(base, FLUX_LAST, 0.3), FLUX_TARGETS)
    words = ["--lora", lora, "--deploy", tmp_path / "fp8", "--dataset_config", dataset, "--save_to"]
    with pytest.raises(SystemExit) as ended:
        call(refit_lora, *words, tmp_path / "wrong.safetensors", "--model", base)
    assert ended.value.code == 2
    assert "another model, distilled perhaps; give its own bf16 weights" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "wrong.safetensors").exists()
    call(refit_lora, *words, tmp_path / "right.safetensors", "--model", turbo)
    files = lora, tmp_path / "right.safetensors"
    kept, fitted = (load_lora(path, FLUX_TARGETS).weights[FLUX_LAST].delta() for path in files)
    assert (fitted - kept).norm() < 0.2 * kept.norm()


def reported(words: list[object]) -> dict[str, object]:
    call(precision_report, *words)
    return json.loads((Path(str(words[-1])) / "report.json").read_text())["distilled"]
