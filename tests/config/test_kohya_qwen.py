"""musubi-tuner's Qwen-Image configurations: the published example means what it means there."""

from __future__ import annotations

from pathlib import Path

import pytest

from library.config import load_config
from library.config.kohya.translate import translate
from library.config.kohya.translation import Note
from library.config.load import fields
from library.errors import UserError
from tests.config.test_kohya import PLAIN, _given, _loaded, _problem, _words

# docs/qwen_image.md of musubi-tuner 30c658c, "Standard Qwen-Image Training"
EXAMPLE = _words("""--dit dit.safetensors --vae vae.safetensors --text_encoder qwen_2.5_vl_7b.safetensors
--model_version original --dataset_config data.toml --sdpa --mixed_precision bf16 --timestep_sampling shift
--weighting_scheme none --discrete_flow_shift 2.2 --optimizer_type adamw8bit --learning_rate 5e-5
--gradient_checkpointing --max_data_loader_n_workers 2 --persistent_data_loader_workers
--network_module networks.lora_qwen_image --network_dim 16 --max_train_epochs 16 --save_every_n_epochs 1 --seed 42
--output_dir out --output_name name-of-lora""")
MEANT = {
    "model_type": "qwen_image",
    "pretrained_model_name_or_path": "dit.safetensors",
    "vae": "vae.safetensors",
    "text_encoder": "qwen_2.5_vl_7b.safetensors",
    "dataset_config": "data.toml",
    "mixed_precision": "bf16",
    "timestep_sampling": "shift",
    "weighting_scheme": "none",
    "discrete_flow_shift": 2.2,
    "optimizer_type": "adamw8bit",
    "learning_rate": 5e-5,
    "gradient_checkpointing": True,
    "max_data_loader_n_workers": 2,
    "network_dim": 16,
    "max_train_epochs": 16,
    "save_every_n_epochs": 1,
    "seed": 42,
    "output_dir": "out",
    "output_name": "name-of-lora",
    "save_format": "kohya",  # what musubi-tuner writes
}
SHORT = _words("--dit d --vae v --text_encoder t --dataset_config data.toml --network_module networks.lora_qwen_image")


def with_version(*flags: str) -> dict[str, object]:
    return _loaded([*SHORT, *flags])[0]


def test_the_example_runs_unchanged_on_the_command_line() -> None:
    given, notes = _loaded(EXAMPLE)
    assert given == MEANT
    assert notes["network_args"].startswith("note: modulation is left out, as musubi-tuner means to and does not")


def test_the_example_runs_unchanged_as_toml(tmp_path: Path) -> None:
    lines, words = [], iter(EXAMPLE)
    for word in words:
        key = word.removeprefix("--")
        if key in ("sdpa", "gradient_checkpointing", "persistent_data_loader_workers"):
            lines.append(f"{key} = true")
            continue
        value = next(words)
        number = value.replace(".", "").replace("e-", "").isdigit()
        lines.append(f"{key} = {value if number else repr(value)}")
    (tmp_path / "run.toml").write_text("\n".join(lines))
    assert _given(load_config(["--config_file", str(tmp_path / "run.toml")])) == MEANT


@pytest.mark.parametrize(
    ("flags", "model_type", "zero_cond_t"),
    [
        ([], "qwen_image", None),
        (["--model_version", "edit"], "qwen_image_edit", None),
        (["--model_version", "Edit-2509"], "qwen_image_edit_plus", None),
        (["--model_version", "edit-2511"], "qwen_image_edit_plus", True),
        (["--edit"], "qwen_image_edit", None),
        (["--edit_plus"], "qwen_image_edit_plus", None),
        (["--edit", "--edit_plus"], "qwen_image_edit_plus", None),  # resolve_model_version_args there
        (["--model_version", "edit", "--edit_plus"], "qwen_image_edit", None),
    ],
    ids=str,
)
def test_the_version_chooses_the_model_type(flags: list[str], model_type: str, zero_cond_t: bool | None) -> None:
    given = with_version(*flags)
    assert given["model_type"] == model_type
    assert given.get("zero_cond_t") == zero_cond_t


