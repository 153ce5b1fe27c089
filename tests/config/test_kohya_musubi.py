"""musubi-tuner's configurations: the example of each of its pages means here what it means there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from library.config import load_config
from library.config.kohya.command import read_command
from library.config.kohya.translate import translate
from library.config.load import fields
from library.config.model_types import MODEL_TYPES
from library.config.schema import NetworkConfig
from library.errors import UserError
from library.training.plan import plan_network
from networks.options import parse_network_args
from tests.config.test_kohya import PLAIN, _loaded, _problem, _words
from tests.targets import KREA2_TARGETS, QWEN_TARGETS

# model type here -> "Training" in musubi-tuner's docs/<page>.md (30c658c, of Z-Image 867ab25), Kontext's with other
# values
EXAMPLES = {
    "flux2_dev": _words("""--model_version dev --dit dit.safetensors --vae ae.safetensors --text_encoder te.safetensors
--dataset_config data.toml --sdpa --mixed_precision bf16 --timestep_sampling flux2_shift --weighting_scheme none
--optimizer_type adamw8bit --learning_rate 1e-4 --gradient_checkpointing --max_data_loader_n_workers 2
--persistent_data_loader_workers --network_module networks.lora_flux_2 --network_dim 32 --max_train_epochs 16
--save_every_n_epochs 1 --seed 42 --output_dir out --output_name name-of-lora"""),
    "flux_kontext": _words("""--dit dit.safetensors --vae ae.safetensors --text_encoder1 t5xxl.safetensors
--text_encoder2 clip_l.safetensors --dataset_config data.toml --sdpa --mixed_precision bf16
--timestep_sampling flux_shift --weighting_scheme none --optimizer_type adamw8bit --learning_rate 2e-4
--gradient_checkpointing --max_data_loader_n_workers 2 --persistent_data_loader_workers
--network_module networks.lora_flux --network_dim 8 --max_train_epochs 4 --save_every_n_epochs 2 --seed 7
--output_dir out --output_name kontext --fp8_base --fp8_scaled --fp8_t5"""),
    "krea2": _words("""--dit dit.safetensors --vae vae.safetensors --text_encoder te.safetensors
--dataset_config data.toml --sdpa --mixed_precision bf16 --timestep_sampling shift --weighting_scheme none
--discrete_flow_shift 2.5 --optimizer_type adamw8bit --learning_rate 1e-4 --gradient_checkpointing
--max_data_loader_n_workers 2 --persistent_data_loader_workers --network_module networks.lora_krea2 --network_dim 32
--network_alpha 32 --max_train_epochs 16 --save_every_n_epochs 1 --seed 42 --output_dir out --output_name lora"""),
    "qwen_image": _words("""--dit dit.safetensors --vae vae.safetensors --text_encoder te.safetensors
--model_version original --dataset_config data.toml --sdpa --mixed_precision bf16 --timestep_sampling shift
--weighting_scheme none --discrete_flow_shift 2.2 --optimizer_type adamw8bit --learning_rate 5e-5
--gradient_checkpointing --max_data_loader_n_workers 2 --persistent_data_loader_workers
--network_module networks.lora_qwen_image --network_dim 16 --max_train_epochs 16 --save_every_n_epochs 1 --seed 42
--output_dir out --output_name name-of-lora"""),
    "qwen_image_21": _words("""--dit dit.safetensors --dataset_config data.toml --sdpa --mixed_precision bf16
--gradient_checkpointing --network_module networks.lora_qwen_image_21 --network_dim 16 --network_alpha 16
--optimizer_type AdamW --learning_rate 1e-4 --timestep_sampling shift --discrete_flow_shift 3.0 --weighting_scheme none
--max_train_steps 2000 --save_every_n_steps 200 --output_dir out --output_name name --vae vae.safetensors
--text_encoder te.safetensors"""),
    "z_image": _words("""--dit dit.safetensors --vae vae.safetensors --text_encoder te.safetensors
