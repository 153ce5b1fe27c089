"""musubi-tuner's Qwen-Image-2.1 configurations: the published example means what it means there."""

from __future__ import annotations

from pathlib import Path

import pytest

from library.config.kohya.command import read_command
from library.models.registry import lora_targets
from tests.config.test_kohya import _loaded, _words

# docs/qwen_image_21.md of musubi-tuner, "LoRA Training", and what samples need
EXAMPLE = _words("""--dit dit --dataset_config data.toml --sdpa --mixed_precision bf16 --gradient_checkpointing
--network_module networks.lora_qwen_image_21 --network_dim 16 --network_alpha 16 --optimizer_type AdamW
--learning_rate 1e-4 --timestep_sampling shift --discrete_flow_shift 3.0 --weighting_scheme none --max_train_steps 2000
--save_every_n_steps 200 --output_dir out --output_name name --vae vae --text_encoder te""")
MEANT = {
    "model_type": "qwen_image_21",
    "pretrained_model_name_or_path": "dit",
    "vae": "vae",
    "text_encoder": "te",
    "dataset_config": "data.toml",
    "mixed_precision": "bf16",
    "gradient_checkpointing": True,
    "network_dim": 16,
    "network_alpha": 16.0,
    "optimizer_type": "AdamW",
    "learning_rate": 1e-4,
    "timestep_sampling": "shift",
    "discrete_flow_shift": 3.0,
    "weighting_scheme": "none",
    "max_train_steps": 2000,
    "save_every_n_steps": 200,
    "output_dir": "out",
    "output_name": "name",
    "save_format": "kohya",  # what musubi-tuner writes
}


def test_the_example_runs_unchanged() -> None:
    given, notes = _loaded(EXAMPLE)
    assert given == MEANT
    assert "network_args" not in notes, "both train attention and feed-forward of the blocks"


def test_the_trainer_is_known_by_its_script_and_its_own_flags_are_taken() -> None:
    flags = _words("--dit_config config.json --vae_tiling --fp8_base --fp8_scaled --fp8_vl --blocks_to_swap 30")
    script = "src/musubi_tuner/qwen_image_21_train_network.py"
    command = read_command(["accelerate", "launch", script, *EXAMPLE, *flags])
    assert command.tool == "musubi-tuner"
    given, notes = _loaded([*command.arguments])
    assert given["fp8_scaled"] is given["fp8_text_encoder"] is True
    assert given["blocks_to_swap"] == 30
    assert notes["dit_config"] == "note: has no effect here: the file says what its model is"
    assert notes["vae_tiling"].startswith("note: has no effect here: an image is encoded and decoded whole")


@pytest.mark.parametrize("controls", [False, True])
def test_the_datasets_control_images_ask_for_the_edit_model(controls: bool, tmp_path: Path) -> None:
    control = 'control_directory = "controls"\n' if controls else ""
    dataset = tmp_path / "data.toml"
    dataset.write_text(f'[[datasets]]\nimage_directory = "images"\n{control}')
    given, notes = _loaded([str(dataset) if word == "data.toml" else word for word in EXAMPLE])
    assert given["model_type"] == ("qwen_image_21_edit" if controls else "qwen_image_21")
    assert ("model_type" in notes) is controls
    assert lora_targets()[given["model_type"]].kohya_module == "networks.lora_qwen_image_21"
