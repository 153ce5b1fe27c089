"""musubi-tuner's Krea 2 configurations: the published example means what it means there."""

from __future__ import annotations

import pytest

from library.config.kohya.command import read_command
from library.config.schema import NetworkConfig
from library.models.krea2.files import KREA2_TARGETS
from networks.options import parse_network_args
from tests.config.test_kohya import _loaded, _words

# docs/krea2.md of musubi-tuner 30c658c, "Training"; the text encoder is only there for samples
EXAMPLE = _words("""--dit raw.safetensors --vae vae.safetensors --text_encoder qwen3vl_4b.safetensors
--dataset_config data.toml --sdpa --mixed_precision bf16 --timestep_sampling shift --weighting_scheme none
--discrete_flow_shift 2.5 --optimizer_type adamw8bit --learning_rate 1e-4 --gradient_checkpointing
--max_data_loader_n_workers 2 --persistent_data_loader_workers --network_module networks.lora_krea2 --network_dim 32
--network_alpha 32 --max_train_epochs 16 --save_every_n_epochs 1 --seed 42 --output_dir out --output_name lora""")
MEANT = {
    "model_type": "krea2",
    "pretrained_model_name_or_path": "raw.safetensors",
    "vae": "vae.safetensors",
    "text_encoder": "qwen3vl_4b.safetensors",
    "dataset_config": "data.toml",
    "mixed_precision": "bf16",
    "timestep_sampling": "shift",
    "weighting_scheme": "none",
    "discrete_flow_shift": 2.5,
    "optimizer_type": "adamw8bit",
    "learning_rate": 1e-4,
    "gradient_checkpointing": True,
    "max_data_loader_n_workers": 2,
    "network_dim": 32,
    "network_alpha": 32.0,
    "max_train_epochs": 16,
    "save_every_n_epochs": 1,
    "seed": 42,
    "output_dir": "out",
    "output_name": "lora",
    "save_format": "kohya",  # what musubi-tuner writes
}


def test_the_example_runs_unchanged() -> None:
    given, notes = _loaded(EXAMPLE)
    assert given == MEANT
    assert "network_args" not in notes, "both train every linear layer"


def test_the_trainer_is_known_by_its_script_and_turbo_becomes_the_model_of_samples() -> None:
    flags = _words("--turbo_dit turbo.safetensors --turbo_dit_cache --sample_prompts p.txt --fp8_base --fp8_scaled")
    command = read_command(["accelerate", "launch", "src/musubi_tuner/krea2_train_network.py", *EXAMPLE, *flags])
    assert command.tool == "musubi-tuner"
    given, notes = _loaded([*command.arguments, "--sample_every_n_epochs", "1"])
    assert (given["sample_model"], given["fp8_scaled"]) == ("turbo.safetensors", True)
    assert "sample_model" in notes["turbo_dit"]
    assert notes["turbo_dit_cache"] == "note: has no effect here: sample_model is read from disk for each sampling"
    assert _loaded([*EXAMPLE, "--timestep_sampling", "krea2_shift"])[0]["timestep_sampling"] == "krea2_shift"


# docs/krea2.md, "LoRA target layers": the authors' configuration for long runs
ATTENTION = (
    r"exclude_patterns=['.*\.mlp\..*','first','last\.linear','tmlp\..*','txtmlp\..*','tproj\.1','txtfusion\..*']"
)


def test_its_patterns_on_the_published_names_leave_attention() -> None:
    given, _ = _loaded([*EXAMPLE, "--network_args", ATTENTION])
    options = parse_network_args(NetworkConfig(network_args=given["network_args"]), KREA2_TARGETS)
    trained = options.trained_layers(KREA2_TARGETS, ("transformer",))
    names = ("to_q", "to_k", "to_v", "to_gate", "to_out.0")
    assert sorted(trained) == sorted(f"transformer_blocks.0.attn.{name}" for name in names)


@pytest.mark.parametrize("name", ["blocks_to_swap", "gradient_checkpointing_cpu_offload"])
def test_its_memory_options_are_taken(name: str) -> None:
    words = [f"--{name}", *(["26"] if name == "blocks_to_swap" else [])]
    given, _ = _loaded([*EXAMPLE, *words])
    assert given.get(name) == 26 if name == "blocks_to_swap" else given["cpu_offload_checkpointing"] is True
