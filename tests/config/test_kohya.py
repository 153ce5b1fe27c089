"""kohya's configurations: the published examples mean what they mean there, or are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic.fields import FieldInfo

from dev.write_config_docs import kohya_page
from library.config import TrainConfig, load_config
from library.config.kohya.command import paths_read, read_command_file
from library.config.kohya.flags import DEFAULTS, FLAGS, Fate
from library.config.kohya.translate import summary, translate
from library.config.kohya.translation import Note
from library.config.scripts import fields
from library.data.config import load_dataset_config
from library.errors import UserError, one_line

ROOT = Path(__file__).resolve().parents[2]


def _words(text: str) -> list[str]:
    return text.split()


# docs/flux_train_network.md of sd-scripts, section 4, "Here's a basic command example"
FLUX_EXAMPLE = _words("""--pretrained_model_name_or_path=flux1-dev.safetensors --clip_l=clip_l.safetensors
--t5xxl=t5xxl_fp16.safetensors --ae=ae.safetensors --dataset_config=my_flux_dataset_config.toml --output_dir=out
--output_name=my_flux_lora --save_model_as=safetensors --network_module=networks.lora_flux --network_dim=16
--network_alpha=1 --learning_rate=1e-4 --optimizer_type=AdamW8bit --lr_scheduler=constant --sdpa --max_train_epochs=10
--save_every_n_epochs=1 --mixed_precision=fp16 --gradient_checkpointing --guidance_scale=1.0
--timestep_sampling=flux_shift --model_prediction_type=raw --blocks_to_swap=18 --cache_text_encoder_outputs
--cache_latents""")

PLAIN = ["--pretrained_model_name_or_path", "base", "--dataset_config", "data.toml"]
KOHYA = [*PLAIN, "--network_module", "networks.lora_flux", "--model_prediction_type", "raw"]
KOHYA += ["--network_train_unet_only"]


def _given(config: TrainConfig) -> dict[str, Any]:
    return {
        key: getattr(section, key)
        for section in (getattr(config, name) for name in type(config).model_fields)
        for key in section.model_fields_set
    }


def _problem(argv: list[str]) -> str:
    with pytest.raises(UserError) as caught:
        load_config(argv)
    return str(caught.value)


def _loaded(argv: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    notes: list[Note] = []
    return _given(load_config(argv, notes)), {note.key: f"{note.outcome}: {note.text}" for note in notes}


def _schema_with(**added: FieldInfo) -> dict[str, tuple[str, FieldInfo]]:
    return {**fields(), **{key: ("training", field) for key, field in added.items()}}


def test_the_example_of_sd_scripts_gives_the_settings_it_means() -> None:
    """blocks_to_swap aside, which is the one thing in it that depends on the version."""
    given, notes = _loaded([flag for flag in FLUX_EXAMPLE if "blocks_to_swap" not in flag])
    assert given == {
        "model_type": "flux",
        "pretrained_model_name_or_path": "flux1-dev.safetensors",
        "clip_l": "clip_l.safetensors",
        "t5xxl": "t5xxl_fp16.safetensors",
        "ae": "ae.safetensors",
        "dataset_config": "my_flux_dataset_config.toml",
        "output_dir": "out",
        "output_name": "my_flux_lora",
        "network_dim": 16,
        "network_alpha": 1.0,
        "network_args": ["split_qkv=False"],  # one LoRA on each joined qkv
        "learning_rate": 1e-4,
        "optimizer_type": "AdamW8bit",
        "lr_scheduler": "constant",
        "max_train_epochs": 10,
        "save_every_n_epochs": 1,
        "mixed_precision": "fp16",
        "gradient_checkpointing": True,
        "guidance_scale": 1.0,
        "timestep_sampling": "flux_shift",
        "text_encoder_lr": [1e-4],  # without network_train_unet_only CLIP-L is trained too
        "save_format": "kohya",  # what sd-scripts writes
    }
    assert notes["model_prediction_type"] == "accepted: asks for nothing"
    assert notes["cache_latents"] == "accepted: latents are always cached on disk"


def test_the_same_settings_as_toml_without_its_suffix_mean_the_same(tmp_path: Path) -> None:
    lines = []
    for flag in FLUX_EXAMPLE:
        key, equals, value = flag.removeprefix("--").partition("=")
        number = value.replace(".", "").replace("e-", "").isdigit()
        lines.append(f"{key} = {value if number else repr(value)}" if equals else f"{key} = true")
    (tmp_path / "run.toml").write_text("[anything]\n" + "\n".join(line for line in lines if "swap" not in line))
    from_toml, _ = _loaded(["--config_file", str(tmp_path / "run")])
    from_flags, _ = _loaded([flag for flag in FLUX_EXAMPLE if "blocks_to_swap" not in flag])
    assert from_toml == from_flags


def test_a_flag_that_the_schema_has_is_taken_whatever_the_table_says() -> None:
    known = _schema_with(blocks_to_swap=FieldInfo(annotation=int, default=0), fp8_base=FieldInfo(annotation=bool))
    translation = translate({"blocks_to_swap": "18", "fp8_base_unet": True}, {}, known)
    assert translation.values == {"blocks_to_swap": "18", "fp8_base": True}


def test_fp8_options_mean_what_they_mean_there() -> None:
    assert _loaded([*KOHYA, "--fp8_base_unet"])[0]["fp8_base"] is True
    given, notes = _loaded([*KOHYA, "--fp8_base", "--fp8_scaled"])
    assert given["fp8_scaled"] is True
    assert "fp8_base" not in given
    assert notes["fp8_base"] == "accepted: fp8_scaled is set too and counts"


def test_what_is_unset_means_what_it_means_in_sd_scripts() -> None:
    given, notes = _loaded(KOHYA)
    assert given["learning_rate"] == 2e-6
    assert given["network_dim"] == 4
    assert given["guidance_scale"] == 3.5
    assert given["timestep_sampling"] == "sigma"
    assert notes["learning_rate"] == "default: unset, so 2e-06, the default of sd-scripts"
    assert notes["seed"] == "note: unset, so random in sd-scripts and 0 here"


def test_single_flags_of_kohyas_leave_tandems_defaults_alone() -> None:
    given, notes = _loaded([*PLAIN, "--cache_latents", "--sdpa", "--unet_lr", "3e-4"])
    assert given == {
        "pretrained_model_name_or_path": "base",
        "dataset_config": "data.toml",
        "learning_rate": pytest.approx(3e-4),
    }
    assert notes["unet_lr"] == "renamed: becomes learning_rate, which it wins over, as there"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--save_precision", "float"], {"save_precision": "fp32"}),
        (["--lr_scheduler", "cosine", "--lr_warmup_steps", "10%"], {"lr_warmup_steps": 0.1}),
        (
            ["--lr_scheduler", "cosine_with_min_lr", "--lr_scheduler_min_lr_ratio", "0.1"],
            {"lr_scheduler": "cosine", "lr_scheduler_min_lr_ratio": 0.1},
        ),
        (["--network_alpha", "0", "--network_dim", "8"], {"network_alpha": 8.0}),
        (["--learning_rate", "1e-5", "--unet_lr", "1e-3"], {"learning_rate": 1e-3}),
        (["--weighting_scheme", "uniform"], {"weighting_scheme": "none"}),
        (["--weighting_scheme", "cosmap"], {"weighting_scheme": "none"}),  # sd-scripts weighs sigma_scaled only
        (["--weighting_scheme", "logit_normal", "--logit_mean", "0.5"], {"weighting_scheme": "logit_normal"}),
        (["--optimizer_type", ""], {"optimizer_type": "AdamW"}),
        (["--loss_type", "huber", "--huber_schedule", "constant", "--huber_scale", "1", "--huber_c", "0.2"],
         {"loss_type": "huber", "huber_c": 0.2}),
        (["--logging_dir", "logs"], {"logging_dir": "logs", "log_with": "tensorboard"}),
        (["--torch_compile", "--dynamo_backend", "EAGER"], {"torch_compile": True, "dynamo_backend": "eager"}),
        (
            ["--network_args", "train_blocks=single", "verbose=True", "loraplus_lr_ratio=16", "conv_dim=4"],
            {"network_args": ["train_double_block_indices=none", "loraplus_lr_ratio=16", "split_qkv=False"]},
        ),
        (["--network_args", "train_blocks=all", "split_qkv=True", "rank_dropout=0.1"],
         {"network_args": ["split_qkv=True", "rank_dropout=0.1"]}),
        (["--max_validation_steps", "5"], {"max_validation_images": 5}),
        (["--vae", "v.safetensors"], {"ae": "v.safetensors"}),
    ],
)  # fmt: skip
def test_values_mean_what_they_mean_there(argv: list[str], expected: dict[str, Any]) -> None:
    given, _ = _loaded([*KOHYA, *argv])
    assert {key: given[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("argv", "gone"),
    [
        (["--timestep_sampling", "flux_shift", "--discrete_flow_shift", "3.1582"], "discrete_flow_shift"),
        (["--sigmoid_scale", "2"], "sigmoid_scale"),
        (["--huber_c", "0.2", "--huber_schedule", "snr"], "huber_c"),
        (["--sample_every_n_steps", "100"], "sample_every_n_steps"),
        (["--lr_scheduler_num_cycles", "3"], "lr_scheduler_num_cycles"),
        (["--dynamo_backend", "no"], "dynamo_backend"),
        (["--wandb_run_name", "x"], "wandb_run_name"),
        (["--resume", ""], "resume"),
        (["--sample_prompts", "p.txt", "--sample_every_n_epochs", "0"], "sample_every_n_epochs"),
    ],
)
def test_what_does_nothing_there_is_left_out_and_the_run_goes_on(argv: list[str], gone: str) -> None:
    given, notes = _loaded([*KOHYA, *argv])
    assert gone not in given
    assert gone in notes


@pytest.mark.parametrize(
    "argv",
    [["--noise_offset", "0"], ["--multires_noise_discount", "0.3"], ["--text_encoder_lr", "0"], ["--text_encoder_lr"],
     ["--no-xformers"], ["--xformers"], ["--token_warmup_step", "0"], ["--caption_extension", ".caption"],
     ["--zero_stage", "2"], ["--offload_optimizer_device", "cpu"]],
)  # fmt: skip
def test_a_refused_flag_that_asks_for_nothing_changes_nothing(argv: list[str]) -> None:
    assert _loaded([*KOHYA, *argv])[0] == _loaded(KOHYA)[0]


@pytest.mark.parametrize(
    "argv",
    [["--xformers"], ["--mem_eff_attn"], ["--flash_attn"], ["--sage_attn"], ["--console_log_file", "log.txt"],
     ["--log_prefix", "x"], ["--noise_offset", "0.1"], ["--min_snr_gamma", "5"], ["--clip_skip", "2"],
     ["--model_prediction_type", "sigma_scaled"], ["--save_model_as", "ckpt"], ["--wandb_api_key", "k3y"],
     ["--fused_backward_pass"], ["--compile_fullgraph"], ["--num_timestep_buckets", "8"], ["--attn_mode", "flash3"]],
)  # fmt: skip
def test_what_only_chooses_a_kernel_or_notes_something_is_one_line_and_the_run_goes_on(argv: list[str]) -> None:
    given, notes = _loaded([*KOHYA, *argv])
    assert given == _loaded(KOHYA)[0]
    key = argv[0].removeprefix("--")
    assert notes[key].startswith("note: has no effect here: ")
    assert "k3y" not in notes[key]


@pytest.mark.parametrize(
    ("argv", "key", "value"),
    [
        (["--split_mode"], "blocks_to_swap", 18),
        (["--split_mode", "--blocks_to_swap", "4"], "blocks_to_swap", 4),
        (["--use_8bit_adam"], "optimizer_type", "AdamW8bit"),
        (["--use_lion_optimizer", "--optimizer_type", ""], "optimizer_type", "Lion"),
        (["--save_n_epoch_ratio", "4", "--max_train_epochs", "10"], "save_every_n_epochs", 2),
        (["--no_half_vae"], "vae_dtype", "fp32"),
        (["--optimizer_type", "pytorch_optimizer.CAME"], "optimizer_type", "CAME"),
        (["--deepspeed"], "zero", 2),
        (["--deepspeed", "--zero_stage", "1"], "zero", 1),
        (["--scale_weight_norms", "1"], "scale_weight_norms", 1.0),
        (["--ip_noise_gamma", "0.1", "--ip_noise_gamma_random_strength"], "ip_noise_gamma_random_strength", True),
        (["--loss_type", "l1"], "loss_type", "l1"),
        (["--base_weights", "a", "b", "--base_weights_multiplier", "0.5"], "base_weights_multiplier", [0.5]),
        (["--metadata_author", "me", "--metadata_tags", "a, b"], "metadata_tags", "a, b"),
        (["--lr_scheduler", "inverse_sqrt", "--lr_scheduler_timescale", "50"], "lr_scheduler_timescale", 50),
        (["--vae_batch_size", "0"], "vae_batch_size", 1),
    ],
)
def test_options_that_were_missed_are_taken(argv: list[str], key: str, value: object) -> None:
    assert _loaded([*KOHYA, *argv])[0][key] == value


def test_keys_that_describe_images_hold_where_the_dataset_toml_does_not_say(tmp_path: Path) -> None:
    """As sd-scripts' config_util.py has it: subset, dataset, [general], command line."""
    (tmp_path / "images").mkdir()
    toml = '[general]\nflip_aug = false\n[[datasets]]\n[[datasets.subsets]]\nimage_dir = "images"\n'
    (tmp_path / "data.toml").write_text(toml)
    argv = [*KOHYA, "--dataset_config", str(tmp_path / "data.toml"), "--caption_extension", ".txt", "--flip_aug"]
    notes: list[Note] = []
    argv += ["--resolution", "512,768", "--dataset_repeats", "3", "--keep_tokens", "2", "--train_data_dir", "elsewhere"]
    arguments = load_config(argv, notes).dataset
    dataset = load_dataset_config(arguments.dataset_config, arguments).datasets[0]
    settings = dataset.subsets[0].settings
    assert (settings.caption_extension, settings.num_repeats, settings.keep_tokens) == (".txt", 3, 2)
    assert dataset.resolution == (512, 768)
    assert settings.flip_aug is False, "the TOML's own word counts"
    said = {note.key: note.text for note in notes}
    assert said["train_data_dir"] == "dataset_config is set and counts, as there"
    assert said["caption_extension"] == f"holds where {tmp_path / 'data.toml'} does not say"


