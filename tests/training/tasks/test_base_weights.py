"""``base_weights``: training on a base with LoRAs merged into it is training on the model that merge_lora writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import tools.merge_lora as merge_lora
from library.errors import UserError
from tests.runs import call, largest_difference, lora, metadata, run, write_base, write_dataset
from tests.training.tasks.test_quantised_runs import linked, with_transformer

STRONG = {"learning_rate": 0.05, "max_train_steps": 3}  # an update that fp8's rounding does not swallow


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[str]]:
    """A base, a dataset, and two LoRAs on other layers and of other ranks."""
    folder = tmp_path_factory.mktemp("base_weights")
    base, dataset = write_base(folder / "base"), write_dataset(folder / "data", images=4)
    first = {"network_dim": 4, "network_alpha": 2, "seed": 1}
    second = {"network_dim": 2, "save_format": "kohya", "network_args": ["exclude_patterns=.*attn.*"], "seed": 2}
    for name, settings in (("first", first), ("second", second)):
        run(base, dataset, folder / name, **STRONG | settings)
    return base, dataset, [str(folder / name / "lora.safetensors") for name in ("first", "second")]


def merged(model: Path, loras: list[str], target: Path) -> Path:
    call(merge_lora, "--model", model, "--save_to", target, *loras)
    return target


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        (None, {}),
        (None, {"fp8_scaled": True, "fp8_granularity": "row"}),
        (None, {"fp8_base": True}),
        ("comfy_scaled", {}),
        ("plain", {}),
    ],
    ids=["fp32", "fp8_scaled", "fp8_base", "fp8 file with scales", "fp8 file without"],
)
def test_it_is_the_base_that_merge_lora_writes(
    case: tuple[Path, Path, list[str]], tmp_path: Path, layout: str | None, settings: dict[str, object]
) -> None:
    base, dataset, (first, second) = case
    if layout is not None:
        base = with_transformer(base, tmp_path / "fp8", layout)
    run(base, dataset, tmp_path / "own", base_weights=[first, second], base_weights_multiplier=[0.5], **settings)
    words = ["--lora", f"{first}:0.5", f"{second}:1", *(["--accept_loss"] if layout else [])]
    whole = linked(base, tmp_path / "whole", merged(base / "transformer", words, tmp_path / "merged"))
    run(whole, dataset, tmp_path / "written", **settings)
    assert largest_difference(lora(tmp_path / "own"), lora(tmp_path / "written")) == 0
    run(base, dataset, tmp_path / "without", **settings)
    assert largest_difference(lora(tmp_path / "own"), lora(tmp_path / "without")) > 1e-3


def test_the_file_says_what_it_was_trained_on_and_a_state_goes_on_with_nothing_else(
    case: tuple[Path, Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, dataset, (first, second) = case
    asked = {"base_weights": [first], "base_weights_multiplier": [0.5], "save_every_n_steps": 2, "save_state": True}
    run(base, dataset, tmp_path / "out", **asked)
    assert json.loads(metadata(tmp_path / "out")["tandem.base_weights"]) == [{"lora": "lora.safetensors", "ratio": 0.5}]
    assert f"base: {first} merged at 0.5" in capsys.readouterr().out

    state = next((tmp_path / "out").glob("lora-step*-state"))
    run(base, dataset, tmp_path / "resumed", **asked, resume=state)
    assert largest_difference(lora(tmp_path / "resumed"), lora(tmp_path / "out")) == 0
    for other in ({"base_weights": []}, {"base_weights_multiplier": [0.6]}, {"base_weights": [second]}):
        with pytest.raises(UserError, match="base_weights"):
            run(base, dataset, tmp_path / "other", **asked | other, resume=state)

    run(base, dataset, tmp_path / "on", network_weights=tmp_path / "out/lora.safetensors")
    assert "trained on a base with LoRAs merged into it" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize("damage", ["gone", "a text file", "of another model"])
def test_what_is_no_lora_of_this_model_is_refused_by_name(
    case: tuple[Path, Path, list[str]], tmp_path: Path, damage: str
) -> None:
    base, dataset, (first, _) = case
    path = tmp_path / "a.safetensors"
    if damage == "a text file":
        path.write_text("a LoRA")
    elif damage == "of another model":
        names = [f"transformer_blocks.77.attn.to_q.lora_{x}.weight" for x in "AB"]
        shapes = [(4, 32), (32, 4)]
        tensors = {f"transformer.{name}": torch.ones(shape) for name, shape in zip(names, shapes, strict=True)}
        save_file(tensors, path)
    with pytest.raises(UserError, match="a.safetensors|transformer_blocks.77"):
        run(base, dataset, tmp_path / "out", base_weights=[first, path])