--dataset_config data.toml --sdpa --mixed_precision bf16 --timestep_sampling shift --weighting_scheme none
--discrete_flow_shift 2.0 --optimizer_type adamw8bit --learning_rate 1e-4 --gradient_checkpointing
--max_data_loader_n_workers 2 --persistent_data_loader_workers --network_module networks.lora_zimage --network_dim 32
--max_train_epochs 16 --save_every_n_epochs 1 --seed 42 --output_dir out --output_name name-of-lora"""),
}
_PARTS = {"vae": "vae.safetensors", "text_encoder": "te.safetensors"}
_FUSED = {"network_args": ["split_qkv=False"]}  # one LoRA on each joined qkv, as there
_EVERY = {
    "pretrained_model_name_or_path": "dit.safetensors",
    "dataset_config": "data.toml",
    "mixed_precision": "bf16",
    "weighting_scheme": "none",
    "gradient_checkpointing": True,
    "output_dir": "out",
    "save_format": "kohya",  # what musubi-tuner writes
    "network_alpha": 1.0,  # its parser's default
}
_MOST = _EVERY | {
    "optimizer_type": "adamw8bit",
    "learning_rate": 1e-4,
    "max_data_loader_n_workers": 2,
    "max_train_epochs": 16,
    "save_every_n_epochs": 1,
    "seed": 42,
    "output_name": "name-of-lora",
}
MEANT: dict[str, dict[str, Any]] = {
    "flux2_dev": _MOST | _PARTS | _FUSED
    | {"vae": "ae.safetensors", "timestep_sampling": "flux2_shift", "network_dim": 32, "guidance_scale": 1.0},
    "flux_kontext": _MOST | _FUSED
    | {"ae": "ae.safetensors", "t5xxl": "t5xxl.safetensors", "clip_l": "clip_l.safetensors",
       "timestep_sampling": "flux_shift", "learning_rate": 2e-4, "network_dim": 8, "max_train_epochs": 4,
       "save_every_n_epochs": 2, "seed": 7, "output_name": "kontext", "fp8_scaled": True, "fp8_text_encoder": True,
       "guidance_scale": 1.0},
    "krea2": _MOST | _PARTS
    | {"timestep_sampling": "shift", "discrete_flow_shift": 2.5, "network_dim": 32, "network_alpha": 32.0,
       "output_name": "lora"},
    "qwen_image": _MOST | _PARTS
    | {"timestep_sampling": "shift", "discrete_flow_shift": 2.2, "learning_rate": 5e-5, "network_dim": 16},
    "qwen_image_21": _EVERY | _PARTS
    | {"network_dim": 16, "network_alpha": 16.0, "optimizer_type": "AdamW", "learning_rate": 1e-4,
       "timestep_sampling": "shift", "discrete_flow_shift": 3.0, "max_train_steps": 2000, "save_every_n_steps": 200,
       "output_name": "name"},
    "z_image": _MOST | _PARTS
    | {"timestep_sampling": "shift", "discrete_flow_shift": 2.0, "network_dim": 32},
}  # fmt: skip
SHORT = _words("--dit d --vae v --text_encoder t --dataset_config data.toml --network_module networks.lora_qwen_image")


@pytest.mark.parametrize("model_type", EXAMPLES)
def test_an_example_runs_unchanged_and_its_trainer_is_known_by_its_script(model_type: str) -> None:
    script = f"src/musubi_tuner/{MODEL_TYPES[model_type].kohya_script}"
    command = read_command(["accelerate", "launch", script, *EXAMPLES[model_type]])
    assert command.tool == "musubi-tuner"
    given, notes = _loaded(list(command.arguments))
    assert given == MEANT[model_type] | {"model_type": model_type}
    said = {
        "flux2_dev": "split_qkv=False is the default there",
        "flux_kontext": "split_qkv=False is the default there",
        "qwen_image": "note: modulation is left out, as musubi-tuner means to and does not",
    }
    assert said.get(model_type, "") in notes.get("network_args", "")
    assert ("network_args" in notes) == (model_type in said), "of the others both train the same layers"


@pytest.mark.parametrize(
    ("model_type", "flags", "expected"),
    [
        ("flux2_dev", "--fp8_base --fp8_scaled --fp8_text_encoder --vae_dtype bfloat16 --blocks_to_swap 16",
         {"fp8_scaled": True, "fp8_text_encoder": True, "blocks_to_swap": 16, "vae_dtype": "bf16"}),
        ("z_image", "--fp8_llm --fp8_base --fp8_scaled", {"fp8_scaled": True, "fp8_text_encoder": True}),
        ("qwen_image_21", "--fp8_base --fp8_scaled --fp8_vl --blocks_to_swap 30 --dit_config c.json --vae_tiling",
         {"fp8_scaled": True, "fp8_text_encoder": True, "blocks_to_swap": 30}),
        ("krea2", "--turbo_dit turbo.safetensors --turbo_dit_cache --sample_prompts p.txt --blocks_to_swap 26",
         {"sample_model": "turbo.safetensors", "blocks_to_swap": 26}),
        ("krea2", "--timestep_sampling krea2_shift --gradient_checkpointing_cpu_offload",
         {"timestep_sampling": "krea2_shift", "cpu_offload_checkpointing": True}),
        ("qwen_image", "--timestep_sampling qwen_shift --sigmoid_scale 1.2",
         {"timestep_sampling": "qwen_shift", "sigmoid_scale": 1.2}),
        ("qwen_image", "--network_args include_patterns=['.*5.*']", {"network_args": []}),
        ("flux2_dev", "--network_args exclude_patterns=['.*txt_.*']",
         {"network_args": ["exclude_patterns=['.*txt_.*']", "split_qkv=False"]}),
    ],
)  # fmt: skip
def test_further_flags_mean_what_they_mean_there(model_type: str, flags: str, expected: dict[str, Any]) -> None:
    given, notes = _loaded([*EXAMPLES[model_type], *_words(flags)])
    assert {key: given[key] for key in expected} == expected
    for key in ("dit_config", "vae_tiling", "turbo_dit_cache"):
        assert f"--{key}" not in flags.split() or notes[key].startswith("note: has no effect here: ")


@pytest.mark.parametrize("controls", [False, True])
@pytest.mark.parametrize(
    ("network", "version", "model_type"),
    [
        ("flux_2", None, "flux2_dev"),
        ("flux_2", "dev", "flux2_dev"),
        ("flux_2", "klein-4b", "flux2_klein"),
        ("flux_2", "klein-base-9b", "flux2_klein"),
        ("qwen_image_21", None, "qwen_image_21"),
    ],
)
def test_the_version_and_the_datasets_control_images_choose_the_model_type(
    network: str, version: str | None, model_type: str, controls: bool, tmp_path: Path
) -> None:
    control = 'control_directory = "controls"\n' if controls else ""
    dataset = tmp_path / "data.toml"
    dataset.write_text(f'[[datasets]]\nimage_directory = "images"\n{control}')
    flags = ["--network_module", f"networks.lora_{network}", "--dataset_config", str(dataset)]
    given, notes = _loaded([*SHORT, *flags, *(["--model_version", version] if version else [])])
    assert given["model_type"] == model_type + ("_edit" if controls else "")
    if network == "flux_2":
        assert ("the default of musubi-tuner" in notes["model_version"]) is (version is None)


@pytest.mark.parametrize(
    ("flags", "model_type", "zero_cond_t"),
    [
        ([], "qwen_image", None),
        (["--model_version", "edit"], "qwen_image_edit", None),
        (["--model_version", "Edit-2509"], "qwen_image_edit_plus", None),
        (["--model_version", "edit-2511"], "qwen_image_edit_plus", True),
        (["--edit"], "qwen_image_edit", None),
        (["--edit", "--edit_plus"], "qwen_image_edit_plus", None),  # resolve_model_version_args there
        (["--model_version", "edit", "--edit_plus"], "qwen_image_edit", None),
    ],
    ids=str,
)
def test_the_version_of_qwen_image_chooses_the_model_type(
    flags: list[str], model_type: str, zero_cond_t: bool | None
) -> None:
    given, _ = _loaded([*SHORT, *flags])
    assert given["model_type"] == model_type
    assert given.get("zero_cond_t") == zero_cond_t


def test_what_is_not_there_is_refused_with_what_replaces_it() -> None:
    for flags, message in (
        ("--model_version layered", "--model_version: not taken: 'layered' is not a model family"),
        ("--network_module networks.lora_flux_2 --model_version klein-2b", "'klein-2b' is not a model family"),
        ("--remove_first_image_from_target", "layered models are not in this version; remove it"),
        ("--timestep_sampling ideogram4_shift", "'ideogram4_shift' is not in this version; it belongs to Ideogram"),
        (
            "--network_args exclude_patterns=['.*mlp.*'] include_patterns=['.*5.*']",
            "it brings back what exclude_patterns take there, here it restricts",
        ),
        ("--network_module networks.lora_wan", "--network_module: not taken: "),
        ("--network_module lycoris.kohya", "--network_module: not taken: "),
    ):
        assert message in _problem([*SHORT, *_words(flags)]), flags


def test_what_has_no_effect_there_is_left_out() -> None:
    flags = "--timestep_sampling qwen_shift --discrete_flow_shift 2.2 --fp8_base --fp8_scaled --guidance_scale 3"
    given, notes = _loaded([*SHORT, *_words(flags)])
    assert not {"fp8_base", "guidance_scale", "discrete_flow_shift"} & given.keys()
    assert notes["guidance_scale"] == 'left out: has no effect with model_type = "qwen_image", which takes no guidance'
    assert _loaded(SHORT)[0]["timestep_sampling"] == "sigma"  # musubi-tuner's default


def test_krea_2s_patterns_on_the_published_names_leave_attention() -> None:
    """docs/krea2.md, "LoRA target layers": the authors' configuration for long runs."""
    patterns = (
        r"exclude_patterns=['.*\.mlp\..*','first','last\.linear','tmlp\..*','txtmlp\..*','tproj\.1','txtfusion\..*']"
    )
    given, _ = _loaded([*EXAMPLES["krea2"], "--network_args", patterns])
    options = parse_network_args(NetworkConfig(network_args=given["network_args"]), KREA2_TARGETS)
    trained = options.trained_layers(KREA2_TARGETS, ("transformer",))
    names = ("to_q", "to_k", "to_v", "to_gate", "to_out.0")
    assert sorted(trained) == sorted(f"transformer_blocks.0.attn.{name}" for name in names)


def test_keys_of_another_family_are_refused() -> None:
    for flags, message in (
        ("--model_type qwen_image --ae x", 'ae: has no effect with model_type = "qwen_image", whose files are vae'),
        ("--vae x", 'vae: has no effect with model_type = "flux", whose files are ae'),
        ("--model_type qwen_image --guidance_scale 2", "which takes no guidance"),
        ("--model_type qwen_image_edit --zero_cond_t", "zero_cond_t: has no effect with model_type"),
    ):
        assert message in _problem([*PLAIN, *_words(flags)]), flags
    config = load_config([*PLAIN, *_words("--model_type qwen_image --text_encoder_lr 1e-5")])
    with pytest.raises(UserError, match="the text encoder of qwen_image cannot be trained; remove it"):
        plan_network(config.network, config.optimizer, config.training, QWEN_TARGETS)


def test_a_translation_without_a_trainer_takes_single_flags_too() -> None:
    notes = translate({"model_version": "edit-2509"}, {}, fields()).notes
    assert [note.outcome for note in notes] == ["renamed"]