def test_a_key_that_nobody_knows_is_passed_over_as_there_unless_it_is_misspelt(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('network_module = "networks.lora_flux"\nbyt5 = ""\nno_token_padding = false\nmy_forks_key = 3\n')
    _, notes = _loaded(["--config_file", str(path), *PLAIN])
    assert notes["my_forks_key"] == "note: is no key of kohya's or Tandem's; passed over, as there"
    path.write_text('network_module = "networks.lora_flux"\nlearning_rat = 1e-4\n')
    assert "learning_rat: unknown key; did you mean 'learning_rate'?" in _problem(["--config_file", str(path), *PLAIN])
    path.write_text("my_forks_key = 3\n")
    assert "my_forks_key: unknown key" in _problem(["--config_file", str(path), *PLAIN])


@pytest.mark.parametrize(
    ("values", "rates"),
    [
        ({"learning_rate": 1e-4}, [1e-4]),
        ({"learning_rate": 1e-4, "unet_lr": 1e-3}, [1e-4]),
        ({}, [2e-6]),
        ({"optimizer_type": "prodigy"}, [1.0]),
        ({"text_encoder_lr": 5e-5}, [5e-5]),
        ({"text_encoder_lr": ["5e-5", "1e-5"]}, ["5e-5", "1e-5"]),
        ({"text_encoder_lr": [0.0]}, None),
        ({"text_encoder_lr": [5e-5], "network_train_unet_only": True}, None),
        ({"network_train_unet_only": True}, None),
    ],
)
def test_clip_is_trained_where_sd_scripts_trains_it(values: dict[str, Any], rates: list | None) -> None:
    translation = translate({"network_module": "networks.lora_flux", **values}, {}, fields())
    assert translation.problems() == []
    assert translation.values.get("text_encoder_lr") == rates


def test_adafactor_computes_its_rate_unless_told_not_to() -> None:
    """relative_step is on by default in transformers' Adafactor and in sd-scripts, off in Tandem."""
    given, notes = _loaded([*KOHYA, "--optimizer_type", "adafactor", "--learning_rate", "1e-4"])
    assert given["optimizer_args"] == ["relative_step=True"]
    assert "learning_rate" not in given
    assert "computes its own rate" in notes["learning_rate"]
    recommended = ["relative_step=False", "scale_parameter=False", "warmup_init=False"]
    given, _ = _loaded([*KOHYA, "--optimizer_type", "adafactor", "--learning_rate", "1e-4", "--optimizer_args",
                        *recommended])  # fmt: skip
    assert given["optimizer_args"] == recommended
    assert given["learning_rate"] == pytest.approx(1e-4)


def test_an_estimated_step_size_gets_no_default_rate() -> None:
    given, _ = _loaded([*KOHYA, "--optimizer_type", "prodigy"])
    assert "learning_rate" not in given


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--network_module", "lycoris.kohya"], "--network_module: not taken: 'lycoris.kohya' is not in this version"),
        (["--lr_scheduler", "piecewise_constant"], "--lr_scheduler: not taken: 'piecewise_constant' is not in this"),
        (["--color_aug"], "--color_aug: not taken: images are read once, when their latents are cached"),
        (["--save_n_epoch_ratio", "4"], "set save_every_n_epochs to max_train_epochs divided by it"),
        (["--loss_type", "huber", "--huber_schedule", "exponential"], "--huber_schedule: not taken: 'exponential'"),
        (["--loss_type", "huber", "--huber_scale", "3"], "--huber_scale: not taken: it multiplies huber_c; set"),
        (["--model_type", "chroma"], "--model_type: not taken: 'chroma' is not in this version; Chroma is not a model"),
        (["--lr_scheduler", "cosine", "--lr_warmup_steps", "x%"], "--lr_warmup_steps: 'x%' does not fit"),
    ],
)  # fmt: skip
def test_what_is_not_taken_is_named_with_its_replacement(argv: list[str], message: str) -> None:
    problem = _problem([*KOHYA, *argv])
    assert message in problem
    assert argv[-2 if len(argv) > 1 else -1] in problem


