"""musubi-tuner's Z-Image configurations: the published example means what it means there."""

from __future__ import annotations

from library.config.kohya.command import read_command
from tests.config.test_kohya import _loaded, _words

# docs/zimage.md of musubi-tuner 867ab25, "Training"
EXAMPLE = _words("""--dit dit.safetensors --vae vae.safetensors --text_encoder qwen_3_4b.safetensors
--dataset_config data.toml --sdpa --mixed_precision bf16 --timestep_sampling shift --weighting_scheme none
--discrete_flow_shift 2.0 --optimizer_type adamw8bit --learning_rate 1e-4 --gradient_checkpointing
--max_data_loader_n_workers 2 --persistent_data_loader_workers --network_module networks.lora_zimage --network_dim 32
--max_train_epochs 16 --save_every_n_epochs 1 --seed 42 --output_dir out --output_name name-of-lora""")
MEANT = {
    "model_type": "z_image",
    "pretrained_model_name_or_path": "dit.safetensors",
    "vae": "vae.safetensors",
    "text_encoder": "qwen_3_4b.safetensors",
    "dataset_config": "data.toml",
    "mixed_precision": "bf16",
    "timestep_sampling": "shift",
    "weighting_scheme": "none",
    "discrete_flow_shift": 2.0,
    "optimizer_type": "adamw8bit",
    "learning_rate": 1e-4,
    "gradient_checkpointing": True,
    "max_data_loader_n_workers": 2,
    "network_dim": 32,
    "max_train_epochs": 16,
    "save_every_n_epochs": 1,
    "seed": 42,
    "output_dir": "out",
    "output_name": "name-of-lora",
    "save_format": "kohya",  # what musubi-tuner writes; in ComfyUI's names, which musubi-tuner converts to
}


def test_the_example_runs_unchanged() -> None:
    given, notes = _loaded(EXAMPLE)
    assert given == MEANT
    assert "network_args" not in notes, "musubi-tuner leaves Z-Image's modulation out, as it means to"


def test_the_trainer_is_known_by_its_script_and_its_fp8_switches_are_taken() -> None:
    command = read_command(["accelerate", "launch", "src/musubi_tuner/zimage_train_network.py", *EXAMPLE, "--fp8_llm"])
    assert command.tool == "musubi-tuner"
    given, _ = _loaded([*command.arguments, "--fp8_base", "--fp8_scaled"])
    assert given["fp8_scaled"] is given["fp8_text_encoder"] is True
