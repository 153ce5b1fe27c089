"""kohya's configurations: the published examples mean what they mean there, or are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

import pytest
from pydantic.fields import FieldInfo

from library.config import TrainConfig, load_config
from library.config.kohya import Note, summary, translate
from library.config.kohya_flags import FLAGS, Fate
from library.config.kohya_values import DEFAULTS, INERT
from library.config.load import fields
from library.errors import UserError, one_line
from tools.write_config_docs import kohya_page

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

# docs/qwen_image.md of musubi-tuner, "Standard Qwen-Image Training"
QWEN_EXAMPLE = _words("""--dit dit.safetensors --vae vae.safetensors --text_encoder qwen_2.5_vl_7b.safetensors
--model_version original --dataset_config data.toml --sdpa --mixed_precision bf16 --timestep_sampling shift
--weighting_scheme none --discrete_flow_shift 2.2 --optimizer_type adamw8bit --learning_rate 5e-5
--gradient_checkpointing --max_data_loader_n_workers 2 --persistent_data_loader_workers
--network_module networks.lora_qwen_image --network_dim 16 --max_train_epochs 16 --save_every_n_epochs 1 --seed 42
--output_dir out --output_name name-of-lora""")

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

# and musubi-tuner 30c658c's qwen_image_train_network.py
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
""")

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
        "pretrained_model_name_or_path": "flux1-dev.safetensors",
        "clip_l": "clip_l.safetensors",
        "t5xxl": "t5xxl_fp16.safetensors",
        "ae": "ae.safetensors",
        "dataset_config": "my_flux_dataset_config.toml",
        "output_dir": "out",
        "output_name": "my_flux_lora",
        "network_dim": 16,
        "network_alpha": 1.0,
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
    assert notes["model_prediction_type"].startswith("accepted")
    assert notes["cache_latents"] == "accepted: latents are always cached on disk"


@pytest.mark.skipif("blocks_to_swap" in fields(), reason="this version has it: the example runs unchanged")
def test_the_example_of_sd_scripts_is_refused_for_block_swapping_alone() -> None:
    assert _problem(FLUX_EXAMPLE) == (
        "--blocks_to_swap: not taken: moving blocks between CPU and GPU is not in this version; "
        "remove it and use gradient_checkpointing"
    )


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


@pytest.mark.skipif("qwen_image" in get_args(fields()["model_type"][1].annotation), reason="this version has it")
def test_the_example_of_musubi_tuner_is_refused_in_one_line() -> None:
    assert _problem(QWEN_EXAMPLE) == (
        "--network_module: Qwen-Image is not a model family of this version, which has: flux; "
        "train this configuration with musubi-tuner"
    )


def test_the_example_of_musubi_tuner_runs_where_the_schema_has_the_family() -> None:
    known = {
        **_schema_with(text_encoder=FieldInfo(annotation=str)),
        "model_type": ("model", FieldInfo(annotation=Literal["flux", "qwen_image"])),
    }
    argv = iter(QWEN_EXAMPLE)
    values: dict[str, Any] = {}
    for word in argv:
        key = word.removeprefix("--")
        takes_none = key in ("sdpa", "gradient_checkpointing", "persistent_data_loader_workers")
        values[key] = True if takes_none else next(argv)
    translation = translate(values, {}, known)
    assert translation.tool == "musubi-tuner"
    assert translation.problems() == []
    taken = {
        "pretrained_model_name_or_path": "dit.safetensors",
        "vae" if "vae" in known else "ae": "vae.safetensors",
        "text_encoder": "qwen_2.5_vl_7b.safetensors",
        "model_type": "qwen_image",
        "discrete_flow_shift": "2.2",
        "timestep_sampling": "shift",
        "weighting_scheme": "none",
        "save_format": "kohya",
    }
    assert {key: translation.values[key] for key in taken} == taken
    assert not {"dit", "sdpa", "model_version", "network_module"} & set(translation.values)


@pytest.mark.parametrize("name", [*SD_SCRIPTS_FLAGS, *MUSUBI_FLAGS])
def test_every_flag_of_both_projects_has_a_fate_and_says_why(name: str) -> None:
    flag = FLAGS[name]
    assert flag.fate in get_args(Fate)
    assert ("sd-scripts" in flag.tools) == (name in SD_SCRIPTS_FLAGS)
    assert ("musubi-tuner" in flag.tools) == (name in MUSUBI_FLAGS)
    if flag.fate == "same":
        assert name in fields(), "same, but no key of the schema"
    if flag.fate == "refused":
        assert flag.instead
        assert flag.why or flag.instead.startswith("set ")
    if flag.fate == "accepted":
        assert flag.why
    assert (flag.fate == "renamed") == bool(flag.to)


def test_the_tables_of_values_name_keys_of_the_schema() -> None:
    named = {key for defaults in DEFAULTS.values() for key in defaults}
    named |= {key for inert in INERT for key in (*inert.keys, inert.needs)}
    assert named <= set(fields())


def test_a_flag_that_the_schema_has_is_taken_whatever_the_table_says() -> None:
    known = _schema_with(blocks_to_swap=FieldInfo(annotation=int, default=0), fp8_base=FieldInfo(annotation=bool))
    translation = translate({"blocks_to_swap": "18", "fp8_base_unet": True}, {}, known)
    assert translation.values == {"blocks_to_swap": "18", "fp8_base": True}