def test_a_training_folder_without_a_dataset_toml_is_the_folders_that_sd_scripts_finds(tmp_path: Path) -> None:
    """``10_name class``: 10 repeats, the caption "name class" where an image has none; buckets of 256 to 1024."""
    for name in ("img/10_zorbo disc", "img/2_sky", "img/notes", "reg/1_disc"):
        (tmp_path / name).mkdir(parents=True)
    argv = ["--pretrained_model_name_or_path", "m", "--network_module", "networks.lora_flux"]
    argv += ["--train_data_dir", str(tmp_path / "img"), "--reg_data_dir", str(tmp_path / "reg")]
    argv += ["--resolution", "1024,768", "--caption_extension", ".txt", "--enable_bucket", "--max_bucket_reso", "2048"]
    arguments = load_config(argv).dataset
    dataset = load_dataset_config(arguments.dataset_config, arguments).datasets[0]
    assert dataset.resolution == (1024, 768)
    assert (dataset.settings.min_bucket_reso, dataset.settings.max_bucket_reso) == (256, 2048)
    found = [(subset.settings, subset.image_dir) for subset in dataset.subsets]
    assert [(s.class_tokens, s.num_repeats, s.is_reg, s.caption_extension) for s, _ in found] == [
        ("zorbo disc", 10, False, ".txt"),
        ("sky", 2, False, ".txt"),
        ("disc", 1, True, ".txt"),
    ]
    assert [folder for _, folder in found] == [
        tmp_path / name for name in ("img/10_zorbo disc", "img/2_sky", "reg/1_disc")
    ]
    assert found[0][0].image_dir == "10_zorbo disc", "samples are known by their place in the folder"
    with pytest.raises(UserError, match="holds no folder named like '10_name class'"):
        load_dataset_config(tmp_path / "reg/1_disc", arguments)


