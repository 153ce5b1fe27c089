"""Every flag of kohya's FLUX, Qwen-Image and Z-Image LoRA trainers, and what becomes of it here: data only.

The flags are those of sd-scripts' ``flux_train_network.py`` (sd-scripts 48d368f, February 2026) and of
musubi-tuner's ``qwen_image_train_network.py`` (musubi-tuner 30c658c, June 2026), read from their argument
parsers, with ``fp8_llm`` of its ``zimage_train_network.py``, and a few keys that kohya_ss (the GUI) writes into its
TOML files. Each has one of five fates:

    same      a key of the schema, with the same meaning
    renamed   set under another name, the first of ``to`` that the schema has; refused if it has none
    accepted  describes what is always so here, or nothing that training depends on; ``only`` lists the values
              for which that is true, any other value is refused
    dataset   belongs in the dataset TOML, under the same name
    refused   not taken, with the reason and what to do instead; ``off`` lists values that ask for nothing

A flag that is a key of the schema is ``same`` whatever stands here, so a row need not change on the day on
which a feature arrives. Below them, what unset keys and single values mean there where that is not what they mean here.
``library.config.kohya.translate`` applies the tables; ``docs/kohya_flags.md`` is made from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Fate = Literal["same", "renamed", "accepted", "dataset", "refused"]
Tool = Literal["sd-scripts", "musubi-tuner"]
SD: tuple[Tool, ...] = ("sd-scripts",)
MUSUBI: tuple[Tool, ...] = ("musubi-tuner",)
BOTH: tuple[Tool, ...] = (*SD, *MUSUBI)


@dataclass(frozen=True)
class Flag:
    """One flag.

    Attributes:
        name: without dashes.
        fate: see the module's docstring.
        tools: the trainers that have it.
        takes: what follows it on the command line.
        why: what it means here, or why it is refused.
        instead: what to do where it is refused.
        to: the names it may have here.
        only: the accepted values; empty for any.
        off: the values, beside false, zero and nothing, that ask for nothing.
    """

    name: str
    fate: Fate
    tools: tuple[Tool, ...]
    takes: Literal["switch", "value", "list"] = "value"
    why: str = ""
    instead: str = "remove it"
    to: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    off: tuple[Any, ...] = ()


def _flags(names: str, fate: Fate, tools: tuple[Tool, ...], why: str = "", **rest: Any) -> list[Flag]:
    return [Flag(name, fate, tools, why=why, **rest) for name in names.split()]


_SAME = [
    *_flags(
        "dataset_config output_dir output_name save_every_n_epochs save_every_n_steps save_last_n_epochs "
        "save_last_n_epochs_state save_last_n_steps save_last_n_steps_state save_state save_state_on_train_end "
        "huggingface_repo_id huggingface_path_in_repo huggingface_repo_visibility save_state_to_huggingface "
        "async_upload resume training_comment max_train_steps max_train_epochs max_data_loader_n_workers "
        "gradient_checkpointing blocks_to_swap gradient_accumulation_steps mixed_precision logging_dir "
        "log_tracker_name wandb_run_name ddp_timeout ddp_gradient_as_bucket_view ddp_static_graph sample_prompts "
        "sample_every_n_steps sample_every_n_epochs sample_at_first optimizer_args learning_rate max_grad_norm "
        "lr_decay_steps lr_scheduler_num_cycles lr_scheduler_power lr_scheduler_min_lr_ratio network_weights "
        "network_dim network_dropout timestep_sampling discrete_flow_shift sigmoid_scale guidance_scale "
        "logit_mean logit_std mode_scale log_with dim_from_weights",
        "same",
        BOTH,
    ),
    *_flags(
        "pretrained_model_name_or_path model_type clip_l t5xxl ae t5xxl_max_token_length train_batch_size "
        "vae_batch_size text_encoder_batch_size full_bf16 torch_compile prior_loss_weight masked_loss "
        "validate_every_n_steps validate_every_n_epochs network_train_text_encoder_only",
        "same",
        SD,
    ),
    *_flags("dynamo_mode", "same", MUSUBI),
    *_flags("min_timestep max_timestep", "same", BOTH, "sd-scripts ignores it for FLUX; here it counts"),
    *_flags("save_precision", "same", BOTH, "float is called fp32"),
    *_flags("optimizer_type", "same", BOTH, "empty is AdamW; Adafactor without relative_step has it on, as there"),
    *_flags("lr_scheduler", "same", BOTH, "cosine_with_min_lr is cosine with lr_scheduler_min_lr_ratio"),
    *_flags("lr_warmup_steps", "same", BOTH, "10% is 0.1"),
    *_flags("network_alpha", "same", BOTH, "0 means the rank, as there"),
    *_flags("network_args", "same", BOTH, "train_blocks is rewritten, split_qkv left out"),
    *_flags(
        "weighting_scheme", "same", BOTH, "uniform is none; with model_prediction_type raw sd-scripts weighs no loss"
    ),
    *_flags("dynamo_backend", "same", BOTH, "no is torch_compile = false"),
    *_flags("loss_type", "same", SD, "l1 is refused; smooth_l1 with a small huber_c is near it"),
    *_flags("huber_c", "same", SD, "multiplied by huber_scale"),
    *_flags("text_encoder_lr", "same", SD, "unset it is learning_rate, unless network_train_unet_only"),
    *_flags("seed", "same", BOTH, "unset it is random there and 0 here"),
]

_RENAMED = [
    *_flags("unet_lr", "renamed", SD, "wins over learning_rate, as there", to=("unet_lr", "learning_rate")),
    *_flags("max_validation_steps", "renamed", SD, "counts images here, batches there", to=("max_validation_images",)),
    *_flags(
        "fp8_base_unet", "renamed", SD, "text encoders keep their dtype", takes="switch", to=("fp8_base",),
        instead="use a card with room for bf16 weights",
    ),
    *_flags("dit", "renamed", MUSUBI, "the transformer", to=("pretrained_model_name_or_path",)),
    *_flags("vae", "renamed", BOTH, "Qwen-Image's VAE; FLUX's becomes ae", to=("vae", "ae")),
    *_flags(
        "model_version", "renamed", MUSUBI, "original, edit, edit-2509 or edit-2511 (with zero_cond_t), not layered",
        to=("model_type",),
    ),
    *_flags("edit edit_plus", "renamed", MUSUBI, "as model_version edit or edit-2509", takes="switch",
            to=("model_type",)),
    *_flags("fp8_vl fp8_llm", "renamed", MUSUBI, "with block scales, where musubi-tuner casts", takes="switch",
            to=("fp8_text_encoder",)),
    *_flags(
        "text_encoder", "renamed", MUSUBI, "Qwen2.5-VL or Qwen3", to=("text_encoder",), instead="remove it",
    ),
    *_flags("compile", "renamed", MUSUBI, takes="switch", to=("torch_compile",)),
    *_flags("compile_backend", "renamed", MUSUBI, to=("dynamo_backend",)),
    *_flags("compile_mode", "renamed", MUSUBI, to=("dynamo_mode",)),
    *_flags("gradient_checkpointing_cpu_offload", "renamed", MUSUBI, takes="switch",
            to=("cpu_offload_checkpointing",)),
]  # fmt: skip

_ACCEPTED = [
    *_flags("cache_latents cache_latents_to_disk", "accepted", SD, "latents are always cached on disk", takes="switch"),
    *_flags(
        "cache_text_encoder_outputs cache_text_encoder_outputs_to_disk", "accepted", SD,
        "text is always encoded once and cached on disk", takes="switch",
    ),
    *_flags("skip_cache_check", "accepted", SD, "the check takes milliseconds and is always made", takes="switch"),
    *_flags("sdpa", "accepted", BOTH, "PyTorch's scaled dot product attention is what is used", takes="switch"),
    *_flags(
        "network_train_unet_only", "accepted", SD, "what happens without text_encoder_lr", takes="switch",
    ),
    *_flags(
        "network_module", "accepted", BOTH, "the trainer's LoRA for the model",
        only=("networks.lora_flux", "networks.lora_qwen_image", "networks.lora_zimage"),
        instead="set networks.lora_flux; network_type chooses another kind (dora, lokr, loha, oft, boft)",
    ),
    *_flags(
        "model_prediction_type", "accepted", SD, "the prediction is the velocity, taken raw", only=("raw",),
        instead="set raw, as sd-scripts' documentation recommends: its target is the velocity for every choice",
    ),
    *_flags("save_model_as", "accepted", SD, "files are safetensors", only=("safetensors",), instead="set safetensors"),
    *_flags("huggingface_repo_type", "accepted", BOTH, "uploads go to a model repository", only=("model",),
            instead="upload to a model repository"),
    *_flags("lowram", "accepted", SD, "weights are always read one tensor at a time", takes="switch"),
    *_flags("highvram", "accepted", SD, "the encoders leave the device after caching anyway", takes="switch"),
    *_flags("disable_mmap_load_safetensors", "accepted", SD, "how files are read changes no result", takes="switch"),
    *_flags("disable_numpy_memmap", "accepted", MUSUBI, "how files are read changes no result", takes="switch"),
    *_flags("persistent_data_loader_workers", "accepted", BOTH, "data workers always persist", takes="switch"),
    *_flags("log_config", "accepted", BOTH, "the configuration is always written to output_dir", takes="switch"),
    *_flags("console_log_level", "accepted", SD, "changes no result"),
    *_flags("console_log_simple", "accepted", SD, "changes no result", takes="switch"),
    *_flags("sample_sampler", "accepted", SD, "FLUX samples with Euler there too, whatever is set"),
    *_flags("max_token_length", "accepted", SD, "sd-scripts ignores it for FLUX; t5xxl_max_token_length is the key"),
    *_flags("huber_schedule", "accepted", SD, "huber_c is the same at every timestep", only=("constant",),
            instead="set constant"),
    *_flags("huber_scale", "accepted", SD, "multiplies huber_c"),
    *_flags("split_attn", "accepted", MUSUBI, "changes no result; SDPA needs no splitting", takes="switch"),
    *_flags("compile_dynamic", "accepted", MUSUBI, "shapes are compiled as they come", only=("auto",),
            instead="set auto"),
    *_flags("epoch noise_offset_type", "accepted", SD, "kohya_ss writes it; sd-scripts does not read it"),
]  # fmt: skip

_DATASET = [
    *_flags(
        "shuffle_caption enable_wildcard flip_aug random_crop enable_bucket bucket_no_upscale alpha_mask",
        "dataset", SD, takes="switch",
    ),
    *_flags(
        "keep_tokens keep_tokens_separator secondary_separator caption_prefix caption_suffix resolution "
        "caption_dropout_rate caption_dropout_every_n_epochs caption_tag_dropout_rate resize_interpolation "
        "conditioning_data_dir validation_split validation_seed train_data_dir reg_data_dir in_json",
        "dataset", SD,
    ),
    *_flags("caption_separator", "dataset", SD, off=(",",)),
    *_flags("caption_extension", "dataset", SD, off=(".caption",)),
    *_flags("caption_extention", "dataset", SD, "a misspelling of caption_extension that sd-scripts takes"),
    *_flags("min_bucket_reso", "dataset", SD, off=(256,)),
    *_flags("max_bucket_reso", "dataset", SD, off=(1024,)),
    *_flags("bucket_reso_steps", "dataset", SD, off=(64,)),
    *_flags("dataset_repeats", "dataset", SD, "num_repeats of the subset", off=(1,)),
]  # fmt: skip

_FROM_CACHE = "images are read once, when their latents are cached"
_NOT_FOR_FLOW = "a remedy for noise prediction that sd-scripts ignores for FLUX"
_NO_MERGED_BASE = "the base is trained on as it is"
_LATER = "not in this version"
_REFUSED = [
    *_flags("color_aug", "refused", SD, _FROM_CACHE, takes="switch",
            instead="remove it, or add recoloured copies to the folder"),
    *_flags("face_crop_aug_range", "refused", SD, _FROM_CACHE,
            instead="remove it and use random_crop, or crop the files beforehand"),
    *_flags("token_warmup_min token_warmup_step", "refused", SD, "captions are cached", off=(1,),
            instead="remove it, or use caption_tag_dropout_rate"),
    *_flags("weighted_captions", "refused", SD, "captions are cached without weights", takes="switch"),
    *_flags("cache_info", "refused", SD, "sizes and captions are always remembered", takes="switch"),
    *_flags("debug_dataset", "refused", SD, "there is no window to show", takes="switch",
            instead="read the summary of buckets and counts at the start"),
    *_flags("dataset_class", "refused", SD, "datasets are described by a TOML", instead="use dataset_config"),
    *_flags("noise_offset multires_noise_iterations adaptive_noise_scale min_snr_gamma v_pred_like_loss",
            "refused", SD, _NOT_FOR_FLOW),
    *_flags("multires_noise_discount", "refused", SD, _NOT_FOR_FLOW, off=(0.3,)),
    *_flags("noise_offset_random_strength zero_terminal_snr scale_v_pred_loss_like_noise_pred debiased_estimation_loss",
            "refused", SD, _NOT_FOR_FLOW, takes="switch"),
    *_flags("ip_noise_gamma", "refused", SD, "noise is not perturbed"),
    *_flags("ip_noise_gamma_random_strength", "refused", SD, "noise is not perturbed", takes="switch"),
    *_flags("v2 v_parameterization", "refused", SD, "it belongs to Stable Diffusion", takes="switch"),
    *_flags("clip_skip", "refused", SD, "FLUX takes CLIP's pooled output only; sd-scripts ignores it too",
            off=(1,)),
    *_flags("xformers", "refused", BOTH, "PyTorch's own attention kernels are used", takes="switch",
            instead="write sdpa or remove it"),
    *_flags("mem_eff_attn", "refused", SD, "PyTorch's own attention kernels are used", takes="switch",
            instead="write sdpa or remove it"),
    *_flags("flash_attn sage_attn flash3", "refused", MUSUBI, "PyTorch's own attention kernels are used",
            takes="switch", instead="write sdpa or remove it"),
    *_flags("apply_t5_attn_mask", "refused", SD, "FLUX sees the padded text unmasked, as in its own pipeline",
            takes="switch", instead="remove it, or set t5xxl_max_token_length to what your captions need"),
    *_flags("controlnet_model_name_or_path", "refused", SD, "control networks are not used in training"),
    *_flags("use_pinned_memory_for_block_swap block_swap_h2d_only", "accepted", MUSUBI,
            "swapped weights are page-locked and copied to the device only", takes="switch"),
    *_flags("img_in_txt_in_offloading", "refused", MUSUBI, f"moving the input layers is {_LATER}", takes="switch"),
    *_flags("block_swap_ring_size", "refused", MUSUBI, "the ring has two slots", off=(2,)),
    *_flags("split_mode", "refused", SD, "it stands for blocks_to_swap = 18", takes="switch",
            instead="set that"),
    *_flags("cpu_offload_checkpointing", "same", SD, "copies run beside the computation", takes="switch"),
    *_flags("fp8_base", "same", BOTH, "embedders and final layer stay high unless fp8_exclude says otherwise",
            takes="switch"),
    *_flags("fp8_scaled", "same", MUSUBI, "fp8_base beside it is left out; embedders and final layer stay high",
            takes="switch"),
    *_flags("full_fp16", "refused", SD, "fp16 LoRA weights lose small updates", takes="switch",
            instead="use full_bf16, which rounds stochastically"),
    *_flags("no_half_vae", "refused", SD, "the VAE runs in the dtype of the base", takes="switch",
            instead='set base_dtype = "fp32" for the one run that fills the cache'),
    *_flags("vae_dtype", "refused", MUSUBI, "the VAE runs in the dtype of the base", instead="set base_dtype"),
    *_flags("fused_backward_pass", "refused", SD, "a LoRA's gradients are too small for it to save memory",
            takes="switch"),
    *_flags("scale_weight_norms", "refused", BOTH, f"limiting weight norms is {_LATER}",
            instead="lower learning_rate or set weight_decay in optimizer_args"),
    *_flags("base_weights base_weights_multiplier", "refused", BOTH, _NO_MERGED_BASE, takes="list",
            instead="merge first with tools/merge_lora.py"),
    *_flags("no_metadata", "refused", BOTH, "merging and reports need the metadata", takes="switch"),
    *_flags("skip_until_initial_step", "refused", SD, "runs go on where their state was saved", takes="switch",
            instead="use resume"),
    *_flags("initial_epoch initial_step", "refused", SD, "runs go on where their state was saved",
            instead="use resume"),
    *_flags("resume_from_huggingface", "refused", BOTH, "states are read from disk", takes="switch",
            instead="download the state and give resume its folder"),
    *_flags("huggingface_token", "refused", BOTH, "secrets do not belong in a configuration",
            instead="set HF_TOKEN or run huggingface-cli login"),
    *_flags("wandb_api_key", "refused", BOTH, "secrets do not belong in a configuration",
            instead="set WANDB_API_KEY or run wandb login"),
    *_flags("log_prefix", "refused", BOTH, "tracker files lie in logging_dir itself",
            instead="put the prefix into logging_dir"),
    *_flags("log_tracker_config", "refused", BOTH, "trackers need no file",
            instead="set log_tracker_name and wandb_run_name"),
    *_flags("console_log_file", "refused", SD, "messages go to the terminal", instead="redirect them with > file"),
    *_flags("save_n_epoch_ratio", "refused", SD, "it depends on the number of epochs",
            instead="set save_every_n_epochs to max_train_epochs divided by it"),
    *_flags("use_8bit_adam", "refused", SD, takes="switch", instead='set optimizer_type = "AdamW8bit"'),
    *_flags("use_lion_optimizer", "refused", SD, takes="switch", instead='set optimizer_type = "Lion"'),
    *_flags("lr_scheduler_type", "refused", BOTH, "schedules are chosen by name", instead="choose an lr_scheduler"),
    *_flags("lr_scheduler_args", "refused", BOTH, "the schedules have keys of their own", takes="list",
            instead="use lr_scheduler_power, _num_cycles or _min_lr_ratio"),
    *_flags("lr_scheduler_timescale", "refused", BOTH, "there is no inverse_sqrt schedule",
            instead='use lr_scheduler = "cosine"'),
    *_flags("tokenizer_cache_dir", "refused", SD, "tokenizers lie where transformers puts them",
            instead="set HF_HOME, or clip_l_tokenizer and t5xxl_tokenizer to folders"),
    *_flags("output_config", "refused", SD, "it writes a configuration instead of training", takes="switch",
            instead="use tools/migrate_config.py"),
    *_flags("deepspeed zero3_init_flag zero3_save_16bit_model fp16_master_weights_and_gradients", "refused", SD,
            "DeepSpeed's settings are Tandem's own", takes="switch", instead="for ZeRO set zero = 1, 2 or 3"),
    *_flags("zero_stage", "refused", SD, "it has another name", off=(2,), instead="set zero = 1, 2 or 3"),
    *_flags("offload_optimizer_device offload_optimizer_nvme_path offload_param_device offload_param_nvme_path",
            "refused", SD, "nothing is offloaded under zero"),
    *_flags("metadata_title metadata_author metadata_description metadata_license metadata_tags", "refused", BOTH,
            f"free model-spec fields are {_LATER}", instead="use training_comment"),
    *_flags("metadata_usage_hint metadata_thumbnail metadata_merged_from metadata_trigger_phrase "
            "metadata_preprocessor metadata_is_negative_embedding", "refused", SD,
            f"free model-spec fields are {_LATER}", instead="use training_comment"),
    *_flags("metadata_reso metadata_arch", "refused", MUSUBI, "they are filled in from the run"),
    *_flags("remove_first_image_from_target", "refused", MUSUBI, f"layered models are {_LATER}", takes="switch"),
    *_flags("num_layers", "refused", MUSUBI, "the file says how many layers it has"),
    *_flags("compile_fullgraph dynamo_fullgraph dynamo_dynamic", "refused", MUSUBI,
            "blocks are compiled one by one with what works", takes="switch"),
    *_flags("compile_cache_size_limit", "refused", MUSUBI, "each block shape is compiled once"),
    *_flags("cuda_allow_tf32 cuda_cudnn_benchmark", "refused", MUSUBI, "it concerns fp32 only",
            takes="switch", instead='set mixed_precision = "bf16"'),
    *_flags("preserve_distribution_shape", "refused", MUSUBI, "min_timestep and max_timestep squeeze the distribution",
            takes="switch"),
    *_flags("num_timestep_buckets", "refused", MUSUBI, "timesteps are a function of seed, step and image"),
    *_flags("show_timesteps", "refused", MUSUBI, "it shows a histogram instead of training",
            instead="read sigma_mean in metrics.jsonl"),
]  # fmt: skip

FLAGS: Mapping[str, Flag] = {flag.name: flag for flag in (*_SAME, *_RENAMED, *_ACCEPTED, *_DATASET, *_REFUSED)}

_COMMON: Mapping[str, Any] = {
    "network_dim": 4,
    "network_alpha": 1.0,
    "learning_rate": 2e-6,
    "max_train_steps": 1600,
    "max_grad_norm": 1.0,
    "optimizer_type": "AdamW",
    "lr_scheduler": "constant",
    "timestep_sampling": "sigma",
    "sigmoid_scale": 1.0,
    "weighting_scheme": "none",
    "save_format": "kohya",
}
DEFAULTS: Mapping[Tool, Mapping[str, Any]] = {
    "sd-scripts": {
        **_COMMON,
        "mixed_precision": "no",
        "discrete_flow_shift": 3.0,
        "guidance_scale": 3.5,
        "loss_type": "l2",
        "huber_c": 0.1,
        "prior_loss_weight": 1.0,
    },
    "musubi-tuner": {**_COMMON, "discrete_flow_shift": 1.0, "guidance_scale": 1.0},
}  # what an unset key means there, where training or its result depends on it (their parsers' defaults)

# Kohya's trainers stop at these where they would have no effect: refused, not left out.
NEVER_LEFT_OUT = frozenset({"dim_from_weights", "lr_warmup_steps"})

SAME_AS: Mapping[tuple[str, str], str] = {  # (key, value there) -> value here
    ("weighting_scheme", "uniform"): "none",
    ("save_precision", "float"): "fp32",
    ("network_module", "networks.lora_flux.py"): "networks.lora_flux",
}

REFUSED_VALUES: Mapping[tuple[str, str], str] = {  # refused unless the schema takes the value
    ("loss_type", "l1"): "use smooth_l1 with a small huber_c, which is near it",
    ("lr_scheduler", "inverse_sqrt"): "use cosine or polynomial",
    ("lr_scheduler", "piecewise_constant"): "use warmup_stable_decay",
    ("lr_scheduler", "reduce_lr_on_plateau"): "use cosine",
    ("lr_scheduler", "cosine_warmup_with_min_lr"): "use cosine with lr_scheduler_min_lr_ratio",
    ("lr_scheduler", "adafactor"): "it comes with Adafactor's relative_step=True only; use constant_with_warmup",
    ("model_type", "chroma"): "Chroma is not a model family of this version; train FLUX.1",
    ("timestep_sampling", "logsnr"): "use sigmoid, which is logSNR at mean 0 and standard deviation 2",
    ("timestep_sampling", "flux2_shift"): "it belongs to FLUX.2; use flux_shift or shift",
    ("timestep_sampling", "ideogram4_shift"): "it belongs to Ideogram; use flux_shift or shift",
    ("timestep_sampling", "krea2_shift"): "it belongs to Krea; use flux_shift or shift",
    ("timestep_sampling", "qinglong_flux"): "use flux_shift",
    ("timestep_sampling", "qinglong_qwen"): "use qwen_shift",
}