def test_fp8_options_mean_what_they_mean_there() -> None:
    assert _loaded([*KOHYA, "--fp8_base_unet"])[0]["fp8_base"] is True
    given, notes = _loaded([*KOHYA, "--fp8_base", "--fp8_scaled"])
    assert given["fp8_scaled"] is True
    assert "fp8_base" not in given
    assert notes["fp8_base"] == "left out: fp8_scaled is set too and counts"


def test_what_is_unset_means_what_it_means_in_sd_scripts() -> None:
    given, notes = _loaded(KOHYA)
    assert given["learning_rate"] == 2e-6
    assert given["network_dim"] == 4
    assert given["guidance_scale"] == 3.5
    assert given["timestep_sampling"] == "sigma"
    assert notes["learning_rate"] == "default: unset, so 2e-06, the default of sd-scripts"
    assert notes["seed"] == "told: unset, so random in sd-scripts and 0 here"


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
        (
            ["--loss_type", "huber", "--huber_schedule", "constant", "--huber_scale", "3", "--huber_c", "0.2"],
            {"loss_type": "huber", "huber_c": pytest.approx(0.6)},
        ),
        (["--logging_dir", "logs"], {"logging_dir": "logs", "log_with": "tensorboard"}),
        (["--torch_compile", "--dynamo_backend", "EAGER"], {"torch_compile": True, "dynamo_backend": "eager"}),
        (
            ["--network_args", "train_blocks=single", "verbose=True", "loraplus_lr_ratio=16", "conv_dim=4"],
            {"network_args": ["train_double_block_indices=none", "loraplus_lr_ratio=16"]},
        ),
        (["--network_args", "train_blocks=all", "split_qkv=True", "rank_dropout=0.1"],
         {"network_args": ["rank_dropout=0.1"]}),
        (["--max_validation_steps", "5"], {"max_validation_images": 5}),
        (["--vae", "v.safetensors"], {"vae" if "vae" in fields() else "ae": "v.safetensors"}),
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
     ["--no-xformers"], ["--scale_weight_norms", "0.0"], ["--caption_extension", ".caption"], ["--zero_stage", "2"]],
)  # fmt: skip
def test_a_refused_flag_that_asks_for_nothing_is_no_problem(argv: list[str]) -> None:
    _loaded([*KOHYA, *argv])


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
        (["--noise_offset", "0.1"], "--noise_offset: not taken: a remedy for noise prediction that sd-scripts ignores"),
        (["--xformers"], "--xformers: not taken: PyTorch's own attention kernels are used; write sdpa or remove it"),
        (["--model_prediction_type", "sigma_scaled"], "--model_prediction_type: not taken: 'sigma_scaled' is not in"),
        (["--save_model_as", "ckpt"], "--save_model_as: not taken: 'ckpt' is not in this version; set safetensors"),
        (["--network_module", "lycoris.kohya"], "--network_module: not taken: 'lycoris.kohya' is not in this version"),
        (["--loss_type", "l1"], "--loss_type: not taken: 'l1' is not in this version; use smooth_l1"),
        (["--lr_scheduler", "inverse_sqrt"], "--lr_scheduler: not taken: 'inverse_sqrt' is not in this version"),
        (["--loss_type", "huber", "--huber_schedule", "exponential"], "--huber_schedule: not taken: 'exponential'"),
        (["--loss_type", "huber", "--huber_scale", "x"], "--huber_scale: 'x' is not a number"),
        (["--model_type", "chroma"], "--model_type: not taken: 'chroma' is not in this version; Chroma is not a model"),
        (["--base_weights", "a.safetensors"], "merge first with tools/merge_lora.py"),
        (["--wandb_api_key", "x"], "set WANDB_API_KEY or run wandb login"),
        (["--resolution", "1024,1024"], "set it below [general] in data.toml, or let tools/migrate_config.py do it"),
        (["--lr_warmup_steps", "x%"], "--lr_warmup_steps: 'x%' does not fit"),
    ],
)  # fmt: skip
def test_what_is_not_taken_is_named_with_its_replacement(argv: list[str], message: str) -> None:
    problem = _problem([*KOHYA, *argv])
    assert message in problem
    assert argv[-2 if len(argv) > 1 else -1] in problem


def test_a_training_folder_without_a_dataset_toml_is_one_line() -> None:
    argv = ["--pretrained_model_name_or_path", "m", "--network_module", "networks.lora_flux", "--train_data_dir", "img"]
    problem = _problem([*argv, "--resolution", "1024,1024", "--caption_extension", ".txt"])
    assert problem == (
        "--train_data_dir: not taken: images are described by a dataset TOML; tools/migrate_config.py writes it "
        "from train_data_dir and the keys beside"
    )


def test_every_refused_key_of_a_toml_is_a_line_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('network_module = "networks.lora_flux"\nxformers = true\n[noise]\nip_noise_gamma = 0.1\n')
    lines = _problem(["--config_file", str(path), *PLAIN]).splitlines()
    assert [line.split(": not taken")[0] for line in lines] == [f"{path}:2: xformers", f"{path}:4: ip_noise_gamma"]
    assert one_line(UserError("\n".join(lines))).splitlines() == lines  # none is lost where scripts print it


def test_the_run_tells_what_it_filled_in_and_not_what_is_as_always() -> None:
    notes: list[Note] = []
    load_config([*KOHYA, "--cache_latents"], notes)
    shown = summary(notes)
    assert "note: learning_rate: unset, so 2e-06, the default of sd-scripts" in shown
    assert not any("cache_latents" in line for line in shown)


def test_the_page_of_flags_is_up_to_date() -> None:
    assert (ROOT / "docs/kohya_flags.md").read_text(encoding="utf-8") == kohya_page()