def test_images_that_nothing_names_are_missed() -> None:
    argv = [
        "--pretrained_model_name_or_path",
        "m",
        "--network_module",
        "networks.lora_flux",
        "--resolution",
        "1024,1024",
    ]
    assert "--resolution: not taken: describes the images, which nothing names; set" in _problem(argv)


def test_every_refused_key_of_a_toml_is_a_line_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('network_module = "networks.lora_flux"\ncolor_aug = true\n[cast]\nfull_fp16 = true\n')
    lines = _problem(["--config_file", str(path), *PLAIN]).splitlines()
    assert [line.split(": not taken")[0] for line in lines] == [f"{path}:2: color_aug", f"{path}:4: full_fp16"]
    assert one_line(UserError(*lines)).splitlines() == lines  # none is lost where scripts print it


def test_the_run_tells_what_it_filled_in_and_not_what_is_as_always() -> None:
    notes: list[Note] = []
    load_config([*KOHYA, "--cache_latents"], notes)
    shown = summary(notes)
    assert "note: learning_rate: unset, so 2e-06, the default of sd-scripts" in shown
    assert not any("cache_latents" in line for line in shown)
    notes = []
    load_config([*KOHYA, "--huber_c", "0.3", "--sigmoid_scale", "1.0", "--compile_mode", "default"], notes)
    idle = {note.key for note in notes if f"note: {note.line()}" in summary(notes) and "no effect" in note.text}
    assert idle == {"huber_c", "compile_mode"}, "what has no effect is told, but for a default"