def test_what_is_not_there_is_refused_with_what_replaces_it() -> None:
    assert "--model_version: not taken: 'layered' is not a model family" in _problem(
        [*SHORT, "--model_version", "layered"]
    )
    assert "layered models are not in this version; remove it" in _problem([*SHORT, "--remove_first_image_from_target"])
    assert "'ideogram4_shift' is not in this version; it belongs to Ideogram" in _problem(
        [*SHORT, "--timestep_sampling", "ideogram4_shift"]
    )
    patterns = ["--network_args", "exclude_patterns=['.*mlp.*']", "include_patterns=['.*5.*']"]
    assert "it brings back what exclude_patterns take there, here it restricts" in _problem([*SHORT, *patterns])


def test_qwen_shift_fp8_and_unused_keys_mean_what_they_mean_there() -> None:
    flags = _words("""--timestep_sampling qwen_shift --sigmoid_scale 1.2 --discrete_flow_shift 2.2 --fp8_base
    --fp8_scaled --fp8_vl --guidance_scale 3 --blocks_to_swap 16""")
    given, notes = _loaded([*SHORT, *flags])
    assert given["timestep_sampling"] == "qwen_shift"
    assert given["sigmoid_scale"] == 1.2
    assert given["fp8_scaled"] is given["fp8_text_encoder"] is True
    assert given["blocks_to_swap"] == 16
    assert not {"fp8_base", "guidance_scale", "discrete_flow_shift"} & given.keys()
    assert notes["guidance_scale"] == 'left out: has no effect with model_type = "qwen_image", which takes no guidance'
    assert with_version()["timestep_sampling"] == "sigma"  # musubi-tuner's default
    given, notes = _loaded([*SHORT, "--network_args", "include_patterns=['.*5.*']"])
    assert "include_patterns" not in str(given.get("network_args"))


def test_sd_scripts_vae_is_fluxs_ae() -> None:
    flags = [*PLAIN, "--network_module", "networks.lora_flux", "--model_prediction_type", "raw", "--vae", "ae.sft"]
    given, notes = _loaded([*flags, "--network_train_unet_only"])
    assert given["ae"] == "ae.sft"
    assert "vae" not in given
    assert notes["vae"].startswith("renamed: becomes ae")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"model_type": "qwen_image", "ae": "x"},
            'ae: has no effect with model_type = "qwen_image", whose files are vae',
        ),
        ({"vae": "x"}, 'vae: has no effect with model_type = "flux", whose files are ae'),
        ({"model_type": "qwen_image", "guidance_scale": "2"}, "guidance_scale: has no effect .*takes no guidance"),
        ({"model_type": "qwen_image_edit", "zero_cond_t": "true"}, "zero_cond_t: has no effect with model_type"),
        ({"model_type": "qwen_image", "text_encoder_lr": "1e-5"}, "text_encoder_lr"),
    ],
    ids=str,
)
def test_keys_of_the_other_family_are_refused(settings: dict[str, str], message: str) -> None:
    flags = [word for key, value in settings.items() for word in (f"--{key}", value)]
    if "text_encoder_lr" in settings:  # decided by the network's plan, which knows what can be trained
        from library.models.qwen_image.files import QWEN_TARGETS
        from library.training.plan import plan_network

        config = load_config([*PLAIN, *flags])
        with pytest.raises(UserError, match="the text encoder of qwen_image cannot be trained; remove it"):
            plan_network(config.network, config.optimizer, config.training, QWEN_TARGETS)
        return
    with pytest.raises(UserError, match=message):
        load_config([*PLAIN, *flags])


def test_a_translation_without_a_trainer_takes_single_flags_too() -> None:
    notes: list[Note] = translate({"model_version": "edit-2509"}, {}, fields()).notes
    assert [note.outcome for note in notes] == ["renamed"]


@pytest.mark.parametrize("module", ["networks.lora_wan", "lycoris.kohya", "networks.loha"])
def test_a_network_of_another_family_is_refused_beside_dit(module: str) -> None:
    argv = _words(f"--dit d --vae v --text_encoder t --dataset_config data.toml --network_module {module}")
    assert "--network_module: not taken: " in _problem(argv)
