"""Every flag of kohya's two trainers has a fate, and the page that lists them is up to date."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from dev.write_config_docs import kohya_page
from library.config.kohya.command import paths_read, read_command_file
from library.config.kohya.flags import DEFAULTS, FLAGS, Fate
from library.config.scripts import fields
from tests.config.test_kohya import _words

ROOT = Path(__file__).resolve().parents[2]


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