@pytest.mark.parametrize("module", ["networks.lora_flux", "networks.lora_qwen_image"])
def test_ranks_of_a_file_that_is_not_given_are_refused(module: str) -> None:
    argv = [*PLAIN, "--network_module", module, "--network_train_unet_only", "--network_dim", "8", "--dim_from_weights"]
    assert "dim_from_weights: has no effect without network_weights, the file to take ranks from" in _problem(argv)


def test_a_length_of_decay_means_there_what_it_means_here_or_nothing() -> None:
    kohyas = [*KOHYA, "--lr_decay_steps", "10%", "--lr_scheduler"]
    assert _loaded([*kohyas, "warmup_stable_decay"])[0]["lr_decay_steps"] == pytest.approx(0.1)
    given, notes = _loaded([*kohyas, "cosine"])
    assert "lr_decay_steps" not in given
    assert notes["lr_decay_steps"] == "left out: has no effect there without warmup_stable_decay"
    assert _loaded([*PLAIN, "--lr_decay_steps", "9", "--lr_scheduler", "cosine"])[0]["lr_decay_steps"] == 9


def test_what_kohyas_trainers_stop_at_is_refused_too() -> None:
    problem = _problem([*KOHYA, "--lr_scheduler", "constant", "--lr_warmup_steps", "100"])
    assert 'lr_warmup_steps: has no effect with lr_scheduler = "constant"' in problem
    assert "lr_warmup_steps" not in _loaded([*KOHYA, "--lr_warmup_steps", "0"])[1]


