"""musubi-tuner's FLUX.2 configurations: the published example means what it means there."""

from __future__ import annotations

from pathlib import Path

import pytest

from library.config.kohya.command import read_command
from tests.config.test_kohya import _loaded, _problem, _words

# docs/flux_2.md of musubi-tuner, "Training"
EXAMPLE = _words("""--model_version dev --dit dit.safetensors --vae ae.safetensors --text_encoder mistral.safetensors
--dataset_config data.toml --sdpa --mixed_precision bf16 --timestep_sampling flux2_shift --weighting_scheme none
--optimizer_type adamw8bit --learning_rate 1e-4 --gradient_checkpointing --max_data_loader_n_workers 2
--persistent_data_loader_workers --network_module networks.lora_flux_2 --network_dim 32 --max_train_epochs 16
--save_every_n_epochs 1 --seed 42 --output_dir out --output_name name-of-lora""")
MEANT = {
    "model_type": "flux2_dev",
    "pretrained_model_name_or_path": "dit.safetensors",
    "vae": "ae.safetensors",
    "text_encoder": "mistral.safetensors",
    "dataset_config": "data.toml",
    "mixed_precision": "bf16",
    "timestep_sampling": "flux2_shift",
    "weighting_scheme": "none",
    "optimizer_type": "adamw8bit",
    "learning_rate": 1e-4,
    "gradient_checkpointing": True,
    "max_data_loader_n_workers": 2,
    "network_dim": 32,
    "network_args": ["split_qkv=False"],  # one LoRA on each joined qkv, as there
    "max_train_epochs": 16,
    "save_every_n_epochs": 1,
    "seed": 42,
    "output_dir": "out",
    "output_name": "name-of-lora",
    "save_format": "kohya",  # what musubi-tuner writes
}
SHORT = _words("--dit d --vae v --text_encoder t --dataset_config data.toml --network_module networks.lora_flux_2")


def test_the_example_runs_unchanged() -> None:
    given, notes = _loaded(EXAMPLE)
    assert given == MEANT
    assert "split_qkv=False is the default there" in notes["network_args"]


def test_the_trainer_is_known_by_its_script_and_its_memory_switches_are_taken() -> None:
    flags = _words("--fp8_base --fp8_scaled --fp8_text_encoder --vae_dtype bfloat16 --blocks_to_swap 16")
    command = read_command(["accelerate", "launch", "src/musubi_tuner/flux_2_train_network.py", *EXAMPLE, *flags])
    assert command.tool == "musubi-tuner"
    given, _ = _loaded(list(command.arguments))
    assert given["fp8_scaled"] is given["fp8_text_encoder"] is True
    assert given["blocks_to_swap"] == 16


@pytest.mark.parametrize(
    ("version", "model_type"),
    [
        (None, "flux2_dev"),
        ("dev", "flux2_dev"),
        ("klein-4b", "flux2_klein"),
        ("klein-base-4b", "flux2_klein"),
        ("klein-9b", "flux2_klein"),
        ("klein-base-9b", "flux2_klein"),
    ],
)
@pytest.mark.parametrize("controls", [False, True])
def test_the_version_and_the_datasets_control_images_choose_the_model_type(
    version: str | None, model_type: str, controls: bool, tmp_path: Path
) -> None:
    control = 'control_directory = "controls"\n' if controls else ""
    dataset = tmp_path / "data.toml"
    dataset.write_text(f'[[datasets]]\nimage_directory = "images"\n{control}')
    flags = [str(dataset) if word == "data.toml" else word for word in SHORT]
    given, notes = _loaded([*flags, *(["--model_version", version] if version else [])])
    assert given["model_type"] == model_type + ("_edit" if controls else "")
    assert ("the default of musubi-tuner" in notes["model_version"]) is (version is None)


def test_other_versions_and_networks_are_refused() -> None:
    assert "--model_version: not taken: 'klein-2b' is not a model family" in _problem(
        [*SHORT, "--model_version", "klein-2b"]
    )
    given, _ = _loaded([*SHORT, "--network_args", "exclude_patterns=['.*txt_.*']"])
    assert "exclude_patterns" in str(given["network_args"])
