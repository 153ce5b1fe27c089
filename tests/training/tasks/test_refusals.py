"""What cannot work is told before anything is encoded or loaded: no cache is there when the message comes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from library.errors import UserError
from tests.runs import run, write_dataset

CLIP = {"text_encoder_lr": [1e-3], "max_train_steps": 2}


@pytest.fixture(scope="module")
def states(base: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the states of a finished run of the transformer alone, and of one with CLIP."""
    folder = tmp_path_factory.mktemp("states")
    run(base, dataset, folder / "plain", max_train_steps=2, save_state=True)
    run(base, dataset, folder / "text", **CLIP, save_state=True)
    return folder


def _changed(base: Path, copy: Path, part: str) -> Path:
    """Copy a pipeline with other weights in one part."""
    shutil.copytree(base, copy)
    (file,) = (copy / part).glob("*.safetensors")
    save_file({name: tensor + 0.5 for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    return copy


def _refusal(base: Path, tmp_path: Path, **settings: object) -> str:
    """Return the message, after checking that nothing was cached for it."""
    data = write_dataset(tmp_path / "fresh")
    with pytest.raises(UserError) as caught:
        run(base, data, tmp_path / "out", **settings)
    assert list((tmp_path / "fresh").rglob("*.safetensors")) == []
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_state_of_another_base_or_other_text_encoders(base: Path, states: Path, tmp_path: Path) -> None:
    other = _changed(base, tmp_path / "other", "transformer")
    resumed = {"resume": states / "plain" / "lora-state", "max_train_steps": 4}
    assert "was trained on another base model; set the one" in _refusal(other, tmp_path, **resumed)
    other = _changed(base, tmp_path / "text", "text_encoder")
    resumed = CLIP | {"resume": states / "text" / "lora-state", "max_train_steps": 4}
    assert "was trained with text_encoders = " in _refusal(other, tmp_path, **resumed)


def test_a_state_that_is_finished_or_damaged(base: Path, states: Path, tmp_path: Path) -> None:
    state = states / "plain" / "lora-state"
    assert "is at step 2 and the run ends at 2" in _refusal(base, tmp_path, resume=state, max_train_steps=2)
    for name in ("optimizer.safetensors", "schedule.json", "weights.safetensors"):
        copy = tmp_path / name.replace(".", "-")
        shutil.copytree(state, copy)
        (copy / name).write_bytes((copy / name).read_bytes()[:20])
        assert f"{copy}/{name.split('.')[0]}" in _refusal(base, tmp_path, resume=copy)


def test_weights_to_go_on_from_that_are_no_lora(base: Path, tmp_path: Path) -> None:
    save_file({"something.weight": torch.zeros(2, 2)}, tmp_path / "x.safetensors")
    assert "x.safetensors" in _refusal(base, tmp_path, network_weights=tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    "settings",
    [
        {"text_encoder_lr": [0.5]},
        {"network_args": ["loraplus_lr_ratio=4"]},
        {"text_encoder_lr": [1.0], "network_args": ["loraplus_text_encoder_lr_ratio=2"]},
    ],
)
@pytest.mark.parametrize("optimizer", ["Prodigy", "dadaptation.DAdaptAdam"])
def test_several_rates_for_an_optimizer_that_takes_one(
    base: Path, tmp_path: Path, optimizer: str, settings: dict[str, object]
) -> None:
    message = _refusal(base, tmp_path, optimizer_type=optimizer, learning_rate=1.0, **settings)
    assert f"{optimizer} takes one learning rate for all weights and has several" in message


def test_a_lora_names_the_text_encoders_it_was_trained_with(base: Path, states: Path) -> None:
    with safe_open(states / "text" / "lora.safetensors", framework="pt") as file:
        named = file.metadata()["tandem.text_encoder_fingerprint"]
    with safe_open(states / "plain" / "lora.safetensors", framework="pt") as file:
        assert "tandem.text_encoder_fingerprint" not in file.metadata()
    assert named in (states / "text" / "lora-state" / "position.json").read_text()


def test_a_format_that_a_program_or_every_program_would_not_read(base: Path, tmp_path: Path) -> None:
    said = _refusal(base, tmp_path / "a", save_for=["diffusers", "sd-scripts"], max_train_steps=1)
    assert "save_for: sd-scripts reads no LoRA of " in said
    assert said.endswith(" from save_format diffusers; set save_format = kohya")
    text = {"text_encoder_lr": 1e-3, "network_args": ["train_t5xxl=True"], "save_format": "diffusers"}
    assert "save_format: no program reads text_encoder_2." in _refusal(base, tmp_path / "b", **text)