def test_text_encoders_beside_ranks_from_a_file_are_refused_only_where_their_rate_was_given() -> None:
    argv = [*KOHYA, "--dim_from_weights", "--network_weights", "a.safetensors", "--network_dim", "8"]
    with_encoders = [word for word in argv if word != "--network_train_unet_only"]
    given_rate = [*with_encoders, "--text_encoder_lr", "1e-5"]
    assert "text_encoder_lr: dim_from_weights trains the transformer's layers" in _problem(given_rate)
    unset, said = _loaded(with_encoders)
    assert ("text_encoder_lr" in unset, "those of CLIP-L too" in said["dim_from_weights"]) == (False, True)
    given, notes = _loaded(argv)
    assert given["dim_from_weights"] is True
    assert notes["network_dim"].startswith("left out: has no effect with dim_from_weights")


# every flag that sd-scripts 48d368f's flux_train_network.py adds to its parser, in the parser's order
SD_SCRIPTS_FLAGS = _words("""
console_log_level console_log_file console_log_simple v2 v_parameterization pretrained_model_name_or_path
tokenizer_cache_dir metadata_title metadata_author metadata_description metadata_license metadata_tags
metadata_usage_hint metadata_thumbnail metadata_merged_from metadata_trigger_phrase metadata_preprocessor
metadata_is_negative_embedding train_data_dir cache_info shuffle_caption caption_separator caption_extension
caption_extention keep_tokens keep_tokens_separator secondary_separator enable_wildcard caption_prefix caption_suffix
color_aug flip_aug face_crop_aug_range random_crop debug_dataset resolution cache_latents vae_batch_size
cache_latents_to_disk skip_cache_check enable_bucket min_bucket_reso max_bucket_reso bucket_reso_steps
bucket_no_upscale resize_interpolation token_warmup_min token_warmup_step alpha_mask dataset_class
caption_dropout_rate caption_dropout_every_n_epochs caption_tag_dropout_rate reg_data_dir in_json dataset_repeats
output_dir output_name huggingface_repo_id huggingface_repo_type huggingface_path_in_repo huggingface_token
huggingface_repo_visibility save_state_to_huggingface resume_from_huggingface async_upload save_precision
save_every_n_epochs save_every_n_steps save_n_epoch_ratio save_last_n_epochs save_last_n_epochs_state
save_last_n_steps save_last_n_steps_state save_state save_state_on_train_end resume train_batch_size
max_token_length mem_eff_attn torch_compile dynamo_backend xformers sdpa vae max_train_steps max_train_epochs
max_data_loader_n_workers persistent_data_loader_workers seed gradient_checkpointing gradient_accumulation_steps
mixed_precision full_fp16 full_bf16 fp8_base ddp_timeout ddp_gradient_as_bucket_view ddp_static_graph clip_skip
logging_dir log_with log_prefix log_tracker_name wandb_run_name log_tracker_config wandb_api_key log_config
noise_offset noise_offset_random_strength multires_noise_iterations ip_noise_gamma ip_noise_gamma_random_strength
multires_noise_discount adaptive_noise_scale zero_terminal_snr min_timestep max_timestep loss_type huber_schedule
huber_c huber_scale lowram highvram sample_every_n_steps sample_at_first sample_every_n_epochs sample_prompts
sample_sampler output_config prior_loss_weight conditioning_data_dir masked_loss deepspeed zero_stage
offload_optimizer_device offload_optimizer_nvme_path offload_param_device offload_param_nvme_path zero3_init_flag
zero3_save_16bit_model fp16_master_weights_and_gradients optimizer_type use_8bit_adam use_lion_optimizer
learning_rate max_grad_norm optimizer_args lr_scheduler_type lr_scheduler_args lr_scheduler lr_warmup_steps
lr_decay_steps lr_scheduler_num_cycles lr_scheduler_power fused_backward_pass lr_scheduler_timescale
lr_scheduler_min_lr_ratio dataset_config min_snr_gamma scale_v_pred_loss_like_noise_pred v_pred_like_loss
debiased_estimation_loss weighted_captions cpu_offload_checkpointing no_metadata save_model_as unet_lr
text_encoder_lr fp8_base_unet network_weights network_module network_dim network_alpha network_dropout network_args
network_train_unet_only network_train_text_encoder_only training_comment dim_from_weights scale_weight_norms
base_weights base_weights_multiplier no_half_vae skip_until_initial_step initial_epoch initial_step validation_seed
validation_split validate_every_n_steps validate_every_n_epochs max_validation_steps cache_text_encoder_outputs
cache_text_encoder_outputs_to_disk text_encoder_batch_size disable_mmap_load_safetensors weighting_scheme logit_mean
logit_std mode_scale blocks_to_swap clip_l t5xxl ae controlnet_model_name_or_path t5xxl_max_token_length
apply_t5_attn_mask guidance_scale timestep_sampling sigmoid_scale model_prediction_type discrete_flow_shift
model_type split_mode
""")

