"""musubi-tuner's FLUX.1 Kontext configurations: they mean what they mean there."""

from __future__ import annotations

from library.config.kohya.command import read_command
from tests.config.test_kohya import _loaded, _words

# the options of docs/flux_kontext.md of musubi-tuner 30c658c, "Training", with other values
EXAMPLE = _words("""--dit kontext.safetensors --vae ae.safetensors --text_encoder1 t5xxl.safetensors
--text_encoder2 clip_l.safetensors --dataset_config data.toml --sdpa --mixed_precision bf16
--timestep_sampling flux_shift --weighting_scheme none --optimizer_type adamw8bit --learning_rate 2e-4
--gradient_checkpointing --max_data_loader_n_workers 2 --persistent_data_loader_workers
--network_module networks.lora_flux --network_dim 8 --max_train_epochs 4 --save_every_n_epochs 2 --seed 7
--output_dir out --output_name kontext --fp8_base --fp8_scaled --fp8_t5""")


def test_the_options_of_the_page_run_unchanged() -> None:
    command = read_command(["accelerate", "launch", "src/musubi_tuner/flux_kontext_train_network.py", *EXAMPLE])
    assert command.tool == "musubi-tuner"
    given, notes = _loaded(EXAMPLE)
    assert given == {
        "model_type": "flux_kontext",
        "pretrained_model_name_or_path": "kontext.safetensors",
        "ae": "ae.safetensors",
        "t5xxl": "t5xxl.safetensors",
        "clip_l": "clip_l.safetensors",
        "dataset_config": "data.toml",
        "mixed_precision": "bf16",
        "timestep_sampling": "flux_shift",
        "weighting_scheme": "none",
        "optimizer_type": "adamw8bit",
        "learning_rate": 2e-4,
        "gradient_checkpointing": True,
        "max_data_loader_n_workers": 2,
        "network_dim": 8,
        "max_train_epochs": 4,
        "save_every_n_epochs": 2,
        "seed": 7,
        "output_dir": "out",
        "output_name": "kontext",
        "fp8_scaled": True,
        "fp8_text_encoder": True,
        "save_format": "kohya",
        "network_args": ["split_qkv=False"],  # one LoRA on a fused qkv, as musubi-tuner trains it
    }
    assert "one LoRA on" in notes["network_args"]