# and musubi-tuner 30c658c's qwen_image_train_network.py, then what zimage_, flux_kontext_, krea2_ and (of a later
# version) qwen_image_21_ add
MUSUBI_FLAGS = _words("""
dataset_config sdpa flash_attn sage_attn xformers flash3 split_attn compile compile_backend compile_mode
compile_dynamic compile_fullgraph compile_cache_size_limit cuda_allow_tf32 cuda_cudnn_benchmark dynamo_backend
dynamo_mode dynamo_fullgraph dynamo_dynamic max_train_steps max_train_epochs max_data_loader_n_workers
persistent_data_loader_workers seed gradient_checkpointing gradient_checkpointing_cpu_offload
gradient_accumulation_steps mixed_precision save_precision logging_dir log_with log_prefix log_tracker_name
wandb_run_name log_tracker_config wandb_api_key log_config ddp_timeout ddp_gradient_as_bucket_view ddp_static_graph
sample_every_n_steps sample_at_first sample_every_n_epochs sample_prompts optimizer_type optimizer_args
learning_rate max_grad_norm lr_scheduler lr_warmup_steps lr_decay_steps lr_scheduler_num_cycles lr_scheduler_power
lr_scheduler_timescale lr_scheduler_min_lr_ratio lr_scheduler_type lr_scheduler_args fp8_base blocks_to_swap
use_pinned_memory_for_block_swap block_swap_h2d_only block_swap_ring_size img_in_txt_in_offloading
disable_numpy_memmap guidance_scale timestep_sampling discrete_flow_shift sigmoid_scale weighting_scheme logit_mean
logit_std mode_scale min_timestep max_timestep preserve_distribution_shape num_timestep_buckets show_timesteps
no_metadata network_weights network_module network_dim network_alpha network_dropout network_args training_comment
dim_from_weights scale_weight_norms base_weights base_weights_multiplier output_dir output_name resume
save_every_n_epochs save_every_n_steps save_last_n_epochs save_last_n_epochs_state save_last_n_steps
save_last_n_steps_state save_state save_state_on_train_end metadata_title metadata_author metadata_description
metadata_license metadata_tags metadata_reso metadata_arch huggingface_repo_id huggingface_repo_type
huggingface_path_in_repo huggingface_token huggingface_repo_visibility save_state_to_huggingface
resume_from_huggingface async_upload dit vae vae_dtype fp8_scaled text_encoder fp8_vl num_layers
remove_first_image_from_target edit edit_plus model_version
fp8_llm use_32bit_attention text_encoder1 text_encoder2 fp8_t5 turbo_dit turbo_dit_cache dit_config vae_tiling
""")


def test_every_flag_of_both_projects_has_a_fate_and_says_why(subtests: pytest.Subtests) -> None:
    for name in dict.fromkeys([*SD_SCRIPTS_FLAGS, *MUSUBI_FLAGS]):
        with subtests.test(name):
            flag = FLAGS[name]
            assert flag.fate in get_args(Fate)
            assert ("sd-scripts" in flag.tools) == (name in SD_SCRIPTS_FLAGS)
            assert ("musubi-tuner" in flag.tools) == (name in MUSUBI_FLAGS)
            if flag.fate == "same":
                assert name in fields(), "same, but no key of the schema"
            if flag.fate == "refused":
                assert flag.instead
                assert flag.why or flag.instead.startswith("set ")
            if flag.fate in ("accepted", "noted"):
                assert flag.why
            assert (flag.fate == "renamed") == bool(flag.to)


def test_the_tables_of_values_name_keys_of_the_schema() -> None:
    named = {key for defaults in DEFAULTS.values() for key in defaults}
    assert named <= set(fields())


def test_the_page_of_flags_is_up_to_date() -> None:
    assert (ROOT / "docs/kohya_flags.md").read_text(encoding="utf-8") == kohya_page()


def test_what_a_script_reads_is_the_same_with_a_byte_order_mark(tmp_path: Path) -> None:
    """Windows' editors write one; the words of the command are those that the translation of the file has."""
    script = tmp_path / "train.sh"
    for mark in ("", "\ufeff"):
        text = f"{mark}X=flux_train_network.py --config_file ok.toml\nflux_train_network.py --config_file other.toml\n"
        script.write_text(text, encoding="utf-8")
        assert "other.toml" in read_command_file(script).arguments
        assert paths_read(text, script.name) == [("config_file", "other.toml")]


def test_each_kind_of_script_is_read_by_the_rules_of_its_own_shell(tmp_path: Path) -> None:
    """What continues a line, quotes and names a variable in one shell is plain text in another."""
    command = "accelerate launch flux_train_network.py --output_dir"
    for name, text, expected in (
        ("folders.bat", f"set OUT=D:\\loras\\\nset DATA=D:\\data\n{command} %OUT% --train_data_dir %DATA%\n",
         ("D:\\loras\\", "--train_data_dir", "D:\\data")),
        ("apostrophe.bat", f"{command} C:\\O'Brien ^\n  --seed 1\n", ("C:\\O'Brien", "--seed", "1")),
        ("date.sh", f"NOW=`date +%F`\n{command} out --seed 1\n", ("out", "--seed", "1")),
        ("folder.ps1", f"$out = 'D:\\loras\\'\n{command} $out `\n  --seed 1\n", ("D:\\loras\\", "--seed", "1")),
    ):  # fmt: skip
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert read_command_file(tmp_path / name).arguments == ("--output_dir", *expected), name
